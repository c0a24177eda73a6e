"""Fusion under the gate: which ops become one kernel, and why.

Kernels grow from seeds: contractions and convolutions first (elementwise ops after them become epilogues),
then reductions (with what feeds and follows them), then what is left of elementwise chains. A group grows op by
op, also past points where it would store more values than it may, and the best point on the way is kept: best
by the IO that is saved, as the gate prices it, minus the compute that is added. At last, cheap values that
several kernels read may be computed again by each reader instead of stored. Every yes and no is a `Decision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlx.cost.compute import elementwise_ps
from rlx.cost.decision import Decision, DecisionLog, decide
from rlx.cost.gate import IoFusionGate, default_gate
from rlx.cost.io import IoModel
from rlx.cost.profile import GraphIoProfile, fusion_benefit
from rlx.ir.compose import ComposeError, Kernel
from rlx.ir.graph import Graph, Node
from rlx.ir.types import TensorType
from rlx.passes.attend import Candidate, attention_candidates
from rlx.passes.facts import Facts
from rlx.passes.fit import Fit, Misfit
from rlx.passes.reach import Reach
from rlx.passes.regions import Group, Region, RegionMaker, emit_graph
from rlx.passes.trial import Pricing, Trial
from rlx.passes.work import evaluated_work

MOST_NODES = 64  # ops in one kernel
MOST_AHEAD = 12  # ops to look past the best group so far
MOST_TRIAL_OUTPUTS = 6  # values that a group may need to store while it grows
MOST_RECOMPUTED = 8  # ops that are computed again by each reader
MOST_READERS = 24

Pins = Mapping[tuple[int, int], bool]
Supports = Callable[[Kernel, Sequence[TensorType]], str | None]


@dataclass(frozen=True)
class Options:
    """What decides about fusion besides the graph."""

    gate: IoFusionGate
    device: str = "cpu"
    assume: Mapping[str, int] | None = None
    pins: Pins | None = None
    supports: Supports = lambda kernel, types: None


class Fuser:
    """Groups of one graph, and the decisions that made them."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph, self.options, self.gate = graph, options, options.gate
        self.facts = Facts(graph, IoModel(graph, options.assume))
        self.reach = Reach(self.facts)
        self.maker = RegionMaker(self.facts)
        self.log = DecisionLog()
        self.group_of: dict[int, int] = {}  # node -> number of the group that owns it
        self.groups: dict[int, Group] = {}
        self.fits: dict[int, Fit] = {}
        self.homes: dict[int, set[int]] = {}  # node -> groups that evaluate it
        self.pricing = Pricing(self.facts)
        self._pinned: dict[int, list[tuple[int, bool]]] = {}
        for (a, b), together in sorted((options.pins or {}).items()):
            graph.node(a), graph.node(b)
            self._pinned.setdefault(a, []).append((b, together))
            self._pinned.setdefault(b, []).append((a, together))

    def run(self) -> list[Group]:
        """All groups; ops that are left alone are groups of one."""
        kernels = self.facts.kernels
        for candidate in attention_candidates(self.facts):
            if not any(i in self.group_of for i in candidate.nodes):
                self.attend(candidate)
        for node in kernels:
            if self.facts.kind(node) in ("contract", "conv") and node.id not in self.group_of:
                self.grow(self.alone(node), "epilogue", backward=False, kinds=("map",))
        for node in kernels:
            if self.facts.kind(node) == "reduce" and node.id not in self.group_of:
                self.grow(self.alone(node), "reduction", backward=True, kinds=("map", "reduce"))
        for node in reversed(kernels):
            if node.id not in self.group_of and self.is_needed(node.id):
                self.grow(self.alone(node), "elementwise", backward=True, kinds=("map",))
        self.recompute()
        return list(self.groups.values())

    def is_needed(self, i: int) -> bool:
        """Whether a value has a reader that does not compute it for itself."""
        if i in self.facts.kept or i not in self.facts.readers:  # readers of an op with several results read those
            return True
        own = self.homes.get(i, set())
        return any(not self.homes.get(r, set()) <= own or r not in self.homes for r in self.facts.readers[i])

    # -- growing one group

    def alone(self, node: Node) -> Trial:
        """A group of one op."""
        return Trial.start(self.pricing, self.reach, Fit.of(self.facts, [node.id]))

    def attend(self, candidate: Candidate) -> None:
        """Make attention one kernel, if it is attention, the backend has a kernel for it, and it pays."""
        root = self.graph.nodes[candidate.second]
        copies = tuple(i for i in candidate.generated if i not in candidate.nodes)
        fit = Fit.attention(self.facts, candidate.nodes, copies, root)
        start = Trial.start(self.pricing, self.reach, fit, copies)
        apart = any(self.apart(i, candidate.nodes) for i in candidate.nodes)
        why = fit.refuse_outputs(start.outputs) or self.kernel_refused(start)
        if apart:
            why = "pinned apart by the user"
        gain = self.gain(start)
        if why is None and gain < self.gate.least_gain_ps and not self.wishes(start):
            why = "the gate finds that it does not pay"
        if why is None:
            self.grow(start, "attention", backward=False, kinds=("map",))
            return
        where = self.where((candidate.first, candidate.second))
        score = self.gate.score_ps(fusion_benefit(start.before, start.after))
        self.log.add(
            Decision(
                candidate.nodes, start.before, start.after, score, 0, False, why, where, apart, "attention"
            )
        )

    def grow(self, start: Trial, rule: str, backward: bool, kinds: Sequence[str]) -> None:
        """Grow a group, keep the best point on the way, and record what was decided."""
        now = start
        if now.fit.kind == "own":
            self.commit(now)
            return
        better = [now]  # each better than those before it
        gain = self.gain(now)
        refused: dict[int, str] = {}
        while len(now.fit.status) < MOST_NODES:
            if len(now.fit.status) - len(better[-1].fit.status) > MOST_AHEAD:
                break
            wider = self.step(now, backward, kinds, refused)
            if wider is None:
                break
            now = wider
            if now.fit.refuse_outputs(now.outputs) is None:
                reached = self.gain(now)
                if reached >= gain + self.gate.least_gain_ps or self.wishes(now) > self.wishes(better[-1]):
                    better.append(now)
                    gain = reached
        while self.kernel_refused(better[-1]) is not None:
            better.pop()
        best = better[-1]
        self.commit(best)
        if len(best.fit.status) > 1:
            self.record(best, rule)
        self.record_refusals(best, rule, refused)

    def step(self, now: Trial, backward: bool, kinds: Sequence[str], refused: dict[int, str]) -> Trial | None:
        """The group with one more neighbour; the first that fits."""
        for node in self.neighbours(now.members, backward):
            if node.id in refused or node.id in self.group_of or self.facts.kind(node) not in kinds:
                continue
            if self.apart(node.id, now.members):
                refused[node.id] = "pinned apart by the user"
                continue
            if not (now.span | self.reach.span([node.id])).acyclic:
                continue  # what lies between may join later, and then this too
            try:
                wider = now.add(node, self.reach)
            except Misfit as why:
                refused[node.id] = str(why)
                continue
            if len(wider.outputs) <= MOST_TRIAL_OUTPUTS:
                return wider
        return None

    def neighbours(self, members: Sequence[int], backward: bool) -> Iterator[Node]:
        """Readers of a group's values, then producers of what it reads."""
        nodes, inside = self.graph.nodes, set(members)
        seen: set[int] = set()
        for i in members:
            for r in self.facts.readers.get(i, ()):
                if r not in inside and r not in seen:
                    seen.add(r)
                    yield nodes[r]
        if not backward:
            return
        for i in reversed(members):
            for access in self.facts.accesses(nodes[i]):
                if access.root not in inside and access.root not in seen:
                    seen.add(access.root)
                    if access.root in self.reach:
                        yield nodes[access.root]

    def gain(self, t: Trial) -> int:
        """Picoseconds that a group saves."""
        score = self.gate.score_ps(fusion_benefit(t.before, t.after))
        return score - elementwise_ps(self.options.device, t.work_added)

    def kernel_refused(self, t: Trial) -> str | None:
        """Why the composer or the backend does not take a group that fits by its reads."""
        if len(t.fit.status) == 1:
            return None
        try:
            region, _ = self.maker.region(t.group, t.outputs)
        except ComposeError as why:
            return why.message
        return self.unsupported(region)

    def unsupported(self, region: Region) -> str | None:
        """Why the backend has no native kernel for a region; None if it has."""
        ends = (*region.body.inputs, *region.body.outputs.values())
        return self.options.supports(region.kernel, [n.tensor for n in ends])

    def commit(self, t: Trial) -> None:
        number = len(self.groups)
        group = self.groups[number] = t.group
        self.fits[number] = t.fit
        for i in group.nodes:
            self.group_of[i] = number
        for i in group.evaluated:
            self.homes.setdefault(i, set()).add(number)
        self.reach.join(group.nodes, single_output=len(t.outputs) == 1)

    # -- pins

    def apart(self, i: int, members: Sequence[int]) -> bool:
        return any(b in members and not together for b, together in self._pinned.get(i, ()))

    def wishes(self, t: Trial) -> int:
        """Pinned pairs that lie together in a group."""
        if not self._pinned:
            return 0
        inside = t.fit.status
        return sum(together and b in inside for i in inside for b, together in self._pinned.get(i, ()))

    # -- records

    def record(self, t: Trial, rule: str) -> None:
        pin = True if self.wishes(t) else None
        compute = elementwise_ps(self.options.device, t.work_added)
        where = self.where(t.members)
        self.log.add(
            decide(self.gate, t.members, t.before, t.after, compute, rule=rule, where=where, pin=pin)
        )

    def where(self, members: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for i in members for w in self.graph.nodes[i].where))

    def record_refusals(self, t: Trial, rule: str, refused: Mapping[int, str]) -> None:
        """Neighbours that stayed outside, each with the price it would have had and the reason."""
        for node in self.neighbours(t.members, backward=False):
            if self.facts.kind(node) == "own":
                continue
            members = sorted((*t.members, node.id))
            outputs = self.facts.outputs(members, set(members))
            before = t.after + self.pricing.single(node.id)
            after = self.pricing.group(members, outputs)
            reason = refused.get(node.id)
            compute = 0
            if reason is None:
                reason, compute = self.why_refused(t, node)
            score = self.gate.score_ps(fusion_benefit(before, after))
            region, where = tuple(members), self.where((t.members[0], node.id))
            pinned = reason == "pinned apart by the user"
            self.log.add(Decision(region, before, after, score, compute, False, reason, where, pinned, rule))

    def why_refused(self, t: Trial, node: Node) -> tuple[str, int]:
        """The reason, and the compute in picoseconds that joining would have added."""
        if not (t.span | self.reach.span([node.id])).acyclic:
            return "another kernel between them needs one and feeds the other", 0
        if node.id in self.group_of:
            other = self.groups[self.group_of[node.id]]
            return f"%{node.id} is part of the kernel of %{other.nodes[0]} already", 0
        try:
            wider = t.add(node, self.reach)
        except Misfit as why:
            return str(why), 0
        why_not = wider.fit.refuse_outputs(wider.outputs) or self.kernel_refused(wider)
        compute = elementwise_ps(self.options.device, wider.work_added - t.work_added)
        return why_not or "the gate finds that it does not pay", compute

    # -- recomputing

    def recompute(self) -> None:
        """Dissolve cheap elementwise groups into all of their readers where that pays."""
        order = sorted(self.groups, key=lambda g: -max(self.groups[g].nodes))
        for number in order:
            group, fit = self.groups[number], self.fits[number]
            if fit.kind != "map" or len(group.evaluated) > MOST_RECOMPUTED:
                continue
            readers = self.reader_groups(number)
            if readers and len(readers) <= MOST_READERS:
                self.dissolve(number, readers)

    def outputs_of(self, number: int) -> tuple[int, ...]:
        """Values that a group stores: needed by a kernel that does not compute them itself."""
        group = self.groups[number]
        return tuple(
            i
            for i in group.nodes
            if i in self.facts.kept
            or any(home not in self.homes[i] for r in self.facts.readers.get(i, ()) for home in self.homes[r])
        )

    def reader_groups(self, number: int) -> list[int]:
        """Groups that read a group's values; none if a value must be stored in any case."""
        found: dict[int, None] = {}
        for i in self.outputs_of(number):
            if i in self.facts.kept:
                return []
            for r in self.facts.readers.get(i, ()):
                for home in sorted(self.homes[r]):
                    if home != number:
                        found[home] = None
        return list(found)

    def dissolve(self, number: int, readers: Sequence[int]) -> None:
        nodes = [self.graph.nodes[i] for i in self.groups[number].evaluated]
        if any(self.apart(n.id, self.groups[r].evaluated) for n in nodes for r in readers):
            return
        fits: dict[int, Fit] = {}
        for r in readers:
            try:
                fits[r] = self.fits[r].add_all([n for n in nodes if n.id not in self.fits[r].status])
            except Misfit:
                return
            if len(fits[r].status) > MOST_NODES:
                return
        involved = [number, *readers]
        before, work_before = GraphIoProfile(), 0
        for g in involved:
            before += self.pricing.group(self.groups[g].evaluated, self.outputs_of(g))
            work_before += evaluated_work(self.facts, self.fits[g], self.outputs_of(g))
        after, work_after = GraphIoProfile(), 0
        grown: dict[int, Group] = {}
        for r in readers:
            outputs = self.outputs_of(r)
            copies = sorted(
                {*self.groups[r].copies, *(n.id for n in nodes if n.id not in self.groups[r].nodes)}
            )
            grown[r] = Group(self.groups[r].nodes, tuple(copies))
            after += self.pricing.group(grown[r].evaluated, outputs)
            work_after += evaluated_work(self.facts, fits[r], outputs)
            try:
                region, _ = self.maker.region(grown[r], outputs)
            except ComposeError:
                return
            if self.unsupported(region) is not None:
                return
        compute = elementwise_ps(self.options.device, work_after - work_before)
        members = sorted({i for g in involved for i in self.groups[g].evaluated})
        made = decide(
            self.gate,
            members,
            before,
            after,
            compute,
            rule="recompute",
            where=self.where(n.id for n in nodes),
        )
        self.log.add(made)
        if not made.verdict:
            return
        for n in nodes:
            self.homes[n.id] = (self.homes[n.id] - {number}) | set(readers)
        for r in readers:
            self.groups[r], self.fits[r] = grown[r], fits[r]
        del self.groups[number]
        for n in nodes:
            if self.group_of.get(n.id) == number:
                del self.group_of[n.id]


def fuse(graph: Graph, options: Options | None = None) -> tuple[Graph, DecisionLog]:
    """Replace groups of ops by region nodes; also gives the record of every decision."""
    fuser = Fuser(graph, options or Options(default_gate("cpu")))
    fuser.run()
    groups = list(fuser.groups.values())
    outputs = {group: fuser.outputs_of(number) for number, group in fuser.groups.items()}
    return emit_graph(fuser.facts, groups, outputs, fuser.maker), fuser.log
