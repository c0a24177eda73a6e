"""Resizing and sampling of images."""

from __future__ import annotations

from typing import Literal

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.shape import normal_ordered
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim
from rlx.ir.graph import Node

MODES = ("nearest", "linear", "cubic")
TRANSFORMS = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@onnx_op("Upsample")
def upsample_by_attribute(n: Call) -> Outputs:
    if n.has("scales"):
        scales = n.attr("scales")
    else:
        scales = [1.0, 1.0, n.attr("height_scale"), n.attr("width_scale")]
    return ops.upsample(n[0], scales, _upsample_mode(n))


@onnx_op("Upsample", since=9)
def upsample(n: Call) -> Outputs:
    return ops.upsample(n[0], [float(s) for s in n.array(1)], _upsample_mode(n))


def _upsample_mode(n: Call) -> str:
    mode = n.choice("mode", "nearest", ("nearest", "linear", "bilinear"))
    return "linear" if mode == "bilinear" else mode


@onnx_op("Resize", since=10)
def resize_by_scales(n: Call) -> Outputs:
    mode = n.choice("mode", "nearest", ("nearest", "linear"))
    return ops.resize(
        n[0], scale=[float(s) for s in n.array(1)], mode=mode, transform="asymmetric", nearest="floor"
    )


@onnx_op("Resize", since=11)
def resize(n: Call) -> Outputs:
    x = n[0]
    axes = n.attr("axes", None)
    axes = None if axes is None else normal_ordered(axes, x.rank)
    transform = n.choice("coordinate_transformation_mode", "half_pixel", TRANSFORMS)
    how: dict[str, AttrValue] = {
        "axes": axes,
        "mode": n.choice("mode", "nearest", MODES),
        "transform": transform,
        "nearest": n.choice("nearest_mode", "round_prefer_floor", ROUNDINGS),
        "cubic_a": n.attr("cubic_coeff_a", -0.75),
        "antialias": n.flag("antialias"),
        "exclude_outside": n.flag("exclude_outside"),
        "extrapolation": n.attr("extrapolation_value", 0.0),
        "policy": n.choice("keep_aspect_ratio_policy", "stretch", ("stretch", "not_larger", "not_smaller")),
    }
    if transform == "tf_crop_and_resize":
        how["roi"] = n[1]
    scales = n.get(2)
    if n.get(3) is not None:
        return ops.resize(x, size=n.dims(3), **how)
    if scales is None or scales.tensor.numel == 0:
        raise ModelImportError("neither scales nor sizes are given")
    return ops.resize(x, scale=[float(s) for s in n.array(2)], **how)


@onnx_op("GridSample")
def grid_sample(
    x: Node,
    grid: Node,
    *,
    mode: Literal["linear", "nearest", "cubic", "bilinear", "bicubic"] = "linear",
    padding_mode: Literal["zeros", "border", "reflection"] = "zeros",
    align_corners: bool = False,
) -> Node:
    return ops.grid_sample(x, grid, mode, padding_mode, align_corners)


@onnx_op("AffineGrid")
def affine_grid(theta: Node, size: tuple[Dim, ...], *, align_corners: bool = False) -> Node:
    return ops.affine_grid(theta, size, align_corners)


@onnx_op("RoiAlign")
def roi_align(n: Call) -> Outputs:
    default = "half_pixel" if n.version >= 16 else "output_half_pixel"
    transform = n.choice("coordinate_transformation_mode", default, ("half_pixel", "output_half_pixel"))
    return ops.roi_align(
        n[0],
        n[1],
        n[2],
        size=(int(n.attr("output_height", 1)), int(n.attr("output_width", 1))),
        sampling_ratio=int(n.attr("sampling_ratio", 0)),
        spatial_scale=n.attr("spatial_scale", 1.0),
        half_pixel=transform == "half_pixel",
        mode=n.choice("mode", "avg", ("avg", "max")),
    )
