"""Activations and other elementwise functions built from primitives: one entry of the table is one op.

All broadcast like NumPy and compute half precision in f32, rounding once. Attributes are keywords:

>>> leaky_relu(np.array([-1.0, 2.0]), alpha=0.5)
array([-0.5,  2. ])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.attr import Attr, AttrValue, one_of, real
from rlx.ir.dtype import BOOL, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.math.elementwise import (
    CONSTANT_PIECES,
    POSITIVE,
    abs,
    div,
    equal,
    erf,
    exp,
    expm1,
    less,
    log1p,
    make_samples,
    maximum,
    minimum,
    mul,
    pow,
    sigmoid,
    sqrt,
    tanh,
    where,
)
from rlx.ops.rules import (
    Accepts,
    broadcast_shapes,
    expand_in_f32,
    in_f32,
    is_real,
    is_real_float,
    need_dtype,
    same_dtype,
    unbroadcast,
)


class Composite(Op):
    """Base of the table's ops: broadcasting elementwise functions of operands of one dtype."""

    level = Level.HIR
    accepts: Accepts
    result: DType | None = None

    def infer(self, *types: TensorType, **attrs: object) -> TensorType:
        for t in types:
            need_dtype(self.name, t, type(self).accepts)
        d = same_dtype(self.name, types)
        return TensorType(self.result or d, broadcast_shapes(self.name, [t.shape for t in types]))


OFF_CENTRE = (-1.93, 2.11)  # distinct values in it miss the kinks at 0 and other round numbers


def composite(
    name: str,
    arity: int,
    ref: Callable[..., np.ndarray],
    expand: Callable[..., Tensor],
    doc: str,
    *,
    attrs: Mapping[str, Attr] | None = None,
    tried: Sequence[Mapping[str, AttrValue]] = ({},),
    grad: Callable[..., Sequence[Tensor]] | str | None = None,
    accepts: Accepts = is_real_float,
    result: DType | None = None,
    ranges: Sequence[tuple[float, float]] | None = None,
    smooth: bool = True,
    one_rounding: bool = False,
    scalar: str | None = None,
) -> Op:
    """Declare one op by its meaning and its expansion, both called with operands and attributes.

    `grad(g, y, *xs, **attrs)` where the expansion's own gradient is not as exact, or the reason why there is
    none; `tried` are attribute values for samples; `one_rounding`: the expansion needs no detour through f32.
    """

    def vjp(self: Op, g: Node, y: Node, *operands: Node, **given: object) -> list[Node]:
        assert callable(grad)
        return [unbroadcast(d, x) for d, x in zip(grad(g, y, *operands, **given), operands, strict=True)]

    def samples(self: Op) -> list[Sample]:
        base = make_samples(
            arity, accepts, ranges or [OFF_CENTRE] * arity, smooth and not isinstance(grad, str)
        )
        if accepts is is_real_float:
            base.append(Sample((Arg("f16[9]", 0.5, 2.0),) * arity, grad=False))
        return [Sample(s.args, more, s.grad) for more in tried for s in base]

    members: dict[str, object] = {
        "__doc__": doc,
        "__module__": __name__,
        "name": name,
        "scalar": scalar,
        "arity": arity,
        "attrs": attrs or {},
        "accepts": staticmethod(accepts),
        "result": result,
        "ref": staticmethod(in_f32(ref)),
        "expand": staticmethod(expand if one_rounding else expand_in_f32(expand)),
        "samples": samples,
        "not_differentiable": grad if isinstance(grad, str) else None,
    }
    if callable(grad):
        members["vjp"] = vjp
    return declare(type(name, (Composite,), members))


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.frompyfunc(math.erfc, 1, 1)(x), dtype=x.dtype).reshape(x.shape)


def _gelu_ref(x: np.ndarray, *, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)), x.dtype)
    return np.asarray(0.5 * x * _erfc(-x * math.sqrt(0.5)), x.dtype)


def _gelu(x: Node, *, approximate: str) -> Node:
    if approximate == "tanh":
        inner = (x * x * (0.044715 * math.sqrt(2 / math.pi)) + math.sqrt(2 / math.pi)) * x
        return x * 0.5 * (tanh(inner) + 1.0)
    return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)


