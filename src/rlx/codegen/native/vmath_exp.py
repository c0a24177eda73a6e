"""Exponentials, logarithms and what is made of them, lane by lane, for f32 and f64."""

from __future__ import annotations

import math
from functools import partial

from rlx.codegen.native import vmath_tables as tables
from rlx.codegen.native.irlanes import Lanes
from rlx.codegen.native.irtypes import Value, constant
from rlx.codegen.native.vmath_core import (
    LN_2,
    LOG2_E,
    LOG10_E,
    at_widths,
    clamp,
    fast_two_sum,
    fit,
    format_of,
    has_power_table,
    integer_type,
    nearer_to_zero,
    odd_fit,
    pick_power,
    residual,
    rounder,
    scale,
    sign_bit,
    split_exponent,
    two_product,
    two_sum,
    whole_part,
)

_EXP = {element: (*fitted, 1.0, 1.0) for element, fitted in tables.EXP.items()}  # of exp itself


def _reduce_exp(f: Lanes, x: Value, low: Value | None = None) -> tuple[Value, Value, Value]:
    """(n, power, r) with x + low = n ln 2 + r, n whole, |r| <= ln(2) / 2; `power` is for `scale`."""
    fmt = format_of(x)
    n, power = whole_part(f, x, LOG2_E)
    r = f.fma(n, -fmt.ln2_low, f.fma(n, -fmt.ln2_high, x))
    return n, power, r if low is None else f.fadd(r, low)


def _expm1_small(f: Lanes, r: Value) -> Value:
    """exp(r) - 1 for |r| <= ln(2) / 2."""
    return f.fma(f.fmul(r, r), fit(f, r, tables.EXP), r)


def _exp_sum(f: Lanes, x: Value, low: Value | None = None, shift: float = 0.0) -> Value:
    """exp(x + low) * 2**shift; x is in the range of `exp` already, |low| is tiny."""
    _, power, r = _reduce_exp(f, x, low)
    if shift:
        power = f.fadd(power, shift)
    return scale(f, f.fadd(_expm1_small(f, r), 1.0), power)


def exp(f: Lanes, x: Value, rounded: bool = False) -> Value:
    """e**x; `rounded`: x is itself the result of a rounding (see `_reduce_to_parts`)."""
    if has_power_table(f, x):
        return at_widths(f, lambda part: _exp_of_parts(f, part, rounded), 4, max(4, x.width), x)
    return _exp_sum(f, clamp(f, x, *format_of(x).exp_range))


def _exp_of_parts(f: Lanes, x: Value, rounded: bool) -> Value:
    """x is not clamped: where it is so large that r means nothing, or not a number, n alone decides."""
    word, n, r = _reduce_to_parts(f, x, rounded)
    r = nearer_to_zero(f, r, 0.0625)
    small = f.fma(f.fmul(r, r), f.polynomial(r, tables.EXP_SIXTEENTH), r)
    power = pick_power(f, word, tables.POWERS)
    return scale(f, f.fma(power, small, power), n)


def _reduce_to_parts(f: Lanes, x: Value, rounded: bool) -> tuple[Value, Value, Value]:
    """(word, n, r) with x = n ln 2 + r, |r| <= ln(2) / 32; lowest in `word` is n in sixteenths.

    The rounding of an argument moves its exponential by up to |x| / 2 units of the last place. What ln 2
    lacks as one number moves it ten times less: a rounded argument does without the second part.
    """
    fmt = format_of(x)
    word = f.fma(x, LOG2_E, rounder(x, 16))
    n = f.fsub(word, rounder(x, 16))
    if rounded:
        return word, n, f.fma(n, -LN_2, x)
    return word, n, f.fma(n, -fmt.ln2_low, f.fma(n, -fmt.ln2_high, x))


def exp2(f: Lanes, x: Value) -> Value:
    """2**x, exact for whole x: online softmax rescales by 2**0 and must not move a bit."""
    if has_power_table(f, x):
        return at_widths(f, partial(_exp2_of_parts, f), 4, max(4, x.width), x)
    x = clamp(f, x, *format_of(x).exp2_range)
    n, power = whole_part(f, x)
    r = f.fsub(x, n)
    return scale(f, f.fma(r, fit(f, r, tables.EXP2), 1.0), power)


