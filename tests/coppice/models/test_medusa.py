"""Loading of Medusa heads: what fits is taken, a misfit is refused with both sides named."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coppice.errors import StartError
from coppice.models.config import DecoderConfig, RopeConfig
from coppice.models.medusa import MedusaHeads, load_medusa
from kernels import ops

CPU = torch.device("cpu")
VOCAB, HIDDEN = 20, 8
TARGET = DecoderConfig(
    "llama", VOCAB, HIDDEN, 12, 2, 2, 1, 4, rms_norm_eps=1e-5, rope=RopeConfig(), max_context=64
)
LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def weights(heads: int, blocks: int = 1, seed: int = 0) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=noise)
            found[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=noise)
        found[f"{head}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=noise)
    return found


def write(
    path: Path, tensors: Mapping[str, Tensor], pickled: bool = False, **config: object
) -> Path:
    path.mkdir(exist_ok=True)
    if pickled:
        torch.save(dict(tensors), path / "medusa_lm_head.pt")
    else:
        save_file(dict(tensors), path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path, quantize: bool = False) -> MedusaHeads:
    return load_medusa(path, TARGET, LM_HEAD, torch.float32, CPU, quantize)


def expected(tensors: Mapping[str, Tensor], head: int, blocks: int, feature: Tensor) -> list[float]:
    """Log-probabilities [vocab] that a head gives one feature, in fp64."""
    x = feature.double()
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        y = tensors[f"{name}.weight"].double() @ x + tensors[f"{name}.bias"].double()
        x = x + y / (1 + torch.exp(-y))
    logits = tensors.get(f"{head}.{blocks}.weight", LM_HEAD).double() @ x
    return (logits - logits.exp().sum().log()).tolist()


def assert_computes(
    heads: MedusaHeads, tensors: Mapping[str, Tensor], count: int, blocks: int = 1
) -> None:
    features = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert len(heads.heads) == count
    for head in range(count):
        ids, log_probs = heads.best_tokens(head, features, 5)
        for row in range(3):
            wanted = expected(tensors, head, blocks, features[row])
            order = sorted(range(VOCAB), key=lambda token: -wanted[token])[:5]
            assert ids[row].tolist() == order
            assert log_probs[row].tolist() == pytest.approx([wanted[t] for t in order], abs=1e-4)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_published_heads_are_taken_as_they_are(tmp_path: Path, pickled: bool, blocks: int) -> None:
    tensors = weights(3, blocks)
    path = write(tmp_path, tensors, pickled, medusa_num_heads=3, medusa_num_layers=blocks)
    assert_computes(load(path), tensors, 3, blocks)


def test_a_config_that_says_fewer_heads_than_the_file_holds_loses_none(tmp_path: Path) -> None:
    """So it is in the first published ones: 2 beside 5."""
    tensors = weights(5)
    path = write(tmp_path, tensors, medusa_num_heads=2, medusa_num_layers=1)
    assert_computes(load(path), tensors, 5)


def test_a_head_without_words_of_its_own_speaks_with_the_targets(tmp_path: Path) -> None:
    tensors = weights(3)
    del tensors["1.1.weight"]
    heads = load(write(tmp_path, tensors, medusa_num_heads=3))
    assert_computes(heads, tensors, 3)


@pytest.mark.skipif(not ops.native_backends(), reason="the native library is not built")
@pytest.mark.parametrize("own", [True, False], ids=["own words", "the target's words"])
def test_in_int8_all_of_its_products_are(tmp_path: Path, own: bool) -> None:
    tensors = {n: t for n, t in weights(2).items() if own or not n.endswith(".1.weight")}
    heads = load(write(tmp_path, tensors, medusa_num_heads=2), quantize=True)
    for head in heads.heads:
        assert [weight.dtype for weight, _ in head.blocks] == [torch.int8]
        assert head.lm_head.dtype == torch.int8


def test_the_identity_tells_other_weights_apart(tmp_path: Path) -> None:
    one = load(write(tmp_path / "heads", weights(1, seed=1), medusa_num_heads=1)).identity
    other = load(write(tmp_path / "heads", weights(1, seed=2), medusa_num_heads=1)).identity
    assert one.startswith("heads@")
    assert one != other


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors = weights(2)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "heads", "said"),
    [
        (weights(2), 3, ("medusa_num_heads is 3", "file holds 2")),
        (changed("0.1.weight", torch.zeros(VOCAB + 4, HIDDEN)), 2, ("[24, 8]", "[20, 8]")),
        (changed("1.0.linear.weight", torch.zeros(4, 4)), 2, ("[4, 4]", "[8, 8]")),
        (changed("1.0.linear.bias", None), 2, ("1.0.linear.bias", "missing")),
        (changed("0.0.linear.bias", torch.full((8,), torch.nan)), 2, ("0.0.linear.bias", "NaN")),
        (changed("0.1.linear.weight", torch.zeros(8, 8)), 2, ("0.1.linear.weight", "no place")),
        (changed("attention.weight", torch.zeros(8, 8)), 2, ("attention.weight", "no place")),
    ],
)
def test_a_misfit_is_refused_with_both_sides_named(
    tmp_path: Path, tensors: dict[str, Tensor], heads: int, said: tuple[str, ...]
) -> None:
    path = write(tmp_path, tensors, medusa_num_heads=heads)
    with pytest.raises(StartError) as refused:
        load(path)
    assert str(path) in str(refused.value)
    assert all(part in str(refused.value) for part in said)


@pytest.mark.parametrize("config", [{}, {"medusa_num_heads": 0}, {"medusa_num_heads": "2"}])
def test_a_config_that_does_not_count_its_heads_is_refused(
    tmp_path: Path, config: dict[str, object]
) -> None:
    write(tmp_path, weights(2), **config)
    with pytest.raises(StartError, match="medusa_num_heads"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(StartError, match=r"medusa_lm_head\.safetensors nor medusa_lm_head\.pt"):
        load(tmp_path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    torch.save({"0.0.linear.weight": [1.0]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(StartError, match="something else"):
        load(tmp_path)
