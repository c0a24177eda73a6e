"""Arenas: one piece of device memory, cut into the slots that a plan gave to its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rlx.driver.region import Memory, Tile
from rlx.driver.typed import F32Array, as_f32, bytes_to_f32, elements, f32_to_bytes
from rlx.errors import BufferUseError, DTypeError
from rlx.ir.dtype import DType, dtype, pack, plain_array, unpack
from rlx.records import dataclass

Array = np.ndarray


@dataclass(frozen=True)
class ArenaSlot:
    """Where one value lives in an arena, and what it is. Slots of different lifetimes may share bytes.

    >>> ArenaSlot(64, "i4", (3, 3)).nbytes
    5
    """

    offset: int
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))

    @property
    def elements(self) -> int:
        return elements(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements."""
        return self.dtype.nbytes(self.elements)


class DeviceArena(Protocol):
    """Typed access to the slots of a plan, by node id. Lengths are exact; neighbours are never touched."""

    def byte_offset(self, id: int) -> int | None:
        """Offset of the slot of `id` from the base, or None if it has no slot."""
        ...

    def has_buffer(self, id: int) -> bool:
        """Whether `id` has a slot."""
        ...

    def size_bytes(self) -> int:
        """Bytes of the whole arena."""
        ...

    def write(self, id: int, array: Array) -> None:
        """Store `array`, whose dtype and length must be those of the slot."""
        ...

    def read(self, id: int) -> Array:
        """The values of a slot, as a new host array."""
        ...

    def write_input_f32(self, id: int, dtype: object, data: object) -> None:
        """Store f32 values in a slot of dtype `dtype`, converting them."""
        ...

    def read_output_f32(self, id: int, dtype: object, n: int) -> F32Array:
        """The `n` values of a slot of dtype `dtype`, converted to f32."""
        ...


class Arena:
    """A `DeviceArena` over memory of any device."""

    def __init__(
        self, memory: Memory, slots: Mapping[int, ArenaSlot], size: int | None = None, alignment: int = 64
    ) -> None:
        self.memory = memory
        self.alignment = alignment
        self._slots = dict(slots)
        self._size = arena_size(slots) if size is None else size
        for id, slot in self._slots.items():
            if slot.offset < 0 or slot.offset + slot.nbytes > self._size:
                raise BufferUseError(
                    f"slot of node {id} ends at byte {slot.offset + slot.nbytes}, outside the arena "
                    f"of {self._size} bytes; plan a larger arena"
                )

    @property
    def device(self) -> str:
        return self.memory.device

    def byte_offset(self, id: int) -> int | None:
        slot = self._slots.get(id)
        return None if slot is None else slot.offset

    def has_buffer(self, id: int) -> bool:
        return id in self._slots

    def size_bytes(self) -> int:
        return self._size

    def slot(self, id: int) -> ArenaSlot:
        """The slot of `id`; having none is an error."""
        found = self._slots.get(id)
        if found is None:
            raise BufferUseError(f"node {id} has no slot in this arena of {len(self._slots)} slots")
        return found

    def tile(self, id: int) -> Tile:
        """The bytes of a slot, for copy engines and streams."""
        slot = self.slot(id)
        return Tile(self.memory, slot.offset, 1, slot.nbytes, slot.nbytes)

    def write(self, id: int, array: Array) -> None:
        """Store `array`; its shape must be the slot's, or flat with as many elements.

        >>> import numpy as np
        >>> from rlx.driver import HostArena
        >>> arena = HostArena({7: ArenaSlot(0, "f16", (2,))})
        >>> arena.write(7, np.array([1, 2], np.float16)); arena.read(7).tolist()
        [1.0, 2.0]
        """
        slot = self.slot(id)
        array = plain_array(array, f"the value of node {id}")
        if array.dtype != slot.dtype.np:
            raise DTypeError(
                f"the slot of node {id} holds {slot.dtype}, not {array.dtype.name}; convert the array"
            )
        if array.shape != slot.shape and array.shape != (slot.elements,):
            raise BufferUseError(
                f"the slot of node {id} has shape {slot.shape}, the array {array.shape}; reshape the array"
            )
        self.memory.write(slot.offset, pack(array, slot.dtype))

    def read(self, id: int) -> Array:
        slot = self.slot(id)
        data = self.memory.read(slot.offset, slot.nbytes)
        return unpack(data, slot.dtype, slot.elements).reshape(slot.shape)

    def write_input_f32(self, id: int, dtype: object, data: object) -> None:
        slot = self._slot_of_dtype(id, dtype)
        values = as_f32(data)
        self._check_length(id, slot, values.size)
        self.memory.write(slot.offset, f32_to_bytes(values, slot.dtype))

    def read_output_f32(self, id: int, dtype: object, n: int) -> F32Array:
        slot = self._slot_of_dtype(id, dtype)
        self._check_length(id, slot, n)
        return bytes_to_f32(self.memory.read(slot.offset, slot.nbytes), slot.dtype, n)

    def _slot_of_dtype(self, id: int, wanted: object) -> ArenaSlot:
        slot = self.slot(id)
        if dtype(wanted) is not slot.dtype:
            raise DTypeError(f"the slot of node {id} holds {slot.dtype}, not {dtype(wanted)}")
        return slot

    @staticmethod
    def _check_length(id: int, slot: ArenaSlot, n: int) -> None:
        if n != slot.elements:
            raise BufferUseError(
                f"the slot of node {id} holds {slot.elements} elements, not {n}; lengths must be equal"
            )


def arena_size(slots: Mapping[int, ArenaSlot]) -> int:
    """Bytes up to the end of the last slot."""
    return max((slot.offset + slot.nbytes for slot in slots.values()), default=0)
