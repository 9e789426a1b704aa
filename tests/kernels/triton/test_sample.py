"""Tokens drawn by the kernel are those of the one sampler."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coppice.request import SamplingParams
from coppice.sampler import Sampler, uniform
from kernels import ops, reference
from kernels.triton.backend import TritonBackend


@dataclass(frozen=True)
class Row:
    temperature: float
    min_p: float
    top_k: int
    top_p: float
    seed: int


ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    top_k=st.sampled_from([0, 1, 3, 50, 100_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-3]),
    seed=st.integers(0, 2**40),
)


def drawn(backend: TritonBackend, logits: Tensor, rows: list[Row]) -> list[int]:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)

    return backend.draw(
        logits,
        column([r.temperature for r in rows]),
        column([r.min_p for r in rows]),
        torch.tensor([r.top_k for r in rows], dtype=torch.int32, device=logits.device),
        column([r.top_p for r in rows]),
        column([uniform(r.seed, 5) for r in rows]),
    ).tolist()


def of_the_sampler(logits: Tensor, row: Row) -> int:
    params = SamplingParams(
        temperature=row.temperature, min_p=row.min_p, top_k=row.top_k, top_p=row.top_p
    )
    return Sampler(params, row.seed, ()).sample(logits, 5)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    vocab=st.sampled_from([1, 5, 64, 700, 2049]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    whole=st.booleans(),
)
def test_it_draws_what_the_sampler_draws(
    backend: TritonBackend,
    device: torch.device,
    rows: list[Row],
    vocab: int,
    spread: float,
    whole: bool,
) -> None:
    logits = spread * torch.randn((len(rows), vocab), device=device)
    if whole:  # many ties
        logits = logits.round()
    expected = [of_the_sampler(each, row) for each, row in zip(logits, rows, strict=True)]
    assert drawn(backend, logits, rows) == expected


def test_ties_go_to_the_lowest_ids(backend: TritonBackend, device: torch.device) -> None:
    logits = torch.zeros((1, 100), device=device)
    assert drawn(backend, logits, [Row(0.0, 0.0, 0, 1.0, 1)]) == [0]
    for seed in range(4):
        (token,) = drawn(backend, logits, [Row(1.0, 0.0, 3, 1.0, seed)])
        assert token < 3
        (token,) = drawn(backend, logits, [Row(1.0, 0.0, 0, 0.05, seed)])
        assert token < 5


def test_both_zeros_are_one(backend: TritonBackend, device: torch.device) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=device)
    assert drawn(backend, logits, [Row(0.0, 0.0, 0, 1.0, 1)]) == [1]
    assert drawn(backend, logits, [Row(1.0, 0.0, 1, 1.0, 1)]) == [1]


def test_where_there_is_no_distribution_the_best_is_taken(
    backend: TritonBackend, device: torch.device
) -> None:
    inf = torch.inf
    logits = torch.tensor([[1.0, inf, 3.0], [-inf, -inf, -inf], [5.0, -inf, 1.0]], device=device)
    rows = [Row(1.0, 0.1, 2, 0.9, seed) for seed in range(3)]
    expected = [of_the_sampler(each, row) for each, row in zip(logits, rows, strict=True)]
    assert drawn(backend, logits, rows) == expected
    assert expected[:2] == [1, 0]


def test_what_is_not_a_number_is_never_drawn(backend: TritonBackend, device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[nan, 1.0, 3.0], [-inf, nan, -1.0], [nan, nan, nan]], device=device)
    for temperature in (0.0, 1.0):
        rows = [Row(temperature, 0.0, 0, 1.0, seed) for seed in range(3)]
        assert drawn(backend, logits, rows) == [2, 2, 0]


def test_the_operation_draws_with_it(backend: TritonBackend, device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device) * 3
    uniforms = torch.tensor([0.0, 0.3, 0.7, 0.999], dtype=torch.float64, device=device)
    expected = reference.sample(logits, 0.8, 2**31 - 1, 0.9, 0.01, uniforms)
    with ops.use_backend(backend):
        drawn_ones = ops.sample(logits, 0.8, 2**31 - 1, 0.9, 0.01, uniforms)
    assert drawn_ones.tolist() == expected.tolist()
    assert expected.unique().numel() > 1
