"""Lines of an image copied into scratch with zeros around, so that windows never meet an edge."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backend.cpu.conv_shape import Geometry, Image
from rlx.backend.cpu.frame import ArgumentTable
from rlx.backend.cpu.irtext import Function, Int, Module, Value, constant, vector

ELEMENT = "float"


def emit_line_packer(module: Module, name: str, table: ArgumentTable, shape: Geometry, image: Image) -> str:
    """Name of the function pack(args, to, x, d, h, lines, padded).

    It copies, for every block of channels and plane of the window at output plane `d`, `lines` lines from
    that of output line `h` on; a line holds `padded` pixels.
    """
    name = f"{name}.lines"
    params = [
        ("ptr", "args"),
        ("ptr noalias", "to"),
        ("ptr noalias", "x"),
        ("i64", "d"),
        ("i64", "h"),
        ("i64", "lines"),
        ("i64", "padded"),
    ]
    fn = module.function(name, params, internal=True, noinline=True)
    _, to, x, d, h, lines, padded = fn.args
    taps = shape.window[0]
    blocks = -(-shape.per_in // image.lanes)
    size = [table.dim(fn, s) for s in shape.size]
    low = [table.dim(fn, s) for s in shape.low]
    steps = [table.dim(fn, s) for s in image.axes]
    block_step = table.dim(fn, image.block)
    begin = fn.smin(fn.smax(low[2], 0), padded)
    end = fn.smin(fn.smax(fn.add(low[2], size[2]), begin), padded)
    line_elements = fn.mul(padded, image.lanes)
    mover = _Mover(fn, module.target.lanes("f32"), image.lanes, steps[2])
    first_d, first_h = (
        fn.sub(fn.mul(d, shape.strides[0]), low[0]),
        fn.sub(fn.mul(h, shape.strides[1]), low[1]),
    )

    def block(b: Int, _: list[Value]) -> None:
        def plane(k: Int, _: list[Value]) -> None:
            at_d = fn.add(first_d, fn.mul(k, shape.dilations[0]))
            target = fn.gep(to, fn.mul(fn.mul(fn.add(fn.mul(b, taps), k), lines), line_elements), ELEMENT)
            source = fn.add(fn.mul(b, block_step), fn.mul(at_d, steps[0]))
            in_plane = fn.cmp("ult", at_d, size[0])

            def line(r: Int, _: list[Value]) -> None:
                at_h = fn.add(first_h, r)
                there = fn.gep(target, fn.mul(r, line_elements), ELEMENT)
                inside = fn.and_(in_plane, fn.cmp("ult", at_h, size[1]))

                def copy() -> None:
                    mover.zero(there, 0, begin)
                    start = fn.add(
                        fn.add(source, fn.mul(at_h, steps[1])), fn.mul(fn.sub(begin, low[2]), steps[2])
                    )
                    mover.copy(fn.gep(x, start, ELEMENT), there, begin, end)
                    mover.zero(there, end, padded)

                fn.branch(inside, copy, lambda: mover.zero(there, 0, padded))  # type: ignore[arg-type]

            fn.loop(0, lines, 1, [], line)

        fn.loop(0, taps, 1, [], plane)

    fn.loop(0, blocks, 1, [], block)
    return name


class _Mover:
    """Zeros and copies pixels of a line in the widest pieces."""

    def __init__(self, fn: Function, lanes: int, pixel: int, step: Int) -> None:
        self.fn, self.lanes, self.pixel, self.step = fn, lanes, pixel, step
        self.contiguous = isinstance(step, int) and step == pixel

    def _pieces(self, begin: Int, end: Int, piece: Callable[[Int, Value | None], None]) -> None:
        """piece(element, mask) over the elements of pixels begin..end in whole vectors,
        the last one masked.
        """
        fn = self.fn
        first, last = fn.mul(begin, self.pixel), fn.mul(end, self.pixel)
        if self.pixel % self.lanes == 0:
            fn.loop(first, last, self.lanes, [], lambda i, _: piece(i, None))
            return
        whole = fn.add(first, fn.mul(fn.udiv(fn.sub(last, first), self.lanes), self.lanes))
        fn.loop(first, whole, self.lanes, [], lambda i, _: piece(i, None))
        left = fn.sub(last, whole)
        fn.branch(fn.cmp("sgt", left, 0), lambda: piece(whole, fn.lanes(left, self.lanes)))

    def zero(self, to: Value, begin: Int, end: Int) -> None:
        fn, zeros = self.fn, constant(vector(ELEMENT, self.lanes), 0)

        def piece(i: Int, mask: Value | None) -> None:
            place = fn.gep(to, i, ELEMENT)
            fn.store(zeros, place) if mask is None else fn.masked_store(zeros, place, mask)

        self._pieces(begin, end, piece)

    def copy(self, source: Value, to: Value, begin: Int, end: Int) -> None:
        """Pixels begin..end of the line from `source`, which is the first of them."""
        fn, type_ = self.fn, vector(ELEMENT, self.lanes)
        if not self.contiguous:

            def one(i: Int, _: list[Value]) -> None:
                place = fn.gep(source, fn.mul(fn.sub(i, begin), self.step), ELEMENT)
                there = fn.gep(to, fn.mul(i, self.pixel), ELEMENT)
                moved = vector(ELEMENT, self.pixel)
                fn.store(fn.load(moved, place), there)

            fn.loop(begin, end, 1, [], one)
            return
        skip = fn.mul(begin, self.pixel)

        def piece(i: Int, mask: Value | None) -> None:
            place, there = fn.gep(source, fn.sub(i, skip), ELEMENT), fn.gep(to, i, ELEMENT)
            if mask is None:
                fn.store(fn.load(type_, place), there)
            else:
                fn.masked_store(fn.masked_load(type_, place, mask), there, mask)

        self._pieces(begin, end, piece)
