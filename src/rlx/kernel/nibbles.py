"""Codes of four bits, two in a byte, as products by expert read them."""

from __future__ import annotations

import numpy as np

RUN = 32
"""Byte i of a run of so many codes holds code i and, in its upper half, code i + 16."""
UNIT = RUN // 2
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of four bits that MXFP4 has, by their codes."""
_PLACES = np.zeros(25, np.uint8)  # by the doubled number, negative ones from the end
_PLACES[E2M1_DOUBLED[::-1].astype(np.int64)] = np.arange(16, dtype=np.uint8)[::-1]


def packed(codes: np.ndarray, coding: str) -> np.ndarray:
    """Integers -8 to 7 ("i4"), or twice the numbers of "e2m1", two in a byte along the last axis.

    >>> packed(np.arange(32) // 2 - 8, "i4").tolist()[:4]
    [128, 128, 145, 145]
    """
    places = _PLACES[codes.astype(np.int64)] if coding == "e2m1" else (codes + 8).astype(np.uint8)
    runs = places.reshape(*codes.shape[:-1], -1, 2, UNIT)
    made: np.ndarray = (runs[..., 0, :] | runs[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)
    return made


def unpacked(codes: np.ndarray, coding: str) -> np.ndarray:
    """The integers that `packed` took.

    >>> unpacked(np.arange(16, dtype=np.uint8), "i4")[[0, 1, 15, 16]].tolist()
    [-8, -7, 7, -8]
    """
    runs = codes.reshape(*codes.shape[:-1], -1, UNIT)
    places = np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return E2M1_DOUBLED[places] if coding == "e2m1" else places.astype(np.int8) - np.int8(8)
