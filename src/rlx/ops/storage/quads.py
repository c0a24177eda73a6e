"""Small weights: a constant matrix of signed bytes in panels for products that are exact for those only."""

from __future__ import annotations

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, boolean, whole
from rlx.ir.dtype import I8
from rlx.ir.op import Sample, declare
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Template
from rlx.kernel.quads import QuadPanels
from rlx.ops.storage.packing import Packing


class _Quads(Packing):
    attrs = {
        **{name: Attr(whole) for name in ("k", "n", "columns", "lanes", "room")},
        "seven": Attr(boolean, default=False),
    }
    not_differentiable = "it is made of weights after gradients are"

    def lower(self, x: TensorType, **layout: object) -> Form:
        return Template(self.name, tuple(layout.items()))


def _example() -> np.ndarray:
    return np.array([[127, 1, -128], [-2, 99, 127], [3, 99, 0], [-4, 0, 5], [5, 1, 1]], np.int8)


_LAYOUT = {"k": 5, "n": 3, "columns": 2, "lanes": 1}


@declare
class pack_quads(_Quads):
    """A weight matrix [k, n] of bytes in panels of quads; what is too large waits."""

    name = "pack_quads"

    def infer(self, x: TensorType, **layout: AttrValue) -> TensorType:
        quads = QuadPanels(**layout)
        if x.dtype is not I8 or x.rank < 2:
            raise ShapeError(f"pack_quads: {x} is not a matrix of i8")
        for size, wanted in zip(x.shape[-2:], (quads.k, quads.n), strict=True):
            require_equal(size, wanted, f"pack_quads: {x} is not [{quads.k},{quads.n}]")
        return TensorType(I8, (*x.shape[:-2], quads.elements))

    def ref(self, x: np.ndarray, **layout: AttrValue) -> np.ndarray:
        quads = QuadPanels(**layout)
        packed = [quads.pack(one) for one in x.reshape(-1, *x.shape[-2:])]
        return np.reshape(np.array(packed, np.uint8).view(np.int8), (*x.shape[:-2], quads.elements))

    def check_stored(self, packed: np.ndarray, **layout: AttrValue) -> str | None:
        quads = QuadPanels(**layout)
        found = (quads.fault(one) for one in packed.reshape(-1, quads.elements))
        return next((fault for fault in found if fault is not None), None)

    def samples(self) -> list[Sample]:
        pairs = [Sample((_example(),), {**_LAYOUT, "room": room}) for room in (1, 3)]
        return [*pairs, Sample((_example(),), {**_LAYOUT, "room": 3, "seven": True})]


@declare
class unpack_quads(_Quads):
    """The matrix [k, n] of bytes that lies in memory in panels of quads; a contraction reads those."""

    name = "unpack_quads"
    reader_side = True

    def infer(self, x: TensorType, **layout: AttrValue) -> TensorType:
        quads = QuadPanels(**layout)
        if x.dtype is not I8 or x.rank < 1:
            raise ShapeError(f"unpack_quads: {x} does not hold the bytes of a matrix")
        size = quads.elements
        require_equal(x.shape[-1], size, f"unpack_quads: {x} does not hold {size} bytes")
        return TensorType(I8, (*x.shape[:-1], quads.k, quads.n))

    def ref(self, x: np.ndarray, **layout: AttrValue) -> np.ndarray:
        quads = QuadPanels(**layout)
        found = [quads.unpack(one) for one in x.reshape(-1, x.shape[-1])]
        return np.reshape(np.array(found, np.int8), (*x.shape[:-1], quads.k, quads.n))

    def samples(self) -> list[Sample]:
        out = []
        for seven, room in ((False, 2), (True, 3)):
            packed = QuadPanels(**_LAYOUT, room=room, seven=seven).pack(_example()).view(np.int8)
            out.append(Sample((packed,), {**_LAYOUT, "room": room, "seven": seven}))
        return out
