"""Runs any HIR or MIR graph node by node with each op's NumPy reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.errors import InputError, RlxError
from rlx.ir.bind import as_given, check_array, check_constraints, match_shape
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import BodyRunner, Role
from rlx.ir.operand import Arrays
from rlx.ir.rewrite import substitute_dims
from rlx.ir.types import TensorType, tensor_types


class Interpreter:
    """One run of a graph: `values` holds every computed node, `binding` the sizes of symbols."""

    def __init__(self, graph: Graph, binding: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self.binding: dict[str, int] = dict(binding or {})
        self.values: dict[int, Arrays] = {}

    def run(
        self,
        inputs: Mapping[str, object],
        params: Mapping[str, object] | None = None,
        states: Mapping[str, object] | None = None,
    ) -> dict[str, np.ndarray]:
        """Outputs by name."""
        graph = self.graph
        self._feed(graph.inputs, inputs, "input")
        self._feed(list(graph.params.values()), {**graph.param_values, **(params or {})}, "param")
        given = {**graph.state_values, **(states or {})}
        for name, node in graph.state_inputs.items():
            if name not in given:
                given[name] = np.zeros(node.tensor.bind(self.binding), node.dtype.np)
        self._feed(list(graph.state_inputs.values()), given, "state")
        check_constraints(graph.constraints, self.binding)
        live = graph.live()
        for node in graph.nodes:
            if node.id in live and node.id not in self.values:
                self.values[node.id] = self.compute(node)
        return {name: self.array(n) for name, n in graph.outputs.items()}

    def new_states(self) -> dict[str, np.ndarray]:
        """Values of the states after the run."""
        return {s.name: self.array(s.output) for s in self.graph.states}

    def array(self, node: Node) -> np.ndarray:
        """The value of a node with one result, which was computed."""
        value = self.values[node.id]
        assert not isinstance(value, tuple), "only results of a node with several are read"
        return value

    def compute(self, node: Node) -> Arrays:
        """The value of one node from its operands' values."""
        op = node.op
        if op.role is Role.CONSTANT:
            value: np.ndarray = node.attrs["value"].array
            return value
        args = [self.values[o.id] for o in node.operands]
        if op.role is Role.RESULT:
            chosen: np.ndarray = args[0][node.attrs["index"]]
            return chosen
        attrs = {k: substitute_dims(v, self.binding) for k, v in node.attrs.items()}
        if node.bodies:
            attrs["run"] = self.bodies(node)
        with np.errstate(all="ignore"):
            out = op.ref(*args, **attrs)
        many = isinstance(out, tuple)
        arrays = tuple(np.asarray(a) for a in (out if isinstance(out, tuple) else (out,)))
        for want, got in zip(tensor_types(node.type), arrays, strict=True):
            self._check_result(node, want, got)
        return arrays if many else arrays[0]

    def bodies(self, node: Node) -> BodyRunner:
        """What runs the bodies of a node for its reference."""
        return _Bodies(node, self.binding)

    def _check_result(self, node: Node, want: TensorType, got: np.ndarray) -> None:
        if dtype(got.dtype) is not want.dtype:
            raise RlxError(
                f"reference of {node.op.name} gave {got.dtype}, its type rule says {want}", node.where
            )
        try:
            match_shape(want.shape, got.shape, self.binding, f"result of {node.op.name}")
        except InputError as e:
            raise RlxError(
                f"reference of {node.op.name} disagrees with its type rule: {e.message}", node.where
            ) from e

    def _feed(self, nodes: Sequence[Node], given: Mapping[str, object], kind: str) -> None:
        names = [n.attrs["name"] for n in nodes]
        extra = [k for k in given if k not in names]
        if extra and kind == "input":
            raise InputError(
                f"unknown {kind} {extra[0]!r}; graph {self.graph.name!r} has: {', '.join(names) or 'none'}"
            )
        for name, node in zip(names, nodes, strict=True):
            if name not in given:
                raise InputError(f"{kind} {name!r} ({node.type}) of graph {self.graph.name!r} is missing")
            array = as_given(node.tensor, given[name])
            check_array(node.tensor, array, self.binding, f"{kind} {name!r}")
            self.values[node.id] = array


class _Bodies:
    """Runs the bodies of one node for its `ref`."""

    def __init__(self, node: Node, binding: Mapping[str, int]) -> None:
        self.node, self.binding = node, binding

    def __call__(self, number: int, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        body = self.node.bodies[number]
        names = [n.attrs["name"] for n in body.inputs]
        return list(Interpreter(body, self.binding).run(dict(zip(names, values, strict=True))).values())

    def empty(self, number: int) -> list[np.ndarray]:
        outputs = self.node.bodies[number].outputs.values()
        return [np.empty(n.tensor.bind(dict(self.binding)), n.dtype.np) for n in outputs]

    def planned(self, number: int, symbol: str) -> int | None:
        return None


def evaluate(
    graph: Graph,
    inputs: Mapping[str, object],
    params: Mapping[str, object] | None = None,
    states: Mapping[str, object] | None = None,
    binding: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Outputs of a graph by name, computed by the NumPy reference.

    >>> import rlx, numpy as np
    >>> g = rlx.Graph()
    >>> g.output("y", g.input("x", (2,), "f32") * 2.0)
    >>> evaluate(g, {"x": np.array([1, 2], np.float32)})["y"]
    array([2., 4.], dtype=float32)
    """
    return Interpreter(graph, binding).run(inputs, params, states)
