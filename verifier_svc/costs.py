"""What something takes by its size, learned from measurements. Pure policy."""

from dataclasses import dataclass, field
from itertools import pairwise

# Of a measurement in a running mean, at least: the first ones count alike.
_WEIGHT = 0.1
# Of what one point's change says of all others: a machine that is slower now is so everywhere,
# while what is not done is not measured.
_COMMON = 0.25
_FEW = 8  # sizes that are told apart


@dataclass(slots=True)
class _Point:
    size: float
    seconds: float
    measurements: int = 1


@dataclass(slots=True)
class CostCurve:
    """Running means of what was measured, close sizes together; straight lines in between.

    Below the smallest size a thing takes as long as that, and above the largest one as well, or in
    proportion to its size where `proportional`.
    """

    proportional: bool
    _points: dict[int, _Point] = field(default_factory=dict[int, _Point])

    def observe(self, size: int, seconds: float) -> None:
        bucket = _bucket(size)
        point = self._points.get(bucket)
        if point is None:
            between = self._between(size)
            point = self._points[bucket] = _Point(size, between or seconds)
            if between is None:
                return
        point.measurements += 1
        weight = max(_WEIGHT, 1 / point.measurements)
        before = point.seconds
        point.size += weight * (size - point.size)
        point.seconds += weight * (seconds - point.seconds)
        common = (point.seconds / before) ** _COMMON if before > 0 else 1.0
        for other in self._points.values():
            if other is not point:
                other.seconds *= common

    def seconds(self, size: int) -> float:
        """0 while nothing has been measured."""
        if not self._points:
            return 0.0
        between = self._between(size)
        if between is not None:
            return between
        smallest = min(self._points.values(), key=lambda point: point.size)
        if size <= smallest.size:
            return smallest.seconds
        last = max(self._points.values(), key=lambda point: point.size)
        return last.seconds * (size / last.size if self.proportional else 1.0)

    def _between(self, size: int) -> float | None:
        """What a size takes of which smaller and larger ones were measured."""
        points = sorted(self._points.values(), key=lambda point: point.size)
        for below, above in pairwise(points):
            if below.size <= size <= above.size:
                share = (size - below.size) / (above.size - below.size)
                return below.seconds + share * (above.seconds - below.seconds)
        return None


def _bucket(size: int) -> int:
    """Larger sizes are taken together in intervals of half of the power of two below."""
    if size <= _FEW:
        return size
    half = 1 << (size.bit_length() - 2)
    return size // half * half
