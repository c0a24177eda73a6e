"""The mask of a block of queries, where each query has its own: turned square by square, so that lanes are
queries; and which blocks of keys it hides from all of them.

A block of keys is skipped where that changes nothing: every weight would be 0 to the last bit. A mask that
adds -inf hides any finite score. One that adds a large negative number does if no product of these queries
and keys can bring a score near the largest so far. Products and values must be finite, since 0 times infinity
is not a number.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant, vector

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.block import Block
    from rlx.codegen.cpu.attention.flash import Access, AttentionSpec

KEYS = 128  # keys of one block: its scores stay in L1
VANISHES = -160.0  # 2 to this power is 0 in f32, whatever is lost in rounding
LARGEST = 3e38
SLACK = 1.01  # a sum of products as it is rounded, against one of their largest sizes
SIZE_BITS = 0x7FFFFFFF
INFINITE_BITS = 0x7F800000


def is_turned(spec: AttentionSpec) -> bool:
    """Whether a mask is copied by squares: queries have rows of their own, in which keys lie side by side."""
    mask = spec.mask
    return mask is not None and mask.column == 1 and not (isinstance(mask.row, int) and mask.row == 0)


class BlockMask:
    """The mask as one block of queries reads it; `copy` has room for the part of a block of keys."""

    def __init__(self, block: Block, copy: Value) -> None:
        self.block, self.fn, self.spec, self.copy = block, block.fn, block.spec, copy
        assert self.spec.mask is not None
        self.adds = self.spec.mask_kind == "add"
        self.element = block.kernel.mask_element
        self.step = block.dim(self.spec.mask.row)
        self.chunk = block.lanes * (1 if self.adds else 4)  # elements of a register

    @staticmethod
    def rows(spec: AttentionSpec) -> int:
        """Rows of scratch."""
        return KEYS if is_turned(spec) else 0

    def fill(self, k0: Int, n: Int) -> None:
        """Copy the part of `n` keys from k0 on. The last square overlaps the one before; a part that is
        smaller than a square is gathered key by key.
        """
        fn, lanes = self.fn, self.block.lanes
        start = fn.gep(self.block.mask, k0, self.element)

        def squares(j: int) -> None:
            source = fn.gep(start, fn.mul(self.step, lanes * j), self.element)
            last = fn.smax(fn.sub(fn.sub(self.block.count, lanes * j), 1), 0)
            turn, width = _turn_square(fn.module, lanes, self.element), constant("i64", self.block.nr)

            def square(i: Int, _: list[Value]) -> None:
                at = fn.smin(i, fn.sub(n, lanes))
                target = self.block.at(self.copy, at, j)
                place = fn.gep(source, at, self.element)
                fn.call(turn, [place, fn.value(self.step), fn.value(last), target, width])

            fn.loop(0, n, lanes, [], square)

        def columns(j: int) -> None:
            source = fn.gep(start, fn.mul(self.step, lanes * j), self.element)
            exists = fn.lanes(fn.smax(fn.sub(self.block.count, lanes * j), 0), lanes)
            index = fn.value(fn.mul(fn.iota(lanes), fn.splat(self.step, lanes, "i64")))

            def column(i: Int, _: list[Value]) -> None:
                found = fn.gather(fn.gep(source, i, self.element), index, self.element, exists)
                fn.store(_as_words(self.fn, found), self.block.at(self.copy, i, j))

            fn.loop(0, n, 1, [], column)

        whole = fn.cmp("sge", n, lanes)
        fn.branch(whole, lambda: self.block.each(squares), lambda: self.block.each(columns))

    def read(self, row: Int, j: int) -> Value:
        """What the copy holds of a key, for vector j of queries: floats, or integers, 0 or not."""
        type_ = self.block.type if self.adds else vector("i32", self.block.lanes)
        return self.fn.load(type_, self.block.at(self.copy, row, j))

    # -- blocks that are hidden

    def hides(self, k0: Int, n: Int) -> Value:
        """Whether a block of keys may be skipped. Keys and values are only looked at where the mask hides."""
        fn, no = self.fn, [constant("i1", False)]

        def looked_at() -> list[Value]:
            top = self.largest(k0, n)
            covered = fn.fcmp("olt", top, self.reach()) if self.adds else fn.cmp("eq", top, 0)
            return fn.if_value(covered, lambda: [self.vanishes(k0, n, top)], lambda: no)

        return fn.if_value(fn.cmp("sge", n, self.chunk), looked_at, lambda: no)[0]

    def reach(self) -> Value:
        """What a mask must be below to hide scores of 0."""
        fn, least = self.fn, self.least_top()
        unseen = fn.fcmp("oeq", least, float("-inf"))
        return fn.select(unseen, constant("float", -LARGEST), fn.fadd(least, VANISHES / self.block.after))

    def least_top(self) -> Value:
        """The smallest of the largest scores that the queries have seen."""
        fn, block = self.fn, self.block
        tops = [fn.load(block.type, block.at(block.top, 0, j)) for j in range(block.vectors)]
        return fn.reduce(fn.fmin_x86, reduce(fn.fmin_x86, tops))

    def largest(self, k0: Int, n: Int) -> Value:
        """The largest number that the mask adds, or whether it keeps any key: all bytes together."""
        fn, start = self.fn, self.fn.gep(self.block.mask, k0, self.element)
        type_ = vector(self.element, self.chunk)

        def row(i: Int, found: list[Value]) -> list[Value]:
            place = fn.gep(start, fn.mul(i, self.step), self.element)

            def part(c: Int, found: list[Value]) -> list[Value]:
                at = fn.smin(c, fn.sub(n, self.chunk))  # the last one overlaps
                read = fn.load(type_, fn.gep(place, at, self.element))
                return [fn.value((fn.fmax if self.adds else fn.or_)(read, found[0]))]

            return fn.loop(0, n, self.chunk, found, part)

        none = constant(type_, float("-inf") if self.adds else 0)
        (found,) = fn.loop(0, self.block.count, 1, [none], row)
        return fn.reduce(fn.fmax if self.adds else fn.or_, found)

    def vanishes(self, k0: Int, n: Int, top: Value) -> Value:
        """Whether keys that the mask hides are without any effect: their values, and products with them."""
        fn, spec, block = self.fn, self.spec, self.block
        values = self.size(block.v, spec.v, k0, n, spec.value_depth)
        finite = fn.value(fn.cmp("ult", values, INFINITE_BITS))
        if not self.adds:
            return finite
        keys = self.size(block.k, spec.k, k0, n, spec.depth)
        queries = self.size_of_queries()
        bound = fn.fmul(fn.fmul(*(fn.bitcast(size, "float") for size in (keys, queries))), SLACK * spec.depth)
        hidden = fn.and_(fn.fcmp("oeq", top, float("-inf")), fn.fcmp("olt", bound, LARGEST))
        nearest = fn.fmul(fn.fsub(fn.fadd(bound, top), self.least_top()), block.after)
        far = fn.fcmp("olt", nearest, VANISHES)
        return fn.value(fn.and_(finite, fn.or_(hidden, far)))

    def size(self, base: Value, access: Access, k0: Int, n: Int, columns: int) -> Value:
        """The largest size in `n` rows, as bits: an infinity and what is not a number are the largest."""
        fn, lanes, step = self.fn, self.block.lanes, self.block.dim(access.row)
        type_, whole = vector("float", lanes), columns - columns % lanes

        def row(i: Int, found: list[Value]) -> list[Value]:
            place = fn.gep(base, fn.mul(fn.add(k0, i), step), "float")

            def part(c: Int, now: list[Value]) -> list[Value]:
                return [self.larger(fn.load(type_, fn.gep(place, c, "float")), now[0])]

            found = fn.loop(0, whole, lanes, found, part)
            if columns == whole:
                return found
            rest = fn.masked_load(type_, fn.gep(place, whole, "float"), fn.lanes(columns - whole, lanes))
            return [self.larger(rest, found[0])]

        (found,) = fn.loop(0, n, 1, [constant(vector("i32", lanes), 0)], row)
        return fn.reduce(fn.umax, found)

    def size_of_queries(self) -> Value:
        """The same of the queries as they are packed."""
        fn, block = self.fn, self.block

        def part(i: Int, now: list[Value]) -> list[Value]:
            return [self.larger(fn.load(block.type, fn.gep(block.qt, i, "float")), now[0])]

        start = [constant(vector("i32", block.lanes), 0)]
        (found,) = fn.loop(0, self.spec.depth * block.nr, block.lanes, start, part)
        return fn.reduce(fn.umax, found)

    def larger(self, x: Value, found: Value) -> Value:
        """The larger one of sizes as bits, lane by lane."""
        fn = self.fn
        return fn.value(fn.umax(fn.value(fn.and_(fn.bitcast(x, found.type), SIZE_BITS)), found))


def _as_words(fn: Function, found: Value) -> Value:
    return found if found.element == "float" else fn.zext(found, "i32")


def _turn_square(module: Module, lanes: int, element: str) -> str:
    """target[i][lane] = source[lane][i] for a square of 4-byte words; rows past `last` repeat it."""
    name = f"rlx_turn_square_{lanes}_{element}"
    if not module.defines(name):
        params = [("ptr", "source"), ("i64", "step"), ("i64", "last"), ("ptr", "target"), ("i64", "width")]
        fn = module.function(name, params, internal=True, noinline=True)
        source, step, last, target, width = fn.args
        rows = [fn.gep(source, fn.mul(fn.smin(i, last), step), element) for i in range(lanes)]
        read = [_as_words(fn, fn.load(vector(element, lanes), row)) for row in rows]
        for i, column in enumerate(fn.transpose(read)):
            fn.store(column, fn.gep(target, fn.mul(width, i), "float"))
    return name
