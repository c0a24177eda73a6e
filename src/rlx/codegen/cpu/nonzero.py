"""Positions of the elements that are not zero: a kernel that finds out how large its result is.

Its memory cannot be planned before, so it works in scratch, which has room for every element: first the
count, then the positions [rank, count]. The runtime reads both and plans what follows for that size.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.frame import KernelFrame, Slot, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import from_memory, memory_type
from rlx.codegen.native.irtext import Int, Module
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.ir.types import TensorType
from rlx.kernel.form import Template, dense_strides

BLOCK = 16  # elements that are passed over together where all of them are zero


def emit_nonzero(
    module: Module, name: str, form: Template, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel; one thread runs it."""
    return _Nonzero(KernelFrame(module, name, inputs, outputs)).emit()


class _Nonzero:
    def __init__(self, frame: KernelFrame) -> None:
        self.frame, self.fn = frame, frame.fn
        self.slot = frame.inputs[0]
        self.sizes = [frame.dim(self.fn, d) for d in self.slot.shape]
        self.operand = frame.operand(self.fn, 0)
        self.numel = TensorType(self.slot.dtype, self.slot.shape).numel

    def emit(self) -> EmittedKernel:
        fn, rank = self.fn, len(self.sizes)
        total = self.frame.dim(fn, self.numel)
        base = self.frame.scratch()
        positions = fn.gep(base, 1, "i64")
        flat = positions if rank <= 1 else fn.gep(positions, fn.mul(total, rank), "i64")

        def one(i: Int, found: list[Value]) -> list[Value]:
            (count,) = found
            fn.store(fn.value(i), fn.gep(flat, count, "i64"))
            return [fn.value(fn.add(count, fn.zext(self.hits(i, 1), "i64")))]

        def block(i: Int, found: list[Value]) -> list[Value]:
            def each() -> list[Value]:
                return fn.loop(i, fn.add(i, BLOCK), 1, found, one)

            return fn.if_value(fn.any_lane(self.hits(i, BLOCK)), each, lambda: found)

        found = [constant("i64", 0)]
        whole: Int = 0
        if self.is_dense:
            whole = fn.sub(total, fn.urem(total, BLOCK))
            found = fn.loop(0, whole, BLOCK, found, block)
        (count,) = fn.loop(whole, total, 1, found, one)
        fn.store(count, base)
        if rank > 1:

            def spread(c: Int, _: list[Value]) -> None:
                place = unflatten(fn, fn.load("i64", fn.gep(flat, c, "i64")), self.sizes)
                for axis, index in enumerate(place):
                    fn.store(fn.value(index), fn.gep(positions, fn.add(fn.mul(count, axis), c), "i64"))

            fn.loop(0, count, 1, [], spread)
        copies = rank if rank <= 1 else rank + 1
        return EmittedKernel(
            self.frame.name, self.frame.dims, self.numel * (8 * copies) + 64, serial=True, reveals=True
        )

    @property
    def is_dense(self) -> bool:
        return self.slot.strides is None or self.slot.strides == dense_strides(self.slot.shape)

    def hits(self, i: Int, lanes: int) -> Value:
        """Whether elements from i on are not zero."""
        fn, dtype = self.fn, self.slot.dtype
        element = memory_type(dtype)
        offset = i
        if not self.is_dense:
            offset = 0
            for index, step in zip(unflatten(fn, i, self.sizes), self.operand.strides, strict=True):
                offset = fn.add(offset, fn.mul(index, self.frame.dim(fn, step)))
        loaded = fn.load(vector(element, lanes), fn.gep(self.operand.pointer, offset, element))
        x = from_memory(fn, loaded, dtype)
        if dtype.is_bool:
            return x
        zero = constant(x.type, 0)
        return fn.fcmp("une", x, zero) if dtype.is_float else fn.value(fn.cmp("ne", x, zero))
