"""Exponentials, logarithms and what is made of them, lane by lane, for f32 and f64."""

from __future__ import annotations

import math

from rlx.codegen.native import vmath_tables as tables
from rlx.codegen.native.notation import inline
from rlx.codegen.native.vmath_core import (
    LN_2,
    LOG2_E,
    LOG10_E,
    at_widths,
    clamp,
    fast_two_sum,
    fit,
    format_of,
    integer_type,
    nearer_to_zero,
    number,
    odd_fit,
    pick_eighth,
    pick_power,
    power_parts,
    residual,
    rounder,
    scale,
    sign_bit,
    split_exponent,
    two_product,
    two_sum,
    whole_part,
)
from rlx.codegen.native.words import (
    Word,
    bitcast,
    copysign,
    fabs,
    fcmp,
    floor,
    fma,
    fmax_x86,
    fmin_x86,
    fpext,
    fptrunc,
    lshr,
    polynomial,
    select,
    sqrt,
    target,
)

_EXP: dict[str, tuple[float, ...]] = {
    element: (*fitted, 1.0, 1.0) for element, fitted in tables.EXP.items()
}  # of exp itself


@inline
def _reduce_exp(x: Word, low: Word | None = None) -> tuple[Word, Word, Word]:
    """(n, power, r) with x + low = n ln 2 + r, n whole, |r| <= ln(2) / 2; `power` is for `scale`."""
    fmt = format_of(x)
    n, power = whole_part(x, LOG2_E)
    r = fma(n, -fmt.ln2_low, fma(n, -fmt.ln2_high, x))
    return n, power, r if low is None else r + low


@inline
def _expm1_small(r: Word) -> Word:
    """exp(r) - 1 for |r| <= ln(2) / 2."""
    return fma(r * r, fit(r, tables.EXP), r)


@inline
def _exp_sum(x: Word, low: Word | None = None, shift: float = 0.0) -> Word:
    """exp(x + low) * 2**shift; x is in the range of `exp` already, |low| is tiny."""
    _, power, r = _reduce_exp(x, low)
    if shift:
        power = power + shift
    return scale(_expm1_small(r) + 1.0, power)


def exp(x: Word, rounded: bool = False) -> Word:
    """e**x; `rounded`: x is itself the result of a rounding (see `_reduce_to_parts`)."""
    parts = power_parts(x)
    if parts == 16:
        return at_widths(lambda part: _exp_of_parts(part, rounded), 4, max(4, x.width), x)
    if parts == 8:
        return at_widths(lambda part: _exp_of_eighths(part, rounded), 8, max(8, x.width), x)
    return _exp_sum(clamp(x, *format_of(x).exp_range))


@inline
def exp_of_distance(d: Word) -> Word:
    """e**-d for f32 d >= 0 that is the result of a rounding: the bits of `exp(-d, rounded=True)`.

    One factor is enough for the power of two, which is 2**_LIFT times as large as it should be: a product
    with 2**-_LIFT rounds what is denormal. Beyond the limit the factor is 0, and nothing underflows.
    """
    parts = power_parts(d)
    if parts == 16:
        return exp(-d, rounded=True)
    return at_widths(_exp_of_eighths_below if parts == 8 else _exp_below, parts, max(parts, d.width), d)


_LIFT = 63


def _cut_distance(d: Word) -> Word:
    """d, cut where the factor is 0; not a number stays so."""
    return fmin_x86(number(d, (format_of(d).bias + _LIFT) * LN_2), d)


@inline
def _exp_below(d: Word) -> Word:
    fmt = format_of(d)
    d = _cut_distance(d)
    counter = rounder(d, 1) + fmt.bias + _LIFT
    word = fma(d, -LOG2_E, counter)
    n = word - counter
    r = fma(n, -fmt.ln2_low, fma(n, -fmt.ln2_high, -d))
    power = bitcast(bitcast(word, integer_type(d)) << fmt.mantissa, d.type)
    return (_expm1_small(r) + 1.0) * power * 2.0**-_LIFT


@inline
def _exp_of_eighths_below(d: Word) -> Word:
    d = _cut_distance(d)
    word, _, r = _reduce_to_parts(-d, rounded=True, more=format_of(d).bias + _LIFT)
    power = pick_eighth(bitcast(word, integer_type(d)), tables.POWERS[::2])
    return _times_exp(power, r, rounded=True) * 2.0**-_LIFT


