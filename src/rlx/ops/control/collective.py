"""Collectives: values that the ranks of a mesh axis exchange.

A graph is one program that every rank runs; a collective is where they meet. `axis` names the axis of the
mesh whose ranks take part and `ranks` says how many they are. All ranks meet in the order of the program:
collectives are never merged, reordered or dropped.

The meaning for all ranks of a group is `everywhere(arrays of all ranks) -> results of all ranks`, which
`rlx.reference.ranks` runs. On its own (`ref`) a collective gives what rank 0 gets when all ranks hold
the same operand. Gradients are those of the sum of all ranks' losses, so the gradient of a sum over ranks is
a sum over ranks.

The four ops that move data (`all_reduce`, `stack_ranks`, `reduce_part`, `swap_parts`) work on whole tensors
or on parts along axis 0, which are separate in memory; the others cut and join along any axis with moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, integer, one_of, string
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType, tensor_types
from rlx.kernel.form import Collective as CollectiveForm
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import axes as space_axes
from rlx.kernel.scalar import const, load
from rlx.ops.array.shape import reshape, transpose
from rlx.ops.math.elementwise import equal, where
from rlx.ops.rules import is_computable, need_dtype, normal_axis, shape_of

Arrays = Sequence[np.ndarray]

KINDS = ("sum", "mean", "max", "min", "prod")
_STEPS: dict[str, Callable[..., np.ndarray]] = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}


def _group_size(value: object) -> int:
    count = integer(value)
    if count < 1:
        raise ValueError(f"needs at least 1 rank, got {count}")
    return count


def _combined(arrays: Arrays, kind: str) -> np.ndarray:
    """The reduction in rank order; half precision is accumulated in f32 and rounded once."""
    own = arrays[0].dtype
    narrow = own.itemsize == 2 and own.kind not in "iub"
    values = [a.astype(np.float32) for a in arrays] if narrow else list(arrays)
    total: np.ndarray = functools.reduce(_STEPS.get(kind, np.add), values)
    if kind == "mean":
        total = total // len(values) if own.kind in "iu" else total / total.dtype.type(len(values))
    return np.asarray(total).astype(own)


class Collective(Op):
    """Base of the collectives that move data: one tensor in, one out."""

    family = "collective"
    arity = 1
    effects = "ordered"
    attrs = {"axis": Attr(string), "ranks": Attr(_group_size)}
    meeting: ClassVar[str]  # the function of `rlx.dist` that moves the data

    everywhere: Callable[..., list[np.ndarray]]
    """Results of all ranks of a group for their operands."""
    pairs: Callable[[int], tuple[tuple[int, int], ...]]
    """(axis of the operand, axis of the result) that run along each other and that nothing cuts."""

    def ref(self, x: np.ndarray, *, ranks: int, **attrs: object) -> np.ndarray:
        return self.everywhere([x] * ranks, ranks=ranks, **attrs)[0]

    def lower(self, x: TensorType, *, axis: str, ranks: int, **attrs: object) -> Form:
        (out,) = tensor_types(self.infer(x, axis=axis, ranks=ranks, **attrs))
        if ranks == 1:  # nobody to meet: the operand, under the shape of the result
            skip = out.rank - x.rank
            at = space_axes(out.rank)
            return Map(out.shape, load(0, at[skip:] if skip >= 0 else (const(0), *at), x.dtype))
        what = " ".join(str(v) for v in attrs.values())
        return CollectiveForm(
            f"{self.name} {what}".strip() + f" over {axis!r} ({ranks} ranks)", self.pairs(x.rank)
        )

    def cost(self, x: TensorType, **attrs: object) -> Dim:
        return x.numel

    def _samples(self, texts: Sequence[str], **attrs: object) -> list[Sample]:
        return [Sample((Arg(t),), {"axis": "x", "ranks": 1, **attrs}, grad="n" not in t) for t in texts]


class _Parts(Collective):
    """Base of those whose operand is cut into one part per rank along axis 0."""

    def _check(self, x: TensorType, ranks: int) -> None:
        need_dtype(self.name, x, is_computable)
        if x.rank == 0 or x.shape[0] != ranks:
            raise ShapeError(f"{self.name}: {x} needs a first axis of size {ranks}, one part for each rank")


@declare
class all_reduce(Collective):
    """The operands of all ranks combined (sum, mean, max, min or prod) in the order of the ranks."""

    name = "all_reduce"
    meeting = "all_reduce"
    in_place = True
    attrs = {**Collective.attrs, "kind": Attr(one_of(*KINDS), "sum")}

    def infer(self, x: TensorType, *, axis: str, ranks: int, kind: str) -> TensorType:
        need_dtype(self.name, x, is_computable)
        return x

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int, kind: str) -> list[np.ndarray]:
        return [_combined(arrays, kind)] * ranks

    def pairs(self, rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i) for i in range(rank))

    def vjp(self, g: Node, y: Node, x: Node, *, axis: str, ranks: int, kind: str) -> list[Node]:
        if kind in ("sum", "mean"):
            return [all_reduce(g, axis=axis, ranks=ranks, kind=kind)]
        whole = stack_ranks(x, axis=axis, ranks=ranks)
        return [reduce_part(_combine_vjp(kind, g, y, whole), axis=axis, ranks=ranks)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        made: Node = all_reduce(x, **attrs)
        return made

    def samples(self) -> list[Sample]:
        return [
            *self._samples(["f32[3,4]", "f32[]", "f32[0,2]", "f32[n,3]"]),
            *self._samples(["f32[17]"], kind="mean"),
            *self._samples(["f32[5]"], kind="max"),
            *self._samples(["f32[5]"], kind="prod"),
            Sample((Arg("i32[4]", -5, 5),), {"axis": "x", "ranks": 1, "kind": "min"}, grad=False),
        ]


def _combine_vjp(kind: str, g: Node, y: Node, whole: Node) -> Node:
    """The gradient of combining a stack of all ranks' values along axis 0: that of the reduction op."""
    (d,) = get_op(f"reduce_{kind}").vjp(g, y, whole, axes=(0,), keepdims=False)
    assert d is not None, "a reduction has the gradient of its operand"
    return d


