"""Convolutions: direct sums, Winograd's transforms, depthwise, planar images."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from rlx.cost.time.bodies import evaluated
from rlx.cost.time.owners import Share
from rlx.cost.time.products import AHEAD, tiles_for
from rlx.cost.time.work import Setting, Work
from rlx.kernel.nests import ConvNest
from rlx.kernel.panels import groups_of
from rlx.records import dataclass

PANEL_VECTORS = 2  # of output channels in a tile
TRANSFORMS = {2: (32, 24), 4: (180, 130)}  # operations of a tile of F(m, 3), per vector: of inputs, of sums
TO_PLANES = 6  # operations per vector of sums that are transposed
COPIED, GATHERED = 2, 8  # loads and stores per vector of lines that are packed: blocked, planar
BORDER = 1.5  # loads per element of a window that meets an edge
STRIP = 8  # tiles of pixels that meet a panel of weights while it is near
LINE_SUMS = 24  # of a tile of planar images


@dataclass(frozen=True)
class _Shape:
    """A convolution at known sizes."""

    images: int
    groups: int
    per_in: int
    per_out: int
    pixels: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padded: bool

    @staticmethod
    def of(nest: ConvNest, at: Setting) -> _Shape:
        form, size = nest.form, at.size
        return _Shape(
            size(form.x[0]),
            form.groups,
            size(form.w[1]),
            size(form.w[0]) // form.groups,
            tuple(size(d) for d in form.out[2:]),
            tuple(size(d) for d in form.w[2:]),
            form.strides,
            any(size(p) for pair in form.padding for p in pair),
        )

    @property
    def taps(self) -> int:
        return prod(self.window)

    @property
    def depth(self) -> int:
        """Products of one output."""
        return self.per_in * self.taps

    @property
    def outputs(self) -> int:
        """Pixels of all images."""
        return self.images * prod(self.pixels)

    @property
    def elements(self) -> int:
        """Of all images that are read, about."""
        return self.outputs * prod(self.strides) * self.per_in * self.groups

    @property
    def single(self) -> bool:
        """One-element windows side by side: pixels in are pixels out."""
        return self.taps == 1 and not self.padded and set(self.strides) <= {1}


def conv_work(nest: ConvNest, at: Setting) -> Work:
    """What a convolution does."""
    shape, work, out = _Shape.of(nest, at), Work(), [at.size(d) for d in nest.form.out]
    if not shape.outputs:
        return Work(units=1)
    end = evaluated(at, [s.body for s in nest.stores], out)
    lane = 1 if nest.out_blocked else len(out) - 1
    end_ps = end.vector_ps(at.rates, at.lanes, lane, len(nest.stores), AHEAD)
    read, written = _shares(nest, shape, at)
    if nest.prologue is None:
        work.read(nest.x, at.nbytes[nest.x], read)
    else:  # lanes along lines
        image = [at.size(d) for d in nest.prologue.shape]
        first = evaluated(at, [nest.prologue.body], image)
        vectors = prod(image[:-1]) * -(-image[-1] // at.lanes)
        work.compute_ps = vectors * (first.vector_ps(at.rates, at.lanes, len(image) - 1, 1) + at.rates.row_ps)
        for r in first.reads:
            work.read(r.operand, r.footprint(image, at.nbytes[r.operand]), read)
    kind, attrs = nest.w_layout or (None, ())
    every = at.target.prices.cores if kind == "unpack_winograd" else 1  # each thread reads all weights
    work.read(nest.w, at.nbytes[nest.w] * every, Share())
    if kind == "unpack_winograd":
        _winograd(work, shape, dict(attrs)["m"], at, end_ps)
    elif kind == "read_as" and groups_of(dict(attrs)["layout"]) != shape.groups:
        _depthwise(work, shape, at, end_ps)
    elif kind is not None:
        _direct(work, nest, shape, at, end_ps)
    elif shape.single:
        _pixels(work, shape, at, end_ps)
    else:
        _planar(work, shape, at, end_ps)
    work.end(at, end.reads, out, len(nest.stores), written)
    return work


def _shares(nest: ConvNest, shape: _Shape, at: Setting) -> tuple[Share, Share]:
    """How threads share image and result: bands of lines, or where weights are larger, channels."""
    whole, lanes = at.nbytes[at.operands], at.lanes
    source = at.nbytes[nest.x] if nest.prologue is None else 0
    read, written = shape.per_in * shape.groups, shape.per_out * shape.groups
    blocks_in = -(-read // lanes) if nest.x_blocked else read
    blocks_out = -(-written // lanes) if nest.out_blocked else written
    if shape.images > 1:
        return Share(1, shape.images).of(source), Share(1, shape.images).of(whole)
    if shape.per_in == 1 and shape.groups > 1:  # every channel by itself
        return Share(1, blocks_in).of(source), Share(1, blocks_out).of(whole)
    if shape.depth * written * 4 > source and nest.prologue is None:
        return Share(), Share(1, blocks_out).of(whole)
    lines = shape.pixels[0]
    return Share(1, lines).of(source // blocks_in), Share(1, lines).of(whole // blocks_out)


def _pixels_of_tile(at: Setting) -> int:
    return (at.target.registers - PANEL_VECTORS - 1) // PANEL_VECTORS


def _direct(work: Work, nest: ConvNest, shape: _Shape, at: Setting, end_ps: float) -> None:
    """Output channels in lanes, weights in panels."""
    rates, pixels = at.rates, _pixels_of_tile(at)
    dtype = {1: "u8", 2: "bf16"}.get(at.itemsizes[nest.w], "f32")
    tiles = tiles_for(dtype, at.target, pixels, PANEL_VECTORS)
    lines = 1 if shape.single else prod(shape.pixels[:-1])
    each = tiles.product_ps(rates, prod(shape.pixels) // lines, shape.per_out, shape.depth, end_ps)
    work.compute_ps += shape.images * shape.groups * lines * each
    if not nest.out_blocked:
        work.compute_ps += shape.outputs * shape.per_out * shape.groups / at.lanes * TO_PLANES * rates.op_ps
    if nest.prologue is None and (shape.padded or not nest.x_blocked):
        work.compute_ps += (
            shape.elements / at.lanes * rates.load_ps * (COPIED if nest.x_blocked else GATHERED)
        )
    weights = shape.depth * shape.per_out * shape.groups * at.itemsizes[nest.w]
    tiles_of_image = -(-prod(shape.pixels) // pixels)
    work.add_inner("l2", weights * shape.images * -(-tiles_of_image // STRIP))
    panels = shape.groups * -(-shape.per_out // (PANEL_VECTORS * at.lanes))
    work.units = max(shape.images * (tiles_of_image if shape.single else lines), panels)


def _winograd(work: Work, shape: _Shape, m: int, at: Setting, end_ps: float) -> None:
    """Tiles are transformed, multiplied point by point, and transformed back."""
    rates, (*planes, high, wide), points = at.rates, shape.pixels, (m + 2) ** 2
    count = shape.images * prod(planes) * -(-high // m) * -(-wide // m)
    tiles = tiles_for("f32", at.target, _pixels_of_tile(at), PANEL_VECTORS)
    inputs = shape.per_in * prod(shape.window[:-2])  # planes of a window are further channels
    work.compute_ps += points * tiles.product_ps(rates, count, shape.per_out, inputs, rates.load_ps)
    before, after = (operations * rates.op_ps for operations in TRANSFORMS[m])
    blocks_in, blocks_out = -(-inputs // at.lanes), -(-shape.per_out // at.lanes)
    work.compute_ps += count * (blocks_in * before + blocks_out * (after + m * m * end_ps))
    work.add_inner("l2", 2 * 4 * count * points * (inputs + shape.per_out))
    work.units = count


def _depthwise(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """Every lane is a channel; pixels whose windows meet an edge are summed one by one."""
    rates, inside = at.rates, 1
    planes = shape.images * -(-shape.per_out * shape.groups // at.lanes)
    for out, window, stride in zip(shape.pixels, shape.window, shape.strides, strict=True):
        inside *= max(out - (-(-(window - 1) // stride) if shape.padded else 0), 0)
    spare = at.target.registers - min(shape.taps, 9) - 3
    columns = max(min(8, spare // (1 + shape.strides[-1])), 1)
    line = (columns * shape.strides[-1] + shape.window[-1] - 1) / columns
    loads = shape.taps / shape.window[-1] * line * rates.load_ps / 2
    pixel = max(shape.taps * rates.fma_ps, loads, shape.taps * rates.chain_ps / columns / 2) + end_ps
    border = BORDER * shape.taps * rates.load_ps + end_ps
    strips = rates.call_ps * (1 + shape.pixels[-1] / columns)
    work.compute_ps += planes * (inside * pixel + (prod(shape.pixels) - inside) * border + strips)
    work.units = planes if planes > 1 else shape.pixels[0]


def _pixels(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """A product of weights with planes of pixels."""
    tiles, pixels = tiles_for("f32", at.target), prod(shape.pixels)
    each = tiles.product_ps(at.rates, shape.per_out, pixels, shape.per_in, end_ps)
    work.compute_ps += shape.images * shape.groups * each
    columns = -(-pixels // (at.lanes * tiles.vectors))
    work.units = shape.images * shape.groups * -(-shape.per_out // tiles.rows) * columns


def _planar(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """Pixels of a line in lanes, some channels at once."""
    rates, line = at.rates, -(-shape.pixels[-1] // at.lanes)
    rows = min(8 if at.target.registers >= 32 else 4, shape.per_out)
    vectors = max(min(LINE_SUMS // rows, line), 1)
    tiles = replace(tiles_for("f32", at.target), rows=rows, vectors=vectors)
    lines = shape.images * prod(shape.pixels[:-1])
    count = lines * shape.groups * shape.per_out / rows * -(-line // vectors)
    tile = shape.depth * tiles.step_ps(rates, rows, vectors) + rates.call_ps + rows * vectors * end_ps
    work.compute_ps += count * tile
    work.compute_ps += shape.elements / at.lanes * COPIED * rates.load_ps * shape.strides[-1]
    work.units = max(shape.images * shape.groups, lines)
