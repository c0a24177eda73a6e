"""The fingerprint: any change of a program gives another one, and no process gives another for the same."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import sample_models
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import ALL_CASES, Case

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.cost import default_gate
from rlx.errors import RlxError
from rlx.ir.attr import Blob, attr_key
from rlx.ir.dim import Expr
from rlx.ir.dtype import DType, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op
from rlx.ir.types import TensorType
from rlx.kernel.layout import Layout
from rlx.kernel.panels import Panels
from rlx.plan.build import Planner
from rlx.plan.lir import LirBufferSlot, LirModule, LirViewAlias
from rlx.rewrite.basic import materialize_outputs
from rlx.rewrite.bodies import prepare_bodies

TARGET = "x86-64-v3"
WITH_ATTRS = [case for case in ALL_CASES if case.op.attrs]


def planned_as_is(graph: Graph) -> LirModule:
    """A graph as it stands: nothing is simplified away."""
    graph = materialize_outputs(prepare_bodies(graph, lambda body: body))
    planner = Planner(graph, {})
    return LirModule(graph, planner.plan(), target=TARGET, planner=planner)


def mutations(value: Any) -> list[Any]:
    """Values near another, most likely valid ones first."""
    if value is None:
        return [1, 0, 0.5, True, "f32", (0,)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 0, 1, 2, 3, 4]
    if isinstance(value, float):
        return [value + 0.25, -value, 0.5, 1.5]
    if isinstance(value, str):
        words = (
            "linear",
            "nearest",
            "cubic",
            "constant",
            "edge",
            "reflect",
            "wrap",
            "max",
            "min",
            "add",
            "mul",
        )
        more = ("hann", "hamming", "mean", "sum", "none", "relu", "tanh", "ij,jk->ki", "f64", "other")
        return [w for w in (*words, *more) if w != value]
    if isinstance(value, Layout):
        return [Panels(3, 10, 2, 2).layout, Panels(3, 10, 8, 2).layout]
    if isinstance(value, DType):
        return [dtype(n) for n in ("f64", "f16", "i32", "i64", "bf16", "bool") if n != value.name]
    if isinstance(value, Expr):
        return [value + 1, value * 2, 3]
    if isinstance(value, TensorType):
        return [value.with_dtype(d) for d in mutations(value.dtype)]
    if isinstance(value, Blob):
        flipped = value.array.copy()
        raw = flipped.reshape(-1).view(np.uint8)
        raw[:1] ^= 1
        return [Blob(flipped)]
    if isinstance(value, tuple):
        out: list[Any] = []
        for i, item in enumerate(value):
            out += [(*value[:i], m, *value[i + 1 :]) for m in mutations(item)]
        return [*out, value[::-1], value[1:], (*value, *(value[:1] or ("left",)))]
    return []


def try_mutated(graph: Graph, op: Op, key: str, value: Any) -> Graph | None:
    """The graph with one attribute of the nodes of one op changed; None if that is not valid."""
    out = Graph(graph.name)
    mapping: dict[int, Any] = {}
    try:
        with out.building():
            for node in graph.nodes:
                attrs = {**node.attrs, key: value} if node.op is op else node.attrs
                operands = [mapping[o.id] for o in node.operands]
                mapping[node.id] = out.add(node.op, operands, attrs, node.bodies, where=node.where)
            out.set_outputs({k: mapping[n.id] for k, n in graph.outputs.items()})
    except (RlxError, TypeError, ValueError, IndexError, KeyError, ZeroDivisionError, AttributeError):
        return None
    return out


def forged(module: LirModule, op: Op, key: str, value: Any) -> LirModule:
    """The program with one attribute overwritten, whether or not the op's type rule would take it."""
    graph = module.into_graph()
    node = next(n for n in graph.nodes if n.op is op)
    node.attrs = MappingProxyType({**node.attrs, key: value})
    return replace(module, mir=graph)


