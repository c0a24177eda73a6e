"""What is known of a Loop before it runs: carries that no step changes, carries that count, how many steps.

Exporters write `for` as a Loop whose condition compares a counter that it carries, and hand weights through
the loop as carries. Seen through, such a loop is a scan over steps whose number is known, reads weights as
weights, and may slice at its counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import RlxError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.order import in_order
from rlx.frontend.onnx.proto import names_read, subgraphs
from rlx.frontend.onnx.sizes.arithmetic import Undecided, Unknown, filled
from rlx.frontend.onnx.value import Value
from rlx.ir.attr import AttrValue
from rlx.ir.body import Body
from rlx.ir.dim import Dim, Expr, ceildiv, dim_max, dim_min, known_le, substitute, symbols
from rlx.ir.graph import Node
from rlx.records import dataclass

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


MOST_NODES = 64
"""A number that takes more nodes to compute is not a counter."""
ENDLESS = 2**31 - 1
"""Exporters write this number of trips, or more, for «as long as the condition holds»."""
FAR_BELOW = 1 << 40
"""A carry of which nothing is known yet may be as negative as this."""

# what may be between a carry and the same carry a step later: moves that undo each other, and + 0
PASSES = ("Identity", "Add", "Sub", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Counter:
    """A carry that is start + by * step."""

    start: Dim
    by: int

    def at(self, step: Dim) -> Dim:
        """Its value as a step begins."""
        return self.start + self.by * step


@dataclass
class Foresight:
    """A loop, as far as it is known beforehand."""

    fixed: set[int] = field(default_factory=set)
    """Carries that every step hands on as they are."""
    counters: dict[int, Counter] = field(default_factory=dict)
    count: Dim | None = None
    """How many steps there are, if that is known."""
    most: Dim | None = None
    """No more steps than this, if that is known."""
    starts: bool = False
    """Whether a first step is certain."""
    unread: set[int] = field(default_factory=set)
    """Carries that a step only writes."""


def foresee(n: Call, body: GraphProto, carried: Sequence[Value]) -> Foresight:
    """What the body of a Loop reveals about its steps."""
    return _Look(n, body, carried).found()


class _Look:
    """A body of a Loop, of which only what counts is converted."""

    def __init__(self, n: Call, body: GraphProto, carried: Sequence[Value]) -> None:
        self.n, self.body, self.carried = n, body, carried
        self.nodes = in_order(body.node, n.scope.has)
        self.makers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        self.inputs = [info.name for info in body.input]
        self.outputs = [info.name for info in body.output]
        self.known = Foresight()

    def found(self) -> Foresight:
        known = self.known
        for k in range(len(self.carried)):
            if self._hands_on(k):
                known.fixed.add(k)
        read = names_read(self.body) | set(self.outputs)
        known.unread = {k for k in range(len(self.carried)) if self.inputs[2 + k] not in read}
        self._find_counters()
        self._count_steps()
        return known

    # -- carries

    def _hands_on(self, k: int) -> bool:
        """Whether a step leaves a carry as it is (or, a float, + 0: only the sign of a zero could differ)."""
        name = self.outputs[1 + k]
        axes: list[tuple[int, ...]] = []
        for _ in range(MOST_NODES):
            if name == self.inputs[2 + k]:
                return not axes
            node = self._maker(name)
            if node is None or node.op_type not in PASSES:
                return False
            first, *rest = node.input
            if node.op_type in ("Add", "Sub"):
                if not self._is_zero(rest[0]):
                    return False
            elif node.op_type != "Identity":
                moved = self._axes(node)
                if moved is None:
                    return False
                if node.op_type == "Squeeze":
                    axes.append(moved)
                elif not axes or axes.pop() != moved:
                    return False
            name = first
        return False

    def _is_zero(self, name: str) -> bool:
        found = self._number(name, {})
        return found is not None and not isinstance(found, (Unknown, Expr)) and found == 0

    def _axes(self, node: NodeProto) -> tuple[int, ...] | None:
        """Axes of a Squeeze or Unsqueeze, which are non-negative numbers."""
        if len(node.input) < 2:
            given = next((a.ints for a in node.attribute if a.name == "axes"), None)
            return None if given is None else tuple(given)
        found = self._value(node.input[1], {})
        return None if found is None or found.dtype == object else tuple(int(x) for x in found.reshape(-1))

    def _find_counters(self) -> None:
        """Carries of one integer that grow by the same number in every step."""
        numbers = {
            k: value
            for k, value in enumerate(self.carried)
            if isinstance(value, Node) and value.dtype.is_int and value.tensor.numel == 1
        }
        steps = self.n.importer.known
        open_: dict[str, Dim] = {
            self.inputs[2 + k]: steps.new_step(self.n.label) - FAR_BELOW for k in numbers
        }
        for k, value in numbers.items():
            if k in self.known.fixed:
                continue
            name = self.inputs[2 + k]
            after = self._number(self.outputs[1 + k], open_)
            start = _one(self.n.partial(value))
            if not _is_size(after) or not _is_size(start):
                continue
            by = after - open_[name]
            if isinstance(by, int) and by:
                self.known.counters[k] = Counter(start, by)
            elif isinstance(by, int):
                self.known.fixed.add(k)

    # -- steps

    def _count_steps(self) -> None:
        """The number of trips and each part of the condition bound the steps; together they may say it."""
        known, n = self.known, self.n
        bounds: list[Dim] = []
        exact = True
        trips = n.get(0)
        if trips is not None:
            limit = _one(n.partial(trips))
            if not _is_size(limit):
                exact = False
            elif isinstance(limit, Expr) or limit < ENDLESS:
                bounds.append(dim_max(limit, 0))
        start = n.get(1)
        begin = True if start is None else _one(n.partial(start))
        known.starts = begin is True and exact and all(known_le(1, most) is True for most in bounds)
        exact = exact and (begin is True or isinstance(begin, Undecided))
        if begin is False:
            known.count = known.most = 0
            return
        step = n.importer.known.new_step(n.label)
        given = {self.inputs[0]: step} if self.inputs else {}
        given |= {self.inputs[2 + k]: c.at(step) for k, c in known.counters.items()}
        asked = False  # whether a part of the condition asks at the start, too, what `begin` asks
        for name in self._conditions(self.outputs[0]):
            going = True if name == self.inputs[1] else self._number(name, given)
            if going is True:
                continue
            if going is False:
                bounds.append(1)
                continue
            below = _below_zero(going)
            last = None if below is None else _steps_below_zero(below, step)
            if last is None or below is None:
                exact = False
                continue
            first = _below_zero(begin)
            if first is not None and first == substitute(below, {_name(step): -1}):
                asked = True
                bounds.append(dim_max(last + 1, 0))
            else:
                bounds.append(dim_max(last, 0) + 1)
        if begin is not True and not asked:
            exact = False
        if bounds:
            known.most = dim_min(*bounds)
            known.count = known.most if exact else None

    def _conditions(self, name: str) -> Iterator[str]:
        """Values that must all hold for the loop to go on."""
        node = self._maker(name)
        if node is None or node.op_type not in (*PASSES, "And", "Cast", "Reshape"):
            yield name
        elif node.op_type == "And":
            for part in node.input:
                yield from self._conditions(part)
        elif node.op_type in ("Add", "Sub") and not self._is_zero(node.input[1]):
            yield name
        else:
            yield from self._conditions(node.input[0])

    # -- values

    def _number(self, name: str, given: Mapping[str, Dim]) -> AttrValue:
        """The one number that a value of the body is, as far as it is known; None if nothing is."""
        return _one(self._value(name, given))

    def _value(self, name: str, given: Mapping[str, Dim]) -> np.ndarray | None:
        """What is known of a value of the body, where `given` says what some of its inputs are."""
        importer = self.n.importer
        fixed = {self.inputs[2 + k]: self.carried[k] for k in self.known.fixed}
        needed = self._needed(name, {*given, *fixed})
        if needed is None:
            return None
        scratch = Body("look", self.n.graph)
        values: dict[str, Value] = dict(fixed)
        for at, (input_, size) in enumerate(given.items()):
            like = self.carried[self.inputs.index(input_) - 2] if input_ in self.inputs[2:] else None
            shape, dtype = (like.shape, like.dtype) if isinstance(like, Node) else ((), "i64")
            node = scratch.input(f"in{at}", shape, dtype)
            importer.known.given[node] = filled(shape, size)
            values[input_] = node
        with scratch.building():
            try:
                value = importer.look(self.body, needed, values, self.n.scope, name)
                return self.n.partial(value) if isinstance(value, Node) else None
            except RlxError:
                return None

    def _maker(self, name: str) -> NodeProto | None:
        return self.nodes[self.makers[name]] if name in self.makers else None

    def _needed(self, name: str, given: set[str]) -> list[NodeProto] | None:
        """Nodes that compute a value from what is given, in order; None if it takes more than that."""
        needed: set[int] = set()
        stack = [name]
        while stack:
            top = stack.pop()
            if top in given or not top:
                continue
            node = self._maker(top)
            if node is None:
                if top in self.inputs:
                    return None
                continue  # a stored value, or one from outside
            if subgraphs(node):
                return None
            if self.makers[top] not in needed:
                needed.add(self.makers[top])
                stack += node.input
            if len(needed) > MOST_NODES:
                return None
        return [self.nodes[i] for i in sorted(needed)]


def _one(found: np.ndarray | None) -> AttrValue:
    """The element of an array of one."""
    if found is None or found.size != 1:
        return None
    value = found.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def _is_size(value: object) -> bool:
    return isinstance(value, (int, Expr)) and not isinstance(value, bool)


def _below_zero(asked: object) -> Dim | None:
    """A comparison of sizes as «this size is below zero»."""
    if not isinstance(asked, Undecided) or asked.relation not in ("lt", "le"):
        return None
    return asked.lhs - asked.rhs - (asked.relation == "le")


def _name(step: Expr) -> str:
    return symbols(step)[0]


def _steps_below_zero(size: Dim, step: Expr) -> Dim | None:
    """The first step at which a size is not below zero; None if it does not grow with the steps."""
    first = substitute(size, {_name(step): 0})
    slope = substitute(size, {_name(step): 1}) - first
    if not isinstance(slope, int) or slope <= 0 or first + slope * step != size:
        return None
    return ceildiv(-first, slope)
