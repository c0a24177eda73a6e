"""Attention in flash style: online softmax over blocks of keys, no matrix of scores beyond a tile.

Lanes are queries. A block of one to three vectors of queries is packed once as Q^T; for each block of keys
    S^T = K Q^T              keys are rows, read in place by broadcast
    P^T = exp2(S^T - max)    maximum and sum run down the rows: no horizontal step
    O^T = alpha O^T + V^T P^T
and O^T is transposed and divided by the sum at the end. Neither K nor V is copied. Every output has one order
of operations, set by the block of keys alone. A few queries are served one by one (`attention_row.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlx.backend.cpu import vmath
from rlx.backend.cpu.attention_row import FEW, row_function
from rlx.backend.cpu.frame import FIRST_OPERAND, ArgumentTable, EmittedKernel, Slot, unflatten
from rlx.backend.cpu.irtext import Function, Int, Module
from rlx.backend.cpu.irtypes import Value, constant, vector
from rlx.ir.dim import Dim

KEYS = 128  # keys of one block: its scores stay in L1
QUERY_VECTORS = 3
KEY_ROWS = {1: 16, 2: 12, 3: 8}  # query vectors -> key rows of a tile of S^T
VALUE_ROWS = {1: 16, 2: 12, 3: 8}  # query vectors -> value columns of a tile of O^T
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Access:
    """Element steps of an operand: per batch axis (heads included), per row, and along the feature axis."""

    operand: int
    batch: tuple[Dim, ...]
    row: Dim
    column: Dim = 1
    start: Dim = 0


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(q k^T * scale + mask) v over batch axes; `mask` is None, "bool" (what may be seen) or "add"."""

    batch: tuple[Dim, ...]
    queries: Dim
    keys: Dim
    depth: int
    value_depth: int
    scale: float
    q: Access
    k: Access
    v: Access
    o: Access
    mask: Access | None = None  # row: step per query, column: step per key
    mask_kind: str = ""
    causal: bool = False
    offset: Dim = 0  # key position of query 0
    left: int = -1  # keys further back than this are hidden; -1: none
    right: int = -1
    empty_is_zero: bool = True  # the result of a query that sees none of many keys; else NaN


