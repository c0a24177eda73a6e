"""The signature is the schema: what a conversion takes says what is read from an ONNX node, and of what kind.

Positional parameters are the inputs of the op, in order. Parameters after `*` are its attributes, by name,
with their defaults; one without a default must be given. Annotations say what each must be:

    Node, Node | None       an input that is a tensor; with `| None` it may be missing
    *xs: Node               all inputs that follow
    tuple[Dim, ...], Dim    an input that holds sizes, or one size
    int, float, bool, str   an attribute; a bool is 0 or 1 in ONNX
    Literal["a", "b"]       an attribute that is one of these words
    list[int], list[float]  an attribute; `| None` if it may be missing
    DType                   an attribute that is the number of an element type
    Call                    the node itself, first: for what a signature cannot say
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType, UnionType
from typing import Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import REQUIRED, Call
from rlx.frontend.onnx.value import Outputs, Value
from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Node

Read: TypeAlias = Callable[[Call], AttrValue]

_KINDS: dict[object, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "text"),
    bool: (int, "0 or 1"),
    list[int]: (list, "a list of whole numbers"),
    list[float]: (list, "a list of numbers"),
}


def is_plain(function: Callable[..., Outputs]) -> bool:
    """Whether a conversion takes the node itself and nothing else."""
    return list(inspect.signature(function).parameters) == ["n"]


def by_signature(function: Callable[..., Outputs]) -> Callable[[Call], Outputs]:
    """A conversion of a node, from a function of its inputs and attributes.

    >>> def LeakyRelu(x: Node, *, alpha: float = 0.01) -> Node:
    ...     return x
    >>> by_signature(LeakyRelu).__name__
    'LeakyRelu'
    """
    hints = get_type_hints(function, localns={"Value": Value})  # which names itself
    inputs: list[Read] = []
    attributes: dict[str, Read] = {}
    rest: int | None = None
    taken = 0
    for name, p in inspect.signature(function).parameters.items():
        kind = hints[name]
        if kind is Call:
            inputs.append(lambda n: n)
        elif p.kind is p.KEYWORD_ONLY:
            attributes[name] = _attribute(name, kind, REQUIRED if p.default is p.empty else p.default)
        elif p.kind is p.VAR_POSITIONAL:
            rest = taken
        else:
            inputs.append(_input(function.__name__, name, kind, taken))
            taken += 1

    @wraps(function)
    def convert(n: Call) -> Outputs:
        given = [read(n) for read in inputs]
        if rest is not None:
            given += n.nodes(rest)
        return function(*given, **{name: read(n) for name, read in attributes.items()})

    return convert


def _input(function: str, name: str, kind: object, i: int) -> Read:
    if kind is Node:
        return lambda n: n[i]
    if kind == Node | None:
        return lambda n: n.get(i)
    if kind == tuple[Dim, ...]:
        return lambda n: n.dims(i)
    if kind == Dim:
        return lambda n: n.size(i)
    raise TypeError(f"{function}: no input of an ONNX op is read as {name}: {kind}")


def _attribute(name: str, kind: object, default: object) -> Read:
    if get_origin(kind) is Literal:
        return lambda n: n.choice(name, default, get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (k for k in get_args(kind) if k is not NoneType)
    if kind is DType:
        return lambda n: n.dtype(name, default)
    wanted, what = _KINDS[kind]

    def read(n: Call) -> AttrValue:
        value = n.attr(name, default)
        if value is None:
            return None
        if not isinstance(value, wanted):
            raise ModelImportError(f"its attribute {name!r} must be {what}, but is {value!r}")
        return kind(value) if isinstance(kind, type) and kind is not list else value

    return read
