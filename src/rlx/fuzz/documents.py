"""Files to mutate: graphs, plans, artefacts and models of small programs, and how each is read and used."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.compile import compile, plan
from rlx.errors import RlxError
from rlx.frontend.onnx import from_onnx
from rlx.fuzz.grammar import draw_program
from rlx.ir import serialize
from rlx.ir.graph import Graph
from rlx.ir.parse import parse_graph
from rlx.ir.text import graph_text
from rlx.ir.verify import verify
from rlx.plan import files as plan_files
from rlx.plan.text import module_text
from rlx.runtime import container
from rlx.session import load

MOST_ELEMENTS = 1_000_000  # of the inputs of a program that is run
UNKNOWN_SIZE = 3  # of a symbol


@dataclass(frozen=True)
class Document:
    """A file in pieces: texts that are mutated, and bytes that are kept.

    `kind` is a name of KINDS, which says how it is written again (with sound checksums) and used.
    """

    kind: str
    texts: Mapping[str, str]
    kept: Any = None


def graph_of(seed: int, number: int) -> Graph | None:
    """A graph of the grammar, or None where it draws one that is refused."""
    program = draw_program(seed, number)
    try:
        return program.graph(program.open_sizes(), weights=not program.others)
    except Exception:  # what it means that a program cannot be traced is another oracle's question
        return None


# -- making


def as_graph_text(graph: Graph, folder: Path) -> Document:
    blobs: dict[str, np.ndarray] = {}
    return Document("graph text", {"text": graph_text(graph, blobs=blobs)}, (blobs, dict(graph.param_values)))


def as_graph_file(graph: Graph, folder: Path) -> Document:
    path = folder / "sound.graph"
    serialize.save(graph, path)
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw, 16)[0]
    head = serialize._PREFIX.size
    header = json.loads(raw[head : head + length])
    text = header.pop("text")
    return Document(
        "graph file", {"text": text, "header": json.dumps(header)}, raw[-(-(head + length) // 64) * 64 :]
    )


def as_plan_text(graph: Graph, folder: Path) -> Document:
    blobs: dict[str, np.ndarray] = {}
    return Document("plan text", {"text": module_text(plan(graph), blobs)})


def as_artefact(graph: Graph, folder: Path) -> Document:
    path = folder / "sound.rlx"
    compile(graph, cache=False, threads=1).save(path)
    file = container.Container(path)
    parts = {name: file.part(name) for name in file.part_names}
    texts = {name: part.decode() for name, part in parts.items() if not name.endswith(("code", "runtime"))}
    own = ("parts", "arrays", "array_bytes", "array_sums", "array_sha256")
    header = {k: v for k, v in file.header.items() if k not in own}
    texts["header"] = json.dumps(header)
    arrays = [np.array(file.array(i)) for i in range(len(file.header["arrays"]))]
    return Document("artefact", texts, (parts, arrays))


# -- using


def use_graph(graph: Graph) -> None:
    """Compile and run a graph that was read, if its inputs are of a size to be made."""
    verify(graph)
    run(compile(graph, cache=False, threads=1), graph)


def run(program: Any, graph: Graph) -> None:
    binding = dict.fromkeys(graph.symbols(), UNKNOWN_SIZE)
    shapes = {n.attrs["name"]: n.tensor.bind(binding) for n in graph.inputs}
    if sum(int(np.prod(s, dtype=object)) for s in shapes.values()) > MOST_ELEMENTS:
        return
    program.run({n.attrs["name"]: np.zeros(shapes[n.attrs["name"]], n.dtype.np) for n in graph.inputs})


def use_graph_text(document: Document, folder: Path) -> None:
    blobs, values = document.kept
    graph = parse_graph(document.texts["text"], blobs)
    graph.param_values = {k: v for k, v in values.items() if k in graph.params}
    use_graph(graph)


def use_graph_file(document: Document, folder: Path) -> None:
    header = json.dumps({**_object(document.texts["header"]), "text": document.texts["text"]}).encode()
    size = serialize._PREFIX.size
    body = header + b"\0" * (-(size + len(header)) % 64) + document.kept
    fields = (serialize.MAGIC, serialize.VERSION, 0, len(header), size + len(body))
    digest = hashlib.sha256(serialize._PREFIX.pack(*fields, b"") + body).digest()
    path = folder / "mutant.graph"
    path.write_bytes(serialize._PREFIX.pack(*fields, digest) + body)
    use_graph(serialize.load(path))


def _object(text: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except ValueError as e:
        raise RlxError("a mutant that is no JSON says nothing about readers of what JSON holds") from e
    return made if isinstance(made, dict) else {}


def use_plan_text(document: Document, folder: Path) -> None:
    path = folder / "mutant.plan"
    path.write_text(document.texts["text"], encoding="utf-8")
    module = plan_files.load(path)
    str(module)
    module.plan.check()


def use_artefact(document: Document, folder: Path) -> None:
    parts, arrays = document.kept
    texts = {k: v.encode() for k, v in document.texts.items() if k != "header"}
    path = folder / "mutant.rlx"
    container.write(path, _object(document.texts["header"]), {**parts, **texts}, arrays)
    program = load(path)
    run(program, program.graph)


def use_onnx(document: Document, folder: Path) -> None:
    graph = from_onnx(document.kept)
    use_graph(graph)


MAKERS: dict[str, Callable[[Graph, Path], Document]] = {
    "graph text": as_graph_text,
    "graph file": as_graph_file,
    "plan text": as_plan_text,
    "artefact": as_artefact,
}
USERS: dict[str, Callable[[Document, Path], None]] = {
    "graph text": use_graph_text,
    "graph file": use_graph_file,
    "plan text": use_plan_text,
    "artefact": use_artefact,
    "onnx": use_onnx,
}