@inline
def _times_exp(power: Word, r: Word, rounded: bool) -> Word:
    """power * exp(r) for |r| <= ln(2) / 16."""
    table = tables.EXP_EIGHTH_ROUNDED if rounded else tables.EXP_EIGHTH
    return fma(power, fma(r * r, polynomial(r, table), r), power)


@inline
def _exp_of_eighths(x: Word, rounded: bool) -> Word:
    """The power of two is the product of two: one with the eighths, and half of the whole power."""
    bias = format_of(x).bias
    x = clamp(x, -2 * bias * LN_2, format_of(x).exp_range[1])
    word, _, r = _reduce_to_parts(x, rounded, more=2 * bias)
    count = bitcast(word, integer_type(x))
    half = lshr(count, 1) & -8
    power = pick_eighth(count - half, tables.POWERS[::2])
    return _times_exp(power, r, rounded) * bitcast(half << format_of(x).mantissa - 3, x.type)


@inline
def _exp_of_parts(x: Word, rounded: bool) -> Word:
    """x is not clamped: where it is so large that r means nothing, or not a number, n alone decides."""
    word, n, r = _reduce_to_parts(x, rounded)
    r = nearer_to_zero(r, 0.0625)
    small = fma(r * r, polynomial(r, tables.EXP_SIXTEENTH), r)
    power = pick_power(word, tables.POWERS)
    return scale(fma(power, small, power), n)


@inline
def _reduce_to_parts(x: Word, rounded: bool, more: int = 0) -> tuple[Word, Word, Word]:
    """(word, n, r) with x = n ln 2 + r, |r| <= ln(2) / 32; lowest in `word` is n + more in sixteenths.

    Both are in eighths, or whole, where `power_parts` says so; then |r| is larger.

    The rounding of an argument moves its exponential by up to |x| / 2 units of the last place. What ln 2
    lacks as one number moves it ten times less: a rounded argument does without the second part.
    """
    fmt = format_of(x)
    counter = rounder(x, power_parts(x)) + more
    word = fma(x, LOG2_E, counter)
    n = word - counter
    if rounded:
        return word, n, fma(n, -LN_2, x)
    return word, n, fma(n, -fmt.ln2_low, fma(n, -fmt.ln2_high, x))


@inline
def exp2(x: Word) -> Word:
    """2**x, exact for whole x: online softmax rescales by 2**0 and must not move a bit."""
    if power_parts(x) == 16:
        return at_widths(_exp2_of_parts, 4, max(4, x.width), x)
    x = clamp(x, *format_of(x).exp2_range)
    n, power = whole_part(x)
    r = x - n
    return scale(fma(r, fit(r, tables.EXP2), 1.0), power)


@inline
def exp2_of_distance(x: Word) -> Word:
    """2**x for f32 x <= 0, exact for whole x: the weight of a score that is -x below the largest.

    It is 0 below 2**-126.5, where such a weight adds nothing to a sum of weights, which is at least 1. So one
    factor is enough, whose exponent counts up from 0.
    """
    parts = power_parts(x)
    if parts == 16:
        return exp2(x)
    if parts == 8:
        return at_widths(_exp2_of_eighths_below, 8, max(8, x.width), x)
    return _exp2_below(x)


@inline
def _exp2_of_eighths_below(x: Word) -> Word:
    bias = format_of(x).bias
    counter = rounder(x, 8) + bias
    x = fmax_x86(number(x, -bias), x)  # not a number stays so
    word = x + counter
    r = x - (word - counter)
    power = pick_eighth(bitcast(word, integer_type(x)), tables.POWERS[::2])
    return fma(power * r, polynomial(r, tables.EXP2_EIGHTH), power)


@inline
def _exp2_below(x: Word) -> Word:
    fmt = format_of(x)
    counter = rounder(x, 1) + fmt.bias
    x = fmax_x86(number(x, -fmt.bias), x)  # not a number stays so
    word = x + counter
    r = x - (word - counter)
    power = bitcast(bitcast(word, integer_type(x)) << fmt.mantissa, x.type)
    return fma(r, fit(r, tables.EXP2), 1.0) * power


@inline
def _exp2_of_parts(x: Word) -> Word:
    """As `_exp_of_parts`, where no step of the reduction rounds."""
    word = x + rounder(x, 16)
    n = word - rounder(x, 16)
    r, power = nearer_to_zero(x - n, 0.0625), pick_power(word, tables.POWERS)
    return scale(fma(power * r, polynomial(r, tables.EXP2_SIXTEENTH), power), n)


