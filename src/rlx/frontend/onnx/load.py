"""Reading ONNX files: every way in which a file can be no model gives one clear sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rlx.errors import ModelImportError, UnsupportedError, how_to_install
from rlx.files import read_plain
from rlx.frontend.onnx.lazy_weights import IDENTITY, read_light
from rlx.model_kinds import ONNX_BYTES, START, is_onnx_object, what_else

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto


def onnx_package() -> ModuleType:
    """The onnx package, which is an optional extra."""
    try:
        import onnx
    except ImportError:
        raise UnsupportedError(
            f"reading ONNX models needs the package onnx; {how_to_install('onnx')}"
        ) from None
    return onnx


def load_model(source: object) -> tuple[ModelProto, Path | None]:
    """A ModelProto, and the folder of its external data, from a path, bytes, a ModelProto or an
    ONNXProgram; or from what this gave for one of them. Large tensors of a file are external data in that
    file (`light`)."""
    onnx = onnx_package()
    if isinstance(source, tuple):
        proto, folder = source
        return proto, folder
    if isinstance(source, onnx.ModelProto):
        return _checked(source, "the model"), None
    if isinstance(source, ONNX_BYTES):
        return _parsed(bytes(source), "the model"), None
    if is_onnx_object(source):  # an ONNXProgram of torch.onnx
        return load_model(getattr(source, "model_proto"))  # noqa: B009
    if not isinstance(source, (str, os.PathLike)):
        kinds = "a path, bytes, a ModelProto or an ONNXProgram"
        raise ModelImportError(f"from_onnx takes {kinds}, not {type(source).__name__}")
    path = Path(source)
    try:
        data = read_light(path) or read_plain(path)
    except OSError as e:
        raise ModelImportError(f"cannot read the model {str(path)!r}: {e.strerror or e}") from None
    return _parsed(data, f"the file {str(path)!r}"), path.parent


def _parsed(data: bytes, what: str) -> ModelProto:
    onnx = onnx_package()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    other = what_else(data[:START])
    if other is not None:
        raise ModelImportError(f"{what} is {other}")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError):
        raise ModelImportError(
            f"{what} is not an ONNX model or is truncated; download it or export it again"
        ) from None
    return _checked(model, what)


def _checked(model: ModelProto, what: str) -> ModelProto:
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelImportError(f"{what} holds no ONNX graph; it is damaged, or another kind of file")
    return model


def opset_versions(model: ModelProto, problems: list[str]) -> dict[str, int]:
    """Domain -> version; a version that the onnx package does not know is a problem."""
    onnx = onnx_package()
    out: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        out[domain] = max(int(entry.version), out.get(domain, 0))
    newest = onnx.defs.onnx_opset_version()
    if out.get("", 1) > newest:
        problems.append(
            f"opset {out['']} is newer than the installed onnx package knows ({newest}); update onnx"
        )
    if not out:
        out[""] = 1  # models from before opsets were written down
    return out


def external_files(model: ModelProto, folder: Path) -> list[Path]:
    """The other files in `folder` that hold tensors of a model."""
    names = {
        entry.value
        for tensor in _tensors(model.graph)
        if not any(entry.key == IDENTITY for entry in tensor.external_data)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [folder / name for name in sorted(names)]


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _tensors(inner)
