"""Sum and sum of squared distances from the mean in one pass over a row (Welford's method in every lane).

The usual way needs the mean before it can take distances: a second pass over every row. Here every lane keeps
the mean of its elements and their squared distances from it; at the end lanes are put together as samples of
known sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backend.cpu.irtext import Function, Int
from rlx.backend.cpu.irtypes import Value, constant
from rlx.backend.cpu.primitives import register_type
from rlx.backend.cpu.reduction import Reducer, Round
from rlx.ir.compose import Stat, Store
from rlx.ir.dim import Dim
from rlx.ir.scalar import Scalar


def are_moments(stats: Sequence[Stat], stores: Sequence[Store], number: int, extent: Dim) -> bool:
    """Whether statistic `number` is a sum and the next one that of squared distances from its mean.

    What is stored must need both: infinite elements turn both into NaN, but a sum alone would be infinite.
    """
    if number + 1 >= len(stats):
        return False
    total, squares = stats[number : number + 2]
    floats = total.body.dtype.name in ("f32", "f64") and total.dtype is total.body.dtype is squares.dtype
    if not floats or total.combine != "sum" or squares.combine != "sum":
        return False
    product = squares.body
    if product.prim != "mul" or product.args[0] != product.args[1] or product.args[0].prim != "sub":
        return False
    element, mean = product.args[0].args
    if element != total.body or not _is_mean(mean, number, extent):
        return False
    later = [*(s.body for s in stats[number + 2 :]), *(s.body for s in stores)]
    return all(_uses(body, number + 1) or not _uses(body, number) for body in later)


def _is_mean(s: Scalar, number: int, extent: Dim) -> bool:
    """Whether an expression is statistic `number` over the elements of a row (or times the exact inverse)."""
    if s.prim == "mul":
        return _is_acc(s.args[0], number) and s.args[1].prim == "const" and s.args[1].data * extent == 1
    return s.prim == "div" and _is_acc(s.args[0], number) and _is_extent(s.args[1], extent)


def _is_acc(s: Scalar, number: int) -> bool:
    return s.prim == "acc" and (s.data or 0) == number


def _uses(body: Scalar, number: int) -> bool:
    return any(_is_acc(e, number) for e in body.walk())


def _is_extent(s: Scalar, extent: Dim) -> bool:
    """Whether an expression is the number of elements of a row, as a float."""
    if s.prim == "const":
        return bool(s.data == extent)
    return s.prim == "cast" and s.args[0].prim == "size" and bool(s.args[0].data == extent)


class MomentsReducer(Reducer):
    """Carries mean and squared distances of every lane."""

    parts = 2

    def __init__(self, fn: Function, stat: Stat, lanes: int, extent: Int, groups: int) -> None:
        super().__init__(fn, stat, lanes)
        self.extent, self.groups = extent, groups

    @property
    def result_types(self) -> list[str]:
        return [register_type(self.dtype)] * 2

    def start(self) -> list[Value]:
        return [constant(self.type, 0.0)] * 2

    def add(
        self, carried: list[Value], x: Value, position: Int, mask: Value | None, now: Round
    ) -> list[Value]:
        fn, (mean, squares) = self.fn, carried
        away = fn.fsub(x, mean)
        new_mean = fn.fma(away, fn.splat(now.inverse(x.element), x.width), mean)
        new = [new_mean, fn.fma(away, fn.fsub(x, new_mean), squares)]
        return new if mask is None else [fn.select(mask, n, c) for n, c in zip(new, carried, strict=True)]

    def results(self, groups: list[list[Value]]) -> list[Value]:
        """Sum and squared distances of all lanes of all groups."""
        fn, element = self.fn, register_type(self.dtype)
        sizes = self.sizes()
        total = fn.reduce_add(
            self.tree([fn.fmul(n, mean) for n, (mean, _) in zip(sizes, groups, strict=True)])
        )
        count = fn.sitofp(fn.value(self.extent), element)
        middle = fn.splat(fn.fdiv(total, count), self.lanes)
        parts = []
        for n, (mean, squares) in zip(sizes, groups, strict=True):
            away = fn.fsub(mean, middle)
            parts.append(fn.fma(fn.fmul(away, away), n, squares))
        return [total, fn.reduce_add(self.tree(parts))]

    def sizes(self) -> list[Value]:
        """How many elements each lane of each group has seen."""
        fn, element = self.fn, register_type(self.dtype)
        block = self.lanes * self.groups
        rounds = fn.udiv(self.extent, block)
        rest = fn.urem(self.extent, block)
        more, left = fn.udiv(rest, self.lanes), fn.urem(rest, self.lanes)
        others, first = (
            fn.splat(fn.sitofp(fn.value(n), element), self.lanes) for n in (rounds, fn.add(rounds, more))
        )
        tail = fn.select(fn.lanes(left, self.lanes), constant(self.type, 1.0), constant(self.type, 0.0))
        return [fn.fadd(first, tail), *(others for _ in range(self.groups - 1))]

    def tree(self, vectors: list[Value]) -> Value:
        while len(vectors) > 1:
            vectors = [self.fn.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]
