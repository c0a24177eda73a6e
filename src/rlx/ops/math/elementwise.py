"""Elementwise primitives: one entry of the table is one op, with its meaning, gradient and domain.

All broadcast like NumPy. Each is also a scalar primitive of kernel bodies, under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlx.ir.attr import Attr, boolean, dtype_kind, optional
from rlx.ir.dim import Dim
from rlx.ir.dtype import BOOL, DType, dtype
from rlx.ir.dtype import convert as convert_array
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Tensor
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import call, convert, load, primitive
from rlx.ops.rules import (
    Accepts,
    align_batched,
    broadcast_index,
    broadcast_shapes,
    in_f32,
    is_boolean,
    is_computable,
    is_floating,
    is_integer,
    is_number,
    is_real,
    is_real_float,
    need_dtype,
    same_dtype,
    unbroadcast,
)

Gradient = Callable[..., Sequence[Tensor | None]]
CONSTANT_PIECES = "its value is constant between jumps; the gradient is zero or does not exist"


class Elementwise(Op):
    """Base of the table's ops: everything but meaning and gradient is the same for all."""

    family = "elementwise"
    accepts: Accepts
    result: Callable[..., DType]
    work: int = 1

    def infer(self, *types: TensorType) -> TensorType:
        for t in types:
            need_dtype(self.name, t, type(self).accepts)
        same_dtype(self.name, types)
        out = type(self).result(*(t.dtype for t in types))
        return TensorType(out, broadcast_shapes(self.name, [t.shape for t in types]))

    def batch(self, flags: Sequence[bool], *operands: Node) -> Node:
        made: Node = self(*align_batched(flags, operands))
        return made

    def lower(self, *types: TensorType) -> Form:
        out = self.infer(*types)
        loads = [load(i, broadcast_index(t.shape, out.shape), t.dtype) for i, t in enumerate(types)]
        return Map(out.shape, call(self.name, *loads))

    def cost(self, *types: TensorType) -> Dim:
        return self.infer(*types).numel * self.work


def _result_same(*dtypes: DType) -> DType:
    return dtypes[0]


def _result_bool(*dtypes: DType) -> DType:
    return BOOL


def _result_real(*dtypes: DType) -> DType:
    return dtype({"c64": "f32", "c128": "f64"}.get(dtypes[0].name, dtypes[0]))


def _result_second(*dtypes: DType) -> DType:
    return dtypes[1]


def _sample_dtype(accepts: Accepts) -> str:
    return "i32" if accepts is is_integer else "bool" if accepts is is_boolean else "f32"


def make_samples(
    arity: int, accepts: Accepts, ranges: Sequence[tuple[float, float]], smooth: bool
) -> list[Sample]:
    """Samples of a broadcasting op whose operands are in `ranges`."""
    kind = _sample_dtype(accepts)
    shapes: dict[int, list[tuple[str, ...]]] = {
        1: [("[]",), ("[1]",), ("[7]",), ("[2,0]",), ("[3,17]",)],
        2: [("[]", "[]"), ("[5]", "[5]"), ("[2,1,3]", "[4,1]"), ("[0,3]", "[3]"), ("[33]", "[1]")],
        3: [("[5]", "[5]", "[5]"), ("[2,1]", "[3]", "[]"), ("[0]", "[0]", "[1]")],
    }
    out = [
        Sample(
            tuple(Arg(kind + s, lo, hi, distinct=True) for s, (lo, hi) in zip(row, ranges, strict=True)),
            grad=smooth,
        )
        for row in shapes[arity]
    ]
    if kind == "f32":
        special = tuple(Arg("f32[24]", lo, hi, special=True) for lo, hi in ranges)
        out.append(Sample(special, grad=False))
        symbolic = tuple(Arg("f32[n,3]", lo, hi, distinct=True) for lo, hi in ranges)
        out.append(Sample(symbolic, grad=False))
    if accepts is is_number or accepts is is_real:
        out.append(Sample(tuple(Arg("i32[6]", lo, hi) for lo, hi in ranges), grad=False))
    return out


