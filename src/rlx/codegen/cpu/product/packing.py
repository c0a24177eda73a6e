"""Operands of a contraction in the order in which its kernel reads them.

The right operand is stored in `Panels`: packed once from weights, or on the fly by native code. A left one
stored by columns is copied to tiles of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.microkernel import Kind, kind_of, tile_of
from rlx.codegen.native.irtext import Value, constant, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    builder,
    gep,
    i64,
    insert,
    lanes,
    load,
    loop,
    masked_load,
    noalias,
    ptr,
    round_up,
    shuffle,
    store,
    transpose,
    udiv,
    uge,
    umin,
    urem,
)
from rlx.errors import ShapeError
from rlx.ir.dtype import dtype as as_dtype
from rlx.kernel.layout import Layout
from rlx.kernel.panels import Panels
from rlx.records import dataclass
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


def panel_packer(kind: Kind, vectors: int, k_stride: Count, column_stride: Count) -> str:
    """Name of a function that packs neighbouring panels of B from a matrix in place: `pack_panels`.

    A panel has `vectors` vectors of columns. A stride known to be 1 chooses a faster copy.
    """
    form = "rows" if column_stride == 1 else "columns" if k_stride == 1 else "elements"
    name = f"rlx.pack.{form}.{kind.element}.{kind.group}.{kind.lanes}x{vectors}"
    return pack_panels.written(name, kind=kind, vectors=vectors, form=form)


@native(internal=True, noinline=True)
def pack_panels(
    source: noalias,
    k_stride: i64,
    column_stride: i64,
    panels: noalias,
    depth: i64,
    left: i64,
    count: i64,
    *,
    kind: Kind,
    vectors: int,
    form: str,
) -> None:
    """Write panels[p][k][column] (with k in groups) for p < count and k < depth.

    `left` columns exist in all: those after them are filled from inside the matrix and mean nothing.
    """
    packer = _PanelPacker(
        kind, vectors * kind.lanes, source, k_stride, column_stride, panels, depth, left, count
    )
    if form == "rows":
        packer.pack_rows()
    else:
        packer.pack_columns(form == "columns")


@dataclass(frozen=True)
class _PanelPacker:
    """Works in units: one row of a panel, which holds a group of k."""

    kind: Kind
    columns: int
    source: ptr
    k_stride: i64
    column_stride: i64
    panels: ptr
    depth: i64
    left: i64
    count: i64

    # ---- places

    @inline
    def place(self, start: ptr, offset: Count) -> ptr:
        return gep(start, offset, self.kind.moved)

    @inline
    def panel(self, index: Count, column: Count) -> ptr:
        """Where a column of a packed panel begins."""
        size = round_up(self.depth, self.kind.group) * self.columns
        return self.place(self.place(self.panels, index * size), column * self.kind.group)

    @inline
    def put(self, values: Sequence[Value], panel: ptr, unit: Count, apart: int) -> None:
        """Store vectors at a unit of a panel, `apart` elements from each to the next."""
        row = self.place(panel, unit * (self.columns * self.kind.group))
        for i, value in enumerate(values):
            store(value, self.place(row, i * apart), size_bytes(self.kind.moved))

    # ---- columns side by side

    @inline
    def pack_rows(self) -> None:
        """One unit through all panels, then the next, so that long pieces of rows are read."""
        size, group = self.kind.lanes, self.kind.group
        row_type = vector(self.kind.moved, size)
        units, rest = udiv(self.depth, group), urem(self.depth, group)
        last = self.columns - size

        def read(row: ptr, mask: Value | None) -> list[Value]:
            whole = range(0, self.columns if mask is None else last, size)
            out: list[Value] = [load(row_type, self.place(row, i)) for i in whole]
            if mask is not None:
                out.append(masked_load(row_type, self.place(row, last), mask))
            return out

        def copy(unit: Count, count: int, mask: Value | None) -> None:
            """A unit of which only `count` k exist."""
            firsts = [self.place(self.source, (unit * group + i) * self.k_stride) for i in range(count)]
            for p in loop(self.count):
                rows = [read(self.place(first, p * self.columns), mask) for first in firsts]
                empty = [[constant(row_type, 0)] * len(rows[0])] * (group - count)
                mixed = [interleaved(list(parts)) for parts in zip(*rows, *empty, strict=True)]
                self.put(mixed, self.panel(p, 0), unit, size * group)

        def every(mask: Value | None) -> None:
            for unit in loop(units):
                copy(unit, group, mask)
            for count in range(1, group):
                if rest == count:
                    copy(units, count, mask)

        # Columns run out in the last vector of the last panel only, and such a panel comes alone.
        in_last = self.left - last
        if uge(in_last, size):
            every(None)
        else:
            every(lanes(in_last, size))

    # ---- separate columns

    @inline
    def pack_columns(self, contiguous: bool) -> None:
        """A vector of columns through all units, then the next; each is contiguous, or none is."""
        group = self.kind.group
        units, rest = udiv(self.depth, group), urem(self.depth, group)
        for p in loop(self.count):
            first = p * self.columns
            for column in loop(0, self.columns, self.kind.lanes):
                places = self.lane_places(first + column)
                to = self.panel(p, column)
                if contiguous:
                    self.pack_squares(places, to, units)
                else:
                    self.pack_elements(places, to, units)
                for count in range(1, group):
                    if rest == count:
                        self.pack_unit(places, to, units, count)

    @inline
    def lane_places(self, column: Count) -> list[ptr]:
        """Where each lane's column begins; lanes past the matrix repeat its last column."""
        end = self.left - 1
        columns = [umin(column + lane, end) for lane in range(self.kind.lanes)]
        return [self.place(self.source, c * self.column_stride) for c in columns]

    @inline
    def pack_elements(self, places: list[ptr], panel: ptr, units: Count) -> None:
        for unit in loop(units):
            self.pack_unit(places, panel, unit, self.kind.group)

    @inline
    def pack_unit(self, places: list[ptr], panel: ptr, unit: Count, count: int) -> None:
        """One unit, element by element; only `count` of its k exist."""
        group = self.kind.group
        row = constant(vector(self.kind.moved, self.kind.lanes * group), 0)
        for i in range(count):
            distance = (unit * group + i) * self.k_stride
            for lane, place in enumerate(places):
                loaded = load(self.kind.moved, self.place(place, distance))
                row = insert(row, loaded, lane * group + i)
        self.put([row], panel, unit, 0)

    @inline
    def pack_squares(self, places: list[ptr], panel: ptr, units: Count) -> None:
        """Each column is contiguous: squares of lanes x units; the last one ends with the matrix."""
        size, group, element = self.kind.lanes, self.kind.group, self.kind.moved
        type_ = vector(element if group == 1 else f"i{8 * group * size_bytes(element)}", size)
        if uge(units, size):
            end = units - size
            for first in loop(0, units, size):
                unit = umin(first, end)
                k = unit * group
                loaded = [load(type_, self.place(place, k), size_bytes(element)) for place in places]
                self.put(transpose(loaded), panel, unit, self.columns * group)
        else:
            self.pack_elements(places, panel, units)


