"""When Winograd's transforms pay: a model of direct and transformed 3x3 convolutions on one core.

Windows over three axes whose last two are 3x3 count too: their planes are further input channels.

F(4, 3) does 4 times fewer products than the window and F(2, 3) 2.25 times fewer, but their weights are 4 and
1.8 times larger and are read from memory once a run, and inputs and sums pass through scratch. Small images
with many channels therefore stay with m = 2 or with direct sums. Bytes are transformed to 16 bits, of which
an instruction takes half as many: F(4, 3) has half the time of direct sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from rlx.cost.decision import Decision
from rlx.cost.profile import GraphIoProfile
from rlx.ir.dims.choice import choose
from rlx.ir.dtype import F32, I8
from rlx.ir.graph import Node
from rlx.ops.storage.winograd import WinogradLayout
from rlx.records import dataclass
from rlx.target.tiles import ConvTarget

Image = tuple[int, ...]
"""Sizes [N, C, axes] of an image."""
T = TypeVar("T", bound=Hashable)
USUAL_SIZE = 56  # what a symbolic size counts as when costs are compared


@dataclass(frozen=True)
class WinogradChoice:
    """The best transform of a convolution and the nanoseconds that it saves over direct sums, which take
    `direct`; less than 0 where those are cheaper.
    """

    layout: WinogradLayout
    gain: float
    direct: float


def by_image(rule: Callable[[Image, Image], T], node: Node) -> T:
    """What a rule says about the image that a convolution reads, and the one that it writes."""
    rank = node.rank
    usual = 2 * (1, *(USUAL_SIZE for _ in range(rank - 1)))
    sizes = (*node.operands[0].shape, *node.shape)
    return choose(lambda *at: rule(at[:rank], at[rank:]), sizes, usual)


def choose_winograd(node: Node, read: Image, written: Image, target: ConvTarget) -> WinogradChoice | None:
    """The transform that pays most for an image of this size; None where the window does not fit."""
    w, one, group = node.operands[1], (1, 1), target.group(node.operands[0].dtype.name)
    if not target.winograd or node.attrs["groups"] != 1 or len(w.shape) < 4 or w.shape[-2:] != (3, 3):
        return None
    if node.attrs["strides"][-2:] != one or node.attrs["dilations"][-2:] != one:
        return None
    planes = int(w.shape[2]) if len(w.shape) == 5 else 0
    out, channels = int(w.shape[0]), int(w.shape[1])
    if out < target.lanes or channels % target.lanes:
        return None
    exact, pairs = w.dtype is I8, target.group("i16")
    if not (w.dtype is F32 or (exact and pairs > 1 and not planes)):
        return None
    item, point, rate = (1, 2, pairs) if exact else (4, 4, 1)  # bytes of a weight and a point; points at once
    prices = target.prices
    n, _, *depth, h, wide = written
    n *= math.prod(depth)
    padded = -(-out // target.lanes) * target.lanes
    inputs = channels * max(planes, 1)
    size = padded * inputs
    # Both sums leave out planes of a window in the padding, direct ones also lines.
    whole = (
        (_share_inside(node, 0, read, written), _share_inside(node, 1, read, written)) if planes else (1, 1)
    )

    def cost(m: int) -> float:
        """Nanoseconds; m = 1 is the direct sum."""
        if m == 1:
            products = 18 * n * h * wide * size * whole[0] * whole[1] / (prices.flops * group)
            return products + 9 * item * size / prices.weight_bytes
        points, tiles = (m + 2) ** 2, n * -(-h // m) * -(-wide // m)
        products = 2 * tiles * points * size * whole[0] / (prices.flops * rate)
        products += point * points * size / prices.weight_bytes
        moved = 2 * tiles * points * (4 * padded * layout(m).parts + point * inputs)
        return products + moved / (prices.exact_bytes if exact else prices.scratch_bytes)

    def layout(m: int) -> WinogradLayout:
        return WinogradLayout(m, out, channels, target.columns, target.lanes, rate, planes)

    best = 4 if exact else min((2, 4), key=cost)
    return WinogradChoice(layout(best), cost(1) - cost(best), cost(1))


def _share_inside(node: Node, axis: int, read: Image, written: Image) -> float:
    """The part of all taps along an axis that read the image, not its padding."""
    taps, low = node.operands[1].shape[2 + axis], node.attrs["padding"][axis][0]
    stride, dilation = node.attrs["strides"][axis], node.attrs["dilations"][axis]
    count = written[2 + axis]
    if not isinstance(taps, int) or not isinstance(low, int) or not count:
        return 1.0
    places = (np.arange(count) * stride - low)[:, None] + np.arange(taps) * dilation
    return float(np.mean((places >= 0) & (places < read[2 + axis])))


def winograd_decision(node: Node, choice: WinogradChoice, moved: float) -> Decision:
    """The record of a transform that was considered; images are moved to blocks and back in `moved` ns."""
    m = choice.layout.m
    if choice.gain > moved:
        reason = f"F({m}, 3): {9 * m * m / (m + 2) ** 2:.3g} times fewer products in whole tiles"
    elif choice.gain > 0:
        reason = "moving the image to blocks of channels would take longer than transforms save"
    else:
        reason = f"direct sums are cheaper than F({m}, 3), with its transforms and larger weights"
    return Decision(
        region=(),
        before=GraphIoProfile(),
        after=GraphIoProfile(),
        score_ps=-round(moved * 1000),
        compute_ps_added=-round(choice.gain * 1000),
        verdict=choice.gain > moved,
        reason=reason,
        where=node.where,
        rule="winograd",
        ops=(node.op.name,),
    )


def gains_by_halves(node: Node, target: ConvTarget) -> bool:
    """Whether direct sums of 16-bit operands, in half the time of f32, beat what f32 does best."""

    def gains(read: Image, written: Image) -> bool:
        choice = choose_winograd(node, read, written, target)
        return choice is None or choice.gain < choice.direct / 2

    return by_image(gains, node)
