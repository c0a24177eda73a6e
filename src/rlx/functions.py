"""Transforms of Python functions: jit, grad, value_and_grad, jvp, vmap.

`jit` traces once per dtypes, ranks, static arguments and pytree and runs natively from then on. The others
work inside a trace (on nodes) and, called with arrays, compile themselves; they compose.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import BudgetError, GradientError, TransformError, TypeError_
from rlx.frontend.trace import Trace, as_array, fits, trace_arrays, trace_types
from rlx.ir.bind import match_shape
from rlx.ir.graph import Graph, Node, current_graph
from rlx.ir.op import get_op
from rlx.ir.rewrite import inline
from rlx.ir.tree import flatten, unflatten
from rlx.transform.grad import backward, is_differentiable_dtype, jvp_graph, ones_like, zeros_like
from rlx.transform.vmap import batch_graph


class Jit:
    """A function that is traced and compiled on first use, and again for other dtypes, ranks or statics."""

    def __init__(
        self, function: Callable[..., Any], static: Sequence[int | str] = (), **options: Any
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, options
        self._static_places, self._static_names = _static_arguments(function, static)
        self._programs: dict[Any, list[tuple[Trace, Any]]] = {}
        self.stats: dict[str, Any] = {"traces": 0, "specialized": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten((args, kwargs))
        if any(isinstance(leaf, Node) for leaf in leaves):
            return self.function(*args, **kwargs)  # inside another trace
        trace, program, arrays = self._compiled(args, kwargs)
        out = program.run({f"arg{i}": a for i, a in enumerate(arrays)})
        return unflatten(trace.result, list(out.values()))

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled program that a call with these arguments runs; its inputs are arg0, arg1 ...

        >>> import numpy as np, rlx
        >>> double = rlx.jit(lambda x: x * 2.0)
        >>> double.program(np.ones(3, np.float32)).run({"arg0": np.ones(2, np.float32)})
        {'out0': array([2., 2.], dtype=float32)}
        """
        return self._compiled(args, kwargs)[1]

    def _compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Trace, Any, Sequence[np.ndarray]]:
        fixed_args = {i: args[i] for i in self._static_places if i < len(args)}
        fixed_kwargs = {k: kwargs[k] for k in self._static_names if k in kwargs}
        moving = tuple(None if i in fixed_args else a for i, a in enumerate(args))
        moving_kwargs = {k: v for k, v in kwargs.items() if k not in fixed_kwargs}
        leaves, tree = flatten((moving, moving_kwargs))
        arrays = [as_array(leaf) for leaf in leaves]
        key = (
            tree,
            tuple((a.dtype.str, a.dtype.name, a.ndim) for a in arrays),
            _hashable(fixed_args, fixed_kwargs),
        )
        known = self._programs.setdefault(key, [])
        for number, (trace, _) in enumerate(known):
            if fits(trace, arrays):
                return trace, self._within_budget(known, number, arrays), arrays

        def call(*a: Any, **k: Any) -> Any:
            full = [fixed_args.get(i, v) for i, v in enumerate(a)]
            return self.function(*full, **k, **fixed_kwargs)

        call.__name__ = getattr(self.function, "__name__", "function")
        trace = trace_arrays(call, arrays, tree)
        program = self._compile(trace, arrays)
        known.append((trace, program))
        self.stats["traces"] += 1
        self.stats["specialized"] |= trace.specialized
        return trace, program, arrays

    def _compile(self, trace: Trace, arrays: Sequence[np.ndarray]) -> Any:
        from rlx.compile import compile

        options = dict(self.options)
        if options.get("budget") is not None:  # what is done to fit it depends on sizes: those of this call
            options.setdefault("assume", _sizes(trace.graph, arrays))
        return compile(trace.graph, **options)

    def _within_budget(
        self, known: list[tuple[Trace, Any]], number: int, arrays: Sequence[np.ndarray]
    ) -> Any:
        """The program of a known trace; where these sizes take more than its budget, one that is made to fit
        them, which takes its place, or the refusal that they get."""
        trace, program = known[number]
        if self.options.get("budget") is None or "assume" in self.options:
            return program
        sizes = _sizes(trace.graph, arrays)
        try:
            program.plan_for(sizes)
        except BudgetError:
            program = self._compile(trace, arrays)
            program.plan_for(sizes)  # refuses if nothing fits
            known[number] = (trace, program)
        return program


