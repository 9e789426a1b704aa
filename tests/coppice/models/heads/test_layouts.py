"""Every published layout computes what was published, through our KV cache."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.heads.head import DraftHead
from coppice.models.heads.loading import feature_layers, load_head
from kernels import ops
from kernels.batch import AttentionBatch, KVCache, Segment
from kernels.packed import PackedWeight

CPU = torch.device("cpu")
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 40, 16, 24, 4, 2, 4
DRAFTED = (1, 2, 5, 11, 12, 13, 20, 31, 38)
NOISE = torch.Generator().manual_seed(7)
# fp32 sums in another order over at most 48 values of about 1: a few hundred roundings of 2^-24.
BOUND = 2e-5

TARGET = DecoderConfig(
    "llama", VOCAB, HIDDEN, 32, 6, HEADS, KV_HEADS, DIM, 1e-5, RopeConfig(), max_context=256
)
CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NOISE) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)


EMBEDDING, LM_HEAD = draw(VOCAB, HIDDEN) * 4, draw(VOCAB, HIDDEN) * 4


def layer(hidden: int, inputs: int) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": draw(HEADS * DIM, inputs),
        "self_attn.k_proj.weight": draw(KV_HEADS * DIM, inputs),
        "self_attn.v_proj.weight": draw(KV_HEADS * DIM, inputs),
        "self_attn.o_proj.weight": draw(hidden, HEADS * DIM),
        "mlp.gate_proj.weight": draw(INNER, hidden),
        "mlp.up_proj.weight": draw(INNER, hidden),
        "mlp.down_proj.weight": draw(hidden, INNER),
        "post_attention_layernorm.weight": draw(hidden),
    }


def eagle(**more: Tensor) -> dict[str, Tensor]:
    named = {name.replace("__", "."): tensor for name, tensor in more.items()}
    return layer(HIDDEN, HIDDEN) | {"fc.weight": draw(HIDDEN, 2 * HIDDEN)} | named


def eagle3(drafted: int, hidden: int = HIDDEN, **more: Tensor) -> dict[str, Tensor]:
    named = {name.replace("__", "."): tensor for name, tensor in more.items()}
    fused = {
        "fc.weight": draw(hidden, 3 * HIDDEN),
        "hidden_norm.weight": draw(hidden),
        "input_layernorm.weight": draw(hidden),
        "norm.weight": draw(hidden),
        "lm_head.weight": draw(drafted, hidden) * 2,
    }
    return layer(hidden, 2 * hidden) | fused | named


def maps() -> dict[str, Tensor]:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[list(DRAFTED)] = True
    return {"d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED)), "t2d": mask}


@dataclass(frozen=True)
class Layout:
    tensors: Mapping[str, Tensor]  # the layer's without prefix
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    beside: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    file: str = "model.safetensors"
    drafted: Sequence[int] | None = None
    token_map: str = ""  # name of a file
    layers: tuple[int, ...] = ()

    def write(self, path: Path) -> Path:
        of_layer = layer(1, 1).keys() | {"hidden_norm.weight", "input_layernorm.weight"}
        biases = {name.replace("weight", "bias") for name in of_layer}
        norms = {f"self_attn.{part}_norm.weight" for part in "qk"}
        stored = {
            f"{self.prefix}.{name}" if name in of_layer | biases | norms else self._spelt(name): t
            for name, t in self.tensors.items()
        } | dict(self.beside)
        stored = {name: tensor.clone() for name, tensor in stored.items()}
        if self.file.endswith(".bin"):
            torch.save(stored, path / self.file)
        else:
            save_file(stored, path / self.file)
        (path / "config.json").write_text(json.dumps(dict(self.config)))
        if self.token_map.endswith(".json"):
            (path / self.token_map).write_text(json.dumps(self.drafted))
        elif self.token_map:
            ids = list(DRAFTED) if "list" in self.token_map else torch.tensor(DRAFTED)
            torch.save(ids, path / self.token_map.replace("list", ""))
        return path

    def _spelt(self, name: str) -> str:
        return name.replace("fc.", "fusion_fc.") if self.prefix == "transformer" else name


def speculators(kind: str, **more: object) -> dict[str, object]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
        "speculators_version": "0.5.0",
        "transformer_layer_config": dict(CONFIG),
        "tie_word_embeddings": False,
    } | more


SHORT = {"draft_vocab_size": len(DRAFTED)}
LAYOUTS = {
    "EAGLE": Layout(eagle(fc__bias=draw(HIDDEN)), "layers.0", CONFIG),
    "EAGLE, pickled, without fc.bias": Layout(
        eagle(), "layers.0", CONFIG | {"bias": False}, file="pytorch_model.bin"
    ),
    "EAGLE, midlayer, biases of q, k and v": Layout(
        eagle(
            self_attn__q_proj__bias=draw(HEADS * DIM),
            self_attn__k_proj__bias=draw(KV_HEADS * DIM),
            self_attn__v_proj__bias=draw(KV_HEADS * DIM),
        ),
        "midlayer",
        CONFIG | {"bias": False, "model_type": "qwen2"},
    ),
    "EAGLE, own tables": Layout(
        eagle(embed_tokens__weight=draw(VOCAB, HIDDEN) * 4, lm_head__weight=draw(VOCAB, HIDDEN)),
        "layers.0",
        CONFIG | {"bias": False},
    ),
    "EAGLE, copies of the target's tables": Layout(
        eagle(embed_tokens__weight=EMBEDDING, lm_head__weight=LM_HEAD),
        "layers.0",
        CONFIG | {"bias": False},
    ),
    "EAGLE, own LM head of a draft vocabulary": Layout(
        eagle(lm_head__weight=draw(len(DRAFTED), HIDDEN)),
        "layers.0",
        CONFIG | {"bias": False},
        beside=maps(),
        drafted=DRAFTED,
    ),
    "EAGLE, speculators": Layout(
        eagle(fc__bias=draw(HIDDEN)),
        "transformer",
        speculators("eagle", fusion_bias=True, layernorms=False),
    ),
    "EAGLE-3": Layout(
        eagle3(len(DRAFTED)), "midlayer", CONFIG | SHORT, maps(), drafted=DRAFTED, layers=(2, 3, 3)
    ),
    "EAGLE-3, pickled": Layout(
        eagle3(len(DRAFTED)),
        "midlayer",
        CONFIG | SHORT,
        maps(),
        "pytorch_model.bin",
        DRAFTED,
        layers=(2, 3, 3),
    ),
    "EAGLE-3, layers.0, whole vocabulary, own embedding": Layout(
        eagle3(VOCAB, embed_tokens__weight=draw(VOCAB, HIDDEN) * 4),
        "layers.0",
        CONFIG | {"draft_vocab_size": VOCAB},
        layers=(2, 3, 3),
    ),
    "EAGLE-3, whole vocabulary, maps to itself": Layout(
        eagle3(VOCAB),
        "midlayer",
        CONFIG | {"draft_vocab_size": VOCAB},
        {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB).bool()},
        layers=(2, 3, 3),
    ),
    "EAGLE-3, smaller than the target": Layout(
        eagle3(len(DRAFTED), 12, embed_tokens__weight=draw(VOCAB, 12) * 3),
        "midlayer",
        CONFIG | SHORT | {"hidden_size": 12, "target_hidden_size": HIDDEN},
        maps(),
        drafted=DRAFTED,
        layers=(2, 3, 3),
    ),
    "EAGLE-3, layers after which to read": Layout(
        eagle3(len(DRAFTED)),
        "midlayer",
        CONFIG | SHORT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
        maps(),
        drafted=DRAFTED,
        layers=(1, 4, 6),
    ),
    "EAGLE-3, norms of q and k": Layout(
        eagle3(
            len(DRAFTED), self_attn__q_norm__weight=draw(DIM), self_attn__k_norm__weight=draw(DIM)
        ),
        "midlayer",
        CONFIG | SHORT | {"model_type": "qwen3"},
        maps(),
        drafted=DRAFTED,
        layers=(2, 3, 3),
    ),
    "EAGLE-3, speculators": Layout(
        eagle3(len(DRAFTED), embed_tokens__weight=EMBEDDING),
        "layers.0",
        speculators(
            "eagle3",
            norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[1, 0, 5],
            target_hidden_size=None,
            **SHORT,
        ),
        maps(),
        drafted=DRAFTED,
        layers=(1, 0, 5),
    ),
} | {
    f"EAGLE, {name}": Layout(
        eagle(), "layers.0", CONFIG | {"bias": False}, token_map=name, drafted=DRAFTED
    )
    for name in ("token_map.json", "token_map.pt", "freq_9.json", "freq_9.pt", "freq_9list.pt")
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


class Cached:
    """Our head over slots in disorder, some rows at a time."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))
        self.cache: KVCache = head.new_cache(48)
        self.rows = 0

    def run(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        start, stop = self.rows, self.rows + len(tokens)
        slots = self.slots[start:stop]
        segment = Segment(stop - start, self.slots[:start], slots, None)
        batch = AttentionBatch(slots, torch.arange(start, stop), (segment,))
        self.rows = stop
        return self.head.forward(torch.tensor(tokens), features, self.cache, batch)


def test_it_computes_what_was_published(layout: Layout, slow_head: Any, tmp_path: Path) -> None:
    head = load_head(layout.write(tmp_path), TARGET, EMBEDDING, LM_HEAD, torch.float32, CPU)
    assert head.feature_layers == layout.layers
    slow = slow_head(
        layout.tensors, HEADS, KV_HEADS, VOCAB,
        bool(layout.config.get("norm_before_residual")), layout.drafted,
    )  # fmt: skip
    width = HIDDEN * max(1, len(layout.layers))
    given = torch.randn(11, width, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(2)).tolist()
    cached = Cached(head)
    reduced, wanted = head.reduce(given), slow.reduced(given)
    found = torch.cat((cached.run(tokens[:7], reduced[:7]), cached.run(tokens[7:], reduced[7:])))
    for _ in range(5):
        predicted = slow.features(EMBEDDING, tokens, wanted)
        assert torch.allclose(found, predicted[-len(found) :], rtol=BOUND, atol=BOUND)
        logits = slow.logits(LM_HEAD, predicted[-1:])
        best, log_probs = head.best_tokens(found[-1:], 4)
        assert torch.equal(best, logits.topk(4).indices)
        assert torch.allclose(log_probs, logits.log_softmax(-1).topk(4).values, atol=1e-4)
        tokens.append(int(best[0, 0]))
        wanted = torch.cat((wanted, predicted[-1:]))
        found = cached.run(tokens[-1:], found[-1:])


@pytest.mark.skipif(not ops.native_backends(), reason="the native library is not built")
def test_in_int8_all_of_its_products_are_what_was_published(layout: Layout, tmp_path: Path) -> None:
    path = layout.write(tmp_path)
    plain = load_head(path, TARGET, EMBEDDING, LM_HEAD, torch.float32, CPU)
    small = load_head(path, TARGET, EMBEDDING, LM_HEAD, torch.float32, CPU, quantize=True)
    for name in ("fc", "lm_head", "layer.qkv", "layer.o", "layer.gate_up", "layer.down"):
        published, packed = (attrgetter(name)(head) for head in (plain, small))
        assert isinstance(packed, PackedWeight)
        assert packed.dtype == torch.int8
        wide = published.dense()
        off = (packed.dense() - wide).abs()
        assert (off <= 0.501 * wide.abs().amax(1, keepdim=True) / 127).all()


def test_the_features_that_it_reads_are_told_without_loading_it(
    layout: Layout, tmp_path: Path
) -> None:
    assert feature_layers(layout.write(tmp_path), TARGET) == layout.layers


def test_a_copied_table_is_the_targets_own(tmp_path: Path) -> None:
    layout = LAYOUTS["EAGLE, copies of the target's tables"]
    embedding, lm_head = EMBEDDING.bfloat16(), LM_HEAD.bfloat16()
    head = load_head(layout.write(tmp_path), TARGET, embedding, lm_head, torch.bfloat16, CPU)
    assert head.embedding.data_ptr() == embedding.data_ptr()
