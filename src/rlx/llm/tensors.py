"""Tensors of model files, mapped into memory: what GGUF files and safetensors have in common."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from rlx.errors import FormatError
from rlx.llm.blocks import Format, Groups, decode
from rlx.records import dataclass

Array = np.ndarray

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file: its shape as NumPy has it, its format, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    format: Format
    source: mmap.mmap
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements // self.format.size * self.format.bytes

    def rows(self) -> Array:
        """Its bytes, one row of them for each row of the last axis."""
        raw = np.frombuffer(self.source, np.uint8, self.nbytes, self.offset)
        return raw.reshape(-1, self.shape[-1] // self.format.size * self.format.bytes)

    def groups(self) -> Groups | None:
        """Small integers as [rows, columns]; None for floating-point numbers."""
        return None if self.format.decode is None else decode(self.format, self.rows())

    def array(self) -> Array:
        """The numbers: f16 and bf16 as they are, all others in f32."""
        groups = self.groups()
        if groups is not None:
            return groups.numbers().reshape(self.shape)
        flat = np.frombuffer(self.source, _DTYPES[self.format.name], self.elements, self.offset)
        return flat.reshape(self.shape)


class Tensors:
    """Tensors by name; those that were asked for are noted, so that what is left over can be named."""

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

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())
