"""Winograd's transforms of 3x3 kernels: F(m, 3) computes m x m outputs from (m + 2) x (m + 2) transformed
inputs.

Products of transformed kernels and images, point by point, replace the window: 2.25 (m = 2) or 4 (m = 4)
times fewer multiplications. Matrices: with x a tile of the image and w the kernel, the outputs are A (G w G'
* B x B') A', where `*` multiplies element by element.

Kernels of bytes stay integers: each row of G is multiplied by what makes it whole, and fits 16 bits. Outputs
are then `WHOLE` ** 2 times too large, which is taken off exactly for up to `most_channels` channels; more are
summed in parts.

Kernels of three axes are transformed over the last two. The planes of their windows are further input
channels: sums over planes are taken point by point, before they are transformed back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, positive, whole
from rlx.ir.dtype import F64, I8, I16, I32
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Sample, declare
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.panels import Panels
from rlx.kernel.scalar import Scalar, axes, call, const, convert, load, load_or, select
from rlx.ops.array.shape import reshape, transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast
from rlx.ops.storage.packing import Packing, read_as, store_as
from rlx.records import dataclass

INPUT = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
WHOLE_KERNEL = {  # rows of G, each times what makes it whole
    2: ((1, 0, 0), (1, 1, 1), (1, -1, 1), (0, 0, 1)),
    4: ((1, 0, 0), (-1, -1, -1), (-1, 1, -1), (1, 2, 4), (1, -2, 4), (0, 0, 1)),
}
WHOLE_ROWS = {2: (1, 2, 2, 1), 4: (4, 6, 6, 24, 24, 1)}  # and what that is
OUTPUT = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
RESTORE = {  # a left inverse of G
    2: ((1, 0, 0, 0), (0, 1, -1, 0), (0, 0, 0, 1)),
    4: ((4, 0, 0, 0, 0, 0), (0, -3, 3, 0, 0, 0), (0, 0, 0, 0, 0, 1)),
}
WHOLE = 24  # of F(4, 3): what all of WHOLE_ROWS divide
INTEGER_RESTORE = ((1, 0, 0, 0, 0, 0), (0, -1, 1, 0, 0, 0), (0, 0, 0, 0, 0, 1))  # the second gives the double


def most_channels() -> int:
    """Channels of u8 times i8 whose sums over a window of 3x3 are exact in i32 behind the transforms.

    Sums are computed modulo 2 ** 32, times 576 = 9 * 64. An inverse of 9 takes the 9 off; 64 times the sum
    must fit.

    >>> most_channels()
    114
    """
    return (2**31 // 64 - 1) // (9 * 255 * 128)


@dataclass(frozen=True)
class WinogradLayout:
    """Transformed kernels of [O, I, 3, 3]: for each point, panels of an [I, O] matrix.

    With `planes`, kernels are [O, I, planes, 3, 3] and matrices [planes * I, O], plane after plane.

    >>> WinogradLayout(2, out=4, channels=3, columns=4, lanes=4).shape
    (16, 12)
    >>> WinogradLayout(2, out=4, channels=3, columns=4, lanes=4, planes=2).kernel
    (4, 3, 2, 3, 3)
    """

    m: int
    out: int
    channels: int
    columns: int
    lanes: int
    group: int = 1  # input channels that one instruction takes
    planes: int = 0  # of a window of three axes; 0: it has two

    @property
    def kernel(self) -> tuple[int, ...]:
        """The shape of a kernel."""
        return (self.out, self.channels, *((self.planes,) if self.planes else ()), 3, 3)

    @property
    def depth(self) -> int:
        """Products of one output at a point: input channels of all planes."""
        return self.channels * max(self.planes, 1)

    @cached_property
    def panels(self) -> Panels:
        return Panels(self.depth, self.out, self.columns, self.lanes, self.group)

    @property
    def parts(self) -> int:
        """Parts of the input channels, in whole blocks, that are summed one by one."""
        blocks = -(-self.depth // self.lanes)
        return 1 if self.group == 1 else -(-blocks // (most_channels() // self.lanes))

    @property
    def wide_out(self) -> int:
        """Outputs padded to whole vectors."""
        return -(-self.out // self.lanes) * self.lanes

    @property
    def points(self) -> int:
        return (self.m + 2) ** 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.points, self.panels.elements


def transform_kernel(w: Node, layout: WinogradLayout) -> Node:
    """A kernel transformed (in f64, rounded once; bytes exactly, to i16) and packed."""
    made: Node = pack_winograd(w, **_attrs(layout))
    return made


_LAYOUT = {
    **{k: Attr(positive) for k in ("m", "out", "channels", "columns", "lanes")},
    "group": Attr(positive, 1),
    "planes": Attr(whole, 0),
}
_AT_ONCE = 8192  # elements of each tap that are transformed together: what is made of them stays in L2


def _attrs(layout: WinogradLayout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in _LAYOUT}


class _WinogradPacking(Packing):
    attrs = _LAYOUT

    def layouts(self, exact: bool) -> list[WinogradLayout]:
        if exact:
            return [WinogradLayout(4, 3, 4, 2, 2, 2), WinogradLayout(4, 5, 3, 4, 2, 2)]
        return [
            WinogradLayout(2, 3, 2, 2, 2),
            WinogradLayout(4, 4, 1, 4, 2),
            WinogradLayout(2, 1, 1, 4, 2),
            WinogradLayout(2, 3, 2, 2, 2, planes=3),
        ]


@declare
class pack_winograd(_WinogradPacking):
    """A kernel [O, I, (planes,) 3, 3] transformed for Winograd's products, in panels; bytes stay whole
    numbers."""

    name = "pack_winograd"

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        want = WinogradLayout(**layout)
        kernel = want.kernel
        lead = max(x.rank - len(kernel), 0)
        require_shape(x.shape[lead:], kernel, f"pack_winograd: {x} is not a kernel {list(kernel)}")
        made = x.with_shape((*x.shape[:lead], *want.shape))
        return made.with_dtype(I16) if x.dtype is I8 else made

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        want = WinogradLayout(**layout)
        exact, group = x.dtype == np.int8, want.group
        if want.planes:
            x = np.moveaxis(x, -3, -4)
            x = x.reshape(*x.shape[:-4], want.depth, 3, 3)
        out = np.zeros((*x.shape[:-4], *want.shape), np.int16 if exact else x.dtype)
        taps = np.moveaxis(x, (-2, -1, -4), (0, 1, -1))  # [r, s, ..., I, O]
        rows, divisors = WHOLE_KERNEL[want.m], WHOLE_ROWS[want.m]
        for first, stop, panel in want.panels.each(out):
            step = max(_AT_ONCE // (stop - first) // group, 1) * group
            for begin in range(0, want.depth, step):
                some = taps[..., begin : begin + step, first:stop].astype(np.float64, order="C")
                to = panel[..., begin // group : (begin + step) // group, :, :]
                once = [[_combined(row, list(some[:, s])) for s in range(3)] for row in rows]
                for a, b in np.ndindex(len(rows), len(rows)):
                    point = _combined(rows[b], once[a])
                    if not exact:
                        point = point / (divisors[a] * divisors[b])
                    for i in range(group):
                        channels = point[..., i::group, :]
                        to[..., a * len(rows) + b, : channels.shape[-2], :, i] = channels
        return out

    def vjp(self, g: Node, y: Node, x: Node, **layout: int) -> list[Node]:
        want = WinogradLayout(**layout)
        lead, side = g.rank - 2, want.m + 2
        matrix = np.array(WHOLE_KERNEL[want.m], np.float64) / np.array(WHOLE_ROWS[want.m])[:, None]
        points = read_as(cast(g, dtype="f64"), layout=want.panels.layout)
        *inside, out = _matrix_axes(want)
        grid = reshape(points, (*g.shape[:lead], side, side, *inside, out))
        once = dot_general(grid, matrix, ((lead,), (0,)))  # [..., b, (planes,) i, o, r]
        twice = dot_general(once, matrix, ((lead,), (0,)))  # [..., (planes,) i, o, r, s]
        order = (2, 1, 0, 3, 4) if want.planes else (1, 0, 2, 3)
        return [cast(transpose(twice, (*range(lead), *(lead + i for i in order))), dtype=x.dtype)]

    def lower(self, x: TensorType, **layout: int) -> Form:
        want = WinogradLayout(**layout)
        exact = x.dtype is I8
        wide, to = (I32, I16) if exact else (F64, x.dtype)
        rows, side, rank = WHOLE_KERNEL[want.m], want.m + 2, len(want.kernel)
        *lead, point, at = axes(x.rank - rank + 2)

        def read(place: list[Scalar], exists: Scalar) -> Scalar:
            row, o = place
            inside = [row % want.channels, row // want.channels] if want.planes else [row]

            def tap(r: int, s: int) -> Scalar:
                index = [*lead, o, *inside, const(r), const(s)]
                return convert(load_or(0, index, exists, const(0, x.dtype)), wide)

            def line(at: Scalar, parts: Sequence[Scalar]) -> Scalar:
                return _pick(at, [_sum(zip(row, parts, strict=True)) for row in rows])

            once = [line(point // side, [tap(r, s) for r in range(3)]) for s in range(3)]
            twice = line(point % side, once)
            if not exact:
                divisors = [const(d, wide) for d in WHOLE_ROWS[want.m]]
                both = call("mul", _pick(point // side, divisors), _pick(point % side, divisors))
                twice = call("div", twice, both)
            return convert(twice, to)

        return Map((*x.shape[:-rank], *want.shape), want.panels.layout.element(at, read))

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg(f"{kind}[{','.join(map(str, v.kernel))}]", -60, 60),), _attrs(v), grad=kind == "f32")
            for kind in ("f32", "i8")
            for v in self.layouts(kind == "i8")
        ]


def _matrix_axes(layout: WinogradLayout) -> tuple[int, ...]:
    """The matrix of a point, with planes and input channels apart."""
    return (*((layout.planes,) if layout.planes else ()), layout.channels, layout.out)


def _combined(row: Sequence[int], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts times the factors of a row, summed; where a factor is 0, its part leaves no trace."""
    total: np.ndarray | None = None
    for factor, part in zip(row, parts, strict=True):
        if factor:
            term = part if factor == 1 else part * factor
            total = term if total is None else total + term
    assert total is not None
    return total


