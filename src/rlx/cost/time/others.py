"""Kernels of their own kind: Fourier transforms, scatter, sort, running sums, templates."""

from __future__ import annotations

from math import log2, prod

from rlx.cost.time.bodies import evaluated
from rlx.cost.time.owners import Share
from rlx.cost.time.reads import LINE_BYTES
from rlx.cost.time.work import ANY_SHARE, Setting, Work
from rlx.kernel.form import Cumulate, Scatter, Sort, Template
from rlx.kernel.nests import Opaque, TransformNest

BUTTERFLY = 4.0  # operations per element and level of a Fourier transform
PIECE = 32  # elements of a row of gathered columns that a thread takes at a time
COMPARED = 2.0  # elements that a step of a sort moves


def transform_work(nest: TransformNest, at: Setting) -> Work:
    """What Fourier transforms of rows do."""
    rates, lanes, outer = at.rates, at.target.lanes(nest.dtype.name), [at.size(d) for d in nest.rows]
    rows, n = prod(outer), nest.n if nest.kind == "complex" else max(nest.n // 2, 1)
    work, read, written = Work(units=rows), [*outer, nest.read], [*outer, nest.written]
    source = evaluated(at, nest.sources, read)
    end = evaluated(at, [s.body for s in nest.stores], written)
    work.compute_ps = rows * nest.read / lanes * source.vector_ps(rates, lanes, len(outer), 1)
    work.compute_ps += rows * BUTTERFLY * n * max(log2(n), 1.0) / lanes * rates.op_ps
    work.compute_ps += rows * nest.written / lanes * end.vector_ps(rates, lanes, len(outer), len(nest.stores))
    work.compute_ps += rows * rates.row_ps
    first = next((a for a, extent in enumerate(read) if extent > 1), 0)
    for r in source.reads:
        step = abs(r.steps[first] or 0) * r.itemsize
        share = Share(step, read[first]) if step else Share()
        work.read(r.operand, r.footprint(read, at.nbytes[r.operand]), share)
    work.end(at, end.reads, written, len(nest.stores), Share(1, rows).of(at.nbytes[at.operands]))
    return work


def opaque_work(kernel: Opaque, at: Setting) -> Work:
    """What a kernel of its own kind does."""
    form, work, rates = kernel.form, Work(), at.rates
    if isinstance(form, Scatter):
        points, item = prod(map(at.size, form.space)), at.itemsizes[at.operands]
        work.compute_ps = points * (rates.load_ps if form.is_box else 2 * rates.gather_ps)
        work.add_inner("l2", points * (item if form.is_box else LINE_BYTES))
        for operand in (form.base, at.operands):
            work.read(operand, at.nbytes[operand], Share())
        return work
    if isinstance(form, Template) and form.kind == "gather_stored":
        return _gathered(at)
    for operand, nbytes in enumerate(at.nbytes):
        work.read(operand, nbytes, Share())
    if isinstance(form, Sort):
        *outer, n = (at.size(d) for d in form.shape)
        work.compute_ps = prod(outer) * n * max(log2(max(n, 2)), 1.0) * COMPARED * rates.gather_ps
        work.units = prod(outer)
    elif isinstance(form, Cumulate):
        space = [at.size(d) for d in form.space]
        rows, beside = prod(space[: form.axis]), prod(space[form.axis + 1 :])
        chains = max(beside / at.lanes, 1.0)
        work.compute_ps = rows * space[form.axis] * chains * max(rates.chain_ps, 2 * rates.load_ps)
        work.units = max(int(rows * chains), 1)
    else:  # an instruction for each element
        work.compute_ps = sum(n / item for n, item in zip(at.nbytes, at.itemsizes, strict=True)) * rates.op_ps
        work.units = ANY_SHARE
    return work


def _gathered(at: Setting) -> Work:
    """Columns of panels as rows: every element is in a cache line of its own."""
    indices, rows = 1, at.operands
    elements = at.nbytes[rows] // at.itemsizes[rows]
    work = Work(elements * at.rates.gather_ps, max(elements // PIECE, 1))
    lines = min(elements * LINE_BYTES, at.nbytes[0])
    work.read(0, lines, Share())
    work.read(indices, at.nbytes[indices], Share())
    work.read(rows, at.nbytes[rows], Share(PIECE * at.itemsizes[rows], max(elements // PIECE, 1)))
    return work
