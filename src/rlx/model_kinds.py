"""Files that are not ONNX models: what each is, by its first bytes, and what to do with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ONNX_BYTES = (bytes, bytearray, memoryview)
START = 4096
"""How many bytes of a file are looked at."""

_EXPORT = "load the model in PyTorch and export it with torch.onnx.export(model, args, 'model.onnx')"
_SHOWN_FILES = 3
_DEPTH = 2  # of folders below the one that was given: Hugging Face has onnx/model.onnx

# (first byte, what is there, what the file is, what to do); the first match counts.
_MARKS: tuple[tuple[int, bytes, str, str], ...] = (
    (
        4,
        b"TFL3",
        "a TensorFlow Lite model (.tflite)",
        "convert it: python -m tf2onnx.convert --tflite FILE --output model.onnx",
    ),
    (
        4,
        b"ORTM",
        "in ONNX Runtime's own format (.ort), which only it reads",
        "give the .onnx file it came from",
    ),
    (
        0,
        b"GGUF",
        "a GGUF file, which holds weights and no graph",
        "if it is a language model: rlx chat --model FILE, or rlx.llm.load",
    ),
    (0, b"\x89HDF", "an HDF5 file, such as a Keras model", "convert it to ONNX with tf2onnx"),
    (0, b"\x93NUMPY", "an array that np.save wrote", "give it as an input: rlx run MODEL --input NAME=FILE"),
    (0, b"\x80\x02", "a pickle, such as an old PyTorch checkpoint", _EXPORT),
    (0, b"\x80\x03", "a pickle", _EXPORT),
    (0, b"\x80\x04", "a pickle", _EXPORT),
    (0, b"\x80\x05", "a pickle", _EXPORT),
    (0, b"\x1f\x8b", "compressed with gzip", "unpack it first"),
    (0, b"\xfd7zXZ", "compressed with xz", "unpack it first"),
    (0, b"(\xb5/\xfd", "compressed with zstd", "unpack it first"),
    (0, b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (257, b"ustar", "a tar archive", "unpack it first"),
    (0, b"RLXPROG", "a compiled program of RLX", "give the path of its file to rlx.load"),
    (0, b"RLXGRAPH", "a graph of RLX", "give the path of its file to rlx.load"),
    (0, b"RLXPLAN", "a plan, which has no model to run", "compare it with rlx diff"),
    (
        0,
        b"version https://git-lfs",
        "a Git LFS pointer, not the model itself",
        "fetch the model: git lfs pull",
    ),
)
_ARCHIVES = {
    ".npz": ("arrays that np.savez wrote", "give an .onnx or .rlx file"),
    ".keras": ("a Keras model", "convert it to ONNX with tf2onnx"),
    ".pt2": ("a program that torch.export wrote", _EXPORT),
}
_ONNX_TEXT = "convert it: onnx.save(onnx.load('FILE', format='{}'), 'model.onnx')"


def is_onnx_object(value: object) -> bool:
    """Whether a value is a ModelProto, or an ONNXProgram of torch.onnx; neither package is imported."""
    named = type(value).__name__ == "ModelProto" and hasattr(value, "SerializeToString")
    return named or hasattr(value, "model_proto")


def instead_of(value: object) -> str:
    """What to do with a value that is neither a model nor a graph; "" if that is unknown."""
    if hasattr(value, "state_dict") and hasattr(value, "forward"):  # a module of PyTorch
        return "; export it: rlx.load(torch.onnx.export(model, args, dynamo=True))"
    return ""


def what_else(start: bytes, file: str = "FILE") -> str | None:
    """What a file is that begins like this and is not an ONNX model, and what to do; None if it may be one.

    >>> what_else(b"GGUF\\x03\\x00")[:14]
    'a GGUF file, w'
    >>> what_else(b"\\x08\\x08\\x12\\x07pytorch") is None
    True
    """
    found = _what_else(start, os.path.splitext(file)[1])
    return None if found is None else found.replace("FILE", file)


def _what_else(start: bytes, suffix: str) -> str | None:
    if not start:
        return "empty; it was not written or not downloaded to its end"
    for at, mark, what, advice in _MARKS:
        if start[at : at + len(mark)] == mark:
            return f"{what}; {advice}"
    if start.startswith(b"PK\x03\x04"):
        what, advice = _ARCHIVES.get(suffix, ("a zip archive, such as a PyTorch checkpoint", _EXPORT))
        return f"{what}; {advice}"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return f"a safetensors file, which holds weights but no graph; {_EXPORT}"
    text = _as_text(start)
    return None if text is None else _text(text)


def _as_text(start: bytes) -> str | None:
    """The start of a file as text; None if it is not. Protobuf has bytes below 32 in its first field."""
    text = start.decode("utf-8", "ignore")
    broken = len(start) - len(text.encode()) > 3  # a character may be cut in two at the end
    return None if broken or re.search("[\x00-\x08\x0e-\x1f]", text) else text.lstrip("\ufeff \t\r\n")


def _text(text: str) -> str:
    if re.match(r"(<!doctype|<html)", text, re.IGNORECASE):
        return "a web page; download the file itself"
    if re.match(r"<\s*(ir_version|opset_import|producer_name|domain)\b", text):
        return f"an ONNX model as text; {_ONNX_TEXT.format('onnxtxt')}"
    if re.match(r"(ir_version|producer_name|opset_import|graph)\s*[:{]", text):
        return f"an ONNX model as text; {_ONNX_TEXT.format('textproto')}"
    if re.match(r'\{\s*"(irVersion|producerName|graph|opsetImport)"', text):
        return f"an ONNX model as JSON; {_ONNX_TEXT.format('json')}"
    if re.match(r'graph\s+"', text):
        return "a graph of RLX as text; give its file a name that does not end in .onnx"
    if text[:1] in ("{", "["):
        return "JSON; give the .onnx or .rlx file of the model"
    return 'text, not an ONNX model, and not a graph of RLX, which begins with: graph "NAME" {'


def about_folder(folder: Path) -> str:
    """What to do about a folder where a model was expected."""
    models = sorted(_models_in(folder, _DEPTH), key=lambda path: (len(path.parts), path))
    if models:
        some = ", ".join(str(path) for path in models[:_SHOWN_FILES])
        more = ", ..." if len(models) > _SHOWN_FILES else ""
        return f"is a folder; give a file in it: {some}{more}"
    if (folder / "saved_model.pb").exists():
        return (
            "is a TensorFlow SavedModel; convert it: "
            f"python -m tf2onnx.convert --saved-model {folder} --output model.onnx"
        )
    if any(folder.glob("*.safetensors")):
        return f"is a folder with weights (.safetensors) but no .onnx or .rlx file; {_EXPORT}"
    return "is a folder without an .onnx or .rlx file; give the path of a model file"


def _models_in(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and depth:
            yield from _models_in(Path(entry.path), depth - 1)
        elif entry.name.endswith((".onnx", ".rlx")):
            yield Path(entry.path)
