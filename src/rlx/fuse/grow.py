"""Fusion under the gate: which ops become one kernel, and why.

Kernels grow from seeds: contractions and convolutions first (elementwise ops after them become epilogues),
then reductions (with what feeds and follows them), then what is left of elementwise chains. A group grows op
by op, also past points where it would store more values than it may, and the best point on the way is kept:
best by the IO that is saved, as the gate prices it, minus the compute that is added. At last, what is left of
elementwise chains may be computed by the kernels that read it instead of stored: again by each of several
readers, or as the prologue of a contraction. Every yes and no is a `Decision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlx.cost.decision import Decision, DecisionLog, decide
from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel
from rlx.cost.profile import GraphIoProfile, fusion_benefit
from rlx.fuse.attend import Candidate, attention_candidates
from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit, Misfit, Status
from rlx.fuse.reach import Reach
from rlx.fuse.regions import Group, Region, RegionMaker, emit_graph
from rlx.fuse.spectra import is_transform, surround
from rlx.fuse.trial import Pricing, Trial
from rlx.ir.dim import sym
from rlx.ir.dims.choice import CHOICES, Choice
from rlx.ir.graph import Graph, Node
from rlx.ir.types import TensorType
from rlx.kernel.nests import ComposeError, Kernel
from rlx.kernel.rounding import rounds_by_kernel
from rlx.records import dataclass
from rlx.target.prices import Machine

MOST_NODES = 64  # ops in one kernel
MOST_AHEAD = 12  # ops to look past the best group so far
MOST_TRIAL_OUTPUTS = 6  # values that a group may need to store while it grows
MOST_RECOMPUTED = 8  # ops that are computed again by each reader
MOST_PROLOGUE = 24  # ops that a contraction computes before it, if no other kernel needs them
MOST_READERS = 24
APART = "pinned apart by the user"

Pins = Mapping[tuple[int, int], bool]
Supports = Callable[[Kernel, Sequence[TensorType]], str | None]


@dataclass(frozen=True)
class FuseOptions:
    """What decides about fusion besides the graph."""

    gate: IoFusionGate
    machine: Machine
    assume: Mapping[str, int] | None = None
    pins: Pins | None = None
    supports: Supports = lambda kernel, types: None


class Fuser:
    """Groups of one graph, and the decisions behind them."""

    def __init__(self, graph: Graph, options: FuseOptions) -> None:
        self.graph, self.options, self.gate = graph, options, options.gate
        self.facts = Facts(graph, IoModel(graph, options.assume))
        self.reach = Reach(self.facts)
        self.maker = RegionMaker(self.facts)
        self.log = DecisionLog()
        self.group_of: dict[int, int] = {}  # node -> number of the group that owns it
        self.groups: dict[int, Group] = {}
        self.fits: dict[int, Fit] = {}
        self.homes: dict[int, set[int]] = {}  # node -> groups that evaluate it
        self.pricing = Pricing(self.facts, options.machine)
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
            if is_transform(self.facts, node):
                surround(self, node)
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
        if (
            i in self.facts.kept or i not in self.facts.readers
        ):  # readers of an op with several results read those
            return True
        own = self.homes.get(i, set())
        readers = self.facts.readers.get(i, ())
        return any(r not in self.homes or not self.homes[r] <= own for r in readers)

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
            why = APART
        gain = self.gain(start)
        if why is None and gain < self.gate.least_gain_ps and not self.wishes(start):
            why = "the gate finds that it does not pay"
        if why is None:
            self.grow(start, "attention", backward=False, kinds=("map",))
            return
        where = self.where((candidate.first, candidate.second))
        score = self.gate.score_ps(fusion_benefit(start.before, start.after))
        compute, nodes = start.compute_ps_added, candidate.nodes
        self.log.add(
            Decision(nodes, start.before, start.after, score, compute, False, why, where, apart, "attention")
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
                refused[node.id] = APART
                continue
            span = now.span | self.reach.span([node.id])
            if not span.acyclic:
                continue  # the ops between may join later, and then this too
            if not self._pinned and self.better_elsewhere(now, node):
                refused[node.id] = "its reader can compute it from values that are stored anyway"
                continue
            try:
                wider = now.add(node, span)
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
        return score - t.compute_ps_added

    def better_elsewhere(self, now: Trial, node: Node) -> bool:
        """Whether an op is better computed by its only reader, from values that are stored in any case."""
        readers = self.facts.readers.get(node.id, ())
        if node.id in self.facts.kept or len(readers) != 1 or self.facts.kind(node) != "map":
            return False
        reader = self.graph.nodes[readers[0]]
        if reader.id in now.fit.status or reader.id in self.group_of:
            return False
        if self.facts.kind(reader) not in ("map", "reduce"):
            return False
        io = self.facts.io
        saved = 2 * io.bytes(node)
        for root, count in io.reads(node).items():
            if root in now.fit.status and not self.is_stored(root):
                return False
            saved -= count * self.graph.nodes[root].dtype.itemsize
        return saved > 0

    def is_stored(self, i: int) -> bool:
        """Whether a value goes to memory whatever is fused: an output, or read from memory."""
        readers = (self.graph.nodes[r] for r in self.facts.readers.get(i, ()))
        return i in self.facts.kept or any(self.facts.kind(r) not in ("map", "reduce") for r in readers)

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
            for v in (i, *self.facts.values(i)):
                self.homes.setdefault(v, set()).add(number)
        self.reach.join(group.nodes, single_output=len(t.outputs) == 1)

    # -- pins

    def apart(self, i: int, members: Sequence[int]) -> bool:
        return any(b in members and not together for b, together in self._pinned.get(i, ()))

    def together(self, i: int, members: Sequence[int]) -> bool:
        return any(b in members and together for b, together in self._pinned.get(i, ()))

    def wishes(self, t: Trial) -> int:
        """Pinned pairs that are together in a group."""
        if not self._pinned:
            return 0
        inside = t.fit.status
        return sum(together and b in inside for i in inside for b, together in self._pinned.get(i, ()))

    # -- records

    def record(self, t: Trial, rule: str) -> None:
        pin = True if self.wishes(t) else None
        compute = t.compute_ps_added
        where = self.where(t.members)
        self.log.add(
            decide(self.gate, t.members, t.before, t.after, compute, rule=rule, where=where, pin=pin)
        )

    def where(self, members: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w for i in members for w in self.graph.nodes[i].where))

    def record_refusals(self, t: Trial, rule: str, refused: Mapping[int, str]) -> None:
        """Neighbours that stayed outside, each with the price it would have had and the reason."""
        for node in self.neighbours(t.members, backward=False):
            if self.facts.kind(node) == "own" or self.may_become_prologue(t, node):
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
            pinned = reason == APART
            self.log.add(Decision(region, before, after, score, compute, False, reason, where, pinned, rule))

    def may_become_prologue(self, t: Trial, node: Node) -> bool:
        """Whether a map is yet to be tried as the prologue of a contraction that reads it."""
        reads = [a.root for a in self.facts.accesses(node) if a.how == "rows" and a.root in t.fit.status]
        return t.fit.kind == "map" and bool(reads) and not any(i in self.facts.kept for i in reads)

    def why_refused(self, t: Trial, node: Node) -> tuple[str, int]:
        """The reason, and the compute in picoseconds that joining would have added."""
        if self.apart(node.id, t.members):
            return APART, 0
        try:
            wider = t.add(node, t.span | self.reach.span([node.id]))
        except Misfit as why:
            return str(why), 0
        compute = wider.compute_ps_added - t.compute_ps_added
        if not wider.span.acyclic:
            return "another kernel between them needs one and feeds the other", compute
        if node.id in self.group_of:
            others = [i for i in self.groups[self.group_of[node.id]].nodes if i != node.id]
            beside = f" with %{others[0]}" if others else " of its own"
            return f"%{node.id} is in a kernel{beside} already", compute
        why_not = wider.fit.refuse_outputs(wider.outputs) or self.kernel_refused(wider)
        return why_not or "the gate finds that it does not pay", compute

    # -- recomputing

    def recompute(self) -> None:
        """Let readers compute cheap values themselves, instead of storing them, where that pays."""
        stored = [i for number in self.groups for i in self.outputs_of(number)]
        for i in sorted(stored, reverse=True):
            number = self.group_of.get(i)
            if number is None or i in self.facts.kept or not self.is_needed(i):
                continue
            if self.fits[number].status[i] is not Status.FREE:
                continue
            needed = self.closure(i, number)
            readers = self.reader_groups(i, number)
            alone = len(readers) == 1 and self.reads_rows(readers[0], i)  # nothing is computed twice
            most = MOST_PROLOGUE if alone else MOST_RECOMPUTED
            if readers and len(readers) <= MOST_READERS:
                if len(needed) <= most:
                    self.spread(i, needed, number, readers)
                else:
                    self.refuse_spread(i, needed, readers, f"{len(needed)} ops are more than {most}")
        while idle := [number for number in self.groups if not self.outputs_of(number)]:
            for number in idle:  # its last reader is gone, because others compute what that one did
                self.drop_unneeded(number)

    def closure(self, i: int, number: int) -> list[Node]:
        """A value and what its group computes for it, from values that are stored anyway."""
        inside = {k for k in self.groups[number].evaluated if not self.is_stored(k)}
        found, stack = {i}, [i]
        while stack:
            for access in self.facts.accesses(self.graph.nodes[stack.pop()]):
                if access.root in inside and access.root not in found:
                    found.add(access.root)
                    stack.append(access.root)
        return [self.graph.nodes[k] for k in sorted(found)]

    def outputs_of(self, number: int) -> tuple[int, ...]:
        """Values that a group stores: needed by a kernel that does not compute them itself."""
        values = (v for i in self.groups[number].nodes for v in self.facts.values(i))
        return tuple(v for v in values if self.is_needed(v))

    def reader_groups(self, i: int, number: int) -> list[int]:
        """Groups that read a value from memory, and store anything themselves: others are about to go."""
        homes = (home for r in self.facts.readers.get(i, ()) for home in sorted(self.homes[r]))
        return [h for h in dict.fromkeys(homes) if h not in self.homes[i] and self.outputs_of(h)]

    def spread(self, i: int, needed: Sequence[Node], number: int, readers: Sequence[int]) -> None:
        """Copy what a value needs into the groups that read it, if they can take it and the gate agrees."""
        if any(self.apart(n.id, self.groups[r].evaluated) for n in needed for r in readers):
            return self.refuse_spread(i, needed, readers, APART)
        grown: dict[int, tuple[Group, Fit]] = {}
        for r in readers:
            copied = self.with_copies(r, needed)
            if isinstance(copied, str):
                return self.refuse_spread(i, needed, readers, copied)
            grown[r] = copied
        involved = [number, *readers]
        before, work_before = self.cost_of(involved)
        undo = {g: (self.groups[g], self.fits[g]) for g in involved}
        homes = {n.id: set(self.homes[n.id]) for n in needed}
        for r in readers:
            self.groups[r], self.fits[r] = grown[r]
            for n in needed:
                self.homes[n.id].add(r)
        self.drop_unneeded(number)
        after, work_after = self.cost_of([g for g in involved if g in self.groups])
        compute = work_after - work_before
        region = sorted({m for group, _ in undo.values() for m in group.evaluated})
        where = self.where([i])
        rule = self.spread_rule(i, readers)
        wished = any(self.together(n.id, self.groups[r].nodes) for n in needed for r in readers)
        pin = True if wished else None
        made = decide(self.gate, region, before, after, compute, rule=rule, where=where, pin=pin)
        why = next(filter(None, map(self.group_refused, readers)), None) if made.verdict else None
        if why is not None:
            made = replace(made, verdict=False, reason=why)
        self.log.add(made)
        if not made.verdict:
            for g, (group, fit) in undo.items():
                self.groups[g], self.fits[g] = group, fit
                self.group_of.update(dict.fromkeys(group.nodes, g))
            self.homes.update(homes)

    def reads_rows(self, number: int, i: int) -> bool:
        """Whether a group's contraction would compute a value as its left operand."""
        nodes = (self.graph.nodes[n] for n in self.groups[number].nodes)
        return any(a.root == i and a.how == "rows" for n in nodes for a in self.facts.accesses(n))

    def spread_rule(self, i: int, readers: Sequence[int]) -> str:
        return "prologue" if any(self.reads_rows(r, i) for r in readers) else "recompute"

    def refuse_spread(self, i: int, needed: Sequence[Node], readers: Sequence[int], why: str) -> None:
        """Record a prologue that cannot be, with what it would have saved."""
        rule = self.spread_rule(i, readers)
        if rule != "prologue":
            return  # values that every kernel reads from memory are the usual case
        number, inside = self.group_of[i], {n.id for n in needed}
        before, after = GraphIoProfile(), GraphIoProfile()
        for g in (number, *readers):
            members, outputs = self.groups[g].evaluated, self.outputs_of(g)
            before += self.pricing.group(members, outputs)
            if g != number:
                after += self.pricing.group({*members, *inside}, outputs)
            elif set(outputs) != {i}:
                after += self.pricing.group(members, [v for v in outputs if v != i])
        region = sorted({*inside, *(m for r in readers for m in self.groups[r].evaluated)})
        score = self.gate.score_ps(fusion_benefit(before, after))
        where, pinned = self.where([i]), why == APART
        self.log.add(Decision(tuple(region), before, after, score, 0, False, why, where, pinned, rule))

    def with_copies(self, number: int, needed: Sequence[Node]) -> tuple[Group, Fit] | str:
        """A group that computes more values for itself, or why it cannot."""
        group, fit = self.groups[number], self.fits[number]
        if fit.kind == "transform":
            return "a transform has taken what it wants to compute itself"
        try:
            wider = fit.add_all([n for n in needed if n.id not in fit.status])
        except Misfit as why:
            return str(why)
        if len(wider.status) > MOST_NODES:
            return f"a kernel has at most {MOST_NODES} ops"
        copies = {*group.copies, *(n.id for n in needed if n.id not in group.nodes)}
        return Group(group.nodes, tuple(sorted(copies))), wider

    def drop_unneeded(self, number: int) -> None:
        """Remove a group that stores nothing any more."""
        if not self.outputs_of(number):
            group = self.groups.pop(number)
            for i in group.nodes:
                del self.group_of[i]
            for i in group.evaluated:
                self.homes[i].discard(number)

    def cost_of(self, numbers: Sequence[int]) -> tuple[GraphIoProfile, int]:
        """IO of groups as they are, and picoseconds of computing."""
        io, work = GraphIoProfile(), 0
        for g in numbers:
            outputs = self.outputs_of(g)
            io += self.pricing.group(self.groups[g].evaluated, outputs)
            work += self.pricing.work.evaluated_ps(self.fits[g], outputs)
        return io, work

    def group_refused(self, number: int) -> str | None:
        """Why the backend has no kernel for a group."""
        try:
            region, _ = self.maker.region(self.groups[number], self.outputs_of(number))
        except ComposeError as why:
            return why.message
        return self.unsupported(region)


