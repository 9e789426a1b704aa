"""Text to ids as llama.cpp does it for the same vocabulary, and ids back to text."""

import hashlib
import json
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from coppice.errors import InvalidArgument, StartError
from coppice.tokenizer import ChatMessage, Tokenizer

LLAMA_CPP = json.loads((Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text())
PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SLOW_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of the sentencepiece kind: spaces as a mark, the first one dropped, bytes as tokens."""
    words = ["▁", "a", "b", "é", "世", "▁a", "ab", "▁ab"]
    vocabulary = {
        token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])
    }
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    fast = FastTokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    directory = tmp_path_factory.mktemp("byte_fallback")
    fast.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize(("text", "ids"), LLAMA_CPP["ids"])
def test_a_text_has_the_ids_of_llama_cpp(text: str, ids: list[int], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text) == ids


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="the evaluation prompts are not here")
def test_all_evaluation_prompts_have_the_ids_of_llama_cpp(tokenizer: Tokenizer) -> None:
    digest, prompts = hashlib.sha256(), 0
    for file in sorted(PROMPTS.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            first = ChatMessage("user", json.loads(line)["turns"][0])
            ids = tokenizer.encode_chat([first])
            digest.update((" ".join(map(str, ids)) + "\n").encode())
            prompts += 1
    expected = LLAMA_CPP["prompts"]
    assert (prompts, digest.hexdigest()) == (expected["count"], expected["sha256"])


def test_special_tokens_are_left_out_of_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer.decode(ids) == "user\nHi\n"
    assert tokenizer.token_text(ids[0]) == "<|im_start|>"


def test_the_vocabulary_has_the_size_of_the_models(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152


def test_a_lone_surrogate_is_an_invalid_argument(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="surrogates"):
        tokenizer.encode("half \ud83d of an emoji")


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@SLOW_FIXTURE
def test_pushed_text_is_the_decoded_text_of_any_ids(ids: list[int], tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids).rstrip(REPLACEMENT)


@given(text=st.text(max_size=30))
@SLOW_FIXTURE
def test_pushed_text_is_the_text_that_was_encoded(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids).rstrip(REPLACEMENT)


@given(text=st.text(st.sampled_from("ab é世界😀ñ"), max_size=30))
@SLOW_FIXTURE
def test_pushed_text_is_whole_with_a_byte_fallback_tokenizer(
    text: str, byte_fallback: Tokenizer
) -> None:
    ids = byte_fallback.encode(text)
    # This kind of tokenizer takes one leading space for the mark that it puts there anyhow.
    assert "".join(pieces(byte_fallback, ids)) == text.removeprefix(" ")


@given(ids=st.lists(st.integers(0, 263), max_size=40))
@SLOW_FIXTURE
def test_no_ids_break_the_detokenizer(ids: list[int], byte_fallback: Tokenizer) -> None:
    for piece in pieces(byte_fallback, ids)[:-1]:
        assert not piece.endswith(REPLACEMENT)


def test_a_character_appears_when_its_last_byte_does(byte_fallback: Tokenizer) -> None:
    ids = [byte_fallback.encode("a")[0], *byte_fallback.encode("a😀b")[1:]]
    assert pieces(byte_fallback, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_never_ends_is_dropped_at_the_end(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("a😀")[:-1]
    assert pieces(byte_fallback, ids) == ["a", "", "", "", ""]


def test_endless_garbage_is_shown_at_last(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("😀")[0]
    detokenizer = tokenizer.detokenizer()
    assert any(REPLACEMENT in detokenizer.push(broken) for _ in range(300))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": 1}'])
def test_a_broken_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartError, match=r"tokenizer\.json cannot be read") as refusal:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(refusal.value)


def test_the_tokenizer_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, coppice.tokenizer; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert run([sys.executable, "-c", program], check=False).returncode == 0