def test_any_other_attribute_of_any_op_gives_another_fingerprint() -> None:
    """Where a type rule takes no other value for an attribute alone, the node is forged."""
    tried: set[tuple[str, str]] = set()
    for case in ALL_CASES:
        graph, _ = case.graph()
        target = next((n for n in graph.nodes if n.op is case.op), None)
        if target is None:
            continue
        module = planned_as_is(graph)
        for key in case.op.attrs:
            others = [v for v in mutations(target.attrs[key]) if attr_key(v) != attr_key(target.attrs[key])]
            valid = (try_mutated(graph, case.op, key, v) for v in others)
            found = next((g for g in valid if g is not None and not is_same(g, target, key)), None)
            other = forged(module, case.op, key, others[0]) if found is None else planned_as_is(found)
            assert other.fingerprint() != module.fingerprint(), (case.op.name, key)
            tried.add((case.op.name, key))
    assert tried == {(c.op.name, key) for c in ALL_CASES for key in c.op.attrs}


def is_same(graph: Graph, node: Node, key: str) -> bool:
    """Whether a value was brought to the form that the attribute had before."""
    changed = next(n for n in graph.nodes if n.op is node.op)
    return bool(attr_key(changed.attrs[key]) == attr_key(node.attrs[key]))


# -- properties: one thing of a random program is changed


@settings(max_examples=300)
@given(st.data())
def test_one_attribute_of_any_op(data: st.DataObject) -> None:
    """Any other value, also deep inside a tuple, and also one that the op's type rule would not take."""
    case: Case = data.draw(st.sampled_from(WITH_ATTRS), label="case")
    key = data.draw(st.sampled_from(sorted(case.op.attrs)), label="attribute")
    graph, _ = case.graph()
    node = next((n for n in graph.nodes if n.op is case.op), None)
    if node is None:
        return
    others = [v for v in mutations(node.attrs[key]) if attr_key(v) != attr_key(node.attrs[key])]
    value = data.draw(st.sampled_from(others), label="value")
    module = planned_as_is(graph)
    other = forged(module, case.op, key, value)
    assert other.fingerprint() != module.fingerprint()
    assert other.code_key != module.code_key


def mixed(constant: np.ndarray) -> LirModule:
    """Views, shared storage, several outputs, a constant, a product."""
    g = rlx.Graph("mixed")
    x = g.input("x", ("n", 8), "f32")
    w = g.param("w", (8, 8), "f32", np.eye(8, dtype=np.float32))
    running = ops.cumsum(x @ w + constant, axis=1)
    g.output("y", ops.cumsum(ops.transpose(running), axis=0))
    g.output("z", ops.cumsum(ops.tanh(running)[1:], axis=1))
    return plan(g, target=TARGET)


CONSTANT = np.arange(8, dtype=np.float32)
MIXED = mixed(CONSTANT)


@settings(max_examples=60)
@given(st.integers(0, CONSTANT.nbytes * 8 - 1))
def test_one_bit_of_a_constant(bit: int) -> None:
    changed = CONSTANT.copy()
    changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert mixed(changed).fingerprint() != MIXED.fingerprint()