@declare
class stack_ranks(Collective):
    """The operands of all ranks along a new first axis, in the order of the ranks."""

    name = "stack_ranks"
    meeting = "all_gather"

    def infer(self, x: TensorType, *, axis: str, ranks: int) -> TensorType:
        need_dtype(self.name, x, is_computable)
        return x.with_shape((ranks, *x.shape))

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int) -> list[np.ndarray]:
        return [np.stack(arrays)] * ranks

    def pairs(self, rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i + 1) for i in range(rank))

    def vjp(self, g: Node, y: Node, x: Node, **attrs: object) -> list[Node]:
        return [reduce_part(g, **attrs)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        return _move_axis(stack_ranks(x, **attrs), 0, 1)

    def samples(self) -> list[Sample]:
        return self._samples(["f32[3,4]", "f32[]", "f32[n]", "f32[0,2]"])


@declare
class reduce_part(_Parts):
    """Part r of the operands of all ranks, combined, for rank r; parts are along the first axis."""

    name = "reduce_part"
    meeting = "reduce_scatter"
    attrs = {**Collective.attrs, "kind": Attr(one_of(*KINDS), "sum")}

    def infer(self, x: TensorType, *, axis: str, ranks: int, kind: str) -> TensorType:
        self._check(x, ranks)
        return x.with_shape(x.shape[1:])

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int, kind: str) -> list[np.ndarray]:
        return [_combined([a[r] for a in arrays], kind) for r in range(ranks)]

    def pairs(self, rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i - 1) for i in range(1, rank))

    def vjp(self, g: Node, y: Node, x: Node, *, axis: str, ranks: int, kind: str) -> list[Node]:
        if kind in ("sum", "mean"):
            back = stack_ranks(g, axis=axis, ranks=ranks)
            return [back if kind == "sum" else back / float(ranks)]
        whole = swap_parts(x, axis=axis, ranks=ranks)
        return [swap_parts(_combine_vjp(kind, g, y, whole), axis=axis, ranks=ranks)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        made: Node = reduce_part(_move_axis(x, 1, 0), **attrs)
        return made

    def samples(self) -> list[Sample]:
        return [
            *self._samples(["f32[1,4]", "f32[1]", "f32[1,n]"]),
            *self._samples(["f32[1,3,2]"], kind="mean"),
        ]


@declare
class swap_parts(_Parts):
    """Part r of this rank's operand goes to rank r; part s of the result came from rank s."""

    name = "swap_parts"
    meeting = "all_to_all"

    def infer(self, x: TensorType, *, axis: str, ranks: int) -> TensorType:
        self._check(x, ranks)
        return x

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int) -> list[np.ndarray]:
        return [np.stack([a[r] for a in arrays]) for r in range(ranks)]

    def pairs(self, rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((i, i) for i in range(1, rank))

    def vjp(self, g: Node, y: Node, x: Node, **attrs: object) -> list[Node]:
        return [swap_parts(g, **attrs)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        return _move_axis(swap_parts(_move_axis(x, 1, 0), **attrs), 0, 1)

    def samples(self) -> list[Sample]:
        return self._samples(["f32[1,4]", "f32[1]", "f32[1,n]"])


@declare
class rank_index(Op):
    """The number of this rank along an axis of the mesh; rank 0 where there is no mesh."""

    name = "rank_index"
    family = "rank"
    arity = 0
    attrs = Collective.attrs
    not_differentiable = "which rank this is depends on no value"

    def infer(self, *, axis: str, ranks: int) -> TensorType:
        return TensorType(I64, ())

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int) -> list[np.ndarray]:
        return [np.asarray(r, np.int64) for r in range(ranks)]

    def ref(self, *, axis: str, ranks: int) -> np.ndarray:
        return np.asarray(0, np.int64)

    def batch(self, flags: Sequence[bool], **attrs: object) -> Node:
        made: Node = rank_index(**attrs)
        return made

    def lower(self, *, axis: str, ranks: int) -> Form:
        if ranks == 1:
            return Map((), const(0))
        return CollectiveForm(f"the number of this rank along {axis!r}", ())

    def cost(self, *, axis: str, ranks: int) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [Sample((), {"axis": "x", "ranks": 1})]


# -- along any axis: moves around the ops above


class _Composite(Op):
    """Base of collectives that are others with moves around them."""

    level = Level.HIR
    family = "collective"
    arity = 1
    effects = "ordered"


def _move_axis(x: Node, source: int, to: int) -> Node:
    order = [i for i in range(x.rank) if i != source]
    order.insert(to, source)
    made: Node = x if source == to else transpose(x, order)
    return made


def _cut(name: str, shape: Shape, dim: int, ranks: int) -> Dim:
    """Length of one of `ranks` equal parts along an axis."""
    part = shape[dim] // ranks
    text = ",".join(map(str, shape))
    require_equal(
        part * ranks, shape[dim], f"{name}: axis {dim} of [{text}] does not divide by {ranks} ranks"
    )
    return part


def _with(shape: Shape, dim: int, size: Dim) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _parts_first(x: Node, dim: int, ranks: int) -> Node:
    """[..., ranks * n, ...] -> [ranks, ..., n, ...]."""
    n = x.shape[dim] // ranks
    return _move_axis(reshape(x, (*x.shape[:dim], ranks, n, *x.shape[dim + 1 :])), dim, 0)


def _parts_joined(x: Node, dim: int) -> Node:
    """[ranks, ..., n, ...] -> [..., ranks * n, ...]; `dim` counts without the first axis."""
    apart = _move_axis(x, 0, dim)
    joined = (*apart.shape[:dim], apart.shape[dim] * apart.shape[dim + 1], *apart.shape[dim + 2 :])
    made: Node = reshape(apart, joined)
    return made


def _check_dim(name: str, x: TensorType, dim: int) -> None:
    need_dtype(name, x, is_computable)
    if not 0 <= dim < x.rank:
        raise ShapeError(f"{name}: axis {dim} is out of range for {x}")


@declare
class _all_gather(_Composite):
    """The operands of all ranks one after the other along `dim`, in the order of the ranks."""

    name = "all_gather"
    attrs = {**Collective.attrs, "dim": Attr(integer, 0)}

    def infer(self, x: TensorType, *, axis: str, ranks: int, dim: int) -> TensorType:
        _check_dim(self.name, x, dim)
        return x.with_shape(_with(x.shape, dim, x.shape[dim] * ranks))

    def everywhere(self, arrays: Arrays, *, axis: str, ranks: int, dim: int) -> list[np.ndarray]:
        return [np.concatenate(arrays, dim)] * ranks

    def ref(self, x: np.ndarray, *, axis: str, ranks: int, dim: int) -> np.ndarray:
        return np.concatenate([x] * ranks, dim)

    def expand(self, x: Node, *, axis: str, ranks: int, dim: int) -> Node:
        return _parts_joined(stack_ranks(x, axis=axis, ranks=ranks), dim)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {"axis": "x", "ranks": 1}),
            Sample((Arg("f32[3,4,2]"),), {"axis": "x", "ranks": 1, "dim": 1}),
            Sample((Arg("f32[n,2]"),), {"axis": "x", "ranks": 1, "dim": 0}, grad=False),
        ]


