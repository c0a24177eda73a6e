"""Control flow that chooses: `cond` runs one of two bodies. Loops are in `scan` and `loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.body import as_nodes, close, need_arguments, trace
from rlx.ir.build import graph_of
from rlx.ir.dim import Dim, dim_max
from rlx.ir.dtype import BOOL
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Arg, BodyRunner, Op, Sample, declare
from rlx.ir.operand import Arrays, Nodes, Operand, Tensor
from rlx.ir.tree import Nest, flatten, unflatten
from rlx.ir.types import TensorType, Type
from rlx.kernel.form import Form, Loop
from rlx.ops.array.create import full
from rlx.ops.array.shape import reshape
from rlx.ops.control.bodies import (
    add_op,
    as_tuple,
    as_value,
    batched,
    check_equal,
    check_inputs,
    is_float,
    known_type,
    need_scalar,
    one_or_tuple,
    output_types,
    pullback,
    sample_body,
    scatter_grads,
    splice,
    type_of,
    values_of,
    work,
)
from rlx.ops.math.elementwise import where
from rlx.ops.rules import batch_size

Traced = Callable[..., Nest]
"""A function of the user that is called on nodes."""


@declare
class _cond(Op):
    """The results of the first body where the condition holds, else of the second; only that one runs."""

    name = "cond"
    bodies = 2

    def infer(self, condition: TensorType, *args: TensorType, bodies: Sequence[Graph]) -> Type:
        need_scalar(self.name, "condition", condition, BOOL)
        for what, body in zip(("then body", "else body"), bodies, strict=True):
            check_inputs(self.name, what, body, args)
        yes, no = map(output_types, bodies)
        if len(yes) != len(no) or not yes:
            raise TypeMismatchError(
                f"cond: its bodies give {len(yes)} and {len(no)} results; give as many in both, at least one"
            )
        for i, (a, b) in enumerate(zip(yes, no, strict=True)):
            check_equal(a, b, f"cond: result {i} is {a} in one body and {b} in the other; make them the same")
        return one_or_tuple(yes)

    def ref(self, condition: np.ndarray, *args: np.ndarray, run: BodyRunner) -> Arrays:
        out = run(0 if condition else 1, args)
        return out[0] if len(out) == 1 else tuple(out)

    def vjp(
        self, g: Nest, y: Nest, condition: Node, *args: Node, bodies: Sequence[Graph]
    ) -> list[Node | None]:
        incoming = as_tuple(g)
        seeded = [i for i, d in enumerate(incoming) if d is not None]
        wanted = [i for i, a in enumerate(args) if is_float(a)]
        if not wanted:
            return [None] * (1 + len(args))
        operands = [condition, *args, *(incoming[i] for i in seeded)]
        made = add_op(self, operands, {}, [pullback(b, wanted, seeded) for b in bodies])
        return [None, *scatter_grads(len(args), wanted, as_tuple(made))]

    def batch(self, flags: Sequence[bool], condition: Node, *args: Node, bodies: Sequence[Graph]) -> Nodes:
        size = batch_size(flags, (condition, *args))
        made = [batched(b, flags[1:], size)[0] for b in bodies]
        if not flags[0]:
            whole: Nodes = add_op(self, [condition, *args], {}, made)
            return whole
        yes, no = (splice(b, args, condition.graph) for b in made)  # some want one and some the other
        at = [reshape(condition, (size, *(1,) * (x.rank - 1))) for x in yes]
        chosen = tuple(where(c, a, b) for c, a, b in zip(at, yes, no, strict=True))
        return chosen if len(chosen) > 1 else chosen[0]

    def lower(self, condition: TensorType, *args: TensorType, bodies: Sequence[Graph]) -> Form:
        return Loop("cond", fixed_operands=1)

    def cost(self, condition: TensorType, *args: TensorType, bodies: Sequence[Graph]) -> Dim:
        return dim_max(*map(work, bodies))

    def samples(self) -> list[Sample]:
        def two(types: Sequence[str], yes: Traced, no: Traced) -> tuple[Graph, Graph]:
            return sample_body(types, yes, "then"), sample_body(types, no, "else")

        vectors = ["f64[3]", "f64[3]"]
        smooth = two(vectors, lambda a, b: [a * b, a * 2.0], lambda a, b: [a - b * b, b])
        one = two(["f32[n,2]"], lambda a: [a + 1.0], lambda a: [a * a])
        whole = two(["i32[4]", "f64[]"], lambda i, s: [i + 1, s * s], lambda i, s: [i, s])
        empty = two(["f32[0]"], lambda a: [a + 1.0], lambda a: [a])
        nothing = two([], lambda: [full((2,), 1.0)], lambda: [full((2,), 2.0)])
        true, false = np.array(True), np.array(False)
        return [
            Sample((true, Arg("f64[3]"), Arg("f64[3]")), bodies=smooth),
            Sample((false, Arg("f64[3]"), Arg("f64[3]")), bodies=smooth),
            Sample((Arg("bool[]"), Arg("f32[n,2]")), bodies=one, grad=False),
            Sample((true, Arg("i32[4]"), Arg("f64[]")), bodies=whole),
            Sample((false, Arg("f32[0]")), bodies=empty, grad=False),
            Sample((true,), bodies=nothing, grad=False),
        ]


def cond(
    condition: Operand,
    then: Traced,
    otherwise: Traced,
    *operands: Operand,
) -> Tensor:
    """then(*operands) where the condition (one bool) holds, else otherwise(*operands); only one of them runs.

    Both return the same nested tuples, lists and dicts of values of the same types.

    >>> cond(np.array(True), lambda x: x + 1.0, lambda x: x * 2.0, np.array([3.0]))
    array([4.])
    """
    leaves, tree = values_of(operands)
    graph = graph_of([condition, *leaves])
    traced = []
    for name, function in (("then", then), ("else", otherwise)):
        need_arguments("cond", function, [f"operand{i}" for i in range(len(operands))])
        body, out = trace(
            name, lambda *xs, f=function: f(*unflatten(tree, xs)), [type_of(x) for x in leaves], graph
        )
        traced.append((body, out))
    (yes, left), (no, right) = traced
    (a, shape), (b, other) = flatten(left), flatten(right)
    if shape != other:
        raise TypeMismatchError(f"cond: its functions return {shape} and {other}; make them the same")
    yes.set_outputs(as_nodes(yes, a, [known_type(x) for x in b], "the function of cond"))
    no.set_outputs(as_nodes(no, b, [known_type(x) for x in a], "the function of cond"))
    bodies, outer = close([yes, no])
    made = add_op(_cond, [as_value(condition), *leaves, *outer], {}, bodies)
    return unflatten(shape, as_tuple(made))


__all__ = ["cond"]
