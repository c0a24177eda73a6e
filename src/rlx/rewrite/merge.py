"""Parallel matmuls: contractions of one value with several weights become one with concatenated weights.

The joined weight is derived at load; readers see slices of the one result, which are views. What follows
every matmul alike (a bias each) is joined too. Whether it pays is the gate's business: the value is read
once instead of many times, but an elementwise op that could have been an epilogue becomes a kernel of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.cost.decision import Decision, decide
from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel
from rlx.cost.profile import GraphIoProfile
from rlx.errors import provenance
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op, run_rule
from rlx.ir.rewrite import copy_node, finish_rewrite
from rlx.ir.types import TupleType
from rlx.ir.weights import weight_ids
from rlx.kernel.form import CodedContract, Contract, Map, dense
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import axes
from rlx.records import dataclass


@dataclass(frozen=True, eq=False)
class Branch:
    """A matmul and the elementwise ops that follow it, each with a weight."""

    product: Node
    chain: tuple[Node, ...]

    @property
    def end(self) -> Node:
        return self.chain[-1] if self.chain else self.product

    @property
    def columns(self) -> int:
        size = self.product.shape[-1]
        assert isinstance(size, int)
        return size


def merge_products(
    graph: Graph, gate: IoFusionGate, assume: Mapping[str, int] | None = None
) -> tuple[Graph, list[Decision]]:
    """The graph with parallel matmuls joined where the gate agrees, and its decision about each."""
    fixed = weight_ids(graph)
    groups = _parallel(graph, fixed)
    if not groups:
        return graph, []
    io = IoModel(graph, assume)
    users = graph.users()
    kept = {n.id for n in graph.roots()}
    decisions, chosen = [], []
    for products in groups:
        branches = _branches(products, users, fixed, kept)
        before, after = _price(io, branches, users, kept)
        made = decide(gate, (), before, after, rule="merge products", where=_where(branches))
        decisions.append(made)
        if made.verdict:
            chosen.append(branches)
    return (_rewrite(graph, chosen, fixed) if chosen else graph), decisions


def _where(branches: Sequence[Branch]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(w for b in branches for w in b.product.where))


# -- finding them


def _parallel(graph: Graph, fixed: set[int]) -> list[list[Node]]:
    """Contractions of the same value over the same axis with constant matrices, two or more each."""
    found: dict[object, list[Node]] = {}
    live = graph.live()
    for node in graph.nodes:
        if node.id not in live or not _is_product(node, fixed):
            continue
        x, matrix, *_ = node.operands
        key = (x.id, _summed(node), matrix.dtype.name, node.dtype.name, _coding(node))
        found.setdefault(key, []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _is_product(node: Node, fixed: set[int]) -> bool:
    """x @ w with a constant matrix w."""
    if not _is_plain(node) or not node.op.heavy:
        return False
    form = _contraction(node)
    if form is None or form.batch or len(form.contract) != 1 or len(form.rhs) != 2:
        return False
    static = all(isinstance(d, int) and d > 0 for d in form.rhs)
    x, *weights = node.operands
    return static and all(w.id in fixed for w in weights) and x.id not in fixed


def _contraction(node: Node) -> Contract | None:
    """What a node contracts."""
    form = lower_node(node)
    if isinstance(form, CodedContract):
        return form.contract
    return form if isinstance(form, Contract) else None


def _summed(product: Node) -> tuple[int, ...]:
    """The axes of x that are summed over."""
    form = _contraction(product)
    assert form is not None
    return tuple(i for i, _ in form.contract)


def _reads_codes(product: Node) -> bool:
    """Whether a matmul takes codes and factors themselves."""
    return isinstance(lower_node(product), CodedContract)


def _coding(product: Node) -> object:
    """How the weight of a matmul is decoded from fewer bits, or None: such weights join as codes."""
    if _reads_codes(product):
        return _kind_of_codes(product, product.operands[1:])
    matrix = product.operands[1]
    if not matrix.op.decodes or product.attrs["rhs_contract"] != (0,):
        return None
    return _kind_of_codes(matrix, matrix.operands)


def _kind_of_codes(node: Node, parts: Sequence[Node]) -> object:
    kinds = tuple(_kind_of_codes(o, o.operands) if o.op.decodes else o.dtype for o in parts)
    return node.op.name, tuple(sorted(node.attrs.items())), kinds


def _is_plain(node: Node) -> bool:
    """Whether a node computes one tensor, by a form and not by a body."""
    return node.op.role is Role.COMPUTE and not node.bodies and not isinstance(node.type, TupleType)


def _branches(
    products: Sequence[Node], users: Mapping[int, list[Node]], fixed: set[int], kept: set[int]
) -> list[Branch]:
    """Products with as long a chain behind them as all have alike."""
    branches = [Branch(p, ()) for p in products]
    while True:
        following = [_only_user(b.end, users, kept) for b in branches]
        steps = [n for n in following if n is not None]
        if len(steps) != len(branches) or not _alike(branches, steps, fixed):
            return branches
        branches = [Branch(b.product, (*b.chain, n)) for b, n in zip(branches, steps, strict=True)]


def _only_user(node: Node, users: Mapping[int, list[Node]], kept: set[int]) -> Node | None:
    readers = users[node.id]
    return readers[0] if len(readers) == 1 and node.id not in kept else None


def _alike(branches: Sequence[Branch], steps: Sequence[Node], fixed: set[int]) -> bool:
    """Whether every branch goes on with the same op, with a weight per column or the same scalar."""
    first = steps[0]
    for branch, step in zip(branches, steps, strict=True):
        if not _is_plain(step) or step.op is not first.op or dict(step.attrs) != dict(first.attrs):
            return False
        if step.shape != branch.end.shape or step.dtype is not first.dtype:  # a cast is as good as a bias
            return False
        if len(step.operands) != len(first.operands) or step.op.has("view"):
            return False
        at = [i for i, o in enumerate(step.operands) if o is branch.end]
        if at != [i for i, o in enumerate(first.operands) if o is branches[0].end] or len(at) != 1:
            return False
        form = lower_node(step)
        if (
            not isinstance(form, Map)
            or not all(e.prim == "load" for e in form.body.args)
            or not form.body.args
        ):
            return False
        if form.body.args[at[0]].args != axes(step.rank):
            return False
        if not all(i in at or _by_column(o, branch.columns, fixed) for i, o in enumerate(step.operands)):
            return False
    return True


def _by_column(node: Node, columns: int, fixed: set[int]) -> bool:
    """A weight of one value per column."""
    return node.id in fixed and node.rank > 0 and node.shape == (*(1,) * (node.rank - 1), columns)


# -- what it saves


def _price(
    io: IoModel, branches: Sequence[Branch], users: Mapping[int, list[Node]], kept: set[int]
) -> tuple[GraphIoProfile, GraphIoProfile]:
    """IO of the separate matmuls, each with its chain as epilogue, and of the joined one."""
    x = branches[0].product.operands[0]
    read = io.bytes(io.root(x))
    results = [io.bytes(b.end) for b in branches]
    weights = sum(io.bytes(o) for b in branches for n in (b.product, *b.chain) for o in n.operands[1:])
    apart = GraphIoProfile(len(branches), 0, 0, read * len(branches) + weights + sum(results))
    joined = GraphIoProfile(1, 0, 0, read + weights + sum(results))
    columns = sum(b.columns for b in branches)
    for branch, size in zip(branches, results, strict=True):
        copied = branch.end.id in kept  # an output has its own memory
        extra = copied + _would_be_epilogue(branch, users) + _views_lost(branch, columns, users)
        joined += GraphIoProfile(extra, 0, 0, 2 * size * extra)
    return apart, joined


def _views_lost(branch: Branch, columns: int, users: Mapping[int, list[Node]]) -> int:
    """Views of a branch that cannot be views of a slice: their elements would have to be copied."""
    whole = dense((*branch.end.shape[:-1], columns))
    lost, stack = 0, [(branch.end, dense(branch.end.shape), whole)]
    while stack:
        node, before, after = stack.pop()
        for user in users[node.id]:
            if user.op.role is not Role.COMPUTE or not user.op.has("view") or user.operands[0] is not node:
                continue
            types = [o.type for o in user.operands]
            alone = run_rule(user.op, "view", before, *types, node=user)
            sliced = run_rule(user.op, "view", after, *types, node=user)
            if alone is not None and sliced is None:
                lost += 1
            elif alone is not None:
                stack.append((user, alone, sliced))
    return lost


def _would_be_epilogue(branch: Branch, users: Mapping[int, list[Node]]) -> bool:
    """Whether the op behind a branch could have been computed on the fly, and now cannot."""
    readers = users[branch.end.id]
    if len(readers) != 1:
        return False
    (reader,) = readers
    if not _is_plain(reader) or reader.op.host_only is not None or reader.op.has("view"):
        return False
    return isinstance(lower_node(reader), Map) and reader.shape == branch.end.shape


# -- the rewrite


def _rewrite(graph: Graph, groups: Sequence[Sequence[Branch]], fixed: set[int]) -> Graph:
    """Weights go first, so that a joined matmul can take the place of its first part."""
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    live = graph.live()
    first = {branches[0].product.id: branches for branches in groups}
    gone = {n.id for branches in groups for b in branches for n in (b.product, *b.chain)}
    mapping: dict[int, Node] = {}
    named = (Role.INPUT, Role.PARAM, Role.STATE)
    order = sorted(graph.nodes, key=lambda n: n.id not in fixed)
    with out.building():
        for node in order:
            if node.id in first:
                with provenance(_where(first[node.id])):
                    _join(first[node.id], mapping)
            elif node.id not in gone and (node.id in live or node.op.role in named):
                mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], out)
    finish_rewrite(graph, out, mapping)
    return out


def _joined_product(branches: Sequence[Branch], mapping: Mapping[int, Node]) -> Node:
    """One matmul with the columns of all weights, one after the other; weights of fewer bits stay so."""
    product = branches[0].product
    x = mapping[product.operands[0].id]
    made: Node
    if _reads_codes(product):
        made = product.op(x, *_beside([b.product.operands[1:] for b in branches], mapping), **product.attrs)
        return made
    attrs = dict(product.attrs) | {"rhs_contract": (0,)}
    made = product.op(x, _joined_weight(branches, mapping), **attrs)
    return made


def _beside(parts: Sequence[Sequence[Node]], mapping: Mapping[int, Node]) -> list[Node]:
    """The columns of the first parts of all, of their second ones, and so on."""
    return _joined_parts([[mapping[o.id] for o in own] for own in parts])


def _joined_parts(parts: Sequence[Sequence[Node]]) -> list[Node]:
    """Parts of several matrices side by side; those of fewer bits stay so, too."""
    return [
        same[0].op(*_joined_parts([o.operands for o in same]), **same[0].attrs)
        if same[0].op.decodes
        else get_op("concat")(*same, axis=1)
        for same in zip(*parts, strict=True)
    ]


def _joined_weight(branches: Sequence[Branch], mapping: Mapping[int, Node]) -> Node:
    weights = []
    for b in branches:
        matrix = mapping[b.product.operands[1].id]
        (axis,) = b.product.attrs["rhs_contract"]
        weights.append(matrix if axis == 0 else get_op("transpose")(matrix, perm=(1, 0)))
    concat = get_op("concat")
    if _coding(branches[0].product) is None:
        made: Node = concat(*weights, axis=1)
        return made
    (made,) = _joined_parts([[w] for w in weights])
    return made


def _join(branches: Sequence[Branch], mapping: dict[int, Node]) -> None:
    """One matmul for all branches; their ends become slices of it."""
    product = branches[0].product
    whole = _joined_product(branches, mapping)
    for step in range(len(branches[0].chain)):
        nodes = [b.chain[step] for b in branches]
        before = branches[0].chain[step - 1] if step else product
        operands = []
        for i, o in enumerate(nodes[0].operands):
            beside = [mapping[n.operands[i].id] for n in nodes] if o is not before else []
            operands.append(get_op("concat")(*beside, axis=o.rank - 1) if beside else whole)
        whole = nodes[0].op(*operands, **nodes[0].attrs)
    start = 0
    for b in branches:
        lead = whole.rank - 1
        mapping[b.end.id] = get_op("slice")(
            whole,
            starts=(*(0,) * lead, start),
            sizes=(*whole.shape[:-1], b.columns),
            steps=(1,) * whole.rank,
        )
        start += b.columns
