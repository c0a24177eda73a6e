"""If and Scan.

What is known at import is decided at import: a condition that is known takes one branch, a scan over few
rows is unrolled. The rest becomes `cond` and `scan` of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx import ops
from rlx.errors import ModelImportError, RlxError
from rlx.frontend.onnx.call import Call, NeedsValue
from rlx.frontend.onnx.proto import subgraphs
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.arithmetic import Undecided
from rlx.frontend.onnx.value import Outputs, Value
from rlx.ir.body import trace
from rlx.ir.dim import Constraint, Dim, dim_max, dim_min, known_eq
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto


MOST_UNROLLED = 2048
"""Nodes that an unrolled loop may have."""


def results(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(values)


@onnx_op("If")
def if_(n: Call) -> Outputs:
    condition = n[0]
    yes, no = n.subgraph("then_branch"), n.subgraph("else_branch")
    known = n.known(0)
    if known is not None:
        return results(n.run_subgraph(yes if known.reshape(-1)[0] else no, []))
    try:
        declared = [declared_shape(info) for info in yes.output]

        def branch(graph: GraphProto) -> list[Node]:
            values = [as_tensor(v) for v in n.run_subgraph(graph, [])]
            return [one_as(v, shape) for v, shape in zip(values, declared, strict=True)]

        chosen = sizes_by_condition(n, condition, lambda: branch(yes), lambda: branch(no))
        if chosen is not None:
            return results(ops.cond(ops.reshape(condition, ()), *chosen))
        made = ops.cond(ops.reshape(condition, ()), lambda: branch(yes), lambda: branch(no))
        return results(made)
    except RlxError as e:
        # branches of different types (or with sequences): the program cannot choose, the importer must
        assumed = assumed_branch(n, condition)
        if assumed is not None:
            return results(n.run_subgraph(yes if assumed else no, []))
        try:
            n.demand(condition, "its condition")
        except NeedsValue as needed:
            raise NeedsValue(f"{needed.message} ({e.message})", needed.inputs) from None
        raise


def sizes_by_condition(
    n: Call, condition: Node, yes: Callable[[], list[Node]], no: Callable[[], list[Node]]
) -> tuple[Callable[[], list[Node]], Callable[[], list[Node]]] | None:
    """Branches whose results differ in size, under the sizes that the condition chooses: where it compares
    sizes, it is a size itself, 0 or 1. None where there is nothing to choose."""
    found = n.partial(condition)
    asked = None if found is None or found.size != 1 else found.reshape(-1)[0]
    if not isinstance(asked, Undecided) or asked.relation not in ("lt", "le"):
        return None
    shapes = [[v.shape for v in trace(name, f, [], n.graph)[1]] for name, f in (("then", yes), ("else", no))]
    if any(len(a) != len(b) for a, b in zip(*shapes, strict=True)):
        return None
    holds = dim_min(dim_max(asked.rhs - asked.lhs + (asked.relation == "le"), 0), 1)
    united = [
        tuple(a if known_eq(a, b) is True else b + holds * (a - b) for a, b in zip(left, right, strict=True))
        for left, right in zip(*shapes, strict=True)
    ]
    if united == shapes[0]:
        return None

    def as_united(branch: Callable[[], list[Node]]) -> Callable[[], list[Node]]:
        return lambda: [ops.reshape(v, shape) for v, shape in zip(branch(), united, strict=True)]

    return as_united(yes), as_united(no)


def assumed_branch(n: Call, condition: Node) -> bool | None:
    """Which branch to take where the condition is an equality of sizes: it is assumed, and a guard checks it;
    inside a branch around this one, wherever that is taken.

    Exporters write «squeeze this axis if its size is 1» in this way.
    """
    found = n.partial(condition)
    asked = None if found is None or found.size != 1 else found.reshape(-1)[0]
    if not isinstance(asked, Undecided) or asked.relation not in ("eq", "ne"):
        return None
    if n.importer.known.is_step(asked.lhs) or n.importer.known.is_step(asked.rhs):
        return None  # every step of a loop has its own answer
    n.graph.assume(Constraint("eq", asked.lhs, asked.rhs, (n.label,)))
    return asked.relation == "eq"


def declared_shape(info: ValueInfoProto) -> tuple[int, ...] | None:
    """The shape that a sub-graph declares for an output; None if it is not all numbers."""
    tensor = info.type.tensor_type
    if not tensor.HasField("shape") or any(not d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def one_as(value: Node, shape: Sequence[Dim] | None) -> Node:
    """A value of one element under another shape of one: exporters mix T and T[1] where branches and steps of
    loops meet."""
    if shape is None or value.shape == tuple(shape):
        return value
    is_one = value.tensor.numel == 1 and all(d == 1 for d in shape)
    made: Node = ops.reshape(value, shape) if is_one else value
    return made


def as_tensor(value: Value) -> Node:
    if not isinstance(value, Node):
        raise ModelImportError("a branch gives a sequence, an optional or text")
    return value


def count_nodes(graph: GraphProto) -> int:
    """Nodes of a sub-graph and of those inside it."""
    total = 0
    for node in graph.node:
        total += 1 + sum(map(count_nodes, subgraphs(node)))
    return total


@onnx_op("Scan")
def scan_with_batch(n: Call) -> Outputs:
    """Opset 8: a batch axis in front of everything, lengths as input 0."""
    if n.value(0) is not None:
        raise ModelImportError("sequence_lens is not supported")
    body = n.subgraph("body")
    count = int(n.attr("num_scan_inputs"))
    directions = n.attr("directions", [0] * count)
    operands = n.nodes(1)
    states = len(operands) - count
    batch = operands[0].shape[0]
    if not isinstance(batch, int):
        raise ModelImportError("the batch size of Scan-8 must be a number")
    parts = []
    for b in range(batch):
        one = [ops.squeeze(ops.slice_axis(x, 0, b, 1), 0) for x in operands]
        parts.append(scanned(n, body, one[:states], one[states:], directions, [0] * count, None, None))
    return tuple(ops.stack([as_tensor(p[i]) for p in parts]) for i in range(len(parts[0])))


@onnx_op("Scan", since=9)
def scan(n: Call) -> Outputs:
    body = n.subgraph("body")
    count = int(n.attr("num_scan_inputs"))
    states = len(n) - count
    outputs = len(body.output) - states
    return scanned(
        n,
        body,
        n.nodes()[:states],
        n.nodes()[states:],
        n.attr("scan_input_directions", [0] * count),
        n.attr("scan_input_axes", [0] * count),
        n.attr("scan_output_directions", [0] * outputs),
        n.attr("scan_output_axes", [0] * outputs),
    )


def scanned(
    n: Call,
    body: GraphProto,
    states: Sequence[Node],
    xs: Sequence[Node],
    directions: Sequence[int],
    axes: Sequence[int],
    out_directions: Sequence[int] | None,
    out_axes: Sequence[int] | None,
) -> tuple[Value, ...]:
    """Run a body along axes of tensors: unrolled where that is short, else a scan of the program."""
    moved = []
    for x, backward, axis in zip(xs, directions, axes, strict=True):
        x = ops.moveaxis(x, normal_axis("Scan", axis, x.rank), 0)
        moved.append(ops.flip(x, 0) if backward else x)
    length = moved[0].shape[0]

    def step(carry: Sequence[Node], rows: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        out = [as_tensor(v) for v in n.run_subgraph(body, [*carry, *rows])]
        return out[: len(states)], out[len(states) :]

    final: Sequence[Node] = list(states)
    stacked: Sequence[Node]
    if isinstance(length, int) and 0 < length * count_nodes(body) <= MOST_UNROLLED:
        rows: list[list[Node]] = []
        for i in range(length):
            final, row = step(final, [ops.squeeze(ops.slice_axis(x, 0, i, 1), 0) for x in moved])
            rows.append(row)
        stacked = [ops.stack([row[j] for row in rows]) for j in range(len(rows[0]))]
    else:
        final, stacked = ops.scan(step, final, moved)
    out = []
    for i, y in enumerate(stacked):
        if out_directions is not None and out_directions[i]:
            y = ops.flip(y, 0)
        axis = 0 if out_axes is None else out_axes[i]
        out.append(ops.moveaxis(y, 0, normal_axis("Scan", axis, y.rank)))
    return results([*final, *out])
