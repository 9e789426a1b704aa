"""From a checkpoint directory to a decoder, and to the identity of what was loaded."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.checkpoint import Checkpoint, read_json
from coppice.models.config import DecoderConfig, token_ids
from coppice.models.decoder import Decoder, DecoderWeights, LayerWeights, layer_sizes
from coppice.models.rope import rotary_table
from coppice.models.sharding import Part, Shard, Span, whole
from kernels import ops

# In a config.json, but without a say in what the model computes.
CONFIG_NOTES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
SAMPLE_BYTES = 4096

# A tensor by its name and whole shape, or a part of it.
Read = Callable[[str, Sequence[int], Part | None], Tensor]


def load_target(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None = None,
    quantize: bool = False,
) -> Decoder:
    """The decoder in the checkpoint directory `path`, its weights in `dtype` on `device`, those of
    its matrix products in int8 with `quantize`.

    Raises StartError (one line) when something is missing, broken or not supported.
    """
    config = read_config(path, max_context)
    weights = load_weights(path, config, dtype, device, quantize)
    return Decoder(config, weights, rotary_table(config, device), quantize)


def load_weights(
    path: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantize: bool = False,
    shard: Shard | None = None,
) -> DecoderWeights:
    """The weights of the target in `path`, or of one rank's shard alone: then nothing else is
    read. Raises StartError as `load_target` does."""
    shard = shard or whole(config)
    checkpoint = Checkpoint.open(path)
    names: set[str] = set()

    def read(name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        names.add(name)
        return checkpoint.tensor(name, shape, dtype, device, part)

    first = _layer(read, config, 0, shard, quantize)
    _refuse_unknown_tensors(checkpoint, names, config, path)
    vocabulary = (config.vocab_size, config.hidden_size)
    rows = Part(0, shard.vocabulary)
    embedding = read("model.embed_tokens.weight", vocabulary, rows)
    others = range(1, config.layers)
    return DecoderWeights(
        embedding=embedding,
        layers=(first, *(_layer(read, config, layer, shard, quantize) for layer in others)),
        norm=read("model.norm.weight", (config.hidden_size,)),
        lm_head=embedding
        if config.tied_embeddings
        else ops.pack(read("lm_head.weight", vocabulary, rows), quantize),
    )


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


def read_config(path: Path, max_context: int | None = None) -> DecoderConfig:
    """The shape of the model in `path`. The ids that end a text are `generation_config.json`'s
    where it has any, as in transformers: chat models list more of them there."""
    config = DecoderConfig.from_hf(read_json(path / "config.json"), max_context)
    if (path / "generation_config.json").exists():
        eos = token_ids(read_json(path / "generation_config.json").get("eos_token_id"))
        config = replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def target_hash(path: Path) -> str:
    """Identity (sha256, hex) of the config and the weights in `path`.

    It is compared at every start and every Hello, so it must not read tens of gigabytes: of each
    tensor it takes name, dtype, shape and three blocks of bytes (start, middle, end). Training
    changes all of a tensor, so another fine-tune is another hash; it is no protection against
    someone who alters single weights on purpose. How the tensors are spread over shards has no
    influence.
    """
    config = {k: v for k, v in read_json(path / "config.json").items() if k not in CONFIG_NOTES}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    checkpoint = Checkpoint.open(path)
    for name in sorted(checkpoint.shards):
        _hash_tensor(digest.update, checkpoint.shards[name], name)
    return digest.hexdigest()


def _hash_tensor(update: Callable[[bytes], None], path: Path, name: str) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        update(f"{name} {entry['dtype']} {entry['shape']} ".encode())
        for offset in (start, (start + end) // 2, max(start, end - SAMPLE_BYTES)):
            file.seek(offset)
            update(file.read(min(SAMPLE_BYTES, end - offset)))


@dataclass(frozen=True, slots=True)
class _Projection:
    """A linear operation of a layer, and the outputs of it that are wanted."""

    name: str
    outputs: int
    wanted: Span


@dataclass(frozen=True, slots=True)
class _LayerReader:
    read: Read
    prefix: str
    hidden: int

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        return self.read(f"{self.prefix}.{name}.weight", shape, part)

    def fused(self, parts: Sequence[_Projection]) -> Tensor:
        return torch.cat(
            [self.weight(p.name, (p.outputs, self.hidden), Part(0, p.wanted)) for p in parts]
        )

    def bias(self, present: bool, parts: Sequence[_Projection]) -> Tensor | None:
        if not present:
            return None
        return torch.cat(
            [
                self.read(f"{self.prefix}.{p.name}.bias", (p.outputs,), Part(0, p.wanted))
                for p in parts
            ]
        )


def _layer(
    read: Read, config: DecoderConfig, layer: int, shard: Shard, quantize: bool = False
) -> LayerWeights:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.heads * dim, config.kv_heads * dim
    heads, kv_heads, mlp = shard.heads.times(dim), shard.kv_heads.times(dim), shard.inner
    qkv = (
        _Projection("self_attn.q_proj", q_size, heads),
        _Projection("self_attn.k_proj", kv_size, kv_heads),
        _Projection("self_attn.v_proj", kv_size, kv_heads),
    )
    gate_up = (_Projection("mlp.gate_proj", inner, mlp), _Projection("mlp.up_proj", inner, mlp))
    o = _Projection("self_attn.o_proj", hidden, Span(0, hidden))
    down = _Projection("mlp.down_proj", hidden, Span(0, hidden))
    stored = _LayerReader(read, f"model.layers.{layer}", hidden)
    weights = LayerWeights(
        input_norm=stored.weight("input_layernorm", (hidden,)),
        qkv=stored.fused(qkv),
        qkv_bias=stored.bias(config.attention_bias, qkv),
        q_norm=stored.weight("self_attn.q_norm", (dim,)) if config.qk_norm else None,
        k_norm=stored.weight("self_attn.k_norm", (dim,)) if config.qk_norm else None,
        o=stored.weight(o.name, (hidden, q_size), Part(1, heads)),
        o_bias=stored.bias(config.output_bias, (o,)),
        post_norm=stored.weight("post_attention_layernorm", (hidden,)),
        gate_up=stored.fused(gate_up),
        gate_up_bias=stored.bias(config.mlp_bias, gate_up),
        down=stored.weight(down.name, (hidden, inner), Part(1, mlp)),
        down_bias=stored.bias(config.mlp_bias, (down,)),
    )
    # Here, so that no more than one layer is ever there twice.
    return ops.pack_layer(weights, layer_sizes(shard.layers_of(config)), quantize)


def _refuse_unknown_tensors(
    checkpoint: Checkpoint, first_layer: set[str], config: DecoderConfig, path: Path
) -> None:
    """A tensor that would be left out silently makes another model of it. `first_layer` are the
    names that a layer is read from."""
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(config.layers):
        known |= {name.replace(".layers.0.", f".layers.{layer}.") for name in first_layer}
    for name in sorted(checkpoint.shards):
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise StartError(
                f"{path}: tensor {name} has no place in a {config.model_type} of "
                f"{config.layers} layers as its config.json describes it"
            )
