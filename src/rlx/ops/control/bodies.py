"""What control flow needs to know about its bodies: their types, gradients, batched forms and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.assume import require_shape
from rlx.ir.build import apply
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, constant_array, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op, Role, run_rule
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.rewrite import inline
from rlx.ir.tree import Nest, Tree, flatten
from rlx.ir.types import TensorType, TupleType, Type, parse_type
from rlx.ops.rules import lift, op_call
from rlx.transform.grad import backward, ensure_mir, for_gradient, zeros_like
from rlx.transform.vmap import batch_nodes


def check_inputs(name: str, what: str, body: Graph, types: Sequence[TensorType]) -> None:
    """A body must take values of these types."""
    if len(types) != len(body.inputs):
        raise TypeMismatchError(
            f"{name}: its {what} takes {len(body.inputs)} values, but is given {len(types)}"
        )
    for i, (t, node) in enumerate(zip(types, body.inputs, strict=True)):
        check_equal(t, node.tensor, f"{name}: value {i} is {t}, but its {what} takes {node.type}")


def check_equal(a: TensorType, b: TensorType, otherwise: str) -> None:
    """Two types must be the same."""
    if a.dtype is not b.dtype:
        raise TypeMismatchError(otherwise)
    require_shape(a.shape, b.shape, otherwise)


def output_types(body: Graph) -> list[TensorType]:
    """Types of a body's results."""
    return [n.tensor for n in body.outputs.values()]


def one_or_tuple(types: Sequence[TensorType]) -> Type:
    """The type of a node with these results."""
    return types[0] if len(types) == 1 else TupleType(tuple(types))


def add_op(
    op: Op | type[Op], operands: Sequence[Operand], attrs: Mapping[str, object], bodies: Sequence[Graph]
) -> Tensor:
    """Call an op that has bodies."""
    assert isinstance(op, Op), "declare has made an instance of the class"
    return apply(op, operands, attrs, bodies)


def as_tuple(values: Node | tuple[Node, ...]) -> tuple[Nest, ...]:
    """Results of an op as a tuple, however many there are."""
    return values if isinstance(values, tuple) else (values,)


def is_float(t: TensorType | Node) -> bool:
    """Whether gradients flow through values of this type."""
    return t.dtype.is_float or t.dtype.is_complex


def work(body: Graph) -> Dim:
    """Scalar operations of one run of a body."""
    total: Dim = 0
    for node in body.nodes:
        if node.op.role is Role.REGION:
            total = total + work(node.bodies[0])
        elif node.op.role is Role.COMPUTE and node.op.has("cost"):
            total = total + run_rule(node.op, "cost", *(o.type for o in node.operands), node=node)
    return total


def new_body(name: str, types: Sequence[TensorType]) -> Graph:
    """An empty body with inputs in0, in1, ..."""
    made = Graph(name)
    for i, t in enumerate(types):
        made.input(f"in{i}", t.shape, t.dtype)
    return made


def ready_for_gradient(body: Graph, wanted: Sequence[int]) -> Graph:
    """A body whose loops keep what their gradients by the inputs `wanted` will read."""
    return for_gradient(body, [body.inputs[i].attrs["name"] for i in wanted])


def pullback(body: Graph, wanted: Sequence[int], seeded: Sequence[int]) -> Graph:
    """The gradient of a body as a body: takes its inputs and the gradients of its results `seeded`, gives
    those of its inputs `wanted`."""
    ready = ready_for_gradient(body, wanted)
    results = output_types(ready)
    types = [n.tensor for n in ready.inputs] + [results[i] for i in seeded]
    made = new_body(f"{body.name}.gradient", types)
    for c in ready.constraints:
        made.assume(c)
    with made.building():
        inputs, incoming = made.inputs[: len(ready.inputs)], made.inputs[len(ready.inputs) :]
        outputs = inline(ready, inputs, made)
        seeds: dict[int, Node] = {}
        for i, g in zip(seeded, incoming, strict=True):
            id = outputs[i].id
            seeds[id] = op_call("add", seeds[id], g) if id in seeds else g
        targets = [inputs[i] for i in wanted]
        grads = backward(made, seeds, targets)
        made.set_outputs([zeros_like(t) if g is None else g for t, g in zip(targets, grads, strict=True)])
    return made


def batched(
    body: Graph, flags: Sequence[bool], size: Dim, force: Sequence[bool] | bool = True
) -> tuple[Graph, list[bool]]:
    """A body over a batch: inputs with a flag have a new axis 0 of `size`.

    Returns it with the flags of its results; those that `force` names are repeated along the new axis where
    they do not depend on a batched input.
    """
    mir = ensure_mir(body, "batch")
    types = [
        n.tensor.with_shape((size, *n.shape)) if f else n.tensor
        for f, n in zip(flags, mir.inputs, strict=True)
    ]
    made = new_body(body.name, types)
    for c in mir.constraints:
        made.assume(c)
    needed = [force] * len(mir.outputs) if isinstance(force, bool) else list(force)
    with made.building():
        values = batch_nodes(mir, list(zip(made.inputs, flags, strict=True)), made)
        found = [values[n.id] for n in mir.outputs.values()]
        outputs = [lift(x, size) if need and not f else x for need, (x, f) in zip(needed, found, strict=True)]
        made.set_outputs(outputs)
    return made, [f or need for need, (_, f) in zip(needed, found, strict=True)]