def _exp2_of_parts(f: Lanes, x: Value) -> Value:
    """As `_exp_of_parts`, where no step of the reduction rounds."""
    word = f.fadd(x, rounder(x, 16))
    n = f.fsub(word, rounder(x, 16))
    r, power = nearer_to_zero(f, f.fsub(x, n), 0.0625), pick_power(f, word, tables.POWERS)
    return scale(f, f.fma(f.fmul(power, r), f.polynomial(r, tables.EXP2_SIXTEENTH), power), n)


def _half_expm1(f: Lanes, x: Value) -> tuple[Value, Value, Value]:
    """(n, exp(r) - 1, (exp(x) - 1) / 2) with x = n ln 2 + r; half, so that only the result overflows."""
    n, power, r = _reduce_exp(f, x)
    p = _expm1_small(f, r)
    half = scale(f, constant(x.type, 0.5), power)
    return n, p, f.fma(half, p, f.fsub(half, 0.5))


def expm1(f: Lanes, x: Value) -> Value:
    fmt = format_of(x)
    n, p, half = _half_expm1(f, clamp(f, x, -2.0 * fmt.mantissa, fmt.exp_range[1]))
    return f.copysign(f.select(f.fcmp("oeq", n, 0.0), p, f.fadd(half, half)), x)


def sigmoid(f: Lanes, x: Value) -> Value:
    """1 / (1 + exp(-x)), whose far left keeps its relative accuracy."""
    if has_power_table(f, x):
        return at_widths(f, partial(_sigmoid_of_parts, f), 4, max(4, x.width), x)
    if f.module.target.has_avx512:
        e = exp(f, f.fneg(f.fabs(x)))
        top = f.select(sign_bit(f, x), e, constant(x.type, 1.0))
        return f.fdiv(top, f.fadd(e, 1.0))
    return _sigmoid_by_shift(f, x)


def _sigmoid_by_shift(f: Lanes, x: Value) -> Value:
    """t / (t + t exp(-x)) with t so small that exp(-x) never overflows: one shift makes t 2**n."""
    fmt = format_of(x)
    tiny = (fmt.bias + 1) // 2
    counter = rounder(x, 1) + fmt.bias - tiny  # the lowest bits of a sum with n are the exponent of t 2**n
    x = clamp(f, x, -(fmt.mantissa + fmt.bias + 1) * LN_2, 40.0)  # beyond, the result is 0 or 1
    word = f.fma(x, -LOG2_E, counter)
    n = f.fsub(word, counter)
    s = f.fma(n, fmt.ln2_low, f.fma(n, fmt.ln2_high, x))  # -x = n ln 2 - s
    e = f.polynomial(s, [c * (-1) ** i for i, c in enumerate(reversed(_EXP[x.element]))][::-1])
    power = f.shl(f.bitcast(word, integer_type(x)), fmt.mantissa)
    t = constant(x.type, 2.0**-tiny)
    return f.fdiv(t, f.fma(e, f.bitcast(f.value(power), x.type), t))


def _sigmoid_of_parts(f: Lanes, x: Value) -> Value:
    """t / (t + 2**n exp(r)) with t = 2**-(k / 16) and -x = (n + k / 16) ln 2 + r: no product with a power.

    Both sides of the fraction are made small, since exp(-x) overflows before the quotient is 0. x is not
    clamped, as in `_exp_of_parts`.
    """
    tiny = 2.0**-64
    word, n, r = _reduce_to_parts(f, f.fneg(x), rounded=False)
    r = nearer_to_zero(f, r, 0.0625)
    inverse_powers = [1.0, *(power / 2 for power in reversed(tables.POWERS[1:]))]
    t = pick_power(f, word, [tiny * power for power in inverse_powers])
    e = f.polynomial(r, [tiny * c for c in (*tables.EXP_SIXTEENTH, 1.0, 1.0)])
    return f.fdiv(t, f.fadd(scale(f, e, n), t))


