"""Statistics and norms over axes, built from reductions; sizes of symbolic axes as values.

Half precision computes in f32 and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir.attr import Attr, boolean, dim, dtype_kind, ints, real
from rlx.ir.dim import Dim
from rlx.ir.dtype import F64, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import convert, size
from rlx.ops.math.elementwise import abs, exp, log, maximum, sqrt, where
from rlx.ops.math.reduce import reduce_max, reduce_sum, reduced_shape, spread, summable
from rlx.ops.rules import (
    Accepts,
    check_axes,
    expand_in_f32,
    in_f32,
    is_number,
    is_real,
    is_real_float,
    need_dtype,
    normal_axes,
    op_call,
    rank_of,
)


@declare
class _dim_value(Op):
    """A size as a scalar of a number dtype, so that programs with symbolic dims can compute with it."""

    name = "dim_value"
    arity = 0
    size_value = "dim"
    attrs = {"dim": Attr(dim), "dtype": Attr(dtype_kind)}
    not_differentiable = "a size depends on no value"

    def infer(self, *, dim: Dim, dtype: DType) -> TensorType:
        out = TensorType(dtype, ())
        need_dtype(self.name, out, is_number)
        return out

    def ref(self, *, dim: int, dtype: DType) -> np.ndarray:
        return np.asarray(dim, dtype.np)

    def batch(self, flags: Sequence[bool], *, dim: Dim, dtype: DType) -> Node:
        made: Node = _dim_value(dim=dim, dtype=dtype)
        return made

    def lower(self, *, dim: Dim, dtype: DType) -> Form:
        return Map((), convert(size(dim), dtype))

    def cost(self, *, dim: Dim, dtype: DType) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [Sample((), {"dim": 5, "dtype": d}) for d in ("f32", "i64", "f16")]


def dim_value(dim: Dim, dtype: DTypeLike = "i64") -> Tensor:
    """A size (an int, a symbol's name or a dim expression) as a scalar of the graph being built.

    >>> dim_value(7)
    array(7)
    """
    return _dim_value(dim=dim, dtype=dtype)


def count(x: Node, axes: Sequence[int]) -> Tensor:
    """How many elements of x there are along axes: a number, or a scalar node where a size is symbolic."""
    total: Dim = 1
    for a in axes:
        total = total * x.shape[a]
    return float(total) if isinstance(total, int) else dim_value(total, x.dtype)


class Statistic(Op):
    """Base of composites of reductions: real floating point in, one value per kept index out."""

    level = Level.HIR
    arity = 1
    attrs = {"axes": Attr(ints), "keepdims": Attr(boolean, False)}
    accepts: Accepts = staticmethod(is_real_float)
    low = -2.0  # of the values in samples

    def infer(self, x: TensorType, *, axes: Sequence[int], keepdims: bool, **attrs: object) -> TensorType:
        need_dtype(self.name, x, type(self).accepts)
        check_axes(self.name, axes, x.rank)
        return TensorType(x.dtype, reduced_shape(x.shape, axes, keepdims))

    def samples(self) -> list[Sample]:
        def one(text: str, axes: tuple[int, ...], keepdims: bool = False, **more: object) -> Sample:
            low = 0.0 if "special" in more else self.low
            return Sample(
                (Arg(text, low, 2.0, distinct=True, special="special" in more),),
                {"axes": axes, "keepdims": keepdims},
                grad=not more,
            )

        whole = [one("i32[3,4]", (1,), symbolic=False)] if type(self).accepts is is_real else []
        return [
            *whole,
            one("f32[2,3,4]", (0, 2)),
            one("f32[5]", (0,), True),
            one("f32[3,17]", (1,)),
            one("f32[33,3]", (0,), True),
            one("f32[2,0]", (1,), symbolic=False),
            one("f32[0,3]", (1,), symbolic=False),
            one("f32[n,3]", (0,), symbolic=True),
            one("f32[n,m]", (0, 1), True, symbolic=True),
            one("f32[4,20]", (1,), special=True),
            one("f16[4,20]", (1,), symbolic=False),
            one("bf16[4,20]", (0,), symbolic=False),
        ]


Meaning = Callable[..., Any]


def statistic(
    name: str,
    ref: Meaning,
    expand: Meaning,
    doc: str,
    *,
    vjp: Meaning | None = None,
    low: float = -2.0,
    accepts: Accepts = is_real_float,
) -> Op:
    """Declare one statistic: `ref(x, axis=, keepdims=)` in NumPy and `expand(x, axes, keepdims)` in ops."""

    def meaning(x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(ref(x, axis=tuple(axes), keepdims=keepdims), x.dtype)

    members: dict[str, object] = {
        "__doc__": doc,
        "__module__": __name__,
        "name": name,
        "accepts": staticmethod(accepts),
        "low": low,
        "ref": staticmethod(in_f32(meaning)),
        "expand": staticmethod(expand_in_f32(lambda x, *, axes, keepdims: expand(x, axes, keepdims))),
    }
    if vjp is not None:
        members["vjp"] = vjp
    return declare(type(name, (Statistic,), members))


def _mean_ref(x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    return np.asarray(
        np.sum(x, axis=axis, keepdims=keepdims) / np.float64(math.prod(x.shape[a] for a in axis))
    )


def _mean(x: Node, axes: Sequence[int], keepdims: bool) -> Node:
    made: Node = reduce_sum(x, axes=axes, keepdims=keepdims) / count(x, axes)
    return made


def _logsumexp_ref(x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    top = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    total = np.log(np.sum(np.exp(x.astype(np.float64) - top), axis=axis, keepdims=True)) + top
    return np.asarray(total if keepdims else np.squeeze(total, axis))


def _finite(x: Node) -> Node:
    """x, or 0 where it is infinite or NaN."""
    made: Node = where(abs(x) < math.inf, x, 0.0)
    return made


def _logsumexp(x: Node, axes: Sequence[int], keepdims: bool) -> Node:
    top = _finite(reduce_max(x, axes=axes, keepdims=True))
    total = log(reduce_sum(exp(x - top), axes=axes, keepdims=True)) + top
    made: Node = total if keepdims else op_call("reshape", total, shape=reduced_shape(x.shape, axes, False))
    return made


def _logsumexp_vjp(self: Op, g: Node, y: Node, x: Node, *, axes: Sequence[int], keepdims: bool) -> list[Node]:
    return [spread(g, x, axes) * exp(x - spread(_finite(y), x, axes))]


# fmt: off
_mean_op = statistic("mean", _mean_ref, _mean, "Sum divided by the number of elements.")
_logsumexp_op = statistic(
    "logsumexp", _logsumexp_ref, _logsumexp,
    "log of the sum of exp, without overflow; over nothing it is -inf.", vjp=_logsumexp_vjp)
_norm_l1_op = statistic(
    "norm_l1", lambda x, **k: np.sum(np.abs(x), **k),
    lambda x, axes, keep: reduce_sum(abs(x), axes=axes, keepdims=keep), "Sum of absolute values.",
    low=0.1, accepts=is_real)
_norm_l2_op = statistic(
    "norm_l2", lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    lambda x, axes, keep: sqrt(reduce_sum(x * x, axes=axes, keepdims=keep)),
    "Square root of the sum of squares.", low=0.1)
_log_sum_op = statistic(
    "log_sum", lambda x, **k: np.log(np.sum(x, **k)),
    lambda x, axes, keep: log(reduce_sum(x, axes=axes, keepdims=keep)), "Logarithm of the sum.", low=0.1)
_sum_square_op = statistic(
    "sum_square", lambda x, **k: np.sum(x * x, **k),
    lambda x, axes, keep: reduce_sum(x * x, axes=axes, keepdims=keep), "Sum of squares.", accepts=is_real)
# fmt: on


def _freedom(x: Node, axes: Sequence[int], ddof: float) -> Any:
    """The number of elements less ddof; as in NumPy never below 0, so that too few give NaN or infinity."""
    number = count(x, axes)
    if not ddof:
        return number
    return max(number - ddof, 0.0) if isinstance(number, float) else maximum(number - ddof, 0.0)


def variance(x: Node, axes: Sequence[int], keepdims: bool, ddof: float = 0.0) -> Node:
    """Mean square distance from the mean, in two passes."""
    apart = x - _mean(x, axes, True)
    made: Node = reduce_sum(apart * apart, axes=axes, keepdims=keepdims) / _freedom(x, axes, ddof)
    return made


def _var_ref(x: np.ndarray, *, axes: Sequence[int], keepdims: bool, ddof: float) -> np.ndarray:
    apart = x - _mean_ref(x, tuple(axes), True)
    number = np.float64(max(math.prod(x.shape[a] for a in axes) - ddof, 0))
    return np.asarray(np.sum(apart * apart, axis=tuple(axes), keepdims=keepdims) / number, x.dtype)


class _Spread(Statistic):
    """Base of var and std, which take `ddof` as NumPy does."""

    attrs = {**Statistic.attrs, "ddof": Attr(real, 0.0)}

    def samples(self) -> list[Sample]:
        def more(text: str, ddof: float, grad: bool = False) -> Sample:
            return Sample((Arg(text, distinct=True),), {"axes": (1,), "ddof": ddof}, grad=grad)

        few = [more("f32[3,0]", 1), more("f32[3,1]", 1), more("f32[3,2]", 3.5), more("f32[n,m]", 2)]
        whole = [s for s in super().samples() if Arg("f32[5]", self.low, distinct=True) not in s.args]
        return [*whole, more("f32[3,7]", 1, grad=True), *few]


@declare
class _var(_Spread):
    """Mean square distance from the mean; the divisor is the number of elements minus ddof, at least 0."""

    name = "var"
    ref = staticmethod(in_f32(_var_ref))
    expand = staticmethod(expand_in_f32(lambda x, *, axes, keepdims, ddof: variance(x, axes, keepdims, ddof)))


@declare
class _std(_Spread):
    """Square root of the variance."""

    name = "std"
    ref = staticmethod(in_f32(lambda x, **attrs: np.sqrt(_var_ref(x, **attrs))))
    expand = staticmethod(
        expand_in_f32(lambda x, *, axes, keepdims, ddof: sqrt(variance(x, axes, keepdims, ddof)))
    )


def _as_float(x: Operand) -> Tensor:
    """Integers and truth values count as f64, as in NumPy."""
    d = x.dtype if isinstance(x, Node) else dtype(np.asarray(x).dtype)
    return op_call("cast", x, dtype=F64) if d.is_int or d.is_bool else x


def _over(op: Any, x: Operand, axis: int | Sequence[int] | None, keepdims: bool, **attrs: object) -> Any:
    if op.accepts is is_real_float:
        x = _as_float(x)
    rank = rank_of(x)
    return op(x, axes=normal_axes(op.name, axis, rank), keepdims=keepdims, **attrs)


@of_one
def mean(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Mean over axes (all by default), as numpy.mean.

    >>> mean(np.array([[1.0, 2.0], [3.0, 4.0]]), axis=0)
    array([2., 3.])
    """
    return _over(_mean_op, x, axis, keepdims)


@of_one
def var(
    x: Operand, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False
) -> Tensor:
    """Variance over axes (all by default), as numpy.var.

    >>> float(var(np.array([1.0, 3.0])))
    1.0
    """
    return _over(_var, x, axis, keepdims, ddof=ddof)


@of_one
def std(
    x: Operand, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False
) -> Tensor:
    """Standard deviation over axes (all by default), as numpy.std.

    >>> float(std(np.array([1.0, 3.0, 1.0, 3.0])))
    1.0
    """
    return _over(_std, x, axis, keepdims, ddof=ddof)


@of_one
def logsumexp(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over axes (all by default), without overflow.

    >>> logsumexp(np.array([1000.0, 1000.0])).round(3)
    np.float64(1000.693)
    """
    return _over(_logsumexp_op, x, axis, keepdims)


@of_one
def norm_l1(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Sum of absolute values over axes (all by default); integers and `dtype` as in `sum`.

    >>> float(norm_l1(np.array([3.0, -4.0])))
    7.0
    """
    return _over(_norm_l1_op, summable(x, dtype), axis, keepdims)


@of_one
def norm_l2(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Euclidean norm over axes (all by default).

    >>> float(norm_l2(np.array([3.0, -4.0])))
    5.0
    """
    return _over(_norm_l2_op, x, axis, keepdims)


@of_one
def log_sum(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Logarithm of the sum over axes (all by default).

    >>> float(log_sum(np.array([0.5, 0.5])))
    0.0
    """
    return _over(_log_sum_op, x, axis, keepdims)


@of_one
def sum_square(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Sum of squares over axes (all by default); integers and `dtype` as in `sum`.

    >>> float(sum_square(np.array([3.0, -4.0])))
    25.0
    """
    return _over(_sum_square_op, summable(x, dtype), axis, keepdims)
