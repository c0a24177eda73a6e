"""Graphs: the one data structure of HIR, MIR and LIR.

A graph is append-only: a node is typed by its op's rule and never changes. Passes build new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from rlx.errors import InputError, RlxError, ShapeError, TypeMismatchError, VerifyError, current_where
from rlx.ir.assume import ConstraintLog, inferring
from rlx.ir.attr import Blob, dims
from rlx.ir.dim import Constraint, Dim, Expr, sym, symbols
from rlx.ir.dtype import LazyArray, ParamValue, constant_array, convert, dtype, plain_array
from rlx.ir.dtype import dtype as as_dtype
from rlx.ir.later import later
from rlx.ir.node import Node
from rlx.ir.op import Op, Role, check_arity, get_op
from rlx.ir.operand import DimLike, DTypeLike
from rlx.ir.symbols import node_symbols
from rlx.ir.types import TensorType, TupleType, Type, check_sizes, tensor_types, type_symbols
from rlx.records import dataclass

_SHOWN = 4  # inputs and outputs in a repr
# Nodes with names, which come from outside.
NAMED = (Role.INPUT, Role.PARAM, Role.STATE)


@dataclass(frozen=True, eq=False)
class State:
    """A value that survives runs: read as `input`, replaced by `output` at the end of a run."""

    name: str
    input: Node
    output: Node


_CURRENT: ContextVar[Graph | None] = ContextVar("rlx_current_graph", default=None)


def infer_type(
    op: Op, operands: Sequence[Node], attrs: Mapping[str, object], bodies: Sequence[Graph]
) -> Type:
    """The type that an op's rule gives to a node; the rule may refuse."""
    if len(bodies) != op.bodies:
        bodies_text = "body" if op.bodies == 1 else "bodies"
        raise TypeMismatchError(f"{op.name}: takes {op.bodies} {bodies_text}, got {len(bodies)}")
    types = [o.type for o in operands]
    if op.role is not Role.RESULT:
        for o in operands:
            if isinstance(o.type, TupleType):
                many = len(o.type.items)
                raise TypeMismatchError(
                    f"{op.name}: operand %{o.id} ({o.op.name}) has {many} results; pick one first"
                )
    inferred: Type = op.infer(*types, **attrs, bodies=bodies) if op.bodies else op.infer(*types, **attrs)
    for t in tensor_types(inferred):
        check_sizes(op.name, t)
    return inferred


def current_graph() -> Graph | None:
    """The graph being built by the innermost `with graph:`, trace or pass."""
    return _CURRENT.get()