@settings(max_examples=100)
@given(st.data())
def test_one_number_of_the_plan(data: st.DataObject) -> None:
    """Offsets, sizes, spaces, strides, lifetimes, order, alignment, sizes of spaces, what is shared."""
    p = MIXED.plan
    step = data.draw(st.sampled_from([1, 4, 64]), label="step")
    what = data.draw(
        st.sampled_from(["offset", "size", "space", "life", "order", "alignment", "room", "view", "shared"])
    )
    changed = replace(p, assignments=dict(p.assignments), view_aliases=dict(p.view_aliases))
    node = data.draw(st.sampled_from(sorted(p.lifetimes)), label="node")
    slot = p.assignments[node]
    if what == "offset":
        changed.assignments[node] = replace(slot, offset=slot.offset + step)
    elif what == "size":
        changed.assignments[node] = replace(slot, size=slot.size + step)
    elif what == "space":
        changed.assignments[node] = LirBufferSlot(slot.offset, slot.size, "state")
    elif what == "life":
        first, last = p.lifetimes[node]
        changed.lifetimes = {**p.lifetimes, node: (first, last + step)}
    elif what == "order":
        at = data.draw(st.integers(1, len(p.schedule) - 1), label="at")
        changed.schedule = [*p.schedule[at:], *p.schedule[:at]]
    elif what == "alignment":
        changed.alignment = p.alignment + step
    elif what == "room":
        space = data.draw(st.sampled_from(sorted(p.space_sizes)), label="space")
        changed.space_sizes = {**p.space_sizes, space: p.space_sizes[space] + step}
    elif what == "view":
        view = data.draw(st.sampled_from(sorted(p.view_aliases)), label="view")
        alias = p.view_aliases[view]
        strides = tuple(s + step for s in alias.strides or (1,))
        other = data.draw(
            st.sampled_from([(alias.byte_offset + step, alias.strides), (alias.byte_offset, strides)])
        )
        changed.view_aliases[view] = LirViewAlias(alias.root, *other)
    else:
        changed.shared = {**p.shared, node: node}
    assert replace(MIXED, buffers=changed).fingerprint() != MIXED.fingerprint()


OPTIONS = st.sampled_from(
    [
        {"target": "x86-64-v4"},
        {"assume": {"n": 127}},
        {"precision": "bf16"},
        *({"gate": replace(default_gate("cpu"), **{k: v})} for k, v in [
            ("dispatch_ns", 201), ("roundtrip_ns", 1), ("memory_bw", 24.5), ("host_readback_bw", 1),
            ("unified_memory", False), ("host_thunk_penalty_ns", 3), ("min_gain_ns", 99),
            ("legacy_unified_readback", True),
        ]),
    ]
)  # fmt: skip


@settings(max_examples=30)
@given(OPTIONS)
def test_one_option_of_compile(option: dict[str, Any]) -> None:
    g = rlx.Graph("options")
    g.output("y", ops.tanh(g.input("x", ("n", 8), "f32") * 2.0))
    first = plan(g, target=TARGET)
    assert plan(g, **{"target": TARGET, **option}).fingerprint() != first.fingerprint()


# -- the same in every process

SCRIPT = """
import importlib, pkgutil, random, sys
sys.path.insert(0, sys.argv[1])
names = []
for part in ("ir", "kernel", "ops", "fuse", "rewrite", "cost", "plan", "transform"):
    folder = importlib.import_module("rlx." + part)
    names += [m.name for m in pkgutil.walk_packages(folder.__path__, folder.__name__ + ".")]
random.Random(int(sys.argv[2])).shuffle(names)
for name in names[: int(sys.argv[3])]:
    importlib.import_module(name)
import numpy as np, rlx
from rlx import ops
from rlx.api.compile import plan
from sample_models import bert, exported_attention
signal = rlx.Graph("signal")
_, power = ops.welch(signal.input("x", ("n", 512), "f32"), nperseg=64)
signal.output("y", ops.spectral_peaks(power, 3)[0])
image = rlx.Graph("image")
w = image.param("w", (16, 3, 3, 3), "f32", np.ones((16, 3, 3, 3), np.float32))
image.output("y", ops.max_pool(ops.relu(ops.conv(image.input("x", (1, 3, "h", "h"), "f32"), w)), (2, 2)))
for graph in (bert(1), exported_attention("causal"), signal, image):
    lir = plan(graph, target="x86-64-v3")
    print(lir.fingerprint(), lir.code_key)
    sys.stdout.write(lir.to_text())
"""


def test_the_same_text_in_every_process() -> None:
    """With other hash seeds, and with modules imported in other orders."""
    running = []
    for seed, count in (("0", 0), ("1", 1000), ("77", 20)):
        command = [sys.executable, "-c", SCRIPT, str(Path(sample_models.__file__).parent), seed, str(count)]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, text=True, env=env, **pipes))  # type: ignore[call-overload]
    texts = set()
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        texts.add(out)
    assert len(texts) == 1 and next(iter(texts)).count("rlx plan 1") == 4
