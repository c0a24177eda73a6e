"""Convolutions: direct sums, Winograd's transforms, depthwise, planar images."""

from __future__ import annotations

from math import prod

import numpy as np

from rlx.cost.time.bodies import evaluated
from rlx.cost.time.owners import Share
from rlx.cost.time.products import AHEAD, tiles_for
from rlx.cost.time.reads import LINE_BYTES, Size
from rlx.cost.time.work import Setting, Traffic, Work
from rlx.kernel.form import Conv
from rlx.kernel.nests import ConvNest
from rlx.kernel.panels import groups_of
from rlx.records import dataclass

HEAVY_WEIGHTS = 8  # times the elements of an image from which threads share channels of Winograd's sums
PANEL_VECTORS = 2  # of output channels in a tile
TRANSFORMS = {2: (32, 24), 4: (180, 130)}  # operations of a tile of F(m, 3), per vector: of inputs, of sums
TO_PLANES = 6  # operations per vector of sums that are transposed
COPIED, GATHERED = 2, 8  # loads and stores per vector of lines that are packed: blocked, planar
BORDER = 1.5  # loads per element of a window of a pixel that is summed by itself
STRIP_COLUMNS, FEWEST_COLUMNS = 8, 4  # of a strip, and of one that keeps weights in registers
MOST_KEPT = 16  # weights in registers
STRIP = 8  # tiles of pixels that meet a panel of weights while it is near
LINE_SUMS, MOST_VECTORS = 24, 8  # of a tile of planar images
WRITTEN_OUT = 25  # elements of a window of one channel for which several lines are a tile
AHEAD_OF_TILE = 448  # instructions that a core looks ahead


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
    read: tuple[int, ...]  # elements of all windows along an axis that are not padding
    unknown: int  # columns at the right edge of which code does not know what they read

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
            tuple(_elements_read(form, axis, size) for axis in range(len(form.strides))),
            _unknown_columns(form, size),
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


def _elements_read(form: Conv, axis: int, size: Size) -> int:
    """Of the windows along an axis, how many elements are inside the image."""
    starts = np.arange(size(form.out[2 + axis])) * form.strides[axis] - size(form.padding[axis][0])
    places = starts[:, None] + np.arange(size(form.w[2 + axis])) * form.dilations[axis]
    return int(((places >= 0) & (places < size(form.x[2 + axis]))).sum())


