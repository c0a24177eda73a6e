"""Groups of numbers rounded to i8 with a scale each: the numbers that say how.

The scale is the largest size in the group over `TOP`, codes are numbers times TOP over that size, rounded
half to even. Groups without a size of at least 2**-100 are zeros: codes and scale are 0. In a group with an
infinity or NaN the scale is NaN.
"""

from __future__ import annotations

import numpy as np

TOP = 127.0
LEAST = 0x0D800000  # 2**-100, as bits: sizes compare as integers
INFINITE = 0x7F800000
NAN = 0x7FC00000
MAGIC = 1.5 * 2**23  # plus a small number, its last bits are that number rounded half to even
MAGIC_BITS = 0x4B400000


def round_groups(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., groups, group] and scales [..., groups] of x [..., k]; the last group is padded with zeros.

    >>> codes, scales = round_groups(np.array([1, -0.5, 0, 0], np.float32), 2)
    >>> codes.tolist(), scales.tolist()
    ([[127, -64], [0, 0]], [0.007874015718698502, 0.0])
    """
    *lead, k = x.shape
    groups = -(-k // group)
    padded = np.zeros((*lead, groups * group), np.float32)
    padded[..., :k] = x
    parts = padded.reshape(*lead, groups, group)
    most = (parts.view(np.int32) & 0x7FFFFFFF).max(-1, initial=0)
    counts = (most >= LEAST) & (most < INFINITE)
    largest = np.where(counts, most, INFINITE).astype(np.int32).view(np.float32)
    scales = np.where(counts, largest / np.float32(TOP), np.float32(0))
    scales[most >= INFINITE] = np.nan
    by = (np.float32(TOP) / largest)[..., None]
    codes = np.rint(np.where(counts[..., None], parts, np.float32(0)) * by)
    return codes.astype(np.int8), scales.astype(np.float32)
