"""Mean and squared distances from it, exact for long rows far from 0.

The usual way needs the mean before it can take distances: a second pass over every row. Where the length of
rows is known, one pass does both (Welford's method in every lane): every lane keeps the mean of its elements
and their squared distances from it; at the end lanes are put together as samples of known sizes. Where only
a run tells the length, there are two passes, and the second also adds the distances: their mean is what the
mean was rounded by.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.primitives import register_type
from rlx.codegen.cpu.rows.reduction import BlockedSum, Reducer, Round, only_where
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, constant, lanes_of
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Index, Word, fma, reduce_add, select, sitofp, splat
from rlx.ir.dim import Dim
from rlx.kernel.nests import Stat, Store
from rlx.kernel.rounding import is_long_row
from rlx.kernel.scalar import Scalar, call, convert, is_acc, rebuild, size, uses_acc

LONG = 4096  # elements of a row: in longer ones, sums and means lose more than one rounding


def in_one_pass(stats: Sequence[Stat], stores: Sequence[Store], number: int, extent: Dim) -> bool:
    """Whether one pass takes statistic `number` and the next one."""
    return is_long_row(extent) and are_moments(stats, stores, number, extent)


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
    return all(uses_acc(body, number + 1) or not uses_acc(body, number) for body in later)


def distance_of(stats: Sequence[Stat], number: int) -> Scalar:
    """What is squared in `are_moments`."""
    return stats[number + 1].body.args[0]


def mean_of(stats: Sequence[Stat], number: int) -> Scalar:
    """What the distances of `are_moments` are taken from."""
    return distance_of(stats, number).args[1]


def with_rest(body: Scalar, mean: Scalar, rest: int) -> Scalar:
    """Distances from the mean, less statistic `rest`: what the mean is off by."""

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim != "sub" or args[1] != mean:
            return None
        return call("sub", call("sub", *args), Scalar("acc", (), e.dtype, rest))

    return rebuild(body, change)


def _is_mean(s: Scalar, number: int, extent: Dim) -> bool:
    """Whether an expression is statistic `number` over the elements of a row (or times the exact inverse)."""
    if s.prim not in ("mul", "div") or not is_acc(s.args[0], number):
        return False
    if not isinstance(extent, int):
        return s.prim == "div" and s.args[1] == convert(size(extent), s.dtype)
    if s.args[1].prim != "const":
        return False
    factor = s.args[1].data
    return bool(factor == extent if s.prim == "div" else factor * extent == 1)


class SquaresReducer(BlockedSum):
    """Squared distances from a mean, and what the mean is off by: the mean of the distances.

    In rows of at most LONG elements it counts as nothing: there both ways to take a mean round alike.
    """

    def __init__(self, fn: Function, stat: Stat, lanes: int, extent: Index) -> None:
        super().__init__(fn, stat, lanes)
        self.extent = extent

    @property
    def result_types(self) -> list[str]:
        return [register_type(self.dtype)] * 2

    def start(self) -> list[Word]:
        return [Word(constant(self.type, 0.0))] * 2

    def leave(self, held: list[Word], found: list[Word]) -> list[Word]:
        each = (super(SquaresReducer, self).leave(held[i::2], found[i : i + 1]) for i in range(2))
        return [v for pair in zip(*each, strict=True) for v in pair]

    @inline
    def add(
        self, carried: list[Word], x: Word, position: Index, mask: Value | None, now: Round
    ) -> list[Word]:
        squares, away = carried
        return only_where(mask, [squares + x * x, away + x], carried)

    @inline
    def results(self, groups: list[list[Word]], pivot: Word | None = None) -> list[Word]:
        squares, away = [self.finish([held[i::2] for held in groups]) for i in range(2)]
        rest = away / sitofp(self.extent, away.type)
        better = squares - away * rest
        better = select(better < 0.0, 0.0, better)
        counts = self.extent > LONG
        return [select(counts, better, squares), select(counts, rest, 0.0)]


class MomentsReducer(Reducer):
    """Carries mean and squared distances of every lane.

    Long rows are taken less a pivot, their first element: elements far from 0 would cost every mean a
    rounding of their size. The third result is what the mean, a number of that size, is off by.
    """

    def __init__(
        self, fn: Function, stat: Stat, lanes: int, extent: int, groups: int, mean: Scalar, results: int
    ) -> None:
        super().__init__(fn, stat, lanes)
        self.extent, self.groups, self.mean, self.number = extent, groups, mean, results

    @property
    def result_types(self) -> list[str]:
        return [register_type(self.dtype)] * self.number

    def start(self) -> list[Word]:
        return [Word(constant(self.type, 0.0))] * 2

    @inline
    def add(
        self, carried: list[Word], x: Word, position: Index, mask: Value | None, now: Round
    ) -> list[Word]:
        mean, squares = carried
        away = x - mean
        new_mean = fma(away, splat(now.inverse(x.element), x.width), mean)
        return only_where(mask, [new_mean, fma(away, x - new_mean, squares)], carried)

    @inline
    def results(self, groups: list[list[Word]], pivot: Word | None = None) -> list[Word]:
        """Sum and squared distances of all lanes of all groups, and the rest of the mean where it counts."""
        sizes = self.sizes()
        total = reduce_add(_tree([n * mean for n, (mean, _) in zip(sizes, groups, strict=True)]))
        own = total / float(self.extent)
        middle = splat(own, self.lanes)
        parts = []
        for n, (mean, squares) in zip(sizes, groups, strict=True):
            away = mean - middle
            parts.append(fma(away * away, n, squares))
        all_squares = reduce_add(_tree(parts))
        if pivot is None:
            return [total, all_squares]
        total = fma(pivot, float(self.extent), total)
        by = float(self.mean.args[1].data)
        read = total / by if self.mean.prim == "div" else total * by
        return [total, all_squares, pivot - read + own][: self.number]

    def sizes(self) -> list[Word]:
        """How many elements each lane of each group has seen."""
        rounds, rest = divmod(self.extent, self.lanes * self.groups)
        more, left = divmod(rest, self.lanes)
        first = [float(rounds + more + (lane < left)) for lane in range(self.lanes)]
        others = [Word(constant(self.type, float(rounds))) for _ in range(1, self.groups)]
        return [Word(lanes_of(self.type, first)), *others]


@inline
def _tree(vectors: list[Word]) -> Word:
    """A sum of vectors, by halves; there are a power of two of them."""
    if len(vectors) == 1:
        return vectors[0]
    return _tree([a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)])
