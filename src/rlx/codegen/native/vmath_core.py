"""What the vectorised math functions share: facts about f32 and f64, exact sums and products, scaling.

Everything takes scalars and vectors of `float` or `double` of any width; wide vectors are cut by LLVM.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from rlx.codegen.native import twins
from rlx.codegen.native.irtypes import Value, constant, lanes_of, like, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Word,
    bitcast,
    builder,
    concat,
    floor,
    fma,
    fmax_x86,
    fmin_x86,
    lshr,
    part,
    polynomial,
    round_even,
    select,
    shuffle,
    splat,
    target,
)
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


def format_of(x: Word) -> Format:
    """The format of the lanes of `x`."""
    return FORMATS[x.element]


def integer_type(x: Word) -> str:
    """The integer type as wide as `x`, lane for lane."""
    return like(x.type, format_of(x).integer)


def number(x: Word, value: float) -> Word:
    """`value` in every lane of the type of `x`."""
    return Word(constant(x.type, value))


def fit(x: Word, table: Table) -> Word:
    """The fitted polynomial of `table` at `x`."""
    return polynomial(x, table[x.element])


@inline
def odd_fit(x: Word, square: Word, table: Table) -> Word:
    """x + x**3 * polynomial(x**2)."""
    return fma(x * square, fit(square, table), x)


def clamp(x: Word, low: float, high: float) -> Word:
    """`x` cut to [low, high]; NaN stays NaN, because both minimum and maximum give their second operand."""
    return fmin_x86(number(x, high), fmax_x86(number(x, low), x))


@inline
def two_sum(a: Word, b: Word) -> tuple[Word, Word]:
    """(a + b rounded, the rounding error), whatever their sizes."""
    total = a + b
    part = total - a
    return total, a - (total - part) + (b - part)


@inline
def fast_two_sum(a: Word, b: Word) -> tuple[Word, Word]:
    """(a + b rounded, the rounding error) when |a| >= |b|."""
    total = a + b
    return total, b - (total - a)


@inline
def two_product(a: Word, b: Word) -> tuple[Word, Word]:
    """(a * b rounded, the rounding error)."""
    product = a * b
    if target().has_fma:
        return product, fma(a, b, -product)
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    error = a_high * b_high - product
    error = error + a_high * b_low + a_low * b_high
    return product, error + a_low * b_low


@inline
def residual(c: Word, a: Word, b: Word) -> Word:
    """c - a * b, accurate when a * b is nearly c."""
    if target().has_fma:
        return fma(-a, b, c)
    product, rest = two_product(a, b)
    return c - product - rest


@inline
def _halves(a: Word) -> tuple[Word, Word]:
    """`a` as the sum of two numbers of half as many bits, whose products are exact."""
    fmt = format_of(a)
    keep = -1 << (fmt.mantissa + 2) // 2
    high = bitcast(bitcast(a, integer_type(a)) & keep, a.type)
    return high, a - high


def power_parts(x: Word) -> int:
    """Into how many parts powers of two are cut whose fractions a register holds, any lane of which can be
    picked: 16 or 8 for f32, else 1."""
    if x.element != "float":
        return 1
    return 16 if target().has_avx512 else 8 if target().has("avx2") else 1


def rounder(x: Word, parts: int) -> float:
    """What rounds a small number to multiples of 1 / parts when it is added; its lowest bits count them."""
    return 1.5 * 2.0 ** format_of(x).mantissa / parts


_PICKS = {
    16: ("llvm.x86.avx512.permvar.si.512", "avx512f"),
    8: ("llvm.x86.avx2.permd", "avx2"),
}


def pick(index: Word, values: Sequence[int]) -> Word:
    """The one of 16 or 8 integers, all lanes of one register, that the lowest bits of integers choose."""
    count = len(values)
    name, feature = _PICKS[count]
    register = lanes_of(vector("i32", count), list(values))

    def one(k: Word) -> Word:
        return Word(builder().intrinsic(name, k.type, register, k, feature=feature, twin=twins.look_up))

    return at_widths(one, count, count, index)


def pick_power(word: Word, powers: Sequence[float]) -> Word:
    """The one of 16 numbers that the lowest bits of `word` choose."""
    values = [FORMATS["float"].bits(power) for power in powers]
    return bitcast(pick(bitcast(word, integer_type(word)), values), word.type)


@inline
def pick_eighth(count: Word, powers: Sequence[float]) -> Word:
    """2**(count / 8 - 127), where the lowest 12 bits of the integers `count` are positive and below 2047.

    What the number of eighths adds to the bits of the whole power, the table leaves out.
    """
    fmt = FORMATS["float"]
    shift, one = fmt.mantissa - 3, fmt.bits(1.0)
    fractions = [fmt.bits(power) - one - (k << shift) for k, power in enumerate(powers)]
    return bitcast(pick(count, fractions) + (count << shift), like(count.type, "float"))


def at_widths(emit: Callable[..., Word], least: int, most: int, *operands: Word) -> Word:
    """What exists for `least` to `most` lanes at any width: in halves, or with lanes that nobody uses."""
    width = operands[0].width
    if width > most:
        half = width // 2
        low, high = (at_widths(emit, least, most, *(part(x, i, half) for x in operands)) for i in (0, half))
        return concat(low, high)
    if width >= least:
        return emit(*operands)
    unused = [-1] * (least - width)
    wide = [splat(x, least) if width == 1 else shuffle(x, None, [*range(width), *unused]) for x in operands]
    return part(emit(*wide), 0, width)


def nearer_to_zero(x: Word, limit: float) -> Word:
    """f32 cut to [-limit, limit] in one AVX-512 instruction; what is not a number becomes `limit`."""
    smaller_size_with_sign_of_first = constant("i32", 2)

    def cut(part: Word) -> Word:
        rest = [number(part, limit), smaller_size_with_sign_of_first]
        return _masked_instruction("range", part, *rest, feature="avx512dq", twin=twins.nearer_to_zero)

    return at_widths(cut, 4, 16, x)


def _masked_instruction(name: str, x: Word, *rest: Value, feature: str, twin: Callable[..., Value]) -> Word:
    """An AVX-512 instruction that has a mask and may have a rounding mode: all lanes, the current mode."""
    total = x.width * (32 if x.element == "float" else 64)
    full = f"llvm.x86.avx512.mask.{name}.p{'s' if x.element == 'float' else 'd'}.{total}"
    mask = constant("i16" if x.width == 16 else "i8", -1)
    rounding = [constant("i32", 4)] if total == 512 else []
    last = [number(x, 0.0), mask, *rounding]
    return Word(builder().intrinsic(full, x.type, x, *rest, *last, feature=feature, twin=twin))


@inline
def whole_part(x: Word, factor: float = 1.0) -> tuple[Word, Word]:
    """(n, power): n is the whole number next to x * factor, `power` what `scale` takes for it."""
    product = x if factor == 1.0 else None
    if target().has_avx512:
        n = round_even(x * factor if product is None else product)
        return n, n
    counter = _counter(x)
    power = fma(x, factor, counter) if product is None else product + counter
    return power - counter, power


def _counter(x: Word) -> float:
    """What gives a sum with a whole number n whose lowest bits are n + 2 bias."""
    return rounder(x, 1) + 2 * format_of(x).bias


@inline
def scale(p: Word, power: Word) -> Word:
    """p * 2**n, rounded once when the result is denormal; `power` is that of `whole_part`.

    With AVX-512 it is n itself, and p * 2**floor(n) is an instruction. Else the lowest bits of `power` are
    n + 2 bias: half of them, shifted into the exponent, is a factor, and so is what remains.
    """
    native = _scale_instruction(p, power)
    if native is not None:
        return native
    if target().has_avx512:
        power = floor(power) + _counter(p)
    fmt = format_of(p)
    word = bitcast(power, integer_type(p))
    half = lshr(word, 1)
    for exponent in (half, word - half):
        p = p * bitcast(exponent << fmt.mantissa, p.type)
    return p


def _scale_instruction(p: Word, n: Word) -> Word | None:
    """The same by the AVX-512 instruction, if the target and the width have it."""
    lanes = 4 if p.element == "float" else 2  # of 128 bits
    if not target().has_avx512 or p.width < lanes:
        return None

    def one(a: Word, b: Word) -> Word:
        return _masked_instruction("scalef", a, b, feature="avx512f", twin=twins.scale)

    return at_widths(one, lanes, 4 * lanes, p, n)


@inline
def split_exponent(x: Word) -> tuple[Word, Word]:
    """(e, m) with x = m * 2**e and m in [sqrt(1/2), sqrt(2)), for positive finite x, denormal or not."""
    fmt = format_of(x)
    root = fmt.bits(0.7071067811865476)
    small = x < fmt.smallest_normal
    x = select(small, x * 2.0 ** (fmt.mantissa + 2), x)
    offset = select(small, number(x, fmt.bias + fmt.mantissa + 2.0), number(x, float(fmt.bias)))
    moved = bitcast(x, integer_type(x)) + (fmt.bits(1.0) - root)
    exponent = lshr(moved, fmt.mantissa) | fmt.bits(2.0**fmt.mantissa)
    e = bitcast(exponent, x.type) - 2.0**fmt.mantissa - offset
    m = (moved & (1 << fmt.mantissa) - 1) + root
    return e, bitcast(m, x.type)


@inline
def sign_bit(x: Word) -> bool:
    """Whether the sign bit is set, for -0.0 and NaN too."""
    return bitcast(x, integer_type(x)) < 0
