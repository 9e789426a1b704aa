"""From the directory of a published head to the head, for one target.

The kind is recognized: EAGLE-3 norms its feature (`hidden_norm`), EAGLE-1/2 does not. All layouts
are loaded as they are published; `stored.py`, `published.py` and `token_map.py` describe them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from coppice.errors import StartError
from coppice.models.config import DecoderConfig
from coppice.models.decoder import layer_sizes
from coppice.models.heads.head import DraftHead, Eagle3Head, EagleHead
from coppice.models.heads.layer import LAYER, read_layer
from coppice.models.heads.published import (
    VECTORS,
    HeadConfig,
    read_head_config,
    usual_feature_layers,
)
from coppice.models.heads.stored import MEND, StoredHead
from coppice.models.heads.token_map import read_token_map
from coppice.models.rope import rotary_table
from kernels import ops
from kernels.packed import Weight

SHIPPED_HEAD = "data/eagle2-smollm2-135m"
FEATURE_NORM = f"{LAYER}.hidden_norm.weight"
# A copy in another half-precision type than the target's was rounded, and is a copy all the same.
COPY_RTOL, COPY_ATOL = 2.0**-7, 2.0**-24


def shipped_head() -> Path:
    """The head that comes with the package, for the default model."""
    return Path(str(files("coppice") / SHIPPED_HEAD))


def feature_layers(path: Path, target: DecoderConfig) -> tuple[int, ...]:
    """The target's layers whose inputs the head in the directory `path` reads; none: it reads the
    final feature. Raises StartError when it can't be read, or the target has no such layers."""
    return _feature_layers(read_head_config(path), StoredHead.open(path), target)


def load_head(
    path: Path,
    target: DecoderConfig,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    quantize: bool = False,
) -> DraftHead:
    """The head in the directory `path`, its matrix products in int8 with `quantize`, for a target
    with `embedding` and `lm_head` [vocab, hidden]. Raises StartError (one line) that names both
    sides of a misfit."""
    published, stored = read_head_config(path), StoredHead.open(path)
    layers = _feature_layers(published, stored, target)
    _check_fit(path, published, target, eagle3=bool(layers))
    source = _Source(published, stored, embedding, lm_head, dtype, device, quantize)
    head = _eagle3(source, layers) if layers else _eagle(source)
    stored.refuse_unread("an EAGLE-3 head" if layers else "an EAGLE-1/2 head")
    return head


@dataclass(frozen=True, slots=True)
class _Source:
    """A head while it is loaded."""

    published: HeadConfig
    stored: StoredHead
    target_embedding: Tensor  # [vocab, target_hidden]
    target_lm_head: Tensor  # [vocab, target_hidden]
    dtype: torch.dtype
    device: torch.device
    quantize: bool

    @property
    def identity(self) -> str:
        return f"{self.stored.path.resolve().name}@{self.stored.digest()[:12]}"

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.stored.read(name, shape, self.dtype, self.device)

    def norm(self, name: str) -> Tensor:
        return self.read(f"{name}.weight", (self.published.decoder.hidden_size,))

    def embedding(self) -> Tensor:
        """[vocab, hidden]: the head's own, or the target's."""
        theirs = self._own(self.target_embedding)
        wanted = (self.published.decoder.vocab_size, self.published.decoder.hidden_size)
        if "embed_tokens.weight" not in self.stored and theirs.shape == wanted:
            return theirs
        return _own_or_copied(self.read("embed_tokens.weight", wanted), theirs)

    def token_map(self) -> Tensor | None:
        """[draft_vocab]; of the size that the config says, if it says one."""
        vocab_size, said = self.published.decoder.vocab_size, self.published.draft_vocab_size
        token_map = read_token_map(self.stored, vocab_size, self.device)
        size = vocab_size if token_map is None else len(token_map)
        if said not in (None, size):
            raise StartError(
                f"head {self.stored.path}: draft_vocab_size is {said}, its token map leads to "
                f"{size} of the target's {vocab_size} tokens"
            )
        return token_map

    def lm_head(self, token_map: Tensor | None, borrowed: bool) -> Tensor:
        """[draft_vocab, hidden], packed later: the head's own, stored for its draft vocabulary or
        for all tokens, else the target's if it may be `borrowed`."""
        vocab_size, hidden = self.published.decoder.vocab_size, self.published.decoder.hidden_size
        full = self._own(self.target_lm_head)  # [vocab, hidden]
        if "lm_head.weight" in self.stored or not borrowed:
            rows = self.stored.rows("lm_head.weight")
            drafted = vocab_size if token_map is None else len(token_map)
            if rows not in (drafted, vocab_size):
                raise StartError(
                    f"head {self.stored.path}: lm_head.weight has {rows} rows, the draft "
                    f"vocabulary {drafted} tokens, the target's {vocab_size}"
                )
            own = self.read("lm_head.weight", (rows, hidden))
            if token_map is not None and rows == drafted:
                return own
            full = _own_or_copied(own, full)
        return full if token_map is None else full[token_map]

    def pack(self, weight: Weight) -> Weight:
        return ops.pack(weight, self.quantize)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)


