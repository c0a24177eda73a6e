"""Simplification: each rule fires where it should, never where bits would change, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import ops
from rlx.errors import VerifyError
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.rewrite.rules import Firing, Rule, apply_rules
from rlx.rewrite.simplify import holds_exactly, simplify_rules

INF, NAN = float("inf"), float("nan")
SPECIAL = np.array([[-0.0, 0.0, 1.5, -2.25], [INF, -INF, NAN, 1e-42], [3e38, 7.0, -1.0, 0.1]], np.float32)


def simplified(
    f: Callable[[Node], Any], of: str = "f32", shape: tuple[Any, ...] = (3, 4)
) -> tuple[Graph, Graph, list[Firing]]:
    g = Graph("case")
    g.output("y", f(g.input("x", shape, of)))
    log: list[Firing] = []
    return g, verify(apply_rules(g, simplify_rules(), log)), log


def kernels(graph: Graph) -> int:
    return sum(n.op.role == "compute" for n in graph.nodes if n.id in graph.live())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def spread(x: Any, count: int) -> Any:
    return ops.broadcast_to(x, (count, 3, 4))


FIRES: list[tuple[str, str, Callable[[Node], Any], int]] = [
    ("x * 1", "neutral element", lambda x: x * 1.0, 0),
    ("1 * x", "neutral element", lambda x: 1.0 * x, 0),
    ("x / 1", "neutral element", lambda x: x / 1.0, 0),
    ("x + -0.0", "neutral element", lambda x: x + -0.0, 0),
    ("x - 0", "neutral element", lambda x: x - 0.0, 0),
    ("x ** 1", "neutral element", lambda x: ops.pow(x, 1.0), 0),
    ("max(x, -inf)", "neutral element", lambda x: ops.maximum(x, -INF), 0),
    ("min(x, inf)", "neutral element", lambda x: ops.minimum(x, INF), 0),
    ("x * ones", "neutral element", lambda x: x * np.ones((3, 4), np.float32), 0),
    ("x * spread one", "neutral element", lambda x: x * ops.broadcast_to(x.graph.constant(1.0), (3, 4)), 0),
    ("neg neg", "undone", lambda x: ops.neg(ops.neg(x)), 0),
    ("abs abs", "undone", lambda x: abs(abs(x)), 1),
    ("x / 4", "exact reciprocal", lambda x: x / 4.0, 1),
    ("x ** 2", "square", lambda x: ops.pow(x, 2.0), 1),
    ("where c x x", "same both ways", lambda x: ops.where(x < 0.0, x, x), 0),
    ("cast to same", "identity", lambda x: ops.cast(x, "f32"), 0),
    ("cast there and back", "cast of cast", lambda x: ops.cast(ops.cast(x, "f64"), "f32"), 0),
    ("cast through wide", "cast of cast", lambda x: ops.cast(ops.cast(x, "f64"), "f16"), 1),
    ("transpose twice", "move of move", lambda x: ops.transpose(ops.transpose(x)), 0),
    ("three transposes", "move of move", lambda x: ops.transpose(ops.transpose(ops.transpose(x))), 1),
    ("reshape twice", "reshape of reshape", lambda x: ops.reshape(ops.reshape(x, (2, 6)), (4, 3)), 1),
    ("reshape there and back", "reshape of reshape", lambda x: ops.reshape(ops.reshape(x, (12,)), (3, 4)), 0),
    ("reshape to same", "identity", lambda x: ops.reshape(x, (3, 4)), 0),
    ("transpose to same", "identity", lambda x: ops.transpose(x, (0, 1)), 0),
    ("slice of all", "identity", lambda x: ops.slice_axis(x, 0, 0, 3), 0),
    ("slice of slice", "move of move", lambda x: ops.slice_axis(ops.slice_axis(x, 1, 1, 3), 1, 1, 2), 1),
    ("flip of flip", "move of move", lambda x: ops.flip(ops.flip(x, 1), 1), 0),
    ("broadcast to same", "identity", lambda x: ops.broadcast_to(x, (3, 4)), 0),
    ("broadcast twice", "move of move", lambda x: spread(spread(x, 1), 2), 1),
    ("concat of one", "identity", lambda x: ops.concat([x], 0), 0),
    ("pad by nothing", "identity", lambda x: ops.pad(x, padding=((0, 0), (0, 0))), 0),
    ("max over ones", "reduction of one", lambda x: ops.max(ops.reshape(x, (3, 1, 4)), axis=1), 0),
    ("prod over no axes", "reduction of one", lambda x: ops.prod(x, axis=()), 0),
    ("equal twice", "common subexpression", lambda x: ops.exp(x) * ops.exp(x), 2),
    ("constants", "fold constants", lambda x: x + (x.graph.constant(2.0) * 3.0), 1),
]  # fmt: skip


@pytest.mark.parametrize("case", FIRES, ids=[c[0] for c in FIRES])
def test_rule_fires_and_keeps_every_bit(case: tuple[str, str, Callable[[Node], Any], int]) -> None:
    _, rule, f, left = case
    before, after, log = simplified(f)
    assert rule in [fired.rule for fired in log]
    assert kernels(after) == left
    x = {"x": SPECIAL}
    assert same_bits(evaluate(before, x)["y"], evaluate(after, x)["y"])


STAYS: list[tuple[str, Callable[[Node], Any]]] = [
    ("x + 0.0 turns -0.0 into 0.0", lambda x: x + 0.0),
    ("x - -0.0 does too", lambda x: x - -0.0),
    ("x * 0 is NaN for inf", lambda x: x * 0.0),
    ("x / 3 has no exact reciprocal", lambda x: x / 3.0),
    ("x / 2**-127: 2**127 fits, 2**-127 is not normal", lambda x: x / 2.0**-127),
    ("rounding to f16 and back", lambda x: ops.cast(ops.cast(x, "f16"), "f32")),
    ("slice that drops", lambda x: ops.slice_axis(x, 0, 0, 2)),
    ("transpose", lambda x: ops.transpose(x)),
    ("x * ones that widens", lambda x: x * np.ones((2, 3, 4), np.float32)),
    ("sum over more than one", lambda x: ops.sum(x, axis=0)),
    ("a sum of -0.0 is 0.0", lambda x: ops.sum(ops.reshape(x, (1, 12)), axis=0)),
]


@pytest.mark.parametrize("case", STAYS, ids=[c[0] for c in STAYS])
def test_rules_leave_alone_what_they_would_change(case: tuple[str, Callable[[Node], Any]]) -> None:
    before, after, log = simplified(case[1])
    assert [f for f in log if f.op != "constant"] == []
    assert kernels(after) == kernels(before)


def test_integers_and_bools_have_their_own_neutral_elements() -> None:
    for f, of in ((lambda x: x + 0, "i32"), (lambda x: x | 0, "i32"), (lambda x: x & True, "bool")):
        _, after, log = simplified(f, of)
        assert [x.rule for x in log] == ["neutral element"] and kernels(after) == 0


def test_symbolic_shapes_simplify_too() -> None:
    _, after, log = simplified(
        lambda x: ops.reshape(ops.reshape(ops.transpose(ops.transpose(x)), (-1,)), (x.shape[0], 4)),
        shape=("n", 4),
    )
    assert kernels(after) == 0 and {"move of move", "reshape of reshape"} <= {f.rule for f in log}


def test_a_slice_of_a_broadcast_stays_a_slice() -> None:
    """Part of an axis that was not stretched: no broadcast gives that."""
    for count in (0, 1, 4, 9):
        g, after, _ = simplified(lambda x, n=count: ops.broadcast_to(x, (2, 9))[:, :n], shape=(1, 9))
        x = {"x": np.arange(9, dtype=np.float32).reshape(1, 9)}
        assert same_bits(evaluate(g, x)["y"], evaluate(after, x)["y"])


def test_a_slice_of_a_broadcast_makes_no_guard() -> None:
    g, after, _ = simplified(
        lambda x: ops.slice_axis(ops.broadcast_to(x, (2, *x.shape)), 2, 0, x.shape[1] // 2), shape=("n", "m")
    )
    assert [str(c) for c in after.constraints] == [str(c) for c in g.constraints]


def test_a_rule_that_needs_more_of_sizes_does_not_fire() -> None:
    g = Graph()
    x, y = g.input("x", ("n",), "f32"), g.input("y", ("m",), "f32")
    g.output("z", abs(x))
    g.output("u", y)

    def narrow(s: Any) -> Node | None:
        return abs(x_of(s) + s.node.graph.inputs[1]) if s.node.op.name == "abs" else None

    def x_of(s: Any) -> Node:
        return s.node.operands[0]

    made = verify(apply_rules(g, (Rule("needs n = m", narrow),)))
    assert not made.constraints and [n.op.name for n in made.nodes] == ["input", "input", "abs"]


def test_a_constant_is_not_spread_by_folding() -> None:
    _, after, _ = simplified(
        lambda x: ops.sum(ops.broadcast_to(x.graph.constant(2.0), (500, 3, 4)) * x, axis=0)
    )
    assert max(n.attrs["value"].array.size for n in after.nodes if n.op.role == "constant") == 1


def test_firings_name_rule_node_and_source_line() -> None:
    _, _, log = simplified(lambda x: x * 1.0)
    assert len(log) == 1
    assert str(log[0]).startswith("neutral element: %2 mul (at test_passes_simplify.py:")


def test_effects_and_random_numbers_are_not_merged() -> None:
    g = Graph()
    x = g.input("x", (3,), "f32")
    g.output("y", ops.exp(x) + ops.exp(-x))
    assert kernels(apply_rules(g, simplify_rules())) == 4


def test_rules_that_undo_each_other_are_reported() -> None:
    g = Graph()
    g.output("y", abs(g.input("x", (3,), "f32")))
    other = Rule("again", lambda s: abs(s.node.operands[0]))
    with pytest.raises(VerifyError, match=r"rules again rewrite %1 \(abs\) without end"):
        apply_rules(g, (other,))


def test_a_rule_must_keep_the_type() -> None:
    g = Graph()
    g.output("y", abs(g.input("x", (3,), "f32")))
    with pytest.raises(VerifyError, match=r"rule 'wrong' turned .* of another type"):
        apply_rules(g, (Rule("wrong", lambda s: ops.cast(s.node, "f16")),))


def test_exact_dtypes_agree_with_all_values() -> None:
    for narrow in ("bool", "i8", "u8", "i16", "f16", "bf16", "i32", "f32"):
        for wide in ("i8", "u8", "i16", "i32", "f16", "bf16", "f32", "f64"):
            a, b = dtype(narrow), dtype(wide)
            if a.bits > 16:
                claimed = holds_exactly(a, b)
                assert not claimed or b.bits > a.bits or a is b
                continue
            values = (
                np.arange(2).astype(bool)
                if a.is_bool
                else np.arange(2**a.bits).astype(f"u{a.bits // 8}").view(a.np)
            )
            if not a.is_bool and a.is_float:
                with np.errstate(all="ignore"):
                    values = values[np.isfinite(values.astype(np.float64))]
            with np.errstate(all="ignore"):
                back = values.astype(b.np).astype(np.float64)
            assert holds_exactly(a, b) == bool((back == values.astype(np.float64)).all()), (narrow, wide)


MOVES: list[Callable[[Node], Any]] = [
    lambda x: ops.transpose(x),
    lambda x: ops.flip(x, 0),
    lambda x: ops.reshape(x, (-1,)) if x.rank > 1 else ops.reshape(x, (2, -1)),
    lambda x: ops.reshape(x, (*x.shape, 1)) if x.rank < 3 else ops.reshape(x, (-1,)),
    lambda x: ops.slice_axis(x, 0, 0, (x.shape[0] + 1) // 2, 2) if x.shape[0] > 2 else x,
    lambda x: ops.broadcast_to(x, (2, *x.shape)) if x.rank < 3 else x * 1.0,
    lambda x: x / 8.0,
    lambda x: ops.cast(ops.cast(x, "f64"), "f32"),
    lambda x: -x,
    lambda x: ops.sum(ops.reshape(x, (1, *x.shape)), axis=0),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(MOVES) - 1), min_size=1, max_size=8))
def test_chains_of_moves_keep_every_bit(steps: list[int]) -> None:
    def chain(x: Node) -> Any:
        for i in steps:
            x = MOVES[i](x)
        return x

    before, after, _ = simplified(chain, shape=(4, 6))
    x = {"x": np.arange(24, dtype=np.float32).reshape(4, 6) - 7}
    assert same_bits(evaluate(before, x)["y"], evaluate(after, x)["y"])
    assert kernels(after) <= kernels(before)


@pytest.mark.parametrize("middle", ["f32", "bf16", "f64"])
def test_integers_through_floats_saturate(middle: str) -> None:
    """An integer cast to another wraps; a float saturates, so the one in between stays."""
    g = rlx.Graph()
    x = g.input("x", (4,), "i8")
    g.output("y", ops.cast(ops.cast(x, middle), "u16"))
    g.output("z", ops.cast(ops.cast(x, middle), "i32"))
    numbers = np.int8([-128, -1, 0, 127])
    got = rlx.compile(g).run({"x": numbers})
    np.testing.assert_array_equal(got["y"], [0, 0, 0, 127])
    np.testing.assert_array_equal(got["z"], numbers)
