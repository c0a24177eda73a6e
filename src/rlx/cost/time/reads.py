"""Where the loads of a body go as the axes of its loop nest advance, at known sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np

from rlx.ir.dim import Dim
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.scalar import LOADS, Scalar, load_index
from rlx.records import dataclass

Size = Callable[[Dim], int]
"""Gives sizes at known values of their symbols."""
LINE_BYTES = 64
TRIED, SPREAD = 128, 16  # neighbours along an axis that are looked at: at its start, and everywhere
GUARDED = 256  # points at which a guard is looked at
BY_CONSTANT, DIVISION = 12.0, 60.0  # operations of an integer division in one lane

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "floor_div": lambda x, y: np.floor_divide(x, np.where(y == 0, 1, y)),
    "mod": lambda x, y: np.mod(x, np.where(y == 0, 1, y)),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": lambda c, x, y: np.asarray(np.where(c != 0, x, y)),
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
}


@dataclass(frozen=True)
class Read:
    """A load (or store) of an element: how far its place moves along each axis, in elements.

    A step of None means that it differs from index to index: a quotient or remainder, or an index that comes
    from data. Along `scattered` axes every lane computes its own index, in `index_operations`. A guarded load
    reads in the `part` of points where its guard holds.
    """

    operand: int
    itemsize: int
    steps: tuple[int | None, ...]
    guarded: bool = False
    index_operations: float = 0.0
    scattered: tuple[bool, ...] = ()
    part: float = 1.0
    start: int = 0  # elements before the first
    from_data: bool = False  # whether data say where

    def is_scattered(self, axis: int) -> bool:
        """Whether lanes along an axis compute indices of their own."""
        return bool(self.scattered) and self.scattered[axis]

    def computes_index(self, axis: int) -> bool:
        """Whether every lane along an axis finds its own element."""
        return self.steps[axis] is None or self.is_scattered(axis)

    def is_apart(self, axis: int) -> bool:
        """Whether lanes along an axis load their elements one by one."""
        return self.computes_index(axis) or self.steps[axis] not in (0, 1, -1)

    def footprint(self, space: Sequence[int], most: int | None = None) -> int:
        """Bytes of the cache lines that it touches, each counted once; `most` are the operand's own."""
        moving = [(abs(s), n) for s, n in zip(self.steps, space, strict=True) if s and n > 1]
        loose = prod(n for s, n in zip(self.steps, space, strict=True) if s is None)
        dense, run = 1, 1  # elements that lie together, and how far they reach
        others = loose
        for step, extent in sorted(moving):
            if step * self.itemsize < LINE_BYTES or step <= run:
                dense, run = dense * extent, max(run, step * (extent - 1) + run)
            else:
                others *= extent
        lines = -(-run * self.itemsize // LINE_BYTES) if dense > 1 else 1
        exact = run * self.itemsize if lines > 4 or others == 1 else lines * LINE_BYTES
        total = others * exact
        return total if most is None else min(total, most)


def read_of(load: Scalar, strides: Sequence[int], space: Sequence[int], size: Size) -> Read:
    """How a load moves through an operand with these strides.

    Code finds out where quotients and remainders of a plain load are neighbours in memory. Those of a guarded
    load it computes, unless they are decided wherever the guard holds.
    """
    index = load_index(load) if load.prim in LOADS else load.args
    rank, guarded = len(space), load.prim == "load_or"
    steps: list[int | None] = [0] * rank
    loose, start = list[tuple[Scalar, int]](), 0
    pairs = list(zip(index, strides, strict=False))
    for i, stride in pairs if guarded else _joined(pairs, size):
        parts = affine(i, rank)
        known = None if parts is None else [to_dim(c) for c in (*parts[0], parts[1])]
        if known is None or any(k is None for k in known):
            loose.append((i, stride))
            continue
        *moved, rest = (size(k) * stride for k in known)  # type: ignore[arg-type]
        steps, start = [s + k for s, k in zip(steps, moved, strict=True)], start + rest  # type: ignore[operator]
    part, held = (1.0, None) if not guarded else _held(load.args[0], space, size)
    operations, scattered = 0.0, (False,) * rank
    if loose:
        found = _probed(loose, space, size)
        follows = load.prim == "load" or (held is not None and _decided(loose, held, size))
        scattered = tuple(
            (f is None and not (follows and guarded))
            or (not follows and any(e.prim == "axis" and e.data == a for i, _ in loose for e in i.walk()))
            for a, f in enumerate(found)
        )
        steps = [None if f is None else s + f for s, f in zip(steps, found, strict=True)]  # type: ignore[operator]
        if follows and guarded:
            steps = [1 if s is None and a == rank - 1 else s for a, s in enumerate(steps)]
        operations = sum(_index_cost(e) for i, _ in loose for e in i.walk())
        zero = [np.zeros(1, np.int64)] * rank
        start += sum(int(np.ravel(_value(i, zero, size, {}))[0]) * stride for i, stride in loose)
    from_data = any(e.prim in LOADS for i, _ in loose for e in i.walk())
    item = load.dtype.itemsize
    return Read(load.data, item, tuple(steps), guarded, operations, scattered, part, start, from_data)


def _decided(parts: Iterable[tuple[Scalar, int]], at: Sequence[np.ndarray], size: Size) -> bool:
    """Whether all quotients in indices are 0 at these points: then there is nothing to divide."""
    known = dict[Scalar, np.ndarray]()
    for i, _ in parts:
        _value(i, at, size, known)
        for e in i.walk():
            if e.prim in ("floor_div", "mod"):
                value, by = known[e.args[0]], known[e.args[1]]
                if np.any((value < 0) | (value >= by)):
                    return False
            elif e.prim in LOADS:
                return False
    return True


def _joined(index: list[tuple[Scalar, int]], size: Size) -> list[tuple[Scalar, int]]:
    """Quotient and remainder of one index, which a reshape leaves, as that index."""
    out = list[tuple[Scalar, int]]()
    for i, stride in index:
        if out and i.prim == "mod" and out[-1][0].prim == "floor_div":
            (whole, outer), (inner, count) = out[-1], i.args
            same = whole.args[0] == inner and whole.args[1] == count
            extent = to_dim(count)
            if same and extent is not None and outer == size(extent) * stride:
                out[-1] = (inner, stride)
                continue
        out.append((i, stride))
    return out


def _index_cost(e: Scalar) -> float:
    """Operations of an index that every lane computes for itself."""
    if not e.args or e.prim in LOADS:
        return 0.0
    if e.prim not in ("floor_div", "mod"):
        return 1.0
    by = e.args[1]
    if by.prim != "const":
        return DIVISION
    return 1.0 if by.data and by.data & (by.data - 1) == 0 else BY_CONSTANT


def _held(guard: Scalar, space: Sequence[int], size: Size) -> tuple[float, list[np.ndarray]]:
    """The part of all points at which a guard holds, and some of them."""
    steps = [max(round(n * (0.5**0.5 + a / 7) % n), 1) if n else 1 for a, n in enumerate(space)]
    at = [np.arange(GUARDED) * (step | 1) % max(n, 1) for step, n in zip(steps, space, strict=True)]
    holds = np.broadcast_to(_value(guard, at, size, {}) != 0, (GUARDED,))
    return float(holds.mean()), [a[holds] for a in at]


def _probed(parts: Iterable[tuple[Scalar, int]], space: Sequence[int], size: Size) -> list[int | None]:
    """The step of a sum of indices along every axis, by looking at neighbours; None where it varies."""
    starts = [np.array([0, n // 3, n // 2 + n // 5]) for n in space]
    out: list[int | None] = []
    for a, extent in enumerate(space):
        if extent < 2:
            out.append(0)
            continue
        spread = np.linspace(0, extent - 2, SPREAD).astype(np.int64)
        places = np.unique(np.concatenate([np.arange(min(TRIED, extent - 1)), spread]))
        points = []
        for offset in (0, 1):
            at = [np.repeat(s[:, None], len(places), 1) for s in starts]
            at[a] = np.repeat(places[None, :] + offset, 3, 0)
            points.append(at)
        low, high = (sum(_value(i, at, size, {}) * stride for i, stride in parts) for at in points)
        differences = np.unique(np.broadcast_to(high - low, (3, len(places))))
        out.append(int(differences[0]) if len(differences) == 1 else None)
    return out


def _value(e: Scalar, at: Sequence[np.ndarray], size: Size, known: dict[Scalar, np.ndarray]) -> np.ndarray:
    """An index at points; what comes from data is some number that depends on where it is read."""
    found = known.get(e)
    if found is None:
        if e.prim == "const":
            found = np.asarray(int(e.data))
        elif e.prim == "axis":
            found = at[e.data]
        elif e.prim == "size":
            found = np.asarray(size(e.data))
        else:
            args = [_value(a, at, size, known) for a in e.args]
            rule = _ARITHMETIC.get(e.prim)
            if e.prim == "cast":
                found = args[0]
            elif rule is not None:
                found = np.asarray(rule(*args)).astype(np.int64)
            else:
                found = np.asarray(sum((a * 7919 for a in args), np.asarray(31)) % 1009)
        known[e] = found
    return found
