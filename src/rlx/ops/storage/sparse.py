"""Sparse weights: a constant matrix that is mostly zeros, as its columns' non-zero elements.

Stored as bytes: where each column starts (i64, one more than there are columns), the row of every element
(i64), then the elements. There is room for `room` of them.
"""

from __future__ import annotations

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, dtype_kind, whole
from rlx.ir.dtype import U8, DType
from rlx.ir.op import Sample, declare
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Template
from rlx.ops.storage.packing import Packing
from rlx.records import dataclass


@dataclass(frozen=True)
class SparseColumns:
    """Where the parts of a sparse [k, n] matrix lie in its bytes.

    >>> SparseColumns(4, 3, 5, np.dtype(np.float32)).bytes
    92
    """

    k: int
    n: int
    room: int
    dtype: np.dtype

    @property
    def rows_at(self) -> int:
        """First byte of the row numbers."""
        return 8 * (self.n + 1)

    @property
    def values_at(self) -> int:
        """First byte of the elements."""
        return self.rows_at + 8 * self.room

    @property
    def bytes(self) -> int:
        return self.values_at + self.dtype.itemsize * self.room

    def pack(self, x: np.ndarray) -> np.ndarray:
        columns, rows = np.nonzero(x.T)
        if len(rows) > self.room:
            raise InputError(
                f"a matrix [{self.k},{self.n}] with {len(rows)} non-zero elements does not fit where it was "
                f"compiled as a sparse one with {self.room}; compile the program again with this value"
            )
        out = np.zeros(self.bytes, np.uint8)
        starts = np.searchsorted(columns, np.arange(self.n + 1))
        out[: self.rows_at] = starts.astype(np.int64).view(np.uint8)
        out[self.rows_at : self.rows_at + 8 * len(rows)] = rows.astype(np.int64).view(np.uint8)
        found = np.ascontiguousarray(x[rows, columns], self.dtype).view(np.uint8)
        out[self.values_at : self.values_at + len(found)] = found
        return out

    def fault(self, packed: np.ndarray) -> str | None:
        """What is wrong with bytes that are not known to come from `pack`; kernels go where they point."""
        starts = packed[: self.rows_at].view(np.int64)
        if int(starts[0]) < 0 or int(starts[-1]) > self.room or np.any(starts[1:] < starts[:-1]):
            return f"a sparse matrix whose columns do not start in order within {self.room} elements"
        rows = packed[self.rows_at : self.values_at].view(np.int64)
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.k):
            return f"a sparse matrix with an element in none of its {self.k} rows"
        return None

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        packed = np.ascontiguousarray(packed)
        fault = self.fault(packed)
        if fault is not None:
            raise InputError(f"{fault}; the weight is damaged")
        starts = packed[: self.rows_at].view(np.int64)
        count = int(starts[-1])
        rows = packed[self.rows_at : self.rows_at + 8 * count].view(np.int64)
        values = np.frombuffer(packed[self.values_at :].tobytes(), self.dtype, count)
        out = np.zeros((self.k, self.n), self.dtype)
        out[rows, np.repeat(np.arange(self.n), np.diff(starts))] = values
        return out


class _Sparse(Packing):
    attrs = {"k": Attr(whole), "n": Attr(whole), "room": Attr(whole), "dtype": Attr(dtype_kind)}
    not_differentiable = "it is made of weights after gradients are"

    def lower(self, x: TensorType, **layout: object) -> Form:
        return Template(self.name, tuple(layout.items()))


def columns_of(k: int, n: int, room: int, dtype: DType) -> SparseColumns:
    return SparseColumns(k, n, room, dtype.np)


def _example() -> np.ndarray:
    x = np.zeros((4, 3), np.float32)
    x[[0, 2, 3], [1, 1, 2]] = 1.5, -2.0, 4.0
    return x


@declare
class pack_sparse(_Sparse):
    """A weight matrix [k, n] as the bytes of its non-zero elements."""

    name = "pack_sparse"

    def infer(self, x: TensorType, *, k: int, n: int, room: int, dtype: DType) -> TensorType:
        if x.dtype is not dtype or x.rank < 2:
            raise ShapeError(f"pack_sparse: {x} is not a matrix of {dtype}")
        require_equal(x.shape[-2], k, f"pack_sparse: {x} is not [{k},{n}]")
        require_equal(x.shape[-1], n, f"pack_sparse: {x} is not [{k},{n}]")
        return TensorType(U8, (*x.shape[:-2], columns_of(k, n, room, dtype).bytes))

    def ref(self, x: np.ndarray, **layout: AttrValue) -> np.ndarray:
        columns = columns_of(**layout)
        packed = [columns.pack(one) for one in x.reshape(-1, *x.shape[-2:])]
        return np.reshape(packed, (*x.shape[:-2], columns.bytes))

    def check_stored(self, packed: np.ndarray, **layout: AttrValue) -> str | None:
        columns = columns_of(**layout)
        found = (columns.fault(one) for one in packed.reshape(-1, columns.bytes))
        return next((fault for fault in found if fault is not None), None)

    def samples(self) -> list[Sample]:
        x = _example()
        return [Sample((x,), {"k": 4, "n": 3, "room": room, "dtype": "f32"}) for room in (3, 5)]


@declare
class unpack_sparse(_Sparse):
    """The matrix [k, n] that lies in memory as non-zero elements; a contraction reads those directly."""

    name = "unpack_sparse"
    reader_side = True

    def infer(self, x: TensorType, *, k: int, n: int, room: int, dtype: DType) -> TensorType:
        size = columns_of(k, n, room, dtype).bytes
        if x.dtype is not U8 or x.rank < 1:
            raise ShapeError(f"unpack_sparse: {x} does not hold the bytes of a matrix")
        require_equal(x.shape[-1], size, f"unpack_sparse: {x} does not hold {size} bytes")
        return TensorType(dtype, (*x.shape[:-1], k, n))

    def ref(self, x: np.ndarray, **layout: AttrValue) -> np.ndarray:
        columns = columns_of(**layout)
        found = [columns.unpack(one) for one in x.reshape(-1, x.shape[-1])]
        return np.reshape(found, (*x.shape[:-1], columns.k, columns.n))

    def samples(self) -> list[Sample]:
        layout = {"k": 4, "n": 3, "room": 4}
        nothing = SparseColumns(**layout, dtype=np.dtype(np.float32)).pack(np.zeros((4, 3), np.float32))
        return [Sample((nothing,), {**layout, "dtype": "f32"})]
