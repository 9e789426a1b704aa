"""Where the ranks of a verifier go: on which hosts, and on a GPU each where there are GPUs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util import placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coppice.errors import StartError
from coppice.settings import Settings, VerifierSettings

# Ray wants a bundle to hold something. Workers share a host's cores without being counted.
NEXT_TO_NOTHING = 0.001
PLACE_SECONDS = 60.0


def group_of_ranks(settings: Settings) -> PlacementGroup | None:
    """Room for all ranks of one verifier; None for one rank, which needs no company. Raises
    StartError where the cluster has not the GPUs or hosts for it."""
    verifier = settings.verifier
    if verifier.tensor_parallel == 1:
        return None
    gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    bundle = needs_of_rank(settings.model.device, verifier, gpus)
    bundles = [bundle] * verifier.tensor_parallel
    return placement_group(bundles, strategy=verifier.placement.upper())


def needs_of_rank(device: str, verifier: VerifierSettings, gpus: Sequence[int]) -> dict[str, float]:
    """Resources of each rank; `gpus` are those of each host. Raises StartError when there are not
    enough of them, or of hosts, for `verifier.placement`."""
    on_gpus = device.startswith("cuda") or (device == "auto" and any(gpus))
    ranks, placement = verifier.tensor_parallel, verifier.placement
    places = gpus if on_gpus else [ranks] * len(gpus)  # cores are shared by any number
    match placement:
        case "strict_pack":
            found, what = max(places), "GPUs on one host"
        case "strict_spread":
            found, what = sum(map(bool, places)), "hosts with a GPU" if on_gpus else "hosts"
        case _:
            found, what = sum(places), "GPUs"
    if found < ranks:
        raise StartError(
            f"verifier.tensor_parallel = {ranks} with verifier.placement = {placement} needs as "
            f"many {what}, and Ray knows of {found}; lower it, or choose another placement"
            + (", or set model.device to cpu" if on_gpus else "")
        )
    return {"CPU": NEXT_TO_NOTHING} | ({"GPU": 1.0} if on_gpus else {})


async def until_placed(group: PlacementGroup, name: str) -> None:
    """Raises StartError when the cluster has no room for the ranks of verifier `name` in time."""
    try:
        await asyncio.wait_for(group.ready(), PLACE_SECONDS)
    except TimeoutError:
        raise StartError(
            f"{name}: no room for all ranks within {PLACE_SECONDS:g} s by verifier.placement and "
            "verifier.tensor_parallel; `ray status` says what is taken"
        ) from None


def first_rank(group: PlacementGroup | None) -> dict[str, Any]:
    """Options of the actor of the first rank, which places the others itself."""
    if group is None:
        return {}
    return {
        "num_gpus": group.bundle_specs[0].get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0
        ),
    }
