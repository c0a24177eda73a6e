"""Chains of kernels that treat rows alike become nodes that run in slices (`rlx.ops.slices`).

An axis is a symbol of the program or, in programs of fixed sizes, a number of rows that values begin with.
The kernels of a chain are copied into a body that says `rows` for it. A copy is kept only if it is the same
for all rows at once, and if the kernel it composes to provably treats rows alike (`rlx.kernel.rowwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field

from rlx.errors import RlxError
from rlx.ir.dim import Dim, Expr, Sym, evaluate, sym, symbols
from rlx.ir.dims.expr import of_atom
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op, run_rule
from rlx.ir.resize import rebind
from rlx.ir.rewrite import copy_node, finish_rewrite, substitute_dims
from rlx.ir.symbols import graph_symbols
from rlx.ir.types import TensorType, Type, tensor_types
from rlx.kernel.compose import compose
from rlx.kernel.form import dense
from rlx.kernel.nests import ComposeError
from rlx.kernel.rowwise import cut_axis, front, is_cut, is_whole, keeps_rows, view_keeps_rows
from rlx.kernel.views import View, view_layouts
from rlx.plan.phase import Phase, PhaseSchedule
from rlx.records import dataclass

MOST_AXES = 4  # that are tried
WEIGHTS = (Role.PARAM, Role.CONSTANT)


@dataclass(frozen=True)
class Axis:
    """Rows to cut along: all `size` of them are `rows` in a body."""

    size: Dim
    rows: str

    @property
    def symbol(self) -> str | None:
        return symbols(self.size)[0] if isinstance(self.size, Expr) else None

    def loosen(self, t: TensorType) -> TensorType:
        """A type as a body sees it."""
        if self.symbol is not None:
            return t.substitute({self.symbol: sym(self.rows)})
        return t.with_shape(self.loosen_dims(t.shape))

    def begins(self, t: TensorType) -> bool:
        """Whether a type of the program has this axis, as it is, in front."""
        axis = front(t.shape)
        return self.symbol is not None or t.shape[axis : axis + 1] == (self.size,)

    def loosen_dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Dims that begin, after ones, with a multiple of the number of rows."""
        axis, size = front(dims), self.size
        first = dims[axis] if axis < len(dims) else 0
        if not isinstance(first, int) or not isinstance(size, int) or first <= 0 or first % size:
            return dims
        return (*dims[:axis], first // size * sym(self.rows), *dims[axis + 1 :])

    def fasten(self, t: Type) -> tuple[TensorType, ...]:
        """Types of a body as they are for all rows."""
        return tuple(item.substitute({self.rows: self.size}) for item in tensor_types(t))


class NotAlike(Exception):
    """A kernel that does not treat rows alike, as far as can be proved."""


@dataclass(eq=False)
class Chain:
    """Kernels that run in slices together, and what their body reads and gives, by node of the program."""

    axis: Axis
    body: Graph = field(default_factory=lambda: Graph("slices"))
    members: list[int] = field(default_factory=list)
    made: dict[int, Node] = field(default_factory=dict)  # of the program -> of the body
    outside: dict[int, int] = field(default_factory=dict)  # input of the body -> value of the program
    views: dict[int, View] = field(default_factory=dict)  # in the body


class Splitter:
    """Finds the chains of a graph of kernels along one axis."""

    def __init__(self, graph: Graph, axis: Axis, phases: PhaseSchedule) -> None:
        self.graph, self.axis, self.phases = graph, axis, phases
        self.views = view_layouts(graph)
        self.assumed = {(c.kind, c.lhs, c.rhs) for c in graph.constraints}
        self._bodies: dict[object, Graph | None] = {}
        self._kept: list[Graph] = []  # keeps the identities in `_bodies` alive

    def chains(self, order: Sequence[int]) -> list[Chain]:
        """Chains of at least two kernels; a kernel between that reads of a chain ends it."""
        found: list[Chain] = []
        now = Chain(self.axis)
        for kernel in order:
            node = self.graph.nodes[kernel]
            if now.members and self.phases.get(kernel) is not self.phases.get(now.members[0]):
                found.append(now)
                now = Chain(self.axis)
            if self.phases.get(kernel) is not Phase.PROLOGUE and self.joins(now, node):
                continue
            if now.members and self.reads_of(node, now):
                found.append(now)
                now = Chain(self.axis)
                self.joins(now, node)  # begins another one, if it can
        found.append(now)
        return [c for c in found if len(c.members) > 1]

    def reads_of(self, node: Node, chain: Chain) -> bool:
        """Whether a kernel reads what a chain computes."""
        return any(self.owner(o) in chain.members for o in node.operands)

    def owner(self, node: Node) -> int:
        """The kernel that computes a value."""
        root = self.root(node)
        return root.operands[0].id if root.op.role is Role.RESULT else root.id

    def root(self, node: Node) -> Node:
        return self.graph.nodes[self.views[node.id].root] if node.id in self.views else node

    def joins(self, chain: Chain, node: Node) -> bool:
        """Add a kernel to a chain, if it treats rows alike."""
        if node.op.role is not Role.REGION:
            return False
        for exact in (False, True):
            made, outside = dict(chain.made), dict(chain.outside)
            try:
                self.join(chain, node, exact)
                return True
            except NotAlike:
                chain.made, chain.outside = made, outside
        return False

    def join(self, chain: Chain, node: Node, exact: bool) -> None:
        """Add a kernel to a chain. What it reads from outside is cut if it begins with as many rows as there
        are or, if that need not be `exact`, with a multiple of them.
        """
        operands = [self.value(chain, o, exact) for o in node.operands]
        if not any(is_cut(o.tensor, self.axis.rows) for o in operands):
            raise NotAlike
        body = self.loosened_body(node.bodies[0], [o.tensor for o in operands])
        made = chain.body.add(node.op, operands, node.attrs, (body,), where=node.where)
        chain.members.append(node.id)
        for old, new in zip(self.graph.results(node), chain.body.results(made), strict=True):
            chain.made[old.id] = new

    # -- values as a body sees them

    def value(self, chain: Chain, node: Node, exact: bool) -> Node:
        """A value of the program in a body: computed there, or read from outside."""
        if node.id in chain.made:
            return chain.made[node.id]
        if node.id in self.views:
            return self.view(chain, node, exact)
        if node.op.role is Role.STATE:
            raise NotAlike  # its new value is written in its place
        whole = node.op.role in WEIGHTS or (exact and not self.axis.begins(node.tensor))
        t = node.tensor if whole else self.axis.loosen(node.tensor)
        if not is_cut(t, self.axis.rows) and not is_whole(t, self.axis.rows):
            raise NotAlike
        made = chain.body.input(f"x{len(chain.body.inputs)}", t.shape, t.dtype)
        chain.made[node.id], chain.outside[made.id] = made, node.id
        return made

    def view(self, chain: Chain, node: Node, exact: bool) -> Node:
        if len(node.operands) != 1:
            raise NotAlike
        source = self.value(chain, node.operands[0], exact)
        attrs = self.loosened_attrs(node, [source.tensor])
        made = chain.body.add(node.op, [source], attrs, where=node.where)
        base = chain.views.get(source.id) or View(source.id, dense(source.shape))
        layout = run_rule(node.op, "view", base.layout, source.type, node=made)
        root = chain.body.nodes[base.root].tensor
        if layout is None or not view_keeps_rows(layout, made.tensor, root, self.axis.rows):
            raise NotAlike
        chain.views[made.id] = View(base.root, layout)
        chain.made[node.id] = made
        return made

    def loosened_attrs(self, node: Node, operands: Sequence[TensorType]) -> dict[str, object]:
        """Attributes with which an op gives for these operands what it gives now, for any number of rows."""
        if self.axis.symbol is not None:
            changed = {self.axis.symbol: sym(self.axis.rows)}
            ways = [_substituted(node.attrs, changed)]
        else:
            loose = {
                key: self.axis.loosen_dims(value) if isinstance(value, tuple) else value
                for key, value in node.attrs.items()
            }
            ways = [dict(node.attrs), loose]
        for attrs in ways:
            trial = Graph("trial")
            inputs = [trial.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(operands)]
            try:
                made = trial.add(node.op, inputs, attrs, node.bodies)
            except RlxError:
                continue
            if self.holds(trial) and self.axis.fasten(made.type) == tensor_types(node.type):
                return attrs
        raise NotAlike

    def holds(self, part: Graph) -> bool:
        """Whether what a part assumes is what the whole program assumes, so nothing of the number of rows."""
        return all((c.kind, c.lhs, c.rhs) in self.assumed for c in part.constraints)

    def loosened_body(self, body: Graph, operands: Sequence[TensorType]) -> Graph:
        """A region's body over operands of these types; NotAlike if it does not treat rows alike."""
        key = (id(body), tuple(operands))
        if key not in self._bodies:
            self._kept.append(body)
            try:
                self._bodies[key] = self._loosened_body(body, operands)
            except NotAlike:
                self._bodies[key] = None
        found = self._bodies[key]
        if found is None:
            raise NotAlike
        return found

    def _loosened_body(self, body: Graph, operands: Sequence[TensorType]) -> Graph:
        if self.axis.symbol is not None:
            out = rebind(body, {self.axis.symbol: sym(self.axis.rows)})
        else:
            out = self._copied(body, operands)
        results = [n.tensor for n in out.outputs.values()]
        taken = [n.tensor for n in out.inputs]
        if not self.holds(out) or taken != list(operands):
            raise NotAlike
        try:
            kernel = compose(out)
        except ComposeError:
            raise NotAlike from None
        if not keeps_rows(kernel, taken, results, self.axis.rows):
            raise NotAlike
        return out

    def _copied(self, body: Graph, operands: Sequence[TensorType]) -> Graph:
        """A body over other operands, node by node."""
        out = Graph(body.name)
        made: dict[int, Node] = {}
        given = iter(operands)
        with out.building():
            for node in body.nodes:
                inputs = [made[o.id] for o in node.operands]
                if node.op.role is Role.INPUT:
                    t = next(given)
                    made[node.id] = out.input(node.attrs["name"], t.shape, t.dtype)
                elif node.op.role is Role.RESULT or all(
                    new.type == old.type for new, old in zip(inputs, node.operands, strict=True)
                ):
                    made[node.id] = copy_node(node, inputs, out)
                else:
                    attrs = self.loosened_attrs(node, [n.tensor for n in inputs])
                    made[node.id] = out.add(node.op, inputs, attrs, node.bodies, where=node.where)
            out.set_outputs({name: made[n.id] for name, n in body.outputs.items()})
        return out


def _substituted(attrs: Mapping[str, object], sizes: Mapping[str, Dim]) -> dict[str, object]:
    return {key: substitute_dims(value, sizes) for key, value in attrs.items()}


# -- the graph with chains as nodes


def find_chains(
    graph: Graph,
    order: Sequence[int],
    phases: PhaseSchedule,
    binding: Mapping[str, int],
    full: Collection[int],
) -> list[Chain]:
    """Chains that can run in slices, along the axis that leaves most bytes inside of them.

    Only chains with a kernel in `full` (those at whose step much is alive) count.
    """
    most, best = 0, list[Chain]()
    for size in _axes(graph, order, binding):
        found = Splitter(graph, Axis(size, _fresh(graph)), phases).chains(order)
        chains = [c for c in found if not set(full).isdisjoint(c.members) and _inside(graph, c, binding)]
        inside = sum(_inside(graph, c, binding) for c in chains)
        if inside > most:
            most, best = inside, chains
    return best


def _axes(graph: Graph, order: Sequence[int], binding: Mapping[str, int]) -> list[Dim]:
    """First dims of values after ones, those of most bytes first."""
    weights: dict[Dim, int] = {}
    for kernel in order:
        for t in tensor_types(graph.nodes[kernel].type):
            axis = front(t.shape)
            first = t.shape[axis] if axis < t.rank else 1
            if isinstance(first, Expr) and len(symbols(first)) == 1:
                first = _symbol(first)
            if isinstance(first, Expr) or first > 1:
                weights[first] = weights.get(first, 0) + evaluate(t.nbytes, binding)
    return sorted(weights, key=lambda d: (-weights[d], str(d)))[:MOST_AXES]


def _symbol(d: Expr) -> Dim:
    """The only symbol of a dim, with the bounds that it has; the dim itself if it is none of its terms."""
    atoms = [atom for monomial, _ in d.terms for atom, _ in monomial if isinstance(atom, Sym)]
    return of_atom(atoms[0]) if atoms else d


def _fresh(graph: Graph) -> str:
    taken, name = graph_symbols(graph), "rows"
    while name in taken:
        name += "_"
    return name


def _escaping(graph: Graph, chain: Chain) -> list[int]:
    """Values of a chain that are read outside of it, or that the caller gets."""
    inside, views = set(chain.members), view_layouts(graph)

    def root(node: Node) -> int:
        return views[node.id].root if node.id in views else node.id

    values = [r.id for m in chain.members for r in graph.results(graph.nodes[m])]
    needed = set(map(root, graph.roots()))
    live = graph.live()
    for node in graph.nodes:
        if node.id in live and node.id not in inside and node.op.role in (Role.COMPUTE, Role.REGION):
            if node.id not in views:
                needed.update(map(root, node.operands))
    return [v for v in values if v in needed]


def _inside(graph: Graph, chain: Chain, binding: Mapping[str, int]) -> int:
    """Bytes of values that nobody outside of a chain reads."""
    out = set(_escaping(graph, chain))
    values = [r for m in chain.members for r in graph.results(graph.nodes[m]) if r.id not in out]
    return sum(evaluate(v.tensor.nbytes, binding) for v in values)


def with_chains(graph: Graph, order: Sequence[int], chains: Sequence[Chain]) -> Graph:
    """The graph in which every chain is one node, where its last kernel was."""
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    made: dict[int, Node] = {}

    def value(node: Node) -> Node:
        if node.id not in made:
            made[node.id] = copy_node(node, [value(o) for o in node.operands], out)
        return made[node.id]

    last = {chain.members[-1]: chain for chain in chains}
    member = {m for chain in chains for m in chain.members}
    with out.building():
        for node in graph.nodes:
            if node.op.role in (Role.INPUT, Role.PARAM, Role.STATE):
                value(node)
        for kernel in order:
            if kernel in last:
                _emit(graph, last[kernel], value, made, out)
            elif kernel not in member:
                for result in graph.results(graph.nodes[kernel]):
                    value(result)
        for node in graph.roots():
            value(node)
    finish_rewrite(graph, out, made)
    return out


def _emit(
    graph: Graph, chain: Chain, value: Callable[[Node], Node], made: dict[int, Node], out: Graph
) -> None:
    """A chain as one node: its body anew, what is cut first among its inputs."""
    escaping, axis = _escaping(graph, chain), chain.axis
    old = chain.body
    old.set_outputs({f"y{k}": chain.made[v] for k, v in enumerate(escaping)})
    live = old.live()
    read = [n for n in old.inputs if n.id in live]
    inputs = sorted(read, key=lambda n: not is_cut(n.tensor, axis.rows))
    body, copies = Graph("slices"), dict[int, Node]()
    for i, n in enumerate(inputs):
        copies[n.id] = body.input(f"x{i}", n.shape, n.dtype)
    for n in old.nodes:
        if n.id in live and n.id not in copies:
            copies[n.id] = copy_node(n, [copies[o.id] for o in n.operands], body)
    for m in chain.members:  # a kernel writes all of its results, read or not
        for r in graph.results(graph.nodes[m]):
            if r.id != m and chain.made[r.id].operands[0].id in copies and chain.made[r.id].id not in copies:
                copy_node(chain.made[r.id], [copies[chain.made[r.id].operands[0].id]], body)
    body.set_outputs({f"y{k}": copies[chain.made[v].id] for k, v in enumerate(escaping)})
    operands = [value(graph.nodes[chain.outside[n.id]]) for n in inputs]
    cut = [n.tensor for n in inputs if is_cut(n.tensor, axis.rows)]
    axes = tuple(cut_axis(t, axis.rows) for t in (*cut, *(chain.made[v].tensor for v in escaping)))
    attrs = {"symbol": axis.rows, "size": axis.size, "sliced": len(cut), "axes": axes}
    where = tuple(dict.fromkeys(w for m in chain.members for w in graph.nodes[m].where))
    node = out.add(get_op("slices"), operands, attrs, (body,), where=where)
    for v, result in zip(escaping, out.results(node), strict=True):
        made[v] = result
