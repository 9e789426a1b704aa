"""Where a model runs, and what decides its bits."""

import torch

from coppice.models.placement import fingerprint

CPU = torch.device("cpu")


def test_what_decides_the_bits_is_in_the_fingerprint() -> None:
    plain, int8, fp32 = (
        fingerprint(torch.bfloat16, CPU),
        fingerprint(torch.bfloat16, CPU, quantize=True),
        fingerprint(torch.float32, CPU, quantize=True),
    )
    split = fingerprint(torch.bfloat16, CPU, ranks=2)
    assert len({plain, int8, fp32, split}) == 4
    assert "/bfloat16/" in plain
    assert "/bfloat16-int8/" in int8
