import os

import pytest

from coppice.errors import StartError
from coppice.settings import Settings, VerifierSettings
from verifier_svc.target import Target, threads_of


@pytest.mark.parametrize(
    ("ranks", "threads", "shares"), [(2, 8, [4, 4]), (3, 8, [3, 3, 2]), (3, 2, [1, 1, 1])]
)
def test_ranks_share_out_the_threads(ranks: int, threads: int, shares: list[int]) -> None:
    verifier = VerifierSettings(tensor_parallel=ranks, threads=threads)
    assert [threads_of(verifier, rank) for rank in range(ranks)] == shares


def test_without_a_setting_they_share_out_the_cores() -> None:
    verifier, cores = VerifierSettings(tensor_parallel=2), len(os.sched_getaffinity(0))
    assert threads_of(verifier, 0) == max(1, (cores + 1) // 2)
    assert threads_of(VerifierSettings(), 0) is None


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [("ab", [8, 8]), ("aab", [4, 4, 8]), ("aba", [4, 8, 4]), ("bbab", [3, 3, 8, 2])],
)
def test_ranks_share_the_threads_with_those_on_their_host_alone(
    nodes: str, shares: list[int]
) -> None:
    verifier = VerifierSettings(tensor_parallel=len(nodes), threads=8)
    assert [threads_of(verifier, rank, nodes) for rank in range(len(nodes))] == shares


def test_one_gpu_is_not_enough_for_ranks() -> None:
    settings = Settings.model_validate(
        {"model": {"device": "cuda:1"}, "verifier": {"tensor_parallel": 2}}
    )
    with pytest.raises(StartError, match=r"device = cuda:1 is one GPU, .* set it to cuda"):
        Target.of(settings)
