"""Rearranging: axes added, dropped and moved; split, stack, tile, repeat, roll; space and depth; grids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, dim, dims, integer, ints, one_of
from rlx.ir.dim import Dim, Expr, dim_max, floordiv, known_le, mod
from rlx.ir.dims.read import is_size
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import broadcast_to, concat, reshape, slice_axis, transpose
from rlx.ops.rules import as_axes, check_axes, ensure, normal_axes, normal_axis, shape_of


@of_one
def expand_dims(x: Operand, axis: int | Sequence[int]) -> Tensor:
    """New axes of size 1 at places of the result, as numpy.expand_dims.

    >>> expand_dims(np.zeros((2, 3)), (0, -1)).shape
    (1, 2, 3, 1)
    """
    shape = shape_of(x)
    count = len(as_axes(axis))
    new = normal_axes("expand_dims", axis, len(shape) + count)
    rest = iter(shape)
    return reshape(x, tuple(1 if i in new else next(rest) for i in range(len(shape) + count)))


@of_one
def squeeze(x: Operand, axis: int | Sequence[int] | None = None) -> Tensor:
    """Without axes of size 1 (by default all that are known to be), as numpy.squeeze.

    >>> squeeze(np.zeros((1, 2, 1))).shape, squeeze(np.zeros((1, 2, 1)), -1).shape
    ((2,), (1, 2))
    """
    shape = shape_of(x)
    if axis is None:
        gone: tuple[int, ...] = tuple(i for i, d in enumerate(shape) if is_size(d, 1))
    else:
        gone = normal_axes("squeeze", axis, len(shape))
    for i in gone:
        ensure(
            x, "eq", shape[i], 1, f"squeeze: axis {i} of [{','.join(map(str, shape))}] is {shape[i]}, not 1"
        )
    return reshape(x, tuple(d for i, d in enumerate(shape) if i not in gone))


@of_one
def flatten(x: Operand, axis: int | None = None) -> Tensor:
    """All elements on one axis; with an axis, a matrix of the axes before it by the rest, as ONNX Flatten.

    >>> flatten(np.zeros((2, 3, 4))).shape, flatten(np.zeros((2, 3, 4)), axis=2).shape
    ((24,), (6, 4))
    """
    if axis is None:
        return reshape(x, (_product(shape_of(x)),))
    shape = shape_of(x)
    cut = len(shape) if axis == len(shape) else normal_axis("flatten", axis, max(len(shape), 1))
    return reshape(x, (_product(shape[:cut]), _product(shape[cut:])))


def _product(sizes: Sequence[Dim]) -> Dim:
    total: Dim = 1
    for d in sizes:
        total = total * d
    return total


@of_one
def moveaxis(x: Operand, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Axes moved to other places, the rest in order, as numpy.moveaxis.

    >>> moveaxis(np.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    rank = len(shape_of(x))
    lists = [as_axes(a) for a in (source, destination)]
    old, new = ([normal_axis("moveaxis", a, rank) for a in axes_] for axes_ in lists)
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise ShapeError(f"moveaxis: source {lists[0]} and destination {lists[1]} do not pair distinct axes")
    target = dict(zip(new, old, strict=True))
    rest = iter([i for i in range(rank) if i not in old])
    return transpose(x, [target[i] if i in target else next(rest) for i in range(rank)])


@of_one
def swapaxes(x: Operand, axis1: int, axis2: int) -> Tensor:
    """Two axes exchanged, as numpy.swapaxes.

    >>> swapaxes(np.zeros((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    rank = len(shape_of(x))
    perm = list(range(rank))
    a, b = normal_axis("swapaxes", axis1, rank), normal_axis("swapaxes", axis2, rank)
    perm[a], perm[b] = b, a
    return transpose(x, perm)


def split(
    x: Operand, indices_or_sections: Any = None, axis: int = 0, *, sizes: Sequence[object] | None = None
) -> tuple[Tensor, ...]:
    """Parts along an axis, as numpy.split: equal parts, parts cut at indices, or parts of given sizes.

    >>> split(np.arange(6), 3), split(np.arange(6), [1, 4])
    ((array([0, 1]), array([2, 3]), array([4, 5])), (array([0]), array([1, 2, 3]), array([4, 5])))
    """
    shape = shape_of(x)
    axis = normal_axis("split", axis, len(shape))
    parts = _split_sizes(x, shape[axis], axis, indices_or_sections, sizes)
    out, start = [], 0  # type: list[Tensor], Dim
    for n in parts:
        out.append(slice_axis(x, axis, start, n))
        start = start + n
    return tuple(out)


def _split_sizes(x: Operand, extent: Dim, axis: int, given: Any, sizes: Sequence[object] | None) -> list[Dim]:
    if sizes is not None:
        parts: list[Dim] = [dim(n) for n in sizes]
        total: Dim = 0
        for n in parts:
            total = total + n
        what = f"split: sizes {tuple(parts)} do not add up to axis {axis} of size {extent}"
        ensure(x, "eq", total, extent, what)
        return parts
    if isinstance(given, (int, np.integer)):
        if given < 1:
            raise ShapeError(f"split: {given} parts; give at least 1")
        what = f"split: axis {axis} of size {extent} does not divide into {given} equal parts"
        ensure(x, "multiple", extent, int(given), what)
        return [floordiv(extent, int(given))] * int(given)
    if given is None:
        raise ShapeError("split: give a number of parts, indices to cut at, or sizes=")
    cuts = [0, *(dim(i) for i in given), extent]
    for low, high in pairwise(cuts):
        if known_le(low, high) is False:
            raise ShapeError(f"split: cut {low} comes after {high} on axis {axis} of size {extent}")
    return [high - low for low, high in pairwise(cuts)]


@overload
def stack(arrays: Sequence[Node], axis: int = 0) -> Node: ...
@overload
def stack(arrays: Sequence[Operand], axis: int = 0) -> Tensor: ...
def stack(arrays: Sequence[Operand], axis: int = 0) -> Tensor:
    """Join along a new axis, as numpy.stack.

    >>> stack([np.array([1, 2]), np.array([3, 4])], axis=1)
    array([[1, 3],
           [2, 4]])
    """
    if not arrays:
        raise ShapeError("stack: needs at least one operand")
    axis = normal_axis("stack", axis, len(shape_of(arrays[0])) + 1)
    return concat([expand_dims(a, axis) for a in arrays], axis)


def meshgrid(*arrays: Operand, indexing: str = "xy") -> tuple[Tensor, ...]:
    """Coordinate grids of 1-D arrays, as numpy.meshgrid; indexing "xy" swaps the first two axes.

    >>> [g.tolist() for g in meshgrid(np.array([1, 2]), np.array([3, 4]), indexing="ij")]
    [[[1, 1], [2, 2]], [[3, 4], [3, 4]]]
    """
    if indexing not in ("xy", "ij"):
        raise ShapeError(f"meshgrid: indexing is 'xy' or 'ij', not {indexing!r}")
    places = list(range(len(arrays)))
    if indexing == "xy" and len(arrays) > 1:
        places[:2] = [1, 0]
    for a in arrays:
        if len(shape_of(a)) != 1:
            raise ShapeError(f"meshgrid: every array has one axis; one has shape {tuple(shape_of(a))}")
    full = [shape_of(arrays[p])[0] for p in places]  # the swap is its own inverse
    out = []
    for a, place in zip(arrays, places, strict=True):
        wide = reshape(a, tuple(d if i == place else 1 for i, d in enumerate(full)))
        out.append(broadcast_to(wide, tuple(full)))
    return tuple(out)


@declare
class _tile(Op):
    """The whole tensor repeated along each axis."""

    name = "tile"
    level = Level.HIR
    arity = 1
    attrs = {"repeats": Attr(dims)}

    def infer(self, x: TensorType, *, repeats: Shape) -> TensorType:
        if len(repeats) != x.rank:
            raise ShapeError(f"tile: {x} needs {x.rank} repeats, got {len(repeats)}")
        if any(known_le(0, r) is False for r in repeats):
            raise ShapeError(f"tile: repeats {tuple(repeats)} of {x} are negative")
        return x.with_shape(tuple(d * r for d, r in zip(x.shape, repeats, strict=True)))

    def ref(self, x: np.ndarray, *, repeats: Sequence[int]) -> np.ndarray:
        return np.tile(x, tuple(repeats))

    def expand(self, x: Node, *, repeats: Shape) -> Node:
        narrow: list[Dim] = []
        wide: list[Dim] = []
        for d, r in zip(x.shape, repeats, strict=True):
            narrow += [d] if r == 1 else [1, d]
            wide += [d] if r == 1 else [r, d]
        out = self.infer(x.tensor, repeats=repeats)
        made: Node = reshape(broadcast_to(reshape(x, tuple(narrow)), tuple(wide)), out.shape)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"),), {"repeats": (2, 3)}),
            Sample((Arg("f32[2,3]"),), {"repeats": (1, 2)}),
            Sample((Arg("f32[4]"),), {"repeats": (0,)}),
            Sample((Arg("f32[]"),), {"repeats": ()}),
            Sample((Arg("f32[0,2]"),), {"repeats": (3, 1)}),
            Sample((Arg("i32[n,3]"),), {"repeats": (2, "n")}, grad=False),
        ]


@of_one
def tile(x: Operand, reps: object) -> Tensor:
    """The whole of x repeated, as numpy.tile; missing repeats are 1, extra ones make leading axes.

    >>> tile(np.array([1, 2]), (2, 2))
    array([[1, 2, 1, 2],
           [1, 2, 1, 2]])
    """
    shape = shape_of(x)
    repeats = tuple(reps) if isinstance(reps, (tuple, list, np.ndarray)) else (reps,)
    if len(repeats) > len(shape):
        x = reshape(x, (*(1,) * (len(repeats) - len(shape)), *shape))
    return _tile(x, repeats=(*(1,) * (len(shape) - len(repeats)), *repeats))


@declare
class _repeat(Op):
    """Each element along an axis repeated in place."""

    name = "repeat"
    level = Level.HIR
    arity = 1
    attrs = {"repeats": Attr(dim), "axis": Attr(integer)}

    def infer(self, x: TensorType, *, repeats: Dim, axis: int) -> TensorType:
        check_axes(self.name, (axis,), x.rank)
        if known_le(0, repeats) is False:
            raise ShapeError(f"repeat: repeats {repeats} of {x} is negative")
        return x.with_shape((*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))

    def ref(self, x: np.ndarray, *, repeats: int, axis: int) -> np.ndarray:
        return np.repeat(x, repeats, axis)

    def expand(self, x: Node, *, repeats: Dim, axis: int) -> Node:
        before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
        wide = broadcast_to(reshape(x, (*before, 1, *after)), (*before, repeats, *after))
        made: Node = reshape(wide, self.infer(x.tensor, repeats=repeats, axis=axis).shape)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"),), {"repeats": 3, "axis": 0}),
            Sample((Arg("f32[2,3]"),), {"repeats": 2, "axis": 1}),
            Sample((Arg("f32[3]"),), {"repeats": 0, "axis": 0}),
            Sample((Arg("f32[0]"),), {"repeats": 2, "axis": 0}),
            Sample((Arg("f32[n,2]"),), {"repeats": "n", "axis": 1}, grad=False),
        ]


@of_one
def repeat(x: Operand, repeats: Operand, axis: int | None = None) -> Tensor:
    """Each element repeated, as numpy.repeat: a number (or symbolic size) for all, or one number for each.

    >>> repeat(np.array([1, 2]), 2), repeat(np.array([1, 2]), [0, 3])
    (array([1, 1, 2, 2]), array([2, 2, 2]))
    """
    if axis is None:
        x, axis = flatten(x), 0
    axis = normal_axis("repeat", axis, len(shape_of(x)))
    if isinstance(repeats, (int, np.integer, Expr, str)):
        return _repeat(x, repeats=repeats, axis=axis)
    each = np.asarray(repeats)
    extent = shape_of(x)[axis]
    ensure(x, "eq", extent, each.size, f"repeat: {each.size} repeats for axis {axis} of size {extent}")
    return gather(x, np.repeat(np.arange(each.size), each), axis)


@declare
class _roll(Op):
    """Elements shifted along axes; what leaves at one end comes in at the other."""

    name = "roll"
    level = Level.HIR
    arity = 1
    attrs = {"shifts": Attr(ints), "axes": Attr(ints)}

    def infer(self, x: TensorType, *, shifts: Sequence[int], axes: Sequence[int]) -> TensorType:
        check_axes(self.name, axes, x.rank)
        if len(shifts) != len(axes):
            raise ShapeError(f"roll: {len(axes)} axes of {x} need as many shifts, got {len(shifts)}")
        return x

    def ref(self, x: np.ndarray, *, shifts: Sequence[int], axes: Sequence[int]) -> np.ndarray:
        return np.roll(x, tuple(shifts), tuple(axes))

    def expand(self, x: Node, *, shifts: Sequence[int], axes: Sequence[int]) -> Node:
        for by, axis in zip(shifts, axes, strict=True):
            extent = x.shape[axis]
            head = mod(by, dim_max(extent, 1))  # how many come in at the front
            if head != 0:
                rest = extent - head
                x = concat([slice_axis(x, axis, rest, head), slice_axis(x, axis, 0, rest)], axis)
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[5]"),), {"shifts": (2,), "axes": (0,)}),
            Sample((Arg("f32[3,4]"),), {"shifts": (-1, 6), "axes": (0, 1)}),
            Sample((Arg("f32[2,3]"),), {"shifts": (3,), "axes": (1,)}),
            Sample((Arg("f32[2,0]"),), {"shifts": (1,), "axes": (1,)}),
            Sample((Arg("f32[2,n]"),), {"shifts": (4,), "axes": (1,)}, grad=False),
        ]


