"""Transforms of Python functions: jit, grad, value_and_grad, jvp, vmap.

`jit` traces once per dtypes, ranks, static arguments and pytree and runs natively from then on. The others
work inside a trace (on nodes) and, called with arrays, compile themselves; they compose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import GradientError, TransformError
from rlx.frontend.trace import Trace, as_array, fits, trace_arrays, trace_types
from rlx.ir.graph import Graph, Node, current_graph, inline
from rlx.ir.op import get_op
from rlx.ir.tree import flatten, unflatten
from rlx.transform.grad import backward, is_differentiable_dtype, jvp_graph, ones_like, zeros_like
from rlx.transform.vmap import batch_graph


class Jit:
    """A function that is traced and compiled on first use, and again for other dtypes, ranks or statics."""

    def __init__(
        self, function: Callable[..., Any], static: Sequence[int | str] = (), **options: Any
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.static, self.options = function, tuple(static), options
        self._programs: dict[Any, list[tuple[Trace, Any]]] = {}
        self.stats: dict[str, Any] = {"traces": 0, "specialized": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fixed_args = {i: args[i] for i in self.static if isinstance(i, int) and i < len(args)}
        fixed_kwargs = {k: kwargs[k] for k in self.static if isinstance(k, str) and k in kwargs}
        moving = tuple(None if i in fixed_args else a for i, a in enumerate(args))
        moving_kwargs = {k: v for k, v in kwargs.items() if k not in fixed_kwargs}
        leaves, tree = flatten((moving, moving_kwargs))
        if any(isinstance(leaf, Node) for leaf in leaves):
            return self.function(*args, **kwargs)  # inside another trace
        arrays = [as_array(leaf) for leaf in leaves]
        key = (
            tree,
            tuple((a.dtype.str, a.dtype.name, a.ndim) for a in arrays),
            _hashable(fixed_args, fixed_kwargs),
        )
        for trace, program in self._programs.get(key, ()):
            if fits(trace, arrays):
                return self._run(trace, program, arrays)

        def call(*a: Any, **k: Any) -> Any:
            full = [fixed_args.get(i, v) for i, v in enumerate(a)]
            return self.function(*full, **k, **fixed_kwargs)

        call.__name__ = getattr(self.function, "__name__", "function")
        trace = trace_arrays(call, arrays, tree)
        from rlx.compile import compile

        program = compile(trace.graph, **self.options)
        self._programs.setdefault(key, []).append((trace, program))
        self.stats["traces"] += 1
        self.stats["specialized"] |= trace.specialized
        return self._run(trace, program, arrays)

    def _run(self, trace: Trace, program: Any, arrays: Sequence[np.ndarray]) -> Any:
        out = program.run({f"arg{i}": a for i, a in enumerate(arrays)})
        return unflatten(trace.result, list(out.values()))


def _hashable(args: dict[int, Any], kwargs: dict[str, Any]) -> Any:
    key = (tuple(sorted(args.items())), tuple(sorted(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        raise TransformError(
            "static arguments of jit must be hashable; pass arrays as ordinary arguments"
        ) from None
    return key


def jit(
    function: Callable[..., Any] | None = None, *, static: Sequence[int | str] = (), **options: Any
) -> Any:
    """Compile a Python function on arrays; options are those of rlx.compile.

    >>> import numpy as np, rlx
    >>> @rlx.jit
    ... def f(x, w):
    ...     return rlx.ops.softmax(x @ w, axis=-1)
    >>> f(np.zeros((1, 3), np.float32), np.zeros((3, 2), np.float32))
    array([[0.5, 0.5]], dtype=float32)
    """
    if function is None:
        return lambda f: Jit(f, static, **options)
    return Jit(function, static, **options)


def _nodes_or_jit(make: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a transformed function: in the graph being built, or compiled when called with arrays."""
    leaves, _ = flatten(args)
    if any(isinstance(leaf, Node) for leaf in leaves) or current_graph() is not None:
        return make(*args)
    cached = _COMPILED.get(make)
    if cached is None:
        cached = _COMPILED[make] = Jit(make)
    return cached(*args)


_COMPILED: dict[Callable[..., Any], Jit] = {}


