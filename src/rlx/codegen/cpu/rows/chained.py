"""Long chains of instructions: which expressions are computed for several vectors side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.expression import is_load
from rlx.codegen.cpu.rows.transposed import load_steps
from rlx.codegen.native import vmath
from rlx.ir.dtype import F32
from rlx.kernel.nests import Store
from rlx.kernel.scalar import PRIMITIVES, Scalar

DEEP_TOGETHER = 4  # vectors; with eight, constants and values of 16 registers are mostly in memory
_DEEP_COST = 8  # of a primitive that is a chain by itself


def is_deep(bodies: Sequence[Scalar]) -> bool:
    """Whether expressions hold one function of f32 that is written in place, and none that is called.

    Several functions are several chains already, and their constants fill the registers.

    >>> from rlx.kernel.scalar import axes, call, load
    >>> x = load(0, axes(1), F32)
    >>> is_deep([call("tanh", x)]), is_deep([call("sqrt", x)]), is_deep([call("mul", call("sin", x), x)])
    (True, False, False)
    """
    count = 0
    for e in {e for body in bodies for e in body.walk()}:
        function = vmath.FUNCTIONS.get(e.prim)
        if function is not None and not function.inline:
            return False
        is_chain = function is not None or e.prim in ("exp_difference", "exp_below")
        if is_chain and PRIMITIVES[e.prim].cost >= _DEEP_COST:
            count += 1 if e.dtype is F32 else 2
    return count == 1


def is_plain(stores: Sequence[Store], rank: int) -> bool:
    """Whether everything is read and stored element after element along the last axis, or is the same."""
    for e in {e for store in stores for e in store.body.walk() if is_load(e)}:
        steps = load_steps(e, rank) if e.prim == "at" else None
        if steps is None or steps[-1] not in (0, 1):
            return False
    return all(store.strides and store.strides[-1] == 1 for store in stores)
