"""Depthwise convolutions on planar images: one channel at a time, lanes along the last axis of the output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from rlx.backend.cpu.collapse import bodies, flatten_loads
from rlx.backend.cpu.expression import Lane
from rlx.backend.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.backend.cpu.irtext import Int, Module
from rlx.backend.cpu.irtypes import Value, constant, vector
from rlx.backend.cpu.nest_base import NestEmitter
from rlx.ir.compose import ConvNest, Nest

MOST_TAPS = 64  # products of one output that are written out one by one


def is_depthwise(nest: ConvNest, inputs: Sequence[Slot]) -> bool:
    """Whether every output channel reads one input channel, in f32, planar, with a small static window."""
    form = nest.form
    window = form.w[1:]
    if nest.x_blocked or nest.out_blocked or nest.w_layout is not None or form.w[1] != 1:
        return False
    if form.dtype.name != "f32" or any(inputs[i].dtype.name != "f32" for i in (nest.x, nest.w)):
        return False
    taps = 1
    for d in window:
        if not isinstance(d, int):
            return False
        taps *= d
    dense = inputs[nest.x].steps[-1] == 1
    return taps <= MOST_TAPS and dense and isinstance(form.w[0], int) and form.strides[-1] <= 2


def emit_depthwise(
    module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a depthwise convolution into the module."""
    form = nest.form
    space = Nest(form.out, len(form.out), (), nest.stores)
    frame = KernelFrame(module, name, inputs, outputs)
    return _Depthwise(frame, flatten_loads(space, [slot.steps for slot in inputs]), nest).emit()


class _Depthwise(NestEmitter):
    def __init__(self, frame: KernelFrame, space: Nest, conv: ConvNest) -> None:
        super().__init__(frame, space)
        self.conv, self.form = conv, conv.form
        self.x, self.w = self.operands[conv.x], self.operands[conv.w]
        self.last = len(space.space) - 1
        self.type = vector("float", self.lanes)
        self.stride = self.form.strides[-1]
        self.low = frame.dim(self.fn, self.form.padding[-1][0])
        self.width = frame.dim(self.fn, self.form.x[-1])

    def emit(self) -> EmittedKernel:
        self.rows(self.sizes[:-1], self.row)
        return self.frame.finish()

    def row(self, row: list[Int]) -> None:
        """One line of output pixels."""
        fn, form = self.fn, self.form
        image, channel, *place = row
        outside = self.point([*row, 0], None)
        self.prepare(outside, bodies(self.nest), set(range(self.last)))
        per_out = int(form.w[0]) // form.groups  # type: ignore[call-overload]
        strides = [self.frame.dim(fn, s) for s in self.x.strides]
        plane = fn.add(fn.mul(image, strides[0]), fn.mul(fn.udiv(channel, per_out), strides[1]))
        weights = fn.gep(self.w.pointer, fn.mul(channel, self.frame.dim(fn, self.w.strides[0])), "float")
        lines: list[
            tuple[tuple[int, ...], Value, Value | None]
        ] = []  # taps before the last axis, start, exists
        for taps in product(*(range(int(d)) for d in form.w[2:-1])):  # type: ignore[call-overload]
            offset, exists = plane, None
            for i, tap in enumerate(taps):
                low = self.frame.dim(fn, form.padding[i][0])
                at = fn.sub(fn.add(fn.mul(place[i], form.strides[i]), tap * form.dilations[i]), low)
                inside = fn.value(fn.cmp("ult", at, self.frame.dim(fn, form.x[2 + i])), "i1")
                exists = inside if exists is None else fn.value(fn.and_(exists, inside))
                offset = fn.add(offset, fn.mul(at, strides[2 + i]))
            if exists is not None:  # a line outside of the image reads nothing, at an address that exists
                offset = fn.select(exists, fn.value(offset), fn.value(plane))
            lines.append((taps, fn.gep(self.x.pointer, offset, "float"), exists))
        reach = (int(form.w[-1]) - 1) * form.dilations[-1]  # type: ignore[call-overload]

        def pixels(i: Int, mask: Value | None) -> None:
            first = fn.sub(fn.mul(i, self.stride), self.low)
            final = fn.add(first, (self.lanes - 1) * self.stride + reach)
            inner = fn.value(
                fn.and_(
                    fn.value(fn.cmp("sge", first, 0), "i1"),
                    fn.value(fn.cmp("slt", fn.add(final, self.stride - 1), self.width), "i1"),
                ),
                "i1",
            )
            total = fn.if_value(
                inner,
                lambda: [self.sums(lines, weights, first, None)],
                lambda: [self.sums(lines, weights, first, fn.value(first))],
            )[0]
            axes = [*row, i]
            at = self.point(axes, Lane(self.last, i, self.lanes, mask), outside)
            at.accs = [total]
            for number, store in enumerate(self.nest.stores):
                self.write(at, store, number, axes, store.strides[-1])

        self.along(self.sizes[self.last], self.lanes, pixels)

    def sums(
        self,
        lines: list[tuple[tuple[int, ...], Value, Value | None]],
        weights: Value,
        first: Int,
        edge: Value | None,
    ) -> Value:
        """Products of one vector of outputs; at an edge (`edge` is the first column) lanes are guarded."""
        fn, form = self.fn, self.form
        total = constant(self.type, 0.0)
        strides = [self.frame.dim(fn, s) for s in self.w.strides]
        for taps, start, exists in lines:
            for tap in range(int(form.w[-1])):  # type: ignore[call-overload]
                offset: Int = fn.mul(strides[-1], tap)
                for t, s in zip(taps, strides[2:-1], strict=True):
                    offset = fn.add(offset, fn.mul(s, t))
                weight = fn.broadcast(fn.gep(weights, offset, "float"), "float", self.lanes)
                column = fn.add(first, tap * form.dilations[-1])
                value = self.read(start, column, exists, edge is not None)
                total = fn.fma(value, weight, total)
        return total

    def read(self, start: Value, column: Int, exists: Value | None, edge: bool) -> Value:
        fn = self.fn
        place = fn.gep(start, column, "float")
        if edge:
            lane = fn.value(fn.mul(fn.iota(self.lanes), constant(vector("i64", self.lanes), self.stride)))
            at = fn.value(fn.add(fn.splat(fn.value(column), self.lanes), lane))
            mask = fn.value(fn.cmp("ult", at, fn.splat(fn.value(self.width), self.lanes, "i64")))
            if exists is not None:
                mask = fn.select(exists, mask, constant(mask.type, False))
            if self.stride == 1:
                return fn.masked_load(self.type, place, mask)
            safe = fn.select(mask, at, constant(at.type, 0))
            return fn.gather(start, safe, "float", mask)
        if self.stride == 1:
            got = fn.load(self.type, place)
        else:
            wide = fn.load(vector("float", self.lanes * 2), place)
            got = fn.shuffle(wide, None, range(0, self.lanes * 2, 2))
        return got if exists is None else fn.select(exists, got, constant(self.type, 0.0))
