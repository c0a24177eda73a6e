"""AMX: registers that hold matrices of 16 rows of 64 bytes, and instructions that multiply them.

Code names the registers by number; LLVM keeps nothing in them by itself. A thread says which shapes they have
before it uses them (`configure`) and `release`s them in the end.

Where AMX is emulated, the registers are `STATE_BYTES` of memory, and twins of the instructions do for any
shapes what Intel's pseudo-code says, with the same bits (but for sign and payload of a NaN, see `twins.py`).
"""

from __future__ import annotations

import struct

from rlx.codegen.native.irops import Int
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.codegen.native.notation import Native, inline, native
from rlx.codegen.native.twins import flushed
from rlx.codegen.native.words import (
    Word,
    bitcast,
    builder,
    byte_at,
    concat,
    dot_i16,
    fma,
    i8,
    i16,
    i32,
    i64,
    lanes,
    load,
    loop,
    lshr,
    ptr,
    select,
    splat,
    store,
    udiv,
    zext,
)
from rlx.records import dataclass

COUNT, ROWS, LINE = 8, 16, 64  # registers, and rows and bytes of a row that one can have
LANES = LINE // 4  # sums of a row
_SHAPES, _REGISTER = 64, ROWS * LINE  # bytes
STATE_BYTES = _SHAPES + COUNT * _REGISTER
_COLUMNS_AT, _ROWS_AT = 16, 48  # in the shapes: bytes of a row as u16, rows as u8


def shapes(*registers: tuple[int, int]) -> bytes:
    """What `configure` reads: rows, and bytes of a row, of each register from the first on.

    >>> shapes((16, 64), (3, 8))[16:20].hex(), shapes((16, 64), (3, 8))[48:50].hex()
    ('40000800', '1003')
    """
    rows = bytes(r for r, _ in registers)
    columns = b"".join(struct.pack("<H", c) for _, c in registers)
    parts = (b"\1", _COLUMNS_AT), (columns, _ROWS_AT - _COLUMNS_AT), (rows, _SHAPES - _ROWS_AT)
    return b"".join(part.ljust(size, b"\0") for part, size in parts)


@dataclass(frozen=True)
class Matrices:
    """The registers in the function that is being written; `state` is where they are if they are emulated."""

    state: Value | None

    def configure(self, place: Value) -> None:
        """Give all registers the shapes at a place, and zeros."""
        self._write("ldtilecfg", configure_registers, (), place)

    def release(self) -> None:
        """Use no register any more."""
        self._write("tilerelease", release_registers, ())

    def zero(self, to: int) -> None:
        self._write("tilezero", zero_register, (to,))

    def load(self, to: int, place: Value, distance: Int) -> None:
        """Read a register whose rows begin `distance` bytes apart."""
        self._write("tileloadd64", load_register, (to,), place, distance)

    def store(self, register: int, place: Value, distance: Int) -> None:
        """Write its rows."""
        self._write("tilestored64", store_register, (register,), place, distance)

    def dot_bytes(self, sums: int, a: int, b: int, signed: bool) -> None:
        """sums[m, n] (i32) += products of the bytes a[m, k], `signed` or not, and b[k, n], signed, over k."""
        name, twin = ("tdpbssd", dot_i8i8) if signed else ("tdpbusd", dot_u8i8)
        self._write(name, twin, (sums, a, b), feature="amx-int8")

    def dot_bf16(self, sums: int, a: int, b: int) -> None:
        """sums[m, n] (f32) += the sum of the products of the first of each pair over k, and of the second."""
        self._write("tdpbf16ps", dot_pairs, (sums, a, b), feature="amx-bf16")

    def _write(
        self,
        name: str,
        twin: Native[..., None],
        registers: tuple[int, ...],
        *operands: Int,
        feature: str = "amx-tile",
    ) -> None:
        """Write an instruction on registers of these numbers, or a call of its twin."""
        f = builder()
        values = [f.value(x) for x in operands]

        def emulated(*_: object) -> Value:
            assert self.state is not None
            return f.call(twin.written(f"rlx.{name}"), [self.state, *registers, *values])

        numbers = [constant("i8", n) for n in registers]
        f.intrinsic(f"llvm.x86.{name}", "void", *numbers, *values, feature=feature, twin=emulated)


# ---- twins


@inline
def rows_of(state: ptr, register: i64) -> i64:
    return zext(load(i8, byte_at(state, register + _ROWS_AT), 1), i64)


@inline
def bytes_of(state: ptr, register: i64) -> i64:
    """Of a row."""
    return zext(load(i16, byte_at(state, register * 2 + _COLUMNS_AT), 1), i64)


