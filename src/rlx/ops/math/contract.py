"""Sums of products: dot_general (the MIR contraction), matmul and einsum on top of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, dtype_kind, ints, optional, string
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_two
from rlx.ir.types import TensorType
from rlx.kernel.form import Contract, Form
from rlx.ops.array.shape import broadcast_to, inverse_permutation, reshape, transpose
from rlx.ops.rules import broadcast_shapes, is_number, lift_all, need_dtype, op_call, same_dtype, shift
from rlx.records import dataclass


def accumulate_dtype(d: DType) -> DType:
    """What products are summed in: f32 for half precision, else the dtype itself."""
    return F32 if d.name in ("f16", "bf16") else d


def _sizes_differ(a: TensorType, i: int, b: TensorType, j: int) -> str:
    return f"matmul: axis {i} of {a} and axis {j} of {b} differ"


def _two_sizes(equation: str, label: str) -> str:
    return f"einsum: {equation!r}: label {label!r} has two sizes"


S = TypeVar("S")


@dataclass(frozen=True)
class Axes:
    """Which axes of two operands meet; the others are free."""

    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @property
    def contract(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.lhs_contract, self.rhs_contract, strict=True))

    @property
    def batch(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.lhs_batch, self.rhs_batch, strict=True))

    def left(self, rank: int) -> tuple[int, ...]:
        return free_axes(rank, self.lhs_contract, self.lhs_batch)

    def right(self, rank: int) -> tuple[int, ...]:
        return free_axes(rank, self.rhs_contract, self.rhs_batch)

    def result(self, a: Sequence[S], b: Sequence[S]) -> tuple[S, ...]:
        """Shape of the result: batch axes, free axes of lhs, free axes of rhs."""
        left, right = self.left(len(a)), self.right(len(b))
        return (*(a[i] for i in self.lhs_batch), *(a[i] for i in left), *(b[j] for j in right))


@declare
class _dot_general(Op):
    """Contract axes of two tensors: the result has batch axes, free axes of lhs, free axes of rhs.

    Half precision accumulates in f32; `out_dtype` widens the result (i8 x i8 -> i32, bf16 x bf16 -> f32).
    """

    name = "dot_general"
    arity = 2
    heavy = True
    attrs = {
        "lhs_contract": Attr(ints),
        "rhs_contract": Attr(ints),
        "lhs_batch": Attr(ints, ()),
        "rhs_batch": Attr(ints, ()),
        "out_dtype": Attr(optional(dtype_kind), None),
    }

    def infer(
        self, a: TensorType, b: TensorType, *, out_dtype: DType | None, **axes: AttrValue
    ) -> TensorType:
        need_dtype(self.name, a, is_number)
        need_dtype(self.name, b, is_number)
        d = same_dtype(self.name, (a, b)) if out_dtype is None else out_dtype
        at = Axes(**axes)
        for side, t, used in (
            ("lhs", a, (*at.lhs_contract, *at.lhs_batch)),
            ("rhs", b, (*at.rhs_contract, *at.rhs_batch)),
        ):
            if len(set(used)) != len(used) or not all(0 <= i < t.rank for i in used):
                raise ShapeError(f"dot_general: {side} axes {used} are not distinct axes of {t}")
        if len(at.lhs_contract) != len(at.rhs_contract) or len(at.lhs_batch) != len(at.rhs_batch):
            raise ShapeError("dot_general: lhs and rhs name different numbers of axes")
        for i, j in (*at.contract, *at.batch):
            require_equal(a.shape[i], b.shape[j], partial(_sizes_differ, a, i, b, j))
        return TensorType(d, at.result(a.shape, b.shape))

    def ref(self, a: np.ndarray, b: np.ndarray, *, out_dtype: DType | None, **axes: AttrValue) -> np.ndarray:
        at, own = Axes(**axes), dtype(a.dtype)
        out = own if out_dtype is None else out_dtype
        wide = accumulate_dtype(out if out.bits > own.bits else own).np
        left, right = at.left(a.ndim), at.right(b.ndim)
        batch = math.prod([a.shape[i] for i in at.lhs_batch])
        k, m = math.prod([a.shape[i] for i in at.lhs_contract]), math.prod([a.shape[i] for i in left])
        n = math.prod([b.shape[j] for j in right])
        a_moved = a.transpose(*at.lhs_batch, *left, *at.lhs_contract)
        b_moved = b.transpose(*at.rhs_batch, *at.rhs_contract, *right)
        x = a_moved.astype(wide, copy=False).reshape(batch, m, k)
        y = b_moved.astype(wide, copy=False).reshape(batch, k, n)
        product: np.ndarray = np.matmul(x, y).reshape(at.result(a.shape, b.shape))
        return product.astype(out.np, copy=False)

    def vjp(
        self, g: Node, y: Node, a: Node, b: Node, *, out_dtype: DType | None, **axes: AttrValue
    ) -> list[Node]:
        at, kinds = Axes(**axes), (a.dtype, b.dtype)
        if g.dtype is not a.dtype:  # out_dtype: the products below are those of the wider dtype
            a, b = op_call("cast", a, dtype=g.dtype), op_call("cast", b, dtype=g.dtype)
        left, right, nb = at.left(a.rank), at.right(b.rank), len(at.lhs_batch)
        g_left, g_right = range(nb, nb + len(left)), range(nb + len(left), g.rank)
        both = tuple(range(nb))
        # [batch, left, contracted in the order of rhs]
        da = dot_general(g, b, (tuple(g_right), right), (both, at.rhs_batch))
        by_rhs = [i for i, _ in sorted(at.contract, key=lambda pair: pair[1])]
        da = transpose(da, inverse_permutation((*at.lhs_batch, *left, *by_rhs)))
        # [batch, right, contracted in the order of lhs]
        db = dot_general(g, a, (tuple(g_left), left), (both, at.lhs_batch))
        by_lhs = [j for _, j in sorted(at.contract)]
        db = transpose(db, inverse_permutation((*at.rhs_batch, *right, *by_lhs)))
        grads = zip((da, db), kinds, strict=True)
        return [d if d.dtype is kind else op_call("cast", d, dtype=kind) for d, kind in grads]

    def batch(
        self, flags: Sequence[bool], a: Node, b: Node, *, out_dtype: DType | None, **axes: AttrValue
    ) -> Node:
        at = Axes(**axes)
        lhs, rhs = shift(at.lhs_contract), shift(at.rhs_contract)
        made: Node
        if flags[0] and not flags[1] and not at.batch:  # the batch axis is one more free axis of lhs
            made = dot_general(a, b, (lhs, at.rhs_contract), ((), ()), out_dtype)
            return made
        if flags[1] and not flags[0] and not at.batch:
            made = dot_general(a, b, (at.lhs_contract, rhs), ((), ()), out_dtype)
            place = a.rank - len(at.lhs_contract)
            made = transpose(made, (place, *(i for i in range(made.rank) if i != place)))
            return made
        a, b = lift_all(flags, (a, b))
        batch = ((0, *shift(at.lhs_batch)), (0, *shift(at.rhs_batch)))
        made = dot_general(a, b, (lhs, rhs), batch, out_dtype)
        return made

    def lower(self, a: TensorType, b: TensorType, *, out_dtype: DType | None, **axes: AttrValue) -> Form:
        at, out = Axes(**axes), a.dtype if out_dtype is None else out_dtype
        wide = accumulate_dtype(out if out.bits > a.dtype.bits else a.dtype)
        return Contract(a.shape, b.shape, at.batch, at.contract, out, wide)

    def cost(self, a: TensorType, b: TensorType, *, out_dtype: DType | None, **axes: AttrValue) -> Dim:
        total: Dim = 2 * a.numel
        for j in Axes(**axes).right(b.rank):
            total = total * b.shape[j]
        return total

    def samples(self) -> list[Sample]:
        def one(a: str, b: str, contract: Any, batch: Any = ((), ()), **more: AttrValue) -> Sample:
            attrs = {
                "lhs_contract": contract[0],
                "rhs_contract": contract[1],
                "lhs_batch": batch[0],
                "rhs_batch": batch[1],
            }
            return Sample((Arg(a), Arg(b)), attrs, **more)

        return [
            one("f32[3,4]", "f32[4,5]", ((1,), (0,))),
            one("f32[2,3,4]", "f32[2,5,4]", ((2,), (2,)), ((0,), (0,))),
            one("f32[4,2,3]", "f32[3,5,4]", ((0, 2), (2, 0))),
            one("f32[3]", "f32[3]", ((0,), (0,))),
            one("f32[2]", "f32[3]", ((), ())),
            one("f32[2,0]", "f32[0,3]", ((1,), (0,)), grad=False),
            one("f32[n,7]", "f32[7,17]", ((1,), (0,)), grad=False),
            one("f32[1,5]", "f32[5,1]", ((1,), (0,))),
            one("i32[2,3]", "i32[3,2]", ((1,), (0,)), grad=False),
        ]


def free_axes(rank: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Axes that are neither contracted nor batch, in order."""
    return tuple(i for i in range(rank) if i not in contract and i not in batch)


