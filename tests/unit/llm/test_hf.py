"""Folders with config.json and safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx.errors import FormatError
from rlx.llm.hf import HfFolder, read_safetensors
from rlx.llm.names import renamed
from rlx.llm.tensors import Tensors

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    table, at = {}, 0
    for name, array in arrays.items():
        table[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    head = json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for a in arrays.values())


ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(5, dtype=ml_dtypes.bfloat16).reshape(5, 1),
}


def folder(path: Path, files: dict[str, bytes], config: object = None) -> Path:
    (path / "config.json").write_text(json.dumps({} if config is None else config))
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_one_file(tmp_path: Path) -> None:
    opened = HfFolder(folder(tmp_path, {"model.safetensors": safetensors(ARRAYS)}, {"model_type": "llama"}))
    assert opened.config == {"model_type": "llama"}
    for name, want in ARRAYS.items():
        got = opened.tensors[name].array()
        assert got.dtype == want.dtype and np.array_equal(got, want)


def test_several_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}
    parts = {"1.safetensors": safetensors({n: ARRAYS[n] for n in "ac"}), "2.safetensors": safetensors(ARRAYS)}
    index_file = {"model.safetensors.index.json": json.dumps(index).encode()}
    opened = HfFolder(folder(tmp_path, parts | index_file))
    assert list(opened.tensors) == ["a", "c", "b"]
    assert np.array_equal(opened.tensors["c"].array(), ARRAYS["c"])


def test_an_index_cannot_leave_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    with pytest.raises(FormatError, match="plain file name"):
        HfFolder(folder(tmp_path, {"model.safetensors.index.json": json.dumps(index).encode()}))


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    files = {
        "model.safetensors.index.json": json.dumps({"weight_map": {"z": "1.safetensors"}}).encode(),
        "1.safetensors": safetensors(ARRAYS),
    }
    with pytest.raises(FormatError, match="has no tensor 'z'"):
        HfFolder(folder(tmp_path, files))


def with_head(head: object, data: bytes = bytes(64)) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(dtype: str = "F32", shape: object = (2,), at: object = (0, 8)) -> bytes:
    return with_head({"t": {"dtype": dtype, "shape": shape, "data_offsets": at}})


BAD = {
    "empty": (b"", "only 0"),
    "short": ((1 << 40).to_bytes(8, "little"), "its head has 1099511627776 bytes"),
    "no JSON": ((3).to_bytes(8, "little") + b"{{{", "not a valid safetensors file"),
    "a list": (with_head([]), "not a valid safetensors file"),
    "deep": (with_head(None)[:0] + (20000).to_bytes(8, "little") + b"[" * 20000, "not a valid safetensors"),
    "no shape": (with_head({"t": {"dtype": "F32"}}), "not a valid safetensors file"),
    "dtype": (one("C64"), "is of C64; RLX reads F32, F16, BF16"),
    "integers": (one("I64"), "does not fit"),
    "negative": (one(shape=(-2,)), "has the shape"),
    "fraction": (one(shape=(2.0,)), "has the shape"),
    "wrong size": (one(shape=(3,)), "does not fit"),
    "beyond": (one(at=(100, 108)), "does not fit"),
    "backwards": (one(at=(8, 0)), "does not fit"),
    "huge": (one(shape=(1 << 60, 1 << 60)), "does not fit"),
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_lie(what: str, tmp_path: Path) -> None:
    content, message = BAD[what]
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"bad.safetensors") as raised:
        read_safetensors(tmp_path / "bad.safetensors")
    assert message in str(raised.value)


def test_integers_are_no_weights_but_may_be_there(tmp_path: Path) -> None:
    """Files have tables of positions and the like; only a weight of the model must be numbers."""
    path = tmp_path / "w.safetensors"
    names = {"model.rotary.places": (0, 8), "model.norm.weight": (8, 16)}
    path.write_bytes(
        with_head({n: {"dtype": "I64", "shape": [1], "data_offsets": at} for n, at in names.items()})
    )
    found = read_safetensors(path)
    assert len(found) == 2
    with pytest.raises(
        FormatError, match=r"tensor 'model\.norm\.weight' is of I64; RLX reads F32, F16, BF16"
    ):
        renamed(Tensors("w", found))
    del found["model.norm.weight"]
    assert not renamed(Tensors("w", found)).entries


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config.json holds no JSON object, but list"):
        HfFolder(folder(tmp_path, {}, []))
