"""Loops whose number of steps the data decide: the MIR op `loop` (ONNX Loop), and `while_loop` on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import GradientError, OpAttributeError, TransformError, TypeMismatchError, current_where
from rlx.ir.attr import Attr, AttrValue, dim, integer, optional
from rlx.ir.body import Body, as_nodes, close, need_arguments, trace
from rlx.ir.build import graph_of
from rlx.ir.dim import Constraint, Dim, Expr, sym
from rlx.ir.dtype import BOOL, I64
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Arg, BodyRunner, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor
from rlx.ir.tree import Nest, flatten, unflatten
from rlx.ir.types import TensorType, Type
from rlx.kernel.form import Form, Loop
from rlx.ops.array.create import iota, zeros
from rlx.ops.array.shape import reshape, slice_axis
from rlx.ops.control.bodies import (
    add_op,
    as_tuple,
    batch_carries,
    check_carries,
    check_inputs,
    is_float,
    need_scalar,
    new_body,
    one_or_tuple,
    output_types,
    pair_of,
    pullback,
    ready_for_gradient,
    results_of,
    same_carry,
    sample_body,
    scatter_grads,
    splice,
    type_of,
    values_of,
    work,
)
from rlx.ops.control.cond import _cond
from rlx.ops.control.scan import _scan, swap_front
from rlx.ops.math.elementwise import less, logical_and, where
from rlx.ops.math.reduce import reduce_any, reduce_max
from rlx.ops.rules import batch_size, lift

ENDLESS = np.iinfo(np.int64).max  # trips of a loop that only its condition ends
ASSUMED_TRIPS = 128  # what the cost of a loop without a bound is computed for
STEP, FLAG = TensorType(I64, ()), TensorType(BOOL, ())


@declare
class _loop(Op):
    """Run a body until it says stop, at most `trips` times: operands trips, go, carries, then fixed values.

    The body takes carries, the number of the step and the fixed values; it gives carries, whether to go on,
    and values of which `rows` (a size, often one that only the run knows) are stacked along axis 0. Results:
    final carries, then stacked values. With `max_trips` no more steps than that run, and the loop has a
    gradient.
    """

    name = "loop"
    bodies = 1
    attrs = {
        "carries": Attr(integer),
        "rows": Attr(optional(dim), None),
        "max_trips": Attr(optional(integer), None),
    }

    def infer(
        self,
        trips: TensorType,
        go: TensorType,
        *types: TensorType,
        carries: int,
        rows: Dim | None,
        max_trips: int | None,
        bodies: Sequence[Graph],
    ) -> Type:
        (body,) = bodies
        need_scalar(self.name, "number of trips", trips, I64)
        need_scalar(self.name, "condition", go, BOOL)
        if not 0 <= carries <= len(types):
            raise TypeMismatchError(f"loop: {carries} carries, but {len(types)} operands to carry or read")
        if max_trips is not None and max_trips < 0:
            raise OpAttributeError(f"loop: max_trips is {max_trips}; it must be 0 or more")
        check_inputs(self.name, "body", body, [*types[:carries], STEP, *types[carries:]])
        out = output_types(body)
        check_carries(self.name, types[:carries], out)
        if len(out) == carries:
            raise TypeMismatchError("loop: its body must return a bool after its carries: whether to go on")
        need_scalar(self.name, "condition in the body", out[carries], BOOL)
        stacked = out[carries + 1 :]
        if rows is None and stacked:
            raise OpAttributeError(
                f"loop: its body stacks {len(stacked)} values; say with `rows` how many rows"
            )
        if not carries and not stacked:
            raise TypeMismatchError("loop: its body must return a result")
        count: Dim = 0 if rows is None else rows
        return one_or_tuple([*out[:carries], *(t.with_shape((count, *t.shape)) for t in stacked)])

    def ref(
        self,
        trips: np.ndarray,
        go: np.ndarray,
        *arrays: np.ndarray,
        carries: int,
        rows: int | None,
        max_trips: int | None,
        run: BodyRunner,
    ) -> Any:
        state, fixed = list(arrays[:carries]), arrays[carries:]
        most = int(trips) if max_trips is None else min(int(trips), max_trips)
        found: list[list[np.ndarray]] = []
        on, step = bool(go), 0
        while on and step < most:
            out = run(0, [*state, np.asarray(step, np.int64), *fixed])
            state, on = out[:carries], bool(out[carries])
            found.append(out[carries + 1 :])
            step += 1
        return results_of(state, found, lambda: run.empty(0)[carries + 1 :])

    def vjp(
        self, g: Nest, y: Nest, *operands: Node, bodies: Sequence[Graph], **attrs: AttrValue
    ) -> list[Node | None]:
        if attrs["max_trips"] is None:
            raise GradientError(
                "loop: without a bound on its steps there is no reverse-mode gradient; "
                "give max_trips to while_loop or loop, or use scan"
            )
        incoming = as_tuple(g)
        seeded = [i for i, d in enumerate(incoming) if d is not None]
        wanted = [i for i, x in enumerate(operands) if is_float(x)]
        whole = pullback(_as_scan(operands, bodies[0], **attrs), wanted, seeded)
        grads = splice(whole, [*operands, *(incoming[i] for i in seeded)], operands[0].graph)
        return scatter_grads(len(operands), wanted, grads)

    def saving(self, *operands: Node, bodies: Sequence[Graph], **attrs: AttrValue) -> Node | None:
        """A loop with a bound as a scan: its own gradient rule then saves what it needs."""
        if attrs["max_trips"] is None or not any(is_float(x) for x in operands):
            return None
        if isinstance(attrs["rows"], Expr):  # only the loop itself knows how many rows there are
            return None
        wanted = [i for i, x in enumerate(operands) if is_float(x)]
        whole = ready_for_gradient(_as_scan(operands, bodies[0], **attrs), wanted)
        graph = operands[0].graph
        made = splice(whole, operands, graph)
        return made[0] if len(made) == 1 else graph.add(get_op("tuple"), made)

    def batch(
        self,
        flags: Sequence[bool],
        trips: Node,
        go: Node,
        *operands: Node,
        carries: int,
        rows: Dim | None,
        max_trips: int | None,
        bodies: Sequence[Graph],
    ) -> Any:
        size = batch_size(flags, (trips, go, *operands))
        (body,) = bodies
        inner = [*flags[2 : 2 + carries], False, *flags[2 + carries :]]
        made, carried = batch_carries(body, inner, size, carries, free=(carries,))
        ragged = flags[0] or flags[1] or list(made.outputs.values())[carries].rank > 0
        if ragged:
            if rows is not None:
                raise TransformError(
                    "vmap: a loop that stacks values would make another number of steps for each element of "
                    "the batch; use scan, or stack nothing"
                )
            return self.batch_ragged(flags, trips, go, operands, carries, max_trips, body, size)
        given = [
            lift(x, size) if c and not f else x for x, c, f in zip(operands, carried, flags[2:], strict=False)
        ]
        attrs = {"carries": carries, "rows": rows, "max_trips": max_trips}
        out = as_tuple(add_op(self, [trips, go, *given, *operands[carries:]], attrs, [made]))
        final = [x if f else lift(x, size) for x, f in zip(out[:carries], carried, strict=True)]
        results = (*final, *map(swap_front, out[carries:]))
        return results if len(results) > 1 else results[0]

    def batch_ragged(
        self,
        flags: Sequence[bool],
        trips: Node,
        go: Node,
        operands: Sequence[Node],
        carries: int,
        max_trips: int | None,
        body: Graph,
        size: Dim,
    ) -> Any:
        """Steps as long as any element goes on; those that have stopped keep their values."""
        inner = [True] * carries + [False, *flags[2 + carries :]]
        made, _ = batch_carries(body, inner, size, carries)
        each = trips if flags[0] else lift(trips, size)
        alive = logical_and(go if flags[1] else lift(go, size), less(0, each))
        start = [lift(x, size) if not f else x for x, f in zip(operands[:carries], flags[2:], strict=False)]
        fixed = [each, *operands[carries:]]
        step = new_body(body.name, [*(x.tensor for x in (alive, *start)), STEP, *(x.tensor for x in fixed)])
        with step.building():
            now, *old = step.inputs[: 1 + carries]
            number, limit, *rest = step.inputs[1 + carries :]
            new = splice(made, [*old, number, *rest], step)
            on = logical_and(logical_and(now, new[carries]), less(number + 1, limit))
            kept = [
                where(reshape(now, (size, *(1,) * (a.rank - 1))), a, b)
                for a, b in zip(new[:carries], old, strict=True)
            ]
            step.set_outputs([on, *kept, reduce_any(on, axes=(0,))])
        attrs = {"carries": 1 + carries, "rows": None, "max_trips": max_trips}
        most = reduce_max(trips, axes=(0,)) if flags[0] else trips
        out = add_op(self, [most, reduce_any(alive, axes=(0,)), alive, *start, *fixed], attrs, [step])
        return tuple(out[1:]) if carries > 1 else out[1]

    def lower(self, *types: TensorType, bodies: Sequence[Graph], **attrs: AttrValue) -> Form:
        carries = attrs["carries"]
        return Loop("loop", tuple(attrs.items()), 2 + carries, carries + 1, carries)

    def cost(
        self,
        *types: TensorType,
        carries: int,
        rows: Dim | None,
        max_trips: int | None,
        bodies: Sequence[Graph],
    ) -> Dim:
        trips = rows if rows is not None else ASSUMED_TRIPS if max_trips is None else max_trips
        return trips * work(bodies[0])

    def samples(self) -> list[Sample]:
        true, one = np.array(True), {"carries": 1}

        def number(n: int) -> np.ndarray:
            return np.array(n, np.int64)

        halve = sample_body(["f64[]", "i64[]"], lambda c, i: [c * 0.5, c > 0.3])
        power = sample_body(
            ["f64[k]", "i64[]", "f64[k]"], lambda c, i, k: [c * k + i.astype("f64"), i < 100, c, c * k]
        )
        grow = sample_body(["i32[3]", "i64[]"], lambda c, i: [c + c, i < 7])
        two = (Arg("f64[k]"), Arg("f64[k]"))
        return [
            Sample((number(50), true, Arg("f64[]", 1.0, 2.0)), {**one, "max_trips": 6}, bodies=(halve,)),
            Sample((number(50), true, Arg("f64[]", 1.0, 2.0)), one, bodies=(halve,), grad=False),
            Sample((number(3), true, *two), {**one, "rows": 3, "max_trips": 4}, bodies=(power,)),
            Sample((number(3), true, *two), {**one, "rows": "n"}, bodies=(power,), grad=False),
            Sample((number(0), true, *two), {**one, "rows": 0}, bodies=(power,), grad=False),
            Sample((number(5), true, Arg("i32[3]")), one, bodies=(grow,), grad=False),
            Sample((number(5), np.array(False), Arg("i32[3]")), one, bodies=(grow,), grad=False),
        ]


def _as_scan(
    operands: Sequence[Node], body: Graph, carries: int, rows: Dim | None, max_trips: int | None
) -> Graph:
    """A loop of at most max_trips steps as a body that scans over all of them; later steps do nothing."""
    assert max_trips is not None
    made = new_body("loop", [x.tensor for x in operands])
    with made.building():
        trips, go, *rest = made.inputs
        start, fixed = rest[:carries], rest[carries:]
        types = [FLAG, *(x.tensor for x in start), STEP, *(x.tensor for x in (trips, *fixed))]
        step = new_body(body.name, types)
        with step.building():
            on, *old = step.inputs[: 1 + carries]
            number, limit, *kept = step.inputs[1 + carries :]
            now = logical_and(on, less(number, limit))
            new = add_op(_cond, [now, *old, number, *kept], {}, [body, _idle(body, carries)])
            step.set_outputs([logical_and(now, new[carries]), *new[:carries], *new[carries + 1 :]])
        attrs = {"carries": 1 + carries, "scanned": 1, "length": max_trips}
        out = add_op(_scan, [go, *start, iota(max_trips), trips, *fixed], attrs, [step])
        stacked = [slice_axis(x, 0, 0, 0 if rows is None else rows) for x in out[1 + carries :]]
        made.set_outputs([*out[1 : 1 + carries], *stacked])
    return made


def _idle(body: Graph, carries: int) -> Graph:
    """A step that leaves carries as they are and stacks zeros."""
    made = new_body("idle", [n.tensor for n in body.inputs])
    with made.building():
        blank = [zeros(t.shape, t.dtype) for t in output_types(body)[carries + 1 :]]
        made.set_outputs([*made.inputs[:carries], made.constant(False), *blank])
    return made


# -- tracing Python functions


def while_loop(
    cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Nest, max_trips: int | None = None
) -> Nest:
    """carry = body(carry) as long as cond(carry) holds; returns the last carry, a nested container like init.

    `max_trips` bounds the number of steps; a loop with such a bound has a reverse-mode gradient.

    >>> while_loop(lambda x: x < 100, lambda x: x * 3, np.array(5))
    array(135)
    """
    for function in (cond, body):
        need_arguments("while_loop", function, ["carry"])
    leaves, tree = values_of(init)
    start = unflatten(tree, leaves)

    def step(i: Tensor, carry: Nest) -> Nest:
        new = body(carry)
        return cond(new), new, None

    carry, _ = loop(step, start, go=cond(start), max_trips=max_trips)
    return carry


def loop(
    body: Callable[[Any, Any], tuple[Nest, Nest, Nest]],
    init: Nest,
    trips: Operand | None = None,
    go: Operand = True,
    max_trips: int | None = None,
    rows: Dim | None = None,
) -> tuple[Nest, Nest]:
    """go, carry, y = body(step, carry) while go holds, at most `trips` times (None: no bound): ONNX's Loop.

    Returns the last carry and all y stacked along axis 0. Carry and y may be nested containers; y may be
    None. How many rows are stacked is a new symbol unless `rows` says it. A number of trips that is known
    beforehand (an int or dim_value, with a body that returns True) makes this a scan. `max_trips` bounds the
    steps of other loops, which gives them a reverse-mode gradient; an int as `trips` is such a bound.

    >>> loop(lambda i, c: (c < 10, c + i, c), np.array(1), trips=100)
    (array(16), array([ 1,  1,  2,  4,  7, 11]))
    """
    carries, tree = values_of(init)
    types = [type_of(x) for x in carries]
    graph = graph_of([x for x in (trips, go, *carries) if x is not None])
    need_arguments("loop", body, ["step", "carry"])
    traced, out = trace("body", lambda *xs: body(xs[-1], unflatten(tree, xs[:-1])), [*types, STEP], graph)
    on, carry, y = pair_of("loop", out, "go, carry, y", 3)
    ys, y_tree = flatten(y)
    what = "the function of loop"
    handed = as_nodes(traced, same_carry("loop", carry, tree), types, what)
    stacked = as_nodes(traced, ys, [None] * len(ys), what)
    known = _known_trips(trips) if go is True and on is True else None
    if known is not None:
        traced.set_outputs([*handed, *stacked])
        bodies, outer = close([traced])
        attrs = {"carries": len(carries), "scanned": 1, "length": known}
        made = as_tuple(add_op(_scan, [*carries, _steps(known, graph), *outer], attrs, bodies))
        return unflatten(tree, made[: len(carries)]), unflatten(y_tree, made[len(carries) :])
    traced.set_outputs([*handed, *as_nodes(traced, [on], [FLAG], what), *stacked])
    bodies, outer = close([traced])
    if isinstance(trips, (int, np.integer)):
        max_trips = int(trips) if max_trips is None else min(int(trips), max_trips)
    if stacked:
        rows = _new_symbol(traced, max_trips, _known_trips(trips)) if rows is None else rows
    most = trips if isinstance(trips, Node) else np.asarray(ENDLESS if trips is None else trips, np.int64)
    begin = go if isinstance(go, Node) else np.asarray(go, bool)
    named: dict[str, AttrValue] = {
        "carries": len(carries),
        "rows": rows if stacked else None,
        "max_trips": max_trips,
    }
    made = as_tuple(add_op(_loop, [most, begin, *carries, *outer], named, bodies))
    return unflatten(tree, made[: len(carries)]), unflatten(y_tree, made[len(carries) :])


def _known_trips(trips: Operand | None) -> Dim | None:
    """A number of trips that does not depend on data."""
    if isinstance(trips, (int, np.integer)):
        return int(trips)
    if isinstance(trips, Node) and trips.op.name == "dim_value":
        size: Dim = trips.attrs["dim"]
        return size
    return None


def _steps(count: Dim, graph: Graph | None) -> Tensor:
    """0, 1, 2, ... as an operand."""
    if graph is None:
        return iota(count)
    with graph.building():
        return iota(count)


def _new_symbol(body: Body, most: int | None, trips: Dim | None) -> Dim:
    """A size that only the run knows, under a name that no graph around uses; at most `trips`."""
    used: set[str] = set()
    here: Graph | None = body
    while here is not None:
        used.update(here.symbols())
        here = here.parent if isinstance(here, Body) else None
    number = 0
    while (name := f"trips{number}") in used:
        number += 1
    rows = sym(name, 0, most)
    if isinstance(trips, Expr) and body.parent is not None:
        body.parent.assume(Constraint("min", trips, rows, current_where()))
    return rows


__all__ = ["loop", "while_loop"]
