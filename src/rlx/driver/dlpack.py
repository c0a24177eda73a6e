"""DLPack both ways, for host memory, in every dtype that DLPack names (NumPy itself stops at bf16 and f8).

The structures are those of dlpack.h 1.x. A capsule named "dltensor" or "dltensor_versioned" hands memory
over; its consumer renames it and calls the deleter when done, which is where we drop our reference.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Protocol

import numpy as np

from rlx.errors import BufferUseError, DTypeError
from rlx.ir.dtype import ALL_DTYPES, DType

CPU = 1  # kDLCPU
_READ_ONLY = 1  # flag of a versioned tensor
_VERSION = (1, 0)

_FAMILY = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_SPECIAL = {"bf16": 4, "f8e4m3fn": 10, "f8e4m3fnuz": 11, "f8e5m2": 12, "f8e5m2fnuz": 13, "f8e8m0": 14}
_CODES = {d: (_SPECIAL.get(d.name, _FAMILY[d.kind]), d.bits) for d in ALL_DTYPES if d.bits >= 8}
_DTYPES = {code: d for d, code in _CODES.items()}


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_Kind = type[_Managed] | type[_Versioned]
_KINDS: dict[bytes, _Kind] = {
    b"dltensor_versioned": _Versioned,
    b"dltensor": _Managed,
}

_api = ctypes.pythonapi
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Prototypes of our own: setting argtypes on the shared library object would change them for everyone.
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)
# The destructor gets a dying object: its address must not become a counted reference again.
_dying_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

# Exports that a consumer still holds: key in the context field -> everything that must stay alive.
_exports: dict[int, tuple[object, ...]] = {}
_keys = itertools.count(1)


def _drop(address: int, kind: _Kind) -> None:
    _exports.pop(kind.from_address(address).context, None)


_DELETERS = {
    _Managed: _Deleter(lambda address: _drop(address, _Managed)),
    _Versioned: _Deleter(lambda address: _drop(address, _Versioned)),
}


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _capsule_died(capsule: int) -> None:
    """A capsule that nobody consumed still owns its tensor."""
    for name, kind in _KINDS.items():
        if _dying_is(capsule, name):
            _drop(_dying_pointer(capsule, name), kind)


def export(array: np.ndarray, kind: DType, max_version: tuple[int, int] | None) -> object:
    """A capsule over the memory of `array` (C order); the array lives until the consumer lets go."""
    if kind not in _CODES:
        raise DTypeError(f"DLPack has no packed {kind}; convert to i8 or f32 first")
    readonly = not array.flags.writeable
    versioned = max_version is not None and max_version[0] >= 1
    if readonly and not versioned:
        raise BufferUseError("read-only memory needs a consumer that speaks DLPack 1; copy the buffer first")
    structure = _Versioned if versioned else _Managed
    managed = structure()
    shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    steps = [step // array.itemsize for step in array.strides]
    strides = (ctypes.c_int64 * max(1, array.ndim))(*steps)
    tensor = managed.tensor
    tensor.data = array.ctypes.data
    tensor.device_type, tensor.device_id, tensor.ndim = CPU, 0, array.ndim
    tensor.dtype = _DataType(*_CODES[kind], 1)
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    if versioned:
        managed.major, managed.minor = _VERSION
        managed.flags = _READ_ONLY if readonly else 0
    key = next(_keys)
    managed.context, managed.deleter = key, _DELETERS[structure]
    _exports[key] = (managed, shape, strides, array)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return _capsule_new(ctypes.addressof(managed), name, ctypes.cast(_capsule_died, ctypes.c_void_p))


class _Owner:
    """Calls the producer's deleter when the last array over its memory is gone."""

    def __init__(self, address: int, kind: _Kind) -> None:
        self._managed = kind.from_address(address)
        self._address = address

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(self._address)


class Producer(Protocol):
    """What exports its memory by DLPack; before DLPack 1, without a version."""

    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(self, *, max_version: tuple[int, int] = ...) -> object: ...


def take(producer: Producer) -> tuple[np.ndarray, DType]:
    """The memory that `producer` exports, as an array without a copy, and its dtype."""
    device_type = producer.__dlpack_device__()[0]
    if device_type != CPU:
        raise BufferUseError(f"{type(producer).__name__} is not in host memory; move it to the host first")
    try:
        capsule = producer.__dlpack__(max_version=_VERSION)
    except TypeError:  # a producer from before DLPack 1
        capsule = producer.__dlpack__()
    for name, kind in _KINDS.items():
        if _capsule_is(capsule, name):
            address = _capsule_pointer(capsule, name)
            array, dtype = _array(address, kind)  # may refuse, and then the capsule keeps its tensor
            _capsule_rename(capsule, b"used_" + name)
            return array, dtype
    raise BufferUseError(f"{type(producer).__name__}.__dlpack__ did not return a DLPack capsule")


def _array(address: int, kind: _Kind) -> tuple[np.ndarray, DType]:
    managed = kind.from_address(address)
    if kind is _Versioned and managed.major != _VERSION[0]:
        raise BufferUseError(f"DLPack version {managed.major} is not one this RLX understands")
    tensor = managed.tensor
    found = _DTYPES.get((tensor.dtype.code, tensor.dtype.bits))
    if found is None or tensor.dtype.lanes != 1:
        raise DTypeError(
            f"DLPack type code {tensor.dtype.code} with {tensor.dtype.bits} bits x {tensor.dtype.lanes} "
            "has no dtype in RLX"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if 0 in shape:
        return np.zeros(shape, found.np), found
    strides = None  # dense
    length = found.itemsize * math.prod(shape)
    if tensor.strides:
        strides = tuple(step * found.itemsize for step in tensor.strides[: tensor.ndim])
        length = found.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if min(strides, default=0) < 0:
            raise BufferUseError("a DLPack tensor with negative strides is not supported; copy it first")
    block = (ctypes.c_uint8 * length).from_address(tensor.data + tensor.byte_offset)
    block.owner = _Owner(address, kind)
    array = np.ndarray(shape, found.np, np.frombuffer(block, np.uint8), 0, strides)
    if kind is _Versioned and managed.flags & _READ_ONLY:
        array.flags.writeable = False
    return array, found
