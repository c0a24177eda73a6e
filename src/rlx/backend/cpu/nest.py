"""Loop nests as native code: fused maps, reductions and row kernels (softmax, norms).

Lanes run along the innermost axis where memory is contiguous there (rows), or along the last kept axis when
that one is (columns). The order of every reduction depends on sizes and target only: lanes and unrolled
accumulators combine in a fixed tree, and threads split rows, never a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rlx.backend.cpu.collapse import accesses, bodies, collapse, map_bodies
from rlx.backend.cpu.expression import Ahead, Expression, Lane
from rlx.backend.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.backend.cpu.irtext import Int, Module
from rlx.backend.cpu.irtypes import Value, vector
from rlx.backend.cpu.nest_base import NestEmitter
from rlx.backend.cpu.primitives import register_type
from rlx.backend.cpu.reduction import Reducer, reducer_for
from rlx.backend.cpu.target import Target
from rlx.backend.cpu.transposed import TransposedNest, read_axis
from rlx.ir.affine import affine
from rlx.ir.compose import Nest
from rlx.ir.dim import Dim
from rlx.ir.scalar import LOADS, PRIMITIVES, Scalar, axis, call, const, rebuild, replace_axes

AHEAD = (Ahead(1024),)  # maps ask memory in advance: long bodies let few loads be on their way
# Beside stores past the caches: memory fills the second cache early, that one the first shortly before use.
STREAM_AHEAD = (Ahead(8192, 2), Ahead(512))
UNROLL = 4  # independent accumulators of a row reduction, to hide the latency of its chain
SAVE_COST = (
    8  # expressions at least this expensive are kept for the next pass over a row instead of recomputed
)


def emit_nest(
    module: Module, name: str, nest: Nest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a nest into the module."""
    flat = collapse(nest, [slot.steps for slot in inputs])
    frame = KernelFrame(module, name, inputs, outputs)
    if not flat.stats:
        flat = _wide_axis_last(flat, inputs, module.target)
        turned = read_axis(flat)
        return _MapNest(frame, flat).emit() if turned is None else TransposedNest(frame, flat, turned).emit()
    if flat.outer == len(flat.space):
        flat = _with_inner_axis(flat)
    if _prefers_columns(flat):
        return _ColumnNest(frame, flat).emit()
    return _RowNest(frame, flat).emit()


def _wide_axis_last(nest: Nest, inputs: Sequence[Slot], target: Target) -> Nest:
    """A map whose last axis leaves most lanes empty runs along the axis that most of its loads are contiguous
    along, if that is wide enough: its stores are scattered then.
    """
    lanes, rank = target.lanes("f32"), len(nest.space)
    last = nest.space[-1] if rank else lanes
    if not isinstance(last, int) or 2 * last > lanes:
        return nest
    along = [0] * rank
    for body in bodies(nest):
        for e in body.walk():
            whole = e.prim == "at" or (e.prim in LOADS and inputs[e.data].steps[-1:] == (1,))
            parts = affine(e.args[-1], rank) if whole else None
            if parts is not None:
                along = [n + (step == 1) for n, step in zip(along, parts[0], strict=True)]
    wide = [a for a, d in enumerate(nest.space) if not isinstance(d, int) or d >= lanes]
    best = max(wide, key=lambda a: (along[a], a), default=None)
    if best is None or along[best] <= along[-1]:
        return nest
    order = [*(a for a in range(rank) if a != best), best]
    place = [axis(order.index(a)) for a in range(rank)]
    moved = map_bodies(nest, lambda s: replace_axes(s, place))
    stores = tuple(replace(s, strides=tuple(s.strides[a] for a in order)) for s in moved.stores)
    return Nest(tuple(nest.space[a] for a in order), rank, moved.stats, stores)


def _with_inner_axis(nest: Nest) -> Nest:
    """Reductions over nothing but axes of size 1 still need one inner axis to run along."""
    stores = tuple(replace(s, strides=(*s.strides, 0)) if s.full else s for s in nest.stores)
    return Nest((*nest.space, 1), nest.outer, nest.stats, stores)


def _prefers_columns(nest: Nest) -> bool:
    """Whether neighbours in memory lie along the last kept axis rather than along the last reduced one."""
    if nest.outer == 0 or nest.outer == len(nest.space):
        return False
    steps = accesses(nest).steps
    rows = sum(1 for s in steps if s[-1] == 1)
    columns = sum(1 for s in steps if s[nest.outer - 1] == 1)
    return columns > rows


