"""What a graph moves, predicted: launches, host waits and bytes of one forward pass.

Every live node that is neither leaf nor view is one launch; it reads its operands and writes its result. An
operand is billed once per element that can be read: at most its own size, at most one element per load and
point of the iteration space, so a gather pays for the rows it reads. Loop bodies count once per trip.
Symbolic sizes are taken at an assumed binding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import log
from types import MappingProxyType

from rlx.cost.profile import GraphIoProfile
from rlx.cost.sync import host_sync_op_kinds
from rlx.ir.bind import holds, size_symbol
from rlx.ir.dim import Constraint, Dim, Expr, evaluate, symbols
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Level, Role
from rlx.ir.symbols import sizes_at_bounds
from rlx.ir.types import tensor_types
from rlx.kernel.control import is_branch, own_symbols
from rlx.kernel.form import Form, HostCall, Loop, Map, Pieces, Reduce, Scatter
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import LOADS, Scalar
from rlx.kernel.views import view_layouts
from rlx.transform.expand import expand_graph

ASSUMED_SIZE = 128
ASSUMED_BATCH = 1
MOST_ASSUMED = 1 << 20
COMMON_SIZES = (*range(1, 17), *(m << k for k in range(2, 12) for m in (5, 6, 7, 8, 9)))
MOST_TRIALS = 500
TRIPS = ("length", "rows", "max_trips")  # what a loop's form calls the number of its steps
LEAVES = (Role.INPUT, Role.PARAM, Role.CONSTANT, Role.STATE, Role.RESULT, Role.TUPLE)


def assumed_binding(graph: Graph, assume: Mapping[str, int] | None = None) -> dict[str, int]:
    """A size for every symbol: the one given, else 1 for batch-like ones, else 128, doubled where the graph
    needs more (a window of 400 samples does not fit 128). If an assumption of the graph does not hold for
    these sizes, common sizes near them are taken for which all hold, where there are such.

    Batch-like is a symbol that is the leading dim of inputs with more axes, and no other dim of any input. No
    size is assumed above the bound of a size input; a size that data decides is taken at its bound, because
    that is what its values need room for.

    >>> g = Graph()
    >>> x = g.input("x", ("batch", "seq", 8), "f32")
    >>> assumed_binding(g, {"seq": 64})
    {'batch': 1, 'seq': 64}
    """
    leading: set[str] = set()
    elsewhere: set[str] = set()
    most: dict[str, int] = {}
    for node in graph.inputs:
        size = size_symbol(node.tensor)
        if size is not None and size.max is not None:
            most[size.name] = size.max
        for axis, d in enumerate(node.shape):
            if isinstance(d, Expr):
                first = axis == 0 and node.rank > 1 and len(symbols(d)) == 1 and size is None
                (leading if first else elsewhere).update(symbols(d))
    given = assume or {}
    batch = leading - elsewhere
    fixed = _fixed_by(graph.constraints)
    usual = {s: ASSUMED_BATCH if s in batch else ASSUMED_SIZE for s in graph.symbols()}
    usual = {s: min(n, most.get(s, n)) for s, n in usual.items()}
    if not usual.keys() <= leading | elsewhere:  # states have the others, or an op finds them
        usual |= sizes_at_bounds(graph, {**usual, **fixed, **given})
    chosen = {s: given.get(s, fixed.get(s, n)) for s, n in usual.items()}
    free = usual.keys() - given.keys() - fixed.keys() - most.keys()
    grown = _grown(chosen, free, [c for c in _all_constraints(graph) if c.kind == "min"])
    return _accepted(grown, free, list(_constraints_of_a_run(graph)))


def _all_constraints(graph: Graph) -> Iterator[Constraint]:
    """Constraints of a graph and of the bodies in it."""
    yield from graph.constraints
    for node in graph.nodes:
        for body in node.bodies:
            yield from _all_constraints(body)


def _constraints_of_a_run(graph: Graph) -> Iterator[Constraint]:
    """Constraints that hold in every run: those of branches are left out, as a run takes one of them."""
    yield from graph.constraints
    for node in graph.nodes:
        if node.bodies and not is_branch(node):
            for body in node.bodies:
                yield from _constraints_of_a_run(body)


def _accepted(
    binding: dict[str, int], free: Collection[str], constraints: Sequence[Constraint]
) -> dict[str, int]:
    """The sizes, or the nearest ones for which all constraints hold; the sizes, if none of those near do."""
    broken = [c for c in constraints if not holds(c, binding)]
    if not broken:
        return binding
    concerned = sorted({s for c in broken for s in (*symbols(c.lhs), *symbols(c.rhs)) if s in free})
    for sizes in islice(_nearby(binding, concerned), MOST_TRIALS):
        if all(holds(c, sizes) for c in constraints):
            return sizes
    return binding


def _nearby(sizes: dict[str, int], free: Sequence[str]) -> Iterator[dict[str, int]]:
    """Sizes with one free symbol changed to a common size, then with two, and so on; the nearest first.

    >>> list(islice(_nearby({"n": 128}, ["n"]), 3))
    [{'n': 144}, {'n': 112}, {'n': 160}]
    """

    def near(symbol: str) -> list[int]:
        others = {*COMMON_SIZES} - {sizes[symbol]}
        return sorted(others, key=lambda n: (abs(log(n / max(sizes[symbol], 1))), n))

    for count in range(1, len(free) + 1):
        for changed in combinations(free, count):
            for values in product(*map(near, changed)):
                yield {**sizes, **dict(zip(changed, values, strict=True))}


def _grown(binding: dict[str, int], free: Collection[str], needs: Sequence[Constraint]) -> dict[str, int]:
    """The binding with free symbols doubled until what the graph needs at least is there.

    Only those are doubled that bring a need nearer: an image, not the window that must fit it.
    """
    for need in needs:
        names = need.symbols
        if not all(s in binding for s in names):
            continue  # a size that only a body knows
        grown = dict(binding)
        while not need.check(grown) and max(grown.values()) < MOST_ASSUMED:
            missing = _missing(need, grown)
            larger = {s: 2 * grown[s] for s in names if s in free}
            helps = {s: n for s, n in larger.items() if _missing(need, {**grown, s: n}) < missing}
            if not helps:
                break
            grown |= helps
        if need.check(grown):
            binding = grown
    return binding


def _missing(need: Constraint, binding: Mapping[str, int]) -> int:
    """How much the left side of a need is short of the right one."""
    return evaluate(need.rhs, binding) - evaluate(need.lhs, binding)


def _fixed_by(constraints: Iterable[Constraint]) -> dict[str, int]:
    """Symbols that the graph itself assumes to have one size."""
    found: dict[str, int] = {}
    for c in constraints:
        for one, other in ((c.lhs, c.rhs), (c.rhs, c.lhs)):
            if c.kind == "eq" and isinstance(one, Expr) and isinstance(other, int):
                names = symbols(one)
                if len(names) == 1 and str(one) == names[0]:
                    found[names[0]] = other
    return found


def is_scalar_constant(node: Node) -> bool:
    """A constant of one element: kernels hold it in their code."""
    return node.op.role is Role.CONSTANT and node.attrs["value"].array.size == 1


class IoModel:
    """Sizes and reads of one graph at one binding; every answer is worked out once."""

    def __init__(
        self, graph: Graph, assume: Mapping[str, int] | None = None, host_ops: frozenset[str] = frozenset()
    ) -> None:
        self.graph, self.host_ops = graph, host_ops
        self.binding = assumed_binding(graph, assume)
        self.views = view_layouts(graph)
        self._dims: dict[Dim, int] = {}
        self._elements: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._reads: dict[int, dict[int, int]] = {}

    def size(self, d: Dim) -> int:
        """A dim at the assumed binding; symbols that only bodies have are assumed too."""
        if isinstance(d, int):
            return d
        known = self._dims.get(d)
        if known is None:
            known = self._dims[d] = evaluate(d, {s: self.binding.get(s, ASSUMED_SIZE) for s in symbols(d)})
        return known

    def points(self, space: Iterable[Dim]) -> int:
        """Number of points of an iteration space."""
        total = 1
        for d in space:
            total *= self.size(d)
        return total

    def elements(self, node: Node) -> int:
        """Elements of a value."""
        known = self._elements.get(node.id)
        if known is None:
            known = self._elements[node.id] = self.points(node.shape)
        return known

    def bytes(self, node: Node) -> int:
        """Bytes of a value (of all results, for a node with several)."""
        known = self._bytes.get(node.id)
        if known is None:
            items = tensor_types(node.type)
            known = self._bytes[node.id] = sum(self.points(t.shape) * t.dtype.itemsize for t in items)
        return known

    def is_view(self, node: Node) -> bool:
        """Whether a value needs no kernel because its reader can read it in place."""
        return node.id in self.views or node.reader_side

    def root(self, node: Node) -> Node:
        """The value whose storage a view uses."""
        while self.is_view(node):
            node = node.operands[0]
        return node

    def stored(self, node: Node) -> int:
        """Elements of memory behind a value: a broadcast view has fewer than its shape says."""
        least = self.elements(node)
        while self.is_view(node):
            node = node.operands[0]
            least = min(least, self.elements(node))
        return least

    def reads(self, node: Node) -> Mapping[int, int]:
        """What a kernel reads: id of a stored value -> elements."""
        known = self._reads.get(node.id)
        if known is None:
            known = self._reads[node.id] = {}
            counts = self._loads(node)
            for number, operand in enumerate(node.operands):
                if is_scalar_constant(operand):
                    continue  # part of the kernel's code
                stored = self.stored(operand)
                count = stored if counts is None else min(stored, counts.get(number, 0))
                root = self.root(operand)
                most = self.elements(root)
                known[root.id] = min(most, known.get(root.id, 0) + count)
        return MappingProxyType(known)

    def _loads(self, node: Node) -> dict[int, int] | None:
        """Elements loaded per operand; None says all of each."""
        if node.op.role is Role.REGION:
            return self._region_loads(node.bodies[0])
        if node.op.role is not Role.COMPUTE or node.op.host_only is not None or node.bodies:
            return None
        if node.op.level is Level.HIR:
            return self._region_loads(_expansion(node))
        return self._form_loads(lower_node(node))

    def _form_loads(self, form: Form) -> dict[int, int] | None:
        counts: dict[int, int] = {}
        if isinstance(form, Pieces):
            for piece in form.pieces:
                _count(piece.body, self.points(piece.extent), counts)
            return counts
        if isinstance(form, (Map, Reduce)):
            _count(form.body, self.points(form.space), counts)
            return counts
        return None

    def _region_loads(self, body: Graph) -> dict[int, int]:
        """Reads of a body's inputs, added up over the nodes that read them."""
        inner = IoModel(body, self.binding)
        inner.binding = self.binding
        number = {n.id: i for i, n in enumerate(body.inputs)}
        counts: dict[int, int] = {}
        live = body.live()
        for node in body.nodes:
            if node.id in live and node.op.role not in LEAVES and not inner.is_view(node):
                for root, count in inner.reads(node).items():
                    if root in number:
                        counts[number[root]] = counts.get(number[root], 0) + count
        return counts

    def profile(self, node: Node) -> GraphIoProfile:
        """The IO of one live node."""
        if node.op.role in LEAVES or self.is_view(node):
            return GraphIoProfile()
        if node.bodies and node.op.role is not Role.REGION:
            return self._control(node)
        traffic, part = self.bytes(node), self._written_part(node)
        if part is not None:
            return GraphIoProfile(1, 0, 0, 2 * part * node.dtype.itemsize)
        for root, count in self.reads(node).items():
            traffic += count * self.graph.nodes[root].dtype.itemsize
        return GraphIoProfile(1, int(self.waits(node)), 0, traffic)

    def _written_part(self, node: Node) -> int | None:
        """Elements that an update of a state writes; its plan leaves the others where they are."""
        if node.op.family != "update" or node.op.role is not Role.COMPUTE:
            return None
        form = lower_node(node)
        if not isinstance(form, Scatter):
            return None
        base = node.operands[form.base]
        updates = base.op.role is Role.STATE or self._written_part(base) is not None
        return self.points(form.space) if updates else None

    def waits(self, node: Node) -> bool:
        """Whether the host must step in to compute a node."""
        if node.op.host_only is not None or node.op.name in self.host_ops:
            return True
        if node.op.role is not Role.COMPUTE or node.op.level is Level.HIR or node.bodies:
            return False
        return isinstance(lower_node(node), HostCall)

    def _control(self, node: Node) -> GraphIoProfile:
        """Bodies times trips; of bodies that exclude each other, the dearer one."""
        form = lower_node(node)
        config = dict(form.config) if isinstance(form, Loop) else {}
        trips = next((self.size(config[k]) for k in TRIPS if config.get(k) is not None), 1)
        all_rows = {s: self.size(config["size"]) for s in own_symbols(form)} if isinstance(form, Loop) else {}
        inside = []
        for body in node.bodies:
            model = IoModel(body, {**self.binding, **all_rows}, self.host_ops)
            inside.append(_total(model, body.roots()))
        return max(inside, key=lambda p: p.as_tuple()[::-1]) * trips