@declare
class _reduce_scatter(_Composite):
    """The operands of all ranks combined, cut along `dim` into one equal part per rank."""

    name = "reduce_scatter"
    attrs = {**Collective.attrs, "kind": Attr(one_of(*KINDS), "sum"), "dim": Attr(integer, 0)}

    def infer(self, x: TensorType, *, axis: str, ranks: int, kind: str, dim: int) -> TensorType:
        _check_dim(self.name, x, dim)
        return x.with_shape(_with(x.shape, dim, _cut(self.name, x.shape, dim, ranks)))

    def everywhere(self, arrays: Arrays, *, ranks: int, kind: str, dim: int, **_: object) -> list[np.ndarray]:
        return np.split(_combined(arrays, kind), ranks, dim)

    def ref(self, x: np.ndarray, *, ranks: int, **attrs: AttrValue) -> np.ndarray:
        return self.everywhere([x] * ranks, ranks=ranks, **attrs)[0]

    def expand(self, x: Node, *, axis: str, ranks: int, kind: str, dim: int) -> Node:
        made: Node = reduce_part(_parts_first(x, dim, ranks), axis=axis, ranks=ranks, kind=kind)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {"axis": "x", "ranks": 1}),
            Sample((Arg("f32[3,4,2]"),), {"axis": "x", "ranks": 1, "dim": 1, "kind": "mean"}),
            Sample((Arg("f32[n,2]"),), {"axis": "x", "ranks": 1, "dim": 1}, grad=False),
        ]


