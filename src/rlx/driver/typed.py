"""Typed bytes: f32 values to and from the packed storage of every dtype.

Rounding, NaN, infinity and saturation are those of `rlx.ir.dtype.convert`; these functions add exact lengths.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlx.errors import BufferUseError, DTypeError
from rlx.ir.dtype import DType, convert, dtype, pack, unpack

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Bytes = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]


def as_f32(data: object) -> F32Array:
    """`data` as a flat f32 array; arrays of another dtype are refused, not rounded in silence."""
    if isinstance(data, np.ndarray) and data.dtype != np.float32:
        raise DTypeError(f"expected f32 data, got {data.dtype.name}; convert it, or write it typed")
    return np.ascontiguousarray(data, np.float32).reshape(-1)


def f32_to_bytes(values: F32Array, to: DType) -> Bytes:
    """The packed bytes of `values` converted to `to`."""
    return pack(convert(values, to), to)


def bytes_to_f32(data: Bytes, source: DType, n: int) -> F32Array:
    """`n` packed elements as f32. A complex value has an f32 value only if its imaginary part is zero."""
    values = unpack(data, source, n)
    if source.is_complex and np.any(values.imag != 0):
        raise DTypeError(f"a {source} value with an imaginary part does not fit f32; read it typed")
    return convert(values, "f32")


def write_typed_from_f32(dst: np.ndarray | ReadableBuffer, to: object, src: object, max_elems: int) -> int:
    """Convert the f32 values `src` to dtype `to` and store them at the start of `dst`; return how many.

    More values than `max_elems`, or than `dst` has room for, is an error and writes nothing. Bytes of `dst`
    behind the values stay as they are, and so do the other bits of a last byte that is only partly used.

    >>> out = bytearray(4)
    >>> write_typed_from_f32(out, "bf16", [1.0, -2.0], 2), out.hex()
    (2, '803f00c0')
    """
    target = dtype(to)
    values = as_f32(src)
    room = _flat_bytes(dst)
    if not room.flags.writeable:
        raise BufferUseError("the destination is read-only; give writable memory")
    if values.size > max_elems:
        raise BufferUseError(f"{values.size} values do not fit a slot of {max_elems} elements; cut the data")
    data = f32_to_bytes(values, target)
    if data.nbytes > room.nbytes:
        raise BufferUseError(
            f"{values.size} values of {target} take {data.nbytes} bytes, not the {room.nbytes} given"
        )
    used_bits = values.size * target.bits % 8
    if used_bits:
        kept = room[data.nbytes - 1] & np.uint8(0xFF << used_bits & 0xFF)
        data[-1] |= kept
    room[: data.nbytes] = data
    return values.size


def read_typed_to_f32(src: np.ndarray | ReadableBuffer, source: object, n: int) -> F32Array:
    """The first `n` elements of dtype `source` in the bytes `src`, as f32.

    >>> read_typed_to_f32(bytes.fromhex("803f00c0"), "bf16", 2).tolist()
    [1.0, -2.0]
    """
    kind = dtype(source)
    data = _flat_bytes(src)
    if n < 0 or kind.nbytes(n) > data.nbytes:
        raise BufferUseError(
            f"{n} values of {kind} take {kind.nbytes(max(n, 0))} bytes, but there are {data.nbytes}"
        )
    return bytes_to_f32(data[: kind.nbytes(n)], kind, n)


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def _flat_bytes(thing: np.ndarray | ReadableBuffer) -> Bytes:
    if isinstance(thing, np.ndarray):
        if not thing.flags.c_contiguous:
            raise BufferUseError("typed bytes must be contiguous; give a contiguous array")
        return thing.reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(thing).cast("B"), np.uint8)