@inline
def _half_expm1(x: Word) -> tuple[Word, Word, Word]:
    """(n, exp(r) - 1, (exp(x) - 1) / 2) with x = n ln 2 + r; half, so that only the result overflows."""
    n, power, r = _reduce_exp(x)
    p = _expm1_small(r)
    half = scale(number(x, 0.5), power)
    return n, p, fma(half, p, half - 0.5)


@inline
def expm1(x: Word) -> Word:
    fmt = format_of(x)
    n, p, half = _half_expm1(clamp(x, -2.0 * fmt.mantissa, fmt.exp_range[1]))
    return copysign(select(n == 0.0, p, half + half), x)


@inline
def sigmoid(x: Word) -> Word:
    """1 / (1 + exp(-x)), whose far left keeps its relative accuracy."""
    parts = power_parts(x)
    if parts == 16:
        return at_widths(_sigmoid_of_parts, 4, max(4, x.width), x)
    if target().has_avx512:
        e = exp(-fabs(x))
        top = select(sign_bit(x), e, number(x, 1.0))
        return top / (e + 1.0)
    return at_widths(_sigmoid_by_shift, parts, max(parts, x.width), x)


@inline
def _sigmoid_by_shift(x: Word) -> Word:
    """p / (p + exp(-r)) with x = n ln 2 + r and p = 2**n, whose bits are those of n, shifted.

    Both sides are lifted, so that p is never denormal. With eighths they also have a factor for which all of
    the table are nearly exact.
    """
    fmt, parts = format_of(x), power_parts(x)
    lift = (fmt.bias + 1) // 2
    x = clamp(x, -(fmt.mantissa + fmt.bias + 1) * LN_2, 40.0)  # beyond, the result is 0 or 1
    word, _, r = _reduce_to_parts(x, rounded=False, more=fmt.bias + lift)
    count = bitcast(word, integer_type(x))
    terms, factor = _EXP[x.element], 1.0
    if parts == 8:
        power, factor = pick_eighth(count, tables.SCALED_POWERS), tables.SCALED_POWERS[0]
        terms = (*tables.EXP_EIGHTH_ROUNDED, 1.0, 1.0)
    else:
        power = bitcast(count << fmt.mantissa, x.type)
    signs = [(-1) ** i for i in reversed(range(len(terms)))]
    e = polynomial(r, [factor * 2.0**lift * sign * c for sign, c in zip(signs, terms, strict=True)])
    return power / (power + e)


@inline
def _sigmoid_of_parts(x: Word) -> Word:
    """t / (t + 2**n exp(r)) with t = 2**-(k / 16) and -x = (n + k / 16) ln 2 + r: no product with a power.

    Both sides of the fraction are made small, since exp(-x) overflows before the quotient is 0. x is not
    clamped, as in `_exp_of_parts`.
    """
    tiny = 2.0**-64
    word, n, r = _reduce_to_parts(-x, rounded=False)
    r = nearer_to_zero(r, 0.0625)
    inverse_powers = [1.0, *(power / 2 for power in reversed(tables.POWERS[1:]))]
    t = pick_power(word, [tiny * power for power in inverse_powers])
    e = polynomial(r, [tiny * c for c in (*tables.EXP_SIXTEENTH, 1.0, 1.0)])
    return t / (scale(e, n) + t)


@inline
def tanh(x: Word) -> Word:
    """u / (u + 1) with u = (exp(2|x|) - 1) / 2, which is 1 to the last bit well before the clamp."""
    double = fmin_x86(number(x, 22.0), fabs(x)) * 2.0
    half = _half_expm1(double)[2]
    return copysign(half / (half + 1.0), x)


@inline
def sinh(x: Word) -> Word:
    a = fabs(x)
    near = odd_fit(a, a * a, tables.SINH)
    half = _exp_sum(clamp(a, 0.0, format_of(x).exp_range[1] + 1.0), shift=-1.0)
    far = half - 0.25 / half
    return copysign(select(a < 1.0, near, far), x)


@inline
def cosh(x: Word) -> Word:
    half = _exp_sum(clamp(fabs(x), 0.0, format_of(x).exp_range[1] + 1.0), shift=-1.0)
    return half + 0.25 / half


# ---- logarithms