@of_two
def dot_general(
    a: Operand,
    b: Operand,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    out_dtype: DTypeLike | None = None,
) -> Tensor:
    """Contract axes of a with axes of b, pairing batch axes; result axes are batch, rest of a, rest of b.

    >>> dot_general(np.ones((2, 3)), np.ones((4, 3)), ((1,), (1,))).shape
    (2, 4)
    """
    return _dot_general(
        a,
        b,
        lhs_contract=tuple(contract[0]),
        rhs_contract=tuple(contract[1]),
        lhs_batch=tuple(batch[0]),
        rhs_batch=tuple(batch[1]),
        out_dtype=out_dtype,
    )


def matrix_product(a: Node, b: Node, out_dtype: DTypeLike | None = None) -> Node:
    """matmul as a contraction; `out_dtype` as for dot_general."""
    made: Node
    if b.rank <= 2:  # leading axes of a are just more rows
        made = dot_general(a, b, ((a.rank - 1,), (max(b.rank - 2, 0),)), out_dtype=out_dtype)
        return made
    if a.rank == 1:
        made = dot_general(b, a, ((b.rank - 2,), (0,)), out_dtype=out_dtype)
        return made
    lead = broadcast_shapes("matmul", [a.shape[:-2], b.shape[:-2]])
    a = a if a.shape[:-2] == lead else broadcast_to(a, (*lead, *a.shape[-2:]))
    b = b if b.shape[:-2] == lead else broadcast_to(b, (*lead, *b.shape[-2:]))
    n = len(lead)
    made = dot_general(a, b, ((n + 1,), (n,)), (tuple(range(n)), tuple(range(n))), out_dtype)
    return made


