"""Small passes that every program needs: dead code, outputs with storage, derived weights."""

from __future__ import annotations

from rlx.ir.dim import Expr
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import copy_node, finish_rewrite, rewrite
from rlx.ir.types import TensorType, TupleType, type_symbols
from rlx.kernel.form import is_dense
from rlx.kernel.views import view_layouts


def remove_dead(graph: Graph) -> Graph:
    """Drop nodes that no output needs."""
    live = graph.live()
    if all(n.id in live or n.op.role in (Role.INPUT, Role.PARAM, Role.STATE) for n in graph.nodes):
        return graph
    return rewrite(graph, lambda node, operands, out: None)


def materialize_outputs(graph: Graph) -> Graph:
    """Every output gets its own storage: a view, an input or a value named twice is copied."""
    seen: set[int] = set()
    copied = set()
    views = view_layouts(graph)
    for name, node in graph.outputs.items():
        computed = node.op.role in (Role.COMPUTE, Role.RESULT, Role.REGION)
        if not computed or node.id in views or node.reader_side or node.id in seen:
            copied.add(name)
        seen.add(node.id)
    if not copied:
        return graph
    out = remove_dead(graph)
    copy = get_op("copy")
    out.set_outputs(
        {
            name: out.add(copy, (node,), where=node.where) if name in copied else node
            for name, node in out.outputs.items()
        }
    )
    return out


def materialize_operands(graph: Graph) -> Graph:
    """Every operand of a collective gets its own contiguous storage: others read it in place. One
    that is reduced in place has no other readers. What a kernel reads in its own layout (channels in
    blocks) is in one piece, too: a view may repeat or skip pixels.
    """
    views, users, ends = view_layouts(graph), graph.users(), {n.id for n in graph.ends()}

    def is_whole(operand: Node) -> bool:
        view = views.get(operand.id)
        return view is None or (view.layout.offset == 0 and is_dense(view.layout, operand.shape))

    def is_fit(node: Node, operand: Node) -> bool:
        if node.op.family != "collective":
            return is_whole(operand)
        view = views.get(operand.id)
        root = operand if view is None else graph.nodes[view.root]
        computed = root.op.role in (Role.COMPUTE, Role.RESULT) and not operand.reader_side
        alone = view is None and len(users[operand.id]) == 1 and operand.id not in ends
        return computed and is_whole(operand) and root.id not in ends and (alone or not node.op.in_place)

    unfit = {
        n.id
        for n in graph.nodes
        if (n.op.family == "collective" or (n.op.storage and n.reader_side)) and not is_fit(n, n.operands[0])
    } & graph.live()
    if not unfit:
        return graph
    copy = get_op("copy")

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.id not in unfit:
            return None
        stored = out.add(copy, operands, where=node.where)
        return out.add(node.op, (stored,), node.attrs, where=node.where)

    return rewrite(graph, visit)


def uses_symbols(node: Node) -> bool:
    """Whether the value of a node depends on the size of a symbol."""
    return bool(type_symbols(node.type)) or any(_has_symbols(v) for v in node.attrs.values())


def _has_symbols(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_has_symbols(v) for v in value)
    return isinstance(value, Expr) or (isinstance(value, TensorType) and bool(type_symbols(value)))


def is_derivable(node: Node) -> bool:
    """Whether a value computed from weights can be computed once, at load."""
    plain = node.op.effects == "none" and not node.bodies and not node.reader_side
    return plain and not uses_symbols(node) and not isinstance(node.type, TupleType)


def is_free_view(node: Node) -> bool:
    """Views of part of a tensor, or that repeat it: they cost nothing where they are
    read, a copy of them would.
    """
    return node.op.has("view") and node.tensor.numel != node.operands[0].tensor.numel


def weight_only(graph: Graph) -> set[int]:
    """Nodes to compute at load: those that depend on weights alone, but not the free
    views that others read.
    """
    rooted = {n.id for n in graph.roots()}
    fixed: set[int] = set()
    for node in graph.nodes:
        if node.op.role in (Role.PARAM, Role.CONSTANT):
            fixed.add(node.id)
        elif node.op.role is Role.COMPUTE and node.operands and all(o.id in fixed for o in node.operands):
            if node.id not in rooted and is_derivable(node):
                fixed.add(node.id)
    users = graph.users()
    for node in reversed(graph.nodes):
        if node.id in fixed and node.op.role is Role.COMPUTE and is_free_view(node):
            if any(u.id not in fixed for u in users[node.id]):
                fixed.discard(node.id)
    return fixed


def split_derived(graph: Graph) -> tuple[Graph, Graph | None]:
    """Move what depends on weights only to a graph that runs at load; its results become params."""
    fixed = weight_only(graph)
    rooted = {n.id for n in graph.roots()}
    live = graph.live()
    wanted = [
        o
        for node in graph.nodes
        if node.id in live and node.id not in fixed
        for o in node.operands
        if o.id in fixed and o.op.role is Role.COMPUTE
    ]
    wanted = list({o.id: o for o in wanted}.values())
    if not wanted:
        return graph, None
    derived = Graph(f"{graph.name}.weights")
    inside: dict[int, Node] = {}
    within = {n.id for n in graph.nodes if n.id in fixed and (n.id in live or n.op.role is Role.PARAM)}
    for node in reversed(graph.nodes):  # views that others read too
        if node.id in within:
            within.update(o.id for o in node.operands)
    for node in graph.nodes:
        if node.id in within:
            inside[node.id] = copy_node(node, [inside[o.id] for o in node.operands], derived)
    derived.param_values = dict(graph.param_values)
    names = {o.id: f"derived:{i}" for i, o in enumerate(wanted)}
    derived.set_outputs({names[o.id]: inside[o.id] for o in wanted})
    main = Graph(graph.name)
    for c in graph.constraints:
        main.assume(c)
    mapping: dict[int, Node] = {}
    needed = {o.id for n in graph.nodes if n.id in live and n.id not in fixed for o in n.operands}
    for node in graph.nodes:
        if node.id in names:
            attrs = {"name": names[node.id], "type": node.tensor}
            mapping[node.id] = main.add(get_op("param"), (), attrs, where=node.where)
        elif node.id in fixed:
            if node.id in needed or node.id in rooted:
                mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], main)
        elif node.id in live or node.op.role in (Role.INPUT, Role.STATE):
            mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], main)
    finish_rewrite(graph, main, mapping)
    main.param_values = {k: v for k, v in graph.param_values.items() if k in main.params}
    return main, derived
