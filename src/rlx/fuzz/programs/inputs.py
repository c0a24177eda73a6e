"""Arrays to call programs with, from a description: the same numbers in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.ir.dtype import DType, dtype

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)


@dataclass(frozen=True)
class Values:
    """A range of numbers; `special` has NaN and infinities too, `distinct` no two that are equal.

    `given` are the numbers themselves, where an op needs just these (indices, say).

    >>> Values(0, 1, distinct=True).array("f32", (2, 2), (0, 0)).shape
    (2, 2)
    """

    low: float = -2.0
    high: float = 2.0
    distinct: bool = False
    special: bool = False
    given: tuple[object, ...] | None = None

    def array(self, kind: str, shape: Sequence[int], seed: Sequence[int]) -> np.ndarray:
        if self.given is not None:
            return np.resize(np.asarray(self.given, dtype(kind).np), tuple(shape))  # each row of a batch
        return random_array(dtype(kind), tuple(shape), self, np.random.default_rng(seed))


def random_array(t: DType, shape: tuple[int, ...], values: Values, rng: np.random.Generator) -> np.ndarray:
    """Random numbers of a dtype within a range.

    >>> random_array(dtype("u8"), (3,), Values(0, 0), np.random.default_rng(0))
    array([0, 0, 0], dtype=uint8)
    """
    low, high = values.low, values.high
    if t.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if t.is_int:
        least = int(max(low, float(t.min_value)))
        most = max(int(min(high, float(t.max_value))), least)
        return rng.integers(least, most, shape, dtype=np.int64, endpoint=True).astype(t.np)
    if t.is_complex:
        return (rng.uniform(low, high, shape) + 1j * rng.uniform(low, high, shape)).astype(t.np)
    count = int(np.prod(shape, dtype=np.int64))
    if values.distinct:
        steps = (rng.permutation(count) + 0.5) / max(count, 1)
        numbers = (low + (high - low) * steps).reshape(shape)
    else:
        numbers = rng.uniform(low, high, shape)
    numbers = numbers.astype(np.float64 if t.np == np.float64 else np.float32)
    if values.special and count:
        at = rng.choice(count, min(count, len(SPECIAL)), replace=False)
        numbers.reshape(-1)[at] = np.array(SPECIAL)[: len(at)]
    return numbers.astype(t.np)
