"""Every scalar primitive in LLVM IR, for scalars and vectors alike. One missing here has no native kernel.

Values in registers have a *register type*: f16 and bf16 are computed as float, bool as i1, u8 as i8 ...
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.native import storage, vmath
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, bits, constant, like, mangle
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.remainder import fmod
from rlx.codegen.native.vmath_exp import exp, exp_of_distance
from rlx.codegen.native.words import Word, bitcast, is_nan, lshr, sdiv, select, srem, udiv, ult, urem, zext
from rlx.errors import UnsupportedError
from rlx.ir.dtype import F32, I8, DType
from rlx.ir.dtype import dtype as as_dtype

MEMORY = {"f64": "double", "f32": "float", "f16": "half", "bf16": "bfloat", "bool": "i8"}
MEMORY |= {f"{sign}{n}": f"i{n}" for sign in "iu" for n in (8, 16, 32, 64)}
MEMORY |= dict.fromkeys(storage.NAMES, "i8")
REGISTER = {**MEMORY, "f16": "float", "bf16": "float", "bool": "i1"}
REGISTER |= {name: "i8" if name in storage.INTEGERS else "float" for name in storage.NAMES}


def supported(dtype: DType) -> bool:
    """Whether kernels can compute with a dtype."""
    return dtype.name in MEMORY


def memory_type(dtype: DType) -> str:
    """LLVM type of one element in memory."""
    try:
        return MEMORY[dtype.name]
    except KeyError:
        raise UnsupportedError(f"dtype {dtype} has no native kernels") from None


def register_type(dtype: DType) -> str:
    """LLVM type of one element in a register."""
    memory_type(dtype)
    return REGISTER[dtype.name]


def from_memory(fn: Function, x: Value, dtype: DType) -> Value:
    """What was loaded, as a register value."""
    if dtype.name in ("f16", "bf16"):
        return fn.fpext(x, "float")
    if dtype.is_bool:
        return fn.value(fn.cmp("ne", x, constant(x.type, 0)))
    return storage.decode(fn, x, dtype) if dtype.storage_only else x


def to_memory(fn: Function, x: Value, dtype: DType) -> Value:
    """A register value as it is stored."""
    if dtype.name in ("f16", "bf16"):
        return fn.fptrunc(x, MEMORY[dtype.name])
    if dtype.storage_only:
        return storage.encode(fn, x, dtype)
    return fn.zext(x, "i8") if dtype.is_bool else x


Emit = Callable[[Function, DType, list[Value]], Value]


def _both(floating: Callable[..., object], integer: Callable[..., object]) -> Emit:
    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        f = floating if dtype.is_float else integer
        return fn.value(f(fn, *args))  # type: ignore[arg-type]

    return emit


def _math(name: str) -> Emit:
    return lambda fn, dtype, args: vmath.apply(fn, name, *args)


def _compare(floating: str, signed: str, unsigned: str) -> Emit:
    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        if dtype.is_float:
            return fn.fcmp(floating, *args)
        return fn.value(fn.cmp(signed if dtype.is_signed else unsigned, *args))

    return emit


@inline
def _neg(f: Function, dtype: DType, args: list[Value]) -> Value:
    (x,) = map(Word, args)
    return -x if dtype.is_float else 0 - x


@inline
def _abs(f: Function, dtype: DType, args: list[Value]) -> Value:
    (x,) = map(Word, args)
    if dtype.is_float:
        return f.fabs(x)
    return select(x < 0, 0 - x, x) if dtype.is_signed else x


@inline
def _sign(f: Function, dtype: DType, args: list[Value]) -> Value:
    (x,) = map(Word, args)
    zero, one, minus_one = (constant(x.type, n) for n in (0, 1, -1))
    if dtype.is_float:
        below = x < 0
        signed = select(below, minus_one, select(x > 0, one, x))  # what is not a number stays
        return select(x == 0, zero, signed)
    if not dtype.is_signed:
        return select(x == 0, zero, one)
    below = x < 0
    return select(below, minus_one, select(x > 0, one, zero))


def _extreme(name: str) -> Emit:
    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        if dtype.is_float:
            return (fn.fmax if name == "max" else fn.fmin)(*args)
        which = ("s" if dtype.is_signed else "u") + name
        return fn.value(getattr(fn, which)(*args))

    return emit


@inline
def _safe_divisor(x: Word, y: Word, signed: bool) -> tuple[Word, bool]:
    """(a divisor that cannot trap, mask of division by zero). The lowest number / -1 would overflow."""
    by_zero = y == 0
    traps = by_zero
    if signed:
        lowest, minus_one = -(1 << (bits(x.type) - 1)), y == -1
        traps = by_zero | ((x == lowest) & minus_one)
    return select(traps, 1, y), by_zero


@inline
def _integer_division(kind: str, dtype: DType, x: Word, y: Word) -> Word:
    signed = dtype.is_signed
    safe, by_zero = _safe_divisor(x, y, signed)
    if kind == "trunc_div" or (kind == "floor_div" and not signed):
        out = sdiv(x, safe) if signed else udiv(x, safe)
    elif kind == "fmod" or (kind == "mod" and not signed):
        out = srem(x, safe) if signed else urem(x, safe)
    else:
        quotient, rest = sdiv(x, safe), srem(x, safe)
        differs = (rest ^ safe) < 0
        off = (rest != 0) & differs
        if kind == "floor_div":
            out = quotient - zext(off, quotient.element)
        else:
            out = select(off, rest + safe, rest)
    return select(by_zero, 0, out)


@inline
def _float_mod(f: Function, x: Word, y: Word) -> Value:
    """Remainder with the sign of y, as NumPy."""
    rest = Word(fmod(f, x, y))
    nonzero = rest != 0.0
    differs = (rest < 0.0) ^ (y < 0.0)
    adjusted = select(nonzero & differs, rest + y, rest)
    return select(nonzero, adjusted, f.copysign(0.0, y))


@inline
def _floor_div(f: Function, x: Word, y: Word) -> Value:
    """The floor of the exact quotient, not of the rounded one."""
    rest = Word(fmod(f, x, y))
    quotient = (x - rest) / y
    differs = (rest < 0.0) ^ (y < 0.0)
    below = (rest != 0.0) & differs
    quotient = select(below, quotient - 1.0, quotient)
    plain = x / y
    whole = Word(f.floor(quotient))
    near = select(quotient - whole > 0.5, whole + 1.0, whole)
    signed = select(near == 0.0, f.copysign(0.0, plain), near)
    return select(y == 0.0, plain, signed)


_FLOAT_DIVISIONS: dict[str, Callable[..., Value]] = {
    "fmod": fmod,
    "mod": _float_mod,
    "trunc_div": lambda fn, x, y: fn.trunc_float(fn.fdiv(x, y)),
    "floor_div": _floor_div,
}


def _division(kind: str) -> Emit:
    floating = _FLOAT_DIVISIONS[kind]

    @inline
    def emit(f: Function, dtype: DType, args: list[Value]) -> Value:
        x, y = map(Word, args)
        return floating(f, x, y) if dtype.is_float else _integer_division(kind, dtype, x, y)

    return emit


@inline
def _pow(f: Function, dtype: DType, args: list[Value]) -> Value:
    if dtype.is_float:
        return vmath.apply(f, "pow", *args)
    x, y = map(Word, args)
    one, minus_one = constant(x.type, 1), constant(x.type, -1)
    result, base, rest = one, x, y
    if dtype.is_signed:
        rest = select(y < 0, 0, y)
    for _ in range(bits(x.element)):
        odd = (rest & one) != 0
        result = select(odd, result * base, result)
        base *= base
        rest = lshr(rest, one)
    if not dtype.is_signed:
        return result
    is_one, is_minus_one = x == one, x == minus_one
    odd = (y & one) != 0
    inverse = select(is_one, one, select(is_minus_one, select(odd, minus_one, one), 0))
    return select(y < 0, inverse, result)


@inline
def _shift_left(f: Function, dtype: DType, args: list[Value]) -> Value:
    x, y = map(Word, args)
    inside = ult(y, bits(x.element))
    return select(inside, x << select(inside, y, 0), 0)


@inline
def _shift_right(f: Function, dtype: DType, args: list[Value]) -> Value:
    x, y = map(Word, args)
    inside = ult(y, bits(x.element))
    amount = select(inside, y, 0)
    if not dtype.is_signed:
        return select(inside, lshr(x, amount), 0)
    full = x >> (bits(x.element) - 1)
    return select(inside, x >> amount, full)


def _is_inf(fn: Function, dtype: DType, args: list[Value]) -> Value:
    return fn.fcmp("oeq", fn.fabs(args[0]), float("inf"))


def _where(fn: Function, dtype: DType, args: list[Value]) -> Value:
    return fn.select(*args)


def _bitcast(to: str) -> Emit:
    """The stored bits of a value, read as another dtype of the same width."""

    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        stored = to_memory(fn, args[0], dtype)
        return from_memory(fn, fn.bitcast(stored, like(stored.type, MEMORY[to])), as_dtype(to))

    return emit


# the dtype handed to an entry is that of the first number operand
PRIMITIVES: dict[str, Emit] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "is_nan": lambda fn, d, a: fn.is_nan(a[0]),
    "is_inf": _is_inf,
    "logical_not": lambda fn, d, a: fn.value(fn.xor(a[0], constant(a[0].type, True))),
    "bitwise_not": lambda fn, d, a: fn.value(fn.xor(a[0], constant(a[0].type, -1))),
    "add": _both(Function.fadd, Function.add),
    "sub": _both(Function.fsub, Function.sub),
    "mul": _both(Function.fmul, Function.mul),
    "div": lambda fn, d, a: fn.fdiv(*a),
    "floor_div": _division("floor_div"),
    "trunc_div": _division("trunc_div"),
    "mod": _division("mod"),
    "fmod": _division("fmod"),
    "pow": _pow,
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "equal": _compare("oeq", "eq", "eq"),
    "not_equal": _compare("une", "ne", "ne"),
    "less": _compare("olt", "slt", "ult"),
    "less_equal": _compare("ole", "sle", "ule"),
    "greater": _compare("ogt", "sgt", "ugt"),
    "greater_equal": _compare("oge", "sge", "uge"),
    "logical_and": lambda fn, d, a: fn.value(fn.and_(*a)),
    "logical_or": lambda fn, d, a: fn.value(fn.or_(*a)),
    "logical_xor": lambda fn, d, a: fn.value(fn.xor(*a)),
    "bitwise_and": lambda fn, d, a: fn.value(fn.and_(*a)),
    "bitwise_or": lambda fn, d, a: fn.value(fn.or_(*a)),
    "bitwise_xor": lambda fn, d, a: fn.value(fn.xor(*a)),
    "shift_left": _shift_left,
    "shift_right": _shift_right,
    "where": _where,
    "rounded": lambda fn, d, a: from_memory(fn, to_memory(fn, a[0], d), d),
    "larger": lambda fn, d, a: fn.fmax_x86(*a),  # the second of two floats where either is not a number
    "exp_difference": lambda fn, d, a: write(fn, exp, fn.fsub(*a), rounded=True),
    "exp_below": lambda fn, d, a: write(fn, exp_of_distance, fn.fsub(a[1], a[0])),
    **{f"bitcast_{to}": _bitcast(to) for to in MEMORY},
    **{
        name: _math(name)
        for name in (
            "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan atan2 sinh cosh tanh "
            "asinh acosh atanh erf erfc sigmoid floor ceil round trunc"
        ).split()
    },
}


def emit_cast(fn: Function, x: Value, source: DType, to: DType, saturate: bool | None = None) -> Value:
    """The cast op's rules between register values."""
    if source is to:
        return x
    if source.storage_only:  # registers hold its values exactly as f32 or i8
        return emit_cast(fn, x, _HELD_AS[source.is_float], to, saturate)
    if to.storage_only:
        return _to_storage(fn, x, source, to, saturate)
    target = register_type(to)
    if to.is_bool:
        if source.is_float:
            return fn.fcmp("une", x, constant(x.type, 0.0))
        return fn.value(fn.cmp("ne", x, constant(x.type, 0)))
    if source.is_bool:
        return fn.uitofp(x, target) if to.is_float else fn.zext(x, target)
    if to.name in ("f16", "bf16"):
        exact = x if source.is_float else _unrounded(fn, Word(x), source, to)
        return from_memory(fn, to_memory(fn, exact, to), to)
    if source.is_float and to.is_float:
        wide, narrow = bits(x.element), bits(target)
        return fn.fpext(x, target) if wide < narrow else fn.fptrunc(x, target) if wide > narrow else x
    if source.is_int and to.is_float:
        return (fn.sitofp if source.is_signed else fn.uitofp)(x, target)
    if source.is_float:
        return _float_to_int(fn, x, to, target)
    wide, narrow = bits(x.element), bits(target)
    if wide == narrow:
        return x
    return fn.trunc(x, target) if wide > narrow else (fn.sext if source.is_signed else fn.zext)(x, target)