def table(
    name: str,
    arity: int,
    ref: Callable[..., np.ndarray],
    grad: Gradient | str,
    doc: str,
    *,
    accepts: Accepts = is_floating,
    result: Callable[..., DType] = _result_same,
    ranges: Sequence[tuple[float, float]] | None = None,
    cost: int = 1,
    smooth: bool = True,
) -> Op:
    """Declare one elementwise op. `grad(g, y, *xs)` gives gradients before un-broadcasting, or is the
    reason why there is none; `ranges` is the domain of each operand in samples."""
    meaning = in_f32(ref)
    primitive(name, arity, meaning, result, cost)
    domain = ranges or [(-2.0, 2.0)] * arity
    differentiable = not isinstance(grad, str)

    def vjp(self: Op, g: Node, y: Node, *operands: Node) -> list[Tensor]:
        assert not isinstance(grad, str)
        return [
            None if d is None else unbroadcast(d, x)
            for d, x in zip(grad(g, y, *operands), operands, strict=True)
        ]

    members: dict[str, object] = {
        "__doc__": doc,
        "__module__": __name__,
        "name": name,
        "scalar": name,
        "arity": arity,
        "accepts": staticmethod(accepts),
        "result": staticmethod(result),
        "work": cost,
        "ref": staticmethod(meaning),
        "samples": staticmethod(lambda: make_samples(arity, accepts, domain, smooth and differentiable)),
        "not_differentiable": None if differentiable else grad,
    }
    if differentiable:
        members["vjp"] = vjp
    return declare(type(name, (Elementwise,), members))


