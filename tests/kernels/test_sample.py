"""Tokens drawn by the native library: those of the reference, and of an enumeration."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops, reference
from kernels.cpu.backend import CpuBackend

# Native and reference sum in another order and have another exp; both are right to within this
# share of a mass. Where a border is that near, either answer is the definition's.
SLACK = 1e-12
NEAR_ONE = 1.0 - 2.0**-53  # the largest number that a sampler's generator gives


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, backend: CpuBackend, logits: Tensor, uniforms: Tensor) -> Tensor:
        return backend.sample(
            logits, self.temperature, self.top_k, self.top_p, self.min_p, uniforms
        )

    def define(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return reference.sample(
            logits, self.temperature, self.top_k, self.top_p, self.min_p, uniforms
        )


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.05, 0.3, 0.8, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 300, 100_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.9, 0.5, 1e-3, 1e-300]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.3, 1.0]),
)
UNIFORMS = st.one_of(
    st.sampled_from([2.0**-53, 0.5, NEAR_ONE]),
    st.integers(0, 2**53 - 1).map(lambda raw: raw * 2.0**-53),
)
KINDS = st.sampled_from(["random", "tied", "peaked", "flat", "holes"])


def row_of(kind: str, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(size, generator=generator)
    if kind == "tied":
        x = x.round()
    if kind == "peaked":
        x[seed % size] += 40
    if kind == "flat":
        x = torch.full((size,), float(x[0]))
    if kind == "holes":
        x[torch.rand(size, generator=generator) < 0.5] = -torch.inf
        x[seed % size] = 1.0
    return x


def near(a: float, b: float) -> bool:
    return abs(a - b) <= SLACK * max(abs(a), abs(b))


def is_decided(row: Tensor, params: Params, number: float) -> bool:
    """False where a border lies within SLACK, so that rounding may decide either way."""
    logits, order = row.sort(descending=True, stable=True)
    ranked = (row.double() / params.temperature).softmax(-1)[order]
    if params.min_p:
        # The best one's equals are no border: they have exactly its mass.
        least = params.min_p * float(ranked[0])
        if any(near(float(mass), least) for mass in ranked[logits < logits[0]]):
            return False
        kept = ranked >= least
        ranked, logits = ranked[kept], logits[kept]
    if 0 < params.top_k < len(ranked):
        # Different logits with the same mass in fp64: natively the larger logit wins.
        k = params.top_k
        if logits[k - 1] != logits[k] and near(float(ranked[k - 1]), float(ranked[k])):
            return False
        ranked = ranked[:k]
    if params.top_p < 1.0:
        # The border of the definition is 1e-12 below the limit.
        reached = ranked.cumsum(0) / ranked.sum()
        if ((reached - (params.top_p - 1e-12)).abs() < SLACK / 2).any():
            return False
    _, mass = reference.distribution(
        row, params.temperature, params.top_k, params.top_p, params.min_p
    )
    borders = (mass.cumsum(0) / mass.sum())[:-1]
    return not bool(((borders - number).abs() <= SLACK * number).any())


def check(backend: CpuBackend, row: Tensor, params: Params, number: float) -> None:
    uniforms = torch.tensor([number], dtype=torch.float64)
    expected = params.define(row[None], uniforms)
    got = params.draw(backend, row[None], uniforms)
    if got.tolist() != expected.tolist():
        assume(is_decided(row, params, number))
    assert got.tolist() == expected.tolist()


@settings(max_examples=250, deadline=None)
@given(PARAMS, UNIFORMS, KINDS, st.integers(1, 3000), st.integers(0, 2**32))
def test_it_draws_what_the_reference_draws(
    backend: CpuBackend, params: Params, number: float, kind: str, size: int, seed: int
) -> None:
    check(backend, row_of(kind, size, seed), params, number)


@settings(max_examples=25, deadline=None)
@given(PARAMS, UNIFORMS, KINDS, st.integers(0, 2**32))
def test_it_draws_what_the_reference_draws_of_a_whole_vocabulary(
    backend: CpuBackend, params: Params, number: float, kind: str, seed: int
) -> None:
    check(backend, row_of(kind, 49152, seed), params, number)


def enumerated(logits: list[float], params: Params) -> list[tuple[int, float]]:
    """What may be drawn, by ascending id, and its share: by lists and loops alone."""
    weights = [math.exp(x / params.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    ranked = [i for i in ranked if weights[i] >= params.min_p * max(weights)]
    ranked = ranked[: params.top_k or None]
    limit = params.top_p * math.fsum(weights[i] for i in ranked)
    nucleus: list[int] = []
    for i in ranked:
        if params.top_p < 1.0 and math.fsum(weights[j] for j in nucleus) >= limit:
            break
        nucleus.append(i)
    total = math.fsum(weights[i] for i in nucleus)
    return [(i, weights[i] / total) for i in sorted(nucleus)]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (Params(), [0, 1, 2, 3, 4, 5, 6]),
        (Params(0.5), [0, 1, 2, 3, 4, 5, 6]),
        (Params(top_k=3), [1, 2, 4]),  # 4 and 6 are equal
        (Params(top_p=0.7), [1, 2, 4]),
        (Params(min_p=0.15), [0, 1, 2, 4, 6]),
        (Params(2.0, top_k=5, top_p=0.8, min_p=0.3), [1, 2, 4, 6]),
    ],
)
def test_every_id_has_exactly_its_part_of_the_unit_interval(
    backend: CpuBackend, params: Params, kept: list[int]
) -> None:
    logits = torch.tensor([0.3, 1.9, 1.1, -0.6, 0.8, -2.0, 0.8])
    shares = enumerated(logits.tolist(), params)
    assert [i for i, _ in shares] == kept
    numbers, expected, low = list[float](), list[int](), 0.0
    for i, share in shares:
        numbers += [low + 1e-11, low + share / 2, low + share - 1e-11]
        expected += [i] * 3
        low += share
    rows = logits.expand(len(numbers), -1)
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    assert params.draw(backend, rows, uniforms).tolist() == expected


def test_more_than_have_any_mass_are_all(backend: CpuBackend) -> None:
    """Also where the lowest of them is as far from the highest as rounding makes it."""
    uniforms = torch.rand(8, dtype=torch.float64)
    for seed in range(200):
        row = row_of("holes", 400, seed)
        finite = int(row.isfinite().sum())
        drawn = Params(100.0).draw(backend, row.expand(8, -1), uniforms)
        for top_k in (finite, finite + 1, 399):
            limited = Params(100.0, top_k=top_k).draw(backend, row.expand(8, -1), uniforms)
            assert torch.equal(limited, drawn)


def test_the_ends_are_the_first_and_the_last_id_with_mass(backend: CpuBackend) -> None:
    row = torch.full((700,), -torch.inf)
    row[[5, 300, 699]] = torch.tensor([0.0, 30.0, 0.0])
    row[0] = -1e30
    uniforms = torch.tensor([0.0, 0.5, NEAR_ONE], dtype=torch.float64)
    for params in (Params(), Params(top_k=3), Params(top_k=600), Params(min_p=1e-20)):
        assert params.draw(backend, row.expand(3, -1), uniforms).tolist() == [5, 300, 699]


@pytest.mark.parametrize(
    "params",
    [Params(), Params(0.8, top_p=0.95), Params(top_k=50, top_p=0.9), Params(min_p=0.05)],
)
def test_a_row_has_the_same_token_alone_and_among_others(
    backend: CpuBackend, params: Params
) -> None:
    x = 2 * torch.randn(33, 2500)
    x[::3] = x[0].round()  # of equal rows only the number may decide
    uniforms = torch.rand(33, dtype=torch.float64)
    uniforms[::6] = uniforms[0]
    try:
        backend.set_threads(2)
        together = params.draw(backend, x, uniforms)
        backend.set_threads(1)
        assert torch.equal(params.draw(backend, x, uniforms), together)
    finally:
        backend.set_threads(2)
    alone = [int(params.draw(backend, x[i : i + 1], uniforms[i : i + 1])) for i in range(33)]
    assert alone == together.tolist()
    assert len(set(alone[::6])) == 1


def test_where_there_is_no_distribution_the_best_is_taken(chosen: CpuBackend) -> None:
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([[nan, 1.0, nan, 3.0], [nan] * 4, [-inf] * 4, [2.0, inf, 3.0, inf]])
    uniforms = torch.full((4,), 0.99, dtype=torch.float64)
    for size in (4, 400):
        rows = torch.nn.functional.pad(x, (0, size - 4), value=-inf)
        for params in ((1.0, 0, 1.0, 0.0), (0.8, 2, 0.9, 0.1)):
            assert ops.sample(rows, *params, uniforms).tolist() == [3, 0, 0, 1]
            assert reference.sample(rows, *params, uniforms).tolist() == [3, 0, 0, 1]


def test_no_temperature_is_greedy(chosen: CpuBackend) -> None:
    x, uniforms = torch.randn(6, 300), torch.rand(6, dtype=torch.float64)
    assert torch.equal(ops.sample(x, 0.0, 0, 1.0, 0.0, uniforms), ops.argmax(x))
    assert torch.equal(reference.sample(x, 0.0, 0, 1.0, 0.0, uniforms), ops.argmax(x))


def test_no_rows_give_no_ids(chosen: CpuBackend) -> None:
    none = torch.empty(0, dtype=torch.float64)
    for draw in (ops.sample, reference.sample):
        assert draw(torch.empty(0, 9), 1.0, 0, 1.0, 0.0, none).shape == (0,)


def test_other_types_and_sizes_are_refused(backend: CpuBackend) -> None:
    params, one = Params(), torch.zeros(1, dtype=torch.float64)
    for x, uniforms in (
        (torch.zeros(1, 4, dtype=torch.bfloat16), one),
        (torch.zeros(1, 0), one),
        (torch.zeros(2, 4), one),
        (torch.zeros(1, 4), one.float()),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            params.draw(backend, x, uniforms)