@inline
def _unrounded(f: Function, x: Word, source: DType, to: DType) -> Value:
    """Integers as floats that round to 16 bits as they would themselves."""
    convert = f.sitofp if source.is_signed else f.uitofp
    if source.bits <= 16 or to.name == "f16":  # what f32 does not hold is infinite in f16
        return convert(x, "float")
    if source.bits == 64:
        # f64 has no room for the low bits of large numbers: of these it only matters that one is set.
        low = x & 0xFFF
        sticky = (x | (low + 0xFFF)) & -0x1000
        size = Word(_abs(f, source, [x]))
        x = select(ult(size, 1 << 48), x, sticky)
    return convert(x, "double")


LEVELS = 1.5 * 2.0**23  # floats of this size differ by one, and their last bits count from it


@inline
def emit_level(f: Function, x: Value, byte: DType, zero: int, to: DType) -> Value:
    """round(x) + zero of f32, saturated to a byte: as that byte, or as f32 again.

    Bounds are integers: cutting the range before or after rounding is one, and a sum whose last bits are the
    level rounds by itself.
    """
    if byte.is_signed:
        x = select(is_nan(x), float(-zero), x)
    inside = _clamped(f, x, byte.min_value - zero, byte.max_value - zero)
    if to.is_float:
        level = Word(f.round_even(inside))
        return level + float(zero) if zero else level
    word = bitcast(inside + LEVELS, like(x.type, "i32"))
    return f.trunc(word + zero, register_type(byte))


