"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rlx import ops
from rlx.errors import ShapeError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim
from rlx.ir.graph import Node

AUTO = {"NOTSET": None, "VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same_lower"}


Pairs: TypeAlias = tuple[tuple[int, int], ...]


def padding_of(n: Call, rank: int) -> str | Pairs | None:
    """auto_pad and pads as the padding of our ops."""
    auto = n.choice("auto_pad", "NOTSET", tuple(AUTO))
    pads = n.attr("pads", None)
    if AUTO[auto] is not None:
        return AUTO[auto]
    return pairs_of(pads, rank)


def pairs_of(pads: Sequence[int] | None, rank: int) -> Pairs | None:
    """Low sides of all axes, then high sides, as pairs."""
    if pads is None or not pads:
        return None
    if len(pads) != 2 * rank:
        raise ShapeError(f"{len(pads)} pads for {rank} axes; there must be two for each")
    return tuple((pads[i], pads[rank + i]) for i in range(rank))


def check_window(n: Call, w: Node) -> None:
    """kernel_shape only repeats what the weight says."""
    given = n.attr("kernel_shape", None)
    if given is not None and any(
        isinstance(d, int) and d != k for d, k in zip(w.shape[2:], given, strict=False)
    ):
        raise ShapeError(f"kernel_shape {given} is not that of the weight {w.tensor}")


def conv_options(n: Call, w: Node) -> dict[str, AttrValue]:
    """What all convolutions have in common."""
    check_window(n, w)
    rank = w.rank - 2
    return {
        "strides": n.attr("strides", None),
        "padding": padding_of(n, rank),
        "dilations": n.attr("dilations", None),
        "groups": int(n.attr("group", 1)),
    }


@onnx_op("Conv")
def conv(n: Call) -> Outputs:
    return ops.conv(n[0], n[1], n.get(2), **conv_options(n, n[1]))


@onnx_op("ConvTranspose")
def conv_transpose(n: Call) -> Outputs:
    x, w = n[0], n[1]
    options = conv_options(n, w)
    rank = w.rank - 2
    extra = n.attr("output_padding", None) or [0] * rank
    target: Sequence[int] | None = n.attr("output_shape", None)
    if target is not None:
        auto = n.attr("auto_pad", "NOTSET")
        strides, dilations = options["strides"] or [1] * rank, options["dilations"] or [1] * rank
        pads: list[tuple[Dim, Dim]] = []
        for i in range(rank):
            reach = (w.shape[2 + i] - 1) * dilations[i] + 1
            total = (x.shape[2 + i] - 1) * strides[i] + extra[i] + reach - target[i]
            small = total // 2
            pads.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
        options["padding"] = tuple(pads)
    return ops.conv_transpose(x, w, n.get(2), output_padding=extra, **options)


@onnx_op("DeformConv")
def deform_conv(n: Call) -> Outputs:
    options = conv_options(n, n[1])
    parts = int(n.attr("offset_group", 1))
    return ops.deform_conv(n[0], n[1], n[2], n.get(4), n.get(3), offset_groups=parts, **options)


@onnx_op("Col2Im")
def col2im(n: Call) -> Outputs:
    """Columns [N, C * block, positions] added up into an image [N, C, image]."""
    x, image, block = n[0], n.dims(1), n.dims(2)
    rank = len(image)
    strides, dilations = n.attr("strides", [1] * rank), n.attr("dilations", [1] * rank)
    pads = pairs_of(n.attr("pads", None), rank) or ((0, 0),) * rank
    total: Dim = 1
    for b in block:
        total = total * b
    counts = [
        (d + low + high - (b - 1) * k - 1) // s + 1
        for d, b, (low, high), k, s in zip(image, block, pads, dilations, strides, strict=True)
    ]
    apart = ops.reshape(x, (x.shape[0], x.shape[1] // total, *block, *counts))
    apart = ops.transpose(apart, (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)))
    return ops.fold_windows(apart, image, strides=strides, padding=pads, dilations=dilations)
