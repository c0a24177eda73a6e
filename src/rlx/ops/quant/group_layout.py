"""How weights of 4 or 8 bits lie in memory, and their packing with NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ShapeError
from rlx.records import dataclass

PANEL_VECTORS = 2
_SCALE_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True)
class QuantLayout:
    """Where quantised weights lie: panels, in them groups, in them scales, zeros (if any) and codes.

    4-bit codes come as one 32-bit word per column and 8 k: the even k in the low half, the odd in the high.
    8-bit codes come k by k.

    >>> QuantLayout(64, 32, bits=4, group=32, lanes=16, scale="f16").nbytes
    1152
    """

    k: int
    n: int
    bits: int
    group: int
    lanes: int
    scale: str = "f32"
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ShapeError(f"quantised weights have 4 or 8 bits, not {self.bits}")
        if self.group < 8 or self.group % 8:
            raise ShapeError(f"a group of quantised weights is a multiple of 8 along k, not {self.group}")

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
    def factors_bytes(self) -> int:
        """Bytes of the scales, and of the zeros, of a group."""
        return self.columns * _SCALE_BYTES[self.scale]

    @property
    def codes_start(self) -> int:
        return self.factors_bytes * (1 + self.zeros)

    @property
    def group_bytes(self) -> int:
        return self.codes_start + self.columns * self.group * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        return self.groups * self.group_bytes

    @property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes


def pack_quantised(
    q: NDArray[np.integer],
    scales: NDArray[np.floating],
    layout: QuantLayout,
    zeros: NDArray[np.floating] | None = None,
) -> NDArray[np.uint8]:
    """Codes `q` [k, n] (-8..7 or -128..127), `scales` and `zeros` [groups, n] as the kernels read them.

    >>> layout = QuantLayout(8, 1, bits=8, group=8, lanes=4)
    >>> pack_quantised(np.ones((8, 1), np.int8), np.ones((1, 1), np.float32), layout).shape
    (96,)
    """
    low, high = -(1 << (layout.bits - 1)), (1 << (layout.bits - 1)) - 1
    if q.shape != (layout.k, layout.n) or scales.shape != (layout.groups, layout.n):
        wanted = f"[{layout.k}, {layout.n}] and [{layout.groups}, {layout.n}]"
        raise ShapeError(f"codes and scales must have shapes {wanted}, not {q.shape} and {scales.shape}")
    if layout.zeros != (zeros is not None) or (zeros is not None and zeros.shape != scales.shape):
        raise ShapeError("zeros are given exactly when the layout has them, in the shape of the scales")
    if q.size and (q.min() < low or q.max() > high):
        raise ShapeError(f"codes of {layout.bits} bits must be in {low}..{high}, not {q.min()}..{q.max()}")
    padded = np.zeros((layout.depth, layout.panels * layout.columns), np.int32)
    padded[: layout.k, : layout.n] = q
    codes = padded.reshape(layout.groups, layout.group, layout.panels, layout.columns)
    if layout.bits == 8:
        parts = codes.transpose(2, 0, 1, 3).astype(np.int8)
    else:
        eights = (codes + 8).reshape(layout.groups, layout.group // 8, 4, 2, layout.panels, layout.columns)
        shifts = 4 * np.arange(4)[:, None] + 16 * np.arange(2)  # nibble of k = 2 i + odd
        words = (eights.astype(np.uint32) << shifts[None, None, :, :, None, None].astype(np.uint32)).sum(
            axis=(2, 3), dtype=np.uint32
        )
        parts = words.transpose(2, 0, 1, 3)
    shape = (layout.panels, layout.groups, -1)
    blocks = [_factors(scales, layout).view(np.uint8).reshape(shape)]
    if zeros is not None:
        blocks.append(_factors(zeros, layout).view(np.uint8).reshape(shape))
    blocks.append(np.ascontiguousarray(parts).view(np.uint8).reshape(shape))
    return np.concatenate(blocks, axis=2).reshape(-1)


def _factors(factors: NDArray[np.floating], layout: QuantLayout) -> NDArray[np.floating]:
    """[groups, n] -> [panels, groups, columns]."""
    dtype = np.float16 if layout.scale == "f16" else np.float32
    padded = np.zeros((layout.groups, layout.panels * layout.columns), dtype)
    padded[:, : layout.n] = factors
    return np.ascontiguousarray(
        padded.reshape(layout.groups, layout.panels, layout.columns).transpose(1, 0, 2)
    )


def unpack_quantised(packed: NDArray[np.uint8], layout: QuantLayout) -> NDArray[np.float32]:
    """The matrix (q - zero) * scale that lies in packed weights.

    >>> layout = QuantLayout(8, 1, bits=4, group=8, lanes=4)
    >>> codes = np.arange(-4, 4).reshape(8, 1)
    >>> unpack_quantised(pack_quantised(codes, np.full((1, 1), 0.5), layout), layout)[:, 0].tolist()
    [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    """
    blocks = np.ascontiguousarray(packed).reshape(layout.panels, layout.groups, layout.group_bytes)
    kind = np.float16 if layout.scale == "f16" else np.float32

    def factors(start: int) -> NDArray[np.float32]:
        part = np.ascontiguousarray(blocks[..., start : start + layout.factors_bytes])
        return part.view(kind).astype(np.float32)[:, :, None, :]

    codes = np.ascontiguousarray(blocks[..., layout.codes_start :])
    shape = (layout.panels, layout.groups, layout.group, layout.columns)
    if layout.bits == 8:
        levels = codes.view(np.int8).reshape(shape).astype(np.float32)
    else:
        words = codes.view(np.uint32).reshape(layout.panels, layout.groups, -1, 1, 1, layout.columns)
        shifts = (4 * np.arange(4)[:, None] + 16 * np.arange(2)).astype(np.uint32)
        levels = ((words >> shifts[None, None, None, :, :, None]) & 15).reshape(shape).astype(np.float32) - 8
    if layout.zeros:
        levels -= factors(layout.factors_bytes)
    matrix = (levels * factors(0)).transpose(1, 2, 0, 3).reshape(layout.depth, -1)
    return np.ascontiguousarray(matrix[: layout.k, : layout.n])