def _clamped(fn: Function, x: Value, low: float, high: float) -> Word:
    """`x` cut to a range. What is not a number gives the lower end."""
    return Word(fn.fmin_x86(fn.fmax_x86(x, float(low)), float(high)))


_HELD_AS = {True: F32, False: I8}


def _to_storage(fn: Function, x: Value, source: DType, to: DType, saturate: bool | None) -> Value:
    """Round to a storage-only dtype; the result is held as f32 or i8 again."""
    if to.is_float:
        if source.name == "f64" or (source.is_int and source.bits == 64):
            raise UnsupportedError(f"cast from {source} to {to} has no native code")
        wide = emit_cast(fn, x, source, F32)
        return storage.decode(fn, storage.encode(fn, wide, to, saturate), to)
    if source.is_float:
        return storage.from_float(fn, x, to)
    low = emit_cast(fn, x, source, I8)
    return storage.decode(fn, storage.encode(fn, low, to), to)


@inline
def _float_to_int(f: Function, x: Value, to: DType, target: str) -> Value:
    """Towards zero, saturating, NaN to 0: LLVM's saturating conversion has exactly these rules.

    For bytes and 16 bits it is slow; there the range is cut before the conversion.
    """
    if to.bits <= 16:
        if to.is_signed:
            x = select(is_nan(x), 0.0, x)
        return f.trunc(f.fptosi(_clamped(f, x, to.min_value, to.max_value), "i32"), target)
    kind = "fptosi.sat" if to.is_signed else "fptoui.sat"
    result = like(x.type, target)
    return f.intrinsic(f"llvm.{kind}.{mangle(result)}.{mangle(x.type)}", result, x)
