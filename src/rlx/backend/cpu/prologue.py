"""What products and convolutions compute as they read it: expressions over an operand's axes, in lanes."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backend.cpu.collapse import flatten_loads
from rlx.backend.cpu.frame import Slot
from rlx.backend.cpu.ranges import decided
from rlx.ir.affine import affine, to_dim
from rlx.ir.dim import Dim
from rlx.ir.kernel import Nest, Store
from rlx.ir.scalar import LOADS, Scalar, load_index
from rlx.ir.types import Shape


def flat_source(body: Scalar, space: Shape, inputs: Sequence[Slot]) -> Nest:
    """An expression over a space as a map with flat loads; where it would be stored is left open."""
    rank = len(space)
    made = Nest(space, rank, (), (Store(decided(body, space), True, (0,) * rank),))
    return flatten_loads(made, [slot.steps for slot in inputs])


def runs_along(nest: Nest, axis: int, inputs: Sequence[Slot]) -> bool:
    """Whether all that an expression loads lies side by side along an axis, or is the same all along it."""
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
