"""Fusion under the gate: what becomes one kernel, what does not, and what the record says about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sample_models import EXPORTED, bert, bert_inputs, exported_attention, exported_inputs

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.cost import IoFusionGate, default_gate, profile_graph_io
from rlx.cost.profile import GraphIoProfile
from rlx.errors import VerifyError
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ops.storage.packing import from_blocks, to_blocks
from rlx.plan.lir import LirModule
from rlx.reference.interpreter import evaluate

NO_DISPATCH = IoFusionGate(0, 0, 25, 25, True, 80_000, 100)


def built(f: Callable[..., Any], *shapes: tuple[Any, ...], params: tuple[tuple[int, ...], ...] = ()) -> Graph:
    g = rlx.Graph("case")
    xs = [g.input(f"x{i}", s, "f32") for i, s in enumerate(shapes)]
    rng = np.random.default_rng(5)
    ws = [g.param(f"w{i}", s, "f32", rng.standard_normal(s, np.float32)) for i, s in enumerate(params)]
    made = f(*xs, *ws)
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(f"y{i}", y)
    return g


def kinds(lir: LirModule) -> list[str]:
    """Kinds of kernels in the order in which they run."""
    nodes = [lir.mir.nodes[i] for i in lir.plan.schedule]
    return [n.attrs["kind"] if n.op.role is Role.REGION else n.op.name for n in nodes]


def ops_of(node: Node) -> list[str]:
    return [n.op.name for n in node.bodies[0].nodes if n.op.role is Role.COMPUTE]


def planned(g: Graph, **options: Any) -> LirModule:
    return plan(g, checks=True, **options)


# -- regions

ONE_KERNEL: list[tuple[str, str, Callable[..., Any], list[tuple[Any, ...]], list[tuple[int, ...]]]] = [
    ("chain", "map", lambda x: ops.tanh(x * 2.0 + 1.0), [("n", 8)], []),
    ("broadcasts", "map", lambda x, y: ops.exp(x) + y * 2.0, [("n", 8), (8,)], []),
    ("softmax", "reduce", lambda x: ops.softmax(x * 0.5, -1), [("n", 8)], []),
    ("layer norm", "reduce", lambda x, w, b: ops.layer_norm(x, w, b), [("n", 8)], [(8,), (8,)]),
    ("rms norm", "reduce", lambda x, w: ops.rms_norm(x, w), [("n", 8)], [(8,)]),
    ("bias, gelu", "contract", lambda x, w, b: ops.gelu(x @ w + b), [("n", 8)], [(8, 16), (16,)]),
    ("residual", "contract", lambda x, y, w: y + x @ w, [("n", 8), ("n", 16)], [(8, 16)]),
    ("scale, cast", "contract", lambda x, w: ops.cast((x @ w) * 0.5, "f16"), [("n", 8)], [(8, 16)]),
    ("swiglu", "map", lambda x: ops.swiglu(x), [("n", 16)], []),
    ("rope", "map", ops.rope, [("n", 2, "m", 8), ("m", 4), ("m", 4)], []),
    ("conv", "conv", lambda x, w, b: ops.relu(ops.conv(x, w) + b), [(1, 3, 9, 9)], [(8, 3, 3, 3), (8, 1, 1)]),
    ("views on the way in", "map", lambda x: ops.transpose(x)[1:] + 1.0, [(6, 5)], []),
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c[0] for c in ONE_KERNEL])
def test_becomes_one_kernel(case: Any) -> None:
    _, kind, f, shapes, params = case
    lir = planned(built(f, *shapes, params=tuple(params)))
    assert kinds(lir) == [kind]


def test_transpose_and_reshape_behind_a_product_are_strides_of_its_store() -> None:
    def join_heads(x: Node, w: Node) -> Any:
        return ops.reshape(ops.transpose(x @ w, (0, 2, 1, 3)), (2, x.shape[2], 32)) * 2.0

    g = built(lambda x, w: join_heads(x, w) * 0.5, (2, 4, "s", 16), params=((16, 8),))
    lir = planned(g)
    assert kinds(lir)[0] == "contract" and "transpose" in ops_of(lir.mir.nodes[lir.plan.schedule[0]])
    x = {"x0": np.random.default_rng(0).standard_normal((2, 4, 5, 16), np.float32)}
    np.testing.assert_allclose(rlx.compile(g).run(x)["y0"], evaluate(g, x)["y0"], rtol=1e-5, atol=1e-5)


def test_an_intermediate_that_is_an_output_survives() -> None:
    def f(x: Node) -> tuple[Any, Any]:
        middle = ops.exp(x)
        return middle, middle * 2.0 + x

    g = built(f, ("n", 64))
    lir = planned(g)
    assert kinds(lir) == ["map"] and len(lir.mir.outputs) == 2
    x = {"x0": np.ones((3, 64), np.float32)}
    got = rlx.compile(g).run(x)
    np.testing.assert_allclose(got["y0"], np.e, rtol=1e-6)
    np.testing.assert_allclose(got["y1"], 2 * np.e + 1, rtol=1e-6)


def test_a_product_stores_one_value() -> None:
    """The sum is needed twice: it ends the product's kernel, and what follows is another one."""

    def f(x: Node, w: Node, b: Node) -> tuple[Any, Any]:
        y = x @ w + b
        return y, ops.gelu(y)

    lir = planned(built(f, ("n", 16), params=((16, 16), (16,))))
    assert kinds(lir) == ["contract", "map"]
    assert ops_of(lir.mir.nodes[lir.plan.schedule[0]])[-1] == "add"


