"""Lower precision on request: matmuls take narrow operands and accumulate in f32, and a value that nothing
but such matmuls read is stored narrow.

Products with weights always do, convolutions with weights where the target multiplies narrow operands faster
than wide ones and no transform does better. The two matmuls of attention do where it pays: at best queries,
keys and values are stored narrow by the kernels that compute them; at worst each is rounded by one of its
own. What is read in f32 too (a residual stream, keys
that are a result) stays f32, with a rounded copy for the matmuls. There is a `Decision` per value and per
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlx.cost.decision import Decision, decide
from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel
from rlx.cost.profile import GraphIoProfile
from rlx.errors import ConfigError
from rlx.fuse.attend import Candidate, attention_candidates
from rlx.fuse.facts import Facts
from rlx.ir.dim import Dim, known_eq
from rlx.ir.dtype import BF16, F16, F32, DType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast
from rlx.rewrite.basic import remove_dead
from rlx.rewrite.conv_cost import gains_by_halves
from rlx.rewrite.half_weights import Halves
from rlx.target.prices import DEVICES, Prices
from rlx.target.tiles import ConvTarget

PRECISIONS: dict[str, DType | None] = {"f32": None, "bf16": BF16, "f16": F16}


def lower_precision(
    graph: Graph,
    precision: str,
    gate: IoFusionGate,
    assume: Mapping[str, int] | None = None,
    multiplied: tuple[str, ...] = (),
    convolves: ConvTarget | None = None,
    prices: Prices = DEVICES["cpu"],
) -> tuple[Graph, list[Decision]]:
    """The graph with narrow matmuls, and what was decided about the values that they read.

    `multiplied` names the dtypes whose matmuls the target computes faster than those of f32; `convolves`
    says how fast its convolutions are.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
    narrow = PRECISIONS[precision]
    if narrow is None:
        return graph, []
    plan = _Narrowing(graph, narrow, gate, assume, narrow.name in multiplied, convolves, prices)
    return remove_dead(rewrite(graph, plan.visit)), plan.decisions  # moves of values that are wide no more