class _MapNest(NestEmitter):
    """No reduction: lanes along the last axis."""

    def emit(self) -> EmittedKernel:
        fn, rank = self.fn, len(self.nest.space)
        if rank == 0:
            fn.branch(fn.cmp("eq", self.frame.thread, 0), lambda: self.stores(self.point([], None), []))
        else:
            self.with_streaming(self.all)
        return self.frame.finish()

    def all(self) -> None:
        fn = self.fn
        if len(self.nest.space) == 1:
            blocks = fn.ceildiv(self.sizes[0], self.lanes)
            low, high = self.frame.share(blocks)
            start = fn.mul(low, self.lanes)
            stop = fn.smin(fn.mul(high, self.lanes), self.sizes[0])
            self.sweep([], start, stop)
        else:
            self.rows(self.sizes[:-1], lambda row: self.sweep(row, 0, self.sizes[-1]))

    def sweep(self, row: list[Int], start: Int, stop: Int) -> None:
        last = len(row)
        outside = self.point([*row, 0], None)
        self.prepare(outside, bodies(self.nest), set(range(last)))

        def vector_at(i: Int, mask: Value | None) -> None:
            axes = [*row, i]
            at = self.point(axes, Lane(last, i, self.lanes, mask), outside)
            at.ahead = STREAM_AHEAD if self.streaming else AHEAD
            self.stores(at, axes)

        self.along(stop, self.lanes, vector_at, start)

    def stores(self, at: Expression, axes: list[Int]) -> None:
        for number, store in enumerate(self.nest.stores):
            step = store.strides[-1] if store.strides else 1
            self.write(at, store, number, axes, step)


