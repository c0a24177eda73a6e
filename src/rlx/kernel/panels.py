"""The layouts that kernels read: panels of matrices, of convolution kernels and of bits, blocks of channels.

Each class names the numbers that kernels work with; its `layout` says where elements are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.graph import Node
from rlx.kernel.boxes import Box, Digit, Side
from rlx.kernel.layout import Layout
from rlx.kernel.packed import ELEMENTS, Element
from rlx.records import dataclass

PANEL_VECTORS = 2  # of columns, in panels of quantised weights
BYTE_OF_K = (0, 2, 1, 3)
"""Which byte of a quad of 6-bit codes has each of its k: neighbours are in the low bytes of its halves, or in
the high ones."""
_SCALE_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True)
class Panels:
    """A matrix [k, n] in panels of `columns` columns, one after the other.

    A panel is [k / group][columns][group], read front to back by a kernel. The last one is narrower, in whole
    vectors of `lanes`, padded with zeros.

    >>> Panels(3, 10, 4, 2, 1).layout
    Layout('3,10 -> 30: 0:3=3@4 0:8=2@12,4@1; 0:3=3@2 8:10=2@1 +24')
    """

    k: int
    n: int
    columns: int
    lanes: int
    group: int = 1

    def __post_init__(self) -> None:
        _check("panels", (self.k, self.n), (self.columns, self.lanes, self.group))

    @property
    def full(self) -> int:
        """Panels with every column in use."""
        return self.n // self.columns

    @property
    def tail(self) -> int:
        """Padded columns of the last, narrower panel; 0 when there is none."""
        return _round_up(self.n % self.columns, self.lanes)

    @property
    def depth(self) -> int:
        """k padded to whole groups."""
        return _round_up(self.k, self.group)

    @property
    def elements(self) -> int:
        return self.depth * (self.full * self.columns + self.tail)

    @property
    def layout(self) -> Layout:
        """Where the elements of a [k, n] matrix are stored."""
        return _matrix(self)

    def each(self, packed: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Panel by panel of [..., elements]: its first column, the column after its last one, and a view on
        them, as [..., depth / group, columns, group]."""
        lead, groups = packed.shape[:-1], self.depth // self.group
        for first in range(0, self.n, self.columns):
            width = self.columns if first + self.columns <= self.n else self.tail
            stop = min(first + width, self.n)
            panel = packed[..., self.depth * first : self.depth * (first + width)]
            yield first, stop, panel.reshape(*lead, groups, width, self.group)[..., : stop - first, :]


