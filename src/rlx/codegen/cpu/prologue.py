"""What matmuls and convolutions compute as they read it: expressions over an operand's axes, in lanes."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.expression import Expression
from rlx.codegen.cpu.frame import ArgumentTable, Slot
from rlx.codegen.cpu.rows.collapse import flatten_loads
from rlx.codegen.cpu.rows.nest_base import prepare
from rlx.codegen.cpu.rows.ranges import decided
from rlx.codegen.native.irtext import Function, Int
from rlx.ir.dim import Dim
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.nests import Nest, Store
from rlx.kernel.scalar import LOADS, Scalar, axis, load_index, rebuild, size
from rlx.records import dataclass


def flat_source(body: Scalar, space: Shape, inputs: Sequence[Slot]) -> Nest:
    """An expression over a space as a map with flat loads; where it would be stored is left open."""
    rank = len(space)
    made = Nest(space, rank, (), (Store(decided(body, space), True, (0,) * rank),))
    return flatten_loads(made, [slot.steps for slot in inputs])


def runs_along(nest: Nest, axis: int, inputs: Sequence[Slot]) -> bool:
    """Whether all loads of an expression are contiguous along an axis, or constant along it."""
    for e in nest.stores[0].body.walk():
        if e.prim == "at":
            step = _step(e.args, (1,), axis, len(nest.space))
        elif e.prim in LOADS:
            step = _step(load_index(e), inputs[e.data].steps, axis, len(nest.space))
        else:
            continue
        if step is None or step not in (0, 1):
            return False
    return True


@dataclass(frozen=True)
class Line:
    """An expression along a line of its operand: what only moves from line to line is found once per line.

    `starts` are the places at which loads begin; `body` reads them as further axes behind those of the nest.
    """

    body: Scalar
    starts: tuple[Scalar, ...]
    fixed: frozenset[int]

    @staticmethod
    def of(nest: Nest, moving: Sequence[int]) -> Line:
        """The only expression of a nest, along a line on which the axes `moving` move."""
        rank, starts = len(nest.space), dict[Scalar, int]()

        def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
            parts = affine(args[0], rank) if e.prim == "at" else None
            steps = None if parts is None else [to_dim(c) for c in parts[0]]
            if parts is None or steps is None or any(s is None for s in steps):
                return None
            start, along = parts[1], list[Scalar]()
            for number, step in enumerate(steps):
                assert step is not None
                if step != 0 and number in moving:
                    along.append(axis(number) * size(step))
                elif step != 0:
                    start = start + axis(number) * size(step)
            place = axis(rank + starts.setdefault(start, len(starts)))
            for term in along:
                place = place + term
            return Scalar("at", (place,), e.dtype, e.data)

        body = rebuild(nest.stores[0].body, change)
        fixed = {i for i in range(rank) if i not in moving} | {rank + i for i in range(len(starts))}
        return Line(body, tuple(starts), frozenset(fixed))

    def begin(self, fn: Function, table: ArgumentTable, axes: Sequence[Int]) -> Expression:
        """The expression at the beginning of a line: later ones on it have its axes and what it knows."""
        operands = table.operands(fn)
        here = Expression(fn, table.dim, operands, axes, None)
        found = Expression(fn, table.dim, operands, [*axes, *(here(s) for s in self.starts)], None)
        prepare(found, [self.body], set(self.fixed))
        return found


def _step(index: Sequence[Scalar], strides: Shape, axis: int, rank: int) -> Dim | None:
    """Elements from one index along an axis to the next; None where they differ."""
    total: Dim = 0
    for i, stride in zip(index, strides, strict=True):
        if not any(e.prim == "axis" and e.data == axis for e in i.walk()):
            continue
        parts = affine(i, rank)
        along = None if parts is None else to_dim(parts[0][axis])
        if along is None:
            return None
        total = total + along * stride
    return total
