"""From an attention nest to the flash kernel: strides of operands, mask and window as it takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.codegen.cpu.attention.flash import Access, AttentionSpec, emit_attention
from rlx.codegen.cpu.frame import EmittedKernel, Slot
from rlx.codegen.cpu.product.contraction import linear_steps
from rlx.codegen.native.irtext import Module
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dims.choice import need_numbers
from rlx.kernel.nests import AttentionNest
from rlx.kernel.scalar import Scalar

FLOATS = ("f32", "bf16", "f16")  # of operands and results
MOST_DEPTH = 512  # features of a head: query, result and scores of a block stay in L2


def attention_spec(nest: AttentionNest, inputs: Sequence[Slot], outputs: int = 1) -> AttentionSpec | str:
    """The flash kernel that computes a nest, or the reason why there is none."""
    if not nest.plain:
        return "scores that are not scaled and masked products have no native attention kernel"
    if len(nest.masks) > 1:
        return "the native attention kernel takes one mask"
    depth, value_depth = nest.depth, nest.value_depth
    need_numbers((depth, value_depth), "is the size of heads, whose scores one kernel adds in its own order")
    if not isinstance(depth, int) or not isinstance(value_depth, int):
        return "the native attention kernel wants heads of a static size"
    if not 0 < depth <= MOST_DEPTH or not 0 < value_depth <= MOST_DEPTH:
        return f"the native attention kernel wants heads of 1 to {MOST_DEPTH} features"
    dtypes = {s.dtype.name for s in (nest.q, nest.k, nest.v)}
    if (
        len(dtypes) > 1
        or not dtypes <= set(FLOATS)
        or any(s.prim != "load" for s in (nest.q, nest.k, nest.v))
    ):
        return f"the native attention kernel reads queries, keys and values of one of {', '.join(FLOATS)}"
    if nest.accumulate.name != "f32":
        return "the native attention kernel sums in f32"
    if len(nest.stores) != 1 or not _stored_plain(nest.stores[0].body):
        return "the native attention kernel stores its result as it is, or rounded"
    mask = nest.masks[0] if nest.masks else None
    if mask is not None and mask.kind == "keep" and (mask.negated or mask.fill != -math.inf):
        return "the native attention kernel hides what a mask does not keep, completely"
    if mask is not None and mask.kind == "add" and mask.load.dtype.name != "f32":
        return "the native attention kernel adds masks of f32"
    if nest.left is not None and nest.right is not None:
        need_numbers((nest.left + nest.right,), "decides how far attention looks in one kernel")
    window = _window(nest.left, nest.right)
    if window is None:
        return "the native attention kernel wants windows of a static size"
    offset, left, causal = window
    store = nest.stores[0].strides
    accesses = [_access(load, inputs, len(nest.batch)) for load in (nest.q, nest.k, nest.v)]
    seen = None if mask is None else _access(mask.load, inputs, len(nest.batch))
    sink = None if nest.sink is None else _access(nest.sink, inputs, len(nest.batch))
    if nest.sink is not None and nest.sink.dtype.name != "f32":
        return "the native attention kernel reads sinks of f32"
    unread = (mask is not None and seen is None) or (nest.sink is not None and sink is None)
    if any(a is None for a in accesses) or unread:
        need_numbers((*nest.batch, nest.queries, nest.keys), "decides how attention reads its operands")
        return "an operand of attention lies in memory in no regular way"
    q, k, v = (a for a in accesses if a is not None)
    return AttentionSpec(
        nest.batch,
        nest.queries,
        nest.keys,
        depth,
        value_depth,
        nest.scale,
        q,
        k,
        v,
        Access(len(inputs), store[:-2], store[-2], store[-1]),
        mask=seen,
        mask_kind="" if mask is None else "bool" if mask.kind == "keep" else "add",
        causal=causal,
        offset=offset,
        left=left,
        empty_is_zero=nest.masked,
        sink=sink,
    )


def _stored_plain(body: Scalar) -> bool:
    """Whether the sums are what is stored, as they are or rounded."""
    if body.prim == "cast":
        return body.args[0].prim == "acc" and body.dtype.name in FLOATS
    return body.prim == "acc"


def _window(left: Dim | None, right: Dim | None) -> tuple[Dim, int, bool] | None:
    """(offset, left, causal) of the kernel: keys after query + offset and before query
    + offset - left hide.
    """
    if right is None:
        if left is None:
            return 0, -1, False
        return (0, left, False) if isinstance(left, int) and left >= 0 else (-left, 0, False)
    if left is None:
        return right, -1, True
    both = left + right
    return (right, both, True) if isinstance(both, int) and both >= 0 else None


def _access(load: Scalar, inputs: Sequence[Slot], batch: int) -> Access | None:
    steps = linear_steps(load, inputs[load.data].steps, batch + 2)
    if steps is None:
        return None
    return Access(load.data, steps.axes[:batch], steps.axes[batch], steps.axes[batch + 1], steps.start)


def emit_attention_nest(
    module: Module, name: str, nest: AttentionNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of an attention nest; UnsupportedError where there is none."""
    spec = attention_spec(nest, inputs)
    if isinstance(spec, str):
        raise UnsupportedError(spec)
    return emit_attention(module, name, spec, inputs, outputs)
