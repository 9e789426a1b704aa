"""Small random heads on disk, and a slow drafter that is obviously right."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.eagle_head import EagleHead, load_eagle_head

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
        config = json.loads((self.directory / "config.json").read_text())
        w = {k: v.float() for k, v in load_file(self.directory / "model.safetensors").items()}
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        theta = config["rope_parameters"]["rope_theta"]
        x = torch.stack([torch.cat((self.embedding[t], f)) for t, f in pairs])
        x = x @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
        attention = "layers.0.self_attn."
        q, k, v = (x @ w[f"{attention}{name}_proj.weight"].T for name in "qkv")
        q, k = (_rotated(part, n, theta) for part, n in ((q, heads), (k, kv_heads)))
        v = v.view(len(pairs), kv_heads, -1)
        causal = torch.ones(len(pairs), len(pairs)).tril() == 0
        mixed: list[Tensor] = []
        for head in range(heads):
            mine = head * kv_heads // heads
            scores = q[:, head] @ k[:, mine].T / math.sqrt(q.shape[-1])
            mixed.append(scores.masked_fill(causal, -math.inf).softmax(-1) @ v[:, mine])
        x = x + torch.cat(mixed, -1) @ w[f"{attention}o_proj.weight"].T
        norm = w["layers.0.post_attention_layernorm.weight"]
        y = x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * norm
        gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w["layers.0.mlp.down_proj.weight"].T
        return x[-1]


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
    head: EagleHead
    reference: ReferenceDrafter
    config: DecoderConfig


def write_tiny_head(
    directory: Path, seed: int = 0, token_map: list[int] | None = None, **changes: object
) -> Path:
    """A random head of 32 dimensions over 60 tokens in the published format."""
    config = {
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
        "bias": True,
    } | changes
    shapes = {
        "fc.weight": (32, 64),
        "fc.bias": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
        "layers.0.post_attention_layernorm.weight": (32,),
    }
    noise = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=noise) * shape[-1] ** -0.5
        for name, shape in shapes.items()
        if config["bias"] or name != "fc.bias"
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    if token_map is not None:
        (directory / "token_map.json").write_text(json.dumps(token_map))
    return directory


def tiny_target() -> DecoderConfig:
    return DecoderConfig(
        "llama", 60, 32, 48, 2, 4, 2, 8, rms_norm_eps=1e-5, rope=RopeConfig(), max_context=4096
    )


@pytest.fixture
def make_tiny_head(tmp_path: Path) -> Callable[..., TinyHead]:
    def make(seed: int = 0, token_map: list[int] | None = None, **changes: object) -> TinyHead:
        directory = write_tiny_head(tmp_path / f"head{seed}", seed, token_map, **changes)
        noise = torch.Generator().manual_seed(seed + 1000)
        embedding = torch.randn(60, 32, generator=noise)
        lm_head = torch.randn(60, 32, generator=noise) * 0.4
        config, cpu = tiny_target(), torch.device("cpu")
        head = load_eagle_head(directory, config, embedding, lm_head, torch.float32, cpu)
        return TinyHead(head, ReferenceDrafter(directory, embedding, lm_head), config)

    return make
