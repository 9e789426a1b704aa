"""The key-value part of a GGUF file, typed and checked."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from coppice.errors import StartError


class GgufMetadata:
    """What a GGUF file says about its model. Raises StartError where it says too little, or
    something that is not supported."""

    def __init__(self, reader: GGUFReader, source: Path) -> None:
        self._reader = reader
        self._source = source
        self.architecture = self._text("general.architecture")
        if self._value(f"{self.architecture}.expert_count"):
            raise StartError(f"{source} is a mixture of experts: not supported")
        if self._value(f"{self.architecture}.attention.sliding_window"):
            raise StartError(f"{source} has a sliding attention window: not supported")
        self.heads = self.hyperparameter("attention.head_count")
        self.kv_heads = self.hyperparameter("attention.head_count_kv", self.heads)
        self.head_dim = self.hyperparameter(
            "attention.key_length", self.hyperparameter("embedding_length") // self.heads
        )
        rotated = self.hyperparameter("rope.dimension_count", self.head_dim)
        if rotated != self.head_dim:
            raise StartError(f"{source}: {rotated} of {self.head_dim} dimensions rotated: only all")
        self.tokens = self._list("tokenizer.ggml.tokens")

    def hyperparameter(self, key: str, default: int | None = None) -> int:
        """An integer of the architecture, such as block_count."""
        value = self._value(f"{self.architecture}.{key}", default)
        if not isinstance(value, int):
            raise StartError(
                f"{self._source}: {self.architecture}.{key} is {value}, expected a number"
            )
        return value

    @property
    def rms_norm_eps(self) -> float:
        key = f"{self.architecture}.attention.layer_norm_rms_epsilon"
        # Stored as fp32: as published again in the fewest digits that mean the same number.
        return float(f"{self._value(key, 1e-6):.6g}")

    @property
    def rope_theta(self) -> float:
        return float(self._value(f"{self.architecture}.rope.freq_base", 10000.0))

    @property
    def rope_scaling(self) -> dict[str, object] | None:
        """In the spelling of config.json."""
        prefix = f"{self.architecture}.rope.scaling"
        kind = self._value(f"{prefix}.type", "none")
        if kind == "none":
            return None
        return {
            "rope_type": kind,
            "factor": self._value(f"{prefix}.factor"),
            "original_max_position_embeddings": self._value(f"{prefix}.original_context_length"),
        }

    @property
    def tokenizer_model(self) -> str:
        return self._text("tokenizer.ggml.model")

    @property
    def pre_tokenizer(self) -> str:
        return str(self._value("tokenizer.ggml.pre", "default"))

    @property
    def merges(self) -> list[str]:
        return self._list("tokenizer.ggml.merges")

    @property
    def token_types(self) -> list[int]:
        return self._list("tokenizer.ggml.token_type")

    @property
    def chat_template(self) -> str | None:
        return self._value("tokenizer.chat_template")

    def adds_bos(self, default: bool) -> bool:
        return bool(self._value("tokenizer.ggml.add_bos_token", default))

    def special_id(self, kind: str) -> int | None:
        """Id of the bos, eos or unknown token."""
        return self._value(f"tokenizer.ggml.{kind}_token_id")

    def special_token(self, kind: str) -> str | None:
        index = self.special_id(kind)
        return None if index is None else self.tokens[index]

    def _text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise StartError(f"{self._source}: {key} is missing")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list) or not value:
            raise StartError(f"{self._source}: {key} is missing")
        return value

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()
