"""Random well-typed graphs, built by Hypothesis from moves: each adds one op where it is applicable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import rlx
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.node import is_among
from rlx.ir.op import Level

ops = rlx.ops
SIZES = {"n": 3, "m": 2}
"""Static sizes are 1, 2 and 3: that n is 3 is then something that graphs may have to assume."""


class NotHere(Exception):
    """A move that nothing in the graph so far is fit for."""


@dataclass
class Builder:
    """A graph that grows. `exact` are the nodes whose value does not depend on how an HIR op is expanded."""

    draw: Any
    dtype: str
    graph: Graph = field(default_factory=lambda: Graph("random"))
    nodes: list[Node] = field(default_factory=list)
    exact: set[Node] = field(default_factory=set)

    def choose(self, options: Sequence[Any]) -> Any:
        if not options:
            raise NotHere
        return self.draw(st.sampled_from(list(options)))

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(evaluate(d, SIZES) for d in node.shape)

    def value(self, least_rank: int = 0, dtype: str | None = None) -> Node:
        """A node to work on, the latest ones first; by default of the graph's floating-point dtype."""
        fit = [
            n for n in reversed(self.nodes) if n.rank >= least_rank and str(n.dtype) == (dtype or self.dtype)
        ]
        return self.choose(fit)

    def exact_value(self) -> Node:
        """A node for ops that jump: equal to the last bit however the graph is evaluated."""
        return self.choose([n for n in self.nodes if n in self.exact and str(n.dtype) == self.dtype])

    def partner(self, node: Node) -> Node:
        """A node that broadcasts with another."""
        fit = [n for n in self.nodes if n.dtype is node.dtype and self.broadcasts(n, node)]
        return self.choose(fit)

    def broadcasts(self, a: Node, b: Node) -> bool:
        pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
        return all(1 in (x, y) or evaluate(x, SIZES) == evaluate(y, SIZES) for x, y in pairs)

    def axis(self, node: Node) -> int:
        return self.draw(st.integers(-node.rank, node.rank - 1))

    def axes(self, node: Node) -> tuple[int, ...] | None:
        if node.rank == 0:
            return None
        return self.draw(st.none() | st.lists(st.integers(0, node.rank - 1), unique=True).map(tuple))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def constant(self, shape: Sequence[int]) -> Node:
        """A weight: fixed numbers, a param or a constant of the graph."""
        values = np.sin(np.arange(1, 1 + int(np.prod(shape)), dtype=self.dtype_np)).reshape(tuple(shape))
        if self.flag():
            return self.graph.constant(values)
        return self.graph.param(f"w{len(self.graph.params)}", shape, self.dtype, values)

    @property
    def dtype_np(self) -> np.dtype[np.generic]:
        return np.dtype({"f32": np.float32, "f64": np.float64}[self.dtype])

    def add(self, *made: Node) -> None:
        """Enter results, each with whether it is exact."""
        for node in made:
            self.nodes.append(node)
            if node.op.level is Level.MIR and all(self._is_exact(o) for o in node.operands):
                self.exact.add(node)

    def _is_exact(self, node: Node) -> bool:
        if node in self.exact or not node.operands:
            return True
        if is_among(node, self.nodes) or node.op.level is Level.HIR:
            return False
        return all(self._is_exact(o) for o in node.operands)


UNARY = [
    getattr(ops, name)
    for name in (
        "neg tanh sin cos sigmoid erf square softplus gelu silu mish softsign atan log_sigmoid".split()
    )
]

Move = Callable[[Builder], "Node | Sequence[Node]"]


def unary(b: Builder) -> Node:
    return b.choose(UNARY)(b.value())


def guarded_unary(b: Builder) -> Node:
    """Functions with a domain, kept inside it and away from its ends."""
    x = b.value()
    inner = b.choose((ops.exp, ops.log, ops.sqrt, ops.rsqrt, ops.reciprocal, ops.log1p, ops.cbrt))
    return inner(ops.tanh(x) * 0.5 + 1.0)


def binary(b: Builder) -> Node:
    x = b.value()
    y = b.partner(x)
    kind = b.choose(("add", "sub", "mul", "div", "hypot", "logaddexp"))
    if kind == "mul":
        return ops.tanh(x) * y
    if kind == "div":
        return x / (ops.sin(y) * 0.5 + 2.0)
    if kind == "hypot":
        return ops.hypot(x, ops.sin(y) + 3.0)
    return getattr(ops, str(kind))(x, y)


def reduce(b: Builder) -> Node:
    x = b.value()
    kind = b.choose((ops.sum, ops.mean, ops.logsumexp, ops.var))
    return kind(x, axis=b.axes(x), keepdims=b.flag())


