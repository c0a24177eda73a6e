"""Forms: the few kinds of kernel that a backend implements. A MIR op lowers to one form.

A form describes *what* is computed over an iteration space of dims; operands are numbered as the op's
operands. The output is written densely in the order of the kept axes.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeAlias

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.kernel.scalar import Scalar
from rlx.records import dataclass

Space: TypeAlias = tuple[Dim, ...]


@dataclass(frozen=True)
class Map:
    """out[axes] = body(axes), over the whole space."""

    space: Space
    body: Scalar


@dataclass(frozen=True)
class Piece:
    """One box of the output: out[offset + axes] = body(axes) for axes in extent."""

    offset: Space
    extent: Space
    body: Scalar


@dataclass(frozen=True)
class Pieces:
    """The output as a disjoint union of boxes (concat, pad, stack); boxes cover the space."""

    space: Space
    pieces: tuple[Piece, ...]


def order_shows(combine: str, dtype: DType) -> bool:
    """Whether the order in which elements of a dtype are combined shows in the result."""
    return combine in ("sum", "prod") and not (dtype.is_int or dtype.is_bool)


@dataclass(frozen=True)
class Reduce:
    """Combine body over `axes` of the space; the kept axes index the output.

    combine: sum prod max min any all | argmax argmin (the result is the index along the single axis).
    `finish` maps the combined value (acc) at the kept axes to the output; None is the identity.
    """

    space: Space
    axes: tuple[int, ...]
    combine: str
    body: Scalar
    dtype: DType
    finish: Scalar | None = None
    last: bool = False  # argmax/argmin: take the last of equals

    @property
    def rounds(self) -> bool:
        """Whether the order in which elements are combined shows in the result."""
        return order_shows(self.combine, self.body.dtype)


@dataclass(frozen=True)
class Contract:
    """Sum of products: out[batch, m, n] = sum over k of lhs * rhs.

    Axes of lhs and rhs by number: batch pairs, contracted pairs, and the free ones in order. The output is
    batch dims, then free dims of lhs, then free dims of rhs.
    """

    lhs: tuple[Dim, ...]
    rhs: tuple[Dim, ...]
    batch: tuple[tuple[int, int], ...]
    contract: tuple[tuple[int, int], ...]
    dtype: DType
    accumulate: DType


@dataclass(frozen=True)
class CodedContract:
    """A contraction of rows, rounded to i8 by groups along k, with codes [k, n] of `bits` bits.

    Operands are x, codes, scales and perhaps zeros or minimums. It is no `Contract`: it is not linear in x.
    """

    contract: Contract
    bits: int
    group: int
    minimums: bool = False


@dataclass(frozen=True)
class Conv:
    """Convolution in NC... layout; x is operand 0, w operand 1 ([O, I/groups, *window])."""

    x: tuple[Dim, ...]
    w: tuple[Dim, ...]
    out: tuple[Dim, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[Dim, Dim], ...]
    dilations: tuple[int, ...]
    groups: int
    dtype: DType
    accumulate: DType
    fill: int = 0  # what padding consists of


@dataclass(frozen=True)
class Cumulate:
    """Running combine (sum, prod, max, min) of body along one axis; exclusive and reverse as in ONNX."""

    space: Space
    axis: int
    combine: str
    body: Scalar
    dtype: DType
    exclusive: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class Scatter:
    """out = operand `base`, then out[index(axes)] combine= value(axes) in ascending order of axes.

    combine: set add mul max min. An index out of range is a run-time error.
    """

    base: int
    shape: Space
    space: Space
    index: tuple[Scalar, ...]
    value: Scalar
    combine: str
    is_box: bool = False  # it sets a box of `space`'s sizes that is known to lie inside, at any place


@dataclass(frozen=True)
class Sort:
    """Stable sort of operand 0 along the last axis; outputs values and i64 positions, `keep` of each."""

    shape: Space
    keep: Dim
    descending: bool
    dtype: DType


@dataclass(frozen=True)
class Template:
    """A kernel known by name to backends that have it (fft, recurrent cells, ...); config is plain data.

    `fallback_why` is what `explain` says on a backend that lacks it: there it is a host thunk.
    """

    kind: str
    config: tuple[tuple[str, Any], ...] = ()
    outputs: int = 1


@dataclass(frozen=True)
class Loop:
    """Bodies run by the program itself (if, while, scan): control is the kind.

    Operands from number `fixed_operands` on are, in every step, the bodies' inputs from `fixed_inputs` on.
    The first `carries` results of a body are what its first inputs are in the next step.
    """

    control: str
    config: tuple[tuple[str, Any], ...] = field(default=())
    fixed_operands: int = 0
    fixed_inputs: int = 0
    carries: int = 0


@dataclass(frozen=True)
class HostCall:
    """A host function, named in explain and stats; billed as a sync point."""

    why: str


@dataclass(frozen=True)
class Collective(HostCall):
    """The form of a meeting of ranks, which runs between native segments; `why` names it.

    `pairs` lists (axis of the operand, axis of the result) that run along each other and that nothing cuts.
    """

    pairs: tuple[tuple[int, int], ...] = ()


Form: TypeAlias = (
    Map
    | Pieces
    | Reduce
    | Contract
    | CodedContract
    | Conv
    | Cumulate
    | Scatter
    | Sort
    | Template
    | Loop
    | HostCall
)


@dataclass(frozen=True)
class Strides:
    """Where a tensor's elements lie in its storage: offset and strides, in elements."""

    offset: Dim
    strides: tuple[Dim, ...]


def dense_strides(shape: Space) -> tuple[Dim, ...]:
    """Row-major strides in elements.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    out: list[Dim] = []
    step: Dim = 1
    for d in reversed(shape):
        out.append(step)
        step = step * d
    return tuple(reversed(out))


def dense(shape: Space) -> Strides:
    """The layout of a freshly written tensor."""
    return Strides(0, dense_strides(shape))


def is_dense(layout: Strides, shape: Space) -> bool:
    """Whether a layout is row-major without gaps (strides of size-1 axes do not matter)."""
    want = dense_strides(shape)
    return all(a == b or d == 1 for a, b, d in zip(layout.strides, want, shape, strict=True))