@declare
class matmul(Op):
    """Matrix product with NumPy's rules: the last two axes multiply, the others broadcast, vectors too.

    >>> matmul(np.ones((2, 3)), np.ones((3, 4))).shape
    (2, 4)
    """

    name = "matmul"
    level = Level.HIR
    arity = 2
    heavy = True

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        need_dtype(self.name, a, is_number)
        need_dtype(self.name, b, is_number)
        d = same_dtype(self.name, (a, b))
        if a.rank == 0 or b.rank == 0:
            raise ShapeError(f"matmul: {a} @ {b}: a scalar operand; use * instead")
        inner = b.shape[-2] if b.rank > 1 else b.shape[0]
        require_equal(
            a.shape[-1],
            inner,
            lambda: (
                f"matmul: argument 0 has {a.shape[-1]} {'columns' if a.rank > 1 else 'elements'}, "
                f"argument 1 has {inner} {'rows' if b.rank > 1 else 'elements'} ({a} @ {b})"
            ),
        )
        lead = broadcast_shapes(self.name, [a.shape[:-2], b.shape[:-2]])
        rows = a.shape[-2:-1]
        columns = b.shape[-1:] if b.rank > 1 else ()
        return TensorType(d, (*lead, *rows, *columns))

    def ref(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = accumulate_dtype(dtype(a.dtype)).np
        return np.asarray(np.matmul(a.astype(wide), b.astype(wide))).astype(a.dtype)

    def expand(self, a: Node, b: Node) -> Node:
        return matrix_product(a, b)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"), Arg("f32[3,4]"))),
            Sample((Arg("f32[2,5,3]"), Arg("f32[3,4]"))),
            Sample((Arg("f32[2,1,5,3]"), Arg("f32[4,3,2]"))),
            Sample((Arg("f32[3]"), Arg("f32[3]"))),
            Sample((Arg("f32[3]"), Arg("f32[2,3,4]"))),
            Sample((Arg("f32[2,4,3]"), Arg("f32[3]"))),
            Sample((Arg("f32[2,0]"), Arg("f32[0,3]")), grad=False),
            Sample((Arg("f32[1,n,4]"), Arg("f32[4,2]")), grad=False),
        ]


