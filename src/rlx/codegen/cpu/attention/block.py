"""One block of queries of flash attention in f32; `flash.py` says what it computes and calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rlx.codegen.cpu.attention.mask import HIDDEN, KEYS, BlockMask, is_turned
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.vmath_exp import exp2_of_distance
from rlx.codegen.native.words import (
    Int,
    Word,
    bitcast,
    broadcast,
    call,
    fma,
    fmax_x86,
    fpext,
    fptrunc,
    gather,
    gep,
    i64,
    iota,
    lanes,
    load,
    loop,
    ptr,
    scatter,
    select,
    splat,
    store,
    transpose,
    udiv,
)
from rlx.ir.dim import Dim

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Access, Attention, AttentionSpec
    from rlx.target.cpu import Target

PARTIAL_SUMS = 4  # of a score: every fourth feature, or pair of them
LOG2E = math.log2(math.e)
SHORT = 32  # keys up to which code for their number gains less than it costs to compile


def tile_rows(target: Target) -> dict[int, int]:
    """Query vectors -> value columns of a tile of O^T. The sums, the query vectors and one vector of the
    other operand fit the registers; a product that is not fused with its addition takes one more.
    """
    if target.registers >= 32:
        return {1: 16, 2: 12, 3: 8}
    return {1: 12, 2: 6, 3: 4} if target.has_fma else {1: 12, 2: 6}


Rows = tuple[ptr, Int, Int, str]
"""Where rows are read: the first, elements to the next row and to the next column, their type."""


def gathered(place: ptr, index: Word, element: str, mask: Word) -> Word:
    """Elements of memory as floats."""
    found = gather(place, index, element if element == "float" else "i16", mask)
    return fpext(bitcast(found, vector(element, index.width)), "float")


def narrowed(x: Word, element: str) -> Word:
    """A result as memory holds it; 16-bit floats as their bits, which every target moves."""
    return x if element == "float" else bitcast(fptrunc(x, element), vector("i16", x.width))


class Scaling(NamedTuple):
    """From products of queries and keys to weights: what is multiplied with queries, with products before a
    mask (None: nothing), and with differences of scores before their power of 2.
    """

    queries: float
    before: float | None
    after: float
    adds: bool  # whether a mask is added; else it says what is seen

    @staticmethod
    def of(spec: AttentionSpec, in_pairs: bool) -> Scaling:
        """Pairs of bf16 are not scaled, which would round them again. Scores of which the largest stays the
        largest are scaled as late as that costs nothing.
        """
        scale, adds = spec.scale, spec.mask_kind == "add"
        if not in_pairs:
            return Scaling(scale if adds else scale * LOG2E, None, LOG2E if adds else 1.0, adds)
        if adds or not scale > 0:
            return Scaling(1.0, None if scale == 1.0 else scale, LOG2E, adds)
        return Scaling(1.0, None, scale * LOG2E, adds)

    @inline
    def masked(self, x: Word, mask: Word | None) -> Word:
        """Products as scores, with their mask."""
        if self.adds is True and mask is not None:
            return x + mask if self.before is None else fma(x, self.before, mask)
        if self.before is not None:
            x *= self.before
        return x if mask is None else select(mask != 0, x, HIDDEN)

    @inline
    def power(self, score: Word, base: Word) -> Word:
        """The weight of a score. Their difference is exact where it counts, also of large scores."""
        x = score - base
        if self.after != 1.0:
            x *= self.after
        return exp2_of_distance(x)


class Block:
    """The function for one number of query vectors."""

    def __init__(self, kernel: Attention, fn: Function, vectors: int) -> None:
        self.kernel, self.fn, self.vectors, self.spec = kernel, fn, vectors, kernel.spec
        self.scaling = kernel.scaling
        self.lanes, self.type, self.element = kernel.lanes, kernel.type, kernel.element
        self.nr = self.lanes * vectors
        self.scratch, self.q, self.k, self.v, self.o, self.mask = map(ptr, fn.args[1:7])
        self.first: Int = i64(fn.args[7])
        self.count: Int = i64(fn.args[8])
        self._sizes = fn.args[9]
        self.sizes: dict[int, i64] = {}  # known sizes that the function is given
        self.is_short = isinstance(self.spec.keys, int) and self.spec.keys <= SHORT
        starts, at = [], 0
        for rows in self.parts(kernel.spec, kernel.width):
            starts.append(gep(self.scratch, at * kernel.width, "float"))
            at += rows
        self.qt, self.ot, self.st, self.top, self.sum, self.alpha, *self.copies = starts
        copy = gep(self.scratch, at * kernel.width, "float")
        self.own_masks = BlockMask(self, copy) if is_turned(self.spec) else None
        in_rows = self.spec.k.column == 1 and self.spec.v.column == 1
        self.may_skip = type(self) is Block and in_rows
        self.right = 0 if self.spec.causal else self.spec.right if self.spec.right >= 0 else None
        self.left = self.spec.left if self.spec.left >= 0 else None  # keys that a query sees before itself

    @staticmethod
    def parts(spec: AttentionSpec, width: int) -> tuple[int, ...]:
        """Rows of scratch, `width` floats each: Q^T, O^T, S^T, three for the softmax, copies of operands."""
        return spec.depth, spec.value_depth, KEYS, 1, 1, 1

    def dim(self, d: Dim) -> Int:
        """A size. Known ones of short sequences are read at run time, too: steps of an unrolled decoder
        differ in them alone, and have their blocks in common."""
        if not isinstance(d, int) or d <= 1 or not self.is_short:
            return self.kernel.dim(d)
        if d not in self.sizes:
            place = self.fn.at_entry("ptr", f"getelementptr i64, {self._sizes}, i64 {len(self.sizes)}")
            self.sizes[d] = i64(self.fn.at_entry("i64", f"load i64, {place}, align 8"))
        return self.sizes[d]

    def at(self, base: ptr, row: Int, j: int) -> ptr:
        """Vector j of a row of a scratch matrix. It is called most often, so it uses the builder itself."""
        f = self.fn
        return ptr(f.gep(base, f.add(f.mul(row, self.nr), self.lanes * j), "float"))

    @inline
    def emit(self) -> None:
        spec = self.spec
        self.pack_queries()
        for j in range(self.vectors):
            store(splat(HIDDEN, self.lanes), self.at(self.top, 0, j))
        for j in range(self.vectors):
            store(splat(0.0, self.lanes), self.at(self.sum, 0, j))
        for i in loop(0, spec.value_depth * self.nr, self.lanes):
            store(splat(0.0, self.lanes), gep(self.ot, i, "float"))
        keys, start = self.dim(spec.keys), self.dim(0)
        self.position = self.first + self.dim(spec.offset)  # key position of the first query
        if self.right is not None:  # keys after the last query's reach are never touched
            keys = max(min(keys, self.position + self.count + self.right), 0)
        if self.left is not None:  # pairs of keys stay together
            start = udiv(max(self.position - self.left, 0), 2) * 2
        for k0 in loop(udiv(start, KEYS) * KEYS, keys, KEYS):
            first = k0 if self.left is None else max(k0, start)
            self.some_keys(first, min(keys, k0 + KEYS) - first)
        self.write()

    @inline
    def some_keys(self, k0: Int, n: Int) -> None:
        """A block of keys, without those at its ends that the mask hides from all queries."""
        masks = self.own_masks
        if masks is None:
            self.key_block(k0, n)
        elif self.may_skip:
            start, stop = masks.shown(k0, n)
            if start < stop:
                masks.fill(k0 + start, stop - start)
                self.key_block(k0 + start, stop - start)
        else:
            masks.fill(k0, n)
            self.key_block(k0, n)

    @inline
    def pack_queries(self) -> None:
        """Q^T with scale and log2 e folded in; lanes past the last query repeat it or hold zeros."""
        spec, step, factor = self.spec, self.dim(self.spec.q.row), self.scaling.queries
        for j in range(self.vectors):
            start = gep(self.q, step * (self.lanes * j), self.element)
            left = self.count - self.lanes * j
            if spec.q.column == 1 and spec.depth % self.lanes == 0:
                self.pack_squares(start, step, left, splat(factor, self.lanes), j)
            else:
                self.pack_columns(start, step, left, factor, j)

    @inline
    def pack_squares(self, start: ptr, step: Int, left: Int, factor: Word, j: int) -> None:
        """Rows of queries are read whole and transposed in registers; the last one stands in for others."""
        last = max(left - 1, 0)
        turn = _pack_square(self.lanes, self.element)
        for d in loop(0, self.spec.depth, self.lanes):
            source, target = gep(start, d, self.element), self.at(self.qt, d, j)
            call(turn, source, step, last, target, self.nr, factor)

    @inline
    def pack_columns(self, start: ptr, step: Int, left: Int, factor: float, j: int) -> None:
        column = self.dim(self.spec.q.column)
        exists = lanes(max(left, 0), self.lanes)
        index = iota(self.lanes) * splat(step, self.lanes, "i64")
        for d in loop(self.spec.depth):
            got = gathered(gep(start, d * column, self.element), index, self.element, exists)
            store(got * factor, self.at(self.qt, d, j))

    @inline
    def key_block(self, k0: Int, n: Int) -> None:
        for j in range(self.vectors):
            store(load(self.type, self.at(self.top, 0, j)), self.at(self.alpha, 0, j))
        self.scores(k0, n)
        bases, sums = [], []
        for j in range(self.vectors):
            top = load(self.type, self.at(self.alpha, 0, j))
            base = select(top == HIDDEN, 0.0, top)
            alpha = self.scaling.power(load(self.type, self.at(self.top, 0, j)), base)
            store(top, self.at(self.top, 0, j))
            store(alpha, self.at(self.alpha, 0, j))
            bases.append(base)
            sums.append(load(self.type, self.at(self.sum, 0, j)) * alpha)
        for j, total in enumerate(self.weights(n, bases, sums)):
            store(total, self.at(self.sum, 0, j))
        self.values(k0, n)

    @inline
    def weights(self, n: Int, bases: list[Word], sums: list[Word]) -> list[Word]:
        """P^T in place of S^T; gives the sums with the weights added."""
        for i in loop(n):
            added = []
            for j in range(self.vectors):
                place = self.at(self.st, i, j)
                p = self.scaling.power(load(self.type, place), bases[j])
                store(p, place)
                added.append(sums[j] + p)
            sums = added
        return sums

    @inline
    def scores(self, k0: Int, n: Int) -> None:
        """S^T of a block and, in place of `alpha`, the largest scores so far: tiles of key rows; the last one
        overlaps the one before it.
        """
        rows = self.score_rows()
        base, step, column, element = self.key_rows(k0, n)

        def tile(row: Int, height: int) -> None:
            starts = [gep(base, (row + i) * step, element) for i in range(height)]
            products = self.products(starts, column)
            for j in range(self.vectors):
                top = load(self.type, self.at(self.alpha, 0, j))
                for i, sums in enumerate(products):
                    x = self.seen(sums[j], k0, row + i, j)
                    store(x, self.at(self.st, row + i, j))
                    top = fmax_x86(x, top)  # a NaN makes the sum NaN
                store(top, self.at(self.alpha, 0, j))

        if n >= rows:
            last = n - rows
            for row in loop(0, n, rows):
                tile(min(row, last), rows)
        else:
            for row in loop(n):
                tile(row, 1)

    def score_rows(self) -> int:
        """Key rows of a tile of S^T. Their totals fit 32 registers as well; with 16, they are in memory while
        a partial sum runs.
        """
        has_room = self.kernel.module.target.registers >= 32
        return 12 // self.vectors if has_room else self.kernel.tile_rows[self.vectors]

    def key_rows(self, k0: Int, n: Int) -> Rows:
        """Where keys are read."""
        return self.rows_of(self.k, self.spec.k, k0)

    def value_rows(self, k0: Int, n: Int) -> Rows:
        """Where values are read."""
        return self.rows_of(self.v, self.spec.v, k0)

    @inline
    def rows_of(self, base: ptr, access: Access, k0: Int) -> Rows:
        step = self.dim(access.row)
        return gep(base, k0 * step, self.element), step, self.dim(access.column), self.element

    @inline
    def products(self, keys: list[ptr], column: Int) -> list[list[Word]]:
        """Scores of a few keys: for each of them, those of all vectors of queries.

        Each is the sum of four partial sums: of features 0, 4, 8 ..., of features 1, 5, 9 ..., and so on.
        Rows of single queries (`row.py`) add in the same order.
        """

        def pair(d: Int) -> tuple[list[Word], list[Word]]:
            q = [load(self.type, self.at(self.qt, d, j)) for j in range(self.vectors)]
            return [broadcast(gep(start, d * column, "float"), "float", self.lanes) for start in keys], q

        depth = self.spec.depth
        totals = [[splat(0.0, self.lanes)] * self.vectors] * len(keys)
        for first in loop(min(PARTIAL_SUMS, depth)):
            row, q = pair(first)
            sums = [[k * x for x in q] for k in row]
            for d in loop(first + PARTIAL_SUMS, depth, PARTIAL_SUMS):
                row, q = pair(d)
                added = zip(row, sums, strict=True)
                sums = [[fma(k, x, s) for x, s in zip(q, own, strict=True)] for k, own in added]
            totals = [[t + s for t, s in zip(*own, strict=True)] for own in zip(totals, sums, strict=True)]
        return totals

    @inline
    def seen(self, x: Word, k0: Int, row: Int, j: int) -> Word:
        """Scores of a key as they are weighed: with the mask, and -inf where a query may not see it."""
        key = k0 + row
        mask = None
        if self.own_masks is not None:
            mask = self.own_masks.read(row, j)
        elif self.spec.mask is not None:
            mask = self.mask_of(key, j)
        x = self.scaling.masked(x, mask)
        if self.right is self.left is None:
            return x
        return select(self.hidden(key, j), HIDDEN, x)

    @inline
    def mask_of(self, key: Int, j: int) -> Word:
        """The mask of a key, where it is the same for all queries or its keys lie apart."""
        spec, element = self.spec, self.kernel.mask_element
        assert spec.mask is not None
        step = self.dim(spec.mask.row)
        start = gep(self.mask, key * self.dim(spec.mask.column), element)
        if isinstance(step, int) and step == 0:
            return broadcast(start, element, self.lanes)
        start = gep(start, step * (self.lanes * j), element)
        exists = lanes(max(self.count - self.lanes * j, 0), self.lanes)
        index = iota(self.lanes) * splat(step, self.lanes, "i64")
        return gather(start, index, element, exists)

    @inline
    def hidden(self, key: Int, j: int) -> bool:
        """Lanes whose query may not see this key."""
        query = splat(self.position + self.lanes * j, self.lanes) + iota(self.lanes)
        place = splat(i64(key), self.lanes)
        late = early = False
        if self.right is not None:
            late = place > query + splat(self.right, self.lanes, "i64")
        if self.left is not None:
            early = place < query - splat(self.left, self.lanes, "i64")
        return late | early

    @inline
    def values(self, k0: Int, n: Int) -> None:
        """O^T = alpha O^T + V^T P^T, in tiles of value columns."""
        base, step, column, _ = self.value_rows(k0, n)

        def value(key: Int, d: Int) -> Word:
            return broadcast(gep(base, key * step + d * column, "float"), "float", self.lanes)

        def weight(key: Int, j: int) -> Word:
            return load(self.type, self.at(self.st, key, j))

        self.weigh(n, value, weight, lambda v, p, total: fma(v, p, total))

    @inline
    def weigh(
        self,
        count: Int,
        value: Callable[[Int, Int], Word],
        weight: Callable[[Int, int], Word],
        multiply_add: Callable[[Word, Word, Word], Word],
    ) -> None:
        """O^T += value(i, column) * weight(i, query vector), summed over i < count."""
        depth, vectors = self.spec.value_depth, self.vectors
        alphas = [load(self.type, self.at(self.alpha, 0, j)) for j in range(vectors)]

        def tile(first: Int, height: int) -> None:
            sums = [
                [load(self.type, self.at(self.ot, first + i, j)) * a for j, a in enumerate(alphas)]
                for i in range(height)
            ]
            for key in loop(count):
                p = [weight(key, j) for j in range(vectors)]
                added = []
                for i, before in enumerate(sums):
                    v = value(key, first + i)
                    added.append([multiply_add(v, x, s) for x, s in zip(p, before, strict=True)])
                sums = added
            for i, column in enumerate(sums):
                for j, s in enumerate(column):
                    store(s, self.at(self.ot, first + i, j))

        tiles = -(-depth // self.kernel.tile_rows[vectors])
        rows, larger = divmod(depth, tiles)  # a small last tile would wait for its sums
        for first in loop(0, larger * (rows + 1), rows + 1):
            tile(first, rows + 1)
        for first in loop(larger * (rows + 1), depth, rows):
            tile(first, rows)

    @inline
    def write(self) -> None:
        """O = (O^T / sum)^T; lanes that exist only."""
        spec, step = self.spec, self.dim(self.spec.o.row)
        for j in range(self.vectors):
            total = load(self.type, self.at(self.sum, 0, j))
            top = total if spec.sink is None else load(self.type, self.at(self.top, 0, j))
            factor = self.kernel.share(total, top, self.scratch)
            start = gep(self.o, step * (self.lanes * j), self.kernel.o_element)
            left = self.count - self.lanes * j
            if spec.o.column == 1 and spec.value_depth % self.lanes == 0:
                self.write_squares(start, step, left, factor, j)
            else:
                self.write_columns(start, step, left, factor, j)

    @inline
    def write_squares(self, start: ptr, step: Int, left: Int, factor: Word, j: int) -> None:
        turn = _write_square(self.lanes, self.kernel.o_element)
        for d in loop(0, self.spec.value_depth, self.lanes):
            source, target = self.at(self.ot, d, j), gep(start, d, self.kernel.o_element)
            call(turn, source, self.nr, factor, target, step, left)

    @inline
    def write_columns(self, start: ptr, step: Int, left: Int, factor: Word, j: int) -> None:
        column = self.dim(self.spec.o.column)
        exists = lanes(max(left, 0), self.lanes)
        index = iota(self.lanes) * splat(step, self.lanes, "i64")
        for d in loop(self.spec.value_depth):
            value = self.kernel.stored(load(self.type, self.at(self.ot, d, j)) * factor)
            scatter(value, gep(start, d * column, value.element), index, exists)


def _pack_square(lanes: int, element: str) -> str:
    """target[i][lane] = source[lane][i] * factor for a square; rows past `last` repeat it."""
    name, floats = f"rlx_pack_square_{lanes}_{element}", vector("float", lanes)
    return _pack.written(name, factor=floats, lanes=lanes, element=element)


@native(internal=True, noinline=True)
def _pack(
    source: ptr, step: i64, last: i64, target: ptr, width: i64, factor: Word, *, lanes: int, element: str
) -> None:
    rows = [gep(source, min(i64(i), last) * step, element) for i in range(lanes)]
    read = [fpext(load(vector(element, lanes), row), "float") for row in rows]
    for i, column in enumerate(transpose(read)):
        store(column * factor, gep(target, width * i, "float"))


def _write_square(lanes: int, element: str) -> str:
    """target[lane][i] = source[i][lane] * factor[lane] for the first `left` lanes of a square."""
    name, floats = f"rlx_write_square_{lanes}_{element}", vector("float", lanes)
    return _write.written(name, factor=floats, lanes=lanes, element=element)


@native(internal=True, noinline=True)
def _write(
    source: ptr, width: i64, factor: Word, target: ptr, step: i64, left: i64, *, lanes: int, element: str
) -> None:
    columns = [load(vector("float", lanes), gep(source, width * i, "float")) for i in range(lanes)]
    for i, row in enumerate(transpose([column * factor for column in columns])):
        place = gep(target, step * i, element)
        exists, value = left > i, narrowed(row, element)
        if exists:
            store(value, place)