def panel_widener(kind: Kind) -> str:
    """Name of a function that widens a panel of weights of 16 bits: `widen_panel`."""
    return widen_panel.written(f"rlx.widen.{kind.element}.{kind.lanes}", kind=kind)


@native(internal=True, noinline=True)
def widen_panel(source: noalias, to: noalias, vectors: i64, *, kind: Kind) -> None:
    """Write the vectors of a panel as they are multiplied."""
    for n in loop(vectors):
        place = gep(source, n * kind.lanes, kind.element)
        store(kind.read_b(builder(), place, None), gep(to, n * kind.lanes, kind.accumulator))


def interleaved(rows: list[Value]) -> Value:
    """Lane 0 of every row, then lane 1 of every row ...; the number of rows is a power of two."""
    if len(rows) == 1:
        return rows[0]
    even, odd = interleaved(rows[::2]), interleaved(rows[1::2])
    width = even.width
    return shuffle(even, odd, [i // 2 + i % 2 * width for i in range(2 * width)])


def tile_packer(kind: Kind, width: int) -> str:
    """Name of a function that packs row tiles of an A stored as [k][m]: `pack_tiles`."""
    return pack_tiles.written(f"rlx.pack.tiles.{kind.element}.{width}", kind=kind, width=width)


@native(internal=True, noinline=True)
def pack_tiles(
    source: noalias,
    k_stride: i64,
    tiles: noalias,
    tile_stride: i64,
    depth: i64,
    starts: ptr,
    count: i64,
    *,
    kind: Kind,
    width: int,
) -> None:
    """Write tiles[t][k][i] = source[k][starts[t] + i] for i < width.

    It goes through all tiles a few k at a time: pieces of source rows are read while they are in L1, and each
    tile is written in whole cache lines.
    """
    element, row = kind.moved, vector(kind.moved, width)
    for first in loop(0, depth, _ROWS_AT_ONCE):
        stop = umin(first + _ROWS_AT_ONCE, depth)
        for t in loop(count):
            column = gep(source, starts[t], kind.element)
            packed = gep(tiles, t * tile_stride, kind.element)
            for k in loop(first, stop):
                loaded = load(row, gep(column, k * k_stride, element))
                store(loaded, gep(packed, k * width, element))
