"""Circular functions and their inverses, lane by lane, for f32 and f64.

Angles are reduced in f64: a multiple of pi/2 in two or three parts while that is exact, and beyond 2**19 by
the method of Payne and Hanek, lane after lane, with as many bits of 2/pi as the exponent asks for.
"""

from __future__ import annotations

import math

from rlx.codegen.native import vmath_tables as tables
from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.irtypes import Value, bits, constant
from rlx.codegen.native.vmath_core import fit, format_of, integer_type, odd_fit, sign_bit, two_sum

_LARGE = 2.0**19
# pi/2 in parts of 33 bits, whose products with a whole number below 2**20 are exact, and the rest.
_PI_2 = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_PI_2_AFTER_FIRST = 6.077100506506192e-11
# The bits of 2/pi, 64 at a time, after one word of zeros for the bits before the point.
_TWO_OVER_PI = (
    0x0000000000000000, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561,
    0xB7246E3A424DD2E0, 0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41,
    0x3991D639835339F4, 0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7,
    0x4F463F669E5FEA2D, 0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB,
)  # fmt: skip


def _reduce(f: Function, x: Value) -> tuple[Value, Value]:
    """(r, q): x - n pi/2 with |r| <= pi/4 in the format of x, and n mod 4 in i32 lanes."""
    precise = x.element == "double"
    wide = f.fpext(x, "double")
    n = f.round_even(f.fmul(wide, 2.0 / math.pi))
    r = f.fsub(wide, f.fmul(n, _PI_2[0]))
    if precise:
        r, lost = two_sum(f, r, f.fneg(f.fmul(n, _PI_2[1])))
        r = f.fadd(r, f.fsub(lost, f.fmul(n, _PI_2[2])))
    else:
        r = f.fsub(r, f.fmul(n, _PI_2_AFTER_FIRST))
    size = f.fabs(wide)
    large = f.value(f.and_(f.fcmp("oge", size, _LARGE), f.fcmp("olt", size, math.inf)))
    quadrant = f.fptosi(f.select(f.fcmp("olt", size, _LARGE), n, constant(n.type, 0.0)), "i32")

    def exact() -> list[Value]:
        return list(_reduce_lanes(f, wide, large, r, quadrant))

    r, quadrant = f.if_value(f.any_lane(large), exact, lambda: [r, quadrant])
    return f.fptrunc(r, x.element), quadrant


def _reduce_lanes(f: Function, x: Value, large: Value, r: Value, quadrant: Value) -> tuple[Value, Value]:
    """Replace r and quadrant in the large lanes, one at a time."""
    reduce_large = _reduce_large(f.module)
    values, rests, turns = f.alloca("double", x.width), f.alloca("double", x.width), f.alloca("i32", x.width)
    f.store(x, values)
    f.store(r, rests)
    f.store(quadrant, turns)

    def lane(i: Value | int, carried: list[Value]) -> None:
        value = f.load("double", f.gep(values, i, "double"))
        size = f.fabs(value)

        def replace() -> None:
            rest = f.call(reduce_large, [value, f.gep(turns, i, "i32")], "double")
            f.store(rest, f.gep(rests, i, "double"))

        f.branch(f.value(f.and_(f.fcmp("oge", size, _LARGE), f.fcmp("olt", size, math.inf))), replace)

    f.loop(0, x.width, 1, [], lane)
    return f.load(r.type, rests), f.load(quadrant.type, turns)


def _reduce_large(module: Module) -> str:
    """A function (x, pointer to quadrant) -> r for one finite f64 of at least 2**19, written once per module.

    x = M 2**e with M of 53 bits. Bits of 2/pi worth a multiple of 4 quadrants are skipped; M times the next
    192 bits is the turn as a fixed-point fraction of 4 quadrants, of which the upper 128 bits are kept.
    """
    name = "rlx_reduce_large"
    if module.defines(name):
        return name
    f = module.function(
        name, [("double", "x"), ("ptr", "quadrant")], internal=True, noinline=True, returns="double"
    )
    x, quadrant = f.args
    word = f.bitcast(x, "i64")
    mantissa = f.zext(f.or_(f.and_(word, (1 << 52) - 1), 1 << 52), "i128")
    exponent = f.sub(f.and_(f.lshr(word, 52), 0x7FF), 1023 + 52)
    position = f.add(exponent, 64 - 2)
    table = f.gep(module.table("rlx_two_over_pi", "i64", _TWO_OVER_PI), f.lshr(position, 6), "i64")
    shift = f.value(f.and_(position, 63))
    words = [f.load("i64", f.gep(table, i, "i64")) for i in range(4)]
    window = [
        f.zext(f.intrinsic("llvm.fshl.i64", "i64", words[i], words[i + 1], shift), "i128") for i in range(3)
    ]
    turn = f.add(f.shl(f.mul(mantissa, window[0]), 64), f.mul(mantissa, window[1]))
    turn = f.add(turn, f.lshr(f.mul(mantissa, window[2]), 64))
    whole = f.lshr(f.add(turn, 1 << 125), 126)
    fraction = f.value(f.sub(turn, f.shl(whole, 126)))
    negative = f.value(f.cmp("slt", fraction, 0))
    size = f.select(negative, f.value(f.sub(0, fraction)), fraction)
    high = f.uitofp(f.trunc(f.lshr(size, 64), "i64"), "double")
    low = f.uitofp(f.trunc(size, "i64"), "double")
    rest = f.fmul(f.fma(high, 2.0**64, low), math.pi / 2 * 2.0**-126)
    below = f.value(f.cmp("slt", word, 0))
    turns = f.trunc(f.value(whole), "i32")
    f.store(f.value(f.and_(f.select(below, f.value(f.sub(0, turns)), turns), 3)), quadrant)
    flip = f.value(f.xor(negative, below))
    f.return_(f.select(flip, f.fneg(rest), rest))
    return name


