"""A group of ops on its way to be a kernel: what it would save and cost, updated op by op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from rlx.cost.profile import GraphIoProfile
from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit
from rlx.fuse.reach import Reach, Span
from rlx.fuse.regions import Group
from rlx.fuse.work import Work
from rlx.ir.graph import Node
from rlx.records import dataclass
from rlx.target.prices import Machine


class Pricing:
    """IO of ops alone and of groups, at the assumed sizes."""

    def __init__(self, facts: Facts, machine: Machine) -> None:
        self.facts, self.work = facts, Work(facts, machine)
        self._single: dict[int, GraphIoProfile] = {}

    def single(self, i: int) -> GraphIoProfile:
        """IO of an op as a separate kernel."""
        known = self._single.get(i)
        if known is None:
            known = self._single[i] = self.facts.io.profile(self.facts.graph.nodes[i])
        return known

    def group(self, members: Iterable[int], outputs: Sequence[int]) -> GraphIoProfile:
        """IO of one kernel over these ops that stores these values."""
        inside = set(members)
        reads: dict[int, int] = {}
        waits = 0
        for i in inside:
            waits += self.single(i).sync_points
            for root, count in self.facts.io.reads(self.facts.graph.nodes[i]).items():
                if root not in inside:
                    reads[root] = reads.get(root, 0) + count
        return self.of(reads, outputs, waits)

    def of(self, reads: Mapping[int, int], outputs: Sequence[int], waits: int) -> GraphIoProfile:
        """IO of a kernel by the elements it reads and the values it stores."""
        io, nodes = self.facts.io, self.facts.graph.nodes
        traffic = sum(io.bytes(nodes[i]) for i in outputs)
        for root, count in reads.items():
            stored = nodes[root]
            traffic += min(count, io.elements(stored)) * stored.dtype.itemsize
        return GraphIoProfile(1, min(waits, 1), 0, traffic)


@dataclass(frozen=True)
class Trial:
    """A group, and how it compares with its ops as separate kernels."""

    pricing: Pricing
    fit: Fit
    span: Span
    outputs: tuple[int, ...]
    before: GraphIoProfile
    reads: Mapping[int, int]  # values from outside -> elements read
    pointwise: bool  # every op works at the same points: nothing is computed more often than alone
    copies: tuple[int, ...] = ()  # members that other kernels compute for themselves too

    @staticmethod
    def start(pricing: Pricing, reach: Reach, fit: Fit, copies: tuple[int, ...] = ()) -> Trial:
        """The first point of a group that grows: one op, or a pattern that belongs together."""
        facts = pricing.facts
        own = [i for i in sorted(fit.status) if i not in copies]
        outputs = tuple(facts.outputs(own, set(fit.status)))
        before = GraphIoProfile()
        reads: dict[int, int] = {}
        for i in sorted(fit.status):
            before += pricing.single(i) if i not in copies else GraphIoProfile()
            for root, count in facts.io.reads(facts.graph.nodes[i]).items():
                if root not in fit.status:
                    reads[root] = reads.get(root, 0) + count
        pointwise = fit.kind != "reduce"
        return Trial(pricing, fit, reach.span(own), outputs, before, reads, pointwise, copies)

    # Prices are computed lazily: most trials are dropped before.

    @cached_property
    def after(self) -> GraphIoProfile:
        """IO of the group as one kernel."""
        if self._single:
            return self.before
        return self.pricing.of(self.reads, self.outputs, self.before.sync_points)

    @cached_property
    def compute_ps_added(self) -> int:
        """Picoseconds of computing beyond that of its ops as separate kernels."""
        if self.pointwise or self._single:
            return 0
        work = self.pricing.work
        return work.evaluated_ps(self.fit, self.outputs) - work.separate_ps(self.fit)

    @property
    def _single(self) -> bool:
        return len(self.fit.status) - len(self.copies) == 1

    @cached_property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.fit.status))

    @cached_property
    def group(self) -> Group:
        return Group(tuple(i for i in self.members if i not in self.copies), self.copies)

    def add(self, node: Node, span: Span) -> Trial:
        """The group with one more op, and the span of both; Misfit says why it does not fit."""
        facts = self.pricing.facts
        fit = self.fit.add(node)
        outputs = tuple(facts.outputs(sorted((*self.outputs, node.id)), fit.status))
        reads = dict(self.reads)
        reads.pop(node.id, None)
        for root, count in facts.io.reads(node).items():
            if root not in fit.status:
                reads[root] = reads.get(root, 0) + count
        before = self.before + self.pricing.single(node.id)
        pointwise = self.pointwise and fit.kind != "reduce" and self._same_points(node)
        return Trial(self.pricing, fit, span, outputs, before, reads, pointwise, self.copies)

    def _same_points(self, node: Node) -> bool:
        facts = self.pricing.facts
        nodes = facts.graph.nodes
        readers = [nodes[r] for r in facts.readers.get(node.id, ()) if r in self.fit.status]
        inside = [a for a in facts.accesses(node) if a.root in self.fit.status]
        inside += [a for r in readers for a in facts.accesses(r) if a.root == node.id]
        return all(a.pointwise for a in inside)