@of_one
def roll(x: Operand, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Elements shifted along axes (of the flattened x without one), as numpy.roll.

    >>> roll(np.arange(5), 2)
    array([3, 4, 0, 1, 2])
    """
    shape = shape_of(x)
    if axis is None:
        return reshape(roll(flatten(x), shift, 0), shape)
    given = as_axes(axis)
    by = (shift,) * len(given) if isinstance(shift, (int, np.integer)) else tuple(shift)
    if len(by) != len(given):
        raise ShapeError(f"roll: {len(given)} axes need as many shifts, got {len(by)}")
    total: dict[int, int] = {}
    for a, s in zip(given, by, strict=True):
        a = normal_axis("roll", a, len(shape))
        total[a] = total.get(a, 0) + int(s)
    axes = tuple(sorted(total))
    return _roll(x, shifts=tuple(total[a] for a in axes), axes=axes)


def _check_blocks(name: str, x: TensorType, size: int) -> None:
    if x.rank != 4:
        raise ShapeError(f"{name}: {x} is not of the form [N, C, H, W]")
    if size < 1:
        raise ShapeError(f"{name}: the block size {size} is not positive")


@declare
class _depth_to_space(Op):
    """Blocks of channels become squares of pixels; mode "DCR" or "CRD" as in ONNX."""

    name = "depth_to_space"
    level = Level.HIR
    arity = 1
    attrs = {"block": Attr(integer), "mode": Attr(one_of("DCR", "CRD"), "DCR")}

    def infer(self, x: TensorType, *, block: int, mode: str) -> TensorType:
        _check_blocks(self.name, x, block)
        n, c, h, w = x.shape
        what = f"depth_to_space: the channels of {x} are not a multiple of {block * block}"
        require_equal(floordiv(c, block * block) * block * block, c, what)
        return x.with_shape((n, floordiv(c, block * block), h * block, w * block))

    def ref(self, x: np.ndarray, *, block: int, mode: str) -> np.ndarray:
        n, c, h, w = x.shape
        out = np.empty((n, c // block**2, h * block, w * block), x.dtype)
        for i, j in np.ndindex(block, block):
            tap = i * block + j
            part = (
                x[:, tap * out.shape[1] : (tap + 1) * out.shape[1]]
                if mode == "DCR"
                else x[:, tap :: block**2]
            )
            out[:, :, i::block, j::block] = part
        return out

    def expand(self, x: Node, *, block: int, mode: str) -> Node:
        n, c, h, w = x.shape
        rest = floordiv(c, block * block)
        if mode == "DCR":
            apart = transpose(reshape(x, (n, block, block, rest, h, w)), (0, 3, 4, 1, 5, 2))
        else:
            apart = transpose(reshape(x, (n, rest, block, block, h, w)), (0, 1, 4, 2, 5, 3))
        made: Node = reshape(apart, (n, rest, h * block, w * block))
        return made

    def samples(self) -> list[Sample]:
        out = []
        for mode in ("DCR", "CRD"):
            out += [
                Sample((Arg("f32[2,8,2,3]"),), {"block": 2, "mode": mode}),
                Sample((Arg("f32[1,9,1,2]"),), {"block": 3, "mode": mode}),
                Sample((Arg("f32[1,2,3,1]"),), {"block": 1, "mode": mode}),
                Sample((Arg("f32[0,4,2,2]"),), {"block": 2, "mode": mode}, grad=False),
                Sample((Arg("f32[n,4,m,3]"),), {"block": 2, "mode": mode}, grad=False),
            ]
        return out


@declare
class _space_to_depth(Op):
    """Squares of pixels become blocks of channels, as ONNX SpaceToDepth: undoes depth_to_space DCR."""

    name = "space_to_depth"
    level = Level.HIR
    arity = 1
    attrs = {"block": Attr(integer)}

    def infer(self, x: TensorType, *, block: int) -> TensorType:
        _check_blocks(self.name, x, block)
        n, c, h, w = x.shape
        for d in (h, w):
            what = f"space_to_depth: height and width of {x} are not multiples of {block}"
            require_equal(floordiv(d, block) * block, d, what)
        return x.with_shape((n, c * block * block, floordiv(h, block), floordiv(w, block)))

    def ref(self, x: np.ndarray, *, block: int) -> np.ndarray:
        return np.concatenate([x[:, :, i::block, j::block] for i, j in np.ndindex(block, block)], 1)

    def expand(self, x: Node, *, block: int) -> Node:
        n, c, h, w = x.shape
        rows, columns = floordiv(h, block), floordiv(w, block)
        apart = transpose(reshape(x, (n, c, rows, block, columns, block)), (0, 3, 5, 1, 2, 4))
        made: Node = reshape(apart, (n, c * block * block, rows, columns))
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3,4,6]"),), {"block": 2}),
            Sample((Arg("f32[1,1,3,3]"),), {"block": 3}),
            Sample((Arg("f32[1,2,3,1]"),), {"block": 1}),
            Sample((Arg("f32[2,0,2,2]"),), {"block": 2}, grad=False),
            Sample((Arg("f32[n,m,2,4]"),), {"block": 2}, grad=False),
        ]


@of_one
def depth_to_space(x: Operand, blocksize: int, mode: str = "DCR") -> Tensor:
    """[N, C, H, W] with blocks of channels spread over squares of pixels, as ONNX DepthToSpace.

    >>> depth_to_space(np.arange(4).reshape(1, 4, 1, 1), 2)
    array([[[[0, 1],
             [2, 3]]]])
    """
    return _depth_to_space(x, block=blocksize, mode=mode)


@of_one
def space_to_depth(x: Operand, blocksize: int) -> Tensor:
    """[N, C, H, W] with squares of pixels gathered into channels, as ONNX SpaceToDepth.

    >>> space_to_depth(np.arange(4).reshape(1, 1, 2, 2), 2).ravel()
    array([0, 1, 2, 3])
    """
    return _space_to_depth(x, block=blocksize)
