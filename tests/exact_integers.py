"""The oracle of integer code: sums of products in NumPy's int64, one rounding to a byte at the end.

No other engine decides about integers. ONNX Runtime multiplies u8 by i8 with instructions that saturate on
machines without VNNI, so that its results depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def product(a: np.ndarray, b: np.ndarray, a_zero: Any = 0, b_zero: Any = 0) -> np.ndarray:
    """The matrix product of what stands above its zero points.

    >>> product(np.array([[255, 255]], np.uint8), np.array([[127], [127]], np.int8)).tolist()
    [[64770]]
    """
    return (a.astype(np.int64) - a_zero) @ (b.astype(np.int64) - b_zero)


def convolution(
    x: np.ndarray,
    w: np.ndarray,
    x_zero: Any = 0,
    w_zero: Any = 0,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    groups: int = 1,
) -> np.ndarray:
    """A convolution over two axes, [n, c, h, w] with [m, c / groups, i, j]; the border has the zero point."""
    image = np.pad(x.astype(np.int64) - x_zero, ((0, 0), (0, 0), *padding))
    kernel = w.astype(np.int64) - w_zero
    windows = np.lib.stride_tricks.sliding_window_view(image, kernel.shape[2:], (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1]]
    parts = zip(np.split(windows, groups, 1), np.split(kernel, groups, 0), strict=True)
    return np.concatenate([np.einsum("nchwij,mcij->nmhw", part, k) for part, k in parts], 1)


def quantised(real: np.ndarray, scale: Any, zero: Any, kind: Any) -> np.ndarray:
    """round(real / scale) + zero, saturated; halves go to even.

    >>> quantised(np.array([-9.0, 0.25, 0.75, 900.0]), 0.5, 10, np.uint8).tolist()
    [0, 10, 12, 255]
    """
    info = np.iinfo(kind)
    level = np.rint(np.asarray(real) / scale) + zero
    return np.clip(level, info.min, info.max).astype(kind)


def real(stored: np.ndarray, scale: Any, zero: Any) -> np.ndarray:
    """What stored integers stand for, in f64."""
    return (stored.astype(np.int64) - zero) * np.asarray(scale, np.float64)


KINDS: dict[str, Any] = {"u8": np.uint8, "i8": np.int8}
# Weights by how large their pairs are: none is too large, a few are, most are, the largest of all.
WEIGHTS = ("small", "outliers", "large", "least", "most")


def weights(rng: np.random.Generator, how: str, k: int, n: int) -> np.ndarray:
    if how in ("least", "most"):
        return np.full((k, n), -128 if how == "least" else 127, np.int8)
    w = rng.integers(-64, 65, (k, n))
    if how == "large":
        w = rng.integers(-128, 128, (k, n))
    if how == "outliers":  # in one quad of eight, and in the last
        rows = np.unique(np.append(np.arange(0, k, 32), k - 1))
        w[rows, rng.integers(0, n, len(rows))] = rng.choice([-128, 127], len(rows))
    return w.astype(np.int8)


def left(rng: np.random.Generator, dtype: str, m: int, k: int) -> np.ndarray:
    """Bytes of which a third is extreme."""
    low, high = (0, 255) if dtype == "u8" else (-128, 127)
    values = rng.integers(low, high, (m, k), endpoint=True)
    return np.where(rng.random((m, k)) < 0.3, rng.choice([low, high], (m, k)), values).astype(KINDS[dtype])
