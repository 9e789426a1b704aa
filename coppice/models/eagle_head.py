"""EAGLE-1/2 draft heads in the published format: one decoder layer behind the target's embedding.

Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858). The pair of token x_{t+1} and
feature f_t sits at position t; the layer predicts f_{t+1}, and the target's LM head turns that
into the distribution of x_{t+2}.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json
from coppice.models.config import DecoderConfig
from coppice.models.decoder import (
    LayerWeights,
    RotaryTable,
    decoder_layers,
    layer_sizes,
    new_cache,
)
from coppice.models.rope import rotary_table
from kernels import ops
from kernels.batch import AttentionBatch, KVCache
from kernels.packed import Weight

PICKLE_FILE = "pytorch_model.bin"
TOKEN_MAP_FILE = "token_map.json"
LAYER = "layers.0"
MEND = "set speculation.head to a head trained for this target"
# Published beside a head, without a part in it: the target's own, or made from the config.
IGNORED_TENSORS = (
    "embed_tokens.weight",
    "lm_head.weight",
    f"{LAYER}.self_attn.rotary_emb.inv_freq",
)


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """Weights of a head together with the target's tensors that it borrows."""

    identity: str  # for logs and refusals
    config: DecoderConfig  # the head's own; its `max_context` is what it was trained for
    embedding: Tensor  # [vocab, hidden], the target's
    lm_head: Weight  # [draft_vocab, hidden], rows of the target's
    token_map: Tensor | None  # [draft_vocab] int64 target ids; None: all of the vocabulary
    fc: Weight  # [hidden, 2 * hidden]
    fc_bias: Tensor | None  # [hidden]
    layer: LayerWeights
    rotary: RotaryTable

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, slots: int) -> KVCache:
        return new_cache(self.config, slots, self.dtype, self.device)

    def forward(
        self, tokens: Tensor, features: Tensor, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Predicted features [rows, hidden] for pairs of tokens [rows] and features [rows,
        hidden]; K/V go into `cache`."""
        pairs = torch.cat((self.embedding[tokens], features), -1)  # [rows, 2 * hidden]
        hidden = ops.linear(pairs, self.fc, self.fc_bias)
        angles = self.rotary(batch.positions)
        return decoder_layers(hidden, (self.layer,), self.config, angles, cache, batch)

    def best_tokens(self, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest next tokens of features [rows, hidden]: target ids and
        log-probabilities (fp32, over the draft vocabulary), both [rows, min(count, draft_vocab)]
        and likeliest first."""
        logits = ops.linear(features, self.lm_head, wide=True)  # [rows, draft_vocab]
        tokens, log_probs = ops.best_tokens(logits, min(count, logits.shape[-1]))
        return (tokens if self.token_map is None else self.token_map[tokens]), log_probs


def load_embeddings(
    path: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Embedding and LM head, both [vocab, hidden], of the target in the directory `path`, without
    its layers. They are one tensor when the target ties them."""
    checkpoint = Checkpoint.open(path)
    shape = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.tensor("model.embed_tokens.weight", shape, dtype, device)
    if config.tied_embeddings:
        return embedding, embedding
    return embedding, checkpoint.tensor("lm_head.weight", shape, dtype, device)


def load_eagle_head(
    path: Path,
    target_config: DecoderConfig,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> EagleHead:
    """The head in the directory `path` for a target with `embedding` and `lm_head` [vocab,
    hidden]. Raises StartError (one line) that names both sides of a misfit."""
    published = read_json(path / "config.json")
    config = DecoderConfig.from_hf(published)
    _check_fit(path, config, target_config)
    stored = _open_weights(path)

    def read(name: str, shape: Sequence[int]) -> Tensor:
        return stored.read(name, shape, dtype, device)

    hidden = config.hidden_size
    fc_bias = read("fc.bias", (hidden,)) if published.get("bias", True) else None
    fc, layer = read("fc.weight", (hidden, 2 * hidden)), _layer(read, config, stored.names)
    _refuse_unknown_tensors(path, stored.names)
    token_map = _token_map(path, config.vocab_size, device)
    rows = lm_head if token_map is None else lm_head[token_map.to(lm_head.device)]
    return EagleHead(
        identity=f"{path.resolve().name}@{stored.digest[:12]}",
        config=config,
        embedding=embedding.to(device=device, dtype=dtype),
        lm_head=ops.pack(rows.to(device=device, dtype=dtype)),
        token_map=token_map,
        fc=ops.pack(fc),
        fc_bias=fc_bias,
        layer=ops.pack_layer(layer, layer_sizes(config)),
        rotary=rotary_table(config, device),
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    names: frozenset[str]
    read: Callable[[str, Sequence[int], torch.dtype, torch.device], Tensor]
    digest: str  # sha256 of the weights, hex


def _check_fit(path: Path, head: DecoderConfig, target: DecoderConfig) -> None:
    for field in ("hidden_size", "vocab_size"):
        mine, theirs = getattr(head, field), getattr(target, field)
        if mine != theirs:
            raise StartError(f"head {path}: {field} is {mine}, the target's is {theirs}: {MEND}")
    if head.layers != 1:
        raise StartError(f"head {path}: num_hidden_layers is {head.layers}, expected 1: {MEND}")


def _open_weights(path: Path) -> _Stored:
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        checkpoint = Checkpoint.open(path)
        files = sorted(set(checkpoint.shards.values()))
        return _Stored(frozenset(checkpoint.shards), checkpoint.tensor, _digest(files))
    if not (path / PICKLE_FILE).exists():
        raise StartError(f"head {path} has no weights: neither {SINGLE_FILE} nor {PICKLE_FILE}")
    tensors = _unpickle(path / PICKLE_FILE)

    def read(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if name not in tensors:
            raise StartError(f"head {path}: tensor {name} {list(shape)} is missing: {MEND}")
        found = tensors[name]
        if list(found.shape) != list(shape) or not found.is_floating_point():
            is_now = f"{list(found.shape)} of {found.dtype}"
            raise StartError(f"head {path}: tensor {name} is {is_now}, expected {list(shape)}")
        converted = found.to(device=device, dtype=dtype)
        if not bool(torch.isfinite(converted).all()):
            raise StartError(f"head {path}: tensor {name} holds NaN or infinity in {dtype}")
        return converted

    return _Stored(frozenset(tensors), read, _digest([path / PICKLE_FILE]))


def _unpickle(path: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartError(f"{path} cannot be read as plain weights: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise StartError(f"{path} holds something else than named tensors")
    return content


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _layer(
    read: Callable[[str, Sequence[int]], Tensor], config: DecoderConfig, names: frozenset[str]
) -> LayerWeights:
    """Biases of the projections are where the file has them: configs of published heads repeat
    the target's family, whatever the head was trained with."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def weight(name: str, *shape: int) -> Tensor:
        return read(f"{LAYER}.{name}.weight", shape)

    def bias(*parts: tuple[str, int]) -> Tensor | None:
        if not any(f"{LAYER}.{name}.bias" in names for name, _ in parts):
            return None
        return torch.cat([read(f"{LAYER}.{name}.bias", (size,)) for name, size in parts])

    qkv = (
        ("self_attn.q_proj", q_size),
        ("self_attn.k_proj", kv_size),
        ("self_attn.v_proj", kv_size),
    )
    gate_up = (("mlp.gate_proj", inner), ("mlp.up_proj", inner))
    return LayerWeights(
        input_norm=None,
        qkv=torch.cat([weight(name, size, hidden) for name, size in qkv]),
        qkv_bias=bias(*qkv),
        q_norm=None,
        k_norm=None,
        o=weight("self_attn.o_proj", hidden, q_size),
        o_bias=bias(("self_attn.o_proj", hidden)),
        post_norm=weight("post_attention_layernorm", hidden),
        gate_up=torch.cat([weight(name, size, hidden) for name, size in gate_up]),
        gate_up_bias=bias(*gate_up),
        down=weight("mlp.down_proj", hidden, inner),
        down_bias=bias(("mlp.down_proj", hidden)),
    )


def _refuse_unknown_tensors(path: Path, names: frozenset[str]) -> None:
    """A tensor that would be left out silently makes another head of it (EAGLE-3, say)."""
    projections = [f"self_attn.{part}_proj" for part in "qkvo"]
    projections += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    known = {f"{LAYER}.{name}.{kind}" for name in projections for kind in ("weight", "bias")}
    known |= {"fc.weight", "fc.bias", f"{LAYER}.post_attention_layernorm.weight", *IGNORED_TENSORS}
    unknown = sorted(names - known)
    if unknown:
        raise StartError(f"head {path}: tensor {unknown[0]} has no place in an EAGLE-1/2 head")


def _token_map(path: Path, vocab_size: int, device: torch.device) -> Tensor | None:
    """The draft vocabulary, a JSON list of target ids (FR-Spec, arXiv 2502.14856)."""
    file = path / TOKEN_MAP_FILE
    if not file.exists():
        return None
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise StartError(f"{file}: expected a JSON list of token ids")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise StartError(f"{file}: token {outside[0]} is outside of the target's [0, {vocab_size})")
    if len(set(ids)) != len(ids):
        raise StartError(f"{file}: a token is listed twice")
    return torch.tensor(ids, dtype=torch.int64, device=device)  # [draft_vocab]
