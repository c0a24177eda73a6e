"""Params from packed weights: what kernels read tells what was given, bit for bit, so nobody keeps both.

Most weights are params in another order: transposed, joined, in panels, in fewer bytes. Ops that only move
elements can be undone (`Op.lossless`). Params of which other ops made weights, as for Winograd convolutions,
are not found here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

import numpy as np

from rlx.errors import FormatError
from rlx.ir.dtype import LazyArray
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.plan.lir import LirModule
from rlx.runtime.derive import cone, evaluated

LazyArrays = dict[str, LazyArray]
Steps = list[tuple[Node, int]]
"""From a weight down to a param: nodes, and which operand comes next."""
MOST_BYTES = 8  # of an undone weight, per byte of all weights: codes of one bit, as bytes
MOST_MOVES = 8  # of every byte, on the way from weights to params


def recoverable(lir: LirModule, weights: Collection[int]) -> dict[str, tuple[int, Steps]]:
    """Params that can be computed from these weights: the id of one, and the steps that were taken to it."""
    found: dict[str, tuple[int, Steps]] = {}
    made = {} if lir.derived is None else lir.derived.outputs
    for node in lir.mir.nodes:
        if node.op.role is not Role.PARAM or node.id not in weights:
            continue
        name = node.attrs["name"]
        if name not in made:
            found[name] = (node.id, [])
            continue
        todo: list[tuple[Node, Steps]] = [(made[name], [])]
        while todo:
            at, steps = todo.pop()
            if at.op.role is Role.PARAM:
                found.setdefault(at.attrs["name"], (node.id, steps))
            elif at.op.lossless:
                todo += [(o, [*steps, (at, i)]) for i, o in enumerate(at.operands)]
    return found


def recovery(lir: LirModule, wanted: Mapping[str, tuple[int, Steps]]) -> Graph:
    """The graph that computes params: its params are weights, by the numbers of their nodes.

    >>> import rlx
    >>> g = rlx.Graph("layer")
    >>> w = g.param("w", (64, 32), "f32", np.ones((64, 32), np.float32))
    >>> g.output("y", g.input("x", ("n", 64), "f32") @ w)
    >>> from rlx.api.compile import plan
    >>> lir = plan(g, target="x86-64-v3")
    >>> [node.op.name for node in recovery(lir, recoverable(lir, range(9))).nodes]
    ['param', 'read_as']
    """
    out = Graph(f"{lir.name}.params")
    known: dict[tuple[int, ...], Node] = {}
    for name, (id, steps) in wanted.items():
        weight = lir.mir.nodes[id]
        key: tuple[int, ...] = (id,)
        if key not in known:
            known[key] = out.param(str(id), weight.shape, weight.dtype)
        for node, i in steps:
            before, key = known[key], (*key, i)
            if key not in known:
                known[key] = _undone(node, i, before)
        out.output(name, known[key])
    return out


def _undone(node: Node, i: int, result: Node) -> Node:
    """Operand i of a lossless op, from its result."""
    if not node.op.has("store_in"):
        found = node.op.vjp(result, node, *node.operands, **node.attrs)[i]
        assert found is not None
        return found
    if i:  # what else is in the storage is in the same place there
        return result
    found = node.op.vjp(result, node, node.operands[0], **node.attrs)[0]
    assert found is not None
    return found


def check_recovery(graph: Graph) -> None:
    """Refuse a graph from a file that does more than move elements, or makes many of few."""
    given = sum(int(n.tensor.nbytes) for n in graph.params.values() if n.tensor.is_static)
    moved = 0
    for node in graph.nodes:
        plain = node.op.role is Role.PARAM or node.op.has("view") or (node.op.storage and node.reader_side)
        if not plain or not node.tensor.is_static or node.bodies:
            raise FormatError(f"its params are computed by {node.op.name}, which does not belong there")
        moved += int(node.tensor.nbytes)
        if int(node.tensor.nbytes) > MOST_BYTES * given or moved > MOST_MOVES * MOST_BYTES * given:
            raise FormatError(f"its params are computed by a {node.op.name} that has too large a result")


class Recovered:
    """Params by name: `graph` is their recovery, `weight` gives the bytes of a weight by the number of its
    node."""

    def __init__(self, graph: Graph, weight: Callable[[int], np.ndarray]) -> None:
        self._graph, self._weight = graph, weight

    def value(self, name: str) -> np.ndarray:
        """The value of a param."""
        node = self._graph.outputs.get(name)
        if node is None:
            raise FormatError(f"there is no param {name!r}")
        values = {}
        for n in cone(node):
            if n.op.role is Role.PARAM:
                raw, want = self._weight(int(n.attrs["name"])), n.tensor
                if len(raw) != want.nbytes:
                    raise FormatError(f"the weight of {len(raw)} bytes is not {want}")
                values[n.attrs["name"]] = raw.view(n.dtype.np).reshape(want.bind({}))
        return evaluated(self._graph, node, values)


def recovered_params(lir: LirModule, memory: Mapping[int, np.ndarray], wanted: Collection[str]) -> LazyArrays:
    """Those of the `wanted` params of a program that its weights in `memory` tell, as lazy arrays."""
    params = (lir.derived or lir.mir).params
    found = {n: how for n, how in recoverable(lir, memory).items() if n in wanted}
    made = functools.cache(lambda: Recovered(recovery(lir, found), memory.__getitem__))

    def lazy(name: str) -> LazyArray:
        return LazyArray(params[name].dtype, params[name].tensor.bind({}), lambda: made().value(name))

    return {name: lazy(name) for name in found}
