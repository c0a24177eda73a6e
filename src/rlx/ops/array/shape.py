"""Ops that move or rename elements: reshape, transpose, broadcast, slice, concat, pad, flip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import overload

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_at_least, require_equal
from rlx.ir.attr import Attr, AttrValue, dims, integer, ints
from rlx.ir.dim import Dim, dim_min, divides, known_eq, known_le
from rlx.ir.graph import Node
from rlx.ir.op import EVERY_OPERAND, Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map, Piece, Pieces, Strides, dense_strides, is_dense
from rlx.kernel.scalar import Scalar, axes, const, load, size
from rlx.ops.rules import (
    broadcast_index,
    lift_all,
    normal_axes,
    normal_axis,
    op_call,
    rank_of,
    same_dtype,
    shape_of,
    shift,
    unbroadcast,
    with_gaps,
)


def _text(shape: Sequence[Dim]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def flat_index(index: Sequence[Scalar], shape: Shape) -> Scalar:
    """Row-major position of an index."""
    total = const(0)
    for i, stride in zip(index, dense_strides(shape), strict=True):
        total = total + i * size(stride)
    return total


def split_index(flat: Scalar, shape: Shape) -> list[Scalar]:
    """The index of a row-major position."""
    out: list[Scalar] = []
    for d, stride in zip(shape, dense_strides(shape), strict=True):
        i = flat // size(stride)
        out.append(const(0) if d == 1 else i if d is shape[0] and not out else i % size(d))
    return out


def matching_groups(a: Shape, b: Shape) -> list[tuple[list[int], list[int]]] | None:
    """Cut two shapes of equal size into groups of axes with equal products, as fine as can be proved."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [], []
        p: Dim = 1
        q: Dim = 1
        if i < len(a):
            p, left, i = a[i], [i], i + 1
        if j < len(b):
            q, right, j = b[j], [j], j + 1
        while known_eq(p, q) is not True:
            # a side that divides the other one has axes missing; where neither is known to, the smaller may
            if p != 0 and divides(p, q) is True:
                grow_left = True
            elif q != 0 and p != 0 and divides(q, p) is True:
                grow_left = False
            else:
                grow_left = known_le(p, q) is True
            if i < len(a) and (grow_left or j >= len(b)):
                p, i = p * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                q, j = q * b[j], j + 1
                right.append(j - 1)
            elif i < len(a):
                p, i = p * a[i], i + 1
                left.append(i - 1)
            else:
                return None
        groups.append((left, right))
    return groups


@declare
class _reshape(Op):
    """The same elements in row-major order under another shape; costs nothing on dense storage."""

    name = "reshape"
    arity = 1
    lossless = True
    moves = (0,)
    attrs = {"shape": Attr(dims)}

    def infer(self, x: TensorType, *, shape: Shape) -> TensorType:
        out = TensorType(x.dtype, shape)
        require_equal(
            x.numel, out.numel, lambda: f"reshape: {x} has {x.numel} elements, {_text(shape)} has {out.numel}"
        )
        return out

    def ref(self, x: np.ndarray, *, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(tuple(shape))

    def vjp(self, g: Node, y: Node, x: Node, *, shape: Shape) -> list[Node]:
        return [reshape(g, x.shape)]

    def batch(self, flags: Sequence[bool], x: Node, *, shape: Shape) -> Node:
        made: Node = reshape(x, (x.shape[0], *shape))
        return made

    def lower(self, x: TensorType, *, shape: Shape) -> Form:
        groups = matching_groups(x.shape, shape)
        at = axes(len(shape))
        if groups is None:
            return Map(shape, load(0, split_index(flat_index(at, shape), x.shape), x.dtype))
        index: list[Scalar] = []
        for left, right in groups:
            inner = tuple(shape[j] for j in right)
            flat = flat_index([at[j] for j in right], inner)
            index += [flat] if len(left) == 1 else split_index(flat, tuple(x.shape[i] for i in left))
        return Map(shape, load(0, index, x.dtype))

    def cost(self, x: TensorType, *, shape: Shape) -> Dim:
        return 0

    def view(self, layout: Strides, x: TensorType, *, shape: Shape) -> Strides | None:
        if is_dense(layout, x.shape):
            return Strides(layout.offset, dense_strides(shape))
        groups = matching_groups(x.shape, shape)
        if groups is None:
            return None
        strides: list[Dim] = []
        for left, right in groups:
            own = [(x.shape[i], layout.strides[i]) for i in left if x.shape[i] != 1]
            for (_, outer), (d, inner) in pairwise(own):
                if known_eq(outer, d * inner) is not True:
                    return None
            step: Dim = own[-1][1] if own else 1
            part: list[Dim] = []
            for j in reversed(right):
                part.append(step)
                step = step * shape[j]
            strides += reversed(part)
        return Strides(layout.offset, tuple(strides))

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3,4]"),), {"shape": (6, 4)}),
            Sample((Arg("f32[2,12]"),), {"shape": (2, 3, 1, 4)}),
            Sample((Arg("f32[]"),), {"shape": (1, 1)}),
            Sample((Arg("f32[0,3]"),), {"shape": (3, 0)}),
            Sample((Arg("f32[6,4]"),), {"shape": (8, 3)}),
            Sample((Arg("f32[n,6]"),), {"shape": ("n", 2, 3)}, grad=False),
        ]