class _RowNest(NestEmitter):
    """Lanes along the last reduced axis; rows are passed over once per reduction and once per full store."""

    def __init__(self, frame: KernelFrame, nest: Nest) -> None:
        super().__init__(frame, map_bodies(nest, lambda s: s if _is_stepped(s) else rebuild(s, _divide_once)))
        nest = self.nest
        self.inner = list(range(nest.outer, len(nest.space)))
        self.saved = self.choose_saved() if len(self.inner) == 1 else {}
        self.ahead: Sequence[Ahead] = ()

    def choose_saved(self) -> dict[Scalar, int]:
        """Expensive expressions that a later pass needs again -> number of their scratch row."""
        passes = [s.body for s in self.nest.stats] + [s.body for s in self.nest.stores if s.full]
        axis_number = self.inner[0]
        out: dict[Scalar, int] = {}
        for i, body in enumerate(passes[:-1]):
            later = {e for b in passes[i + 1 :] for e in b.walk()}
            stack = [body]
            while stack:
                e = stack.pop()
                if e in out:
                    continue
                if (
                    e in later
                    and _cost(e) >= SAVE_COST
                    and _uses_axis(e, axis_number)
                    and e.dtype.name in ("f32", "f64")
                ):
                    out[e] = len(out)
                else:
                    stack.extend(e.args)
        return out

    def emit(self) -> EmittedKernel:
        scratch: Dim = 0
        if self.saved:
            self.scratch = self.frame.scratch()
            per_row = self.nest.space[self.inner[0]] * 8 + 64
            scratch = per_row * len(self.saved)
        self.with_streaming(self.all_rows)
        return self.frame.finish(scratch)

    def all_rows(self) -> None:
        if self.nest.outer:
            self.rows(self.sizes[: self.nest.outer], self.row)
        else:
            self.fn.branch(self.fn.cmp("eq", self.frame.thread, 0), lambda: self.row([]))

    def saved_place(self, e: Scalar, i: Int) -> Value:
        fn = self.fn
        stride = fn.add(fn.mul(self.sizes[self.inner[0]], 8), 64)
        start = fn.gep(self.scratch, fn.mul(stride, self.saved[e]), "i8")
        return fn.gep(start, i, register_type(e.dtype))

    def row(self, row: list[Int]) -> None:
        fn = self.fn
        outside = self.point([*row, *(0 for _ in self.inner)], None)
        ready: set[Scalar] = set()
        for number, stat in enumerate(self.nest.stats):
            reducer = reducer_for(fn, stat, self.lanes)
            self.ahead = self.ahead_in(number)
            self.prepare(outside, [stat.body], set(range(self.nest.outer)), number)
            value = self.reduce(row, outside, stat.body, reducer, ready)
            outside.accs = [*outside.accs, value]
            ready |= {e for e in stat.body.walk() if e in self.saved}
        full = [s for s in self.nest.stores if s.full]
        self.prepare(outside, [s.body for s in full], set(range(self.nest.outer)), len(self.nest.stats))
        for number, store in enumerate(self.nest.stores):
            if not store.full:
                self.write(outside, store, number, row)
        if full:
            self.ahead = self.ahead_in(len(self.nest.stats))
            self.nested(row, outside, lambda axes, lane: self.full_stores(axes, lane, outside, ready))

    def ahead_in(self, number: int) -> Sequence[Ahead]:
        """The second pass over a row asks for the next row, which then comes while this one is computed."""
        several = len(self.nest.stats) + any(s.full for s in self.nest.stores) > 1
        if not several:
            return AHEAD
        return (Ahead(self.sizes[self.inner[-1]]),) if number == 1 and len(self.inner) == 1 else ()

    def full_stores(self, axes: list[Int], lane: Lane, outside: Expression, ready: set[Scalar]) -> None:
        at = self.at(axes, lane, outside, ready)
        for number, store in enumerate(self.nest.stores):
            if store.full:
                self.write(at, store, number, axes, store.strides[-1])

    def at(self, axes: list[Int], lane: Lane, outside: Expression, ready: set[Scalar]) -> Expression:
        at = self.point(axes, lane, outside)
        at.ahead = self.ahead
        fn = self.fn

        def load(e: Scalar) -> Value:
            place, type_ = self.saved_place(e, lane.base), vector(register_type(e.dtype), lane.width)
            return fn.load(type_, place) if lane.mask is None else fn.masked_load(type_, place, lane.mask)

        at.saved = {e: partial(load, e) for e in ready}
        return at

    def keep(self, at: Expression, body: Scalar, ready: set[Scalar]) -> None:
        """Write freshly computed expensive expressions to scratch for later passes."""
        fn, lane = self.fn, at.lane
        assert lane is not None
        for e in body.walk():
            if e in self.saved and e not in ready:
                value, place = at.vector(e), self.saved_place(e, lane.base)
                if lane.mask is None:
                    fn.store(value, place)
                else:
                    fn.masked_store(value, place, lane.mask)

    def nested(self, row: list[Int], outside: Expression, visit: Callable[[list[Int], Lane], None]) -> None:
        """Visit every vector of the inner axes."""

        def level(axes: list[Int]) -> None:
            number = len(axes)
            if number == len(self.nest.space) - 1:
                self.along(
                    self.sizes[number],
                    self.lanes,
                    lambda i, mask: visit([*axes, i], Lane(number, i, self.lanes, mask)),
                )
            else:
                self.fn.loop(0, self.sizes[number], 1, [], lambda i, _: level([*axes, i]))

        level(list(row))

    def reduce(
        self, row: list[Int], outside: Expression, body: Scalar, reducer: Reducer, ready: set[Scalar]
    ) -> Value:
        """One reduction over the inner axes, as a scalar."""
        fn, last = self.fn, len(self.nest.space) - 1
        extent = self.sizes[last]

        def step(axes: list[Int], i: Int, mask: Value | None, carried: list[Value]) -> list[Value]:
            at = self.at([*axes, i], Lane(last, i, self.lanes, mask), outside, ready)
            value = at.vector(body)
            self.keep(at, body, ready)
            return reducer.step(carried, value, self.position(axes, i), mask)

        def level(axes: list[Int], carried: list[list[Value]]) -> list[list[Value]]:
            number = len(axes)
            if number < last:
                flat = [v for group in carried for v in group]
                out = fn.loop(
                    0,
                    self.sizes[number],
                    1,
                    flat,
                    lambda i, now: [v for g in level([*axes, i], _groups(now, reducer.parts)) for v in g],
                )
                return _groups(out, reducer.parts)
            block = self.lanes * UNROLL
            whole = fn.sub(extent, fn.urem(extent, block))
            flat = [v for group in carried for v in group]

            def unrolled(i: Int, now: list[Value]) -> list[Value]:
                groups = _groups(now, reducer.parts)
                return [
                    v
                    for u, group in enumerate(groups)
                    for v in step(axes, fn.add(i, u * self.lanes), None, group)
                ]

            flat = fn.loop(0, whole, block, flat, unrolled)
            groups = _groups(flat, reducer.parts)
            rest = fn.sub(extent, fn.urem(extent, self.lanes))
            first = fn.loop(whole, rest, self.lanes, groups[0], lambda i, now: step(axes, i, None, now))
            left = fn.sub(extent, rest)
            more = fn.cmp("sgt", left, 0)
            first = fn.if_value(
                more, lambda: step(axes, rest, fn.lanes(left, self.lanes), first), lambda: first
            )
            return [first, *groups[1:]]

        groups = level(list(row), [reducer.start() for _ in range(UNROLL)])
        return reducer.finish(groups)

    def position(self, axes: list[Int], i: Int) -> Int:
        """Flat index within the reduced axes (what argmax reports)."""
        flat: Int = 0
        for number in self.inner:
            index = i if number == len(axes) else axes[number]
            flat = self.fn.add(self.fn.mul(flat, self.sizes[number]), index)
        return flat