@declare
class _all_to_all(_Composite):
    """Part r of `split` goes to rank r; what came is joined along `concat` in the order of the ranks."""

    name = "all_to_all"
    attrs = {**Collective.attrs, "split": Attr(integer, 0), "concat": Attr(integer, 0)}

    def infer(self, x: TensorType, *, axis: str, ranks: int, split: int, concat: int) -> TensorType:
        _check_dim(self.name, x, split)
        _check_dim(self.name, x, concat)
        cut = _with(x.shape, split, _cut(self.name, x.shape, split, ranks))
        return x.with_shape(_with(cut, concat, cut[concat] * ranks))

    def everywhere(
        self, arrays: Arrays, *, ranks: int, split: int, concat: int, **_: object
    ) -> list[np.ndarray]:
        parts = [np.split(a, ranks, split) for a in arrays]
        return [np.concatenate([p[r] for p in parts], concat) for r in range(ranks)]

    def ref(self, x: np.ndarray, *, ranks: int, **attrs: AttrValue) -> np.ndarray:
        return self.everywhere([x] * ranks, ranks=ranks, **attrs)[0]

    def expand(self, x: Node, *, axis: str, ranks: int, split: int, concat: int) -> Node:
        swapped = swap_parts(_parts_first(x, split, ranks), axis=axis, ranks=ranks)
        return _parts_joined(swapped, concat)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {"axis": "x", "ranks": 1}),
            Sample((Arg("f32[3,4,2]"),), {"axis": "x", "ranks": 1, "split": 1, "concat": 2}),
            Sample((Arg("f32[n,2]"),), {"axis": "x", "ranks": 1, "split": 0, "concat": 1}, grad=False),
        ]


