"""Nodes of a model in any order: sorted where that is possible, refused by name where they form a circle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import parser  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import ModelImportError  # noqa: E402
from rlx.frontend.onnx.order import in_order  # noqa: E402
from rlx.reference.interpreter import evaluate  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")

MODEL = """
<ir_version: 9, opset_import: ["": 17, "local": 1]>
net (float[N] x, bool go) => (float[N] y)
{
    a = Exp (x)
    b = Neg (a)
    c = local.twice (b)
    d = If (go) <
        then_branch = yes () => (float[N] p) { q = Add (a, c) r = Mul (q, b) p = Tanh (r) },
        else_branch = no () => (float[N] s) { t = Sub (c, a) s = Tanh (t) }
    >
    y = Add (d, a)
}
<domain: "local", opset_import: ["": 17]>
twice (u) => (v) { two = Constant <value = float {2.0}> () w = Mul (u, two) z = Sub (w, u) v = Add (z, u) }
"""


def shuffled(model: Any, seed: int) -> Any:
    """The same model with its nodes, and those of its sub-graphs and functions, in another order."""
    rng = random.Random(seed)

    def shuffle(holder: Any) -> None:
        nodes = list(holder.node)
        rng.shuffle(nodes)
        del holder.node[:]
        holder.node.extend(nodes)
        for node in holder.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    shuffle(attribute.g)

    out = type(model)()
    out.CopyFrom(model)
    for holder in (out.graph, *out.functions):
        shuffle(holder)
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("go", [False, True])
def test_nodes_in_any_order_mean_the_same(seed: int, go: bool) -> None:
    model = parser.parse_model(MODEL)
    x = np.linspace(-1, 1, 5).astype(np.float32)
    feeds = {"x": x, "go": np.array(go)}
    want = evaluate(rlx.from_onnx(model), feeds)["y"]
    np.testing.assert_array_equal(evaluate(rlx.from_onnx(shuffled(model, seed)), feeds)["y"], want)


def test_a_loop_whose_steps_are_out_of_order() -> None:
    model = parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]>
    net (float[N] x, int64 n) => (float[N] y)
    {
        y = Loop (n, , x) <
            body = step (int64 i, bool c, float[N] before) => (bool on, float[N] after)
            { after = Tanh (grown) on = Identity (c) grown = Add (before, before) }
        >
    }
    """)
    x = np.linspace(-1, 1, 5).astype(np.float32)
    got = evaluate(rlx.from_onnx(model), {"x": x, "n": np.array(2)})["y"]
    np.testing.assert_allclose(got, np.tanh(2 * np.tanh(2 * x)), rtol=1e-6)


def test_nodes_that_are_in_order_stay_where_they_are() -> None:
    nodes = list(parser.parse_model(MODEL).graph.node)
    assert [n.output[0] for n in in_order(nodes, lambda name: False)] == [n.output[0] for n in nodes]
    moved = [nodes[1], nodes[0], *nodes[2:]]
    assert [n.output[0] for n in in_order(moved, lambda name: False)] == [n.output[0] for n in nodes]


@pytest.mark.parametrize(
    "body, named",
    [
        ("a = Add (x, b) [late] b = Exp (a) y = Neg (x)", ("'a' (Add)", "'late' (Exp)")),
        ("a = Add (a, x) y = Exp (a)", ("'a' (Add)",)),
        ("y = If (go) < then_branch = t () => (float[N] p) { p = Exp (q) q = Exp (p) }, "
         "else_branch = e () => (float[N] r) { r = Exp (x) } >", ("'p' (Exp)", "'q' (Exp)")),
        ("y = If (go) < then_branch = t () => (float[N] p) { p = Exp (b) }, "
         "else_branch = e () => (float[N] r) { r = Exp (x) } > b = Neg (y)", ("'y' (If)", "'b' (Neg)")),
    ],
)  # fmt: skip
def test_nodes_in_a_circle_are_named(body: str, named: tuple[str, ...]) -> None:
    text = f'<ir_version: 9, opset_import: ["": 17]> net (float[N] x, bool go) => (float[N] y) {{ {body} }}'
    with pytest.raises(ModelImportError, match="circle") as e:
        rlx.from_onnx(parser.parse_model(text))
    assert all(name in str(e.value) for name in named)
