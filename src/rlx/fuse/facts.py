"""What fusion asks about a graph, answered once per node: kinds of kernels, who reads what, and where."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from rlx.cost.instructions import Evaluation, evaluation
from rlx.cost.io import IoModel
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import Shape, TupleType
from rlx.kernel.form import CodedContract, Contract, Conv, Form, Map, Pieces, Reduce
from rlx.kernel.lowering import lower_node, pieces_body, storage_of_codes
from rlx.kernel.scalar import LOADS, PRIMITIVES, Scalar, axes, const, load_index, replace_axes
from rlx.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One way in which a kernel reads a stored value.

    how: "plain" at an index always in range, "guarded" only where a condition holds, "checked" at an index
    from data, "memory" as a whole (operands of ops that are separate kernels, weights), "rows" also as a
    whole, but by a contraction or convolution, which can compute what it reads.
    `index` is relative to `operand`, which may be a view of the value. `pointwise` is a plain read of the
    value itself at every point of an equal space.
    """

    root: int
    how: str
    operand: Node
    index: tuple[Scalar, ...]
    pointwise: bool
    once_per: int = 1


WHOLE = ("memory", "rows")
HOW = {"load": "plain", "load_or": "guarded", "load_checked": "checked"}


def is_point(index: Sequence[Scalar], point: Sequence[Scalar], shape: Shape) -> bool:
    """Whether an index is the given point; along axes of size 1 it may also be 0."""
    if len(index) != len(point):
        return False
    return all(
        e is p or e == p or (d == 1 and e == const(0)) for e, p, d in zip(index, point, shape, strict=True)
    )


class Facts:
    """A MIR graph with everything that fusion wants to know about its nodes."""

    def __init__(self, graph: Graph, io: IoModel) -> None:
        self.graph, self.io = graph, io
        self.live = graph.live()
        self.kernels = [
            n for n in graph.nodes if n.id in self.live and n.op.role is Role.COMPUTE and not io.is_view(n)
        ]
        self.readers: dict[int, list[int]] = {}  # stored value -> kernels that read it, through views or not
        for node in self.kernels:
            for root in dict.fromkeys(io.root(o).id for o in node.operands):
                self.readers.setdefault(root, []).append(node.id)
        self._results: dict[int, list[int]] = {}  # op with several results -> those that are read
        for node in graph.nodes:
            if node.op.role is Role.RESULT and node.id in self.live:
                self._results.setdefault(node.operands[0].id, []).append(node.id)
        self.kept = {io.root(n).id for n in graph.roots()}  # values that must be stored whoever reads them
        self._forms: dict[int, Form | None] = {}
        self._accesses: dict[int, tuple[Access, ...]] = {}
        self._work: dict[int, Evaluation] = {}
        self._dearest: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._points: dict[int, int] = {}

    def form(self, node: Node) -> Form | None:
        """The form of a node that is one kernel with one result; None for all others."""
        if node.id not in self._forms:
            plain = node.op.role is Role.COMPUTE and node.op.host_only is None and not node.bodies
            single = not isinstance(node.type, TupleType)
            self._forms[node.id] = lower_node(node) if plain and single else None
        return self._forms[node.id]

    def kind(self, node: Node) -> str:
        """map, reduce, contract, conv, or own: a kernel that joins no other."""
        known = self._kinds.get(node.id)
        if known is None:
            known = self._kinds[node.id] = self._kind(node)
        return known

    def _kind(self, node: Node) -> str:
        form = self.form(node)
        if isinstance(form, (Map, Pieces)):
            return "map"
        if isinstance(form, Reduce):
            return "reduce"
        if isinstance(form, Contract):
            return "contract"
        if isinstance(form, CodedContract) and storage_of_codes(node) is not None:
            return "contract"
        return "conv" if isinstance(form, Conv) else "own"

    def body(self, node: Node) -> Scalar | None:
        """The expression that a map or reduction evaluates at every point."""
        form = self.form(node)
        if isinstance(form, Pieces):
            return pieces_body(form)
        return form.body if isinstance(form, (Map, Reduce)) else None

    def accesses(self, node: Node) -> tuple[Access, ...]:
        """Every distinct way in which a node reads stored values."""
        known = self._accesses.get(node.id)
        if known is None:
            known = self._accesses[node.id] = tuple(self._find_accesses(node))
        return known

    def _find_accesses(self, node: Node) -> list[Access]:
        body = self.body(node)
        if body is None:
            computes = self.kind(node) in ("contract", "conv") and not isinstance(
                self.form(node), CodedContract
            )
            first = "rows" if computes else "memory"
            how = [first, *("memory" for _ in node.operands[1:])]
            return [
                Access(self.io.root(o).id, way, o, (), False)
                for o, way in zip(node.operands, how, strict=True)
            ]
        out = []
        form = self.form(node)
        space = form.space if isinstance(form, Reduce) else node.shape
        inner = form.axes if isinstance(form, Reduce) else range(len(space))[-1:]
        for e in body.walk():
            if e.prim in LOADS:
                operand, index = node.operands[e.data], load_index(e)
                root = self.io.root(operand).id
                here = e.prim == "load" and root == operand.id and is_point(index, axes(len(space)), space)
                fixed = not any(x.prim == "axis" and x.data in inner for i in index for x in i.walk())
                once_per = self.io.points(space[i] for i in inner) if fixed else 1
                pointwise = here and operand.shape == space
                out.append(Access(root, HOW[e.prim], operand, index, pointwise, max(once_per, 1)))
        return out

    def root_index(self, access: Access) -> tuple[Scalar, ...]:
        """The index of an access in the axes of the stored value itself, seen through views."""
        index, at = access.index, access.operand
        while at.id != access.root:
            view = lower_node(at)
            assert isinstance(view, Map)
            index = tuple(replace_axes(i, index) for i in view.body.args)
            at = at.operands[0]
        return index

    def work(self, node: Node) -> Evaluation:
        """What a map or reduction takes at a point."""
        known = self._work.get(node.id)
        if known is None:
            body, form, size = self.body(node), self.form(node), self.io.size
            known = Evaluation()
            if body is not None:
                space = form.space if isinstance(form, Reduce) else node.shape
                known = evaluation(body, space, node.operands, size)
            if isinstance(form, Reduce):
                known = replace(known, operations=known.operations + 1)  # to combine
            self._work[node.id] = known
        return known

    def dearest(self, node: Node) -> int:
        """Operations of the dearest primitive in a map or reduction, by which kernels keep its value."""
        known = self._dearest.get(node.id)
        if known is None:
            body = self.body(node)
            prims = () if body is None else (PRIMITIVES.get(e.prim) for e in body.walk())
            known = self._dearest[node.id] = max((p.cost for p in prims if p is not None), default=0)
        return known

    def points(self, node: Node) -> int:
        """Points at which a node evaluates its expression when it is a separate kernel."""
        known = self._points.get(node.id)
        if known is None:
            form = self.form(node)
            space = form.space if isinstance(form, (Map, Pieces, Reduce)) else node.shape
            known = self._points[node.id] = self.io.points(space)
        return known

    def outputs(self, owned: Sequence[int], evaluated: Container[int]) -> list[int]:
        """Values of a group that are needed outside of it, in order."""
        out = []
        for i in (v for o in owned for v in self.values(o)):
            if i in self.kept or any(r not in evaluated for r in self.readers.get(i, ())):
                out.append(i)
        return out

    def values(self, i: int) -> Sequence[int]:
        """What others read of a node: itself, or its results."""
        return self._results.get(i, (i,))
