"""The functions that a Winograd kernel calls: both transforms, and products of a register tile of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Image
from rlx.codegen.cpu.conv.winograd_direct import is_spoilt
from rlx.codegen.cpu.conv.winograd_numbers import Integers, Reals
from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.frame import ArgumentTable
from rlx.codegen.cpu.primitives import memory_type
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.ir.types import Shape

Numbers = Reals | Integers


def _each_tile(
    fn: Function,
    tiles: Int,
    place: Sequence[Int],
    tiles_h: Int,
    tiles_w: Int,
    body: Callable[[Int, Int, Int, Int], None],
) -> None:
    """body(number, image, row, column) of `tiles` tiles in row-major order from `place` on."""

    def one(t: Int, at: list[Value]) -> list[Value]:
        image, row, column = at
        body(t, image, row, column)
        column = fn.value(fn.add(column, 1))
        wrap = fn.cmp("eq", column, tiles_w)
        row = fn.value(fn.add(row, fn.zext(wrap, "i64")))
        column = fn.value(fn.select(wrap, 0, column))
        wrap = fn.cmp("eq", row, tiles_h)
        image = fn.value(fn.add(image, fn.zext(wrap, "i64")))
        return [image, fn.value(fn.select(wrap, 0, row)), column]

    fn.loop(0, tiles, 1, list(place), one)


def emit_input_transform(module: Module, numbers: Numbers, m: int, lanes: int, fill: int = 0) -> str:
    """Name of the function that writes transformed tiles as [point][block][tile][lanes]; `fill` is what
    surrounds an image.
    """
    name = f"winograd.input{m}.{numbers.name}.{fill}"
    if module.defines(name):
        return name
    words = ("batch", "block", "line", "height", "width", "low_h", "low_w")
    more = ("step", "blocks", "tiles", "image", "row", "column", "tiles_h", "tiles_w")
    params = [
        ("ptr noalias", "x"),
        *(("i64", w) for w in words),
        ("ptr noalias", "to"),
        *(("i64", w) for w in more),
    ]
    fn = module.function(name, params, internal=True, noinline=True)
    x, batch, block, line, height, width, low_h, low_w, to, step, blocks, tiles, *rest = fn.args
    place, (tiles_h, tiles_w) = rest[:3], rest[3:]
    side, type_ = m + 2, vector(numbers.image, lanes)
    edge = fn.alloca(numbers.image, side * side * lanes)

    def in_block(b: Int, _: list[Value]) -> None:
        plane = fn.mul(b, block)
        target = fn.gep(to, fn.mul(fn.mul(b, tiles), lanes), numbers.point)

        def tile(t: Int, image: Int, row: Int, column: Int) -> None:
            top, left = fn.sub(fn.mul(row, m), low_h), fn.sub(fn.mul(column, m), low_w)
            start = fn.add(
                plane, fn.add(fn.mul(image, batch), fn.add(fn.mul(top, line), fn.mul(left, lanes)))
            )
            source = fn.gep(x, start, numbers.image)
            inside: Value = fn.value(fn.cmp("sge", top, 0))
            for condition in (
                fn.cmp("sge", left, 0),
                fn.cmp("sle", fn.add(top, side), height),
                fn.cmp("sle", fn.add(left, side), width),
            ):
                inside = fn.value(fn.and_(inside, condition))

            def copy() -> list[Int | Value]:
                """A tile that reaches past an edge, with `fill` there."""
                for i in range(side):
                    in_line = fn.cmp("ult", fn.add(top, i), height)
                    for j in range(side):
                        there = fn.and_(in_line, fn.cmp("ult", fn.add(left, j), width))
                        spot = fn.gep(source, fn.add(fn.mul(line, i), j * lanes), numbers.image)
                        got = fn.if_value(
                            there,  # type: ignore[arg-type]
                            lambda spot=spot: [fn.load(type_, spot)],  # type: ignore[misc]
                            lambda: [constant(type_, fill)],
                        )
                        fn.store(got[0], fn.gep(edge, (i * side + j) * lanes, numbers.image))
                return [edge, side * lanes]

            begin, stride = fn.if_value(inside, lambda: [source, line], copy)
            lines = [fn.gep(begin, fn.mul(stride, i), numbers.image) for i in range(side)]
            grid = [
                [numbers.read(fn, fn.gep(p, j * lanes, numbers.image), lanes) for j in range(side)]
                for p in lines
            ]
            there = fn.gep(target, fn.mul(t, lanes), numbers.point)
            for k, value in enumerate(v for r in numbers.into(fn, m, grid) for v in r):
                fn.store(value, fn.gep(there, fn.mul(step, k), numbers.point))

        _each_tile(fn, tiles, place, tiles_h, tiles_w, tile)

    fn.loop(0, blocks, 1, [], in_block)
    return name


def emit_products(module: Module, kind: Kind, pixels: int, vectors: int) -> str:
    """Name of the function products(x, w, y, blocks, step): sums of one register tile over all input
    channels.

    `step` is the number of elements from one block of channels to the next, in x and in y.
    """
    name = f"winograd.{kind.element}.{pixels}x{vectors}"
    if module.defines(name):
        return name
    params = [
        ("ptr noalias", "x"),
        ("ptr noalias", "w"),
        ("ptr noalias", "y"),
        ("i64", "blocks"),
        ("i64", "step"),
    ]
    fn = module.function(name, params, internal=True, noinline=True)
    x, w, y, blocks, step = fn.args
    lanes, width = kind.lanes, vectors * kind.lanes

    def block(b: Int, sums: list[Value]) -> list[Value]:
        there = fn.gep(x, fn.mul(b, step), kind.element)
        rows = Places.of(fn, there, [p * lanes for p in range(pixels)], kind.group, kind.element)
        panel = fn.gep(w, fn.mul(b, lanes * width), kind.element)
        starts = [j * lanes * kind.group for j in range(vectors)]
        columns = Places.of(fn, panel, starts, width * kind.group, kind.element)
        return accumulate(fn, kind, rows, columns, lanes, sums)

    sums = fn.loop(0, blocks, 1, [kind.zero] * (pixels * vectors), block)
    for n, total in enumerate(sums):
        there = fn.gep(y, fn.mul(step, n % vectors), kind.accumulator)
        fn.store(total, fn.gep(there, n // vectors * lanes, kind.accumulator))
    return name


def _sums_of(
    fn: Function, numbers: Numbers, at: Value, step: Int, side: int, type_: str
) -> list[list[Value]]:
    """The sums of a tile at all points."""
    places = [fn.gep(at, fn.mul(step, n), numbers.sums) for n in range(side * side)]
    return [[fn.load(type_, p) for p in places[i * side : (i + 1) * side]] for i in range(side)]


def _part_of(fn: Function, numbers: Numbers, parts: Value, number: Int, elements: int) -> Value:
    """Where the outputs of a tile are summed up."""
    return fn.gep(parts, fn.mul(number, elements), numbers.sums)


def emit_part(module: Module, numbers: Numbers, m: int, lanes: int, adds: bool) -> str:
    """Name of the function part(sums, to, step, first, last, tiles): outputs of some input channels, stored
    as [block][tile][pixel][lanes], or added to what is there.
    """
    name = f"winograd.part{m}.{numbers.name}" + (".add" if adds else "")
    if module.defines(name):
        return name
    params = [("ptr noalias", "sums"), ("ptr noalias", "to")]
    params += [("i64", w) for w in ("step", "first", "last", "tiles")]
    fn = module.function(name, params, internal=True, noinline=True)
    sums, to, step, first, last, tiles = fn.args
    type_ = vector(numbers.sums, lanes)

    def tile(number: Int, _: list[Value]) -> None:
        at = fn.gep(sums, fn.mul(number, lanes), numbers.sums)
        there = _part_of(fn, numbers, to, number, m * m * lanes)
        results = numbers.out(fn, m, _sums_of(fn, numbers, at, step, m + 2, type_))
        for n, value in enumerate(v for r in results for v in r):
            place = fn.gep(there, n * lanes, numbers.sums)
            fn.store(fn.value(fn.add(value, fn.load(type_, place))) if adds else value, place)

    fn.loop(fn.mul(first, tiles), fn.mul(last, tiles), 1, [], tile)
    return name


def emit_output_transform(
    module: Module,
    name: str,
    table: ArgumentTable,
    epilogue: Epilogue,
    y: Image,
    m: int,
    lanes: int,
    out: Shape,
    channels: int,
    numbers: Numbers,
    in_parts: bool,
    repair: Callable[[Function, Sequence[Int], Value], None],
) -> str:
    """Name of the function that turns sums into outputs and stores them behind the epilogue.

    Lanes after the last of `channels` are stored as zeros. With `in_parts`, outputs of the input channels
    before are added. repair(fn, place, stage) computes the sums of the tile at `place` (image, block, first
    line and pixel) without transforms, where those hold Inf or NaN.
    """
    name = f"{name}.output"
    words = ("step", "first", "last", "tiles", "image", "row", "column", "tiles_h", "tiles_w")
    params = [("ptr", "args"), ("ptr noalias", "sums"), ("ptr", "before"), *(("i64", w) for w in words)]
    fn = module.function(name, params, internal=True, noinline=True)
    _, sums, before, step, first, last, tiles, *rest = fn.args
    place, (tiles_h, tiles_w) = rest[:3], rest[3:]
    side, type_ = m + 2, vector(numbers.sums, lanes)
    height, width = (table.dim(fn, d) for d in out[1:])
    steps = [table.dim(fn, s) for s in (y.batch, y.block, y.axes[1])]
    element = memory_type(table.outputs[0].dtype)
    pointer = table.operand(fn, len(table.inputs)).pointer
    stage = fn.alloca(numbers.sums, m * m * lanes)

    def block(b: Int, _: list[Value]) -> None:
        source = fn.gep(sums, fn.mul(fn.mul(b, tiles), lanes), numbers.sums)
        mask = fn.lanes(fn.sub(channels, fn.mul(b, lanes)), lanes) if channels % lanes else None
        lane = Lane(2, 0, lanes, mask)

        def tile(t: Int, image: Int, row: Int, column: Int) -> None:
            grid = _sums_of(fn, numbers, fn.gep(source, fn.mul(t, lanes), numbers.sums), step, side, type_)
            earlier = _part_of(fn, numbers, before, fn.add(fn.mul(b, tiles), t), m * m * lanes)
            for n, value in enumerate(v for r in numbers.out(fn, m, grid) for v in r):
                if in_parts:
                    value = fn.value(fn.add(value, fn.load(type_, fn.gep(earlier, n * lanes, numbers.sums))))
                fn.store(value, fn.gep(stage, n * lanes, numbers.sums))
            top, left = fn.mul(row, m), fn.mul(column, m)
            if isinstance(numbers, Reals):
                fn.branch(is_spoilt(fn, grid), lambda: repair(fn, (image, b, top, left), stage))
            common = epilogue.at(fn, [image, b, 0, 0, top, left], lane, None, None)
            for e in epilogue.fixed:
                common(e)
            start = fn.add(fn.mul(image, steps[0]), fn.mul(b, steps[1]))
            start = fn.add(start, fn.add(fn.mul(top, steps[2]), fn.mul(left, lanes)))
            origin = fn.gep(pointer, start, element)
            lines = fn.smin(fn.sub(height, top), m)
            pixels = fn.smin(fn.sub(width, left), m)

            def line(i: Int, _: list[Value]) -> None:
                there = fn.gep(origin, fn.mul(i, steps[2]), element)

                def pixel(j: Int, _: list[Value]) -> None:
                    value = fn.load(
                        type_, fn.gep(stage, fn.mul(fn.add(fn.mul(i, m), j), lanes), numbers.sums)
                    )
                    point = [image, b, 0, 0, fn.add(top, i), fn.add(left, j)]
                    result = epilogue.value(epilogue.at(fn, point, lane, value, common))
                    if mask is not None:
                        result = fn.select(mask, result, constant(result.type, 0))
                    fn.store(result, fn.gep(there, fn.mul(j, lanes), element))

                fn.loop(0, pixels, 1, [], pixel)

            fn.loop(0, lines, 1, [], line)

        _each_tile(fn, tiles, place, tiles_h, tiles_w, tile)

    fn.loop(first, last, 1, [], block)
    return name
