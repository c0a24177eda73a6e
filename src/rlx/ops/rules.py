"""Rules that many ops share: axis checks, broadcasting and its inverse, batching by a leading axis."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast, overload

import numpy as np

from rlx.errors import DTypeError, ShapeError, TypeMismatchError, current_where
from rlx.ir.assume import require_equal
from rlx.ir.dim import Constraint, Dim, dim_max
from rlx.ir.dtype import F32, DType
from rlx.ir.graph import Node
from rlx.ir.op import get_op
from rlx.ir.operand import Arrays, Nodes, Operand, Tensor
from rlx.ir.types import Shape, TensorType, TupleType
from rlx.kernel.scalar import Scalar, axis, const

Accepts = Callable[[DType], bool]


def is_number(d: DType) -> bool:
    return not d.is_bool and not d.storage_only


def is_real(d: DType) -> bool:
    return is_number(d) and not d.is_complex


def is_computable(d: DType) -> bool:
    return not d.storage_only


def is_floating(d: DType) -> bool:
    return (d.is_float or d.is_complex) and not d.storage_only


def is_real_float(d: DType) -> bool:
    return d.is_float and not d.storage_only


def is_complex(d: DType) -> bool:
    return d.is_complex


def is_integer(d: DType) -> bool:
    return d.is_int and not d.storage_only


def is_boolean(d: DType) -> bool:
    return d.is_bool


_NEEDS: dict[Accepts, str] = {
    is_number: "a number dtype",
    is_real: "a real number dtype",
    is_computable: "a dtype that computes",
    is_floating: "a floating-point dtype",
    is_real_float: "a real floating-point dtype",
    is_complex: "a complex dtype",
    is_integer: "an integer dtype",
    is_boolean: "bool",
}

# What to do about a dtype that is refused.
_CASTS: dict[Accepts, str] = {
    is_number: "; cast it, for example rlx.ops.cast(x, 'i32')",
    is_floating: "; cast it, for example rlx.ops.cast(x, 'f32')",
    is_real_float: "; cast it, for example rlx.ops.cast(x, 'f32')",
    is_complex: "; cast it, for example rlx.ops.cast(x, 'c64')",
    is_integer: "; cast it, for example rlx.ops.cast(x, 'i64')",
    is_boolean: "; compare it, for example x != 0",
}


def need_dtype(name: str, t: TensorType, accepts: Accepts) -> None:
    """Refuse dtypes that the op does not compute with."""
    if isinstance(t, TupleType):
        raise TypeMismatchError(f"{name}: an operand has several results; pick one first")
    if not accepts(t.dtype):
        wanted = _NEEDS.get(accepts, "a supported dtype")
        hint = _CASTS.get(accepts, "")
        if t.dtype.storage_only:
            hint = "; it only stores values, cast it to f32 first"
        raise DTypeError(f"{name}: operand {t} is not of {wanted}{hint}")


def same_dtype(name: str, types: Sequence[TensorType]) -> DType:
    """All operands must agree; mixing is the user's decision."""
    first = types[0].dtype
    for t in types[1:]:
        if t.dtype is not first:
            listed = ", ".join(map(str, types))
            cast = f"rlx.ops.cast(x, {first.name!r})"
            raise DTypeError(f"{name}: operands {listed} have different dtypes; cast one, for example {cast}")
    return first


