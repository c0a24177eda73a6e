"""How long a kernel computes, compared with its ops as separate kernels.

A value inside a kernel is evaluated wherever it is read: once per point of a larger space it is broadcast to,
once per different index, and again in every pass over a row. That is what fusion pays for not storing it.

A contraction computes rows of its left operand block by block. With weights in panels a block meets all
columns, else it is computed again for every group of columns; where rows are too few to be shared, every
thread computes all of them. A convolution computes lines of its image band by band, and those that windows of
two bands reach twice; where weights outweigh the image, every thread computes all of it.

Times are of the whole device. Instructions are counted by kind (`rlx.cost.instructions`), and what one takes
is of the target that kernels are for (`Machine.again`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit, Status
from rlx.ir.graph import Node
from rlx.kernel.form import Contract, Conv
from rlx.target.prices import Machine


class Work:
    """Prices what kernels over ops of a graph compute, at the assumed sizes."""

    def __init__(self, facts: Facts, machine: Machine) -> None:
        self.facts, self.prices, self.again = facts, machine.prices, machine.again
        self._point_fs: dict[int, int] = {}

    def point_fs(self, node: Node) -> int:
        """Femtoseconds of a map or reduction at one point."""
        known = self._point_fs.get(node.id)
        if known is None:
            known = self._point_fs[node.id] = self.facts.work(node).femtoseconds(self.again)
        return known

    def separate_ps(self, fit: Fit) -> int:
        """Picoseconds of a fit's ops as separate kernels."""
        facts = self.facts
        inner = (i for i, status in fit.status.items() if status is not Status.INNER)
        return _picoseconds(
            sum(self.point_fs(n) * facts.points(n) for n in (facts.graph.nodes[i] for i in inner))
        )

    def evaluated_ps(self, fit: Fit, outputs: Sequence[int]) -> int:
        """Picoseconds of one kernel over all members of a fit."""
        facts = self.facts
        nodes, io = facts.graph.nodes, facts.io
        members = sorted((i for i, status in fit.status.items() if status is not Status.INNER), reverse=True)
        rows = 1
        if fit.space is not None:
            rows = io.points(d for i, d in enumerate(fit.space) if i not in fit.axes)
        needed: dict[int, dict[int, int]] = {i: {} for i in members}  # member -> pass -> evaluations
        for i in outputs:
            node = nodes[i]
            by_row = fit.status[i] is Status.ROW
            needed[i][-1] = rows if by_row else io.elements(node)
        total = 0
        for i in members:
            node, passes = nodes[i], needed[i]
            reduction = facts.kind(node) == "reduce"
            if reduction and passes:
                passes = {i: facts.points(node)}
            total += self._node_fs(node, passes)
            for access in facts.accesses(node):
                inner = needed.get(access.root)
                if inner is None:
                    continue
                if fit.status[access.root] is Status.ROW:
                    inner[-2] = max(inner.get(-2, 0), rows)
                    continue
                if access.how == "rows":
                    inner[i] = self.computed_elements(node)
                    total += self._scratch_fs(node)
                    continue
                for number, count in passes.items():
                    had = inner.get(number, 0)
                    inner[number] = max(had, count) if access.pointwise else had + count // access.once_per
        return _picoseconds(total)

    def computed_elements(self, node: Node) -> int:
        """Elements of the first operand of a contraction or convolution, if that computes them."""
        facts = self.facts
        form, elements = facts.form(node), facts.io.elements(node.operands[0])
        if isinstance(form, Conv):
            return self._computed_in_bands(form)
        assert isinstance(form, Contract)
        summed = [i for i, _ in form.contract]
        rows = facts.io.points(d for i, d in enumerate(form.lhs) if i not in summed)
        times = 1 if rows >= self.prices.shared_rows else self.prices.cores
        if node.operands[1].reader_side:
            return times * elements
        joined = [j for _, j in (*form.batch, *form.contract)]
        columns = facts.io.points(d for j, d in enumerate(form.rhs) if j not in joined)
        return max(times, -(-columns // self.prices.group_columns)) * elements

    def _scratch_fs(self, node: Node) -> int:
        """What a kernel loses because it reads what it computes from scratch: nothing if it copies its image
        in any case (padding, planes), or if all of it stays in a core's caches."""
        form, io = self.facts.form(node), self.facts.io
        if not isinstance(form, Conv) or not node.operands[0].reader_side:
            return 0
        image, padded = io.points(form.x), any(io.size(p) for pair in form.padding for p in pair)
        in_caches = 4 * image <= self.prices.band_bytes
        return 0 if padded or in_caches else 1000 * self.prices.in_place_ps * image

    def _computed_in_bands(self, form: Conv) -> int:
        """Elements of an image that a convolution computes."""
        io = self.facts.io
        image = io.points(form.x)
        times = self.prices.cores if io.points(form.w) > image else 1
        if len(form.strides) < 2:
            return times * image
        stride, reach = form.strides[-2], (io.size(form.w[-2]) - 1) * form.dilations[-2] + 1
        line = 4 * io.size(form.x[1]) * io.size(form.x[-1])
        fit = stride * (max(self.prices.band_bytes // max(line, 1) - reach, 0) // stride + 1)
        return times * image * (fit + max(reach - stride, 0)) // fit

    def _node_fs(self, node: Node, passes: dict[int, int]) -> int:
        """Femtoseconds of evaluating a member as often as passes need it, or of loading what one has kept."""
        if not passes:
            return 0
        once = self.point_fs(node)
        if len(passes) == 1 or self.facts.dearest(node) < self.prices.saved_operations:
            return once * sum(passes.values())
        first, *rest = sorted(passes.values(), reverse=True)
        return once * first + self.again.reload_fs * sum(rest)


def _picoseconds(femtoseconds: int) -> int:
    """Rounded up."""
    return -(-femtoseconds // 1000)
