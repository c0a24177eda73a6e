"""ONNX models as graphs. The importer itself, and the onnx package, are loaded when a model is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.errors import ModelImportError
from rlx.files import file_boundary
from rlx.frontend.onnx.importer import import_model
from rlx.frontend.onnx.load import external_files, load_model
from rlx.frontend.onnx.value import HostOutput
from rlx.ir.graph import Graph
from rlx.ir.operand import DimLike
from rlx.ir.tree import Nest


def from_onnx(
    model: object,
    values: Mapping[str, Nest] | None = None,
    shapes: Mapping[str, Sequence[DimLike]] | None = None,
    states: Mapping[str, str] | None = None,
) -> Graph:
    """The graph of an ONNX model; dynamic dims become symbols.

    `model` is a path, bytes, a ModelProto, or the ONNXProgram that `torch.onnx.export` returns.

    `shapes` replaces the declared shape of inputs, `values` fixes inputs whose values decide shapes (they
    stay inputs; the program is right for these values only). `states` names inputs that take an output of the
    run before, as in {"state": "stateN"}: they become states (see `Graph.with_states`).
    An output of maps (scores of a classifier, by ZipMap) is the tensor of their values, a row for each map.

    >>> import onnx.parser, rlx
    >>> g = rlx.from_onnx(onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["": 17]>
    ...     small (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }'''))
    >>> str(g.outputs["y"].type)
    'f32[N,3]'
    """
    return _graph_of(model, values, shapes, states)


def open_file(path: Path) -> tuple[object, list[Path]]:
    """The model of a file, for `from_file`, and the files next to it that hold its data."""
    model = load_model(path)
    return model, external_files(model[0], path.parent)


def from_file(model: object, shapes: Mapping[str, Sequence[DimLike]] | None = None) -> Graph:
    """The graph of an opened model, for a program that packs its params: the large ones are lazy arrays,
    which read the files of the model whenever they are needed."""
    return _graph_of(model, None, shapes, None, lazy=True)


def _graph_of(
    model: object,
    values: Mapping[str, Nest] | None,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None,
    lazy: bool = False,
) -> Graph:
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else "the model"
    with file_boundary(name, "ONNX model"):
        imported = import_model(model, values, shapes, lazy)
    for name, place in imported.outputs.items():
        if not isinstance(place, str) and not (isinstance(place, HostOutput) and place.is_numbers):
            raise ModelImportError(
                f"output {name!r} is a sequence, an optional or text, which a graph does not hold; "
                "run the model with rlx.onnx_backend instead"
            )
    return imported.graph.with_states(states) if states else imported.graph


__all__ = ["from_file", "from_onnx", "open_file"]