@of_one
def reshape(x: Operand, shape: Sequence[AttrValue]) -> Tensor:
    """The same elements under another shape; one dim may be -1.

    >>> reshape(np.arange(6), (2, -1)).shape
    (2, 3)
    """
    unknown = sum(isinstance(d, (int, np.integer)) and bool(d == -1) for d in shape)
    if unknown > 1:
        raise ShapeError(f"reshape: {_text(tuple(shape))} leaves {unknown} sizes open; only one may be -1")
    if unknown:
        total = x.tensor.numel if isinstance(x, Node) else np.asarray(x).size
        rest: Dim = 1
        for d in shape:
            rest = rest if isinstance(d, (int, np.integer)) and d == -1 else rest * d
        if isinstance(rest, int) and rest == 0:
            raise ShapeError(f"reshape: -1 in {_text(tuple(shape))} is ambiguous for an empty tensor")
        missing = total // rest
        if known_eq(missing * rest, total) is False:
            raise ShapeError(f"reshape: {total} elements do not divide into {_text(tuple(shape))}")
        shape = [missing if isinstance(d, (int, np.integer)) and d == -1 else d for d in shape]
    return _reshape(x, shape=tuple(shape))


@declare
class _transpose(Op):
    """Axis i of the result is axis perm[i] of x; a view where the reader takes strides."""

    name = "transpose"
    arity = 1
    lossless = True
    moves = (0,)
    attrs = {"perm": Attr(ints)}

    def infer(self, x: TensorType, *, perm: Sequence[int]) -> TensorType:
        if sorted(perm) != list(range(x.rank)):
            raise ShapeError(f"transpose: perm {tuple(perm)} does not permute the {x.rank} axes of {x}")
        return x.with_shape(tuple(x.shape[p] for p in perm))

    def ref(self, x: np.ndarray, *, perm: Sequence[int]) -> np.ndarray:
        return np.transpose(x, perm)

    def vjp(self, g: Node, y: Node, x: Node, *, perm: Sequence[int]) -> list[Node]:
        return [transpose(g, inverse_permutation(perm))]

    def batch(self, flags: Sequence[bool], x: Node, *, perm: Sequence[int]) -> Node:
        made: Node = transpose(x, (0, *shift(perm)))
        return made

    def lower(self, x: TensorType, *, perm: Sequence[int]) -> Form:
        at = axes(x.rank)
        where_is = inverse_permutation(perm)
        return Map(
            tuple(x.shape[p] for p in perm), load(0, [at[where_is[i]] for i in range(x.rank)], x.dtype)
        )

    def cost(self, x: TensorType, *, perm: Sequence[int]) -> Dim:
        return 0

    def view(self, layout: Strides, x: TensorType, *, perm: Sequence[int]) -> Strides:
        return Strides(layout.offset, tuple(layout.strides[p] for p in perm))

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3,4]"),), {"perm": (2, 0, 1)}),
            Sample((Arg("f32[5]"),), {"perm": (0,)}),
            Sample((Arg("f32[]"),), {"perm": ()}),
            Sample((Arg("f32[0,3]"),), {"perm": (1, 0)}),
            Sample((Arg("f32[n,3,m]"),), {"perm": (1, 2, 0)}, grad=False),
        ]


