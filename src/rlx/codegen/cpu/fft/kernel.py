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

import numpy as np

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.fft.group import GroupTransform, Rows
from rlx.codegen.cpu.fft.lanes import LaneShape
from rlx.codegen.cpu.fft.plan import convolution_size, lanes_cost, pairs, radices, roots_of_unity
from rlx.codegen.cpu.fft.rows import RowTransform, row_transform
from rlx.codegen.cpu.fft.single import SingleTransform
from rlx.codegen.cpu.frame import KernelFrame, Slot, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.contraction import linear_steps
from rlx.codegen.native.irtext import Int, Module
from rlx.codegen.native.irtypes import Value
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
    return FftKernel(KernelFrame(module, name, inputs, outputs), what).emit()


class FftKernel:
    """Reads, transforms and stores; see the module's text."""

    def __init__(self, frame: KernelFrame, what: TransformNest) -> None:
        self.frame, self.fn, self.what = frame, frame.fn, what
        self.halved = is_halved(what)
        self.points = what.n // 2 if self.halved else what.n  # of the complex transform inside
        element = memory_type(what.dtype)
        self.width = frame.module.target.lanes(what.dtype.name)
        self.shape = LaneShape(element, self.width)
        self.operands = frame.operands(frame.fn)
        self.sizes = [frame.dim(frame.fn, d) for d in what.rows]
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

    def across_rows(self) -> None:
        """Groups are neighbours along the last row axis, which are adjacent in memory."""
        fn, width = self.fn, self.width
        *outer, last = self.sizes
        blocks = [*outer, fn.ceildiv(last, width)]
        low, high = self.frame.share(self.product(blocks))

        def group(u: Int, _: list[Value]) -> None:
            *lead, block = unflatten(fn, u, blocks)
            start = fn.mul(block, width)
            whole = isinstance(last, int) and last % width == 0
            mask = None if whole else fn.lanes(fn.sub(last, start), width)
            places = [fn.add(start, i) for i in range(width)]
            index = [[*lead, fn.smin(p, fn.sub(last, 1))] for p in places]
            exists = [fn.cmp("slt", p, last) for p in places]
            GroupTransform(self, Rows(index, exists, Lane(len(outer), start, width, mask))).run()

        fn.loop(low, high, 1, [], group)

    def along_rows(self) -> None:
        """Groups of any rows that follow each other, and single rows."""
        fn, width = self.fn, self.width
        total = self.product(self.sizes)
        single = row_transform(self.frame.module, self.points, self.shape)
        groups, alone = self.split(total, single)
        low, high = self.frame.share(fn.add(groups, alone))

        def unit(u: Int, _: list[Value]) -> None:
            def group() -> None:
                start = fn.mul(u, width)
                places = [fn.add(start, i) for i in range(width)]
                index = [unflatten(fn, fn.smin(p, fn.sub(total, 1)), self.sizes) for p in places]
                GroupTransform(self, Rows(index, [fn.cmp("slt", p, total) for p in places], None)).run()

            def row() -> None:
                assert single is not None
                SingleTransform(self, single).run(fn.add(fn.sub(u, groups), fn.mul(groups, width)))

            only_groups = isinstance(alone, int) and alone == 0
            only_rows = isinstance(groups, int) and groups == 0
            in_group = True if only_groups else False if only_rows else fn.cmp("slt", u, groups)
            fn.branch(in_group, group, row)

        fn.loop(low, high, 1, [], unit)

    def product(self, sizes: Sequence[Int]) -> Int:
        total: Int = 1
        for d in sizes:
            total = self.fn.mul(total, d)
        return total

    def split(self, total: Int, single: RowTransform | None) -> tuple[Int, Int]:
        """How many groups there are, the last one perhaps with lanes to spare, and how many rows go alone."""
        fn, width = self.fn, self.width
        if single is None:
            return fn.ceildiv(total, width), 0
        if single.cost < self.lanes_cost():
            return 0, total
        rest = fn.urem(total, width)
        few = fn.cmp("slt", rest, max(width // 4, 2))
        alone = fn.select(few, rest, 0)
        return fn.ceildiv(fn.sub(total, alone), width), alone

    def lanes_cost(self) -> float:
        n = self.points
        cost = lanes_cost(n, self.shape.bytes)
        return cost if radices(n) is not None else 2 * (cost + 2) * convolution_size(n) / n

    def need(self, nbytes: int) -> None:
        """Ask for scratch."""
        self.scratch = max(self.scratch, nbytes)

    def root_table(self, n: int, count: int) -> Value:
        """exp(-2 pi i k / n) for k < count."""
        name = f"fft_half_roots_{n}_{self.shape.element}"
        return self.frame.module.table(name, self.shape.element, pairs(roots_of_unity(n, np.arange(count))))

    def lane(self, t: Int, mask: Value | None) -> Lane:
        """Lanes along the row."""
        return Lane(len(self.sizes), t, self.width, mask)

    def point(self, row: Sequence[Int], t: Int, lane: Lane, accs: Sequence[Value] = ()) -> Expression:
        """Expressions at element or result t of a row."""
        return Expression(
            self.fn, self.frame.dim, self.operands, [*row, t], lane, accs, error=self.frame.error
        )

    def put(self, number: int, value: Value, index: Sequence[Int], lane: Lane) -> None:
        """Store neighbours along the lane's axis."""
        fn, store, dtype = self.fn, self.what.stores[number], self.frame.outputs[number].dtype
        offset: Int = 0
        for i, stride in zip(index, store.strides, strict=True):
            offset = fn.add(offset, fn.mul(i, self.frame.dim(fn, stride)))
        place = fn.gep(self.frame.output(number).pointer, offset, memory_type(dtype))
        value = to_memory(fn, value, dtype)
        step = store.strides[lane.axis]
        if step != 1:
            steps = fn.mul(fn.iota(self.width), fn.splat(self.frame.dim(fn, step), self.width, "i64"))
            fn.scatter(value, place, fn.value(steps), lane.mask)
        elif lane.mask is None:
            fn.store(value, place)
        else:
            fn.masked_store(value, place, lane.mask)

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