def splice(body: Graph, arguments: Sequence[Node], into: Graph) -> list[Node]:
    """Copy a body into a graph, with what it assumes; returns its results there."""
    for c in body.constraints:
        into.assume(c)
    return inline(body, arguments, into)


def need_scalar(name: str, what: str, t: TensorType, kind: DType) -> None:
    """A value that steers control flow is one bool or one number."""
    if t.rank != 0 or t.dtype is not kind:
        raise TypeMismatchError(f"{name}: its {what} is {t}; it must be a single {kind} ({kind}[])")


def scatter_grads(count: int, places: Sequence[int], grads: Sequence[Node]) -> list[Node | None]:
    """Gradients of some operands among all."""
    out: list[Node | None] = [None] * count
    for i, g in zip(places, grads, strict=True):
        out[i] = g
    return out


def sample_body(types: Sequence[str], function: Callable[..., Sequence[Node]], name: str = "body") -> Graph:
    """A closed body from type texts and a function of its inputs (for samples)."""
    made = new_body(name, [parse_type(t) for t in types])
    with made.building():
        made.set_outputs(list(function(*made.inputs)))
    return made


def check_carries(name: str, given: Sequence[TensorType], out: Sequence[TensorType]) -> None:
    """What a body hands on must be of the type it takes."""
    if not out:
        raise TypeMismatchError(f"{name}: its body must return a result")
    if len(out) < len(given):
        raise TypeMismatchError(f"{name}: its body takes {len(given)} carries, but gives {len(out)} results")
    for i, (a, b) in enumerate(zip(given, out, strict=False)):
        check_equal(a, b, f"{name}: carry {i} enters the body as {a}, but leaves it as {b}; keep its type")


def results_of(
    state: Sequence[np.ndarray],
    rows: Sequence[Sequence[np.ndarray]],
    like: Callable[[], Sequence[np.ndarray]],
) -> Tensor:
    """Final carries and stacked rows, as a reference returns them; `like` tells types if there is no row."""
    if rows:
        stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    else:
        stacked = [np.empty((0, *e.shape), e.dtype) for e in like()]
    out = (*state, *stacked)
    return out if len(out) > 1 else out[0]


def batch_carries(
    body: Graph, flags: Sequence[bool], size: Dim, carries: int, free: Sequence[int] = ()
) -> tuple[Graph, list[bool]]:
    """A batched body whose carries (its first inputs and results) keep their type: one becomes batched if
    what replaces it is. Other results are all batched, but for those in `free`."""
    carried, rest = list(flags[:carries]), list(flags[carries:])
    others = [i not in free for i in range(carries, len(body.outputs))]
    while True:
        made, found = batched(body, [*carried, *rest], size, [*carried, *others])
        if found[:carries] == carried:
            return made, carried
        carried = found[:carries]


# -- tracing Python functions


@of_one
def as_value(x: Operand) -> Tensor:
    """A leaf as a node or an array; Python numbers are f32, i64 and bool, as constants of a graph are."""
    if isinstance(x, Node):
        return x
    return constant_array(x)


def type_of(x: Node | np.ndarray | np.generic) -> TensorType:
    """The type of a node or an array."""
    return x.tensor if isinstance(x, Node) else TensorType(dtype(x.dtype), x.shape)


def known_type(x: Operand) -> TensorType | None:
    """The type of a result of a traced function; None for a Python number, which takes another's."""
    return type_of(x) if isinstance(x, (Node, np.ndarray, np.generic)) else None


def values_of(nest: Nest) -> tuple[list[Tensor], Tree]:
    """Leaves of a nested container as nodes and arrays, and its shape."""
    leaves, tree = flatten(nest)
    return [as_value(x) for x in leaves], tree


def same_carry(name: str, carry: Nest, tree: Tree) -> list[Nest]:
    """Leaves of the carry that a traced function returned; it must be nested as it came in."""
    leaves, found = flatten(carry)
    if found != tree:
        raise TypeMismatchError(
            f"{name}: the carry enters as {tree} and leaves as {found}; it must keep its structure"
        )
    return leaves


def pair_of(name: str, value: object, parts: str, count: int = 2) -> tuple[Nest, ...]:
    """What a traced function returned, as a tuple of so many parts."""
    if not isinstance(value, tuple) or len(value) != count:
        raise TypeMismatchError(
            f"{name}: its function must return the tuple ({parts}), got {flatten(value)[1]}"
        )
    return value
