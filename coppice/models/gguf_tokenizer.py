"""A `tokenizer.json` from the vocabulary in a GGUF file."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.processors import TemplateProcessing

from coppice.errors import StartError
from coppice.models.gguf_metadata import GgufMetadata

CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How text is cut before byte-pair merging, and what else belongs to that tokenizer."""

    cut: PreTokenizer
    normalized: bool = False  # to NFC
    whole_words: bool = False  # a word that is in the vocabulary is not merged up
    adds_bos: bool = False  # where the file does not say


def _pre_tokenization(name: str) -> PreTokenization | None:
    """By `tokenizer.ggml.pre`. The name stands for a program, so none is guessed."""
    match name:
        case "smollm":
            return PreTokenization(Steps([Digits(individual_digits=True), _gpt2()]))
        case "gpt-2":
            return PreTokenization(_gpt2())
        case "llama-bpe":
            cut = _split(rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}")
            return PreTokenization(cut, whole_words=True, adds_bos=True)
        case "qwen2":
            return PreTokenization(
                _split(rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{REST}"), normalized=True
            )
        case _:
            return None


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> PreTokenizer:
    by_pattern = Split(Regex(pattern), behavior="isolated")
    return Steps([by_pattern, ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_json(metadata: GgufMetadata) -> str:
    """The content of `tokenizer.json`. Raises StartError for a tokenizer that is not known."""
    kind, name = metadata.tokenizer_model, metadata.pre_tokenizer
    rules = _pre_tokenization(name)
    if kind != "gpt2" or rules is None:
        raise StartError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {name!r} is not supported (byte-level BPE "
            "with smollm, gpt-2, llama-bpe or qwen2 is); use the model's safetensors instead"
        )
    vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
    merges = [_pair(merge) for merge in metadata.merges]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rules.whole_words))
    if rules.normalized:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = rules.cut
    tokenizer.decoder = ByteLevelDecoder()
    bos, bos_id = metadata.special_token("bos"), metadata.special_id("bos")
    if bos is not None and bos_id is not None and metadata.adds_bos(rules.adds_bos):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    _add_tokens(tokenizer, metadata.tokens, metadata.token_types)
    return tokenizer.to_str(pretty=True)


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in text before all else; those of control are special."""
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
