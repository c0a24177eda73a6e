"""Kernels that are not loop nests: scatter, running combines, sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.expression import ERROR_INDEX, Expression, Lane, Operand
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot, unflatten
from rlx.codegen.cpu.primitives import PRIMITIVES, from_memory, memory_type, register_type, to_memory
from rlx.codegen.native.irtext import Int, Module
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.kernel.form import Cumulate, Scatter, Sort, dense_strides

_COMBINE = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum", "sum": "add", "prod": "mul"}


class _Kernel:
    def __init__(self, module: Module, name: str, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> None:
        self.frame = KernelFrame(module, name, inputs, outputs)
        self.fn = self.frame.fn
        self.operands = self.frame.operands(self.fn)

    def dim(self, d: Dim) -> Int:
        return self.frame.dim(self.fn, d)

    def at(self, axes: Sequence[Int], lane: Lane | None = None) -> Expression:
        return Expression(self.fn, self.frame.dim, self.operands, axes, lane, error=self.frame.error)

    def total(self, sizes: Sequence[Int]) -> Int:
        out: Int = 1
        for n in sizes:
            out = self.fn.mul(out, n)
        return out

    def load(self, operand: Operand, offset: Int, dtype: DType) -> Value:
        return from_memory(
            self.fn, self.fn.load(memory_type(dtype), self.place(operand, offset, dtype)), dtype
        )

    def store(self, x: Value, operand: Operand, offset: Int, dtype: DType) -> None:
        self.fn.store(to_memory(self.fn, x, dtype), self.place(operand, offset, dtype))

    def place(self, operand: Operand, offset: Int, dtype: DType) -> Value:
        return self.fn.gep(operand.pointer, offset, memory_type(dtype))

    def offset(self, index: Sequence[Int], strides: Sequence[Dim]) -> Int:
        flat: Int = 0
        for i, s in zip(index, strides, strict=True):
            flat = self.fn.add(flat, self.fn.mul(i, self.dim(s)))
        return flat


def emit_scatter(
    module: Module, name: str, form: Scatter, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Every thread owns a part of the output: it copies the base there, then applies the updates that fall
    into it, in ascending order. So results do not depend on the number of threads. Where the output is the
    base, nothing is copied; a box written into it is then split by its own rows.
    """
    k = _Kernel(module, name, inputs, outputs)
    fn, dtype, out = k.fn, outputs[0].dtype, k.frame.output(0)
    shape = [k.dim(d) for d in form.shape]
    low, high = k.frame.share(k.total(shape))
    base = k.operands[form.base]

    def copy(i: Int, _: list[Value]) -> None:
        at = k.offset(unflatten(fn, i, shape), base.strides)
        fn.store(fn.load(memory_type(dtype), k.place(base, at, dtype)), k.place(out, i, dtype))

    elsewhere = fn.value(fn.cmp("ne", base.pointer, out.pointer))
    space = [k.dim(d) for d in form.space]
    dense = dense_strides(form.shape)

    def update(i: Int, _: list[Value]) -> None:
        at = k.at(unflatten(fn, i, space))
        index = [at(e) for e in form.index]
        good = constant("i1", True)
        for value, extent in zip(index, shape, strict=True):
            good = fn.value(fn.and_(good, fn.value(fn.cmp("ult", value, extent))))
        flat = fn.value(k.offset(index, dense))
        fn.branch(
            good,
            lambda: fn.branch(
                fn.value(fn.and_(fn.value(fn.cmp("sge", flat, low)), fn.value(fn.cmp("slt", flat, high)))),
                lambda: combine(at, flat),
            ),
            lambda: fn.store(constant("i64", ERROR_INDEX), k.frame.error),
        )

    def combine(at: Expression, flat: Value) -> None:
        value = at(form.value)
        if form.combine != "set":
            value = PRIMITIVES[_COMBINE[form.combine]](fn, dtype, [k.load(out, flat, dtype), value])
        k.store(value, out, flat, dtype)

    def scattered() -> None:
        fn.branch(elsewhere, lambda: fn.loop(low, high, 1, [], copy))
        fn.loop(0, k.total(space), 1, [], update)

    if form.is_box:
        fn.branch(elsewhere, scattered, lambda: _write_box(k, form, space, dtype))
    else:
        scattered()
    return k.frame.finish()


