"""Panels of the right operand of a contraction: made once from weights with NumPy, or on the fly by native code.

A matrix [K, N] becomes panels of `nr` columns, one after the other. A panel is [K][nr] (or [K / group][nr][group]
where an instruction takes several k at once), so the kernel reads it front to back. The last panel is narrower, in
whole vectors, padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rlx.backend.cpu.irtext import Function, Int, Module, Value, vector
from rlx.backend.cpu.microkernel import Kind, kind_of
from rlx.backend.cpu.target import Target
from rlx.errors import ShapeError

_NUMPY = {"f64": np.float64, "f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclass(frozen=True)
class PanelLayout:
    """Where the columns of a packed [k, n] matrix lie."""

    k: int
    n: int
    columns: int  # of a full panel
    lanes: int
    group: int

    @staticmethod
    def of(k: int, n: int, target: Target, dtype: str) -> PanelLayout:
        kind = kind_of(dtype, target)
        return PanelLayout(k, n, target.tile(dtype)[1] * kind.lanes, kind.lanes, kind.group)

    @property
    def full(self) -> int:
        """Panels with every column in use."""
        return self.n // self.columns

    @property
    def tail(self) -> int:
        """Padded columns of the last, narrower panel; 0 when there is none."""
        return -(-(self.n % self.columns) // self.lanes) * self.lanes

    @property
    def depth(self) -> int:
        """k padded to whole groups."""
        return -(-self.k // self.group) * self.group

    @property
    def elements(self) -> int:
        return self.depth * (self.full * self.columns + self.tail)


def packed_shape(k: int, n: int, target: Target, dtype: str = "f32") -> tuple[int]:
    """Shape of what `pack_weights` returns for a [k, n] matrix.

    >>> from rlx.backend.cpu.target import resolve
    >>> packed_shape(10, 50, resolve("x86-64-v4"))
    (640,)
    """
    return (PanelLayout.of(k, n, target, dtype).elements,)


def pack_weights(w: NDArray[np.generic], target: Target, dtype: str = "f32") -> NDArray[np.generic]:
    """The matrix `w` [K, N] in the panels that kernels for `target` read.

    >>> from rlx.backend.cpu.target import resolve
    >>> w = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> pack_weights(w, resolve("x86-64"))
    array([0., 1., 2., 0., 3., 4., 5., 0.], dtype=float32)
    """
    if w.ndim != 2:
        raise ShapeError(f"weights to pack must be a matrix [K, N], not of shape {w.shape}: reshape them first")
    layout = PanelLayout.of(*w.shape, target, dtype)
    padded = np.zeros((layout.depth, layout.full * layout.columns + layout.tail), _NUMPY[dtype])
    padded[: layout.k, : layout.n] = w
    cut = layout.full * layout.columns
    return np.concatenate([
        _interleave(padded[:, :cut], layout.columns, layout.group),
        _interleave(padded[:, cut:], layout.tail, layout.group),
    ])  # fmt: skip


def _interleave(matrix: NDArray[np.generic], columns: int, group: int) -> NDArray[np.generic]:
    """[K, panels * columns] -> panels of [K / group][columns][group], flat."""
    if not matrix.size:
        return matrix.reshape(-1)
    depth, width = matrix.shape
    split = matrix.reshape(depth // group, group, width // columns, columns)
    return split.transpose(2, 0, 3, 1).reshape(-1)


def unpack_weights(packed: NDArray[np.generic], k: int, n: int, target: Target, dtype: str = "f32") -> NDArray[np.generic]:
    """The [k, n] matrix that `pack_weights` turned into `packed`.

    >>> from rlx.backend.cpu.target import resolve
    >>> host, w = resolve("host"), np.arange(65 * 3, dtype=np.float32).reshape(3, 65)
    >>> bool((unpack_weights(pack_weights(w, host), 3, 65, host) == w).all())
    True
    """
    layout = PanelLayout.of(k, n, target, dtype)
    if packed.shape != (layout.elements,):
        raise ShapeError(f"packed weights of a {k} x {n} matrix have {layout.elements} elements, not {packed.shape}")
    cut = layout.depth * layout.full * layout.columns
    parts = [(packed[:cut], layout.columns), (packed[cut:], layout.tail)]
    blocks = [
        part.reshape(-1, layout.depth // layout.group, columns, layout.group).transpose(1, 3, 0, 2).reshape(layout.depth, -1)
        for part, columns in parts
        if part.size
    ]
    return np.concatenate(blocks, axis=1)[:k, :n] if blocks else np.zeros((k, n), packed.dtype)


# ---- panels made at run time

_STRIP = [("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "column_stride"), ("ptr noalias", "panel"),
          ("i64", "panel_columns"), ("i64", "depth"), ("i64", "left")]  # fmt: skip


def emit_strip_packer(module: Module, kind: Kind, row_stride: Int | None, column_stride: Int | None) -> str:
    """An internal function that copies one vector's worth of columns of B into a panel; gives its name.

    `void pack(source, row_stride, column_stride, panel, panel_columns, depth, left)` writes
    panel[k * panel_columns + lane] = source[k * row_stride + lane * column_stride] for k < depth. Lanes from `left`
    on are filled from memory inside the matrix and mean nothing. Strides known to be 1 choose a faster copy.
    """
    form = "rows" if column_stride == 1 else "columns" if row_stride == 1 else "gather"
    name = f"rlx.pack.{form}.{kind.element}.{kind.lanes}"
    if not module.defines(name):
        fn = module.function(name, _STRIP, internal=True, noinline=True)
        {"rows": _copy_rows, "columns": _transpose_columns, "gather": _gather_all}[form](fn, kind)
    return name


def _copy_rows(fn: Function, kind: Kind) -> None:
    source, row_stride, _, panel, panel_columns, depth, left = fn.args
    type_ = vector(kind.element, kind.lanes)

    def copy(mask: Value | None) -> None:
        def row(k: Int, _: list[Value]) -> None:
            place = fn.gep(source, fn.mul(k, row_stride), kind.element)
            loaded = fn.load(type_, place) if mask is None else fn.masked_load(type_, place, mask)
            fn.store(loaded, fn.gep(panel, fn.mul(k, panel_columns), kind.element))

        fn.loop(0, depth, 1, [], row)

    whole = fn.cmp("uge", left, kind.lanes)
    fn.branch(whole, lambda: copy(None), lambda: copy(fn.lanes(left, kind.lanes)))


def _lane_places(fn: Function, kind: Kind) -> list[Value]:
    """Address of the first element of every lane's column; lanes past the matrix repeat its last column."""
    source, _, column_stride, _, _, _, left = fn.args
    last = fn.sub(left, 1)
    return [
        fn.gep(source, fn.mul(fn.umin(lane, last), column_stride), kind.element) for lane in range(kind.lanes)
    ]