def _sizes(graph: Graph, arrays: Sequence[np.ndarray]) -> dict[str, int]:
    """The sizes that arguments give to the symbols of a traced function."""
    binding: dict[str, int] = {}
    for node in graph.inputs:
        name = node.attrs["name"]
        match_shape(node.shape, arrays[int(name.removeprefix("arg"))].shape, binding, f"argument {name}")
    return binding


def _static_arguments(
    function: Callable[..., Any], static: Sequence[int | str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places and names of static arguments; each may be given either way in a call."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_places = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    open_names = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name for p in parameters}
    for s in static:
        known = (open_places or s < len(names)) and s >= 0 if isinstance(s, int) else open_names or s in own
        if not known:
            which = f"argument {s}" if isinstance(s, int) else repr(s)
            has = ", ".join(p.name for p in parameters) or "none"
            raise TransformError(f"jit: static names {which}, but the function's arguments are: {has}")
    places = {s if isinstance(s, int) else names.index(s) for s in static if isinstance(s, int) or s in names}
    named = {names[s] if isinstance(s, int) else s for s in static if isinstance(s, str) or s < len(names)}
    return tuple(sorted(places)), tuple(sorted(named))


def _hashable(args: dict[int, Any], kwargs: dict[str, Any]) -> Any:
    key = tuple((place, _exact(value)) for place, value in (*args.items(), *sorted(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        raise TransformError(
            "static arguments of jit must be hashable; pass arrays as ordinary arguments"
        ) from None
    return key


def _exact(value: Any) -> Any:
    """A key that tells 1, 1.0 and True apart, and 0.0 from -0.0: functions may."""
    if isinstance(value, tuple):
        return tuple(_exact(v) for v in value)
    return type(value), value.hex() if isinstance(value, float) else value


def jit(
    function: Callable[..., Any] | None = None, *, static: Sequence[int | str] = (), **options: Any
) -> Any:
    """Compile a Python function on arrays; options are those of rlx.compile. A memory `budget` is met for the
    sizes of the first call, unless `assume` says others, and checked for those of every call.

    >>> import numpy as np, rlx
    >>> @rlx.jit
    ... def f(x, w):
    ...     return rlx.ops.softmax(x @ w, axis=-1)
    >>> f(np.zeros((1, 3), np.float32), np.zeros((3, 2), np.float32))
    array([[0.5, 0.5]], dtype=float32)
    """
    if function is None:
        return lambda f: Jit(f, static, **options)
    if not callable(function):
        raise TypeError_(f"rlx.jit takes a function, got a value of type {type(function).__name__}")
    return Jit(function, static, **options)


class _Transformed:
    """A transformed function: part of the graph being built or, called with arrays, compiled."""

    def __init__(self, in_graph: Callable[..., Any]) -> None:
        self.in_graph, self.compiled = in_graph, Jit(in_graph)

    def __call__(self, *args: Any) -> Any:
        leaves, _ = flatten(args)
        inside = any(isinstance(leaf, Node) for leaf in leaves) or current_graph() is not None
        return self.in_graph(*args) if inside else self.compiled(*args)


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

    return functools.wraps(function)(_Transformed(in_graph))


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
    function: Callable[..., Any], in_axes: int | Sequence[int | None] | None = 0, out_axes: int = 0
) -> Callable[..., Any]:
    """Apply a function to every slice of its arguments at once.

    >>> import numpy as np, rlx
    >>> rlx.vmap(lambda x, y: rlx.ops.sum(x * y))(np.ones((3, 2)), np.ones((3, 2)))
    array([2., 2., 2.])
    """

    def in_graph(*args: Any) -> Any:
        graph = current_graph()
        assert graph is not None
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

    return functools.wraps(function)(_Transformed(in_graph))


def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """(value, directional derivative) of a function at `primals` along `tangents`.

    >>> import numpy as np, rlx
    >>> rlx.jvp(lambda x: x * x, (np.array([3.0]),), (np.array([1.0]),))
    (array([9.]), array([6.]))
    """
    if len(primals) != len(tangents):
        raise TransformError(f"jvp: {len(primals)} primals but {len(tangents)} tangents")
    made: tuple[Any, Any] = _jvp_of(function)(tuple(primals), tuple(tangents))
    return made


@functools.lru_cache(maxsize=64)  # functions whose derivative stays compiled
def _jvp_of(function: Callable[..., Any]) -> _Transformed:
    def in_graph(points: Any, directions: Any) -> Any:
        graph = current_graph()
        assert graph is not None
        leaves, tree = flatten((points, {}))
        moves, _ = flatten(directions)
        nodes = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in leaves]
        along = [x if isinstance(x, Node) else graph.constant(as_array(x)) for x in moves]
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