def _unknown_columns(form: Conv, size: Size) -> int:
    """Columns at the right edge, where neither their number nor the width of the image is known to code."""
    (_, high), stride = form.padding[-1], form.strides[-1]
    if isinstance(form.x[-1], int) or (isinstance(high, int) and stride == 1):
        return 0
    return -(-size(high) // stride)


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
    if kind == "unpack_winograd":
        _winograd(
            work, shape, dict(attrs)["m"], at, end_ps, nest.w, shared=bool(read.step) or shape.images > 1
        )
    elif kind == "read_as" and groups_of(dict(attrs)["layout"]) != shape.groups:
        _depthwise(work, shape, at, end_ps)
    elif kind is not None:
        _direct(work, nest, shape, at, end_ps)
    elif shape.single:
        _pixels(work, shape, at, end_ps)
    else:
        _planar(work, shape, at, end_ps)
    if kind != "unpack_winograd":
        work.read(nest.w, at.nbytes[nest.w], Share())
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
    elements, weights = prod(map(at.size, nest.form.x)), shape.depth * written
    if nest.w_layout is not None and nest.w_layout[0] == "unpack_winograd":
        weights = at.nbytes[nest.w] // at.itemsizes[nest.w] // HEAVY_WEIGHTS
    if weights > elements:
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


def _winograd(
    work: Work, shape: _Shape, m: int, at: Setting, end_ps: float, weights: int, shared: bool
) -> None:
    """Strips of tiles are transformed, multiplied point by point, and transformed back, one after the other.
    Every strip meets all weights, which are read by every thread if threads have strips of their own, and
    once if they have output channels."""
    rates, (*planes, high, wide), points = at.rates, shape.pixels, (m + 2) ** 2
    count, pixels = shape.images * prod(planes) * -(-high // m) * -(-wide // m), _pixels_of_tile(at)
    tiles = tiles_for("f32", at.target, pixels, PANEL_VECTORS)
    inputs = shape.per_in * prod(shape.window[:-2])  # planes of a window are further channels
    work.compute_ps += points * tiles.product_ps(rates, count, shape.per_out, inputs, rates.load_ps)
    before, after = (operations * rates.op_ps for operations in TRANSFORMS[m])
    blocks_in, blocks_out = -(-inputs // at.lanes), -(-shape.per_out // at.lanes)
    work.compute_ps += count * (blocks_in * before + blocks_out * (after + m * m * end_ps))
    work.compute_ps += 1000 * 2 * 4 * count * points * (inputs + shape.per_out) / rates.l2_rate
    cores, nbytes = at.target.prices.cores, at.nbytes[weights]
    most = max(at.target.l2_bytes // (4 * points * (inputs + shape.per_out)) // pixels, 2) * pixels
    strips, first = -(-count // most), 1
    if shared:
        strips, first = min(-(-strips // cores) * cores, count), min(cores, count)
    work.traffic.append(Traffic(weights, first * nbytes, waits=True))
    again = rates.l2_rate if nbytes <= at.target.l2_bytes // 2 else rates.l3_rate
    work.compute_ps += 1000 * (strips - first) * nbytes / again
    work.units = strips if shared else max(-(-shape.per_out // (PANEL_VECTORS * at.lanes)), 1)


def _depthwise(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """Every lane is a channel; strips of a few columns run down an image. Elements of windows that are
    padding are left out. Columns at the right edge of which code does not know are summed one by one."""
    rates, spare, stride = at.rates, at.target.registers - 3, shape.strides[-1]
    planes = shape.images * -(-shape.per_out * shape.groups // at.lanes)
    columns = min(STRIP_COLUMNS, (spare - shape.taps) // (1 + stride))
    if shape.taps > MOST_KEPT or columns < FEWEST_COLUMNS:  # weights are read line by line
        columns = max(min(STRIP_COLUMNS, (spare - 1) // (1 + stride)), 1)
    line = (columns * stride + shape.window[-1] - 1) / columns
    loads = shape.taps / shape.window[-1] * line * rates.load_ps / 2
    pixel = max(shape.taps * rates.fma_ps, loads, shape.taps * rates.chain_ps / columns / 2)
    read = prod(shape.read) / shape.taps / prod(shape.pixels)  # the part of windows that is not padding
    border = shape.unknown * prod(shape.pixels[:-1])
    strips = rates.call_ps * (1 + shape.pixels[-1] / columns)
    work.compute_ps += planes * ((prod(shape.pixels) - border) * pixel * read + prod(shape.pixels) * end_ps)
    work.compute_ps += planes * (border * BORDER * shape.taps * read * rates.load_ps + strips)
    work.units = planes if planes > 1 else shape.pixels[0]


def _pixels(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """A product of weights with planes of pixels."""
    tiles, pixels = tiles_for("f32", at.target), prod(shape.pixels)
    each = tiles.product_ps(at.rates, shape.per_out, pixels, shape.per_in, end_ps)
    work.compute_ps += shape.images * shape.groups * each
    columns = -(-pixels // (at.lanes * tiles.vectors))
    work.units = shape.images * shape.groups * -(-shape.per_out // tiles.rows) * columns


def _planar(work: Work, shape: _Shape, at: Setting, end_ps: float) -> None:
    """Pixels of a line in lanes, some channels at once. Lines that windows reach are copied to scratch, band
    by band, and loaded once for each element of a window: such loads cross lines of the cache."""
    rates, line, stride = at.rates, -(-shape.pixels[-1] // at.lanes), shape.strides[-1]
    many = at.target.registers >= 32
    by_lines = shape.per_in == shape.per_out == 1 and shape.taps <= WRITTEN_OUT
    rows = 4 if by_lines else min(8 if many else 4, shape.per_out)
    vectors = max(
        min((LINE_SUMS if many else LINE_SUMS // 2) // rows, line, 4 if by_lines else MOST_VECTORS), 1
    )
    high = shape.pixels[-2] if len(shape.pixels) > 1 else 1
    reach, down = (shape.window[-2], shape.strides[-2]) if len(shape.pixels) > 1 else (1, 1)
    planes = shape.images * shape.groups * prod(shape.pixels[:-2])
    copied = 4 * shape.per_in * prod(shape.window[:-2]) * (shape.pixels[-1] * stride + vectors * at.lanes)
    height = max(at.target.l1_bytes // 2 // copied - reach, 0) // down + 1
    bands = -(-high // height)
    if planes < at.target.prices.cores:
        bands = -(-bands // at.target.prices.cores) * at.target.prices.cores
    height = -(-high // bands)
    bands = -(-high // height)
    held = copied * ((height - 1) * down + reach)
    work.compute_ps += planes * bands * held / 4 / at.lanes * COPIED * rates.load_ps * stride
    lines = planes * high
    loads = vectors * (1 + at.lanes * 4 / LINE_BYTES) * (reach / (rows + reach) if by_lines else 1.0)
    sums = rows * vectors
    beside = max(AHEAD_OF_TILE / (shape.depth * (sums + vectors)), 1.0)  # tiles that the core looks ahead
    step = max(
        sums * rates.fma_ps, (loads + (0 if by_lines else rows)) * rates.fma_ps, rates.chain_ps / beside
    )
    count = lines * shape.per_out / rows * -(-line // vectors)
    work.compute_ps += count * (shape.depth * step + rates.call_ps + sums * end_ps)
    if held > at.target.l1_bytes:  # a tile brings its part of all lines nearer
        part = 4 * shape.depth // shape.window[-1] * (vectors * at.lanes + shape.window[-1])
        work.add_inner("l2", count * part)
    work.units = planes * bands
