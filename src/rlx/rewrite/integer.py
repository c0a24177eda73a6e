"""Matmuls of dequantised bytes as integer matmuls of the bytes themselves.

Exporters write a quantised matmul in real numbers: (q - zero) * scale of both factors, a matmul
in f32, and a rounding of the result. Scales that do not change along the summed axes move behind the sum:
what is left inside is a matmul of 8-bit integers, summed exactly in i32. The rules look at forms, so they
hold for MatMul, Gemm, Conv and whatever else lowers to a contraction or a convolution; what follows (bias,
activation, rounding to bytes) joins as an epilogue like any other.

What changes: the sum is exact, where f32 rounds each step, and three roundings follow it (to f32, the product
of the scales, the product with it), at most 2**-22 of the value together. A value that is rounded to bytes
afterwards may therefore differ by one quantum from the real one where it is that close to a half.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.cost.decision import Decision
from rlx.cost.profile import GraphIoProfile
from rlx.ir.dim import Dim
from rlx.ir.dims.bounds import upper_bound
from rlx.ir.dtype import F32, I32, DType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import Shape, tensor_types
from rlx.kernel.form import Contract, Conv, Map
from rlx.ops.array.shape import reshape, transpose
from rlx.ops.array.window import is_padded
from rlx.ops.math.contract import Axes
from rlx.ops.math.elementwise import round
from rlx.ops.quant.qlinear import Meeting, contraction, is_byte
from rlx.ops.quant.qlinear_conv import convolution, per_channel
from rlx.ops.quant.quantize import to
from rlx.records import dataclass
from rlx.rewrite.numbers import SMALL, number_of
from rlx.rewrite.rules import Firing, Rule, Subject, apply_rules
from rlx.target.prices import DEVICES, Prices

LARGEST_SUM = 2**31 - 1
NEARBY = 64  # ops between a sum and the rounding of what became of it
BOUNDS = ("maximum", "minimum")


@dataclass(frozen=True, eq=False)
class Levels:
    """A real value (codes - zero) * scale, with parameters that broadcast to the codes."""

    codes: Node
    zero: Node | None
    scale: Node

    @property
    def parameters(self) -> tuple[Node, ...]:
        return (self.scale,) if self.zero is None else (self.scale, self.zero)

    def vary_only_along(self, axes: tuple[int, ...]) -> bool:
        """Whether parameters have one number along all other axes."""
        for p in self.parameters:
            whole: Shape = (*(1,) * (self.codes.rank - p.rank), *p.shape)
            if any(d != 1 for i, d in enumerate(whole) if i not in axes):
                return False
        return True

    @property
    def are_numbers(self) -> bool:
        return self.vary_only_along(())

    @property
    def largest(self) -> int:
        """The largest size of codes - zero."""
        low, high = int(self.codes.dtype.min_value), int(self.codes.dtype.max_value)
        zero = np.zeros(()) if self.zero is None else number_of(self.zero)
        return high - low if zero is None else int(max(high - np.min(zero), np.max(zero) - low))


def same_number(a: Node | None, b: Node | None) -> bool:
    """Whether two parameters are the same number; none is 0."""
    values = [np.zeros(()) if p is None else number_of(p) for p in (a, b)]
    if any(v is None or v.size != 1 for v in values):
        return False
    x, y = (float(np.asarray(v).reshape(())) for v in values)
    return x == y


# -- finding quantised values


def levels_of(node: Node) -> Levels | None:
    """The codes of an f32 value that is dequantised, moved, or the largest of a window of such."""
    if node.op.role is not Role.COMPUTE or node.dtype is not F32:
        return None
    s = Subject(node)
    if s.applied is not None:
        return _dequantised(node, *s.applied)
    if s.moved is not None:
        return _moved(node, s)
    return _largest_of_windows(node)


def _operands(node: Node, prim: str) -> list[Node] | None:
    """Operands of a node that applies this primitive to them."""
    applied = Subject(node).applied if node.op.role is Role.COMPUTE else None
    return applied[1] if applied is not None and applied[0] == prim else None


def _uncast(node: Node, to: DType) -> Node | None:
    found = _operands(node, "cast") if node.dtype is to else None
    return None if found is None else found[0]


def _dequantised(node: Node, prim: str, args: list[Node]) -> Levels | None:
    if prim != "mul":
        return None
    for value, scale in (args, args[::-1]):
        level = _uncast(value, F32)
        if level is None or value.shape != node.shape or scale.dtype is not F32:
            continue
        zero = None
        less = _operands(level, "sub")
        if less is not None:
            level, zero = less
        codes = level if is_byte(level.dtype) else _uncast(level, I32)
        if codes is not None and is_byte(codes.dtype) and codes.shape == node.shape:
            return Levels(codes, zero, scale)
    return None


def _moved(node: Node, s: Subject) -> Levels | None:
    """A reshape, transpose, slice ... of codes; parameters that vary follow a transpose only."""
    found, index = levels_of(node.operands[0]), s.moved
    if found is None or index is None:
        return None
    rank = node.operands[0].rank
    if found.are_numbers:
        return Levels(node.op(found.codes, **node.attrs), found.zero, found.scale)
    if rank != node.rank or sorted(e.data for e in index if e.prim == "axis") != list(range(rank)):
        return None
    order = [0] * rank
    for i, e in enumerate(index):
        order[e.data] = i

    def follow(p: Node) -> Node:
        made: Node = transpose(reshape(p, (*(1,) * (rank - p.rank), *p.shape)), tuple(order))
        return made

    zero = None if found.zero is None else follow(found.zero)
    return Levels(node.op(found.codes, **node.attrs), zero, follow(found.scale))


def _largest_of_windows(node: Node) -> Levels | None:
    """Scales are positive: the largest value has the largest code. Each window has an element inside."""
    if node.op.family != "pool" or node.attrs["combine"] != "max":
        return None
    found = levels_of(node.operands[0])
    if found is None or not found.are_numbers:
        return None
    scale, pads = number_of(found.scale), node.attrs["padding"]
    inside = all(d == 1 for d in node.attrs["dilations"]) and all(
        isinstance(p, int) and p < k for k, pair in zip(node.attrs["window"], pads, strict=True) for p in pair
    )
    if scale is None or not scale.reshape(()) > 0 or not inside:
        return None
    return Levels(node.op(found.codes, **node.attrs), found.zero, found.scale)


# -- the rules


class IntegerRules:
    """The table, and what was decided about every candidate."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.decisions = prices, list[Decision]()

    def table(self) -> tuple[Rule, ...]:
        return (
            Rule("integer product", self.product),
            Rule("integer convolution", self.convolution),
            Rule("same codes again", same_codes),
            Rule("product with the inverse scale", inverse_scale),
            Rule("zero point of zero", no_zero_point),
            Rule("bound that a byte has anyway", no_bound),
        )

    def product(self, s: Subject) -> Node | None:
        node, form = s.node, s.form
        if not isinstance(form, Contract) or node.dtype is not F32 or form.accumulate is not F32:
            return None
        axes = Axes(
            tuple(i for i, _ in form.contract),
            tuple(j for _, j in form.contract),
            tuple(i for i, _ in form.batch),
            tuple(j for _, j in form.batch),
        )
        free = axes.left(len(form.lhs)), axes.right(len(form.rhs))
        kept = (*axes.lhs_batch, *free[0]), (*axes.rhs_batch, *free[1])
        depth: Dim = 1
        for i in axes.lhs_contract:
            depth = depth * form.lhs[i]

        def made(a: Levels, b: Levels) -> Node:
            sums = contraction(a.codes, b.codes, axes, constant(a.zero), constant(b.zero))
            meeting = Meeting(a.codes, b.codes, axes)
            out: Node = to(sums, F32) * (meeting.beside(a.scale, True) * meeting.beside(b.scale, False))
            return out

        return self.decide(s, "integer product", kept, depth, made)

    def convolution(self, s: Subject) -> Node | None:
        node, form = s.node, s.form
        if not isinstance(form, Conv) or node.dtype is not F32 or form.accumulate is not F32 or form.fill:
            return None
        depth: Dim = 1
        for d in form.w[1:]:
            depth = depth * d
        geometry = {"strides": form.strides, "padding": form.padding, "dilations": form.dilations}
        spatial = len(form.strides)

        def vector(p: Node) -> Node:
            return reshape(p, () if p.tensor.numel == 1 else (p.tensor.numel,))

        def zero(p: Node | None) -> Node | None:
            return None if p is None else vector(p)

        def made(x: Levels, w: Levels) -> Node:
            zeros = {"left": constant(zero(x.zero)), "right": constant(zero(w.zero))}
            sums = convolution(x.codes, w.codes, zeros, form.groups, geometry)
            scale = reshape(x.scale, ()) * per_channel(vector(w.scale), spatial)
            out: Node = to(sums, F32) * scale
            return out

        def refuse(x: Levels) -> str | None:
            padded = is_padded(form.padding)
            if padded and x.zero is not None and number_of(x.zero) is None:
                return "padding is the zero point, which is not a known number"
            return None

        return self.decide(s, "integer convolution", ((), (0,)), depth, made, refuse)

    def decide(
        self,
        s: Subject,
        rule: str,
        axes: tuple[tuple[int, ...], tuple[int, ...]],
        depth: Dim,
        made: Callable[[Levels, Levels], Node],
        refuse: Callable[[Levels], str | None] = lambda x: None,
    ) -> Node | None:
        """Write the integer form if both factors are quantised and nothing speaks against it; record it."""
        a, b = (levels_of(o) for o in s.node.operands[:2])
        if a is None and b is None:
            return None
        reason = None
        if a is None or b is None:
            reason = f"its {'left' if a is None else 'right'} factor is not quantised"
        elif not a.vary_only_along(axes[0]) or not b.vary_only_along(axes[1]):
            reason = "a scale or zero point varies along a summed axis"
        else:
            most = upper_bound(depth)
            if most is None or most * a.largest * b.largest > LARGEST_SUM:
                reason = f"sums of {depth} products may not fit i32"
            else:
                reason = refuse(a)
        work = s.node.op.cost(*(o.tensor for o in s.node.operands), **s.node.attrs)
        work = work if isinstance(work, int) else 0
        part, whole = self.prices.bytes_saved
        saved = self.prices.contraction_ps * work * part // whole if reason is None else 0
        self.decisions.append(
            Decision(
                region=(),
                before=GraphIoProfile(),
                after=GraphIoProfile(),
                score_ps=0,
                compute_ps_added=-saved,
                verdict=reason is None,
                reason=reason or "both factors are bytes: exact sums in i32, scales follow",
                where=s.node.where,
                rule=rule,
                ops=(s.node.op.name,),
            )
        )
        if reason is not None:
            return None
        assert a is not None and b is not None
        return made(a, b)


