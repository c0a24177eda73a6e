"""Reverse-mode differentiation on graphs, and forward mode as reverse mode of reverse mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import GradientError, provenance
from rlx.ir.graph import Graph, Node
from rlx.ir.node import is_among
from rlx.ir.op import Level, Op, Role, get_op, run_rule
from rlx.ir.rewrite import inline, rewrite
from rlx.ir.types import TupleType
from rlx.transform.expand import expand_graph


def is_differentiable_dtype(node: Node) -> bool:
    """Gradients flow through real and complex floating point only."""
    return not isinstance(node.type, TupleType) and (node.dtype.is_float or node.dtype.is_complex)


def ensure_mir(graph: Graph, keep_rules: str) -> Graph:
    """Expand HIR ops that do not carry the rule themselves."""

    def keep(op: Op) -> bool:
        return op.level is Level.HIR and op.has(keep_rules)

    if any(n.op.level is Level.HIR and not keep(n.op) for n in graph.nodes):
        return expand_graph(graph, keep)
    return graph


def backward(
    graph: Graph, seeds: Mapping[int, Node], wanted: Sequence[Node], first: int = 0
) -> list[Node | None]:
    """Gradients of sum(seed * node) with respect to `wanted`, added to the same graph.

    `seeds` maps node ids to their incoming gradients. Shared uses accumulate in a fixed order. Nodes before
    `first` are taken as constants (unless wanted). HIR ops without a rule go through their expansion.
    """
    reach = _influenced_by(graph, wanted, first)
    grads: dict[int, Node] = dict(seeds)
    parts: dict[int, dict[int, Node]] = {}  # multi-output nodes: result index -> gradient
    top = max(seeds, default=-1)
    with graph.building():
        for node in reversed(graph.nodes[first : top + 1]):
            if node.id not in reach or not node.operands:
                continue
            if node.op.role is Role.RESULT:
                g = grads.get(node.id)
                if g is not None:
                    parts.setdefault(node.operands[0].id, {})[node.attrs["index"]] = g
                continue
            many = isinstance(node.type, TupleType)
            if (node.id not in parts) if many else (node.id not in grads):
                continue
            if node.op.not_differentiable is not None:
                continue  # constant between jumps: the gradient is zero wherever it exists
            incoming: Any = _tuple_grads(node, parts[node.id]) if many else grads[node.id]
            with provenance(node.where):
                out = _node_gradients(graph, node, incoming, many)
            for operand, d in out:
                if d is None or operand.id not in reach or not is_differentiable_dtype(operand):
                    continue
                old = grads.get(operand.id)
                with provenance(node.where):
                    grads[operand.id] = d if old is None else get_op("add")(old, d)
    return [grads.get(n.id) for n in wanted]


def _node_gradients(graph: Graph, node: Node, incoming: Any, many: bool) -> list[tuple[Node, Node | None]]:
    """(operand, gradient) pairs of one node."""
    if node.op.has("vjp"):
        value: Any = tuple(graph.results(node)) if many else node
        return list(
            zip(
                node.operands,
                run_rule(node.op, "vjp", incoming, value, *node.operands, node=node),
                strict=True,
            )
        )
    start = len(graph.nodes)
    made = run_rule(node.op, "expand", *node.operands, node=node)
    results = made if isinstance(made, tuple) else (made,)
    given = incoming if many else (incoming,)
    operands = list(dict.fromkeys(node.operands))
    direct = {r.id: g for r, g in zip(results, given, strict=True) if g is not None and is_among(r, operands)}
    seeds: dict[int, Node] = {}
    for r, g in zip(results, given, strict=True):
        if g is not None and r.id >= start:
            seeds[r.id] = get_op("add")(seeds[r.id], g) if r.id in seeds else g
    inner: list[Node | None] = [None] * len(operands)
    if seeds:
        inner = list(backward(graph, seeds, operands, start))
    for i, x in enumerate(operands):  # an expansion may return an operand itself
        if x.id in direct:
            own = inner[i]
            inner[i] = direct[x.id] if own is None else get_op("add")(own, direct[x.id])
    return list(zip(operands, inner, strict=True))


def _tuple_grads(node: Node, known: Mapping[int, Node]) -> tuple[Node | None, ...]:
    assert isinstance(node.type, TupleType)
    return tuple(known.get(i) for i in range(len(node.type.items)))


def _influenced_by(graph: Graph, wanted: Sequence[Node], first: int = 0) -> set[int]:
    seen = {n.id for n in wanted}
    for node in graph.nodes[first:]:
        if node.id not in seen and any(o.id in seen for o in node.operands):
            seen.add(node.id)
    return seen


def zeros_like(node: Node) -> Node:
    """A zero of the node's type."""
    zero = node.graph.constant(np.zeros((), node.dtype.np))
    made: Node = get_op("broadcast_to")(zero, shape=node.shape)
    return made