class Graph:
    """A computation: inputs, parameters and states in, named outputs out.

    >>> g = Graph("hello")
    >>> x = g.input("x", (2, "n"), "f32")
    >>> g.output("y", x + x)
    >>> len(g), str(g.outputs["y"].type)
    (2, 'f32[2,n]')
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.inputs: list[Node] = []
        self.params: dict[str, Node] = {}
        self.param_values: dict[str, ParamValue] = {}
        self.states: list[State] = []
        self.state_inputs: dict[str, Node] = {}
        self.state_values: dict[str, np.ndarray] = {}
        self.outputs: dict[str, Node] = {}
        self.constraints: list[Constraint] = []
        self._names: set[str] = set()  # of inputs, params and states
        self._results: dict[int, dict[int, Node]] = {}  # id of a multi-output node -> index -> `result` node
        self._log = ConstraintLog()

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return (
            f"<graph {self.name!r}{self.signature()}, {len(self.nodes)} node{'s' * (len(self.nodes) != 1)}>"
        )

    def signature(self) -> str:
        """Inputs and outputs with their types, for reprs; long lists are cut.

        >>> g = Graph("double")
        >>> g.output("y", g.input("x", (2, "n"), "f32") * 2.0)
        >>> g.signature()
        '(x: f32[2,n]) -> (y: f32[2,n])'
        """
        ends = [(n.attrs["name"], n) for n in self.inputs], list(self.outputs.items())
        texts = [[f"{name}: {n.type}" for name, n in end[:_SHOWN]] for end in ends]
        return " -> ".join(
            f"({', '.join([*shown, *(['...'] * (len(end) > _SHOWN))])})"
            for shown, end in zip(texts, ends, strict=True)
        )

    def __str__(self) -> str:
        return later().graph_text(self)

    def __reduce__(self) -> tuple[Callable[[bytes], Graph], tuple[bytes]]:
        """Pickle, deepcopy and processes that are spawned take a graph by the bytes of its file."""
        return later().reduced(self)

    def __copy__(self) -> Graph:
        """A separate graph that shares the arrays of this one."""
        return later().copy(self)

    @contextmanager
    def building(self) -> Iterator[Graph]:
        """Make this the current graph: ops without node operands (iota, random) are added here."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    # -- the builder's face

    def input(
        self, name: str, shape: Sequence[DimLike], dtype: DTypeLike = "f32", once: bool = False
    ) -> Node:
        """A named input. Text dims are symbols; `once` inputs are read in the prologue of a stream."""
        return self.add(get_op("input"), (), {"name": name, "type": _type(name, shape, dtype), "once": once})

    def size(self, name: str, maximum: int, minimum: int = 0) -> Dim:
        """A size that is given at every run, as a number, under this name: for example how much of a cache is
        filled. Memory is planned for `maximum`, so that another size costs next to nothing.

        >>> g = Graph("prefix")
        >>> n = g.size("n", maximum=8)
        >>> g.output("y", g.input("x", (8,), "f32")[:n])
        >>> str(g.outputs["y"].type), str(g.inputs[0].type)
        ('f32[n]', 'i8[n,0]')
        """
        dim = sym(name, minimum, maximum)
        self.input(name, (dim, 0), "i8")
        return dim

    def param(
        self, name: str, shape: Sequence[DimLike], dtype: DTypeLike = "f32", value: ParamValue | None = None
    ) -> Node:
        """A named parameter; its value may be set now or by `set_param` of the compiled program."""
        node = self.add(get_op("param"), (), {"name": name, "type": _type(name, shape, dtype)})
        if value is not None:
            self.set_param(name, value)
        return node

    def set_param(self, name: str, value: ParamValue) -> None:
        """Give a parameter its value."""
        if name not in self.params:
            known = ", ".join(self.params) or "none"
            raise InputError(f"graph {self.name!r} has no param {name!r}; it has: {known}")
        want = self.params[name].tensor
        if not isinstance(value, LazyArray):
            value = plain_array(value, f"param {name!r}")
        if not want.is_static or value.shape != want.shape or dtype(value.dtype) is not want.dtype:
            got = TensorType(dtype(value.dtype), value.shape)
            raise InputError(f"param {name!r} is {want}, got {got}; give an array of that dtype and shape")
        self.param_values[name] = value

    def constant(self, value: object, dtype: DTypeLike | None = None) -> Node:
        """A constant; its content is part of the program."""
        array = constant_array(value)
        if dtype is not None:
            array = convert(plain_array(value, "a constant"), as_dtype(dtype))
        return self.add(get_op("constant"), (), {"value": Blob(array)})

    def state(
        self, name: str, shape: Sequence[DimLike], dtype: DTypeLike = "f32", init: np.ndarray | None = None
    ) -> Node:
        """A value that survives runs; `set_state` says what replaces it. Starts as `init` or zeros."""
        node = self.add(get_op("state"), (), {"name": name, "type": _type(name, shape, dtype)})
        if init is not None:
            self.state_values[name] = convert(plain_array(init, f"state {name!r}"), node.dtype)
        return node

    def set_state(self, name: str, value: Node) -> None:
        """Declare the value of state `name` after a run."""
        if name not in self.state_inputs:
            raise InputError(f"graph {self.name!r} has no state {name!r}; declare it with g.state first")
        old = self.state_inputs[name]
        if value.tensor != old.tensor:
            raise ShapeError(
                f"state {name!r} is {old.type}, but its new value is {value.type}; make them equal"
            )
        self.states = [s for s in self.states if s.name != name]
        self.states.append(State(name, old, self._own(value)))

    def with_states(self, pairs: Mapping[str, str]) -> Graph:
        """A graph in which inputs that take an output of the run before are states, by input and output name.

        States begin as zeros. Those outputs are removed.

        >>> g = Graph("count")
        >>> g.output("next", g.input("n", (), "i64") + g.input("step", (), "i64"))
        >>> h = g.with_states({"n": "next"})
        >>> [n.attrs["name"] for n in h.inputs], [s.name for s in h.states], list(h.outputs)
        (['step'], ['n'], [])
        """
        return later().with_states(self, pairs)

    def output(self, name: str, node: Node) -> None:
        """Name a node as an output."""
        if name in self.outputs:
            raise VerifyError(f"graph {self.name!r} already has an output {name!r}; choose another name")
        self._own(node).tensor  # noqa: B018 - refuses tuples with a clear message
        self.outputs[name] = node

    def set_outputs(self, outputs: Mapping[str, Node] | Sequence[Node]) -> None:
        """Replace all outputs; a plain sequence gets names out0, out1, ..."""
        if not isinstance(outputs, Mapping):
            outputs = {f"out{i}": n for i, n in enumerate(outputs)}
        self.outputs = {}
        for name, node in outputs.items():
            self.output(name, node)

    def node(self, id: int) -> Node:
        """The node of that id."""
        if not 0 <= id < len(self.nodes):
            raise VerifyError(f"graph {self.name!r} has no node %{id}; it has {len(self.nodes)} nodes")
        return self.nodes[id]

    # -- creating nodes

    def add(
        self,
        op: Op,
        operands: Sequence[Node] = (),
        attrs: Mapping[str, object] | None = None,
        bodies: Sequence[Graph] = (),
        where: tuple[str, ...] | None = None,
    ) -> Node:
        """Append a node; its op's type rule decides its type or refuses."""
        where = current_where() if where is None else where
        try:
            with inferring(self._log, where):
                check_arity(op, len(operands))
                canonical = op.canonical_attrs(attrs or {})
                if op.role in NAMED and canonical["name"] in self._names:
                    named = f"an input, param or state called {canonical['name']!r}"
                    raise VerifyError(f"graph {self.name!r} already has {named}; choose another name")
                inferred = infer_type(op, [self._own(o) for o in operands], canonical, tuple(bodies))
        except RlxError as e:
            self._log.forget()
            if e.where:
                raise
            raise type(e)(e.message, where) from None
        if self._log.items:
            self.constraints += self._log.take()
        node = Node(self, len(self.nodes), op, tuple(operands), canonical, tuple(bodies), inferred, where)
        self.nodes.append(node)
        if op.role is not Role.COMPUTE:
            self._register(node)
        return node

    def add_typed(
        self,
        op: Op,
        operands: Sequence[Node],
        attrs: Mapping[str, object],
        bodies: Sequence[Graph],
        type: Type,
        where: tuple[str, ...],
    ) -> Node:
        """Append a node whose type is known for certain, unchecked: for plans that were verified before."""
        canonical = op.canonical_attrs(attrs)
        node = Node(self, len(self.nodes), op, tuple(operands), canonical, bodies, type, where)
        self.nodes.append(node)
        if op.role is not Role.COMPUTE:
            self._register(node)
        return node

    def adopt(
        self, node: Node, operands: Sequence[Node], where: tuple[str, ...] | None = None
    ) -> Node | None:
        """Append a copy of another graph's node without inferring its type again; None where that is unsound.

        A type follows from op, attributes and operand types, so equal operand types are enough, as long as
        this graph assumes what the other one does.
        """
        if node.op.role in NAMED and node.attrs["name"] in self._names:
            return None
        if not node.graph._log.known <= self._log.known:
            return None
        for old, new in zip(node.operands, operands, strict=True):
            if new.graph is not self or (old.type is not new.type and old.type != new.type):
                return None
        id, given = len(self.nodes), tuple(operands)
        where = node.where if where is None else where
        made = Node(self, id, node.op, given, node.attrs, node.bodies, node.type, where)
        made._form = node._form
        self.nodes.append(made)
        if node.op.role is not Role.COMPUTE:
            self._register(made)
        return made

    def _register(self, node: Node) -> None:
        """Enter a node where its role has a list."""
        role, attrs = node.op.role, node.attrs
        if role in NAMED:
            self._names.add(attrs["name"])
        if role is Role.INPUT:
            self.inputs.append(node)
        elif role is Role.PARAM:
            self.params[attrs["name"]] = node
        elif role is Role.STATE:
            self.state_inputs[attrs["name"]] = node
        elif role is Role.RESULT:
            self._results.setdefault(node.operands[0].id, {}).setdefault(attrs["index"], node)

    def assume(self, constraint: Constraint) -> None:
        """Add a constraint that a front end or pass relies on; unproved ones become run-time guards."""
        self._log.assume(constraint)
        self.constraints += self._log.take()

    def mark(self) -> tuple[int, int]:
        """How far the graph is built, for `take_back`."""
        return len(self.nodes), len(self.constraints)

    def take_back(self, mark: tuple[int, int]) -> None:
        """Drop the nodes and constraints that were added since `mark`: a trial that is not used."""
        nodes, constraints = mark
        for made in [n for n in self.nodes[nodes:] if n.op.role is Role.RESULT]:
            self._results[made.operands[0].id].pop(made.attrs["index"])
        del self.nodes[nodes:]
        self._log.known -= {(c.kind, c.lhs, c.rhs) for c in self.constraints[constraints:]}
        del self.constraints[constraints:]

    def results(self, node: Node) -> list[Node]:
        """One `result` node per output of a multi-output node (created once)."""
        if not isinstance(node.type, TupleType):
            return [node]
        if node.op.role is Role.TUPLE:
            return list(node.operands)
        made = self._results.setdefault(node.id, {})
        for i in range(len(node.type.items)):
            if i not in made:
                self.add(get_op("result"), (node,), {"index": i}, where=node.where)
        return [made[i] for i in range(len(node.type.items))]

    def _own(self, node: Node) -> Node:
        if not isinstance(node, Node):
            raise RlxError(f"expected a node of graph {self.name!r}, got {type(node).__name__}")
        if node.graph is not self:
            raise RlxError(
                f"%{node.id} ({node.op.name}) belongs to graph {node.graph.name!r}, not to {self.name!r}; "
                "build all operands in one graph"
            )
        return node

    # -- questions

    def symbols(self) -> tuple[str, ...]:
        """Names of all symbols, sorted."""
        found: set[str] = set()
        for node in self.nodes:
            for t in tensor_types(node.type):
                for d in t.shape:
                    if isinstance(d, Expr):
                        found.update(symbols(d))
        return tuple(sorted(found))

    def users(self) -> dict[int, list[Node]]:
        """Node id -> the nodes that read it, in order."""
        out: dict[int, list[Node]] = {n.id: [] for n in self.nodes}
        for node in self.nodes:
            for o in dict.fromkeys(node.operands):
                out[o.id].append(node)
        return out

    def ends(self) -> list[Node]:
        """Nodes whose values are there at the end: outputs and new state values."""
        return list(dict.fromkeys([*self.outputs.values(), *(s.output for s in self.states)]))

    def roots(self) -> list[Node]:
        """Nodes that must be computed: outputs, new state values, ordered effects."""
        ordered = [n for n in self.nodes if n.op.effects == "ordered"]
        return list(dict.fromkeys([*self.ends(), *ordered]))

    def live(self) -> set[int]:
        """Ids of nodes reachable from the roots, and of those that find sizes of such nodes in data."""
        seen: set[int] = set()
        finders = [n for n in self.nodes if n.op.finds_size]
        stack = self.roots()
        while stack:
            node = stack.pop()
            if node.id not in seen:
                seen.add(node.id)
                stack.extend(node.operands)
            if not stack and finders:
                stack = self._wanted_finders(finders, seen)
        return seen

    def _wanted_finders(self, finders: Sequence[Node], seen: set[int]) -> list[Node]:
        """Nodes that nobody reads, but whose size live nodes have, or must equal another one."""
        wanted = {s for n in self.nodes if n.id in seen for s in node_symbols(n)}
        wanted |= {s for c in self.constraints if c.kind == "eq" for d in (c.lhs, c.rhs) for s in symbols(d)}
        found = []
        for node in finders:
            given = {s for o in node.operands for s in type_symbols(o.type)}
            if node.id not in seen and wanted & (node_symbols(node).keys() - given):
                found.append(node)
        return found


def _type(name: str, shape: Sequence[DimLike], of: DTypeLike) -> TensorType:
    if isinstance(shape, str) or not hasattr(shape, "__iter__"):
        raise ShapeError(f"the shape of {name!r} needs a tuple of sizes such as (2, 'n'), got {shape!r}")
    try:
        return TensorType(dtype(of), dims(tuple(shape)))
    except ValueError as e:
        raise ShapeError(f"the shape of {name!r} {e}") from None


__all__ = ["NAMED", "Graph", "Node", "State", "current_graph", "infer_type"]