def _gelu_grad(g: Node, y: Node, x: Node, *, approximate: str) -> list[Node]:
    if approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = tanh((x * x * (0.044715 * c) + c) * x)
        slope = (x * x * (3 * 0.044715 * c) + c) * (1.0 - t * t)
        return [g * 0.5 * (t + 1.0 + x * slope)]
    density = exp(x * x * -0.5) * math.sqrt(0.5 / math.pi)
    return [g * ((erf(x * math.sqrt(0.5)) + 1.0) * 0.5 + x * density)]


def _elu_ref(x: np.ndarray, high: float, low: float, inner: float) -> np.ndarray:
    return np.where(x > 0, high * x, low * np.expm1(np.minimum(x, 0) / inner)).astype(x.dtype)


def _elu(x: Node, high: float, low: float, inner: float) -> Node:
    below = minimum(x, 0.0) if inner == 1.0 else minimum(x, 0.0) / inner
    return where(x > 0.0, x if high == 1.0 else x * high, expm1(below) * low)


def _elu_grad(g: Node, y: Node, x: Node, high: float, low: float, inner: float) -> list[Node]:
    return [g * where(x > 0.0, high, (y + low) / inner)]


# the constants of "Self-Normalizing Neural Networks", in single precision as in ONNX
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _softplus(x: Node) -> Node:
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


def _hard_sigmoid(x: Node, *, alpha: float, beta: float) -> Node:
    return minimum(maximum(x * alpha + beta, 0.0), 1.0)


def _hypot(a: Node, b: Node) -> Node:
    a, b = abs(a), abs(b)
    largest = maximum(a, b)
    ordinary = (largest > 0.0) & (largest < math.inf)
    unit = where(ordinary, largest, 1.0)  # keeps the squares in range
    a1, b1 = a / unit, b / unit
    root = unit * sqrt(a1 * a1 + b1 * b1)
    return where(equal(a, math.inf) | equal(b, math.inf), math.inf, root)


def _logaddexp(a: Node, b: Node) -> Node:
    apart = where(equal(a, b), 0.0, abs(a - b))  # equal infinities are 0 apart
    return maximum(a, b) + log1p(exp(-apart))


def _cbrt(x: Node) -> Node:
    size = abs(x)
    root = pow(size, 1 / 3)
    better = root - (root - size / (root * root)) * (1 / 3)  # one step of Newton: the exponent is not exact
    root = where(size < math.inf, better, root)
    return where(size > 0.0, where(x < 0.0, -root, root), x)  # a zero keeps its sign


def _shrink_ref(x: np.ndarray, *, lambd: float, bias: float) -> np.ndarray:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


def _alpha(value: float) -> dict[str, Attr]:
    return {"alpha": Attr(real, value)}


# fmt: off
relu = composite(
    "relu", 1, lambda x: np.maximum(x, np.zeros((), x.dtype)), lambda x: maximum(x, 0), "max(x, 0).",
    grad=lambda g, y, x: [where(x > 0, g, 0)], accepts=is_real, smooth=True, one_rounding=True,
    scalar="relu")
leaky_relu = composite(
    "leaky_relu", 1, lambda x, alpha: np.where(x >= 0, x, x * alpha).astype(x.dtype),
    lambda x, alpha: where(x >= 0.0, x, x * alpha), "x, or alpha * x where x < 0.",
    attrs=_alpha(0.01), tried=({}, {"alpha": 0.3}))
prelu = composite(
    "prelu", 2, lambda x, slope: np.where(x >= 0, x, x * slope),
    lambda x, slope: where(x >= 0.0, x, x * slope), "x, or slope * x where x < 0.")
gelu = composite(
    "gelu", 1, _gelu_ref, _gelu, 'x * (the normal distribution function); approximate="tanh" estimates it.',
    attrs={"approximate": Attr(one_of("none", "tanh"), "none")}, tried=({}, {"approximate": "tanh"}),
    grad=_gelu_grad)
silu = composite(
    "silu", 1, lambda x: x * sigmoid.ref(x), lambda x: x * sigmoid(x), "x * sigmoid(x).")
swish = composite(
    "swish", 1, lambda x, alpha: x * sigmoid.ref((alpha * x).astype(x.dtype)),
    lambda x, alpha: x * sigmoid(x * alpha), "x * sigmoid(alpha * x).",
    attrs=_alpha(1.0), tried=({}, {"alpha": 1.7}))
mish = composite(
    "mish", 1, lambda x: x * np.tanh(np.logaddexp(x, 0)).astype(x.dtype), lambda x: x * tanh(_softplus(x)),
    "x * tanh(softplus(x)).")
