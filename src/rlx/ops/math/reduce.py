"""Reductions over any axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, overload
from typing import cast as cast_type

import numpy as np

from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, boolean, integer, ints
from rlx.ir.dim import Dim
from rlx.ir.dtype import BOOL, I64, U64, DType
from rlx.ir.dtype import dtype as dtype_of
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import ArrayLike, DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Reduce
from rlx.kernel.scalar import axes as space_axes
from rlx.kernel.scalar import load
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.math.elementwise import cast, equal
from rlx.ops.rules import (
    Accepts,
    check_axes,
    in_f32,
    is_boolean,
    is_number,
    is_real,
    need_dtype,
    normal_axes,
    normal_axis,
    op_call,
    rank_of,
    shift,
)


def reduced_shape(shape: Shape, axes: Sequence[int], keepdims: bool) -> Shape:
    """The shape after reducing axes."""
    if keepdims:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def spread(g: Node, like: Node, axes: Sequence[int]) -> Node:
    """A reduced value repeated over the axes that were reduced."""
    kept = reshape(g, reduced_shape(like.shape, axes, True))
    made: Node = broadcast_to(kept, like.shape)
    return made


class Reduction(Op):
    """Base of reductions to one value per kept index."""

    family = "reduction"
    arity = 1
    attrs = {"axes": Attr(ints), "keepdims": Attr(boolean, False)}
    combine: ClassVar[str]
    accepts: Accepts
    result: DType | None = None
    identity_on_empty = True  # whether an empty reduction has a value

    def infer(self, x: TensorType, *, axes: Sequence[int], keepdims: bool) -> TensorType:
        need_dtype(self.name, x, type(self).accepts)
        check_axes(self.name, axes, x.rank)
        return TensorType(self.result or x.dtype, reduced_shape(x.shape, axes, keepdims))

    def batch(self, flags: Sequence[bool], x: Node, *, axes: Sequence[int], keepdims: bool) -> Node:
        made: Node = self(x, axes=shift(axes), keepdims=keepdims)
        return made

    def lower(self, x: TensorType, *, axes: Sequence[int], keepdims: bool) -> Form:
        body = load(0, space_axes(x.rank), x.dtype)
        return Reduce(x.shape, tuple(axes), self.combine, body, self.result or x.dtype)

    def cost(self, x: TensorType, *, axes: Sequence[int], keepdims: bool) -> Dim:
        return x.numel

    def samples(self) -> list[Sample]:
        kind = "bool" if type(self).accepts is is_boolean else "f32"
        smooth = self.not_differentiable is None
        out = [
            Sample((Arg(f"{kind}[2,3,4]", distinct=True),), {"axes": (0, 2)}, grad=smooth),
            Sample((Arg(f"{kind}[5]", distinct=True),), {"axes": (0,), "keepdims": True}, grad=smooth),
            Sample((Arg(f"{kind}[2,3]", distinct=True),), {"axes": ()}, grad=smooth),
            Sample((Arg(f"{kind}[]"),), {"axes": ()}, grad=smooth),
            Sample((Arg(f"{kind}[3,33]", distinct=True),), {"axes": (1,)}, grad=smooth),
            Sample((Arg(f"{kind}[33,3]", distinct=True),), {"axes": (0,)}, grad=smooth),
            Sample((Arg(f"{kind}[n,3]"),), {"axes": (1,)}, grad=False),
            Sample((Arg(f"{kind}[0,3]"),), {"axes": (1,)}, grad=False),
        ]
        if self.identity_on_empty:
            out.append(Sample((Arg(f"{kind}[2,0]"),), {"axes": (1,)}, grad=False))
        if kind == "f32":
            out.append(Sample((Arg("f32[4,20]", special=True),), {"axes": (1,)}, grad=False))
            out.append(Sample((Arg("i32[3,4]", -5, 5),), {"axes": (1,)}, grad=False))
        return out


def _over(f: Callable[..., Tensor]) -> Callable[..., np.ndarray]:
    def ref(x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(f(x, axis=tuple(axes), keepdims=keepdims))

    return ref


_sum_ref = in_f32(_over(lambda x, **k: np.sum(x, dtype=x.dtype, **k)))
_prod_ref = in_f32(_over(lambda x, **k: np.prod(x, dtype=x.dtype, **k)))


@declare
class reduce_sum(Reduction):
    """Sum over axes; an empty sum is 0. Half precision accumulates in f32."""

    name = "reduce_sum"
    combine = "sum"
    accepts = staticmethod(is_number)

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_sum_ref(x, **attrs))

    def vjp(self, g: Node, y: Node, x: Node, *, axes: Sequence[int], keepdims: bool) -> list[Node]:
        return [spread(g, x, axes)]


@declare
class reduce_prod(Reduction):
    """Product over axes; an empty product is 1."""

    name = "reduce_prod"
    combine = "prod"
    accepts = staticmethod(is_number)

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_prod_ref(x, **attrs))

    def vjp(self, g: Node, y: Node, x: Node, *, axes: Sequence[int], keepdims: bool) -> list[Node]:
        # the product of all the others, from exclusive running products of both sides: right for zeros too
        kept = [i for i in range(x.rank) if i not in axes]
        flat = op_call("transpose", x, perm=(*kept, *axes))
        shape = flat.shape
        rows = tuple(x.shape[i] for i in kept)
        count: Dim = 1
        for i in axes:
            count = count * x.shape[i]
        flat = reshape(flat, (*rows, count))
        last = len(rows)
        before = op_call("cumprod", flat, axis=last, exclusive=True, reverse=False)
        after = op_call("cumprod", flat, axis=last, exclusive=True, reverse=True)
        order = tuple(int(i) for i in np.argsort((*kept, *axes)))
        others = op_call("transpose", reshape(before * after, shape), perm=order)
        return [spread(g, x, axes) * others]


class _Extremum(Reduction):
    accepts = staticmethod(is_real)
    identity_on_empty = False

    def vjp(self, g: Node, y: Node, x: Node, *, axes: Sequence[int], keepdims: bool) -> list[Node]:
        hit = cast(equal(x, spread(y, x, axes)), dtype=x.dtype)  # ties share the gradient
        count = reduce_sum(hit, axes=axes, keepdims=keepdims)
        return [spread(g / count, x, axes) * hit]


@declare
class reduce_max(_Extremum):
    """Largest element over axes; NaN wins.

    Undefined over an empty axis (gives -inf or the smallest integer).
    """

    name = "reduce_max"
    combine = "max"

    def ref(self, x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(np.max(x, axis=tuple(axes), keepdims=keepdims, initial=_lowest(x.dtype)))


@declare
class reduce_min(_Extremum):
    """Smallest element over axes; NaN wins.

    Undefined over an empty axis (gives inf or the largest integer).
    """

    name = "reduce_min"
    combine = "min"

    def ref(self, x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(np.min(x, axis=tuple(axes), keepdims=keepdims, initial=_highest(x.dtype)))


def _lowest(d: np.dtype) -> Any:
    return np.iinfo(d).min if d.kind in "iu" else np.array(-np.inf).astype(d)


def _highest(d: np.dtype) -> Any:
    return np.iinfo(d).max if d.kind in "iu" else np.array(np.inf).astype(d)


@declare
class reduce_any(Reduction):
    """Whether any element over axes is true; an empty one is False."""

    name = "reduce_any"
    combine = "any"
    accepts = staticmethod(is_boolean)
    not_differentiable = "its value is a truth value"

    def ref(self, x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(np.any(x, axis=tuple(axes), keepdims=keepdims))


@declare
class reduce_all(Reduction):
    """Whether all elements over axes are true; an empty one is True."""

    name = "reduce_all"
    combine = "all"
    accepts = staticmethod(is_boolean)
    not_differentiable = "its value is a truth value"

    def ref(self, x: np.ndarray, *, axes: Sequence[int], keepdims: bool) -> np.ndarray:
        return np.asarray(np.all(x, axis=tuple(axes), keepdims=keepdims))


class _ArgExtremum(Op):
    arity = 1
    attrs = {"axis": Attr(integer), "keepdims": Attr(boolean, False), "last": Attr(boolean, False)}
    not_differentiable = "its value is an index"
    combine: ClassVar[str]

    def infer(self, x: TensorType, *, axis: int, keepdims: bool, last: bool) -> TensorType:
        need_dtype(self.name, x, is_real)
        check_axes(self.name, (axis,), x.rank)
        require_at_least(x.shape[axis], 1, f"{self.name}: axis {axis} of {x} has no elements to choose from")
        return TensorType(I64, reduced_shape(x.shape, (axis,), keepdims))

    def ref(self, x: np.ndarray, *, axis: int, keepdims: bool, last: bool) -> np.ndarray:
        find = np.argmax if self.combine == "argmax" else np.argmin
        if last:
            return np.asarray(x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis, keepdims=keepdims))
        return np.asarray(find(x, axis=axis, keepdims=keepdims))

    def batch(self, flags: Sequence[bool], x: Node, *, axis: int, keepdims: bool, last: bool) -> Node:
        made: Node = self(x, axis=axis + 1, keepdims=keepdims, last=last)
        return made

    def lower(self, x: TensorType, *, axis: int, keepdims: bool, last: bool) -> Form:
        body = load(0, space_axes(x.rank), x.dtype)
        return Reduce(x.shape, (axis,), self.combine, body, I64, last=last)

    def cost(self, x: TensorType, *, axis: int, keepdims: bool, last: bool) -> Dim:
        return x.numel

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,5]"),), {"axis": 1}),
            Sample((Arg("f32[4,3]"),), {"axis": 0, "keepdims": True}),
            Sample((np.array([1, 3, 3, 0], np.float32),), {"axis": 0}),
            Sample((np.array([1, 3, 3, 0], np.float32),), {"axis": 0, "last": True}),
            Sample((Arg("f32[3,40]", special=True),), {"axis": 1}),
            Sample((Arg("f32[0,3]"),), {"axis": 1}),
            Sample((Arg("i32[n,4]"),), {"axis": 1}),
        ]


@declare
class _argmax(_ArgExtremum):
    """Index of the largest element along an axis (the first of equals; NaN wins)."""

    name = "argmax"
    combine = "argmax"


@declare
class _argmin(_ArgExtremum):
    """Index of the smallest element along an axis (the first of equals; NaN wins)."""

    name = "argmin"
    combine = "argmin"


@of_one
def summable(x: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """x in the dtype of its sum or product: `dtype`, or 64 bits for truth values and narrow integers.

    >>> summable(np.array([200, 100], np.uint8)).dtype, summable(np.array([True])).dtype
    (dtype('uint64'), dtype('int64'))
    """
    own = x.dtype if isinstance(x, Node) else dtype_of(np.asarray(x).dtype)
    if dtype is not None:
        wanted = dtype_of(dtype)
    elif own.is_bool or (own.is_int and not own.storage_only):
        wanted = U64 if own.is_int and not own.is_signed else I64
    else:
        wanted = own
    return x if wanted is own else cast(x, dtype=wanted)


class Reducer(Protocol):
    """A function that reduces axes, for type checkers."""

    @overload
    def __call__(self, x: Node, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Node: ...
    @overload
    def __call__(
        self, x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False
    ) -> Tensor: ...


def _reducer(op: Callable[..., Tensor], name: str, what: str, example: str) -> Reducer:
    def f(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        return op(x, axes=normal_axes(name, axis, rank_of(x)), keepdims=keepdims)

    f.__name__ = f.__qualname__ = name
    f.__doc__ = f"{what} over axes (all by default), as numpy.{name}.\n\n    {example}\n    "
    return cast_type(Reducer, f)


@of_one
def sum(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Sum over axes (all by default), as numpy.sum: integers and truth values add up in i64 or u64.

    `dtype` is what elements are converted to before they are added.

    >>> sum(np.array([[1, 2], [3, 4]]), axis=0)
    array([4, 6])
    >>> x = np.array([200, 100], np.uint8)
    >>> int(sum(x)), int(sum(x, dtype="u8"))
    (300, 44)
    """
    return reduce_sum(summable(x, dtype), axes=normal_axes("sum", axis, rank_of(x)), keepdims=keepdims)


