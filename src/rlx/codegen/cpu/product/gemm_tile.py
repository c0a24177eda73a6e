"""The functions a GEMM driver calls for each register tile: accumulate over k, apply the epilogue, store.

They are written on first use, one per (rows, vectors, panels, ragged or not). Sizes known to the compiler are
constants in them; the others come through a `Frame` on the driver's stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import TileEnd
from rlx.codegen.cpu.product.gemm_rows import row_sum_at
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import Value, constant, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    builder,
    byte_at,
    field,
    gep,
    i32,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    noalias,
    prefetch,
    ptr,
    select,
    splat,
    store,
    uge,
    umin,
    zext,
)
from rlx.kernel.quads import GROUP, MIDDLE, QuadPanels
from rlx.records import dataclass

LINE = 64  # bytes of a cache line
LONG = 128  # k from which a tile takes as long as lines of C take to come from memory


@dataclass(frozen=True)
class TileWriter:
    """Writes the tile functions of one kernel.

    The frame holds n, k, a_row, a_k, b_k, c_row, the batch indices, and as the flags ask `stage`, `fresh`,
    `done`.
    """

    name: str
    kind: Kind
    vectors: int  # of a full panel
    end: TileEnd
    panel_stride: int | None  # elements from a panel of B to the next, for tiles of several; None: from k
    packed_weights: bool
    staged: bool  # sums go through a tile in L1, where one function finishes them
    masked_b: bool  # B is read in place up to the last column of the matrix
    resumes: bool  # k comes in blocks, between which C holds the sums
    deep: bool  # whether k is known to be `LONG`
    beside: tuple[tuple[int, str], ...] = ()  # matrices like C that the epilogue reads: field, element type
    quads: QuadPanels | None = None  # what the panels of B are

    @property
    def step_bytes(self) -> int:
        """Bytes of a full panel that one step reads."""
        return self.vectors * self.kind.lanes * self.kind.group * size_bytes(self.kind.element)

    @property
    def pace(self) -> int:
        """Bytes of later weights that a step prefetches: a cache line, if it reads as much."""
        return min(self.step_bytes, LINE)

    def bytes_of_step(self, form: TileForm) -> int:
        """Bytes of a panel that one step of a tile reads."""
        return self.step_bytes // self.vectors * form.vectors

    def steps_of_lines(self, form: TileForm) -> int:
        """Steps that read whole cache lines of a panel."""
        return LINE // math.gcd(self.bytes_of_step(form), LINE)

    @property
    def asks_early(self) -> bool:
        """Whether tiles prefetch lines of C before they sum: where the sums take long, and fill C at once."""
        return self.deep and not self.resumes

    @inline
    def columns(self, form: TileForm, k: Count) -> list[Count]:
        """First element of every vector of B at a step."""
        vector = self.kind.lanes * self.kind.group
        stride = k * (self.vectors * self.kind.lanes) if self.panel_stride is None else self.panel_stride
        return [p * stride + j * vector for p in range(form.panels) for j in range(form.vectors)]

    def function(self, rows: int, vectors: int, panels: int = 1, masked: bool = False, ahead: int = 0) -> str:
        """Name of the function for `rows` x (vectors * panels) accumulators."""
        several = f"x{panels}" if panels > 1 else ""
        name = f"{self.name}.{rows}x{vectors}{several}" + ("m" if masked else "") + ("a" if ahead else "")
        ragged = masked and builder().module.target.has_avx512
        return compute_tile.written(name, writer=self, form=TileForm(rows, vectors, panels, ragged, ahead))


@dataclass(frozen=True)
class TileForm:
    """What the code of a tile depends on: its rows, and the vectors of each of its panels."""

    rows: int
    vectors: int
    panels: int
    ragged: bool  # whether the last vector of a row has a mask
    ahead: int = 0  # bytes from what is read of a packed panel to what is prefetched of it

    @property
    def width(self) -> int:
        """Vectors of a row."""
        return self.panels * self.vectors


@native(internal=True, noinline=True)
def compute_tile(
    args: ptr,
    frame: ptr,
    a: noalias,
    b: noalias,
    c: ptr,
    row: i64,
    column: i64,
    later: ptr,
    *,
    writer: TileWriter,
    form: TileForm,
) -> None:
    """Compute the tile of C whose first element is (row, column); the pointers point to its operands, and to
    packed weights to prefetch meanwhile, `pace` bytes per step (`b` itself: nothing to prefetch).
    """
    f, kind, end = builder(), writer.kind, writer.end
    rows, vectors, panels, width = form.rows, form.vectors, form.panels, form.width
    a_row, a_k, k, c_row = end.frame.named(frame, "a_row", "a_k", "k", "c_row")
    b_k: Count = vectors * kind.lanes if writer.packed_weights else end.frame.read(f, frame, "b_k")
    # Source: rows of A, and the columns of each panel of B.
    steps = [i * a_row for i in range(rows)]
    a_places = Places.of(f, a, steps, a_k * kind.group, kind.row_element)
    b_places = Places.of(f, b, writer.columns(form, k), b_k * kind.group, kind.element)
    # Tile: rows of C, whose last vector may be ragged. Without masks in registers, B is packed and the stage
    # takes whole vectors.
    mask = None
    if form.ragged:
        (n,) = end.frame.named(frame, "n")
        mask = lanes(n - (column + (width - 1) * kind.lanes), kind.lanes)
    lines = [gep(c, i * c_row, end.c_element) for i in range(rows)]
    tile = Tile(lines, width, kind.lanes, end.c_element, mask)
    if writer.asks_early:
        tile.ask(beside_tile(args, writer.beside, row, column, c_row, rows))

    start = [kind.zero] * (rows * width)
    panel_places: list[ptr] = []
    if writer.quads is not None:
        assert writer.panel_stride is not None
        panel_places = [gep(b, p * writer.panel_stride, kind.element) for p in range(panels)]
        start = starts_of_tile(kind, writer.quads, panel_places, vectors, a, steps)
    if writer.resumes:
        (fresh,) = end.frame.named(frame, "fresh")
        start = start if fresh != 0 else tile.sums_so_far()
    meanwhile = None
    if writer.packed_weights:
        pace = select(later == b, 0, writer.pace)

        def ask_for_later(step: i64) -> None:
            prefetch(byte_at(later, step * pace), locality=2)

        if form.ahead:
            meanwhile = weights_ahead(writer, form, b, k)
        elif panels == 1:
            meanwhile = ask_for_later
    each = writer.steps_of_lines(form) if form.ahead else 1
    own_mask = mask if writer.masked_b else None
    sums = accumulate(f, kind, a_places, b_places, k, start, own_mask, meanwhile, each)
    if writer.quads is not None:
        sums = with_room(kind, writer.quads, panel_places, vectors, a, steps, sums)

    # End: the epilogue, where these are all of the sums.
    def finish() -> None:
        if writer.staged:
            end.through_stage(args, frame, sums, c, row, column, rows)
        else:
            at: list[tuple[Count, Count, Value | None]] = [(row, column, None)] * len(sums)  # unused
            if writer.end.epilogue is not None:
                at = [(row + i, column + first, own) for i in range(rows) for first, own in tile.vectors]
            tile.put([end.result(frame, x, *where) for x, where in zip(sums, at, strict=True)])

    if not writer.resumes:
        finish()
    else:
        (done,) = end.frame.named(frame, "done")
        if done != 0:
            finish()
        else:
            tile.put(sums)


@inline
def weights_ahead(writer: TileWriter, form: TileForm, b: ptr, k: Count) -> Callable[[Count], None]:
    """What prefetches every line of the weights once. Behind the end of its panels, a tile asks for those
    that follow them."""
    size = writer.bytes_of_step(form)
    panel = k * size
    lines = range(0, writer.steps_of_lines(form) * size, LINE)

    def ask(step: Count) -> None:
        at = step * size + form.ahead
        if form.panels > 1:
            at += select(uge(at, panel), panel * (form.panels - 1), 0)
        for p in range(form.panels):
            for line in lines:
                prefetch(byte_at(b, at + (panel * p + line)))

    return ask


# ---- quads


@inline
def starts_of_tile(
    kind: Kind, quads: QuadPanels, panels: list[ptr], vectors: int, a: ptr, distances: list[Count]
) -> list[Value]:
    """What the sums of panels of quads begin with: what was added to bytes of A, or to those of B, is taken
    off again."""
    columns, type_ = vectors * kind.lanes, vector("i32", kind.lanes)

    def each(first: int) -> list[Word]:
        """A number of each column."""
        places = (byte_at(panel, first + j * kind.lanes * 4) for panel in panels for j in range(vectors))
        return [load(type_, place, 1) for place in places]

    starts: list[Word] = [Word(kind.zero)] * (len(panels) * vectors)
    if kind.changes_rows:
        starts = each(quads.starts_at(columns))
    if not kind.counts_rows:
        return [*starts] * len(distances)
    offsets, out = each(quads.offsets_at(columns)), list[Value]()
    for distance in distances:
        total = splat(load(i32, byte_at(a, distance + row_sum_at(quads.k)), 1), kind.lanes)
        out += [start - offset * total for start, offset in zip(starts, offsets, strict=True)]
    return out


@inline
def with_room(
    kind: Kind,
    quads: QuadPanels,
    panels: list[ptr],
    vectors: int,
    a: ptr,
    distances: list[Count],
    sums: list[Value],
) -> list[Value]:
    """The sums with what waits after the steps of each panel; every panel has its own k for that."""
    f, columns, out = builder(), vectors * kind.lanes, list(sums)
    for p, panel in enumerate(panels if quads.room else []):
        own = [n for n in range(len(sums)) if n // vectors % len(panels) == p]
        weights = byte_at(panel, quads.room_at(columns))
        places = byte_at(panel, quads.places_at(columns))
        found = zext(load(i32, byte_at(panel, quads.count_at(columns)), 1), i64)
        totals, extra = [out[n] for n in own], [kind.zero] * (len(distances) if quads.seven else 0)
        for s in loop(umin(found, quads.room)):
            k = zext(load(i32, gep(places, s, i32), 1), i64)
            at = byte_at(a, umin(k, quads.k - GROUP))
            there = byte_at(weights, s * (columns * GROUP))
            b = [kind.read_b(f, byte_at(there, j * kind.lanes * GROUP), None) for j in range(vectors)]
            made, more = list[Value](), list[Value]()
            for i, distance in enumerate(distances):
                x = kind.read_a(f, byte_at(at, distance), GROUP)
                line = totals[i * vectors : (i + 1) * vectors]
                made += [kind.multiply_add(f, x, y, total) for y, total in zip(b, line, strict=True)]
                if quads.seven:
                    more.append(kind.multiply_add(f, x, constant(x.type, MIDDLE), extra[i]))
            totals, extra = made, more
        for i, (n, total) in enumerate(zip(own, totals, strict=True)):
            out[n] = Word(total) - extra[i // vectors] if quads.seven else total
    return out


# ---- a tile in memory


@inline
def beside_tile(
    args: ptr, beside: Sequence[tuple[int, str]], row: Count, column: Count, c_row: Count, rows: int
) -> list[tuple[ptr, str]]:
    """Rows of what the epilogue reads for a tile, and their type."""
    out: list[tuple[ptr, str]] = []
    for number, element in beside:
        start = gep(field(args, number, ptr), row * c_row + column, element)
        out += [(gep(start, i * c_row, element), element) for i in range(rows)]
    return out


@dataclass(frozen=True)
class Tile:
    """The vectors of C that one call covers; the mask, if any, belongs to the last of each row."""

    rows: list[ptr]
    width: int
    lanes: int
    element: str
    mask: Value | None

    @property
    def vectors(self) -> list[tuple[int, Value | None]]:
        """First column and mask of each vector of a row."""
        last = self.width - 1
        return [(j * self.lanes, self.mask if j == last else None) for j in range(self.width)]

    @inline
    def ask(self, beside: list[tuple[ptr, str]]) -> None:
        """Prefetch lines of C, and of what the epilogue reads, while the sums are computed."""
        for row, element in (*((row, self.element) for row in self.rows), *beside):
            for byte in range(0, self.width * self.lanes * size_bytes(element), LINE):
                prefetch(byte_at(row, byte), locality=2)

    @inline
    def sums_so_far(self) -> list[Value]:
        """What C holds between blocks of k."""
        out: list[Value] = []
        type_ = vector(self.element, self.lanes)
        for row in self.rows:
            for first, mask in self.vectors:
                place = gep(row, first, self.element)
                out.append(load(type_, place) if mask is None else masked_load(type_, place, mask))
        return out

    @inline
    def put(self, values: list[Value]) -> None:
        """Store one vector for each cell."""
        lines = [(row, *where) for row in self.rows for where in self.vectors]
        for (row, first, mask), value in zip(lines, values, strict=True):
            if mask is None:
                store(value, gep(row, first, self.element))
            else:
                masked_store(value, gep(row, first, self.element), mask)
