"""Plans in files: the text of a plan with constants and values, or text alone.

`rlx.ir.text.container` has the layout: the text is the part "plan", the tables "params", "derived", "states"
and "blobs" name arrays. Nothing in a file is executed: text is parsed, verified and checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary, open_plain, read_npy, read_plain
from rlx.ir.dtype import dtype
from rlx.ir.text.container import PLAN, File, Stored, numbered, write
from rlx.plan.lir import LirModule
from rlx.plan.text import module_text, parse_module

TEXT_MARK = b"rlx plan "
_PLAN = "plan"


def save(module: LirModule, path: str | os.PathLike[str]) -> None:
    """Write a program to a file, which is replaced in one step."""
    blobs: dict[str, np.ndarray] = {}
    text = module_text(module, blobs)
    derived = {} if module.derived is None else module.derived.param_values
    values: dict[str, Mapping[str, Stored]]
    values = {"params": module.mir.param_values, "states": module.mir.state_values}
    tables, arrays = numbered({**values, "derived": derived, "blobs": blobs})
    write(path, PLAN, tables, {_PLAN: text.encode()}, arrays)


def _odd(array: np.ndarray) -> bool:
    """Dtypes that NumPy's file format does not know."""
    return array.dtype.kind == "V" or array.dtype.name.startswith(
        ("bfloat", "float8", "float4", "int4", "uint4")
    )


def is_plan(start: bytes) -> bool:
    """Whether the first bytes of a file are those of a plan, as `save` or as `write_text` writes it."""
    return start.startswith((PLAN.mark, TEXT_MARK))


def write_text(module: LirModule, path: str | os.PathLike[str]) -> None:
    """Write a program as text that people and tools for text can compare.

    Constants too large for it are in the folder `<path>.blobs`; the values of params are not written.
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
        with open_plain(path) as file:
            is_text = file.read(len(TEXT_MARK)) == TEXT_MARK
        try:
            return _read_text(read_plain(path), name) if is_text else _module(File(path, PLAN))
        except FormatError:
            raise
        except RlxError as e:
            raise FormatError(f"{name} does not hold a valid plan: {e}") from e


def _module(file: File) -> LirModule:
    file.check_all()
    module = parse_module(file.text(_PLAN), file.table("blobs"))
    if module.derived is not None:
        module.derived.param_values |= file.table("derived")
    module.mir.param_values |= file.table("params")
    module.mir.state_values = file.table("states")
    return module
