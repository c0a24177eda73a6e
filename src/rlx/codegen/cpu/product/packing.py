"""Operands of a contraction in the order in which its kernel reads them.

The right operand is stored in `Panels`: packed once from weights, or on the fly by native code. A left one
stored by columns is copied to tiles of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from rlx.codegen.cpu.product.microkernel import Kind, kind_of, tile_of
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.errors import ShapeError
from rlx.ir.dtype import dtype as as_dtype
from rlx.kernel.layout import Layout
from rlx.kernel.panels import Panels
from rlx.target.cpu import Target


def panels_of(k: int, n: int, target: Target, dtype: str = "f32") -> Panels:
    """The layout that kernels for `target` read a constant [k, n] matrix in.

    >>> from rlx.target.cpu import resolve
    >>> panels_of(10, 50, resolve("x86-64-v4")).elements
    640
    """
    kind = kind_of(dtype, target)
    return Panels(k, n, tile_of(dtype, target)[1] * kind.lanes, kind.lanes, kind.group)


def own_panels(stated: Layout, target: Target, dtype: str) -> Panels | None:
    """The panels that a layout consists of, None where kernels for `target` read another one.

    >>> from rlx.target.cpu import resolve
    >>> own_panels(Panels(10, 50, 8, 4).layout, resolve("x86-64-v4"), "f32") is None
    True
    """
    k, n = stated.sizes if len(stated.sizes) == 2 else (None, None)
    if k is None or n is None:
        return None
    own = panels_of(k, n, target, dtype)
    return own if own.layout == stated else None


def pack_weights(w: np.ndarray, target: Target, dtype: str = "f32") -> np.ndarray:
    """The matrix `w` [K, N] in the panels that kernels for `target` read.

    >>> from rlx.target.cpu import resolve
    >>> w = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> pack_weights(w, resolve("x86-64"))
    array([0., 1., 2., 0., 3., 4., 5., 0.], dtype=float32)
    """
    if w.ndim != 2:
        raise ShapeError(
            f"weights to pack must be a matrix [K, N], not of shape {w.shape}: reshape them first"
        )
    k, n = w.shape
    stored = as_dtype("i8" if dtype == "u8" else dtype)  # u8 is the left operand of signed weights
    return panels_of(k, n, target, dtype).layout.pack(w.astype(stored.np))


# ---- panels packed at run time

_ROWS_AT_ONCE = 8  # k that all row tiles take together

_PANEL_PARAMS = [
    ("ptr noalias", "source"),
    ("i64", "k_stride"),
    ("i64", "column_stride"),
    ("ptr noalias", "panels"),
    ("i64", "depth"),
    ("i64", "left"),
    ("i64", "count"),
]


def emit_panel_packer(module: Module, kind: Kind, vectors: int, k_stride: Int, column_stride: Int) -> str:
    """An internal function that packs neighbouring panels of B from a matrix in place; gives its name.

    `void pack(source, k_stride, column_stride, panels, depth, left, count)` writes panels[p][k][column] (with
    k in groups) for p < count and k < depth. A panel has `vectors` vectors of columns. `left` columns exist
    in all: those after them are filled from inside the matrix and mean nothing. A stride known to be 1
    chooses a faster copy.
    """
    form = "rows" if column_stride == 1 else "columns" if k_stride == 1 else "elements"
    name = f"rlx.pack.{form}.{kind.element}.{kind.group}.{kind.lanes}x{vectors}"
    if not module.defines(name):
        fn = module.function(name, _PANEL_PARAMS, internal=True, noinline=True)
        _PanelPacker(fn, kind, vectors).emit(form)
    return name


class _PanelPacker:
    """Works in units: one row of a panel, which holds a group of k."""

    def __init__(self, fn: Function, kind: Kind, vectors: int) -> None:
        self.fn, self.kind, self.columns = fn, kind, vectors * kind.lanes
        self.source, self.k_stride, self.column_stride, self.panels, self.depth, self.left, self.count = (
            fn.args
        )
        self.row_type = vector(kind.moved, kind.lanes)
        self.units = fn.udiv(self.depth, kind.group)  # full ones
        self.rest = fn.urem(self.depth, kind.group)

    def emit(self, form: str) -> None:
        fn, lanes = self.fn, self.kind.lanes
        if form == "rows":
            return self.rows()
        pack = self.transposed if form == "columns" else self.elements

        def panel(p: Int, _: list[Value]) -> None:
            first = fn.mul(p, self.columns)

            def strip(column: Int, _: list[Value]) -> None:
                places = self.lane_places(fn.add(first, column))
                to = self.panel(p, column)
                pack(places, to)
                self.last_unit(lambda count: self.element_unit(places, to, self.units, count))

            fn.loop(0, self.columns, lanes, [], strip)

        fn.loop(0, self.count, 1, [], panel)
        return None

    def last_unit(self, pack: Callable[[int], None]) -> None:
        """pack(count) where the last unit holds only `count` k."""
        for count in range(1, self.kind.group):
            self.fn.branch(self.fn.cmp("eq", self.rest, count), functools.partial(pack, count))

    # ---- places

    def at(self, place: Value, offset: Int) -> Value:
        return self.fn.gep(place, offset, self.kind.moved)

    def panel(self, index: Int, column: Int) -> Value:
        """Where a column of a packed panel begins."""
        fn, group = self.fn, self.kind.group
        size = fn.mul(fn.round_up(self.depth, group), self.columns)
        return self.at(self.at(self.panels, fn.mul(index, size)), fn.mul(column, group))

    def store(self, values: Sequence[Value], panel: Value, unit: Int, apart: int) -> None:
        """Store vectors at a unit of a panel, `apart` elements from each to the next."""
        row = self.at(panel, self.fn.mul(unit, self.columns * self.kind.group))
        for i, value in enumerate(values):
            self.fn.store(value, self.at(row, i * apart), size_bytes(self.kind.moved))

    def lane_places(self, column: Int) -> list[Value]:
        """Where each lane's column begins; lanes past the matrix repeat its last column."""
        fn, end = self.fn, self.fn.sub(self.left, 1)
        columns = [fn.umin(fn.add(column, lane), end) for lane in range(self.kind.lanes)]
        return [self.at(self.source, fn.mul(c, self.column_stride)) for c in columns]

    # ---- columns side by side

    def rows(self) -> None:
        """One unit through all panels, then the next, so that long pieces of rows are read."""
        fn, lanes, group = self.fn, self.kind.lanes, self.kind.group
        last = self.columns - lanes

        def vectors(row: Value, mask: Value | None) -> list[Value]:
            whole = range(0, self.columns if mask is None else last, lanes)
            loaded = [fn.load(self.row_type, self.at(row, i)) for i in whole]
            return (
                loaded if mask is None else [*loaded, fn.masked_load(self.row_type, self.at(row, last), mask)]
            )

        def copy(unit: Int, count: int, mask: Value | None) -> None:
            firsts = [
                self.at(self.source, fn.mul(fn.add(fn.mul(unit, group), i), self.k_stride))
                for i in range(count)
            ]

            def panel(p: Int, _: list[Value]) -> None:
                rows = [vectors(self.at(first, fn.mul(p, self.columns)), mask) for first in firsts]
                empty = [[constant(self.row_type, 0)] * len(rows[0])] * (group - count)
                mixed = [self.interleave(list(parts)) for parts in zip(*rows, *empty, strict=True)]
                self.store(mixed, self.panel(p, 0), unit, lanes * group)

            fn.loop(0, self.count, 1, [], panel)

        def every(mask: Value | None) -> None:
            fn.loop(0, self.units, 1, [], lambda unit, _: copy(unit, group, mask))
            self.last_unit(lambda count: copy(self.units, count, mask))

        # Columns run out in the last vector of the last panel only, and such a panel comes alone.
        rest = fn.sub(self.left, last)
        fn.branch(fn.cmp("uge", rest, lanes), lambda: every(None), lambda: every(fn.lanes(rest, lanes)))

    def interleave(self, rows: list[Value]) -> Value:
        """Lane 0 of every row, then lane 1 of every row ...; the number of rows is a power of two."""
        if len(rows) == 1:
            return rows[0]
        even, odd = self.interleave(rows[::2]), self.interleave(rows[1::2])
        return self.fn.shuffle(even, odd, [i // 2 + i % 2 * even.width for i in range(2 * even.width)])

    # ---- separate columns

    def elements(self, places: list[Value], panel: Value) -> None:
        group = self.kind.group
        self.fn.loop(0, self.units, 1, [], lambda unit, _: self.element_unit(places, panel, unit, group))

    def element_unit(self, places: list[Value], panel: Value, unit: Int, count: int) -> None:
        """One unit, element by element; only `count` of its k exist."""
        fn, group = self.fn, self.kind.group
        lanes = constant(vector(self.kind.moved, self.kind.lanes * group), 0)
        for i in range(count):
            distance = fn.mul(fn.add(fn.mul(unit, group), i), self.k_stride)
            for lane, place in enumerate(places):
                loaded = fn.load(self.kind.moved, self.at(place, distance))
                lanes = fn.insert(lanes, loaded, lane * group + i)
        self.store([lanes], panel, unit, 0)

    def transposed(self, places: list[Value], panel: Value) -> None:
        """Each column is contiguous: squares of lanes x units; the last one ends with the matrix."""
        fn, lanes, group = self.fn, self.kind.lanes, self.kind.group
        type_ = self.row_type if group == 1 else vector(f"i{8 * group * size_bytes(self.kind.moved)}", lanes)

        def squares() -> None:
            end = fn.sub(self.units, lanes)

            def square(unit: Int, _: list[Value]) -> None:
                unit = fn.umin(unit, end)
                k = fn.mul(unit, group)
                loaded = [fn.load(type_, self.at(place, k), size_bytes(self.kind.moved)) for place in places]
                self.store(fn.transpose(loaded), panel, unit, self.columns * group)

            fn.loop(0, self.units, lanes, [], square)

        fn.branch(fn.cmp("uge", self.units, lanes), squares, lambda: self.elements(places, panel))


def emit_tile_packer(module: Module, kind: Kind, width: int) -> str:
    """An internal function that packs row tiles of an A stored as [k][m]; gives its name.

    `void pack(source, k_stride, tiles, tile_stride, depth, starts, count)` writes tiles[t][k][i] =
    source[k][starts[t] + i] for i < width. It goes through all tiles a few k at a time: pieces of source rows
    are read while they are in L1, and each tile is written in whole cache lines.
    """
    name = f"rlx.pack.tiles.{kind.element}.{width}"
    if module.defines(name):
        return name
    params = [
        ("ptr noalias", "source"),
        ("i64", "k_stride"),
        ("ptr noalias", "tiles"),
        ("i64", "tile_stride"),
        ("i64", "depth"),
        ("ptr", "starts"),
        ("i64", "count"),
    ]
    fn = module.function(name, params, internal=True, noinline=True)
    source, k_stride, tiles, tile_stride, depth, starts, count = fn.args

    def rows(first: Int, _: list[Value]) -> None:
        stop = fn.umin(fn.add(first, _ROWS_AT_ONCE), depth)

        def tile(t: Int, _: list[Value]) -> None:
            column = fn.gep(source, fn.field(starts, t), kind.element)
            packed = fn.gep(tiles, fn.mul(t, tile_stride), kind.element)

            def row(k: Int, _: list[Value]) -> None:
                loaded = fn.load(vector(kind.moved, width), fn.gep(column, fn.mul(k, k_stride), kind.moved))
                fn.store(loaded, fn.gep(packed, fn.mul(k, width), kind.moved))

            fn.loop(first, stop, 1, [], row)

        fn.loop(0, count, 1, [], tile)

    fn.loop(0, depth, _ROWS_AT_ONCE, [], rows)
    return name
