"""Packing of weights of 4 or 8 bits with NumPy, as `QuantLayout` says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ShapeError
from rlx.kernel.panels import PANEL_VECTORS, QuantLayout

__all__ = ["PANEL_VECTORS", "QuantLayout", "pack_quantised", "unpack_quantised"]
_SCALES = {"f16": np.float16, "f32": np.float32}


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
    codes = layout.codes.pack(q.astype(np.int8))
    factors = [scales] if zeros is None else [scales, zeros]
    packed = [layout.factors.pack(f.astype(_SCALES[layout.scale])).view(np.uint8) for f in factors]
    packed.append(codes.view(np.uint8) if layout.bits == 8 else _paired((codes + 8).view(np.uint8)))
    return np.concatenate(packed, axis=2).reshape(-1)


def _paired(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of 4 bits, two to a byte: the first in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def _single(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `_paired`."""
    return np.stack([pairs & 15, pairs >> np.uint8(4)], axis=-1).reshape(*pairs.shape[:-1], -1)


def unpack_quantised(packed: NDArray[np.uint8], layout: QuantLayout) -> NDArray[np.float32]:
    """The matrix (q - zero) * scale of packed weights.

    >>> layout = QuantLayout(8, 1, bits=4, group=8, lanes=4)
    >>> codes = np.arange(-4, 4).reshape(8, 1)
    >>> unpack_quantised(pack_quantised(codes, np.full((1, 1), 0.5), layout), layout)[:, 0].tolist()
    [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    """
    blocks = np.ascontiguousarray(packed).reshape(layout.panels, layout.groups, layout.group_bytes)

    def factors(start: int) -> NDArray[np.float32]:
        part = np.ascontiguousarray(blocks[..., start : start + layout.factors_bytes])
        rows = layout.factors.unpack(part.view(_SCALES[layout.scale])).astype(np.float32)
        return np.repeat(rows, layout.group, axis=0)[: layout.k]

    codes = np.ascontiguousarray(blocks[..., layout.codes_start :])
    whole = codes.view(np.int8) if layout.bits == 8 else _single(codes).view(np.int8) - np.int8(8)
    levels = layout.codes.unpack(whole).astype(np.float32)
    if layout.zeros:
        levels -= factors(layout.factors_bytes)
    found: NDArray[np.float32] = levels * factors(0)
    return found
