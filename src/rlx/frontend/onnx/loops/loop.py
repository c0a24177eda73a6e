"""Loop: written out, a scan over steps whose number is known, or a loop that data end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError, RlxError
from rlx.frontend.onnx.call import Call, NeedsValue
from rlx.frontend.onnx.loops.appended import with_sequences, without_appending
from rlx.frontend.onnx.loops.control import MOST_UNROLLED, as_tensor, count_nodes, one_as, results
from rlx.frontend.onnx.loops.loop_analysis import Foresight, foresee
from rlx.frontend.onnx.proto import element_dtype
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.arithmetic import filled
from rlx.frontend.onnx.value import Outputs, Value
from rlx.ir.attr import AttrValue
from rlx.ir.body import trace
from rlx.ir.dim import evaluate
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.types import TensorType, type_symbols

if TYPE_CHECKING:
    from onnx import GraphProto


Carry: TypeAlias = "tuple[list[Node], list[Node], Node]"
"""Carried values, buffers of rows, and the number of steps so far."""

MOST_BUFFER = 4 << 20
"""Bytes of a buffer for the rows that a loop stacks whose end data decide; more are stacked by the host."""


@onnx_op("Loop")
def loop(n: Call) -> Outputs:
    body = n.subgraph("body")
    carried = list(n.operands[2:]) + [None] * max(0, len(body.input) - 2 - len(n.operands[2:]))
    trips = n.get(0)
    limit = None if trips is None else n.known(0)
    start = n.get(1)
    go = np.asarray(True) if start is None else n.known(1)
    if limit is not None and go is not None:
        steps = int(limit.reshape(-1)[0]) if go.reshape(-1)[0] else 0
        if steps * count_nodes(body) <= MOST_UNROLLED:
            made = unrolled(n, body, steps, carried)
            if made is not None:
                return made
    body, carried, appended = without_appending(body, carried)
    try:
        looped = native_loop(n, body, carried, foresee(n, body, carried))
        return results(with_sequences(looped, appended))
    except RlxError as e:
        for operand, what in ((trips, "its number of trips"), (start, "its condition")):
            if operand is not None and n.known_value(operand) is None:
                try:
                    n.demand(operand, what)
                except NeedsValue as needed:
                    raise NeedsValue(f"{needed.message} ({e.message})", needed.inputs) from None
                except ModelImportError:
                    raise e from None
        raise


def unrolled(n: Call, body: GraphProto, steps: int, carried: list[Value]) -> Outputs:
    """The loop written out, as long as each step's condition is known; None if one is not."""
    rows: list[list[Node]] = []
    go = n.constant(True)
    for step in range(steps):
        out = n.run_subgraph(body, [n.constant(np.int64(step)), go, *carried])
        carried, row = list(out[1 : 1 + len(carried)]), out[1 + len(carried) :]
        rows.append([as_tensor(v) for v in row])
        condition = n.known_value(as_tensor(out[0]))
        if condition is None:
            return None
        if not condition.reshape(-1)[0]:
            break
    count = len(body.output) - 1 - len(carried)
    if count and not rows:
        stacked = [empty_scan(n, body, 1 + len(carried) + i) for i in range(count)]
    else:
        stacked = [ops.stack([row[i] for row in rows]) for i in range(count)]
    return results([*carried, *stacked])


def empty_scan(n: Call, body: GraphProto, index: int) -> Node:
    """What a loop of no steps has stacked: nothing, of the declared type."""
    declared = body.output[index].type.tensor_type
    dims = [d.dim_value for d in declared.shape.dim]
    return n.constant(np.zeros((0, *dims), element_dtype(declared.elem_type, "a loop output").np))


def native_loop(n: Call, body: GraphProto, carried: Sequence[Value], ahead: Foresight) -> tuple[Value, ...]:
    """The loop as one of the program. What no step changes is read from around it, and where the number of
    steps is known, it is a scan, and what counts the steps is computed from their number."""
    made = _Loop(n, body, carried, ahead)
    if not made.kept and not made.rows:
        return results(made.ends({}))
    return made.scan() if ahead.count is not None else made.loop()


