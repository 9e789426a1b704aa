"""Eight-bit floats by their bits: torch's."""

import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import from_fp8, to_fp8


@triton.jit
def read(codes: tl.tensor, out: tl.tensor):
    at = tl.arange(0, 256)
    tl.store(out + at, from_fp8(tl.load(codes + at)).to(tl.float32))


@triton.jit
def write(x: tl.tensor, codes: tl.tensor, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(codes + at, to_fp8(tl.load(x + at)))


def test_every_code_is_read_as_torch_reads_it(device: torch.device) -> None:
    codes = torch.arange(256, device=device).to(torch.uint8)
    out = torch.empty(256, device=device)
    read[(1,)](codes, out)
    expected = codes.view(torch.float8_e4m3fn).float()
    numbers = ~expected.isnan()
    assert int(numbers.sum()) == 254
    assert torch.equal(out[numbers], expected[numbers])


def test_values_are_rounded_as_torch_rounds_them(device: torch.device) -> None:
    values = torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat((middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])))
    x = torch.cat(
        (
            values,
            near,
            torch.randn(1000, device=device) * 2.0 ** torch.randint(-12, 9, (1000,), device=device),
        )
    )
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)))
    codes = torch.empty(4096, dtype=torch.uint8, device=device)
    write[(1,)](x, codes, 4096)
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_is_too_large_becomes_the_largest(device: torch.device) -> None:
    x = torch.tensor([449.0, 1e30, torch.inf, -torch.inf], device=device)
    codes = torch.empty(4, dtype=torch.uint8, device=device)
    write[(1,)](x, codes, 4)
    assert codes.tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
