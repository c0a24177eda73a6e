"""What the vectorised math functions share: facts about f32 and f64, exact sums and products, scaling.

Everything takes scalars and vectors of `float` or `double` of any width; wide vectors are cut by LLVM.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from rlx.codegen.native import twins
from rlx.codegen.native.irlanes import Lanes
from rlx.codegen.native.irtypes import Value, constant, lanes_of, like, vector
from rlx.records import dataclass

Table = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Format:
    """Facts about one float format."""

    integer: str
    mantissa: int
    bias: int
    ln2_high: float  # few bits, so that its product with any exponent is exact
    ln2_low: float
    log10_2_high: float
    log10_2_low: float
    pi_2_high: float  # pi/2 rounded to this format, and the rest
    pi_2_low: float
    exp_range: tuple[float, float]  # exp is infinite above; below, a factor 2**n is 0, never a denormal
    exp2_range: tuple[float, float]
    erfc_zero: float  # erfc is 0 from here on
    smallest_normal: float

    def bits(self, value: float) -> int:
        """The bit pattern of `value` as an integer."""
        code = ("<f", "<I") if self.mantissa == 23 else ("<d", "<Q")
        return int(struct.unpack(code[1], struct.pack(code[0], value))[0])


FORMATS = {
    "float": Format(
        integer="i32",
        mantissa=23,
        bias=127,
        ln2_high=0.693359375,
        ln2_low=-2.1219444005469057e-4,
        log10_2_high=0.30078125,
        log10_2_low=2.487456639811952e-4,
        pi_2_high=1.5707963705062866,
        pi_2_low=-4.3711390001862426e-8,
        exp_range=(-176.0, 89.0),
        exp2_range=(-254.0, 129.0),
        erfc_zero=10.06,
        smallest_normal=2.0**-126,
    ),
    "double": Format(
        integer="i64",
        mantissa=52,
        bias=1023,
        ln2_high=0.6931471803691238,
        ln2_low=1.9082149292705877e-10,
        log10_2_high=0.30102999566361177,
        log10_2_low=3.694239077158931e-13,
        pi_2_high=1.5707963267948966,
        pi_2_low=6.123233995736766e-17,
        exp_range=(-1418.0, 710.0),
        exp2_range=(-2046.0, 1025.0),
        erfc_zero=27.3,
        smallest_normal=2.0**-1022,
    ),
}
LOG2_E = 1.4426950408889634
LOG10_E = 0.4342944819032518
LN_2 = 0.6931471805599453


def format_of(x: Value) -> Format:
    """The format of the lanes of `x`."""
    return FORMATS[x.element]


def integer_type(x: Value) -> str:
    """The integer type as wide as `x`, lane for lane."""
    return like(x.type, format_of(x).integer)


def fit(f: Lanes, x: Value, table: Table) -> Value:
    """The fitted polynomial of `table` at `x`."""
    return f.polynomial(x, table[x.element])


def odd_fit(f: Lanes, x: Value, square: Value, table: Table) -> Value:
    """x + x**3 * polynomial(x**2)."""
    return f.fma(f.fmul(x, square), fit(f, square, table), x)


def clamp(f: Lanes, x: Value, low: float, high: float) -> Value:
    """`x` cut to [low, high]; NaN stays NaN, because both minimum and maximum give their second operand."""
    return f.fmin_x86(constant(x.type, high), f.fmax_x86(constant(x.type, low), x))


def two_sum(f: Lanes, a: Value, b: Value) -> tuple[Value, Value]:
    """(a + b rounded, the rounding error), whatever their sizes."""
    total = f.fadd(a, b)
    part = f.fsub(total, a)
    return total, f.fadd(f.fsub(a, f.fsub(total, part)), f.fsub(b, part))


def fast_two_sum(f: Lanes, a: Value, b: Value) -> tuple[Value, Value]:
    """(a + b rounded, the rounding error) when |a| >= |b|."""
    total = f.fadd(a, b)
    return total, f.fsub(b, f.fsub(total, a))


def two_product(f: Lanes, a: Value, b: Value) -> tuple[Value, Value]:
    """(a * b rounded, the rounding error)."""
    product = f.fmul(a, b)
    if f.module.target.has_fma:
        return product, f.fma(a, b, f.fneg(product))
    a_high, a_low = _halves(f, a)
    b_high, b_low = _halves(f, b)
    error = f.fsub(f.fmul(a_high, b_high), product)
    error = f.fadd(f.fadd(error, f.fmul(a_high, b_low)), f.fmul(a_low, b_high))
    return product, f.fadd(error, f.fmul(a_low, b_low))


def residual(f: Lanes, c: Value, a: Value, b: Value) -> Value:
    """c - a * b, accurate when a * b is nearly c."""
    if f.module.target.has_fma:
        return f.fma(f.fneg(a), b, c)
    product, rest = two_product(f, a, b)
    return f.fsub(f.fsub(c, product), rest)


def _halves(f: Lanes, a: Value) -> tuple[Value, Value]:
    """`a` as the sum of two numbers of half as many bits, whose products are exact."""
    fmt = format_of(a)
    keep = -1 << (fmt.mantissa + 2) // 2
    high = f.bitcast(f.value(f.and_(f.bitcast(a, integer_type(a)), keep)), a.type)
    return high, f.fsub(a, high)


def has_power_table(f: Lanes, x: Value) -> bool:
    """Whether fractional powers of two come from registers: f32 where any of their lanes can be picked."""
    return x.element == "float" and f.module.target.has_avx512


def rounder(x: Value, parts: int) -> float:
    """What rounds a small number to multiples of 1 / parts when it is added; its lowest bits count them."""
    return 1.5 * 2.0 ** format_of(x).mantissa / parts


def pick_power(f: Lanes, word: Value, powers: Sequence[float]) -> Value:
    """The one of 16 numbers, all lanes of one register, that the lowest bits of `word` choose."""
    register = lanes_of(vector("i32", 16), [FORMATS["float"].bits(power) for power in powers])

    def pick(k: Value) -> Value:
        name, twin = "llvm.x86.avx512.permvar.si.512", twins.look_up
        return f.intrinsic(name, k.type, register, k, feature="avx512f", twin=twin)

    found = at_widths(f, pick, 16, 16, f.bitcast(word, integer_type(word)))
    return f.bitcast(found, word.type)


def at_widths(f: Lanes, emit: Callable[..., Value], least: int, most: int, *operands: Value) -> Value:
    """What exists for `least` to `most` lanes at any width: in halves, or with lanes that nobody uses."""
    width = operands[0].width
    if width > most:
        half = width // 2
        low, high = (
            at_widths(f, emit, least, most, *(f.part(x, i, half) for x in operands)) for i in (0, half)
        )
        return f.concat(low, high)
    if width >= least:
        return emit(*operands)
    unused = [-1] * (least - width)
    wide = [
        f.splat(x, least) if width == 1 else f.shuffle(x, None, [*range(width), *unused]) for x in operands
    ]
    return f.part(emit(*wide), 0, width)


def nearer_to_zero(f: Lanes, x: Value, limit: float) -> Value:
    """f32 cut to [-limit, limit] in one AVX-512 instruction; what is not a number becomes `limit`."""
    smaller_size_with_sign_of_first = constant("i32", 2)

    def cut(part: Value) -> Value:
        rest = [constant(part.type, limit), smaller_size_with_sign_of_first]
        return _masked_instruction(f, "range", part, *rest, feature="avx512dq", twin=twins.nearer_to_zero)

    return at_widths(f, cut, 4, 16, x)


def _masked_instruction(
    f: Lanes, name: str, x: Value, *rest: Value, feature: str, twin: Callable[..., Value]
) -> Value:
    """An AVX-512 instruction that has a mask and may have a rounding mode: all lanes, the current mode."""
    total = x.width * (32 if x.element == "float" else 64)
    full = f"llvm.x86.avx512.mask.{name}.p{'s' if x.element == 'float' else 'd'}.{total}"
    mask = constant("i16" if x.width == 16 else "i8", -1)
    rounding = [constant("i32", 4)] if total == 512 else []
    last = [constant(x.type, 0.0), mask, *rounding]
    return f.intrinsic(full, x.type, x, *rest, *last, feature=feature, twin=twin)


def whole_part(f: Lanes, x: Value, factor: float = 1.0) -> tuple[Value, Value]:
    """(n, power): n is the whole number next to x * factor, `power` what `scale` takes for it."""
    product = x if factor == 1.0 else None
    if f.module.target.has_avx512:
        n = f.round_even(f.fmul(x, factor) if product is None else product)
        return n, n
    counter = _counter(x)
    power = f.fma(x, factor, counter) if product is None else f.fadd(product, counter)
    return f.fsub(power, counter), power


def _counter(x: Value) -> float:
    """What gives a sum with a whole number n whose lowest bits are n + 2 bias."""
    return rounder(x, 1) + 2 * format_of(x).bias


def scale(f: Lanes, p: Value, power: Value) -> Value:
    """p * 2**n, rounded once when the result is denormal; `power` is that of `whole_part`.

    With AVX-512 it is n itself, and p * 2**floor(n) is an instruction. Else the lowest bits of `power` are
    n + 2 bias: half of them, shifted into the exponent, is a factor, and so is what remains.
    """
    native = _scale_instruction(f, p, power)
    if native is not None:
        return native
    if f.module.target.has_avx512:
        power = f.fadd(f.floor(power), _counter(p))
    fmt = format_of(p)
    word = f.bitcast(power, integer_type(p))
    half = f.lshr(word, 1)
    for exponent in (half, f.sub(word, half)):
        p = f.fmul(p, f.bitcast(f.value(f.shl(f.value(exponent), fmt.mantissa)), p.type))
    return p


def _scale_instruction(f: Lanes, p: Value, n: Value) -> Value | None:
    """The same by the AVX-512 instruction, if the target and the width have it."""
    lanes = 4 if p.element == "float" else 2  # of 128 bits
    if not f.module.target.has_avx512 or p.width < lanes:
        return None

    def one(a: Value, b: Value) -> Value:
        return _masked_instruction(f, "scalef", a, b, feature="avx512f", twin=twins.scale)

    return at_widths(f, one, lanes, 4 * lanes, p, n)


def split_exponent(f: Lanes, x: Value) -> tuple[Value, Value]:
    """(e, m) with x = m * 2**e and m in [sqrt(1/2), sqrt(2)), for positive finite x, denormal or not."""
    fmt = format_of(x)
    root = fmt.bits(0.7071067811865476)
    small = f.fcmp("olt", x, fmt.smallest_normal)
    x = f.select(small, f.fmul(x, 2.0 ** (fmt.mantissa + 2)), x)
    offset = f.select(
        small, constant(x.type, fmt.bias + fmt.mantissa + 2.0), constant(x.type, float(fmt.bias))
    )
    moved = f.add(f.bitcast(x, integer_type(x)), fmt.bits(1.0) - root)
    exponent = f.or_(f.lshr(moved, fmt.mantissa), fmt.bits(2.0**fmt.mantissa))
    e = f.fsub(f.fsub(f.bitcast(f.value(exponent), x.type), 2.0**fmt.mantissa), offset)
    m = f.add(f.and_(moved, (1 << fmt.mantissa) - 1), root)
    return e, f.bitcast(f.value(m), x.type)


def sign_bit(f: Lanes, x: Value) -> Value:
    """Whether the sign bit is set, for -0.0 and NaN too."""
    return f.value(f.cmp("slt", f.bitcast(x, integer_type(x)), 0))
