"""The walk through a graph that gives every value a placement along one axis of a mesh.

Every node may be computed whole on every rank, or cut along an axis of its iteration space that an operand is
already cut along, or, if it is linear, on partial values as they are. The cheapest way is taken, counting the
collectives that it needs and the work that it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlx.errors import RlxError, provenance
from rlx.ir.assume import ConstraintLog, inferring
from rlx.ir.attr import dims
from rlx.ir.dim import Dim, divides, evaluate, symbols
from rlx.ir.graph import Graph, Node, State
from rlx.ir.mesh import Partial, Placement, Replicate, Shard, ShardingError
from rlx.ir.op import Role, get_op, run_rule
from rlx.ir.rewrite import copy_node
from rlx.ir.types import Shape, TensorType, TupleType
from rlx.kernel.form import Cumulate, Form, Map, Pieces, Reduce, Scatter
from rlx.kernel.scalar import Scalar
from rlx.kernel.views import keeps_order
from rlx.records import dataclass
from rlx.rewrite.sharding.links import Link, form_of, links, passes_partial
from rlx.target.prices import DEVICES

WHOLE = Replicate()
NAMED = (Role.INPUT, Role.PARAM, Role.STATE)

# What ways are weighed with, in nanoseconds; only proportions matter.
PRICES = DEVICES["cpu"]  # ranks run on CPUs
IMPOSSIBLE = float("inf")


@dataclass(frozen=True)
class Inserted:
    """One change of placement: of which value, from what to what, for whom, and the bytes a rank receives."""

    axis: str
    what: str
    value: str
    before: Placement
    after: Placement
    reader: str
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.what} over {self.axis!r}: {self.value}, {self.before} -> {self.after}, for {self.reader}"
        )


@dataclass(frozen=True)
class Change:
    """How a value gets from one placement to another."""

    before: Placement
    what: str
    cost: float
    bytes: int = 0


@dataclass(frozen=True)
class Way:
    """One way to compute a node: placements of its operands and of its result."""

    operands: tuple[Placement, ...]
    result: Placement
    link: Link | None = None


class Walk:
    """One walk through a graph for one axis. `gathered` are values to gather as soon as they exist."""

    def __init__(
        self,
        graph: Graph,
        axis: str,
        ranks: int,
        given: Mapping[str, Placement],
        binding: Mapping[str, int],
        gathered: frozenset[int] = frozenset(),
    ) -> None:
        self.graph, self.axis, self.ranks, self.given = graph, axis, ranks, given
        self.binding, self.gathered = binding, gathered
        self.out = Graph(graph.name)
        self.cost = 0.0
        self.inserted: list[Inserted] = []
        self.rank: Node | None = None
        self.values: dict[int, dict[Placement, Node]] = {}  # a node in every placement so far
        self.ways: dict[int, Way] = {}
        for c in graph.constraints:
            self.out.assume(c)
        live = graph.live()
        with self.out.building():
            for node in graph.nodes:
                if node.id in live or node.op.role in NAMED:
                    with provenance(node.where):
                        self.place(node)
            self.finish()

    def finish(self) -> None:
        """Outputs and states, placed as the user gave them."""
        graph, out = self.graph, self.out
        out.param_values, out.state_values = dict(graph.param_values), dict(graph.state_values)
        for name, node in graph.outputs.items():
            with provenance(node.where):
                out.outputs[name] = self.get(node, self.given.get(name, WHOLE), f"output {name!r}")
        for s in graph.states:
            with provenance(s.output.where):
                value = self.get(s.output, self.given.get(s.name, WHOLE), f"state {s.name!r}")
            out.states.append(State(s.name, out.state_inputs[s.name], value))

    def doubtful(self) -> list[int]:
        """Values that are sharded and then reduced: gathering them first may need fewer collectives."""
        found: dict[int, None] = {}
        for id, way in self.ways.items():
            node = self.graph.nodes[id]
            if isinstance(way.result, Partial) and way.link is not None and not node.op.heavy:
                for operand in node.operands:
                    if isinstance(next(iter(self.values[operand.id])), Shard):
                        found.setdefault(operand.id)
        return sorted(found)

    # -- nodes

    def place(self, node: Node) -> None:
        """Enter a node in `values`, computed in the cheapest way."""
        if node.op.role in NAMED:
            self.values[node.id] = self.leaf(node)
            return
        if node.op.family == "rank" and node.attrs["axis"] == self.axis:
            self.values[node.id] = {WHOLE: self.rank_number()}
            return
        for way in sorted(self.ways_of(node), key=lambda way: self.price(node, way)):
            made = self.make(node, way)
            if made is not None:
                break
        else:
            raise ShardingError(
                f"%{node.id} ({node.op.name}) fits none of its operands' placements", node.where
            )
        self.cost += self.work(node) / (1 if way.link is None else self.ranks)
        self.ways[node.id] = way
        self.values[node.id] = {way.result: made}
        if node.id in self.gathered and isinstance(way.result, Shard):
            self.values[node.id] = {WHOLE: self.get(node, WHOLE, "its readers")}

    def leaf(self, node: Node) -> dict[Placement, Node]:
        placement = self.given.get(node.attrs["name"], WHOLE)
        if not isinstance(placement, Shard):
            return {placement: copy_node(node, (), self.out)}
        attrs = {**node.attrs, "type": self.local(node.tensor, placement.dim)}
        return {placement: self.out.add(node.op, (), attrs, where=node.where)}

    def local(self, whole: TensorType, dim: int | None) -> TensorType:
        """The type of one rank's part."""
        if dim is None:
            return whole
        shape: Shape = (*whole.shape[:dim], whole.shape[dim] // self.ranks, *whole.shape[dim + 1 :])
        return whole.with_shape(shape)

    def rank_number(self) -> Node:
        """The number of this rank: a param, so that all ranks run the same code."""
        if self.rank is None:
            self.rank = self.out.param(f"rank:{self.axis}", (), "i64")
        return self.rank

    # -- ways to compute a node

    def ways_of(self, node: Node) -> Iterator[Way]:
        have = [self.values[o.id] for o in node.operands]
        splits = node.op.role is Role.COMPUTE and not isinstance(node.type, TupleType)
        meets_here = node.op.has("everywhere") and node.attrs["axis"] == self.axis
        if splits and not meets_here and any(p != WHOLE for placed in have for p in placed):
            for link in links(node):
                if self.follows(link, have) and self.divides(node, link):
                    operands = tuple(WHOLE if d is None else Shard(d) for d in link.operands)
                    result = Partial(link.combine or "") if link.result is None else Shard(link.result)
                    yield Way(operands, result, link)
            yield from self.partial_ways(node, have)
        yield Way((WHOLE,) * len(node.operands), WHOLE)

    def partial_ways(self, node: Node, have: Sequence[Mapping[Placement, Node]]) -> Iterator[Way]:
        for kind in dict.fromkeys(p.kind for placed in have for p in placed if isinstance(p, Partial)):
            partial = [i for i, placed in enumerate(have) if Partial(kind) in placed and WHOLE not in placed]
            if partial and passes_partial(node, partial, kind):
                given = tuple(Partial(kind) if i in partial else WHOLE for i in range(len(have)))
                yield Way(given, Partial(kind))

    def follows(self, link: Link, have: Sequence[Mapping[Placement, Node]]) -> bool:
        """Whether an operand is already cut along the axis: only what the user sharded is sharded."""
        return any(
            d is not None and Shard(d) in placed for d, placed in zip(link.operands, have, strict=True)
        )

    def divides(self, node: Node, link: Link) -> bool:
        sizes = [o.shape[d] for o, d in zip(node.operands, link.operands, strict=True) if d is not None]
        if link.result is not None:
            sizes.append(node.shape[link.result])
        return all(divides(self.ranks, d) is True for d in sizes)

    def price(self, node: Node, way: Way) -> float:
        """Nanoseconds of the collectives that a way needs, and of each rank's work."""
        wanted = dict.fromkeys(zip((o.id for o in node.operands), way.operands, strict=True))
        moving = sum(self.change(self.graph.nodes[id], placement).cost for id, placement in wanted)
        return moving + self.work(node) / (1 if way.link is None else self.ranks)

    def work(self, node: Node) -> float:
        """Nanoseconds of computing a node whole."""
        if node.op.role is not Role.COMPUTE or not node.op.has("cost"):
            return 0.0
        cost = run_rule(node.op, "cost", *(o.type for o in node.operands), node=node)
        price = PRICES.rank_contraction_ns if node.op.heavy else PRICES.rank_elementwise_ns
        return self.known(cost) * price

    def known(self, d: Dim) -> int:
        return evaluate(d, {s: self.binding.get(s, 1) for s in symbols(d)})

    def make(self, node: Node, way: Way) -> Node | None:
        """The node computed in a way; None if its op cannot be cut so after all."""
        attrs = node.attrs if way.link is None else self.local_attrs(node, way.link)
        if attrs is None:
            return None
        reader = f"%{node.id} {node.op.name}"
        operands = [self.get(o, p, reader) for o, p in zip(node.operands, way.operands, strict=True)]
        if way.link is None:
            return copy_node(node, operands, self.out)
        return self.out.add(node.op, operands, attrs, where=node.where)

    def local_attrs(self, node: Node, link: Link) -> Mapping[str, object] | None:
        """Attributes of a node that computes one rank's part: as they are, or with the part's sizes."""
        types = [self.local(o.tensor, d) for o, d in zip(node.operands, link.operands, strict=True)]
        want = self.local(node.tensor, link.result)
        resized = dict(node.attrs)
        at = link.result
        if at is not None:
            for key, value in node.attrs.items():
                is_shape = node.op.attrs[key].kind is dims and len(value) == node.rank
                if is_shape and value[at] == node.shape[at]:
                    resized[key] = (*value[:at], want.shape[at], *value[at + 1 :])
        for attrs in (node.attrs, resized):
            if self.computes(node, types, attrs, want):
                return attrs
        return None

    def computes(
        self, node: Node, types: Sequence[TensorType], attrs: Mapping[str, object], want: TensorType
    ) -> bool:
        """Whether a node's op, applied to parts, gives the part wanted, by the same expression."""
        log = ConstraintLog(node.graph.constraints)
        try:
            with inferring(log, node.where):
                fits = node.op.infer(*types, **attrs) == want and not log.items
                whole = form_of(node)
                return fits and (
                    keeps_order(node) or _bodies(node.op.lower(*types, **attrs)) == _bodies(whole)
                )
        except RlxError:
            return False

    # -- changes of placement

    def change(self, node: Node, want: Placement) -> Change:
        """The cheapest way to have a value in a placement."""
        have = self.values[node.id]
        if want in have:
            return Change(want, "", 0.0)
        return min((self.change_from(node, before, want) for before in have), key=lambda c: c.cost)

    def change_from(self, node: Node, before: Placement, want: Placement) -> Change:
        size, n = self.known(node.tensor.nbytes), self.ranks
        others = size * (n - 1) // n
        if isinstance(want, Partial):
            return Change(before, "", IMPOSSIBLE)
        if isinstance(before, Replicate):
            return Change(before, "slice", size / n * PRICES.rank_byte_ns)
        meeting = PRICES.meeting_ns
        if isinstance(before, Partial):
            summing = others * PRICES.rank_sum_byte_ns
            if isinstance(want, Shard):
                return Change(before, f"reduce_scatter {before.kind}", meeting + summing, others)
            return Change(before, f"all_reduce {before.kind}", meeting + 2 * summing, 2 * others)
        if isinstance(want, Shard):
            return Change(before, "all_to_all", meeting + others / n * PRICES.rank_byte_ns, others // n)
        return Change(before, "all_gather", meeting + others * PRICES.rank_byte_ns, others)

    def get(self, node: Node, want: Placement, reader: str) -> Node:
        """A value in a placement; what that needs is inserted and noted."""
        have = self.values[node.id]
        if want in have:
            return have[want]
        if isinstance(want, Shard) and divides(self.ranks, node.shape[want.dim]) is not True:
            told = f"axis {want.dim} of {reader} ({node.type}) does not divide by the {self.ranks} ranks"
            raise ShardingError(f"{told} of axis {self.axis!r}", node.where)
        change = self.change(node, want)
        if change.cost == IMPOSSIBLE:
            listed = ", ".join(map(str, have))
            raise ShardingError(
                f"{reader} cannot be {want}: it is computed as {listed}; give one of these", node.where
            )
        made = have[want] = self.changed(have[change.before], change.before, want)
        self.cost += change.cost
        if change.bytes:
            value = f"%{node.id} {node.op.name} {node.type}"
            note = Inserted(self.axis, change.what, value, change.before, want, reader, change.bytes)
            self.inserted.append(note)
        return made

    def changed(self, x: Node, before: Placement, want: Placement) -> Node:
        over = {"axis": self.axis, "ranks": self.ranks}
        made: Node
        if isinstance(before, Replicate) and isinstance(want, Shard):
            size = x.shape[want.dim] // self.ranks
            length = get_op("dim_value")(dim=size, dtype="i64")
            start = get_op("mul")(self.rank_number(), length)
            made = get_op("dynamic_slice")(x, start, axes=(want.dim,), sizes=(size,))
        elif isinstance(before, Partial) and isinstance(want, Shard):
            made = get_op("reduce_scatter")(x, kind=before.kind, dim=want.dim, **over)
        elif isinstance(before, Partial):
            made = get_op("all_reduce")(x, kind=before.kind, **over)
        elif isinstance(before, Shard) and isinstance(want, Shard):
            made = get_op("all_to_all")(x, split=want.dim, concat=before.dim, **over)
        else:
            assert isinstance(before, Shard)
            made = get_op("all_gather")(x, dim=before.dim, **over)
        return made


def _bodies(form: Form | None) -> list[Scalar]:
    """The expressions of a form: what must not depend on which part of an axis is computed."""
    if isinstance(form, (Map, Reduce, Cumulate)):
        return [form.body]
    if isinstance(form, Scatter):
        return [*form.index, form.value]
    return [p.body for p in form.pieces] if isinstance(form, Pieces) else []