def test_groups_never_wait_for_themselves() -> None:
    """softmax(x) feeds a product and is added to it: both sums in one kernel would need each other."""

    def f(x: Node, w: Node) -> Any:
        e = ops.softmax(x)
        return e + ops.tanh(e @ w)

    assert kinds(planned(built(f, ("n", 16), params=((16, 16),)))) == ["reduce", "contract"]


# -- whole models


def test_bert_has_seven_kernels_per_layer() -> None:
    one, two = planned(bert(1)), planned(bert(2))
    assert len(two.plan.schedule) - len(one.plan.schedule) == 7
    layer = Counter(kinds(two)) - Counter(kinds(one))
    assert layer == {"contract": 4, "attention": 1, "reduce": 2}


@pytest.mark.usefixtures("each_origin")
def test_bert_computes_what_the_reference_does() -> None:
    g, feed = bert(2), bert_inputs()
    want, got = evaluate(g, feed), rlx.compile(g).run(feed)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4)


def test_decisions_add_up_to_the_profile_of_the_fused_graph() -> None:
    lir = planned(bert(2))
    assert lir.unfused is not None
    saved = GraphIoProfile()
    for d in lir.decisions.kept():
        saved += d.before - d.after
    assert profile_graph_io(lir.unfused) - saved == profile_graph_io(lir.mir)


# -- attention


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("style", EXPORTED)
def test_attention_is_found_as_exporters_write_it(style: str) -> None:
    g, feed = exported_attention(style), exported_inputs(style)
    program = rlx.compile(g)
    assert "attention" in kinds(program.lir)
    # The product of scaled queries is a kernel more; with the sequence first, products are better not merged.
    apart = {"scale before": 4, "sequence first": 5}
    assert len(program.lir.plan.schedule) == apart.get(style, 3)
    want = evaluate(g, feed)
    np.testing.assert_allclose(program.run(feed)["y"], want["y"], rtol=1e-4, atol=1e-5)


