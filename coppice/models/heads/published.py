"""The config.json of a published head, in its two layouts.

EAGLE and EAGLE-3 publish the config of a decoder of one layer, with a few keys more. The
*speculators* layout (`speculators_model_type`) nests that decoder in `transformer_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from coppice.errors import StartError
from coppice.models.checkpoint import read_json
from coppice.models.config import DecoderConfig, parse_published
from coppice.models.heads.stored import MEND

SPECULATORS_TYPES = ("eagle", "eagle3")
# Of the speculators layout, each of which makes another computation of the head.
UNSUPPORTED = ("layernorms", "norm_before_fc", "fc_norm", "norm_output")
VECTORS = 3  # of the target that an EAGLE-3 head reads


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What config.json says of a head beside its weights."""

    decoder: DecoderConfig  # of the one layer; its vocabulary is the target's
    target_hidden_size: int
    draft_vocab_size: int | None  # None: it does not say
    feature_layers: tuple[int, ...] | None  # whose inputs EAGLE-3 reads; None: the usual ones
    fc_bias: bool  # of EAGLE-1/2: whether there must be one
    residual_is_normed: bool  # of EAGLE-3


def usual_feature_layers(target: DecoderConfig) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads when its config names none."""
    return (2, target.layers // 2, target.layers - 3)


def read_head_config(path: Path) -> HeadConfig:
    """The config of the head in the directory `path`. Raises StartError for what is missing, or
    would compute something else than is known here."""
    content = read_json(path / "config.json")
    published = parse_published(_Published, content, f"head {path}: config.json")
    kind = published.speculators_model_type
    if kind is not None and kind not in SPECULATORS_TYPES:
        known = ", ".join(SPECULATORS_TYPES)
        raise StartError(f"head {path}: speculators_model_type {kind!r} is none of {known}")
    for key in UNSUPPORTED:
        if content.get(key):
            raise StartError(f"head {path}: {key} = {content[key]} is not supported: {MEND}")
    nested = published.transformer_layer_config
    decoder = DecoderConfig.from_hf(content if nested is None else nested)
    if decoder.layers != 1:
        raise StartError(f"head {path}: num_hidden_layers is {decoder.layers}, expected 1: {MEND}")
    return HeadConfig(
        decoder=decoder,
        target_hidden_size=published.target_hidden_size or decoder.hidden_size,
        draft_vocab_size=published.draft_vocab_size,
        feature_layers=_feature_layers(published),
        fc_bias=published.bias if kind is None else published.fusion_bias,
        residual_is_normed=published.norm_before_residual,
    )


class _Capture(BaseModel):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class _Published(BaseModel):
    """The keys of a head's config.json beside those of a decoder."""

    speculators_model_type: str | None = None
    transformer_layer_config: Mapping[str, Any] | None = None
    target_hidden_size: int | None = Field(None, gt=0)
    draft_vocab_size: int | None = Field(None, gt=0)
    norm_before_residual: bool = False
    bias: bool = True  # of EAGLE-1/2's fc
    fusion_bias: bool = False  # the same in the speculators layout
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    eagle_config: _Capture | None = None


def _feature_layers(published: _Published) -> tuple[int, ...] | None:
    """Two conventions are in use: ids at the top name the layers whose inputs are read, those in
    `eagle_config` the layers after which they are read."""
    if published.eagle_aux_hidden_state_layer_ids:
        return published.eagle_aux_hidden_state_layer_ids
    nested = published.eagle_config
    if nested is None or not nested.eagle_aux_hidden_state_layer_ids:
        return None
    return tuple(layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids)
