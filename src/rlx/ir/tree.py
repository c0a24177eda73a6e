"""Nested containers of values: flattened to a list of leaves, and put together again from other leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rlx.errors import TypeError_

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """Leaves of nested tuples, lists, named tuples and dicts (keys in sorted order), and their way back.

    None is an empty container. Everything else is a leaf.

    >>> leaves, rebuild = flatten({"b": (1, None), "a": [2]})
    >>> leaves, rebuild(["x", "y"])
    ([2, 1], {'a': ['x'], 'b': ('y', None)})
    """
    leaves: list[Any] = []
    assemble = _collect(tree, leaves)

    def rebuild(values: Sequence[Any]) -> Any:
        if len(values) != len(leaves):
            raise TypeError_(f"{structure(tree)} holds {len(leaves)} values, got {len(values)}")
        return assemble(iter(values))

    return leaves, rebuild


def _collect(tree: Any, leaves: list[Any]) -> Callable[[Any], Any]:
    if tree is None:
        return lambda values: None
    if isinstance(tree, dict):
        inner = {key: _collect(tree[key], leaves) for key in sorted(tree)}
        return lambda values: {key: make(values) for key, make in inner.items()}
    if isinstance(tree, (tuple, list)):
        kind = type(tree)
        parts = [_collect(item, leaves) for item in tree]
        if hasattr(kind, "_fields"):
            return lambda values: kind(*(make(values) for make in parts))
        return lambda values: kind(make(values) for make in parts)
    leaves.append(tree)
    return next


def structure(tree: Any) -> str:
    """The shape of a tree as text, for messages and for comparing two trees.

    >>> structure({"b": (1, None), "a": [2]})
    "{'a': [*], 'b': (*, None)}"
    """
    if tree is None:
        return "None"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {structure(tree[key])}" for key in sorted(tree)) + "}"
    if isinstance(tree, (tuple, list)):
        inner = ", ".join(structure(item) for item in tree)
        if hasattr(tree, "_fields"):
            return f"{type(tree).__name__}({inner})"
        return f"[{inner}]" if isinstance(tree, list) else f"({inner}{',' if len(tree) == 1 else ''})"
    return "*"
