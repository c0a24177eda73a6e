"""Work in slices: a body that treats rows alike runs on some rows after the other, in less memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.attr import Attr, AttrValue, dim, integer, ints, string
from rlx.ir.dim import Dim, substitute
from rlx.ir.graph import Graph, Node
from rlx.ir.op import BodyRunner, Op, Role, Sample, declare
from rlx.ir.resize import rebind
from rlx.ir.tree import Nest
from rlx.ir.types import TensorType, TupleType, Type
from rlx.kernel.form import Form, Loop
from rlx.kernel.rowwise import cut_axis
from rlx.ops.control.bodies import (
    as_tuple,
    batched,
    check_equal,
    is_float,
    output_types,
    pullback,
    sample_body,
    scatter_grads,
    splice,
    work,
)
from rlx.ops.rules import batch_size


@declare
class _slices(Op):
    """A body applied to all rows, in as many slices as the plan says.

    `symbol` is the body's name for the number of rows in a slice, `size` the number of all rows. The first
    `sliced` operands are cut, the others are read whole by every slice; results are joined. `axes` are those
    along which: of every value that is cut and every result the first that is not 1. The body must treat rows
    alike: how they are cut changes nothing.
    """

    name = "slices"
    bodies = 1
    attrs = {"symbol": Attr(string), "size": Attr(dim), "sliced": Attr(integer), "axes": Attr(ints)}

    def infer(
        self,
        *types: TensorType,
        symbol: str,
        size: Dim,
        sliced: int,
        axes: tuple[int, ...],
        bodies: Sequence[Graph],
    ) -> Type:
        whole = {symbol: size}
        wanted = [n.tensor.substitute(whole) for n in bodies[0].inputs]
        if len(types) != len(wanted):
            raise TypeMismatchError(f"slices: its body takes {len(wanted)} values, but is given {len(types)}")
        for i, (t, want) in enumerate(zip(types, wanted, strict=True)):
            check_equal(t, want, f"slices: operand {i} is {t}, but of all rows its body takes {want}")
        cut = [n.tensor for n in bodies[0].inputs[:sliced]] + output_types(bodies[0])
        found = tuple(cut_axis(t, symbol) for t in cut)
        for t, axis in zip(cut, found, strict=True):
            if axis is None:
                raise TypeMismatchError(f"slices: {t} has no axis of {symbol} rows in front to be cut along")
        if found != axes:
            raise TypeMismatchError(f"slices: axes are {axes}, but its body has rows along {found}")
        for n in bodies[0].inputs[sliced:]:
            if n.tensor.substitute({symbol: 0}) != n.tensor:
                raise TypeMismatchError(
                    f"slices: {n.type} depends on {symbol}, but every slice reads all of it"
                )
        return TupleType(tuple(t.substitute(whole) for t in output_types(bodies[0])))

    def ref(
        self, *arrays: np.ndarray, symbol: str, size: int, sliced: int, axes: tuple[int, ...], run: BodyRunner
    ) -> tuple[np.ndarray, ...]:
        step = run.planned(0, symbol) or max(size, 1)
        parts = []
        for start in range(0, max(size, 1), step):
            mine = []
            for a, axis in zip(arrays[:sliced], axes, strict=False):
                per = a.shape[axis] // max(size, 1)
                mine.append(a.take(range(start * per, min(start + step, size) * per), axis))
            parts.append(run(0, [*mine, *arrays[sliced:]]))
        columns = zip(zip(*parts, strict=True), axes[sliced:], strict=True)
        return tuple(np.concatenate(column, axis) for column, axis in columns)

    def vjp(
        self,
        g: Nest,
        y: Nest,
        *operands: Node,
        symbol: str,
        size: Dim,
        sliced: int,
        axes: tuple[int, ...],
        bodies: Sequence[Graph],
    ) -> list[Node | None]:
        incoming = as_tuple(g)
        seeded = [i for i, d in enumerate(incoming) if d is not None]
        wanted = [i for i, x in enumerate(operands) if is_float(x)]
        whole = pullback(rebind(bodies[0], {symbol: size}), wanted, seeded)
        grads = splice(whole, [*operands, *(incoming[i] for i in seeded)], operands[0].graph)
        return scatter_grads(len(operands), wanted, grads)

    def batch(
        self,
        flags: Sequence[bool],
        *operands: Node,
        symbol: str,
        size: Dim,
        sliced: int,
        axes: tuple[int, ...],
        bodies: Sequence[Graph],
    ) -> tuple[Node, ...]:
        whole = rebind(bodies[0], {symbol: size})
        made, _ = batched(whole, flags, batch_size(flags, operands))
        return tuple(splice(made, operands, operands[0].graph))

    def lower(self, *types: TensorType, bodies: Sequence[Graph], **attrs: AttrValue) -> Form:
        return Loop("slices", tuple(attrs.items()), attrs["sliced"], attrs["sliced"])

    def cost(
        self,
        *types: TensorType,
        symbol: str,
        size: Dim,
        sliced: int,
        axes: tuple[int, ...],
        bodies: Sequence[Graph],
    ) -> Dim:
        inside = [n.bodies[0] for n in bodies[0].nodes if n.op.role is Role.REGION]
        return substitute(sum(map(work, inside), work(bodies[0])), {symbol: size})

    def samples(self) -> list[Sample]:
        def attrs(size: Dim, *axes: int) -> dict[str, AttrValue]:
            return {"symbol": "rows", "size": size, "sliced": 1, "axes": axes}

        two = sample_body(["f64[rows,3]", "f64[3]"], lambda x, w: [x * w, x + w])
        wide = sample_body(["f32[2*rows,2]"], lambda x: [x * x])
        behind = sample_body(["f64[1,rows,2]"], lambda x: [x * x])
        return [
            Sample(("f64[1,4,2]",), attrs(4, 1, 1), bodies=(behind,)),
            Sample(("f64[5,3]", "f64[3]"), attrs(5, 0, 0, 0), bodies=(two,)),
            Sample(("f32[6,2]",), attrs(3, 0, 0), bodies=(wide,), grad=False),
        ]
