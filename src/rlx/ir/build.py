"""From a call of an op to a node: arrays and numbers become constants, scalars are weakly typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.errors import DTypeError, TypeMismatchError
from rlx.ir.body import Body
from rlx.ir.dim import Expr
from rlx.ir.dtype import I64, DType, convert, dtype, weak_scalar
from rlx.ir.graph import Graph, Node, current_graph
from rlx.ir.later import later
from rlx.ir.op import Op, get_op
from rlx.ir.operand import Operand, Tensor
from rlx.ir.types import TupleType
from rlx.ir.weak import WEAK


def apply(
    op: Op, operands: Sequence[Operand], attrs: Mapping[str, object], bodies: Sequence[Graph] = ()
) -> Tensor:
    """Add `op` to the graph of its operands; without any node, evaluate by the reference at once.

    Returns a node, or a tuple of nodes for an op with several results.
    """
    graph = graph_of(operands)
    if graph is None:
        return _evaluate(op, operands, attrs, bodies)
    node = graph.add(op, coerce(op, operands, graph), attrs, bodies)
    return tuple(graph.results(node)) if isinstance(node.type, TupleType) else node


def graph_of(operands: Sequence[Operand]) -> Graph | None:
    """The graph that the operands live in, else the one being built."""
    current = current_graph()
    for o in operands:
        if isinstance(o, Node):  # a function being traced may use values from around it
            return current if isinstance(current, Body) and current.is_inside(o.graph) else o.graph
    return current


def coerce(op: Op, operands: Sequence[Operand], graph: Graph) -> list[Node]:
    """Operands as nodes of `graph`. Scalars of Python or NumPy, and sizes, take the dtype of the first tensor
    they are combined with."""
    operands = _with_weak(op, operands)
    typed = [o for i, o in enumerate(operands) if i != op.condition]
    beside = _dtype_beside(typed, np.ndarray)
    if beside is not None:
        operands = [_weakened(op, o, beside) if isinstance(o, np.generic) else o for o in operands]
    else:
        beside = _dtype_beside(typed, np.generic) or _dtype_of_numbers(typed)
    out = []
    for i, o in enumerate(operands):
        if isinstance(o, Node):
            out.append(o)
        elif i == op.condition:
            out.append(graph.constant(o))
        elif isinstance(o, Expr):
            to = I64 if beside is None else _weak_dtype(op, 0, beside)
            out.append(graph.add(get_op("dim_value"), (), {"dim": o, "dtype": to}))
        elif isinstance(o, (bool, int, float, complex)) and beside is not None:
            to = _weak_dtype(op, o, beside)
            if isinstance(o, int) and not to.is_int and abs(o) >= 1 << 63:  # no integer of NumPy holds it
                o = float(o)
            out.append(graph.constant(convert(np.asarray(o), to)))
        elif isinstance(o, (bool, int, float, complex, np.ndarray, np.generic, list, tuple)):
            out.append(graph.constant(o))
        else:
            kind = type(o).__name__
            raise TypeMismatchError(
                f"{op.name}: an operand of type {kind} is neither a node, an array nor a number"
            )
    return out


def _with_weak(op: Op, operands: Sequence[Operand]) -> Sequence[Operand]:
    """Numbers among the arguments of the traced function, in the dtype of the other operands."""
    weak = WEAK.get()
    if weak is None or not any(isinstance(o, Node) and o in weak.nodes for o in operands):
        return operands
    typed = [o for i, o in enumerate(operands) if i != op.condition]
    others = [o for o in typed if not (isinstance(o, Node) and o in weak.nodes)]
    beside = _dtype_beside(others, np.ndarray)
    if beside is None or not (op.family == "elementwise" or beside.is_float):
        return operands
    out = []
    for i, o in enumerate(operands):
        known = weak.nodes.get(o) if isinstance(o, Node) and i != op.condition else None
        try:
            out.append(o if known is None else weak.beside(known, beside))
        except DTypeError as e:
            raise DTypeError(f"{op.name}: {e.message}") from None
    return out


def _dtype_beside(operands: Sequence[Operand], arrays: type[np.ndarray | np.generic]) -> DType | None:
    """The dtype of the first tensor that is not of bools, else of the first."""
    present = [o.dtype for o in operands if isinstance(o, Node) and not isinstance(o.type, TupleType)]
    present += [dtype(o.dtype) for o in operands if isinstance(o, arrays)]
    return min(present, key=lambda d: d.is_bool, default=None)


def _dtype_of_numbers(operands: Sequence[Operand]) -> DType | None:
    """What numbers of Python have in common, if they are of several kinds: 1 and 0.5 are floats."""
    kinds = {type(o) for o in operands if isinstance(o, (bool, int, float, complex))}
    strongest = next((kind for kind in (complex, float, int) if kind in kinds), None)
    return dtype(strongest) if strongest is not None and len(kinds) > 1 else None


def _weakened(op: Op, value: np.generic, beside: DType) -> Tensor:
    """A NumPy scalar as the Python number that it is, where the op takes numbers of one dtype."""
    kind = dtype(value.dtype)
    if kind.is_bool or not (op.family == "elementwise" or (kind.is_float and beside.is_float)):
        return value
    return value.item()


def _weak_dtype(op: Op, value: complex, beside: DType) -> DType:
    try:
        return weak_scalar(value, beside)
    except DTypeError as e:
        raise DTypeError(f"{op.name}: {e.message}") from None


def _evaluate(
    op: Op, operands: Sequence[Operand], attrs: Mapping[str, object], bodies: Sequence[Graph]
) -> Tensor:
    graph = Graph(op.name)
    with graph.building():
        node = graph.add(op, coerce(op, operands, graph), attrs, bodies)
        graph.set_outputs(graph.results(node))
    values = list(later().evaluate(graph, {}).values())
    return values[0] if len(values) == 1 else tuple(values)
