"""Vectorised math: every function as straight vector code, for f32 and f64 and any number of lanes.

`apply(f, "exp", x)` computes one function. Cheap ones are written in place; the rest become one internal
function per module and type, so that a kernel that uses them often stays small. NaN, infinities, denormals
and signed zeros come out as in NumPy. Errors are measured by the tests and listed in docs/vmath.md.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.native import vmath_exp, vmath_trig
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, mangle
from rlx.codegen.native.notation import write
from rlx.codegen.native.words import ceil, floor, round_even, sqrt, trunc_float
from rlx.errors import CompileError, DTypeError
from rlx.records import dataclass

Emit = Callable[..., Value]


@dataclass(frozen=True)
class MathFunction:
    """One function: how many operands it takes, how to write it, and whether in place."""

    name: str
    operands: int
    emit: Emit
    inline: bool


def _made(*rows: tuple[str, int, Emit, bool]) -> dict[str, MathFunction]:
    return {row[0]: MathFunction(*row) for row in rows}


FUNCTIONS = _made(
    ("exp", 1, vmath_exp.exp, True),
    ("exp2", 1, vmath_exp.exp2, True),
    ("expm1", 1, vmath_exp.expm1, True),
    ("sigmoid", 1, vmath_exp.sigmoid, True),
    ("tanh", 1, vmath_exp.tanh, True),
    ("sinh", 1, vmath_exp.sinh, False),
    ("cosh", 1, vmath_exp.cosh, False),
    ("log", 1, vmath_exp.log, True),
    ("log2", 1, vmath_exp.log2, True),
    ("log10", 1, vmath_exp.log10, True),
    ("log1p", 1, vmath_exp.log1p, False),
    ("asinh", 1, vmath_exp.asinh, False),
    ("acosh", 1, vmath_exp.acosh, False),
    ("atanh", 1, vmath_exp.atanh, False),
    ("erf", 1, vmath_exp.erf, True),
    ("erfc", 1, vmath_exp.erfc, False),
    ("pow", 2, vmath_exp.power, False),
    ("sqrt", 1, sqrt, True),
    ("rsqrt", 1, vmath_exp.rsqrt, True),
    ("sin", 1, vmath_trig.sin, False),
    ("cos", 1, vmath_trig.cos, False),
    ("tan", 1, vmath_trig.tan, False),
    ("asin", 1, vmath_trig.asin, False),
    ("acos", 1, vmath_trig.acos, False),
    ("atan", 1, vmath_trig.atan, False),
    ("atan2", 2, vmath_trig.atan2, False),
    ("floor", 1, floor, True),
    ("ceil", 1, ceil, True),
    ("round", 1, round_even, True),
    ("trunc", 1, trunc_float, True),
)


def apply(f: Function, name: str, *operands: Value, inline: bool | None = None) -> Value:
    """The function `name` of `operands`, written into `f`. `inline` overrides the choice of place.

    >>> from rlx.codegen.native.irtext import Module
    >>> from rlx.target.cpu import resolve
    >>> f = Module(resolve("x86-64-v3")).function("f", [("<8 x float>", "x")], returns="<8 x float>")
    >>> apply(f, "tanh", f.args[0]).type
    '<8 x float>'
    """
    if name not in FUNCTIONS:
        raise CompileError(f"there is no math function {name!r}: choose one of {', '.join(FUNCTIONS)}")
    function = FUNCTIONS[name]
    if len(operands) != function.operands:
        raise CompileError(f"math function {name!r} takes {function.operands} operands, not {len(operands)}")
    type_ = operands[0].type
    if operands[0].element not in ("float", "double") or any(x.type != type_ for x in operands):
        given = ", ".join(x.type for x in operands)
        raise DTypeError(
            f"math function {name!r} takes float or double lanes of one type, not {given}: convert first"
        )
    if function.inline if inline is None else inline:
        return write(f, function.emit, *operands)
    return f.call(_shared(f, function, type_), operands, type_)


def _shared(f: Function, function: MathFunction, type_: str) -> str:
    """Name of the module's own copy of the function for one type."""
    name = f"rlx_{function.name}_{mangle(type_)}"
    if not f.module.defines(name):
        params = [(type_, f"x{i}") for i in range(function.operands)]
        made = f.module.function(name, params, internal=True, noinline=True, returns=type_)
        made.return_(write(made, function.emit, *made.args))
    return name
