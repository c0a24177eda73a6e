"""Kernels that are not loop nests: scatter, running combines, sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.codegen.cpu.expression import ERROR_INDEX, Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, kernel, product, unflatten
from rlx.codegen.cpu.primitives import PRIMITIVES, from_memory, memory_type, register_type, to_memory
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    byte_at,
    ceildiv,
    gep,
    i1,
    i8,
    i64,
    is_nan,
    is_number,
    lanes,
    load,
    loop,
    masked_store,
    ptr,
    select,
    store,
    ult,
    zext,
)
from rlx.ir.dim import Dim
from rlx.kernel.form import Cumulate, Scatter, Sort, dense_strides
from rlx.kernel.scalar import Scalar

_COMBINE = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum", "sum": "add", "prod": "mul"}


class _Points:
    """Expressions over the operands of a kernel."""

    def __init__(self, frame: KernelFrame) -> None:
        self.frame, self.operands = frame, frame.operands(frame.fn)

    def at(self, axes: Sequence[Any], lane: Lane | None = None) -> Expression:
        frame = self.frame
        return Expression(frame.fn, frame.dim, self.operands, axes, lane, error=frame.error)


@inline
def _offset(frame: KernelFrame, index: Sequence[Any], strides: Sequence[Dim]) -> Any:
    flat = 0
    for i, step in zip(index, strides, strict=True):
        flat += i * frame.dim(frame.fn, step)
    return flat


def _varies(e: Scalar, axis: int) -> bool:
    """Whether an expression depends on an axis."""
    return any(part.prim == "axis" and part.data == axis for part in e.walk())


@kernel
def emit_scatter(frame: KernelFrame, form: Scatter) -> EmittedKernel:
    """Every thread owns a part of the output: it copies the base there, then applies the updates that fall
    into it, in ascending order. So results do not depend on the number of threads. Where the output is the
    base, nothing is copied; a box written into it is then split by its own rows.
    """
    points, out, dtype = _Points(frame), frame.result(0), frame.outputs[0].dtype
    element, base = memory_type(dtype), points.operands[form.base]
    shape = frame.sizes(form.shape)
    low, high = frame.share(product(shape))
    elsewhere = base.pointer != out
    space, dense = frame.sizes(form.space), dense_strides(form.shape)

    def scattered() -> None:
        if elsewhere:
            for i in loop(low, high):
                here = _offset(frame, unflatten(frame.fn, i, shape), base.strides)
                store(load(element, gep(base.pointer, here, element)), gep(out, i, element))
        rows, width = (space[:-1], space[-1]) if space else ([], 1)
        for r in loop(product(rows)):
            lead = unflatten(frame.fn, r, rows)
            row = points.at([*lead, 0])
            same = {n: row(e) for n, e in enumerate(form.index) if not _varies(e, len(rows))}
            if inside({n: (value, shape[n]) for n, value in same.items()}):
                for i in loop(width):
                    one(points.at([*lead, i] if space else []), same)
            elif width > 0:
                store(i64(ERROR_INDEX), frame.error)

    def inside(index: Mapping[int, tuple[Value, Value | int]]) -> i1:
        found = i1(True)
        for value, extent in index.values():
            found &= ult(value, extent)
        return found

    def one(point: Expression, same: Mapping[int, Value]) -> None:
        """An update of a row whose index is known in part."""
        index = {n: same[n] if n in same else point(e) for n, e in enumerate(form.index)}
        flat = i64(_offset(frame, list(index.values()), dense))
        if inside({n: (value, shape[n]) for n, value in index.items() if n not in same}):
            if (flat >= low) & (flat < high):
                update(point, flat)
        else:
            store(i64(ERROR_INDEX), frame.error)

    def update(point: Expression, flat: i64) -> None:
        value = point(form.value)
        if form.combine != "set":
            old = from_memory(frame.fn, load(element, gep(out, flat, element)), dtype)
            value = PRIMITIVES[_COMBINE[form.combine]](frame.fn, dtype, [old, value])
        store(to_memory(frame.fn, value, dtype), gep(out, flat, element))

    if form.is_box:
        if elsewhere:
            scattered()
        else:
            _write_box(points, form, space, out)
    else:
        scattered()
    return frame.finish()


@inline
def _write_box(points: _Points, form: Scatter, space: Sequence[Any], out: ptr) -> None:
    """A box of the output becomes the update, which is known to be inside: threads share its rows."""
    frame, dtype, dense = points.frame, points.frame.outputs[0].dtype, dense_strides(form.shape)
    width, last = frame.module.target.vector_bytes // 4, len(space) - 1
    low, high = frame.share(product(space[:-1]))
    for r in loop(low, high):
        lead = unflatten(frame.fn, r, space[:-1])
        start = i64(_offset(frame, [points.at([*lead, 0])(e) for e in form.index], dense))
        for i in loop(0, space[-1], width):
            mask = lanes(space[-1] - i, width)
            value = points.at([*lead, i], Lane(last, i, width, mask)).vector(form.value)
            place = gep(out, start + i, memory_type(dtype))
            masked_store(to_memory(frame.fn, value, dtype), place, mask)


@kernel
def emit_cumulate(frame: KernelFrame, form: Cumulate) -> EmittedKernel:
    """Running combines, one after the other along the axis; lanes along the last axis if that is another."""
    points, out, computed = _Points(frame), frame.result(0), form.body.dtype
    sizes, axis, last = frame.sizes(form.space), form.axis, len(form.space) - 1
    across = axis != last
    width = frame.module.target.vector_bytes // 4 if across else 1
    rows = [*sizes[:axis], *sizes[axis + 1 :]]
    if across:
        rows[-1] = ceildiv(rows[-1], width)
    combine = PRIMITIVES[_COMBINE[form.combine]]
    start = constant(vector(register_type(computed), width), int(form.combine == "prod"))
    low, high = frame.share(product(rows))
    for r in loop(low, high):
        index: list[Any] = unflatten(frame.fn, r, rows)
        mask = None
        if across:
            index = [*index[:-1], index[-1] * width]
            mask = lanes(sizes[-1] - index[-1], width)
        total = start
        for i in loop(sizes[axis]):
            here = sizes[axis] - 1 - i if form.reverse else i
            axes = [*index[:axis], here, *index[axis:]]
            lane = None if mask is None else Lane(last, axes[-1], width, mask)
            value = points.at(axes, lane).vector(form.body)
            before, total = total, combine(frame.fn, computed, [total, value])
            if form.combine in ("max", "min"):
                total = select(i == 0, value, total)
            shown = to_memory(frame.fn, before if form.exclusive else total, form.dtype)
            offset = _offset(frame, axes, dense_strides(form.space))
            place = gep(out, offset, memory_type(form.dtype))
            if mask is None:
                store(shown, place)
            else:
                masked_store(shown, place, mask)
    return frame.finish()


@kernel
def emit_sort(frame: KernelFrame, form: Sort) -> EmittedKernel:
    """Stable bottom-up merge sort of rows; NaN sorts as the largest.

    Scratch holds two copies of values and places.
    """
    dtype, element = form.dtype, memory_type(form.dtype)
    (source,) = frame.operands(frame.fn)
    lead = frame.sizes(form.shape[:-1])
    n, keep = frame.sizes((form.shape[-1], form.keep))
    half, base = n * 8, frame.scratch()
    values = [base, byte_at(base, half)]
    places = [byte_at(base, half * 2), byte_at(base, half * 3)]

    def is_before(a: Any, b: Any) -> Any:
        x: Any = from_memory(frame.fn, a, dtype)
        y: Any = from_memory(frame.fn, b, dtype)
        if dtype.is_bool:
            x, y = zext(x, i8), zext(y, i8)
        smaller = PRIMITIVES["greater" if form.descending else "less"](frame.fn, dtype, [x, y])
        if not dtype.is_float:
            return smaller
        first, second = (x, y) if form.descending else (y, x)
        return smaller | (is_nan(first) & is_number(second))

    low, high = frame.share(product(lead))
    for r in loop(low, high):
        index = unflatten(frame.fn, r, lead)
        for i in loop(n):
            here = _offset(frame, [*index, i], source.strides)
            store(load(element, gep(source.pointer, here, element)), gep(values[0], i, element))
            places[0][i] = i
        # Runs of `width` elements are in order; pairs of them are merged.
        width, v, p, to_v, to_p = i64(1), values[0], places[0], values[1], places[1]
        while width < n:
            for start in loop(0, n, width * 2):
                middle, end = min(start + width, n), min(start + width * 2, n)
                left, right = i64(start), i64(middle)
                for i in loop(start, end):
                    has_left, has_right = left < middle, right < end
                    # Where a side has no more, its element is loaded from the start, and not taken.
                    safe_left, safe_right = select(has_left, left, start), select(has_right, right, start)
                    a = load(element, gep(v, safe_left, element))
                    b = load(element, gep(v, safe_right, element))
                    takes_right = (has_right & is_before(b, a)) | ~has_left
                    chosen = select(takes_right, safe_right, safe_left)
                    store(load(element, gep(v, chosen, element)), gep(to_v, i, element))
                    to_p[i] = p[chosen]
                    moved = zext(takes_right, i64)
                    left += 1 - moved
                    right += moved
            width, v, p, to_v, to_p = width * 2, to_v, to_p, v, p
        for i in loop(keep):
            to = r * keep + i
            store(load(element, gep(v, i, element)), gep(frame.result(0), to, element))
            frame.result(1)[to] = p[i]
    return frame.finish(form.shape[-1] * 32 + 64)


EMITTERS: dict[type, Callable[..., EmittedKernel]] = {
    Scatter: emit_scatter,
    Cumulate: emit_cumulate,
    Sort: emit_sort,
}
