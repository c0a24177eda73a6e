"""Pieces of the zoo's own graphs: trained networks, a few ops at a time, with something changed.

The pieces are kept as text in `zoo_pieces.jsonl`, so that a seed gives the same programs on a machine that
has fetched no model. `python -m rlx.fuzz.programs.zoo_pieces` writes the file again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx import zoo
from rlx.cost.io import assumed_binding
from rlx.errors import RlxError
from rlx.files import Json
from rlx.frontend.onnx import from_onnx
from rlx.fuzz.programs.draw import FLOATS, MOST_ELEMENTS, Draw, NotHere
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.program import HEADER
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.resize import with_sizes
from rlx.zoo import gpt2, minilm

FILE = Path(__file__).parent / "zoo_pieces.jsonl"
MOST_OPS = 8  # of a piece
SMALLER = (16, 12, 8, 6, 4, 3, 2)
"""What sizes of networks become in a piece, if its ops accept it."""
PER_MODEL = 60  # pieces
SAME_SHAPE = ("tanh", "sigmoid", "relu", "neg", "exp", "abs", "sin", "softsign", "erf")
"""Ops that may stand for each other in a piece."""


@functools.cache
def pieces() -> tuple[Json, ...]:
    """What is in the file: inputs as [dtype, shape], lines that call ops."""
    return tuple(json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines())


def from_the_zoo(d: Draw) -> object:
    """A piece of a network on values that are there, with a size, a dtype, a number or an op changed."""
    piece = d.choose(pieces())
    names: dict[str, str] = {}
    sizes = sorted({n for _, shape in piece["inputs"] for n in shape if n > 1})
    resized = {d.choose(sizes): d.choose((1, 2, 3, 5, 8, 17))} if sizes and d.chance(0.4) else {}
    kind = d.choose(FLOATS) if d.chance(0.2) else "f32"
    for number, (told, shape) in enumerate(piece["inputs"]):
        shape = [resized.get(n, n) for n in shape]
        own = kind if told == "f32" else told
        same = [v for v in d.known([own]) if list(d.shape(v)) == shape]
        many = Values(0, 1) if own[0] in "iu" else None
        fresh = not same or d.chance(0.3)
        names[f"i{number}"] = d.input(own, d.named(shape), many) if fresh else d.choose(same)
    changed = d.random.randrange(len(piece["lines"])) if d.chance(0.4) else -1
    made: list[str] = []
    for number, line in enumerate(piece["lines"]):
        text = _changed(d, line) if number == changed else line
        text = re.sub(r"\b[iv]\d+\b", lambda m: names[m[0]], text)
        try:
            made = d.emit(text.replace("'f32'", repr(kind)), 3)
        except NotHere:
            break  # what follows has lost its operand
        names[f"v{number}"] = made[0]
    return made


def _changed(d: Draw, line: str) -> str:
    """One number of an attribute is another, or the op is one like it."""
    found = re.match(r"op\('(\w+)'\)", line)
    if found and found[1] in SAME_SHAPE:
        return line.replace(found[1], d.choose(SAME_SHAPE), 1)
    numbers = list(re.finditer(r"(?<![\w.'-])-?\d+(?![\w.'])", line))
    if not numbers:
        return line
    at = d.choose(numbers)
    n = int(at[0])
    return line[: at.start()] + str(d.choose((n + 1, n - 1, 0, 1, 2, -1))) + line[at.end() :]


# -- making the file


def pieces_of(graph: Graph) -> Iterator[Json]:
    """Pieces of a graph without symbols: an op and the nearest ops that it reads."""
    seen: set[str] = set()
    for node in graph.nodes:
        inside = _nearest(node)
        if len(inside) < 2:
            continue
        piece = _smaller(_piece(inside))
        key = re.sub(r"\d+", "", json.dumps(piece)) if piece else ""
        if piece and key not in seen:
            seen.add(key)
            yield piece


def _is_written(node: Node) -> bool:
    """Whether a node can be a line: one tensor of a size to be tried, attributes that are plain."""
    if node.op.role is not Role.COMPUTE or node.bodies or node.op.effects != "none" or node.op.finds_size:
        return False
    if not hasattr(node.type, "shape") or not all(isinstance(n, int) for n in node.shape):
        return False
    return all(_text(v) is not None for v in node.attrs.values())


def _nearest(node: Node) -> list[Node]:
    found: list[Node] = []
    queue = [node]
    while queue and len(found) < MOST_OPS:
        at = queue.pop(0)
        if _is_written(at) and not any(at is f for f in found):
            found.append(at)
            queue += at.operands
    return sorted(found, key=lambda n: n.id)


def _piece(inside: Sequence[Node]) -> Json | None:
    names: dict[int, str] = {}
    inputs: list[list[Any]] = []
    lines: list[str] = []
    for number, node in enumerate(inside):
        operands = []
        for o in node.operands:
            value = o.attrs["value"].array if o.op.role is Role.CONSTANT else None
            if value is not None and value.size <= 8:
                operands.append(f"np.array({value.tolist()}, np.{value.dtype.name})")
                continue
            if o.id not in names:
                if not hasattr(o.type, "shape") or not all(isinstance(n, int) for n in o.shape):
                    return None
                names[o.id] = f"i{len(inputs)}"
                inputs.append([o.dtype.name, list(o.shape)])
            operands.append(names[o.id])
        attrs = [f"{k}={_text(v)}" for k, v in node.attrs.items()]
        lines.append(f"op({node.op.name!r})({', '.join([*operands, *attrs])})")
        names[node.id] = f"v{number}"
    return {"inputs": inputs, "lines": lines} if len(inputs) <= 6 else None


def _smaller(piece: Json | None) -> Json | None:
    """The piece with its large sizes made small, wherever they stand; None if its ops refuse that."""
    while piece is not None:
        large = sorted({n for _, shape in piece["inputs"] for n in shape if n > SMALLER[0]}, reverse=True)
        tries = (_renumbered(piece, n, m) for n in large for m in SMALLER)
        better = next((t for t in tries if _is_typed(t)), None)
        if better is None:
            return piece if _is_typed(piece, MOST_ELEMENTS) else None
        piece = better
    return None


def _renumbered(piece: Json, old: int, new: int) -> Json:
    inputs = [[kind, [new if n == old else n for n in shape]] for kind, shape in piece["inputs"]]
    lines = [re.sub(rf"(?<![\w.'-]){old}(?![\w.'])", str(new), line) for line in piece["lines"]]
    return {"inputs": inputs, "lines": lines}


def _is_typed(piece: Json, most: float = np.inf) -> bool:
    """Whether the lines are accepted, and no value has more elements."""
    space: Json = {}
    exec(HEADER, space)
    graph = Graph("piece")
    for i, (kind, shape) in enumerate(piece["inputs"]):
        space[f"i{i}"] = graph.input(f"i{i}", shape, kind)
    try:
        with graph.building():
            for i, line in enumerate(piece["lines"]):
                space[f"v{i}"] = eval(line, space)
    except Exception:  # a size that does not fit what others say
        return False
    return all(int(np.prod([int(d) for d in n.shape])) <= most for n in graph.nodes if n.operands or n.attrs)


def _text(value: Any) -> str | None:
    """An attribute as Python text."""
    if isinstance(value, DType):
        return repr(value.name)
    if isinstance(value, (tuple, list)):
        parts = [_text(v) for v in value]
        return None if None in parts else f"({''.join(f'{p}, ' for p in parts)})".replace(", )", ",)")
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else None


def write() -> None:
    """Write the file from the models that are fetched."""
    lines = []
    for name, graph in _graphs():
        try:
            graph = with_sizes(graph, assumed_binding(graph))
        except RlxError:  # silero: each branch is for its own sizes
            continue
        found = list(pieces_of(graph))
        step = max(1, len(found) // PER_MODEL)
        lines += [json.dumps({"model": name, **piece}) for piece in found[::step]]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _graphs() -> Iterator[tuple[str, Graph]]:
    config = gpt2.Config()
    yield "gpt2", gpt2.build(config, gpt2.random_weights(config))
    if zoo.is_fetched("minilm"):
        yield "minilm", minilm.load_graph(zoo.path("minilm").parent)
    for model in zoo.models():
        for file in model.files:
            if zoo.is_fetched(model.id) and file.name.endswith(".onnx"):
                yield model.id, from_onnx(zoo.path(model.id, file.name))


if __name__ == "__main__":
    write()
