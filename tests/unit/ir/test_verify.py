"""The verifier: sound graphs pass, and every broken rule is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from op_cases import ALL_CASES, Case, by_op
from sample_graphs import GRAPHS, assumed, hello, nested, stateful

import rlx
from rlx.errors import VerifyError
from rlx.ir.dim import Constraint, sym
from rlx.ir.graph import Graph, Node, State
from rlx.ir.module import MirModule
from rlx.ir.op import Level, Op, Role, declare, withdraw
from rlx.ir.types import parse_type
from rlx.ir.verify import verify
from rlx.transform.expand import expand_graph


@by_op(ALL_CASES)
def test_every_op_is_legal_where_it_belongs(case: Case) -> None:
    g, _ = case.graph()
    verify(g, Level.HIR)
    verify(expand_graph(g), Level.MIR)
    if case.op.level is Level.HIR:
        with pytest.raises(VerifyError, match="is an HIR op in a MIR graph"):
            verify(g, Level.MIR)


@pytest.mark.parametrize("name", GRAPHS)
def test_sound_graphs_pass(name: str) -> None:
    g = GRAPHS[name]()
    assert verify(g) is g


def set_attr(node: Node, key: str, value: Any) -> None:
    node.attrs = MappingProxyType({**node.attrs, key: value})


@dataclass
class Broken:
    """A sound graph, how to break it, and what the verifier says then."""

    name: str
    build: Callable[[], Graph]
    spoil: Callable[[Graph], Any]
    says: str


def foreign(g: Graph) -> Node:
    return Graph("other").input("z", (1,), "f32")


def hir_in_body(g: Graph) -> None:
    body = g.nodes[1].bodies[0]
    with body.building():
        rlx.ops.gelu(body.inputs[0])


def reorder(g: Graph) -> None:
    g.nodes[3], g.nodes[4] = g.nodes[4], g.nodes[3]
    g.nodes[3].id, g.nodes[4].id = 3, 4


BROKEN = [
    Broken("id", hello, lambda g: setattr(g.nodes[3], "id", 9), "%9 (matmul) is number 3 of graph 'hello'"),
    Broken("graph", hello, lambda g: setattr(g.nodes[3], "graph", Graph("b")), "belongs to graph 'b'"),
    Broken("order", hello, reorder, "%3 (add) reads %4, which does not come before it"),
    Broken(
        "operand", hello, lambda g: setattr(g.nodes[4], "operands", (g.nodes[3], foreign(g))), "not a node of"
    ),
    Broken("arity", hello, lambda g: setattr(g.nodes[5], "operands", ()), "%5: gelu: takes 1 operand, got 0"),
    Broken(
        "attribute",
        hello,
        lambda g: set_attr(g.nodes[5], "approximate", "x"),
        "%5: gelu: attribute 'approximate'",
    ),
    Broken("unknown attribute", hello, lambda g: set_attr(g.nodes[5], "axis", 1), "unknown attribute 'axis'"),
    Broken(
        "uncanonical",
        nested,
        lambda g: set_attr(g.nodes[1].bodies[0].nodes[3], "axes", [1]),
        "canonical form",
    ),
    Broken(
        "type",
        hello,
        lambda g: setattr(g.nodes[5], "type", parse_type("f32[1]")),
        "but its type rule says f32[1,seq,2]",
    ),
    Broken(
        "body type",
        nested,
        lambda g: setattr(g.nodes[1].bodies[0].nodes[2], "type", parse_type("f32[]")),
        "%2 (mul)",
    ),
    Broken("bodies", nested, lambda g: setattr(g.nodes[1], "bodies", ()), "region: takes 1 body, got 0"),
    Broken(
        "itself", nested, lambda g: setattr(g.nodes[1], "bodies", (g,)), "graph 'nested' is a body of itself"
    ),
    Broken(
        "constraint",
        assumed,
        lambda g: g.constraints.pop(),
        "holds only if 2*half equals n, which is not among",
    ),
    Broken(
        "refuted", assumed, lambda g: g.assume(Constraint("eq", sym("q"), sym("q") + 1)), "which never holds"
    ),
    Broken("inputs", hello, lambda g: g.inputs.clear(), "its list of inputs is not its input nodes: %0"),
    Broken("params", hello, lambda g: g.params.clear(), "its list of params is not its param nodes: %1"),
    Broken(
        "states", stateful, lambda g: g.state_inputs.clear(), "its list of states is not its state nodes: %1"
    ),
    Broken(
        "two names",
        assumed,
        lambda g: set_attr(g.nodes[1], "name", "a"),
        "the name 'a', which %0 has already",
    ),
    Broken(
        "renamed", hello, lambda g: set_attr(g.nodes[1], "name", "v"), "is called 'v', but is listed as 'w'"
    ),
    Broken(
        "value",
        hello,
        lambda g: g.param_values.update(w=np.zeros(3, np.float32)),
        "the value of 'w' has rank 2",
    ),
    Broken(
        "stray value",
        hello,
        lambda g: g.param_values.update(q=np.zeros(3)),
        "a value for 'q', but no such param",
    ),
    Broken(
        "state value",
        stateful,
        lambda g: g.state_values.update(count=np.zeros((), np.int32)),
        "got dtype i32",
    ),
    Broken(
        "output",
        hello,
        lambda g: g.outputs.update(z=foreign(g)),
        "output 'z' is %0 = input() : f32[1], which is not one of its nodes",
    ),
    Broken(
        "tuple output", nested, lambda g: g.outputs.update(z=g.nodes[1]), "has 2 results, but is output 'z'"
    ),
    Broken("state twice", stateful, lambda g: g.states.append(g.states[0]), "state 'count' is listed twice"),
    Broken(
        "state type",
        stateful,
        lambda g: setattr(g, "states", [State("count", g.nodes[1], g.constant(np.float32(1)))]),
        "%3 (constant) is f32[], but replaces state 'count' of i64[]",
    ),
    Broken(
        "bounds",
        assumed,
        lambda g: g.input("c", (sym("n", min=2),), "f32"),
        "symbol n has different bounds in places",
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=[b.name for b in BROKEN])
def test_what_is_broken_is_found(broken: Broken) -> None:
    g = broken.build()
    verify(g)
    broken.spoil(g)
    with pytest.raises(VerifyError) as caught:
        verify(g)
    assert broken.says in str(caught.value)


def test_levels_go_into_bodies() -> None:
    g = nested()
    hir_in_body(g)
    verify(g, Level.HIR)
    with pytest.raises(VerifyError, match=r"%4 \(gelu\) is an HIR op in a MIR graph"):
        verify(g, Level.MIR)


def test_the_message_names_the_location() -> None:
    g = hello()
    g.nodes[5].type = parse_type("f32[]")
    with pytest.raises(VerifyError, match=r"%5 \(gelu\) .* \(at model.py:2, layer.0\)"):
        verify(g)


def toy_op(infer: Callable[..., Any]) -> Op:
    members = {"name": "toy_op", "role": Role.TUPLE, "infer": infer, "samples": lambda self: []}
    return declare(type("toy_op", (Op,), members))


def test_an_op_declared_again_is_another_op() -> None:
    """Nodes of an op that was withdrawn and declared anew are not silently judged by the new rules."""
    g = Graph()
    g.add(toy_op(lambda self: parse_type("f32[]")))
    verify(g)
    withdraw("toy_op")
    for again in (False, True):
        if again:
            toy_op(lambda self: parse_type("f32[]"))
        with pytest.raises(VerifyError, match=r"%0 \(toy_op\) is an op that is not declared"):
            verify(g)
    withdraw("toy_op")


def test_a_rule_that_crashes_is_a_verify_error() -> None:
    answers = [parse_type("f32[]")]
    g = Graph()
    g.add(toy_op(lambda self: answers.pop()))
    with pytest.raises(VerifyError, match="type rule that failed with IndexError: pop from empty list"):
        verify(g)
    withdraw("toy_op")


# -- modules


def test_a_module_is_verified_mir() -> None:
    with pytest.raises(VerifyError, match="expand it first"):
        MirModule.from_graph(hello())
    module = MirModule.from_graph(expand_graph(hello()))
    assert module.name == "hello" and len(module) == len(module.as_graph())
    assert str(MirModule.from_text(str(module))) == str(module)


def test_a_graph_taken_out_is_the_callers_own() -> None:
    module = MirModule.from_graph(expand_graph(hello()))
    taken = module.into_graph()
    assert str(taken) == str(module) and taken.param_values.keys() == {"w"}
    before = len(module)
    taken.input("more", (1,), "f32")
    assert len(module) == before and module.as_graph() is module.as_graph()