ATTENTION: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {}, ""),
    ("causal", {"causal": True}, ""),
    ("window", {"causal": True, "window": (3, -1)}, ""),
    ("offset", {"causal": True, "offset": 2}, ""),
    ("boolean mask", {}, "bool"),
    ("added mask", {"scale": 0.3}, "f32"),
]


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("heads", [4, 2], ids=["all heads", "grouped"])
@pytest.mark.parametrize("case", ATTENTION, ids=[c[0] for c in ATTENTION])
def test_the_attention_op_is_one_kernel(case: tuple[str, dict[str, Any], str], heads: int) -> None:
    _, attrs, mask = case
    g = rlx.Graph("attention")
    q = g.input("q", (2, 4, "n", 16), "f32")
    k, v = (g.input(name, (2, heads, "m", 16), "f32") for name in "kv")
    more = [g.input("mask", (2, 1, "n", "m"), mask)] if mask else []
    g.output("y", ops.attention(q, k, v, *more, **attrs))
    program = rlx.compile(g)
    assert kinds(program.lir) == ["attention"]
    rng = np.random.default_rng(0)
    feed = {"q": rng.standard_normal((2, 4, 5, 16), np.float32)}
    feed |= {n: rng.standard_normal((2, heads, 7, 16), np.float32) for n in "kv"}
    if mask:
        seen = rng.random((2, 1, 5, 7)) < 0.7
        seen[0, 0, 2] = False  # a query that sees nothing
        feed["mask"] = seen if mask == "bool" else rng.standard_normal((2, 1, 5, 7), np.float32)
    np.testing.assert_allclose(program.run(feed)["y"], evaluate(g, feed)["y"], rtol=1e-4, atol=1e-5)


def test_attention_whose_weights_are_an_output_is_refused() -> None:
    g = rlx.Graph("weights")
    q, k, v = (g.input(n, (1, 2, 8, 16), "f32") for n in "qkv")
    weights = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)), -1)
    g.output("y", weights @ v)
    g.output("weights", weights)
    lir = planned(g)
    assert "attention" not in kinds(lir)


def test_attention_that_the_backend_lacks_is_refused_with_its_reason() -> None:
    g = rlx.Graph("capped")
    q, k, v = (g.input(n, (1, 2, 8, 16), "f32") for n in "qkv")
    g.output("y", ops.attention(q, k, v, softcap=5.0))
    lir = planned(g)
    assert "attention" not in kinds(lir)
    (refused,) = [d for d in lir.decisions if d.rule == "attention"]
    assert not refused.verdict and "no native attention kernel" in refused.reason


# -- parallel products


@pytest.mark.usefixtures("each_origin")
def test_parallel_products_share_one_kernel() -> None:
    def f(x: Node, a: Node, b: Node, p: Node, q: Node) -> tuple[Any, Any]:
        return ops.sum(x @ a + p, axis=0), ops.sum(x @ b + q, axis=0)

    g = built(f, ("n", 16), params=((16, 8), (16, 24), (8,), (24,)))
    lir = planned(g)
    assert kinds(lir).count("contract") == 1
    (merged,) = lir.trace.decisions
    assert merged.verdict and merged.rule == "merge products"
    x = {"x0": np.random.default_rng(0).standard_normal((3, 16), np.float32)}
    want, got = evaluate(g, x), rlx.compile(g).run(x)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_products_with_epilogues_of_their_own_stay_apart() -> None:
    def f(x: Node, a: Node, b: Node) -> Any:
        return ops.silu(x @ a) * (x @ b)

    lir = planned(built(f, (4, 16), params=((16, 512), (16, 512))))
    (refused,) = lir.trace.decisions
    assert not refused.verdict
    assert kinds(lir) == ["contract", "contract"]


@pytest.mark.usefixtures("each_origin")
def test_set_param_reaches_merged_weights() -> None:
    def f(x: Node, a: Node, b: Node) -> tuple[Any, Any]:
        return ops.sum(x @ a, axis=0), ops.sum(x @ b, axis=0)

    program = rlx.compile(built(f, (2, 4), params=((4, 4), (4, 4))))
    assert "contract" in kinds(program.lir) and program.lir.trace.decisions[0].verdict
    program.set_param("w1", np.eye(4, dtype=np.float32))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(program.run({"x0": x})["y1"], x.sum(0))


