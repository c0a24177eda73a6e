"""Kernels: what a region is composed to, and what a backend writes code for.

A `Nest` is a loop nest over `space`. Its first `outer` axes are kept, the others reduced. Each `Stat`
combines an expression over the inner axes; later expressions read it as acc(j). Stores write either one value
per point (full) or one per row (outer axes only). Maps, reductions, softmax, norms are all nests.

A `ContractNest` is a contraction whose operands are read in place through affine indices and whose result
passes through epilogue expressions (acc(0) is the sum of products) before it is stored. Its left operand may
also be computed as it is read, by any expression over its axes: the prologue. A `ConvNest` is the same for a
convolution. An `AttentionNest` is softmax(score(q k^T)) v, which never holds all scores in memory.
A `TransformNest` is a Fourier transform that computes what it reads and passes on what it gives.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import RlxError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ir.types import Shape
from rlx.kernel.form import Contract, Conv, Form, order_shows
from rlx.kernel.layout import Layout
from rlx.kernel.scalar import Scalar, call, convert, rebuild
from rlx.records import dataclass


class ComposeError(RlxError):
    """These ops do not make one kernel."""


@dataclass(frozen=True)
class Stat:
    """One reduction over the inner axes; `body` is an expression over the full space."""

    combine: str
    body: Scalar
    dtype: DType
    last: bool = False

    @property
    def rounds(self) -> bool:
        """Whether the order in which elements are combined shows in the result."""
        return order_shows(self.combine, self.body.dtype)


@dataclass(frozen=True)
class Store:
    """One output of a kernel: an expression over the full space, or over the outer axes only."""

    body: Scalar
    full: bool
    strides: Shape  # in elements of the output, per axis of the space it is stored over


@dataclass(frozen=True)
class Nest:
    """A loop nest; see the module's text.

    The order in which a sum adds is a matter of what is reduced, not of where elements lie or of what else a
    kernel does. `columns` says whether each kept element has a chain of additions of its own; if not, lanes
    share one. None: any order will do.
    """

    space: Shape
    outer: int
    stats: tuple[Stat, ...]
    stores: tuple[Store, ...]
    columns: bool | None = None


@dataclass(frozen=True)
class ContractNest:
    """A contraction with prologue and epilogue. `lhs`, `rhs` are over the contraction's iteration axes
    (batch, m..., n..., k... in the order of `space`): `rhs` is a load, `lhs` a load or what the kernel
    computes for itself, rounded to its dtype. Stores are over the output axes."""

    form: Contract
    lhs: Scalar
    rhs: Scalar
    space: Shape
    kept: int
    stores: tuple[Store, ...]
    rhs_layout: tuple[str, tuple[tuple[str, Any], ...]] | None = (
        None  # the op that unpacks it, its attributes
    )

    @property
    def has_prologue(self) -> bool:
        """Whether the left operand is computed rather than read."""
        return self.lhs.prim != "load"


@dataclass(frozen=True)
class Computed:
    """An image that is computed as it is read: an expression over its axes as they would be stored."""

    body: Scalar
    shape: Shape


@dataclass(frozen=True)
class ConvNest:
    """A convolution with prologue and epilogue; operand 0 and 1 of the form are body inputs x and w.

    Stores are over the output axes [N, C, ...]. Images may have blocked channels, the kernel panels. With a
    prologue there is no input x (it is -1): the kernel computes the image, rounded to its dtype; padding is
    around what it gives.
    """

    form: Conv
    x: int
    w: int
    stores: tuple[Store, ...]
    x_layout: Layout | None = None  # None: planar
    out_layout: Layout | None = None
    w_layout: tuple[str, tuple[tuple[str, Any], ...]] | None = None  # the op that unpacks it, its attributes
    prologue: Computed | None = None

    @property
    def x_blocked(self) -> bool:
        """Whether the image is stored in blocks of channels."""
        return self.x_layout is not None

    @property
    def out_blocked(self) -> bool:
        """Whether the result is."""
        return self.out_layout is not None

    @property
    def has_prologue(self) -> bool:
        """Whether the image is computed rather than read."""
        return self.prologue is not None


@dataclass(frozen=True)
class Mask:
    """One operand that shapes the scores of attention; `load` is over (batch..., query, key).

    kind "add" adds it. kind "keep" is boolean: where it does not hold, the score is `fill`; `negated` means
    where it does.
    """

    kind: str
    load: Scalar
    fill: float = 0.0
    negated: bool = False


@dataclass(frozen=True)
class AttentionNest:
    """softmax(score) v, where a score is the product of a query and a key after scale and masks.

    Axes are (batch..., row, column): `q` is a load over query and depth, `k` over key and depth, `v` over key
    and value depth; each may be cast to a wider dtype. `score` is over (batch..., query, key), with acc(0)
    the product. It is what scale, masks (in the order in which they apply) and window say, unless `plain` is
    False: then it is some other function of the product, and only `score` itself counts. Keys further back
    than `left` or further ahead than `right` of the query's number are hidden (None: no limit). Rows of which
    all keys are hidden give zeros if `masked`, else NaN. A `sink`, a load over the batch, is one more score,
    whose share of the softmax weighs nothing. Stores are over (batch..., query, value depth), with acc(0) the
    result.
    """

    batch: Shape
    queries: Dim
    keys: Dim
    depth: Dim
    value_depth: Dim
    q: Scalar
    k: Scalar
    v: Scalar
    score: Scalar
    plain: bool
    scale: float
    masks: tuple[Mask, ...]
    left: Dim | None  # key >= query - left
    right: Dim | None  # key <= query + right
    masked: bool
    accumulate: DType
    stores: tuple[Store, ...]
    sink: Scalar | None = None


@dataclass(frozen=True)
class TransformNest:
    """Fourier transforms of rows of n elements (or to them), without scaling.

    kind "complex" reads and gives both parts, "real" reads real rows and gives coefficients 0 .. n // 2,
    "to_real" the other way round. `forward` means exp(-2 pi i k t / n). Sources are over (rows..., element),
    stores over (rows..., result), with acc(0) and acc(1) the parts of the result.
    """

    kind: str
    n: int
    forward: bool
    dtype: DType
    rows: Shape
    sources: tuple[Scalar, ...]
    stores: tuple[Store, ...]

    @property
    def read(self) -> int:
        """Elements read per row."""
        return self.n // 2 + 1 if self.kind == "to_real" else self.n

    @property
    def written(self) -> int:
        """Results per row."""
        return self.n // 2 + 1 if self.kind == "real" else self.n


@dataclass(frozen=True, eq=False)
class Opaque:
    """One op that is a kernel of its own kind (scatter, sort, cumulate, template, host call)."""

    form: Form
    node: Node


Kernel = Nest | ContractNest | ConvNest | AttentionNest | TransformNest | Opaque


def as_sum(nest: ContractNest) -> Nest:
    """A contraction as a plain sum of products: right for every dtype and index."""
    wide = nest.form.accumulate
    body = call("mul", convert(nest.lhs, wide), convert(nest.rhs, wide))
    result = convert(Scalar("acc", (), wide, 0), nest.form.dtype)

    def finish(store: Store) -> Store:
        body = rebuild(store.body, lambda e, _: result if e.prim == "acc" else None)
        return Store(body, False, store.strides)

    return Nest(nest.space, nest.kept, (Stat("sum", body, wide),), tuple(finish(s) for s in nest.stores))
