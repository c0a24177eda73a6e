"""Arithmetic of the IR text builder: integers that fold, floats and rounding.

Every method takes scalars and vectors alike. A Python number next to a `Value` takes that value's type; two
Python ints are computed at once and give an int (or a bool), so one generator serves static and run-time
sizes. What a target lacks is spelled out in instructions that it has: no call to libm, no unknown intrinsic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from rlx.codegen.native.irtypes import Value, bits, constant, is_float, like, mangle
from rlx.errors import CompileError, UnsupportedError

if TYPE_CHECKING:
    from rlx.codegen.native.irtext import Module

Number = Value | int | float
Int = Value | int
Bool = Value | bool
N = TypeVar("N", bound=Number)

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
    "ult": lambda a, b: a % 2**64 < b % 2**64,
    "ule": lambda a, b: a % 2**64 <= b % 2**64,
    "ugt": lambda a, b: a % 2**64 > b % 2**64,
    "uge": lambda a, b: a % 2**64 >= b % 2**64,
}


def _quotient(a: int, b: int) -> int:
    """Division towards zero, as sdiv does it."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _power_of_two(value: Number) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


class Arithmetic:
    """Computing on values; `Lanes` adds conversions and shuffles, `Function` memory and control."""

    module: Module

    def op(self, type_: str, text: str) -> Value:
        """Emit one instruction and name its result."""
        raise NotImplementedError

    def emit(self, line: str) -> None:
        """Append an instruction without a result."""
        raise NotImplementedError

    # ---- operands

    def value(self, x: Number, type_: str = "i64") -> Value:
        """`x` as a Value: Python numbers become constants of `type_`."""
        if isinstance(x, Value):
            return x
        if isinstance(x, float) and not is_float(type_):
            raise CompileError(f"the float {x!r} stands where a value of type {type_} is needed")
        return constant(type_, x)

    def _same(self, *operands: Number) -> list[Value]:
        """All operands as Values of the one type among them (i64 when all are Python ints)."""
        type_ = next((x.type for x in operands if isinstance(x, Value)), "i64")
        same = [self.value(x, type_) for x in operands]
        for x in same:
            if x.type != type_:
                types = ", ".join(sorted({x.type for x in same}))
                raise CompileError(f"operands of one instruction differ in type: {types}")
        return same

    def _pair(self, a: Number, b: Number) -> tuple[Value, Value]:
        """Two operands as Values of one type."""
        if a.__class__ is Value:
            if b.__class__ is not Value:
                return a, self.value(b, a.type)
            if a.type == b.type:
                return a, b
        elif b.__class__ is Value:
            return self.value(a, b.type), b
        left, right = self._same(a, b)
        return left, right

    def _binary(self, opcode: str, a: Number, b: Number) -> Value:
        if a.__class__ is Value:  # the usual case: without a further call
            type_ = a.type
            if b.__class__ is Value:
                if b.type == type_:
                    return self.op(type_, f"{opcode} {type_} {a.text}, {b.text}")
            elif type_ == "i64" and b.__class__ is int and -(1 << 63) <= b < 1 << 63:
                return self.op("i64", f"{opcode} i64 {a.text}, {b}")
        left, right = self._pair(a, b)
        return self.op(left.type, f"{opcode} {left.type} {left.text}, {right.text}")

    def intrinsic(
        self,
        name: str,
        type_: str,
        *operands: Value,
        feature: str = "",
        twin: Callable[..., Value] | None = None,
    ) -> Value:
        """Call an LLVM intrinsic by full name. With `feature`, refuse on a target without it; `twin` writes
        the same for a target whose code cannot use it."""
        if name not in self.module.declared:
            target = self.module.target
            if feature and not target.has(feature):
                raise UnsupportedError(f"{name} needs {feature}, which target {target.name} lacks")
            if feature and not target.code.has(feature):
                if twin is None:
                    raise UnsupportedError(
                        f"{name} is not emulated; compile for a target that this machine runs"
                    )
                return twin(self, *operands)
            self.module.declare(name, type_, [operand.type for operand in operands])
        listed = ", ".join([f"{x.type} {x.text}" for x in operands])
        text = f"call {type_} @{name}({listed})"
        if type_ != "void":
            return self.op(type_, text)
        self.emit(text)
        return Value("void", "")

    def _overloaded(self, name: str, *operands: Value) -> Value:
        return self.intrinsic(f"llvm.{name}.{mangle(operands[0].type)}", operands[0].type, *operands)

    # ---- integers

    def add(self, a: Int, b: Int) -> Int:
        if a.__class__ is Value and b.__class__ is Value:
            return self._binary("add", a, b)
        if isinstance(a, int):
            if isinstance(b, int):
                return a + b
            if a == 0:
                return b
        elif isinstance(b, int) and b == 0:
            return a
        return self._binary("add", a, b)

    def sub(self, a: Int, b: Int) -> Int:
        if a.__class__ is Value and b.__class__ is Value:
            return self._binary("sub", a, b)
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if isinstance(b, int) and b == 0 else self._binary("sub", a, b)

    def mul(self, a: Int, b: Int) -> Int:
        if a.__class__ is Value and b.__class__ is Value:
            return self._binary("mul", a, b)
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if isinstance(a, int) and a == 1:
            return b
        if isinstance(b, int) and b == 1:
            return a
        if (isinstance(a, int) and a == 0) or (isinstance(b, int) and b == 0):
            if self._pair(a, b)[0].type == "i64":
                return 0
        return self._binary("mul", a, b)

    def _divide(self, opcode: str, fold: Callable[[int, int], int], a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int) and b != 0:
            return fold(a, b)
        if isinstance(b, int) and b == 1 and opcode.endswith("div"):
            return a
        return self._binary(opcode, a, b)

    # Division by zero traps: the caller guards a run-time divisor that may be zero.
    def udiv(self, a: Int, b: Int) -> Int:
        return self._divide("udiv", lambda x, y: x // y, a, b)

    def urem(self, a: Int, b: Int) -> Int:
        return self._divide("urem", lambda x, y: x % y, a, b)

    def sdiv(self, a: Int, b: Int) -> Int:
        """Quotient rounded towards zero."""
        return self._divide("sdiv", _quotient, a, b)

    def srem(self, a: Int, b: Int) -> Int:
        """Remainder with the sign of `a`."""
        return self._divide("srem", lambda x, y: x - _quotient(x, y) * y, a, b)

    def floordiv(self, a: Int, b: Int) -> Int:
        """Quotient rounded down, like Python's `//`."""
        if isinstance(a, int) and isinstance(b, int) and b != 0:
            return a // b
        if _power_of_two(b):
            assert isinstance(b, int)
            return self.ashr(a, b.bit_length() - 1)
        quotient, remainder = self.sdiv(a, b), self.srem(a, b)
        return self.value(self.select(self._off_sign(remainder, b), self.sub(quotient, 1), quotient))

    def floormod(self, a: Int, b: Int) -> Int:
        """Remainder with the sign of `b`, like Python's `%`."""
        if isinstance(a, int) and isinstance(b, int) and b != 0:
            return a % b
        if _power_of_two(b):
            assert isinstance(b, int)
            return self.and_(a, b - 1)
        remainder = self.srem(a, b)
        return self.value(self.select(self._off_sign(remainder, b), self.add(remainder, b), remainder))

    def _off_sign(self, remainder: Int, divisor: Int) -> Bool:
        """Whether a truncating remainder is on the other side of zero than the divisor."""
        if isinstance(divisor, int):
            return self.cmp("slt" if divisor > 0 else "sgt", remainder, 0)
        differ = self.cmp("slt", self.xor(remainder, divisor), 0)
        return self.value(self.and_(self.cmp("ne", remainder, 0), differ), "i1")

    def ceildiv(self, a: Int, b: Int) -> Int:
        """ceil(a / b) of non-negative `a` and positive `b`."""
        return self.udiv(self.add(a, self.sub(b, 1)), b)

    def round_up(self, a: Int, multiple: Int) -> Int:
        """The least multiple of `multiple` that is >= `a` (non-negative)."""
        return self.mul(self.ceildiv(a, multiple), multiple)

    def _extreme(self, name: str, fold: Callable[[int, int], int], a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return fold(a, b)
        return self._overloaded(name, *self._pair(a, b))

    def smin(self, a: Int, b: Int) -> Int:
        return self._extreme("smin", min, a, b)

    def smax(self, a: Int, b: Int) -> Int:
        return self._extreme("smax", max, a, b)

    def umin(self, a: Int, b: Int) -> Int:
        return self._extreme("umin", min, a, b)

    def umax(self, a: Int, b: Int) -> Int:
        return self._extreme("umax", max, a, b)

    def _logic(self, opcode: str, fold: Callable[[int, int], int], a: Number, b: Number) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return fold(a, b)
        return self._binary(opcode, a, b)

    def and_(self, a: Int, b: Int) -> Int:
        """Bitwise and; of two masks or truth values, both."""
        if isinstance(a, bool):
            return b if a else a
        if isinstance(b, bool):
            return a if b else b
        return self._logic("and", lambda x, y: x & y, a, b)

    def or_(self, a: Int, b: Int) -> Int:
        if isinstance(a, bool):
            return a if a else b
        if isinstance(b, bool):
            return b if b else a
        return self._logic("or", lambda x, y: x | y, a, b)

    def xor(self, a: Int, b: Int) -> Int:
        return self._logic("xor", lambda x, y: x ^ y, a, b)

    def not_(self, a: Int) -> Int:
        """Bitwise not; of a truth value, its opposite."""
        return not a if isinstance(a, bool) else self.xor(a, True if self.value(a).element == "i1" else -1)

    def shl(self, a: Int, b: Int) -> Int:
        return a if isinstance(b, int) and b == 0 else self._logic("shl", lambda x, y: x << y, a, b)

    def lshr(self, a: Int, b: Int) -> Int:
        if isinstance(b, int) and b == 0:
            return a
        return self._logic("lshr", lambda x, y: (x % 2**64) >> y, a, b)

    def ashr(self, a: Int, b: Int) -> Int:
        return a if isinstance(b, int) and b == 0 else self._logic("ashr", lambda x, y: x >> y, a, b)

    def cmp(self, predicate: str, a: Number, b: Number) -> Bool:
        """Integer comparison: eq ne slt sle sgt sge ult ule ugt uge. Two ints give a Python bool."""
        if isinstance(a, int) and isinstance(b, int):
            return _COMPARE[predicate](a, b)
        if a.__class__ is Value and a.type == "i64":
            if b.__class__ is Value:
                if b.type == "i64":
                    return self.op("i1", f"icmp {predicate} i64 {a.text}, {b.text}")
            elif b.__class__ is int and -(1 << 63) <= b < 1 << 63:
                return self.op("i1", f"icmp {predicate} i64 {a.text}, {b}")
        left, right = self._pair(a, b)
        result = "i1" if left.type == "i64" else like(left.type, "i1")
        return self.op(result, f"icmp {predicate} {left.type} {left.text}, {right.text}")

    def ult(self, a: Int, b: Int) -> Bool:
        """Whether a < b, as numbers without a sign: of a positive b, whether 0 <= a < b."""
        return self.cmp("ult", a, b)

    def ule(self, a: Int, b: Int) -> Bool:
        """Whether a <= b, as numbers without a sign."""
        return self.cmp("ule", a, b)

    def ugt(self, a: Int, b: Int) -> Bool:
        """Whether a > b, as numbers without a sign."""
        return self.cmp("ugt", a, b)

    def uge(self, a: Int, b: Int) -> Bool:
        """Whether a >= b, as numbers without a sign."""
        return self.cmp("uge", a, b)

    @overload
    def select(self, condition: Value, a: Number, b: Number) -> Value: ...
    @overload
    def select(self, condition: Bool, a: Value, b: Value) -> Value: ...
    @overload
    def select(self, condition: Bool, a: Int, b: Int) -> Int: ...
    @overload
    def select(self, condition: bool, a: N, b: N) -> N: ...
    def select(self, condition: Bool, a: Number, b: Number) -> Number:
        """`a` where the condition holds, else `b`; lanes are chosen one by one under a vector condition."""
        if isinstance(condition, bool):
            return a if condition else b
        left, right = self._pair(a, b)
        type_ = left.type
        if self.module.relaxed and condition.width > 1 and is_float(type_):
            # LLVM would make the lesser of two a relaxed minimum, which may lose a NaN. Of bits it does not.
            words = like(type_, f"i{bits(type_)}")
            left, right = (self.op(words, f"bitcast {x} to {words}") for x in (left, right))
            mask = self.op(words, f"sext {condition} to {words}")
            differing = self.op(words, f"xor {left}, {right.text}")
            taken = self.op(words, f"and {differing}, {mask.text}")
            return self.op(type_, f"bitcast {self.op(words, f'xor {taken}, {right.text}')} to {type_}")
        chosen = f"{type_} {left.text}, {type_} {right.text}"
        return self.op(type_, f"select {condition.type} {condition.text}, {chosen}")

    # ---- floats

    def fadd(self, a: Number, b: Number) -> Value:
        return self._binary("fadd", a, b)

    def fsub(self, a: Number, b: Number) -> Value:
        return self._binary("fsub", a, b)

    def fmul(self, a: Number, b: Number) -> Value:
        return self._binary("fmul", a, b)

    def fdiv(self, a: Number, b: Number) -> Value:
        return self._binary("fdiv", a, b)

    def fneg(self, a: Value) -> Value:
        return self.op(a.type, f"fneg {a}")

    def fabs(self, a: Value) -> Value:
        return self._overloaded("fabs", a)

    def copysign(self, magnitude: Number, sign: Value) -> Value:
        return self._overloaded("copysign", *self._same(magnitude, sign))

    def sqrt(self, a: Value) -> Value:
        return self._overloaded("sqrt", a)

    def fma(self, a: Number, b: Number, c: Number) -> Value:
        """a * b + c: rounded once where the target has FMA, else twice (never a call to libm)."""
        if a.__class__ is Value and b.__class__ is Value and c.__class__ is Value:
            type_ = a.type
            name = f"llvm.fma.{mangle(type_)}"
            if name in self.module.declared and type_ == b.type == c.type:  # by an earlier call of this
                operands = f"{type_} {a.text}, {type_} {b.text}, {type_} {c.text}"
                return self.op(type_, f"call {type_} @{name}({operands})")
        target = self.module.target
        if target.may_fuse:
            return self._binary("fadd contract", self._binary("fmul contract", a, b), c)
        if not target.has_fma:
            return self.fadd(self.fmul(a, b), c)
        return self._overloaded("fma", *self._same(a, b, c))

    def fcmp(self, predicate: str, a: Number, b: Number) -> Value:
        """Float comparison: oeq one olt ole ogt oge ord; une ult ... uno hold for NaN too."""
        left, right = self._pair(a, b)
        return self.op(like(left.type, "i1"), f"fcmp {predicate} {left.type} {left.text}, {right.text}")

    def is_nan(self, a: Value) -> Value:
        return self.fcmp("uno", a, a)

    def is_number(self, a: Value) -> Value:
        """Whether it is no NaN."""
        return self.fcmp("ord", a, a)

    def fmin_x86(self, a: Number, b: Number) -> Value:
        """a < b ? a : b, one instruction on x86: gives `b` when either is NaN."""
        return self.select(self.fcmp("olt", a, b), a, b)

    def fmax_x86(self, a: Number, b: Number) -> Value:
        """a > b ? a : b, one instruction on x86: gives `b` when either is NaN."""
        return self.select(self.fcmp("ogt", a, b), a, b)

    def fmin(self, a: Number, b: Number) -> Value:
        """Smaller of the two, NaN when either is NaN."""
        left, right = self._same(a, b)
        return self.select(self.is_nan(left), left, self.fmin_x86(left, right))

    def fmax(self, a: Number, b: Number) -> Value:
        """Larger of the two, NaN when either is NaN."""
        left, right = self._same(a, b)
        return self.select(self.is_nan(left), left, self.fmax_x86(left, right))

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's scheme, highest power first."""
        total = constant(x.type, coefficients[0])
        for c in coefficients[1:]:
            total = self.fma(total, x, c)
        return total

    # ---- rounding to integers

    def floor(self, a: Value) -> Value:
        return self._round("floor", a)

    def ceil(self, a: Value) -> Value:
        return self._round("ceil", a)

    def trunc_float(self, a: Value) -> Value:
        return self._round("trunc", a)

    def round_even(self, a: Value) -> Value:
        """To the nearest integer, ties to even."""
        return self._round("roundeven", a)

    def _round(self, name: str, a: Value) -> Value:
        target = self.module.target
        if target.has("sse4.1") or not target.x86:
            return self._overloaded(name, a)
        return self._round_sse2(name, a)

    def _round_sse2(self, name: str, a: Value) -> Value:
        """Rounding without the instruction: adding and removing 2**mantissa rounds to even, then correct.

        Values without a fraction (and NaN) are kept, and the sign too, so that -0.3 becomes -0.0.
        """
        big = 2.0 ** (23 if a.element == "float" else 52)
        size = self.fabs(a)
        near = self.copysign(self.fsub(self.fadd(size, big), big), a)
        if name == "floor":
            near = self.select(self.fcmp("ogt", near, a), self.fsub(near, 1.0), near)
        elif name == "ceil":
            near = self.select(self.fcmp("olt", near, a), self.fadd(near, 1.0), near)
        elif name == "trunc":
            over = self.fcmp("ogt", self.fabs(near), size)
            near = self.select(over, self.fsub(near, self.copysign(1.0, a)), near)
        return self.select(self.fcmp("olt", size, big), self.copysign(near, a), a)
