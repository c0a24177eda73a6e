"""Fourier transforms with what is around them: elements are computed as they are read, results as they are
stored.

A transform reads every element of a row, so what it reads may be any expression over (rows, element); each of
its results may pass through further expressions on its way to memory, with acc(0) its real and acc(1) its
imaginary part (a real result is acc(0)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dim import known_le
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import Shape
from rlx.kernel.composer import Composer, strip_rows
from rlx.kernel.form import Conv, Form, Template, dense_strides
from rlx.kernel.legality import conflict, same_space
from rlx.kernel.lowering import lower_node
from rlx.kernel.nests import ComposeError, Kernel, Store, TransformNest
from rlx.kernel.order import stored_through
from rlx.kernel.scalar import Scalar, axes


def is_transform(form: Form | None) -> bool:
    """Whether a form is a Fourier transform of a known length."""
    return (
        isinstance(form, Template) and form.kind == "fft" and isinstance(dict(form.config)["shape"][-1], int)
    )


def holds_transform(body: Graph) -> bool:
    """Whether a body has a transform in it."""
    fourier = [n for n in body.nodes if n.op.family == "fourier"]
    if not fourier:
        return False
    live = body.live()
    return any(is_transform(lower_node(n)) for n in fourier if n.id in live)


class TransformComposer(Composer):
    """Composes a body with one transform, elementwise ops before it and after it."""

    def __init__(self, body: Graph) -> None:
        super().__init__(body)
        self.transform: tuple[dict[str, Any], Node] | None = None
        self.sources: tuple[Scalar, ...] = ()

    def _takes(self, form: Form) -> bool:
        return is_transform(form)

    def _root(self, node: Node, form: Form) -> None:
        if not isinstance(form, Template):
            kind = "conv" if isinstance(form, Conv) else "contract"
            raise ComposeError(conflict("transform", kind), node.where)
        if self.transform is not None or self.rows is not None:
            root = "reduce" if self.transform is None else "transform"
            raise ComposeError(conflict(root, "transform"), node.where)
        config = dict(form.config)
        self.transform = (config, node)
        self.sources = tuple(self.values[o.id] for o in node.operands)
        if form.outputs == 1:
            self.values[node.id] = Scalar("acc", axes(node.rank), config["dtype"], 0)

    def _part(self, node: Node) -> None:
        assert self.transform is not None
        self.values[node.id] = Scalar("acc", axes(node.rank), self.transform[0]["dtype"], node.attrs["index"])

    def _finish(self) -> Kernel:
        assert self.transform is not None
        config, node = self.transform
        if self.rows is not None:
            raise ComposeError(conflict("transform", "reduce"), node.where)
        *rows, n = config["shape"]
        last = n // 2 + 1 if config["kind"] == "real" else n
        found = [self._stored(o, (*rows, last)) for o in self.body.outputs.values()]
        space = found[0][0]
        if any(not same_space(s, space) for s, _ in found):
            raise ComposeError("results of one transform are stored for different rows", node.where)
        return TransformNest(
            config["kind"],
            n,
            config["sign"] < 0,
            config["dtype"],
            space[:-1],
            self.sources,
            tuple(store for _, store in found),
        )

    def _stored(self, node: Node, full: Shape) -> tuple[Shape, Store]:
        """Where an output lies: at its own point of the transform's results, or those in another order.

        It may
        leave out rows at the end, which are then not computed."""
        at = node
        while not self._at_own_point(at, full):
            if (
                at.op.role is not Role.COMPUTE
                or len(at.operands) != 1
                or at.operands[0].id not in self.values
            ):
                raise ComposeError(f"{node.op.name} reads results of a transform at other points", node.where)
            at = at.operands[0]
        strides = dense_strides(node.shape) if at is node else stored_through(node, at)
        if strides is None:
            raise ComposeError(f"{node.op.name} does not store all results of a transform", node.where)
        return at.shape, Store(strip_rows(self.values[at.id]), True, strides)

    def _at_own_point(self, node: Node, full: Shape) -> bool:
        if node.rank != len(full) or not same_space(node.shape[-1:], full[-1:]):
            return False
        if any(known_le(d, limit) is not True for d, limit in zip(node.shape, full, strict=True)):
            return False
        point, value = axes(node.rank), self.values[node.id]
        found = [e for e in value.walk() if e.prim == "acc"]
        return bool(found) and all(e.args == point for e in found)


def sources_of(nest: TransformNest) -> Sequence[Scalar]:
    """All expressions of a transform: what it reads and what it stores."""
    return (*nest.sources, *(s.body for s in nest.stores))