def inverse_permutation(perm: Sequence[int]) -> tuple[int, ...]:
    """Where each axis goes.

    >>> inverse_permutation((2, 0, 1))
    (1, 2, 0)
    """
    out = [0] * len(perm)
    for i, p in enumerate(perm):
        out[p] = i
    return tuple(out)


@of_one
def transpose(x: Operand, axes: Sequence[int] | None = None) -> Tensor:
    """Permute axes as numpy.transpose does; by default reverse them.

    >>> transpose(np.zeros((2, 3, 4)), (1, 0, 2)).shape
    (3, 2, 4)
    """
    rank = rank_of(x)
    perm = tuple(reversed(range(rank))) if axes is None else [normal_axis("transpose", a, rank) for a in axes]
    return _transpose(x, perm=tuple(perm))


@declare
class _broadcast_to(Op):
    """Repeat along new leading axes and along axes of size 1; a view with stride 0."""

    name = "broadcast_to"
    arity = 1
    moves = (0,)
    attrs = {"shape": Attr(dims)}

    def infer(self, x: TensorType, *, shape: Shape) -> TensorType:
        skip = len(shape) - x.rank
        if skip < 0:
            raise ShapeError(f"broadcast_to: {x} has more axes than {_text(shape)}")
        for i, d in enumerate(x.shape):
            if d != 1:
                require_equal(
                    d, shape[skip + i], lambda: f"broadcast_to: {x} does not broadcast to {_text(shape)}"
                )
        return x.with_shape(shape)

    def ref(self, x: np.ndarray, *, shape: Sequence[int]) -> np.ndarray:
        return np.broadcast_to(x, tuple(shape))

    def vjp(self, g: Node, y: Node, x: Node, *, shape: Shape) -> list[Node]:
        return [unbroadcast(g, x)]

    def batch(self, flags: Sequence[bool], x: Node, *, shape: Shape) -> Node:
        wide = reshape(x, (x.shape[0], *(1,) * (len(shape) + 1 - x.rank), *x.shape[1:]))
        made: Node = broadcast_to(wide, (x.shape[0], *shape))
        return made

    def lower(self, x: TensorType, *, shape: Shape) -> Form:
        return Map(shape, load(0, broadcast_index(x.shape, shape), x.dtype))

    def cost(self, x: TensorType, *, shape: Shape) -> Dim:
        return 0

    def view(self, layout: Strides, x: TensorType, *, shape: Shape) -> Strides:
        skip = len(shape) - x.rank
        kept = [
            0 if d == 1 and shape[skip + i] != 1 else s
            for i, (d, s) in enumerate(zip(x.shape, layout.strides, strict=True))
        ]
        return Strides(layout.offset, (*(0,) * skip, *kept))

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,1]"),), {"shape": (2, 3, 4)}),
            Sample((Arg("f32[]"),), {"shape": (5,)}),
            Sample((Arg("f32[1]"),), {"shape": (0,)}),
            Sample((Arg("f32[4]"),), {"shape": (4,)}),
            Sample((Arg("f32[n,1]"),), {"shape": ("n", 3)}, grad=False),
        ]


@of_one
def broadcast_to(x: Operand, shape: Sequence[AttrValue]) -> Tensor:
    """Repeat x to a shape, as numpy.broadcast_to.

    >>> broadcast_to(np.array([1, 2]), (3, 2)).shape
    (3, 2)
    """
    return _broadcast_to(x, shape=tuple(shape))


