"""How far a native result may lie from the truth: one table of rounding, followed through a graph.

| op | its own rounding |
|---|---|
| elementwise | 4 ulp of its dtype |
| sums, running sums, scattered sums of K terms | K eps sum abs(x) |
| contractions, convolutions, transforms, maps of K > 3 elements | 2 K eps sum abs(a) abs(b) |
| moves, comparisons, extremes, sorts, integers | none |

Values are computed in f64 by the reference. What operands are off by is carried on: linearly through sums and
products, elsewhere by looking at what the op gives at both ends of its operands' intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rlx.backend.reference.interpreter import Interpreter
from rlx.ir.form import Call, Contract, Conv, Cumulate, Form, Map, Pieces, Reduce, Scatter, Template
from rlx.ir.graph import Graph, Node, substitute_dims
from rlx.ir.op import Role
from rlx.ir.types import tensor_types
from rlx.ops.addressing import OutOfRangeError

ELEMENTWISE_ULPS = 4
ADDED_UP = ("sum", "add")
BITS = ("bitcast", "custom")  # what they do to a value is not about its size


@dataclass
class Bounded:
    """A value in f64 (integers as they are) and how far a computed one may lie from it."""

    value: np.ndarray
    error: np.ndarray | float = 0.0


class NotFollowed(Exception):
    """The graph holds an op through which errors are not followed."""


class Follower(Interpreter):
    """Walks a graph of primitive ops with values and bounds."""

    def __init__(self, graph: Graph, feed: dict[str, np.ndarray], binding: dict[str, int]) -> None:
        super().__init__(graph, binding)
        self.known: dict[int, tuple[Bounded, ...]] = {}
        self.feed = feed

    def outputs(self) -> dict[str, Bounded]:
        for node in self.graph.nodes:
            self.known[node.id] = self.step(node)
        return {name: self.known[node.id][0] for name, node in self.graph.outputs.items()}

    def step(self, node: Node) -> tuple[Bounded, ...]:
        role = node.op.role
        if role is Role.INPUT:
            return (Bounded(widened(self.feed[node.attrs["name"]])),)
        if role is Role.CONSTANT:
            return (Bounded(widened(node.attrs["value"].array)),)
        if role is Role.RESULT:
            return (self.known[node.operands[0].id][node.attrs["index"]],)
        computed = role is Role.COMPUTE and node.op.effects == "none" and node.op.has("lower")
        if not computed or node.bodies or isinstance(self.form(node), Call) or node.op.name in BITS:
            raise NotFollowed(node.op.name)
        operands = [self.known[o.id][0] for o in node.operands]
        values = self.apply(node, [o.value for o in operands])
        errors = [self.carried(node, operands, values, i) for i in range(len(values))]
        own = self.rounding(node, operands, values)
        return tuple(Bounded(v, e + r) for v, e, r in zip(values, errors, own, strict=True))

    def form(self, node: Node) -> Form:
        made: Form = node.op.lower(*[o.tensor for o in node.operands], **node.attrs)
        return made

    def apply(self, node: Node, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the op gives; casts between floats keep the value."""
        if node.op.name == "cast" and node.dtype.is_float and arrays[0].dtype == np.float64:
            return [arrays[0]]
        attrs = {k: self.bound_attr(v) for k, v in node.attrs.items()}
        with np.errstate(all="ignore"):
            out = node.op.ref(*arrays, **attrs)
        return [widened(np.asarray(a)) for a in (out if isinstance(out, tuple) else (out,))]

    def bound_attr(self, value: Any) -> Any:
        return substitute_dims(value, self.binding)

    def is_linear(self, form: object) -> bool:
        if isinstance(form, (Contract, Conv)):
            return True
        return isinstance(form, (Reduce, Cumulate, Scatter)) and form.combine in ADDED_UP

    def carried(
        self, node: Node, operands: Sequence[Bounded], values: Sequence[np.ndarray], number: int
    ) -> np.ndarray | float:
        """What errors of operands do to a result."""
        total: np.ndarray | float = 0.0
        form = self.form(node)
        for i, operand in enumerate(operands):
            if not np.any(operand.error):
                continue
            error = np.broadcast_to(operand.error, operand.value.shape)
            if self.is_linear(form):
                parts = [np.abs(o.value) if o.value.dtype.kind == "f" else o.value for o in operands]
                parts[i] = error
                total = total + self.apply(node, parts)[number]
                continue
            moved = []
            if node.operands[i] in node.operands[:i]:
                continue  # moved with the first
            for end in ends(operand.value, error):
                same = [o is node.operands[i] for o in node.operands]
                parts = [end if s else o.value for s, o in zip(same, operands, strict=True)]
                try:
                    moved.append(distance(self.apply(node, parts)[number], values[number]))
                except OutOfRangeError:
                    raise NotFollowed("an index that rounding decides") from None
            total = total + np.fmax(*moved)
        return total

    def rounding(
        self, node: Node, operands: Sequence[Bounded], values: Sequence[np.ndarray]
    ) -> list[np.ndarray | float]:
        """What the op itself may add."""
        form = self.form(node)
        out: list[np.ndarray | float] = []
        for i, (t, value) in enumerate(zip(tensor_types(node.type), values, strict=True)):
            if not t.dtype.is_float:
                out.append(0.0)
                continue
            eps = float(ml_dtypes.finfo(t.dtype.np).eps)
            terms, size = self.sum_of(node, form, operands, i)
            if size is not None:
                out.append(terms * eps * size + ELEMENTWISE_ULPS * eps * np.abs(value))
            elif isinstance(form, (Map, Pieces)) and not moves_only(form):
                out.append(ELEMENTWISE_ULPS * eps * np.abs(value))
            else:
                out.append(0.0)
        return out

    def sum_of(
        self, node: Node, form: object, operands: Sequence[Bounded], number: int
    ) -> tuple[float, np.ndarray | float | None]:
        """(terms, sum of their sizes) of an op that adds up; a factor of 2 where they are products."""
        sizes = [np.abs(o.value) if o.value.dtype.kind == "f" else o.value for o in operands]

        def extent(dims: Sequence[Any]) -> float:
            return float(math.prod(self.bound_attr(tuple(dims)))) or 1.0

        if isinstance(form, Contract):
            return 2 * extent([form.lhs[a] for a, _ in form.contract]), self.apply(node, sizes)[number]
        if isinstance(form, Conv):
            return 2 * extent(form.w[1:]), self.apply(node, sizes)[number]
        if isinstance(form, Reduce) and form.combine in ADDED_UP:
            return extent([form.space[a] for a in form.axes]), self.apply(node, sizes)[number]
        if isinstance(form, Reduce) and form.combine == "prod":
            return extent([form.space[a] for a in form.axes]), np.abs(self.apply(node, sizes)[number])
        if isinstance(form, Cumulate) and form.combine in (*ADDED_UP, "prod"):
            return extent([form.space[form.axis]]), self.apply(node, sizes)[number]
        if isinstance(form, Scatter) and form.combine in (*ADDED_UP, "mul"):
            return extent(form.space), self.apply(node, sizes)[number]
        if isinstance(form, Map) and (loads := sum(e.prim == "load" for e in form.body.walk())) > 3:
            return 2.0 * loads, max(float(s.max(initial=0)) for s in sizes if s.dtype.kind == "f")
        if isinstance(form, Template):
            count = max((o.value.size for o in operands), default=1)
            return 2.0 * count, max(
                (float(s.max(initial=0)) for s in sizes if s.dtype.kind == "f"), default=0.0
            )
        return 0.0, None


