"""ONNX files without the weights in them.

Protobuf copies every byte of a message, and again every time that a tensor's data is read. So tensors
with much data are turned into tensors whose data is in a file, as ONNX has them anyway: in this very file,
from which it is read when the tensor is needed. What remains of a model is short.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlx.errors import ModelImportError
from rlx.files import open_plain
from rlx.ir.text.container import read_into

LEAST_BYTES = 32768
"""Data of a tensor from which it stays in the file."""
IDENTITY = "rlx.identity"
"""Key of what a file was when its tensors were found in it: its data is not taken from another one."""

_GRAPH, _INITIALIZER = 7, 5  # fields of ModelProto and GraphProto
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14  # fields of TensorProto
_EXTERNAL = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields on the wire


class _Odd(Exception):
    """Not what files of models look like; protobuf is to say what it is."""


class _Field(NamedTuple):
    number: int
    kind: int
    start: int  # of the whole field
    content: int
    stop: int


def read_light(path: Path) -> bytes | None:
    """The bytes of a model file with its large tensors left out, or None where that is not for it: a link
    to another folder, a damaged file, another kind of file."""
    if path.resolve().parent != path.parent.resolve():  # data of tensors next to a model
        return None
    with open_plain(path) as file:
        status = os.fstat(file.fileno())
        if not status.st_size:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _model(data, path.resolve().name, identity(status))
            except (_Odd, IndexError):
                return None


def identity(status: os.stat_result) -> str:
    """What changes when a file does."""
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


class KeptFile:
    """A file with tensors that stays open, so that they can be read again: also when it is removed, or
    another one has its name. One that was changed since is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._lock = open_plain(path), threading.Lock()
        weakref.finalize(self, self._file.close)
        status = os.fstat(self._file.fileno())
        self.identity, self.size, self._time = identity(status), status.st_size, status.st_mtime_ns

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of the file."""
        if self.size < offset + nbytes:  # before memory is allocated for it
            raise ModelImportError(
                f"the file {str(self.path)!r} ends before byte {offset + nbytes}; it was truncated"
            )
        found = np.empty(nbytes, np.uint8)
        with self._lock:
            self._file.seek(offset)
            try:
                read_into(self._file, found)
            except OSError as e:
                raise self.fail(str(e.strerror or e)) from None
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size, self._time):
            raise self.fail("it has changed since it was opened")
        return found

    def fail(self, why: str) -> ModelImportError:
        return ModelImportError(f"the file {str(self.path)!r} cannot be read: {why}; load the model again")


def _model(data: mmap.mmap, location: str, known: str) -> bytes:
    out, graphs = [], 0
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.kind == _BYTES:
            out.append(_message(_GRAPH, _graph(data, field, location, known)))
            graphs += 1
        else:
            out.append(data[field.start : field.stop])
    if graphs != 1:
        raise _Odd
    return b"".join(out)


def _graph(data: mmap.mmap, graph: _Field, location: str, known: str) -> bytes:
    out, start = [], graph.content
    for field in _fields(data, graph.content, graph.stop):
        long = field.stop - field.content >= LEAST_BYTES
        if field.number == _INITIALIZER and field.kind == _BYTES and long:
            out.append(data[start : field.start])  # all that came before, in one piece
            out.append(_message(_INITIALIZER, _tensor(data, field, location, known)))
            start = field.stop
    out.append(data[start : graph.stop])
    return b"".join(out)


def _tensor(data: mmap.mmap, tensor: _Field, location: str, known: str) -> bytes:
    out, outside = [], 0
    for field in _fields(data, tensor.content, tensor.stop):
        size = field.stop - field.content
        if field.number == _RAW_DATA and field.kind == _BYTES and size >= LEAST_BYTES:
            facts = {"location": location, "offset": field.content, "length": size, IDENTITY: known}
            out += [_message(_EXTERNAL_DATA, _entry(key, str(value))) for key, value in facts.items()]
            out.append(_number(_DATA_LOCATION << 3 | _VARINT) + _number(_EXTERNAL))
            outside += 1
        else:
            outside += field.number in (_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION)
            out.append(data[field.start : field.stop])
    if outside > 1:  # data in two places
        raise _Odd
    return b"".join(out)


def _entry(key: str, value: str) -> bytes:
    return _message(1, key.encode()) + _message(2, value.encode())


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[_Field]:
    """The fields of the message at these bytes."""
    while at < end:
        start = at
        tag, at = _varint(data, at)
        kind, content = tag & 7, at
        if kind == _BYTES:
            size, content = _varint(data, at)
            at = content + size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _Odd
        if at > end:
            raise _Odd
        yield _Field(tag >> 3, kind, start, content, at)


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise _Odd


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(content)) + content
