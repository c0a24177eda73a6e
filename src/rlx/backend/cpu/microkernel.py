"""The inner product of every contraction: a register tile of accumulators over one ascending loop in k.

GEMM, convolution and recurrent input all call `accumulate`. It reads A one element at a time (broadcast) and
B one vector at a time, so A may have any strides and B needs its columns side by side. Each output is one
chain of multiply-adds in ascending k: tile height, panel width and thread count cannot show in the bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backend.cpu.irtext import Function, Int, Value, constant, vector
from rlx.backend.cpu.target import Target
from rlx.errors import DTypeError

LLVM_TYPES = {"f64": "double", "f32": "float", "bf16": "bfloat", "f16": "half"}


@dataclass(frozen=True)
class Kind:
    """How one operand dtype is read, multiplied and summed on one target.

    `group` consecutive k are taken by one step: 1 for FMA, 2 for the bf16 dot product. A group of A must lie
    side by side in memory; B is packed as [k / group][column][group]."""

    element: str
    accumulator: str
    group: int
    lanes: int

    @property
    def zero(self) -> Value:
        """An accumulator vector of zeros."""
        return constant(vector(self.accumulator, self.lanes), 0)

    @property
    def moved(self) -> str:
        """Type in which an element is copied: 16-bit floats travel as integers, which every target moves."""
        return "i16" if self.element in ("bfloat", "half") else self.element

    def read_a(self, fn: Function, place: Value, count: int) -> Value:
        """`count` (at most `group`) elements of A, in every lane; the rest of the group is zero."""
        if self.group == 1:
            return fn.splat(self._widen(fn, fn.load(self.element, place)), self.lanes)
        if count == self.group:
            pair = fn.load("i32", place, 2)
        else:
            pair = fn.zext(fn.load("i16", place), "i32")
        return fn.bitcast(fn.splat(pair, self.lanes), self._grouped)

    def read_b(self, fn: Function, place: Value, mask: Value | None) -> Value:
        """One vector of B; lanes off the mask are zero and not read."""
        type_ = self._grouped if self.group > 1 else vector(self.element, self.lanes)
        loaded = fn.load(type_, place) if mask is None else fn.masked_load(type_, place, mask)
        return loaded if self.group > 1 else self._widen(fn, loaded)

    def multiply_add(self, fn: Function, a: Value, b: Value, total: Value) -> Value:
        return fn.dot_bf16(total, a, b) if self.group == 2 else fn.fma(a, b, total)

    @property
    def _grouped(self) -> str:
        return vector(self.element, self.lanes * self.group)

    def _widen(self, fn: Function, value: Value) -> Value:
        return value if self.element == self.accumulator else fn.fpext(value, self.accumulator)


def kind_of(dtype: str, target: Target, grouped: bool = True) -> Kind:
    """The best way `target` has to contract operands of `dtype`; 16-bit floats accumulate in f32.

    Without `grouped`, one that takes k one by one, for an A whose neighbours in k do not lie side by side.

    >>> from rlx.backend.cpu.target import resolve
    >>> kind_of("bf16", resolve("x86-64-v4-bf16-vnni")).group, kind_of("bf16", resolve("x86-64-v3")).group
    (2, 1)
    """
    if dtype not in LLVM_TYPES:
        known = ", ".join(LLVM_TYPES)
        raise DTypeError(f"no contraction kernel takes {dtype}: cast the operands to one of {known}")
    accumulator = "double" if dtype == "f64" else "float"
    group = 2 if dtype == "bf16" and target.has_bf16 and grouped else 1
    return Kind(LLVM_TYPES[dtype], accumulator, group, target.lanes("f64" if dtype == "f64" else "f32"))


@dataclass(frozen=True)
class Places:
    """Addresses that move together through k: each is a pointer plus a constant offset, `step` elements per
    k."""

    places: tuple[tuple[Value, int], ...]
    step: Int
    element: str

    @staticmethod
    def of(fn: Function, base: Value, offsets: Sequence[Int], step: Int, element: str) -> Places:
        """Places at `offsets` elements from `base`: known offsets become displacements, others pointers."""
        places = [(base, o) if isinstance(o, int) else (fn.gep(base, o, element), 0) for o in offsets]
        return Places(tuple(places), step, element)

    def at(self, fn: Function, k: Int) -> list[Value]:
        """The addresses at step k."""
        distance = fn.mul(k, self.step)
        moved: dict[Value, Value] = {}
        for pointer, _ in self.places:
            if pointer not in moved:
                moved[pointer] = fn.gep(pointer, distance, self.element)
        return [fn.gep(moved[pointer], offset, self.element) for pointer, offset in self.places]


def accumulate(
    fn: Function,
    kind: Kind,
    rows: Places,
    columns: Places,
    depth: Int,
    start: Sequence[Value],
    mask: Value | None = None,
) -> list[Value]:
    """start[i, j] + the sum over k < depth of rows[i] at k times columns[j] at k, as a list in row order.

    Steps of `rows` and `columns` count one group of k. The mask, if any, belongs to the last column vector.
    """
    width = len(columns.places)

    def step(k: Int, totals: Sequence[Value], count: int) -> list[Value]:
        b = [
            kind.read_b(fn, place, mask if j == width - 1 else None)
            for j, place in enumerate(columns.at(fn, k))
        ]
        sums = list(totals)
        for i, place in enumerate(rows.at(fn, k)):
            a = kind.read_a(fn, place, count)
            for j in range(width):
                sums[i * width + j] = kind.multiply_add(fn, a, b[j], sums[i * width + j])
        return sums

    whole = fn.udiv(depth, kind.group)
    sums = fn.loop(0, whole, 1, start, lambda k, totals: step(k, totals, kind.group))
    if kind.group == 1:
        return sums
    rest = fn.cmp("ne", fn.urem(depth, kind.group), 0)
    return fn.if_value(rest, lambda: step(whole, sums, kind.group - 1), lambda: sums)