@dataclass(frozen=True)
class KernelPanels:
    """A convolution kernel [O, I, window] in panels; I counts the channels of one group.

    For each group there are panels of output channels. Their rows are the products of one output in the order
    in which they are summed: blocks of input channels, window elements, channels of the block. With one
    channel per block that is for a planar image read line by line; with one vector, a blocked image. Narrow
    dtypes are multiplied in groups of neighbouring channels; a block that is not full ends with zeros.

    >>> KernelPanels((4, 3, 5), groups=2, columns=4, lanes=2, block=1).layout
    Layout('2*2,3,5 -> 60: 0:2=2@30 0:2=2@1 0:3=3@10 0:5=5@2')
    """

    shape: tuple[int, ...]
    groups: int
    columns: int
    lanes: int
    block: int
    group: int = 1

    def __post_init__(self) -> None:
        _check("panels", self.shape, (self.groups, self.columns, self.lanes, self.block, self.group))
        if len(self.shape) < 2 or self.shape[0] % self.groups:
            raise ShapeError(f"a kernel {list(self.shape)} has not the outputs of {self.groups} groups")
        if self.block % self.group and self.whole:
            raise ShapeError(f"a block of {self.block} channels does not consist of groups of {self.group}")

    @cached_property
    def panels(self) -> Panels:
        """The panels of one group."""
        rows = (self.whole + self.tail) * self.taps
        return Panels(rows, self.shape[0] // self.groups, self.columns, self.lanes, self.group)

    @property
    def whole(self) -> int:
        """Channels in full blocks."""
        return self.shape[1] // self.block * self.block

    @property
    def tail(self) -> int:
        """Channels of the last block if it is not full, in whole groups."""
        return _round_up(self.shape[1] - self.whole, self.group)

    @property
    def taps(self) -> int:
        return prod(self.shape[2:])

    @property
    def layout(self) -> Layout:
        """Where the elements of an [O, I, window] kernel are stored."""
        return _kernel(self)


@dataclass(frozen=True)
class QuantLayout:
    """A matrix of quantised weights in panels, of blocks, of factors and codes.

    Factors are scales and perhaps zeros or minimums; codes with minimums are unsigned. A block is one group.
    With `block`, it is that many: a factor of a group is then a code of 8 bits times a factor of the block,
    and in front of the codes of all groups are the factors of the block, then the codes of factors.

    4-bit codes come as one 32-bit word per column and 8 k: the even k in the low half, the odd in the high.
    8-bit codes come k by k; in quads, four k of a column together. 6-bit codes come in sets of 16 k of a
    vector of columns, as `rlx.kernel.packed` has them; `BYTE_OF_K` says where the k of a quad are. They take
    8 bits where groups are not whole sets.

    >>> QuantLayout(64, 32, bits=4, group=32, lanes=16, scale="f16").nbytes
    1152
    >>> QuantLayout(256, 32, bits=4, group=32, lanes=16, scale="f16", minimums=True, block=8).nbytes
    4736
    """

    k: int
    n: int
    bits: int
    group: int
    lanes: int
    scale: str = "f32"
    zeros: bool = False
    zero: str = ""  # dtype of zeros or minimums, where it is another than that of scales
    quads: bool = False  # of codes of 8 bits
    minimums: bool = False
    block: int = 0

    def __post_init__(self) -> None:
        if self.zero == self.scale:
            object.__setattr__(self, "zero", "")  # equal layouts are equal
        if self.bits not in (4, 6, 8):
            raise ShapeError(f"quantised weights have 4, 6 or 8 bits, not {self.bits}")
        if self.bits == 6 and (self.group % 16 or _element(6, False, self.lanes) not in ELEMENTS):
            object.__setattr__(self, "bits", 8)
        if self.quads and self.bits != 8:
            object.__setattr__(self, "quads", False)
        if self.group < 8 or self.group % 8:
            raise ShapeError(f"a group of quantised weights is a multiple of 8 along k, not {self.group}")
        if (self.zeros and self.minimums) or self.block < 0:
            raise ShapeError("quantised weights have zeros or minimums, and blocks of some groups")

    @property
    def shifted(self) -> bool:
        """Whether groups have a second factor: zeros or minimums."""
        return self.zeros or self.minimums

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return PANEL_VECTORS * self.lanes

    @property
    def panels(self) -> int:
        return -(-self.n // self.columns)

    @property
    def groups(self) -> int:
        return -(-self.k // self.group)

    @property
    def depth(self) -> int:
        """k padded to whole groups."""
        return self.groups * self.group

    @property
    def together(self) -> int:
        """Groups of a block."""
        return max(self.block, 1)

    @property
    def blocks(self) -> int:
        return -(-self.groups // self.together)

    @property
    def factor_starts(self) -> tuple[int, ...]:
        """Where in a block factors begin: scales, which come first, then zeros or minimums."""
        return (0, self.columns * _SCALE_BYTES[self.scale])[: 1 + self.shifted]

    @property
    def factor_codes_starts(self) -> tuple[int, ...]:
        """Where in a block the codes of factors begin, a row for each group; none if there are none."""
        last = self.scale if not self.shifted else self.zero or self.scale
        first = self.factor_starts[-1] + self.columns * _SCALE_BYTES[last]
        return tuple(first + i * self.block * self.columns for i in range(1 + self.shifted))

    @property
    def codes_start(self) -> int:
        """Where in a block the codes of its groups begin, one group after the other."""
        return self.factor_codes_starts[-1] + self.block * self.columns

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes of a group."""
        return self.columns * self.group * self.bits // 8

    @property
    def block_bytes(self) -> int:
        return self.codes_start + self.together * self.codes_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of a group with its part of the factors, rounded up."""
        return -(-self.block_bytes // self.together)

    @property
    def panel_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def codes(self) -> Layout:
        """Where the codes [k, n] are stored.

        >>> QuantLayout(16, 8, bits=4, group=16, lanes=4).codes
        Layout('i4+8 16,8 -> 96: 0:16=2@64,4@1,2@4 0:8=8@8 +64')
        """
        return self.layouts[0]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Where codes [k, n], scales and (if there are some) zeros or minimums [groups, n] are stored, in
        this order; with blocks, the codes [groups, n] and the factors [blocks, n] of each of these."""
        return _quantised(self)

    def pack(self, codes: np.ndarray, *factors: np.ndarray) -> np.ndarray:
        """Codes (-8..7 or -128..127; with minimums 0..15 or 0..255) and all others as kernels read them.

        >>> layout = QuantLayout(8, 1, bits=8, group=8, lanes=4)
        >>> layout.pack(np.ones((8, 1), np.int8), np.ones((1, 1), np.float32)).shape
        (96,)
        """
        if len(factors) != len(self.layouts) - 1:
            raise ShapeError("zeros are given exactly when the layout has them")
        stored = None
        for x, own in zip((codes, *factors), self.layouts, strict=True):
            stored = own.pack(x, stored)
        assert stored is not None
        return stored


def quantised_of(
    layouts: Sequence[Layout], group: int, lanes: int, quads: bool = False, block: int = 0
) -> QuantLayout | None:
    """The panels that layouts of codes and factors consist of, None if they are others.

    >>> own = QuantLayout(16, 8, bits=4, group=16, lanes=4)
    >>> quantised_of(own.layouts, 16, 4) == own, quantised_of(own.layouts, 8, 4)
    (True, None)
    """
    names = ["" if own.packed is None else own.packed.name for own in layouts]
    sizes = layouts[0].sizes if layouts else ()
    known = [
        (bits, unsigned)
        for bits in (4, 6, 8)
        for unsigned in (False, True)
        if _element(bits, unsigned, lanes) in names[:1]
    ]
    factors = names[2::2] if block else names[1:]
    if not known or len(factors) not in (1, 2) or not all(name in _SCALE_BYTES for name in factors):
        return None
    if len(sizes) != 2 or group < 8 or group % 8 or block < 0:
        return None
    k, n = (size or 0 for size in sizes)
    (bits, minimums), shifted = known[0], len(factors) == 2
    if minimums > shifted:
        return None
    found = QuantLayout(
        k,
        n,
        bits,
        group,
        lanes,
        factors[0],
        shifted and not minimums,
        factors[-1],
        quads,
        minimums,
        block,
    )
    return found if found.layouts == tuple(layouts) else None


@dataclass(frozen=True)
class ChannelBlocks:
    """An image [N, C, axes] as [N, C / lanes, axes, lanes]: the channels of a pixel side by side, then zeros.

    >>> ChannelBlocks(4, 20, 8).layout
    Layout('?,20,?,? -> ?,3,?,?,8: 0:20=3@8,8@1')
    """

    rank: int
    channels: int
    lanes: int

    def __post_init__(self) -> None:
        _check("blocks", (), (self.channels, self.lanes))
        if self.rank < 2:
            raise ShapeError(f"an image has at least 2 axes, not {self.rank}")

    @property
    def layout(self) -> Layout:
        """Where the elements of an image are stored."""
        return _blocks(self)


def blocks_of(layout: Layout) -> ChannelBlocks | None:
    """The blocks of channels that a layout consists of, None if it is another one.

    >>> blocks_of(ChannelBlocks(4, 20, 8).layout)
    ChannelBlocks(rank=4, channels=20, lanes=8)
    >>> blocks_of(Panels(3, 10, 4, 2).layout) is None
    True
    """
    return _as_blocks(layout)


def stored_blocks(node: Node) -> Layout | None:
    """The layout of an op that stores an image in blocks of channels, None for any other op."""
    if not node.op.writer_side:
        return None
    layout: Layout = node.attrs["layout"]
    return layout if is_image(layout, node.operands[0].rank) else None


def read_blocks(node: Node) -> Layout | None:
    """The layout of an op that reads an image from blocks of channels, None for any other op."""
    layout = node.attrs.get("layout") if node.reader_side else None
    return layout if layout is not None and blocks_of(layout) is not None else None


def is_image(layout: Layout, rank: int) -> bool:
    """Whether a layout is blocks of channels of an image of this rank.

    >>> is_image(ChannelBlocks(4, 20, 8).layout, 4)
    True
    """
    blocks = blocks_of(layout)
    return blocks is not None and blocks.rank == rank


@lru_cache(1024)
def _as_blocks(layout: Layout) -> ChannelBlocks | None:
    rank = len(layout.shape)
    if rank < 2 or layout.sizes.count(None) != rank - 1 or not layout.sizes[1] or not layout.stored[-1]:
        return None
    found = ChannelBlocks(rank, layout.sizes[1], layout.stored[-1])
    return found if found.layout == layout else None


def groups_of(layout: Layout) -> int:
    """The groups that the panels of a convolution kernel belong to.

    >>> groups_of(KernelPanels((4, 3, 5), groups=2, columns=4, lanes=2, block=1).layout)
    2
    """
    factors = layout.shape[0] if layout.shape else None
    return factors[0] if factors is not None and len(factors) == 2 else 1


# ---- boxes and digits


def _check(what: str, sizes: tuple[int, ...], units: tuple[int, ...]) -> None:
    if min(sizes, default=0) < 0 or min(units) < 1:
        raise ShapeError(f"{what} have sizes of at least 0 and units of at least 1, not {sizes} and {units}")


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _cuts(n: int, whole: int, unit: int) -> list[tuple[int, int, int, int]]:
    """The parts of n elements: of `whole` elements, and the rest in whole units. Start and stop, the width of
    one part and their number."""
    full, rest = n // whole * whole, n % whole
    out = [(0, full, whole, n // whole)] if full else []
    return [*out, (full, n, _round_up(rest, unit), 1)] if rest else out


def _side(start: int, stop: int, *digits: tuple[int, int]) -> Side:
    return Side(start, stop, tuple(Digit(*d) for d in digits if d[0] > 1))


@lru_cache(1024)
def _matrix(p: Panels) -> Layout:
    boxes, base = [], 0
    for start, stop, width, count in _cuts(p.n, p.columns, p.lanes) if p.k else ():
        rows = _side(0, p.k, (p.depth // p.group, width * p.group), (p.group, 1))
        columns = _side(start, stop, (count, p.depth * width), (width, p.group))
        boxes.append(Box((rows, columns), base))
        base += count * p.depth * width
    return Layout(((p.k,), (p.n,)), (p.elements,), tuple(boxes))


@lru_cache(1024)
def _kernel(k: KernelPanels) -> Layout:
    outputs, channels, *window = k.shape
    per, rows, boxes, base = outputs // k.groups, k.panels.k, [], 0
    for start, stop, width, count in _cuts(per, k.columns, k.lanes) if 0 not in k.shape else ():
        first = 0
        for low, high, size, blocks in _cuts(channels, k.block, k.group):
            sides = [_side(0, k.groups, (k.groups, k.panels.elements))] if k.groups > 1 else []
            sides.append(_side(start, stop, (count, rows * width), (width, k.group)))
            inside = ((size // k.group, width * k.group), (k.group, 1))
            sides.append(_side(low, high, (blocks, size * k.taps * width), *inside))
            steps = [prod(window[i + 1 :]) * size * width for i in range(len(window))]
            sides += [_side(0, n, (n, step)) for n, step in zip(window, steps, strict=True)]
            boxes.append(Box(tuple(sides), base + first * width))
            first += size * blocks * k.taps
        base += count * rows * width
    first_axis = (k.groups, per) if k.groups > 1 else (outputs,)
    shape = (first_axis, *((n,) for n in k.shape[1:]))
    return Layout(shape, (k.groups * k.panels.elements,), tuple(boxes))


@lru_cache(1024)
def _blocks(b: ChannelBlocks) -> Layout:
    count, pixels = -(-b.channels // b.lanes), (None,) * (b.rank - 2)
    side = _side(0, b.channels, (count, b.lanes), (b.lanes, 1))
    return Layout((None, (b.channels,), *pixels), (None, count, *pixels, b.lanes), (Box((side,), 0),))


def _element(bits: int, unsigned: bool, lanes: int) -> str:
    """How codes of so many bits are written for vectors of so many columns."""
    if bits == 6:
        return f"u6x{lanes}" if unsigned else f"i6+32x{lanes}"
    return {4: ("i4+8", "u4"), 8: ("i8", "u8")}[bits][unsigned]


@lru_cache(1024)
def _quantised(q: QuantLayout) -> tuple[Layout, ...]:
    names = (_element(q.bits, q.minimums, q.lanes), q.scale, q.zero or q.scale)
    codes, *kinds = (ELEMENTS[name] for name in names[: 2 + q.shifted])
    inside: tuple[tuple[int, int], ...]
    inside, column = ((q.group, q.columns),), 1
    if q.bits == 4:
        inside, column = ((q.group // 8, q.columns * 8), (4, 1), (2, 4)), 8
    elif q.bits == 6:
        inside, column = ((q.group // 16, q.columns * 48), (4, 12), (2, 3), (2, 6)), 48  # BYTE_OF_K
    elif q.quads:
        inside, column = ((q.group // 4, q.columns * 4), (4, 1)), 4

    def part(
        element: Element, rows: int, start: int, digits: Sequence[tuple[int, int]] = (), column: int = 1
    ) -> Layout:
        """Blocks and panels are as far apart as all parts together need."""

        def far(nbytes: int) -> int:
            return 8 * nbytes // element.place_bits

        down = _side(0, rows, (q.blocks, far(q.block_bytes)), *digits)
        across = _side(0, q.n, (q.panels, far(q.panel_bytes)), (q.columns, column))
        boxes = (Box((down, across), far(start)),) if q.nbytes else ()
        return Layout(((rows,), (q.n,)), (q.nbytes,), boxes, element)

    groups = (q.together, 8 * q.codes_bytes // codes.place_bits)
    parts = [part(codes, q.k, q.codes_start, (groups, *inside), column)]
    for kind, start, codes_start in zip(kinds, q.factor_starts, q.factor_codes_starts, strict=True):
        if q.block:
            parts.append(part(ELEMENTS["i8"], q.groups, codes_start, ((q.block, q.columns),)))
        parts.append(part(kind, q.blocks, start))
    return tuple(parts)
