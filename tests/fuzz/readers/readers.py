"""What reads files from outside, as functions of bytes: each gives a value or raises an `RlxError`.

`run.py` calls them with bytes that coverage leads to, `tests/fuzz/test_readers.py` with the bytes that were
kept. Checksums are made again first, so that what lies behind them is read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlx.api.options import KEPT
from rlx.cli.inputs import from_file
from rlx.errors import RlxError
from rlx.frontend.onnx import from_onnx
from rlx.ir.dtype import F32
from rlx.ir.text import files as serialize
from rlx.ir.text.container import (
    ALIGNMENT,
    GRAPH,
    PLAN,
    PREFIX_BYTES,
    PROGRAM,
    Kind,
    digests,
    first_array,
    prefix,
)
from rlx.ir.text.read import parse_foreign
from rlx.ir.types import parse_type
from rlx.ir.verify import verify
from rlx.ir.weights import round_up
from rlx.ops.storage.sparse import columns_of
from rlx.plan import files as plans
from rlx.runtime.store.artifact import Artifact

_FOLDER = tempfile.TemporaryDirectory(prefix="rlx-readers-")
END = b"\n--\n"
"""Between the header and the rest of a file; the prefix is made anew."""


def _file(name: str, data: bytes) -> Path:
    path = Path(_FOLDER.name, name)
    path.write_bytes(data)
    return path


def read_text(data: bytes) -> None:
    """A graph or a plan as text."""
    if data.startswith(plans.TEXT_MARK):
        str(plans.load(_file("text.plan", data)))
    else:
        verify(parse_foreign(data.decode(errors="replace")))


def read_container(data: bytes) -> None:
    """A `.rlx` file: its header, the source graph, and every array that a table names."""
    file = Artifact(_container(PROGRAM, "any.rlx", data))
    for kind in ("params", "states", "blobs"):
        file._table(kind)
    for number in range(len(file.targets)):
        file.is_trusted(number)
        file.planned_with(number, KEPT)
    file.source()


def _container(kind: Kind, name: str, data: bytes) -> Path:
    """A file of this kind, with the header and the rest that `data` has."""
    header, _, rest = data.partition(END)
    header = _with_digests(header, rest)
    base = round_up(PREFIX_BYTES + len(header), ALIGNMENT)
    start = prefix(kind, header, base + len(rest)) + header
    return _file(name, start.ljust(base, b"\0") + rest)


def _with_digests(header: bytes, rest: bytes) -> bytes:
    """The header with the digests that its parts and arrays have, as far as it can be read."""
    try:
        told = json.loads(header)
        end = 0
        for entry in told["parts"]:
            _, offset, size, _ = entry
            entry[3] = hashlib.sha256(rest[offset : offset + size]).hexdigest()
            end = max(end, offset + size)
        told["array_sums"] = told["array_sha256"] = "0" * 64
        length = len(json.dumps(told).encode())
        base = round_up(PREFIX_BYTES + length, ALIGNMENT)
        first = first_array(base + end, told["array_bytes"]) - base
        arrays = np.frombuffer(rest[first:], np.uint8)
        told["array_sums"], told["array_sha256"] = digests([arrays])
        return json.dumps(told).encode()
    except Exception:  # then it is the reader's to say what is wrong with it
        return header


def read_onnx(data: bytes) -> None:
    """An ONNX model in a file, so that the reader that leaves weights there has its turn."""
    from_onnx(_file("model.onnx", data))


def read_weights(data: bytes) -> None:
    """Arrays: the first byte says in which kind of file."""
    kind, data = data[:1], data[1:]
    if kind == b"g":
        serialize.load(_container(GRAPH, "any.graph", data))
    elif kind == b"p":
        plans.load(_container(PLAN, "any.plan", data))
    elif kind == b"s":
        columns = columns_of(7, 5, 6, F32)
        columns.unpack(np.frombuffer(data[: columns.bytes].ljust(columns.bytes, b"\0"), np.uint8))
    else:
        suffix, of = {b"i": (".png", "u8[1,3,4,4]"), b"w": (".wav", "f32[n]")}.get(kind, (".npy", "f32[n]"))
        from_file(_file("any" + suffix, data), parse_type(of), {})


READERS: dict[str, Callable[[bytes], Any]] = {
    "text": read_text,
    "container": read_container,
    "onnx": read_onnx,
    "weights": read_weights,
}


def read(name: str, data: bytes) -> None:
    """Let a reader read; whatever it raises but an RlxError is a finding."""
    try:
        READERS[name](data)
    except RlxError:
        pass
