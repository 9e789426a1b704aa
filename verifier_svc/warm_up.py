"""Measures passes before anything is served: what rows cost, and what a context adds."""

import time

from coppice.tree import MAX_ROWS, DraftTree
from verifier_svc.engine import Engine
from verifier_svc.runner import Rows

_PASSES, _ENOUGH_SECONDS = 3, 0.1
_CONTEXT, _PART = 2048, 16


def warm_up(engine: Engine) -> None:
    """Takes the slots that it likes: no session may have any."""
    rows, slots = 1, engine.runner.slots
    while rows <= min(max(MAX_ROWS, engine.settings.verifier.row_budget), slots):
        starts = range(0, rows, MAX_ROWS)
        seconds = _seconds(engine, [_chain(at, min(MAX_ROWS, rows - at)) for at in starts])
        engine.budget.observe_step(rows, seconds)
        engine.pace.measure_rows(rows, seconds)
        rows *= 2
    longest = min(engine.runner.model.config.max_context, slots)
    context = min(_CONTEXT, longest - _PART)
    one, many = (_seconds(engine, [_part(context, tokens)]) for tokens in (1, _PART))
    engine.pace.measure_context(context, one, many, _PART)


def _seconds(engine: Engine, batch: list[Rows]) -> float:
    """Of the fastest of some passes; of long ones, which vary less, fewer."""
    taken: list[float] = []
    while len(taken) < _PASSES and sum(taken) < _ENOUGH_SECONDS:
        started = time.monotonic()
        engine.runner.run(batch)
        taken.append(time.monotonic() - started)
    return min(taken)


def _chain(slot: int, rows: int) -> Rows:
    """A chain at the start of a context, in slots from `slot` on."""
    chain = DraftTree(tuple(range(rows - 1)), tuple(range(rows - 1)), (0.0,) * (rows - 1))
    return Rows([0] * rows, range(rows), range(slot, slot + rows), [], chain.masks(), rows)


def _part(context: int, tokens: int) -> Rows:
    """A part of a prompt, behind a context in the first slots."""
    places = range(context, context + tokens)
    return Rows([0] * tokens, places, places, range(context), None, tokens)
