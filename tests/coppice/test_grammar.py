"""Masks and drafts against matchers written the slow way: whole texts, no incremental state."""

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from coppice.errors import FailedPrecondition
from coppice.grammar import GrammarCompiler, GrammarError, refusal
from coppice.request import Choices, SamplingParams, StoppingParams, StructuredOutput
from coppice.sampler import Sampler
from coppice.stopping import Finish, FinishReason, Stopper
from coppice.tokenizer import Tokenizer
from coppice.tree import DraftTree

PIECES = ["a", "b", "c", "ab", "bc", "abc", "aa", "x", "1", "2", "12"]
END, OTHER_END, SPECIAL = len(PIECES), len(PIECES) + 1, len(PIECES) + 2
VOCAB = len(PIECES) + 4  # the logits of the last one stand for no token
ALPHABET = "abcx12"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    vocab = {piece: id for id, piece in enumerate(PIECES)}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a"), ("1", "2")]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>", "<other end>", "<special>"])
    return GrammarCompiler(fast.to_str, VOCAB, [END, OTHER_END])


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(regex=text)


def texts_of(pattern: str, longest: int) -> set[str]:
    """All texts over the alphabet that match as a whole."""
    every = ("".join(t) for n in range(longest + 1) for t in itertools.product(ALPHABET, repeat=n))
    return {text for text in every if re.fullmatch(pattern, text)}


def allowed_by(texts: set[str], so_far: str) -> set[int]:
    """By the definition: what still leads to one of the texts, and the end at any of them."""
    pieces = {
        id
        for id, piece in enumerate(PIECES)
        if any(text.startswith(so_far + piece) for text in texts)
    }
    return pieces | ({END, OTHER_END} if so_far in texts else set())


def ids(mask: np.ndarray) -> set[int]:
    assert mask.shape == (VOCAB,)
    return set(np.flatnonzero(mask).tolist())


