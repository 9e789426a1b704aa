"""Every operation in plain torch: the definition that the backends are held to."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.batch import AttentionBatch, Segment


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """x [rows, in] @ weight [out, in]^T (+ bias [out]) (+ residual [rows, out]) -> [rows, out], in
    fp32 if `wide`."""
    out = functional.linear(x, weight, bias)
    if residual is not None:
        out = residual + out
    return out.float() if wide else out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d] over its root mean square, times weight [d]; statistics in fp32 (Zhang and
    Sennrich 2019)."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin, times `scale`, of positions [rows] * frequencies [d / 2]: fp32 [rows, d / 2]."""
    angles = positions.float()[:, None] * frequencies[None, :]
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of x [rows, heads, d] by the angles of cos, sin [rows, d / 2] (fp32)
    (Su et al. 2021, in the half-split layout of the published Llama checkpoints)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [rows, 2 * d] -> [rows, d]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def write_kv(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """pool [slots, kv_heads, head_dim] takes values [rows, kv_heads, head_dim] at slots [rows]."""
    pool.index_copy_(0, slots, values)


def visible(segment: Segment) -> Tensor:
    """Which keys (context, then tail) each row of a segment reads: bool [rows, context + tail]."""
    device = segment.tail.device
    index = torch.arange(len(segment.tail), device=device)
    if segment.masks is None:
        tail = index[None, :] <= torch.arange(segment.rows, device=device)[:, None]
    else:
        tail = (segment.masks[:, None] >> index[None, :]) & 1 == 1
    return functional.pad(tail, (len(segment.context), 0), value=True)


def tree_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch) -> Tensor:
    """Attention of q [rows, heads, d] over the slots of k_pool, v_pool [slots, kv_heads, d] that
    each row may read -> [rows, heads, d]. Scores and softmax in fp32; scale d ** -0.5."""
    _, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    out = torch.empty_like(q)
    start = 0
    for segment in batch.segments:
        stop = start + segment.rows
        keys = torch.cat((segment.context, segment.tail))
        k = k_pool[keys].transpose(0, 1).float()  # [kv_heads, keys, d]
        v = v_pool[keys].transpose(0, 1).float()
        # Query heads of one KV head side by side, so that its keys are read once.
        mine = q[start:stop].float().view(-1, kv_heads, heads // kv_heads, dim).permute(1, 0, 2, 3)
        scores = mine.flatten(1, 2) @ k.transpose(1, 2) * dim**-0.5
        scores = scores.view(kv_heads, segment.rows, -1, len(keys))
        scores = scores.masked_fill(~visible(segment)[None, :, None, :], -torch.inf)
        mixed = scores.softmax(-1).flatten(1, 2) @ v
        mixed = mixed.view(kv_heads, segment.rows, heads // kv_heads, dim).permute(1, 0, 2, 3)
        out[start:stop] = mixed.reshape(segment.rows, heads, dim).to(q.dtype)
        start = stop
    return out


def argmax(logits: Tensor) -> Tensor:
    """Ids [rows] of the largest of logits [rows, vocab], the lowest of equals."""
    known = logits.where(~logits.isnan(), -torch.inf)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ids.where(known == known.amax(-1, keepdim=True), len(ids)).amin(-1)


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the `count` likeliest of logits [rows, vocab]: both [rows,
    count], best first and of equals the lowest id."""
    values, ids = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return ids[:, :count], values[:, :count]


# Temperatures below it: the most probable token has all the mass there is (as in vLLM).
GREEDY_BELOW = 1e-5
# Sorting whole vocabularies is slow; nearly all nuclei are inside of so many tokens.
_FEW = 1024


def largest(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of values [n], best first, ties to the lowest id: [count]."""
    count = min(count, len(values))
    least = values.topk(count).values[-1]
    ids = (
        torch.cat(
            (
                (values > least).nonzero().flatten(),
                (values == least).nonzero().flatten(),
            )
        )[:count]
        .sort()
        .values
    )
    return ids[values[ids].sort(descending=True, stable=True).indices]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Ids of the smallest set of most probable tokens whose mass reaches `top_p`."""
    for count in (_FEW, len(probabilities)):
        ids = largest(probabilities, count)
        mass = probabilities[ids].cumsum(0)
        if mass[-1] >= top_p - 1e-12 or len(ids) == len(probabilities):
            break
    # Sums of equal masses miss round values of top_p by their rounding.
    return ids[: int((mass < top_p - 1e-12).sum()) + 1]


def _mask(ids: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[ids] = True
    return mask


def distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """The token ids that are kept of logits [vocab], ascending [kept], and their probabilities in
    fp64 [kept]. In this order: temperature; min-p, of the largest probability; top-k, where 0 is
    all; top-p, the smallest set that reaches it of the rest's mass. Ties go to the lowest id."""
    probabilities = (logits.double() / temperature).softmax(-1)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if min_p > 0.0:
        kept &= probabilities >= min_p * probabilities.max()
    if top_k:
        kept &= _mask(largest(probabilities * kept, top_k), kept)
    if top_p < 1.0:
        remaining = probabilities * kept
        kept &= _mask(_nucleus(remaining / remaining.sum(), top_p), kept)
    ids = kept.nonzero().flatten()
    return ids, probabilities[ids]


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniforms: Tensor,
) -> Tensor:
    """Ids [rows] drawn from logits [rows, vocab]: of a row's `distribution` the inverse, over
    ascending ids, at its number of uniforms [rows] in [0, 1) (fp64)."""
    best = argmax(logits)
    if temperature < GREEDY_BELOW:
        return best
    out: list[Tensor] = []
    for row, token, number in zip(logits, best, uniforms, strict=True):
        # Infinite or no mass at all has no distribution; the best token is then the answer.
        if not row.max().isfinite():
            out.append(token)
            continue
        ids, mass = distribution(row, temperature, top_k, top_p, min_p)
        cumulative = mass.cumsum(0)
        index = torch.searchsorted(cumulative, number * cumulative[-1], right=True)
        out.append(ids[index.clamp(max=len(ids) - 1)])
    return torch.stack(out) if out else best
