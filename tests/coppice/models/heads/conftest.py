"""The forward pass of heads as it was published: fp32, dense and causal, without a cache."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

EPS, THETA = 1e-5, 500.0


@dataclass(frozen=True)
class SlowHead:
    """Computes from tensors whose names are those of the layouts, the layer's without prefix."""

    w: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    vocab: int
    normed_residual: bool
    drafted: Sequence[int] | None  # target ids of the draft vocabulary

    def reduced(self, features: Tensor) -> Tensor:
        return features @ self.w["fc.weight"].T if "hidden_norm.weight" in self.w else features

    def features(self, embedding: Tensor, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Predicted features [pairs, hidden] of pairs of tokens and features [pairs, hidden]."""
        w = self.w
        embedded = w.get("embed_tokens.weight", embedding)[list(tokens)]
        if "hidden_norm.weight" in w:
            normed = normalized(features, w["hidden_norm.weight"])
            x = torch.cat((normalized(embedded, w["input_layernorm.weight"]), normed), -1)
            residual = normed if self.normed_residual else features
        else:
            x = torch.cat((embedded, features), -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
            residual = x
        x = residual + self._attended(x)
        y = normalized(x, w["post_attention_layernorm.weight"])
        gate, up = (y @ w[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T

    def logits(self, lm_head: Tensor, features: Tensor) -> Tensor:
        """[rows, vocab], at -inf what is never drafted."""
        if "norm.weight" in self.w:
            features = normalized(features, self.w["norm.weight"])
        ids = list(range(self.vocab)) if self.drafted is None else list(self.drafted)
        head = self.w.get("lm_head.weight", lm_head)
        head = head[ids] if len(head) == self.vocab else head
        logits = torch.full((len(features), self.vocab), -math.inf)
        logits[:, ids] = features @ head.T
        return logits

    def _attended(self, x: Tensor) -> Tensor:
        w, rows = self.w, len(x)
        q, k, v = (
            x @ w[f"self_attn.{part}_proj.weight"].T + w.get(f"self_attn.{part}_proj.bias", 0.0)
            for part in "qkv"
        )
        q, k = q.view(rows, self.heads, -1), k.view(rows, self.kv_heads, -1)
        v = v.view(rows, self.kv_heads, -1)
        if "self_attn.q_norm.weight" in w:
            q = normalized(q, w["self_attn.q_norm.weight"])
            k = normalized(k, w["self_attn.k_norm.weight"])
        q, k = turned(q), turned(k)
        future = torch.ones(rows, rows).tril() == 0
        mixed: list[Tensor] = []
        for head in range(self.heads):
            mine = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, mine].T / math.sqrt(q.shape[-1])
            mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, mine])
        return torch.cat(mixed, -1) @ w["self_attn.o_proj.weight"].T


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """[rows, heads, d]: each pair (i, i + d / 2) turned as a complex number."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** -(torch.arange(half) / half)
    turn = torch.polar(torch.ones(()), angles.float())[:, None]
    rotated = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((rotated.real, rotated.imag), -1)


@pytest.fixture
def slow_head() -> type[SlowHead]:
    return SlowHead
