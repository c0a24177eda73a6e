"""Ops of the user: a meaning in NumPy, and what else is known about it: gradient, batching, a native form.

`register_op` makes a function usable in graphs under a name; its nodes are `custom` ops that hold the name.
What has no native form runs on the host, as a thunk that `explain` and `stats` name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, GradientError, RlxError, TypeMismatchError, UnknownOpError
from rlx.ir.attr import Attr, AttrValue, string
from rlx.ir.dim import Dim, Expr
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor
from rlx.ir.tree import Nest
from rlx.ir.types import TensorType, TupleType, Type, tensor_types
from rlx.kernel.form import Form, HostCall, Map
from rlx.kernel.scalar import axes, call, const, load
from rlx.ops.array.create import zeros_like
from rlx.ops.array.shape import concat
from rlx.ops.control.scan import scan
from rlx.ops.math.elementwise import cos, sin
from rlx.ops.math.reduce import sum
from rlx.records import dataclass

Rule = Callable[..., Nest]


@dataclass(frozen=True)
class CustomFunction:
    """What a user registered; calling it adds a node, or evaluates at once on arrays.

    `ref` is the meaning. `infer` gives the type of the result (several: a sequence of types) from those of
    the operands; without it the result is like the first operand.
    """

    name: str
    ref: Rule
    infer: Rule | None = None
    vjp: Rule | None = None
    batch: Rule | None = None
    native: Rule | None = None
    cost: Rule | None = None
    version: str = ""

    def __call__(self, *operands: Operand, **options: object) -> Tensor:
        return _custom(*operands, function=self.name, version=self.version, options=options)


_FUNCTIONS: dict[str, CustomFunction] = {}


def register_op(
    name: str,
    *,
    ref: Rule,
    infer: Rule | None = None,
    vjp: Rule | None = None,
    batch: Rule | None = None,
    native: Rule | None = None,
    cost: Rule | None = None,
    version: str = "",
) -> CustomFunction:
    """Register an op under a name; returns the function that adds it to graphs. All rules get its options.

    ref(*arrays, **options)          the meaning, in NumPy: an array, or a tuple for several results
    infer(*types, **options)         type of the result, or several; by default that of the first operand
    vjp(g, y, *nodes, **options)     gradient for each operand (None where there is none), in terms of rlx.ops
    batch(flags, *nodes, **options)  operands with a flag have a batch axis 0; by default a scan along it
    native(*types, **options)        a form of rlx.kernel.form to compile; by default the host computes
    cost(*types, **options)          scalar operations; by default one for each element of the results

    `version` is part of every node: change it with the meaning, so that nothing compiled before is used
    again.

    >>> halve = register_op("halve", ref=lambda x: x / 2, vjp=lambda g, y, x: [g / 2.0])
    >>> halve(np.array([1.0, 3.0]))
    array([0.5, 1.5])
    >>> unregister_op("halve")
    """
    if not name:
        raise RlxError("register_op: an op needs a name")
    if name in _FUNCTIONS:
        raise RlxError(
            f"register_op: {name!r} is registered already; call rlx.ops.unregister_op({name!r}) first"
        )
    made = CustomFunction(name, ref, infer, vjp, batch, native, cost, version)
    _FUNCTIONS[name] = made
    return made


def unregister_op(name: str) -> None:
    """Forget a registered op; graphs that hold it can no longer be run."""
    _find(name)
    del _FUNCTIONS[name]


def custom(name: str, *operands: Operand, **options: object) -> Tensor:
    """Call a registered op by its name.

    >>> _ = register_op("double", ref=lambda x: x * 2)
    >>> custom("double", np.array([1.5]))
    array([3.])
    >>> unregister_op("double")
    """
    return _find(name)(*operands, **options)


def _find(name: str) -> CustomFunction:
    try:
        return _FUNCTIONS[name]
    except KeyError:
        known = ", ".join(sorted(_FUNCTIONS)) or "none"
        raise UnknownOpError(
            f"custom: no op is registered as {name!r} (registered: {known}); call rlx.register_op first"
        ) from None


# -- the op


def _plain(value: object) -> AttrValue:
    """An option in a form that text can hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str, Expr, DType)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    raise ValueError(f"needs numbers, texts, dtypes and tuples of them, got {type(value).__name__}")


def options(value: AttrValue) -> tuple[tuple[str, AttrValue], ...]:
    """Attribute kind: keyword options, as pairs sorted by name."""
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted((str(key), _plain(item)) for key, item in pairs))