@declare
class _slice(Op):
    """Element i of the result along an axis is element start + i * step; steps may be negative."""

    family = "slice"
    name = "slice"
    arity = 1
    moves = (0,)
    attrs = {"starts": Attr(dims), "sizes": Attr(dims), "steps": Attr(ints)}

    def infer(self, x: TensorType, *, starts: Shape, sizes: Shape, steps: Sequence[int]) -> TensorType:
        if not len(starts) == len(sizes) == len(steps) == x.rank:
            raise ShapeError(f"slice: {x} needs {x.rank} starts, sizes and steps")
        for d, start, n, step in zip(x.shape, starts, sizes, steps, strict=True):
            if step == 0:
                raise ShapeError(f"slice: a step of {x} is 0")
            if known_le(n, 0) is True:
                continue
            last = start + (n - 1) * step
            low, high = (start, last) if step > 0 else (last, start)
            if known_le(high + 1, d) is True and known_le(0, low) is True:
                continue
            what = f"slice: start {start}, size {n}, step {step} leaves an axis of size {d} of {x}"
            if known_le(d, high) is True or known_le(low, -1) is True:
                raise ShapeError(what)
            # Nothing is read of an empty slice, so it may begin anywhere. Where its start is known to be
            # inside, the plain guard `d >= start + n` says the same.
            always = known_le(1, n) is True or (step == 1 and known_le(start, d) is True)
            some = 1 if always else dim_min(n, 1)
            require_at_least(d, (high + 1) * some, what)
            require_at_least(low * some, 0, what)
        return x.with_shape(sizes)

    def ref(
        self, x: np.ndarray, *, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
    ) -> np.ndarray:
        for i, (start, n, step) in enumerate(zip(starts, sizes, steps, strict=True)):
            x = np.take(x, start + np.arange(n) * step, axis=i)
        return x

    def vjp(
        self, g: Node, y: Node, x: Node, *, starts: Shape, sizes: Shape, steps: Sequence[int]
    ) -> list[Node]:
        backward = tuple(i for i, s in enumerate(steps) if s < 0)
        if backward:
            g = flip(g, backward)
        firsts = [s + (n - 1) * t if t < 0 else s for s, n, t in zip(starts, sizes, steps, strict=True)]
        pads = []
        for d, first, n, step in zip(x.shape, firsts, sizes, steps, strict=True):
            gap = abs(step) - 1
            pads.append((first, d - first - with_gaps(n, gap), gap))
        low, high, interior = zip(*pads, strict=True) if pads else ((), (), ())
        return [op_call("pad", g, padding=tuple(zip(low, high, strict=True)), interior=interior, value=0)]

    def batch(
        self, flags: Sequence[bool], x: Node, *, starts: Shape, sizes: Shape, steps: Sequence[int]
    ) -> Node:
        made: Node = _slice(x, starts=(0, *starts), sizes=(x.shape[0], *sizes), steps=(1, *steps))
        return made

    def lower(self, x: TensorType, *, starts: Shape, sizes: Shape, steps: Sequence[int]) -> Form:
        at = [i * step + size(start) for i, start, step in zip(axes(x.rank), starts, steps, strict=True)]
        return Map(sizes, load(0, at, x.dtype))

    def cost(self, x: TensorType, *, starts: Shape, sizes: Shape, steps: Sequence[int]) -> Dim:
        return 0

    def view(
        self, layout: Strides, x: TensorType, *, starts: Shape, sizes: Shape, steps: Sequence[int]
    ) -> Strides:
        offset = layout.offset
        for start, stride in zip(starts, layout.strides, strict=True):
            offset = offset + start * stride
        return Strides(offset, tuple(s * t for s, t in zip(layout.strides, steps, strict=True)))

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[5,6]"),), {"starts": (1, 5), "sizes": (3, 3), "steps": (1, -2)}),
            Sample((Arg("f32[7]"),), {"starts": (1,), "sizes": (3,), "steps": (2,)}),
            Sample((Arg("f32[4]"),), {"starts": (2,), "sizes": (0,), "steps": (1,)}, grad=False),
            Sample((Arg("f32[]"),), {"starts": (), "sizes": (), "steps": ()}),
            Sample((Arg("f32[n,4]"),), {"starts": (0, 1), "sizes": ("n", 2), "steps": (1, 1)}, grad=False),
        ]


@of_one
def slice_axis(x: Operand, axis: int, start: Dim, size: Dim, step: int = 1) -> Tensor:
    """Slice one axis: `size` elements from `start` in steps of `step`.

    >>> slice_axis(np.arange(6), 0, 1, 2, 2)
    array([1, 3])
    """
    shape = shape_of(x)
    axis = normal_axis("slice", axis, len(shape))
    starts = [start if i == axis else 0 for i in range(len(shape))]
    sizes = [size if i == axis else d for i, d in enumerate(shape)]
    steps = [step if i == axis else 1 for i in range(len(shape))]
    return _slice(x, starts=tuple(starts), sizes=tuple(sizes), steps=tuple(steps))


@of_one
def flip(x: Operand, axis: int | Sequence[int] | None = None) -> Tensor:
    """Reverse the order along axes, as numpy.flip.

    >>> flip(np.arange(3))
    array([2, 1, 0])
    """
    shape = shape_of(x)
    backward = normal_axes("flip", axis, len(shape))
    starts = tuple(d - 1 if i in backward else 0 for i, d in enumerate(shape))
    steps = tuple(-1 if i in backward else 1 for i in range(len(shape)))
    return _slice(x, starts=starts, sizes=tuple(shape), steps=steps)


