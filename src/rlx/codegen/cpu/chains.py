"""Chains of loads, each of which says where the next one reads: walks down trees, linked lists.

Vectors gain nothing there: a gather takes at least as long as the loads of its lanes, and the next one waits
for all of them. So lanes are walked as scalars, a few side by side, step by step. While one waits for a load,
others go on. 200 trees of 6 levels, one row, on Zen 5: 4.3 -> 1.5 us as x86-64-v3, 2.6 -> 1.5 with AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlx.codegen.cpu.primitives import register_type
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.kernel.scalar import LOADS, Scalar

if TYPE_CHECKING:
    from rlx.codegen.cpu.expression import Expression

LONG = 4  # loads one after the other
AT_ONCE = 4  # lanes side by side


def has_chain(expressions: Iterable[Scalar]) -> bool:
    """Whether an expression reads `LONG` elements one after the other, each where the one before says.

    >>> from rlx.ir.dtype import I64
    >>> from rlx.kernel.scalar import axis, load_checked
    >>> at = axis(0)
    >>> for _ in range(LONG):
    ...     at = load_checked(0, [at + 1], I64)
    >>> has_chain([at]), has_chain([at.args[0]])
    (True, False)
    """
    lengths: dict[Scalar, int] = {}
    for body in expressions:
        for e in body.walk():
            below = max((lengths[a] for a in e.args), default=0)
            lengths[e] = below + (e.prim in LOADS)
            if lengths[e] >= LONG:
                return True
    return False


def can_walk(at: Expression, s: Scalar) -> bool:
    """Whether the lanes of an expression can be walked: all that it needs is found at a single point, too."""
    if at.lane is None or at.lane.width == 1 or not has_chain([s]):
        return False
    return not any(e.prim == "acc" or e in at.saved for e in s.walk())


def walk(at: Expression, s: Scalar) -> Value:
    """The expression in every lane. The caller reports `at.bad`."""
    fn, lane = at.fn, at.lane
    assert lane is not None
    shared = {e: value for e, value in at.memo.items() if value.width == 1}
    points = []
    for number in range(lane.width):
        place = fn.value(fn.add(lane.base, number))
        if lane.mask is not None:  # a lane that does not exist does what the first one does
            place = fn.select(fn.extract(lane.mask, number), place, fn.value(lane.base))
        axes = [place if axis == lane.axis else i for axis, i in enumerate(at.axes)]
        points.append(
            type(at)(fn, at.dim, at.operands, axes, None, error=at.error, memo=dict(shared), bad=[])
        )
    steps = [e for e in s.walk() if e.prim in LOADS]
    for first in range(0, lane.width, AT_ONCE):
        for e in steps:
            for point in points[first : first + AT_ONCE]:
                point(e)
    found = constant(vector(register_type(s.dtype), lane.width), 0)
    for number, point in enumerate(points):
        found = fn.insert(found, point(s), number)
    bad = [flag for point in points for flag in point.bad or ()]
    if bad:
        total = bad[0]
        for flag in bad[1:]:
            total = fn.value(fn.or_(total, flag))
        at.report(total)
    return found