def _gather_rows(fn: Function, kind: Kind, places: list[Value]) -> None:
    """Element by element: any strides."""
    _, row_stride, _, panel, panel_columns, depth, _ = fn.args
    type_ = vector(kind.element, kind.lanes)

    def row(k: Int, _: list[Value]) -> None:
        distance = fn.mul(k, row_stride)
        lanes = Value(type_, "poison")
        for lane, place in enumerate(places):
            lanes = fn.insert(lanes, fn.load(kind.element, fn.gep(place, distance, kind.element)), lane)
        fn.store(lanes, fn.gep(panel, fn.mul(k, panel_columns), kind.element))

    fn.loop(0, depth, 1, [], row)


def _gather_all(fn: Function, kind: Kind) -> None:
    _gather_rows(fn, kind, _lane_places(fn, kind))


def _transpose_columns(fn: Function, kind: Kind) -> None:
    """Squares of lanes x lanes; the last one is moved back to end at `depth`, so nothing is read beyond it."""
    _, _, _, panel, panel_columns, depth, _ = fn.args
    places = _lane_places(fn, kind)
    type_ = vector(kind.element, kind.lanes)

    def squares() -> None:
        end = fn.sub(depth, kind.lanes)

        def square(k: Int, _: list[Value]) -> None:
            k = fn.umin(k, end)
            loaded = [fn.load(type_, fn.gep(place, k, kind.element)) for place in places]
            for i, row in enumerate(fn.transpose(loaded)):
                fn.store(row, fn.gep(panel, fn.mul(fn.add(k, i), panel_columns), kind.element))

        fn.loop(0, depth, kind.lanes, [], square)

    fn.branch(fn.cmp("uge", depth, kind.lanes), squares, lambda: _gather_rows(fn, kind, places))