def fuse(graph: Graph, options: FuseOptions) -> tuple[Graph, DecisionLog]:
    """Replace groups of ops by region nodes; also gives the record of every decision."""
    fuser = _grouped(graph, options)
    groups = list(fuser.groups.values())
    outputs = {group: fuser.outputs_of(number) for number, group in fuser.groups.items()}
    return emit_graph(fuser.facts, groups, outputs, fuser.maker), fuser.log


def _grouped(graph: Graph, options: FuseOptions) -> Fuser:
    """Groups at the assumed sizes; those of a call, where groups show in the bits of what it returns."""
    choices = CHOICES.get()

    def grouped(sizes: Mapping[str, int] | None) -> Fuser:
        fuser = Fuser(graph, replace(options, assume=sizes))
        fuser.run()
        return fuser

    if choices is None or not rounds_by_kernel(graph):
        return grouped(options.assume)
    names = [name for name in graph.symbols() if name in choices.sizes]

    def groups_at(*sizes: int) -> frozenset[Group]:
        return frozenset(
            grouped({**(options.assume or {}), **dict(zip(names, sizes, strict=True))}).groups.values()
        )

    fuser = grouped({**(options.assume or {}), **choices.sizes})
    if names:
        symbolic = tuple(sym(name) for name in names)
        choices.made.append(Choice(groups_at, symbolic, frozenset(fuser.groups.values())))
    return fuser
