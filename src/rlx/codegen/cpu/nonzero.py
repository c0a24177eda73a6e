"""Positions of the elements that are not zero: a kernel that finds out how large its result is.

Its memory cannot be planned before, so it works in scratch, which has room for every element: first the
count, then the positions [rank, count]. The runtime reads both and plans what follows for that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.codegen.cpu.frame import KernelFrame, Slot, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import from_memory, memory_type
from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import at, gep, i64, load, loop, urem, zext
from rlx.ir.types import TensorType
from rlx.kernel.form import Template, dense_strides

BLOCK = 16  # elements that are passed over together where all of them are zero


def emit_nonzero(
    module: Module, name: str, form: Template, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel; one thread runs it."""
    frame = KernelFrame(module, name, inputs, outputs)
    numel = TensorType(inputs[0].dtype, inputs[0].shape).numel
    _nonzero(frame.fn, frame, inputs[0], [frame.dim(frame.fn, d) for d in inputs[0].shape], numel)
    rank = len(inputs[0].shape)
    copies = rank if rank <= 1 else rank + 1
    return EmittedKernel(frame.name, frame.dims, numel * (8 * copies) + 64, serial=True, reveals=True)


@inline
def _nonzero(f: Function, frame: KernelFrame, slot: Slot, sizes: Sequence[Any], numel: Any) -> None:
    operand: Any = frame.operand(f, 0)
    dtype, rank = slot.dtype, len(sizes)
    is_dense = slot.strides is None or slot.strides == dense_strides(slot.shape)
    element = memory_type(dtype)

    def hits(i: Any, lanes: int) -> Any:
        """Whether elements from i on are not zero."""
        offset = i
        if not is_dense:
            offset = 0
            places: Any = unflatten(f, i, sizes)
            for index, step in zip(places, operand.strides, strict=True):
                offset += index * frame.dim(f, step)
        loaded = load(vector(element, lanes), gep(operand.pointer, offset, element))
        x: Any = from_memory(f, loaded, dtype)
        return x if dtype.is_bool else x != 0

    total: Any = frame.dim(f, numel)
    base = frame.scratch()
    positions = at(base, 1)
    flat = positions if rank <= 1 else at(positions, total * rank)
    count, whole = i64(0), 0
    if is_dense:
        whole = total - urem(total, BLOCK)
        for start in loop(0, whole, BLOCK):
            if f.any_lane(hits(start, BLOCK)):
                for i in loop(start, start + BLOCK):
                    flat[count] = i
                    count += zext(hits(i, 1), i64)
    for i in loop(whole, total):
        flat[count] = i
        count += zext(hits(i, 1), i64)
    f.store(count, base)
    if rank > 1:
        for c in loop(0, count):
            for axis, index in enumerate(unflatten(f, flat[c], sizes)):
                positions[count * axis + c] = index
