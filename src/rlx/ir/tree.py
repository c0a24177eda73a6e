"""Nested tuples, lists and dicts of arrays, flattened and put together again.

>>> leaves, tree = flatten({"w": 1, "b": (2, None)})
>>> leaves, unflatten(tree, [10, 20]), str(tree)
([2, 1], {'b': (10, None), 'w': 20}, "{'b': (*, None), 'w': *}")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlx.records import dataclass


@dataclass(frozen=True)
class Tree:
    """The shape of a nest: a kind (leaf, none, tuple, list, dict), its children, and the keys of a dict."""

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[str, ...] = ()

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
        return "None" if self.kind == "none" else "*"


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """Leaves in a fixed order (dicts by key) and the tree that holds them."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Tree:
    if value is None:
        return Tree("none")
    if isinstance(value, dict):
        keys = tuple(sorted(value))
        return Tree("dict", tuple(_flatten(value[k], leaves) for k in keys), keys)
    if isinstance(value, (tuple, list)):
        return Tree(
            "tuple" if isinstance(value, tuple) else "list", tuple(_flatten(v, leaves) for v in value)
        )
    leaves.append(value)
    return Tree("leaf")


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The nest with these leaves."""
    return _unflatten(tree, iter(leaves))


def _unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind == "none":
        return None
    children = [_unflatten(c, leaves) for c in tree.children]
    if tree.kind == "dict":
        return dict(zip(tree.keys, children, strict=True))
    return tuple(children) if tree.kind == "tuple" else children


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
    keys: Sequence[Any] = tree.keys if tree.kind == "dict" else range(len(tree.children))
    for key, child in zip(keys, tree.children, strict=True):
        _paths(child, f"{path}[{key!r}]", out)


def tree_map(f: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every leaf.

    >>> tree_map(lambda x: -x, {"a": [1, 2]})
    {'a': [-1, -2]}
    """
    leaves, tree = flatten(value)
    return unflatten(tree, [f(x) for x in leaves])