def broadcast_shapes(name: str, shapes: Sequence[Shape]) -> Shape:
    """NumPy broadcasting. Only a literal 1 stretches; a symbol is never silently taken to be 1."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = []
    for i in range(rank):
        best: Dim = 1
        for s in shapes:
            j = i - (rank - len(s))
            if j < 0 or s[j] == 1:
                continue
            if best == 1:
                best = s[j]
            else:
                best = require_equal(best, s[j], lambda: _cannot_broadcast(name, shapes))
        out.append(best)
    return tuple(out)


def require_stretch(shape: Shape, to: Shape, what: str) -> None:
    """Prove, refute (ShapeError) or assume that an operand broadcasts to a shape without changing it.

    >>> require_stretch((1, 4), (2, 3, 4), "a mask does not fit")
    >>> require_stretch((3, 4), (1, 4), "a mask does not fit")
    Traceback (most recent call last):
    rlx.errors.ShapeError: a mask does not fit ...
    """
    if len(shape) > len(to):
        raise ShapeError(what)
    for d, full in zip(reversed(shape), reversed(to), strict=False):
        if d != 1:
            require_equal(d, full, what)


def _cannot_broadcast(name: str, shapes: Sequence[Shape]) -> str:
    listed = " and ".join("[" + ",".join(map(str, s)) + "]" for s in shapes)
    return f"{name}: shapes {listed} do not broadcast; each pair of dims must be equal or one of them 1"


def broadcast_index(shape: Shape, out: Shape) -> list[Scalar]:
    """Index of an operand of `shape` at the point axes(len(out))."""
    skip = len(out) - len(shape)
    return [const(0) if d == 1 and out[skip + i] != 1 else axis(skip + i) for i, d in enumerate(shape)]


def normal_axis(name: str, axis_: int, rank: int) -> int:
    """A negative axis counts from the end.

    >>> normal_axis("softmax", -1, rank=2)
    1
    """
    try:
        axis_ = operator.index(axis_)
    except TypeError:
        raise TypeMismatchError(
            f"{name}: {axis_!r} is not an axis; give a whole number, negative to count from the end"
        ) from None
    if not -rank <= axis_ < rank:
        raise ShapeError(f"{name}: axis {axis_} is out of range for rank {rank}")
    return axis_ + rank if axis_ < 0 else axis_


def as_axes(given: object) -> tuple[Tensor, ...]:
    """One axis or several as a tuple; what is in it is not checked.

    >>> as_axes(1), as_axes([0, -1]), as_axes(np.array(2))
    ((1,), (0, -1), (2,))
    """
    if isinstance(given, np.ndarray):
        given = given.tolist()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def normal_axes(name: str, axes_: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted distinct non-negative axes; None is all of them."""
    if axes_ is None:
        return tuple(range(rank))
    given = as_axes(axes_)
    out = sorted(normal_axis(name, a, rank) for a in given)
    if len(set(out)) != len(out):
        raise ShapeError(f"{name}: axes {tuple(given)} name an axis twice")
    return tuple(out)


def check_axes(name: str, axes_: Sequence[int], rank: int) -> None:
    """Attributes hold canonical axes: sorted, distinct, non-negative."""
    if list(axes_) != sorted(set(axes_)) or any(not 0 <= a < rank for a in axes_):
        raise ShapeError(f"{name}: axes {tuple(axes_)} are not sorted distinct axes of rank {rank}")


@overload
def op_call(name: str, x: Node, /, *rest: Operand, **attrs: object) -> Node: ...
@overload
def op_call(name: str, /, *operands: Operand, **attrs: object) -> Tensor: ...
def op_call(name: str, /, *operands: Operand, **attrs: object) -> Tensor:
    """Call an op declared in another module."""
    return get_op(name)(*operands, **attrs)


def shape_of(x: Operand) -> Shape:
    """The shape of a node, an array or anything that NumPy takes for one."""
    return x.shape if isinstance(x, Node) else np.asarray(x).shape


def rank_of(x: Operand) -> int:
    """Number of axes of a node, an array or anything that NumPy takes for one."""
    return len(shape_of(x))


def ensure(x: Operand, kind: str, lhs: Dim, rhs: Dim, what: str) -> None:
    """Prove a fact about sizes, refuse with `what`, or assume it in the graph of x (a run-time guard)."""
    fact = Constraint(kind, lhs, rhs, current_where())
    verdict = fact.known()
    if verdict is False:
        raise ShapeError(what)
    if verdict is None and isinstance(x, Node):
        x.graph.assume(fact)