@of_one
def prod(
    x: Operand,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Product over axes (all by default), as numpy.prod: integers and truth values multiply in i64 or u64.

    `dtype` is what elements are converted to before they are multiplied.

    >>> prod(np.array([[1, 2], [3, 4]]), axis=0)
    array([3, 8])
    >>> int(prod(np.array([100, 100], np.int8)))
    10000
    """
    return reduce_prod(summable(x, dtype), axes=normal_axes("prod", axis, rank_of(x)), keepdims=keepdims)


max = _reducer(
    reduce_max, "max", "Largest element", ">>> max(np.array([[1, 2], [3, 0]]), axis=0)\n    array([3, 2])"
)
min = _reducer(
    reduce_min, "min", "Smallest element", ">>> min(np.array([[1, 2], [3, 0]]), axis=0)\n    array([1, 0])"
)
any = _reducer(reduce_any, "any", "Whether any is true", ">>> bool(any(np.array([False, True])))\n    True")
all = _reducer(reduce_all, "all", "Whether all are true", ">>> bool(all(np.array([False, True])))\n    False")


@of_one
def argmax(x: Operand, axis: int | None = None, keepdims: bool = False, last: bool = False) -> Tensor:
    """Index of the largest element along an axis (of the flattened x without one), as numpy.argmax.

    Of equal elements it is the first, or the `last`; NaN counts as the largest.

    >>> argmax(np.array([[1, 5, 2], [7, 0, 7]]), axis=-1), argmax(np.array([7, 0, 7]), last=True)
    (array([1, 0]), array(2))
    """
    return _at_extremum(_argmax, x, axis, keepdims, last)


@of_one
def argmin(x: Operand, axis: int | None = None, keepdims: bool = False, last: bool = False) -> Tensor:
    """Index of the smallest element along an axis (of the flattened x without one), as numpy.argmin.

    Of equal elements it is the first, or the `last`; NaN counts as the smallest.

    >>> argmin(np.array([[1, 5, 2], [7, 0, 7]]), axis=-1)
    array([0, 1])
    """
    return _at_extremum(_argmin, x, axis, keepdims, last)


def _at_extremum(op: Any, x: Operand, axis: int | None, keepdims: bool, last: bool) -> Any:
    if axis is not None:
        return op(x, axis=normal_axis(op.name, axis, rank_of(x)), keepdims=keepdims, last=last)
    found = op(reshape(x, (-1,)), axis=0, keepdims=False, last=last)
    return reshape(found, (1,) * rank_of(x)) if keepdims else found


__all__ = [
    "BOOL",
    "all",
    "any",
    "argmax",
    "argmin",
    "max",
    "min",
    "prod",
    "reduced_shape",
    "spread",
    "sum",
    "summable",
]
