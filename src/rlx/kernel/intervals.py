"""What values integer expressions can have, by the extents of axes, the ranges of dtypes, and constants."""

from __future__ import annotations

from rlx.ir.types import Shape
from rlx.kernel.scalar import LOADS, Scalar

Interval = tuple[int, int]


class Intervals:
    """The least and the greatest value of expressions over axes of these extents.

    >>> from rlx.kernel.scalar import axis
    >>> Intervals((8, "n")).of(axis(0) * 2 + 3), Intervals((8, "n")).of(axis(1))
    ((3, 17), None)
    """

    def __init__(self, space: Shape) -> None:
        self._space = space
        self._known: dict[Scalar, Interval | None] = {}

    def of(self, s: Scalar) -> Interval | None:
        """Both are values of the dtype; None where nothing is known."""
        for e in s.walk():
            if e not in self._known:
                found = self._find(e)
                if found is not None and not e.dtype.is_bool:
                    if found[0] < e.dtype.min_value or found[1] > e.dtype.max_value:
                        found = None  # it wraps around
                self._known[e] = found
        return self._known[s]

    def _find(self, e: Scalar) -> Interval | None:
        if e.dtype.is_bool:
            return 0, 1
        if not e.dtype.is_int:
            return None
        if e.prim == "const":
            return int(e.data), int(e.data)
        if e.prim == "axis":
            extent = self._space[e.data]
            return (0, extent - 1) if isinstance(extent, int) else None
        if e.prim in LOADS or e.prim == "at":
            return int(e.dtype.min_value), int(e.dtype.max_value)
        found = [self._known[a] for a in e.args]
        if e.prim == "bitwise_and":
            masks = [a.data for a in e.args if a.prim == "const" and a.data >= 0]
            return (0, min(masks)) if masks else None
        if e.prim == "where":
            return _both(found[1], found[2])
        if e.prim == "cast":
            return found[0]
        if len(found) != 2 or found[0] is None or found[1] is None:
            return None
        (low, high), (first, last) = found[0], found[1]
        if e.prim == "add":
            return low + first, high + last
        if e.prim == "sub":
            return low - last, high - first
        if e.prim == "mul":
            corners = (low * first, low * last, high * first, high * last)
            return min(corners), max(corners)
        if e.prim == "minimum":
            return min(low, first), min(high, last)
        if e.prim == "maximum":
            return max(low, first), max(high, last)
        return None


def _both(a: Interval | None, b: Interval | None) -> Interval | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))
