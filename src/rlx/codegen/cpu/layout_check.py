"""Whether a kernel reads and writes the layouts that a plan states: emitters know one layout per target.

Kernels take sizes of tiles and stages from the target. They would read and write another layout past its end,
so it is refused here, before any code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.codegen.cpu.conv.shape import VECTORS, kernel_panels, reads_depthwise
from rlx.codegen.cpu.frame import Slot
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.cpu.product.packing import own_panels, panels_of
from rlx.codegen.cpu.product.quant_gemm import GROUPED, own_groups
from rlx.errors import RlxError
from rlx.kernel.nests import ContractNest, ConvNest
from rlx.kernel.panels import blocks_of, is_image
from rlx.kernel.quads import QuadPanels
from rlx.ops.storage.sparse import columns_of
from rlx.ops.storage.winograd import WinogradLayout
from rlx.target.cpu import Target


def foreign_layout(
    kernel: ContractNest | ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot], target: Target
) -> str | None:
    """Why the kernels of a target cannot read a packed operand as it is stored, if so."""
    packed = kernel.rhs_layout if isinstance(kernel, ContractNest) else kernel.w_layout
    try:
        if isinstance(kernel, ConvNest):
            fits = _images_fit(kernel, target)
            fits = fits and (packed is None or _kernel_fits(kernel, *packed, inputs, target))
        else:
            fits = packed is None or _matrix_fits(kernel, *packed, inputs, target)
    except (RlxError, TypeError, ZeroDivisionError):
        fits = False
    if fits:
        return None
    named = "a blocked image" if packed is None else f"{packed[0]} {dict(packed[1])}"
    return f"kernels for {target.name} cannot read the layout {named}"


def _matrix_fits(
    nest: ContractNest, name: str, attrs: tuple[tuple[str, Any], ...], inputs: Sequence[Slot], target: Target
) -> bool:
    stored = inputs[nest.rhs.data]
    if len(stored.shape) != 1:
        return False  # kernels read one matrix
    if name == "read_as":
        return own_panels(dict(attrs)["layout"], target, nest.lhs.dtype.name) is not None
    if name in GROUPED:
        return own_groups(nest, target) is not None
    if name == "unpack_quads":
        quads, own = QuadPanels(**dict(attrs)), panels_of(1, 1, target, "i8")
        known = target.small_bytes == ("seven" if quads.seven else "pairs")
        return known and (quads.columns, quads.lanes) == (own.columns, own.lanes)
    if name == "unpack_sparse":
        columns = columns_of(**dict(attrs))
        same = columns.dtype == nest.form.dtype.np == nest.lhs.dtype.np
        return same and columns.room >= 1 and columns.k >= 1
    return False


def _images_fit(nest: ConvNest, target: Target) -> bool:
    """Images are planar, or with packed weights in blocks; those written have the target's lanes."""
    if nest.w_layout is None:
        return not nest.x_blocked and not nest.out_blocked
    if nest.x_layout is not None and not is_image(nest.x_layout, len(nest.form.x)):
        return False
    if nest.out_layout is None:
        return True
    blocks = blocks_of(nest.out_layout)
    own = blocks is not None and blocks.lanes == target.lanes("f32")
    return own and is_image(nest.out_layout, len(nest.form.out))


def _kernel_fits(
    nest: ConvNest, name: str, attrs: tuple[tuple[str, Any], ...], inputs: Sequence[Slot], target: Target
) -> bool:
    lanes = target.lanes("f32")
    image = None if nest.x_layout is None else blocks_of(nest.x_layout)
    block = 1 if image is None else image.lanes
    if name == "unpack_winograd":
        transformed = WinogradLayout(**dict(attrs))
        group = 1 if inputs[nest.w].dtype.is_float else kind_of("i16", target).group
        moves = (*nest.form.strides[-2:], *nest.form.dilations[-2:], nest.form.groups)
        plain = all(d == 1 for d in moves) and (group == 1 or not transformed.planes)
        known = transformed.m == 4 or (transformed.m == 2 and group == 1)
        blocks = (block == lanes or not nest.x_blocked) and transformed.channels % lanes == 0
        units = (transformed.columns, transformed.lanes, transformed.group)
        same = tuple(nest.form.w) == transformed.kernel
        return same and plain and known and blocks and units == (VECTORS * lanes, lanes, group)
    if name != "read_as":
        return False
    if reads_depthwise(nest):  # one channel per group, read from blocks to blocks
        depthwise = nest.form.groups == nest.form.w[0] and nest.form.w[1] == 1
        if not (depthwise and block == lanes and nest.out_blocked):
            return False
    return bool(kernel_panels(nest, inputs, target).layout == dict(attrs)["layout"])
