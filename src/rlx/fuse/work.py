"""Scalar operations of a kernel, compared with those of its ops as separate kernels.

A value inside a kernel is evaluated wherever it is read: once per point of a larger space it is broadcast to,
once per different index, and again in every pass over a row. That is what fusion pays for not storing it.

A contraction computes rows of its left operand block by block. With weights in panels a block meets all
columns, else it is computed again for every group of columns; where rows are too few to be shared, every
thread computes all of them. A convolution computes lines of its image band by band, and those that windows of
two bands reach twice; where weights outweigh the image, every thread computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.fuse.facts import Facts
from rlx.fuse.fit import Fit, Status
from rlx.ir.graph import Node
from rlx.kernel.form import Contract, Conv
from rlx.target.prices import Prices


def separate_work(facts: Facts, fit: Fit) -> int:
    """Operations of a fit's ops as separate kernels."""
    inner = (i for i, status in fit.status.items() if status is not Status.INNER)
    return sum(facts.work(n) * facts.points(n) for n in (facts.graph.nodes[i] for i in inner))


def evaluated_work(facts: Facts, fit: Fit, outputs: Sequence[int]) -> int:
    """Operations of one kernel over all members of a fit."""
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
        total += _cost(facts.work(node), passes, facts.prices)
        for access in facts.accesses(node):
            inner = needed.get(access.root)
            if inner is None:
                continue
            if fit.status[access.root] is Status.ROW:
                inner[-2] = max(inner.get(-2, 0), rows)
                continue
            if access.how == "rows":
                inner[i] = computed_elements(facts, node)
                total += _scratch_work(facts, node)
                continue
            for number, count in passes.items():
                had = inner.get(number, 0)
                inner[number] = max(had, count) if access.pointwise else had + count // access.once_per
    return total


def computed_elements(facts: Facts, node: Node) -> int:
    """Elements of the first operand that a contraction or convolution computes, if that is not in memory."""
    form, elements = facts.form(node), facts.io.elements(node.operands[0])
    if isinstance(form, Conv):
        return _computed_in_bands(facts, form)
    assert isinstance(form, Contract)
    summed = [i for i, _ in form.contract]
    rows = facts.io.points(d for i, d in enumerate(form.lhs) if i not in summed)
    times = 1 if rows >= facts.prices.shared_rows else facts.prices.cores
    if node.operands[1].reader_side:
        return times * elements
    joined = [j for _, j in (*form.batch, *form.contract)]
    columns = facts.io.points(d for j, d in enumerate(form.rhs) if j not in joined)
    return max(times, -(-columns // facts.prices.group_columns)) * elements


def _scratch_work(facts: Facts, node: Node) -> int:
    """Operations that a kernel loses because it reads what it computes from scratch: none if it copies its
    image in any case (padding, planes), or if all of it stays in a core's caches."""
    form, io = facts.form(node), facts.io
    if not isinstance(form, Conv) or not node.operands[0].reader_side:
        return 0
    image, padded = io.points(form.x), any(io.size(p) for pair in form.padding for p in pair)
    return 0 if padded or 4 * image <= facts.prices.band_bytes else facts.prices.in_place_operations * image


def _computed_in_bands(facts: Facts, form: Conv) -> int:
    """Elements of an image that a convolution computes."""
    io = facts.io
    image = io.points(form.x)
    times = facts.prices.cores if io.points(form.w) > image else 1
    if len(form.strides) < 2:
        return times * image
    stride, reach = form.strides[-2], (io.size(form.w[-2]) - 1) * form.dilations[-2] + 1
    line = 4 * io.size(form.x[1]) * io.size(form.x[-1])
    fit = stride * (max(facts.prices.band_bytes // max(line, 1) - reach, 0) // stride + 1)
    return times * image * (fit + max(reach - stride, 0)) // fit


def _cost(work: int, passes: dict[int, int], prices: Prices) -> int:
    if not passes:
        return 0
    if work < prices.saved_operations or len(passes) == 1:
        return work * sum(passes.values())
    first, *rest = sorted(passes.values(), reverse=True)
    return work * first + prices.reload_operations * sum(rest)