def tanh(f: Lanes, x: Value) -> Value:
    """u / (u + 1) with u = (exp(2|x|) - 1) / 2, which is 1 to the last bit well before the clamp."""
    double = f.fmul(f.fmin_x86(constant(x.type, 22.0), f.fabs(x)), 2.0)
    half = _half_expm1(f, double)[2]
    return f.copysign(f.fdiv(half, f.fadd(half, 1.0)), x)


def sinh(f: Lanes, x: Value) -> Value:
    a = f.fabs(x)
    near = odd_fit(f, a, f.fmul(a, a), tables.SINH)
    half = _exp_sum(f, clamp(f, a, 0.0, format_of(x).exp_range[1] + 1.0), shift=-1.0)
    far = f.fsub(half, f.fdiv(0.25, half))
    return f.copysign(f.select(f.fcmp("olt", a, 1.0), near, far), x)


def cosh(f: Lanes, x: Value) -> Value:
    half = _exp_sum(f, clamp(f, f.fabs(x), 0.0, format_of(x).exp_range[1] + 1.0), shift=-1.0)
    return f.fadd(half, f.fdiv(0.25, half))


# ---- logarithms


def _log_parts(f: Lanes, small: Value) -> tuple[Value, Value]:
    """(square, rest) with log(1 + small) = small - (square - rest), for 1 + small in [sqrt(1/2), sqrt(2))."""
    s = f.fdiv(small, f.fadd(small, 2.0))
    w = f.fmul(s, s)
    square = f.fmul(f.fmul(small, small), 0.5)
    return square, f.fmul(s, f.fma(w, fit(f, w, tables.LOG), square))


def _log_small(f: Lanes, small: Value) -> Value:
    square, rest = _log_parts(f, small)
    return f.fsub(small, f.fsub(square, rest))


def _log_sum(f: Lanes, e: Value, small: Value, correction: Value | None = None) -> Value:
    """e ln 2 + log(1 + small) + correction, smallest parts first."""
    fmt = format_of(small)
    square, rest = _log_parts(f, small)
    if correction is not None:
        rest = f.fadd(rest, correction)
    tail = f.fsub(f.fsub(square, f.fma(e, fmt.ln2_low, rest)), small)
    return f.fsub(f.fmul(e, fmt.ln2_high), tail)


def _log_limits(f: Lanes, x: Value, result: Value) -> Value:
    """The values of any logarithm at 0, below 0, at infinity and at NaN."""
    result = f.select(f.fcmp("olt", x, math.inf), result, x)
    edge = f.select(f.fcmp("oeq", x, 0.0), constant(x.type, -math.inf), constant(x.type, math.nan))
    return f.select(f.fcmp("ole", x, 0.0), edge, result)


def log(f: Lanes, x: Value) -> Value:
    e, m = split_exponent(f, x)
    return _log_limits(f, x, _log_sum(f, e, f.fsub(m, 1.0)))


def log2(f: Lanes, x: Value) -> Value:
    """Exact at powers of two."""
    e, m = split_exponent(f, x)
    return _log_limits(f, x, f.fma(_log_small(f, f.fsub(m, 1.0)), LOG2_E, e))


def log10(f: Lanes, x: Value) -> Value:
    fmt = format_of(x)
    e, m = split_exponent(f, x)
    part = f.fma(e, fmt.log10_2_low, f.fmul(_log_small(f, f.fsub(m, 1.0)), LOG10_E))
    return _log_limits(f, x, f.fma(e, fmt.log10_2_high, part))


def log1p(f: Lanes, x: Value) -> Value:
    """log of u = 1 + x, plus what the rounding of u lost, over u; near 0 x itself is the small part."""
    u, lost = two_sum(f, constant(x.type, 1.0), x)
    e, m = split_exponent(f, u)
    zero = constant(x.type, 0.0)
    near = f.and_(f.fcmp("ogt", x, -0.29), f.fcmp("olt", x, 0.41))
    small = f.select(f.value(near), x, f.fsub(m, 1.0))
    e = f.select(f.value(near), zero, e)
    correction = f.select(f.value(near), zero, f.fdiv(lost, u))
    return f.copysign(_log_limits(f, u, _log_sum(f, e, small, correction)), x)