PATTERNS = ["abc", "(ab|abc?x)a?", "[abc]{2,5}", "a*(b|12)x?", "(aa|ab|1){1,4}", "(a|aab)*2"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_is_what_some_whole_text_still_begins_with(compiler, pattern: str) -> None:
    rng = random.Random(pattern)
    texts = {length: texts_of(pattern, length) for length in range(4, 8)}
    checked = 0
    for _ in range(20):
        grammar, so_far = compiler.compile(regex(pattern)), ""
        # Four more letters are enough for any piece and the shortest end after it.
        while len(so_far) < 4 and not grammar.complete:
            wanted = allowed_by(texts[len(so_far) + 4], so_far)
            assert ids(grammar.allowed()) == wanted
            checked += 1
            token = rng.choice(sorted(wanted))
            grammar.advance(token)
            so_far += PIECES[token] if token < END else ""
    assert checked > 20


def test_masks_depend_on_the_tokens_alone_and_not_on_what_was_asked_before(compiler) -> None:
    rng = random.Random(1)
    asked, tokens = compiler.compile(regex("(ab|abc?x|12)*")), []
    for _ in range(12):
        tokens.append(rng.choice(sorted(ids(asked.allowed()) - {END, OTHER_END})))
        asked.advance(tokens[-1])
        asked.pruned(DraftTree((0, 1, 8), (0, 1, 0), (0.0, 0.0, 0.0)))
        fresh = compiler.compile(regex("(ab|abc?x|12)*"))
        for token in tokens:
            fresh.advance(token)
        assert ids(fresh.allowed()) == ids(asked.allowed())


@pytest.mark.parametrize("seed", range(24))
def test_a_node_stays_in_a_draft_exactly_when_its_whole_path_is_allowed(compiler, seed) -> None:
    rng = random.Random(seed)
    pattern = rng.choice(PATTERNS)
    texts = texts_of(pattern, 7)
    tokens, parents, paths = [], [], [[]]
    for row in range(1, 30):
        parent = rng.choice([row for row in range(row) if len("".join(paths[row])) < 3])
        free = set(range(VOCAB)) - {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(rng.choice(sorted(free)))
        parents.append(parent)
        paths.append([*paths[parent], (PIECES + ["<end>"] * 2 + ["?"] * 2)[tokens[-1]]])
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(-float(i) for i in range(29)))

    def stays(path: list[str]) -> bool:
        *inner, last = path
        text = "".join(inner)
        if last == "<end>":  # comes only where more might come, or the answer has ended before
            return text in texts and any(t.startswith(text) and t != text for t in texts)
        return any(t.startswith(text + last) for t in texts)

    grammar = compiler.compile(regex(pattern))
    pruned = grammar.pruned(tree)
    kept = [-int(score) for score in pruned.scores]
    assert kept == [node for node in range(29) if stays(paths[node + 1])]
    spelled = [[]]
    for token, parent in zip(pruned.tokens, pruned.parents, strict=True):
        spelled.append([*spelled[parent], token])
    every = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        every.append([*every[parent], token])
    assert spelled[1:] == [every[node + 1] for node in kept]
    assert ids(grammar.allowed()) == allowed_by(texts, "")


def test_an_answer_is_complete_when_nothing_more_can_come_and_after_the_end_of_text(compiler):
    grammar = compiler.compile(regex("ab?"))
    grammar.advance(0)
    assert not grammar.complete
    grammar.advance(1)
    assert grammar.complete
    ended = compiler.compile(regex("ab?"))
    ended.advance(0)
    ended.advance(OTHER_END)
    assert ended.complete


def test_where_the_end_of_text_is_to_be_ignored_it_comes_only_if_there_is_nothing_else(compiler):
    grammar = compiler.compile(regex("a(b|z)?"), ignore_end=True)
    grammar.advance(0)
    assert ids(grammar.allowed()) == {1}
    unspelled = compiler.compile(regex("az?"), ignore_end=True)
    unspelled.advance(0)
    assert ids(unspelled.allowed()) == {END, OTHER_END}
    unspelled.advance(END)
    assert unspelled.complete


def test_what_the_vocabulary_cannot_spell_ends_in_an_error_that_says_where(compiler) -> None:
    grammar = compiler.compile(regex("az"))
    grammar.advance(0)
    with pytest.raises(FailedPrecondition, match="no token fits as token 2 of the answer"):
        grammar.allowed()


def test_a_token_that_is_forbidden_is_never_taken(compiler) -> None:
    with pytest.raises(FailedPrecondition, match="token 1 does not fit as token 1"):
        compiler.compile(regex("a")).advance(1)
    with pytest.raises(FailedPrecondition):
        compiler.compile(regex("a")).advance(END)


@pytest.mark.parametrize("header", ["", '%llguidance {"no_forcing": false}\n'])
def test_forced_text_may_be_spelled_in_any_way(compiler, header: str) -> None:
    output = StructuredOutput(grammar=f"{header}start: /a{{1000000}}/")
    assert ids(compiler.compile(output).allowed()) == {PIECES.index("a"), PIECES.index("aa")}


@pytest.mark.parametrize(
    ("output", "texts"),
    [
        (StructuredOutput(choice=Choices(values=("ab", "abc", "x"))), {"ab", "abc", "x"}),
        (StructuredOutput(grammar='start: x x | /c/\nx: "a" | "12"'), {"aa", "a12", "12a", "c"}),
        (StructuredOutput(json_schema='{"enum": [1, 12, 2111]}'), {"1", "12", "2111"}),
    ],
)
def test_other_constraints_allow_their_texts(compiler, output, texts: set[str]) -> None:
    assert ids(compiler.compile(output).allowed()) == allowed_by(texts, "")


NESTED = "[" * 60_000


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (
            StructuredOutput(regex="("),
            "output.regex = '(': must be a grammar that compiles: at 1(8)",
        ),
        (StructuredOutput(regex="("), "error: unclosed group"),
        (StructuredOutput(regex="(?=a)b"), "look-around"),
        (
            StructuredOutput(json_schema="{"),
            "json_schema = '{': must be a grammar that compiles: not JSON: ",
        ),
        (StructuredOutput(json_schema=NESTED), "not JSON: "),
        (StructuredOutput(json_schema="{} | /.*/"), "not JSON: Extra data"),
        (StructuredOutput(json_schema='{"type": "text"}'), "Invalid type: text"),
        (StructuredOutput(json_schema='{"unevaluatedItems": false}'), "Unimplemented keys"),
        (StructuredOutput(grammar="start: ("), "Expected token ')'"),
        (StructuredOutput(grammar="start: A\nA: /a/ & /b/"), "compiles: no text fits"),
        (StructuredOutput(regex="z"), "compiles: no text fits, or none that the vocabulary"),
        (StructuredOutput(), "compiles: set json_schema, regex, choice"),
        (StructuredOutput(json_object=False), "structured_output.json_object = False"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(compiler, output, complaint):
    with pytest.raises(GrammarError) as caught:
        compiler.compile(output)
    refused = str(refusal(output, str(caught.value)))
    assert complaint in refused
    assert len(refused) < 600


def test_a_tokenizer_that_is_not_of_bytes_is_refused(compiler) -> None:
    words = FastTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(GrammarError, match="not with this model's tokenizer: "):
        GrammarCompiler(words.to_str, 2, [1]).compile(regex("a"))


def test_greedy_is_the_best_of_the_allowed_tokens_whatever_the_bias(compiler) -> None:
    grammar = compiler.compile(regex("[ab](1|2)"))
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0, 0: 5.0})
    sampler = Sampler(params, 0, (), grammar=grammar)
    assert not sampler.is_argmax
    logits = torch.arange(VOCAB, dtype=torch.float32)
    assert sampler.sample(logits, 0) == 0
    sampler.accept(0)
    assert sampler.sample(logits, 1) == 9
    sampler.accept(9)
    assert grammar.complete


