"""Every Triton kernel beside its reference, and rows alone beside rows together, bit for bit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_work import BF16, Line, Tree
from coppice.models.config import DecoderConfig
from coppice.models.rope import rotary_table
from coppice.request import SamplingParams
from coppice.sampler import Sampler, uniform
from kernels import reference
from kernels.triton.backend import Scales, TritonBackend


def check_all(
    backend: TritonBackend, config: DecoderConfig, device: torch.device, context: int, rows: int
) -> Iterator[Line]:
    """`context` and `rows` are those of the attention."""
    yield check_linear(backend, config, device)
    yield from check_rows(backend, config, device)
    yield from check_attention(backend, config, device, context, rows)
    yield check_sample(backend, config.vocab_size, device)


def held(what: str, ours: Tensor, exact: Tensor, bound: float, same_bits: bool) -> Line:
    """A result beside its reference, relative to the largest value there."""
    error = float((ours.double() - exact).abs().max() / exact.abs().max())
    wrong = not error <= bound  # NaN is wrong
    bits = "bits alone = together" if same_bits else "bits alone differ"
    reached = f"error {error:.1e}, allowed {bound:.0e}"
    return Line(f"check: {what}", reached=reached, other=bits, wrong=wrong or not same_bits)


def check_linear(backend: TritonBackend, config: DecoderConfig, device: torch.device) -> Line:
    x = torch.randn((65, config.hidden_size), device=device).to(BF16)
    weight = torch.randn((config.hidden_size, config.hidden_size), device=device).to(BF16)
    ours = backend.linear(x, weight, wide=True)
    rows = (slice(0, 1), slice(7, 8), slice(64, 65), slice(3, 40))
    same = all(torch.equal(backend.linear(x[at], weight, wide=True), ours[at]) for at in rows)
    return held("linear", ours, x.double() @ weight.double().T, 1e-4, same)


def check_rows(
    backend: TritonBackend, config: DecoderConfig, device: torch.device
) -> Iterator[Line]:
    x = torch.randn((5, config.hidden_size), device=device).to(BF16)
    weight = torch.randn(config.hidden_size, device=device).to(BF16)
    ours = backend.rms_norm(x, weight, 1e-5)
    same = torch.equal(backend.rms_norm(x[3:4], weight, 1e-5)[0], ours[3])
    yield held("rms_norm", ours, reference.rms_norm(x.double(), weight.double(), 1e-5), 0.01, same)
    gate_up = torch.randn((5, 2 * config.intermediate_size), device=device).to(BF16)
    ours = backend.silu_mul(gate_up)
    same = torch.equal(backend.silu_mul(gate_up[3:4])[0], ours[3])
    yield held("silu_mul", ours, reference.silu_mul(gate_up.double()), 0.01, same)
    heads = torch.randn((5, config.heads, config.head_dim), device=device).to(BF16)
    angles = rotary_table(config, device)(torch.arange(5, device=device))
    ours = backend.rope(heads, *angles)
    same = torch.equal(backend.rope(heads[3:4], *(a[3:4] for a in angles))[0], ours[3])
    yield held("rope", ours, reference.rope(heads.float(), *angles).double(), 0.01, same)


def check_attention(
    backend: TritonBackend, config: DecoderConfig, device: torch.device, context: int, rows: int
) -> Iterator[Line]:
    for causal in (False, True):
        case = Tree(config, context, rows, causal, device)
        ours = backend.tree_attention(case.q, case.k, case.v, case.batch)
        exact = reference.tree_attention(
            case.q.double(), case.k.double(), case.v.double(), case.batch
        )
        same = all(
            torch.equal(
                backend.tree_attention(case.q[row : row + 1], case.k, case.v, case.plain(row))[0],
                ours[row],
            )
            for row in (0, rows // 3, rows - 1)
        )
        name = f"attention, {'prefill' if causal else 'tree'}, context {context}"
        yield held(name, ours, exact, 0.02, same)
    case = Tree(config, context, rows, False, device)
    scales = Scales(*(torch.rand(config.kv_heads, device=device) + 0.5 for _ in range(2)))
    k, v = (pool.to(torch.float8_e4m3fn) for pool in (case.k, case.v))
    ours = backend.tree_attention(case.q, k, v, case.batch, scales)
    wide = (k.double() * scales.k[:, None], v.double() * scales.v[:, None])
    exact = reference.tree_attention(case.q.double(), *wide, case.batch)
    alone = backend.tree_attention(case.q[3:4], k, v, case.plain(3), scales)
    yield held("attention, fp8 KV", ours, exact, 0.02, torch.equal(alone[0], ours[3]))


def check_sample(backend: TritonBackend, vocab: int, device: torch.device) -> Line:
    count = 16
    logits = 3 * torch.randn((count, vocab), device=device)

    def all_of(value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=device)

    uniforms = [uniform(seed, 5) for seed in range(count)]
    ours = backend.draw(
        logits,
        temperature=all_of(0.8),
        min_p=all_of(0.01),
        top_k=all_of(50).int(),
        top_p=all_of(0.9),
        uniform=torch.tensor(uniforms, dtype=torch.float64, device=device),
    )
    params = SamplingParams(temperature=0.8, min_p=0.01, top_k=50, top_p=0.9)
    expected = [Sampler(params, seed, ()).sample(logits[seed], 5) for seed in range(count)]
    equal = sum(a == b for a, b in zip(ours.tolist(), expected, strict=True))
    return Line("check: sample", reached=f"{equal} of {count} as the sampler", wrong=equal < count)
