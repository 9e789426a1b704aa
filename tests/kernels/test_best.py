"""The largest of rows: right ids, ties to the lowest, log-probabilities of the whole row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops, reference
from kernels.cpu.backend import CpuBackend


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    size=st.one_of(st.integers(1, 40), st.integers(240, 300), st.integers(1000, 3000)),
    count=st.integers(1, 20),
    levels=st.integers(1, 2000),
)
def test_ids_are_those_of_a_stable_sort(
    backend: CpuBackend, rows: int, size: int, count: int, levels: int
) -> None:
    # Few levels: many ties.
    x = torch.randint(0, levels, (rows, size)).float() / levels * 20 - 10
    count = min(count, size)
    ids, log_probs = backend.best(x, count, log_probabilities=True)
    expected = x.double().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :count])
    assert (log_probs - expected.values[:, :count]).abs().max() < 1e-5
    assert torch.equal(backend.best(x, 1, log_probabilities=False)[0][:, 0], ids[:, 0])


def test_a_row_has_the_same_bits_alone(backend: CpuBackend) -> None:
    x = torch.randn(9, 2500)
    ids, log_probs = backend.best(x, 8, log_probabilities=True)
    for row in range(9):
        mine = backend.best(x[row : row + 1], 8, log_probabilities=True)
        assert torch.equal(mine[0][0], ids[row])
        assert torch.equal(mine[1][0], log_probs[row])


def test_what_is_no_number_is_never_the_largest(chosen: CpuBackend) -> None:
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([[nan, 1.0, nan, 3.0], [nan] * 4, [-inf] * 4, [2.0, inf, nan, inf]])
    expected = [3, 0, 0, 1]
    assert ops.argmax(x).tolist() == expected
    assert reference.argmax(x).tolist() == expected


def test_more_places_than_numbers_are_filled_with_other_ids(chosen: CpuBackend) -> None:
    x = torch.tensor([[-torch.inf, 4.0, -torch.inf, -torch.inf]])
    ids, values = chosen.best(x, 3, log_probabilities=False)
    assert ids.tolist() == [[1, 0, 2]]
    assert values.tolist() == [[4.0, -torch.inf, -torch.inf]]


def test_the_reference_agrees(chosen: CpuBackend) -> None:
    x = torch.randn(5, 700)
    ids, log_probs = ops.best_tokens(x, 6)
    expected = reference.best_tokens(x, 6)
    assert torch.equal(ids, expected[0])
    assert (log_probs - expected[1]).abs().max() < 1e-5
    assert torch.equal(ops.argmax(x), reference.argmax(x))


def test_other_types_are_refused(chosen: CpuBackend) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        chosen.best(torch.zeros(1, 4, dtype=torch.bfloat16), 1, log_probabilities=False)
