"""Rows of a table that is stored as a matmul reads it: the table is the transposed matrix, stored once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.attr import Attr, integer, tuple_of
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, U8
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare, get_op
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Template
from rlx.kernel.layout import Layout
from rlx.kernel.layout import layout as layout_kind
from rlx.kernel.panels import Panels, QuantLayout
from rlx.ops.array.addressing import checked
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import transpose
from rlx.ops.math.elementwise import cast
from rlx.ops.quant import groups as _groups  # noqa: F401  ops are declared before they are asked for
from rlx.ops.rules import is_integer, lift_all, need_dtype
from rlx.ops.storage import packing as _packing  # noqa: F401

_READ, _DECODE = get_op("read_as"), get_op("dequantize_groups")
M = TypeVar("M")  # a matrix as a type, as an array, or in a graph


@declare
class gather_stored(Op):
    """Columns of a matrix [k, n], chosen by indices, as rows of f32: [..., k].

    `layouts` say how the matrix is stored: one of its elements, or one each of codes, scales and (perhaps)
    zeros, or minimums of unsigned codes, for each `group` of k. With `block`, each of these factors has two
    layouts: of codes, and of their factors for so many groups. An index out of range is an error when the
    program runs.
    """

    name = "gather_stored"
    arity = 2
    storage = True
    attrs = {"layouts": Attr(tuple_of(layout_kind)), "group": Attr(integer, 0), "block": Attr(integer, 0)}
    not_differentiable = "it is made of weights after gradients are"

    def infer(
        self, stored: TensorType, indices: TensorType, *, layouts: tuple[Layout, ...], group: int, block: int
    ) -> TensorType:
        need_dtype(self.name, indices, is_integer)
        parts = [_READ.infer(stored, layout=own) for own in layouts]
        matrix = _matrix(parts, layouts, group, block, _DECODE.infer)
        if not isinstance(matrix, TensorType) or matrix.rank != 2:
            raise ShapeError(f"{self.name}: {stored} does not hold one matrix")
        if not matrix.dtype.is_float:
            raise DTypeError(f"{self.name}: {matrix} is not a matrix of real numbers")
        return TensorType(F32, (*indices.shape, matrix.shape[0]))

    def ref(
        self, stored: np.ndarray, indices: np.ndarray, *, layouts: tuple[Layout, ...], group: int, block: int
    ) -> np.ndarray:
        parts: list[object] = [own.unpack(stored) for own in layouts]
        matrix = np.asarray(_matrix(parts, layouts, group, block, _DECODE.ref))
        rows: np.ndarray = matrix.T[checked(self.name, indices, matrix.shape[1])]
        return rows.astype(np.float32)

    def batch(
        self,
        flags: Sequence[bool],
        *operands: Node,
        layouts: tuple[Layout, ...],
        group: int,
        block: int,
    ) -> Node:
        made: Node
        if not flags[0]:
            made = self(*operands, layouts=layouts, group=group, block=block)
            return made
        stored, indices = lift_all(flags, operands)
        parts = [_READ(stored, layout=own) for own in layouts]
        matrix = _matrix(parts, layouts, group, block, _DECODE)
        made = cast(gather(transpose(matrix, (0, 2, 1)), indices, axis=1, batch_dims=1), dtype=F32)
        return made

    def lower(
        self, stored: TensorType, indices: TensorType, *, layouts: tuple[Layout, ...], group: int, block: int
    ) -> Form:
        return Template(self.name, (("layouts", layouts), ("group", group), ("block", block)))

    def cost(
        self, stored: TensorType, indices: TensorType, *, layouts: tuple[Layout, ...], group: int, block: int
    ) -> Dim:
        return 4 * self.infer(stored, indices, layouts=layouts, group=group, block=block).numel

    def samples(self) -> list[Sample]:
        def one(
            nbytes: int, at: object, layouts: tuple[Layout, ...], kind: str, group: int = 0, block: int = 0
        ) -> Sample:
            stored = Arg(f"{kind}[{nbytes}]", *((0, 63) if kind == "u8" else ()))
            attrs = {"layouts": layouts, "group": group, "block": block}
            return Sample((stored, at), attrs, grad=False)  # type: ignore[arg-type]

        wide, odd = Panels(5, 50, 48, 16), Panels(7, 9, 4, 2, 2)
        coded = QuantLayout(40, 9, bits=4, group=16, lanes=4)
        bytes_ = QuantLayout(16, 20, bits=8, group=8, lanes=8, scale="f16", zeros=True)
        quads = QuantLayout(16, 20, bits=8, group=8, lanes=8, scale="f16", quads=True)
        least = QuantLayout(16, 20, bits=4, group=8, lanes=8, scale="f16", minimums=True)
        nested = QuantLayout(40, 9, bits=4, group=8, lanes=4, scale="f16", minimums=True, block=3)
        blocks = QuantLayout(40, 20, bits=8, group=8, lanes=8, scale="f16", block=4)
        six = QuantLayout(40, 9, bits=6, group=16, lanes=4, scale="f16")
        six_least = QuantLayout(20, 9, bits=6, group=16, lanes=8, minimums=True, block=2)
        some = np.array([[0, 8], [-9, -1]])
        return [
            one(wide.elements, np.array([0, 49, 47, -1], np.int32), (wide.layout,), "f32"),
            one(odd.elements, some, (odd.layout,), "f16"),
            one(odd.elements, Arg("i64[n]", 0, 8), (odd.layout,), "bf16"),
            one(coded.nbytes, some, coded.layouts, "u8", 16),
            one(bytes_.nbytes, np.array(19), bytes_.layouts, "u8", 8),
            one(bytes_.nbytes, np.zeros((0, 2), np.int64), bytes_.layouts, "u8", 8),
            one(quads.nbytes, some, quads.layouts, "u8", 8),
            one(least.nbytes, some, least.layouts, "u8", 8),
            one(nested.nbytes, some, nested.layouts, "u8", 8, 3),
            one(blocks.nbytes, some, blocks.layouts, "u8", 8, 4),
            one(six.nbytes, some, six.layouts, "u8", 16),
            one(six_least.nbytes, some, six_least.layouts, "u8", 16, 2),
        ]


def _matrix(
    parts: Sequence[M], layouts: Sequence[Layout], group: int, block: int, decode: Callable[..., M]
) -> M:
    """The matrix of parts: one, or codes and their factors. Unsigned codes have minimums."""
    codes, *factors = parts
    if not factors:
        return codes
    if block and len(factors) % 2:
        raise ShapeError("gather_stored: factors in blocks are codes and factors of these")
    if block:
        pairs = zip(factors[::2], factors[1::2], strict=True)
        factors = [decode(*pair, bits=8, group=block, minimums=False) for pair in pairs]
    element = layouts[0].packed
    minimums = element is not None and element.dtype is U8
    return decode(codes, *factors, bits=8, group=group, minimums=minimums)
