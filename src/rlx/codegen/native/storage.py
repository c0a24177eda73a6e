"""Storage-only dtypes in registers: f8 and f4 are computed as float, small integers as i8.

Memory holds one byte per element, as NumPy does. Decoding looks a float up in a table of 256; encoding rounds
to nearest even in integer arithmetic.
"""

from __future__ import annotations

import numpy as np

from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, constant, like, mangle
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Word, bitcast, i8, is_nan, lshr, select, trunc, uge, ugt, ult, zext
from rlx.ir.dtype import DType
from rlx.records import dataclass


@dataclass(frozen=True)
class Format:
    """A small float: mantissa bits, exponent bias, largest finite code, codes of
    infinity and NaN, sign position.
    """

    mantissa: int
    bias: int
    largest: int
    infinity: int | None
    nan: int
    sign: int = 7
    one_zero: bool = False  # no negative zero; its code is NaN


FLOATS = {
    "f8e4m3fn": Format(3, 7, 0x7E, None, 0x7F),
    "f8e5m2": Format(2, 15, 0x7B, 0x7C, 0x7E),
    "f8e4m3fnuz": Format(3, 8, 0x7F, None, 0x80, one_zero=True),
    "f8e5m2fnuz": Format(2, 16, 0x7F, None, 0x80, one_zero=True),
    "f4e2m1": Format(1, 1, 0x7, None, 0x0, sign=3),
}
POWERS = "f8e8m0"
INTEGERS = {"i4": 4, "u4": 4, "i2": 2, "u2": 2}
NAMES = (*FLOATS, POWERS, *INTEGERS)


def register_type(d: DType) -> str:
    """LLVM type of one element in a register."""
    return "i8" if d.name in INTEGERS else "float"


@inline
def decode(f: Function, x: Value, d: DType) -> Value:
    """Bytes as register values."""
    code = Word(x)
    if d.name in INTEGERS:
        bits = INTEGERS[d.name]
        return code << (8 - bits) >> (8 - bits) if d.is_signed else code & ((1 << bits) - 1)
    values = np.arange(256, dtype=np.uint8)
    values = (values & 0xF if d.name == "f4e2m1" else values).view(d.np).astype(np.float32)
    table = f.module.table(f"decode_{d.name}", "float", [float(v) for v in values])
    return f.gather(table, zext(code, "i64"), "float")


@inline
def encode(f: Function, x: Value, d: DType, saturate: bool | None = None) -> Value:
    """Register values as bytes."""
    if d.name in INTEGERS:
        return Word(x) & ((1 << INTEGERS[d.name]) - 1)
    clamp = not d.has_inf if saturate is None else saturate
    return _encode_power(x, clamp) if d.name == POWERS else _encode_float(x, d.name, clamp)


@inline
def _encode_float(x: Value, name: str, clamp: bool) -> Word:
    form, i32 = FLOATS[name], like(x.type, "i32")
    word = bitcast(x, i32)
    magnitude = word & 0x7FFFFFFF
    shift = 23 - form.mantissa
    tie = lshr(magnitude, shift) & 1
    rounded = lshr(magnitude + ((1 << (shift - 1)) - 1) + tie, shift)
    normal = rounded - ((127 - form.bias) << form.mantissa)
    # Adding this number aligns and rounds the bits of small results.
    magic = constant(x.type, 2.0 ** (1 - form.bias - form.mantissa + 23))
    shifted = bitcast(bitcast(magnitude, x.type) + magic, i32)
    small = shifted - bitcast(magic, i32)
    code = select(bitcast(magnitude, x.type) < 2.0 ** (1 - form.bias), small, normal)
    # f4e2m1 always clamps; elsewhere what is too large becomes infinity or NaN unless it saturates
    clamps = clamp or name == "f4e2m1"
    past = form.largest if clamps else form.nan if form.infinity is None else form.infinity
    over, lost = ugt(code, form.largest), is_nan(x)
    signed = lshr(word, 31) << form.sign
    if form.one_zero:
        signed = select(code == 0, 0, signed)
        if past == form.nan:
            signed = select(over, 0, signed)
    out = select(over, past, code) | signed
    return trunc(select(lost, form.nan, out), i8)


@inline
def _encode_power(x: Value, clamp: bool) -> Word:
    """f8e8m0: the exponent alone; ties go up, negative values and NaN are NaN."""
    word = bitcast(x, like(x.type, "i32")) & 0x7FFFFFFF
    exponent, fraction = lshr(word, 23), word & 0x7FFFFF
    up = zext(uge(fraction, 0x400000), "i32")
    normal = exponent + up
    # below 2**-126 the fraction says how far: 2**-127 is its top bit
    tiny = zext(uge(fraction, 0x600000), "i32")
    small = select(ult(fraction, 0x300000), 0 if clamp else 255, tiny)
    code = select(exponent == 0, small, normal)
    code = select(ugt(code, 254), 254 if clamp else 255, code)
    negative = Word(x) < 0.0
    bad = negative | is_nan(x)
    return trunc(select(bad, 255, code), i8)


def from_float(fn: Function, x: Value, to: DType) -> Value:
    """A float register value as a small integer: towards zero, saturating, NaN to 0."""
    kind = "fptosi.sat" if to.is_signed else "fptoui.sat"
    wide = like(x.type, "i8")
    whole = fn.intrinsic(f"llvm.{kind}.{mangle(wide)}.{mangle(x.type)}", wide, x)
    low, high = constant(wide, int(to.min_value)), constant(wide, int(to.max_value))
    if to.is_signed:
        return fn.value(fn.smin(fn.value(fn.smax(whole, low)), high))
    return fn.value(fn.umin(whole, high))
