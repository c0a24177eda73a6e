"""Tensors of model files, mapped into memory: what GGUF files and safetensors have in common."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import BinaryIO

import ml_dtypes
import numpy as np

from rlx.errors import FormatError
from rlx.ir.dtype import ParamValue
from rlx.llm.blocks import Format, Groups, decode
from rlx.records import dataclass
from rlx.runtime.memory import drop_pages
from rlx.runtime.native.bus_guard import Guarded, is_available

Array = np.ndarray

_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype("u1"),
}


class Mapped:
    """A file in memory. What is cut off while it is mapped reads as zeros, and `check` refuses it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path, self.size = path, os.fstat(file.fileno()).st_size
        self._guarded = Guarded(file.fileno(), self.size) if is_available() else None
        if self._guarded is not None:
            self.bytes = self._guarded.array
        else:
            self.bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def check(self) -> None:
        """Raise if a page was read that the file no longer has."""
        if self._guarded is not None and self._guarded.broken:
            raise FormatError(f"{self.path} was cut short while it was read")


class InMemory(Mapped):
    """The bytes of a file that is not on a disk."""

    def __init__(self, data: bytes, path: str) -> None:
        self.path, self.size, self._guarded = path, len(data), None
        self.bytes = np.frombuffer(data, np.uint8)


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file: its shape as NumPy has it, its format, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    format: Format
    source: Mapped
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements // self.format.size * self.format.bytes

    def rows(self) -> Array:
        """Its bytes, one row of them for each row of the last axis."""
        raw = self.source.bytes[self.offset : self.offset + self.nbytes]
        return raw.reshape(-1, self.shape[-1] // self.format.size * self.format.bytes)

    def groups(self) -> Groups | None:
        """Small integers as [rows, columns]; None for floating-point numbers."""
        if self.format.decode is None:
            return None
        rows = self.rows()
        found = decode(self.format, rows)
        self.source.check()
        drop_pages(rows)
        return found

    def mxfp4(self) -> tuple[Array, Array]:
        """Bytes of a tensor in MXFP4, block by block: 16 of codes in the order of `kernel.nibbles`, and one
        of the exponent.
        """
        blocks = self.rows().reshape(-1, self.format.bytes)
        return blocks[:, 1:], blocks[:, 0]

    def array(self) -> Array:
        """The numbers: f16 and bf16 as they are, all others in f32."""
        groups = self.groups()
        if groups is not None:
            return groups.numbers().reshape(self.shape)
        kind = _DTYPES[self.format.name]
        return np.frombuffer(self.source.bytes, kind, self.elements, self.offset).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Stack(Entry):
    """Tensors of one shape and type as one, with a new first axis."""

    parts: tuple[Entry, ...]

    def array(self) -> Array:
        return np.stack([part.array() for part in self.parts])


class Tensors:
    """Tensors by name; those that were asked for are noted, so that what is left over can be named."""

    params: Callable[[], Mapping[str, ParamValue]] | None = None
    """What a decoder makes of tensors, by the names of its params, where a file has that instead."""

    def __init__(self, path: str, entries: dict[str, Entry]) -> None:
        self.path, self.entries = path, entries
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        found = self.entries.get(name)
        if found is None:
            raise FormatError(f"{self.path} has no tensor {name!r}")
        self.asked.add(name)
        return found

    def check(self) -> None:
        """Raise if a file was cut short while it was read."""
        for entry in self.entries.values():
            for part in entry.parts if isinstance(entry, Stack) else (entry,):
                part.source.check()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @cached_property
    def mark(self) -> str:
        """What tells one model from another; it reads little of each tensor."""
        digest = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            data = entry.source.bytes[entry.offset : entry.offset + entry.nbytes]
            digest.update(f"{name} {entry.shape} {entry.format.name}".encode())
            digest.update(data[:64].tobytes() + data[-64:].tobytes())
        return digest.hexdigest()
