"""Does a set of ops fit one kernel? Decided by how each op reads the values of the others.

A kernel has at most one root: a contraction, a convolution, or reductions that share rows. Relative to it,
every value of the kernel is

    free     it does not depend on the root: it may be read at any index, and is computed where it is read
    full     one value per point of the root's space: it may be read at that point only
    row      one value per row (what a reduction gives): it may be read from its own row only
    placed   a full value in another order of elements: it can be stored so, but not read inside
    inner    a step on the way to the root's value (scores of attention): nobody else may read it

`rlx.kernel.compose` builds the kernel from the same rules; here nothing is built, so a trial takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from enum import Enum

from rlx.fuse.facts import Access, Facts, is_point
from rlx.ir.graph import Node
from rlx.ir.types import Shape
from rlx.kernel import legality
from rlx.kernel.affine import affine
from rlx.kernel.form import Reduce
from rlx.kernel.legality import same_space
from rlx.kernel.order import adds_by_columns, stored_through
from rlx.kernel.panels import stored_blocks
from rlx.kernel.scalar import axes, axis
from rlx.records import dataclass


class Status(Enum):
    """How a value of a kernel depends on its root."""

    FREE = "free"
    FULL = "full"
    ROW = "row"
    PLACED = "placed"
    INNER = "inner"


class Misfit(Exception):
    """Why an op does not fit; never leaves the fuser, where it becomes the reason of a decision."""


def allow(why_not: str | None) -> None:
    """Refuse what a rule of `rlx.kernel.legality` refuses."""
    if why_not is not None:
        raise Misfit(why_not)


@dataclass
class Fit:
    """A set of ops that fits one kernel, as far as reads inside of it go."""

    facts: Facts
    status: dict[int, Status] = field(default_factory=dict)  # members, in the order of the graph
    kind: str = "map"
    space: Shape | None = None  # of the root
    axes: tuple[int, ...] = ()  # reduced ones
    checks: frozenset[int] = frozenset()  # members that may fail on an index from data
    sums: tuple[tuple[int, bool], ...] = ()  # bits of sums that round, and whether they add by columns

    @staticmethod
    def of(facts: Facts, nodes: Iterable[int]) -> Fit:
        """The fit of a set of nodes; Misfit says why there is none."""
        fit = Fit(facts)
        for i in sorted(nodes):
            fit = fit._after(facts.graph.nodes[i])
        return fit

    @staticmethod
    def attention(facts: Facts, nodes: Sequence[int], copies: Sequence[int], root: Node) -> Fit:
        """The fit of two contractions with a softmax between them; only the second one's result is seen."""
        status = dict.fromkeys(sorted((*nodes, *copies)), Status.INNER)
        status[root.id] = Status.FULL
        return Fit(facts, status, "attention", root.shape)

    def add(self, node: Node) -> Fit:
        """The fit with one more node, which may come before or after the others."""
        inside = [r for r in self.facts.readers.get(node.id, ()) if r in self.status]
        if not inside:
            return self._after(node)
        reads = any(a.root in self.status for a in self.facts.accesses(node))
        if self.kind == "attention" and reads:
            raise Misfit("a step inside of attention is read by no other kernel")
        if reads or self.facts.kind(node) != "map":
            return Fit.of(self.facts, (*self.status, node.id))
        return self._before(node, inside)

    def add_all(self, nodes: Sequence[Node]) -> Fit:
        """The fit with more nodes; those that are read come last."""
        fit = self
        for node in sorted(nodes, key=lambda n: -n.id):
            fit = fit.add(node)
        return fit

    # -- adding one node

    def _before(self, node: Node, readers: Sequence[int]) -> Fit:
        """A producer that depends on nothing inside: free, if its readers can compute it in place."""
        self._check_order(node)
        checks = self._checks(node)
        graph = self.facts.graph
        for r in readers:
            reader = graph.nodes[r]
            for access in self.facts.accesses(reader):
                if access.root == node.id:
                    self._may_read_computed(reader, access, checks)
        status = {**self.status, node.id: Status.FREE}
        more = self.checks | {node.id} if checks else self.checks
        return Fit(self.facts, status, self.kind, self.space, self.axes, more, self.sums)

    def _after(self, node: Node) -> Fit:
        """A node that nothing inside reads."""
        self._check_order(node)
        kind = self.facts.kind(node)
        if kind == "map":
            found, out = self._status_of(node, node.shape), self
        elif kind == "reduce":
            out = self._with_rows(node)
            form = self.facts.form(node)
            assert isinstance(form, Reduce)
            if out._status_of(node, form.space) is Status.PLACED:
                raise Misfit("a reduction reads its operand in the order of its own space only")
            found = Status.ROW
        else:
            self._check_prologue(node, kind)
            out = Fit(self.facts, {}, kind, None if kind == "own" else node.shape)
            found = Status.FULL
        checks = out.checks | {node.id} if self._checks(node) else out.checks
        status = {**self.status, node.id: found}
        return Fit(self.facts, status, out.kind, out.space, out.axes, checks, out.sums)

    def _check_prologue(self, node: Node, kind: str) -> None:
        """Whether a root can compute what is there already: its prologue."""
        if not self.status:
            return
        if kind == "own":
            raise Misfit(legality.standing_alone(node.op.name))
        allow(legality.joining(self.kind, kind))
        for access in self.facts.accesses(node):
            if access.root in self.status:
                self._may_read_computed(node, access, access.root in self.checks)
                moved, reads = self._moved(access.root), self._reads_memory(access.root)
                allow(legality.computing_operand(node.op.name, kind, moved, reads))

    def _reads_memory(self, i: int) -> bool:
        """Whether computing a member needs a value from outside."""
        accesses = self.facts.accesses(self.facts.graph.nodes[i])
        return any(a.root not in self.status or self._reads_memory(a.root) for a in accesses)

    def _moved(self, i: int) -> str | None:
        """How a member that only is another value at other places reads it: "regular" or "irregular"."""
        node = self.facts.graph.nodes[i]
        body, accesses = self.facts.body(node), self.facts.accesses(node)
        if body is None or body.prim != "load":
            return None
        regular = all(affine(e, node.rank) is not None for a in accesses for e in self.facts.root_index(a))
        inside = [self._moved(a.root) for a in accesses if a.root in self.status]
        if any(found is None for found in inside):
            return None
        return "regular" if regular and "irregular" not in inside else "irregular"

    def _check_order(self, node: Node) -> None:
        """Pieces need another kernel than values that are read from blocks or stored in them: every piece
        would be read across lanes at every point (96 planes of 160 x 160 from four pieces, one of them a
        product read from blocks: 26 ms in one kernel, 3 ms in three)."""
        joins = node.op.family == "concat"
        if not joins and not self._in_blocks(node):
            return
        for other in (self.facts.graph.nodes[i] for i in self.status):
            if self._in_blocks(other) if joins else other.op.family == "concat":
                raise Misfit("pieces are joined by one kernel, read from blocks or stored in them by another")

    def _in_blocks(self, node: Node) -> bool:
        """Whether a node stores blocks, or reads an operand through a layout of its own."""
        if stored_blocks(node) is not None:
            return True
        for operand in node.operands:
            while self.facts.io.is_view(operand):
                if operand.reader_side:
                    return True
                operand = operand.operands[0]
        return False

    def _with_rows(self, node: Node) -> Fit:
        form = self.facts.form(node)
        assert isinstance(form, Reduce)
        allow(legality.joining(self.kind, "reduce"))
        sums = self.sums
        if form.rounds:
            own = form.body.dtype.bits, adds_by_columns(form, [o.shape for o in node.operands])
            allow(legality.sharing_lanes(*own, sums))
            sums = (*sums, own)
        if self.space is None:
            return Fit(self.facts, self.status, "reduce", form.space, form.axes, self.checks, sums)
        allow(legality.sharing_rows(self.space, self.axes, form.space, form.axes))
        return Fit(self.facts, self.status, "reduce", self.space, self.axes, self.checks, sums)

    def _status_of(self, node: Node, own: Shape) -> Status:
        """The status of a node that evaluates its expression over the space `own`."""
        found = Status.FREE
        for access in self.facts.accesses(node):
            status = self.status.get(access.root)
            if status is None:
                continue
            self._may_read_computed(node, access, access.root in self.checks)
            if status is Status.FREE:
                continue
            if self._in_layout(node, status):
                found = Status.PLACED
                continue
            allow(legality.reading_root(node.op.name, access.how))
            if status is Status.PLACED:
                raise Misfit("a value stored in another order is not read inside its kernel")
            if status is Status.INNER:
                raise Misfit("a step inside of attention is read by no other kernel")
            seen = self._aligned(node, access, status, own)
            if Status.PLACED in (seen, found):
                found = Status.PLACED
            else:
                found = Status.FULL if Status.FULL in (seen, found) else seen
        return found

    def _in_layout(self, node: Node, status: Status) -> bool:
        """Whether a node is the layout that a convolution stores its result in."""
        if self.kind != "conv" or status is not Status.FULL or self.space is None:
            return False
        return stored_blocks(node) is not None and same_space(node.operands[0].shape, self.space)

    def _may_read_computed(self, node: Node, access: Access, checks: bool) -> None:
        attention = self.kind == "attention"
        allow(legality.reading_computed(node.op.name, access.how, checks, attention))

    def _checks(self, node: Node) -> bool:
        """Whether evaluating a node may fail on an index that comes from data."""
        return any(a.how == "checked" or a.root in self.checks for a in self.facts.accesses(node))

    def _aligned(self, node: Node, access: Access, status: Status, own: Shape) -> Status:
        """What reading a value that depends on the root makes of the reader."""
        assert self.space is not None
        index = self.facts.root_index(access)
        if status is Status.FULL:
            if same_space(own, self.space) and is_point(index, axes(len(own)), self.space):
                return Status.FULL
            source = self.facts.graph.nodes[access.root]
            if self.facts.kind(node) == "map" and stored_through(node, source) is not None:
                return Status.PLACED
            raise Misfit(legality.OTHER_POINT)
        kept = [i for i in range(len(self.space)) if i not in self.axes]
        outer = tuple(self.space[i] for i in kept)
        value = self.facts.graph.nodes[access.root]
        if value.rank == len(self.space):  # the reduction kept its axes
            index = tuple(index[i] for i in kept)
        if same_space(own, self.space):
            if is_point(index, [axis(i) for i in kept], outer):
                return Status.FULL
        elif same_space(own, outer):
            if is_point(index, axes(len(outer)), outer):
                return Status.ROW
        elif len(own) == len(self.space) and same_space([own[i] for i in kept], outer):
            if all(own[i] == 1 for i in self.axes) and is_point(index, [axis(i) for i in kept], outer):
                return Status.ROW
        raise Misfit(legality.OTHER_ROW)

    # -- the end

    def refuse_outputs(self, outputs: Sequence[int]) -> str | None:
        """Why a kernel cannot store these values; None if it can."""
        if (why := legality.storing(self.kind, len(outputs))) is not None:
            return why
        shapes = [self.facts.graph.nodes[i].shape for i in outputs]
        if self.kind == "map":
            if any(not same_space(s, shapes[0]) for s in shapes[1:]):
                return "values of different shapes are needed elsewhere"
            return None
        if self.space is None:
            return None
        for i, shape in zip(outputs, shapes, strict=True):
            if self.status[i] is Status.PLACED or same_space(shape, self.space):
                continue
            if self.status[i] is Status.INNER:
                return f"%{i} is a step inside of attention and is needed elsewhere"
            if self.kind == "reduce" and self._row_shaped(shape) and self.status[i] is not Status.FULL:
                continue
            return f"%{i} is needed elsewhere and has another shape than the kernel's space"
        return None

    def _row_shaped(self, shape: Shape) -> bool:
        assert self.space is not None
        kept = [i for i in range(len(self.space)) if i not in self.axes]
        outer = tuple(self.space[i] for i in kept)
        if same_space(shape, outer):
            return True
        full_rank = len(shape) == len(self.space) and all(shape[i] == 1 for i in self.axes)
        return full_rank and same_space([shape[i] for i in kept], outer)