@inline
def _log_parts(small: Word) -> tuple[Word, Word]:
    """(square, rest) with log(1 + small) = small - (square - rest), for 1 + small in [sqrt(1/2), sqrt(2))."""
    s = small / (small + 2.0)
    w = s * s
    square = small * small * 0.5
    return square, s * fma(w, fit(w, tables.LOG), square)


@inline
def _log_small(small: Word) -> Word:
    square, rest = _log_parts(small)
    return small - (square - rest)


@inline
def _log_sum(e: Word, small: Word, correction: Word | None = None) -> Word:
    """e ln 2 + log(1 + small) + correction, smallest parts first."""
    fmt = format_of(small)
    square, rest = _log_parts(small)
    if correction is not None:
        rest = rest + correction
    tail = square - fma(e, fmt.ln2_low, rest) - small
    return e * fmt.ln2_high - tail


@inline
def _log_limits(x: Word, result: Word) -> Word:
    """The values of any logarithm at 0, below 0, at infinity and at NaN."""
    result = select(x < math.inf, result, x)
    edge = select(x == 0.0, number(x, -math.inf), number(x, math.nan))
    return select(x <= 0.0, edge, result)


@inline
def log(x: Word) -> Word:
    e, m = split_exponent(x)
    return _log_limits(x, _log_sum(e, m - 1.0))


@inline
def log2(x: Word) -> Word:
    """Exact at powers of two."""
    e, m = split_exponent(x)
    return _log_limits(x, fma(_log_small(m - 1.0), LOG2_E, e))


@inline
def log10(x: Word) -> Word:
    fmt = format_of(x)
    e, m = split_exponent(x)
    part = fma(e, fmt.log10_2_low, _log_small(m - 1.0) * LOG10_E)
    return _log_limits(x, fma(e, fmt.log10_2_high, part))


@inline
def log1p(x: Word) -> Word:
    """log of u = 1 + x, plus what the rounding of u lost, over u; near 0 x itself is the small part."""
    u, lost = two_sum(number(x, 1.0), x)
    e, m = split_exponent(u)
    zero = number(x, 0.0)
    near = (x > -0.29) & (x < 0.41)
    small = select(near, x, m - 1.0)
    e = select(near, zero, e)
    correction = select(near, zero, lost / u)
    return copysign(_log_limits(u, _log_sum(e, small, correction)), x)


@inline
def asinh(x: Word) -> Word:
    """log(a + sqrt(a^2 + 1)) written for log1p; ln 2 + log(a) where a^2 would overflow."""
    a = fabs(x)
    square = a * a
    near = a + square / (sqrt(square + 1.0) + 1.0)
    return copysign(_log1p_or_log(a, near), x)


@inline
def acosh(x: Word) -> Word:
    x = select(x < 1.0, number(x, math.nan), x)
    t = x - 1.0
    near = t + sqrt(t * (t + 2.0))
    return _log1p_or_log(x, near)


