"""What stands in place of instructions of AVX-512 and AVX-VNNI where they are emulated, with the same bits.

`Lanes.intrinsic` takes the twin of an instruction next to its name and writes it for an emulated target.
Vectors of 512 bits need none: LLVM does them in halves.

A NaN that an instruction makes may have another sign or payload here; everything else is exact, which
`tests/backend/native/test_emulation.py` shows on machines that have both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.native.irtypes import Value, constant, like, vector

if TYPE_CHECKING:
    from rlx.codegen.native.irlanes import Lanes

_SMALLEST_NORMAL = 2.0**-126
_EXPONENTS = {"float": (23, 127), "double": (52, 1023)}  # bits of the fraction, largest exponent


def flushed(f: Lanes, x: Value) -> Value:
    """Denormals as zeros of their sign: the bf16 instructions know no others, whatever the mode."""
    return f.select(f.fcmp("olt", f.fabs(x), _SMALLEST_NORMAL), f.copysign(0.0, x), x)


def dot_bf16(f: Lanes, total: Value, a: Value, b: Value) -> Value:
    """vdpbf16ps: a multiply-add of the odd lanes, then one of the even lanes."""
    total = flushed(f, total)
    for first in (1, 0):
        lanes = range(first, a.width, 2)
        left, right = (flushed(f, f.fpext(f.shuffle(x, None, lanes), "float")) for x in (a, b))
        total = flushed(f, f.fma(left, right, total))
    return total


def round_to_bf16(f: Lanes, x: Value) -> Value:
    """vcvtneps2bf16: ties to even."""
    return f.float_to_bf16(flushed(f, x))


def round_two_to_bf16(f: Lanes, high: Value, low: Value) -> Value:
    """vcvtne2ps2bf16."""
    return f.concat(round_to_bf16(f, low), round_to_bf16(f, high))


def dot_u8i8(f: Lanes, total: Value, a: Value, b: Value) -> Value:
    """vpdpbusd: four products each, which nothing saturates."""
    return _add_products(f, total, f.value(f.zext(a, "i32")), f.value(f.sext(b, "i32")))


def dot_i16(f: Lanes, total: Value, a: Value, b: Value) -> Value:
    """vpdpwssd."""
    return _add_products(f, total, f.value(f.sext(a, "i32")), f.value(f.sext(b, "i32")))


def pairs_i16(f: Lanes, a: Value, b: Value) -> Value:
    """vpmaddwd."""
    return dot_i16(f, constant(vector("i32", a.width // 2), 0), a, b)


def saturating_dot_u8i8(f: Lanes, a: Value, b: Value) -> Value:
    """vpmaddubsw: the sum of two products, at most what 16 bits hold."""
    total = constant(vector("i32", a.width // 2), 0)
    total = _add_products(f, total, f.value(f.zext(a, "i32")), f.value(f.sext(b, "i32")))
    for limit, beyond in ((2**15 - 1, "sgt"), (-(2**15), "slt")):
        end = constant(total.type, limit)
        total = f.select(f.cmp(beyond, total, end), end, total)
    return f.trunc(total, "i16")


def _add_products(f: Lanes, total: Value, a: Value, b: Value) -> Value:
    products, group = f.value(f.mul(a, b)), a.width // total.width
    for first in range(group):
        total = f.value(f.add(total, f.shuffle(products, None, range(first, a.width, group))))
    return total


def look_up(f: Lanes, table: Value, index: Value) -> Value:
    """vpermd, vpermps, vpermw: the lane of `table` that the lowest bits of each index name."""
    index = f.value(f.and_(index, table.width - 1))
    found = f.splat(f.extract(table, 0), index.width)
    for lane in range(1, table.width):
        here = f.cmp("eq", index, constant(index.type, lane))
        found = f.select(here, f.splat(f.extract(table, lane), index.width), found)
    return found


def look_up_in_two(f: Lanes, low: Value, index: Value, high: Value) -> Value:
    """vpermi2w: the same in two vectors, one after the other."""
    return look_up(f, f.concat(low, high), index)


def nearer_to_zero(f: Lanes, x: Value, limit: Value, *_: Value) -> Value:
    """vrangeps with the choice "smaller size, sign of the first": a quiet NaN becomes the limit, a signalling
    one a quiet one."""
    nearer = f.copysign(f.select(f.fcmp("olt", f.fabs(x), limit), x, limit), x)
    quiet = f.cmp("ne", f.and_(f.bitcast(x, like(x.type, "i32")), 1 << 22), 0)
    return f.select(f.value(f.or_(f.fcmp("ord", x, x), quiet)), nearer, f.fadd(x, x))


def scale(f: Lanes, x: Value, n: Value, *_: Value) -> Value:
    """vscalefps, vscalefpd: x * 2**floor(n) rounded once, for all x and n.

    A power that no number holds is taken in three steps. Steps down leave room for the whole fraction, so
    that only the last one can round.
    """
    fraction, largest = _EXPONENTS[x.element]
    down = largest - 1 - (fraction + 1)
    power, out = f.floor(n), x
    for _step in range(2):
        above, below = f.fcmp("ogt", power, largest), f.fcmp("olt", power, 1 - largest)
        step = f.select(above, constant(x.type, 2.0**largest), constant(x.type, 1.0))
        out = f.fmul(out, f.select(below, constant(x.type, 2.0**-down), step))
        power = f.select(above, f.fsub(power, largest), f.select(below, f.fadd(power, down), power))
    cut = f.select(f.fcmp("ogt", power, largest), constant(x.type, largest), power)
    cut = f.select(f.fcmp("olt", cut, 1 - largest), constant(x.type, 1 - largest), cut)
    word = f.bitcast(f.fadd(cut, 1.5 * 2.0**fraction), like(x.type, "i32" if x.element == "float" else "i64"))
    factor = f.bitcast(f.value(f.shl(f.add(word, largest), fraction)), x.type)
    infinite = f.select(f.fcmp("ogt", n, 0.0), constant(x.type, float("inf")), constant(x.type, 0.0))
    without_end = f.fcmp("oeq", f.fabs(n), float("inf"))
    out = f.select(without_end, f.fmul(x, infinite), f.fmul(out, factor))
    return f.select(f.is_nan(n), f.fadd(x, n), out)
