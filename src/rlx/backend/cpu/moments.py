"""Sum and sum of squared distances from the mean in one pass over a row (Welford's method in every lane).

The usual way needs the mean before it can take distances: a second pass over every row. Here every lane keeps
the mean of its elements and their squared distances from it; at the end lanes are put together as samples of
known sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backend.cpu.irtext import Function, Int
from rlx.backend.cpu.irtypes import Value, constant, lanes_of
from rlx.backend.cpu.primitives import register_type
from rlx.backend.cpu.reduction import Reducer, Round
from rlx.ir.compose import Stat, Store
from rlx.ir.dim import Dim
from rlx.ir.scalar import Scalar

FROM = 512  # elements of a row: in shorter ones a second pass is cheap, and putting lanes together is not


def are_moments(stats: Sequence[Stat], stores: Sequence[Store], number: int, extent: Dim) -> bool:
    """Whether statistic `number` is a sum and the next one that of squared distances from its mean.

    What is stored must need both: infinite elements turn both into NaN, but a sum alone would be infinite.
    """
    if number + 1 >= len(stats) or not isinstance(extent, int) or extent < FROM:
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


def _is_mean(s: Scalar, number: int, extent: int) -> bool:
    """Whether an expression is statistic `number` over the elements of a row (or times the exact inverse)."""
    if s.prim not in ("mul", "div") or not _is_acc(s.args[0], number) or s.args[1].prim != "const":
        return False
    factor = s.args[1].data
    return bool(factor == extent if s.prim == "div" else factor * extent == 1)


def _is_acc(s: Scalar, number: int) -> bool:
    return s.prim == "acc" and (s.data or 0) == number


def _uses(body: Scalar, number: int) -> bool:
    return any(_is_acc(e, number) for e in body.walk())


class MomentsReducer(Reducer):
    """Carries mean and squared distances of every lane."""

    parts = 2

    def __init__(self, fn: Function, stat: Stat, lanes: int, extent: int, groups: int) -> None:
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
        fn, sizes = self.fn, self.sizes()
        total = fn.reduce_add(
            self.tree([fn.fmul(n, mean) for n, (mean, _) in zip(sizes, groups, strict=True)])
        )
        middle = fn.splat(fn.fdiv(total, float(self.extent)), self.lanes)
        parts = []
        for n, (mean, squares) in zip(sizes, groups, strict=True):
            away = fn.fsub(mean, middle)
            parts.append(fn.fma(fn.fmul(away, away), n, squares))
        return [total, fn.reduce_add(self.tree(parts))]

    def sizes(self) -> list[Value]:
        """How many elements each lane of each group has seen."""
        rounds, rest = divmod(self.extent, self.lanes * self.groups)
        more, left = divmod(rest, self.lanes)
        first = [float(rounds + more + (lane < left)) for lane in range(self.lanes)]
        return [
            lanes_of(self.type, first),
            *(constant(self.type, float(rounds)) for _ in range(1, self.groups)),
        ]

    def tree(self, vectors: list[Value]) -> Value:
        while len(vectors) > 1:
            vectors = [self.fn.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]
