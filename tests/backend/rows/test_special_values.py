"""Signs of zero, subnormals, infinities and NaN through every elementwise op, on every target."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from gemm_harness import every_f32_target
from rlx import ops
from rlx.errors import DTypeError
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph
from rlx.ir.op import Op, all_ops
from rlx.ops.math.activation import Composite
from rlx.ops.math.elementwise import Elementwise
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

LEAST = {"f64": 5e-324, "f32": 1e-45, "f16": 6e-8, "bf16": 1e-40}  # the least above 0, or near it
OWN_OPERANDS = ("where", "cast", "clip")  # where and cast take other dtypes, clip has optional operands


def elementwise(kind: str) -> list[Op]:
    """All ops of one real number per element that take a dtype."""
    found = []
    for op in all_ops():
        if not isinstance(op, (Elementwise, Composite)) or op.name in OWN_OPERANDS:
            continue
        if type(op).accepts(dtype(kind)):
            found.append(op)
    return found


def special(kind: str) -> np.ndarray:
    least = LEAST[kind]
    half = [0.0, least, 1000 * least, 0.25, 0.5, 1.0, 1.5, 2.5, 100.0, np.inf, np.nan]
    return np.array([sign * v for v in half for sign in (1, -1)]).astype(dtype(kind).np)


def graph_of(op: Op, kind: str) -> tuple[Graph, dict[str, np.ndarray]] | None:
    """The op over all combinations of special values; None where it gives complex numbers."""
    values = np.meshgrid(*[special(kind)] * int(op.arity or 1), indexing="ij")
    feed = {f"x{i}": v.ravel() for i, v in enumerate(values)}
    g = Graph(op.name)
    try:
        y = op(*(g.input(name, v.shape, kind) for name, v in feed.items()))
    except DTypeError:
        return None
    g.output("y", y)
    return None if y.dtype.is_complex else (g, feed)


@every_f32_target
@pytest.mark.parametrize("kind", LEAST)
def test_every_elementwise_op(kind: str, target: Target) -> None:
    wrong, tested = [], 0
    for op in elementwise(kind):
        made = graph_of(op, kind)
        if made is None:
            continue
        graph, feed = made
        with np.errstate(all="ignore"):
            want = evaluate(graph, feed)
            got = rlx.compile(graph, target=target.name, cache=False).run(feed)
        assert_by_table(graph, feed, got, want)
        tested += 1
        if want["y"].dtype != bool:
            a, b = got["y"].astype(np.float64), want["y"].astype(np.float64)
            apart = (np.signbit(a) != np.signbit(b)) & ~np.isnan(b)
            at = [tuple(float(v[i]) for v in feed.values()) for i in np.flatnonzero(apart)]
            wrong += [(op.name, *at)] if at else []
    assert not wrong
    assert tested > 60


ODD = "sin tan asin atan sinh tanh asinh atanh expm1 log1p erf sqrt cbrt round trunc floor ceil softsign"


@pytest.mark.parametrize("name", ODD.split())
def test_zero_keeps_its_sign(name: str) -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    for f in (getattr(ops, name), rlx.jit(getattr(ops, name))):
        np.testing.assert_array_equal(np.signbit(f(zeros)), [False, True])
        np.testing.assert_array_equal(f(zeros), 0.0)


def test_one_half_as_an_exponent_is_no_root() -> None:
    """A power does not depend on whether its exponent is one number or an array, as NumPy's does."""
    x, halves = np.array([-0.0, -np.inf, 4.0], np.float32), np.full(3, 0.5, np.float32)
    for exponent in (0.5, halves[:1], halves):
        for f in (ops.pow, rlx.jit(ops.pow)):
            got = f(x, exponent)
            np.testing.assert_array_equal(got, [0.0, np.inf, 2.0])
            assert not np.signbit(got).any()