def constant(p: Node | None) -> Node | None:
    """A zero point, as a constant if its value is known."""
    value = None if p is None else number_of(p)
    return p if p is None or value is None else p.graph.constant(value)


def quantised(node: Node) -> tuple[Node, Node, Node | None] | None:
    """(value, scale, zero point) of a node that rounds value / scale to bytes."""
    if not is_byte(node.dtype):
        return None
    level, zero = _uncast(node, node.dtype), None
    if level is None or level.dtype is not F32:
        return None
    more = _operands(level, "add")
    if more is not None:
        level, zero = more
    rounded = _operands(level, "round")
    ratio = None if rounded is None else _operands(rounded[0], "div")
    return None if ratio is None else (ratio[0], ratio[1], zero)


def same_codes(s: Subject) -> Node | None:
    """Codes that are dequantised, moved, and quantised by the same numbers: (q * s) / s rounds to q."""
    found = quantised(s.node)
    levels = None if found is None else levels_of(found[0])
    if found is None or levels is None or not levels.are_numbers:
        return None
    _, scale, zero = found
    same = same_number(scale, levels.scale) and same_number(zero, levels.zero)
    value = number_of(scale)
    fits = value is not None and 1e-30 < abs(float(value.reshape(()))) < 1e30  # no underflow, no overflow
    right = levels.codes.dtype is s.node.dtype and levels.codes.shape == s.node.shape
    return levels.codes if same and fits and right else None