class _Narrowing:
    """Which matmuls take narrow operands, and where values are rounded for them."""

    def __init__(
        self,
        graph: Graph,
        narrow: DType,
        gate: IoFusionGate,
        assume: Mapping[str, int] | None,
        attends: bool,
        convolves: ConvTarget | None,
        prices: Prices,
    ) -> None:
        self.graph, self.narrow, self.gate, self.prices = graph, narrow, gate, prices
        self.io = IoModel(graph, assume)
        self.fixed = weight_ids(graph)
        self.users, self.kept = graph.users(), {n.id for n in graph.roots()}
        self.live = graph.live()
        self.contraction, self.convolves = get_op("dot_general"), convolves if attends else None
        self.decisions: list[Decision] = []
        self.weights: set[int] = set()  # of attention: they are never stored
        self.products = {n.id for n in graph.nodes if n.id in self.live and self.by_weight(n)}
        if attends:
            self.attend()
        self.report()
        self.rounded: dict[int, Node] = {}
        self.halves = Halves()

    def by_weight(self, node: Node) -> bool:
        """Whether a node multiplies f32 activations with constant weights."""
        if not self.is_product(node) and not self.is_convolution(node):
            return False
        return node.operands[1].id in self.fixed and node.operands[0].id not in self.fixed

    def is_product(self, node: Node) -> bool:
        return node.op is self.contraction and all(n.dtype is F32 for n in (node, *node.operands))

    def is_convolution(self, node: Node) -> bool:
        """A convolution in f32 that gains by narrow operands and has a kernel for them: groups fill vectors,
        and no transform does better.
        """
        if node.op.family != "conv" or any(n.dtype is not F32 for n in (node, *node.operands)):
            return False
        if self.convolves is None or not self.convolves.group(self.narrow.name) > 1:
            return False
        w, groups = node.operands[1].tensor, node.attrs["groups"]
        if not w.is_static or not 3 <= w.rank <= 5:
            return False
        out, per_in = (int(d) for d in w.shape[:2])
        lanes = self.convolves.lanes
        fits = groups == 1 or (per_in % lanes == 0 and out // groups % lanes == 0)
        return fits and gains_by_halves(node, self.convolves)

    # -- attention

    def attend(self) -> None:
        """Add the matmuls of attention that gain by it. One that stays wide may keep others from it, whose
        operands it reads.
        """
        found = [
            c
            for c in attention_candidates(Facts(self.graph, self.io))
            if all(
                i not in self.products and self.is_product(self.graph.nodes[i]) for i in (c.first, c.second)
            )
        ]
        while found:
            self.products |= {i for c in found for i in (c.first, c.second)}
            told = {c.second: self.judge(c) for c in found}
            refused = [c for c in found if not told[c.second].verdict]
            if not refused:
                break
            for c in refused:
                self.products -= {c.first, c.second}
                self.decisions.append(told[c.second])
            found = [c for c in found if told[c.second].verdict]
        self.weights = {self.source(self.graph.nodes[c.second].operands[0]).id for c in found}

    def operands(self, c: Candidate) -> list[Node]:
        """Queries, keys and values as they are stored."""
        first, second = (self.graph.nodes[i] for i in (c.first, c.second))
        return [self.source(o) for o in (*first.operands, second.operands[1])]

    def judge(self, c: Candidate) -> Decision:
        """What attention gains if all its operands are narrow: bytes and time to multiply, against a kernel
        more for each operand that has to be rounded separately.
        """
        before = after = GraphIoProfile()
        apart: dict[str, Node] = {}
        values = dict(zip(("queries", "keys", "values"), self.operands(c), strict=True))
        for name, value in values.items():
            size = self.io.bytes(value)
            if self.made_elsewhere(value) or self.wide_reader(value):
                apart[name] = value
                before += GraphIoProfile(0, 0, 0, size)
                after += GraphIoProfile(1, 0, 0, size + 2 * self.narrowed(size))
            else:
                before += GraphIoProfile(0, 0, 0, 2 * size)
                after += GraphIoProfile(0, 0, 0, 2 * self.narrowed(size))
        scores, result = (self.graph.nodes[i] for i in (c.first, c.second))
        (depth,) = (scores.operands[0].shape[i] for i in scores.attrs["lhs_contract"][:1])
        products = self.io.elements(scores) * (self.io.size(depth) + self.io.size(result.shape[-1]))
        where = tuple(dict.fromkeys(w for v in values.values() for w in v.where))
        ops = tuple(v.op.name for v in values.values())
        rule = f"attend in {self.narrow}"
        added = -self.prices.narrow_saved_ps * products
        made = decide(self.gate, (), before, after, added, rule=rule, where=where, ops=ops)
        why = self.never(apart, *scores.shape[-2:]) if apart else ""
        if not why and not made.verdict:
            why = f"rounding {' and '.join(apart)} apart: {made.reason}"
        return replace(made, verdict=False, reason=why) if why else made

    def never(self, apart: Mapping[str, Node], queries: Dim, keys: Dim) -> str:
        """Why operands are not rounded separately for any assumed sizes: they may be many for few queries."""
        kept = {s.output.id for s in self.graph.states}
        for name, value in apart.items():
            if value.op.role is Role.STATE or value.id in kept:
                return f"its {name} are kept from run to run as {value.dtype}"
        same = known_eq(queries, keys) is True or (isinstance(queries, int) and isinstance(keys, int))
        return "" if same else f"rounding {' and '.join(apart)} apart may cost more than few queries gain"

    def made_elsewhere(self, value: Node) -> bool:
        """Whether no kernel of this program computes a value."""
        return value.op.role is not Role.COMPUTE or value.id in self.fixed

    def narrowed(self, size: int) -> int:
        """Bytes of a value of f32, narrow."""
        return size * self.narrow.bits // 32

    # -- values

    def source(self, value: Node) -> Node:
        """What a chain of moves begins with."""
        while self.is_move(value):
            value = value.operands[0]
        return value

    @staticmethod
    def is_move(node: Node) -> bool:
        return node.op.role is Role.COMPUTE and node.op.has("view")

    def wide_reader(self, value: Node) -> str:
        """Who reads a value in f32, directly or through moves; nobody: an empty text."""
        if value.id in self.kept:
            return "an output"
        for user in self.users[value.id]:
            if user.id not in self.live or user.id in self.products:
                continue
            if not self.is_move(user):
                return f"read by %{user.id} ({user.op.name})"
            further = self.wide_reader(user)
            if further:
                return further
        return ""

    def report(self) -> None:
        """One decision for every value that narrow matmuls read."""
        seen: set[int] = set()
        for node in self.graph.nodes:
            for operand in node.operands if node.id in self.products else ():
                value = self.source(operand)
                if value.id in seen or value.id in self.fixed or value.id in self.weights:
                    continue
                seen.add(value.id)
                reader = self.wide_reader(value)
                self.decisions.append(self.about([value], reader and f"it is {reader} too: rounded beside"))

    def about(self, values: list[Node], refusal: str) -> Decision:
        """Storing values narrow: half the bytes to write, and to read by each reader."""
        moved = sum(
            self.io.bytes(v) * (1 + len(self.users[v.id])) for v in {v.id: v for v in values}.values()
        )
        before, after = (GraphIoProfile(0, 0, 0, n) for n in (moved, self.narrowed(moved)))
        where = tuple(dict.fromkeys(w for v in values for w in v.where))
        ops = tuple(v.op.name for v in values)
        made = decide(self.gate, (), before, after, rule=f"store {self.narrow}", where=where, ops=ops)
        why = refusal or f"nothing but products of {self.narrow} read it: {made.reason}"
        return Decision((), before, after, made.score_ps, 0, not refusal, why, where, rule=made.rule, ops=ops)

    # -- the rewrite

    def visit(self, node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.id not in self.products:
            return None
        a, b = (self.round(old, new) for old, new in zip(node.operands, operands, strict=True))
        at = node.attrs
        made: Node
        if node.op is self.contraction:
            contract, batch = (at["lhs_contract"], at["rhs_contract"]), (at["lhs_batch"], at["rhs_batch"])
            made = dot_general(a, b, contract, batch, out_dtype=F32)
        else:
            made = node.op(a, b, **{**at, "out_dtype": F32})
        return made

    def round(self, old: Node, new: Node) -> Node:
        """A value narrow. It is rounded before it is moved, where nobody reads the wide one: so the kernel
        that computes it stores it narrow.
        """
        if old.id not in self.rounded:
            if self.is_move(old) and old.id not in self.fixed and not self.wide_reader(old.operands[0]):
                before = self.round(old.operands[0], new.operands[0])
                self.rounded[old.id] = old.op(before, *new.operands[1:], **old.attrs)
            else:
                half = self.halves.of(new)
                if half is None or half.dtype is not self.narrow:
                    half = cast(new, dtype=self.narrow)
                self.rounded[old.id] = half  # what was widened from this dtype is what it was
        return self.rounded[old.id]