def _differ_outside(t: TensorType, first: TensorType, axis: int) -> str:
    return f"concat: {t} and {first} differ outside axis {axis}"


@declare
class _concat(Op):
    """Join along an existing axis."""

    family = "concat"
    name = "concat"
    lossless = True
    moves = EVERY_OPERAND
    attrs = {"axis": Attr(integer)}

    def infer(self, *types: TensorType, axis: int) -> TensorType:
        if not types:
            raise ShapeError("concat: needs at least one operand")
        first = types[0]
        if not 0 <= axis < first.rank:
            raise ShapeError(f"concat: axis {axis} is out of range for {first}")
        dtype = same_dtype(self.name, types)
        total: Dim = 0
        shape = list(first.shape)
        for t in types:
            if t.rank != first.rank:
                raise ShapeError(f"concat: {t} and {first} have different ranks")
            for i, d in enumerate(t.shape):
                if i != axis:
                    shape[i] = require_equal(shape[i], d, partial(_differ_outside, t, first, axis))
            total = total + t.shape[axis]
        shape[axis] = total
        return TensorType(dtype, tuple(shape))

    def ref(self, *arrays: np.ndarray, axis: int) -> np.ndarray:
        return np.concatenate(arrays, axis)

    def vjp(self, g: Node, y: Node, *operands: Node, axis: int) -> list[Node]:
        out, start = [], 0  # type: list[Node], Dim
        for x in operands:
            out.append(slice_axis(g, axis, start, x.shape[axis]))
            start = start + x.shape[axis]
        return out

    def batch(self, flags: Sequence[bool], *operands: Node, axis: int) -> Node:
        made: Node = _concat(*lift_all(flags, operands), axis=axis + 1)
        return made

    def lower(self, *types: TensorType, axis: int) -> Form:
        out = self.infer(*types, axis=axis)
        pieces, start = [], 0  # type: list[Piece], Dim
        for k, t in enumerate(types):
            offset = tuple(start if i == axis else 0 for i in range(t.rank))
            pieces.append(Piece(offset, t.shape, load(k, axes(t.rank), t.dtype)))
            start = start + t.shape[axis]
        return Pieces(out.shape, tuple(pieces))

    def cost(self, *types: TensorType, axis: int) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"), Arg("f32[2,1]"), Arg("f32[2,0]")), {"axis": 1}),
            Sample((Arg("f32[4]"),), {"axis": 0}),
            Sample((Arg("f32[n,3]"), Arg("f32[m,3]")), {"axis": 0}, grad=False),
            Sample((Arg("i32[2]"), Arg("i32[3]")), {"axis": 0}, grad=False),
        ]


@overload
def concat(arrays: Sequence[Node], axis: int = 0) -> Node: ...
@overload
def concat(arrays: Sequence[Operand], axis: int = 0) -> Tensor: ...
def concat(arrays: Sequence[Operand], axis: int = 0) -> Tensor:
    """Join along an existing axis, as numpy.concatenate.

    >>> concat([np.array([1, 2]), np.array([3])])
    array([1, 2, 3])
    """
    if not arrays:
        raise ShapeError("concat: needs at least one operand")
    first, *others = arrays
    return _concat(first, *others, axis=normal_axis("concat", axis, rank_of(first)))


@declare
class copy(Op):
    """The same values in their own storage (an output that would otherwise be a view or an input)."""

    family = "copy"
    name = "copy"
    arity = 1
    moves = (0,)

    def infer(self, x: TensorType) -> TensorType:
        return x

    def ref(self, x: np.ndarray) -> np.ndarray:
        return np.array(x)

    def vjp(self, g: Node, y: Node, x: Node) -> list[Node]:
        return [g]

    def batch(self, flags: Sequence[bool], x: Node) -> Node:
        made: Node = copy(x)
        return made

    def lower(self, x: TensorType) -> Form:
        return Map(x.shape, load(0, axes(x.rank), x.dtype))

    def cost(self, x: TensorType) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [Sample((Arg("f32[2,3]"),)), Sample((Arg("f32[0]"),)), Sample((Arg("i32[n]"),), grad=False)]
