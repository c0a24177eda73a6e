"""Files to mutate: graphs, plans, artefacts and models of small programs, and how each is read and used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.api.compile import compile, plan
from rlx.api.session import load
from rlx.errors import RlxError, UnsupportedError
from rlx.files import Json
from rlx.frontend.onnx import from_onnx
from rlx.fuzz import guarded
from rlx.fuzz.containers import put_together, taken_apart
from rlx.fuzz.programs.grammar import draw_program
from rlx.ir.dtype import convert, dtype
from rlx.ir.graph import Graph
from rlx.ir.op import Arg, Op, Role, all_ops
from rlx.ir.text import files as serialize
from rlx.ir.text.container import GRAPH
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.types import TensorType, parse_type, type_symbols
from rlx.ir.verify import verify
from rlx.plan import files as plan_files
from rlx.plan.lir import LirModule
from rlx.plan.text import module_text
from rlx.runtime.native_code import native_code
from rlx.runtime.program import CompiledProgram
from rlx.runtime.store import container
from rlx.runtime.store.artifact import Artifact
from rlx.target.cpu import resolve

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


def ops() -> list[Op]:
    """Ops that compute something, those of storage layouts too."""
    return [op for op in all_ops() if op.role is Role.COMPUTE and op.samples()]


def as_op(op: Op, number: int, weights: bool) -> Document:
    """A graph of one op, as text: one of its samples, with operands that are inputs or, every second time,
    weights."""
    samples = op.samples()
    sample = samples[number % len(samples)]
    graph, rng = Graph(op.name), np.random.default_rng(number)
    operands = []
    for i, arg in enumerate(sample.args):
        given = None
        if isinstance(arg, np.ndarray):
            given, t = arg, TensorType(dtype(arg.dtype), arg.shape)
        else:
            t = parse_type(arg.type if isinstance(arg, Arg) else arg)
        if weights and i and t.is_static:
            value = given if given is not None else convert(rng.integers(0, 3, t.bind({})), t.dtype)
            operands.append(graph.param(f"w{i}", t.shape, t.dtype, value))
        else:
            operands.append(graph.input(f"x{i}", t.shape, t.dtype))
    with graph.building():
        graph.set_outputs(graph.results(graph.add(op, operands, sample.attrs, sample.bodies)))
    return as_graph_text(graph, Path())


def as_graph_file(graph: Graph, folder: Path) -> Document:
    path = folder / "sound.graph"
    serialize.save(graph, path)
    header, parts, arrays = taken_apart(path, GRAPH)
    texts = {"text": parts[serialize.SOURCE].decode(), "header": json.dumps(header)}
    return Document("graph file", texts, arrays)


def as_plan_text(graph: Graph, folder: Path) -> Document:
    blobs: dict[str, np.ndarray] = {}
    return Document("plan text", {"text": module_text(plan(graph), blobs)})


SPARSE = "sparse weights"


def as_sparse(rng: np.random.Generator, folder: Path) -> Document:
    """An artefact whose weights hold numbers that kernels compute addresses from, and their number."""
    k, n = (int(v) for v in rng.integers(64, 300, 2))
    weight = np.where(rng.random((k, n)) < 0.03, rng.standard_normal((k, n)), 0).astype(np.float32)
    graph = Graph("sparse")
    graph.output("y", graph.input("x", ("n", k), "f32") @ graph.param("w", (k, n), "f32", weight))
    document = as_artefact(graph, folder)
    (about,) = json.loads(document.texts["header"])["variants"]
    if not about["addresses"]:
        raise UnsupportedError("the matrix is not sparse enough")
    return Document(SPARSE, {}, (document, dict(about["weights"])[about["addresses"][0][0]]))


def with_other_words(document: Document, rng: np.random.Generator) -> Document:
    """Some of those numbers changed, near or far."""
    made, number = document.kept
    parts, arrays = made.kept
    arrays = [*arrays[:number], arrays[number].copy(), *arrays[number + 1 :]]
    words = arrays[number][: arrays[number].size // 8 * 8].view(np.int64)
    for at in rng.integers(0, words.size, rng.integers(1, 4)):
        words[at : at + 1] += rng.choice([1, -1, 8, -64, 1 << 20, -(1 << 33), 1 << 62])  # may wrap
    return Document(SPARSE, made.texts, (parts, arrays))


def as_artefact(graph: Graph, folder: Path) -> Document:
    path = folder / "sound.rlx"
    compile(graph, cache=False, threads=1).save(path)
    file = container.Container(path)
    parts = {name: file.part(name) for name in file.part_names}
    texts = {name: part.decode() for name, part in parts.items() if not name.endswith(("code", "runtime"))}
    texts["header"] = json.dumps(file.facts)
    arrays = [np.array(file.array(i)) for i in range(len(file.header["arrays"]))]
    return Document("artefact", texts, (parts, arrays))


# -- using


def use_graph(graph: Graph) -> None:
    """Compile and run a graph that was read, if its inputs are of a size to be made."""
    verify(graph)
    run(compile(graph, cache=False, threads=1), graph)


def run(program: Any, graph: Graph, binding: Mapping[str, int] | None = None) -> None:
    sizes = dict(binding or dict.fromkeys(graph.symbols(), UNKNOWN_SIZE))
    shapes = {n.attrs["name"]: n.tensor.bind(sizes) for n in graph.inputs}
    known = [n for n in graph.outputs.values() if set(type_symbols(n.type)) <= sizes.keys()]
    results = [n.tensor.bind(sizes) for n in known]
    if sum(int(np.prod(s, dtype=object)) for s in (*shapes.values(), *results)) > MOST_ELEMENTS:
        return
    program.run({n.attrs["name"]: guarded.array(shapes[n.attrs["name"]], n.dtype.np) for n in graph.inputs})
    guarded.check()


def use_graph_text(document: Document, folder: Path) -> None:
    blobs, values = document.kept
    graph = parse_graph(document.texts["text"], blobs)
    graph.param_values = {k: v for k, v in values.items() if k in graph.params}
    use_graph(graph)


def use_graph_file(document: Document, folder: Path) -> None:
    header, parts = _object(document.texts["header"]), {serialize.SOURCE: document.texts["text"].encode()}
    path = folder / "mutant.graph"
    path.write_bytes(put_together(GRAPH, header, parts, document.kept))
    use_graph(serialize.load(path))


def _object(text: str) -> Json:
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
    run_plan(module)


def run_plan(module: LirModule) -> None:
    """Run a plan as it is written. RLX runs no plan of a file: this shows that its checks would suffice."""
    kernels, code = native_code(module, resolve("host"), cache=False)
    for graph in (module.mir, module.derived):
        if graph is not None:
            missing = {name: n for name, n in graph.params.items() if name not in graph.param_values}
            graph.param_values |= {k: np.zeros(n.tensor.bind({}), n.dtype.np) for k, n in missing.items()}
    program = CompiledProgram(module, kernels, code, threads=1)
    module.planner.check_guards(module.plan.binding)  # as for every plan that a run makes
    program._plans[tuple(module.plan.binding[s] for s in program._symbols)] = module.plan
    run(program, module.mir, module.plan.binding)


def use_artefact(document: Document, folder: Path) -> None:
    parts, arrays = document.kept
    texts = {k: v.encode() for k, v in document.texts.items() if k != "header"}
    path = folder / "mutant.rlx"
    container.write(path, _object(document.texts["header"]), {**parts, **texts}, arrays)
    program = load(path, threads=1)
    run(program, program.graph)


def use_sparse(document: Document, folder: Path) -> None:
    """Accepted by the user, as if signed: what moves addresses is checked all the same."""
    parts, arrays = document.kept
    path = folder / "mutant.rlx"
    container.write(path, _object(document.texts["header"]), parts, arrays)
    Artifact(path).accept()
    program = load(path, threads=1)
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
    SPARSE: use_sparse,
}
