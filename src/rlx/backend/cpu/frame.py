"""What every kernel shares: its argument table, operands, sizes, scratch and the split of work among threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backend.cpu.expression import Operand
from rlx.backend.cpu.irtext import Function, Int, Module
from rlx.backend.cpu.irtypes import Value
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.form import dense_strides
from rlx.ir.types import Shape

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


@dataclass(frozen=True)
class EmittedKernel:
    """What the runtime must know of a kernel: which sizes it reads and how much scratch it needs."""

    name: str
    dims: tuple[Dim, ...]
    scratch_per_thread: Dim = 0
    serial: bool = False


class KernelFrame:
    """A kernel under construction: `fn` is its entry, `dim` reads a size in any function with the same args."""

    def __init__(self, module: Module, name: str, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> None:
        self.module, self.name = module, name
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.fn = module.function(name, [("ptr", "args"), ("i64", "thread"), ("i64", "threads")])
        self._dims: dict[Dim, int] = {}
        self._read: dict[tuple[int, int], Value] = {}

    @property
    def thread(self) -> Value:
        return self.fn.args[1]

    @property
    def threads(self) -> Value:
        return self.fn.args[2]

    def field(self, fn: Function, index: int, type_: str = "i64") -> Value:
        """Field of the argument table, read once at the entry of `fn` (its args[0] is the table)."""
        key = (id(fn), index)
        if key not in self._read:
            place = fn.at_entry("ptr", f"getelementptr i64, {fn.args[0]}, i64 {index}")
            self._read[key] = fn.at_entry(type_, f"load {type_}, {place}, align 8")
        return self._read[key]

    def dim(self, fn: Function, d: Dim) -> Int:
        """A size: known ones are ints, the others fields of the table."""
        if isinstance(d, int):
            return d
        number = self._dims.setdefault(d, len(self._dims))
        return self.field(fn, FIRST_OPERAND + len(self.inputs) + len(self.outputs) + number)

    def pointer(self, number: int, fn: Function | None = None) -> Value:
        """Pointer of an operand, inputs first."""
        return self.field(fn or self.fn, FIRST_OPERAND + number, "ptr")

    def operand(self, number: int, fn: Function | None = None) -> Operand:
        slot = (self.inputs + self.outputs)[number]
        return Operand(self.pointer(number, fn), slot.shape, slot.steps)

    def operands(self, fn: Function | None = None) -> list[Operand]:
        return [self.operand(i, fn) for i in range(len(self.inputs))]

    def output(self, number: int) -> Operand:
        return self.operand(len(self.inputs) + number)

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
        return EmittedKernel(self.name, tuple(self._dims), scratch, serial)


def unflatten(fn: Function, flat: Int, sizes: Sequence[Int]) -> list[Int]:
    """Row-major indices of a flat position."""
    out: list[Int] = []
    for extent in reversed(sizes[1:]):
        out.append(fn.urem(flat, extent))
        flat = fn.udiv(flat, extent)
    if sizes:
        out.append(flat)
    return list(reversed(out))
