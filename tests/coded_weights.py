"""Random weights of few bits, for every way in which a layout stores factors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlx
from rlx.ir.dtype import dtype
from rlx.kernel.panels import QuantLayout

Array = NDArray[Any]

SHIFTS: list[dict[str, Any]] = [
    {"scale": "f32"},
    {"scale": "f16", "zeros": True},
    {"scale": "f16", "minimums": True},
    {"scale": "f16", "block": 16},
    {"scale": "f16", "minimums": True, "block": 8},
    {"scale": "f32", "zeros": True, "block": 3},
]
"""Options of `quant_layout`: what shifts codes, and how factors are stored."""


def shift_name(shift: dict[str, Any]) -> str:
    """A name of such options, for tests."""
    return "-".join(str(key if value is True else value) for key, value in shift.items())


def sampled(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of values as params of a test. One in three runs by default, `-m slow` has the rest.

    Of three axes, each two values of two of them meet in one that runs.
    """
    found = []
    for places in itertools.product(*(range(len(values)) for values in axes)):
        row = [values[place] for values, place in zip(axes, places, strict=True)]
        names = [shift_name(value) if isinstance(value, dict) else str(value) for value in row]
        marks = () if sum(places) % 3 == 0 else pytest.mark.slow
        found.append(pytest.param(*row, marks=marks, id="-".join(names)))
    return found


BITS = [4, 6, 8]


@dataclass
class Coded:
    """A matrix: its codes, its factors as the layout stores them, and as `dequantize_groups` takes them."""

    layout: QuantLayout
    codes: Array
    stored: list[Array]

    @property
    def packed(self) -> Array:
        return self.layout.pack(self.codes, *self.stored)

    @property
    def factors(self) -> list[Array]:
        block = self.layout.block
        if not block:
            return self.stored
        pairs = zip(self.stored[::2], self.stored[1::2], strict=True)
        return [rlx.ops.dequantize_groups(codes, own, bits=8, group=block) for codes, own in pairs]

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of the ops."""
        return {"bits": self.layout.bits, "group": self.layout.group, "minimums": self.layout.minimums}

    def nodes(self, g: rlx.Graph, name: str = "") -> list[rlx.Node]:
        """Params of codes and factors, these dequantised where they are codes themselves."""
        held = [
            g.param(f"{name}part{i}", x.shape, dtype(x.dtype), value=x)
            for i, x in enumerate([self.codes, *self.stored])
        ]
        if not self.layout.block:
            return held
        pairs = zip(held[1::2], held[2::2], strict=True)
        how = {"bits": 8, "group": self.layout.block}
        return [held[0], *(rlx.ops.dequantize_groups(codes, own, **how) for codes, own in pairs)]

    def spread(self, factor: Array) -> Array:
        """A factor for each code, in f64."""
        return np.repeat(factor.astype(np.float64), self.layout.group, axis=0)[: self.layout.k]

    @property
    def matrix(self) -> Array:
        """The numbers, in f64."""
        scale, *second = (self.spread(f) for f in self.factors)
        if self.layout.minimums:
            return self.codes * scale - second[0]
        return (self.codes - second[0] if second else self.codes) * scale

    @property
    def sizes(self) -> Array:
        """The sum of the sizes of what numbers are added from: cancelling costs precision of these."""
        scale, *second = (abs(self.spread(f)) for f in self.factors)
        codes = abs(self.codes.astype(np.float64)) * scale
        if not second:
            return codes
        return codes + (second[0] if self.layout.minimums else second[0] * scale)


def coded_weights(layout: QuantLayout, extreme: bool = False) -> Coded:
    """Random weights in a layout; codes may all be the ends of what there are."""
    rng = np.random.default_rng(layout.k)
    low = 0 if layout.minimums else -(1 << (layout.bits - 1))
    ends, shape = (low, low + (1 << layout.bits) - 1), (layout.k, layout.n)
    drawn = rng.choice(ends, shape) if extreme else rng.integers(ends[0], ends[1] + 1, shape)
    kinds = [layout.scale, *[layout.zero or layout.scale] * layout.shifted]
    bounds = [(0.01, 0.1), (-0.5, 1.5) if layout.minimums else (-4.0, 4.0)]
    stored: list[Array] = []
    for kind, (least, most) in zip(kinds, bounds, strict=False):
        if layout.block:
            stored.append(rng.integers(-32, 64, (layout.groups, layout.n)).astype(np.int8))
            least, most = least / 32, most / 32
        rows = layout.blocks if layout.block else layout.groups
        stored.append(rng.uniform(least, most, (rows, layout.n)).astype(dtype(kind).np))
    return Coded(layout, drawn.astype(np.uint8 if layout.minimums else np.int8), stored)