def emit_attention(
    module: Module, name: str, spec: AttentionSpec, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel: every thread takes blocks of queries of any head."""
    return Attention(module, name, spec, inputs, outputs).emit()


class Attention:
    """A kernel under construction."""

    def __init__(
        self, module: Module, name: str, spec: AttentionSpec, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.module, self.name, self.spec = module, name, spec
        self.table = ArgumentTable(inputs, outputs)
        self.lanes = module.target.lanes("f32")
        self.type = vector("float", self.lanes)
        self.most = QUERY_VECTORS if module.target.registers >= 32 else 1
        self.width = self.lanes * self.most  # queries that scratch has room for
        self.rows = spec.depth + spec.value_depth + KEYS + 3  # of `width` floats each

    def emit(self) -> EmittedKernel:
        spec, table = self.spec, self.table
        fn = self.module.function(self.name, [("ptr", "args"), ("i64", "thread"), ("i64", "threads")])
        dim = lambda d: table.dim(fn, d)  # noqa: E731
        queries = dim(spec.queries)
        blocks = fn.ceildiv(queries, self.width)
        batch = [dim(d) for d in spec.batch]
        units: Int = blocks
        for n in batch:
            units = fn.mul(units, n)
        args, thread, threads = fn.args
        always = isinstance(spec.queries, int) and spec.queries <= FEW
        never = isinstance(spec.queries, int) and spec.queries > FEW
        row = None if never else row_function(self)
        scratch = fn.gep(table.field(fn, 1, "ptr"), fn.mul(thread, table.field(fn, 2)), "i8")
        low = fn.udiv(fn.mul(units, thread), threads)
        high = fn.udiv(fn.mul(units, fn.add(thread, 1)), threads)

        def unit(u: Int, _: list[Value]) -> None:
            *index, block = unflatten(fn, u, [*batch, blocks])
            first = fn.mul(block, self.width)
            count = fn.smin(fn.sub(queries, first), self.width)
            places = [self.base(fn, a, index, first, dim) for a in (spec.q, spec.k, spec.v, spec.o)]
            mask = self.base(fn, spec.mask, index, first, dim) if spec.mask else constant("ptr", 0)
            vectors = fn.ceildiv(count, self.lanes)

            def one(i: Int, _: list[Value]) -> None:
                q, k, v, o = places
                q, o = (fn.gep(p, fn.mul(i, dim(a.row)), "float") for p, a in ((q, spec.q), (o, spec.o)))
                fn.call(row or "", [args, scratch, q, k, v, o, fn.value(fn.add(first, i))])

            def call(n: int) -> None:
                go = lambda: fn.call(  # noqa: E731
                    self.block(n), [args, scratch, *places, mask, fn.value(first), fn.value(count)]
                )
                if n == 1:
                    go()
                else:
                    fn.branch(fn.cmp("eq", vectors, n), go, lambda: call(n - 1))

            if row is None:
                call(self.most)
            elif always:
                fn.loop(0, count, 1, [], one)
            else:
                few = fn.cmp("sle", queries, FEW)
                fn.branch(few, lambda: fn.loop(0, count, 1, [], one), lambda: call(self.most))

        fn.loop(low, high, 1, [], unit)
        return EmittedKernel(self.name, table.dims, self.rows * self.width * 4 + 64)

    def base(
        self, fn: Function, access: Access, index: Sequence[Int], query: Int, dim: Callable[[Dim], Int]
    ) -> Value:
        """Pointer of an operand at a batch index; query operands also at their first query."""
        number = access.operand
        offset = dim(access.start)
        for i, step in zip(index, access.batch, strict=True):
            offset = fn.add(offset, fn.mul(i, dim(step)))
        if any(access is own for own in (self.spec.q, self.spec.o, self.spec.mask)):
            offset = fn.add(offset, fn.mul(query, dim(access.row)))
        pointer = self.table.field(fn, FIRST_OPERAND + number, "ptr")
        element = "i8" if access is self.spec.mask and self.spec.mask_kind == "bool" else "float"
        return fn.gep(pointer, offset, element)

    def factor(self, fn: Function, total: Value) -> Value:
        """1 / sum of the weights. A query that sees no key has sums of 0: its result is 0, or 0 / 0."""
        one, zero = constant(self.type, 1.0), constant(self.type, 0.0)
        if self.spec.empty_is_zero:
            seen = fn.value(fn.or_(fn.fcmp("ogt", total, 0.0), fn.is_nan(total)))
            return fn.select(seen, fn.fdiv(one, total), zero)
        none = fn.cmp("eq", self.table.dim(fn, self.spec.keys), 0)  # a sum over no keys is 0 all the same
        return fn.select(none, zero, fn.fdiv(one, total))

    # -- one block of queries

    def block(self, vectors: int) -> str:
        name = f"{self.name}.block{vectors}"
        if not self.module.defines(name):
            params = [
                ("ptr", "args"),
                ("ptr noalias", "scratch"),
                ("ptr", "q"),
                ("ptr", "k"),
                ("ptr", "v"),
                ("ptr", "o"),
            ]
            fn = self.module.function(
                name,
                [*params, ("ptr", "mask"), ("i64", "first"), ("i64", "count")],
                internal=True,
                noinline=True,
            )
            _Block(self, fn, vectors).emit()
        return name


class _Block:
    """The function for one number of query vectors."""

    def __init__(self, kernel: Attention, fn: Function, vectors: int) -> None:
        self.kernel, self.fn, self.vectors, self.spec = kernel, fn, vectors, kernel.spec
        self.lanes, self.type = kernel.lanes, kernel.type
        self.nr = self.lanes * vectors
        _, scratch, self.q, self.k, self.v, self.o, self.mask, self.first, self.count = fn.args
        spec = kernel.spec
        row = lambda n: fn.gep(scratch, n * kernel.width, "float")  # noqa: E731
        self.qt, self.ot, self.st = row(0), row(spec.depth), row(spec.depth + spec.value_depth)
        state = spec.depth + spec.value_depth + KEYS
        self.top, self.sum, self.alpha = row(state), row(state + 1), row(state + 2)

    def dim(self, d: Dim) -> Int:
        return self.kernel.table.dim(self.fn, d)

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
        fn.loop(start, keys, KEYS, [], lambda k0, _: self.key_block(k0, fn.smin(fn.sub(keys, k0), KEYS)))
        self.write()

    def pack_queries(self) -> None:
        """Q^T with scale and log2 e folded in; lanes past the last query repeat it or hold zeros."""
        fn, spec = self.fn, self.spec
        factor = constant(self.type, spec.scale * (1.0 if self.spec.mask_kind == "add" else LOG2E))
        step = self.dim(spec.q.row)
        for j in range(self.vectors):
            start = fn.gep(self.q, fn.mul(step, self.lanes * j), "float")
            left = fn.sub(self.count, self.lanes * j)
            if spec.q.column == 1 and spec.depth % self.lanes == 0:
                self.pack_squares(start, step, left, factor, j)
            else:
                self.pack_columns(start, step, left, factor, j)

    def pack_squares(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        """Rows of queries are read whole and transposed in registers; the last one stands in for others."""
        fn = self.fn
        last = fn.smax(fn.sub(left, 1), 0)
        turn = _pack_square(fn.module, self.lanes)
        width = constant("i64", self.nr)

        def square(d: Int, _: list[Value]) -> None:
            source, target = fn.gep(start, d, "float"), self.at(self.qt, d, j)
            fn.call(turn, [source, fn.value(step), fn.value(last), target, width, factor])

        fn.loop(0, self.spec.depth, self.lanes, [], square)

    def pack_columns(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn, column = self.fn, self.dim(self.spec.q.column)
        mask = fn.lanes(fn.smax(left, 0), self.lanes)
        index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))

        def one(d: Int, _: list[Value]) -> None:
            got = fn.gather(fn.gep(start, fn.mul(d, column), "float"), index, "float", mask)
            fn.store(fn.fmul(got, factor), self.at(self.qt, d, j))

        fn.loop(0, self.spec.depth, 1, [], one)

    def key_block(self, k0: Int, n: Int) -> None:
        fn = self.fn
        self.scores(k0, n)
        tops = self.maximum(k0, n)
        least = constant(self.type, -math.inf)
        bases, sums = [], []
        for j, top in enumerate(tops):
            unseen = fn.fcmp("oeq", top, least)
            base = fn.select(unseen, constant(self.type, 0.0), top)
            alpha = self.power(fn.fsub(fn.load(self.type, self.at(self.top, 0, j)), base))
            fn.store(top, self.at(self.top, 0, j))
            fn.store(alpha, self.at(self.alpha, 0, j))
            bases.append(base)
            sums.append(fn.fmul(fn.load(self.type, self.at(self.sum, 0, j)), alpha))

        def weights(i: Int, carried: list[Value]) -> list[Value]:
            out = []
            for j in range(self.vectors):
                place = self.at(self.st, i, j)
                p = self.power(fn.fsub(fn.load(self.type, place), bases[j]))
                fn.store(p, place)
                out.append(fn.fadd(carried[j], p))
            return out

        for j, total in enumerate(fn.loop(0, n, 1, sums, weights)):
            fn.store(total, self.at(self.sum, 0, j))
        self.values(k0, n)

    def power(self, x: Value) -> Value:
        if self.spec.mask_kind == "add":
            x = self.fn.fmul(x, LOG2E)
        return vmath.apply(self.fn, "exp2", x, inline=True)

    def scores(self, k0: Int, n: Int) -> None:
        """S^T of a block: tiles of key rows; the last tile overlaps the one before it."""
        fn, spec = self.fn, self.spec
        rows = KEY_ROWS[self.vectors]
        step, column = self.dim(spec.k.row), self.dim(spec.k.column)
        base = fn.gep(self.k, fn.mul(k0, step), "float")

        def tile(row: Int, height: int) -> None:
            starts = [fn.gep(base, fn.mul(fn.add(row, i), step), "float") for i in range(height)]
            zero = constant(self.type, 0.0)

            def along(d: Int, acc: list[Value]) -> list[Value]:
                q = [fn.load(self.type, self.at(self.qt, d, j)) for j in range(self.vectors)]
                out = []
                for i in range(height):
                    k = fn.broadcast(fn.gep(starts[i], fn.mul(d, column), "float"), "float", self.lanes)
                    out += [fn.fma(k, q[j], acc[i * self.vectors + j]) for j in range(self.vectors)]
                return out

            acc = fn.loop(0, spec.depth, 1, [zero] * (height * self.vectors), along)
            for i in range(height):
                for j in range(self.vectors):
                    fn.store(acc[i * self.vectors + j], self.at(self.st, fn.add(row, i), j))

        whole = fn.cmp("sge", n, rows)

        def tiles() -> None:
            fn.loop(0, fn.sub(n, rows - 1), rows, [], lambda r, _: tile(r, rows))
            left = fn.urem(n, rows)
            fn.branch(fn.cmp("ne", left, 0), lambda: tile(fn.sub(n, rows), rows))

        fn.branch(whole, tiles, lambda: fn.loop(0, n, 1, [], lambda r, _: tile(r, 1)))

    def maximum(self, k0: Int, n: Int) -> list[Value]:
        """Running maximum; adds the mask and hides keys that a query may not see."""
        fn, spec = self.fn, self.spec
        least = constant(self.type, -math.inf)
        hides = bool(spec.mask) or spec.causal or spec.left >= 0 or spec.right >= 0
        lanes = fn.iota(self.lanes)

        def row(i: Int, tops: list[Value]) -> list[Value]:
            key = fn.add(k0, i)
            out = []
            for j in range(self.vectors):
                place = self.at(self.st, i, j)
                x = fn.load(self.type, place)
                if spec.mask is not None:
                    x = self.masked(x, key, j)
                hidden = self.hidden(key, j, lanes)
                if hidden is not None:
                    x = fn.select(hidden, least, x)
                if hides:
                    fn.store(x, place)
                out.append(fn.fmax(x, tops[j]))
            return out

        start = [fn.load(self.type, self.at(self.top, 0, j)) for j in range(self.vectors)]
        return fn.loop(0, n, 1, start, row)

    def masked(self, x: Value, key: Int, j: int) -> Value:
        fn, spec = self.fn, self.spec
        assert spec.mask is not None
        element = "i8" if spec.mask_kind == "bool" else "float"
        step = self.dim(spec.mask.row)
        start = fn.gep(self.mask, fn.mul(key, self.dim(spec.mask.column)), element)
        if isinstance(step, int) and step == 0:
            value = fn.broadcast(start, element, self.lanes)
        else:
            start = fn.gep(start, fn.mul(step, self.lanes * j), element)
            exists = fn.lanes(fn.smax(fn.sub(self.count, self.lanes * j), 0), self.lanes)
            index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))
            value = fn.gather(start, index, element, exists)
        if spec.mask_kind == "add":
            return fn.fadd(x, value)
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
        fn, spec = self.fn, self.spec
        step, column = self.dim(spec.v.row), self.dim(spec.v.column)
        base = fn.gep(self.v, fn.mul(k0, step), "float")
        alphas = [fn.load(self.type, self.at(self.alpha, 0, j)) for j in range(self.vectors)]

        def tile(first: Int, height: int) -> None:
            acc = [
                fn.fmul(fn.load(self.type, self.at(self.ot, fn.add(first, i), j)), alphas[j])
                for i in range(height)
                for j in range(self.vectors)
            ]

            def along(key: Int, now: list[Value]) -> list[Value]:
                start = fn.gep(base, fn.add(fn.mul(key, step), fn.mul(first, column)), "float")
                p = [fn.load(self.type, self.at(self.st, key, j)) for j in range(self.vectors)]
                out = []
                for i in range(height):
                    v = fn.broadcast(fn.gep(start, fn.mul(column, i), "float"), "float", self.lanes)
                    out += [fn.fma(v, p[j], now[i * self.vectors + j]) for j in range(self.vectors)]
                return out

            acc = fn.loop(0, n, 1, acc, along)
            for i in range(height):
                for j in range(self.vectors):
                    fn.store(acc[i * self.vectors + j], self.at(self.ot, fn.add(first, i), j))

        rows = VALUE_ROWS[self.vectors]
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
            start = fn.gep(self.o, fn.mul(step, self.lanes * j), "float")
            left = fn.sub(self.count, self.lanes * j)
            if spec.o.column == 1 and spec.value_depth % self.lanes == 0:
                self.write_squares(start, step, left, factor, j)
            else:
                self.write_columns(start, step, left, factor, j)

    def write_squares(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn = self.fn
        turn = _write_square(fn.module, self.lanes)
        width = constant("i64", self.nr)

        def square(d: Int, _: list[Value]) -> None:
            source, target = self.at(self.ot, d, j), fn.gep(start, d, "float")
            fn.call(turn, [source, width, factor, target, fn.value(step), fn.value(left)])

        fn.loop(0, self.spec.value_depth, self.lanes, [], square)

    def write_columns(self, start: Value, step: Int, left: Int, factor: Value, j: int) -> None:
        fn, column = self.fn, self.dim(self.spec.o.column)
        exists = fn.lanes(fn.smax(left, 0), self.lanes)
        index = fn.value(fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64")))

        def one(d: Int, _: list[Value]) -> None:
            value = fn.fmul(fn.load(self.type, self.at(self.ot, d, j)), factor)
            fn.scatter(value, fn.gep(start, fn.mul(d, column), "float"), index, exists)

        fn.loop(0, self.spec.value_depth, 1, [], one)


def _pack_square(module: Module, lanes: int) -> str:
    """target[i][lane] = source[lane][i] * factor for a square; rows past `last` repeat it."""
    name = f"rlx_pack_square_{lanes}"
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
        rows = [fn.gep(source, fn.mul(fn.smin(i, last), step), "float") for i in range(lanes)]
        for i, column in enumerate(fn.transpose([fn.load(type_, row) for row in rows])):
            fn.store(fn.fmul(column, factor), fn.gep(target, fn.mul(width, i), "float"))
    return name


def _write_square(module: Module, lanes: int) -> str:
    """target[lane][i] = source[i][lane] * factor[lane] for the first `left` lanes of a square."""
    name = f"rlx_write_square_{lanes}"
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
            place = fn.gep(target, fn.mul(step, i), "float")
            fn.branch(fn.cmp("sgt", left, i), partial(fn.store, row, place))
    return name