def test_products_that_are_outputs_stay_apart() -> None:
    """Each output has memory of its own, so slices of one result would have to be copied."""
    lir = planned(built(lambda x, a, b: (x @ a, x @ b), (64, 16), params=((16, 64), (16, 64))))
    assert kinds(lir) == ["contract", "contract"] and not lir.trace.decisions[0].verdict


# -- layouts


@pytest.mark.parametrize("side", ["read", "stored"])
def test_pieces_do_not_share_a_kernel_with_blocks(side: str) -> None:
    """In one kernel, every piece would be read across lanes."""
    g = rlx.Graph("pieces")
    with g.building():
        planes = [g.input(f"x{i}", (1, 24, 8, 8), "f32") for i in range(2)]
        if side == "read":
            blocked = g.input("b", (1, 2, 8, 8, 16), "f32")
            planes.append(from_blocks(blocked, 24) * 2.0)
        y = ops.concat(planes, axis=1)
        y = to_blocks(y, 16) if side == "stored" else y
    g.set_outputs({"y": y})
    lir = plan(g)
    assert len(lir.plan.schedule) == 2
    (refused,) = [d for d in lir.decisions.refused() if "pieces are joined by one kernel" in d.reason][:1]
    assert refused.net_ps > 0  # by its price it would pay: the reason is how kernels read
    feed = {n.attrs["name"]: np.random.default_rng(0).random(n.shape, np.float32) for n in g.inputs}
    np.testing.assert_allclose(rlx.compile(g).run(feed)["y"], evaluate(g, feed)["y"], rtol=1e-6)


# -- recomputing


def test_a_cheap_value_is_computed_again_by_each_reader() -> None:
    """Storing a mask costs traffic; comparing again costs next to nothing."""

    def f(x: Node) -> tuple[Any, Any]:
        positive = ops.cast(x > 0.0, "f32")
        return ops.sum(positive, axis=0), ops.sum(positive * 2.0, axis=1)

    lir = planned(built(f, (256, 256)))
    assert kinds(lir) == ["reduce", "reduce"]
    assert any(d.rule == "recompute" and d.verdict for d in lir.decisions)


def test_a_dear_value_is_stored() -> None:
    def f(x: Node) -> tuple[Any, Any]:
        dear = ops.tan(ops.log1p(ops.exp(ops.tan(x))))
        return ops.sum(dear, axis=0), ops.sum(dear * 2.0, axis=1)

    lir = planned(built(f, (256, 256)))
    evaluated = [name for i in lir.plan.schedule for name in ops_of(lir.mir.nodes[i])]
    assert kinds(lir) == ["reduce", "reduce"] and evaluated.count("tan") == 2
    assert any(d.rule == "recompute" and d.compute_ps_added > d.score_ps for d in lir.decisions.refused())


def test_a_vector_is_not_computed_again_for_every_row() -> None:
    lir = planned(built(lambda x, v: x + ops.exp(ops.tan(v)), (4096, 64), (64,)))
    assert kinds(lir) == ["map", "map"]
    refused = [d for d in lir.decisions if not d.verdict]
    assert any(d.compute_ps_added > d.score_ps for d in refused)


# -- decisions


def two_ops(**options: Any) -> LirModule:
    return planned(built(lambda x: ops.exp(x) * 2.0, (64, 64)), **options)


def ids_of(lir: LirModule, *names: str) -> list[int]:
    assert lir.unfused is not None
    return [next(n.id for n in lir.unfused.nodes if n.op.name == name) for name in names]


