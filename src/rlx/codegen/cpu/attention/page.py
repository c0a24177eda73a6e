"""One page of attention over pages: scores of rows, their softmax, and results. `paged` has what calls it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlx.codegen.native import vmath
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    broadcast,
    builder,
    byte_at,
    fma,
    fmax,
    gep,
    i64,
    lanes,
    load,
    loop,
    prefetch,
    ptr,
    reduce,
    select,
    splat,
    store,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.paged import Paged

LINE = 64  # bytes of a cache line
LOG2E = math.log2(math.e)
HIDDEN = -math.inf
Q, K, V, TABLE, SLOTS, LENGTHS = range(6)
K_SCALES, V_SCALES = 6, 7  # of codes


def _parts(count: int, most: int) -> list[range]:
    """range(count) in as few parts of at most `most` as there can be, about equal.

    >>> _parts(8, 3)
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    parts = -(-count // most)
    return [range(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


@native(internal=True, noinline=True)
def attend_page(
    args: ptr,
    q: ptr,
    weights: ptr,
    sums: ptr,
    tops: ptr,
    totals: ptr,
    alphas: ptr,
    k: ptr,
    v: ptr,
    later: ptr,
    low: i64,
    high: i64,
    *,
    kernel: Paged,
    rows: int,
    vectors: int,
) -> None:
    """Rows that see positions from low to high of a page, which are in its first `vectors` vectors: their
    scores, softmax and results. Values are prefetched during scores, and the next keys, which are at `later`,
    during results.
    """
    page = _Page(kernel, rows, vectors)
    page.scores(q, weights, k, v, low, high)
    for r in range(rows):
        page.softmax(r, weights, tops, totals, alphas)
    page.results(weights, sums, alphas, v, later, low, high)


@native(internal=True, noinline=True)
def attend_codes(
    args: ptr,
    q: ptr,
    weights: ptr,
    sums: ptr,
    tops: ptr,
    totals: ptr,
    alphas: ptr,
    k: ptr,
    v: ptr,
    later: ptr,
    k_scales: ptr,
    v_scales: ptr,
    low: i64,
    high: i64,
    *,
    kernel: Paged,
    rows: int,
    vectors: int,
) -> None:
    """The same for codes, whose scales multiply scores, and weights after they are summed."""
    page = _Page(kernel, rows, vectors, (k_scales, v_scales))
    page.scores(q, weights, k, v, low, high)
    for r in range(rows):
        page.softmax(r, weights, tops, totals, alphas)
    page.results(weights, sums, alphas, v, later, low, high)


class _Page:
    """The function for so many rows, and positions in so many vectors."""

    def __init__(self, kernel: Paged, rows: int, vectors: int, scales: tuple[ptr, ptr] | None = None) -> None:
        self.kernel, self.rows, self.lanes, self.scales = kernel, rows, kernel.lanes, scales
        self.vectors, self.positions = vectors, min(vectors * kernel.lanes, kernel.page)
        self.type, self.most = vector("float", kernel.lanes), kernel.vectors(rows)

    @inline
    def place(self, base: ptr, array: int, r: int, i: Int) -> ptr:
        """Float i of a row of an array."""
        return gep(base, i + r * self.kernel.steps[array], "float")

    @inline
    def scores(self, q: ptr, weights: ptr, k: ptr, v: ptr, low: i64, high: i64) -> None:
        kernel, strides = self.kernel, self.kernel.frame.inputs[K].steps
        for js in _parts(self.vectors, self.most):
            acc = [[splat(0.0, self.lanes) for _ in js] for _ in range(self.rows)]
            for d in loop(kernel.depth):
                if js.start == 0:
                    self.fetch(v, V, d, kernel.depth, self.positions)
                start = gep(k, d * kernel.dim(strides[2]), kernel.element(K))
                acc = self.added(acc, js, K, start, kernel.dim(strides[3]), kernel.page, q, 0, d)
            for number, j in enumerate(js):
                seen = self.below(high, j) & ~self.below(low, j)
                for r in range(self.rows):
                    score = self.capped(self.scaled(acc[r][number], K_SCALES, j))
                    store(select(seen, score, HIDDEN), self.place(weights, 1, r, j * self.lanes))

    @inline
    def scaled(self, x: Word, operand: int, j: int) -> Word:
        """Numbers of positions, times the scales that codes have there."""
        if self.scales is None:
            return x
        slot = self.kernel.frame.inputs[operand]
        step = self.kernel.dim(slot.steps[3 if operand == K_SCALES else 2])
        base = self.scales[operand - K_SCALES]
        return x * self.kernel.floats(operand, base, step, j, self.kernel.page)

    @inline
    def added(
        self,
        acc: list[list[Word]],
        js: range,
        operand: int,
        start: ptr,
        step: Int,
        count: int,
        numbers: ptr,
        array: int,
        i: Int,
    ) -> list[list[Word]]:
        """Sums, with number i of each row times a row of a matrix."""
        row = [self.kernel.floats(operand, start, step, j, count) for j in js]
        made = []
        for r in range(self.rows):
            number = broadcast(self.place(numbers, array, r, i), "float", self.lanes)
            made.append([fma(number, x, s) for x, s in zip(row, acc[r], strict=True)])
        return made

    @inline
    def fetch(self, matrix: ptr, operand: int, i: Int, count: int, height: int) -> None:
        """Prefetch part i of `count` of the first rows that a page has of keys or values without gaps."""
        slot = self.kernel.frame.inputs[operand]
        width = slot.shape[3]
        if slot.steps[2:] == (width, 1):
            assert isinstance(width, int)
            share = -(-slot.dtype.itemsize * height * width // (count * LINE)) * LINE
            for byte in range(0, share, LINE):
                prefetch(byte_at(matrix, i * share + byte))

    @inline
    def below(self, position: Int, j: int) -> Word:
        """Lanes of vector j of a page before a position."""
        return lanes(max(position - j * self.lanes, 0), self.lanes)

    @inline
    def capped(self, score: Word) -> Word:
        """A score, in powers of 2."""
        cap = self.kernel.softcap
        return Word(vmath.apply(builder(), "tanh", score)) * (cap * LOG2E) if cap else score

    @inline
    def softmax(self, r: int, weights: ptr, tops: ptr, totals: ptr, alphas: ptr) -> None:
        """Scores of a page become weights; sums so far shrink by alpha."""
        places = [self.place(weights, 1, r, j * self.lanes) for j in range(self.vectors)]
        own = [self.place(base, 3, r, 0) for base in (tops, totals, alphas)]
        best = load(self.type, places[0])
        for place in places[1:]:
            best = max(best, load(self.type, place))
        top, total = load(self.type, own[0]), load(self.type, own[1])
        new_top = max(top, splat(reduce(fmax, best), self.lanes))
        base = select(new_top == HIDDEN, 0.0, new_top)
        alpha = self.power(top - base)
        total = total * alpha
        for j, place in enumerate(places):
            weight = self.power(load(self.type, place) - base)
            store(self.scaled(weight, V_SCALES, j), place)
            total += weight
        store(new_top, own[0])
        store(total, own[1])
        store(alpha, own[2])

    @inline
    def power(self, x: Word) -> Word:
        return Word(vmath.apply(builder(), "exp2", x))

    @inline
    def results(self, weights: ptr, sums: ptr, alphas: ptr, v: ptr, later: ptr, low: i64, high: i64) -> None:
        kernel, strides = self.kernel, self.kernel.frame.inputs[V].steps
        for js in _parts(kernel.steps[2] // self.lanes, self.most):
            acc = []
            for r in range(self.rows):
                alpha = load(self.type, self.place(alphas, 5, r, 0))
                acc.append([load(self.type, self.place(sums, 2, r, j * self.lanes)) * alpha for j in js])
            for p in loop(low, high):
                if js.start == 0:
                    self.fetch(later, K, p, kernel.page, kernel.depth)
                start = gep(v, p * kernel.dim(strides[2]), kernel.element(V))
                acc = self.added(acc, js, V, start, kernel.dim(strides[3]), kernel.value_depth, weights, 1, p)
            for r in range(self.rows):
                for number, j in enumerate(js):
                    store(acc[r][number], self.place(sums, 2, r, j * self.lanes))
