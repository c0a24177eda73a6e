"""Storage-only dtypes in registers: f8 and f4 are computed as float, small integers as i8.

Memory holds one byte per element, as NumPy does. Decoding looks a float up in a table of 256; encoding rounds
to nearest even in integer arithmetic.
"""

from __future__ import annotations

import numpy as np

from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, constant, like, mangle
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


def decode(fn: Function, code: Value, d: DType) -> Value:
    """Bytes as register values."""
    if d.name in INTEGERS:
        bits = INTEGERS[d.name]
        if not d.is_signed:
            return fn.value(fn.and_(code, constant(code.type, (1 << bits) - 1)))
        shift = constant(code.type, 8 - bits)
        return fn.value(fn.ashr(fn.value(fn.shl(code, shift)), shift))
    values = np.arange(256, dtype=np.uint8)
    values = (values & 0xF if d.name == "f4e2m1" else values).view(d.np).astype(np.float32)
    table = fn.module.table(f"decode_{d.name}", "float", [float(v) for v in values])
    return fn.gather(table, fn.zext(code, "i64"), "float")


def encode(fn: Function, x: Value, d: DType, saturate: bool | None = None) -> Value:
    """Register values as bytes."""
    if d.name in INTEGERS:
        return fn.value(fn.and_(x, constant(x.type, (1 << INTEGERS[d.name]) - 1)))
    clamp = not d.has_inf if saturate is None else saturate
    if d.name == POWERS:
        return _encode_power(fn, x, clamp)
    f = FLOATS[d.name]
    i32 = like(x.type, "i32")
    word = fn.bitcast(x, i32)
    magnitude = fn.value(fn.and_(word, 0x7FFFFFFF))
    shift = 23 - f.mantissa
    tie = fn.value(fn.and_(fn.value(fn.lshr(magnitude, shift)), 1))
    rounded = fn.value(
        fn.lshr(fn.value(fn.add(fn.value(fn.add(magnitude, (1 << (shift - 1)) - 1)), tie)), shift)
    )
    normal = fn.value(fn.sub(rounded, (127 - f.bias) << f.mantissa))
    magic = constant(x.type, 2.0 ** (1 - f.bias - f.mantissa + 23))
    shifted = fn.bitcast(fn.fadd(fn.bitcast(magnitude, x.type), magic), i32)
    small = fn.value(fn.sub(shifted, fn.bitcast(magic, i32)))
    least = constant(x.type, 2.0 ** (1 - f.bias))
    code = fn.select(fn.fcmp("olt", fn.bitcast(magnitude, x.type), least), small, normal)
    # f4e2m1 always clamps; elsewhere what is too large becomes infinity or NaN unless it saturates
    past = f.largest if clamp or d.name == "f4e2m1" else f.nan if f.infinity is None else f.infinity
    over = fn.value(fn.cmp("ugt", code, f.largest))
    lost = fn.is_nan(x)
    signed = fn.value(fn.shl(fn.value(fn.lshr(word, 31)), f.sign))
    if f.one_zero:
        plain = fn.value(fn.cmp("eq", code, 0))
        signed = fn.select(plain, constant(i32, 0), signed)
        if past == f.nan:
            signed = fn.select(over, constant(i32, 0), signed)
    code = fn.select(over, constant(i32, past), code)
    out = fn.value(fn.or_(code, signed))
    return fn.trunc(fn.select(lost, constant(i32, f.nan), out), "i8")


def _encode_power(fn: Function, x: Value, clamp: bool) -> Value:
    """f8e8m0: the exponent alone; ties go up, negative values and NaN are NaN."""
    i32 = like(x.type, "i32")
    word = fn.value(fn.and_(fn.bitcast(x, i32), 0x7FFFFFFF))
    exponent = fn.value(fn.lshr(word, 23))
    fraction = fn.value(fn.and_(word, 0x7FFFFF))
    up = fn.zext(fn.value(fn.cmp("uge", fraction, 0x400000)), "i32")
    normal = fn.value(fn.add(exponent, up))
    # below 2**-126 the fraction says how far: 2**-127 is its top bit
    tiny = fn.zext(fn.value(fn.cmp("uge", fraction, 0x600000)), "i32")
    too_small = fn.value(fn.cmp("ult", fraction, 0x300000))
    lowest = constant(i32, 0 if clamp else 255)
    small = fn.select(too_small, lowest, tiny)
    code = fn.select(fn.value(fn.cmp("eq", exponent, 0)), small, normal)
    over = fn.value(fn.cmp("ugt", code, 254))
    code = fn.select(over, constant(i32, 254 if clamp else 255), code)
    negative = fn.fcmp("olt", x, 0.0)
    bad = fn.value(fn.or_(negative, fn.is_nan(x)))
    return fn.trunc(fn.select(bad, constant(i32, 255), code), "i8")


def from_float(fn: Function, x: Value, to: DType) -> Value:
    """A float register value as a small integer: towards zero, saturating, NaN to 0."""
    kind = "fptosi.sat" if to.is_signed else "fptoui.sat"
    wide = like(x.type, "i8")
    whole = fn.intrinsic(f"llvm.{kind}.{mangle(wide)}.{mangle(x.type)}", wide, x)
    low, high = constant(wide, int(to.min_value)), constant(wide, int(to.max_value))
    if to.is_signed:
        return fn.value(fn.smin(fn.value(fn.smax(whole, low)), high))
    return fn.value(fn.umin(whole, high))
