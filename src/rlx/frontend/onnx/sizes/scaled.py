"""Sizes times fractions that floats only come near to: floor(h * 1.7) is a size where rounding spares it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np

MOST_DENOMINATOR = 1024
"""Larger fractions are not simple: a float next to a size does not mean them."""
LARGEST = 1 << 14
"""Sizes for which the arithmetic is tried out; larger ones are refused by a guard."""


@cache
def simple_fraction(factor: float, dtype: np.dtype) -> tuple[Fraction, bool, bool] | None:
    """The fraction that a float stands for, and whether size * factor, computed in `dtype`, rounds (down, up)
    as the size times the fraction does, for every size up to LARGEST.

    >>> simple_fraction(1.7000000476837158, np.dtype("f4"))
    (Fraction(17, 10), True, True)
    >>> simple_fraction(1.2999999523162842, np.dtype("f4"))
    (Fraction(13, 10), False, True)
    >>> simple_fraction(3.1415927410125732, np.dtype("f4"))
    """
    if not np.isfinite(factor) or factor <= 0:
        return None
    found = Fraction(factor).limit_denominator(MOST_DENOMINATOR)
    if found == 0 or found.numerator > LARGEST or dtype.type(found.numerator / found.denominator) != factor:
        return None
    sizes = np.arange(LARGEST + 1)
    computed = sizes.astype(dtype) * dtype.type(factor)
    down = sizes * found.numerator // found.denominator
    up = -(-sizes * found.numerator // found.denominator)
    return found, np.array_equal(np.floor(computed), down), np.array_equal(np.ceil(computed), up)
