"""Folders as Hugging Face has them: config.json, and weights in one or several safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlx.errors import FormatError
from rlx.files import Json, file_boundary, open_plain, read_plain
from rlx.llm.blocks import FORMATS, Format
from rlx.llm.tensors import Entry, Mapped, Tensors

_NUMBERS = {format.name: format for format in FORMATS.values() if format.decode is None}
_OTHERS = {"U8": 1, "I8": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8, "F64": 8}
_OTHERS |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_FORMATS = {**_NUMBERS, **{name: Format(name, 1, size) for name, size in _OTHERS.items()}}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> Json:
    """A file that holds one JSON object."""
    with file_boundary(path, "JSON file"):
        text = read_plain(path)
    return json_object(path, text)


def json_object(path: Path, text: bytes) -> Json:
    """The object in a text of JSON; `path` is what errors call it."""
    with file_boundary(path, "JSON file"):
        found = json.loads(text)
        if not isinstance(found, dict):
            raise FormatError(f"{path} holds no JSON object, but {type(found).__name__}")
        return found


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors of a safetensors file, mapped; FormatError for one that claims what it does not have.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "w.safetensors"
    >>> head = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> _ = file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    >>> read_safetensors(file)["w"].array()
    array([0., 0.], dtype=float32)
    """
    with file_boundary(path, "safetensors file"), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise FormatError(f"{path}: its head has {length} bytes, but the file only {size}")
        head = json.loads(file.read(length))
        source = Mapped(file, os.fspath(path))
        return {
            name: _entry(f"{path}: tensor {name!r}", name, about, source, 8 + length)
            for name, about in head.items()
            if name != "__metadata__"
        }


def _entry(what: str, name: str, about: Json, source: Mapped, data: int) -> Entry:
    shape, (begin, end) = about["shape"], about["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise FormatError(f"{what} has the shape {shape} at {[begin, end]}")
    format = _FORMATS.get(about["dtype"])
    if format is None:
        raise FormatError(f"{what} is of {about['dtype']}; RLX reads {', '.join(_NUMBERS)}")
    entry = Entry(name, tuple(shape), format, source, data + begin)
    if not shape or min(shape) < 1 or entry.nbytes != end - begin or data + end > source.size:
        raise FormatError(
            f"{what}: {format.name}{shape} at {[begin, end]} does not fit {source.size - data} bytes"
        )
    return entry


def check_numbers(path: str, entry: Entry) -> None:
    """Refuse a weight that is not floating-point numbers. What a decoder does not use may be anything."""
    if entry.format.name in _OTHERS:
        raise FormatError(
            f"{path}: tensor {entry.name!r} is of {entry.format.name}; RLX reads {', '.join(_NUMBERS)}"
        )


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """Files with weights, and the tensors wanted of each (None for all)."""
    if not (folder / _INDEX).exists():
        return {_ONE: None}
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(_is_plain(file) for file in places.values()):
        raise FormatError(f"{folder / _INDEX}: 'weight_map' must give a plain file name for each tensor")
    files: dict[str, list[str] | None] = {file: [] for file in sorted(set(places.values()))}
    for name, file in places.items():
        wanted = files[file]
        assert wanted is not None
        wanted.append(name)
    return files


def _is_plain(file: object) -> bool:
    """Whether a value is the name of a file, not a path that leads elsewhere."""
    return isinstance(file, str) and Path(file).name == file


class HfFolder:
    """A folder with a model: `config` as config.json has it, `tensors` by their names in the files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = os.fspath(folder)
        root = Path(folder)
        self.config = read_json(root / "config.json")
        entries: dict[str, Entry] = {}
        shards = _shards(root)
        self.files = tuple(root / file for file in shards)
        for file, wanted in shards.items():
            found = read_safetensors(root / file)
            missing = set(wanted or ()) - found.keys()
            if missing:
                raise FormatError(f"{root / file} has no tensor {min(missing)!r}, which {_INDEX} says it has")
            entries |= found if wanted is None else {name: found[name] for name in wanted}
        self.tensors = Tensors(self.path, entries)
