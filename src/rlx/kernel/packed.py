"""Elements in bytes: how the tensors that share a storage of bytes write each of theirs.

Such a layout names its elements: `f16` are two bytes, `i4+8` four bits that hold the element plus 8, `u4`
four bits that hold it as it is. Elements of 4 bits are two to a byte, the first in the low half.

Elements of 6 bits come in sets: one of `i6+32x16` (plus 32) or `u6x16` (as they are) has 16 columns of 16
elements, 12 bytes each. Element i of a column is byte i % 4 of quad i // 4. Three vectors follow one another,
with 32 bits for each column: the first three quads. A byte of them leaves two bits over; these are the bits
of the fourth quad, the lowest first:

    bits 0-5 of byte b in vector v: element 4 v + b
    bits 6-7 of byte b in vector v: bits 2 v and 2 v + 1 of element 12 + b

So one shift and one mask give most elements of a vector, as bytes, 16-bit or 32-bit integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ShapeError
from rlx.ir.dtype import F16, F32, I8, U8, DType
from rlx.records import dataclass


@dataclass(frozen=True)
class Element:
    """An element as bits: the dtype that it is read as, and what is added before it is stored.

    >>> ELEMENTS["i4+8"].from_units(ELEMENTS["i4+8"].to_units(np.array([-8, 7], np.int8))).tolist()
    [-8, 7]
    """

    name: str
    dtype: DType
    bits: int
    shift: int = 0
    columns: int = 0  # of a set of elements of 6 bits

    @property
    def together(self) -> int:
        """Elements that are written as whole bytes together."""
        return 16 * self.columns if self.columns else max(1, 8 // self.bits)

    @property
    def places(self) -> int:
        """How far apart elements side by side are: distances count in these, which divide bytes."""
        return 3 if self.bits == 6 else 1

    @property
    def place_bits(self) -> int:
        return self.bits // self.places

    @property
    def unit(self) -> np.dtype:
        """Of arrays with one element of the storage each."""
        return np.dtype(np.uint8) if self.bits < 8 else self.dtype.np

    def to_units(self, x: np.ndarray) -> np.ndarray:
        """Elements as they are stored; what does not fit in the bits is refused."""
        if self.dtype.is_float or (x.dtype == self.dtype.np and self.bits == 8):
            return x.astype(self.dtype.np, copy=False)  # the reference may hold floats in more bits
        low = -(1 << (self.bits - 1)) if self.dtype.is_signed else 0
        high = low + (1 << self.bits) - 1
        if x.size and (x.min() < low or x.max() > high):
            told = f"codes of {self.bits} bits must be in {low}..{high}"
            raise ShapeError(f"{told}, not {x.min()}..{x.max()}")
        return np.asarray(x + self.shift, self.dtype.np).view(self.unit)

    def from_units(self, units: np.ndarray) -> np.ndarray:
        """The inverse of `to_units`."""
        if self.bits == 8 * units.itemsize:
            return units
        return np.asarray(units.view(self.dtype.np) - self.dtype.np.type(self.shift))

    def to_bytes(self, units: np.ndarray) -> NDArray[np.uint8]:
        """A storage [..., elements] as bytes."""
        if self.bits == 4:
            paired: NDArray[np.uint8] = units[..., 0::2] | units[..., 1::2] << np.uint8(4)
            return paired
        if self.bits == 6:
            quads = units.reshape(*units.shape[:-1], -1, self.columns, 4, 4)
            words = quads[..., :3, :] | (quads[..., 3:, :] >> _LEFT_OVER & np.uint8(3)) << np.uint8(6)
            return np.ascontiguousarray(words.swapaxes(-3, -2)).reshape(*units.shape[:-1], -1)
        return units.view(np.uint8)

    def from_bytes(self, stored: NDArray[np.uint8]) -> np.ndarray:
        """The inverse of `to_bytes`; a view where elements are whole bytes."""
        if self.bits == 4:
            return np.stack([stored & 15, stored >> np.uint8(4)], axis=-1).reshape(*stored.shape[:-1], -1)
        if self.bits == 6:
            words = stored.reshape(*stored.shape[:-1], -1, 3, self.columns, 4).swapaxes(-3, -2)
            fourth = np.bitwise_or.reduce(words >> np.uint8(6) << _LEFT_OVER, axis=-2, keepdims=True)
            return np.concatenate([words & np.uint8(63), fourth], axis=-2).reshape(*stored.shape[:-1], -1)
        return stored.view(self.unit)


_LEFT_OVER = np.array([[0], [2], [4]], np.uint8)
"""Where the two bits that each of three quads leaves over are in the fourth."""

ELEMENTS = {
    e.name: e
    for e in (
        Element("i4+8", I8, 4, 8),
        Element("u4", U8, 4),
        *[Element(f"i6+32x{columns}", I8, 6, 32, columns) for columns in (4, 8, 16)],
        *[Element(f"u6x{columns}", U8, 6, 0, columns) for columns in (4, 8, 16)],
        Element("i8", I8, 8),
        Element("u8", U8, 8),
        Element("f16", F16, 16),
        Element("f32", F32, 32),
    )
}
