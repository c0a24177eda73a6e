"""What every kernel shares: its argument table, operands, sizes, scratch, the split among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

from rlx.codegen.cpu.expression import Operand
from rlx.codegen.cpu.kernels import KERNEL_ARGS, EmittedKernel
from rlx.codegen.native.control import current
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import ptr
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.types import Shape
from rlx.kernel.form import dense_strides
from rlx.records import dataclass

Count = Any
"""A number of the notation: an int where the compiler knows it, else a Value."""

FIRST_OPERAND = 3  # fields before: error slot, scratch base, scratch bytes per thread


@dataclass(frozen=True)
class Slot:
    """An operand as the plan stores it: dtype, shape, and strides in elements (None: dense)."""

    dtype: DType
    shape: Shape
    strides: Shape | None = None

    @property
    def steps(self) -> Shape:
        return dense_strides(self.shape) if self.strides is None else self.strides


class ArgumentTable:
    """The fields of a kernel's argument table, readable in any function whose args[0] is the table."""

    def __init__(self, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        self._dims: dict[Dim | str, int] = {}  # size expressions, and names of `given` sizes
        self._given: dict[str, int] = {}
        self._read: dict[tuple[str, int], Value] = {}  # by function
        self._operands: dict[tuple[str, int], Operand] = {}

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Size expressions read so far, in the order of their fields."""
        return tuple(self._given[d] if isinstance(d, str) else d for d in self._dims)

    def field(self, fn: Function, index: int, type_: str = "i64") -> Value:
        """Field of the argument table, read once at the entry of `fn` (its args[0] is the table)."""
        key = (fn.name, index)
        found = self._read.get(key)
        if found is None:
            place = fn.at_entry("ptr", f"getelementptr i64, {fn.args[0]}, i64 {index}").text
            found = self._read[key] = fn.at_entry(type_, f"load {type_}, ptr {place}, align 8")
        return found

    def dim(self, fn: Function, d: Dim) -> Int:
        """A size: known ones are ints, the others fields of the table."""
        if isinstance(d, int):
            return d
        return self._dim_field(fn, d)

    def give(self, name: str, size: int) -> None:
        """Let functions read a known size all the same: their code is then that of other sizes, too."""
        self._given[name] = size
        self._dims[name] = len(self._dims)

    def given(self, fn: Function, name: str) -> Value:
        """A size of `give`, by its name."""
        return self._dim_field(fn, name)

    def _dim_field(self, fn: Function, d: Dim | str) -> Value:
        number = self._dims.setdefault(d, len(self._dims))
        return self.field(fn, FIRST_OPERAND + len(self.inputs) + len(self.outputs) + number)

    def operand(self, fn: Function, number: int) -> Operand:
        """An operand, inputs first."""
        key = (fn.name, number)
        found = self._operands.get(key)
        if found is None:
            slot = (self.inputs + self.outputs)[number]
            pointer = self.field(fn, FIRST_OPERAND + number, "ptr")
            found = self._operands[key] = Operand(pointer, slot.shape, slot.steps)
        return found

    def operands(self, fn: Function) -> list[Operand]:
        """All inputs."""
        return [self.operand(fn, i) for i in range(len(self.inputs))]

    def size(self, d: Dim) -> Count:
        """A size, as a number of the function that is being written."""
        return self.dim(current(), d)

    def start(self, number: int) -> ptr:
        """Where an operand is, inputs first, as a pointer of the function that is being written."""
        return ptr(self.field(current(), FIRST_OPERAND + number, "ptr"))


class KernelFrame(ArgumentTable):
    """A kernel under construction: `fn` is its entry."""

    def __init__(self, module: Module, name: str, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> None:
        super().__init__(inputs, outputs)
        self.module, self.name = module, name
        self.fn = module.function(name, KERNEL_ARGS)

    @property
    def args(self) -> ptr:
        """The argument table itself, for the functions that the kernel calls."""
        return ptr(self.fn.args[0])

    @property
    def thread(self) -> Value:
        return self.fn.args[1]

    @property
    def threads(self) -> Value:
        return self.fn.args[2]

    def sizes(self, shape: Shape) -> list[Count]:
        """Sizes, as numbers of the notation."""
        return [self.dim(self.fn, d) for d in shape]

    def output(self, number: int) -> Operand:
        return self.operand(self.fn, len(self.inputs) + number)

    def result(self, number: int) -> ptr:
        """Where an output is, as a pointer of the notation; outputs are dense."""
        return ptr(self.field(self.fn, FIRST_OPERAND + len(self.inputs) + number, "ptr"))

    @property
    def error(self) -> Value:
        return self.field(self.fn, 0, "ptr")

    def scratch(self) -> Value:
        """This thread's scratch."""
        fn = self.fn
        return fn.gep(self.field(fn, 1, "ptr"), fn.mul(self.thread, self.field(fn, 2)), "i8")

    def share(self, total: Int) -> tuple[Int, Int]:
        """The contiguous part of range(total) that belongs to this thread."""
        fn = self.fn
        low = fn.udiv(fn.mul(total, self.thread), self.threads)
        return low, fn.udiv(fn.mul(total, fn.add(self.thread, 1)), self.threads)

    def finish(self, scratch: Dim = 0, serial: bool = False) -> EmittedKernel:
        return EmittedKernel(self.name, self.dims, scratch, serial)


def kernel(function: Callable[[KernelFrame, Any], EmittedKernel]) -> Callable[..., EmittedKernel]:
    """Make a function in the notation of native functions an emitter: it gets the kernel's frame and form."""
    written = inline(function)

    def emit(
        module: Module, name: str, form: object, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> EmittedKernel:
        frame = KernelFrame(module, name, inputs, outputs)
        return write(frame.fn, written, frame, form)

    return update_wrapper(emit, function)


@inline
def product(sizes: Sequence[Count]) -> Count:
    """The number of points of a space."""
    total = 1
    for size in sizes:
        total *= size
    return total


def unflatten(fn: Function, flat: Int, sizes: Sequence[Int]) -> list[Int]:
    """Row-major indices of a flat position."""
    out: list[Int] = []
    for extent in reversed(sizes[1:]):
        out.append(fn.urem(flat, extent))
        flat = fn.udiv(flat, extent)
    if sizes:
        out.append(flat)
    return list(reversed(out))