@inline
def _log1p_or_log(a: Word, near: Word) -> Word:
    """log1p(near), or log(2 a) for large a."""
    large = a > 2.0 ** (format_of(a).mantissa // 2 + 3)
    extra = select(large, number(a, LN_2), number(a, 0.0))
    return log1p(select(large, a - 1.0, near)) + extra


@inline
def atanh(x: Word) -> Word:
    a = fabs(x)
    return copysign(log1p(a * 2.0 / (1.0 - a)) * 0.5, x)


# ---- the error function


@inline
def erf(x: Word) -> Word:
    a = fabs(x)
    size = _erf_f32(a) if x.element == "float" else _erf_f64(a)
    return copysign(size, x)


@inline
def _erf_f32(a: Word) -> Word:
    """One polynomial whose coefficients depend on the lane: a * p(a^2) near 0, 1 - p(a)^8 farther out."""
    a = fmin_x86(number(a, 3.95), a)
    far = a > 1.1
    v = select(far, a, a * a)
    pairs = list(zip(tables.ERFC_ROOT["float"], tables.ERF["float"], strict=True))
    coefficients = [select(far, number(a, c_far), number(a, c_near)) for c_far, c_near in pairs]
    p = coefficients[0]
    for c in coefficients[1:]:
        p = fma(p, v, c)
    square = p * p
    fourth = square * square
    return select(far, fma(-fourth, fourth, 1.0), a * p)


@inline
def _erf_f64(a: Word) -> Word:
    near = a * fit(a * a, tables.ERF)
    return select(a < 1.0, near, 1.0 - _erfc_positive(a))


@inline
def erfc(x: Word) -> Word:
    right = _erfc_positive(fabs(x))
    return select(x < 0.0, 2.0 - right, right)


@inline
def _inverse_of_sum(a: Word, b: float) -> Word:
    """1 / (a + b) for a >= 0, corrected for the rounding of the sum and of the quotient."""
    total = a + b
    inverse = 1.0 / total
    lost = inverse * (total - b - a)
    error = lost + residual(number(a, 1.0), inverse, total)
    return fma(inverse, error, inverse)


@inline
def _erfc_positive(a: Word) -> Word:
    """exp(-a^2) times a polynomial in (a - 2) / (a + 2): accurate to the last value above 0."""
    a = fmin_x86(number(a, format_of(a).erfc_zero), a)
    inverse = _inverse_of_sum(a, 2.0)
    q = (a - 2.0) * inverse
    square, rest = two_product(a, a)
    decay = _exp_sum(-square, -rest)
    return fit(q, tables.ERFCX) * inverse * decay


# ---- powers


@inline
def rsqrt(x: Word) -> Word:
    return 1.0 / sqrt(x)


@inline
def power(x: Word, y: Word) -> Word:
    """x**y with the special values of C and NumPy."""
    a = fabs(x)
    size = _power_f32(a, y) if x.element == "float" else _power_f64(a, y)
    zero = a == 0.0
    vanishing = zero ^ (y < 0.0)
    limit = select(vanishing, number(x, 0.0), number(x, math.inf))
    size = select(zero | (a == math.inf), limit, size)
    whole = Word(floor(y) == y)
    halved = y * 0.5
    odd = whole & fcmp("one", floor(halved), halved)
    result = select(sign_bit(x) & odd, -size, size)
    finite_negative = (x < 0.0) & (x > -math.inf)
    undefined = (finite_negative & ~whole) | fcmp("uno", x, y)
    result = select(undefined, number(x, math.nan), result)
    one = (x == 1.0) | (y == 0.0)
    return select(one, number(x, 1.0), result)


@inline
def _power_f32(a: Word, y: Word) -> Word:
    """2**(y log2 a) in f64, which has bits to spare."""
    logarithm = log2(fpext(a, "double"))
    exponent = fpext(clamp(y, -(2.0**70), 2.0**70), "double")
    return fptrunc(exp2(exponent * logarithm), "float")


@inline
def _power_f64(a: Word, y: Word) -> Word:
    """exp(y log a) with the logarithm as a sum of two numbers: exp magnifies its error a thousandfold."""
    high, low = _log_two(a)
    y = clamp(y, -(2.0**70), 2.0**70)
    product, rest = two_product(y, high)
    rest = fma(y, low, rest)
    bounded = clamp(product, *format_of(a).exp_range)
    same = bounded == product
    return _exp_sum(bounded, select(same, rest, number(a, 0.0)))


_TWO_THIRDS_REST = 3.700743415417188e-17


@inline
def _log_two(a: Word) -> tuple[Word, Word]:
    """log(a) as the sum of two numbers (about 65 bits) for positive finite a."""
    fmt = format_of(a)
    e, m = split_exponent(a)
    small = m - 1.0
    sum_high, sum_low = two_sum(m, number(a, 1.0))
    s = small / sum_high
    s_low = (residual(small, s, sum_high) - s * sum_low) / sum_high
    w, w_low = two_product(s, s)
    w_low = fma(s * 2.0, s_low, w_low)
    # series = 2/3 + w * tail, as two numbers; the first term alone is not exact
    *rest, two_thirds = tables.LOG["double"]
    tail = w * polynomial(w, rest)
    series, series_low = fast_two_sum(number(a, two_thirds), tail)
    series_low = series_low + _TWO_THIRDS_REST
    t, t_low = two_product(w, series)
    t_low = t_low + fma(w, series_low, w_low * series)
    factor, factor_low = fast_two_sum(number(a, 2.0), t)
    factor_low = factor_low + t_low
    high, low = two_product(s, factor)
    low = low + fma(s, factor_low, s_low * factor)
    total, total_low = two_sum(e * fmt.ln2_high, high)
    total_low = total_low + fma(e, fmt.ln2_low, low)
    return fast_two_sum(total, total_low)
