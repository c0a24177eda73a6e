"""What evaluating an expression once takes of a core: instructions by kind, elements loaded one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.cost.time.reads import Size, read_of
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.kernel.form import dense_strides
from rlx.kernel.scalar import LOADS, PRIMITIVES, Scalar, load_index
from rlx.records import dataclass
from rlx.target.prices import Again

# Vector instructions, where they are not the op's own `cost`, which kernels go by.
INSTRUCTIONS = {
    "cast": 1,
    "sqrt": 8,
    "rsqrt": 10,
    "log": 24,
    "log2": 24,
    "log10": 24,
    "log1p": 30,
    "sin": 36,
    "cos": 36,
    "tan": 60,
    "pow": 150,
    "mod": 20,
    "floor_div": 12,
    "rounded": 2,
}
_LEAVES = frozenset(("axis", "const", "size"))
_EVEN = _LEAVES | {"add", "sub", "mul", "neg"}  # of indices that move in even steps


def instructions(e: Scalar) -> int:
    """Vector instructions of one expression, without its arguments, in vectors of 32-bit lanes.

    >>> from rlx.ir.dtype import F32
    >>> from rlx.kernel.scalar import axis, call, const
    >>> x = const(2.0, F32)
    >>> instructions(call("sqrt", x)), instructions(axis(0) + 1), instructions(x)
    (8, 2, 0)
    """
    count = INSTRUCTIONS.get(e.prim)
    if count is None:
        known = PRIMITIVES.get(e.prim)
        if known is None:
            return 0
        count = 1 if e.prim == "div" and e.args[1].prim == "const" else known.cost
    if e.dtype.is_float:
        return count
    return 2 * count if e.dtype.itemsize == 8 or any(a.dtype.itemsize == 8 for a in e.args) else count


@dataclass(frozen=True)
class Evaluation:
    """Of one point: its share of vector instructions, elements that are loaded one by one, and operations on
    their indices."""

    operations: int = 0
    gathered: float = 0.0
    index_operations: float = 0.0

    def femtoseconds(self, again: Again) -> int:
        """Of the whole device."""
        apart = self.gathered * again.gather_fs + self.index_operations * again.index_fs
        return self.operations * again.operation_fs + round(apart)


def _is_even(index: Scalar) -> bool:
    return all(e.prim in _EVEN for e in index.walk())


def evaluation(body: Scalar, space: Sequence[Dim], operands: Sequence[Node], size: Size) -> Evaluation:
    """What an expression over a space takes at a point, each part of it once. Vectors run along the last
    axis: where an index does not move evenly along it, elements are loaded one by one."""
    operations, gathered, index_operations = 0, 0.0, 0.0
    stack, seen = [body], {body}
    while stack:
        e = stack.pop()
        below = e.args
        if e.prim in LOADS:
            index = load_index(e)
            below = e.args[:2] if e.prim == "load_or" else ()
            if space and not all(i.prim in _LEAVES or _is_even(i) for i in index):
                sizes = [size(d) for d in space]
                strides = [size(d) for d in dense_strides(operands[e.data].shape)]
                read = read_of(e, strides, sizes, size)
                if read.computes_index(len(sizes) - 1):
                    gathered += read.part
                    index_operations += read.part * read.index_operations
        else:
            operations += instructions(e)
        for a in below:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    return Evaluation(operations, gathered, index_operations)
