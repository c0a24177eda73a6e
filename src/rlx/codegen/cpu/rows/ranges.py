"""What the extents of a nest's axes decide about its expressions: conditions that always hold, divisions of
indices that are smaller than the divisor. Concatenation, padding and reshapes leave many of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.ir.dim import Dim, known_le, known_lt
from rlx.ir.dtype import BOOL, I64
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.intervals import Interval, Intervals
from rlx.kernel.scalar import COMPARED, Scalar, axes, axis, const, rebuild, replace_axes, select, size

DIVIDED = ("mod", "floor_div")
LARGE = 1 << 31  # indices with smaller factors do not overflow


def decided(body: Scalar, space: Shape) -> Scalar:
    """An expression over axes of these extents, without what they decide.

    >>> import rlx.ops
    >>> from rlx.kernel.scalar import axis
    >>> decided(axis(0) % 8 + axis(1) // 4, (8, 3))
    i0
    """
    if not any(e.prim in COMPARED or e.prim in DIVIDED for e in body.walk()):
        return body
    intervals = Intervals(space)

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim in COMPARED and all(a.dtype is I64 for a in args):
            truth = _truth(e.prim, args[0], args[1], space, intervals)
            return None if truth is None else const(truth, BOOL)
        if e.prim in DIVIDED and e.dtype is I64 and _truth("less", args[0], args[1], space):
            if _truth("greater_equal", args[0], const(0), space):
                return args[0] if e.prim == "mod" else const(0)
        if e.prim == "logical_and" and args[1] in _parts(args[0]):
            return args[0]
        if e.prim == "where":
            return _choice(*args)
        if e.prim == "load_or" and args[0].prim == "const":
            return Scalar("load", args[2:], e.dtype, e.data) if args[0].data else args[1]
        return None

    return rebuild(body, change)


def in_range(body: Scalar, space: Shape, shapes: Sequence[Shape]) -> Scalar:
    """An expression whose checked loads are plain where all indices are inside their operand of `shapes`.

    >>> import rlx.ops
    >>> from rlx.ir.dtype import F32
    >>> from rlx.kernel.scalar import axis, load_checked
    >>> in_range(load_checked(0, [axis(0) * 2], F32), (4,), [(7,)]).prim
    'load'
    """
    if not any(e.prim == "load_checked" for e in body.walk()):
        return body
    intervals = Intervals(space)

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim != "load_checked":
            return None
        for index, extent in zip(args, shapes[e.data], strict=True):
            if _truth("greater_equal", index, const(0), space, intervals) is not True:
                return None
            if _truth("less", index, size(extent), space, intervals) is not True:
                return None
        return Scalar("load", args, e.dtype, e.data)

    return rebuild(body, change)


def cuts(bodies: Iterable[Scalar], space: Shape, number: int, reads: bool) -> list[int]:
    """Where along an axis choices by that axis alone change: those between values, and after them those
    whether anything is read, if `reads` says so.

    >>> import rlx.ops
    >>> from rlx.ir.dtype import F32
    >>> from rlx.kernel.scalar import axis, load
    >>> x = load(0, axes(2), F32)
    >>> cuts([select(axis(0) < 3, select(axis(0) * -1 + 5 >= 0, x, x), x)], (9, 4), 0, False)
    [3, 6]
    """
    found: dict[int, None] = {}
    for prim in ("where", "load_or") if reads else ("where",):
        conditions = [e.args[0] for body in bodies for e in body.walk() if e.prim == prim]
        changes = {_change(e, space, number) for c in conditions for e in c.walk() if e.prim in COMPARED}
        found |= dict.fromkeys(sorted(c for c in changes if c is not None))
    return list(found)


def _change(e: Scalar, space: Shape, number: int) -> int | None:
    """The first index along an axis at which a comparison of that axis alone has changed its answer."""
    parts = affine(e.args[0] - e.args[1], len(space)) if e.args[0].dtype is I64 else None
    rest = None if parts is None else to_dim(parts[1])
    if parts is None or not isinstance(rest, int):
        return None
    step = parts[0][number]
    if not isinstance(step, int) or not step or any(s for i, s in enumerate(parts[0]) if i != number):
        return None
    return -(rest // step) if step > 0 else rest // -step + 1


def decided_within(body: Scalar, space: Shape, number: int, low: int, high: int) -> Scalar:
    """An expression where an axis is in low .. high, without what that decides."""
    here = axes(len(space))
    shifted = replace_axes(body, [a + low if i == number else a for i, a in enumerate(here)])
    made = decided(shifted, (*space[:number], high - low, *space[number + 1 :]))
    return replace_axes(made, [a - low if i == number else a for i, a in enumerate(here)])


def in_units(body: Scalar, space: Shape) -> Scalar:
    """An expression whose quotients and remainders are those of fewer axes where extents allow it.

    Of an index 512 * i + j with j < 512, the quotient by 1024 is i // 2. It does not vary along j then, and
    loads at (i % 2) * 512 + j are contiguous along it.

    >>> import rlx.ops
    >>> i = axis(0) * 512 + axis(1)
    >>> in_units(i // 1024, (8, 512)), in_units(i % 1024, (8, 512))
    (floor_div:i64(i0, 2), add:i64(mul:i64(mod:i64(i0, 2), 512), i1))
    """

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        found = _units(args[0], args[1], space) if e.prim in DIVIDED and e.dtype is I64 else None
        if found is None:
            return None
        unit, many, rest = found
        count = const(args[1].data // unit)
        return many // count if e.prim == "floor_div" else many % count * unit + rest

    return decided(rebuild(body, change), space) if any(e.prim in DIVIDED for e in body.walk()) else body


def _units(index: Scalar, by: Scalar, space: Shape) -> tuple[int, Scalar, Scalar] | None:
    """The largest unit that divides the divisor, and the index as many of them and a rest within one."""
    parts = affine(index, len(space))
    if parts is None or parts[1].prim != "const" or by.prim != "const" or by.data <= 0:
        return None
    steps = [step for step in parts[0] if isinstance(step, int) and abs(step) < LARGE]
    if len(steps) < len(space) or abs(parts[1].data) >= LARGE:
        return None
    for unit in sorted({abs(s) for s in steps if s and by.data % s == 0} - {1}, reverse=True):
        many, rest = const(parts[1].data // unit), const(parts[1].data % unit)
        for number, step in enumerate(steps):
            if step % unit == 0:
                many = many + axis(number) * (step // unit)
            else:
                rest = rest + axis(number) * step
        if _truth("less", rest, const(unit), space) and _truth("greater_equal", rest, const(0), space):
            return unit, many, rest
    return None


def _parts(condition: Scalar) -> set[Scalar]:
    """What must hold for a condition to hold."""
    if condition.prim != "logical_and":
        return {condition}
    return {condition} | _parts(condition.args[0]) | _parts(condition.args[1])


def _choice(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar | None:
    """A choice that is made already, or was made by the choice around it."""
    if condition.prim == "const":
        return yes if condition.data else no
    inner = yes.args[1] if yes.prim == "where" and yes.args[0] in _parts(condition) else yes
    other = no.args[2] if no.prim == "where" and no.args[0] == condition else no
    if inner is yes and other is no:
        return None
    return select(condition, inner, other)


def _truth(prim: str, a: Scalar, b: Scalar, space: Shape, intervals: Intervals | None = None) -> bool | None:
    """Whether a < b (or a >= b) holds at every point, or at none; None where that is not known."""
    bounds = _bounds(a - b, space)
    if bounds is None and intervals is not None:
        bounds = _difference(intervals.of(a), intervals.of(b))
    if bounds is None:
        return None
    low, high = bounds
    always, never = known_lt(high, 0) is True, known_le(0, low) is True
    if not always and not never:
        return None
    return always if prim == "less" else never


def _difference(a: Interval | None, b: Interval | None) -> tuple[Dim, Dim] | None:
    """The least and the greatest value of a - b."""
    return None if a is None or b is None else (a[0] - b[1], a[1] - b[0])


def _bounds(index: Scalar, space: Shape) -> tuple[Dim, Dim] | None:
    """The least and the greatest value of an index over all points."""
    parts = affine(index, len(space))
    rest = None if parts is None else to_dim(parts[1])
    if parts is None or rest is None:
        return None
    low: Dim = rest
    high: Dim = rest
    for step, extent in zip(parts[0], space, strict=True):
        if not isinstance(step, int):
            return None
        reach = step * (extent - 1)
        low, high = (low, high + reach) if step > 0 else (low + reach, high)
    return low, high
