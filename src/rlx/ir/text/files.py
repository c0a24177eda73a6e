"""Graphs in files: one file holds the text, the values of params and states, and large constants.

    magic "RLXGRAPH" | version u32 | 0 u32 | bytes of the header u64 | bytes of the file u64 | SHA-256
    header: JSON {"text": ..., "arrays": [{"kind", "name", "dtype", "shape", "offset"}, ...]}
    arrays: packed elements, little endian, each at a multiple of 64 bytes

The checksum covers the whole file. Nothing in a file is executed; what is read is parsed and verified.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary, open_plain, replacing
from rlx.ir.attr import integer
from rlx.ir.dtype import Array, dtype, pack, unpack
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.text.read import parse_foreign, parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify
from rlx.records import dataclass

MAGIC = b"RLXGRAPH"
VERSION = 1
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQQ32s")
_MOST = 2**40  # elements: more than any array has, fewer than NumPy refuses
_KINDS = ("param", "state", "blob")


@dataclass(frozen=True)
class _Entry:
    """One array of a file."""

    kind: str
    name: str
    array: Array

    def header(self, offset: int) -> dict[str, Any]:
        of = str(dtype(self.array.dtype))
        return {
            "kind": self.kind,
            "name": self.name,
            "dtype": of,
            "shape": list(self.array.shape),
            "offset": offset,
        }


def save(graph: Graph, path: str | os.PathLike[str], values: bool = True) -> None:
    """Write a graph to a file, which is replaced in one step; without `values`, weights and states stay out.

    >>> import tempfile
    >>> g = Graph("double")
    >>> g.output("y", g.input("x", (2,), "f32") * g.param("w", (2,), "f32", np.array([1, 2], np.float32)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(g, folder + "/double.graph")
    ...     load(folder + "/double.graph").param_values["w"]
    array([1., 2.], dtype=float32)
    """
    try:
        with replacing(path) as file:
            _write(graph, file, values)
    except OSError as e:
        raise FormatError(f"cannot write {os.fspath(path)}: {e.strerror or e}") from e


def load(path: str | os.PathLike[str], custom: Collection[str] = ()) -> Graph:
    """Read a graph that `save` wrote; it is checked against its checksum and verified.

    `custom` names the ops of `rlx.register_op` that it may call; without, a file calls none.
    """
    with file_boundary(path, "graph"), open_plain(path) as file:
        data = _read(file)
    try:
        with file_boundary(path, "graph"):
            return _graph(data, lambda text, blobs: parse_foreign(text, blobs, custom))
    except FormatError as e:
        raise FormatError(f"{os.fspath(path)}: {e.message}") from e
    except RlxError as e:
        raise FormatError(f"{os.fspath(path)} does not hold a valid graph: {e}") from e


def to_bytes(graph: Graph) -> bytes:
    """The bytes that `save` writes: what pickle keeps of a graph.

    >>> g = Graph("double")
    >>> g.output("y", g.input("x", (2,), "f32") * 2.0)
    >>> from_bytes(to_bytes(g))
    <graph 'double'(x: f32[2]) -> (y: f32[2]), 3 nodes>
    """
    file = io.BytesIO()
    _write(graph, file, values=True)
    return file.getvalue()


def from_bytes(data: bytes) -> Graph:
    """The graph that `to_bytes` was given, verified. Who unpickles trusts the sender: unlike one from a file
    it may have any op, those of `rlx.register_op` too."""
    room = _room(len(data))
    room[:] = np.frombuffer(data, np.uint8)
    try:
        return _graph(room, parse_graph)
    except FormatError as e:
        raise FormatError(f"a pickled graph: {e.message}") from e
    except RlxError as e:
        raise FormatError(f"a pickled graph is not sound: {e}") from e


# -- writing


def _write(graph: Graph, file: BinaryIO, values: bool) -> None:
    blobs: dict[str, Array] = {}
    text = graph_text(graph, blobs=blobs)
    known = [("param", graph.param_values), ("state", graph.state_values)] if values else []
    tables = [*known, ("blob", blobs)]
    entries = [_Entry(kind, name, array) for kind, table in tables for name, array in table.items()]
    offsets, end = [], 0
    for entry in entries:
        offsets.append(end)
        end = _aligned(end + dtype(entry.array.dtype).nbytes(entry.array.size))
    arrays = [entry.header(offset) for entry, offset in zip(entries, offsets, strict=True)]
    header = json.dumps({"text": text, "arrays": arrays}, sort_keys=True).encode()
    total = _aligned(_PREFIX.size + len(header)) + end

    digest = hashlib.sha256(_PREFIX.pack(MAGIC, VERSION, 0, len(header), total, b""))
    file.seek(_PREFIX.size)
    for piece in _pieces(header, entries):
        digest.update(piece)
        file.write(piece)
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, VERSION, 0, len(header), total, digest.digest()))


def _pieces(header: bytes, entries: list[_Entry]) -> Iterator[Any]:
    """Everything after the prefix, padded so that arrays are aligned in the file."""
    yield header + b"\0" * (_aligned(_PREFIX.size + len(header)) - _PREFIX.size - len(header))
    for entry in entries:
        raw = pack(entry.array, dtype(entry.array.dtype))
        yield raw.data
        yield b"\0" * (_aligned(raw.size) - raw.size)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


# -- reading


def _read(file: BinaryIO) -> Array:
    """The file's bytes in memory aligned as the arrays in it are."""
    size = os.fstat(file.fileno()).st_size
    data = _room(size)
    filled = 0
    while filled < size:
        count = file.readinto(data[filled:].data)  # type: ignore[attr-defined]
        if not count:
            break
        filled += count
    return data[:filled]


def _room(size: int) -> Array:
    """Memory for the bytes of a file, in which arrays are aligned as in the file."""
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


def _graph(data: Array, parse: Callable[[str, Mapping[str, Array]], Graph]) -> Graph:
    header, body = _checked(data)
    tables: dict[str, dict[str, Array]] = {kind: {} for kind in _KINDS}
    for entry in header["arrays"]:
        name, array = entry["name"], _array(entry, body)
        tables[entry["kind"]][name] = array
    graph = parse(header["text"], tables["blob"])
    graph.param_values = tables["param"]
    graph.state_values = tables["state"]
    return verify(graph, Level.HIR)


def _checked(data: Array) -> tuple[dict[str, Any], Array]:
    """Header and array bytes of a file whose prefix and checksum are right."""
    if data.size < _PREFIX.size or data[: len(MAGIC)].tobytes() != MAGIC:
        raise FormatError("not a graph file; it should begin with the bytes RLXGRAPH")
    magic, version, zero, header_size, total, digest = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if version != VERSION:
        raise FormatError(
            f"format version {version}, but this RLX reads version {VERSION}; save the graph again"
        )
    if total != data.size:
        raise FormatError(f"{data.size} bytes long, but should have {total}; it is truncated or damaged")
    again = hashlib.sha256(_PREFIX.pack(magic, version, zero, header_size, total, b""))
    again.update(data[_PREFIX.size :].data)
    if again.digest() != digest:
        raise FormatError("its checksum does not match its content; it is damaged")
    end = _PREFIX.size + header_size
    try:
        header = json.loads(data[_PREFIX.size : end].tobytes())
        known = all(e["kind"] in _KINDS and isinstance(e["name"], str) for e in header["arrays"])
        known = known and isinstance(header["text"], str)
    except (ValueError, TypeError, LookupError, RecursionError):
        known = False
    if not known:
        raise FormatError("its header is malformed; it is damaged")
    return header, data[_aligned(end) :]


def _array(entry: dict[str, Any], body: Array) -> Array:
    """One array, checked against the bytes that are there."""
    what = f"{entry['kind']} {entry['name'][:40]!r}"
    try:
        of = dtype(entry["dtype"])
        shape = tuple(integer(d) for d in entry["shape"])
        offset = integer(entry["offset"])
    except (RlxError, ValueError, TypeError, LookupError) as e:
        raise FormatError(f"{what} has a description that RLX cannot read") from e
    count = math.prod(shape)
    size = of.nbytes(count)
    possible = min(shape, default=0) >= 0 and math.prod(max(d, 1) for d in shape) <= _MOST
    possible = possible and offset >= 0 and offset % ALIGNMENT == 0
    if not possible or offset + size > body.size:
        raise FormatError(f"{what} of {of}[{','.join(map(str, shape))}] is not inside the file")
    raw = body[offset : offset + size]
    return raw.view(of.np).reshape(shape) if of.bits >= 8 else unpack(raw, of, count).reshape(shape)
