"""Kernels that treat rows alike: whether row i of every result comes from row i of what is cut alone.

A value is cut along its first axis that is not 1 if that axis, and no other, has a multiple of `rows`
elements: so many belong to one row. All is decided on the kernel that a region composes to: one axis of its
space runs along the rows, stores go to the row of that axis, and loads of cut operands come from it. That an
index stays inside its row follows from the kernel being sound for one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.ir.dim import Dim, substitute, sym, symbols
from rlx.ir.types import Shape, TensorType
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.form import Strides, dense_strides
from rlx.kernel.nests import AttentionNest, ContractNest, ConvNest, Kernel, Nest, Store, TransformNest
from rlx.kernel.scalar import LOADS, Scalar, load_index


def rows_per(d: Dim, rows: str) -> Dim | None:
    """How many elements of an axis belong to one row; None if the axis is not cut along.

    >>> rows_per(sym("rows") * 4, "rows"), rows_per(7, "rows"), rows_per(sym("rows") + 1, "rows")
    (4, None, None)
    """
    if rows not in symbols(d):
        return None
    count = substitute(d, {rows: 1})
    return count if rows not in symbols(count) and d == count * sym(rows) else None


def front(shape: Sequence[object]) -> int:
    """The first axis that is not 1: slices along it lie one after the other in memory.

    >>> front((1, 1, 5, 1)), front((7, 2)), front((1,))
    (2, 0, 1)
    """
    return next((i for i, d in enumerate(shape) if d != 1), len(shape))


def cut_axis(t: TensorType, rows: str) -> int | None:
    """The axis along which a value has rows to be cut; None if it has none, or not only there."""
    axis = front(t.shape)
    if axis == len(t.shape) or rows_per(t.shape[axis], rows) is None or _mentions(t.shape[axis + 1 :], rows):
        return None
    return axis


def is_cut(t: TensorType, rows: str) -> bool:
    """Whether a value has rows to be cut."""
    return cut_axis(t, rows) is not None


def is_whole(t: TensorType, rows: str) -> bool:
    """Whether a value is the same for every slice."""
    return not _mentions(t.shape, rows)


def _mentions(dims: Sequence[Dim], rows: str) -> bool:
    return any(rows in symbols(d) for d in dims)


def view_keeps_rows(layout: Strides, t: TensorType, root: TensorType, rows: str) -> bool:
    """Whether a view has its rows in the rows of its root, or is whole like its root."""
    if _mentions((layout.offset, *layout.strides), rows):
        return False
    if is_whole(t, rows):
        return is_whole(root, rows)
    axis = cut_axis(t, rows)
    if axis is None:
        return False
    if is_whole(root, rows):
        return layout.strides[axis] == 0
    per = rows_per(t.shape[axis], rows)
    return is_cut(root, rows) and per is not None and layout.strides[axis] * per == _row(root, rows)


def _row(t: TensorType, rows: str) -> Dim:
    """Elements of one row."""
    return substitute(t.numel, {rows: 1})


def keeps_rows(
    kernel: Kernel, operands: Sequence[TensorType], results: Sequence[TensorType], rows: str
) -> bool:
    """Whether a kernel over operands and results of these types, which say `rows`, treats rows alike."""
    if not all(is_cut(t, rows) for t in results):
        return False
    if not all(is_cut(t, rows) or is_whole(t, rows) for t in operands):
        return False
    made = _anatomy(kernel)
    if made is None:
        return False
    space, kept, bodies, stores = made
    along = [i for i, d in enumerate(space) if rows in symbols(d)]
    if len(along) != 1 or along[0] >= kept:
        return False
    axis, per = along[0], rows_per(space[along[0]], rows)
    if per is None:
        return False
    check = _Check(operands, rows, axis, per, len(space))
    if isinstance(kernel, ConvNest):
        if axis != 0 or not is_whole(operands[kernel.w], rows):
            return False
        if kernel.prologue is None:
            if not is_cut(operands[kernel.x], rows):
                return False
        elif not _Check(operands, rows, 0, per, len(kernel.prologue.shape)).passes(kernel.prologue.body):
            return False
    for store, result in zip(stores, results, strict=True):
        if axis >= len(store.strides) or store.strides[axis] * per != _row(result, rows):
            return False
    return all(check.passes(body) for body in bodies)


def _anatomy(
    kernel: Kernel,
) -> tuple[Shape, int, Iterator[Scalar], tuple[Store, ...]] | None:
    """Space of a kernel, how many of its axes results have, all expressions, and stores."""
    stores = getattr(kernel, "stores", ())
    stored = (s.body for s in stores)
    if isinstance(kernel, Nest):
        return kernel.space, kernel.outer, iter([*(s.body for s in kernel.stats), *stored]), stores
    if isinstance(kernel, ContractNest):
        return kernel.space, kernel.kept, iter([kernel.lhs, kernel.rhs, *stored]), stores
    if isinstance(kernel, AttentionNest):
        space = (*kernel.batch, kernel.queries, kernel.keys)
        parts = [kernel.q, kernel.k, kernel.v, kernel.score, *(m.load for m in kernel.masks), *stored]
        return space, len(kernel.batch), iter(parts), stores
    if isinstance(kernel, TransformNest):
        return (*kernel.rows, kernel.n), len(kernel.rows), iter([*kernel.sources, *stored]), stores
    if isinstance(kernel, ConvNest):
        return kernel.form.out, len(kernel.form.out), stored, stores
    return None


class _Check:
    """Looks whether expressions use the axis along the rows for nothing but rows."""

    def __init__(self, operands: Sequence[TensorType], rows: str, axis: int, per: Dim, rank: int) -> None:
        self.operands, self.rows, self.axis, self.per, self.rank = operands, rows, axis, per, rank
        self._known: dict[Scalar, bool] = {}

    def passes(self, body: Scalar) -> bool:
        """Whether the value of an expression depends on its row's elements alone."""
        for e in body.walk():  # arguments come before users
            if e not in self._known:
                self._known[e] = self._look(e)
        return not self._known[body]

    def _loose(self, e: Scalar) -> bool:
        """Whether an expression depends on the number of the row, or of rows, itself."""
        if e not in self._known:  # made by taking an index apart
            self._known[e] = self._look(e)
        return self._known[e]

    def _look(self, e: Scalar) -> bool:
        if e.prim == "axis":
            return bool(e.data == self.axis)
        if e.prim == "size":
            return self.rows in symbols(e.data)
        if e.prim not in LOADS:
            return any(map(self._loose, e.args))
        index = load_index(e)
        if any(map(self._loose, e.args[: len(e.args) - len(index)])):  # a guard, what stands in for it
            return True
        operand = self.operands[e.data]
        if is_whole(operand, self.rows):
            return any(map(self._loose, index))
        return not self._in_row(index, operand)

    def _in_row(self, index: Sequence[Scalar], operand: TensorType) -> bool:
        """Whether an index moves by one row of the operand where the kernel moves by one row."""
        step: Dim = 0
        for i, stride in zip(index, dense_strides(operand.shape), strict=True):
            if not self._loose(i):
                continue
            parts = affine(i, max(self.rank, self.axis + 1))
            along = None if parts is None else to_dim(parts[0][self.axis])
            if parts is None or along is None or self._loose(parts[1]):
                return False
            step = step + along * stride
        return step * self.per == _row(operand, self.rows)