@declare
class _broadcast(_Composite):
    """The operand of rank `root` for all ranks."""

    name = "broadcast"
    attrs = {**Collective.attrs, "root": Attr(integer, 0)}

    def infer(self, x: TensorType, *, axis: str, ranks: int, root: int) -> TensorType:
        need_dtype(self.name, x, is_computable)
        if not 0 <= root < ranks:
            raise ShapeError(f"broadcast: there is no rank {root} among the {ranks} of axis {axis!r}")
        return x

    def everywhere(self, arrays: Arrays, *, ranks: int, root: int, **_: object) -> list[np.ndarray]:
        return [arrays[root]] * ranks

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return x

    def expand(self, x: Node, *, axis: str, ranks: int, root: int) -> Node:
        """A sum in which all but the root take part with zeros: exact, and differentiable as it stands."""
        if ranks == 1:
            return x
        if x.dtype.is_bool or not (x.dtype.is_float or x.dtype.is_int or x.dtype.is_complex):
            raise DTypeError(f"broadcast: {x.type} cannot be summed; cast it to i32 first")
        here = equal(rank_index(axis=axis, ranks=ranks), root)
        zero = x.graph.constant(np.zeros((), x.dtype.np))
        made: Node = all_reduce(where(here, x, zero), axis=axis, ranks=ranks)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {"axis": "x", "ranks": 1}),
            Sample((Arg("f32[n]"),), {"axis": "x", "ranks": 1, "root": 0}, grad=False),
        ]


# -- what users call


@of_one
def all_gather(x: Operand, axis: str, ranks: int, dim: int = 0) -> Tensor:
    """The operands of the `ranks` ranks of mesh axis `axis`, joined along `dim`.

    >>> all_gather(np.arange(2), axis="tp", ranks=2)
    array([0, 1, 0, 1])
    """
    return _all_gather(x, axis=axis, ranks=ranks, dim=_normal("all_gather", x, dim))


@of_one
def reduce_scatter(x: Operand, axis: str, ranks: int, kind: str = "sum", dim: int = 0) -> Tensor:
    """The operands of all ranks combined; each rank gets its part of `dim`.

    >>> reduce_scatter(np.arange(4), axis="tp", ranks=2)
    array([0, 2])
    """
    return _reduce_scatter(x, axis=axis, ranks=ranks, kind=kind, dim=_normal("reduce_scatter", x, dim))


@of_one
def all_to_all(x: Operand, axis: str, ranks: int, split: int = 0, concat: int = 0) -> Tensor:
    """Part r of `split` goes to rank r; what came from the ranks is joined along `concat`.

    >>> all_to_all(np.arange(4), axis="tp", ranks=2)
    array([0, 1, 0, 1])
    """
    split, concat = _normal("all_to_all", x, split), _normal("all_to_all", x, concat)
    return _all_to_all(x, axis=axis, ranks=ranks, split=split, concat=concat)


@of_one
def broadcast(x: Operand, axis: str, ranks: int, root: int = 0) -> Tensor:
    """The operand of rank `root` of mesh axis `axis`, for all its ranks.

    >>> broadcast(np.arange(2), axis="dp", ranks=2)
    array([0, 1])
    """
    return _broadcast(x, axis=axis, ranks=ranks, root=root)


def _normal(name: str, x: Operand, dim: int) -> int:
    return normal_axis(name, dim, len(shape_of(x)))


__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "rank_index", "reduce_scatter"]
