"""Bodies of control flow: Python functions traced into graphs whose inputs are all that they read.

A function may use nodes of the graphs around it: each becomes one more input of the body, and the node itself
one more operand of the op that holds the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.errors import RlxError, TypeMismatchError
from rlx.ir.dtype import convert, plain_array
from rlx.ir.graph import Graph
from rlx.ir.node import Node, place_of
from rlx.ir.op import Op, Role
from rlx.ir.rewrite import copy_node, inline
from rlx.ir.tree import Nest
from rlx.ir.types import TensorType


class Body(Graph):
    """A graph under construction inside `parent`; nodes from outside are captured when an op reads them."""

    def __init__(self, name: str, parent: Graph | None) -> None:
        super().__init__(name)
        self.parent = parent
        self.captured: dict[Node, Node] = {}  # node of the parent -> input of this graph

    def is_inside(self, graph: Graph) -> bool:
        """Whether a graph is this one or one around it."""
        if graph is self or graph is self.parent:
            return True
        return isinstance(self.parent, Body) and self.parent.is_inside(graph)

    def add(
        self,
        op: Op,
        operands: Sequence[Node] = (),
        attrs: Mapping[str, object] | None = None,
        bodies: Sequence[Graph] = (),
        where: tuple[str, ...] | None = None,
    ) -> Node:
        return super().add(op, [self.here(o) for o in operands], attrs, bodies, where)

    def here(self, node: Node) -> Node:
        """A node as a value of this graph."""
        if not isinstance(node, Node) or node.graph is self:
            return node
        if node.op.role is Role.CONSTANT:
            return copy_node(node, (), self)
        if self.parent is None:  # called on arrays only: the first node that it reads says where it is
            self.parent = node.graph
        outer = self.parent.here(node) if isinstance(self.parent, Body) else node
        if outer.graph is not self.parent:
            raise RlxError(
                f"%{node.id} ({node.op.name}) belongs to graph {node.graph.name!r}, which does not "
                f"enclose the body {self.name!r}; it may only use values of the graphs it is called in"
            )
        if outer not in self.captured:
            self.captured[outer] = self.input(f"outer{len(self.captured)}", outer.shape, outer.dtype)
        return self.captured[outer]


def trace(
    name: str, function: Callable[..., Nest], types: Sequence[TensorType], parent: Graph | None
) -> tuple[Body, Nest]:
    """Call a function on fresh inputs of a body; returns the body, still without outputs, and its result."""
    body = Body(name, parent)
    inputs = [body.input(f"in{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    with body.building():
        return body, function(*inputs)


def need_arguments(what: str, function: Callable[..., Nest], names: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these arguments.

    >>> need_arguments("scan", lambda carry: carry, ["carry", "x"])
    Traceback (most recent call last):
    rlx.errors.TypeMismatchError: scan: its function is called as f(carry, x): too many positional...
    """
    if not callable(function):
        raise TypeMismatchError(
            f"{what}: needs a function f({', '.join(names)}), got a {type(function).__name__}"
        )
    try:
        inspect.signature(function).bind(*names)
    except TypeError as e:
        raise TypeMismatchError(f"{what}: its function is called as f({', '.join(names)}): {e}") from None
    except ValueError:
        pass  # a function of Python's own that does not say what it takes


def as_nodes(
    body: Body, values: Sequence[object], like: Sequence[TensorType | None], what: str
) -> list[Node]:
    """Results of a traced function as nodes of its body; a Python number takes the dtype it stands for."""
    out = []
    for value, want in zip(values, like, strict=True):
        if isinstance(value, Node):
            out.append(body.here(value))
        elif isinstance(value, (bool, int, float, complex)) and want is not None:
            out.append(body.constant(convert(plain_array(value), want.dtype)))
        elif isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)):
            out.append(body.constant(value))
        else:
            kind = type(value).__name__
            raise TypeMismatchError(f"{what} returned a {kind}; it must return nodes, arrays or numbers")
    return out


def close(bodies: Sequence[Body]) -> tuple[list[Graph], list[Node]]:
    """Finished graphs with equal captured inputs, in equal order, and the nodes to pass for these."""
    outer = list(dict.fromkeys(node for body in bodies for node in body.captured))
    closed = []
    for body in bodies:
        made = Graph(body.name)
        for c in body.constraints:
            made.assume(c)
        captured = set(body.captured.values())
        own = [made.input(n.attrs["name"], n.shape, n.dtype) for n in body.inputs if n not in captured]
        extra = [made.input(f"in{len(own) + i}", n.shape, n.dtype) for i, n in enumerate(outer)]
        given = {inner: extra[place_of(node, outer)] for node, inner in body.captured.items()}
        fresh = iter(own)
        with made.building():
            results = inline(body, [given[n] if n in given else next(fresh) for n in body.inputs], made)
        made.set_outputs(results)
        closed.append(made)
    return closed, outer
