"""The sums of one Winograd tile without transforms, for tiles whose window holds an Inf or NaN.

Transforms add and subtract neighbours: one Inf would turn the whole tile into NaNs. Such tiles are rare, and
known by four sums: the corner points of a transformed tile take in every element of its window between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.native.irtext import constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    any_lane,
    broadcast,
    fma,
    gep,
    i64,
    is_nan,
    load,
    loop,
    noalias,
    ptr,
    store,
    udiv,
    ult,
    urem,
)
from rlx.ops.storage.winograd import RESTORE

ELEMENT = "float"


@inline
def is_spoilt(grid: Sequence[Sequence[Word]]) -> bool:
    """Whether any lane's corner sums are not finite."""
    first, last = grid[0], grid[-1]
    total = (first[0] + first[-1]) + (last[0] + last[-1])
    return any_lane(is_nan(total - total))


def direct_tile(m: int, lanes: int, adds: bool = False) -> str:
    """Name of the function that sums m x m pixels of one block of output channels, or adds to such sums."""
    return _direct_tile.written(f"winograd.direct{m}" + (".add" if adds else ""), m=m, lanes=lanes, adds=adds)


@native(internal=True, noinline=True)
def _direct_tile(
    x: noalias,
    w: noalias,
    to: noalias,
    block: i64,
    line: i64,
    height: i64,
    width: i64,
    top: i64,
    left: i64,
    blocks: i64,
    point: i64,
    wide: i64,
    *,
    m: int,
    lanes: int,
    adds: bool,
) -> None:
    """Sum m x m pixels of one block of output channels into `to`.

    `x` is an image with blocked channels, the window begins at (top, left). `w` are the block's first weights
    at point 0, with `point` elements to the next point and `wide` to the next input channel.
    """
    type_ = vector(ELEMENT, lanes)

    def add_tap(row: i64, column: i64, p: int, q: int, total: Word) -> Word:
        """`total` and one element of the window times its weight, over all input channels."""
        origin = gep(x, row * line + column * lanes, ELEMENT)
        for c in loop(blocks * lanes):
            at = udiv(c, lanes) * block + urem(c, lanes)
            value = broadcast(gep(origin, at, ELEMENT), ELEMENT, lanes)
            weight = _restored(gep(w, c * wide, ELEMENT), point, m, p, q, type_)
            total = fma(value, weight, total)
        return total

    for n in loop(m * m):
        row, column = top + udiv(n, m), left + urem(n, m)
        total = load(type_, gep(to, n * lanes, ELEMENT)) if adds else Word(constant(type_, 0))
        for p in range(3):
            for q in range(3):
                at_h, at_w = row + p, column + q
                if ult(at_h, height):
                    if ult(at_w, width):
                        total = add_tap(at_h, at_w, p, q, total)
        store(total, gep(to, n * lanes, ELEMENT))


@inline
def _restored(w: ptr, point: i64, m: int, p: int, q: int, type_: str) -> Word:
    """Element (p, q) of a 3x3 kernel from its transformed points."""
    restore, side = RESTORE[m], m + 2

    def line(i: int) -> Word:
        places = [gep(w, point * (i * side + j), ELEMENT) if restore[q][j] else None for j in range(side)]
        return _combined(restore[q], [None if at is None else load(type_, at) for at in places])

    return _combined(restore[p], [line(i) if restore[p][i] else None for i in range(side)])


@inline
def _combined(factors: Sequence[float], values: Sequence[Word | None]) -> Word:
    """A sum of values with factors. Products are rounded one by one: equal ones cancel, so that a line of
    zeros in a kernel stays one, and Inf times it is NaN."""
    total = None
    for factor, value in zip(factors, values, strict=True):
        if value is not None:
            scaled = value if factor == 1 else value * float(factor)
            total = scaled if total is None else total + scaled
    assert total is not None
    return total
