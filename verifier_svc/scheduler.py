"""What the next forward pass does: a pure function of the sessions' state.

A pass mixes prefill chunks, single tokens and trees. Admission is first come first served by
available slots, so nobody starves, and who runs has come before all who wait. Prompts are read in
order of arrival, in chunks that leave those who decode their pace. When slots run out drafts are
dropped first, then the youngest session is preempted (its tokens stay, its slots are recomputed
later). Available slots are those that are free and those that the prefix tree can give back.

*Trees that have not come.* A pass may begin when none of the awaited trees, the first, the first
two ... or all have come, and takes the sessions of the others with their roots alone. With
tokens(k) expected of a pass that waits for k trees, and seconds(k) from asking for them to its end,
the best rate that can be had is r = max tokens(k) / seconds(k): so many tokens of all sessions a
second of waiting costs. Of what can still be done that k is best whose tokens(k) - r * (seconds
until its end) is largest; at the moment of asking it is the k of r. A tree that is overdue is
expected to take as much longer again, so that waiting for it ends when it has cost what the tree
may bring; each tree's own limit holds besides, and holds alone while nobody is held up. A prompt
that a pass reads is held up like a token: its own answer waits behind it.

Nobody is left out for a pass of their own. For what one group of S sessions does in
draft(S) + step(S), two groups in alternation, one drafting while the other is verified, need
max(2 * step(S / 2), 2 * draft(S / 2)): the verifier reads its weights twice, and so does the
drafter. That is longer unless rows are what both spend their time on, and longer in any case where
both share cores (docs/performance.md, "Load, simulated").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifier_svc.awaiting import Awaited

# Trees that are expected within this part of a pass of each other come together.
_TOGETHER = 0.01


@dataclass(frozen=True, slots=True)
class SessionView:
    """The part of a running session's state that scheduling depends on."""

    session_id: str
    pending: int  # tokens without KV, at least 1 (the root)
    nodes: int = 0  # of the tree that has arrived
    awaited: Awaited | None = None  # the tree that has not come
    gain: float = 0.0  # tokens expected of the tree that has arrived or is awaited
    context: int = 0  # tokens with KV


@dataclass(frozen=True, slots=True)
class Limits:
    prefill_chunk: int  # prompt tokens of one pass
    # The same, while others decode with so many rows behind such contexts: for each of the prompts
    # that get any.
    prefill_beside: Callable[[int, Sequence[int], Sequence[SessionView]], Sequence[int]]
    row_budget: int  # tree rows of one pass
    step_seconds: Callable[[int], float]  # of a pass with so many rows
    headroom: int  # slots that an admission leaves for the first steps


@dataclass(frozen=True, slots=True)
class Share:
    """What one session does in a pass: `rows` tokens of prefill, or its root and `nodes`."""

    session_id: str
    rows: int = 1
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A pass to run, or a session to preempt before there can be one; with neither there is
    nothing to do until `wait_until` (None: until a message)."""

    shares: tuple[Share, ...] = ()
    preempted: str | None = None
    wait_until: float | None = None


def admits(price: int, available: int, running: Sequence[int], limits: Limits) -> bool:
    """Whether the first of those who wait can start, for `price` of the available slots.
    `running` are the pending tokens of those who have started: what their prompts still lack is
    spoken for. Alone in the pool every session fits."""
    return not running or price + limits.headroom <= available - sum(running)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A pass that waits for some of the awaited trees."""

    tokens: float  # expected of it
    seconds: float  # that it takes
    begins: float  # after the trees were asked for, if they come when they should
    left: float  # from now until it begins, as far as one knows


def plan(views: Sequence[SessionView], available: int, limits: Limits, now: float) -> Plan:
    """The next pass for running sessions in order of arrival; `now` is of the clock of what they
    await."""
    prefilling = [view for view in views if view.pending > 1]
    decoding = [view for view in views if view.pending == 1]
    shares = _decode_shares(decoding, limits)
    if shares:
        rows = sum(share.rows + share.nodes for share in shares)
        parts = limits.prefill_beside(rows, [view.context for view in decoding], prefilling)
        reading = [Share(v.session_id, part) for v, part in zip(prefilling, parts, strict=False)]
    else:
        reading = _prefill_shares(prefilling, limits.prefill_chunk)
    until = _waits_until(decoding, reading, limits, now)
    if until is not None:
        return Plan(wait_until=until)
    return _fit(views, shares + reading, available)


def _waits_until(
    decoding: Sequence[SessionView], reading: Sequence[Share], limits: Limits, now: float
) -> float | None:
    """When to look again, where waiting for trees is better than a pass without them."""
    awaited = [view.awaited for view in decoding if view.awaited is not None]
    if not awaited:
        return None
    until = min(each.until for each in awaited)
    if len(awaited) == len(decoding) and not reading:
        return until
    choices = _choices(decoding, reading, limits, now)
    rate = max(each.tokens / max(each.begins + each.seconds, 1e-9) for each in choices)
    best = max(choices, key=lambda each: each.tokens - rate * (each.left + each.seconds))
    at_once = choices[0]
    # No choice is worth a longer delay.
    delay = max(
        (each.tokens - at_once.tokens) / rate + at_once.seconds - each.seconds for each in choices
    )
    given_up = [each.expected + delay for each in awaited if each.expected + delay > now]
    return None if best is at_once or not given_up else min(until, *given_up)


def _choices(
    decoding: Sequence[SessionView], reading: Sequence[Share], limits: Limits, now: float
) -> list[_Choice]:
    """The pass that begins at once, the one that waits for the first tree, for two, ..."""
    late: list[tuple[Awaited, float]] = []
    # Whoever reads is held up as if it decoded.
    tokens = float(len(decoding) + len(reading))
    rows = len(decoding) + sum(share.rows for share in reading)
    for view in decoding:
        if view.awaited is not None:
            late.append((view.awaited, view.gain))
        elif view.nodes:
            tokens += view.gain
            rows += view.nodes
    late.sort(key=lambda each: each[0].expected)
    asked = max(each.asked for each, _ in late)
    begins, left = 0.0, 0.0
    seconds = limits.step_seconds(rows)
    together = _TOGETHER * seconds
    choices = [_Choice(tokens, seconds, now - asked, left)]
    for place, (each, gain) in enumerate(late, start=1):
        tokens += gain
        rows += each.nodes
        begins = max(begins, each.expected - asked)
        left = max(left, abs(each.expected - now))
        if place == len(late) or late[place][0].expected - each.expected > together:
            choices.append(_Choice(tokens, limits.step_seconds(rows), begins, left))
    return choices


def _decode_shares(decoding: Sequence[SessionView], limits: Limits) -> list[Share]:
    cap = limits.row_budget // max(1, len(decoding)) - 1
    return [Share(view.session_id, 1, max(0, min(view.nodes, cap))) for view in decoding]


def _prefill_shares(prefilling: Sequence[SessionView], chunk: int) -> list[Share]:
    shares: list[Share] = []
    left = chunk
    for view in prefilling:
        rows = min(left, view.pending)
        if rows:
            shares.append(Share(view.session_id, rows))
            left -= rows
    return shares


def _fit(views: Sequence[SessionView], shares: list[Share], available: int) -> Plan:
    """Drops drafts, then asks for the youngest session's slots, until the pass fits. What a
    session gives back depends on whom it shares with, so it is planned anew without it."""
    if sum(share.rows + share.nodes for share in shares) > available:
        shares = [Share(share.session_id, share.rows) for share in shares]
    if sum(share.rows for share in shares) > available and len(views) > 1:
        return Plan(preempted=views[-1].session_id)
    return Plan(tuple(shares))
