"""The Fourier kernel: rows of a tensor, real or complex, forward or back, any length known when it is
written.

Where there are enough rows, each lane of a vector transforms one (`fft_lanes`): groups of rows are read along
the row, turned so that lanes are rows, transformed, and turned back. A long row, or one of the few rows left
over, is transformed by itself (`fft_rows`). What is read and stored are expressions, so that elementwise work
before and after the transform happens on the way. Threads share groups and rows; which rows form a group does
not depend on them.

A real row of even length is a complex row of half of it: even elements are real parts, odd ones imaginary.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.fft.group import GroupTransform, Rows
from rlx.codegen.cpu.fft.lanes import LaneShape
from rlx.codegen.cpu.fft.plan import convolution_size, lanes_cost, radices
from rlx.codegen.cpu.fft.rows import RowTransform, row_transform
from rlx.codegen.cpu.fft.single import SingleTransform
from rlx.codegen.cpu.frame import KernelFrame, Slot, product, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.contraction import linear_steps
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import Value
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    Int,
    Word,
    ceildiv,
    gep,
    iota,
    lanes,
    loop,
    masked_store,
    scatter,
    select,
    splat,
    store,
    urem,
)
from rlx.errors import UnsupportedError
from rlx.kernel.nests import Store, TransformNest
from rlx.kernel.scalar import Scalar

MOST_POINTS = 1 << 22
"""Code of a transform holds its factors."""


def is_halved(what: TransformNest) -> bool:
    """Whether real rows are transformed as complex rows of half their length."""
    return what.kind != "complex" and what.n % 2 == 0


def emit_fft(
    module: Module, name: str, what: TransformNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a transform."""
    if what.n > MOST_POINTS:
        raise UnsupportedError(f"a transform of {what.n} points has too many factors to store with its code")
    frame = KernelFrame(module, name, inputs, outputs)
    return write(frame.fn, FftKernel(frame, what).emit)


class FftKernel:
    """Reads, transforms and stores; see the module's text."""

    def __init__(self, frame: KernelFrame, what: TransformNest) -> None:
        self.frame, self.what = frame, what
        self.halved = is_halved(what)
        self.points = what.n // 2 if self.halved else what.n  # of the complex transform inside
        self.width = frame.module.target.lanes(what.dtype.name)
        self.shape = LaneShape(memory_type(what.dtype), self.width)
        self.operands = frame.operands(frame.fn)
        self.sizes = frame.sizes(what.rows)
        self.scratch = 0

    def emit(self) -> EmittedKernel:
        if self.what.n == 0:
            return self.frame.finish()
        last = self.what.rows[-1] if self.sizes else 1
        few = isinstance(last, int) and last < self.width // 2
        if not few and self.votes(self.what.sources, self.what.stores) > 0:
            self.across_rows()
        else:
            self.along_rows()
        return self.frame.finish(self.scratch)

    @inline
    def across_rows(self) -> None:
        """Groups are neighbours along the last row axis, which are adjacent in memory."""
        fn, width = self.frame.fn, self.width
        *outer, last = self.sizes
        blocks = [*outer, ceildiv(last, width)]
        low, high = self.frame.share(product(blocks))
        whole = isinstance(last, int) and last % width == 0
        for u in loop(low, high):
            *lead, block = unflatten(fn, u, blocks)
            start = Word(block) * width
            mask = None if whole else lanes(last - start, width)
            places = [start + i for i in range(width)]
            index = [[*lead, min(place, last - 1)] for place in places]
            exists = [place < last for place in places]
            GroupTransform(self, Rows(index, exists, Lane(len(outer), start, width, mask))).run()

    @inline
    def along_rows(self) -> None:
        """Groups of any rows that follow each other, and single rows."""
        fn, width, total = self.frame.fn, self.width, product(self.sizes)
        single = row_transform(self.frame.module, self.points, self.shape)
        groups, alone = self.split(total, single)
        only_groups = isinstance(alone, int) and alone == 0
        only_rows = isinstance(groups, int) and groups == 0
        low, high = self.frame.share(groups + alone)
        for u in loop(low, high):
            if only_groups or (not only_rows and u < groups):
                start = u * width
                places = [start + i for i in range(width)]
                index = [unflatten(fn, min(place, total - 1), self.sizes) for place in places]
                exists = [place < total for place in places]
                GroupTransform(self, Rows(index, exists, None)).run()
            else:
                assert single is not None
                SingleTransform(self, single, (u - groups) + groups * width).run()

    @inline
    def split(self, total: Word, single: RowTransform | None) -> tuple[Word | int, Word | int]:
        """How many groups there are, the last one perhaps with lanes to spare, and how many rows go alone."""
        width = self.width
        if single is None:
            return ceildiv(total, width), 0
        if single.cost < self.lanes_cost():
            return 0, total
        rest = urem(total, width)
        alone = select(rest < max(width // 4, 2), rest, 0)
        return ceildiv(total - alone, width), alone

    def lanes_cost(self) -> float:
        n = self.points
        cost = lanes_cost(n, self.shape.bytes)
        return cost if radices(n) is not None else 2 * (cost + 2) * convolution_size(n) / n

    def need(self, nbytes: int) -> None:
        """Ask for scratch."""
        self.scratch = max(self.scratch, nbytes)

    def lane(self, t: Int, mask: Value | None) -> Lane:
        """Lanes along the row."""
        return Lane(len(self.sizes), t, self.width, mask)

    def point(self, row: Sequence[Value | int], t: Int, lane: Lane, accs: Sequence[Value] = ()) -> Expression:
        """Expressions at element or result t of a row."""
        frame = self.frame
        return Expression(frame.fn, frame.dim, self.operands, [*row, t], lane, accs, error=frame.error)

    @inline
    def put(self, number: int, x: Value, index: Sequence[Value | int], lane: Lane) -> None:
        """Store neighbours along the lane's axis."""
        frame, strides = self.frame, self.what.stores[number].strides
        fn, dtype = frame.fn, frame.outputs[number].dtype
        offset: Word | int = 0
        for i, stride in zip(index, strides, strict=True):
            offset += Word(i) * frame.dim(fn, stride)
        place = gep(frame.output(number).pointer, offset, memory_type(dtype))
        value = to_memory(fn, x, dtype)
        step = strides[lane.axis]
        if step != 1:
            steps = iota(self.width) * splat(frame.dim(fn, step), self.width, "i64")
            scatter(value, place, steps, lane.mask)
        elif lane.mask is None:
            store(value, place)
        else:
            masked_store(value, place, lane.mask)

    def lies_across(self, source: Scalar) -> bool:
        """Whether neighbours in memory of what is read belong to neighbouring rows, not to one row."""
        return self.votes([source], []) > 0

    def votes(self, sources: Sequence[Scalar], stores: Sequence[Store]) -> int:
        """Loads and stores that are contiguous across rows, less those that are so along them."""
        rank, total = len(self.sizes) + 1, 0
        if rank < 2:
            return 0
        steps = [s.strides for s in stores]
        for e in (e for s in sources for e in s.walk() if e.prim == "load"):
            found = linear_steps(e, self.frame.inputs[e.data].steps, rank)
            if found is not None:
                steps.append(found.axes)
        for s in steps:
            total += (s[-2] == 1 and s[-1] != 0) - (s[-1] == 1)
        return total
