"""Results whose size depends on data: nonzero, argwhere, compress, unique, data_size.

Their size is a new symbol, bounded by the number of elements: by itself where that is a number, else
by an assumption of the graph, which the type rules here add. So everything after them is typed and planned;
its value is set when the program runs. A size that is itself a number of the data has no bound: memory behind
it is planned once it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from rlx.errors import ShapeError, TransformError, TypeMismatchError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, boolean, dim, integer, optional
from rlx.ir.build import graph_of
from rlx.ir.dim import Dim, sym
from rlx.ir.dtype import BOOL, I64
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Arg, MultiOp, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType, TupleType
from rlx.kernel.form import Form, Template
from rlx.ops.array.gather import gather
from rlx.ops.array.rearrange import flatten
from rlx.ops.array.shape import reshape, slice_axis, transpose
from rlx.ops.math.elementwise import cast
from rlx.ops.rules import is_computable, is_real, need_dtype, normal_axis, shape_of

MOST_ROWS = 1 << 40
"""A size from data that is larger is a mistake in the data."""


def fresh_count(name: str, bound: Dim | None, graph: Graph | None) -> Dim:
    """A symbol that nothing else uses, named by the place in the program where it arises."""
    chain: list[Graph] = []
    while graph is not None:
        chain.append(graph)
        graph = getattr(graph, "parent", None)
    place = "_".join(str(len(g)) if g is chain[-1] else f"{g.name}{len(g)}" for g in reversed(chain))
    return sym(f"{name}_{place or 0}", max=bound if isinstance(bound, int) else None)


def _no_batch(op: Op) -> NoReturn:
    raise TransformError(f"vmap: {op.name} has a result of another size for each batch; use where or sort")


@declare
class _nonzero(Op):
    """Positions [rank, count] of the elements that are not 0, in row-major order, as ONNX NonZero."""

    name = "nonzero"
    arity = 1
    finds_size = True
    counts = "count"
    attrs = {"count": Attr(dim)}
    not_differentiable = "its value is an index"

    def infer(self, x: TensorType, *, count: Dim) -> TensorType:
        need_dtype(self.name, x, is_computable)
        require_at_least(x.numel, count, f"nonzero: {x} has fewer elements than {count}")
        return TensorType(I64, (x.rank, count))

    def ref(self, x: np.ndarray, *, count: Dim) -> np.ndarray:
        found = np.nonzero(x.reshape(-1))[0]
        return np.asarray(np.unravel_index(found, x.shape) if x.ndim else np.zeros((0, len(found))), np.int64)

    def batch(self, flags: Sequence[bool], x: Node, *, count: Dim) -> Node:
        _no_batch(self)

    def lower(self, x: TensorType, *, count: Dim) -> Form:
        return Template("nonzero")

    def cost(self, x: TensorType, *, count: Dim) -> Dim:
        return x.numel

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("i32[n]", 0, 1),), {"count": "k"}),
            Sample((Arg("bool[n,m]"),), {"count": "c"}),
            Sample((Arg("f32[n,4,3]", special=True),), {"count": "c"}),
            Sample((Arg("f32[n,0]"),), {"count": "c"}),
        ]


def _positions(x: Operand) -> Tensor:
    x = x if isinstance(x, Node) else np.asarray(x)
    count = fresh_count("nonzero", x.tensor.numel if isinstance(x, Node) else x.size, graph_of((x,)))
    return _nonzero(x, count=count)


def nonzero(x: Operand) -> tuple[Tensor, ...]:
    """Positions of the elements that are not 0, one index vector per axis, as numpy.nonzero.

    >>> nonzero(np.array([[0, 1], [2, 0]]))
    (array([0, 1]), array([1, 0]))
    """
    found = _positions(x)
    return tuple(reshape(slice_axis(found, 0, i, 1), (found.shape[1],)) for i in range(found.shape[0]))


@of_one
def argwhere(x: Operand) -> Tensor:
    """Positions of the elements that are not 0, one row each, as numpy.argwhere.

    >>> argwhere(np.array([[0, 1], [2, 0]]))
    array([[0, 1],
           [1, 0]])
    """
    return transpose(_positions(x))


@of_one
def compress(condition: Operand, x: Operand, axis: int | None = None) -> Tensor:
    """Slices of x along an axis (elements of the flattened x without one) where a 1-D condition holds.

    As numpy.compress and ONNX Compress: the condition may be shorter than the axis.

    >>> compress(np.array([True, False, True]), np.array([[1, 2, 3], [4, 5, 6]]), axis=1)
    array([[1, 3],
           [4, 6]])
    """
    if len(shape_of(condition)) != 1:
        raise ShapeError(f"compress: the condition has {len(shape_of(condition))} axes; it must have one")
    if axis is None:
        x, axis = flatten(x), 0
    return gather(x, nonzero(condition)[0], axis)


@declare
class _unique(MultiOp):
    """Distinct elements (or slices along an axis): first place of each, what every element is, counts."""

    name = "unique"
    arity = 1
    finds_size = True
    attrs = {"axis": Attr(optional(integer), None), "sorted": Attr(boolean, True), "count": Attr(dim)}
    not_differentiable = "its values are indices and counts"
    host_only = "it compares whole slices in an order that no kernel has; the host sorts them"

    def infer(self, x: TensorType, *, axis: int | None, sorted: bool, count: Dim) -> TupleType:
        need_dtype(self.name, x, is_real)
        if axis is not None and not 0 <= axis < x.rank:
            raise ShapeError(f"unique: axis {axis} is out of range for {x}")
        total = x.numel if axis is None else x.shape[axis]
        require_at_least(total, count, f"unique: {x} has fewer elements than {count}")
        return TupleType(tuple(TensorType(I64, (n,)) for n in (count, total, count)))

    def ref(self, x: np.ndarray, *, axis: int | None, sorted: bool, count: Dim) -> tuple[np.ndarray, ...]:
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x
        _, first, inverse, counts = np.unique(wide, True, True, True, axis=axis)
        inverse = inverse.reshape(-1)
        if not sorted:  # in order of first occurrence
            order = np.argsort(first, kind="stable")
            first, counts, inverse = first[order], counts[order], np.argsort(order, kind="stable")[inverse]
        return tuple(a.astype(np.int64) for a in (first, inverse, counts))

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        _no_batch(self)

    def cost(self, x: TensorType, **attrs: object) -> Dim:
        return x.numel * 16

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("i32[n,m]", -1, 1),), {"count": "c"}),
            Sample((Arg("i32[n,m]", -1, 1),), {"count": "c", "sorted": False}),
            Sample((Arg("i32[n,m,2]", 0, 1),), {"count": "c", "axis": 1}),
            Sample((Arg("i32[m,n]", 0, 1),), {"count": "c", "axis": 0, "sorted": False}),
            Sample((Arg("f32[n,4]", special=True),), {"count": "c"}),
            Sample((Arg("f32[n,0]"),), {"count": "c"}),
        ]


def unique(
    x: Operand,
    axis: int | None = None,
    sorted: bool = True,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Tensor:
    """Distinct elements of x (slices along an axis), as numpy.unique; `sorted=False` keeps the order of x.

    On request also the first position of each, the number of every element among them, and their counts.

    >>> unique(np.array([3, 1, 3]), return_counts=True)
    (array([1, 3]), array([1, 2]))
    """
    x = x if isinstance(x, Node) else np.asarray(x)
    if axis is None:
        source, along, bound = flatten(x), 0, x.tensor.numel if isinstance(x, Node) else x.size
    else:
        along = axis = normal_axis("unique", axis, len(x.shape))
        source, bound = x, x.shape[axis]
    count = fresh_count("unique", bound, graph_of((x,)))
    found = _unique(x, axis=axis, sorted=sorted, count=count)
    wanted = (return_index, return_inverse, return_counts)
    extra = [a for a, want in zip(found, wanted, strict=True) if want]
    values = gather(source, found[0], along)
    return (values, *extra) if extra else values


@declare
class _data_size(Op):
    """A result without elements, [count, 0]: its first size is the number that the operand holds."""

    name = "data_size"
    arity = 1
    finds_size = True
    attrs = {"count": Attr(dim)}
    not_differentiable = "its value is a size"
    host_only = "memory behind it is planned by the host, once the size is known"

    def infer(self, x: TensorType, *, count: Dim) -> TensorType:
        if x.rank or x.dtype is not I64:
            raise TypeMismatchError(f"data_size: {x} is not a number; it must be a scalar i64[]")
        return TensorType(BOOL, (count, 0))

    def ref(self, x: np.ndarray, *, count: Dim) -> np.ndarray:
        found = int(x)
        if not 0 <= found <= MOST_ROWS:
            raise ShapeError(f"a size that data decide is {found}; sizes are 0 .. {MOST_ROWS}")
        return np.empty((found, 0), np.bool_)

    def batch(self, flags: Sequence[bool], x: Node, *, count: Dim) -> Node:
        _no_batch(self)

    def cost(self, x: TensorType, *, count: Dim) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [Sample((Arg("i64[]", 0, 9),), {"count": "k"})]


def data_size(x: Operand) -> Dim:
    """The number in an integer scalar as a size: a symbol whose value each run finds; of an array, an int.

    Shapes of what follows may hold it, as in `broadcast_to(y, (data_size(n), 4))`. A run whose data hold a
    negative number is refused.

    >>> data_size(np.array(3))
    3
    """
    x = reshape(cast(x, dtype=I64), ())
    found = _data_size(x, count=fresh_count("data_size", None, graph_of((x,))))
    return found.shape[0]


__all__ = ["argwhere", "compress", "data_size", "nonzero", "unique"]
