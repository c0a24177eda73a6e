"""Loops of known length: `scan` runs a body along an axis, handing values from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, boolean, dim, integer
from rlx.ir.body import as_nodes, close, need_arguments, trace
from rlx.ir.build import graph_of
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph, Node
from rlx.ir.node import is_among
from rlx.ir.op import Arg, BodyRunner, Op, Sample, declare
from rlx.ir.operand import Tensor
from rlx.ir.tree import Nest, Tree, flatten, unflatten
from rlx.ir.types import TensorType, Type
from rlx.kernel.form import Form, Loop
from rlx.ops.array.create import zeros_like
from rlx.ops.array.shape import concat, reshape, transpose
from rlx.ops.control.bodies import (
    add_op,
    as_tuple,
    as_value,
    batch_carries,
    check_carries,
    check_inputs,
    is_float,
    new_body,
    one_or_tuple,
    output_types,
    pair_of,
    pullback,
    results_of,
    same_carry,
    sample_body,
    scatter_grads,
    splice,
    type_of,
    values_of,
    work,
)
from rlx.ops.rules import batch_size, lift, op_call, shift


@declare
class _scan(Op):
    """Run a body along axis 0 of some operands, handing values from step to step.

    Operands: `carries` initial values, `scanned` tensors of `length` rows, then values that every step reads.
    The body takes carries, one row of each scanned tensor and fixed values; it gives new carries and more.
    Results: final carries, then the further values of all steps stacked along axis 0. `reverse` goes from the
    last row up.
    """

    name = "scan"
    bodies = 1
    attrs = {
        "carries": Attr(integer),
        "scanned": Attr(integer),
        "length": Attr(dim),
        "reverse": Attr(boolean, False),
    }

    def infer(
        self,
        *types: TensorType,
        carries: int,
        scanned: int,
        length: Dim,
        reverse: bool,
        bodies: Sequence[Graph],
    ) -> Type:
        (body,) = bodies
        if carries < 0 or scanned < 0 or carries + scanned > len(types):
            raise TypeMismatchError(
                f"scan: {carries} carries and {scanned} scanned operands, but {len(types)} operands in all"
            )
        rows = []
        for i, t in enumerate(types[carries : carries + scanned]):
            if t.rank == 0:
                raise ShapeError(f"scan: scanned operand {i} is {t}; it needs an axis to scan along")
            require_equal(
                t.shape[0], length, f"scan: scanned operand {i} is {t}, but there are {length} steps"
            )
            rows.append(t.with_shape(t.shape[1:]))
        check_inputs(self.name, "body", body, [*types[:carries], *rows, *types[carries + scanned :]])
        out = output_types(body)
        check_carries(self.name, types[:carries], out)
        return one_or_tuple([*out[:carries], *(t.with_shape((length, *t.shape)) for t in out[carries:])])

    def ref(
        self, *arrays: np.ndarray, carries: int, scanned: int, length: int, reverse: bool, run: BodyRunner
    ) -> Any:
        state, xs = list(arrays[:carries]), arrays[carries : carries + scanned]
        fixed = arrays[carries + scanned :]
        rows: list[list[np.ndarray]] = []
        for t in reversed(range(length)) if reverse else range(length):
            out = run(0, [*state, *(x[t] for x in xs), *fixed])
            state, row = out[:carries], out[carries:]
            rows.append(row)
        return results_of(state, rows[::-1] if reverse else rows, lambda: run.empty(0)[carries:])

    def vjp(
        self,
        g: Nest,
        y: Nest,
        *operands: Node,
        carries: int,
        scanned: int,
        length: Dim,
        reverse: bool,
        bodies: Sequence[Graph],
    ) -> list[Node | None]:
        """One scan the other way: it carries the gradients of carries and sums those of fixed values.

        Where a step would add a product to such a sum, its factors are stacked instead and multiplied once
        after the scan: one large contraction over all steps.
        """
        (body,) = bodies
        more = {"carries": carries, "scanned": scanned, "length": length, "reverse": reverse}
        incoming, results = as_tuple(g), as_tuple(y)
        wanted = [i for i, n in enumerate(body.inputs) if is_float(n)]
        if not wanted:
            return [None] * len(operands)
        if _unsaved(body, carries):
            body = _with_carries(body, carries)
            results = as_tuple(add_op(self, operands, more, [body]))
        handed = [i for i in wanted if i < carries]
        fixed = [i for i in wanted if i >= carries + scanned]
        rows = [j for j in range(carries, len(incoming)) if incoming[j] is not None]
        inner = pullback(body, wanted, [*handed, *rows])
        slopes = dict(zip(wanted, inner.outputs.values(), strict=True))
        invariant = range(carries + scanned, len(body.inputs))
        varying = _depending_on(inner, [n for i, n in enumerate(inner.inputs) if i not in invariant])
        factors = {i: f for i in fixed if (f := _factors(slopes[i], varying))}
        moving = [i for i in wanted if carries <= i < carries + scanned]
        added = [i for i in fixed if i not in factors]
        back = [
            *(zeros_like(operands[i]) if incoming[i] is None else incoming[i] for i in handed),
            *(zeros_like(operands[i]) for i in added),
        ]
        along = [
            *(results[j] for j in _saved(body, carries)),
            *operands[carries : carries + scanned],
            *(incoming[j] for j in rows),
        ]
        known = [*inner.inputs[: carries + scanned], *inner.inputs[len(body.inputs) + len(handed) :]]
        known += [slopes[i] for i in moving]  # rows of these are stacked anyway
        extra = list(dict.fromkeys(n for f in factors.values() for n in f if not is_among(n, known)))
        inner.set_outputs([*slopes.values(), *extra])
        rest = operands[carries + scanned :]
        rows_of = [x.tensor.with_shape(x.shape[1:]) for x in along]
        step = new_body(inner.name, [*(x.tensor for x in back), *rows_of, *(x.tensor for x in rest)])
        with step.building():
            gs, sums, values, row_gs, kept = _split(
                step.inputs, len(handed), len(added), carries + scanned, len(rows), len(rest)
            )
            out = splice(inner, [*values, *kept, *gs, *row_gs], step)
            found = dict(zip(wanted, out, strict=False))
            total = [s + found[i] for s, i in zip(sums, added, strict=True)]
            further = [*(found[i] for i in moving), *out[len(wanted) :]]
            step.set_outputs([*(found[i] for i in handed), *total, *further])
        turned = {"carries": len(back), "scanned": len(along), "length": length, "reverse": not reverse}
        made = as_tuple(add_op(self, [*back, *along, *rest], turned, [step])) if step.outputs else ()
        direct = [*handed, *added, *moving]
        stacks = [*along, *made[len(back) :]]
        stack_of = dict(zip([*known, *extra], stacks, strict=True))
        products = [_sum_over_steps(slopes[i], stack_of) for i in factors]
        return scatter_grads(len(operands), [*direct, *factors], [*made[: len(direct)], *products])

    def saving(self, *operands: Node, carries: int, bodies: Sequence[Graph], **more: object) -> Node | None:
        (body,) = bodies
        if not _unsaved(body, carries) or not any(is_float(n) for n in body.inputs):
            return None
        made = add_op(self, operands, {"carries": carries, **more}, [_with_carries(body, carries)])
        first: Node = made[0]
        return first if len(body.outputs) == 1 else first.operands[0]

    def batch(
        self,
        flags: Sequence[bool],
        *operands: Node,
        carries: int,
        scanned: int,
        length: Dim,
        reverse: bool,
        bodies: Sequence[Graph],
    ) -> Node | tuple[Node, ...]:
        size = batch_size(flags, operands)
        made, carried = batch_carries(bodies[0], flags, size, carries)
        given = list(operands)
        for i, x in enumerate(operands):
            if i < carries:
                given[i] = lift(x, size) if carried[i] and not flags[i] else x
            elif i < carries + scanned and flags[i]:
                given[i] = swap_front(x)
        more = {"carries": carries, "scanned": scanned, "length": length, "reverse": reverse}
        out = as_tuple(add_op(self, given, more, [made]))
        final = [x if f else lift(x, size) for x, f in zip(out[:carries], carried, strict=True)]
        results = (*final, *map(swap_front, out[carries:]))
        return results if len(results) > 1 else results[0]

    def lower(self, *types: TensorType, bodies: Sequence[Graph], **attrs: AttrValue) -> Form:
        moving = attrs["carries"] + attrs["scanned"]
        return Loop("scan", tuple(attrs.items()), moving, moving, attrs["carries"])

    def cost(self, *types: TensorType, length: Dim, bodies: Sequence[Graph], **attrs: object) -> Dim:
        return length * work(bodies[0])

    def samples(self) -> list[Sample]:
        affine = sample_body(["f64[3]", "f64[3]", "f64[3]"], lambda c, x, k: [c * k + x, c * c])
        total = sample_body(["f32[]", "f32[]"], lambda c, x: [c + x])
        rows = sample_body(["f64[2]", "f64[]"], lambda x, k: [x * k, x + k])
        steps = sample_body(["i64[]", "f64[2]"], lambda i, a: [i + 1, a * 2.0 + i.astype("f64")])
        two = sample_body(["f64[2]", "f64[2]", "f64[2,2]"], lambda a, b, w: [b @ w, a, a * b])
        symbolic = sample_body(["f32[m]", "f32[m]"], lambda c, x: [c + x, c])
        args = (Arg("f64[3]"), Arg("f64[4,3]"), Arg("f64[3]"))
        named = {"carries": 1, "scanned": 1}
        return [
            Sample(args, {**named, "length": 4}, bodies=(affine,)),
            Sample(args, {**named, "length": 4, "reverse": True}, bodies=(affine,)),
            Sample((Arg("f32[]"), Arg("f32[17]")), {**named, "length": 17}, bodies=(total,), grad=False),
            Sample(
                (Arg("f64[5,2]"), Arg("f64[]")), {"carries": 0, "scanned": 1, "length": 5}, bodies=(rows,)
            ),
            Sample((np.array(1), Arg("f64[2]")), {"carries": 2, "scanned": 0, "length": 3}, bodies=(steps,)),
            Sample(
                (Arg("f64[2]"), Arg("f64[2]"), Arg("f64[2,2]")),
                {"carries": 2, "scanned": 0, "length": 3},
                bodies=(two,),
            ),
            Sample((Arg("f64[3]"), Arg("f64[0,3]"), Arg("f64[3]")), {**named, "length": 0}, bodies=(affine,)),
            Sample((Arg("f64[3]"), Arg("f64[1,3]"), Arg("f64[3]")), {**named, "length": 1}, bodies=(affine,)),
            Sample(
                (Arg("f32[m]"), Arg("f32[n,m]")), {**named, "length": "n"}, bodies=(symbolic,), grad=False
            ),
        ]


def swap_front(x: Node) -> Node:
    """The first two axes exchanged."""
    made: Node = transpose(x, (1, 0, *range(2, x.rank)))
    return made


LINEAR = ("transpose", "reshape", "pad", "neg", "cast")  # a sum may be taken before them as well as after


def _depending_on(graph: Graph, sources: Sequence[Node]) -> set[Node]:
    """Nodes that some of the sources reach."""
    reached = set(sources)
    for node in graph.nodes:
        if any(o in reached for o in node.operands):
            reached.add(node)
    return reached


def _factors(value: Node, varying: set[Node]) -> list[Node]:
    """Factors of a value that is a sum of products of values which differ from step to step; else nothing."""
    if value.op.name in LINEAR:
        return _factors(value.operands[0], varying)
    if value.op.name == "add" and all(o.shape == value.shape for o in value.operands):
        parts = [_factors(o, varying) for o in value.operands]
        return [n for part in parts for n in part] if all(parts) else []
    if value.op.name == "dot_general" and all(o in varying for o in value.operands):
        return list(value.operands)
    return []


def _sum_over_steps(value: Node, rows: Mapping[Node, Node]) -> Node:
    """The sum of such a value over all steps; `rows` are its factors of all steps, stacked."""
    made: Node
    attrs = dict(value.attrs)
    if value.op.name == "dot_general":
        for side in ("lhs", "rhs"):
            attrs[f"{side}_contract"] = (0, *shift(attrs[f"{side}_contract"]))
            attrs[f"{side}_batch"] = shift(attrs[f"{side}_batch"])
        made = op_call("dot_general", *(rows[o] for o in value.operands), **attrs)
        return made
    made = op_call(value.op.name, *(_sum_over_steps(o, rows) for o in value.operands), **attrs)
    return made


def _split(values: Sequence[Node], *counts: int) -> list[list[Node]]:
    rest = iter(values)
    return [[next(rest) for _ in range(n)] for n in counts]


def _saved(body: Graph, carries: int) -> list[int]:
    """For each carry, the stacked result that holds it as it entered each step, -1 if there is none."""
    out = list(body.outputs.values())
    return [
        next((j for j in range(carries, len(out)) if out[j] is body.inputs[i]), -1) for i in range(carries)
    ]


def _unsaved(body: Graph, carries: int) -> bool:
    return -1 in _saved(body, carries)


def _with_carries(body: Graph, carries: int) -> Graph:
    """A body that also gives its carries as they enter, so that the scan stacks them."""
    made = new_body(body.name, [n.tensor for n in body.inputs])
    with made.building():
        results = splice(body, made.inputs, made)
        missing = [made.inputs[i] for i, j in enumerate(_saved(body, carries)) if j < 0]
        made.set_outputs([*results, *missing])
    return made


def scan(
    f: Callable[[Any, Any], tuple[Nest, Nest]],
    init: Nest,
    xs: Nest = None,
    length: Dim | None = None,
    reverse: bool = False,
    unroll: bool = False,
) -> tuple[Nest, Nest]:
    """carry, y = f(carry, x) for each row x of xs; returns the last carry and all y, stacked along axis 0.

    Carries, xs and ys may be nested tuples, lists and dicts; xs may be None if `length` is given. `f` is
    traced once and may use nodes from around it. With `unroll`, its operations are repeated instead (for few
    short steps).

    >>> scan(lambda total, x: (total + x, total), 0.0, np.array([1, 2, 3], np.float32))
    (array(6., dtype=float32), array([0., 1., 3.], dtype=float32))
    """
    carries, tree = values_of(init)
    rows, row_tree = values_of(xs)
    for i, x in enumerate(rows):
        if type_of(x).rank == 0:
            raise ShapeError(f"scan: scanned operand {i} is {type_of(x)}; it needs an axis to scan along")
    if length is None and not rows:
        raise TypeMismatchError("scan: without xs the number of steps is not known; give length")
    steps: Dim = type_of(rows[0]).shape[0] if length is None else dim(length)
    need_arguments("scan", f, ["carry", "x"])
    if unroll and isinstance(steps, int) and steps > 0:
        return _unrolled(f, init, rows, row_tree, steps, reverse)
    types = [type_of(x) for x in carries]
    inner = [t.with_shape(t.shape[1:]) for t in map(type_of, rows)]

    def call(*values: Node) -> Any:
        return f(unflatten(tree, values[: len(carries)]), unflatten(row_tree, values[len(carries) :]))

    body, out = trace("body", call, [*types, *inner], graph_of([*carries, *rows]))
    carry, y = pair_of("scan", out, "carry, y")
    ys, y_tree = flatten(y)
    handed = as_nodes(body, same_carry("scan", carry, tree), types, "the function of scan")
    body.set_outputs([*handed, *as_nodes(body, ys, [None] * len(ys), "the function of scan")])
    bodies, outer = close([body])
    attrs = {"carries": len(carries), "scanned": len(rows), "length": steps, "reverse": reverse}
    made = as_tuple(add_op(_scan, [*carries, *rows, *outer], attrs, bodies))
    return unflatten(tree, made[: len(carries)]), unflatten(y_tree, made[len(carries) :])


def _unrolled(
    f: Callable[..., Nest], carry: Nest, rows: list[Tensor], row_tree: Tree, steps: int, reverse: bool
) -> tuple[Nest, Nest]:
    ys = []
    for t in reversed(range(steps)) if reverse else range(steps):
        carry, y = pair_of("scan", f(carry, unflatten(row_tree, [x[t] for x in rows])), "carry, y")
        ys.append(y)
    if reverse:
        ys.reverse()
    columns = zip(*(flatten(y)[0] for y in ys), strict=True)
    stacked = [concat([reshape(v, (1, *v.shape)) for v in map(as_value, column)]) for column in columns]
    return carry, unflatten(flatten(ys[0])[1], stacked)


__all__ = ["scan"]