def _sum(terms: Iterable[tuple[int, Scalar]]) -> Scalar:
    """`_combined` of expressions."""
    total: Scalar | None = None
    for factor, part in terms:
        if factor:
            term = part if factor == 1 else call("mul", const(factor, part.dtype), part)
            total = term if total is None else call("add", total, term)
    assert total is not None
    return total


def _pick(index: Scalar, choices: Sequence[Scalar]) -> Scalar:
    """The choice that an index names."""
    made = choices[-1]
    for number in range(len(choices) - 2, -1, -1):
        made = select(index < number + 1, choices[number], made)
    return made


@declare
class unpack_winograd(_WinogradPacking):
    """The kernel [O, I, (planes,) 3, 3] of transformed panels; a convolution reads the panels directly."""

    name = "unpack_winograd"
    reader_side = True

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        want = WinogradLayout(**layout)
        if x.rank < 2:
            raise ShapeError(f"unpack_winograd: {x} does not hold points")
        require_shape(x.shape[-2:], want.shape, f"unpack_winograd: {x} is not {list(want.shape)}")
        made = x.with_shape((*x.shape[:-2], *want.kernel))
        return made.with_dtype(I8) if x.dtype is I16 else made

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        want = WinogradLayout(**layout)
        exact = x.dtype == np.int16
        side = want.m + 2
        restore = np.array(INTEGER_RESTORE if exact else RESTORE[want.m], np.float64)
        if exact:
            restore[1] /= 2
        points = want.panels.layout.unpack(x).astype(np.float64)
        grid = points.reshape(*x.shape[:-2], side, side, *_matrix_axes(want))
        turned = "...abpio->...oiprs" if want.planes else "...abio->...oirs"
        out: np.ndarray = np.einsum("ra,sb," + turned, restore, restore, grid)
        return np.floor(out).astype(np.int8) if exact else out.astype(x.dtype)

    def vjp(self, g: Node, y: Node, x: Node, **layout: int) -> list[Node]:
        want = WinogradLayout(**layout)
        restore = np.array(RESTORE[want.m], np.float64)
        lead, rank = g.rank - len(want.kernel), len(want.kernel)
        tap = lead + rank - 2
        once = dot_general(cast(g, dtype="f64"), restore, ((tap,), (0,)))  # [..., o, i, (planes,) s, a]
        twice = dot_general(once, restore, ((tap,), (0,)))  # [..., o, i, (planes,) a, b]
        turned = transpose(twice, (*range(lead), tap, tap + 1, *reversed(range(lead, tap))))
        points = reshape(turned, (*g.shape[:lead], want.points, want.depth, want.out))
        return [store_as(cast(points, dtype=g.dtype), layout=want.panels.layout)]

    def lower(self, x: TensorType, **layout: int) -> Form:
        want = WinogradLayout(**layout)
        exact = x.dtype is I16
        side, restore = want.m + 2, INTEGER_RESTORE if exact else RESTORE[want.m]
        every = axes(x.rank - 2 + len(want.kernel))
        lead, (o, i, *plane, r, s) = every[: x.rank - 2], every[x.rank - 2 :]
        row = plane[0] * want.channels + i if plane else i
        at = want.panels.layout.offset((row, o))

        def weight(row: int, column: int) -> Scalar:
            def there(a: int, b: int) -> Scalar:
                value = load(0, [*lead, a * side + b, at], x.dtype)
                return convert(value, I32) if exact else value

            points = np.ndindex(side, side)
            total = _sum((restore[row][a] * restore[column][b], there(a, b)) for a, b in points)
            if exact:
                total = convert(call("floor_div", total, const(1 << (row == 1) + (column == 1), I32)), I8)
            return total

        body = _pick(r, [_pick(s, [weight(j, k) for k in range(3)]) for j in range(3)])
        return Map((*x.shape[:-2], *want.kernel), body)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg(f"{kind}[{v.points},{v.panels.elements}]", -60, 60),), _attrs(v), grad=kind == "f32")
            for kind in ("f32", "i16")
            for v in self.layouts(kind == "i16")
        ]