@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_sampling_is_from_the_allowed_tokens_alone(compiler, extra) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    drawn = set()
    for position in range(200):
        grammar = compiler.compile(regex("(abc|12)[abc]*"))
        params = SamplingParams.model_validate({"temperature": 1.0, **extra})
        drawn.add(Sampler(params, 9, (), grammar=grammar).sample(logits, position))
    allowed = [0, 3, 5, 8, 10]
    shares = logits[allowed].softmax(0)
    kept = set(allowed)
    if "top_k" in extra:
        kept = {allowed[i] for i in shares.topk(3).indices}
    if "min_p" in extra:
        kept = {allowed[i] for i in range(5) if shares[i] >= 0.2 * shares.max()}
    if "top_p" in extra:
        order = shares.sort(descending=True)
        count = int((order.values.cumsum(0) < 0.7).sum()) + 1
        kept = {allowed[i] for i in order.indices[:count]}
    assert drawn == kept


def test_a_grammar_that_has_nothing_but_the_end_left_wins_over_min_tokens(compiler) -> None:
    grammar = compiler.compile(regex("az?"))
    stopper = Stopper(StoppingParams(min_tokens=5), (END, OTHER_END), 9, None, grammar)
    sampler = Sampler(
        SamplingParams(temperature=0.0), 0, (), 5, stopper.ending_ids, stopper.grammar
    )
    logits = torch.zeros(VOCAB)
    tokens = [sampler.sample(logits, 0)]
    sampler.accept(tokens[0])
    assert stopper.push(tokens[0]) is None
    tokens.append(sampler.sample(logits, 1))
    sampler.accept(tokens[1])
    assert stopper.push(tokens[1]) == Finish(FinishReason.STOP, "grammar")
    assert tokens == [0, END]


def test_min_tokens_hold_back_the_end_where_more_can_come(compiler) -> None:
    grammar = compiler.compile(regex("[ab]*"))
    sampler = Sampler(SamplingParams(temperature=0.0), 0, (), 2, [END, OTHER_END], grammar)
    logits = torch.zeros(VOCAB)
    logits[END] = 9.0
    tokens = []
    for position in range(3):
        tokens.append(sampler.sample(logits, position))
        sampler.accept(tokens[-1])
    assert tokens == [0, 0, END]