def test_a_kernel_that_stores_nothing_computes_nothing_again() -> None:
    """Its readers do what it did; what is spread to readers afterwards does not reach it."""

    def loss(x: Any) -> Any:
        return ops.sum(
            ops.sin(ops.sum_square(ops.reciprocal(ops.tanh(x) * 0.4 + 1.5), axis=-1, keepdims=True))
        )

    def slope(x: Any) -> Any:
        return ops.sum(rlx.grad(loss)(x) * 0.5)

    g = rlx.Graph("second order")
    x0 = g.input("x0", (1, 1, 2, "k"), "f32")
    with g.building():
        g.output("y0", rlx.grad(slope)(x0))
    for k in (1, 15):
        x = np.linspace(-1, 1, 2 * k, dtype=np.float32).reshape(1, 1, 2, k)
        feed = {"x0": x}
        assert_by_table(g, feed, rlx.compile(g, cache=False).run(feed), evaluate(g, feed))


def test_why_not_answers_for_two_nodes() -> None:
    lir = two_ops()
    a, b = ids_of(lir, "exp", "mul")
    assert lir.decisions.why_not(a, b).startswith(f"%{a} and %{b} are one kernel: keep elementwise")
    chain = planned(built(lambda x, w: ops.exp(x) @ w, (8, 8), params=((8, 8),)))
    a, b = ids_of(chain, "exp", "dot_general")
    assert chain.decisions.why_not(a, b).startswith(f"%{a} and %{b} are one kernel: keep prologue")
    chain = planned(built(lambda x, y: x @ ops.exp(y), (8, 8), (8, 8)))
    a, b = ids_of(chain, "exp", "dot_general")
    assert "reads its operands from memory" in chain.decisions.why_not(a, b)


def test_products_of_other_devices_read_what_they_multiply() -> None:
    chain = planned(built(lambda x, w: ops.exp(x) @ w, (8, 8), params=((8, 8),)), device="opencl")
    assert kinds(chain) == ["map", "contract"]
    assert "again for every 8 columns" in chain.decisions.why_not(*ids_of(chain, "exp", "dot_general"))


def test_pins_overrule_the_gate() -> None:
    a, b = ids_of(two_ops(), "exp", "mul")
    apart = two_ops(pins={(a, b): False})
    assert kinds(apart) == ["map", "map"]
    assert "pinned apart by the user" in apart.decisions.why_not(a, b)
    never = IoFusionGate(0, 0, 25, 25, True, 0, 10**9)
    assert kinds(two_ops(gate=never)) == ["map", "map"]
    together = two_ops(gate=never, pins={(b, a): True})
    assert kinds(together) == ["map"]
    assert together.decisions[0].pinned and "pinned by the user" in together.decisions[0].reason


def test_pins_are_about_the_main_graph_not_about_bodies() -> None:
    g = rlx.Graph("looped")
    x = g.input("x", (4,), "f32")
    with g.building():
        v = rlx.ops.sin(x) + 1.0
        out = rlx.ops.loop(lambda i, c: (True, rlx.ops.tanh(c * 0.5 + v), None), v, trips=3)[0]
        g.set_outputs([rlx.ops.stack([out, out], axis=0), rlx.ops.exp(v * 2.0)])
    value = np.linspace(-1, 1, 4, dtype=np.float32)
    plain = rlx.compile(g)
    unfused = plain.lir.unfused
    last = unfused.nodes[-1]  # beyond the last node of the body
    pair = next((o.id, last.id) for o in last.operands)
    assert pair[1] >= max(len(b.nodes) for n in unfused.nodes for b in n.bodies)
    pinned = rlx.compile(g, pins={pair: False})
    for a, b in zip(plain(value), pinned(value), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_pin_of_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(VerifyError, match="has no node %99"):
        two_ops(pins={(0, 99): True})


def test_the_gate_in_force_is_part_of_the_module() -> None:
    assert two_ops().gate == default_gate("cpu").constants()
    assert two_ops(gate=NO_DISPATCH).gate["dispatch_ns"] == 0


def test_decisions_carry_source_lines() -> None:
    lir = two_ops()
    assert all(any("test_fuse.py" in w for w in d.where) for d in lir.decisions)


def test_the_same_graph_gives_the_same_decisions() -> None:
    first, second = planned(bert(1)), planned(bert(1))
    assert first.decisions.to_json() == second.decisions.to_json()
    assert str(first.mir) == str(second.mir)