def _per_element(f: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    ufunc = np.frompyfunc(f, 1, 1)

    def ref(x: np.ndarray) -> np.ndarray:
        return np.asarray(ufunc(x), dtype=x.dtype).reshape(x.shape)

    return ref


def _nonzero(y: np.ndarray) -> np.ndarray:
    return np.where(y == 0, np.ones_like(y), y)


def _int_div(quotient: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Integer division: by zero gives 0, never a trap; the one overflow (min / -1) wraps."""

    def ref(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind not in "iu":
            return quotient(x, y)
        return np.where(y == 0, np.zeros((), x.dtype), quotient(x, _nonzero(y)))

    return ref


def _trunc_div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu":
        return np.asarray(np.trunc(x / y))
    quotient = np.floor_divide(x, y)
    inexact = quotient * y != x
    return np.asarray(quotient + (inexact & ((x < 0) != (y < 0)))).astype(x.dtype)


def _pow(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu":
        # An exponent for every element: of a single 1/2 NumPy makes a root, which differs at -0 and -inf.
        base, exponent = np.broadcast_arrays(x, y)
        out = np.power(base, np.array(exponent, ndmin=1)).reshape(base.shape)
        return np.asarray(np.where(exponent == 2, base * base, out))
    whole = np.power(x, np.maximum(y, 0))
    inverse = np.where(x == 1, 1, np.where(x == -1, np.where(y % 2 == 0, 1, -1), 0))
    return np.where(y < 0, inverse, whole).astype(x.dtype)


def _shift(
    direction: Callable[..., np.ndarray], overflow: Callable[[np.ndarray], np.ndarray]
) -> Callable[..., np.ndarray]:
    def ref(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        bits = x.dtype.itemsize * 8
        inside = (y >= 0) & (y < bits)
        shifted = direction(x, np.where(inside, y, 0).astype(x.dtype))
        return np.where(inside, shifted, overflow(x).astype(x.dtype))

    return ref


def _sign(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.sign(x))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / np.sqrt(x)).astype(x.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + small), small / (1 + small))).astype(x.dtype)


def _is_tie(x: Node, y: Node) -> Node:
    return cast(equal(x, y), dtype=x.dtype)


SMALL, POSITIVE, UNIT = [(-2.0, 2.0)], [(0.1, 3.0)], [(-0.9, 0.9)]
_ln2, _ln10 = math.log(2.0), math.log(10.0)

# fmt: off
# -- unary, numbers
neg = table("neg", 1, np.negative, lambda g, y, x: [-g], "-x.", accepts=is_number)
abs = table("abs", 1, np.abs, lambda g, y, x: [g * sign(x)], "|x|.", accepts=is_real)
sign: Op = table("sign", 1, _sign, CONSTANT_PIECES, "-1, 0 or 1; NaN stays NaN.", accepts=is_real)
floor = table("floor", 1, np.floor, CONSTANT_PIECES, "Largest integer <= x.", accepts=is_real_float)
ceil = table("ceil", 1, np.ceil, CONSTANT_PIECES, "Smallest integer >= x.", accepts=is_real_float)
round = table("round", 1, np.rint, CONSTANT_PIECES, "Nearest integer, halves to even.", accepts=is_real_float)
trunc = table("trunc", 1, np.trunc, CONSTANT_PIECES, "Towards zero.", accepts=is_real_float)
is_nan = table("is_nan", 1, np.isnan, CONSTANT_PIECES, "True where x is NaN.",
               accepts=is_real_float, result=_result_bool)
is_inf = table("is_inf", 1, np.isinf, CONSTANT_PIECES, "True where x is inf or -inf.",
               accepts=is_real_float, result=_result_bool)
logical_not = table("logical_not", 1, np.logical_not, CONSTANT_PIECES, "not x.", accepts=is_boolean)
bitwise_not = table("bitwise_not", 1, np.invert, CONSTANT_PIECES, "Flip every bit.", accepts=is_integer)

# -- unary, floating point
exp = table("exp", 1, np.exp, lambda g, y, x: [g * y], "e**x.", accepts=is_real_float, cost=10)
exp_difference = table("exp_difference", 2, lambda x, y: np.exp(x - y), lambda g, y, a, b: [g * y, -(g * y)],
                       "e**(x - y), as exact as the rounded difference allows.",
                       accepts=is_real_float, cost=10)
exp2 = table("exp2", 1, np.exp2, lambda g, y, x: [g * y * _ln2], "2**x.", accepts=is_real_float, cost=10)
expm1 = table("expm1", 1, np.expm1, lambda g, y, x: [g * (y + 1.0)], "e**x - 1, exact near 0.",
              accepts=is_real_float, cost=14)
log = table("log", 1, np.log, lambda g, y, x: [g / x], "Natural logarithm.",
            accepts=is_real_float, ranges=POSITIVE, cost=14)
log2 = table("log2", 1, np.log2, lambda g, y, x: [g / (x * _ln2)], "Logarithm to base 2.",
             accepts=is_real_float, ranges=POSITIVE, cost=14)
log10 = table("log10", 1, np.log10, lambda g, y, x: [g / (x * _ln10)], "Logarithm to base 10.",
              accepts=is_real_float, ranges=POSITIVE, cost=14)
log1p = table("log1p", 1, np.log1p, lambda g, y, x: [g / (x + 1.0)], "log(1 + x), exact near 0.",
              accepts=is_real_float, ranges=POSITIVE, cost=16)
sqrt = table("sqrt", 1, np.sqrt, lambda g, y, x: [g / (y * 2.0)], "Square root.",
             accepts=is_real_float, ranges=POSITIVE, cost=4)
rsqrt = table("rsqrt", 1, _rsqrt, lambda g, y, x: [g * y / x * -0.5], "1 / sqrt(x).",
              accepts=is_real_float, ranges=POSITIVE, cost=6)
sin = table("sin", 1, np.sin, lambda g, y, x: [g * cos(x)], "Sine of radians.",
            accepts=is_real_float, cost=16)
cos: Op = table("cos", 1, np.cos, lambda g, y, x: [-g * sin(x)], "Cosine of radians.",
                accepts=is_real_float, cost=16)
tan = table("tan", 1, np.tan, lambda g, y, x: [g * (y * y + 1.0)], "Tangent of radians.",
            accepts=is_real_float, ranges=[(-1.2, 1.2)], cost=24)
asin = table("asin", 1, np.arcsin, lambda g, y, x: [g * rsqrt(1.0 - x * x)], "Inverse sine.",
             accepts=is_real_float, ranges=UNIT, cost=20)
acos = table("acos", 1, np.arccos, lambda g, y, x: [-g * rsqrt(1.0 - x * x)], "Inverse cosine.",
             accepts=is_real_float, ranges=UNIT, cost=20)
atan = table("atan", 1, np.arctan, lambda g, y, x: [g / (x * x + 1.0)], "Inverse tangent.",
             accepts=is_real_float, cost=20)
sinh = table("sinh", 1, np.sinh, lambda g, y, x: [g * cosh(x)], "Hyperbolic sine.",
             accepts=is_real_float, cost=20)
cosh: Op = table("cosh", 1, np.cosh, lambda g, y, x: [g * sinh(x)], "Hyperbolic cosine.",
                 accepts=is_real_float, cost=20)
tanh = table("tanh", 1, np.tanh, lambda g, y, x: [g * (1.0 - y * y)], "Hyperbolic tangent.",
             accepts=is_real_float, cost=16)
asinh = table("asinh", 1, np.arcsinh, lambda g, y, x: [g * rsqrt(x * x + 1.0)], "Inverse hyperbolic sine.",
              accepts=is_real_float, cost=24)
acosh = table("acosh", 1, np.arccosh, lambda g, y, x: [g * rsqrt(x * x - 1.0)], "Inverse hyperbolic cosine.",
              accepts=is_real_float, ranges=[(1.2, 4.0)], cost=24)
atanh = table("atanh", 1, np.arctanh, lambda g, y, x: [g / (1.0 - x * x)], "Inverse hyperbolic tangent.",
              accepts=is_real_float, ranges=UNIT, cost=24)
erf = table("erf", 1, _per_element(math.erf), lambda g, y, x: [g * exp(-x * x) * (2.0 / math.sqrt(math.pi))],
            "Error function.", accepts=is_real_float, cost=14)
erfc = table("erfc", 1, _per_element(math.erfc),
             lambda g, y, x: [g * exp(-x * x) * (-2.0 / math.sqrt(math.pi))],
             "1 - erf(x), exact in the tail.", accepts=is_real_float, cost=24)
sigmoid = table("sigmoid", 1, _sigmoid, lambda g, y, x: [g * y * (1.0 - y)], "1 / (1 + exp(-x)).",
                accepts=is_real_float, cost=14)

# -- binary, numbers
add = table("add", 2, np.add, lambda g, y, a, b: [g, g], "a + b.", accepts=is_number)
sub = table("sub", 2, np.subtract, lambda g, y, a, b: [g, -g], "a - b.", accepts=is_number)
mul = table("mul", 2, np.multiply, lambda g, y, a, b: [g * b, g * a], "a * b.", accepts=is_number)
div = table("div", 2, np.divide, lambda g, y, a, b: [g / b, -g * y / b],
            "a / b, floating point; integers: floor_div or trunc_div.",
            ranges=[(-2.0, 2.0), (0.5, 2.0)], cost=4)
floor_div = table("floor_div", 2, _int_div(np.floor_divide), CONSTANT_PIECES,
                  "Quotient rounded down; an integer divided by 0 is 0.",
                  accepts=is_real, ranges=[(-9.0, 9.0), (1.0, 4.0)], cost=6)
trunc_div = table("trunc_div", 2, _int_div(_trunc_div), CONSTANT_PIECES,
                  "Quotient rounded towards 0; an integer divided by 0 is 0.",
                  accepts=is_real, ranges=[(-9.0, 9.0), (1.0, 4.0)], cost=6)
mod = table("mod", 2, _int_div(np.mod), lambda g, y, a, b: [g, -g * floor_div(a, b)],
            "Remainder with the sign of b; an integer modulo 0 is 0.",
            accepts=is_real, ranges=[(-8.7, 9.0), (1.53, 4.0)], cost=8)
fmod = table("fmod", 2, _int_div(np.fmod), lambda g, y, a, b: [g, -g * trunc_div(a, b)],
             "Remainder with the sign of a; an integer modulo 0 is 0.",
             accepts=is_real, ranges=[(-8.7, 9.0), (1.53, 4.0)], cost=8)
pow: Op = table("pow", 2, _pow,
                lambda g, y, a, b: [g * b * pow(a, b - 1.0), g * y * log(where(a > 0.0, a, 1.0))],
                "a ** b.", accepts=is_real, ranges=[(0.2, 2.0), (-2.0, 2.0)], cost=30)
maximum = table("maximum", 2, np.maximum,
                lambda g, y, a, b: [g * cast(a > b, dtype=g.dtype) + g * _is_tie(a, b) * 0.5,
                                    g * cast(b > a, dtype=g.dtype) + g * _is_tie(a, b) * 0.5],
                "The larger; NaN wins. At a tie the gradient is shared.", accepts=is_real)
minimum = table("minimum", 2, np.minimum,
                lambda g, y, a, b: [g * cast(a < b, dtype=g.dtype) + g * _is_tie(a, b) * 0.5,
                                    g * cast(b < a, dtype=g.dtype) + g * _is_tie(a, b) * 0.5],
                "The smaller; NaN wins. At a tie the gradient is shared.", accepts=is_real)
atan2 = table("atan2", 2, np.arctan2, lambda g, y, a, b: [g * b / (a * a + b * b), -g * a / (a * a + b * b)],
              "Angle of the point (b, a).", accepts=is_real_float, ranges=[(0.2, 2.0), (-2.0, 2.0)], cost=30)

# -- comparisons and logic
equal = table("equal", 2, np.equal, CONSTANT_PIECES, "a == b.", accepts=is_computable, result=_result_bool)
not_equal = table("not_equal", 2, np.not_equal, CONSTANT_PIECES, "a != b.",
                  accepts=is_computable, result=_result_bool)
less = table("less", 2, np.less, CONSTANT_PIECES, "a < b.", accepts=is_real, result=_result_bool)
less_equal = table("less_equal", 2, np.less_equal, CONSTANT_PIECES, "a <= b.",
                   accepts=is_real, result=_result_bool)
greater = table("greater", 2, np.greater, CONSTANT_PIECES, "a > b.", accepts=is_real, result=_result_bool)
greater_equal = table("greater_equal", 2, np.greater_equal, CONSTANT_PIECES, "a >= b.",
                      accepts=is_real, result=_result_bool)
logical_and = table("logical_and", 2, np.logical_and, CONSTANT_PIECES, "a and b.", accepts=is_boolean)
logical_or = table("logical_or", 2, np.logical_or, CONSTANT_PIECES, "a or b.", accepts=is_boolean)
logical_xor = table("logical_xor", 2, np.logical_xor, CONSTANT_PIECES, "One of a, b.", accepts=is_boolean)
bitwise_and = table("bitwise_and", 2, np.bitwise_and, CONSTANT_PIECES, "Bits in both.", accepts=is_integer)
bitwise_or = table("bitwise_or", 2, np.bitwise_or, CONSTANT_PIECES, "Bits in either.", accepts=is_integer)
bitwise_xor = table("bitwise_xor", 2, np.bitwise_xor, CONSTANT_PIECES, "Bits in one.", accepts=is_integer)
shift_left = table("shift_left", 2, _shift(np.left_shift, np.zeros_like), CONSTANT_PIECES,
                   "a * 2**b in bits; shifting all bits out gives 0.",
                   accepts=is_integer, ranges=[(-9.0, 9.0), (0.0, 5.0)])
shift_right = table("shift_right", 2, _shift(np.right_shift, lambda x: np.where(x < 0, -1, 0)),
                    CONSTANT_PIECES, "a / 2**b in bits, keeping the sign.",
                    accepts=is_integer, ranges=[(-9.0, 9.0), (0.0, 5.0)])
# fmt: on


@declare
class where(Elementwise):
    """`a` where the condition holds, else `b`; all three broadcast."""

    name = "where"
    scalar = "where"
    arity = 3
    condition = 0
    accepts = staticmethod(is_computable)

    def infer(self, *types: TensorType) -> TensorType:
        condition, a, b = types
        need_dtype(self.name, condition, is_boolean)
        shape = broadcast_shapes(self.name, [condition.shape, a.shape, b.shape])
        return TensorType(same_dtype(self.name, (a, b)), shape)

    def ref(self, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(condition, a, b)

    def vjp(self, g: Node, y: Node, condition: Node, a: Node, b: Node) -> list[Node | None]:
        zero = g.graph.constant(np.zeros((), g.dtype.np))
        return [None, unbroadcast(where(condition, g, zero), a), unbroadcast(where(condition, zero, g), b)]

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("bool[5]"), Arg("f32[5]"), Arg("f32[5]"))),
            Sample((Arg("bool[2,1]"), Arg("f32[3]"), Arg("f32[]"))),
            Sample((Arg("bool[0]"), Arg("f32[0]"), Arg("f32[1]"))),
            Sample((Arg("bool[n]"), Arg("i32[n]"), Arg("i32[]")), grad=False),
            Sample((Arg("bool[17]"), Arg("f32[17]", special=True), Arg("f32[17]", special=True)), grad=False),
        ]


primitive("where", 3, np.where, _result_second)


@declare
class cast(Op):
    """Convert to another dtype.

    float -> narrower float rounds to nearest even; formats without infinity saturate, and with `saturate`
    (True or False) every f8 and f4 format does or does not. float -> int goes towards zero, saturates at the
    ends and turns NaN into 0; int -> int wraps; anything -> bool is `!= 0`.
    """

    name = "cast"
    family = "cast"
    arity = 1
    attrs = {"dtype": Attr(dtype_kind), "saturate": Attr(optional(boolean), None)}

    def infer(self, x: TensorType, *, dtype: DType, saturate: bool | None) -> TensorType:
        return x.with_dtype(dtype)

    def ref(self, x: np.ndarray, *, dtype: DType, saturate: bool | None) -> np.ndarray:
        return convert_array(x, dtype, saturate=saturate)

    def vjp(self, g: Node, y: Node, x: Node, *, dtype: DType, saturate: bool | None) -> list[Node | None]:
        if not is_floating(x.dtype) or not is_floating(dtype):
            return [None]
        return [cast(g, dtype=x.dtype)]

    def batch(self, flags: Sequence[bool], x: Node, *, dtype: DType, saturate: bool | None) -> Node:
        made: Node = cast(x, dtype=dtype, saturate=saturate)
        return made

    def lower(self, x: TensorType, *, dtype: DType, saturate: bool | None) -> Form:
        return Map(x.shape, convert(load(0, broadcast_index(x.shape, x.shape), x.dtype), dtype, saturate))

    def cost(self, x: TensorType, *, dtype: DType, saturate: bool | None) -> Dim:
        return x.numel

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,5]"),), {"dtype": "f64"}),
            Sample((Arg("f32[0]"),), {"dtype": "f16"}, grad=False),
            Sample((Arg("f32[n]"),), {"dtype": "bf16"}, grad=False),
            Sample((Arg("f32[40]", -300, 300, special=True),), {"dtype": "i8"}, grad=False),
            Sample((Arg("f32[40]", -1e20, 1e20, special=True),), {"dtype": "i64"}, grad=False),
            Sample((Arg("i32[9]", -300, 300),), {"dtype": "u8"}, grad=False),
            Sample((Arg("f32[9]", -1, 1, special=True),), {"dtype": "bool"}, grad=False),
            Sample((Arg("bool[4]"),), {"dtype": "f32"}, grad=False),
            Sample((Arg("f32[40]", -600, 600, special=True),), {"dtype": "f8e4m3fn"}, grad=False),
            Sample((Arg("f32[40]", -600, 600, special=True),), {"dtype": "f8e5m2"}, grad=False),
            Sample((Arg("f32[]"),), {"dtype": "f32"}, grad=False),
            Sample(
                (Arg("f32[9]", -1e5, 1e5, special=True),), {"dtype": "f8e5m2", "saturate": True}, grad=False
            ),
            Sample((Arg("f64[40]", -7e4, 7e4, special=True),), {"dtype": "f16"}, grad=False),
            Sample((Arg("i64[40]", -(2**60), 2**60),), {"dtype": "bf16"}, grad=False),
            Sample((Arg("u64[n]", 0, 2**60),), {"dtype": "bf16"}, grad=False),
        ]
