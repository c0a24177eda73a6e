"""Simplify a nest before emission: loads become flat offsets, axes of size 1 vanish, neighbours merge."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rlx.codegen.cpu.rows.ranges import decided, in_range, in_units
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, known_eq
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.nests import Nest, Store
from rlx.kernel.scalar import Scalar, axis, const, rebuild, replace_axes, size
from rlx.records import dataclass


@dataclass(frozen=True)
class Accesses:
    """Element steps per axis of every flat load and store of a nest, and the axes used in any other way."""

    steps: tuple[Shape, ...]
    other: frozenset[int]


def bodies(nest: Nest) -> list[Scalar]:
    """All expressions of a nest."""
    return [*(s.body for s in nest.stats), *(s.body for s in nest.stores)]


def map_bodies(nest: Nest, change: Callable[[Scalar], Scalar]) -> Nest:
    """A nest with every expression rewritten; the same nest where none has changed."""
    old = bodies(nest)
    new = [change(body) for body in old]
    if all(map(operator.is_, new, old)):
        return nest
    made = iter(new)
    stats = tuple([replace(s, body=next(made)) for s in nest.stats])
    stores = tuple([replace(s, body=next(made)) for s in nest.stores])
    return replace(nest, stats=stats, stores=stores)


def flatten_loads(nest: Nest, strides: Sequence[Shape]) -> Nest:
    """Affine loads as `at(offset)`: one flat element offset into the operand's storage."""
    rank = len(nest.space)

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim != "load":
            return None
        if len(args) != len(strides[e.data]):
            raise UnsupportedError("an operand in a special layout can only be read by matmuls")
        total: list[Dim] = [0] * rank
        rest: Dim = 0
        for i, stride in _join(zip(args, strides[e.data], strict=True)):
            parts = affine(i, rank)
            if parts is None:
                return None
            steps = [to_dim(c) for c in parts[0]]
            start = to_dim(parts[1])
            if start is None or any(s is None for s in steps):
                return None
            total = [t + s * stride for t, s in zip(total, steps, strict=True) if s is not None]
            rest = rest + start * stride
        offset = const(0)
        for a, step in enumerate(total):
            offset = offset + axis(a) * size(step)
        return Scalar("at", (offset + size(rest),), e.dtype, e.data)

    return map_bodies(nest, lambda s: rebuild(s, change))