def normalise(b: Builder) -> Node:
    x = b.value(1)
    kind = b.choose((ops.softmax, ops.log_softmax, ops.rms_norm))
    return kind(x, axis=b.axis(x))


def arrange(b: Builder) -> Node:
    x = b.value(1)
    axis = b.axis(x)
    moves: dict[str, Callable[[], Node]] = {
        "transpose": lambda: ops.transpose(x, b.draw(st.permutations(range(x.rank)))),
        "flatten": lambda: ops.reshape(x, (-1,)),
        "expand": lambda: ops.expand_dims(x, axis),
        "flip": lambda: ops.flip(x, axis),
        "roll": lambda: ops.roll(x, b.draw(st.integers(-2, 2)), axis),
        "slice": lambda: x[..., :1] if b.flag() else x[1:] if b.shape(x)[0] > 1 else x[:1],
        "cumsum": lambda: ops.cumsum(x, axis, reverse=b.flag()),
        "pad": lambda: ops.pad(x, [(1, 0)] * x.rank),
        "tile": lambda: ops.tile(x, (2,)),
        "broadcast": lambda: ops.broadcast_to(x, (2, *x.shape)),
    }
    return moves[str(b.choose(sorted(moves)))]()


def join(b: Builder) -> Node:
    x = b.value(1)
    axis = b.axis(x) % x.rank

    def fits(y: Node) -> bool:
        sizes = b.shape(y)
        return len(sizes) == x.rank and all(
            i == axis or s == t for i, (s, t) in enumerate(zip(sizes, b.shape(x), strict=True))
        )

    y = b.choose([n for n in b.nodes if n.dtype is x.dtype and fits(n)])
    return ops.concat([x, y], axis)


def contract(b: Builder) -> Node:
    x = b.value(1)
    last = b.shape(x)[-1]
    if b.flag():
        return ops.tanh(x @ b.constant((last, b.draw(st.integers(1, 3)))))
    return ops.einsum("...i,...i->...", x, x)


def recur(b: Builder) -> Node:
    """A loop with a static trip count and a body."""
    x = b.value(1)
    if not isinstance(x.shape[0], int):
        raise NotHere
    start = ops.sum(x, axis=0) * 0.0

    def step(carry: Node, item: Node) -> tuple[Node, Node]:
        new = ops.tanh(carry * 0.5 + item)
        return new, new * 2.0

    last, stacked = ops.scan(step, start, x)
    return last if b.flag() else stacked


def select(b: Builder) -> Node:
    """Ops that jump, on values that are the same to the last bit in every evaluation."""
    x = b.exact_value()
    kind = b.choose(("where", "maximum", "floor", "argmax", "sort", "cast", "clip"))
    if kind == "where":
        return ops.where(x > 0.25, x, -x)
    if kind == "maximum":
        return ops.maximum(x, 0.5)
    if kind == "argmax":
        if x.rank == 0:
            raise NotHere
        return ops.cast(ops.argmax(x, axis=b.axis(x) % x.rank), b.dtype)
    if kind == "sort":
        return ops.sort(x, b.axis(x)) if x.rank else ops.round(x)
    if kind == "cast":
        return ops.cast(ops.cast(x * 4.0, "i8"), b.dtype)
    return ops.clip(x, -0.5, 0.75) if kind == "clip" else ops.floor(x * 3.0)


SMOOTH: tuple[Move, ...] = (unary, guarded_unary, binary, reduce, normalise, arrange, join, contract, recur)
ANY: tuple[Move, ...] = (*SMOOTH, select)


@st.composite
def graphs(draw: Any, smooth: bool = False, most: int = 8) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph with outputs out0.. and a feed for its inputs; `smooth` graphs are f64 and differentiable."""
    b = Builder(draw, "f64" if smooth else "f32")
    feed: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for i in range(draw(st.integers(1, 3))):
        dims = draw(st.lists(st.sampled_from([1, 2, 3, "n", "m"]), max_size=3))
        x = b.graph.input(f"x{i}", dims, b.dtype)
        feed[f"x{i}"] = rng.uniform(-1.5, 1.5, b.shape(x)).astype(b.dtype_np)
        b.add(x)
    with b.graph.building():
        for _ in range(draw(st.integers(1, most))):
            try:
                made = b.choose(SMOOTH if smooth else ANY)(b)
            except NotHere:
                continue
            b.add(*(made if isinstance(made, (tuple, list)) else (made,)))
    count = draw(st.integers(1, 2))
    b.graph.set_outputs(b.nodes[-count:])
    return b.graph, feed
