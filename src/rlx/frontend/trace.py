"""From Python functions to graphs.

Sizes are plain ints, except where the caller wants symbols. Symbols that the trace must take as equal
become one; a symbol that the function reads as a number is replaced by it; a comparison with a symbol is
answered for the sizes at hand, and the answer becomes a guard of the graph. The trace says so, with the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field

import numpy as np

from rlx.crash_report import found_bug, users_line
from rlx.errors import (
    InputError,
    ShapeError,
    TransformError,
    TypeMismatchError,
    current_where,
    source_location,
)
from rlx.ir.bind import holds, match_shape
from rlx.ir.body import Body
from rlx.ir.dim import Constraint, Dim, Expr, evaluate, sym, symbols
from rlx.ir.dims.atom import quote
from rlx.ir.dims.expr import reduced_equality
from rlx.ir.dims.read import READER
from rlx.ir.dtype import DType, dtype, plain_array
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.tree import Nest, Tree, flatten, unflatten
from rlx.ir.types import TensorType
from rlx.ir.weak import WEAK, Weak, WeakNumbers
from rlx.records import dataclass

MAX_RETRACES = 32
LEAST = 2
"""The least size that a symbol stands for: 0 and 1 mean other things (nothing, broadcast) than the rest."""

_UFUNC = "__array_ufunc__=None"  # in what NumPy says to a node
_NUMPY = "NumPy cannot compute with a traced value, which has no numbers yet; call the function of rlx.ops"

Place = tuple[int, int]
"""An axis of an argument: the number of the array, the number of the axis."""


@dataclass(eq=False)
class Trace:
    """A traced function: its graph, the tree of its results, and which symbols were fixed and why.

    `captured` are nodes of the graphs around it that it read: its last inputs stand for them, in order.
    """

    graph: Graph
    result: Tree
    specialized: dict[str, str] = field(default_factory=dict)
    captured: tuple[Node, ...] = ()
    answers: list[str] = field(default_factory=list)
    ranges: dict[int, DType] = field(default_factory=dict)


def as_array(value: object) -> np.ndarray:
    """A value as an array; Python numbers take RLX's default dtypes."""
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value, dtype(type(value)).np)
    array = plain_array(value, "an argument")
    dtype(array.dtype)
    return array


def trace_types(
    function: Callable[..., Nest],
    types: Sequence[TensorType],
    tree: Tree,
    parent: Graph | None = None,
    numbers: Mapping[int, DType] | None = None,
) -> Trace:
    """Trace with exactly these (possibly symbolic) types; values of `parent` and around it may be read.

    `numbers` are arguments that take the dtype of the arrays they are combined with, or else this one.
    """
    name = getattr(function, "__name__", "function").strip("<>")
    graph = Graph(name) if parent is None else Body(name, parent)
    weak = WeakNumbers()
    try:
        with graph.building():
            inputs = [graph.input(f"arg{i}", t.shape, t.dtype) for i, t in enumerate(types)]
            given = list(inputs)
            for i, own in (numbers or {}).items():
                given[i] = get_op("cast")(inputs[i], dtype=own)
                weak.nodes[given[i]] = Weak(inputs[i], i)
            args, kwargs = unflatten(tree, given)
            token = WEAK.set(weak) if numbers else None
            try:
                leaves, result = flatten(function(*args, **kwargs))
            finally:
                if token is not None:
                    WEAK.reset(token)
            nodes = [_as_node(leaf, graph) for leaf in leaves]
            if isinstance(graph, Body):
                nodes = [graph.here(n) for n in nodes]
            graph.set_outputs({f"out{i}": n for i, n in enumerate(nodes)})
    except Exception as e:
        if isinstance(e, TypeError) and _UFUNC in str(e):
            raise TypeMismatchError(_NUMPY, users_line(e)) from None
        bug = found_bug(f"the trace of {name}", e, graph)
        if bug is None:
            raise
        raise bug from e
    captured = tuple(graph.captured) if isinstance(graph, Body) else ()
    return Trace(graph, result, captured=captured, ranges=weak.ranges)


def _as_node(value: object, graph: Graph) -> Node:
    if isinstance(value, Expr):
        return graph.add(get_op("dim_value"), (), {"dim": value, "dtype": "i64"})
    if isinstance(value, Node):
        return value
    if np.asarray(value).dtype.kind in "OUSMm":
        kind = type(value).__name__
        raise TypeMismatchError(
            f"a traced function returned a {kind}; return arrays, numbers or nests of them"
        )
    return graph.constant(value)


def _line() -> str:
    return source_location() or "an unknown line"


