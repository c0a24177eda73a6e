"""Taps of a window that read nothing but padding: a direct convolution leaves out whole planes and lines of
them.

A product with padding adds 0, unless its weight is NaN or infinite: then 0 times the weight is NaN, which the
reference shows. Where a panel has such a weight, sums start with the products of the taps that are left out:
NaN, or 0 in other channels.
"""

from __future__ import annotations

from typing import ClassVar

from rlx.codegen.cpu.conv.shape import Count, Geometry
from rlx.codegen.cpu.frame import ArgumentTable
from rlx.codegen.cpu.product.microkernel import Kind
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import any_lane, builder, ceildiv, gep, is_nan, loop, or_, ptr
from rlx.ir.dim import known_eq
from rlx.kernel.nests import ConvNest
from rlx.records import dataclass

CHAINS = 4  # sums of a scan of weights that do not wait for each other


@dataclass(frozen=True)
class Taps:
    """The planes and lines of a window that are summed: first and last + 1."""

    planes: tuple[Count, Count]
    lines: tuple[Count, Count]

    NAMES: ClassVar = ("first_d", "last_d", "first_h", "last_h")

    @property
    def numbers(self) -> tuple[Count, Count, Count, Count]:
        return (*self.planes, *self.lines)


def may_skip(nest: ConvNest, kind: Kind) -> bool:
    """Whether planes or lines of taps may read nothing but padding, and may then be left out.

    Sums of bytes also need what belongs to every product of a window.
    """
    form = nest.form
    if kind.element != "float" or kind.group != 1 or form.fill:
        return False
    axes = zip(form.w[2:-1], form.padding[:-1], strict=True)
    return any(k != 1 and any(known_eq(p, 0) is not True for p in padding) for k, padding in axes)


@inline
def taps_inside(table: ArgumentTable, shape: Geometry, axis: int, at: Count) -> tuple[Count, Count]:
    """The taps along an axis that read x at output place `at`: first and last + 1."""
    taps, dilation = shape.window[axis], shape.dilations[axis]
    low = table.size(shape.low[axis]) - at * shape.strides[axis]  # padding before the first tap
    first = min(ceildiv(max(low, 0), dilation), taps)
    last = min(ceildiv(max(low + table.size(shape.size[axis]), 0), dilation), taps)
    return first, max(first, last)


@inline
def has_wild_weight(kind: Kind, w: ptr, vectors: int) -> bool:
    """Whether one of `vectors` vectors of weights, which follow each other, is NaN or infinite."""
    at_once = CHAINS if vectors % CHAINS == 0 else 1
    totals = [kind.zero] * at_once
    for i in loop(0, vectors, at_once):
        places = [gep(w, (i + n) * kind.lanes, kind.element) for n in range(at_once)]
        weights = [kind.read_b(builder(), place, None) for place in places]
        totals = [
            kind.multiply_add(builder(), kind.zero, weight, total)
            for weight, total in zip(weights, totals, strict=True)
        ]
    spoilt = is_nan(totals[0])
    for total in totals[1:]:
        spoilt = or_(spoilt, is_nan(total))
    return any_lane(spoilt)
