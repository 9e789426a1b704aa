"""The shape of a Llama-like decoder, read from a published `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from coppice.errors import StartError

# Which projections carry a bias: per family, or as the config says where it says so.
FAMILIES_WITH_CONFIGURED_BIAS = ("llama", "qwen3")
FAMILIES_WITH_INPUT_BIAS = ("qwen2",)
FAMILIES_WITH_QK_NORM = ("qwen3",)
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
# Kinds whose `factor` stretches the context beyond `max_position_embeddings`.
STRETCHING_ROPE_KINDS = ("linear", "dynamic", "yarn")
QWEN3_HEAD_DIM = 128  # what an absent head_dim means there


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: inverse frequencies are made in `rope.py`."""

    theta: float = 10000.0
    kind: str = "default"  # one of SUPPORTED_ROPE_KINDS
    factor: float = 1.0
    original_max_position: int | None = None  # of the training before any stretching
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder of the Llama kind (Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    attention_bias: bool = False  # of q, k, v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_context: int | None = None) -> "DecoderConfig":
        """The shape that a `config.json` of transformers 4 or 5 describes.

        `max_context` (default: what the model was published for) is the most tokens that will
        ever be used; it decides whether a sliding window is active and where dynamic rope is
        frozen. Raises StartError that names what is missing or not supported.
        """
        _refuse_other_architectures(config)
        published = parse_published(_PublishedConfig, config, "config.json")
        rope = _rope_config(config, published)
        context = _context(published, rope, max_context)
        _refuse_sliding_window(published, context)
        kind = published.model_type
        configured_bias = kind in FAMILIES_WITH_CONFIGURED_BIAS and published.attention_bias
        return cls(
            model_type=kind,
            vocab_size=published.vocab_size,
            hidden_size=published.hidden_size,
            intermediate_size=published.intermediate_size,
            layers=published.num_hidden_layers,
            heads=published.num_attention_heads,
            kv_heads=published.num_key_value_heads or published.num_attention_heads,
            head_dim=_head_dim(published),
            rms_norm_eps=published.rms_norm_eps,
            rope=rope,
            max_context=context,
            attention_bias=kind in FAMILIES_WITH_INPUT_BIAS or configured_bias,
            output_bias=configured_bias,
            mlp_bias=kind == "llama" and published.mlp_bias,
            qk_norm=kind in FAMILIES_WITH_QK_NORM,
            tied_embeddings=published.tie_word_embeddings,
            eos_token_ids=token_ids(published.eos_token_id),
            bos_token_id=published.bos_token_id,
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as published: one id, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class _PublishedConfig(BaseModel):
    """The keys of a config.json that a dense decoder of the Llama kind depends on."""

    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(1e-6, gt=0)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = Field(None, gt=0)
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None


class _PublishedRope(BaseModel):
    """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""

    rope_theta: float | None = Field(None, gt=0)
    factor: float | None = Field(None, gt=0)
    original_max_position_embeddings: int | None = Field(None, gt=0)
    partial_rotary_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


M = TypeVar("M", bound=BaseModel)


def parse_published(kind: type[M], values: Mapping[str, Any], where: str) -> M:
    """Checked values. Raises StartError that names the first one which does not fit."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        given = "absent" if first["type"] == "missing" else repr(first["input"])
        raise StartError(f"{where}: {key} is {given}: {first['msg'].lower()}") from None


def _refuse_other_architectures(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise StartError(
            f"config.json: quantization_config ({method}): quantized checkpoints are not "
            "supported; use the unquantized one"
        )
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise StartError(
            f"config.json: {kind} is a mixture of experts: not supported; supported are dense "
            f"models of type {supported}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise StartError(f"config.json: hidden_act {activation!r} is not supported; only silu")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise StartError(
            f"config.json: model_type {kind!r} is not supported; it must be one of {supported}"
        )


def _rope_config(config: Mapping[str, Any], published: _PublishedConfig) -> RopeConfig:
    values: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in SUPPORTED_ROPE_KINDS or any(isinstance(v, Mapping) for v in values.values()):
        found = kind if kind not in SUPPORTED_ROPE_KINDS else "one per layer type"
        raise StartError(
            f"config.json: rope type {found!r} is not supported; it must be one of "
            f"{', '.join(SUPPORTED_ROPE_KINDS)}"
        )
    rope = parse_published(_PublishedRope, values, "config.json: rope parameters")
    partial = config.get("partial_rotary_factor") or rope.partial_rotary_factor
    if partial != 1.0:
        raise StartError(f"config.json: partial_rotary_factor = {partial} is not supported; only 1")
    original = published.max_position_embeddings
    if kind in ("llama3", "yarn"):
        original = (
            published.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or original
        )
    factor = rope.factor
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise StartError(f"config.json: rope type {kind!r} needs a factor, and has none")
        factor = published.max_position_embeddings / original
    return RopeConfig(
        theta=rope.rope_theta or published.rope_theta or 10000.0,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=rope.attention_factor,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
        truncate=rope.truncate,
    )


def _context(published: _PublishedConfig, rope: RopeConfig, wanted: int | None) -> int:
    """The context in use: the published one, or `wanted` where the rope bears it."""
    if wanted is None:
        return published.max_position_embeddings
    longest = published.max_position_embeddings
    if rope.kind in STRETCHING_ROPE_KINDS and rope.original_max_position is not None:
        longest = max(longest, int(rope.original_max_position * rope.factor))
    if not 1 <= wanted <= longest:
        raise StartError(f"maximum context = {wanted}: this model bears 1 to {longest} tokens")
    return wanted


def _refuse_sliding_window(published: _PublishedConfig, context: int) -> None:
    """A window at least as wide as the context never hides a key, so it may stay."""
    sliding_layers = any(kind != "full_attention" for kind in published.layer_types or ())
    enabled = published.model_type == "mistral" or published.use_sliding_window or sliding_layers
    window = published.sliding_window
    if not enabled or (window is None and not sliding_layers):
        return
    if window is None or window < context:
        mend = f"; set the maximum context to at most {window}" if window else ""
        raise StartError(
            f"config.json: sliding_window = {window} is active in a context of {context} tokens: "
            f"not supported{mend}"
        )


def _head_dim(published: _PublishedConfig) -> int:
    heads = published.num_attention_heads
    kv_heads = published.num_key_value_heads or heads
    if heads % kv_heads:
        raise StartError(
            f"config.json: {heads} query heads cannot share {kv_heads} key-value heads"
        )
    default = published.hidden_size // heads
    if published.model_type == "qwen3":
        default = QWEN3_HEAD_DIM
    head_dim = published.head_dim or default
    if head_dim % 2:
        raise StartError(f"config.json: head_dim = {head_dim}: rotary embedding needs an even one")
    return head_dim
