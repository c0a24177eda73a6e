"""Fusion: grow groups around contractions and reductions, then join what is left of elementwise chains."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.ir.compose import ComposeError
from rlx.ir.graph import Graph, Node, copy_node, finish_rewrite
from rlx.ir.op import Role, get_op
from rlx.ir.types import TupleType
from rlx.passes.groups import GroupGraph, is_scalar_constant, is_view, kind_of


MOST_OUTPUTS = 3  # values that one kernel may store for others


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.info = GroupGraph(graph)
        self.graph = graph
        self.group_of: dict[int, int] = {}
        self.members: dict[int, set[int]] = {}

    def run(self) -> dict[int, set[int]]:
        nodes = [n for n in self.info.compute if not is_view(n)]
        for node in nodes:
            if self.info.form(node) in ("contract", "conv"):
                self.start(node)
        for root in list(self.members):
            self.grow_epilogue(root)
        for node in nodes:
            if node.id not in self.group_of and self.info.form(node) == "reduce":
                self.start(node)
                self.grow(node.id, forward=True, backward=True, kinds=("map", "reduce"))
        for node in reversed(nodes):
            if node.id not in self.group_of:
                self.start(node)
                if self.info.form(node) == "map":
                    self.grow(node.id, forward=False, backward=True, kinds=("map",))
        return self.members

    def start(self, node: Node) -> None:
        self.group_of[node.id] = node.id
        self.members[node.id] = {node.id}

    def grow(self, root: int, forward: bool, backward: bool, kinds: tuple[str, ...]) -> None:
        changed = True
        trial = best = self.members[root]
        while changed:
            changed = False
            for candidate in self.neighbours(trial, forward, backward):
                if candidate.id in self.group_of or self.info.form(candidate) not in kinds:
                    continue
                if self.fits(trial | {candidate.id}):
                    trial = trial | {candidate.id}
                    changed = True
                    if len(self.info.outputs(trial)) <= len(self.info.outputs(best)):
                        best = trial
        self.members[root] = best
        for i in best:
            self.group_of[i] = root

    def grow_epilogue(self, root: int) -> None:
        """Elementwise ops after a contraction; a value may be used twice on the way, not at the end."""
        best = set(self.members[root])
        trial = set(best)
        grew = True
        while grew:
            grew = False
            for i in sorted(trial):
                for user in self.info.users[i]:
                    free = user.id not in trial and user.id not in self.group_of and user.id in self.info.live
                    if not free or is_view(user) or self.info.form(user) != "map":
                        continue
                    wider = trial | {user.id}
                    if len(self.info.outputs(wider)) <= MOST_OUTPUTS and self.composes(wider):
                        trial, grew = wider, True
                        if len(self.info.outputs(trial)) == 1:
                            best = set(trial)
        self.members[root] = best
        for i in best:
            self.group_of[i] = root

    def composes(self, group: set[int]) -> bool:
        if not self.info.is_convex(group):
            return False
        try:
            self.info.kernel(group)
        except ComposeError:
            return False
        return True

    def neighbours(self, group: set[int], forward: bool, backward: bool) -> list[Node]:
        out: dict[int, Node] = {}
        if forward:
            for i in sorted(group):
                for user in self.info.users[i]:
                    if user.id in self.info.live and user.id not in group and not is_view(user):
                        out[user.id] = user
        if backward:
            for i in sorted(group, reverse=True):
                for o in self.sources(self.graph.nodes[i]):
                    if o.id not in group and o.op.role is Role.COMPUTE:
                        out[o.id] = o
        return list(out.values())

    def sources(self, node: Node) -> Iterable[Node]:
        """Operands behind views."""
        for o in node.operands:
            while is_view(o):
                o = o.operands[0]
            yield o

    def fits(self, group: set[int]) -> bool:
        """Whether a group is one kernel that stores few values."""
        outputs = self.info.outputs(group)
        return len(outputs) <= MOST_OUTPUTS and self.composes(group)


def fuse(graph: Graph) -> Graph:
    """Replace groups of ops by region nodes."""
    fuser = _Fuser(graph)
    groups = fuser.run()
    last = {max(members): members for members in groups.values()}
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    mapping: dict[int, Node] = {}
    grouped = set(fuser.group_of)
    live = graph.live()

    def value(node: Node) -> Node:
        """A node of the new graph; views and constants are copied when something reads them."""
        if node.id not in mapping:
            mapping[node.id] = copy_node(node, [value(o) for o in node.operands], out)
        return mapping[node.id]

    for node in graph.nodes:
        if node.op.role in (Role.INPUT, Role.PARAM, Role.STATE):
            value(node)
        elif node.id in last:
            _emit_region(fuser.info, last[node.id], value, mapping, out)
        elif node.id in live and node.id not in grouped and not is_view(node) and not is_scalar_constant(node):
            if node.op.role is not Role.CONSTANT:
                value(node)
    for node in graph.roots():
        value(node)
    finish_rewrite(graph, out, mapping)
    return out


def _emit_region(info: GroupGraph, members: set[int], value, mapping: dict[int, Node], out: Graph) -> None:  # type: ignore[no-untyped-def]
    first = info.graph.nodes[min(members)]
    if len(members) == 1 and (isinstance(first.type, TupleType) or info.form(first) == "other"):
        value(first)
        return
    kernel, body, operands = info.kernel(members)
    where = tuple(dict.fromkeys(w for i in sorted(members) for w in info.graph.nodes[i].where))
    made = out.add(get_op("region"), [value(o) for o in operands], {"kind": kind_of(kernel)}, (body,), where=where)
    for node, result in zip(info.outputs(members), out.results(made), strict=True):
        mapping[node.id] = result
