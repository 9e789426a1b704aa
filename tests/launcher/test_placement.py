import asyncio
from dataclasses import dataclass

import pytest

from coppice.errors import StartError
from coppice.settings import RankPlacement, VerifierSettings
from launcher import placement
from launcher.cluster import Worker, until_ready
from launcher.placement import needs_of_rank


def ranks(count: int, placed: RankPlacement = "strict_pack") -> VerifierSettings:
    return VerifierSettings(tensor_parallel=count, placement=placed)


@pytest.mark.parametrize(
    ("device", "gpus", "needs"), [("cuda", 8, 1.0), ("auto", 4, 1.0), ("auto", 0, 0), ("cpu", 8, 0)]
)
def test_a_rank_needs_a_gpu_where_the_model_is_on_one(device: str, gpus: int, needs: float) -> None:
    assert needs_of_rank(device, ranks(4), [gpus]).get("GPU", 0) == needs


@pytest.mark.parametrize(
    ("placed", "count", "gpus"),
    [
        ("strict_pack", 4, [2, 4]),
        ("pack", 6, [2, 4]),
        ("spread", 6, [2, 4]),
        ("strict_spread", 2, [2, 0, 4]),
    ],
)
def test_as_many_gpus_as_the_placement_needs_are_enough_and_one_less_is_not(
    placed: RankPlacement, count: int, gpus: list[int]
) -> None:
    assert needs_of_rank("cuda", ranks(count, placed), gpus)["GPU"] == 1.0
    with pytest.raises(StartError, match=f"placement = {placed} needs as many "):
        needs_of_rank("cuda", ranks(count + 1, placed), gpus)


@pytest.mark.parametrize(
    ("device", "placed", "gpus", "message"),
    [
        ("cuda", "strict_pack", [4, 4], r"many GPUs on one host, and Ray knows of 4; .* to cpu$"),
        ("auto", "spread", [4, 3], r"many GPUs, and Ray knows of 7; .* to cpu$"),
        ("cuda", "strict_spread", [9, 0], r"many hosts with a GPU, and Ray knows of 1; .* to cpu$"),
        ("cpu", "strict_spread", [9, 0, 0], r"many hosts, and Ray .* 3; .* another placement$"),
    ],
)
def test_what_lacks_is_named_with_both_settings(
    device: str, placed: RankPlacement, gpus: list[int], message: str
) -> None:
    with pytest.raises(StartError, match=message) as caught:
        needs_of_rank(device, ranks(8, placed), gpus)
    named = f"verifier.tensor_parallel = 8 with verifier.placement = {placed} "
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize("placed", ["strict_pack", "pack", "spread"])
def test_without_gpus_one_host_takes_any_number(placed: RankPlacement) -> None:
    assert needs_of_rank("auto", ranks(64, placed), [0]).keys() == {"CPU"}


@dataclass
class NoRoom:
    """Ray's group when it cannot be placed."""

    async def ready(self) -> None:
        await asyncio.Event().wait()


async def test_a_group_that_finds_no_room_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PLACE_SECONDS", 0.05)
    with pytest.raises(StartError, match=r"^verifier-3: no room .* verifier\.placement and"):
        await until_ready(Worker("verifier-3", None, NoRoom()))
