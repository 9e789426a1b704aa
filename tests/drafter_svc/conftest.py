"""Small random heads on disk, and a slow drafter that is obviously right."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.heads.head import DraftHead
from coppice.models.heads.loading import load_head

torch.set_num_threads(1)


@dataclass(frozen=True)
class ReferenceTree:
    tokens: list[int]
    parents: list[int]
    scores: list[float]


@dataclass(frozen=True)
class ReferenceDrafter:
    """Grows the tree of EAGLE-2 by running every path from the first token on: dense causal
    attention, no cache, no mask, one sequence at a time."""

    directory: Path
    embedding: Tensor
    lm_head: Tensor

    def tree(
        self, tokens: list[int], features: Tensor, nodes: int, top_k: int, depth: int
    ) -> ReferenceTree:
        pairs = [(token, features[t]) for t, token in enumerate(tokens[1:])]
        candidates: list[tuple[int, int, float]] = []  # token, candidate above or -1, score
        paths: dict[int, list[tuple[int, Tensor]]] = {-1: pairs}
        frontier = [-1]
        for _ in range(depth):
            level: list[int] = []
            for above in frontier:
                predicted = self._last_feature(paths[above])
                score = candidates[above][2] if above >= 0 else 0.0
                for token, log_prob in self._children(predicted, top_k):
                    level.append(len(candidates))
                    paths[len(candidates)] = [*paths[above], (token, predicted)]
                    candidates.append((token, above, score + min(log_prob, 0.0)))
            frontier = sorted(level, key=lambda c: (-candidates[c][2], c))[:top_k]
        best = sorted(range(len(candidates)), key=lambda c: (-candidates[c][2], c))[:nodes]
        row = {-1: 0} | {candidate: place + 1 for place, candidate in enumerate(best)}
        return ReferenceTree(
            [candidates[c][0] for c in best],
            [row[candidates[c][1]] for c in best],
            [candidates[c][2] for c in best],
        )

    def _children(self, feature: Tensor, count: int) -> list[tuple[int, float]]:
        mapped = self.directory / "token_map.json"
        ids = json.loads(mapped.read_text()) if mapped.exists() else range(len(self.lm_head))
        log_probs = torch.log_softmax(self.lm_head[list(ids)] @ feature, -1).tolist()
        order = sorted(range(len(log_probs)), key=lambda i: -log_probs[i])[:count]
        return [(ids[i], log_probs[i]) for i in order]

    def _last_feature(self, pairs: list[tuple[int, Tensor]]) -> Tensor:
        config, w = self._published()
        x = torch.stack([torch.cat((self.embedding[t], f)) for t, f in pairs])
        x = x @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
        return _through_layer(w, "layers.0.", config, x, residual=x)[-1]

    def _published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = json.loads((self.directory / "config.json").read_text())
        stored = load_file(self.directory / "model.safetensors")
        return config, {name: tensor.float() for name, tensor in stored.items()}


@dataclass(frozen=True)
class Eagle3Reference(ReferenceDrafter):
    """The same with the head of EAGLE-3, whose three features are fused before anything else."""

    def tree(
        self, tokens: list[int], features: Tensor, nodes: int, top_k: int, depth: int
    ) -> ReferenceTree:
        _, w = self._published()
        return super().tree(tokens, features @ w["fc.weight"].T, nodes, top_k, depth)

    def _children(self, feature: Tensor, count: int) -> list[tuple[int, float]]:
        config, w = self._published()
        normed = _normed(feature, w["norm.weight"], config["rms_norm_eps"])
        log_probs = torch.log_softmax(w["lm_head.weight"] @ normed, -1).tolist()
        order = sorted(range(len(log_probs)), key=lambda i: -log_probs[i])[:count]
        return [(i + int(w["d2t"][i]), log_probs[i]) for i in order]

    def _last_feature(self, pairs: list[tuple[int, Tensor]]) -> Tensor:
        config, w = self._published()
        eps = config["rms_norm_eps"]
        embedded = self.embedding[[token for token, _ in pairs]]
        features = torch.stack([feature for _, feature in pairs])
        x = torch.cat(
            (
                _normed(embedded, w["midlayer.input_layernorm.weight"], eps),
                _normed(features, w["midlayer.hidden_norm.weight"], eps),
            ),
            -1,
        )
        return _through_layer(w, "midlayer.", config, x, residual=features)[-1]


def _through_layer(
    w: dict[str, Tensor], prefix: str, config: dict[str, Any], x: Tensor, residual: Tensor
) -> Tensor:
    """A decoder layer whose attention reads x [n, in] and adds to `residual` [n, hidden]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config.get("rope_parameters", config)["rope_theta"]
    attention = f"{prefix}self_attn."
    q, k, v = (x @ w[f"{attention}{name}_proj.weight"].T for name in "qkv")
    q, k = (_rotated(part, n, theta) for part, n in ((q, heads), (k, kv_heads)))
    v = v.view(len(x), kv_heads, -1)
    causal = torch.ones(len(x), len(x)).tril() == 0
    mixed: list[Tensor] = []
    for head in range(heads):
        mine = head * kv_heads // heads
        scores = q[:, head] @ k[:, mine].T / math.sqrt(q.shape[-1])
        mixed.append(scores.masked_fill(causal, -math.inf).softmax(-1) @ v[:, mine])
    x = residual + torch.cat(mixed, -1) @ w[f"{attention}o_proj.weight"].T
    y = _normed(x, w[f"{prefix}post_attention_layernorm.weight"], config["rms_norm_eps"])
    gate, up = (y @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate * gate.sigmoid() * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x: Tensor, heads: int, theta: float) -> Tensor:
    """[n, heads * d] -> [n, heads, d], each pair (i, i + d / 2) turned as a complex number."""
    x = x.view(len(x), heads, -1)
    half = x.shape[-1] // 2
    exponents = torch.arange(half) / half
    angles = torch.arange(len(x))[:, None] * theta**-exponents
    turned = (
        torch.complex(x[..., :half], x[..., half:])
        * torch.polar(torch.ones(()), angles.float())[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


@dataclass(frozen=True)
class TinyHead:
    head: DraftHead
    reference: ReferenceDrafter
    config: DecoderConfig


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def layer_shapes(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (32, inputs),
        f"{prefix}self_attn.k_proj.weight": (16, inputs),
        f"{prefix}self_attn.v_proj.weight": (16, inputs),
        f"{prefix}self_attn.o_proj.weight": (32, 32),
        f"{prefix}mlp.gate_proj.weight": (48, 32),
        f"{prefix}mlp.up_proj.weight": (48, 32),
        f"{prefix}mlp.down_proj.weight": (32, 48),
        f"{prefix}post_attention_layernorm.weight": (32,),
    }


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=noise) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def write_tiny_head(
    directory: Path, seed: int = 0, token_map: list[int] | None = None, **changes: object
) -> Path:
    """A random EAGLE-2 head of 32 dimensions over 60 tokens in the published format."""
    config = CONFIG | {"bias": True} | changes
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 64)}
    shapes |= {"fc.bias": (32,)} if config["bias"] else {}
    weights = random_weights(shapes | layer_shapes("layers.0.", 32), seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    if token_map is not None:
        (directory / "token_map.json").write_text(json.dumps(token_map))
    return directory


def write_tiny_eagle3_head(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A random EAGLE-3 head of 32 dimensions that drafts every third of 60 tokens."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 96), "lm_head.weight": (20, 32)}
    shapes |= {"norm.weight": (32,)} | layer_shapes("midlayer.", 64)
    shapes |= {f"midlayer.{name}.weight": (32,) for name in ("hidden_norm", "input_layernorm")}
    weights = random_weights(shapes, seed)
    for name in weights:
        if "norm" in name:
            weights[name] += 1.0
    drafted = torch.arange(20)
    weights["lm_head.weight"] *= 3.0
    maps = {"d2t": 2 * drafted + 1, "t2d": torch.arange(60) % 3 == 1}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights | maps, directory / "model.safetensors")
    config = CONFIG | {"draft_vocab_size": 20} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def tiny_target() -> DecoderConfig:
    return DecoderConfig(
        "llama", 60, 32, 48, 6, 4, 2, 8, rms_norm_eps=1e-5, rope=RopeConfig(), max_context=4096
    )


def tiny_head(directory: Path, seed: int, reference: type[ReferenceDrafter]) -> TinyHead:
    """The head in `directory` beside the tables of a random target."""
    noise = torch.Generator().manual_seed(seed + 1000)
    embedding = torch.randn(60, 32, generator=noise)
    lm_head = torch.randn(60, 32, generator=noise) * 0.4
    config, cpu = tiny_target(), torch.device("cpu")
    head = load_head(directory, config, embedding, lm_head, torch.float32, cpu)
    return TinyHead(head, reference(directory, embedding, lm_head), config)


@pytest.fixture
def make_tiny_head(tmp_path: Path) -> Callable[..., TinyHead]:
    def make(seed: int = 0, token_map: list[int] | None = None, **changes: object) -> TinyHead:
        directory = write_tiny_head(tmp_path / f"head{seed}", seed, token_map, **changes)
        return tiny_head(directory, seed, ReferenceDrafter)

    return make


@pytest.fixture
def make_tiny_eagle3_head(tmp_path: Path) -> Callable[..., TinyHead]:
    def make(seed: int = 0, **changes: object) -> TinyHead:
        directory = write_tiny_eagle3_head(tmp_path / f"eagle3-{seed}", seed, **changes)
        return tiny_head(directory, seed, Eagle3Reference)

    return make