class _Loop:
    """A Loop on its way to become one of the program."""

    def __init__(self, n: Call, body: GraphProto, carried: Sequence[Value], ahead: Foresight) -> None:
        self.n, self.body, self.carried, self.ahead = n, body, carried, ahead
        self.counted = ahead.counters if ahead.count is not None else {}
        self.kept = [k for k in range(len(carried)) if k not in ahead.fixed and k not in self.counted]
        self.rows = len(body.output) - 1 - len(carried)
        self.start = {k: as_tensor(carried[k]) for k in self.kept}
        if any(k in ahead.unread for k in self.kept):
            self._replace_placeholders()

    def step(self, i: Node, carry: Sequence[Node]) -> tuple[Node, list[Node], list[Node]]:
        """One step: whether to go on, the new carries, the rows to stack."""
        known, values = self.n.importer.known, list(self.carried)
        number = known.new_step(self.n.label, self.ahead.most)
        known.given[i] = filled((), number)
        for k, value in zip(self.kept, carry, strict=True):
            values[k] = value
        for k, counter in self.ahead.counters.items():
            like = as_tensor(self.carried[k])
            if k in self.counted:
                values[k] = number_like(i * counter.by + ops.dim_value(counter.start, "i64"), like)
            known.given[as_tensor(values[k])] = filled(like.shape, counter.at(number))
        out = self.n.run_subgraph(self.body, [i, self.n.constant(True), *values])
        for c in self.n.graph.constraints:
            if known.is_step(c.lhs) or known.is_step(c.rhs):
                raise ModelImportError(f"its steps need {c.describe()}, which does not hold in every step")
        new = [one_as(as_tensor(out[1 + k]), self.start[k].shape) for k in self.kept]
        rows = [as_tensor(v) for v in out[1 + len(self.carried) :]]
        return ops.reshape(as_tensor(out[0]), ()), new, rows

    def ends(self, final: Mapping[int, Node]) -> list[Value]:
        """Carries after the last step."""
        out = list(self.carried)
        for k, counter in self.counted.items():
            assert self.ahead.count is not None
            end = ops.dim_value(counter.at(self.ahead.count), "i64")
            out[k] = number_like(end, as_tensor(self.carried[k]))
        for k, value in final.items():
            out[k] = value
        return out

    def scan(self) -> tuple[Value, ...]:
        """Steps whose number is known."""

        def step(i: Node, carry: Sequence[Node]) -> tuple[bool, list[Node], list[Node]]:
            return True, *self.step(i, carry)[1:]

        count = self.ahead.count
        assert count is not None, "else it is a loop"
        trips = count if isinstance(count, int) else ops.dim_value(count, "i64")
        final, stacked = ops.loop(step, [self.start[k] for k in self.kept], trips=trips)
        return results([*self.ends(dict(zip(self.kept, final, strict=True))), *stacked])

    def loop(self) -> tuple[Value, ...]:
        """Steps until data say stop."""
        trips, go, most = self.n.get(0), self.n.get(1), self.ahead.most
        bounds: dict[str, AttrValue] = {
            "trips": None if trips is None else ops.reshape(trips, ()),
            "go": True if go is None else ops.reshape(go, ()),
            "max_trips": most if isinstance(most, int) else None,
        }
        start = [self.start[k] for k in self.kept]
        buffers = self._buffers() if self.rows and isinstance(most, int) else None
        if buffers is None or most is None:
            final, stacked = ops.loop(self.step, start, **bounds)
            return results([*self.ends(dict(zip(self.kept, final, strict=True))), *stacked])

        def step(i: Node, carry: Carry) -> tuple[Node, Carry, None]:
            values, filled_, _ = carry
            on, new, rows = self.step(i, values)
            filled_ = [
                ops.dynamic_update_slice(b, ops.expand_dims(row, 0), [i], axes=[0])
                for b, row in zip(filled_, rows, strict=True)
            ]
            return on, (new, filled_, i + 1), None

        (final, full, steps), _ = ops.loop(step, (start, buffers, self.n.constant(np.int64(0))), **bounds)
        (made,) = ops.nonzero(ops.less(ops.iota((most,)), steps))
        stacked = [ops.gather(b, made, 0) for b in full]
        return results([*self.ends(dict(zip(self.kept, final, strict=True))), *stacked])

    def _buffers(self) -> list[Node] | None:
        """Room for the rows of as many steps as there can be; None if that is much."""
        assert isinstance(self.ahead.most, int)
        types = [t.with_shape((self.ahead.most, *t.shape)) for t in self._rehearsed()[1 + len(self.kept) :]]
        room = sum(evaluate(t.nbytes, dict.fromkeys(type_symbols(t), 1)) for t in types)
        return [ops.zeros(t.shape, t.dtype) for t in types] if room <= MOST_BUFFER else None

    def _replace_placeholders(self) -> None:
        """A carry that no step reads may begin as anything: exporters give one number for what a first step
        will define."""
        types = self._rehearsed()[1:]
        for k, want in zip(self.kept, types, strict=False):
            have = self.start[k].tensor
            if k in self.ahead.unread and have != want and self.ahead.starts:
                self.start[k] = ops.zeros(want.shape, want.dtype)

    def _rehearsed(self) -> list[TensorType]:
        """Types of what a step gives, found by converting it once more, outside the program."""

        def step(*given: Node) -> list[Node]:
            on, new, rows = self.step(given[-1], given[:-1])
            return [on, *new, *rows]

        types = [self.start[k].tensor for k in self.kept]
        _, out = trace("rehearsal", step, [*types, TensorType(I64, ())], self.n.graph)
        return [node.tensor for node in out]


def number_like(number: Node, like: Node) -> Node:
    """One number with the type of another value."""
    made: Node = ops.cast(ops.reshape(number, like.shape), like.dtype)
    return made