def _feature_layers(
    published: HeadConfig, stored: StoredHead, target: DecoderConfig
) -> tuple[int, ...]:
    if FEATURE_NORM not in stored:
        return ()
    last = target.layers
    layers = published.feature_layers or usual_feature_layers(target)
    if len(layers) != VECTORS or not all(0 <= layer <= last for layer in layers):
        raise StartError(
            f"head {stored.path} reads the inputs of layers {list(layers)}, the target has {last} "
            f"layers: expected {VECTORS} of them: {MEND}"
        )
    return layers


def _check_fit(path: Path, head: HeadConfig, target: DecoderConfig, eagle3: bool) -> None:
    """An EAGLE-1/2 head predicts what it reads, so its own size is the target's."""
    pairs = (
        ("hidden_size", head.decoder.hidden_size, target.hidden_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
        ("vocab_size", head.decoder.vocab_size, target.vocab_size),
    )
    own_size_is_free = eagle3 and head.target_hidden_size != head.decoder.hidden_size
    for field, mine, theirs in pairs[1:] if own_size_is_free else pairs:
        if mine != theirs:
            raise StartError(f"head {path}: {field} is {mine}, the target's is {theirs}: {MEND}")


def _eagle(source: _Source) -> EagleHead:
    config, hidden = source.published.decoder, source.published.decoder.hidden_size
    has_bias = source.published.fc_bias or "fc.bias" in source.stored
    embedding, token_map = source.embedding(), source.token_map()
    layer = read_layer(source.read, source.stored.__contains__, config, hidden)
    return EagleHead(
        identity=source.identity,
        config=config,
        target_hidden_size=hidden,
        feature_layers=(),
        embedding=embedding,
        lm_head=source.pack(source.lm_head(token_map, borrowed=True)),
        token_map=token_map,
        fc=source.pack(source.read("fc.weight", (hidden, 2 * hidden))),
        layer=ops.pack_layer(layer, layer_sizes(config), source.quantize),
        rotary=rotary_table(config, source.device),
        fc_bias=source.read("fc.bias", (hidden,)) if has_bias else None,
    )


def _eagle3(source: _Source, layers: tuple[int, ...]) -> Eagle3Head:
    config, hidden = source.published.decoder, source.published.decoder.hidden_size
    target_hidden = source.published.target_hidden_size
    embedding, token_map = source.embedding(), source.token_map()
    layer = read_layer(source.read, source.stored.__contains__, config, 2 * hidden)
    return Eagle3Head(
        identity=source.identity,
        config=config,
        target_hidden_size=target_hidden,
        feature_layers=layers,
        embedding=embedding,
        lm_head=source.pack(source.lm_head(token_map, borrowed=False)),
        token_map=token_map,
        fc=source.pack(source.read("fc.weight", (hidden, len(layers) * target_hidden))),
        # No plan for the whole: its q, k and v read more than what the layer adds to.
        layer=replace(
            layer,
            qkv=source.pack(layer.qkv),
            o=source.pack(layer.o),
            gate_up=source.pack(layer.gate_up),
            down=source.pack(layer.down),
        ),
        rotary=rotary_table(config, source.device),
        embedding_norm=source.norm(f"{LAYER}.input_layernorm"),
        feature_norm=source.norm(f"{LAYER}.hidden_norm"),
        output_norm=source.norm("norm"),
        residual_is_normed=source.published.residual_is_normed,
    )


def _own_or_copied(own: Tensor, theirs: Tensor) -> Tensor:
    """A head's own table; the target's where it is but a copy of that, so as to be there once."""
    if own.shape == theirs.shape and torch.allclose(own, theirs, COPY_RTOL, COPY_ATOL):
        return theirs
    return own
