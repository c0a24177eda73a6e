"""Small graphs that use every feature of the IR, shared by the tests of text, verifier, files and diffs."""

from __future__ import annotations

import numpy as np

import rlx
from rlx.errors import provenance
from rlx.ir.dim import Constraint, sym
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.ir.text.write import Printer


def hello() -> Graph:
    """The example of the README: symbolic sequence length, a param, a constant, an HIR op."""
    g = Graph("hello")
    with provenance(("model.py:1",)):
        x = g.input("x", (1, "seq", 4), "f32")
        w = g.param("w", (4, 2), "f32", np.arange(8, dtype=np.float32).reshape(4, 2))
    with provenance(("model.py:2", "layer.0")):
        b = g.constant(np.array([0.5, -np.inf], np.float32))
        g.output("y", rlx.ops.gelu(x @ w + b))
    return g


def assumed() -> Graph:
    """Bounded symbols and an equality that inference has to assume."""
    g = Graph("assumed")
    with provenance(("join.py:7",)):
        a = g.input("a", (sym("n", min=1, max=64), 3), "f32")
        b = g.input("b", (2 * sym("half"), 3), "f32")
        g.assume(Constraint("multiple", sym("n", min=1, max=64), 4, ("join.py:9",)))
        g.output("sum", a + b)
    return g


def stateful() -> Graph:
    """A state with an initial value, replaced on every run."""
    g = Graph("counter")
    with provenance(()):
        step = g.input("step", (), "i64", once=True)
        count = g.state("count", (), "i64", init=np.array(5, np.int64))
        new = count + step
        g.set_state("count", new)
        g.output("now", new)
    return g


def nested() -> Graph:
    """A region: a node whose body is a graph, with a constant of its own and two results."""
    body = Graph("body")
    with provenance(("k.py:1",)), body.building():
        x = body.input("x", ("n", 3), "f32")
        y = x * 2.0
        body.set_outputs({"double": y, "total": rlx.ops.sum(y, axis=1)})
    g = Graph("nested")
    with provenance(("m.py:4",)):
        a = g.input("a", ("n", 3), "f32")
        node = g.add(get_op("region"), (a,), {"kind": "reduce"}, (body,))
        double, total = g.results(node)
        g.set_outputs({"double": double, "total": total})
    return g


def large() -> Graph:
    """A constant too large for the text."""
    g = Graph("large")
    with provenance(("big.py:2",)):
        x = g.input("x", (100,), "f32")
        g.output("y", x + g.constant(np.arange(100, dtype=np.float32) / 128))
    return g


GRAPHS = {f.__name__: f for f in (hello, assumed, stateful, nested, large)}


def assert_same(a: Graph, b: Graph) -> None:
    """Everything but values of params and states, which text does not carry."""
    assert a.name == b.name and len(a) == len(b)
    value = Printer().value_text
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.id, x.op, x.type, x.where) == (y.id, y.op, y.type, y.where)
        assert [o.id for o in x.operands] == [o.id for o in y.operands]
        assert x.attrs.keys() == y.attrs.keys()
        for key in x.attrs:
            assert type(x.attrs[key]) is type(y.attrs[key])
            assert value(x.attrs[key]) == value(y.attrs[key])
        assert len(x.bodies) == len(y.bodies)
        for p, q in zip(x.bodies, y.bodies, strict=True):
            assert_same(p, q)
    for table in ("outputs", "params", "state_inputs"):
        left, right = getattr(a, table), getattr(b, table)
        assert [(k, n.id) for k, n in left.items()] == [(k, n.id) for k, n in right.items()]
    assert [n.id for n in a.inputs] == [n.id for n in b.inputs]
    assert [(s.name, s.input.id, s.output.id) for s in a.states] == [
        (s.name, s.input.id, s.output.id) for s in b.states
    ]
    assert a.constraints == b.constraints