@declare
class _einsum(Op):
    """Einstein summation over any number of operands, `->` and ellipsis included."""

    name = "einsum"
    level = Level.HIR
    heavy = True
    attrs = {"equation": Attr(string)}

    def infer(self, *types: TensorType, equation: str) -> TensorType:
        inputs, output = parse_equation(equation, [t.rank for t in types])
        sizes: dict[str, Dim] = {}
        for labels, t in zip(inputs, types, strict=True):
            need_dtype(self.name, t, is_number)
            for label, d in zip(labels, t.shape, strict=True):
                if sizes.get(label, 1) == 1:
                    sizes[label] = d
                elif d != 1:
                    require_equal(sizes[label], d, partial(_two_sizes, equation, label))
        return TensorType(same_dtype(self.name, types), tuple(sizes[c] for c in output))

    def ref(self, *arrays: np.ndarray, equation: str) -> np.ndarray:
        wide = accumulate_dtype(dtype(arrays[0].dtype)).np
        inputs, output = parse_equation(equation, [a.ndim for a in arrays])
        numbers = {c: i for i, c in enumerate(sorted(set("".join(inputs))))}
        args: list[AttrValue] = []
        larger = _larger_labels([(a.shape, labels) for a, labels in zip(arrays, inputs, strict=True)])
        kept = [
            [i for i, (n, c) in enumerate(zip(a.shape, labels, strict=True)) if n != 1 or c not in larger]
            for a, labels in zip(arrays, inputs, strict=True)
        ]
        inputs = ["".join(labels[i] for i in axes) for labels, axes in zip(inputs, kept, strict=True)]
        for place, (labels, axes, a) in enumerate(zip(inputs, kept, arrays, strict=True)):
            elsewhere = output + "".join(inputs[:place] + inputs[place + 1 :])
            part = a.reshape([a.shape[i] for i in axes]).astype(wide)
            shown = "".join(dict.fromkeys(c for c in labels if c in elsewhere))
            # What no other operand has is summed first: times an infinity, the order counts.
            part = np.einsum(part, [numbers[c] for c in labels], [numbers[c] for c in shown])
            args += [part, [numbers[c] for c in shown]]
        return np.asarray(np.einsum(*args, [numbers[c] for c in output])).astype(arrays[0].dtype)

    def expand(self, *operands: Node, equation: str) -> Node:
        inputs, output = parse_equation(equation, [x.rank for x in operands])
        terms = [_diagonal(x, labels) for x, labels in zip(operands, inputs, strict=True)]
        larger = _larger_labels([(x.shape, labels) for x, labels in terms])
        terms = [_without_ones(x, labels, larger) for x, labels in terms]
        value, labels = _sum_out(*terms[0], keep=output + "".join(t[1] for t in terms[1:]))
        for i, (right, right_labels) in enumerate(terms[1:], 1):
            later = output + "".join(t[1] for t in terms[i + 1 :])
            right, right_labels = _sum_out(right, right_labels, keep=labels + later)
            value, labels = _pair(value, labels, right, right_labels, later)
        value, labels = _sum_out(value, labels, keep=output)
        made: Node = transpose(value, tuple(labels.index(c) for c in output))
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"), Arg("f32[3,4]")), {"equation": "ij,jk->ik"}),
            Sample((Arg("f32[2,3]"),), {"equation": "ij->j"}),
            Sample((Arg("f32[3,3]"),), {"equation": "ii->i"}),
            Sample((Arg("f32[3,3]"),), {"equation": "ii"}),
            Sample((Arg("f32[2,3]"),), {"equation": "ij->ji"}),
            Sample((Arg("f32[2]"), Arg("f32[3]"), Arg("f32[2,3]")), {"equation": "i,j,ij->ij"}),
            Sample((Arg("f32[2,4,3]"), Arg("f32[2,3,5]")), {"equation": "...ij,...jk->...ik"}),
            Sample((Arg("f32[2,3,4]"), Arg("f32[2,5,4]")), {"equation": "bic,bjc->bij"}),
            Sample((Arg("f32[n,3]"), Arg("f32[3,4]")), {"equation": "ij,jk->ki"}, grad=False),
        ]


