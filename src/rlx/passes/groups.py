"""Groups of nodes that become one kernel: the body a group would have, and whether it is one kernel at all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from rlx.ir.compose import ComposeError, ContractNest, ConvNest, Kernel, Nest, compose, lower_node
from rlx.ir.form import Contract, Conv, Map, Pieces, Reduce
from rlx.ir.graph import Graph, Node, copy_node
from rlx.ir.op import Role
from rlx.ir.types import TupleType

INLINE_CONSTANT = 1  # constants of one element are part of a body; larger ones are operands


def is_view(node: Node) -> bool:
    """Ops that only rename elements."""
    return node.op.role is Role.COMPUTE and (node.op.has("view") or node.op.reader_side)


def is_scalar_constant(node: Node) -> bool:
    return node.op.role is Role.CONSTANT and node.attrs["value"].array.size == INLINE_CONSTANT


class GroupGraph:
    """A MIR graph with what fusion asks about it: users, forms, bodies of groups."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users = graph.users()
        self.live = graph.live()
        self.output_ids = {n.id for n in graph.roots()}
        self._forms: dict[int, str] = {}

    @cached_property
    def compute(self) -> list[Node]:
        """Live nodes that need a kernel."""
        return [n for n in self.graph.nodes if n.id in self.live and n.op.role is Role.COMPUTE]

    def form(self, node: Node) -> str:
        """map, reduce, contract, conv or other: what kind of kernel a node alone would be."""
        if node.id not in self._forms:
            self._forms[node.id] = self._kind(node)
        return self._forms[node.id]

    def _kind(self, node: Node) -> str:
        if node.op.role is not Role.COMPUTE or node.op.host_only is not None or isinstance(node.type, TupleType):
            return "other"
        form = lower_node(node)
        for kind, name in ((Map, "map"), (Pieces, "map"), (Reduce, "reduce"), (Contract, "contract"), (Conv, "conv")):
            if isinstance(form, kind):
                return name
        return "other"

    def outputs(self, group: Iterable[int]) -> list[Node]:
        """Nodes of a group whose values are needed outside of it."""
        inside = set(group)
        return [self.graph.nodes[i] for i in sorted(inside) if self._needed_outside(i, inside)]

    def _needed_outside(self, id: int, inside: set[int]) -> bool:
        """Views belong to whoever reads them, so only what lies behind a view counts."""
        if id in self.output_ids:
            return True
        for user in self.users[id]:
            if user.id in self.live and user.id not in inside:
                if not is_view(user) or self._needed_outside(user.id, inside):
                    return True
        return False

    def is_convex(self, group: set[int]) -> bool:
        """No path leaves a group and comes back."""
        low = min(group)
        stack = [o for i in group for o in self.graph.nodes[i].operands if o.id not in group]
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            if node.id in seen or node.id < low:
                continue
            seen.add(node.id)
            if node.id in group:
                return False
            stack.extend(node.operands)
        return True

    def body(self, group: Iterable[int], inline_views: bool = True) -> tuple[Graph, list[Node]]:
        """The body of a group and the operands it reads. Views on the way in are part of the body."""
        inside = set(group)
        body = Graph("region")
        operands: list[Node] = []
        mapping: dict[int, Node] = {}

        def value(node: Node) -> Node:
            if node.id in mapping:
                return mapping[node.id]
            if node.id in inside or is_scalar_constant(node) or (inline_views and is_view(node)):
                made = copy_node(node, [value(o) for o in node.operands], body)
            else:
                made = body.input(f"x{len(operands)}", node.shape, node.dtype)
                operands.append(node)
            mapping[node.id] = made
            return made

        with body.building():
            for i in sorted(inside):
                value(self.graph.nodes[i])
        body.set_outputs({f"y{k}": mapping[n.id] for k, n in enumerate(self.outputs(inside))})
        return body, operands

    def kernel(self, group: Iterable[int]) -> tuple[Kernel, Graph, list[Node]]:
        """The kernel of a group; ComposeError says why it is none."""
        try:
            body, operands = self.body(group)
            return compose(body), body, operands
        except ComposeError:
            body, operands = self.body(group, inline_views=False)
            return compose(body), body, operands


def kind_of(kernel: Kernel) -> str:
    """The name of a kernel's root."""
    if isinstance(kernel, Nest):
        return "reduce" if kernel.stats else "map"
    if isinstance(kernel, ContractNest):
        return "contract"
    return "conv" if isinstance(kernel, ConvNest) else "op"
