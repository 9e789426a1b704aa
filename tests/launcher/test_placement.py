import pytest

from coppice.errors import StartError
from launcher.placement import needs_of_rank


@pytest.mark.parametrize(
    ("device", "gpus", "needs"), [("cuda", 8, 1.0), ("auto", 4, 1.0), ("auto", 0, 0), ("cpu", 8, 0)]
)
def test_a_rank_needs_a_gpu_where_the_model_is_on_one(device: str, gpus: int, needs: float) -> None:
    assert needs_of_rank(device, 4, gpus).get("GPU", 0) == needs


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_gpus_on_a_host_are_named(device: str) -> None:
    with pytest.raises(StartError, match=r"tensor_parallel = 8 needs .* knows of is 4; lower it"):
        needs_of_rank(device, 8, 4)
