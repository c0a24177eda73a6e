"""Circular functions and their inverses, lane by lane, for f32 and f64.

Angles are reduced in f64: a multiple of pi/2 in two or three parts while that is exact, and beyond 2**19 by
the method of Payne and Hanek, lane after lane, with as many bits of 2/pi as the exponent asks for.
"""

from __future__ import annotations

import math

from rlx.codegen.native import vmath_tables as tables
from rlx.codegen.native.irtypes import bits
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.vmath_core import fit, format_of, integer_type, number, odd_fit, sign_bit, two_sum
from rlx.codegen.native.words import (
    Word,
    alloca,
    any_lane,
    bitcast,
    builder,
    copysign,
    external,
    fabs,
    fcmp,
    float64,
    fma,
    fpext,
    fptosi,
    fptrunc,
    gep,
    i32,
    i64,
    load,
    loop,
    lshr,
    ptr,
    round_even,
    select,
    sqrt,
    store,
    trunc,
    uitofp,
    zext,
)

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


@inline
def _reduce(x: Word) -> tuple[Word, Word]:
    """(r, q): x - n pi/2 with |r| <= pi/4 in the format of x, and n mod 4 in i32 lanes."""
    wide = fpext(x, "double")
    n = round_even(wide * (2.0 / math.pi))
    r = wide - n * _PI_2[0]
    if x.element == "double":
        r, lost = two_sum(r, -(n * _PI_2[1]))
        r += lost - n * _PI_2[2]
    else:
        r -= n * _PI_2_AFTER_FIRST
    size = fabs(wide)
    large = (size >= _LARGE) & (size < math.inf)
    quadrant = fptosi(select(size < _LARGE, n, 0.0), "i32")
    if any_lane(large):
        r, quadrant = _reduce_lanes(wide, r, quadrant)
    return fptrunc(r, x.element), quadrant


@inline
def _reduce_lanes(x: Word, r: Word, quadrant: Word) -> tuple[Word, Word]:
    """Replace r and quadrant in the large lanes, one at a time."""
    values, rests, turns = alloca("double", x.width), alloca("double", x.width), alloca("i32", x.width)
    store(x, values)
    store(r, rests)
    store(quadrant, turns)
    for i in loop(x.width):
        value = load(float64, gep(values, i, "double"))
        size = fabs(value)
        if (size >= _LARGE) & (size < math.inf):
            rest = rlx_reduce_large(value, gep(turns, i, "i32"))
            store(rest, gep(rests, i, "double"))
    return load(r.type, rests), load(quadrant.type, turns)


_shifted_pair = external("llvm.fshl.i64", i64)


@native(internal=True, noinline=True)
def rlx_reduce_large(x: float64, quadrant: ptr) -> float64:
    """(x, pointer to quadrant) -> r for one finite f64 of at least 2**19.

    x = M 2**e with M of 53 bits. Bits of 2/pi worth a multiple of 4 quadrants are skipped; M times the next
    192 bits is the turn as a fixed-point fraction of 4 quadrants, of which the upper 128 bits are kept.
    """
    word = bitcast(x, "i64")
    mantissa = zext(word & ((1 << 52) - 1) | 1 << 52, "i128")
    exponent = (lshr(word, 52) & 0x7FF) - (1023 + 52)
    position = exponent + (64 - 2)
    table = gep(builder().module.table("rlx_two_over_pi", "i64", _TWO_OVER_PI), lshr(position, 6), "i64")
    shift = position & 63
    words = [table[i] for i in range(4)]
    window = [zext(_shifted_pair(words[i], words[i + 1], shift), "i128") for i in range(3)]
    turn = (mantissa * window[0] << 64) + mantissa * window[1]
    turn += lshr(mantissa * window[2], 64)
    whole = lshr(turn + (1 << 125), 126)
    fraction = turn - (whole << 126)
    negative = fraction < 0
    size = select(negative, 0 - fraction, fraction)
    high = uitofp(trunc(lshr(size, 64), i64), "double")
    low = uitofp(trunc(size, i64), "double")
    rest = fma(high, 2.0**64, low) * (math.pi / 2 * 2.0**-126)
    below = word < 0
    turns = trunc(whole, i32)
    store(select(below, 0 - turns, turns) & 3, quadrant)
    return float64(select(negative ^ below, -rest, rest))