@declare
class _custom(Op):
    """An op of the user, by the name and version it was registered with."""

    name = "custom"
    finds_size = True
    user_function = "function"
    attrs = {"function": Attr(string), "version": Attr(string, ""), "options": Attr(options, ())}

    def infer(
        self, *types: TensorType, function: str, version: str, options: Sequence[tuple[str, AttrValue]]
    ) -> Type:
        found = _find(function)
        if found.version != version:
            raise UnknownOpError(
                f"custom: the graph needs version {version!r} of {function!r}, but version {found.version!r} "
                "is registered; register the other one"
            )
        if found.infer is None:
            if not types:
                raise TypeMismatchError(
                    f"custom: {function!r} has no operand to infer its type from; "
                    "give register_op an infer rule"
                )
            return types[0]
        made = found.infer(*types, **dict(options))
        items = (
            [made]
            if isinstance(made, TensorType)
            else list(tensor_types(made) if isinstance(made, TupleType) else made)
        )
        if not items or not all(isinstance(t, TensorType) for t in items):
            raise TypeMismatchError(
                f"custom: the infer rule of {function!r} gave {made!r}; it must give tensor types"
            )
        return items[0] if len(items) == 1 else TupleType(tuple(items))

    def ref(self, *arrays: np.ndarray, function: str, version: str, options: Any) -> Any:
        return _find(function).ref(*arrays, **dict(options))

    def vjp(
        self,
        g: Nest,
        y: Nest,
        *operands: Node,
        function: str,
        version: str,
        options: Sequence[tuple[str, AttrValue]],
    ) -> Sequence[Node | None]:
        found = _find(function)
        if found.vjp is None:
            raise GradientError(
                f"custom: {function!r} was registered without a gradient; give register_op its vjp"
            )
        grads: Sequence[Node | None] = found.vjp(g, y, *operands, **dict(options))
        if len(grads) != len(operands):
            raise GradientError(
                f"custom: the vjp of {function!r} gave {len(grads)} gradients for {len(operands)} operands"
            )
        for d, x in zip(grads, operands, strict=True):
            if d is not None and d.dtype is not x.dtype:
                raise DTypeError(f"custom: the vjp of {function!r} gave {d.type} as the gradient of {x.type}")
        return grads

    def batch(self, flags: Sequence[bool], *operands: Node, function: str, version: str, options: Any) -> Any:
        found = _find(function)
        if found.batch is not None:
            return found.batch(flags, *operands, **dict(options))
        moving = [x for f, x in zip(flags, operands, strict=True) if f]

        def one(carry: None, rows: list[Node]) -> tuple[None, Any]:
            row = iter(rows)
            return None, found(
                *(next(row) if f else x for f, x in zip(flags, operands, strict=True)), **dict(options)
            )

        return scan(one, None, moving)[1]

    def lower(
        self, *types: TensorType, function: str, version: str, options: Sequence[tuple[str, AttrValue]]
    ) -> Form:
        found = _find(function)
        if found.native is None:
            return HostCall(
                f"custom op {function!r} was registered without a native form; the host computes it"
            )
        form: Form = found.native(*types, **dict(options))
        return form

    def cost(
        self, *types: TensorType, function: str, version: str, options: Sequence[tuple[str, AttrValue]]
    ) -> Dim:
        found = _find(function)
        if found.cost is not None:
            given: Dim = found.cost(*types, **dict(options))
            return given
        total: Dim = 0
        for t in tensor_types(self.infer(*types, function=function, version=version, options=options)):
            total = total + t.numel
        return total

    def samples(self) -> list[Sample]:
        for example in _EXAMPLES:
            _FUNCTIONS.setdefault(example.name, example)
        wave, halves = "example.wave", "example.halves"
        return [
            Sample((Arg("f32[3,5]"),), {"function": wave, "options": {"scale": 0.5}}),
            Sample((Arg("f32[0]"),), {"function": wave, "options": {"scale": 2.0}}, grad=False),
            Sample((Arg("f32[n,1]"),), {"function": wave, "options": {"scale": 2.0}}, grad=False),
            Sample(
                (Arg("f32[17]", special=True),), {"function": wave, "options": {"scale": 2.0}}, grad=False
            ),
            Sample((Arg("f32[2,6]"), Arg("f32[]")), {"function": halves, "version": "1"}),
            Sample((Arg("i32[2,6]"), Arg("i32[]")), {"function": halves, "version": "1"}, grad=False),
        ]


# -- two examples, on which the generated tests run


def _wave_form(x: TensorType, *, scale: float) -> Form:
    value = call("sin", load(0, axes(x.rank), x.dtype))
    return Map(x.shape, call("mul", value, const(scale, x.dtype)))


def _halves_type(x: TensorType, by: TensorType) -> list[TensorType]:
    half = x.with_shape((*x.shape[:-1], x.shape[-1] // 2))
    return [half, half]


def _halves_vjp(g: Sequence[Node | None], y: Sequence[Node], x: Node, by: Node) -> list[Node]:
    parts = [zeros_like(part) if d is None else d for d, part in zip(g, y, strict=True)]
    whole = concat(parts, -1)
    return [whole * by, sum(whole * x)]


_EXAMPLES = (
    CustomFunction(
        "example.wave",
        ref=lambda x, scale: (np.sin(x) * scale).astype(x.dtype),
        vjp=lambda g, y, x, scale: [g * cos(x) * scale],
        batch=lambda flags, x, scale: sin(x) * scale,
        native=_wave_form,
    ),
    CustomFunction(
        "example.halves",
        ref=lambda x, by: tuple(np.split(x * by, 2, -1)),
        infer=_halves_type,
        vjp=_halves_vjp,
        version="1",
    ),
)

__all__ = ["custom", "register_op", "unregister_op"]
