"""The plan of a pass as the words of 32 bits that the first rank tells the others."""

from collections.abc import Sequence
from itertools import islice

from verifier_svc.runner import Rows

STOP = -1  # in place of the number of sessions: there will be no further pass


def encode(batch: Sequence[Rows]) -> list[int]:
    """How many sessions; then of each its sizes, and what is in its rows."""
    words = [len(batch)]
    for rows in batch:
        masked = rows.masks is not None
        words += (len(rows.tokens), len(rows.context), masked, rows.logits, rows.greedy)
        words += rows.tokens
        words += rows.positions
        words += rows.slots
        words += rows.context
        for mask in rows.masks or ():
            words += (_signed(mask & 0xFFFFFFFF), mask >> 32)
    return words


def decode(words: Sequence[int]) -> list[Rows] | None:
    """The batch; None for STOP."""
    rest = iter(words)
    count = next(rest)
    if count == STOP:
        return None
    batch: list[Rows] = []
    for _ in range(count):
        rows, context, masked, logits, greedy = islice(rest, 5)
        tokens, positions, slots = (list(islice(rest, rows)) for _ in range(3))
        read = list(islice(rest, context))
        masks = [next(rest) & 0xFFFFFFFF | next(rest) << 32 for _ in range(rows * masked)]
        batch.append(
            Rows(tokens, positions, slots, read, masks if masked else None, logits, bool(greedy))
        )
    return batch


def _signed(word: int) -> int:
    """The same 32 bits as a signed number."""
    return word - (1 << 32) if word >> 31 else word
