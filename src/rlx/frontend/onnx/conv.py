"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx import ops
from rlx.errors import ImportError_, ShapeError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.ir.dim import Dim
from rlx.ir.graph import Node

AUTO = {"NOTSET": None, "VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same_lower"}


def padding_of(n: Call, rank: int) -> Any:
    """auto_pad and pads as the padding of our ops."""
    auto = n.choice("auto_pad", "NOTSET", tuple(AUTO))
    pads = n.attr("pads", None)
    if AUTO[auto] is not None:
        return AUTO[auto]
    return pairs_of(pads, rank)


def pairs_of(pads: Sequence[int] | None, rank: int) -> Any:
    """Low sides of all axes, then high sides, as pairs."""
    if pads is None or not pads:
        return None
    if len(pads) != 2 * rank:
        raise ShapeError(f"{len(pads)} pads for {rank} axes; there must be two for each")
    return tuple((pads[i], pads[rank + i]) for i in range(rank))


def check_window(n: Call, w: Node) -> None:
    """kernel_shape only repeats what the weight says."""
    given = n.attr("kernel_shape", None)
    if given is not None and any(isinstance(d, int) and d != k for d, k in zip(w.shape[2:], given, strict=False)):
        raise ShapeError(f"kernel_shape {given} is not that of the weight {w.tensor}")


def conv_options(n: Call, w: Node) -> dict[str, Any]:
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
def conv(n: Call) -> Any:
    return ops.conv(n[0], n[1], n.get(2), **conv_options(n, n[1]))


@onnx_op("ConvTranspose")
def conv_transpose(n: Call) -> Any:
    x, w = n[0], n[1]
    options = conv_options(n, w)
    rank = w.rank - 2
    extra = n.attr("output_padding", None) or [0] * rank
    target: Any = n.attr("output_shape", None)
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
def deform_conv(n: Call) -> Any:
    """Each tap of the window is sampled at an offset of its own, bilinearly; then it is a product."""
    x, w, offset = n[0], n[1], n[2]
    bias, mask = n.get(3), n.get(4)
    if x.rank != 4:
        raise ImportError_(f"only two spatial axes are supported, not {x.tensor}")
    check_window(n, w)
    strides = n.attr("strides", [1, 1])
    dilations = n.attr("dilations", [1, 1])
    pads = n.attr("pads", [0, 0, 0, 0])
    groups, parts = int(n.attr("group", 1)), int(n.attr("offset_group", 1))
    batch, channels, height, width = x.shape
    out_channels, per_group, kh, kw = w.shape
    oh, ow = offset.shape[2], offset.shape[3]
    kind = x.dtype
    taps = ops.reshape(offset, (batch, parts, kh, kw, 2, oh, ow))

    def coordinate(axis: int, out: Dim, window: Dim) -> Any:
        shape_out = (1, 1, 1, 1, oh, 1) if axis == 0 else (1, 1, 1, 1, 1, ow)
        shape_tap = (1, 1, kh, 1, 1, 1) if axis == 0 else (1, 1, 1, kw, 1, 1)
        base = ops.reshape(ops.iota((out,), 0, kind) * float(strides[axis]) - float(pads[axis]), shape_out)
        tap = ops.reshape(ops.iota((window,), 0, kind) * float(dilations[axis]), shape_tap)
        return base + tap + ops.squeeze(ops.slice_axis(taps, 4, axis, 1), 4)

    ys, xs = coordinate(0, oh, kh), coordinate(1, ow, kw)
    # to the range -1 .. 1 of grid_sample, where -1 and 1 are the outer edges of the image
    gy = (ys * 2.0 + 1.0) / ops.dim_value(height, kind) - 1.0
    gx = (xs * 2.0 + 1.0) / ops.dim_value(width, kind) - 1.0
    grid = ops.stack([gx, gy], axis=6)  # [batch, parts, kh, kw, oh, ow, 2]
    images = ops.reshape(x, (batch * parts, channels // parts, height, width))
    flat = ops.reshape(grid, (batch * parts, kh * kw * oh, ow, 2))
    found = ops.grid_sample(images, flat, "linear", "zeros", False)
    found = ops.reshape(found, (batch, parts, channels // parts, kh * kw, oh, ow))
    if mask is not None:
        found = found * ops.reshape(mask, (batch, parts, 1, kh * kw, oh, ow))
    columns = ops.reshape(found, (batch, groups, per_group * kh * kw, oh * ow))
    kernel = ops.reshape(w, (groups, out_channels // groups, per_group * kh * kw))
    y = ops.reshape(ops.matmul(kernel, columns), (batch, out_channels, oh, ow))
    return y if bias is None else y + ops.reshape(bias, (1, out_channels, 1, 1))


@onnx_op("Col2Im")
def col2im(n: Call) -> Any:
    from rlx.ops.window import fold_windows

    x = n[0]
    image, block = n.dims(1), n.dims(2)
    rank = len(image)
    strides, dilations = n.attr("strides", [1] * rank), n.attr("dilations", [1] * rank)
    pairs = pairs_of(n.attr("pads", None), rank) or ((0, 0),) * rank
    return fold(n, x, image, block, strides, pairs, dilations, fold_windows)


def fold(
    n: Call, x: Node, image: Any, block: Any, strides: Any, pairs: Any, dilations: Any, fold_windows: Any
) -> Any:
    """Columns [N, C * block, positions] added up into an image [N, C, image]."""
    total: Dim = 1
    for b in block:
        total = total * b
    counts = [
        (d + lo + hi - (b - 1) * k - 1) // s + 1
        for d, b, (lo, hi), k, s in zip(image, block, pairs, dilations, strides, strict=True)
    ]
    channels = x.shape[1] // total
    apart = ops.reshape(x, (x.shape[0], channels, *block, *counts))
    rank = len(image)
    apart = ops.transpose(apart, (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)))
    return fold_windows(apart, image, strides=strides, padding=pairs, dilations=dilations)