def _sine_and_cosine(f: Function, r: Value) -> tuple[Value, Value]:
    """sin and cos of a reduced angle."""
    z = f.fmul(r, r)
    cosine = f.fma(f.fmul(z, z), fit(f, z, tables.COS), f.fma(z, -0.5, 1.0))
    return odd_fit(f, r, z, tables.SIN), cosine


def _circular(f: Function, x: Value, turn: int) -> Value:
    """sin(x + turn pi/2)."""
    r, quadrant = _reduce(f, x)
    sine, cosine = _sine_and_cosine(f, r)
    quadrant = f.value(f.add(quadrant, turn)) if turn else quadrant
    odd = f.value(f.cmp("ne", f.and_(quadrant, 1), 0))
    result = f.select(odd, cosine, sine)
    flip = f.shl(f.zext(f.value(f.and_(quadrant, 2)), format_of(x).integer), bits(x.type) - 2)
    return f.bitcast(f.value(f.xor(f.bitcast(result, integer_type(x)), flip)), x.type)


def sin(f: Function, x: Value) -> Value:
    return f.select(f.fcmp("oeq", x, 0.0), x, _circular(f, x, 0))


def cos(f: Function, x: Value) -> Value:
    return _circular(f, x, 1)


def tan(f: Function, x: Value) -> Value:
    r, quadrant = _reduce(f, x)
    sine, cosine = _sine_and_cosine(f, r)
    odd = f.value(f.cmp("ne", f.and_(quadrant, 1), 0))
    quotient = f.fdiv(f.select(odd, cosine, sine), f.select(odd, f.fneg(sine), cosine))
    return f.select(f.fcmp("oeq", x, 0.0), x, quotient)


# ---- inverses


def _quarter_minus(f: Function, p: Value) -> Value:
    """pi/2 - p, with pi/2 in two parts."""
    fmt = format_of(p)
    return f.fsub(fmt.pi_2_high, f.fsub(p, fmt.pi_2_low))


def _half_minus(f: Function, p: Value) -> Value:
    """pi - p, with pi in two parts."""
    fmt = format_of(p)
    return f.fsub(2.0 * fmt.pi_2_high, f.fsub(p, 2.0 * fmt.pi_2_low))


def _arcsine_parts(f: Function, x: Value) -> tuple[Value, Value]:
    """(whether |x| > 1/2, p): p is asin|x| near 0, and 2 asin(sqrt((1 - |x|) / 2)) = acos|x| otherwise."""
    a = f.fabs(x)
    outer = f.fcmp("ogt", a, 0.5)
    z = f.select(outer, f.fmul(f.fsub(1.0, a), 0.5), f.fmul(a, a))
    t = f.select(outer, f.sqrt(z), a)
    p = odd_fit(f, t, z, tables.ASIN)
    return outer, f.select(outer, f.fadd(p, p), p)


def asin(f: Function, x: Value) -> Value:
    outer, p = _arcsine_parts(f, x)
    return f.copysign(f.select(outer, _quarter_minus(f, p), p), x)


def acos(f: Function, x: Value) -> Value:
    outer, p = _arcsine_parts(f, x)
    inner = _quarter_minus(f, f.copysign(p, x))
    return f.select(outer, f.select(sign_bit(f, x), _half_minus(f, p), p), inner)


def _arctangent(f: Function, top: Value, bottom: Value) -> Value:
    """atan(top / bottom) in [0, pi/2] for top, bottom >= 0: smaller over larger, then the complement."""
    steep = f.fcmp("ogt", top, bottom)
    q = f.fdiv(f.select(steep, bottom, top), f.select(steep, top, bottom))
    p = odd_fit(f, q, f.fmul(q, q), tables.ATAN)
    return f.select(steep, _quarter_minus(f, p), p)


def atan(f: Function, x: Value) -> Value:
    return f.copysign(_arctangent(f, f.fabs(x), constant(x.type, 1.0)), x)


def atan2(f: Function, y: Value, x: Value) -> Value:
    """Angle of the point (x, y), with C's values on the axes, at the origin and at infinity."""
    top, bottom = f.fabs(y), f.fabs(x)
    one, zero = constant(x.type, 1.0), constant(x.type, 0.0)
    both_infinite = f.value(f.and_(f.fcmp("oeq", top, math.inf), f.fcmp("oeq", bottom, math.inf)))
    top, bottom = f.select(both_infinite, one, top), f.select(both_infinite, one, bottom)
    origin = f.value(f.and_(f.fcmp("oeq", top, 0.0), f.fcmp("oeq", bottom, 0.0)))
    p = f.select(origin, zero, _arctangent(f, top, bottom))
    p = f.copysign(f.select(sign_bit(f, x), _half_minus(f, p), p), y)
    return f.select(f.fcmp("uno", x, y), f.fadd(x, y), p)