def inverse_scale(s: Subject) -> Node | None:
    """round(x / scale) of what was an integer sum has its scales divided instead: within the same bound."""
    if s.applied is None or s.applied[0] != "round" or s.node.dtype is not F32:
        return None
    ratio = _operands(s.applied[1][0], "div")
    if ratio is None or not _holds_integer_sum(ratio[0]):
        return None
    scale = number_of(ratio[1])
    if scale is None or not np.all((scale > 1e-30) & (scale < 1e30)):
        return None
    made: Node = round(_divided(ratio[0], scale.astype(np.float64)))
    return made if made.shape == s.node.shape else None


def _divided(node: Node, scale: np.ndarray, deep: int = 4) -> Node:
    """node / scale, divided where that takes least: scales and biases of the value, which are weights."""
    graph = node.graph
    value = number_of(node)
    if value is not None:
        return graph.constant(np.asarray(value / scale, np.float32))
    if not _is_weight(node) and deep and node.op.role is Role.COMPUTE and node.dtype is F32:
        prim, args = _applied(node)
        if prim == "mul" and any(map(_is_weight, args)):
            made: Node = node.op(*(_divided(a, scale) if _is_weight(a) else a for a in args))
            return made
        inner = all(_is_weight(a) or _takes_scale(a) for a in args)
        if prim in ("add", *BOUNDS) and inner and all(scale.size == 1 or a.shape == node.shape for a in args):
            made = node.op(*(_divided(a, scale, deep - 1) for a in args))
            return made
    made = node * graph.constant(np.asarray(1 / scale, np.float32))
    return made


