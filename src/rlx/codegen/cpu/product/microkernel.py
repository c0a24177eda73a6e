"""The inner product of every contraction: a register tile of accumulators over one ascending loop in k.

GEMM, convolution and recurrent input all call `accumulate`. It reads A one element at a time (broadcast) and
B one vector at a time, so A may have any strides and B needs its columns side by side. Each output is one
chain of multiply-adds in ascending k: tile height, panel width and thread count cannot show in the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.native.irtext import Function, Value, constant, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Word,
    bitcast,
    byte_at,
    gep,
    i8,
    i16,
    i32,
    load,
    loop,
    sext,
    splat,
    udiv,
    urem,
    zext,
)
from rlx.errors import DTypeError
from rlx.kernel.quads import OFFSET
from rlx.records import dataclass
from rlx.target.cpu import Target

UNROLLED = 4  # steps that are written one after the other where the compiler does not do it: WebAssembly


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

    def prepared(self, f: Function, elements: Value) -> Value:
        """Elements of A as tiles read them."""
        return elements

    @property
    def changes_rows(self) -> bool:
        """Whether prepared bytes of A have 128 added, or taken off, for panels of quads."""
        return False

    @property
    def counts_rows(self) -> bool:
        """Whether the sum of every prepared row is stored behind it (`row_sum_at`)."""
        return False

    @property
    def moved(self) -> str:
        """Type in which an element is copied: 16-bit floats travel as integers, which every target moves."""
        return "i16" if self.element in ("bfloat", "half") else self.element

    def read_a(self, f: Function, place: Value, count: int) -> Value:
        """`count` (at most `group`) elements of A, in every lane; the rest of the group is zero."""
        return f.splat(self.widened(f, f.load(self.element, place)), self.lanes)

    def read_b(self, f: Function, place: Value, mask: Value | None) -> Value:
        """One vector of B; lanes off the mask are zero and not read."""
        type_ = vector(self.element, self.lanes * self.group)
        loaded = f.load(type_, place) if mask is None else f.masked_load(type_, place, mask)
        return self.widened(f, loaded)

    # This writes one instruction for each step of each sum. It uses the builder itself, which is faster here
    # than the notation.
    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.fma(a, b, total)

    @property
    def has_excess(self) -> bool:
        """Whether `multiply_add` adds too much to every sum of a column, which `excess` counts."""
        return False

    def excess(self, f: Function, b: Value, total: Value) -> Value:
        """`total` plus what a step with `b` adds too much."""
        return total

    def widened(self, f: Function, value: Value) -> Value:
        """Loaded elements as they are multiplied."""
        return value if self.element == self.accumulator else f.fpext(value, self.accumulator)


@dataclass(frozen=True)
class HalfWeights(Kind):
    """B of 16-bit floats, widened as they are read; A is as wide as the sums."""

    @property
    def row_element(self) -> str:
        return self.accumulator

    def read_a(self, f: Function, place: Value, count: int) -> Value:
        return f.splat(f.load(self.row_element, place), self.lanes)


@dataclass(frozen=True)
class Bf16Pairs(Kind):
    """Two k at a time by the bf16 dot product."""

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        return bitcast(splat(pair_at(place, count), self.lanes), vector("bfloat", 2 * self.lanes))

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.dot_bf16(total, a, b)

    def widened(self, f: Function, value: Value) -> Value:
        return value


@dataclass(frozen=True)
class ByteQuads(Kind):
    """Four k at a time by the dot product of bytes (A) with signed ones (B); those of A are unsigned on x86,
    and signed on AArch64 (`takes_signed`).

    Another A is read with 128 added to each byte, or taken off; what that adds to the sums of a column is
    summed next to them and taken off in the end.
    """

    signed: bool
    takes_signed: bool = False

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        words = splat(quad_at(place, count), self.lanes)
        if self.has_excess:
            words ^= -0x7F7F7F80
        return bitcast(words, vector("i8", 4 * self.lanes))

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.dot_i8(total, a, b) if self.takes_signed else f.dot_u8i8(total, a, b)

    @property
    def has_excess(self) -> bool:
        return self.signed != self.takes_signed

    def excess(self, f: Function, b: Value, total: Value) -> Value:
        return self.multiply_add(f, constant(b.type, -128), b, total)

    def widened(self, f: Function, value: Value) -> Value:
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
    def changes_rows(self) -> bool:
        return self.signed

    @property
    def prepares_rows(self) -> bool:
        return self.changes_rows

    @inline
    def prepared(self, f: Function, elements: Value) -> Value:
        return Word(elements) ^ -OFFSET if self.changes_rows else elements

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        return bitcast(splat(quad_at(place, count), self.lanes), vector("i8", 4 * self.lanes))

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        pairs = f.saturating_dot_u8i8(a, b)
        return f.value(f.add(f.dot_i16(pairs, constant(pairs.type, 1)), total))

    @property
    def has_excess(self) -> bool:
        return False


@dataclass(frozen=True)
class SevenBits(SmallQuads):
    """Four k at a time by products of signed bytes (A) and bytes of seven bits (B).

    An unsigned A is made signed once, and the sum of every row is computed then: weights have the offset of
    their column added (`QuadPanels`), so that sums begin with minus offset times the sum of the row.
    """

    @property
    def adds_at_once(self) -> bool:
        return True

    @property
    def prepares_rows(self) -> bool:
        return True

    @property
    def counts_rows(self) -> bool:
        return True

    @property
    def changes_rows(self) -> bool:
        return not self.signed

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.dot_i8i7(total, a, b)


@dataclass(frozen=True)
class ShortPairs(Kind):
    """Two k at a time as 16-bit integers, summed in i32: in one instruction, or `in_two`."""

    in_two: bool

    @property
    def adds_at_once(self) -> bool:
        return not self.in_two

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        return bitcast(splat(pair_at(place, count), self.lanes), vector("i16", 2 * self.lanes))

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.value(f.add(f.dot_i16(a, b), total)) if self.in_two else f.add_dot_i16(total, a, b)

    def widened(self, f: Function, value: Value) -> Value:
        return value


@dataclass(frozen=True)
class Bytes(Kind):
    """One k at a time in 32-bit integers, for targets without a dot product of bytes."""

    signed: bool

    @property
    def adds_at_once(self) -> bool:
        return False

    @inline
    def byte_of_a(self, place: Value) -> i32:
        """One element of A, widened."""
        byte = load(i8, place)
        return sext(byte, i32) if self.signed else zext(byte, i32)

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        return splat(self.byte_of_a(place), self.lanes)

    @inline
    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return Word(a) * b + total

    def widened(self, f: Function, value: Value) -> Value:
        return f.sext(value, "i32")


@dataclass(frozen=True)
class BytePairs(Bytes):
    """Two k at a time as 16-bit integers, whose products are added in pairs."""

    @inline
    def read_a(self, f: Function, place: Value, count: int) -> Value:
        word = self.byte_of_a(place) & 0xFFFF
        if count == 2:
            word |= self.byte_of_a(byte_at(place, 1)) << 16
        return bitcast(splat(word, self.lanes), vector("i16", 2 * self.lanes))

    def multiply_add(self, f: Function, a: Value, b: Value, total: Value) -> Value:
        return f.value(f.add(f.dot_i16(a, b), total))

    def widened(self, f: Function, value: Value) -> Value:
        return f.sext(value, "i16")


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

    @inline
    def prepared(self, f: Function, elements: Value) -> Value:
        return sext(elements, i16) if self.signed else zext(elements, i16)

    def widened(self, f: Function, value: Value) -> Value:
        return f.sext(value, "i16")


@inline
def pair_at(place: Value, count: int) -> i32:
    """Two numbers of 16 bits in a word; of one, the other is zero."""
    return load(i32, place, 2) if count == 2 else zext(load(i16, place), i32)


@inline
def quad_at(place: Value, count: int) -> i32:
    """Four bytes in a word; where only `count` exist, the others are zero."""
    if count == 4:
        return load(i32, place, 1)
    word = zext(load(i8, place), i32)
    for i in range(1, count):
        word |= zext(load(i8, byte_at(place, i)), i32) << 8 * i
    return word


def kind_of(
    dtype: str, target: Target, grouped: bool = True, prepared: bool = False, small: bool = False
) -> Kind:
    """The best way `target` has to contract operands of `dtype`. 16-bit floats are summed in f32.

    "i8" is A and B of signed bytes, "u8" A of unsigned ones, "i16" (if targets multiply pairs) both
    of 16 bits; all are summed in i32. Without `grouped`, k is taken one by one, for an A whose neighbours in
    k are not adjacent. With `prepared`, the caller can prepare rows of A; with `small`, B is in panels of
    quads.

    >>> from rlx.target.cpu import resolve
    >>> kind_of("bf16", resolve("x86-64-v4-bf16-vnni")).group, kind_of("bf16", resolve("x86-64-v3")).group
    (2, 1)
    """
    if dtype in ("i8", "u8"):
        lanes, signed = target.lanes("i32"), dtype == "i8"
        if small:
            quads = SevenBits if target.has_seven_bits else SmallQuads
            return quads("i8", "i32", 4, lanes, signed)
        if grouped and target.has_quads:
            return ByteQuads("i8", "i32", 4, lanes, signed, target.arm)
        if grouped and prepared and target.widens_rows:
            return WidenedPairs("i8", "i32", 2, lanes, True, signed)
        if grouped and target.multiplies_pairs:
            return BytePairs("i8", "i32", 2, lanes, signed)
        return Bytes("i8", "i32", 1, lanes, signed)
    if dtype == "i16" and target.multiplies_pairs:
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

    pointers: tuple[Value, ...]
    numbers: tuple[int, ...]  # of the pointer of each place
    offsets: tuple[int, ...]
    step: Count
    element: str

    @staticmethod
    def of(f: Function, base: Value, offsets: Sequence[Count], step: Count, element: str) -> Places:
        """Places at `offsets` elements from `base`: known offsets become displacements, others pointers."""
        pointers: list[Value] = []
        places: list[tuple[int, int]] = []
        for offset in offsets:
            if not isinstance(offset, int):
                places.append((len(pointers), 0))
                pointers.append(f.gep(base, offset, element))
            else:
                if base not in pointers:
                    pointers.append(base)
                places.append((pointers.index(base), offset))
        return Places(
            tuple(pointers), tuple(n for n, _ in places), tuple(o for _, o in places), step, element
        )

    @inline
    def at(self, f: Function, k: Count) -> list[Value]:
        """The addresses at step k."""
        distance = k * self.step
        moved = [gep(pointer, distance, self.element) for pointer in self.pointers]
        own = map(moved.__getitem__, self.numbers)
        return [gep(pointer, offset, self.element) for pointer, offset in zip(own, self.offsets, strict=True)]


def with_excess(kind: Kind, sums: Sequence[Value], width: int) -> list[Value]:
    """The sums of a tile, followed by those of what is added too much to each of `width` columns."""
    return [*sums, *[kind.zero] * (width if kind.has_excess else 0)]


@inline
def without_excess(kind: Kind, sums: list[Value], width: int) -> list[Value]:
    """The sums of a tile alone, with what was added too much taken off."""
    if not kind.has_excess:
        return sums
    tile = len(sums) - width
    return [Word(total) - sums[tile + n % width] for n, total in enumerate(sums[:tile])]


@inline
def accumulate(
    f: Function,
    kind: Kind,
    rows: Places,
    columns: Places,
    depth: Count,
    start: Sequence[Value],
    mask: Value | None = None,
    meanwhile: Callable[[Count], None] | None = None,
    each: int = 1,
) -> list[Value]:
    """start[i, j] + the sum over k < depth of rows[i] at k times columns[j] at k, as a list in row order.

    Steps of `rows` and `columns` count one group of k. The mask, if any, belongs to the last column vector.
    `meanwhile(step)` writes what is done besides before `each` whole steps.
    """
    width = len(columns.offsets)
    sums = with_excess(kind, start, width)
    return without_excess(kind, add_steps(f, kind, rows, columns, depth, sums, mask, meanwhile, each), width)


@inline
def add_steps(
    f: Function,
    kind: Kind,
    rows: Places,
    columns: Places,
    depth: Count,
    sums: list[Value],
    mask: Value | None = None,
    meanwhile: Callable[[Count], None] | None = None,
    each: int = 1,
) -> list[Value]:
    """What `accumulate` does to sums `with_excess`."""
    width = len(columns.offsets)
    tile = len(rows.offsets) * width
    masks = [None] * (width - 1) + [mask]
    web = f.module.target.web
    alone = web and len(rows.offsets) == 1  # of one row, every vector of B is used once: it is read then

    def step(k: Count, count: int, sums: list[Value]) -> list[Value]:
        """The sums after `count` more k."""
        to_read = list(zip(columns.at(f, k), masks, strict=True))
        b = [] if alone else [kind.read_b(f, place, own) for place, own in to_read]
        out: list[Value] = []
        for i, place in enumerate(rows.at(f, k)):
            a = kind.read_a(f, place, count)
            line = sums[i * width : (i + 1) * width]
            if alone:
                for (column, own), total in zip(to_read, line, strict=True):
                    b.append(kind.read_b(f, column, own))
                    out += f.done_first([kind.multiply_add(f, a, b[-1], total)])
            else:
                made = [kind.multiply_add(f, a, x, total) for x, total in zip(b, line, strict=True)]
                out += f.done_first(made)
        return out + [kind.excess(f, x, total) for x, total in zip(b, sums[tile:], strict=False)]

    whole, rest = udiv(depth, kind.group), urem(depth, kind.group)
    if web and isinstance(whole, int) and whole <= UNROLLED and meanwhile is None:
        for early in range(whole):
            sums = step(early, kind.group, sums)
    else:
        several = whole if each == 1 else udiv(whole, each) * each
        for k in loop(0, several, each):
            if meanwhile is not None:
                meanwhile(k)
            for n in range(each):
                sums = step(k + n, kind.group, sums)
        if each > 1:
            for k in loop(several, whole):
                sums = step(k, kind.group, sums)
    for count in range(1, kind.group):
        sums = sums if rest != count else step(whole, count, sums)
    return sums
