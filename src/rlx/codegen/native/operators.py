"""Operators and items of the notation: an instruction where an operand is a `Value`, else what Python does.

Each function takes the builder `f` first. `syntax.py` writes the calls, as it does those of `control.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Protocol, SupportsFloat, SupportsIndex, TypeVar

from rlx.codegen.native.irops import Int, Number
from rlx.codegen.native.irtext import Function, Value
from rlx.codegen.native.irtypes import constant, is_float, size_bytes
from rlx.errors import CompileError

T = TypeVar("T")
Operator = Callable[[Function, object, object], object]


def number(x: object) -> Number:
    """`x`, which an instruction takes: a value, or a number of Python."""
    if isinstance(x, (Value, int, float)):
        return x
    if isinstance(x, SupportsFloat):  # a number of NumPy
        return operator.index(x) if isinstance(x, SupportsIndex) else float(x)
    raise CompileError(f"an instruction takes values and numbers, not {x!r}")


def _arithmetic(name: str, on_ints: str, on_floats: str) -> Operator:
    known = getattr(operator, name)
    ints, floats = (getattr(Function, method) if method else None for method in (on_ints, on_floats))
    code = on_ints.rstrip("_") if not on_ints.startswith("floor") else ""

    def apply(f: Function, a: object, b: object) -> object:
        if a.__class__ is Value:
            type_ = a.type
            if type_ == "i64" and code:
                # As they are, without a further call, unless the builder may fold or refuse.
                if b.__class__ is Value:
                    if b.type == "i64":
                        return f.op("i64", f"{code} i64 {a.text}, {b.text}")
                elif b.__class__ is int and 1 < b < 1 << 63:
                    return f.op("i64", f"{code} i64 {a.text}, {b}")
            elif on_floats and is_float(type_):
                if b.__class__ is Value:
                    if b.type == type_:
                        return f.op(type_, f"{on_floats} {type_} {a.text}, {b.text}")
                elif b.__class__ is float:
                    return f.op(type_, f"{on_floats} {type_} {a.text}, {constant(type_, b).text}")
        elif b.__class__ is Value:
            type_ = b.type
        else:
            return known(a, b)
        method = floats if type_ != "i64" and is_float(type_) else ints
        if method is None:
            raise CompileError(f"{name} is not defined for {type_}")
        return method(f, a, b)

    return apply


add = _arithmetic("add", "add", "fadd")
sub = _arithmetic("sub", "sub", "fsub")
mul = _arithmetic("mul", "mul", "fmul")
div = _arithmetic("truediv", "", "fdiv")
floordiv = _arithmetic("floordiv", "floordiv", "")
mod = _arithmetic("mod", "floormod", "")
bit_and = _arithmetic("and_", "and_", "")
bit_or = _arithmetic("or_", "or_", "")
bit_xor = _arithmetic("xor", "xor", "")
shift_left = _arithmetic("lshift", "shl", "")
shift_right = _arithmetic("rshift", "ashr", "")


def _comparison(name: str, on_ints: str, on_floats: str, on_pointers: str) -> Operator:
    known = getattr(operator, name)

    def apply(f: Function, a: object, b: object) -> object:
        if a.__class__ is Value:
            type_ = a.type
            if type_ == "i64":
                if b.__class__ is Value:
                    if b.type == "i64":
                        return f.op("i1", f"icmp {on_ints} i64 {a.text}, {b.text}")
                elif b.__class__ is int and -(1 << 63) <= b < 1 << 63:
                    return f.op("i1", f"icmp {on_ints} i64 {a.text}, {b}")
        elif b.__class__ is Value:
            type_ = b.type
        else:
            return known(a, b)
        if is_float(type_):
            return f.fcmp(on_floats, number(a), number(b))
        return f.cmp(on_pointers if type_ == "ptr" else on_ints, number(a), number(b))

    return apply


eq = _comparison("eq", "eq", "oeq", "eq")
ne = _comparison("ne", "ne", "une", "ne")
lt = _comparison("lt", "slt", "olt", "ult")
le = _comparison("le", "sle", "ole", "ule")
gt = _comparison("gt", "sgt", "ogt", "ugt")
ge = _comparison("ge", "sge", "oge", "uge")


def _extreme(known: Callable[..., object], on_ints: str, on_floats: str) -> Callable[..., object]:
    def apply(f: Function, *args: object) -> object:
        if not any(a.__class__ is Value for a in args):
            return known(*args)
        result = args[0]
        for other in args[1:]:
            value = result if result.__class__ is Value else other
            floats = value.__class__ is Value and is_float(value.type)
            result = getattr(f, on_floats if floats else on_ints)(result, other)
        return result

    return apply


minimum = _extreme(min, "smin", "fmin")
maximum = _extreme(max, "smax", "fmax")


def neg(f: Function, a: Number) -> Number:
    if not isinstance(a, Value):
        return -a
    return f.fneg(a) if is_float(a.type) else f.sub(0, a)


def invert(f: Function, a: Int) -> Int:
    return f.not_(a) if isinstance(a, Value) else ~a


def not_(f: Function, a: object) -> object:
    return f.not_(truth(a)) if a.__class__ is Value else not a


def truth(x: Value) -> Value:
    """A condition at run time, checked."""
    if x.type != "i1":
        raise CompileError(f"a condition is a truth value, not {x.type}; compare it with 0")
    return x


def known(f: Function, x: T) -> T:
    """`x`, which Python must know while it writes the code."""
    if x.__class__ is Value:
        raise CompileError(f"this is decided while the code is written, but {x} is known at run time only")
    return x


iterable = known


# ---- items


class Items(Protocol):
    """A list or another object of Python with items."""

    def __getitem__(self, index: Int, /) -> object: ...
    def __setitem__(self, index: Int, x: object, /) -> None: ...


class InMemory:
    """An object of Python whose items are in memory at run time: `x[i]` writes a load, `x[i] = y` a store.

    Its `__getitem__` and `__setitem__` are functions of the notation, so i may be known at run time only.
    """

    __slots__ = ()


def item(f: Function, held: Value | Items, index: Int) -> object:
    """`held[index]`: of a pointer, the 8-byte word at that index."""
    if held.__class__ is list and index.__class__ is int:
        return held[index]
    if isinstance(held, Value):
        return f.load("i64", f.gep(_pointer(held), index, "i64"), 8)
    if index.__class__ is Value and not isinstance(held, InMemory):
        known(f, index)
    return held[index]


def set_item(f: Function, held: Value | Items, index: Int, x: object) -> None:
    """`held[index] = x`: of a pointer, stores an 8-byte word."""
    if isinstance(held, Value):
        value = f.value(number(x))
        if size_bytes(value.type) * value.width != 8:
            raise CompileError(f"p[i] = x stores a word of 8 bytes, not {value.type}; use store(x, p)")
        f.store(value, f.gep(_pointer(held), index, "i64"), 8)
    elif isinstance(held, InMemory):
        held[index] = x
    elif f.regions:
        raise CompileError(
            "an item of a Python list cannot change inside a run-time branch or loop; assign a new list"
        )
    else:
        held[known(f, index)] = x


def update_item(f: Function, apply: Operator, held: Value | Items, index: Int, x: object) -> None:
    """`held[index] += x`, and the like."""
    set_item(f, held, index, apply(f, item(f, held, index), x))


def _pointer(x: Value) -> Value:
    if x.type != "ptr":
        raise CompileError(f"only a pointer has items, not {x.type}")
    return x