def unbroadcast(g: Node, like: Node) -> Node:
    """Sum a gradient over the axes along which `like` was broadcast."""
    if g.shape == like.shape:
        return g
    extra = g.rank - like.rank
    axes_ = [*range(extra)]
    axes_ += [extra + i for i, d in enumerate(like.shape) if d == 1 and g.shape[extra + i] != 1]
    if axes_:
        g = op_call("reduce_sum", g, axes=tuple(axes_), keepdims=False)
    return g if g.shape == like.shape else op_call("reshape", g, shape=like.shape)


def lift(x: Node, size: Dim) -> Node:
    """An unbatched operand repeated along a new leading batch axis."""
    made: Node = op_call("broadcast_to", x, shape=(size, *x.shape))
    return made


def batch_size(flags: Sequence[bool], operands: Sequence[Node]) -> Dim:
    """Size of the batch axis (axis 0 of any batched operand)."""
    return next(x.shape[0] for f, x in zip(flags, operands, strict=True) if f)


def lift_all(flags: Sequence[bool], operands: Sequence[Node]) -> list[Node]:
    """Every operand with a leading batch axis."""
    size = batch_size(flags, operands)
    return [x if f else lift(x, size) for f, x in zip(flags, operands, strict=True)]


def align_batched(flags: Sequence[bool], operands: Sequence[Node]) -> list[Node]:
    """Operands of a broadcasting op: size-1 axes after the batch axis so that ranks line up."""
    rank = max(x.rank - f for f, x in zip(flags, operands, strict=True))
    out = []
    for f, x in zip(flags, operands, strict=True):
        missing = rank - (x.rank - 1) if f else 0
        out.append(op_call("reshape", x, shape=(x.shape[0], *(1,) * missing, *x.shape[1:])) if missing else x)
    return out


def shift(axes_: Sequence[int], by: int = 1) -> tuple[int, ...]:
    """Axes moved by a new leading axis."""
    return tuple(a + by for a in axes_)


A = TypeVar("A", bound=Arrays)
N = TypeVar("N", bound=Nodes)


def in_f32(ref: Callable[..., A]) -> Callable[..., A]:
    """Half-precision operands are computed in f32 and rounded once, as native code does."""

    def wrapped(*arrays: np.ndarray, **attrs: object) -> A:
        narrow = next((a.dtype for a in arrays if a.dtype.itemsize == 2 and a.dtype.kind not in "iub"), None)
        if narrow is None:
            return ref(*arrays, **attrs)
        wide = [a.astype(np.float32) if a.dtype == narrow else a for a in arrays]
        out = ref(*wide, **attrs)
        return cast(A, tuple(back(o, narrow) for o in out) if isinstance(out, tuple) else back(out, narrow))

    def back(given: object, narrow: np.dtype) -> np.ndarray:
        out = np.asarray(given)
        return out.astype(narrow) if out.dtype == np.float32 else out

    return wrapped


def is_half(d: DType) -> bool:
    return d.is_float and d.bits == 16


def widen(x: Node) -> Node:
    """A half-precision node as f32; others as they are."""
    return op_call("cast", x, dtype=F32) if is_half(x.dtype) else x


def expand_in_f32(expand: Callable[..., N]) -> Callable[..., N]:
    """The expansion that `in_f32` is the meaning of: half precision goes through f32 and is rounded once."""

    def wrapped(*operands: Node, **attrs: object) -> N:
        narrow = next((x.dtype for x in operands if is_half(x.dtype)), None)
        if narrow is None:
            return expand(*operands, **attrs)
        out = expand(*(widen(x) for x in operands), **attrs)
        return cast(N, tuple(back(o, narrow) for o in out) if isinstance(out, tuple) else back(out, narrow))

    def back(out: Node, narrow: DType) -> Node:
        return op_call("cast", out, dtype=narrow) if out.dtype is F32 else out

    return wrapped


def with_gaps(n: Dim, gap: int) -> Dim:
    """The size of an axis of `n` elements with `gap` others between neighbours; nothing stays nothing.

    >>> from rlx.ir.dim import sym
    >>> with_gaps(3, 2), with_gaps(0, 2), str(with_gaps(sym("n"), 1))
    (7, 0, 'max(2*n-1,0)')
    """
    return n if gap == 0 else dim_max(n + (n - 1) * gap, 0)
