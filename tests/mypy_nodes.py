"""A plugin of mypy: `==` on nodes is elementwise, so RLX asks with `is` whether two nodes are one.

It reports `==`, `!=`, `in`, `index`, `count` and `remove` on nodes and sequences of nodes. Sets and dicts are
searched by hash, which is the identity of a node.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import MethodContext, Plugin
from mypy.types import Instance, TupleType, Type, UnionType, get_proper_type

NODE = "rlx.ir.node.Node"
BY_HASH = ("builtins.dict", "builtins.set", "builtins.frozenset", "typing.Mapping", "typing.AbstractSet")
METHODS = ("__eq__", "__ne__", "__contains__", "index", "count", "remove")
ADVICE = "nodes are compared by value here; use `is`, or place_of, is_among, are_same of rlx.ir.node"


def holds_nodes(given: Type) -> bool:
    """Whether values of this type are nodes, or are compared by comparing nodes."""
    t = get_proper_type(given)
    if isinstance(t, Instance):
        return t.type.fullname == NODE or any(holds_nodes(a) for a in t.args)
    return isinstance(t, (TupleType, UnionType)) and any(holds_nodes(item) for item in t.items)


def report(context: MethodContext) -> Type:
    owner = get_proper_type(context.type)
    given = [get_proper_type(t) for types in context.arg_types for t in types]
    if isinstance(owner, Instance) and any(base.fullname in BY_HASH for base in owner.type.mro):
        # A key that holds a node beside other things may have the hash of another key.
        wrong = any(holds_nodes(t) and not isinstance(t, Instance) for t in given)
    else:
        wrong = any(map(holds_nodes, [owner, *given]))
    if wrong:
        errors = context.api.errors  # type: ignore[attr-defined]
        silenced, errors._watchers = errors._watchers, []  # mypy drops what is reported about `in`
        context.api.fail(ADVICE, context.context)
        errors._watchers = silenced
    return context.default_return_type


class NodesByIdentity(Plugin):
    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return report if fullname.rpartition(".")[2] in METHODS else None


def plugin(version: str) -> type[Plugin]:
    return NodesByIdentity
