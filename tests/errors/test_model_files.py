"""Files that are no model: told apart by what is in them, each with what to do about it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.cli.main import main
from rlx.errors import ModelImportError

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
ONNX_TEXT = '<ir_version: 8, opset_import: ["": 17]>\nsmall (float[N] x) => (float[N] y) { y = Relu(x) }'
FILES: list[tuple[str, bytes, str, str]] = [
    (
        "m.tflite",
        b"\x1c\0\0\0TFL3" + bytes(64),
        "a TensorFlow Lite model",
        "tf2onnx.convert --tflite m.tflite",
    ),
    (
        "m.safetensors",
        struct.pack("<Q", len(HEADER)) + HEADER + bytes(8),
        "a safetensors file, which holds weights but no graph",
        "torch.onnx.export",
    ),
    (
        "m.gguf",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        "a GGUF file, which holds weights",
        "rlx chat --model m.gguf",
    ),
    ("m.ort", b"\x1c\0\0\0ORTM" + bytes(64), "in ONNX Runtime's own format", "give the .onnx file"),
    ("m.pkl", pickle.dumps({"w": 1}), "a pickle", "torch.onnx.export"),
    ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file, such as a Keras model", "tf2onnx"),
    ("m.npy", b"\x93NUMPY" + bytes(64), "an array that np.save wrote", "--input NAME=m.npy"),
    ("m.onnx.gz", gzip.compress(b"\x08\x08"), "compressed with gzip", "unpack it"),
    ("m.json", b'{"architectures": ["Bert"]}', "JSON", "give the .onnx or .rlx file"),
    ("m.onnxtxt", ONNX_TEXT.encode(), "an ONNX model as text", "onnx.load('m.onnxtxt', format='onnxtxt')"),
    ("m.pbtxt", b"ir_version: 8\ngraph {\n}\n", "an ONNX model as text", "format='textproto'"),
    ("g.pbtxt", b"graph {\n node { }\n}\n", "an ONNX model as text", "format='textproto'"),
    ("onnx.json", b'{"irVersion": "8"}', "an ONNX model as JSON", "format='json'"),
    ("text.onnx", b'graph "net" {\n}', "a graph of RLX as text", "a name that does not end in .onnx"),
    ("page.onnx", b"<!DOCTYPE html><html>", "a web page", "download the file itself"),
    (
        "lfs.onnx",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a Git LFS pointer",
        "git lfs pull",
    ),
    ("empty.onnx", b"", "empty", "not downloaded to its end"),
    ("m.py", b"import rlx\n", "text, not an ONNX model, and not a graph of RLX", 'graph "NAME" {'),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("name", "content", "what", "advice"), FILES, ids=[f[0] for f in FILES])
def test_other_files_are_recognised(
    name: str, content: bytes, what: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(ModelImportError) as raised:
        rlx.load(name)
    assert raised.value.message.startswith(f"{name} is {what}") and advice in raised.value.message
    assert main(["run", name]) == 1
    assert capsys.readouterr().err.startswith(f"rlx: {name} is {what}")


def test_archives_are_told_apart(require: Callable[[str], None]) -> None:
    for name, what in (("m.pt", "a zip archive, such as a PyTorch checkpoint"), ("m.keras", "a Keras model")):
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("data.pkl", b"")
        with pytest.raises(ModelImportError, match=what):
            rlx.load(name)
    np.savez("m.npz", w=np.ones(2))
    with pytest.raises(ModelImportError, match=r"arrays that np\.savez wrote; give an \.onnx or \.rlx file"):
        rlx.load("m.npz")


@pytest.mark.parametrize(("name", "content", "what", "advice"), FILES[:5], ids=[f[0] for f in FILES[:5]])
def test_from_onnx_recognises_them_too(
    name: str, content: bytes, what: str, advice: str, require: Callable[[str], None]
) -> None:
    require("onnx")
    Path(name).write_bytes(content)
    for given in (name, content):
        with pytest.raises(ModelImportError, match=what):
            rlx.from_onnx(given)


def test_folders(capsys: pytest.CaptureFixture[str]) -> None:
    os.makedirs("repo/onnx")
    with pytest.raises(
        ModelImportError, match=r"repo is a folder without an \.onnx or \.rlx file; give the path"
    ):
        rlx.load("repo")
    Path("repo/model.safetensors").touch()
    with pytest.raises(
        ModelImportError, match=r"a folder with weights \(\.safetensors\) but no \.onnx.*torch\.onnx"
    ):
        rlx.load("repo")
    Path("repo/saved_model.pb").touch()
    with pytest.raises(ModelImportError, match=r"a TensorFlow SavedModel; .*--saved-model repo"):
        rlx.load("repo")
    Path("repo/onnx/model.onnx").touch()
    with pytest.raises(ModelImportError, match=r"repo is a folder; give a file in it: repo/onnx/model\.onnx"):
        rlx.load("repo")
    assert main(["explain", "repo"]) == 1
    assert "give a file in it: repo/onnx/model.onnx" in capsys.readouterr().err


def test_files_that_are_not_there() -> None:
    Path("model.onnx").touch()
    with pytest.raises(
        ModelImportError, match=r"cannot read the model 'modle\.onnx'.*did you mean model\.onnx\?"
    ):
        rlx.load("modle.onnx")
    with pytest.raises(ModelImportError, match="for the model of the zoo give zoo:minilm"):
        rlx.load("minilm")


# -- models in memory


class Exported:
    """What torch.onnx.export returns, as far as RLX looks at it: the model is a property."""

    def __init__(self, model: object) -> None:
        self._model = model

    @property
    def model_proto(self) -> object:
        return self._model


def test_models_in_memory(require: Callable[[str], None]) -> None:
    require("onnx")
    import onnx.parser

    model = onnx.parser.parse_model(ONNX_TEXT)
    data = model.SerializeToString()
    x = np.array([-1, 2], np.float32)
    for given in (model, data, bytearray(data), memoryview(data), Exported(model)):
        for program in (rlx.load(given), rlx.compile(given), rlx.Session().load(given)):
            np.testing.assert_array_equal(program(x), [0, 2])
        assert str(rlx.load(given, shapes={"x": (2,)}).inputs[0].type) == "f32[2]"
        assert str(rlx.from_onnx(given).outputs["y"].type) == "f32[N]"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the model is empty"),
        (b"RLXPROG\x01", "a compiled program of RLX; give the path of its file to rlx.load"),
        (b"\x08\x09garbage\x00", "is not an ONNX model or is truncated; download it or export it again"),
        (b"model.onnx", "the model is text, not an ONNX model"),
    ],
)
def test_bytes_that_are_no_model(data: bytes, message: str, require: Callable[[str], None]) -> None:
    require("onnx")
    for call in (rlx.load, rlx.compile):
        with pytest.raises(ModelImportError, match=message):
            call(data)


def test_a_module_of_torch_is_to_be_exported() -> None:
    class Module:
        def state_dict(self) -> dict[str, object]:
            return {}

        def forward(self, x: object) -> object:
            return x

    for call in (rlx.load, rlx.compile):
        with pytest.raises(
            rlx.errors.RlxError, match=r"rlx\.load\(torch\.onnx\.export\(model, args, dynamo=True\)\)"
        ):
            call(Module())