@pytest.mark.parametrize(("left", "reason"), [(2, "stop"), (1, "length")])
def test_a_whole_answer_has_stopped_also_with_its_last_token(compiler, left, reason) -> None:
    grammar = compiler.compile(regex("ab"))
    stopper = Stopper(StoppingParams(), (END,), left, None, grammar)
    finish = None
    for token in (0, 1)[:left]:
        grammar.advance(token)
        finish = stopper.push(token)
    assert finish == Finish(FinishReason(reason), "grammar" if reason == "stop" else "")


# ---- the real tokenizer ----------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer.load(smollm2)
    return tokenizer, GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, [2])


def bytes_of(smollm2: Path) -> dict[int, bytes]:
    """The bytes of every token that is text, by the table published with GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(hidden)}
    published = json.loads((smollm2 / "tokenizer.json").read_text())
    special = {token["id"] for token in published["added_tokens"] if token["special"]}
    return {
        id: bytes(byte_of[letter] for letter in token)
        for token, id in published["model"]["vocab"].items()
        if id not in special
    }


def test_every_token_has_the_bytes_that_its_letters_stand_for(smollm2: Path, real) -> None:
    wanted = bytes_of(smollm2)
    assert len(wanted) > 49_000
    library = real[1].tokens
    assert {id: library.decode_bytes([id]) for id in wanted} == wanted


TEXTS = [
    *("  return", "naïve", "日本語", "🙂🙃", "\n\n\tif", "<|im_end|>", "\x00\x7f"),
    *("a|b", "[ab]+", '"a"', "a\\nb", "/a/", "\\"),
]


def test_masks_of_a_real_vocabulary_hold_the_tokens_that_a_text_begins_with(smollm2, real) -> None:
    pieces = bytes_of(smollm2)
    for text in TEXTS:
        grammar = real[1].compile(StructuredOutput(choice=Choices(values=(text,))))
        left = text.encode()
        while left:
            allowed = set(np.flatnonzero(grammar.allowed()).tolist())
            assert allowed == {id for id, piece in pieces.items() if left.startswith(piece)}
            token = max(allowed, key=lambda id: (len(pieces[id]), id))
            grammar.advance(token)
            left = left[len(pieces[token]) :]
        assert grammar.complete


def test_drafts_do_not_use_up_the_limits_of_the_answer(real) -> None:
    """A regex that makes states without end: with and without drafts it ends at the same token."""
    compiler = real[1]
    few = GrammarCompiler(real[0].to_json, real[0].vocab_size, [2])
    few.__dict__["tokens"] = compiler.tokens
    few._limits = LLParserLimits(max_lexer_states=5000, verbose_errors=False)

    def ends_at(drafts: int) -> str:
        grammar, answer, drafter = few.compile(regex(".*(a|b).{200}c")), *map(random.Random, (0, 1))
        with pytest.raises(FailedPrecondition) as caught:
            while True:
                allowed = np.flatnonzero(grammar.allowed()).tolist()
                for _ in range(drafts):
                    tokens = tuple(drafter.sample(allowed, 4))
                    grammar.pruned(DraftTree(tokens, (0, 1, 2, 3), (0.0,) * 4))
                grammar.advance(answer.choice(allowed[10:]))
        return str(caught.value)

    assert "too many states" in ends_at(0)
    assert ends_at(10) == ends_at(0)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y z"]}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_drawn_within_a_json_schema_parses_and_fits(real, seed: int) -> None:
    tokenizer, compiler = real
    grammar = compiler.compile(StructuredOutput(json_schema=json.dumps(SCHEMA)))
    rng = random.Random(seed)
    tokens: list[int] = []
    while not grammar.complete:
        tokens.append(rng.choice(np.flatnonzero(grammar.allowed()).tolist()))
        grammar.advance(tokens[-1])
        assert len(tokens) < 2000
    value = json.loads(tokenizer.decode(tokens))
    assert {"name", "age", "tags"} <= value.keys() <= SCHEMA["properties"].keys()
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"x", "y z"}
    assert type(value.get("open", True)) is bool
