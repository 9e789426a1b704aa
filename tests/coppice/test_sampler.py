"""The sampler: processors against plain definitions, ties, and randomness by position."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coppice.request import SamplingParams
from coppice.sampler import Sampler, largest, raw_logprobs, uniform

LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.5]), min_size=1, max_size=40)


def draw(logits: list[float], position: int, prompt: tuple[int, ...] = (), **params: object) -> int:
    sampler = Sampler(SamplingParams.model_validate(params), 7, prompt)
    return sampler.sample(torch.tensor(logits), position)


def support(logits: list[float], draws: int = 400, **params: object) -> set[int]:
    sampler = Sampler(SamplingParams.model_validate(params), 3, ())
    row = torch.tensor(logits)
    return {sampler.sample(row, position) for position in range(draws)}


@given(LOGITS)
def test_greedy_takes_the_lowest_id_of_the_largest(logits: list[float]) -> None:
    assert draw(logits, 0, temperature=0.0) == logits.index(max(logits))


@given(LOGITS, st.integers(1, 50))
def test_largest_sorts_by_value_and_breaks_ties_by_id(values: list[float], count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(torch.tensor(values), count).tolist() == wanted


@example([-3.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1, 0, 0.2, 0.5, 1.0)
@settings(max_examples=60)
@given(LOGITS, st.integers(0, 10**6), st.integers(0, 8), st.sampled_from([0.2, 0.6, 0.9, 1.0]),
       st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.5, 1.0, 2.0]))  # fmt: skip
def test_a_draw_is_the_inverse_cdf_of_the_processed_distribution(
    logits: list[float], position: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    weights = [math.exp(x / temperature) for x in logits]
    total = sum(weights)
    mass = {i: w / total for i, w in enumerate(weights)}
    order = sorted(mass, key=lambda i: (-mass[i], i))
    kept = [i for i in order if mass[i] >= min_p * mass[order[0]] * (1 - 1e-12)]
    kept = kept[:top_k] if top_k else kept
    kept_mass, nucleus = sum(mass[i] for i in kept), list[int]()
    for i in kept:
        if top_p < 1.0 and sum(mass[j] for j in nucleus) / kept_mass >= top_p - 1e-12:
            break
        nucleus.append(i)
    point = uniform(7, position) * sum(mass[i] for i in nucleus)
    wanted, below = -1, 0.0
    for i in sorted(nucleus):
        below += mass[i]
        wanted = i
        if below > point:
            break
    got = draw(logits, position, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert got == wanted


def test_uniform_numbers_belong_to_seed_and_position() -> None:
    # Printed once from NumPy's Philox; a seed must give the same answer for ever.
    assert [uniform(7, 3), uniform(2**64 - 1, 0)] == [0.44205212947108785, 0.23494158814525556]
    numbers = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    for tenth in range(10):
        share = sum(tenth <= number * 10 < tenth + 1 for number in numbers) / len(numbers)
        assert abs(share - 0.1) < 0.02


def test_samples_follow_the_distribution() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    sampler = Sampler(SamplingParams(), 11, ())
    counts = [0] * 4
    for position in range(4000):
        counts[sampler.sample(torch.tensor(logits), position)] += 1
    for count, p in zip(counts, (0.5, 0.3, 0.15, 0.05), strict=True):
        assert abs(count / 4000 - p) < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert support(logits, top_p=0.69) == {0, 1}
    assert support(logits, top_p=0.71) == {0, 1, 2}


def test_top_p_beyond_the_shortcut_is_exact() -> None:
    logits = torch.zeros(4096)  # 4096 equal shares: sums of them are exact
    sampler = Sampler(SamplingParams(top_p=0.5), 3, ())
    drawn = {sampler.sample(logits, position) for position in range(3000)}
    assert 1900 < max(drawn) < 2048


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-310, "top_k": 3},
        {"temperature": 1e-6, "top_p": 0.5},
        {"temperature": 1.1e-5, "min_p": 0.5},
        {"temperature": 100.0, "top_k": 2**31 - 1, "min_p": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 0.01, "top_k": 2},
        {"temperature": 1.0, "logit_bias": {0: -100.0, 1: 100.0}, "top_p": 0.01},
    ],
)
def test_extreme_parameters_give_a_token_of_the_vocabulary(params: dict[str, object]) -> None:
    sampler = Sampler(SamplingParams.model_validate(params), 0, (0, 1), 2, [0, 2])
    for logits in (
        [1e4, -1e4, 0.0],
        [0.0, 0.0, 0.0],
        [-3e38, -3e38, 3e38],
        [5.0, -float("inf"), 1],
    ):
        assert 0 <= sampler.sample(torch.tensor(logits), 2**31) < 3


def test_logit_bias_forces_and_forbids() -> None:
    assert draw([0.0, 1.0, 0.0], 0, temperature=0.0, logit_bias={2: 5.0}) == 2
    assert draw([0.0, 1.0, 0.5], 0, temperature=0.0, logit_bias={1: -100.0}) == 2


def test_repetition_penalty_sees_prompt_and_output() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, repetition_penalty=2.0), 0, (0,))
    assert sampler.sample(torch.tensor([3.0, 2.0, 1.9]), 0) == 1
    sampler.accept(1)
    assert sampler.sample(torch.tensor([3.0, 2.0, 1.9]), 1) == 2
    assert sampler.sample(torch.tensor([-0.1, -1.0, -0.15]), 1) == 2


def test_presence_and_frequency_penalties_see_the_output_alone() -> None:
    sampler = Sampler(
        SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25), 0, (0,)
    )
    assert sampler.sample(torch.tensor([1.0, 0.9]), 0) == 0
    sampler.accept(0)
    assert sampler.sample(torch.tensor([1.0, 0.3]), 1) == 1
    assert sampler.sample(torch.tensor([1.0, 0.2]), 1) == 0
    sampler.accept(0)
    assert sampler.sample(torch.tensor([1.3, 0.1]), 2) == 1


def test_ending_tokens_are_held_back_until_the_minimum_length() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0), 0, (), min_tokens=2, ending_ids=[0])
    row = torch.tensor([9.0, 1.0])
    drawn: list[int] = []
    for position in range(3):
        drawn.append(sampler.sample(row, position))
        sampler.accept(drawn[-1])
    assert drawn == [1, 1, 0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 2}])
def test_logprobs_are_the_models_raw_ones(params: dict[str, float]) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    total = math.log(sum(math.exp(x) for x in (1.0, 3.0, 2.0)))
    chosen, top = raw_logprobs(logits, 0, 2)
    assert chosen == pytest.approx(1.0 - total, abs=1e-6)
    assert [token for token, _ in top] == [1, 2]
    assert [value for _, value in top] == pytest.approx([3.0 - total, 2.0 - total], abs=1e-6)
