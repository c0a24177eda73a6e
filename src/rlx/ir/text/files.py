"""Graphs in files: one file holds the text, the values of params and states, and large constants.

`rlx.ir.text.container` has the layout: the text is the part "source", the tables "params", "states" and
"blobs" name arrays. Elements of less than a byte are packed. All bytes are checked before any is used.
Nothing in a file is executed; what is read is parsed and verified.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Mapping

from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary
from rlx.ir.dtype import Array, ParamValue
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.text.container import GRAPH, File, Stored, numbered, write, write_to
from rlx.ir.text.read import parse_foreign, parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify

SOURCE = "source"


def save(graph: Graph, path: str | os.PathLike[str], values: bool = True) -> None:
    """Write a graph to a file, which is replaced in one step; without `values`, weights and states stay out.

    >>> import tempfile, numpy as np
    >>> g = Graph("double")
    >>> g.output("y", g.input("x", (2,), "f32") * g.param("w", (2,), "f32", np.array([1, 2], np.float32)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(g, folder + "/double.graph")
    ...     load(folder + "/double.graph").param_values["w"]
    array([1., 2.], dtype=float32)
    """
    write(path, GRAPH, *_described(graph, values))


def load(path: str | os.PathLike[str], custom: Collection[str] = ()) -> Graph:
    """Read a graph that `save` wrote; it is checked against its checksum and verified.

    `custom` names the ops of `rlx.register_op` that it may call; without, a file calls none.
    """
    with file_boundary(path, "graph"):
        return _graph(File(path, GRAPH), lambda text, blobs: parse_foreign(text, blobs, custom))


def read_foreign(
    text: str, blobs: Mapping[str, Array] | None = None, custom: Collection[str] | None = ()
) -> Graph:
    """The graph of a text that somebody else may have written, verified; `custom` as in `load` (None: any).

    >>> read_foreign('graph "one" { %0 = input() {name="x", type=f32[n]} output "y" = %0 }').name
    'one'
    """
    return verify(parse_foreign(text, blobs, custom))


def read_mir(text: str, blobs: Mapping[str, Array] | None = None) -> Graph:
    """The MIR graph of a text, verified."""
    return verify(parse_graph(text, blobs), Level.MIR)


def to_bytes(graph: Graph) -> bytes:
    """The bytes that `save` writes: what pickle keeps of a graph.

    >>> g = Graph("double")
    >>> g.output("y", g.input("x", (2,), "f32") * 2.0)
    >>> from_bytes(to_bytes(g))
    <graph 'double'(x: f32[2]) -> (y: f32[2]), 3 nodes>
    """
    file = io.BytesIO()
    write_to(file, GRAPH, *_described(graph, values=True))
    return file.getvalue()


def from_bytes(data: bytes) -> Graph:
    """The graph that `to_bytes` was given, verified. Who unpickles trusts the sender: unlike one from a file
    it may have any op, those of `rlx.register_op` too."""
    return _graph(File.of_bytes(data, GRAPH, "a pickled graph"), parse_graph)


def reduced(graph: Graph) -> tuple[Callable[[bytes], Graph], tuple[bytes]]:
    """What pickle keeps of a graph: how to read it, and its bytes."""
    return from_bytes, (to_bytes(graph),)


def _described(graph: Graph, values: bool) -> tuple[dict[str, object], dict[str, bytes], list[Stored]]:
    """Header, parts and arrays of a file."""
    blobs: dict[str, Array] = {}
    text = graph_text(graph, blobs=blobs)
    params, states = (graph.param_values, graph.state_values) if values else ({}, {})
    tables, arrays = numbered({"params": params, "states": states, "blobs": blobs})
    return {**tables, "packed": True}, {SOURCE: text.encode()}, arrays


def _graph(file: File, parse: Callable[[str, Mapping[str, Array]], Graph]) -> Graph:
    file.check_all()
    text, blobs = file.text(SOURCE), file.table("blobs")
    params, states = dict[str, ParamValue](file.table("params")), file.table("states")
    try:
        graph = parse(text, blobs)
        graph.param_values, graph.state_values = params, states
        return verify(graph, Level.HIR)
    except RlxError as e:
        raise FormatError(f"{file.path} does not hold a valid graph: {e}") from e
