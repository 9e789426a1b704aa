"""Medusa heads in the published format (Cai et al. 2024, arXiv 2401.10774).

Head i reads the target's final feature at one position t and predicts token t + 2 + i; what comes
next, token t + 1, is the target's own word. Each is a few residual blocks and an LM head.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from coppice.errors import StartError
from coppice.models.checkpoint import Checkpoint, read_json
from coppice.models.config import DecoderConfig
from coppice.models.heads.stored import MEND, StoredHead, unpickled
from kernels import ops
from kernels.packed import Weight

SAFE_FILE, PICKLE_FILE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHead:
    """x + silu(W x + b), once for each block, then the LM head."""

    blocks: tuple[tuple[Weight, Tensor], ...]  # [hidden, hidden] and [hidden]
    lm_head: Weight  # [vocab, hidden]

    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 of features [rows, hidden]."""
        for weight, bias in self.blocks:
            features = features + functional.silu(ops.linear(features, weight, bias))
        return ops.linear(features, self.lm_head, wide=True)


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    identity: str  # for logs and refusals
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    heads: tuple[MedusaHead, ...]

    def best_tokens(self, head: int, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens that a head predicts from features [rows, hidden]: ids and
        log-probabilities (fp32), both [rows, min(count, vocab)] and likeliest first."""
        logits = self.heads[head].logits(features)  # [rows, vocab]
        return ops.best_tokens(logits, min(count, self.vocab_size))


def load_medusa(
    path: Path,
    target: DecoderConfig,
    lm_head: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    quantize: bool = False,
) -> MedusaHeads:
    """The heads in the directory `path`, in int8 with `quantize`, for a target with `lm_head`
    [vocab, hidden], which serves each of them that stores none. Raises StartError (one line) that
    names both sides of a misfit."""
    blocks, least = _shape(path)
    stored = _open(path)
    count = 0
    while f"{count}.0.linear.weight" in stored:
        count += 1
    # More than it says are no misfit: published configs say 2 beside a file of 5.
    if count < least:
        raise StartError(
            f"head {path}: medusa_num_heads is {least}, the file holds {count}: {MEND}"
        )
    read = partial(stored.read, dtype=dtype, device=device)
    pack = partial(ops.pack, quantize=quantize)
    hidden, shared = target.hidden_size, pack(lm_head.to(device=device, dtype=dtype))

    def block(head: int, index: int) -> tuple[Weight, Tensor]:
        name = f"{head}.{index}.linear"
        weight = read(f"{name}.weight", (hidden, hidden))
        return pack(weight), read(f"{name}.bias", (hidden,))

    def words(head: int) -> Weight:
        name = f"{head}.{blocks}.weight"
        return pack(read(name, (target.vocab_size, hidden))) if name in stored else shared

    heads = tuple(
        MedusaHead(tuple(block(head, index) for index in range(blocks)), words(head))
        for head in range(count)
    )
    stored.refuse_unread(f"{count} Medusa heads of {blocks} blocks")
    identity = f"{path.resolve().name}@{stored.digest()[:12]}"
    return MedusaHeads(identity, hidden, target.vocab_size, dtype, device, heads)


def _shape(path: Path) -> tuple[int, int]:
    """Blocks of a head, and how many heads there are at least."""
    config = read_json(path / "config.json")
    blocks, heads = config.get("medusa_num_layers", 1), config.get("medusa_num_heads")
    if type(blocks) is not int or blocks < 1 or type(heads) is not int or heads < 1:
        raise StartError(
            f"{path / 'config.json'}: medusa_num_heads is {heads!r} and medusa_num_layers "
            f"{blocks!r}, expected numbers from 1 on: {MEND}"
        )
    return blocks, heads


def _open(path: Path) -> StoredHead:
    safe, pickled = path / SAFE_FILE, path / PICKLE_FILE
    if safe.exists():
        checkpoint = Checkpoint.of_file(safe)
        return StoredHead(path, sorted(checkpoint.shards), checkpoint.raw, [safe])
    if not pickled.exists():
        raise StartError(f"head {path} has no weights: neither {SAFE_FILE} nor {PICKLE_FILE}")
    content = unpickled(pickled)
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise StartError(f"{pickled} holds something else than named tensors")
    tensors: dict[str, Tensor] = content
    return StoredHead(path, sorted(tensors), tensors.__getitem__, [pickled])