@inline
def _sine_and_cosine(r: Word) -> tuple[Word, Word]:
    """sin and cos of a reduced angle."""
    z = r * r
    cosine = fma(z * z, fit(z, tables.COS), fma(z, -0.5, 1.0))
    return odd_fit(r, z, tables.SIN), cosine


@inline
def _circular(x: Word, turn: int) -> Word:
    """sin(x + turn pi/2)."""
    r, quadrant = _reduce(x)
    sine, cosine = _sine_and_cosine(r)
    quadrant = quadrant + turn if turn else quadrant
    odd = quadrant & 1 != 0
    result = select(odd, cosine, sine)
    flip = zext(quadrant & 2, format_of(x).integer) << bits(x.type) - 2
    return bitcast(bitcast(result, integer_type(x)) ^ flip, x.type)


@inline
def sin(x: Word) -> Word:
    return select(x == 0.0, x, _circular(x, 0))


@inline
def cos(x: Word) -> Word:
    return _circular(x, 1)


@inline
def tan(x: Word) -> Word:
    r, quadrant = _reduce(x)
    sine, cosine = _sine_and_cosine(r)
    odd = quadrant & 1 != 0
    quotient = select(odd, cosine, sine) / select(odd, -sine, cosine)
    return select(x == 0.0, x, quotient)


# ---- inverses


@inline
def _quarter_minus(p: Word) -> Word:
    """pi/2 - p, with pi/2 in two parts."""
    fmt = format_of(p)
    return fmt.pi_2_high - (p - fmt.pi_2_low)


@inline
def _half_minus(p: Word) -> Word:
    """pi - p, with pi in two parts."""
    fmt = format_of(p)
    return 2.0 * fmt.pi_2_high - (p - 2.0 * fmt.pi_2_low)


@inline
def _arcsine_parts(x: Word) -> tuple[bool, Word]:
    """(whether |x| > 1/2, p): p is asin|x| near 0, and 2 asin(sqrt((1 - |x|) / 2)) = acos|x| otherwise."""
    a = fabs(x)
    outer = a > 0.5
    z = select(outer, (1.0 - a) * 0.5, a * a)
    t = select(outer, sqrt(z), a)
    p = odd_fit(t, z, tables.ASIN)
    return outer, select(outer, p + p, p)


@inline
def asin(x: Word) -> Word:
    outer, p = _arcsine_parts(x)
    return copysign(select(outer, _quarter_minus(p), p), x)


@inline
def acos(x: Word) -> Word:
    outer, p = _arcsine_parts(x)
    inner = _quarter_minus(copysign(p, x))
    return select(outer, select(sign_bit(x), _half_minus(p), p), inner)


@inline
def _arctangent(top: Word, bottom: Word) -> Word:
    """atan(top / bottom) in [0, pi/2] for top, bottom >= 0: smaller over larger, then the complement."""
    steep = top > bottom
    q = select(steep, bottom, top) / select(steep, top, bottom)
    p = odd_fit(q, q * q, tables.ATAN)
    return select(steep, _quarter_minus(p), p)


@inline
def atan(x: Word) -> Word:
    return copysign(_arctangent(fabs(x), number(x, 1.0)), x)


@inline
def atan2(y: Word, x: Word) -> Word:
    """Angle of the point (x, y), with C's values on the axes, at the origin and at infinity."""
    top, bottom = fabs(y), fabs(x)
    one, zero = number(x, 1.0), number(x, 0.0)
    both_infinite = (top == math.inf) & (bottom == math.inf)
    top, bottom = select(both_infinite, one, top), select(both_infinite, one, bottom)
    origin = (top == 0.0) & (bottom == 0.0)
    p = select(origin, zero, _arctangent(top, bottom))
    p = copysign(select(sign_bit(x), _half_minus(p), p), y)
    return select(fcmp("uno", x, y), x + y, p)
