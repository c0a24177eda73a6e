"""Writing at computed places: scatter (slices along an axis), scatter_nd (tuples), scatter_elements.

Each is the opposite of the gather with the same addressing. Updates are applied in row-major order: of equal
places the last one stays; `reduction` combines instead of replacing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, AttrValue, one_of
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I64, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType, parse_type
from rlx.kernel.form import Form, Scatter
from rlx.kernel.scalar import axes, load
from rlx.ops.array.addressing import Addressing, AlongAxis, ByElements, ByTuples, Case, as_indices
from rlx.ops.array.shape import broadcast_to
from rlx.ops.math.elementwise import cast, equal, where
from rlx.ops.rules import is_half, lift_all, normal_axis, op_call, same_dtype, shape_of

REDUCTIONS = ("none", "add", "mul", "max", "min")
_REDUCTION = Attr(one_of(*REDUCTIONS), "none")
_UFUNC: dict[str, Callable[..., object]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def _full(like: Node, value: float, of: DType | None = None) -> Node:
    """A node of one value in the shape of another."""
    scalar = like.graph.constant(np.asarray(value).astype((of or like.dtype).np))
    made: Node = broadcast_to(scalar, like.shape)
    return made


class Scattering(Op):
    """Base of the scatters: data, indices and updates in, data with the updates applied out.

    `add` and `mul` round after every step; the public functions widen half precision to f32 around them.
    """

    arity = 3
    moves = (0, 2)
    address: ClassVar[Addressing]
    opposite: ClassVar[str]  # the gather with the same addressing

    def infer(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: object
    ) -> TensorType:
        same_dtype(self.name, (data, updates))
        if reduction != "none" and (data.dtype.is_bool or data.dtype.storage_only):
            raise DTypeError(
                f"{self.name}: {reduction!r} does not apply to {data}; use reduction 'none' or cast"
            )
        if reduction in ("max", "min") and data.dtype.is_complex:
            raise DTypeError(f"{self.name}: reduction {reduction!r} needs an order; {data} has none")
        want = self.address.space(self.name, data, indices, **attrs)
        need = f"{TensorType(data.dtype, want)} for {data} and {indices}"
        require_shape(want, updates.shape, f"{self.name}: updates {updates} must be {need}")
        return data

    def ref(
        self, data: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, reduction: str, **attrs: object
    ) -> np.ndarray:
        out = np.array(data)
        index = self.address.numpy_places(self.name, data.shape, indices, **attrs)
        *places, updates = (a.ravel() for a in np.broadcast_arrays(*index, updates))
        if reduction != "none":
            _UFUNC[reduction](out, tuple(places), updates)
            return out
        for *place, value in zip(*places, updates, strict=True):
            out[tuple(place)] = value
        return out

    def vjp(
        self, g: Node, y: Node, data: Node, indices: Node, updates: Node, *, reduction: str, **attrs: object
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
            last = equal(
                read(write(_full(data, -1, I64), place, "none")), place
            )  # the one of equals that stays
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
        """From the product of the nonzero updates and the number of zeros: right where updates are 0, too."""
        zero, one = _full(updates, 0.0), _full(updates, 1.0)
        is_zero = equal(updates, zero)
        zeros = read(write(_full(data, 0.0), cast(is_zero, dtype=data.dtype), "add"))
        product = read(write(_full(data, 1.0), where(is_zero, one, updates), "mul"))
        without = where(is_zero, product, product / where(is_zero, one, updates))
        others = where(equal(zeros, cast(is_zero, dtype=data.dtype)), without, zero)
        return [g * write(_full(data, 1.0), updates, "mul"), None, read(g * data) * others]

    def lower(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: object
    ) -> Form:
        places = self.address.places(data, indices, **attrs)
        value = load(2, axes(updates.rank), updates.dtype)
        combine = "set" if reduction == "none" else reduction
        return Scatter(0, data.shape, updates.shape, tuple(places), value, combine)

    def cost(
        self, data: TensorType, indices: TensorType, updates: TensorType, *, reduction: str, **attrs: object
    ) -> Dim:
        return updates.numel

    def samples(self) -> list[Sample]:
        given = [*self.address.samples(), *self.repeated()]
        return [self._sample(k, *case) for k, case in enumerate(given)]

    def repeated(self) -> list[Case]:
        """A case with equal places, once for each reduction."""
        raise NotImplementedError

    def _sample(self, number: int, data: str, indices: Any, attrs: dict[str, AttrValue]) -> Sample:
        symbolic = isinstance(indices, str)
        kind = parse_type(data)
        index = parse_type(indices) if symbolic else TensorType(I64, indices.shape)
        place = {k: v for k, v in self.canonical_attrs(attrs).items() if k != "reduction"}
        how = {"reduction": REDUCTIONS[number % len(REDUCTIONS)], **attrs}
        updates = TensorType(kind.dtype, self.address.space(self.name, kind, index, **place))
        at = Arg(indices, -3, 2) if symbolic else indices
        smooth = not symbolic and kind.dtype.is_float
        return Sample((Arg(data, distinct=True), at, Arg(str(updates), distinct=True)), how, grad=smooth)


@declare
class _scatter(Scattering):
    """Write slices of data along an axis: the opposite of gather."""

    name = "scatter"
    address = AlongAxis()
    attrs = {**address.attrs, "reduction": _REDUCTION}
    opposite = "gather"

    def batch(
        self, flags: Sequence[bool], data: Node, indices: Node, updates: Node, *, reduction: str, **attrs: int
    ) -> Node:
        axis, batch_dims = attrs["axis"], attrs["batch_dims"]
        made: Node
        if not flags[1] and batch_dims == 0:  # all batches write at the same places
            data, updates = lift_all((flags[0], flags[2]), (data, updates))
            made = _scatter(data, indices, updates, axis=axis + 1, reduction=reduction)
            return made
        lifted = lift_all(flags, (data, indices, updates))
        made = _scatter(*lifted, axis=axis + 1, batch_dims=batch_dims + 1, reduction=reduction)
        return made

    def repeated(self) -> list[Case]:
        return [("f32[3,2]", np.array([1, 1, -2, 0]), {"axis": 0, "reduction": r}) for r in REDUCTIONS]


@declare
class _scatter_nd(Scattering):
    """Write elements or slices of data at index tuples, as ONNX ScatterND."""

    name = "scatter_nd"
    address = ByTuples()
    attrs = {**address.attrs, "reduction": _REDUCTION}
    opposite = "gather_nd"

    def batch(
        self,
        flags: Sequence[bool],
        data: Node,
        indices: Node,
        updates: Node,
        *,
        batch_dims: int,
        reduction: str,
    ) -> Node:
        lifted = lift_all(flags, (data, indices, updates))
        made: Node = _scatter_nd(*lifted, batch_dims=batch_dims + 1, reduction=reduction)
        return made

    def repeated(self) -> list[Case]:
        return [("f32[2,3]", np.array([[1, 1], [1, 1], [0, -1]]), {"reduction": r}) for r in REDUCTIONS]


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

    def repeated(self) -> list[Case]:
        return [("f32[2,3]", np.array([[2, 2, 0, -1]]), {"axis": 1, "reduction": r}) for r in REDUCTIONS]


def _apply(
    name: str, x: Operand, indices: Operand, updates: Operand, reduction: str, **attrs: object
) -> Tensor:
    """Call a scatter; sums and products of half precision go through f32 and are rounded once."""
    x = x if isinstance(x, Node) else np.asarray(x)
    own = dtype(x.dtype)
    if not isinstance(updates, (Node, np.ndarray, np.generic)):
        updates = np.asarray(updates, own.np)
    half = is_half(own) and dtype(updates.dtype) is own and reduction in ("add", "mul")
    if half:
        x, updates = cast(x, dtype=F32), cast(updates, dtype=F32)
    out = op_call(name, x, as_indices(indices), updates, reduction=reduction, **attrs)
    return cast(out, dtype=own) if half else out


@of_one
def scatter(
    x: Operand,
    indices: Operand,
    updates: Operand,
    axis: int = 0,
    reduction: str = "none",
    batch_dims: int = 0,
) -> Tensor:
    """x with slices along an axis replaced, or combined (reduction add, mul, max, min), by updates.

    Updates have the shape that `gather` gives for the same x and indices; they apply in row-major order.

    >>> scatter(np.zeros(4), [1, 1, -1], np.array([1.0, 2.0, 5.0]), reduction="add")
    array([0., 3., 0., 5.])
    """
    axis = normal_axis("scatter", axis, len(shape_of(x)))
    return _apply("scatter", x, indices, updates, reduction, axis=axis, batch_dims=batch_dims)


@of_one
def scatter_nd(
    x: Operand, indices: Operand, updates: Operand, reduction: str = "none", batch_dims: int = 0
) -> Tensor:
    """x with elements or slices at index tuples replaced or combined, as ONNX ScatterND.

    >>> scatter_nd(np.zeros((2, 2)), [[0, 1], [1, 0]], np.array([1.0, 2.0]))
    array([[0., 1.],
           [2., 0.]])
    """
    return _apply("scatter_nd", x, indices, updates, reduction, batch_dims=batch_dims)


@of_one
def scatter_elements(
    x: Operand, indices: Operand, updates: Operand, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """x with one element per index replaced or combined along an axis, as ONNX ScatterElements.

    >>> scatter_elements(np.zeros((1, 3)), [[2, 0]], np.array([[7.0, 8.0]]), axis=1)
    array([[8., 0., 7.]])
    """
    axis = normal_axis("scatter_elements", axis, len(shape_of(x)))
    return _apply("scatter_elements", x, indices, updates, reduction, axis=axis)


__all__ = ["scatter", "scatter_elements", "scatter_nd"]
