"""Text to token ids and back, whole or token by token. Torch-free: the gateway uses it too."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from coppice.chat_template import ChatMessage, ChatTemplate
from coppice.errors import InvalidArgument, StartError

__all__ = ["ChatMessage", "Detokenizer", "StopMatcher", "Tokenizer"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character decode to
MAX_PENDING_TOKENS = 256
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A checkpoint's `tokenizer.json` with its chat template."""

    def __init__(self, fast: FastTokenizer, chat_template: ChatTemplate | None) -> None:
        self._fast = fast
        self._chat_template = chat_template
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """From a checkpoint directory. Raises StartError when a file is missing or broken."""
        path = directory / "tokenizer.json"
        if not path.exists():
            raise StartError(f"{path} is missing: the checkpoint needs a fast tokenizer")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartError(f"{path} cannot be read: {error}") from None
        fast.no_truncation()
        fast.no_padding()
        return cls(fast, _chat_template(directory))

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones too."""
        return self._fast.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """The whole tokenizer in the format of `tokenizer.json`."""
        return self._fast.to_str()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer itself puts around it;
        text that spells a special token becomes that token."""
        return self._encode("prompt", text, add_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        return self._fast.decode(list(tokens), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt that the model's chat template makes of `messages`."""
        if self._chat_template is None:
            given = [message.role for message in messages]
            allowed = "sent as plain text to Generate: this model has no chat template"
            raise InvalidArgument("messages", given, allowed)
        return self._chat_template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of the chat prompt; its special tokens are those of the template alone."""
        return self._encode("messages", self.render_chat(messages), add_special_tokens=False)

    def token_text(self, token: int) -> str:
        """What a single token looks like, a special one too."""
        return self._fast.decode([token], skip_special_tokens=False)

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def _encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(field, text, "text without lone surrogates") from None
        # Unlike `encode`, this lets other threads go on.
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class Detokenizer:
    """The text of a growing sequence, in whole characters.

    The tokens that were written last stay as context, because some tokenizers (sentencepiece)
    spell a token by what stands before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes: empty within a character and for special tokens."""
        if token in self._tokenizer.special_ids:
            return ""
        self._pending.append(token)
        text = self._pending_text()
        # No character is that long: such a run is garbage, and decoding it is quadratic.
        if text.endswith(INCOMPLETE) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        if text:
            self._context, self._pending = self._pending, []
            self._context_text = self._tokenizer.decode(self._context)
        return text

    def flush(self) -> str:
        """At the end: what is held back, without the character that will never be whole."""
        text = self._pending_text().rstrip(INCOMPLETE)
        self._pending = []
        return text

    def _pending_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending)
        return text[len(self._context_text) :]


class StopMatcher:
    """Cuts a stream of text at the first stop string that is complete.

    Where several end at the same character, the longest counts. So the result does not depend on
    how the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show: never any part of a stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """At the end: what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _chat_template(directory: Path) -> ChatTemplate | None:
    """`chat_template.jinja` (transformers 5), else the entry of `tokenizer_config.json`."""
    config = _read_json(directory / "tokenizer_config.json")
    source: Any = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if (directory / "chat_template.jinja").exists():
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if not source:
        return None
    tokens = {**_read_json(directory / "special_tokens_map.json"), **config}
    return ChatTemplate(source, {key: _content(tokens.get(key)) for key in TEMPLATE_TOKENS})


def _content(token: Any) -> str:
    """A special token is published as its text or as an object that holds it."""
    return token["content"] if isinstance(token, dict) else token or ""


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartError(f"{path} cannot be read as JSON: {error}") from None
