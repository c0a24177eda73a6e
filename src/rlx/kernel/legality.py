"""Which ops may share a kernel: every rule once, as a function that gives the reason why not, or None.

Fusion asks these rules about groups of ops before anything is built (`rlx.fuse.fit`). Composition asks them
while it builds a kernel (`composer`, `attention` and `spectrum` next to this file).
`tests/fuzz/test_legality.py` checks that what fits also composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlx.ir.dim import Dim, known_eq
from rlx.ir.types import Shape

MOST_OUTPUTS: Mapping[str, int] = MappingProxyType(
    {"map": 3, "reduce": 3, "contract": 1, "conv": 1, "attention": 1, "transform": 3, "own": 1}
)
"""Values that one kernel stores, by the kind of its root."""

OTHER_POINT = "a value of the root is read at another point than its own"
"""A kernel has each result of its root only while it computes that point."""

OTHER_ROW = "a reduced value is read at another row than its own"
"""A kernel has each reduced value only while it computes that row."""

_NAMES = {
    "contract": ("a contraction", "contractions"),
    "conv": ("a convolution", "convolutions"),
    "reduce": ("a reduction", "reductions"),
    "attention": ("attention", "attentions"),
    "transform": ("a transform", "transforms"),
    "own": ("a kernel of its own", "kernels of their own"),
}


def same_space(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal, as far as is known before sizes are.

    >>> same_space((2, 3), (2, 3)), same_space((2, 3), (6,))
    (True, False)
    """
    return len(a) == len(b) and all(x == y or known_eq(x, y) is True for x, y in zip(a, b, strict=True))


def joining(root: str, kind: str) -> str | None:
    """Why a contraction, convolution or reduction cannot follow a root in one kernel. A "map" has no root.

    >>> joining("map", "contract"), joining("reduce", "reduce")
    (None, None)
    >>> joining("contract", "reduce")
    'a contraction and a reduction cannot share a kernel'
    >>> joining("conv", "conv")
    'two convolutions cannot share a kernel'
    """
    return None if root == "map" or root == kind == "reduce" else conflict(root, kind)


def conflict(root: str, kind: str) -> str:
    """Why two roots cannot share a kernel.

    >>> conflict("transform", "reduce")
    'a transform and a reduction cannot share a kernel'
    """
    if root == kind:
        return f"two {_NAMES[kind][1]} cannot share a kernel"
    return f"{_NAMES[root][0]} and {_NAMES[kind][0]} cannot share a kernel"


def sharing_rows(space: Shape, axes: Sequence[int], other: Shape, others: Sequence[int]) -> str | None:
    """Why two reductions cannot run in one loop nest.

    >>> sharing_rows((4, 8), (1,), (4, 8), (0,))
    'reductions over different spaces cannot share a loop nest'
    """
    if tuple(axes) == tuple(others) and same_space(space, other):
        return None
    return "reductions over different spaces cannot share a loop nest"


def sharing_lanes(bits: int, columns: bool, others: Sequence[tuple[int, bool]]) -> str | None:
    """Why a sum cannot share lanes with others: their number and direction show in its bits.

    >>> sharing_lanes(32, True, [(64, True)])
    'sums of different widths cannot share a kernel'
    """
    if any(b != bits for b, _ in others):
        return "sums of different widths cannot share a kernel"
    if any(c is not columns for _, c in others):
        return "sums along rows and along columns cannot share a kernel"
    return None


def reading_computed(op: str, how: str, checks: bool, attention: bool = False) -> str | None:
    """Why an op cannot read a value that its kernel computes. `how` is the kind of access (`rlx.fuse.facts`),
    `checks` says whether computing the value may fail on an index from data.

    >>> reading_computed("gather", "checked", False)
    'gather gathers from a value that is not in memory'
    """
    if how == "memory" or (how == "rows" and attention):
        return f"{op} reads its operands from memory, not computed ones"
    if how == "rows" and checks:
        return reporting(op, checks)
    if how == "checked":
        return f"{op} gathers from a value that is not in memory"
    if how == "guarded" and checks:
        return f"{op} reads a gathered value past its edge"
    return None


def reading_root(op: str, how: str) -> str | None:
    """Why an op cannot read a value that depends on the root of its kernel.

    >>> reading_root("pad", "guarded")
    'pad reads a value of the root past its edge'
    """
    return f"{op} reads a value of the root past its edge" if how == "guarded" else None


def standing_alone(op: str) -> str:
    """Why an op without a loop nest (a sort, a scatter) cannot join any other.

    >>> standing_alone("sort")
    'sort is a kernel of its own'
    """
    return f"{op} is a kernel of its own"


def reporting(part: str, checks: bool) -> str | None:
    """Why a part of a kernel cannot check indices that come from data.

    >>> reporting("an epilogue", checks=True)
    'an epilogue has nowhere to report an index out of range'
    """
    return f"{part} has nowhere to report an index out of range" if checks else None


def computing_operand(op: str, kind: str, moved: str | None, reads: bool) -> str | None:
    """Why a contraction or convolution cannot compute its first operand. `moved` says that it only is another
    value at other places, which are "regular" or not; `reads` whether it needs memory at all.

    >>> computing_operand("conv", "conv", moved="regular", reads=True)
    'conv reads its operands from memory, or computes them'
    """
    if moved is not None and (kind == "conv" or moved != "regular"):
        return f"{op} reads its operands from memory, or computes them"
    return None if reads else f"{op} computes no operand that is the same everywhere"


def storing(kind: str, count: int) -> str | None:
    """Why a kernel cannot store so many values.

    >>> storing("contract", 2)
    '2 of its values are needed elsewhere, and such a kernel stores at most 1'
    """
    most = MOST_OUTPUTS[kind]
    if count <= most:
        return None
    return f"{count} of its values are needed elsewhere, and such a kernel stores at most {most}"
