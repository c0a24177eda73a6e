"""The weights of an exported program as bytes: a header, then every array at its offset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlx import progress
from rlx.config import bytes_text
from rlx.export.layout import MAGIC, WEIGHT_HEADER
from rlx.export.tables import Tables
from rlx.ir.weights import round_up

_CHUNK = 1 << 19  # words


def weight_parts(tables: Tables, version: int) -> Iterator[bytes | memoryview]:
    """The parts of a weights file in order. Arrays that are computed on request are computed twice: first for
    the checksum, which is in front."""
    size = tables.spaces["weight"]
    total = sum(_checksum(start, data) for start, data in _arrays(tables)) % (1 << 64)
    head = np.array([MAGIC, version, size, total], "<u8").tobytes()
    yield head + bytes(WEIGHT_HEADER - len(head))
    at = 0
    for start, data in _arrays(tables):
        yield bytes(start - at)
        yield data.data
        at = start + data.nbytes
    yield bytes(round_up(size, 8) - at)


def write_weights(path: Path, tables: Tables, version: int) -> None:
    """Write a weights file, and tell how far it is."""
    total, written, told = tables.spaces["weight"], 0, 0
    with open(path, "wb") as file:
        for part in weight_parts(tables, version):
            written += file.write(part)
            if total and 10 * written // total > told:
                told = 10 * written // total
                progress.info("writing %s: %s of %s", path.name, bytes_text(written), bytes_text(total))


def _arrays(tables: Tables) -> Iterator[tuple[int, np.ndarray]]:
    """Offset and bytes of every array that has any, in order."""
    for start, array in sorted(tables.weights.items(), key=lambda item: item[0]):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # type: ignore[call-overload]
        if data.nbytes:
            yield start, data


def _checksum(start: int, data: np.ndarray) -> int:
    """The share of an array in what `rlx_checksum` computes: the sum of words, word i times 2 i + 1. Arrays
    begin at whole words, and what follows their last byte is zero."""
    whole = data.nbytes // 8
    words, first, total = data[: 8 * whole].view("<u8"), start // 8, 0
    for i in range(0, whole, _CHUNK):
        part = words[i : i + _CHUNK]
        factors = np.arange(len(part), dtype=np.uint64) * np.uint64(2) + np.uint64(2 * (first + i) + 1)
        total += int((part * factors).sum(dtype=np.uint64))
    last = int.from_bytes(data[8 * whole :].tobytes(), "little")
    return total + last * (2 * (first + whole) + 1)