def _in_graph(value: Any, graph: Graph) -> Node:
    node = value if isinstance(value, Node) else graph.constant(as_array(value))
    made: Node = get_op("copy")(node)  # its own node, so that closures over the same value stay constant
    return made


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns value and gradient of a scalar-valued function.

    Gradients have the pytrees of the arguments.

    >>> import numpy as np, rlx
    >>> step = rlx.value_and_grad(lambda x: rlx.ops.sum(x * x))
    >>> step(np.array([1.0, 2.0]))
    (array(5.), array([2., 4.]))
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def in_graph(*args: Any) -> Any:
        graph = current_graph()
        assert graph is not None
        flat = [flatten(args[i]) for i in numbers]
        wanted = [[_in_graph(leaf, graph) for leaf in leaves] for leaves, _ in flat]
        full = list(args)
        for i, nodes, (_, tree) in zip(numbers, wanted, flat, strict=True):
            full[i] = unflatten(tree, nodes)
        start = wanted[0][0].id if wanted and wanted[0] else 0
        out = function(*full)
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

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return _nodes_or_jit(in_graph, function, args)

    return wrapped


def grad(function: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The gradient of a scalar-valued function.

    >>> import numpy as np, rlx
    >>> rlx.grad(lambda x: rlx.ops.sum(rlx.ops.sin(x)))(np.array([0.0]))
    array([1.])
    """
    both = value_and_grad(function, argnums)

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return both(*args)[1]

    return wrapped


def vmap(
    function: Callable[..., Any], in_axes: int | Sequence[int | None] = 0, out_axes: int = 0
) -> Callable[..., Any]:
    """Apply a function to every slice of its arguments at once.

    >>> import numpy as np, rlx
    >>> rlx.vmap(lambda x, y: rlx.ops.sum(x * y))(np.ones((3, 2)), np.ones((3, 2)))
    array([2., 2., 2.])
    """

    def in_graph(*args: Any) -> Any:
        graph = current_graph()
        assert graph is not None
        axes = (in_axes,) * len(args) if isinstance(in_axes, int) else tuple(in_axes)
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
        trace = trace_types(function, types, tree)
        named = {f"arg{i}": a for i, a in enumerate(per_leaf)}
        batched = batch_graph(trace.graph, named, sizes[0], out_axes)
        for c in batched.constraints:
            graph.assume(c)
        return unflatten(trace.result, inline(batched, nodes, graph))

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return _nodes_or_jit(in_graph, function, args)

    return wrapped


def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """(value, directional derivative) of a function at `primals` along `tangents`.

    >>> import numpy as np, rlx
    >>> rlx.jvp(lambda x: x * x, (np.array([3.0]),), (np.array([1.0]),))
    (array([9.]), array([6.]))
    """

    def in_graph(points: Any, directions: Any) -> Any:
        graph = current_graph()
        assert graph is not None
        leaves, tree = flatten((tuple(points), {}))
        moves, _ = flatten(tuple(directions))
        nodes = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in leaves]
        along = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in moves]
        trace = trace_types(function, [n.tensor for n in nodes], tree)
        smooth = [i for i, n in enumerate(nodes) if is_differentiable_dtype(n)]
        derivative = jvp_graph(trace.graph, [f"arg{i}" for i in smooth])
        named = {f"arg{i}": n for i, n in enumerate(nodes)} | {f"t_arg{i}": along[i] for i in smooth}
        values = inline(trace.graph, nodes, graph)
        tangent_of = dict(
            zip(
                derivative.outputs,
                inline(derivative, [named[n.attrs["name"]] for n in derivative.inputs], graph),
                strict=True,
            )
        )
        out = [tangent_of.get(f"tan_out{i}") for i in range(len(values))]
        slopes = [zeros_like(v) if t is None else t for v, t in zip(values, out, strict=True)]
        return unflatten(trace.result, values), unflatten(trace.result, slopes)

    if len(primals) != len(tangents):
        raise TransformError(f"jvp: {len(primals)} primals but {len(tangents)} tangents")
    made: tuple[Any, Any] = _nodes_or_jit(in_graph, function, (tuple(primals), tuple(tangents)))
    return made
