"""From groups of ops to region nodes: bodies, their kernels, and the graph in which
groups are single nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from rlx.cost.io import is_scalar_constant
from rlx.errors import PlanError
from rlx.fuse.facts import WHOLE, Facts
from rlx.ir.attr import attr_key
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import copy_node, finish_rewrite
from rlx.kernel.compose import compose
from rlx.kernel.nests import AttentionNest, ComposeError, ContractNest, ConvNest, Kernel, Nest, TransformNest
from rlx.records import dataclass


@dataclass(frozen=True)
class Group:
    """Ops that are one kernel. It computes `nodes` for everyone, and `copies` for itself only."""

    nodes: tuple[int, ...]
    copies: tuple[int, ...] = ()

    @property
    def evaluated(self) -> tuple[int, ...]:
        return tuple(sorted((*self.nodes, *self.copies)))


@dataclass(frozen=True)
class Region:
    """A group as it goes into the graph: the body, which equal groups share, and the
    kernel it composes to.
    """

    body: Graph
    kernel: Kernel


def kind_of(kernel: Kernel) -> str:
    """The name of a kernel's root."""
    if isinstance(kernel, Nest):
        return "reduce" if kernel.stats else "map"
    if isinstance(kernel, ContractNest):
        return "contract"
    if isinstance(kernel, AttentionNest):
        return "attention"
    if isinstance(kernel, TransformNest):
        return "transform"
    return "conv" if isinstance(kernel, ConvNest) else "op"


class RegionMaker:
    """Builds bodies of groups; equal groups (the layers of a model) are composed once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._known: dict[object, Region | ComposeError] = {}

    def region(self, group: Group, outputs: Sequence[int]) -> tuple[Region, list[Node]]:
        """The region of a group and the values that it reads; ComposeError says why it cannot be a kernel."""
        try:
            return self._region(group, outputs, inline_views=True)
        except ComposeError:
            # A kernel that cannot take an index as it comes out may still take the view as an operand.
            return self._region(group, outputs, inline_views=False)

    def _region(self, group: Group, outputs: Sequence[int], inline_views: bool) -> tuple[Region, list[Node]]:
        inside = self._inside(self._needed(group, outputs), inline_views)
        operands = [n for n, is_operand in inside if is_operand]
        key = self._key(inside, outputs)
        known = self._known.get(key)
        if known is None:
            try:
                body = self._body(inside, outputs)
                known = Region(body, compose(body))
            except ComposeError as e:
                known = e
            self._known[key] = known
        if isinstance(known, ComposeError):
            raise known
        return known, operands

    def _needed(self, group: Group, outputs: Sequence[int]) -> set[int]:
        """Ops of a group that its outputs need: of others, readers compute the values for themselves."""
        nodes, members = self.facts.graph.nodes, set(group.evaluated)
        found, stack, first = set[int](), list(outputs), min(members)
        while stack:
            i = stack.pop()
            if i not in found and (i in members or self._leads_on(nodes[i])):
                found.add(i)
                stack += [o.id for o in nodes[i].operands if o.id >= first]
        return members & found

    def _leads_on(self, node: Node) -> bool:
        """Whether ops of a group may be behind a node that is none of them: kernels in between would have to
        run both before and after the group's own."""
        return node.op.role is not Role.COMPUTE or self.facts.io.is_view(node)

    def _inside(self, members: set[int], inline_views: bool) -> list[tuple[Node, bool]]:
        """Nodes of a body in order, and whether each is an operand. Views on the way in are part of it."""
        found: dict[int, tuple[Node, bool]] = {}
        nodes = self.facts.graph.nodes
        accesses = [a for i in members for a in self.facts.accesses(nodes[i])]
        from_memory = {a.operand.id for a in accesses if a.how in WHOLE}
        from_memory |= {a.root for a in accesses if a.how == "checked"}  # what is indexed by data

        def visit(node: Node) -> None:
            if node.id in found:
                return
            own = node.id in members or (is_scalar_constant(node) and node.id not in from_memory)
            own = own or (node.op.role is Role.RESULT and node.operands[0].id in members)
            if own or (self.facts.io.is_view(node) and (inline_views or self._on_the_way(node, members))):
                for o in node.operands:
                    visit(o)
                found[node.id] = (node, False)
            else:
                found[node.id] = (node, True)

        for i in sorted(members):
            for v in (i, *self.facts.values(i)):
                visit(nodes[v])
        return list(found.values())

    def _on_the_way(self, node: Node, members: set[int]) -> bool:
        """Views of a group's own values are inside it in any case, and packed
        weights with their reader.
        """
        root = self.facts.io.root(node)
        owner = root.operands[0] if root.op.role is Role.RESULT else root
        return owner.id in members or node.reader_side

    def _key(self, inside: Sequence[tuple[Node, bool]], outputs: Sequence[int]) -> object:
        number = {n.id: i for i, (n, _) in enumerate(inside)}
        parts: list[object] = []
        for node, is_operand in inside:
            if is_operand:
                parts.append(node.type)
            else:
                attrs = tuple([attr_key(v) for v in node.attrs.values()])
                parts.append((node.op, attrs, tuple([number[o.id] for o in node.operands])))
        return (tuple(parts), tuple(number[i] for i in outputs))

    def _body(self, inside: Sequence[tuple[Node, bool]], outputs: Sequence[int]) -> Graph:
        """Locations stay with the region: groups of many layers share one body."""
        body = Graph("region")
        made: dict[int, Node] = {}
        with body.building():
            for node, is_operand in inside:
                if is_operand:
                    kind = get_op("input")
                    attrs = {"name": f"x{len(body.inputs)}", "type": node.tensor}
                    made[node.id] = body.add(kind, (), attrs, where=())
                else:
                    operands = [made[o.id] for o in node.operands]
                    copy = body.adopt(node, operands, where=())
                    if copy is None:
                        copy = body.add(node.op, operands, node.attrs, where=())
                    made[node.id] = copy
            body.set_outputs({f"y{k}": made[i] for k, i in enumerate(outputs)})
        return body


