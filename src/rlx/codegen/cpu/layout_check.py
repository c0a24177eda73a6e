"""Whether a kernel reads weights in the layout that they lie in: the emitters know one layout per target.

A plan says with the attributes of an op how a weight is laid out. Kernels take sizes of tiles and stages from
the target, so any other layout would be read and written past its end. It is refused here, before any code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.codegen.cpu.conv.shape import VECTORS
from rlx.codegen.cpu.frame import Slot
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.cpu.product.packing import panels_of
from rlx.errors import RlxError
from rlx.kernel.nests import ContractNest, ConvNest
from rlx.ops.quant.group_layout import QuantLayout
from rlx.ops.storage.conv_packing import KernelLayout
from rlx.ops.storage.packing import Panels
from rlx.ops.storage.sparse import columns_of
from rlx.ops.storage.winograd import WinogradLayout
from rlx.target.cpu import Target


def foreign_layout(
    kernel: ContractNest | ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot], target: Target
) -> str | None:
    """Why the kernels of a target cannot read a packed operand as it lies, if so."""
    packed = kernel.rhs_layout if isinstance(kernel, ContractNest) else kernel.w_layout
    try:
        if isinstance(kernel, ConvNest):
            fits = _blocks_fit(kernel, outputs, target)
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
    if name == "unpack_panels":
        panels = Panels(**dict(attrs))
        return panels == panels_of(panels.k, panels.n, target, stored.dtype.name)
    if name == "unpack_groups":
        return QuantLayout(**dict(attrs)).lanes == target.lanes("f32")
    if name == "unpack_sparse":
        columns = columns_of(**dict(attrs))
        same = columns.dtype == nest.form.dtype.np == nest.lhs.dtype.np
        return same and columns.room >= 1 and columns.k >= 1
    return False


def _blocks_fit(nest: ConvNest, outputs: Sequence[Slot], target: Target) -> bool:
    """Images in blocks come with packed weights; what is written has the target's lanes."""
    if nest.w_layout is None:
        return not nest.x_blocked and not nest.out_blocked
    return not nest.out_blocked or all(slot.shape[-1] == target.lanes("f32") for slot in outputs)


def _kernel_fits(
    nest: ConvNest, name: str, attrs: tuple[tuple[str, Any], ...], inputs: Sequence[Slot], target: Target
) -> bool:
    lanes = target.lanes("f32")
    image = nest.prologue.shape if nest.prologue is not None else inputs[nest.x].shape
    block = image[-1] if nest.x_blocked else 1
    if name == "unpack_winograd":
        transformed = WinogradLayout(**dict(attrs))
        group = 1 if inputs[nest.w].dtype.is_float else kind_of("i16", target).group
        plain = all(d == 1 for d in (*nest.form.strides, *nest.form.dilations, nest.form.groups))
        known = transformed.m == 4 or (transformed.m == 2 and group == 1)
        blocks = (block == lanes or not nest.x_blocked) and transformed.channels % lanes == 0
        units = (transformed.columns, transformed.lanes, transformed.group)
        return plain and known and blocks and units == (VECTORS * lanes, lanes, group)
    if name != "unpack_kernel":
        return False
    layout = KernelLayout(**dict(attrs))
    if layout.groups != nest.form.groups:  # one channel per group, read from blocks to blocks
        depthwise = nest.form.groups == layout.shape[0] and nest.form.w[1] == 1
        blocks = block == lanes and nest.out_blocked
        return depthwise and blocks and layout == KernelLayout(layout.shape, 1, lanes, lanes, 1)
    read = nest.prologue.body.dtype if nest.prologue is not None else inputs[nest.x].dtype
    group = kind_of(read.name, target).group
    return layout == KernelLayout(layout.shape, layout.groups, VECTORS * lanes, lanes, int(block), group)
