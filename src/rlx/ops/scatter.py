"""Writing at computed places: scatter (slices along an axis), scatter_nd (tuples), scatter_elements.

Each is the opposite of the gather with the same addressing. Updates are applied in ascending order of their own
indices, so of equal places the last one stays; `reduction` combines instead of replacing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.attr import Attr, one_of
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64
from rlx.ir.form import Form, Scatter
from rlx.ir.graph import Node, require_shape
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.scalar import axes, load
from rlx.ir.types import TensorType
from rlx.ops.addressing import Addressing, AlongAxis, ByElements, ByTuples, as_indices
from rlx.ops.elementwise import cast, equal, where
from rlx.ops.rules import lift_all, normal_axis, op_call, same_dtype, shape_of, widen
from rlx.ops.shape import broadcast_to, flat_index

REDUCTIONS = ("none", "add", "mul", "max", "min")
_REDUCTION = Attr(one_of(*REDUCTIONS), "none")
_UFUNC: dict[str, Callable[..., Any]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def _full(like: Node, value: float, dtype: Any = None) -> Node:
    """A node of one value in the shape of another."""
    scalar = like.graph.constant(np.asarray(value).astype((dtype or like.dtype).np))
    made: Node = broadcast_to(scalar, like.shape)
    return made


class Scattering(Op):
    """Base of the scatters: data, indices and updates in, data with the updates applied out.

    `add` and `mul` round after every step; the public functions widen half precision to f32 around them.
    """

    arity = 3
    address: ClassVar[Addressing]
    opposite: ClassVar[str]  # the gather with the same addressing

    def infer(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: Any
    ) -> TensorType:
        same_dtype(self.name, (data, updates))
        if reduction != "none" and (data.dtype.is_bool or data.dtype.storage_only):
            raise DTypeError(f"{self.name}: reduction {reduction!r} does not apply to {data}; use 'none' or cast it")
        if reduction in ("max", "min") and data.dtype.is_complex:
            raise DTypeError(f"{self.name}: reduction {reduction!r} needs an order, which {data} does not have")
        want = self.address.space(self.name, data, indices, **attrs)
        shown = TensorType(data.dtype, want)
        require_shape(want, updates.shape, f"{self.name}: updates {updates} must be {shown} for {data} and {indices}")
        return data

    def ref(
        self, data: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, reduction: str, **attrs: Any
    ) -> np.ndarray:
        out = np.array(data)
        places = self.address.numpy_places(self.name, data.shape, indices, **attrs)
        *places, updates = (a.ravel() for a in np.broadcast_arrays(*places, updates))
        if reduction != "none":
            _UFUNC[reduction](out, tuple(places), updates)
            return out
        for *place, value in zip(*places, updates, strict=True):  # in order: of equal places the last one stays
            out[tuple(place)] = value
        return out

    def vjp(
        self, g: Node, y: Node, data: Node, indices: Node, updates: Node, *, reduction: str, **attrs: Any
    ) -> list[Node | None]:
        def read(x: Node) -> Node:
            made: Node = op_call(self.opposite, x, indices, **attrs)
            return made

        def write(x: Node, values: Node, how: str) -> Node:
            made: Node = self(x, indices, values, reduction=how, **attrs)
            return made

        if reduction == "add":
            return [g, None, read(g)]
        if reduction == "none":
            zero = _full(updates, 0.0)
            place = op_call("iota", shape=updates.shape, axis=None, dtype=I64)
            last = equal(read(write(_full(data, -1, I64), place, "none")), place)  # of equal places, the last one stays
            return [write(g, zero, "none"), None, where(last, read(g), zero)]
        if reduction == "mul":
            return self._product_gradient(g, data, updates, read, write)
        kept = cast(equal(data, y), dtype=data.dtype)
        hits = cast(equal(updates, read(y)), dtype=data.dtype)
        share = g / write(kept, hits, "add")  # ties share the gradient; a NaN is equal to nothing
        return [share * kept, None, read(share) * hits]

    @staticmethod
    def _product_gradient(
        g: Node, data: Node, updates: Node, read: Callable[..., Node], write: Callable[..., Node]
    ) -> list[Node | None]:
        """The product of all the others, right for zeros: the product of the nonzero ones and the count of zeros."""
        zero, one = _full(updates, 0.0), _full(updates, 1.0)
        is_zero = equal(updates, zero)
        zeros = read(write(_full(data, 0.0), cast(is_zero, dtype=data.dtype), "add"))
        product = read(write(_full(data, 1.0), where(is_zero, one, updates), "mul"))
        without = where(is_zero, product, product / where(is_zero, one, updates))
        others = where(equal(zeros, cast(is_zero, dtype=data.dtype)), without, zero)
        return [g * write(_full(data, 1.0), updates, "mul"), None, read(g * data) * others]

    def lower(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: Any
    ) -> Form:
        places = self.address.places(data, indices, **attrs)
        value = load(2, axes(updates.rank), updates.dtype)
        combine = "set" if reduction == "none" else reduction
        return Scatter(0, data.shape, updates.shape, tuple(places), value, combine)

    def cost(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: Any
    ) -> Dim:
        return updates.numel

    def samples(self) -> list[Sample]:
        return [self._sample(k, *given) for k, given in enumerate([*self.address.samples(), *self.repeated()])]

    def repeated(self) -> list[tuple[Any, Any, dict[str, Any]]]:
        """A case with equal places, once for each reduction."""
        raise NotImplementedError

    def _sample(self, k: int, data: str, indices: Any, attrs: dict[str, Any]) -> Sample:
        from rlx.ir.types import parse_type

        symbolic = isinstance(indices, str)
        index = parse_type(indices) if symbolic else TensorType(I64, indices.shape)
        full = {"batch_dims": 0, **attrs} if "batch_dims" in self.address.attrs else attrs
        kind = parse_type(data)
        space = self.address.space(self.name, kind, index, **{n: v for n, v in full.items() if n != "reduction"})
        shape = ",".join(map(str, space))
        at = Arg(indices, -3, 2) if symbolic else indices
        how = {"reduction": REDUCTIONS[k % len(REDUCTIONS)], **attrs}
        smooth = not symbolic and kind.dtype.is_float
        return Sample((Arg(data, distinct=True), at, Arg(f"{kind.dtype}[{shape}]", distinct=True)), how, grad=smooth)


@declare
class _scatter(Scattering):
    """Write slices of data along an axis: the opposite of gather."""

    name = "scatter"
    address = AlongAxis()
    attrs = {**address.attrs, "reduction": _REDUCTION}
    opposite = "gather"

    def batch(
        self, flags: Sequence[bool], data: Node, indices: Node, updates: Node, *, axis: int, batch_dims: int, reduction: str
    ) -> Node:
        made: Node
        if not flags[1] and batch_dims == 0:  # all batches write at the same places
            data, updates = lift_all((flags[0], flags[2]), (data, updates))
            made = _scatter(data, indices, updates, axis=axis + 1, reduction=reduction)
            return made
        lifted = lift_all(flags, (data, indices, updates))
        made = _scatter(*lifted, axis=axis + 1, batch_dims=batch_dims + 1, reduction=reduction)
        return made

    def repeated(self) -> list[tuple[Any, Any, dict[str, Any]]]:
        return [("f32[3,2]", np.array([1, 1, -2, 0]), {"axis": 0, "reduction": r}) for r in REDUCTIONS]


@declare
class _scatter_nd(Scattering):
    """Write elements or slices of data at index tuples, as ONNX ScatterND."""

    name = "scatter_nd"
    address = ByTuples()
    attrs = {**address.attrs, "reduction": _REDUCTION}
    opposite = "gather_nd"

    def batch(
        self, flags: Sequence[bool], data: Node, indices: Node, updates: Node, *, batch_dims: int, reduction: str
    ) -> Node:
        lifted = lift_all(flags, (data, indices, updates))
        made: Node = _scatter_nd(*lifted, batch_dims=batch_dims + 1, reduction=reduction)
        return made

    def repeated(self) -> list[tuple[Any, Any, dict[str, Any]]]:
        return [("f32[2,3]", np.array([[1, 1], [1, 1], [0, -1], [1, 1]]), {"reduction": r}) for r in REDUCTIONS]


@declare
class _scatter_elements(Scattering):
    """Write one element of data per index, along an axis, as ONNX ScatterElements."""

    name = "scatter_elements"
    address = ByElements()
    attrs = {**address.attrs, "reduction": _REDUCTION}
    opposite = "gather_elements"

    def batch(
        self, flags: Sequence[bool], data: Node, indices: Node, updates: Node, *, axis: int, reduction: str
    ) -> Node:
        lifted = lift_all(flags, (data, indices, updates))
        made: Node = _scatter_elements(*lifted, axis=axis + 1, reduction=reduction)
        return made

    def repeated(self) -> list[tuple[Any, Any, dict[str, Any]]]:
        return [("f32[2,3]", np.array([[2, 2, 0, -1]]), {"axis": 1, "reduction": r}) for r in REDUCTIONS]


def _apply(op: Op, x: Any, indices: Any, updates: Any, reduction: str, **attrs: Any) -> Any:
    """Sums and products of half precision go through f32 and are rounded once."""
    if not isinstance(x, Node) and isinstance(updates, Node):
        x = updates.graph.constant(np.asarray(x))
    if reduction in ("add", "mul") and isinstance(x, Node) and widen(x) is not x:
        if not isinstance(updates, Node):
            updates = x.graph.constant(np.asarray(updates), x.dtype)
        same_dtype(op.name, (x.tensor, updates.tensor))
        return cast(op(widen(x), as_indices(indices), widen(updates), reduction=reduction, **attrs), dtype=x.dtype)
    return op(x, as_indices(indices), updates, reduction=reduction, **attrs)


def scatter(x: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none", batch_dims: int = 0) -> Any:
    """x with slices along an axis replaced (or combined: add mul max min); updates are shaped as `gather` gives them.

    >>> scatter(np.zeros(4), [1, 1, -1], np.array([1.0, 2.0, 5.0]), reduction="add")
    array([0., 3., 0., 5.])
    """
    axis = normal_axis("scatter", axis, len(shape_of(x)))
    return _apply(_scatter, x, indices, updates, reduction, axis=axis, batch_dims=batch_dims)


def scatter_nd(x: Any, indices: Any, updates: Any, reduction: str = "none", batch_dims: int = 0) -> Any:
    """x with elements or slices at index tuples replaced or combined, as ONNX ScatterND.

    >>> scatter_nd(np.zeros((2, 2)), [[0, 1], [1, 0]], np.array([1.0, 2.0]))
    array([[0., 1.],
           [2., 0.]])
    """
    return _apply(_scatter_nd, x, indices, updates, reduction, batch_dims=batch_dims)


def scatter_elements(x: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none") -> Any:
    """x with one element per index replaced or combined along an axis, as ONNX ScatterElements.

    >>> scatter_elements(np.zeros((1, 3)), [[2, 0]], np.array([[7.0, 8.0]]), axis=1)
    array([[8., 0., 7.]])
    """
    axis = normal_axis("scatter_elements", axis, len(shape_of(x)))
    return _apply(_scatter_elements, x, indices, updates, reduction, axis=axis)


__all__ = ["scatter", "scatter_elements", "scatter_nd"]