def ones_like(node: Node) -> Node:
    """A one of the node's type."""
    one = node.graph.constant(np.ones((), node.dtype.np))
    made: Node = get_op("broadcast_to")(one, shape=node.shape)
    return made


def for_gradient(graph: Graph, wrt: Sequence[str]) -> Graph:
    """A fresh MIR copy to differentiate by named inputs or params; loops keep what gradients read."""
    mir = ensure_mir(graph, "vjp")
    named = [n for n in mir.nodes if n.op.role in (Role.INPUT, Role.PARAM) and n.attrs["name"] in wrt]
    reach = _influenced_by(mir, named)

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.id not in reach or not node.op.has("saving"):
            return None
        made: Node | None = run_rule(node.op, "saving", *operands, node=node)
        return made

    return rewrite(mir, visit, keep_dead=True)


def gradient_graph(graph: Graph, output: str, wrt: Sequence[str], keep_value: bool = True) -> Graph:
    """A graph with outputs `value` (if kept) and `grad_<name>` of a scalar for named inputs or params."""
    mir = for_gradient(graph, wrt)
    named = {n.attrs["name"]: n for n in mir.inputs} | dict(mir.params)
    missing = [w for w in wrt if w not in named]
    if missing:
        raise GradientError(f"graph {graph.name!r} has no input or param {missing[0]!r} to differentiate by")
    root = mir.outputs[output]
    if root.shape != ():
        raise GradientError(f"the output {output!r} is {root.type}; grad needs a scalar (sum it, or use vjp)")
    if not is_differentiable_dtype(root):
        raise GradientError(
            f"the output {output!r} is {root.type}; only floating-point values have gradients"
        )
    targets = [named[w] for w in wrt]
    for name, node in zip(wrt, targets, strict=True):
        if not is_differentiable_dtype(node):
            raise GradientError(f"{name!r} is {node.type}; gradients exist only for floating-point inputs")
    with mir.building(), provenance(root.where):
        grads = backward(mir, {root.id: ones_like(root)}, targets)
        outputs = {"value": root} if keep_value else {}
        for name, node, g in zip(wrt, targets, grads, strict=True):
            outputs[f"grad_{name}"] = zeros_like(node) if g is None else g
    mir.set_outputs(outputs)
    return mir


def vjp_graph(graph: Graph, wrt: Sequence[str]) -> Graph:
    """Outputs `grad_<name>` = sum over outputs of `ct_<output>` (an input) * d output / d name."""
    mir = for_gradient(graph, wrt)
    named = {n.attrs["name"]: n for n in mir.inputs} | dict(mir.params)
    seeds: dict[int, Node] = {}
    for name, node in list(mir.outputs.items()):
        if is_differentiable_dtype(node):
            g = mir.input(f"ct_{name}", node.shape, node.dtype)
            seeds[node.id] = get_op("add")(seeds[node.id], g) if node.id in seeds else g
    targets = [named[w] for w in wrt]
    grads = backward(mir, seeds, targets)
    with mir.building():
        mir.set_outputs(
            {
                f"grad_{w}": zeros_like(t) if g is None else g
                for w, t, g in zip(wrt, targets, grads, strict=True)
            }
        )
    return mir


def jvp_graph(graph: Graph, wrt: Sequence[str]) -> Graph:
    """Outputs `tan_<output>` = directional derivative along inputs `t_<name>`.

    Forward mode from the reverse rules: the vector-Jacobian product is linear in its cotangent u, so
    differentiating it once more with respect to u, seeded by the tangents, gives the Jacobian-vector product.
    """
    first = vjp_graph(graph, wrt)
    linear_in = [n.attrs["name"] for n in first.inputs if n.attrs["name"].startswith("ct_")]
    second = vjp_graph(first, linear_in)
    # second: inputs x, ct_y (where a linear map is differentiated: any value), ct_grad_x (tangents)
    out = Graph(graph.name)
    arguments: list[Node] = []
    with out.building():
        for node in second.inputs:
            name = node.attrs["name"]
            if name.startswith("ct_grad_"):
                arguments.append(out.input("t_" + name.removeprefix("ct_grad_"), node.shape, node.dtype))
            elif name in linear_in:
                zero = out.constant(np.zeros((), node.dtype.np))
                arguments.append(get_op("broadcast_to")(zero, shape=node.shape))
            else:
                arguments.append(out.input(name, node.shape, node.dtype))
        made = inline(second, arguments, out)
    out.param_values = dict(second.param_values)
    out.set_outputs({k.replace("grad_ct_", "tan_", 1): v for k, v in zip(second.outputs, made, strict=True)})
    return out
