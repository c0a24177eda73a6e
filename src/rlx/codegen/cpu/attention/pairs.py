"""A block of queries of flash attention whose operands are bf16: both matmuls by dot products of pairs.

Pairs run along the summed axis. Rows of queries and keys have theirs side by side already; weights of two
neighbouring keys are rounded and interleaved as they are computed, and so are rows of values, block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.block import LOG2E, Block
from rlx.codegen.cpu.attention.mask import KEYS
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant, vector

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Attention, AttentionSpec

CHUNK = 32  # bf16 elements of a register
LANES = CHUNK // 2
LOW = [i // 2 + CHUNK * (i % 2) for i in range(CHUNK)]  # interleaves the first halves of two vectors
HIGH = [i + LANES for i in LOW]
HALVES = [i // 2 + LANES * (i % 2) for i in range(CHUNK)]  # interleaves the halves of one


class PairBlock(Block):
    """The function for one number of query vectors."""

    def __init__(self, kernel: Attention, fn: Function, vectors: int) -> None:
        super().__init__(kernel, fn, vectors)
        (self.packed_values,) = self.copies
        scale = self.spec.scale
        # Queries are not scaled, which would round them again. Scores of which the largest stays the largest
        # are scaled as late as that costs nothing.
        if self.spec.mask_kind == "add" or not scale > 0:
            self.before, self.after = scale, LOG2E
        else:
            self.after = scale * LOG2E

    @staticmethod
    def parts(spec: AttentionSpec, width: int) -> tuple[int, ...]:
        queries, values = (-(-n // CHUNK) * CHUNK for n in (spec.depth, spec.value_depth))
        return queries // 2, spec.value_depth, KEYS, 1, 1, 1, -(-values * (KEYS // 2) // width)

    @property
    def value_row(self) -> int:
        """Pairs from one packed row of values to the next."""
        return -(-self.spec.value_depth // CHUNK) * CHUNK

    def pack_queries(self) -> None:
        """Q^T in pairs; lanes past the last query repeat it, features past the last are zeros."""
        fn, depth = self.fn, self.spec.depth
        step, turn = self.dim(self.spec.q.row), _pack_pairs(self.fn.module)
        for j in range(self.vectors):
            start = fn.gep(self.q, fn.mul(step, self.lanes * j), "i16")
            last = fn.smax(fn.sub(fn.sub(self.count, self.lanes * j), 1), 0)

            def square(d: Int, _: list[Value], start: Value = start, last: Int = last, j: int = j) -> None:
                source, target = fn.gep(start, d, "i16"), self.at(self.qt, fn.udiv(d, 2), j)
                fn.call(turn, [source, step, last, target, self.nr, fn.sub(depth, d)])

            fn.loop(0, depth, CHUNK, [], square)

    def pairs(self, word: Value) -> Value:
        """One pair in every lane."""
        return self.as_pairs(self.fn.splat(word, self.lanes))

    def as_pairs(self, words: Value) -> Value:
        return self.fn.bitcast(words, vector("bfloat", CHUNK))

    def load_pairs(self, place: Value) -> Value:
        return self.as_pairs(self.fn.load(vector("i32", self.lanes), place))

    def products(self, keys: list[Value], column: Int) -> list[Value]:
        fn, depth = self.fn, self.spec.depth

        def step(d: Int, count: int, acc: list[Value]) -> list[Value]:
            q = [self.load_pairs(self.at(self.qt, fn.udiv(d, 2), j)) for j in range(self.vectors)]
            out = []
            for i, start in enumerate(keys):
                place = fn.gep(start, d, "i16")
                word = fn.load("i32", place, 2) if count == 2 else fn.zext(fn.load("i16", place), "i32")
                k = self.pairs(word)
                out += [fn.dot_bf16(acc[i * self.vectors + j], k, q[j]) for j in range(self.vectors)]
            return out

        acc = [constant(self.type, 0.0)] * (len(keys) * self.vectors)
        acc = fn.loop(0, depth - depth % 2, 2, acc, lambda d, now: step(d, 2, now))
        return step(depth - 1, 1, acc) if depth % 2 else acc

    def weights(self, n: Int, bases: list[Value], sums: list[Value]) -> list[Value]:
        """Two rows of scores become one of pairs, which takes the place of one that has been read."""
        fn = self.fn

        def single() -> None:  # the key that the last one would be paired with is one that weighs nothing
            for j in range(self.vectors):
                fn.store(constant(self.type, float("-inf")), self.at(self.st, n, j))

        fn.branch(fn.cmp("ne", fn.urem(n, 2), 0), single)

        def pair(i: Int, carried: list[Value]) -> list[Value]:
            out = []
            for j in range(self.vectors):
                p = [
                    self.power(fn.load(self.type, self.at(self.st, fn.add(i, k), j)), bases[j])
                    for k in range(2)
                ]
                both = fn.round_to_bf16(p[0], p[1])
                fn.store(
                    fn.bitcast(fn.shuffle(both, None, HALVES), vector("i32", self.lanes)),
                    self.at(self.st, fn.udiv(i, 2), j),
                )
                out.append(fn.fadd(fn.fadd(carried[j], p[0]), p[1]))
            return out

        return fn.loop(0, n, 2, sums, pair)

    def values(self, k0: Int, n: Int) -> None:
        fn, spec = self.fn, self.spec
        step, row = self.dim(spec.v.row), self.value_row
        source = fn.gep(self.v, fn.mul(k0, step), "i16")
        packed = self.packed_values
        fn.call(_interleave_rows(fn.module), [source, step, packed, row, spec.value_depth, n])

        def value(pair: Int, d: Int) -> Value:
            return self.pairs(fn.load("i32", fn.gep(packed, fn.add(fn.mul(pair, row), d), "i32")))

        def weight(pair: Int, j: int) -> Value:
            return self.load_pairs(self.at(self.st, pair, j))

        self.weigh(fn.ceildiv(n, 2), value, weight, lambda v, p, total: fn.dot_bf16(total, v, p))


def _pack_pairs(module: Module) -> str:
    """target[i][lane] = pair i of row `lane` of the source, of up to 16 pairs that `left` elements hold;
    rows past `last` repeat it.
    """
    name = "rlx_pack_pairs"
    if not module.defines(name):
        params = [("ptr", "source"), ("i64", "step"), ("i64", "last")]
        params += [("ptr", "target"), ("i64", "width"), ("i64", "left")]
        fn = module.function(name, params, internal=True, noinline=True)
        source, step, last, target, width, left = fn.args
        there, words = fn.lanes(left, CHUNK), vector("i32", LANES)
        rows = [fn.gep(source, fn.mul(fn.smin(i, last), step), "i16") for i in range(LANES)]
        read = [fn.bitcast(fn.masked_load(vector("i16", CHUNK), row, there), words) for row in rows]
        for i, column in enumerate(fn.transpose(read)):
            fn.store(column, fn.gep(target, fn.mul(width, i), "i32"))
    return name


def _interleave_rows(module: Module) -> str:
    """target[i][c] = (source[2 i][c], source[2 i + 1][c]) for `columns` of `rows`; zeros stand for a row
    that an odd number lacks.
    """
    name = "rlx_interleave_rows"
    if not module.defines(name):
        params = [("ptr", "source"), ("i64", "step"), ("ptr", "target")]
        params += [("i64", "width"), ("i64", "columns"), ("i64", "rows")]
        fn = module.function(name, params, internal=True, noinline=True)
        source, step, target, width, columns, rows = fn.args
        type_ = vector("i16", CHUNK)

        def row(i: Int, _: list[Value]) -> None:
            even = fn.gep(source, fn.mul(i, step), "i16")
            paired = fn.cmp("slt", fn.add(i, 1), rows)
            odd = fn.select(paired, fn.gep(even, step, "i16"), even)
            to = fn.gep(target, fn.mul(fn.udiv(i, 2), width), "i32")

            def chunk(c: Int, _: list[Value]) -> None:
                count = fn.sub(columns, c)
                first = fn.masked_load(type_, fn.gep(even, c, "i16"), fn.lanes(count, CHUNK))
                there = fn.lanes(fn.select(paired, count, 0), CHUNK)
                second = fn.masked_load(type_, fn.gep(odd, c, "i16"), there)
                for part, lanes in enumerate((LOW, HIGH)):
                    place = fn.gep(to, fn.add(c, part * LANES), "i32")
                    fn.store(fn.shuffle(first, second, lanes), place)

            fn.loop(0, columns, CHUNK, [], chunk)

        fn.loop(0, rows, 2, [], row)
    return name
