"""The sums of one Winograd tile without transforms, for tiles whose window holds an Inf or NaN.

Transforms add and subtract neighbours: one Inf would turn the whole tile into NaNs. Such tiles are rare, and
known by four sums: the corner points of a transformed tile take in every element of its window between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.ops.storage.winograd import RESTORE

ELEMENT = "float"


def is_spoilt(fn: Function, grid: Sequence[Sequence[Value]]) -> Value:
    """Whether any lane's corner sums are not finite."""
    first, last = grid[0], grid[-1]
    total = fn.fadd(fn.fadd(first[0], first[-1]), fn.fadd(last[0], last[-1]))
    return fn.any_lane(fn.is_nan(fn.fsub(total, total)))


def emit_direct_tile(module: Module, m: int, lanes: int) -> str:
    """Name of the function that sums m x m pixels of one block of output channels into `to`.

    `x` is an image with blocked channels, the window begins at (top, left). `w` are the block's first weights
    at point 0, with `point` elements to the next point and `wide` to the next input channel.
    """
    name = f"winograd.direct{m}"
    if module.defines(name):
        return name
    words = ("block", "line", "height", "width", "top", "left", "blocks", "point", "wide")
    params = [("ptr noalias", "x"), ("ptr noalias", "w"), ("ptr noalias", "to"), *(("i64", s) for s in words)]
    fn = module.function(name, params, internal=True, noinline=True)
    x, w, to, block, line, height, width, top, left, blocks, point, wide = fn.args
    type_ = vector(ELEMENT, lanes)

    def tap(row: Int, column: Int, p: int, q: int, total: Value) -> Value:
        """`total` and one element of the window times its weight, over all input channels."""
        origin = fn.gep(x, fn.add(fn.mul(row, line), fn.mul(column, lanes)), ELEMENT)

        def channel(c: Int, sums: list[Value]) -> list[Value]:
            at = fn.add(fn.mul(fn.udiv(c, lanes), block), fn.urem(c, lanes))
            value = fn.broadcast(fn.gep(origin, at, ELEMENT), ELEMENT, lanes)
            weight = _restored(fn, fn.gep(w, fn.mul(c, wide), ELEMENT), point, m, p, q, type_)
            return [fn.fma(value, weight, sums[0])]

        return fn.loop(0, fn.mul(blocks, lanes), 1, [total], channel)[0]

    def tap_inside(row: Int, column: Int, p: int, q: int, total: Value) -> Value:
        """The same, unless the element is outside the image."""

        def of_line() -> list[Value]:
            there = fn.cmp("ult", column, width)
            return fn.if_value(there, lambda: [tap(row, column, p, q, total)], lambda: [total])

        return fn.if_value(fn.cmp("ult", row, height), of_line, lambda: [total])[0]

    def pixel(n: Int, _: list[Value]) -> None:
        row, column = fn.add(top, fn.udiv(n, m)), fn.add(left, fn.urem(n, m))
        total = constant(type_, 0)
        for p in range(3):
            for q in range(3):
                total = tap_inside(fn.add(row, p), fn.add(column, q), p, q, total)
        fn.store(total, fn.gep(to, fn.mul(n, lanes), ELEMENT))

    fn.loop(0, m * m, 1, [], pixel)
    return name


def _restored(fn: Function, w: Value, point: Int, m: int, p: int, q: int, type_: str) -> Value:
    """Element (p, q) of a 3x3 kernel from its transformed points."""
    restore, side = RESTORE[m], m + 2

    def line(i: int) -> Value:
        places = [
            fn.gep(w, fn.mul(point, i * side + j), ELEMENT) if restore[q][j] else None for j in range(side)
        ]
        return _combined(fn, restore[q], [None if at is None else fn.load(type_, at) for at in places])

    return _combined(fn, restore[p], [line(i) if restore[p][i] else None for i in range(side)])


def _combined(fn: Function, factors: Sequence[float], values: Sequence[Value | None]) -> Value:
    """A sum of values with factors. Products are rounded one by one: equal ones cancel, so that a line of
    zeros in a kernel stays one, and Inf times it is NaN."""
    total: Value | None = None
    for factor, value in zip(factors, values, strict=True):
        if value is not None:
            scaled = value if factor == 1 else fn.fmul(value, constant(value.type, float(factor)))
            total = scaled if total is None else fn.fadd(total, scaled)
    assert total is not None
    return total
