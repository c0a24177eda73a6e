"""Convolutions as native code: blocked and packed kernels where weights were packed for them, a GEMM for
planar 1x1 windows, and a reduction nest of guarded products for everything else (other dtypes, symbolic
channels).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.conv.depthwise import emit_depthwise
from rlx.codegen.cpu.conv.direct import emit_direct
from rlx.codegen.cpu.conv.planar import emit_planar
from rlx.codegen.cpu.conv.shape import VECTORS, kernel_panels, reads_depthwise
from rlx.codegen.cpu.conv.winograd import Winograd, emit_winograd
from rlx.codegen.cpu.conv.winograd_planes import WinogradPlanes
from rlx.codegen.cpu.frame import EmittedKernel, Slot
from rlx.codegen.cpu.product.contraction import emit_contraction, plan_gemm
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.cpu.rows.nest import emit_nest
from rlx.codegen.native.irtext import Module
from rlx.kernel.form import Contract, dense_strides
from rlx.kernel.nests import ContractNest, ConvNest, Nest, Stat, Store
from rlx.kernel.rounding import has_planar_kernel
from rlx.kernel.scalar import (
    TRUE,
    Scalar,
    axes,
    call,
    const,
    convert,
    in_range,
    load,
    load_or,
    rebuild,
    replace_axes,
    size,
)
from rlx.ops.storage.winograd import WinogradLayout
from rlx.target.cpu import Target
from rlx.target.tiles import ConvTarget


def conv_target(target: Target, winograd: bool = True) -> ConvTarget:
    """The units that this target's convolution kernels work in."""
    lanes = target.lanes("f32")
    grouped = ("u8", "bf16", *(("i16",) if target.multiplies_pairs else ()))
    groups = tuple((d, kind_of(d, target).group) for d in grouped)
    return ConvTarget(lanes, lanes * VECTORS, winograd, groups, target.prices)


def emit_conv(
    module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a convolution into the module."""
    if nest.w_layout is not None:
        kind, attrs = nest.w_layout
        if kind == "unpack_winograd":
            layout = WinogradLayout(**dict(attrs))
            kernel = WinogradPlanes if layout.planes else Winograd
            return emit_winograd(module, name, nest, layout, inputs, outputs, kernel)
        if reads_depthwise(nest):
            return emit_depthwise(module, name, nest, inputs, outputs)
        own = kernel_panels(nest, inputs, module.target)
        return emit_direct(module, name, nest, own, inputs, outputs)
    product = as_product(nest)
    if product is not None and plan_gemm(product, inputs) is not None:
        return emit_contraction(module, name, product, inputs, outputs)
    if _is_planar(nest, inputs):
        return emit_planar(module, name, nest, inputs, outputs)
    return emit_nest(module, name, as_reduction(nest, inputs), inputs, outputs)


def _is_planar(nest: ConvNest, inputs: Sequence[Slot]) -> bool:
    """Whether the kernel for planar images with plain weights fits."""
    w = inputs[nest.w]
    dense = w.strides is None or w.strides == dense_strides(w.shape)
    dtypes = [inputs[nest.x].dtype.name, w.dtype.name, nest.form.dtype.name]
    return dense and has_planar_kernel(nest.form, dtypes) and len(nest.stores) == 1


def as_reduction(nest: ConvNest, inputs: Sequence[Slot]) -> Nest:
    """The convolution as a plain reduction of products over (channel, window): right for every dtype and
    size.
    """
    form = nest.form
    spatial = len(form.strides)
    kept = 2 + spatial
    at = axes(kept + 1 + spatial)
    channel, taps = at[kept], at[kept + 1 :]
    per_in, per_out = form.w[1], form.w[0] // form.groups
    index = [at[0], channel if form.groups == 1 else at[1] // size(per_out) * size(per_in) + channel]
    guard = TRUE
    for i, (stride, (low, _), dilation) in enumerate(
        zip(form.strides, form.padding, form.dilations, strict=True)
    ):
        place = at[2 + i] * stride + taps[i] * dilation - size(low)
        guard = guard & in_range(place, form.x[2 + i])
        index.append(place)
    x, w = inputs[nest.x].dtype, inputs[nest.w].dtype
    wide = form.accumulate
    body = call(
        "mul",
        convert(load_or(nest.x, index, guard, const(form.fill, x)), wide),
        convert(load(nest.w, [at[1], channel, *taps], w), wide),
    )
    result = convert(Scalar("acc", (), wide, 0), form.dtype)
    stores = tuple(
        Store(rebuild(s.body, lambda e, _: result if e.prim == "acc" else None), False, s.strides)
        for s in nest.stores
    )
    return Nest((*form.out, per_in, *form.w[2:]), kept, (Stat("sum", body, wide),), stores)


def as_product(nest: ConvNest) -> ContractNest | None:
    """A window of one element that moves by one: for every image, weights [O, I] times pixels [I, H*W]."""
    form = nest.form
    single = all(d == 1 for d in (*form.w[2:], *form.strides)) and all(p == (0, 0) for p in form.padding)
    if not single or form.accumulate is not form.dtype:
        return None
    groups, per_in, per_out = form.groups, form.w[1], form.w[0] // form.groups
    spatial = len(form.strides)
    n, g, o, *place, i = axes(4 + spatial)
    # iteration axes: image, group, output channel, pixel axes, input channel
    left = load(nest.w, [g * size(per_out) + o, i, *(const(0),) * spatial], form.dtype)
    right = load(nest.x, [n, g * size(per_in) + i, *place], form.dtype)
    contract = Contract(
        lhs=(form.x[0], groups, per_out, per_in),
        rhs=(form.x[0], groups, per_in, *form.x[2:]),
        batch=((0, 0), (1, 1)),
        contract=((3, 2),),
        dtype=form.dtype,
        accumulate=form.accumulate,
    )
    point = [n, g * size(per_out) + o, *place]
    space = (form.x[0], groups, per_out, *form.out[2:], per_in)

    def split_channels(store: Store) -> Store:
        batch, channel, *rest = store.strides
        return Store(replace_axes(store.body, point), store.full, (batch, channel * per_out, channel, *rest))

    return ContractNest(
        contract, left, right, space, 3 + spatial, tuple(split_channels(s) for s in nest.stores)
    )
