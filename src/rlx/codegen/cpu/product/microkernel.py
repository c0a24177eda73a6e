"""The inner product of every contraction: a register tile of accumulators over one ascending loop in k.

GEMM, convolution and recurrent input all call `accumulate`. It reads A one element at a time (broadcast) and
B one vector at a time, so A may have any strides and B needs its columns side by side. Each output is one
chain of multiply-adds in ascending k: tile height, panel width and thread count cannot show in the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.native.irtext import Bool, Function, Int, Value, constant, vector
from rlx.errors import DTypeError
from rlx.kernel.quads import OFFSET
from rlx.records import dataclass
from rlx.target.cpu import Target


@dataclass(frozen=True)
class Kind:
    """How one operand dtype is read, multiplied and summed on one target; this one by fused multiply-add.

    `group` consecutive k are taken by one step: a group of A must be adjacent in memory, and B is packed
    as [k / group][column][group]. Operands that are narrower than the sums are widened as they are read.
    """

    element: str
    accumulator: str
    group: int
    lanes: int

    @property
    def zero(self) -> Value:
        """An accumulator vector of zeros."""
        return constant(vector(self.accumulator, self.lanes), 0)

    @property
    def adds_at_once(self) -> bool:
        """Whether products are added as they are computed, without a register for them."""
        return True

    @property
    def prepares_rows(self) -> bool:
        """Whether tiles read rows of A from scratch, where they are `prepared`."""
        return False

    @property
    def row_element(self) -> str:
        """Type in which tiles read A."""
        return self.element

    def prepared(self, fn: Function, elements: Value) -> Value:
        """Elements of A as tiles read them."""
        return elements

    @property
    def moved(self) -> str:
        """Type in which an element is copied: 16-bit floats travel as integers, which every target moves."""
        return "i16" if self.element in ("bfloat", "half") else self.element

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        """`count` (at most `group`) elements of A, in every lane; the rest of the group is zero."""
        return fn.splat(self._widen(fn, fn.load(self.element, place)), self.lanes)

    def read_b(self, fn: Function, place: Value, mask: Value | None) -> Value:
        """One vector of B; lanes off the mask are zero and not read."""
        type_ = vector(self.element, self.lanes * self.group)
        loaded = fn.load(type_, place) if mask is None else fn.masked_load(type_, place, mask)
        return self._widen(fn, loaded)

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.fma(a, b, total)

    @property
    def has_excess(self) -> bool:
        """Whether `multiply_add` adds too much to every sum of a column, which `excess` counts."""
        return False

    def excess(self, fn: Function, b: Value, total: Value) -> Value:
        """`total` plus what a step with `b` adds too much."""
        return total

    def _widen(self, fn: Function, value: Value) -> Value:
        return value if self.element == self.accumulator else fn.fpext(value, self.accumulator)


@dataclass(frozen=True)
class Bf16Pairs(Kind):
    """Two k at a time by the bf16 dot product."""

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        pair = fn.load("i32", place, 2) if count == 2 else fn.zext(fn.load("i16", place), "i32")
        return fn.bitcast(fn.splat(pair, self.lanes), vector("bfloat", 2 * self.lanes))

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.dot_bf16(total, a, b)

    def _widen(self, fn: Function, value: Value) -> Value:
        return value


@dataclass(frozen=True)
class ByteQuads(Kind):
    """Four k at a time by the dot product of unsigned bytes (A) with signed ones (B).

    A signed A is read with 128 added to each byte; what that adds to the sums of a column is summed next to
    them and taken off in the end.
    """

    signed: bool

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        word = fn.load("i32", place, 1) if count == 4 else self._part(fn, place, count)
        lanes = fn.splat(word, self.lanes)
        if self.signed:
            lanes = fn.value(fn.xor(lanes, -0x7F7F7F80))
        return fn.bitcast(lanes, vector("i8", 4 * self.lanes))

    @staticmethod
    def _part(fn: Function, place: Value, count: int) -> Value:
        word: Int = 0
        for i in range(count):
            byte = fn.zext(fn.load("i8", fn.gep(place, i, "i8")), "i32")
            word = byte if i == 0 else fn.or_(word, fn.shl(byte, 8 * i))
        return fn.value(word)

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.dot_u8i8(total, a, b)

    @property
    def has_excess(self) -> bool:
        return self.signed

    def excess(self, fn: Function, b: Value, total: Value) -> Value:
        return fn.dot_u8i8(total, constant(b.type, -128), b)

    def _widen(self, fn: Function, value: Value) -> Value:
        return value


@dataclass(frozen=True)
class SmallQuads(ByteQuads):
    """Four k at a time by products of bytes whose sums in pairs fit 16 bits, because the weights are small.

    A signed A is made unsigned once; what that adds to the sums is stored with the weights (`QuadPanels`).
    """

    @property
    def adds_at_once(self) -> bool:
        return False

    @property
    def prepares_rows(self) -> bool:
        return self.signed

    def prepared(self, fn: Function, elements: Value) -> Value:
        return fn.value(fn.xor(elements, -OFFSET)) if self.signed else elements

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        word = fn.load("i32", place, 1) if count == 4 else self._part(fn, place, count)
        return fn.bitcast(fn.splat(word, self.lanes), vector("i8", 4 * self.lanes))

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        pairs = fn.saturating_dot_u8i8(a, b)
        return fn.value(fn.add(fn.dot_i16(pairs, constant(pairs.type, 1)), total))

    @property
    def has_excess(self) -> bool:
        return False


@dataclass(frozen=True)
class ShortPairs(Kind):
    """Two k at a time as 16-bit integers, summed in i32: in one instruction, or `in_two`."""

    in_two: bool

    @property
    def adds_at_once(self) -> bool:
        return not self.in_two

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        pair = fn.load("i32", place, 2) if count == 2 else fn.zext(fn.load("i16", place), "i32")
        return fn.bitcast(fn.splat(pair, self.lanes), vector("i16", 2 * self.lanes))

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        if self.in_two:
            return fn.value(fn.add(fn.dot_i16(a, b), total))
        return fn.add_dot_i16(total, a, b)

    def _widen(self, fn: Function, value: Value) -> Value:
        return value


@dataclass(frozen=True)
class Bytes(Kind):
    """One k at a time in 32-bit integers, for targets without a dot product of bytes."""

    signed: bool

    @property
    def adds_at_once(self) -> bool:
        return False

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        byte = fn.load("i8", place)
        return fn.splat(fn.sext(byte, "i32") if self.signed else fn.zext(byte, "i32"), self.lanes)

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.value(fn.add(fn.value(fn.mul(a, b)), total))

    def _widen(self, fn: Function, value: Value) -> Value:
        return fn.sext(value, "i32")


@dataclass(frozen=True)
class BytePairs(Bytes):
    """Two k at a time as 16-bit integers, whose products x86 adds in pairs."""

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        widen = fn.sext if self.signed else fn.zext
        word = fn.and_(fn.value(widen(fn.load("i8", place), "i32")), 0xFFFF)
        if count == 2:
            high = widen(fn.load("i8", fn.gep(place, 1, "i8")), "i32")
            word = fn.or_(word, fn.shl(high, 16))
        return fn.bitcast(fn.splat(fn.value(word), self.lanes), vector("i16", 2 * self.lanes))

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.value(fn.add(fn.dot_i16(a, b), total))

    def _widen(self, fn: Function, value: Value) -> Value:
        return fn.sext(value, "i16")


@dataclass(frozen=True)
class WidenedPairs(ShortPairs):
    """Two k at a time as 16-bit integers: those of A are widened once, before they meet many columns."""

    signed: bool

    @property
    def prepares_rows(self) -> bool:
        return True

    @property
    def row_element(self) -> str:
        return "i16"

    def prepared(self, fn: Function, elements: Value) -> Value:
        return (fn.sext if self.signed else fn.zext)(elements, "i16")

    def _widen(self, fn: Function, value: Value) -> Value:
        return fn.sext(value, "i16")


def kind_of(
    dtype: str, target: Target, grouped: bool = True, prepared: bool = False, small: bool = False
) -> Kind:
    """The best way `target` has to contract operands of `dtype`. 16-bit floats are summed in f32.

    "i8" is A and B of signed bytes, "u8" A of unsigned ones, "i16" (x86 only) both of 16 bits; all are summed
    in i32. Without `grouped`, k is taken one by one, for an A whose neighbours in k are not adjacent. With
    `prepared`, the caller can prepare rows of A; with `small`, B is in panels of quads.

    >>> from rlx.target.cpu import resolve
    >>> kind_of("bf16", resolve("x86-64-v4-bf16-vnni")).group, kind_of("bf16", resolve("x86-64-v3")).group
    (2, 1)
    """
    if dtype in ("i8", "u8"):
        lanes, signed = target.lanes("i32"), dtype == "i8"
        if small:
            return SmallQuads("i8", "i32", 4, lanes, signed)
        if grouped and target.has_vnni:
            return ByteQuads("i8", "i32", 4, lanes, signed)
        if grouped and prepared and target.widens_rows:
            return WidenedPairs("i8", "i32", 2, lanes, True, signed)
        if grouped and target.x86:
            return BytePairs("i8", "i32", 2, lanes, signed)
        return Bytes("i8", "i32", 1, lanes, signed)
    if dtype == "i16" and target.x86:
        return ShortPairs("i16", "i32", 2, target.lanes("i32"), not target.has_vnni)
    if dtype not in ("f64", "f32", "bf16", "f16"):
        raise DTypeError(f"no contraction kernel takes {dtype}: cast to f64, f32, bf16, f16, i8 or u8")
    if dtype == "bf16" and target.has_bf16 and grouped:
        return Bf16Pairs("bfloat", "float", 2, target.lanes("f32"))
    accumulator = "double" if dtype == "f64" else "float"
    return Kind(MEMORY[dtype], accumulator, 1, target.lanes("f64" if dtype == "f64" else "f32"))


def tile_of(dtype: str, target: Target, small: bool = False) -> tuple[int, int]:
    """(rows, vectors) of the register tile.

    >>> from rlx.target.cpu import resolve
    >>> tile_of("u8", resolve("x86-64-v3")), tile_of("u8", resolve("x86-64-v3"), small=True)
    ((6, 2), (5, 2))
    """
    rows, vectors = target.tile(dtype)
    if small:  # beside sums and columns: a vector of A, one of products, one of ones
        rows = min(rows, (target.registers - vectors - 3) // vectors)
    return rows, vectors


@dataclass(frozen=True)
class Places:
    """Addresses that move together, `step` elements per k: each a pointer plus a constant offset."""

    places: tuple[tuple[Value, int], ...]
    step: Int
    element: str

    @staticmethod
    def of(fn: Function, base: Value, offsets: Sequence[Int], step: Int, element: str) -> Places:
        """Places at `offsets` elements from `base`: known offsets become displacements, others pointers."""
        places = [(base, o) if isinstance(o, int) else (fn.gep(base, o, element), 0) for o in offsets]
        return Places(tuple(places), step, element)

    def at(self, fn: Function, k: Int) -> list[Value]:
        """The addresses at step k."""
        distance = fn.mul(k, self.step)
        moved: dict[Value, Value] = {}
        for pointer, _ in self.places:
            if pointer not in moved:
                moved[pointer] = fn.gep(pointer, distance, self.element)
        return [fn.gep(moved[pointer], offset, self.element) for pointer, offset in self.places]


def accumulate(
    fn: Function,
    kind: Kind,
    rows: Places,
    columns: Places,
    depth: Int,
    start: Sequence[Value],
    mask: Value | None = None,
    meanwhile: Callable[[Int], None] | None = None,
) -> list[Value]:
    """start[i, j] + the sum over k < depth of rows[i] at k times columns[j] at k, as a list in row order.

    Steps of `rows` and `columns` count one group of k. The mask, if any, belongs to the last column vector.
    `meanwhile(step)` writes what every whole step does besides.
    """
    width = len(columns.places)
    tile = len(start)
    beside = [kind.zero] * width if kind.has_excess else []

    def step(k: Int, totals: Sequence[Value], count: int) -> list[Value]:
        b = [
            kind.read_b(fn, place, mask if j == width - 1 else None)
            for j, place in enumerate(columns.at(fn, k))
        ]
        sums = list(totals)
        for i, place in enumerate(rows.at(fn, k)):
            a = kind.read_a(fn, place, count)
            for j in range(width):
                sums[i * width + j] = kind.multiply_add(fn, a, b[j], sums[i * width + j])
        for j in range(len(beside)):
            sums[tile + j] = kind.excess(fn, b[j], sums[tile + j])
        return sums

    def whole_step(k: Int, totals: Sequence[Value]) -> list[Value]:
        if meanwhile is not None:
            meanwhile(k)
        return step(k, totals, kind.group)

    whole, rest = fn.udiv(depth, kind.group), fn.urem(depth, kind.group)
    sums = fn.loop(0, whole, 1, [*start, *beside], whole_step)
    for count in range(1, kind.group):
        sums = _unless(fn, fn.cmp("ne", rest, count), sums, functools.partial(step, whole, sums, count))
    if not beside:
        return sums
    return [fn.value(fn.sub(total, sums[tile + n % width])) for n, total in enumerate(sums[:tile])]


def _unless(fn: Function, skip: Bool, values: list[Value], change: Callable[[], list[Value]]) -> list[Value]:
    """The values, changed where `skip` does not hold."""
    return fn.if_value(skip, lambda: values, change)