def split_blocks(nest: Nest) -> Nest:
    """A map with two axes for one that is only read by quotient and remainder, as blocked channels are."""
    if nest.stats:
        return nest
    for a, extent in enumerate(nest.space[:-1]):
        block = _block_of(nest, a)
        if block is not None and isinstance(extent, int) and extent % block == 0:
            return _split_axis(nest, a, extent // block, block)
    return nest


def _split_axis(nest: Nest, a: int, blocks: int, block: int) -> Nest:
    """A map whose axis `a` goes over blocks, and the next one inside them."""
    whole = axis(a) * block + axis(a + 1)
    point = [*(axis(i) for i in range(a)), whole, *(axis(i + 1) for i in range(a + 1, len(nest.space)))]

    def split(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim in ("floor_div", "mod") and args[0] == whole:
            return axis(a) if e.prim == "floor_div" else axis(a + 1)
        return None

    inside = map_bodies(nest, lambda s: rebuild(replace_axes(s, point), split))
    stores = tuple(
        replace(s, strides=(*s.strides[:a], s.strides[a] * block, *s.strides[a:])) for s in inside.stores
    )
    space = (*nest.space[:a], blocks, block, *nest.space[a + 1 :])
    return Nest(space, len(space), (), stores)


def _block_of(nest: Nest, a: int) -> int | None:
    """The one divisor of quotients and remainders of an axis that is read in no other way."""
    found: set[tuple[str, int]] = set()
    for body in bodies(nest):
        for e in body.walk():
            for arg in e.args:
                if arg.prim != "axis" or arg.data != a:
                    continue
                divisor = e.args[1].data if e.prim in ("floor_div", "mod") and e.args[0] is arg else None
                if not isinstance(divisor, int) or e.args[1].prim != "const":
                    return None
                found.add((e.prim, divisor))
    divisors = {divisor for _, divisor in found}
    return divisors.pop() if len(found) == 2 and len(divisors) == 1 and 0 not in divisors else None


def _join(indices: Iterable[tuple[Scalar, Dim]]) -> list[tuple[Scalar, Dim]]:
    """Quotient and remainder of one index, which a reshape leaves, as that index where they are together."""
    out: list[tuple[Scalar, Dim]] = []
    for index, stride in indices:
        if out and index.prim == "mod":
            (whole, outer), (part, count) = out[-1], index.args
            inner, unit = part.args if part.prim == "floor_div" else (part, const(1))
            size_, step, divisor = to_dim(count), to_dim(unit), None
            if whole.prim == "floor_div" and whole.args[0] == inner:
                divisor = to_dim(whole.args[1])
            if size_ is not None and step is not None and divisor is not None:
                if known_eq(divisor, size_ * step) is True and known_eq(outer, size_ * stride) is True:
                    out[-1] = (part, stride)
                    continue
        out.append((index, stride))
    return out


def accesses(nest: Nest) -> Accesses:
    """How the nest's expressions use its axes."""
    rank = len(nest.space)
    found: list[Shape] = []
    other: set[int] = set()
    for body in bodies(nest):
        inside: set[Scalar] = set()
        for e in body.walk():
            if e.prim != "at":
                continue
            parts = affine(e.args[0], rank)
            steps = None if parts is None else [to_dim(c) for c in parts[0]]
            if steps is None or any(s is None for s in steps):
                continue
            found.append(tuple(s for s in steps if s is not None))
            inside.add(e)
        other |= _axes_outside(body, inside)
    for store in nest.stores:
        kept = store.strides if store.full else (*store.strides, *(0,) * (rank - nest.outer))
        found.append(tuple(kept))
    return Accesses(tuple(found), frozenset(other))


def _axes_outside(body: Scalar, inside: set[Scalar]) -> set[int]:
    """Axes that occur outside of the flat loads `inside`."""
    out: set[int] = set()
    stack, seen = [body], set[Scalar]()
    while stack:
        e = stack.pop()
        if e in seen or e in inside:
            continue
        seen.add(e)
        if e.prim == "axis":
            out.add(e.data)
        stack.extend(e.args)
    return out


def drop_axis(nest: Nest, number: int, merged: bool) -> Nest:
    """Remove an axis: its index is 0; when merged, the next axis takes over its extent."""
    point = [
        axis(i) if i < number else const(0) if i == number else axis(i - 1) for i in range(len(nest.space))
    ]
    space = list(nest.space)
    if merged:
        space[number + 1] = space[number] * space[number + 1]
    del space[number]
    outer = nest.outer - (number < nest.outer)

    def thin(store: Store) -> Store:
        if not store.full and number >= nest.outer:
            return store
        return replace(store, strides=tuple(s for i, s in enumerate(store.strides) if i != number))

    changed = map_bodies(nest, lambda s: replace_axes(s, point))
    stores = tuple(thin(s) for s in changed.stores)
    return Nest(tuple(space), outer, changed.stats, stores, nest.columns)


def collapse(nest: Nest, shapes: Sequence[Shape], strides: Sequence[Shape]) -> Nest:
    """The nest with flat loads and as few axes as its accesses allow."""

    def known(body: Scalar) -> Scalar:
        return in_range(decided(body, nest.space), nest.space, shapes)

    nest = flatten_loads(map_bodies(nest, known), strides)
    # Which axes merge decides the order of sums: their loads stay as they are, though some could be flat now.
    joined = map_bodies(nest, lambda body: in_units(body, nest.space))
    nest = joined if joined is nest or nest.stats else flatten_loads(joined, strides)
    number = len(nest.space) - 1
    while number >= 0:
        if nest.space[number] == 1:
            nest = drop_axis(nest, number, merged=False)
        number -= 1
    number = len(nest.space) - 2
    while number >= 0:
        same_kind = (number < nest.outer) == (number + 1 < nest.outer)
        if same_kind and _mergeable(nest, number):
            nest = drop_axis(nest, number, merged=True)
        number -= 1
    return nest


def _mergeable(nest: Nest, number: int) -> bool:
    found = accesses(nest)
    if number in found.other or number + 1 in found.other:
        return False
    inner = nest.space[number + 1]
    return all(known_eq(steps[number], steps[number + 1] * inner) is True for steps in found.steps)