elu = composite(
    "elu", 1, lambda x, alpha: _elu_ref(x, 1.0, alpha, 1.0), lambda x, alpha: _elu(x, 1.0, alpha, 1.0),
    "x, or alpha * (exp(x) - 1) where x < 0.",
    grad=lambda g, y, x, alpha: _elu_grad(g, y, x, 1.0, alpha, 1.0),
    attrs=_alpha(1.0), tried=({}, {"alpha": 0.4}))
celu = composite(
    "celu", 1, lambda x, alpha: _elu_ref(x, 1.0, alpha, alpha), lambda x, alpha: _elu(x, 1.0, alpha, alpha),
    "x, or alpha * (exp(x / alpha) - 1) where x < 0.",
    grad=lambda g, y, x, alpha: _elu_grad(g, y, x, 1.0, alpha, alpha),
    attrs=_alpha(1.0), tried=({}, {"alpha": 0.4}))
selu = composite(
    "selu", 1, lambda x, alpha, gamma: _elu_ref(x, gamma, gamma * alpha, 1.0),
    lambda x, alpha, gamma: _elu(x, gamma, gamma * alpha, 1.0), "gamma * elu(x, alpha).",
    grad=lambda g, y, x, alpha, gamma: _elu_grad(g, y, x, gamma, gamma * alpha, 1.0),
    attrs={"alpha": Attr(real, SELU_ALPHA), "gamma": Attr(real, SELU_GAMMA)},
    tried=({}, {"alpha": 2.0, "gamma": 0.5}))
softplus = composite(
    "softplus", 1, lambda x: np.logaddexp(x, np.zeros((), x.dtype)), _softplus,
    "log(1 + exp(x)), without overflow.",
    grad=lambda g, y, x: [g * sigmoid(x)])
softsign = composite(
    "softsign", 1, lambda x: x / (1 + np.abs(x)), lambda x: x / (abs(x) + 1.0), "x / (1 + |x|).")
log_sigmoid = composite(
    "log_sigmoid", 1, lambda x: np.zeros((), x.dtype) - np.logaddexp(-x, np.zeros((), x.dtype)),
    lambda x: minimum(x, 0.0) - log1p(exp(-abs(x))), "log(sigmoid(x)), without underflow.",
    grad=lambda g, y, x: [g * sigmoid(-x)])
hard_sigmoid = composite(
    "hard_sigmoid", 1, lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1).astype(x.dtype), _hard_sigmoid,
    "clip(alpha * x + beta, 0, 1).", attrs={"alpha": Attr(real, 0.2), "beta": Attr(real, 0.5)},
    tried=({}, {"alpha": 0.5, "beta": 0.6}))
hard_swish = composite(
    "hard_swish", 1, lambda x: x * np.clip(x / 6 + 0.5, 0, 1).astype(x.dtype),
    lambda x: x * _hard_sigmoid(x, alpha=1 / 6, beta=0.5), "x * clip(x / 6 + 1 / 2, 0, 1).",
    ranges=[(-4.0, 4.0)])
hard_tanh = composite(
    "hard_tanh", 1, lambda x, low, high: np.clip(x, low, high).astype(x.dtype),
    lambda x, low, high: minimum(maximum(x, low), high), "x between low and high.",
    attrs={"low": Attr(real, -1.0), "high": Attr(real, 1.0)}, tried=({}, {"low": 0.1, "high": 0.5}),
    one_rounding=True)
thresholded_relu = composite(
    "thresholded_relu", 1, lambda x, alpha: np.where(x > alpha, x, 0).astype(x.dtype),
    lambda x, alpha: where(x > alpha, x, 0.0), "x where x > alpha, else 0.",
    attrs=_alpha(1.0), tried=({}, {"alpha": 0.3}))
shrink = composite(
    "shrink", 1, _shrink_ref,
    lambda x, lambd, bias: where(x < -lambd, x + bias, where(x > lambd, x - bias, 0.0)),
    "x moved towards 0 by bias, 0 where |x| <= lambd.",
    attrs={"lambd": Attr(real, 0.5), "bias": Attr(real, 0.0)}, tried=({}, {"lambd": 0.3, "bias": 0.2}))
square = composite(
    "square", 1, lambda x: x * x, lambda x: mul(x, x), "x * x.", accepts=is_real, one_rounding=True)
reciprocal = composite(
    "reciprocal", 1, lambda x: (1 / x).astype(x.dtype), lambda x: div(1.0, x), "1 / x.",
    ranges=POSITIVE, one_rounding=True)
