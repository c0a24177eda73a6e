"""Typed values in device memory: `Buffer`, and `BufferHandle` for state that outlives a run."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

import numpy as np

from rlx.driver import dlpack
from rlx.driver.device import Device, open_device
from rlx.driver.region import HostMemory, Memory, Tile
from rlx.driver.typed import elements
from rlx.errors import BufferUseError, DeviceError, DTypeError
from rlx.ir.dtype import DType, dtype, pack, plain_array, unpack

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import DTypeLike

Array = np.ndarray


class Buffer:
    """A dense tensor that knows its device. Data cross only by `to_device`, `to_host`, `read`, `write`.

    On the host it is a NumPy array without a copy: `numpy()`, `np.asarray`, DLPack and the buffer protocol
    all see the same bytes. Asking that of a buffer on another device is an error.

    >>> buffer = Buffer.of(np.array([1.0, 2.0], np.float32))
    >>> buffer.device, buffer.shape, np.asarray(buffer).tolist()
    ('cpu', (2,), [1.0, 2.0])
    """

    def __init__(self, memory: Memory, kind: object, shape: tuple[int, ...], offset: int = 0) -> None:
        self.memory = memory
        self.dtype: DType = dtype(kind)
        self.shape = tuple(int(n) for n in shape)
        self.offset = offset
        memory.check_range(offset, self.nbytes)

    @classmethod
    def empty(cls, shape: tuple[int, ...], kind: object, on: str | Device = "cpu") -> Buffer:
        """A zeroed buffer on the device `on`."""
        return cls(open_device(on).allocate(dtype(kind).nbytes(elements(tuple(shape)))), kind, shape)

    @classmethod
    def of(cls, array: np.ndarray | ReadableBuffer, kind: object = None) -> Buffer:
        """A host buffer over the memory of a C-contiguous array or bytes-like object, not a copy.

        `kind` names the dtype of plain bits, for example bf16 values held in uint16:

        >>> Buffer.of(np.array([0x3F80], np.uint16), "bf16").read()
        array([1], dtype=bfloat16)
        """
        if not isinstance(array, np.ndarray):
            array = np.asarray(memoryview(array))
        array = plain_array(array, "the memory of a buffer")
        if not array.flags.c_contiguous:
            raise BufferUseError(
                f"an array with strides {array.strides} is not dense; copy it with ascontiguousarray"
            )
        found = dtype(array.dtype if kind is None else kind)
        if found.bits < 8 and kind is None:
            return cls(HostMemory.wrap(pack(array, found)), found, array.shape)
        if kind is not None and array.itemsize * 8 != found.bits:
            raise DTypeError(
                f"{array.dtype.name} elements cannot be the bits of {found}; give {found.bits}-bit ones"
            )
        return cls(HostMemory.wrap(array), found, array.shape)

    @classmethod
    def from_dlpack(cls, producer: dlpack.Producer) -> Buffer:
        """A host buffer over the memory of a tensor of another library, without a copy."""
        array, found = dlpack.take(producer)
        if not array.flags.c_contiguous:
            raise BufferUseError(
                f"a tensor with strides {array.strides} is not dense; make it contiguous first"
            )
        return cls(HostMemory.wrap(array), found, array.shape)

    @property
    def device(self) -> str:
        """Name of the device that holds the data."""
        return self.memory.device

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(elements(self.shape))

    @property
    def address(self) -> int:
        """Address of the first byte, for the tables of native code; host buffers only."""
        return self._host("given to native code").address + self.offset

    def as_tile(self) -> Tile:
        """The bytes, for copy engines and streams."""
        return Tile(self.memory, self.offset, 1, self.nbytes, self.nbytes)

    def view(self, kind: object, shape: tuple[int, ...], offset: int = 0) -> Buffer:
        """Part of the same bytes, `offset` bytes in, seen as another dtype and shape."""
        seen = Buffer(self.memory, kind, shape, self.offset + offset)
        if offset < 0 or offset + seen.nbytes > self.nbytes:
            raise BufferUseError(
                f"a view of bytes {offset}..{offset + seen.nbytes} leaves the buffer of {self.nbytes}"
            )
        return seen

    # Explicit transfers

    def to_device(self, target: str | Device) -> Buffer:
        """A buffer with the same values on device `target`; the buffer itself if it is there already."""
        to = open_device(target)
        if to.name == self.device:
            return self
        copy = Buffer(to.allocate(self.nbytes), self.dtype, self.shape)
        copy.memory.write(0, self.memory.read(self.offset, self.nbytes))
        return copy

    def to_host(self) -> Buffer:
        """A buffer with the same values in host memory; the buffer itself if it is there already."""
        return self.to_device("cpu")

    def read(self) -> Array:
        """The values as a new host array; from any device."""
        return unpack(self.memory.read(self.offset, self.nbytes), self.dtype, elements(self.shape)).reshape(
            self.shape
        )

    def write(self, array: Array) -> None:
        """Replace the values by those of an array of the same dtype and shape; on any device."""
        array = plain_array(array, "the value of a buffer")
        if array.dtype != self.dtype.np:
            raise DTypeError(f"this buffer holds {self.dtype}, not {array.dtype.name}; convert the array")
        if array.shape != self.shape:
            raise BufferUseError(
                f"this buffer has shape {self.shape}, the array {array.shape}; reshape the array"
            )
        self.memory.write(self.offset, pack(array, self.dtype))

    # Host memory as other libraries see it

    def numpy(self) -> Array:
        """The data as an array, without a copy."""
        memory = self._host("seen as an array")
        if self.dtype.bits < 8:
            raise DTypeError(f"{self.dtype} elements are packed and have no array view; use read()")
        raw = memory.bytes[self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype.np).reshape(self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise BufferUseError(
                    f"a {self.dtype} buffer cannot be seen as {np.dtype(dtype).name} without a copy; "
                    "leave out copy=False"
                )
            return array.astype(dtype)
        return array.copy() if copy else array

    def memoryview(self) -> builtins.memoryview:
        """The data by the buffer protocol; dtypes unknown to it (bf16, f8) appear as unsigned integers."""
        array = self.numpy()
        if array.dtype.kind == "V" or not array.dtype.isbuiltin == 1:
            array = array.view(f"u{array.itemsize}")
        return builtins.memoryview(array)  # type: ignore[arg-type]

    def __buffer__(self, flags: int) -> builtins.memoryview:
        """Makes `memoryview(buffer)` work from Python 3.12 on."""
        return self.memoryview()

    def __dlpack_device__(self) -> tuple[int, int]:
        self._host("exported by DLPack")
        return dlpack.CPU, 0

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        self._host("exported by DLPack")
        if stream is not None:
            raise BufferUseError("host memory has no streams; export with stream=None")
        if dl_device is not None and tuple(dl_device) != (dlpack.CPU, 0):
            raise BufferUseError("a host buffer is exported to the host only; call to_device() for others")
        array = self.numpy() if self.dtype.bits >= 8 else np.zeros(0)
        return dlpack.export(array.copy() if copy else array, self.dtype, max_version)

    def _host(self, use: str) -> HostMemory:
        if not isinstance(self.memory, HostMemory):
            raise DeviceError(
                f"this buffer is in {self.device} memory and cannot be {use}; call to_host() first"
            )
        return self.memory

    def __repr__(self) -> str:
        return f"<Buffer {self.dtype}{list(self.shape)} on {self.device}>"


class BufferHandle:
    """Named state that survives runs: a cache, an optimiser's moments. Programs update it in place.

    A program is compiled against the handle; `bind` gives it memory on a device, zeroed or with `initial`
    values, once. Independent streams each take their own instance from `fresh`.

    >>> cache = BufferHandle("cache", (2, 3), "f32")
    >>> buffer = cache.bind("cpu")
    >>> buffer.numpy()[0] = 7
    >>> cache.read()[0].tolist(), cache.fresh().bound
    ([7.0, 7.0, 7.0], False)
    """

    def __init__(self, name: str, shape: tuple[int, ...], kind: object, initial: Array | None = None) -> None:
        self.name = name
        self.shape = tuple(int(n) for n in shape)
        self.dtype: DType = dtype(kind)
        self._initial = initial
        self._buffer: Buffer | None = None
        if initial is not None and (initial.shape != self.shape or initial.dtype != self.dtype.np):
            raise BufferUseError(
                f"state {name!r} is {self.dtype}{list(self.shape)}, its initial value "
                f"{initial.dtype.name}{list(initial.shape)}; make them equal"
            )

    @property
    def bound(self) -> bool:
        """Whether the state has memory."""
        return self._buffer is not None

    @property
    def buffer(self) -> Buffer:
        """The memory of the state; it must be bound."""
        if self._buffer is None:
            raise BufferUseError(f"state {self.name!r} has no memory yet; call bind(device)")
        return self._buffer

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(elements(self.shape))

    def bind(self, on: str | Device = "cpu", room: Buffer | None = None) -> Buffer:
        """Give the state memory on a device: `room`, zeroed bytes there, or memory of its own. Binding again
        to the same device returns the same buffer."""
        to = open_device(on)
        if self._buffer is None:
            if room is None:
                self._buffer = Buffer.empty(self.shape, self.dtype, to)
            else:
                self._buffer = room.view(self.dtype, self.shape)
            if self._initial is not None:  # fresh memory is zero, and is not touched: a cache may be large
                self.reset()
        elif self._buffer.device != to.name:
            raise BufferUseError(
                f"state {self.name!r} lives on {self._buffer.device}; use fresh() to bind it to {to.name}"
            )
        return self._buffer

    def read(self) -> Array:
        """The state as a new host array."""
        return self.buffer.read()

    def write(self, array: Array) -> None:
        """Replace the state."""
        self.buffer.write(array)

    def reset(self) -> None:
        """Back to the initial value, or zero."""
        start = np.zeros(self.shape, self.dtype.np) if self._initial is None else self._initial
        self.buffer.write(start)

    def fresh(self) -> BufferHandle:
        """Another instance of the same state, not bound yet: one per independent stream."""
        return BufferHandle(self.name, self.shape, self.dtype, self._initial)

    def __repr__(self) -> str:
        place = self._buffer.device if self._buffer else "not bound"
        return f"<BufferHandle {self.name} {self.dtype}{list(self.shape)}, {place}>"
