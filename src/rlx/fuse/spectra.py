"""Elementwise ops around Fourier transforms join them: a transform computes what it reads and what it stores.

Results are followed as far as they can be stored at their own point; on the other side, what is only read by
the transform is computed where it is read, unless that computes elements more often than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlx.cost.profile import GraphIoProfile
from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit, Status
from rlx.fuse.trial import Trial
from rlx.ir.graph import Node
from rlx.kernel.legality import MOST_OUTPUTS
from rlx.kernel.lowering import lower_node
from rlx.kernel.spectrum import is_transform as has_known_length

if TYPE_CHECKING:
    from rlx.fuse.grow import Fuser

MOST_AHEAD = 12  # ops to look past the best group so far


def surround(fuser: Fuser, root: Node) -> None:
    """Make a transform and the ops around it one kernel, as far as that pays."""
    grower = _Grower(fuser, root)
    best = grower.upwards(grower.downwards())
    fuser.commit(best)
    if len(best.fit.status) > 1:
        fuser.record(best, "transform")


class _Grower:
    def __init__(self, fuser: Fuser, root: Node) -> None:
        self.fuser, self.facts, self.root = fuser, fuser.facts, root

    def downwards(self) -> Trial:
        """The best group with ops that read the transform's results."""
        best = now = self.trial([self.root.id])
        while len(now.fit.status) - len(best.fit.status) <= MOST_AHEAD:
            node = next(self.readers(now), None)
            if node is None:
                break
            now = self.trial([*now.fit.status, node.id])
            if self.better(best, now):
                best = now
        return best

    def readers(self, now: Trial) -> Iterator[Node]:
        """Ops that may join after the others, the first one first."""
        values = [v for i in now.fit.status for v in self.facts.values(i)]
        found = sorted({r for v in values for r in self.facts.readers.get(v, ())} - set(now.fit.status))
        for i in found:
            if self.may_join(now, i):
                yield self.facts.graph.nodes[i]

    def upwards(self, best: Trial) -> Trial:
        """The group with ops that compute what the transform reads."""
        refused: set[int] = set()
        above = {self.root.id}
        while True:
            node = next((n for n in self.producers(best, above) if n.id not in refused), None)
            if node is None:
                return best
            wider = self.trial([*best.fit.status, node.id])
            if self.better(best, wider):
                best = wider
                above.add(node.id)
            else:
                refused.add(node.id)

    def producers(self, now: Trial, above: set[int]) -> Iterator[Node]:
        """Ops that only these members read, and none of whose elements would be computed twice."""
        facts, inside = self.facts, set(now.fit.status)
        for i in sorted(above, reverse=True):
            for access in facts.accesses(facts.graph.nodes[i]):
                root = access.root
                if root in inside or root in facts.kept or not self.may_join(now, root):
                    continue
                readers = facts.readers[root]
                if set(readers) <= above and (
                    facts.dearest(facts.graph.nodes[root]) == 0
                    or self.evaluations(root, above) <= self.elements(root)
                ):
                    yield facts.graph.nodes[root]

    def evaluations(self, i: int, above: set[int]) -> int:
        """How often elements of a value are computed if its readers compute them in place."""
        if i == self.root.id:
            return 1
        total = 0
        for r in self.facts.readers[i]:
            if r not in above:
                continue
            reads = [a for a in self.facts.accesses(self.facts.graph.nodes[r]) if a.root == i]
            if r == self.root.id:
                total += sum(self.facts.io.elements(a.operand) for a in reads)
            else:
                total += len(reads) * self.evaluations(r, above)
        return total

    def elements(self, i: int) -> int:
        return self.facts.io.elements(self.facts.graph.nodes[i])

    def may_join(self, now: Trial, i: int) -> bool:
        fuser, members = self.fuser, now.members
        if i in fuser.group_of or i not in fuser.reach or fuser.apart(i, members):
            return False
        if self.facts.kind(self.facts.graph.nodes[i]) != "map":
            return False
        return (now.span | fuser.reach.span([i])).acyclic

    def better(self, best: Trial, now: Trial) -> bool:
        """Whether a group can be one kernel and saves more than the best one so far."""
        fuser = self.fuser
        if len(now.outputs) > MOST_OUTPUTS["transform"] or fuser.kernel_refused(now) is not None:
            return False
        return fuser.gain(now) >= fuser.gain(best) + fuser.gate.least_gain_ps or fuser.wishes(
            now
        ) > fuser.wishes(best)

    def trial(self, members: Iterable[int]) -> Trial:
        """The price of a group; results of the transform inside are read from no memory."""
        facts, pricing = self.facts, self.fuser.pricing
        own = sorted(members)
        inside = {*own, *(v for i in own for v in facts.values(i))}
        before, reads = GraphIoProfile(), dict[int, int]()
        for i in own:
            before += pricing.single(i)
            for read, count in facts.io.reads(facts.graph.nodes[i]).items():
                if read not in inside:
                    reads[read] = reads.get(read, 0) + count
        outputs = tuple(facts.outputs(own, set(own)))
        fit = Fit(facts, dict.fromkeys(own, Status.FULL), "transform")
        return Trial(pricing, fit, self.fuser.reach.span(own), outputs, before, reads, True)


def is_transform(facts: Facts, node: Node) -> bool:
    """Whether a node is a Fourier transform that ops may join."""
    return node.op.family == "fourier" and has_known_length(lower_node(node))
