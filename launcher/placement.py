"""Where the ranks of a verifier go: together on one host, on a GPU each where there are GPUs."""

from typing import Any

import ray
from ray.util import placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coppice.errors import StartError
from coppice.settings import Settings

# Ray wants a bundle to hold something. Workers share a host's cores without being counted.
NEXT_TO_NOTHING = 0.001


def group_of_ranks(settings: Settings) -> PlacementGroup | None:
    """Room for all ranks of one verifier; None for one rank, which needs no company. Raises
    StartError where no host has the GPUs."""
    ranks = settings.verifier.tensor_parallel
    if ranks == 1:
        return None
    most = max(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
    bundle = needs_of_rank(settings.model.device, ranks, most)
    return placement_group([bundle] * ranks, strategy="STRICT_PACK")


def needs_of_rank(device: str, ranks: int, most_gpus: int) -> dict[str, float]:
    """Resources of each rank; `most_gpus` are those of the host that has most. Raises StartError
    when they are too few."""
    needs = {"CPU": NEXT_TO_NOTHING}
    if device.startswith("cuda") or (device == "auto" and most_gpus):
        if most_gpus < ranks:
            raise StartError(
                f"verifier.tensor_parallel = {ranks} needs a host with as many GPUs, and the most "
                f"that Ray knows of is {most_gpus}; lower it, or set model.device to cpu"
            )
        needs["GPU"] = 1.0
    return needs


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
