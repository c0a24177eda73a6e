"""Files in the layout of `rlx.ir.text.container`, taken apart and put together again with right checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.ir.text.container import ALIGNMENT, PREFIX_BYTES, File, Kind, digests, first_array, prefix
from rlx.ir.weights import round_up

DIGESTS = ("parts", "array_bytes", "array_sums", "array_sha256")
"""What of a header follows from the rest of the file."""


def taken_apart(path: str | os.PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, bytes], bytes]:
    """The header without checksums, the parts, and the bytes of all arrays."""
    file = File(path, kind)
    header = {key: value for key, value in file.header.items() if key not in DIGESTS}
    parts = {name: file.part(name) for name in file.part_names}
    with open(path, "rb") as whole:
        data = whole.read()
    return header, parts, data[len(data) - file.header["array_bytes"] :]


def put_together(
    kind: Kind, header: Mapping[str, object], parts: Mapping[str, bytes], arrays: bytes
) -> bytes:
    """The bytes of a file with these pieces: its checksums are right, whatever else it says."""
    table, joined = [], b""
    for name, content in parts.items():
        joined += bytes(-len(joined) % ALIGNMENT)
        table.append([name, len(joined), len(content), hashlib.sha256(content).hexdigest()])
        joined += content
    sums, whole = digests([np.frombuffer(arrays, np.uint8)])
    own = {"parts": table, "array_bytes": len(arrays), "array_sums": sums, "array_sha256": whole}
    return with_header(kind, json.dumps({**header, **own}).encode(), joined, arrays)


def with_header(kind: Kind, header: bytes, parts: bytes, arrays: bytes) -> bytes:
    """The bytes of a file with this header, whatever it is, in front of parts and arrays."""
    base = round_up(PREFIX_BYTES + len(header), ALIGNMENT)
    first = first_array(base + len(parts), len(arrays))
    start = prefix(kind, header, first + len(arrays)) + header
    start = start.ljust(base, b"\0") + parts
    return start.ljust(first, b"\0") + arrays