def _expansion(node: Node) -> Graph:
    alone = Graph(node.op.name)
    inputs = [alone.input(f"x{i}", o.shape, o.dtype) for i, o in enumerate(node.operands)]
    with alone.building():
        made = alone.add(node.op, inputs, node.attrs, node.bodies, where=node.where)
        alone.set_outputs(alone.results(made))
    return expand_graph(alone)


def _count(body: Scalar, points: int, counts: dict[int, int]) -> None:
    for e in body.walk():
        if e.prim in LOADS:
            counts[e.data] = counts.get(e.data, 0) + points


def _total(model: IoModel, roots: Iterable[Node]) -> GraphIoProfile:
    total, seen, stack = GraphIoProfile(), set[int](), list(roots)
    while stack:
        node = stack.pop()
        if node.id not in seen:
            seen.add(node.id)
            total += model.profile(node)
            stack.extend(node.operands)
    return total


def profile_graph_io(
    graph: Graph, assume: Mapping[str, int] | None = None, backend: str = "cpu"
) -> GraphIoProfile:
    """IO of one forward pass of a graph; all its outputs are read back.

    >>> g = Graph()
    >>> x = g.input("x", (64, 128), "f32")
    >>> y = abs(x)
    >>> g.output("y", y.T)
    >>> profile_graph_io(g)
    GraphIoProfile(kernel_launches=1, sync_points=0, host_output_bytes=32768, device_traffic_bytes=65536)
    """
    model = IoModel(graph, assume, host_sync_op_kinds(backend))
    readback = sum(model.bytes(n) for n in graph.outputs.values())
    return _total(model, graph.roots()) + GraphIoProfile(host_output_bytes=readback)


def profile_graph_io_outputs(
    graph: Graph,
    output_ids: Iterable[int],
    assume: Mapping[str, int] | None = None,
    backend: str = "cpu",
) -> GraphIoProfile:
    """IO of computing, and reading back, the given nodes only."""
    model = IoModel(graph, assume, host_sync_op_kinds(backend))
    nodes = [graph.node(i) for i in output_ids]
    readback = sum(model.bytes(n) for n in nodes)
    return _total(model, nodes) + GraphIoProfile(host_output_bytes=readback)