def _write_box(k: _Kernel, form: Scatter, space: Sequence[Int], dtype: DType) -> None:
    """A box of the output becomes the update, which is known to be inside: threads share its rows."""
    fn, out, width = k.fn, k.frame.output(0), k.frame.module.target.vector_bytes // 4
    low, high = k.frame.share(k.total(space[:-1]))
    dense = dense_strides(form.shape)

    def row(r: Int, _: list[Value]) -> None:
        lead = unflatten(fn, r, space[:-1])
        index = [k.at([*lead, 0])(e) for e in form.index]
        start = fn.value(k.offset(index, dense))

        def lanes(i: Int, _: list[Value]) -> None:
            mask = fn.lanes(fn.sub(space[-1], i), width)
            value = k.at([*lead, i], Lane(len(space) - 1, i, width, mask)).vector(form.value)
            fn.masked_store(to_memory(fn, value, dtype), k.place(out, fn.add(start, i), dtype), mask)

        fn.loop(0, space[-1], width, [], lanes)

    fn.loop(low, high, 1, [], row)


def emit_cumulate(
    module: Module, name: str, form: Cumulate, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Running combines, one after the other along the axis; lanes along the last axis if that is another."""
    k = _Kernel(module, name, inputs, outputs)
    fn, dtype, out = k.fn, form.dtype, k.frame.output(0)
    rank, axis = len(form.space), form.axis
    sizes = [k.dim(d) for d in form.space]
    dense = dense_strides(form.space)
    across = rank > 1 and axis != rank - 1
    width = module.target.vector_bytes // 4 if across else 1
    others = [i for i in range(rank) if i != axis]
    rows = [sizes[i] for i in others]
    if across:
        rows[-1] = fn.ceildiv(rows[-1], width)
    type_ = vector(register_type(form.body.dtype), width)
    primitive = PRIMITIVES[_COMBINE[form.combine]]
    ends = {"sum": 0, "prod": 1}
    start = constant(type_, ends.get(form.combine, 0))

    def row(r: Int, _: list[Value]) -> None:
        index = unflatten(fn, r, rows)
        mask = None
        if across:
            index[-1] = fn.mul(index[-1], width)
            mask = fn.lanes(fn.sub(sizes[-1], index[-1]), width)

        def step(i: Int, carried: list[Value]) -> list[Value]:
            place = fn.sub(fn.sub(sizes[axis], 1), i) if form.reverse else i
            axes: list[Int] = [place] * rank
            for n, value in zip(others, index, strict=True):
                axes[n] = value
            at = k.at(axes, Lane(rank - 1, axes[-1], width, mask) if across else None)
            value = at.vector(form.body)
            combined = primitive(fn, form.body.dtype, [carried[0], value])
            if form.combine in ("max", "min"):
                combined = fn.select(fn.cmp("eq", i, 0), value, combined)
            shown = to_memory(fn, carried[0] if form.exclusive else combined, dtype)
            target = k.place(out, k.offset(axes, dense), dtype)
            if mask is None:
                fn.store(shown, target)
            else:
                fn.masked_store(shown, target, mask)
            return [combined]

        fn.loop(0, sizes[axis], 1, [start], step)

    low, high = k.frame.share(k.total(rows))
    fn.loop(low, high, 1, [], row)
    return k.frame.finish()


def emit_sort(
    module: Module, name: str, form: Sort, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Stable bottom-up merge sort of rows; NaN sorts as the largest.

    Scratch holds two copies of values and places.
    """
    k = _Kernel(module, name, inputs, outputs)
    fn, dtype = k.fn, form.dtype
    element, source = memory_type(dtype), k.operands[0]
    lead = [k.dim(d) for d in form.shape[:-1]]
    n, keep = k.dim(form.shape[-1]), k.dim(form.keep)
    half = fn.mul(n, 8)
    base = k.frame.scratch()
    values = [base, fn.gep(base, half, "i8")]
    places = [fn.gep(base, fn.mul(half, i), "i8") for i in (2, 3)]

    def before(a: Value, b: Value) -> Value:
        x, y = from_memory(fn, a, dtype), from_memory(fn, b, dtype)
        if dtype.is_bool:
            x, y = fn.zext(x, "i8"), fn.zext(y, "i8")
        name = "greater" if form.descending else "less"
        smaller = (
            PRIMITIVES[name](fn, dtype, [x, y])
            if not dtype.is_bool
            else fn.value(fn.cmp("ugt" if form.descending else "ult", x, y))
        )
        if not dtype.is_float:
            return smaller
        first, second = (x, y) if form.descending else (y, x)
        nan_order = fn.and_(fn.is_nan(first), fn.fcmp("ord", second, second))
        return fn.value(fn.or_(smaller, fn.value(nan_order)))

    def row(r: Int, _: list[Value]) -> None:
        index = unflatten(fn, r, lead)

        def fill(i: Int, _: list[Value]) -> None:
            at = k.offset([*index, i], source.strides)
            fn.store(fn.load(element, fn.gep(source.pointer, at, element)), fn.gep(values[0], i, element))
            fn.store(fn.value(i), fn.gep(places[0], i, "i64"))

        fn.loop(0, n, 1, [], fill)
        state = fn.while_loop(
            [constant("i64", 1), values[0], places[0], values[1], places[1]],
            lambda c: fn.value(fn.cmp("slt", c[0], n)),
            merge_pass,
        )

        def write(i: Int, _: list[Value]) -> None:
            at = fn.add(fn.mul(r, keep), i)
            found = fn.load(element, fn.gep(state[1], i, element))
            fn.store(found, fn.gep(k.frame.output(0).pointer, at, element))
            fn.store(fn.load("i64", fn.gep(state[2], i, "i64")), fn.gep(k.frame.output(1).pointer, at, "i64"))

        fn.loop(0, keep, 1, [], write)

    def merge_pass(c: list[Value]) -> list[Value]:
        width, v, p, to_v, to_p = c
        fn.loop(0, n, fn.mul(width, 2), [], lambda start, _: merge(start, width, v, p, to_v, to_p))
        return [fn.value(fn.mul(width, 2)), to_v, to_p, v, p]

    def merge(start: Int, width: Value, v: Value, p: Value, to_v: Value, to_p: Value) -> None:
        middle = fn.smin(fn.add(start, width), n)
        end = fn.smin(fn.add(start, fn.mul(width, 2)), n)

        def step(i: Int, c: list[Value]) -> list[Value]:
            left, right = c
            has_left = fn.value(fn.cmp("slt", left, middle))
            has_right = fn.value(fn.cmp("slt", right, end))
            safe_left = fn.select(has_left, left, fn.value(start))
            safe_right = fn.select(has_right, right, fn.value(start))
            a = fn.load(element, fn.gep(v, safe_left, element))
            b = fn.load(element, fn.gep(v, safe_right, element))
            both = fn.value(fn.and_(has_right, before(b, a)))
            none_left = fn.value(fn.xor(has_left, constant("i1", True)))
            take_right = fn.value(fn.or_(both, none_left))
            source_at = fn.select(take_right, safe_right, safe_left)
            fn.store(fn.load(element, fn.gep(v, source_at, element)), fn.gep(to_v, i, element))
            fn.store(fn.load("i64", fn.gep(p, source_at, "i64")), fn.gep(to_p, i, "i64"))
            moved = fn.zext(take_right, "i64")
            return [
                fn.value(fn.add(left, fn.value(fn.sub(constant("i64", 1), moved)))),
                fn.value(fn.add(right, moved)),
            ]

        fn.loop(start, end, 1, [fn.value(start), fn.value(middle)], step)

    low, high = k.frame.share(k.total(lead))
    fn.loop(low, high, 1, [], row)
    return k.frame.finish(form.shape[-1] * 32 + 64)


EMITTERS: dict[type, Callable[..., EmittedKernel]] = {
    Scatter: emit_scatter,
    Cumulate: emit_cumulate,
    Sort: emit_sort,
}
