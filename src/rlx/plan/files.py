"""Plans in files: magic, format version and checksum, then text, constants and values; or text alone.

Nothing in a file is executed: text is parsed, verified and checked, arrays are plain arrays.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np

from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary, read_npy, read_plain, replacing
from rlx.ir.dtype import dtype
from rlx.plan.lir import LirModule
from rlx.plan.text import module_text, parse_module

MAGIC = b"RLXPLAN\0"
TEXT_MARK = b"rlx plan "
VERSION = 1
_HEAD = struct.Struct("<8sI32s")


def save(module: LirModule, path: str | os.PathLike[str]) -> None:
    """Write a program to a file, which is replaced in one step."""
    blobs: dict[str, np.ndarray] = {}
    text = module_text(module, blobs)
    arrays = {f"blob:{k}": v for k, v in blobs.items()}
    owners = {"derived": module.derived, "param": module.mir, "state": module.mir}
    for kind, graph in owners.items():
        if graph is not None:
            values = graph.state_values if kind == "state" else graph.param_values
            arrays |= {f"{kind}:{k}": v for k, v in values.items()}
    packed: dict[str, np.ndarray] = {"text": np.frombuffer(text.encode(), np.uint8)}
    kinds = []
    for number, (name, array) in enumerate(arrays.items()):
        kinds.append(f"{dtype(array.dtype)} {name}")
        packed[f"a{number}"] = (
            np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") if _odd(array) else array
        )
    packed["names"] = np.frombuffer("\n".join(kinds).encode(), np.uint8)
    payload = io.BytesIO()
    np.savez(payload, **packed)  # type: ignore[arg-type]
    data = payload.getvalue()
    try:
        with replacing(path) as file:
            file.write(_HEAD.pack(MAGIC, VERSION, hashlib.sha256(data).digest()) + data)
    except OSError as e:
        raise FormatError(f"cannot write {os.fspath(path)}: {e.strerror or e}") from e


def _odd(array: np.ndarray) -> bool:
    """Dtypes that NumPy's file format does not know."""
    return array.dtype.kind == "V" or array.dtype.name.startswith(
        ("bfloat", "float8", "float4", "int4", "uint4")
    )


def is_plan(start: bytes) -> bool:
    """Whether the first bytes of a file are those of a plan, as `save` or as `write_text` writes it."""
    return start.startswith((MAGIC, TEXT_MARK))


def write_text(module: LirModule, path: str | os.PathLike[str]) -> None:
    """Write a program as text that people and tools for text can compare.

    Constants too large for it lie in the folder `<path>.blobs`; the values of params are not written.
    """
    blobs: dict[str, np.ndarray] = {}
    text = module_text(module, blobs)
    target, folder = Path(path), _blob_folder(path)
    try:
        target.write_text(text, encoding="utf-8")
        for digest, array in blobs.items():
            folder.mkdir(exist_ok=True)
            plain = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") if _odd(array) else array
            np.save(folder / f"{digest}.{dtype(array.dtype)}.npy", plain)
    except OSError as e:
        raise FormatError(f"cannot write {target}: {e.strerror or e}") from e


def _blob_folder(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.blobs")


def _read_text(raw: bytes, path: str) -> LirModule:
    blobs: dict[str, np.ndarray] = {}
    for file in sorted(_blob_folder(path).glob("*.npy")):
        digest, _, name = file.stem.partition(".")
        with file_boundary(file, "array"):
            array, want = read_npy(read_plain(file)), dtype(name).np
        blobs[digest] = array if array.dtype == want else array.view(want)
    return parse_module(raw.decode(), blobs)


def load(path: str | os.PathLike[str]) -> LirModule:
    """Read a program that `save` or `write_text` wrote; it is verified, and its plan checked."""
    name = os.fspath(path)
    with file_boundary(name, "plan"):
        raw = read_plain(path)
        try:
            return _read_text(raw, name) if raw.startswith(TEXT_MARK) else _read_binary(raw, name)
        except FormatError:
            raise
        except RlxError as e:
            raise FormatError(f"{name} does not hold a valid plan: {e}") from e


def _read_binary(raw: bytes, name: str) -> LirModule:
    if len(raw) < _HEAD.size or raw[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{name} is not a plan file; it should begin with the bytes RLXPLAN")
    _, version, digest = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise FormatError(f"{name} has format version {version}, but this RLX reads {VERSION}; save it again")
    data = raw[_HEAD.size :]
    if hashlib.sha256(data).digest() != digest:
        raise FormatError(f"{name}: its checksum does not match its content; it is damaged or truncated")
    return _module(data)


def _members(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of an archive. `save` packs nothing: members together are no larger than their file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if any(i.compress_type != zipfile.ZIP_STORED for i in infos) or (
            sum(i.file_size for i in infos) > len(data)
        ):
            raise FormatError("a plan holds its arrays as they are; this one unpacks to more than its size")
        return {i.filename.removesuffix(".npy"): read_npy(archive.read(i)) for i in infos}


def _module(data: bytes) -> LirModule:
    file = _members(data)
    text = file["text"].tobytes().decode()
    tables: dict[str, dict[str, np.ndarray]] = {k: {} for k in ("blob", "derived", "param", "state")}
    for number, line in enumerate(file["names"].tobytes().decode().splitlines()):
        of, _, name = line.partition(" ")
        kind, _, key = name.partition(":")
        array = file[f"a{number}"]
        want = dtype(of).np
        tables[kind][key] = array if array.dtype == want else array.view(want)
    module = parse_module(text, tables["blob"])
    if module.derived is not None:
        module.derived.param_values = tables["derived"]
    module.mir.param_values = tables["param"]
    module.mir.state_values = tables["state"]
    return module