def ends(value: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of an interval; of a truth value that may differ, the other one."""
    if value.dtype == bool:
        return value ^ (error > 0), value
    with np.errstate(all="ignore"):
        return (value + error).astype(value.dtype), (value - error).astype(value.dtype)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.abs(a.astype(np.float64) - b.astype(np.float64))


def widened(x: np.ndarray) -> np.ndarray:
    """Floats in f64; the rest as it is."""
    if x.dtype.kind in "iub":
        return x
    if x.dtype.kind == "c":
        raise NotFollowed("complex numbers")
    return x.astype(np.float64)


def moves_only(form: Map | Pieces) -> bool:
    bodies = [form.body] if isinstance(form, Map) else [p.body for p in form.pieces]
    return all(b.prim in ("load", "const") for b in bodies)


def assert_within(got: np.ndarray, plain: np.ndarray, truth: Bounded) -> None:
    """A native result lies within its bound; where the reference is not finite, it is the same."""
    assert got.dtype == plain.dtype and got.shape == plain.shape
    if plain.dtype.kind in "iub":
        if np.any(truth.error):  # an index or a comparison of values that are not exact
            return
        np.testing.assert_array_equal(got, plain)
        return
    narrow, wide = plain.astype(np.float64), got.astype(np.float64)
    bound = np.broadcast_to(truth.error, wide.shape)
    judged = np.isfinite(narrow) & np.isfinite(truth.value) & np.isfinite(bound)
    np.testing.assert_array_equal(wide[~np.isfinite(narrow)], narrow[~np.isfinite(narrow)])
    smallest = 2.0**-126 if plain.dtype == np.float32 else float(np.finfo(np.float64).tiny)
    off, room = distance(wide, truth.value)[judged], bound[judged] + smallest
    assert (off <= room).all(), f"off by {off[off > room]}, allowed {room[off > room]}"
