"""Transforms of Python functions: jit, grad, value_and_grad, jvp, vmap.

`jit` compiles a function for the calls that it meets (see `rlx.api.jit`). The others work inside a trace (on
nodes) and, called with arrays, compile themselves; they compose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Unpack

from rlx.api.jit import Dynamic, Jit
from rlx.api.options import CompileOptions, Options, shows_options
from rlx.errors import GradientError, TransformError
from rlx.frontend.arguments import check_call, need_function, place_of
from rlx.frontend.trace import as_array, trace_types
from rlx.ir.graph import Graph, Node, current_graph
from rlx.ir.op import get_op
from rlx.ir.rewrite import inline
from rlx.ir.tree import Nest, flatten, unflatten
from rlx.transform.grad import backward, is_differentiable_dtype, jvp_graph, ones_like, zeros_like
from rlx.transform.vmap import batch_graph


@shows_options
def jit(
    function: Callable[..., Nest] | None = None,
    *,
    static: int | str | Sequence[int | str] = (),
    dynamic: Dynamic = False,
    **options: Unpack[CompileOptions],
) -> Nest:
    """Compile a Python function on arrays; options are those of rlx.compile.

    The first call compiles for its sizes, which are plain ints while the function is traced. A size that
    later differs becomes a symbol: one program then serves all sizes of that axis, except 0 and 1. What the
    function reads of a symbol, or how it compares it, limits the program to calls where that is the same.
    `dynamic` makes sizes symbols at once: True, or names of axes by argument, such as {"x": {0: "batch"}}.
    `static` arguments are Python values that a program is compiled for. `stats` says why each was compiled.
    Numbers among the arguments, Python's and NumPy's, take the dtype of the array next to them, as numbers in
    the text of the function do: np.float64(2) times an f32 array is f32, unlike in NumPy 2.
    Arguments and results may be nested: tuples, lists, dicts, namedtuples, dataclasses, registered classes.

    A memory `budget` is met for the sizes of the call that compiles, and checked for those of every call.

    >>> import numpy as np, rlx
    >>> @rlx.jit
    ... def f(x, w):
    ...     return rlx.ops.softmax(x @ w, axis=-1)
    >>> f(np.zeros((1, 3), np.float32), np.zeros((3, 2), np.float32))
    array([[0.5, 0.5]], dtype=float32)
    """
    Options.of(None, options, "jit", more=("static", "dynamic"))  # refused at once, not with the first call
    if function is None:
        return lambda f: jit(f, static=static, dynamic=dynamic, **options)
    need_function(function, "rlx.jit")
    return Jit(function, static, dynamic, **options)


class _Transformed:
    """A transformed function: part of the graph being built or, called with arrays, compiled."""

    def __init__(self, in_graph: Callable[..., Nest], function: Callable[..., Nest] | None = None) -> None:
        if function is not None:  # whose arguments are matched by name
            functools.update_wrapper(self, function)
            functools.update_wrapper(in_graph, function)
        self.in_graph, self.compiled = in_graph, Jit(in_graph)

    def __repr__(self) -> str:
        return f"<transform, {self.compiled!r}>"

    def __call__(self, *args: Nest, **kwargs: Nest) -> Nest:
        leaves, _ = flatten((args, kwargs))
        if current_graph() is not None:
            return self.in_graph(*args, **kwargs)
        node = next((leaf for leaf in leaves if isinstance(leaf, Node)), None)
        if node is None:
            return self.compiled(*args, **kwargs)
        with node.graph.building():  # of a graph built by hand
            return self.in_graph(*args, **kwargs)


def _in_graph(value: Nest, graph: Graph) -> Node:
    node = value if isinstance(value, Node) else graph.constant(as_array(value))
    made: Node = get_op("copy")(node)  # its own node, so that closures over the same value stay constant
    return made


def value_and_grad(
    function: Callable[..., Nest], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Nest]:
    """A function that returns value and gradient of a scalar-valued function.

    Gradients have the pytrees of the arguments.

    >>> import numpy as np, rlx
    >>> step = rlx.value_and_grad(lambda x: rlx.ops.sum(x * x))
    >>> step(np.array([1.0, 2.0]))
    (array(5.), array([2., 4.]))
    """
    need_function(function, "rlx.grad")
    numbers = (argnums,) if isinstance(argnums, (int, str)) else tuple(argnums)
    for number in numbers:
        if not isinstance(number, int):
            raise TransformError(
                f"grad: argnums={argnums!r}; give the places of arguments, such as 0 or (0, 2)"
            )

    def in_graph(*args: Nest, **kwargs: Nest) -> Nest:
        graph = current_graph()
        assert graph is not None
        for number in numbers:
            if not -len(args) <= number < len(args):
                got = f"{place_of(function)} got {len(args)} by place"
                raise TransformError(f"grad: argnums names argument {number}, but {got}")
        flat = [flatten(args[i]) for i in numbers]
        wanted = [[_in_graph(leaf, graph) for leaf in leaves] for leaves, _ in flat]
        full = list(args)
        for i, nodes, (_, tree) in zip(numbers, wanted, flat, strict=True):
            full[i] = unflatten(tree, nodes)
        start = wanted[0][0].id if wanted and wanted[0] else 0
        check_call(function, full, kwargs)
        out = function(*full, **kwargs)
        loss, aux = out if has_aux else (out, None)
        if not isinstance(loss, Node) or loss.shape != ():
            what = loss.type if isinstance(loss, Node) else type(loss).__name__
            raise GradientError(
                f"grad needs a function that returns a scalar, this one returns {what}; sum it first"
            )
        for nodes in wanted:
            for node in nodes:
                if not is_differentiable_dtype(node):
                    raise GradientError(
                        f"an argument is {node.type}; gradients exist only for floating point"
                    )
        every = [n for nodes in wanted for n in nodes]
        grads = backward(graph, {loss.id: ones_like(loss)}, every, start)
        made = iter(zeros_like(n) if g is None else g for n, g in zip(every, grads, strict=True))
        trees = [unflatten(tree, [next(made) for _ in leaves]) for leaves, tree in flat]
        result = trees[0] if isinstance(argnums, int) else tuple(trees)
        return ((loss, aux), result) if has_aux else (loss, result)

    return _Transformed(in_graph, function)


def grad(function: Callable[..., Nest], argnums: int | Sequence[int] = 0) -> Callable[..., Nest]:
    """The gradient of a scalar-valued function.

    >>> import numpy as np, rlx
    >>> rlx.grad(lambda x: rlx.ops.sum(rlx.ops.sin(x)))(np.array([0.0]))
    array([1.])
    """
    both = value_and_grad(function, argnums)

    @functools.wraps(function)
    def wrapped(*args: Nest, **kwargs: Nest) -> Nest:
        return both(*args, **kwargs)[1]

    return wrapped


def vmap(
    function: Callable[..., Nest], in_axes: int | Sequence[int | None] | None = 0, out_axes: int = 0
) -> Callable[..., Nest]:
    """Apply a function to every slice of its arguments at once.

    >>> import numpy as np, rlx
    >>> rlx.vmap(lambda x, y: rlx.ops.sum(x * y))(np.ones((3, 2)), np.ones((3, 2)))
    array([2., 2., 2.])
    """

    need_function(function, "rlx.vmap")

    def in_graph(*args: Nest, **kwargs: Nest) -> Nest:
        graph = current_graph()
        assert graph is not None
        if kwargs:
            raise TransformError(
                f"vmap: give {next(iter(kwargs))!r} by place, so that in_axes can speak of it"
            )
        check_call(function, args, kwargs)
        axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * len(args)
        if len(axes) != len(args):
            raise TransformError(f"vmap: {len(args)} arguments but {len(axes)} in_axes")
        leaves, tree = flatten((args, {}))
        per_leaf = [a for arg, a in zip(args, axes, strict=True) for _ in flatten(arg)[0]]
        nodes = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in leaves]
        sizes, types = [], []
        for node, at in zip(nodes, per_leaf, strict=True):
            if at is None:
                types.append(node.tensor)
                continue
            place = at + node.rank if at < 0 else at
            if not 0 <= place < node.rank:
                raise TransformError(f"vmap: axis {at} is out of range for {node.type}")
            sizes.append(node.shape[place])
            types.append(node.tensor.with_shape((*node.shape[:place], *node.shape[place + 1 :])))
        if not sizes:
            raise TransformError("vmap: no argument has an axis to map over")
        trace = trace_types(function, types, tree, graph)
        named = {f"arg{i}": a for i, a in enumerate(per_leaf)}
        batched = batch_graph(trace.graph, named, sizes[0], out_axes)
        for c in batched.constraints:
            graph.assume(c)
        return unflatten(trace.result, inline(batched, [*nodes, *trace.captured], graph))

    return _Transformed(in_graph, function)


def jvp(
    function: Callable[..., Nest], primals: Sequence[Nest], tangents: Sequence[Nest]
) -> tuple[Nest, Nest]:
    """(value, directional derivative) of a function at `primals` along `tangents`.

    >>> import numpy as np, rlx
    >>> rlx.jvp(lambda x: x * x, (np.array([3.0]),), (np.array([1.0]),))
    (array([9.]), array([6.]))
    """
    need_function(function, "rlx.jvp")
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            kind = type(given).__name__
            raise TransformError(f"jvp: {name} is of type {kind}; give a tuple, one value for each argument")
    check_call(function, primals, {})
    if len(primals) != len(tangents):
        raise TransformError(f"jvp: {len(primals)} primals but {len(tangents)} tangents")
    made: tuple[Nest, Nest] = _jvp_of(function)(tuple(primals), tuple(tangents))
    return made


@functools.lru_cache(maxsize=64)  # functions whose derivative stays compiled
def _jvp_of(function: Callable[..., Nest]) -> _Transformed:
    def in_graph(points: Nest, directions: Nest) -> Nest:
        graph = current_graph()
        assert graph is not None
        leaves, tree = flatten((points, {}))
        moves, _ = flatten(directions)
        if len(moves) != len(leaves):
            raise TransformError(f"jvp: the primals hold {len(leaves)} arrays, the tangents {len(moves)}")
        nodes = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in leaves]
        along = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in moves]
        for i, (point, move) in enumerate(zip(nodes, along, strict=True)):
            if point.shape != move.shape:
                raise TransformError(
                    f"jvp: primal {i} is {point.type}, its tangent {move.type}; give equal shapes"
                )
        trace = trace_types(function, [n.tensor for n in nodes], tree, graph)
        smooth = [i for i, n in enumerate(nodes) if is_differentiable_dtype(n)]
        derivative = jvp_graph(trace.graph, [f"arg{i}" for i in smooth])
        every = [*nodes, *trace.captured]
        named = {n.attrs["name"]: value for n, value in zip(trace.graph.inputs, every, strict=True)}
        named |= {f"t_arg{i}": along[i] for i in smooth}
        values = inline(trace.graph, every, graph)
        inputs = [named[n.attrs["name"]] for n in derivative.inputs]
        tangent_of = dict(zip(derivative.outputs, inline(derivative, inputs, graph), strict=True))
        out = [tangent_of.get(f"tan_out{i}") for i in range(len(values))]
        slopes = [zeros_like(v) if t is None else t for v, t in zip(values, out, strict=True)]
        return unflatten(trace.result, values), unflatten(trace.result, slopes)

    return _Transformed(in_graph)
