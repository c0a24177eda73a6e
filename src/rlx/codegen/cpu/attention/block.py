"""One block of queries of flash attention in f32; `attention.py` says what it computes and calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.mask import KEYS, BlockMask, is_turned
from rlx.codegen.native import vmath
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.ir.dim import Dim

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Access, Attention, AttentionSpec

TILE_ROWS = {32: {1: 16, 2: 12, 3: 8}, 16: {1: 12, 2: 6}}
"""Registers -> query vectors -> key rows of a tile of S^T, value columns of one of O^T. The sums, the query
vectors and one vector of the other operand fit the registers."""
LOG2E = math.log2(math.e)
SHORT = 32  # keys up to which code for their number gains less than it costs to compile


Rows = tuple[Value, Int, Int, str]
"""Where rows are read: the first, elements to the next row and to the next column, their type."""


def gathered(fn: Function, place: Value, index: Value, element: str, mask: Value) -> Value:
    """Elements of memory as floats."""
    bits = element if element == "float" else "i16"
    found = fn.gather(place, index, bits, mask)
    return fn.fpext(fn.bitcast(found, vector(element, index.width)), "float")


def narrowed(fn: Function, x: Value, element: str) -> Value:
    """A result as memory holds it; 16-bit floats as their bits, which every target moves."""
    if element == "float":
        return x
    return fn.bitcast(fn.fptrunc(x, element), vector("i16", x.width))


class Block:
    """The function for one number of query vectors."""

    def __init__(self, kernel: Attention, fn: Function, vectors: int) -> None:
        self.kernel, self.fn, self.vectors, self.spec = kernel, fn, vectors, kernel.spec
        self.lanes, self.type, self.element = kernel.lanes, kernel.type, kernel.element
        self.nr = self.lanes * vectors
        _, scratch, self.q, self.k, self.v, self.o, self.mask, self.first, self.count, self._sizes = fn.args
        self.sizes: dict[int, Value] = {}  # known sizes that the function is given
        self.is_short = isinstance(self.spec.keys, int) and self.spec.keys <= SHORT
        starts, at = [], 0
        for rows in self.parts(kernel.spec, kernel.width):
            starts.append(fn.gep(scratch, at * kernel.width, "float"))
            at += rows
        self.qt, self.ot, self.st, self.top, self.sum, self.alpha, *self.copies = starts
        copy = fn.gep(scratch, at * kernel.width, "float")
        self.own_masks = BlockMask(self, copy) if is_turned(self.spec) else None
        self.after = LOG2E if self.spec.mask_kind == "add" else 1.0  # what differences of scores are times
        self.before = 1.0  # what a product is times before a mask

    @staticmethod
    def parts(spec: AttentionSpec, width: int) -> tuple[int, ...]:
        """Rows of scratch, `width` floats each: Q^T, O^T, S^T, three for the softmax, copies of operands."""
        return spec.depth, spec.value_depth, KEYS, 1, 1, 1

    def dim(self, d: Dim) -> Int:
        """A size. Known ones of short sequences are read at run time, too: steps of an unrolled decoder
        differ in them alone, and have their blocks in common."""
        if not isinstance(d, int) or d <= 1 or not self.is_short:
            return self.kernel.table.dim(self.fn, d)
        if d not in self.sizes:
            place = self.fn.at_entry("ptr", f"getelementptr i64, {self._sizes}, i64 {len(self.sizes)}")
            self.sizes[d] = self.fn.at_entry("i64", f"load i64, {place}, align 8")
        return self.sizes[d]

    def at(self, base: Value, row: Int, j: int) -> Value:
        """Vector j of a row of a scratch matrix."""
        fn = self.fn
        return fn.gep(base, fn.add(fn.mul(row, self.nr), self.lanes * j), "float")

    def each(self, f: Callable[[int], None]) -> None:
        for j in range(self.vectors):
            f(j)

    def emit(self) -> None:
        fn, spec = self.fn, self.spec
        self.pack_queries()
        zero, least = constant(self.type, 0.0), constant(self.type, -math.inf)
        self.each(lambda j: fn.store(least, self.at(self.top, 0, j)))
        self.each(lambda j: fn.store(zero, self.at(self.sum, 0, j)))
        fn.loop(
            0,
            spec.value_depth * self.nr,
            self.lanes,
            [],
            lambda i, _: fn.store(zero, fn.gep(self.ot, i, "float")),
        )
        keys = self.dim(spec.keys)
        start: Int = 0
        self.position = fn.value(fn.add(self.first, self.dim(spec.offset)))  # key position of the first query
        ahead = 0 if spec.causal else spec.right
        if ahead >= 0:  # keys after the last query's reach are never touched
            reach = fn.add(fn.add(self.position, self.count), ahead)
            keys = fn.smax(fn.smin(keys, reach), 0)
        if spec.left >= 0:
            early = fn.smax(fn.sub(self.position, spec.left), 0)
            start = fn.mul(fn.udiv(early, KEYS), KEYS)
        fn.loop(start, keys, KEYS, [], lambda k0, _: self.some_keys(k0, fn.smin(fn.sub(keys, k0), KEYS)))
        self.write()

    def some_keys(self, k0: Int, n: Int) -> None:
        """A block of keys, unless the mask hides it from all queries."""
        masks, spec = self.own_masks, self.spec
        if masks is None:
            self.key_block(k0, n)
        elif type(self) is Block and spec.k.column == spec.v.column == 1:
            self.fn.branch(masks.hides(k0, n), lambda: None, lambda: self.masked_block(masks, k0, n))
        else:
            self.masked_block(masks, k0, n)

    def masked_block(self, masks: BlockMask, k0: Int, n: Int) -> None:
        masks.fill(k0, n)
        self.key_block(k0, n)

    def pack_queries(self) -> None:
        """Q^T with scale and log2 e folded in; lanes past the last query repeat it or hold zeros."""
        fn, spec = self.fn, self.spec
        factor = constant(self.type, spec.scale * (1.0 if spec.mask_kind == "add" else LOG2E))
        step = self.dim(spec.q.row)
        for j in range(self.vectors):
            start = fn.gep(self.q, fn.mul(step, self.lanes * j), self.element)
            left = fn.sub(self.count, self.lanes * j)
            if spec.q.column == 1 and spec.depth % self.lanes == 0:
                self.pack_squares(start, step, left, factor, j)
            else:
                self.pack_columns(start, step, left, factor, j)

    def pack_squares(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        """Rows of queries are read whole and transposed in registers; the last one stands in for others."""
        fn = self.fn
        last = fn.smax(fn.sub(left, 1), 0)
        turn = _pack_square(fn.module, self.lanes, self.element)
        width = constant("i64", self.nr)

        def square(d: Int, _: list[Value]) -> None:
            source, target = fn.gep(start, d, self.element), self.at(self.qt, d, j)
            fn.call(turn, [source, fn.value(step), fn.value(last), target, width, factor])

        fn.loop(0, self.spec.depth, self.lanes, [], square)

    def pack_columns(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn, column = self.fn, self.dim(self.spec.q.column)
        mask = fn.lanes(fn.smax(left, 0), self.lanes)
        index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))

        def one(d: Int, _: list[Value]) -> None:
            got = gathered(fn, fn.gep(start, fn.mul(d, column), self.element), index, self.element, mask)
            fn.store(fn.fmul(got, factor), self.at(self.qt, d, j))

        fn.loop(0, self.spec.depth, 1, [], one)

    def key_block(self, k0: Int, n: Int) -> None:
        fn = self.fn
        self.each(lambda j: fn.store(fn.load(self.type, self.at(self.top, 0, j)), self.at(self.alpha, 0, j)))
        self.scores(k0, n)
        least = constant(self.type, -math.inf)
        bases, sums = [], []
        for j in range(self.vectors):
            top = fn.load(self.type, self.at(self.alpha, 0, j))
            unseen = fn.fcmp("oeq", top, least)
            base = fn.select(unseen, constant(self.type, 0.0), top)
            alpha = self.power(fn.load(self.type, self.at(self.top, 0, j)), base)
            fn.store(top, self.at(self.top, 0, j))
            fn.store(alpha, self.at(self.alpha, 0, j))
            bases.append(base)
            sums.append(fn.fmul(fn.load(self.type, self.at(self.sum, 0, j)), alpha))
        for j, total in enumerate(self.weights(n, bases, sums)):
            fn.store(total, self.at(self.sum, 0, j))
        self.values(k0, n)

    def weights(self, n: Int, bases: list[Value], sums: list[Value]) -> list[Value]:
        """P^T in place of S^T; gives the sums with the weights added."""
        fn = self.fn

        def row(i: Int, carried: list[Value]) -> list[Value]:
            out = []
            for j in range(self.vectors):
                place = self.at(self.st, i, j)
                p = self.power(fn.load(self.type, place), bases[j])
                fn.store(p, place)
                out.append(fn.fadd(carried[j], p))
            return out

        return fn.loop(0, n, 1, sums, row)

    def power(self, score: Value, base: Value) -> Value:
        """The weight of a score. Their difference is exact where it counts, also of large scores."""
        x = self.fn.fsub(score, base)
        if self.after != 1.0:
            x = self.fn.fmul(x, self.after)
        return vmath.apply(self.fn, "exp2", x, inline=True)

    def scores(self, k0: Int, n: Int) -> None:
        """S^T of a block and, in place of `alpha`, the largest scores so far: tiles of key rows; the last one
        overlaps the one before it.
        """
        fn = self.fn
        rows = self.kernel.tile_rows[self.vectors]
        base, step, column, element = self.key_rows(k0, n)

        def tile(row: Int, height: int) -> None:
            starts = [fn.gep(base, fn.mul(fn.add(row, i), step), element) for i in range(height)]
            acc = self.products(starts, column)
            for j in range(self.vectors):
                top = fn.load(self.type, self.at(self.alpha, 0, j))
                for i in range(height):
                    x = self.seen(acc[i * self.vectors + j], k0, fn.add(row, i), j)
                    fn.store(x, self.at(self.st, fn.add(row, i), j))
                    top = fn.fmax_x86(x, top)  # what is not a number makes the sum so
                fn.store(top, self.at(self.alpha, 0, j))

        def tiles() -> None:
            last = fn.sub(n, rows)
            fn.loop(0, n, rows, [], lambda row, _: tile(fn.smin(row, last), rows))

        whole = fn.cmp("sge", n, rows)
        fn.branch(whole, tiles, lambda: fn.loop(0, n, 1, [], lambda row, _: tile(row, 1)))

    def key_rows(self, k0: Int, n: Int) -> Rows:
        """Where keys are read."""
        return self.rows_of(self.k, self.spec.k, k0)

    def value_rows(self, k0: Int, n: Int) -> Rows:
        """Where values are read."""
        return self.rows_of(self.v, self.spec.v, k0)

    def rows_of(self, base: Value, access: Access, k0: Int) -> Rows:
        step = self.dim(access.row)
        start = self.fn.gep(base, self.fn.mul(k0, step), self.element)
        return start, step, self.dim(access.column), self.element

    def products(self, keys: list[Value], column: Int) -> list[Value]:
        """Scores of a few keys, row by row."""
        fn = self.fn

        def along(d: Int, acc: list[Value]) -> list[Value]:
            q = [fn.load(self.type, self.at(self.qt, d, j)) for j in range(self.vectors)]
            out = []
            for i, start in enumerate(keys):
                k = fn.broadcast(fn.gep(start, fn.mul(d, column), "float"), "float", self.lanes)
                out += [fn.fma(k, q[j], acc[i * self.vectors + j]) for j in range(self.vectors)]
            return out

        zero = constant(self.type, 0.0)
        return fn.loop(0, self.spec.depth, 1, [zero] * (len(keys) * self.vectors), along)

    def seen(self, x: Value, k0: Int, row: Int, j: int) -> Value:
        """Scores of a key as they are weighed: with the mask, and -inf where a query may not see it."""
        fn, spec, key = self.fn, self.spec, self.fn.add(k0, row)
        if spec.mask_kind != "add" and self.before != 1.0:
            x = fn.fmul(x, self.before)
        if self.own_masks is not None:
            x = self.masked(x, self.own_masks.read(row, j))
        elif spec.mask is not None:
            x = self.masked(x, self.mask_of(key, j))
        hidden = self.hidden(key, j, fn.iota(self.lanes))
        return x if hidden is None else fn.select(hidden, constant(self.type, -math.inf), x)

    def mask_of(self, key: Int, j: int) -> Value:
        """The mask of a key, where it is the same for all queries or its keys lie apart."""
        fn, spec, element = self.fn, self.spec, self.kernel.mask_element
        assert spec.mask is not None
        step = self.dim(spec.mask.row)
        start = fn.gep(self.mask, fn.mul(key, self.dim(spec.mask.column)), element)
        if isinstance(step, int) and step == 0:
            return fn.broadcast(start, element, self.lanes)
        start = fn.gep(start, fn.mul(step, self.lanes * j), element)
        exists = fn.lanes(fn.smax(fn.sub(self.count, self.lanes * j), 0), self.lanes)
        index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))
        return fn.gather(start, index, element, exists)

    def masked(self, x: Value, value: Value) -> Value:
        fn = self.fn
        if self.spec.mask_kind == "add":
            return fn.fadd(x, value) if self.before == 1.0 else fn.fma(x, self.before, value)
        seen = fn.value(fn.cmp("ne", value, constant(value.type, 0)))
        return fn.select(seen, x, constant(x.type, -math.inf))

    def hidden(self, key: Int, j: int, lanes: Value) -> Value | None:
        """Lanes whose query may not see this key."""
        fn, spec = self.fn, self.spec
        right = 0 if spec.causal else spec.right
        if right < 0 and spec.left < 0:
            return None
        query = fn.value(fn.add(fn.splat(fn.value(fn.add(self.position, self.lanes * j)), self.lanes), lanes))
        place = fn.splat(fn.value(key), self.lanes)
        out: Value | None = None
        if right >= 0:
            out = fn.value(fn.cmp("sgt", place, fn.value(fn.add(query, constant(query.type, right)))))
        if spec.left >= 0:
            early = fn.value(fn.cmp("slt", place, fn.value(fn.sub(query, constant(query.type, spec.left)))))
            out = early if out is None else fn.value(fn.or_(out, early))
        return out

    def values(self, k0: Int, n: Int) -> None:
        """O^T = alpha O^T + V^T P^T, in tiles of value columns."""
        fn = self.fn
        base, step, column, _ = self.value_rows(k0, n)

        def value(key: Int, d: Int) -> Value:
            place = fn.gep(base, fn.add(fn.mul(key, step), fn.mul(d, column)), "float")
            return fn.broadcast(place, "float", self.lanes)

        self.weigh(n, value, lambda key, j: fn.load(self.type, self.at(self.st, key, j)), fn.fma)

    def weigh(
        self,
        count: Int,
        value: Callable[[Int, Int], Value],
        weight: Callable[[Int, int], Value],
        multiply_add: Callable[[Value, Value, Value], Value],
    ) -> None:
        """O^T += value(i, column) * weight(i, query vector), summed over i < count."""
        fn, spec = self.fn, self.spec
        alphas = [fn.load(self.type, self.at(self.alpha, 0, j)) for j in range(self.vectors)]

        def tile(first: Int, height: int) -> None:
            acc = [
                fn.fmul(fn.load(self.type, self.at(self.ot, fn.add(first, i), j)), alphas[j])
                for i in range(height)
                for j in range(self.vectors)
            ]

            def along(key: Int, now: list[Value]) -> list[Value]:
                p = [weight(key, j) for j in range(self.vectors)]
                out = []
                for i in range(height):
                    v = value(key, fn.add(first, i))
                    out += [multiply_add(v, p[j], now[i * self.vectors + j]) for j in range(self.vectors)]
                return out

            acc = fn.loop(0, count, 1, acc, along)
            for i in range(height):
                for j in range(self.vectors):
                    fn.store(acc[i * self.vectors + j], self.at(self.ot, fn.add(first, i), j))

        rows = self.kernel.tile_rows[self.vectors]
        whole = spec.value_depth - spec.value_depth % rows
        fn.loop(0, whole, rows, [], lambda first, _: tile(first, rows))
        if spec.value_depth % rows:
            tile(whole, spec.value_depth % rows)

    def write(self) -> None:
        """O = (O^T / sum)^T; lanes that exist only."""
        fn, spec = self.fn, self.spec
        step = self.dim(spec.o.row)
        for j in range(self.vectors):
            factor = self.kernel.factor(fn, fn.load(self.type, self.at(self.sum, 0, j)))
            start = fn.gep(self.o, fn.mul(step, self.lanes * j), self.kernel.o_element)
            left = fn.sub(self.count, self.lanes * j)
            if spec.o.column == 1 and spec.value_depth % self.lanes == 0:
                self.write_squares(start, step, left, factor, j)
            else:
                self.write_columns(start, step, left, factor, j)

    def write_squares(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn = self.fn
        turn = _write_square(fn.module, self.lanes, self.kernel.o_element)
        width = constant("i64", self.nr)

        def square(d: Int, _: list[Value]) -> None:
            source, target = self.at(self.ot, d, j), fn.gep(start, d, self.kernel.o_element)
            fn.call(turn, [source, width, factor, target, fn.value(step), fn.value(left)])

        fn.loop(0, self.spec.value_depth, self.lanes, [], square)

    def write_columns(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn, column = self.fn, self.dim(self.spec.o.column)
        exists = fn.lanes(fn.smax(left, 0), self.lanes)
        index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))

        def one(d: Int, _: list[Value]) -> None:
            value = self.kernel.stored(fn, fn.fmul(fn.load(self.type, self.at(self.ot, d, j)), factor))
            fn.scatter(value, fn.gep(start, fn.mul(d, column), value.element), index, exists)

        fn.loop(0, self.spec.value_depth, 1, [], one)


def _pack_square(module: Module, lanes: int, element: str) -> str:
    """target[i][lane] = source[lane][i] * factor for a square; rows past `last` repeat it."""
    name = f"rlx_pack_square_{lanes}_{element}"
    if not module.defines(name):
        type_ = vector("float", lanes)
        params = [
            ("ptr", "source"),
            ("i64", "step"),
            ("i64", "last"),
            ("ptr", "target"),
            ("i64", "width"),
            (type_, "factor"),
        ]
        fn = module.function(name, params, internal=True, noinline=True)
        source, step, last, target, width, factor = fn.args
        rows = [fn.gep(source, fn.mul(fn.smin(i, last), step), element) for i in range(lanes)]
        read = [fn.fpext(fn.load(vector(element, lanes), row), "float") for row in rows]
        for i, column in enumerate(fn.transpose(read)):
            fn.store(fn.fmul(column, factor), fn.gep(target, fn.mul(width, i), "float"))
    return name


def _write_square(module: Module, lanes: int, element: str) -> str:
    """target[lane][i] = source[i][lane] * factor[lane] for the first `left` lanes of a square."""
    name = f"rlx_write_square_{lanes}_{element}"
    if not module.defines(name):
        type_ = vector("float", lanes)
        params = [
            ("ptr", "source"),
            ("i64", "width"),
            (type_, "factor"),
            ("ptr", "target"),
            ("i64", "step"),
            ("i64", "left"),
        ]
        fn = module.function(name, params, internal=True, noinline=True)
        source, width, factor, target, step, left = fn.args
        columns = [fn.load(type_, fn.gep(source, fn.mul(width, i), "float")) for i in range(lanes)]
        rows = fn.transpose([fn.fmul(column, factor) for column in columns])
        for i, row in enumerate(rows):
            place = fn.gep(target, fn.mul(step, i), element)
            fn.branch(fn.cmp("sgt", left, i), partial(fn.store, narrowed(fn, row, element), place))
    return name