def _applied(node: Node) -> tuple[str, list[Node]]:
    """Primitive and arguments of a plain elementwise op; of anything else, none."""
    found = Subject(node).applied if node.op.role is Role.COMPUTE else None
    return found or ("", [])


def _takes_scale(node: Node, deep: int = 8) -> bool:
    """Whether a value is a multiplication by a weight, or a sum or bound of such."""
    prim, args = _applied(node)
    if prim == "mul":
        return any(map(_is_weight, args))
    nearby = bool(deep) and prim in ("add", *BOUNDS)
    return nearby and all(_is_weight(a) or _takes_scale(a, deep - 1) for a in args)


def _is_weight(node: Node, deep: int = 8) -> bool:
    """Whether a small value depends on weights and constants only, so that it is computed at load."""
    size = node.tensor.numel
    if node.op.role in (Role.CONSTANT, Role.PARAM):
        return isinstance(size, int) and size <= SMALL
    plain = node.op.role is Role.COMPUTE and not node.bodies and node.op.effects == "none"
    return bool(plain and deep and node.operands) and all(_is_weight(o, deep - 1) for o in node.operands)


def no_zero_point(s: Subject) -> Node | None:
    """Whether -0.0 or 0.0 is cast to an integer is one."""
    more = _operands(s.applied[1][0], "add") if s.applied is not None and s.applied[0] == "cast" else None
    if more is None or not s.node.dtype.is_int or more[0].shape != s.node.shape:
        return None
    zero = number_of(more[1]) if more[1].tensor.numel == 1 else None
    if zero is None or zero.reshape(()) != 0:
        return None
    made: Node = s.node.op(more[0], **s.node.attrs)
    return made


def no_bound(s: Subject) -> Node | None:
    """A bound outside the range of the byte that follows has no effect: relu before codes from 0 on."""
    if s.applied is None or s.applied[0] != "cast" or not is_byte(s.node.dtype):
        return None
    level, zero = s.applied[1][0], np.zeros(())
    more = _operands(level, "add")
    if more is not None:
        known = number_of(more[1])
        if known is None:
            return None
        zero = known
    rounded = level if more is None else more[0]
    inside = _operands(rounded, "round")
    prim, args = _applied(inside[0]) if inside else ("", [])
    bound = number_of(args[1]) if prim in BOUNDS else None
    if bound is None or args[0].shape != s.node.shape or zero.size != 1:
        return None
    low, high = int(s.node.dtype.min_value), int(s.node.dtype.max_value)
    reached = np.all(bound + zero <= low) if prim == "maximum" else np.all(bound + zero >= high)
    if not reached:
        return None
    plain = round(args[0])
    made: Node = s.node.op(plain if more is None else level.op(plain, more[1]), **s.node.attrs)
    return made


def _holds_integer_sum(node: Node) -> bool:
    """Whether elementwise ops lead from an integer matmul to this value."""
    todo, seen = [node], {node.id}
    while todo and len(seen) < NEARBY:
        at = todo.pop()
        form = Subject(at).form
        if isinstance(form, (Contract, Conv)) and at.dtype is I32:
            return True
        if isinstance(form, Map):
            for o in at.operands:
                if o.id not in seen and o.op.role is Role.COMPUTE:
                    seen.add(o.id)
                    todo.append(o)
    return False


def use_integer_products(
    graph: Graph, log: list[Firing] | None = None, prices: Prices = DEVICES["cpu"]
) -> tuple[Graph, list[Decision]]:
    """Products and convolutions of dequantised bytes, computed in integers; and what was decided.

    >>> from rlx import ops
    >>> from rlx.api.lowering import lower
    >>> g = Graph()
    >>> x = ops.dequantize(g.input("x", (4, 8), "u8"), g.constant(np.float32(0.5)))
    >>> w = ops.dequantize(g.input("w", (8, 3), "i8"), g.constant(np.float32(0.25)))
    >>> g.output("y", x @ w)
    >>> made, (decision,) = use_integer_products(lower(g))
    >>> [str(n.tensor) for n in made.nodes if n.op.heavy and n.id in made.live()], decision.verdict
    (['i32[4,3]'], True)
    """
    if not any(is_byte(t.dtype) for n in graph.nodes for t in tensor_types(n.type)):
        return graph, []
    rules, fired = IntegerRules(prices), list[Firing]()
    made = apply_rules(graph, rules.table(), fired)
    if log is not None:
        log += fired
    return (made if fired else graph), rules.decisions