def einsum(equation: str, *operands: Operand) -> Tensor:
    """Einstein summation, as numpy.einsum with a text equation.

    >>> einsum("ij,ij->i", np.ones((2, 3)), np.ones((2, 3)))
    array([3., 3.])
    """
    return _einsum(*operands, equation=equation)


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Labels of each operand and of the result; an ellipsis becomes capital letters not otherwise used."""
    text = equation.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum: {equation!r} names {len(inputs)} operands, got {len(ranks)}")
    used = set(text)
    spare = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used]
    widest = 0
    for labels, rank in zip(inputs, ranks, strict=True):
        if "..." in labels:
            widest = max(widest, rank - len(labels) + 3)
    dots = "".join(spare[:widest])
    filled = []
    for labels, rank in zip(inputs, ranks, strict=True):
        n = rank - len(labels) + 3 if "..." in labels else 0
        full = labels.replace("...", dots[widest - n :] if n else "")
        if len(full) != rank:
            raise ShapeError(
                f"einsum: {equation!r}: {labels!r} names {len(full)} axes of an operand of rank {rank}"
            )
        filled.append(full)
    if arrow:
        output = output.replace("...", dots)
    else:
        every = "".join(filled)
        output = dots + "".join(sorted(c for c in set(every) - set(dots) if every.count(c) == 1))
    unknown = set(output) - set("".join(filled))
    if unknown or len(set(output)) != len(output):
        raise ShapeError(
            f"einsum: {equation!r}: the result {output!r} repeats a label or has one of no operand"
        )
    return filled, output


def _diagonal(x: Node, labels: str) -> tuple[Node, str]:
    """Take diagonals of labels that occur twice in one operand."""
    while len(set(labels)) != len(labels):
        c = next(c for c in labels if labels.count(c) > 1)
        i = labels.index(c)
        j = labels.index(c, i + 1)
        order = (*(k for k in range(x.rank) if k not in (i, j)), i, j)
        x = transpose(x, order)
        n = x.shape[-1]
        if isinstance(n, int):  # a view
            flat = reshape(x, (*x.shape[:-2], n * n))
            steps = (*(1,) * (flat.rank - 1), n + 1)
            x = op_call("slice", flat, starts=(0,) * flat.rank, sizes=(*flat.shape[:-1], n), steps=steps)
        else:
            x = op_call("diagonal", x, k=0)
        labels = "".join(labels[k] for k in order[:-2]) + c
    return x, labels


def _larger_labels(terms: Sequence[tuple[Sequence[Dim], str]]) -> set[str]:
    """Labels of axes that are not known to have size 1 in every operand."""
    return {c for shape, labels in terms for d, c in zip(shape, labels, strict=True) if d != 1}


def _without_ones(x: Node, labels: str, larger: set[str]) -> tuple[Node, str]:
    """An axis of size 1 next to a larger one broadcasts, as one that is not there."""
    kept = [i for i, (d, c) in enumerate(zip(x.shape, labels, strict=True)) if d != 1 or c not in larger]
    if len(kept) == x.rank:
        return x, labels
    made: Node = reshape(x, tuple(x.shape[i] for i in kept))
    return made, "".join(labels[i] for i in kept)


def _sum_out(x: Node, labels: str, keep: str) -> tuple[Node, str]:
    gone = tuple(i for i, c in enumerate(labels) if c not in keep)
    total = op_call("reduce_sum", x, axes=gone) if gone else x
    return total, "".join(c for c in labels if c in keep)


def _pair(a: Node, la: str, b: Node, lb: str, later: str) -> tuple[Node, str]:
    """Contract two operands: shared labels that are needed later are batch, the rest are summed."""
    shared = [c for c in la if c in lb]
    batch, summed = [c for c in shared if c in later], [c for c in shared if c not in later]
    out = dot_general(
        a,
        b,
        (tuple(la.index(c) for c in summed), tuple(lb.index(c) for c in summed)),
        (tuple(la.index(c) for c in batch), tuple(lb.index(c) for c in batch)),
    )
    return out, "".join(batch) + "".join(c for c in la if c not in shared) + "".join(
        c for c in lb if c not in shared
    )
