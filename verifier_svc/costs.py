"""What something takes by its size, learned from measurements. Pure policy."""

from bisect import bisect_left
from dataclasses import dataclass, field

# Of a measurement in a running mean, at least: the first ones count alike.
_WEIGHT = 0.1
# Of what one point's change says of all others: a machine that is slower now is so everywhere,
# while what is not done is not measured.
_COMMON = 0.25
# Measurements of a point that began as a straight line's: they correct the line, and say nothing of
# the machine.
_SETTLING = 3
_FEW = 8  # sizes that are told apart


@dataclass(slots=True)
class _Point:
    size: float
    seconds: float
    settling: int  # measurements until it tells of others
    measurements: int = 1


@dataclass(slots=True)
class CostCurve:
    """Running means of what was measured, close sizes together; straight lines in between.

    Below the smallest size a thing takes as long as that, and above the largest one as well, or in
    proportion to its size where `proportional`.
    """

    proportional: bool
    # In ascending order, and with them the means of the sizes in each.
    _buckets: list[int] = field(default_factory=list[int])
    _points: list[_Point] = field(default_factory=list[_Point])

    def observe(self, size: int, seconds: float) -> None:
        bucket = _bucket(size)
        at = bisect_left(self._buckets, bucket)
        if self._buckets[at : at + 1] != [bucket]:
            between = self._between(size)
            self._buckets.insert(at, bucket)
            if between is None:
                self._points.insert(at, _Point(size, seconds, 0))
                return
            self._points.insert(at, _Point(size, between, _SETTLING))
        point = self._points[at]
        point.measurements += 1
        weight = max(_WEIGHT, 1 / point.measurements)
        before = point.seconds
        point.size += weight * (size - point.size)
        point.seconds += weight * (seconds - point.seconds)
        if point.settling:
            point.settling -= 1
            return
        common = (point.seconds / before) ** _COMMON if before > 0 else 1.0
        for other in self._points:
            if other is not point:
                other.seconds *= common

    def seconds(self, size: int) -> float:
        """0 while nothing has been measured."""
        if not self._points:
            return 0.0
        between = self._between(size)
        if between is not None:
            return between
        first, last = self._points[0], self._points[-1]
        if size <= first.size:
            return first.seconds
        return last.seconds * (size / last.size if self.proportional else 1.0)

    def _between(self, size: int) -> float | None:
        """What a size takes of which smaller and larger ones were measured."""
        at = bisect_left(self._points, size, key=lambda point: point.size)
        if not 0 < at < len(self._points):
            return None
        below, above = self._points[at - 1], self._points[at]
        share = (size - below.size) / (above.size - below.size)
        return below.seconds + share * (above.seconds - below.seconds)


def _bucket(size: int) -> int:
    """Larger sizes are taken together in intervals of half of the power of two below."""
    if size <= _FEW:
        return size
    half = 1 << (size.bit_length() - 2)
    return size // half * half
