"""What RLX says when it refuses: one sentence that names op, operands and location.

Each case is a call that must be refused, under a title; the texts are in tests/golden/errors/*.txt.
`pytest --update-golden` writes these files anew: read the sentences before committing them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.errors import RlxError, provenance
from rlx.ir.dim import Constraint, parse_dim, sym
from rlx.ir.dim import evaluate as size_of
from rlx.ir.dtype import convert, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.module import MirModule
from rlx.ir.op import get_op
from rlx.ir.text.files import load, save
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.types import parse_type
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import gradient_graph
from rlx.transform.vmap import batch_graph

ops = rlx.ops
Case = Callable[[], object]


def inputs(*types: str) -> list[Node]:
    """Inputs of a fresh graph, called a, b, c, ..."""
    g = Graph("net")
    found = [parse_type(t) for t in types]
    return [g.input(name, t.shape, t.dtype) for name, t in zip("abcdef", found, strict=False)]


def on(function: Callable[..., object], *types: str) -> Case:
    """A function called on inputs of these types."""
    return lambda: function(*inputs(*types))


def graph(function: Callable[..., Node], *types: str) -> Graph:
    """A graph of a function of its inputs."""
    nodes = inputs(*types)
    nodes[0].graph.output("y", function(*nodes))
    return nodes[0].graph


def scaled() -> Graph:
    return graph(lambda a, b: a + b, "f32[n,3]", "f32[m,3]")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def run(g: Graph, **feed: np.ndarray) -> object:
    return evaluate(g, feed)


def pair() -> Node:
    (a,) = inputs("f32[2]")
    return a.graph.add(get_op("tuple"), (a, a))


def named_twice() -> None:
    g = graph(ops.exp, "f32[2]")
    g.output("y", g.inputs[0])


def other_state() -> None:
    g = Graph("net")
    g.set_state("s", ops.cast(g.state("s", (2,), "f32"), "f16"))


def lying() -> Graph:
    g = graph(ops.exp, "f32[2]")
    g.outputs["y"].type = parse_type("f32[3]")
    return g


def forgetful() -> Graph:
    g = scaled()
    g.constraints.clear()
    return g


def text(*lines: str) -> Graph:
    return parse_graph("\n".join(['graph "net" {', '  %0 = input() {name="a", type=f32[2,n]}', *lines, "}"]))


def in_file(change: Callable[[bytes], bytes]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "FILE"
        save(scaled(), path)
        path.write_bytes(change(path.read_bytes()))
        return load(path)


# Shapes, dtypes, axes, attributes and names while a graph is built.
BUILDING: dict[str, Case] = {
    "operands that do not broadcast": on(lambda a, b: a + b, "f32[2,3]", "f32[4,3]"),
    "a size that can never be equal": on(lambda a, b: a + b, "f32[n,3]", "f32[n+1,3]"),
    "an even size beside an odd one": on(lambda a, b: a + b, "f32[2*n]", "f32[2*m+1]"),
    "different dtypes": on(lambda a, b: a * b, "f32[2]", "i64[2]"),
    "a float beside an integer tensor": on(lambda a: a * 2.5, "i64[2]"),
    "an int that does not fit": on(lambda a: a + 256, "u8[2]"),
    "a function of integers": on(lambda a: ops.exp(a), "i32[2]"),
    "arithmetic with storage only": on(lambda a, b: a + b, "f8e4m3fn[2]", "f8e4m3fn[2]"),
    "logic of numbers": on(lambda a: ops.logical_not(a), "f32[2]"),
    "inner sizes of matmul": on(lambda a, b: a @ b, "f32[2,3]", "f32[4,5]"),
    "matmul of scalars": on(lambda a, b: a @ b, "f32[]", "f32[4]"),
    "a sum over an axis that is not there": on(lambda a: ops.sum(a, axis=2), "f32[2,3]"),
    "a sum over an axis twice": on(lambda a: ops.sum(a, axis=(1, -1)), "f32[2,3]"),
    "softmax over a missing axis": on(lambda a: ops.softmax(a, axis=-3), "f32[2,3]"),
    "reshape to another number of elements": on(lambda a: ops.reshape(a, (4, 2)), "f32[2,3]"),
    "transpose by no permutation": on(lambda a: ops.transpose(a, (0, 0)), "f32[2,3]"),
    "broadcast of a size that is not one": on(lambda a: ops.broadcast_to(a, (2, 4)), "f32[2,3]"),
    "concat of different ranks": on(lambda a, b: ops.concat([a, b], axis=0), "f32[2,3]", "f32[2]"),
    "concat of different sizes": on(lambda a, b: ops.concat([a, b], axis=0), "f32[2,3]", "f32[2,4]"),
    "convolution with other channels": on(lambda a, b: ops.conv(a, b), "f32[1,3,8,8]", "f32[4,5,3,3]"),
    "an einsum that is no equation": on(lambda a, b: ops.einsum("ij,jk->iq", a, b), "f32[2,3]", "f32[3,4]"),
    "an op that is not there": lambda: get_op("sofmax"),
    "too many operands": on(lambda a, b: get_op("exp")(a, b), "f32[2]", "f32[2]"),
    "an unknown attribute": on(lambda a: get_op("reduce_sum")(a, axes=(0,), keepdim=True), "f32[2]"),
    "a missing attribute": on(lambda a: get_op("reduce_sum")(a), "f32[2]"),
    "an attribute of the wrong kind": on(lambda a: get_op("reduce_sum")(a, axes=(0.5,)), "f32[2]"),
    "an attribute that is none of the words": on(lambda a: ops.gelu(a, approximate="sigmoid"), "f32[2]"),
    "a dtype that is not there": on(lambda a: ops.cast(a, "f33"), "f32[2]"),
    "an operand that is no tensor": on(lambda a: ops.add(a, {"not": "a tensor"}), "f32[2]"),
    "an operand with several results": lambda: ops.exp(pair()),
    "operands of two graphs": on(lambda a: a + Graph("other").input("z", (2,), "f32"), "f32[2]"),
    "the truth of a node": on(lambda a: 1 if a > 0 else 2, "f32[2]"),
    "iteration over a node": on(lambda a: list(a), "f32[2]"),
    "a name used twice": on(lambda a: a.graph.param("a", (3,), "f32"), "f32[2]"),
    "an output used twice": named_twice,
    "a negative size": lambda: Graph("net").input("x", (-1, 3), "f32"),
    "a size that is no size": lambda: Graph("net").input("x", (1.5, 3), "f32"),
    "a value that does not fit its param": lambda: Graph("net").param("w", (2, 3), "f32", zeros(3, 2)),
    "a value for no param": lambda: Graph("net").set_param("w", np.zeros(1)),
    "a new state of another type": other_state,
    "a state that is not declared": on(lambda a: a.graph.set_state("s", a), "f32[2]"),
    "a node that is not there": lambda: Graph("net").node(7),
}

# Sizes, types and dtypes by themselves.
VALUES: dict[str, Case] = {
    "a symbolic size as a number": lambda: range(sym("seq")),
    "a size without binding": lambda: size_of(sym("seq") + 1, {"batch": 2}),
    "a size that is not understood": lambda: parse_dim("2 ** n"),
    "a division by zero": lambda: sym("n") // 0,
    "bounds in the wrong order": lambda: sym("n", min=4, max=2),
    "an unknown kind of constraint": lambda: Constraint("less", sym("n"), 4),
    "a type without brackets": lambda: parse_type("f32"),
    "numpy codes are not dtypes": lambda: dtype(">f4"),
    "a rounding that is not there": lambda: convert(np.ones(2), "f8e8m0", rounding="sideways"),
}

# Running, differentiating, batching, verifying.
RUNNING: dict[str, Case] = {
    "an input is missing": lambda: run(scaled(), a=zeros(2, 3)),
    "an input that is not there": lambda: run(scaled(), a=zeros(2, 3), b=zeros(2, 3), c=zeros(1)),
    "an input of another dtype": lambda: run(scaled(), a=np.zeros((2, 3)), b=zeros(2, 3)),
    "an input of another rank": lambda: run(scaled(), a=zeros(3), b=zeros(2, 3)),
    "an input of another size": lambda: run(scaled(), a=zeros(2, 4), b=zeros(2, 3)),
    "sizes that break an assumption": lambda: run(scaled(), a=zeros(2, 3), b=zeros(4, 3)),
    "two sizes of one symbol": lambda: run(
        graph(lambda a, b: a + b, "f32[n]", "f32[n]"), a=zeros(2), b=zeros(3)
    ),
    "a size that no symbol gives": lambda: run(graph(ops.exp, "f32[2*n]"), a=zeros(3)),
    "the gradient of a matrix": lambda: gradient_graph(scaled(), "y", ["a"]),
    "the gradient by something unknown": lambda: gradient_graph(scaled(), "y", ["w"]),
    "a batch axis out of range": lambda: batch_graph(scaled(), {"a": 3}, 5),
    "an hir op in mir": lambda: MirModule.from_graph(graph(ops.gelu, "f32[2]")),
    "a type that is a lie": lambda: verify(lying()),
    "an assumption that is not listed": lambda: verify(forgetful()),
}

# Text of graphs.
READING: dict[str, Case] = {
    "no graph at all": lambda: parse_graph("module {}"),
    "nothing": lambda: parse_graph(""),
    "a graph that does not end": lambda: parse_graph('graph "net" {\n  symbol n in 1..\n'),
    "something after the graph": lambda: parse_graph('graph "net" { }\n}'),
    "an unknown statement": lambda: text("  print %0"),
    "an unknown op in text": lambda: text("  %1 = transpoze(%0)"),
    "an undefined operand": lambda: text("  %1 = exp(%2)"),
    "a node defined twice": lambda: text("  %0 = exp(%0)"),
    "an unknown attribute in text": lambda: text("  %1 = exp(%0) {axis=1}"),
    "an attribute written twice": lambda: text("  %1 = transpose(%0) {perm=(1, 0), perm=(0, 1)}"),
    "an attribute of the wrong kind in text": lambda: text('  %1 = transpose(%0) {perm="10"}'),
    "a value that is not understood": lambda: text("  %1 = transpose(%0) {perm=[1, 0]}"),
    "a type that is not the inferred one": lambda: text("  %1 = transpose(%0) {perm=(1, 0)} : f32[2,n]"),
    "a type rule that refuses": lambda: text("  %1 = transpose(%0) {perm=(0, 1, 2)}"),
    "an unknown dtype in text": lambda: text("  %1 = cast(%0) {dtype=float}"),
    "an array with too few elements": lambda: text("  %1 = constant() {value=f32[3]{1.0, 2.0}}"),
    "an element out of range": lambda: text("  %1 = constant() {value=i8[2]{1, 128}}"),
    "an array of unknown shape": lambda: text("  %1 = constant() {value=f32[n]{1.0}}"),
    "a blob that is not given": lambda: text(f"  %1 = constant() {{value=blob:{'0' * 64}}}"),
    "a string that does not end": lambda: text('  output "y = %0'),
    "a wrong escape": lambda: text(r'  output "\q" = %0'),
    "an output named twice in text": lambda: text('  output "y" = %0', '  output "y" = %0'),
    "a symbol after the first node": lambda: text("  symbol n in 1..8"),
    "an assumption of an unknown kind": lambda: parse_graph('graph "net" { assume less {n}, 4 }'),
}

# Files; FILE stands for the path.
FILES: dict[str, Case] = {
    "a file that is not there": lambda: load("/nowhere/FILE"),
    "a folder that is not there": lambda: save(scaled(), "/nowhere/FILE"),
    "another kind of file": lambda: in_file(lambda data: b"\x89PNG\r\n\x1a\n" + data),
    "an empty file": lambda: in_file(lambda data: b""),
    "another version": lambda: in_file(lambda data: data[:8] + b"\x63" + data[9:]),
    "a truncated file": lambda: in_file(lambda data: data[:-1]),
    "a file of a few bytes": lambda: in_file(lambda data: data[:20]),
    "a damaged file": lambda: in_file(lambda data: data[:100] + b"\0" + data[101:]),
}

CASES = {"building": BUILDING, "values": VALUES, "running": RUNNING, "reading": READING, "files": FILES}
ALL = [(group, title) for group, cases in CASES.items() for title in cases]


# -- what every refusal must be


def refusal(function: Case) -> str:
    with provenance(("model.py:12",)), pytest.raises(RlxError) as caught:
        function()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("group", CASES)
def test_texts_are_as_reviewed(group: str, golden: Callable[[str, str], None]) -> None:
    parts = []
    for title, function in CASES[group].items():
        said = re.sub(r"/\S*/FILE", "FILE", refusal(function))
        parts.append(f"{title}\n    {said}\n")
    golden(f"errors/{group}", "\n".join(parts))


@pytest.mark.parametrize(("group", "title"), ALL, ids=[title for _, title in ALL])
def test_every_refusal_is_one_sentence_with_a_place(group: str, title: str) -> None:
    said = refusal(CASES[group][title])
    assert "\n" not in said and 20 < len(said) < 330
    assert "Traceback" not in said and "object at 0x" not in said
    if group == "building":
        place = re.search(r"\(at model\.py:12\)$|graph 'net'|param 'w'|unknown op", said)
        assert place, "says neither where nor in which graph"
    if group == "reading":
        assert re.search(r"\(at line \d+, column \d+\)$", said)


def test_there_are_enough_cases() -> None:
    assert len(ALL) >= 40
    print(f"{len(ALL)} error texts")


def test_the_location_is_the_users_line() -> None:
    (a,) = inputs("f32[2]")
    with pytest.raises(RlxError, match=r"\(at test_error_texts\.py:\d+\)"):
        ops.sum(a, axis=5)
    with pytest.raises(RlxError, match=r"\(at test_error_texts\.py:\d+\)"):
        get_op("reduce_sum")(a, axes=(5,))


def test_a_parsed_graph_keeps_its_locations_for_errors() -> None:
    with provenance(("model.py:12",)):
        g = scaled()
    again = parse_graph(graph_text(g))
    with pytest.raises(RlxError, match=r"\(at model\.py:12\)"):
        evaluate(again, {"a": zeros(2, 3), "b": zeros(4, 3)})