def emit_graph(
    facts: Facts, groups: Sequence[Group], outputs: Mapping[Group, Sequence[int]], maker: RegionMaker
) -> Graph:
    """The graph in which every group is one region node; views and constants follow whoever reads them."""
    graph = facts.graph
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    mapping: dict[int, Node] = {}

    def value(node: Node) -> Node:
        """A node of the new graph; views, constants and results are copied when something reads them."""
        todo = [node]
        while todo:
            one = todo[-1]
            missing = [] if one.id in mapping else [o for o in one.operands if o.id not in mapping]
            todo += missing
            if not missing:
                todo.pop()
                if one.id not in mapping:
                    mapping[one.id] = copy_node(one, [mapping[o.id] for o in one.operands], out)
        return mapping[node.id]

    for node in graph.nodes:
        if node.op.role in (Role.INPUT, Role.PARAM, Role.STATE):
            value(node)
    for group in _in_order(facts, groups):
        _emit(facts, group, outputs[group], maker, value, mapping, out)
    for node in graph.roots():
        value(node)
    finish_rewrite(graph, out, mapping)
    return out


def _emit(facts, group, outputs, maker, value, mapping, out) -> None:  # type: ignore[no-untyped-def]
    first = facts.graph.nodes[group.nodes[0]]
    if len(group.nodes) == 1 and facts.kind(first) == "own":
        made = mapping[first.id] = copy_node(first, [value(o) for o in first.operands], out)
        out.results(made)  # a kernel writes all of its results, read or not
        return
    region, operands = maker.region(group, outputs)
    places = (w for i in group.nodes for w in facts.graph.nodes[i].where)
    where = tuple(dict.fromkeys(places))
    attrs = {"kind": kind_of(region.kernel)}
    made = out.add(get_op("region"), [value(o) for o in operands], attrs, (region.body,), where=where)
    for i, result in zip(outputs, out.results(made), strict=True):
        mapping[i] = result


def _in_order(facts: Facts, groups: Sequence[Group]) -> list[Group]:
    """Groups so that each comes after those it reads; in the order of the graph where
    that leaves a choice.
    """
    home = {i: g for g, group in enumerate(groups) for i in group.nodes}
    needs: list[set[int]] = []
    readers: list[list[int]] = [[] for _ in groups]
    for g, group in enumerate(groups):
        roots = {a.root for i in group.evaluated for a in facts.accesses(facts.graph.nodes[i])}
        before = {home[r] for r in map(_owner(facts), roots) if r in home} - {g}
        needs.append(before)
        for b in before:
            readers[b].append(g)
    ready = [(max(groups[g].nodes), g) for g, before in enumerate(needs) if not before]
    heapq.heapify(ready)
    order = []
    while ready:
        _, g = heapq.heappop(ready)
        order.append(groups[g])
        for r in readers[g]:
            needs[r].discard(g)
            if not needs[r]:
                heapq.heappush(ready, (max(groups[r].nodes), r))
    if len(order) != len(groups):
        stuck = next(groups[g] for g, before in enumerate(needs) if before)
        raise PlanError(f"the group of %{stuck.nodes[0]} depends on itself: fusion created a cycle")
    return order


def _owner(facts: Facts):  # type: ignore[no-untyped-def]
    """The node that computes a stored value: for a result, the op with several of them."""

    def owner(i: int) -> int:
        node = facts.graph.nodes[i]
        return node.operands[0].id if node.op.role is Role.RESULT else i

    return owner
