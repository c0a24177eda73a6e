"""Elements in bytes: how the tensors that share a storage of bytes write each of theirs.

Such a layout names its elements: `f16` are two bytes, `i4+8` four bits that hold the element plus 8, `u4`
four bits that hold it as it is. Elements of 4 bits are two to a byte, the first in the low half.
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
        return units.view(np.uint8)

    def from_bytes(self, stored: NDArray[np.uint8]) -> np.ndarray:
        """The inverse of `to_bytes`; a view where elements are whole bytes."""
        if self.bits == 4:
            return np.stack([stored & 15, stored >> np.uint8(4)], axis=-1).reshape(*stored.shape[:-1], -1)
        return stored.view(self.unit)


ELEMENTS = {
    e.name: e
    for e in (
        Element("i4+8", I8, 4, 8),
        Element("u4", U8, 4),
        Element("i8", I8, 8),
        Element("u8", U8, 8),
        Element("f16", F16, 16),
        Element("f32", F32, 32),
    )
}
