"""What instructions of AMX compute, in NumPy, written from the pseudo-code of Intel's manual.

A register is an array of bytes [16, 64]; shapes are (rows, bytes of a row).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint8]
ROWS, LINE = 16, 64


def tile_load(shape: tuple[int, int], source: Array, distance: int) -> Array:
    made = np.zeros((ROWS, LINE), np.uint8)
    rows, columns = shape
    for row in range(rows):
        made[row, :columns] = source[row * distance : row * distance + columns]
    return made


def dot_bytes(of: list[tuple[int, int]], d: Array, a: Array, b: Array, left: type) -> Array:
    (rows, columns), (_, depth) = of[0], of[1]
    sums, out = d.view(np.int32).copy(), np.zeros((ROWS, LINE), np.uint8)
    x, y = a.view(left).astype(np.int64), b.view(np.int8).astype(np.int64)
    for m in range(rows):
        for k in range(depth // 4):
            for n in range(columns // 4):
                products = x[m, 4 * k : 4 * k + 4] * y[k, 4 * n : 4 * n + 4]
                sums[m, n] = np.int64(int(sums[m, n]) + int(products.sum())).astype(np.int32)
        out.view(np.int32)[m, : columns // 4] = sums[m, : columns // 4]
    return out


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormals of f32 as zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def multiply_add(x: np.ndarray, y: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Rounded once: the product of two bf16 is exact in f64, and f64 is wide enough to add an f32 to it."""
    with np.errstate(all="ignore"):
        return flushed((x.astype(np.float64) * y + total).astype(np.float32))


def dot_bf16(of: list[tuple[int, int]], d: Array, a: Array, b: Array) -> Array:
    (rows, columns), (_, depth) = of[0], of[1]
    out, wide = np.zeros((ROWS, LINE), np.uint8), columns // 4
    x, y = (flushed(z.view(ml_dtypes.bfloat16).astype(np.float32)) for z in (a, b))
    for m in range(rows):
        halves = [np.zeros(wide, np.float32), np.zeros(wide, np.float32)]
        for k in range(depth // 4):
            for i in (0, 1):
                halves[i] = multiply_add(x[m, 2 * k + i], y[k, i : 2 * wide : 2], halves[i])
        with np.errstate(all="ignore"):
            more = flushed(halves[0] + halves[1])
            out.view(np.float32)[m, :wide] = flushed(flushed(d.view(np.float32)[m, :wide]) + more)
    return out


def product_of_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A matmul: 32 of k at a time, with zeros behind the last."""
    (m, k), n = a.shape, b.shape[1]
    total = np.zeros((m, n), np.float32)
    x, y = np.zeros((m, -(-k // 32) * 32), np.float32), np.zeros((-(-k // 32) * 32, n), np.float32)
    x[:, :k], y[:k] = flushed(a.astype(np.float32)), flushed(b.astype(np.float32))
    for start in range(0, k, 32):
        halves = [np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)]
        for i in range(32):
            at = start + i
            halves[i % 2] = multiply_add(x[:, at, None], y[None, at], halves[i % 2])
        with np.errstate(all="ignore"):
            total = flushed(total + flushed(halves[0] + halves[1]))
    return total
