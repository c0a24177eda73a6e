"""Nested containers of arrays, flattened and put together again.

Tuples, lists, dicts, namedtuples, dataclasses, and classes that `register_pytree` names.

>>> leaves, tree = flatten({"w": 1, "b": (2, None)})
>>> leaves, unflatten(tree, [10, 20]), str(tree)
([2, 1], {'b': (10, None), 'w': 20}, "{'b': (*, None), 'w': *}")
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.records import dataclass

Nest: TypeAlias = Any
"""Arrays, nodes, numbers, and containers of them that nest to any depth."""


@dataclass(frozen=True)
class Tree:
    """The shape of a nest: a kind (leaf, none, tuple, list, dict, fields, registered), its children, keys of
    a dict or names of fields, and for a class of the user the class and what it has besides children.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[str, ...] = ()
    made: type | None = None
    rest: Hashable = ()

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(c.leaves for c in self.children)

    def __str__(self) -> str:
        inner = [str(c) for c in self.children]
        if self.kind == "dict":
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, inner, strict=True)) + "}"
        if self.kind in ("tuple", "list"):
            text = ", ".join(inner)
            return f"[{text}]" if self.kind == "list" else f"({text}{',' if len(inner) == 1 else ''})"
        if self.made is not None:
            names = [f"{k}=" for k in self.keys] or [""] * len(inner)
            return f"{self.made.__name__}({', '.join(n + c for n, c in zip(names, inner, strict=True))})"
        return "None" if self.kind == "none" else "*"


LEAF = Tree("leaf")
_REGISTERED: dict[
    type, tuple[Callable[[Nest], tuple[Sequence[Nest], Hashable]], Callable[[Nest, Nest], Nest]]
] = {}


def register_pytree(
    cls: type,
    flatten: Callable[[Nest], tuple[Sequence[Nest], Hashable]],
    unflatten: Callable[[Nest, Nest], Nest],
) -> None:
    """Make a class a container of arrays for jit, grad and vmap.

    `flatten(value)` gives its children and what else there is to it, which must be hashable: programs are
    made for it. `unflatten(rest, children)` builds the value again. Dataclasses need none of this: their
    fields are the children, except those with metadata={"static": True}.

    >>> class Scaled:
    ...     def __init__(self, value, unit):
    ...         self.value, self.unit = value, unit
    >>> register_pytree(Scaled, lambda s: ((s.value,), s.unit), lambda unit, parts: Scaled(*parts, unit))
    >>> tree_map(lambda x: x * 2, Scaled(21, "m")).value
    42
    """
    if not isinstance(cls, type):
        raise TypeMismatchError(f"register_pytree: takes a class, got a value of type {type(cls).__name__}")
    if cls in _REGISTERED:
        raise TypeMismatchError(f"register_pytree: {cls.__name__} is registered already")
    _REGISTERED[cls] = (flatten, unflatten)


def flatten(value: Nest) -> tuple[list[Nest], Tree]:
    """Leaves in a fixed order (dicts by key) and the tree that holds them."""
    leaves: list[Nest] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Nest, leaves: list[Nest]) -> Tree:
    if isinstance(value, np.ndarray):  # most often, in every call of a compiled function
        leaves.append(value)
        return LEAF
    if value is None:
        return Tree("none")
    if isinstance(value, dict):
        keys = tuple(sorted(value))
        return Tree("dict", tuple(_flatten(value[k], leaves) for k in keys), keys)
    cls = type(value)
    if cls in _REGISTERED:
        children, rest = _REGISTERED[cls][0](value)
        return Tree("registered", tuple(_flatten(c, leaves) for c in children), (), cls, rest)
    if hasattr(cls, "_fields") and isinstance(value, tuple):
        return Tree("fields", tuple(_flatten(v, leaves) for v in value), cls._fields, cls)
    if hasattr(cls, "__dataclass_fields__"):
        static = {f.name for f in fields(value) if f.metadata.get("static")}
        names = tuple(f.name for f in fields(value) if f.name not in static)
        rest = tuple((name, getattr(value, name)) for name in sorted(static))
        return Tree("fields", tuple(_flatten(getattr(value, n), leaves) for n in names), names, cls, rest)
    if isinstance(value, (tuple, list)):
        return Tree(
            "tuple" if isinstance(value, tuple) else "list", tuple(_flatten(v, leaves) for v in value)
        )
    leaves.append(value)
    return LEAF


def unflatten(tree: Tree, leaves: Sequence[Nest]) -> Nest:
    """The nest with these leaves."""
    return _unflatten(tree, iter(leaves))


def _unflatten(tree: Tree, leaves: Iterator[Nest]) -> Nest:
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind == "none":
        return None
    children = [_unflatten(c, leaves) for c in tree.children]
    if tree.kind == "dict":
        return dict(zip(tree.keys, children, strict=True))
    if tree.made is not None:
        return _made(tree, tree.made, children)
    return tuple(children) if tree.kind == "tuple" else children


def _made(tree: Tree, cls: Nest, children: list[Nest]) -> Nest:
    if tree.kind == "registered":
        return _REGISTERED[cls][1](tree.rest, children)
    if issubclass(cls, tuple):
        return cls(*children)
    made = object.__new__(cls)  # its fields are known: __init__ and __post_init__ may want real arrays
    known = (*zip(tree.keys, children, strict=True), *tree.rest)  # type: ignore[misc]
    for name, value in known:
        object.__setattr__(made, name, value)
    return made


def leaf_paths(tree: Tree, names: Mapping[int, str]) -> list[str]:
    """How a user writes each leaf of the arguments (args, kwargs) of a function.

    >>> leaf_paths(flatten((({"w": 1}, 2), {"scale": 3}))[1], {0: "params"})
    ["params['w']", 'argument 1', 'scale']
    """
    args, kwargs = tree.children
    out: list[str] = []
    for i, child in enumerate(args.children):
        _paths(child, names.get(i, f"argument {i}"), out)
    for name, child in zip(kwargs.keys, kwargs.children, strict=True):
        _paths(child, name, out)
    return out


def _paths(tree: Tree, path: str, out: list[str]) -> None:
    if tree.kind == "leaf":
        out.append(path)
    keys: Sequence[Nest] = tree.keys or range(len(tree.children))
    for key, child in zip(keys, tree.children, strict=True):
        _paths(child, f"{path}.{key}" if tree.kind == "fields" else f"{path}[{key!r}]", out)


def tree_map(f: Callable[[Nest], Nest], value: Nest) -> Nest:
    """Apply a function to every leaf.

    >>> tree_map(lambda x: -x, {"a": [1, 2]})
    {'a': [-1, -2]}
    """
    leaves, tree = flatten(value)
    return unflatten(tree, [f(x) for x in leaves])
