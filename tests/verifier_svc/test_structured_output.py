"""The engine with grammars: whatever is drafted, forbidden or not, the answer is plain
decoding's."""

import random
import re
import string
from collections.abc import Callable

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from coppice.errors import FailedPrecondition, InvalidArgument
from coppice.grammar import GrammarCompiler
from coppice.request import SamplingParams, StoppingParams, StructuredOutput
from coppice.stopping import Finish, FinishReason
from protos import common_pb2, verifier_pb2

PROMPT = [3, 4, 5, 6, 7, 8, 9]
END = 1
PIECES = ["<pad>", "<end>", *string.ascii_lowercase[:25], *string.digits, *"{}[],:", '"', "ab"]
PIECES += ["12", '":', "bc"]
assert len(PIECES) == 48
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(temperature=1.3, seed=5, logprobs=1)
PENALIZED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=9, repetition_penalty=1.2, logit_bias={3: 2.0, 30: 9.0}
)
STOPPING = StoppingParams(max_tokens=60)
LISTS = StructuredOutput(
    json_schema='{"type": "array", "items": {"enum": ["abc", "de", 12, 7, ["bcd"]]}, "minItems": 7,'
    ' "x-guidance": {"whitespace_flexible": false}}'
)
WORDS = StructuredOutput(regex="([a-f]{2,5}[0-9]{1,3}[x-y]?)*")
SHORT = StructuredOutput(regex="[a-y]{9}[0-9]{4}")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    vocab = {piece: id for id, piece in enumerate(PIECES) if id > END}
    merges = [("a", "b"), ("1", "2"), ('"', ":"), ("b", "c")]
    fast = FastTokenizer(models.BPE(vocab={"<pad>": 0, "<end>": END} | vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<pad>", "<end>"])
    return GrammarCompiler(fast.to_str, len(PIECES), [END])


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens if token > END)


def tree(message: verifier_pb2.Committed, nodes: list[tuple[int, int]]) -> verifier_pb2.Tree:
    """`nodes` as (token, parent's row), best first."""
    return verifier_pb2.Tree(
        session_id=message.session_id, epoch=message.epoch, base_length=message.base_length,
        draft_id=message.base_length, tokens=[token for token, _ in nodes],
        parents=[parent for _, parent in nodes], scores=[-0.01 * i for i in range(len(nodes))],
    )  # fmt: skip


def chains(rng: random.Random, truth: list[int]) -> list[tuple[int, int]]:
    """The truth, wrong from a random place on."""
    right = rng.randint(0, len(truth))
    tokens = truth[:right] + [rng.randrange(48) for _ in range(4)]
    return [(token, row) for row, token in enumerate(tokens)]


def bushes(rng: random.Random, truth: list[int]) -> list[tuple[int, int]]:
    """Every node of the true path among random siblings, with random children of their own."""
    nodes: list[tuple[int, int]] = []
    row = 0
    for token in truth:
        below, siblings = row, rng.sample(range(48), 4)
        siblings[rng.randrange(4)] = token
        for sibling in dict.fromkeys(siblings):
            nodes.append((sibling, below))
            if sibling == token:
                row = len(nodes)
            else:
                nodes.append((rng.randrange(48), len(nodes)))
    return nodes


def noise(rng: random.Random, truth: list[int]) -> list[tuple[int, int]]:
    """Random tokens below random rows, the end of text among them."""
    nodes: dict[tuple[int, int], None] = {(END, 0): None}
    for _ in range(24):
        nodes[rng.randrange(48), rng.randrange(len(nodes) + 1)] = None
    return list(nodes)


Shape = Callable[[random.Random, list[int]], list[tuple[int, int]]]


def drafter(shape: Shape, answer: list[int], seed: int = 0):
    rng = random.Random(seed)

    def draft(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
        done = message.base_length - len(PROMPT)
        return tree(message, shape(rng, answer[done : done + 4])[: message.node_budget])

    return draft


def run_plain(new_bench, compiler, output, params, stopping=STOPPING):
    bench = new_bench()
    bench.open("a", PROMPT, params, stopping, grammar=compiler.compile(output))
    bench.run()
    return bench


@pytest.mark.parametrize("shape", [chains, bushes, noise])
@pytest.mark.parametrize("output", [LISTS, WORDS, SHORT], ids=["json", "words", "short"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "hot", "penalized"])
def test_speculation_changes_nothing_of_a_structured_answer(
    new_bench, new_link, compiler, params, output, shape
) -> None:
    plain = run_plain(new_bench, compiler, output, params)
    answer = plain.tokens("a")
    bench = new_bench()
    bench.open("a", PROMPT, params, STOPPING, grammar=compiler.compile(output))
    new_link(bench.engine, drafter(shape, answer)).join("a")
    bench.run()
    assert bench.tokens("a") == answer
    last, wanted = bench.events["a"][-1], plain.events["a"][-1]
    assert last.error is None and last.finish == wanted.finish
    assert last.stats.malformed_drafts == 0
    if shape is not noise:
        assert last.stats.accepted_nodes > 3
    got = [entry for event in bench.events["a"] for entry in event.logprobs]
    alone = [entry for event in plain.events["a"] for entry in event.logprobs]
    assert [entry.token for entry in got] == [entry.token for entry in alone]
    # The products of fp32 matrices in torch depend on the number of rows in the last bits.
    assert [e.logprob for e in got] == pytest.approx([e.logprob for e in alone], abs=1e-5)


def test_answers_are_within_their_grammar_and_end_with_it(new_bench, compiler) -> None:
    for params in (GREEDY, SAMPLED, PENALIZED):
        short = run_plain(new_bench, compiler, SHORT, params)
        assert re.fullmatch("[a-y]{9}[0-9]{4}", text_of(short.tokens("a")))
        assert short.events["a"][-1].finish == Finish(FinishReason.STOP, "grammar")
        words = run_plain(new_bench, compiler, WORDS, params)
        finish = words.events["a"][-1].finish
        if finish.reason is FinishReason.STOP:
            assert finish.by == str(END)
            assert re.fullmatch("([a-f]{2,5}[0-9]{1,3}[x-y]?)*", text_of(words.tokens("a")))
        else:
            assert len(words.tokens("a")) == 60


def test_reported_logprobs_are_the_models_own(new_bench, compiler) -> None:
    free = new_bench()
    free.open("a", PROMPT, GREEDY, STOPPING)
    free.run()
    bound = run_plain(new_bench, compiler, StructuredOutput(regex="0[a-y]{9}"), GREEDY)
    first, wanted = bound.events["a"][1].logprobs[0], free.events["a"][1].logprobs[0]
    assert first.top == wanted.top
    assert PIECES[first.token] == "0" and first.logprob < wanted.logprob


def test_what_the_grammar_forbids_is_not_verified(new_bench, new_link, compiler) -> None:
    """Nodes are counted by a grammar of the test's own, which sees each path from the start."""
    answer = run_plain(new_bench, compiler, LISTS, SAMPLED).tokens("a")
    sent: dict[int, int] = {}
    draft = drafter(bushes, answer)

    def fits(path: list[int]) -> bool:
        grammar = compiler.compile(LISTS)
        for token in path:
            if grammar.complete or not grammar.allowed()[token]:
                return False
            grammar.advance(token)
        return True

    def counting(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
        message_tree = draft(message)
        paths = [answer[: message.base_length - len(PROMPT)]]
        for token, parent in zip(message_tree.tokens, message_tree.parents, strict=True):
            paths.append([*paths[parent], token])
        sent[message.base_length] = sum(fits(path) for path in paths[1:])
        return message_tree

    bench = new_bench()
    bench.open("a", PROMPT, SAMPLED, STOPPING, grammar=compiler.compile(LISTS))
    new_link(bench.engine, counting).join("a")
    bench.run()
    length, seen = len(PROMPT), 0
    for event in bench.events["a"]:
        if event.nodes:
            assert event.nodes == sent[length]
            seen += 1
        length += len(event.tokens)
    assert seen > 5
    assert max(sent.values()) < 20, "nothing was forbidden"


def test_a_draft_that_is_forbidden_as_a_whole_is_a_plain_step_that_its_drafter_answers_for(
    new_bench, new_link, compiler
) -> None:
    answer = run_plain(new_bench, compiler, SHORT, GREEDY).tokens("a")
    bench = new_bench()
    session = bench.open("a", PROMPT, GREEDY, STOPPING, grammar=compiler.compile(SHORT))
    forbidden = PIECES.index("{")
    link = new_link(bench.engine, lambda m: tree(m, [(forbidden, 0), (answer[0], 1)]))
    link.join("a")
    bench.run()
    assert bench.tokens("a") == answer
    stats = bench.events["a"][-1].stats
    assert (stats.drafted_nodes, stats.speculative_steps, stats.missed_drafts) == (0, 0, 0)
    assert stats.plain_steps == len(answer) - 1
    assert session.draft.patience.worth < 0.5
    assert bench.engine.budget._gain[1] < 0.5


def test_forbidden_nodes_keep_their_rank_in_what_the_budget_learns(
    new_bench, new_link, compiler
) -> None:
    """A drafter whose best guess is always forbidden and whose second is always right: one node
    gains nothing, two gain one."""
    answer = run_plain(new_bench, compiler, SHORT, GREEDY).tokens("a")
    bench = new_bench()
    bench.open("a", PROMPT, GREEDY, STOPPING, grammar=compiler.compile(SHORT))

    def draft(message: verifier_pb2.Committed) -> verifier_pb2.Tree:
        return tree(message, [(END, 0), (answer[message.base_length - len(PROMPT)], 0)])

    new_link(bench.engine, draft).join("a")
    bench.run()
    assert bench.events["a"][-1].stats.accepted_nodes > 4
    assert bench.engine.budget._gain[1] < 0.5 < bench.engine.budget._gain[2]


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_resumed_answer_goes_on_in_its_grammar(new_bench, new_link, compiler, cut: int) -> None:
    answer = run_plain(new_bench, compiler, LISTS, PENALIZED).tokens("a")
    bench = new_bench()
    bench.open(
        "a", PROMPT, PENALIZED, STOPPING, epoch=2, committed=tuple(answer[:cut]),
        grammar=compiler.compile(LISTS),
    )  # fmt: skip
    new_link(bench.engine, drafter(bushes, answer)).join("a", epoch=3)
    bench.run()
    assert bench.tokens("a") == answer[cut:]


def test_what_the_grammar_forbids_or_ends_cannot_be_resumed(new_bench, compiler) -> None:
    with pytest.raises(FailedPrecondition, match="does not fit"):
        new_bench().open("a", PROMPT, committed=(2,), grammar=compiler.compile(LISTS))
    with pytest.raises(InvalidArgument, match="has not ended"):
        grammar = compiler.compile(StructuredOutput(regex="a"))
        new_bench().open("a", PROMPT, committed=(2,), grammar=grammar)


def test_preemption_changes_no_structured_answer(new_bench, new_link, compiler) -> None:
    params = {f"s{i}": SamplingParams(temperature=1.0, seed=i) for i in range(10)}
    alone = {
        name: run_plain(new_bench, compiler, LISTS, params[name]).tokens("a") for name in params
    }
    bench = new_bench(verifier={"kv_slots": 150, "prefix_cache": False})
    drafters = {name: drafter(bushes, alone[name], seed) for seed, name in enumerate(params)}
    link = new_link(bench.engine, lambda message: drafters[message.session_id](message))
    for name in params:
        bench.open(name, PROMPT, params[name], STOPPING, grammar=compiler.compile(LISTS))
        link.join(name)
    bench.run()
    assert {name: bench.tokens(name) for name in params} == alone
    assert bench.engine.metrics.preemptions._value.get() > 0


def test_a_grammar_that_leaves_no_token_ends_its_own_session_alone(
    new_bench, new_link, compiler
) -> None:
    other = run_plain(new_bench, compiler, WORDS, SAMPLED).tokens("a")
    bench = new_bench()
    broken = compiler.compile(StructuredOutput(regex="a{3}Z"))
    bench.open("broken", PROMPT, SAMPLED, STOPPING, grammar=broken)
    bench.open("other", PROMPT, SAMPLED, STOPPING, grammar=compiler.compile(WORDS))
    link = new_link(bench.engine, drafter(bushes, other))
    link.join("other")
    bench.run()
    error = bench.events["broken"][-1].error
    assert isinstance(error, FailedPrecondition)
    assert "no token fits as token 4 of the answer" in str(error)
    assert bench.tokens("broken") == [PIECES.index("a")] * 3
    assert bench.tokens("other") == other


@pytest.mark.parametrize(
    ("stopping", "text"),
    [
        (StoppingParams(max_tokens=30, stop_token_ids=(PIECES.index("b"),)), "aab"),
        (StoppingParams(max_tokens=30, ignore_eos=True), "aab1"),
        (StoppingParams(max_tokens=30, min_tokens=9), "aab1"),
        (StoppingParams(max_tokens=2), "aa"),
    ],
)
def test_other_ends_hold_within_a_grammar(new_bench, compiler, stopping, text: str) -> None:
    """min_tokens cannot make an answer longer than its grammar."""
    output = StructuredOutput(grammar='start: "aa" B "1"\nB: /b/')
    params = SamplingParams(temperature=0.0, logit_bias={PIECES.index("ab"): -100.0})
    bench = run_plain(new_bench, compiler, output, params, stopping)
    assert text_of(bench.tokens("a")) == text
    whole = text == "aab1"
    assert bench.events["a"][-1].finish.reason is FinishReason("length" if text == "aa" else "stop")
    assert (bench.events["a"][-1].finish.by == "grammar") is whole


async def test_a_grammar_that_does_not_compile_ends_its_call_alone(served) -> None:
    """The served tokenizer is one of words, which the library cannot read."""
    output = common_pb2.StructuredOutput(regex="a")
    sampling = common_pb2.SamplingParams(temperature=0.0, seed=1, structured_output=output)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.run(sampling=sampling).read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_output.regex = 'a': must be a grammar that compiles" in error.value.details()
    events = [event async for event in served.run()]
    assert sum(len(event.tokens) for event in events) == 24