def asinh(f: Lanes, x: Value) -> Value:
    """log(a + sqrt(a^2 + 1)) written for log1p; ln 2 + log(a) where a^2 would overflow."""
    a = f.fabs(x)
    square = f.fmul(a, a)
    near = f.fadd(a, f.fdiv(square, f.fadd(f.sqrt(f.fadd(square, 1.0)), 1.0)))
    return f.copysign(_log1p_or_log(f, a, near), x)


def acosh(f: Lanes, x: Value) -> Value:
    x = f.select(f.fcmp("olt", x, 1.0), constant(x.type, math.nan), x)
    t = f.fsub(x, 1.0)
    near = f.fadd(t, f.sqrt(f.fmul(t, f.fadd(t, 2.0))))
    return _log1p_or_log(f, x, near)


def _log1p_or_log(f: Lanes, a: Value, near: Value) -> Value:
    """log1p(near), or log(2 a) for large a."""
    large = f.fcmp("ogt", a, 2.0 ** (format_of(a).mantissa // 2 + 3))
    extra = f.select(large, constant(a.type, LN_2), constant(a.type, 0.0))
    return f.fadd(log1p(f, f.select(large, f.fsub(a, 1.0), near)), extra)


def atanh(f: Lanes, x: Value) -> Value:
    a = f.fabs(x)
    return f.copysign(f.fmul(log1p(f, f.fdiv(f.fmul(a, 2.0), f.fsub(1.0, a))), 0.5), x)


# ---- the error function


def erf(f: Lanes, x: Value) -> Value:
    a = f.fabs(x)
    size = _erf_f32(f, a) if x.element == "float" else _erf_f64(f, a)
    return f.copysign(size, x)


def _erf_f32(f: Lanes, a: Value) -> Value:
    """One polynomial whose coefficients depend on the lane: a * p(a^2) near 0, 1 - p(a)^8 farther out."""
    a = f.fmin_x86(constant(a.type, 3.95), a)
    far = f.fcmp("ogt", a, 1.1)
    v = f.select(far, a, f.fmul(a, a))
    pairs = list(zip(tables.ERFC_ROOT["float"], tables.ERF["float"], strict=True))
    coefficients = [
        f.select(far, constant(a.type, c_far), constant(a.type, c_near)) for c_far, c_near in pairs
    ]
    p = coefficients[0]
    for c in coefficients[1:]:
        p = f.fma(p, v, c)
    square = f.fmul(p, p)
    fourth = f.fmul(square, square)
    return f.select(far, f.fma(f.fneg(fourth), fourth, 1.0), f.fmul(a, p))


def _erf_f64(f: Lanes, a: Value) -> Value:
    near = f.fmul(a, fit(f, f.fmul(a, a), tables.ERF))
    return f.select(f.fcmp("olt", a, 1.0), near, f.fsub(1.0, _erfc_positive(f, a)))


def erfc(f: Lanes, x: Value) -> Value:
    right = _erfc_positive(f, f.fabs(x))
    return f.select(f.fcmp("olt", x, 0.0), f.fsub(2.0, right), right)


def _inverse_of_sum(f: Lanes, a: Value, b: float) -> Value:
    """1 / (a + b) for a >= 0, corrected for the rounding of the sum and of the quotient."""
    total = f.fadd(a, b)
    inverse = f.fdiv(1.0, total)
    lost = f.fmul(inverse, f.fsub(f.fsub(total, b), a))
    error = f.fadd(lost, residual(f, constant(a.type, 1.0), inverse, total))
    return f.fma(inverse, error, inverse)


def _erfc_positive(f: Lanes, a: Value) -> Value:
    """exp(-a^2) times a polynomial in (a - 2) / (a + 2): accurate to the last value above 0."""
    a = f.fmin_x86(constant(a.type, format_of(a).erfc_zero), a)
    inverse = _inverse_of_sum(f, a, 2.0)
    q = f.fmul(f.fsub(a, 2.0), inverse)
    square, rest = two_product(f, a, a)
    decay = _exp_sum(f, f.fneg(square), f.fneg(rest))
    return f.fmul(f.fmul(fit(f, q, tables.ERFCX), inverse), decay)


# ---- powers


def rsqrt(f: Lanes, x: Value) -> Value:
    return f.fdiv(1.0, f.sqrt(x))


def power(f: Lanes, x: Value, y: Value) -> Value:
    """x**y with the special values of C and NumPy."""
    a = f.fabs(x)
    size = _power_f32(f, a, y) if x.element == "float" else _power_f64(f, a, y)
    zero = f.fcmp("oeq", a, 0.0)
    vanishing = f.value(f.xor(zero, f.fcmp("olt", y, 0.0)))
    limit = f.select(vanishing, constant(x.type, 0.0), constant(x.type, math.inf))
    size = f.select(f.value(f.or_(zero, f.fcmp("oeq", a, math.inf))), limit, size)
    whole = f.fcmp("oeq", f.floor(y), y)
    halved = f.fmul(y, 0.5)
    odd = f.and_(whole, f.fcmp("one", f.floor(halved), halved))
    result = f.select(f.value(f.and_(sign_bit(f, x), odd)), f.fneg(size), size)
    finite_negative = f.and_(f.fcmp("olt", x, 0.0), f.fcmp("ogt", x, -math.inf))
    undefined = f.or_(f.and_(finite_negative, f.not_(whole)), f.fcmp("uno", x, y))
    result = f.select(f.value(undefined), constant(x.type, math.nan), result)
    one = f.or_(f.fcmp("oeq", x, 1.0), f.fcmp("oeq", y, 0.0))
    return f.select(f.value(one), constant(x.type, 1.0), result)


def _power_f32(f: Lanes, a: Value, y: Value) -> Value:
    """2**(y log2 a) in f64, which has bits to spare."""
    logarithm = log2(f, f.fpext(a, "double"))
    exponent = f.fpext(clamp(f, y, -(2.0**70), 2.0**70), "double")
    return f.fptrunc(exp2(f, f.fmul(exponent, logarithm)), "float")


def _power_f64(f: Lanes, a: Value, y: Value) -> Value:
    """exp(y log a) with the logarithm as a sum of two numbers: exp magnifies its error a thousandfold."""
    high, low = _log_two(f, a)
    y = clamp(f, y, -(2.0**70), 2.0**70)
    product, rest = two_product(f, y, high)
    rest = f.fma(y, low, rest)
    bounded = clamp(f, product, *format_of(a).exp_range)
    same = f.fcmp("oeq", bounded, product)
    return _exp_sum(f, bounded, f.select(same, rest, constant(a.type, 0.0)))


_TWO_THIRDS_REST = 3.700743415417188e-17


def _log_two(f: Lanes, a: Value) -> tuple[Value, Value]:
    """log(a) as the sum of two numbers (about 65 bits) for positive finite a."""
    fmt = format_of(a)
    e, m = split_exponent(f, a)
    small = f.fsub(m, 1.0)
    sum_high, sum_low = two_sum(f, m, constant(a.type, 1.0))
    s = f.fdiv(small, sum_high)
    s_low = f.fdiv(f.fsub(residual(f, small, s, sum_high), f.fmul(s, sum_low)), sum_high)
    w, w_low = two_product(f, s, s)
    w_low = f.fma(f.fmul(s, 2.0), s_low, w_low)
    # series = 2/3 + w * tail, as two numbers; the first term alone is not exact
    *rest, two_thirds = tables.LOG["double"]
    tail = f.fmul(w, f.polynomial(w, rest))
    series, series_low = fast_two_sum(f, constant(a.type, two_thirds), tail)
    series_low = f.fadd(series_low, _TWO_THIRDS_REST)
    t, t_low = two_product(f, w, series)
    t_low = f.fadd(t_low, f.fma(w, series_low, f.fmul(w_low, series)))
    factor, factor_low = fast_two_sum(f, constant(a.type, 2.0), t)
    factor_low = f.fadd(factor_low, t_low)
    high, low = two_product(f, s, factor)
    low = f.fadd(low, f.fma(s, factor_low, f.fmul(s_low, factor)))
    total, total_low = two_sum(f, f.fmul(e, fmt.ln2_high), high)
    total_low = f.fadd(total_low, f.fma(e, fmt.ln2_low, low))
    return fast_two_sum(f, total, total_low)
