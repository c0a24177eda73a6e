"""Small passes that every program needs: outputs with storage, derived weights, dead code, folding."""

from __future__ import annotations

import numpy as np

from rlx.backend.reference.interpreter import Interpreter
from rlx.ir.graph import Graph, Node, copy_node, finish_rewrite, rewrite
from rlx.ir.op import Role, get_op
from rlx.ir.dim import Expr
from rlx.ir.types import TensorType, TupleType, type_symbols
from rlx.passes.groups import is_view


def remove_dead(graph: Graph) -> Graph:
    """Drop nodes that no output needs."""
    return rewrite(graph, lambda node, operands, out: None)


def materialize_outputs(graph: Graph) -> Graph:
    """Every output gets storage of its own: a view, an input or a value named twice is copied."""
    out = rewrite(graph, lambda node, operands, into: None)
    seen: set[int] = set()
    outputs = {}
    for name, node in out.outputs.items():
        if node.op.role is not Role.COMPUTE and node.op.role is not Role.RESULT or is_view(node) or node.id in seen:
            node = out.add(get_op("copy"), (node,), where=node.where)
        seen.add(node.id)
        outputs[name] = node
    out.set_outputs(outputs)
    return out


FOLD_LIMIT = 1 << 16  # elements up to which an operation on constants is done at compile time


def fold_constants(graph: Graph) -> Graph:
    """Compute what depends on constants only, where the result is small."""

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op.role is not Role.COMPUTE or node.bodies or isinstance(node.type, TupleType) or node.op.effects != "none":
            return None
        if not operands or not all(o.op.role is Role.CONSTANT for o in operands):
            return None
        size = node.tensor.numel
        if not isinstance(size, int) or size > FOLD_LIMIT:
            return None
        run = Interpreter(out)
        for o in operands:
            run.values[o.id] = o.attrs["value"].array
        copy = copy_node(node, operands, out)
        return out.constant(np.asarray(run.compute(copy)))

    return rewrite(graph, visit)


def uses_symbols(node: Node) -> bool:
    """Whether the value of a node depends on the size of a symbol."""
    return bool(type_symbols(node.type)) or any(_has_symbols(v) for v in node.attrs.values())


def _has_symbols(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_has_symbols(v) for v in value)
    return isinstance(value, Expr) or (isinstance(value, TensorType) and bool(type_symbols(value)))


def split_derived(graph: Graph) -> tuple[Graph, Graph | None]:
    """Move what depends only on params and constants to a graph that runs at load; its results become params."""
    fixed: set[int] = set()
    for node in graph.nodes:
        if node.op.role in (Role.PARAM, Role.CONSTANT):
            fixed.add(node.id)
        elif node.op.role is Role.COMPUTE and node.operands and all(o.id in fixed for o in node.operands):
            if node.op.effects == "none" and not node.bodies and not uses_symbols(node) and not node.op.reader_side:
                fixed.add(node.id)
    live = graph.live()
    wanted = [
        o
        for node in graph.nodes
        if node.id in live and node.id not in fixed
        for o in node.operands
        if o.id in fixed and o.op.role is Role.COMPUTE
    ]
    wanted = list({o.id: o for o in wanted}.values())
    if not wanted:
        return graph, None
    derived = Graph(f"{graph.name}.weights")
    inside: dict[int, Node] = {}
    for node in graph.nodes:
        if node.id in fixed and (node.id in live or node.op.role is Role.PARAM):
            inside[node.id] = copy_node(node, [inside[o.id] for o in node.operands], derived)
    derived.param_values = dict(graph.param_values)
    names = {o.id: f"derived:{i}" for i, o in enumerate(wanted)}
    derived.set_outputs({names[o.id]: inside[o.id] for o in wanted})
    main = Graph(graph.name)
    for c in graph.constraints:
        main.assume(c)
    mapping: dict[int, Node] = {}
    needed = {o.id for n in graph.nodes if n.id in live and n.id not in fixed for o in n.operands}
    for node in graph.nodes:
        if node.id in names:
            mapping[node.id] = main.param(names[node.id], node.shape, node.dtype)
        elif node.id in fixed:
            if node.id in needed or node.id in {n.id for n in graph.roots()}:
                mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], main)
        elif node.id in live or node.op.role in (Role.INPUT, Role.STATE):
            mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], main)
    finish_rewrite(graph, main, mapping)
    main.param_values = {k: v for k, v in graph.param_values.items() if k in main.params}
    return main, derived
