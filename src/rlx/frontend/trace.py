"""From Python functions to graphs.

Every dim of every array is a symbol. Dims that the trace must take as equal become one symbol (a call that
breaks this is refused); a dim that the function reads as a number, or that is 1 where it is broadcast, is
specialised, and the trace says so with the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.errors import RlxError, TransformError, source_location
from rlx.ir.bind import match_shape
from rlx.ir.body import Body
from rlx.ir.dim import Constraint, Dim, Expr, evaluate, substitute, sym, symbols
from rlx.ir.dim_expr import READER
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.tree import Tree, flatten, unflatten
from rlx.ir.types import TensorType
from rlx.records import dataclass

MAX_RETRACES = 32


@dataclass
class Trace:
    """A traced function: its graph, the tree of its results, and which dims were fixed and why.

    `captured` are nodes of the graphs around it that it read: its last inputs stand for them, in order.
    """

    graph: Graph
    result: Tree
    specialized: dict[str, str] = field(default_factory=dict)
    captured: tuple[Node, ...] = ()


def as_array(value: Any) -> np.ndarray:
    """A leaf of the arguments as an array; Python numbers take RLX's default dtypes."""
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value, dtype(type(value)).np)
    array = np.asarray(value)
    dtype(array.dtype)
    return array


def trace_types(
    function: Callable[..., Any], types: Sequence[TensorType], tree: Tree, parent: Graph | None = None
) -> Trace:
    """Trace with exactly these (possibly symbolic) types; values of `parent` and around it may be read."""
    name = getattr(function, "__name__", "function").strip("<>")
    graph = Graph(name) if parent is None else Body(name, parent)
    with graph.building():
        inputs = [graph.input(f"arg{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        args, kwargs = unflatten(tree, inputs)
        leaves, result = flatten(function(*args, **kwargs))
        nodes = [leaf if isinstance(leaf, Node) else graph.constant(leaf) for leaf in leaves]
        if isinstance(graph, Body):
            nodes = [graph.here(n) for n in nodes]
        graph.set_outputs({f"out{i}": n for i, n in enumerate(nodes)})
    return Trace(graph, result, captured=tuple(graph.captured) if isinstance(graph, Body) else ())


def trace_arrays(function: Callable[..., Any], arrays: Sequence[np.ndarray], tree: Tree) -> Trace:
    """Trace with every dim a symbol; equalities and reads narrow the symbols until the trace holds."""
    shapes: list[list[Dim]] = [[sym(f"d{i}_{j}") for j in range(a.ndim)] for i, a in enumerate(arrays)]
    actual = {f"d{i}_{j}": n for i, a in enumerate(arrays) for j, n in enumerate(a.shape)}
    reasons: dict[str, str] = {}
    for _ in range(MAX_RETRACES):
        read: dict[str, str] = {}

        def reader(e: Expr, read: dict[str, str] = read) -> int:
            read.update(dict.fromkeys(symbols(e), f"read as a number at {source_location()}"))
            return evaluate(e, actual)

        types = [TensorType(dtype(a.dtype), tuple(s)) for a, s in zip(arrays, shapes, strict=True)]
        token = READER.set(reader)
        try:
            trace = trace_types(function, types, tree)
        finally:
            READER.reset(token)
        mapping = {name: actual[name] for name in read} | _solve(trace.graph.constraints, actual, read)
        reasons |= read
        if not mapping:
            trace.specialized = reasons
            return trace
        shapes = [[substitute(d, mapping) for d in s] for s in shapes]
    raise TransformError(f"tracing {getattr(function, '__name__', 'a function')} does not settle on shapes")


def _solve(
    constraints: Sequence[Constraint], actual: dict[str, int], reasons: dict[str, str]
) -> dict[str, Dim]:
    """Symbols to replace so that assumed equalities hold: by each other, or by 1 where one side is 1.

    An equality that does not hold is refused only if there is nothing to replace: it may come from another
    one that a broadcast explains, and be gone in the next trace.
    """
    out: dict[str, Dim] = {}
    broken: list[Constraint] = []
    for c in constraints:
        if c.kind != "eq":
            continue
        sides = [
            s
            for s in (c.lhs, c.rhs)
            if isinstance(s, Expr) and len(symbols(s)) == 1 and str(s) == symbols(s)[0]
        ]
        names = [symbols(s)[0] for s in sides]
        if any(n in out for n in names):
            continue
        at = ", ".join(c.where)
        if not c.check(actual):
            ones = [n for n in names if actual[n] == 1]
            if not ones:
                broken.append(c)
            for n in ones:
                out[n] = 1
                reasons[n] = f"size 1 is broadcast at {at}"
        elif len(names) == 2 and names[0] != names[1]:
            out[max(names)] = sym(min(names))
        elif len(names) == 1:
            other = c.rhs if c.lhs is sides[0] else c.lhs
            if isinstance(other, int):
                out[names[0]] = other
    if broken and not out:
        c = broken[0]
        raise RlxError(f"the function needs {c.describe()}, which these arguments break", c.where)
    return out


def fits(trace: Trace, arrays: Sequence[np.ndarray]) -> bool:
    """Whether arrays have the shapes that a trace assumed."""
    binding: dict[str, int] = {}
    try:
        for node, array in zip(trace.graph.inputs, arrays, strict=True):
            match_shape(node.shape, array.shape, binding, "argument")
    except RlxError:
        return False
    return all(c.check(binding) for c in trace.graph.constraints)
