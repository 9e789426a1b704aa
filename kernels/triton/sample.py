"""Tokens drawn from rows of logits without sorting them: one program takes one row.

The order of processors is that of serving: temperature, min-p, top-k, top-p. Each of them keeps the
most probable tokens, ties to the lowest id: all logits above a floor and the first few that equal
it. The floor is found by bisection over the bits of a float, then the token by the inverse of the
distribution over ascending ids. Masses are fp64; where a bound falls between two sums that differ
by rounding alone, another order of summing may decide otherwise.
"""

# Triton compiles these functions: they are Python by their syntax alone.
# pyright: basic, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)  # temperatures: the most probable token has all the mass
SLACK = tl.constexpr(1e-12)  # of sums of masses beside a round top-p
LEAST_KEY, MOST_KEY = tl.constexpr(-0x80000000), tl.constexpr(0x7FFFFFFF)  # of no number


@triton.jit
def keys_of(x):
    """fp32 as int32 in the same order; both zeros are one, and NaN is as low as -inf."""
    known = tl.where(x == x, x, -float("inf"))
    bits = tl.where(known == 0, 0.0, known).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The fp32 of a key, as fp64."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def read_keys(logits, at, vocab: tl.constexpr):
    return keys_of(tl.load(logits + at, mask=at < vocab, other=-float("inf")))


@triton.jit
def highest(logits, vocab: tl.constexpr, block: tl.constexpr):
    """The highest key, its lowest id, and how many logits are NaN."""
    best = tl.full([block], LEAST_KEY, tl.int32)
    ids = tl.zeros([block], tl.int32)
    unknown = tl.zeros([block], tl.int32)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        logit = tl.load(logits + at, mask=at < vocab, other=-float("inf"))
        keys = tl.where(at < vocab, keys_of(logit), LEAST_KEY)
        ids = tl.where(keys > best, at, ids)
        best = tl.maximum(keys, best)
        unknown += (logit != logit).to(tl.int32)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, ids, vocab), 0), tl.sum(unknown, 0)


@triton.jit
def weigh(logits, mass, top, temperature, min_p, vocab: tl.constexpr, block: tl.constexpr):
    """Writes exp((logit - highest) / temperature); the lowest key that min-p keeps."""
    floor = tl.full([block], MOST_KEY, tl.int32)
    peak = value_of(top) / temperature
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        logit = tl.load(logits + at, mask=at < vocab, other=-float("inf"))
        weight = tl.exp(logit.to(tl.float64) / temperature - peak)
        tl.store(mass + at, weight, mask=at < vocab)
        kept = (at < vocab) & (weight >= min_p)
        floor = tl.minimum(floor, tl.where(kept, keys_of(logit), MOST_KEY))
    tl.debug_barrier()  # other threads of the program read it
    return tl.min(floor, 0).to(tl.int64)


@triton.jit
def from_key(logits, mass, key, vocab: tl.constexpr, block: tl.constexpr):
    """How many keys are at least `key`, and their mass."""
    count = tl.zeros([block], tl.int32)
    total = tl.zeros([block], tl.float64)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        kept = (at < vocab) & (read_keys(logits, at, vocab) >= key)
        count += kept.to(tl.int32)
        total += tl.load(mass + at, mask=kept, other=0.0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def keep_top_k(logits, mass, floor, top, k, vocab: tl.constexpr, block: tl.constexpr):
    """Floor, and how many of those that equal it are kept."""
    allowed = vocab + tl.zeros_like(k)
    count, _ = from_key(logits, mass, floor, vocab, block)
    if count > k:
        beyond = top.to(tl.int64) + 1
        while beyond - floor > 1:
            middle = floor + (beyond - floor) // 2
            count, _ = from_key(logits, mass, middle, vocab, block)
            if count >= k:
                floor = middle
            else:
                beyond = middle
        above, _ = from_key(logits, mass, floor + 1, vocab, block)
        allowed = k - above
    return floor, allowed


@triton.jit
def keep_top_p(logits, mass, floor, allowed, top, p, vocab: tl.constexpr, block: tl.constexpr):
    """The same for the least set whose mass reaches p of what is kept so far."""
    count, total = from_key(logits, mass, floor, vocab, block)
    above, total_above = from_key(logits, mass, floor + 1, vocab, block)
    ties = tl.minimum(count - above, allowed)
    total = total_above + (total - total_above) / (count - above) * ties
    bound = (p - SLACK) * total
    if total_above >= bound:
        floor += 1
        beyond = top.to(tl.int64) + 1
        while beyond - floor > 1:
            middle = floor + (beyond - floor) // 2
            _, reached = from_key(logits, mass, middle, vocab, block)
            if reached >= bound:
                floor = middle
            else:
                beyond = middle
        count, total = from_key(logits, mass, floor, vocab, block)
        above, total_above = from_key(logits, mass, floor + 1, vocab, block)
        ties = count - above
    each = (total - total_above) / ties
    needed = tl.ceil((bound - total_above) / each)
    return floor, tl.minimum(ties, tl.maximum(needed, 1.0).to(tl.int32))


@triton.jit
def kept_mass(logits, mass, at, before, floor, allowed, vocab: tl.constexpr):
    """The mass of the kept ids of a block, which ids are kept, and how many equal the floor."""
    keys = read_keys(logits, at, vocab)
    ties = ((at < vocab) & (keys == floor)).to(tl.int32)
    rank = before + tl.cumsum(ties, 0) - ties
    kept = (at < vocab) & ((keys > floor) | ((keys == floor) & (rank < allowed)))
    return tl.load(mass + at, mask=kept, other=0.0), kept, tl.sum(ties, 0)


@triton.jit
def pick(logits, mass, floor, allowed, uniform, vocab: tl.constexpr, block: tl.constexpr):
    """The first kept id at which the sum of masses exceeds `uniform` of their total."""
    total = tl.zeros_like(uniform)
    before = tl.zeros_like(allowed)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        weight, _, ties = kept_mass(logits, mass, at, before, floor, allowed, vocab)
        total += tl.sum(weight, 0)
        before += ties
    target = uniform * total
    token = vocab + tl.zeros_like(allowed)
    last = tl.zeros_like(allowed)
    total = tl.zeros_like(uniform)
    before = tl.zeros_like(allowed)
    for begin in range(0, vocab, block):
        at = begin + tl.arange(0, block)
        weight, kept, ties = kept_mass(logits, mass, at, before, floor, allowed, vocab)
        reached = kept & (total + tl.cumsum(weight, 0) > target)
        token = tl.minimum(token, tl.min(tl.where(reached, at, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
        total += tl.sum(weight, 0)
        before += ties
    return tl.minimum(token, last)


@triton.jit
def draw(
    logits: tl.tensor, mass: tl.tensor, out: tl.tensor,
    temperature: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    uniform: tl.tensor, vocab: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    mass += row.to(tl.int64) * vocab
    top, token, unknown = highest(logits, vocab, block)
    heat = tl.load(temperature + row)
    known = (unknown == 0) & (tl.abs(value_of(top)) < float("inf"))
    if known & (heat >= GREEDY_BELOW):
        floor = weigh(logits, mass, top, heat, tl.load(min_p + row), vocab, block)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        allowed = vocab + tl.zeros_like(k)
        if k > 0:
            floor, allowed = keep_top_k(logits, mass, floor, top, k, vocab, block)
        if p < 1.0:
            floor, allowed = keep_top_p(logits, mass, floor, allowed, top, p, vocab, block)
        token = pick(logits, mass, floor, allowed, tl.load(uniform + row), vocab, block)
    tl.store(out + row, token.to(tl.int64))
