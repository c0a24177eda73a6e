"""Every scalar primitive in LLVM IR, for scalars and vectors alike. One missing here has no native kernel.

Values in registers have a *register type*: f16 and bf16 are computed as float, bool as i1, u8 as i8 ...
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.native import storage, vmath
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, bits, constant, like, mangle
from rlx.codegen.native.remainder import fmod
from rlx.codegen.native.vmath_exp import exp
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


def _neg(fn: Function, dtype: DType, args: list[Value]) -> Value:
    return fn.fneg(args[0]) if dtype.is_float else fn.value(fn.sub(constant(args[0].type, 0), args[0]))


def _abs(fn: Function, dtype: DType, args: list[Value]) -> Value:
    (x,) = args
    if dtype.is_float:
        return fn.fabs(x)
    if not dtype.is_signed:
        return x
    zero = constant(x.type, 0)
    return fn.select(fn.value(fn.cmp("slt", x, zero)), fn.value(fn.sub(zero, x)), x)


def _sign(fn: Function, dtype: DType, args: list[Value]) -> Value:
    (x,) = args
    zero, one = constant(x.type, 0), constant(x.type, 1)
    if dtype.is_float:
        signed = fn.select(
            fn.fcmp("olt", x, zero), constant(x.type, -1), fn.select(fn.fcmp("ogt", x, zero), one, x)
        )
        return fn.select(fn.fcmp("oeq", x, zero), zero, signed)
    low = constant(x.type, -1)
    if not dtype.is_signed:
        return fn.select(fn.value(fn.cmp("eq", x, zero)), zero, one)
    return fn.select(
        fn.value(fn.cmp("slt", x, zero)), low, fn.select(fn.value(fn.cmp("sgt", x, zero)), one, zero)
    )


def _extreme(name: str) -> Emit:
    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        if dtype.is_float:
            return (fn.fmax if name == "max" else fn.fmin)(*args)
        which = ("s" if dtype.is_signed else "u") + name
        return fn.value(getattr(fn, which)(*args))

    return emit


def _safe_divisor(fn: Function, x: Value, y: Value, signed: bool) -> tuple[Value, Value, Value]:
    """(divisor that cannot trap, mask of division by zero, mask of the overflow min / -1)."""
    zero, one = constant(y.type, 0), constant(y.type, 1)
    by_zero = fn.value(fn.cmp("eq", y, zero))
    overflow = by_zero
    if signed:
        lowest = constant(x.type, -(1 << (bits(x.type) - 1)))
        edge = fn.value(fn.cmp("eq", y, constant(y.type, -1)))
        overflow = fn.value(fn.and_(fn.value(fn.cmp("eq", x, lowest)), edge))
        return fn.select(fn.value(fn.or_(by_zero, overflow)), one, y), by_zero, overflow
    return fn.select(by_zero, one, y), by_zero, overflow


def _integer_division(kind: str) -> Callable[[Function, DType, Value, Value], Value]:
    def emit(fn: Function, dtype: DType, x: Value, y: Value) -> Value:
        zero = constant(x.type, 0)
        safe, by_zero, _ = _safe_divisor(fn, x, y, dtype.is_signed)
        s = dtype.is_signed
        if kind == "trunc_div" or (kind == "floor_div" and not s):
            out = fn.sdiv(x, safe) if s else fn.udiv(x, safe)
        elif kind == "fmod" or (kind == "mod" and not s):
            out = fn.srem(x, safe) if s else fn.urem(x, safe)
        else:
            quotient, rest = fn.value(fn.sdiv(x, safe)), fn.value(fn.srem(x, safe))
            differs = fn.value(fn.cmp("slt", fn.value(fn.xor(rest, safe)), zero))
            off = fn.value(fn.and_(fn.value(fn.cmp("ne", rest, zero)), differs))
            if kind == "floor_div":
                out = fn.sub(quotient, fn.zext(off, quotient.element))
            else:
                out = fn.select(off, fn.value(fn.add(rest, safe)), rest)
        return fn.select(by_zero, zero, fn.value(out))

    return emit


def _float_mod(fn: Function, x: Value, y: Value) -> Value:
    """Remainder with the sign of y, as NumPy."""
    zero = constant(x.type, 0.0)
    rest = fmod(fn, x, y)
    nonzero = fn.fcmp("une", rest, zero)
    differs = fn.value(fn.xor(fn.fcmp("olt", rest, zero), fn.fcmp("olt", y, zero)))
    adjusted = fn.select(fn.value(fn.and_(nonzero, differs)), fn.fadd(rest, y), rest)
    return fn.select(nonzero, adjusted, fn.copysign(zero, y))


def _division(kind: str) -> Emit:
    whole = _integer_division(kind)

    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        x, y = args
        if not dtype.is_float:
            return whole(fn, dtype, x, y)
        if kind == "fmod":
            return fmod(fn, x, y)
        if kind == "mod":
            return _float_mod(fn, x, y)
        if kind == "trunc_div":
            return fn.trunc_float(fn.fdiv(x, y))
        rest = fmod(fn, x, y)  # floor of the exact quotient, not of the rounded one
        quotient = fn.fdiv(fn.fsub(x, rest), y)
        differs = fn.value(fn.xor(fn.fcmp("olt", rest, 0.0), fn.fcmp("olt", y, 0.0)))
        below = fn.value(fn.and_(fn.fcmp("une", rest, 0.0), differs))
        quotient = fn.select(below, fn.fsub(quotient, 1.0), quotient)
        plain = fn.fdiv(x, y)
        whole_part = fn.floor(quotient)
        near = fn.select(
            fn.fcmp("ogt", fn.fsub(quotient, whole_part), 0.5), fn.fadd(whole_part, 1.0), whole_part
        )
        signed = fn.select(fn.fcmp("oeq", near, 0.0), fn.copysign(constant(x.type, 0.0), plain), near)
        return fn.select(fn.fcmp("oeq", y, 0.0), plain, signed)

    return emit


def _pow(fn: Function, dtype: DType, args: list[Value]) -> Value:
    if dtype.is_float:
        return vmath.apply(fn, "pow", *args)
    x, y = args
    zero, one = constant(x.type, 0), constant(x.type, 1)
    result, base, rest = one, x, y
    if dtype.is_signed:
        rest = fn.select(fn.value(fn.cmp("slt", y, zero)), zero, y)
    for _ in range(
        bits(x.element) if bits(x.element) <= 8 else 64 if bits(x.element) == 64 else bits(x.element)
    ):
        odd = fn.value(fn.cmp("ne", fn.value(fn.and_(rest, one)), zero))
        result = fn.select(odd, fn.value(fn.mul(result, base)), result)
        base = fn.value(fn.mul(base, base))
        rest = fn.value(fn.lshr(rest, one))
    if not dtype.is_signed:
        return result
    minus = constant(x.type, -1)
    is_one, is_minus = fn.value(fn.cmp("eq", x, one)), fn.value(fn.cmp("eq", x, minus))
    odd = fn.value(fn.cmp("ne", fn.value(fn.and_(y, one)), zero))
    inverse = fn.select(is_one, one, fn.select(is_minus, fn.select(odd, minus, one), zero))
    return fn.select(fn.value(fn.cmp("slt", y, zero)), inverse, result)


def _shift(direction: str) -> Emit:
    def emit(fn: Function, dtype: DType, args: list[Value]) -> Value:
        x, y = args
        limit = constant(y.type, bits(x.element))
        inside = fn.value(fn.cmp("ult", y, limit))
        amount = fn.select(inside, y, constant(y.type, 0))
        if direction == "left":
            return fn.select(inside, fn.value(fn.shl(x, amount)), constant(x.type, 0))
        if not dtype.is_signed:
            return fn.select(inside, fn.value(fn.lshr(x, amount)), constant(x.type, 0))
        full = fn.value(fn.ashr(x, constant(x.type, bits(x.element) - 1)))
        return fn.select(inside, fn.value(fn.ashr(x, amount)), full)

    return emit


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
    "shift_left": _shift("left"),
    "shift_right": _shift("right"),
    "where": _where,
    "rounded": lambda fn, d, a: from_memory(fn, to_memory(fn, a[0], d), d),
    "exp_difference": lambda fn, d, a: exp(fn, fn.fsub(*a), rounded=True),
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
        exact = x if source.is_float else _unrounded(fn, x, source, to)
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


def _unrounded(fn: Function, x: Value, source: DType, to: DType) -> Value:
    """Integers as floats that round to 16 bits as they would themselves."""
    convert = fn.sitofp if source.is_signed else fn.uitofp
    if source.bits <= 16 or to.name == "f16":  # what f32 does not hold is infinite in f16
        return convert(x, "float")
    if source.bits == 64:
        # f64 has no room for the low bits of large numbers: of these it only matters that one is set.
        low = fn.and_(x, 0xFFF)
        sticky = fn.and_(fn.or_(x, fn.add(low, 0xFFF)), -0x1000)
        size = _abs(fn, source, [x])
        x = fn.select(fn.cmp("ult", size, constant(x.type, 1 << 48)), x, fn.value(sticky))
    return convert(x, "double")


LEVELS = 1.5 * 2.0**23  # floats of this size differ by one, and their last bits count from it


def emit_level(fn: Function, x: Value, byte: DType, zero: int, to: DType) -> Value:
    """round(x) + zero of f32, saturated to a byte: as that byte, or as f32 again.

    Bounds are integers: cutting the range before or after rounding is one, and a sum whose last bits are the
    level rounds by itself.
    """
    if byte.is_signed:
        x = fn.select(fn.is_nan(x), constant(x.type, float(-zero)), x)
    low, high = (constant(x.type, float(end - zero)) for end in (byte.min_value, byte.max_value))
    inside = fn.fmin_x86(fn.fmax_x86(x, low), high)  # what is not a number gives the lower end
    if to.is_float:
        level = fn.round_even(inside)
        return fn.fadd(level, constant(x.type, float(zero))) if zero else level
    word = fn.bitcast(fn.fadd(inside, constant(x.type, LEVELS)), like(x.type, "i32"))
    return fn.trunc(fn.value(fn.add(word, zero)), register_type(byte))


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


def _float_to_int(fn: Function, x: Value, to: DType, target: str) -> Value:
    """Towards zero, saturating, NaN to 0: LLVM's saturating conversion has exactly these rules.

    For bytes and 16 bits it is slow; there the range is cut before the conversion.
    """
    if to.bits <= 16:
        low, high = (constant(x.type, float(end)) for end in (to.min_value, to.max_value))
        if to.is_signed:
            x = fn.select(fn.is_nan(x), constant(x.type, 0.0), x)
        inside = fn.fmin_x86(fn.fmax_x86(x, low), high)  # what is not a number gives the lower end
        return fn.trunc(fn.fptosi(inside, "i32"), target)
    kind = "fptosi.sat" if to.is_signed else "fptoui.sat"
    result = like(x.type, target)
    return fn.intrinsic(f"llvm.{kind}.{mangle(result)}.{mangle(x.type)}", result, x)
