"""GGUF files: metadata and tensors, mapped into memory.

Nothing of a tensor is read before it is asked for. A file from outside is data: every length and offset is
compared with the size of the file before it is used, so a damaged file is a `FormatError` that says where.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np

from rlx.errors import FormatError
from rlx.files import file_boundary, open_plain
from rlx.llm.blocks import FORMATS, OTHERS, Format
from rlx.llm.tensors import Entry, InMemory, Mapped, Tensors

Array = np.ndarray
Value: TypeAlias = bool | int | float | str | list[str] | Array
V = TypeVar("V")

_MAGIC = b"GGUF"
_TENSOR_COUNT = 8  # where the number of tensors is, behind the version
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_MOST_AXES = 4
_MOST_ENTRIES = 1 << 20  # of metadata and tensors; the largest models have some thousands


class GgufFile:
    """A GGUF file: `metadata` has values by key, `tensors` the tensors by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._prepare(os.fspath(path))
        with file_boundary(self.path, "GGUF file"), open_plain(self.path) as file:
            self._read(file.read(len(_MAGIC)), lambda: Mapped(file, self.path))

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> GgufFile:
        """What the bytes of a file hold; `name` is what errors call them."""
        made = cls.__new__(cls)
        made._prepare(name)
        with file_boundary(name, "GGUF file"):
            made._read(data[: len(_MAGIC)], lambda: InMemory(data, name))
        return made

    def _prepare(self, path: str) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors = Tensors(path, {})

    def _read(self, start: bytes, opened: Callable[[], Mapped]) -> None:
        if start != _MAGIC:
            raise FormatError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        mapped = opened()
        reader = _Reader(self, mapped)
        reader.read()
        mapped.check()
        self._mapped, self._end = mapped, reader.end_of_metadata

    def without_tensors(self) -> bytes:
        """The bytes of a file with the same metadata, and nothing else.

        >>> empty = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
        >>> GgufFile.of_bytes("empty", empty).without_tensors() == empty
        True
        """
        head = self._mapped.bytes[: self._end].tobytes()
        self._mapped.check()
        return head[:_TENSOR_COUNT] + bytes(8) + head[_TENSOR_COUNT + 8 :]

    def get(self, key: str, kind: type[V], default: V | None = None) -> V:
        """A value of the metadata, which must be of a kind; a float may be stored as an integer."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None:
            raise FormatError(f"{self.path}: the metadata has no {key!r}")
        wrong_bool = isinstance(value, bool) and kind is not bool
        if wrong_bool or not isinstance(value, kind):
            raise FormatError(
                f"{self.path}: metadata {key!r} is of type {type(value).__name__}, not {kind.__name__}"
            )
        return value


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """A GGUF file, its metadata and table of tensors read and checked.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "small.gguf"
    >>> key = struct.pack("<Q7sI", 7, b"general", 4)
    >>> _ = file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 7))
    >>> open_gguf(file).metadata
    {'general': 7}
    """
    return GgufFile(path)


class _Reader:
    """Walks the head of a file. Every step says how many bytes it needs and what for."""

    def __init__(self, file: GgufFile, mapped: Mapped) -> None:
        self.file, self.mapped, self.data, self.at = file, mapped, mapped.bytes.data, len(_MAGIC)
        self.end_of_metadata = self.at

    def fail(self, text: str) -> FormatError:
        return FormatError(f"{self.file.path} is not a valid GGUF file: {text} (at byte {self.at})")

    def need(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin; they are taken."""
        at, left = self.at, self.mapped.size - self.at
        if count > left:
            raise self.fail(f"{what} takes {count} bytes, and {left} are left")
        self.at += count
        return at

    def number(self, code: str, what: str) -> int | float | bool:
        at = self.need(struct.calcsize(code), what)
        found: int | float | bool = struct.unpack_from(code, self.data, at)[0]
        return found

    def count(self, what: str, code: str = "<Q") -> int:
        return int(self.number(code, what))

    def text(self, what: str) -> str:
        length = self.count(f"the length of {what}")
        at = self.need(length, what)
        return str(self.data[at : at + length], "utf-8", "surrogateescape")

    def texts(self, count: int, what: str) -> list[str]:
        """Strings of an array; their lengths are compared with the file in one place, for speed."""
        self.at = self.need(8 * count, what)  # each has a length of eight bytes at least
        found, at, size, data = [], self.at, self.mapped.size, self.data
        length_at = struct.Struct("<Q").unpack_from
        for i in range(count):
            if at + 8 > size or length_at(data, at)[0] > size - at - 8:
                self.at = at
                raise self.fail(f"string {i} of {what} goes beyond the end of the file")
            length = length_at(data, at)[0]
            found.append(str(data[at + 8 : at + 8 + length], "utf-8", "surrogateescape"))
            at += 8 + length
        self.at = at
        return found

    def value(self, key: str) -> Value:
        kind = self.count(f"the type of {key!r}", "<I")
        if kind == _STRING:
            return self.text(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _NUMBERS:
            raise self.fail(f"{key!r} has the unknown type {kind}")
        return self.number(_NUMBERS[kind], f"the value of {key!r}")

    def array(self, key: str) -> Value:
        kind = self.count(f"the element type of {key!r}", "<I")
        count = self.count(f"the length of {key!r}")
        if kind == _STRING:
            return self.texts(count, f"the array {key!r}")
        if kind not in _NUMBERS:
            raise self.fail(f"the elements of {key!r} have the type {kind}, which is not read")
        dtype = np.dtype(np.bool_ if kind == _BOOL else _NUMBERS[kind])
        at = self.need(count * dtype.itemsize, f"the array {key!r}")
        if kind == _BOOL:
            return np.frombuffer(self.mapped.bytes, np.uint8, count, at) != 0
        return np.frombuffer(self.mapped.bytes, dtype, count, at)

    def read(self) -> None:
        version = self.count("the version", "<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            why = "it was written for a big-endian machine" if swapped else f"it has version {version}"
            raise self.fail(f"{why}; versions 2 and 3 for little-endian machines are read")
        tensors, entries = self.count("the number of tensors"), self.count("the number of metadata entries")
        if max(tensors, entries) > _MOST_ENTRIES:
            raise self.fail(f"it says that it has {tensors} tensors and {entries} metadata entries")
        metadata = self.file.metadata
        for i in range(entries):
            key = self.text(f"the key of metadata entry {i}")
            if key in metadata:
                raise self.fail(f"the metadata has {key!r} twice")
            metadata[key] = self.value(key)
        self.end_of_metadata = self.at
        found = [self.tensor(i) for i in range(tensors)]
        alignment = self.file.get("general.alignment", int, 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"the alignment {alignment} is not a power of two")
        data = -(-self.at // alignment) * alignment
        for name, shape, format, offset in found:
            self.place(Entry(name, shape, format, self.mapped, data + offset), offset % alignment == 0)

    def tensor(self, number: int) -> tuple[str, tuple[int, ...], Format, int]:
        name = self.text(f"the name of tensor {number}")
        axes = self.count(f"the rank of {name!r}", "<I")
        if not 1 <= axes <= _MOST_AXES:
            raise self.fail(f"tensor {name!r} has {axes} axes; 1 to {_MOST_AXES} are possible")
        sizes = [self.count(f"the shape of {name!r}") for _ in range(axes)]
        kind = self.count(f"the format of {name!r}", "<I")
        format = FORMATS.get(kind)
        if format is None:
            known = ", ".join(f.name for f in FORMATS.values())
            raise self.fail(f"tensor {name!r} has the format {OTHERS.get(kind, kind)}; RLX reads {known}")
        if min(sizes) < 1 or sizes[0] % format.size:
            raise self.fail(
                f"tensor {name!r} has the shape {sizes}: sizes are at least 1, and rows of {format.name} "
                f"have a multiple of {format.size} elements"
            )
        return name, tuple(reversed(sizes)), format, self.count(f"the offset of {name!r}")

    def place(self, entry: Entry, aligned: bool) -> None:
        if entry.name in self.file.tensors:
            raise self.fail(f"it has the tensor {entry.name!r} twice")
        if not aligned or entry.offset + entry.nbytes > self.mapped.size:
            raise self.fail(
                f"tensor {entry.name!r} has {entry.nbytes} bytes at {entry.offset}, which is not an aligned "
                f"place inside the file of {self.mapped.size} bytes; it may be cut short"
            )
        self.file.tensors.entries[entry.name] = entry