class _Reader:
    """Answers questions about symbolic sizes by those of the call, and remembers them."""

    def __init__(self, actual: Mapping[str, int]) -> None:
        self.actual = actual
        self.read_at: dict[str, str] = {}  # symbol -> the line that read it
        self.guards: list[Constraint] = []

    def knows(self, d: Dim) -> bool:
        return self.actual.keys() >= set(symbols(d))

    def read(self, e: Expr) -> int:
        self._need_known(e)
        self.read_at |= dict.fromkeys(symbols(e), f"read as a number at {_line()}")
        return evaluate(e, self.actual)

    def answer(self, relation: str, a: Dim, b: Dim) -> bool:
        asked = Constraint("eq", a, b) if relation == "eq" else Constraint("min", b, a)
        proved = asked.known()
        if proved is not None:
            return proved
        self._need_known(a, b)
        where = (_line(),)
        holds = asked.check(self.actual)
        if relation == "eq":
            self.guards.append(Constraint("eq" if holds else "ne", a, b, where))
        else:
            self.guards.append(
                Constraint("min", b, a, where) if holds else Constraint("min", a, b + 1, where)
            )
        return holds

    def _need_known(self, *asked: Dim) -> None:
        for name in {s for d in asked for s in symbols(d)} - self.actual.keys():
            raise ShapeError(
                f"the size {quote(name)} is found in data when the program runs, so it has no value while "
                "the function is traced; mask the result, or make the size an argument",
                current_where(),
            )


def trace_sizes(
    function: Callable[..., Nest],
    types: Sequence[TensorType],
    tree: Tree,
    names: Mapping[Place, str],
    numbers: Mapping[int, DType] | None = None,
) -> Trace:
    """Trace for arguments of these sizes, those at the places of `names` as symbols of that name.

    Equalities that the function needs, and sizes that it reads, narrow the symbols until the trace holds.
    """
    actual = {name: int(types[i].shape[j]) for (i, j), name in names.items()}
    symbolic = {place: sym(name, LEAST) for place, name in names.items()}
    types = [
        t.with_shape(tuple(symbolic.get((i, j), n) for j, n in enumerate(t.shape)))
        for i, t in enumerate(types)
    ]
    reasons: dict[str, str] = {}
    for _ in range(MAX_RETRACES):
        reader = _Reader(actual)
        token = READER.set(reader)
        try:
            trace = trace_types(function, types, tree, numbers=numbers)
        finally:
            READER.reset(token)
        inside = [c for c in _inside(trace.graph) if set(c.symbols) <= actual.keys() and c.check(actual)]
        mapping = {name: actual[name] for name in reader.read_at} | _solve(
            [*reader.guards, *trace.graph.constraints, *inside], actual, reader.read_at
        )
        reasons |= reader.read_at
        if not mapping:
            for guard in reader.guards:
                trace.graph.assume(guard)
            trace.specialized = reasons
            trace.answers = [f"{g.describe()}, asked at {', '.join(g.where)}" for g in reader.guards]
            return trace
        types = [t.substitute(mapping) for t in types]
    raise TransformError(f"tracing {getattr(function, '__name__', 'a function')} does not settle on shapes")


def _inside(graph: Graph) -> Iterator[Constraint]:
    """What loops and branches assume. A branch that is not taken may assume what does not hold."""
    for node in graph.nodes:
        for body in node.bodies:
            yield from body.constraints
            yield from _inside(body)


def _solve(
    constraints: Sequence[Constraint], actual: Mapping[str, int], reasons: dict[str, str]
) -> dict[str, Dim]:
    """Symbols to replace so that equalities hold: by each other, or by a number."""
    out: dict[str, Dim] = {}
    order = {name: i for i, name in enumerate(actual)}
    for c in constraints:
        if c.kind != "eq" or not all(s in actual for d in (c.lhs, c.rhs) for s in symbols(d)):
            continue
        at = ", ".join(c.where)
        if not c.check(actual):
            raise ShapeError(f"the function needs {c.describe()}, which these sizes break", c.where)
        lhs, rhs = reduced_equality(c.lhs, c.rhs)
        names = [symbols(d)[0] for d in (lhs, rhs) if _is_symbol(d)]
        if any(n in out or n in reasons for n in names):
            continue
        if len(names) == 2 and names[0] != names[1]:
            kept, gone = sorted(names, key=order.__getitem__)
            out[gone] = sym(kept, LEAST)
        elif len(names) == 1:
            other = rhs if _is_symbol(lhs) else lhs
            if isinstance(other, int):
                out[names[0]] = other
                reasons[names[0]] = f"needed to be {other} at {at}"
    return out


def _is_symbol(d: Dim) -> bool:
    return isinstance(d, Expr) and len(symbols(d)) == 1 and str(d) == quote(symbols(d)[0])


def fits(trace: Trace, guards: Sequence[Constraint], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether sizes are those that a trace stands for and meet the guards of its program."""
    binding = sizes_of(trace.graph, shapes)
    if binding is None or any(n < LEAST for n in binding.values()):
        return False
    return all(holds(c, binding) for c in (*trace.graph.constraints, *guards))


def sizes_of(graph: Graph, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """The sizes of a traced function's symbols at arguments of these shapes; None if those do not fit."""
    binding: dict[str, int] = {}
    try:
        for node, shape in zip(graph.inputs, shapes, strict=True):
            match_shape(node.shape, shape, binding, "argument")
    except InputError:
        return None
    return binding