@inline
def row_of(state: ptr, register: i64, row: i64 | int) -> ptr:
    return byte_at(state, register * _REGISTER + row * LINE + _SHAPES)


@inline
def clear(start: ptr, size: int) -> None:
    zeros = constant(vector("i8", LINE), 0)
    for at in loop(0, size, LINE):
        store(zeros, byte_at(start, at))


@inline
def copy(source: ptr, to: ptr, size: i64) -> None:
    """A row, or a part of one."""
    if size == LINE:
        store(load(vector("i8", LINE), source), to)
    else:
        for i in loop(size):
            store(load(i8, byte_at(source, i)), byte_at(to, i))


@native(internal=True, noinline=True)
def configure_registers(state: ptr, place: ptr) -> None:
    copy(place, state, i64(_SHAPES))
    clear(byte_at(state, _SHAPES), COUNT * _REGISTER)


@native(internal=True, noinline=True)
def release_registers(state: ptr) -> None:
    clear(state, STATE_BYTES)


@native(internal=True, noinline=True)
def zero_register(state: ptr, to: i64) -> None:
    clear(row_of(state, to, 0), _REGISTER)


@native(internal=True, noinline=True)
def load_register(state: ptr, to: i64, place: ptr, distance: i64) -> None:
    clear(row_of(state, to, 0), _REGISTER)
    for row in loop(rows_of(state, to)):
        copy(byte_at(place, row * distance), row_of(state, to, row), bytes_of(state, to))


@native(internal=True, noinline=True)
def store_register(state: ptr, register: i64, place: ptr, distance: i64) -> None:
    for row in loop(rows_of(state, register)):
        copy(row_of(state, register, row), byte_at(place, row * distance), bytes_of(state, register))


@inline
def dot_quads(state: ptr, sums: i64, a: i64, b: i64, signed: bool) -> None:
    """Bytes become 16-bit integers, even and odd ones apart: the sum of two products fits 32 bits."""
    columns = lanes(udiv(bytes_of(state, sums), 4), LANES)
    half = vector("i16", LANES)

    def halves(words: Word, signed: bool) -> list[Word]:
        """Even and odd bytes."""
        odd = words >> 8 if signed else lshr(words, 8)
        return [(words << 8) >> 8 if signed else words & 0xFF, odd]

    for row in loop(rows_of(state, sums)):
        place, left = row_of(state, sums, row), row_of(state, a, row)
        low, high = (load(vector("i32", LANES // 2), byte_at(place, at)) for at in (0, LINE // 2))
        for k in loop(udiv(bytes_of(state, a), 4)):
            x = halves(bitcast(splat(load(i32, byte_at(left, k * 4)), LANES // 2), half), signed)
            y, z = (halves(load(half, byte_at(row_of(state, b, k), at)), True) for at in (0, LINE // 2))
            low += dot_i16(x[0], y[0]) + dot_i16(x[1], y[1])
            high += dot_i16(x[0], z[0]) + dot_i16(x[1], z[1])
        store(select(columns, concat(low, high), 0), place)


@native(internal=True, noinline=True)
def dot_u8i8(state: ptr, sums: i64, a: i64, b: i64) -> None:
    """tdpbusd."""
    dot_quads(state, sums, a, b, signed=False)


@native(internal=True, noinline=True)
def dot_i8i8(state: ptr, sums: i64, a: i64, b: i64) -> None:
    """tdpbssd."""
    dot_quads(state, sums, a, b, signed=True)


@native(internal=True, noinline=True)
def dot_pairs(state: ptr, sums: i64, a: i64, b: i64) -> None:
    """tdpbf16ps: the first and the second numbers of all pairs are summed apart, from zero; denormals are
    zeros everywhere, whatever the mode."""
    f, type_ = builder(), vector("float", LANES)
    columns = lanes(udiv(bytes_of(state, sums), 4), LANES)

    def numbers(words: Word) -> list[Value]:
        """First and second numbers of pairs."""
        return [flushed(f, bitcast(x, type_)) for x in (words << 16, words & -0x10000)]

    for row in loop(rows_of(state, sums)):
        place, left = row_of(state, sums, row), row_of(state, a, row)
        first, second = constant(type_, 0), constant(type_, 0)
        for k in loop(udiv(bytes_of(state, a), 4)):
            x = numbers(splat(load(i32, byte_at(left, k * 4)), LANES))
            y = numbers(load(vector("i32", LANES), row_of(state, b, k)))
            first = flushed(f, fma(x[0], y[0], first))
            second = flushed(f, fma(x[1], y[1], second))
        before = flushed(f, load(type_, place))
        total = flushed(f, Word(before) + flushed(f, Word(first) + second))
        store(select(columns, total, 0.0), place)