class _ColumnNest(NestEmitter):
    """Lanes along the last kept axis: every lane reduces its own column, in ascending order."""

    def emit(self) -> EmittedKernel:
        fn, outer = self.fn, self.nest.outer
        last = outer - 1
        self.wide = self.lanes * 2
        columns = self.sizes[last]
        blocks = fn.ceildiv(columns, self.wide)

        def unit(row: list[Int]) -> None:
            base = fn.mul(row[-1], self.wide)
            left = fn.sub(columns, base)
            full = fn.cmp("sge", left, self.wide)
            fn.branch(
                full,
                lambda: self.column([*row[:-1], base], None),
                lambda: self.column([*row[:-1], base], fn.lanes(left, self.wide)),
            )

        self.rows([*self.sizes[:last], blocks], unit)
        return self.frame.finish()

    def column(self, row: list[Int], mask: Value | None) -> None:
        fn, outer = self.fn, self.nest.outer
        inner = len(self.nest.space) - outer
        lane = Lane(outer - 1, row[-1], self.wide, mask)
        head = self.point([*row, *(0 for _ in range(inner))], lane)
        for stat in self.nest.stats:
            reducer = reducer_for(fn, stat, self.wide)

            def level(
                axes: list[Int], carried: list[Value], reducer: Reducer = reducer, body: Scalar = stat.body
            ) -> list[Value]:
                number = len(axes)
                if number == len(self.nest.space):
                    at = self.point(axes, lane, head)
                    flat: Int = 0
                    for n in range(outer, number):
                        flat = fn.add(fn.mul(flat, self.sizes[n]), axes[n])
                    return reducer.step(carried, at.vector(body), flat, None, per_lane=True)
                return fn.loop(0, self.sizes[number], 1, carried, lambda i, now: level([*axes, i], now))

            carried = level(list(row), reducer.start())
            head.accs = [*head.accs, reducer.lane_result(carried)]
        for number, store in enumerate(self.nest.stores):
            if not store.full:
                self.write(head, store, number, row, store.strides[-1])
        full = [(n, s) for n, s in enumerate(self.nest.stores) if s.full]
        if full:

            def write_level(axes: list[Int]) -> None:
                number = len(axes)
                if number < len(self.nest.space):
                    fn.loop(0, self.sizes[number], 1, [], lambda i, _: write_level([*axes, i]))
                    return
                at = self.point(axes, lane, head)
                for n, store in full:
                    self.write(at, store, n, axes, store.strides[outer - 1])

            write_level(list(row))


def _is_stepped(s: Scalar) -> bool:
    """Whether an expression jumps somewhere, so that a last bit may decide a whole unit (quantisation)."""
    return any(
        e.prim in ("round", "floor", "ceil", "trunc", "floor_div", "mod", "sign")
        or (e.prim == "cast" and e.dtype.is_int and e.args[0].dtype.is_float)
        for e in s.walk()
    )


def _divide_once(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
    """x / statistic as x * (1 / statistic): one division per row. The result may differ by one rounding."""
    if e.prim != "div" or not e.dtype.is_float or args[0].prim == "const":
        return None
    inside = list(args[1].walk())
    if not any(x.prim == "acc" for x in inside) or any(x.prim in ("axis", "at", *LOADS) for x in inside):
        return None
    return call("mul", args[0], call("div", const(1.0, e.dtype), args[1]))


def _groups(flat: list[Value], size: int) -> list[list[Value]]:
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def _cost(e: Scalar) -> int:
    return PRIMITIVES[e.prim].cost if e.prim in PRIMITIVES else 0


def _uses_axis(e: Scalar, number: int) -> bool:
    return any(x.prim == "axis" and x.data == number for x in e.walk())