cbrt = composite(
    "cbrt", 1, np.cbrt, _cbrt, "Cube root.", grad=lambda g, y, x: [g / (y * y * 3.0)], ranges=POSITIVE)
is_finite = composite(
    "is_finite", 1, np.isfinite, lambda x: less(abs(x), math.inf),
    "True where x is neither infinite nor NaN.",
    grad=CONSTANT_PIECES, result=BOOL, one_rounding=True)
hypot = composite(
    "hypot", 2, np.hypot, _hypot, "sqrt(a * a + b * b), without overflow.",
    grad=lambda g, y, a, b: [g * a / y, g * b / y], ranges=[(0.5, 2.0), (0.3, 2.0)])
logaddexp = composite(
    "logaddexp", 2, np.logaddexp, _logaddexp, "log(exp(a) + exp(b)), without overflow.",
    grad=lambda g, y, a, b: [g * sigmoid(a - b), g * sigmoid(b - a)])
# fmt: on


@declare
class _clip(Composite):
    """x kept between bounds, of which `bounds` says those given. NaN stays NaN; if min > max, max wins."""

    name = "clip"
    accepts = staticmethod(is_real)
    attrs = {"bounds": Attr(one_of("min", "max", "both"))}

    def infer(self, *types: TensorType, **attrs: object) -> TensorType:
        bounds = attrs["bounds"]
        want = 3 if bounds == "both" else 2
        if len(types) != want:
            raise TypeMismatchError(f"clip: bounds={bounds!r} takes {want} operands, got {len(types)}")
        return super().infer(*types)

    def ref(self, x: np.ndarray, *limits: np.ndarray, bounds: str) -> np.ndarray:
        low = None if bounds == "max" else limits[0]
        high = None if bounds == "min" else limits[-1]
        return np.asarray(np.clip(x, low, high)).astype(x.dtype)  # of bfloat16 NumPy makes float32

    def expand(self, x: Node, *limits: Node, bounds: str) -> Node:
        if bounds != "max":
            x = maximum(x, limits[0])
        if bounds != "min":
            x = minimum(x, limits[-1])
        return x

    def samples(self) -> list[Sample]:
        low, high = np.float32(-0.51), np.float32(0.77)
        return [
            Sample((Arg("f32[3,17]", distinct=True), np.asarray(low), np.asarray(high)), {"bounds": "both"}),
            Sample((Arg("f32[33]", distinct=True), np.asarray(low)), {"bounds": "min"}),
            Sample((Arg("f32[1]"), np.asarray(high)), {"bounds": "max"}),
            Sample(
                (Arg("f32[2,3]", 1, 2), Arg("f32[3]", -2, 0), Arg("f32[2,1]", 0.1, 0.9)), {"bounds": "both"}
            ),
            Sample((Arg("f32[4]"), np.asarray(high), np.asarray(low)), {"bounds": "both"}, grad=False),
            Sample(
                (Arg("f32[24]", special=True), np.asarray(low), np.asarray(high)),
                {"bounds": "both"},
                grad=False,
            ),
            Sample((Arg("f32[n,0]"), Arg("f32[]")), {"bounds": "min"}, grad=False),
            Sample((Arg("f32[n,3]"), Arg("f32[]")), {"bounds": "max"}, grad=False),
            Sample(
                (Arg("i32[9]", -9, 9), np.array([-3], np.int32), np.array([4], np.int32)),
                {"bounds": "both"},
                grad=False,
            ),
            Sample((Arg("f16[9]"), np.array([0.25], np.float16)), {"bounds": "min"}, grad=False),
        ]


@of_one
def clip(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """x kept between min and max, as numpy.clip; a bound that is None does not limit.

    >>> clip(np.array([-3.0, 0.5, 9.0]), -1.0, 1.0)
    array([-1. ,  0.5,  1. ])
    """
    if max is None:
        return x if min is None else _clip(x, min, bounds="min")
    return _clip(x, max, bounds="max") if min is None else _clip(x, min, max, bounds="both")


__all__ = [
    "cbrt", "celu", "clip", "elu", "gelu", "hard_sigmoid", "hard_swish", "hard_tanh", "hypot", "is_finite",
    "leaky_relu", "log_sigmoid", "logaddexp", "mish", "prelu", "reciprocal", "relu", "selu", "shrink", "silu",
    "softplus", "softsign", "square", "swish", "thresholded_relu",
]  # fmt: skip
