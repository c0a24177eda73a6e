"""Ranges of sizes, bounds of what depends on them, and what an export refuses."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import ConfigError, UnsupportedError
from rlx.export.bounds import most, ranges_of, settled
from rlx.export.export import prepare
from rlx.export.names import checked_name
from rlx.export.tables import KernelCall, Repeat, every_step
from rlx.ir.dim import Constraint, ceildiv, dim_max, evaluate, sym

RANGES = {"n": (0, 7), "m": (2, 5)}
N, M = sym("n"), sym("m")


@pytest.mark.parametrize(
    "size", [N, N - M, 3 * N * M - N, (N + 1) // 2, ceildiv(N * 5, M), N % 4, dim_max(M - N, 0), (7 - N) * M]
)
def test_no_size_in_the_ranges_is_above_its_bound(size: object) -> None:
    bound = most(size, RANGES, "x")  # type: ignore[arg-type]
    found = [evaluate(size, {"n": n, "m": m}) for n in range(8) for m in range(2, 6)]  # type: ignore[arg-type]
    assert bound >= max(found)
    assert bound <= 2 * max(found) + 8  # and not far above


def test_a_symbol_without_a_range_has_the_usual_one() -> None:
    g = rlx.Graph()
    g.input("x", ("a", "b", sym("c", 1, 4), sym("d", 2)), "f32")
    assert ranges_of(g, {"a": 1, "b": 300, "c": 1, "d": 1}, {"a": (2, 3)}) == {
        "a": (2, 3),
        "b": (0, 300),
        "c": (1, 4),
        "d": (2, 128),
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"z": (1, 2)}, "has no symbol 'z'"),
        ({"c": (1, 5)}, r"c=1..5 is not a range within 1..4"),
        ({"a": (3, 2)}, r"a=3..2 is not a range"),
        ({"a": (-1, 2)}, r"a=-1..2 is not a range"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(given: dict[str, tuple[int, int]], told: str) -> None:
    g = rlx.Graph()
    g.input("x", ("a", sym("c", 1, 4)), "f32")
    with pytest.raises(ConfigError, match=told):
        ranges_of(g, {"a": 1, "c": 1}, given)


def test_guards_are_settled_by_ranges() -> None:
    assert settled(Constraint("min", N, M), {"n": (5, 9), "m": (2, 5)}) is True
    assert settled(Constraint("eq", N, M), {"n": (5, 9), "m": (2, 4)}) is False
    assert settled(Constraint("multiple", N, 4), {"n": (8, 8)}) is True
    assert settled(Constraint("multiple", N, 4), RANGES) is None


def test_slots_have_room_for_every_size() -> None:
    """A slot that shrinks when a symbol grows: the largest sizes alone would give it too little room."""
    g = rlx.Graph("tail")
    n, m = sym("n", 0, 64), sym("m", 1, 64)
    x = g.input("x", (n,), "f32")
    tail = ops.exp(x[m:])  # n - m elements
    g.input("y", (m,), "f32")
    g.output("z", ops.cumsum(ops.flip(tail, 0), 0))
    tables = prepare(rlx.compile(g), {"n": (32, 64), "m": (1, 64)}).tables
    assert tables.outputs[0].nbytes == 63 * 4


def test_a_scan_is_one_loop_whatever_its_length() -> None:
    g = rlx.Graph("scan")
    last, _ = ops.scan(
        lambda h, x: (ops.tanh(h + x),) * 2, g.input("h", (3,), "f32"), g.input("x", ("n", 3), "f32")
    )
    g.output("last", last)
    counts = []
    for high in (2, 2000):
        steps = prepare(rlx.compile(g), {"n": (0, high)}).tables.steps
        loops = [s for s in every_step(steps) if isinstance(s, Repeat)]
        counts.append((len(loops), sum(isinstance(s, KernelCall) for s in every_step(steps))))
    assert counts[0] == counts[1] and counts[0][0] == 1


def _thunk() -> rlx.Graph:
    g = rlx.Graph("thunk")
    g.output("y", ops.unique(g.input("x", (2, 3), "f32"), axis=0)[0])
    return g


def _by_data() -> rlx.Graph:
    g = rlx.Graph("found")
    g.output("y", ops.nonzero(g.input("x", (9,), "f32"))[0])
    return g


def _no_sizes() -> rlx.Graph:
    g = rlx.Graph("never")
    g.output("y", g.input("x", ("n",), "f32") + g.input("z", ("m",), "f32"))
    return g


@pytest.mark.parametrize(
    ("graph", "bind", "told"),
    [
        (_thunk, {}, r"\(unique\) (runs on the host|.*depends on data)|depends on data"),
        (_by_data, {}, r"\(nonzero\) depends on data"),
        (_no_sizes, {"n": (2, 3), "m": (5, 9)}, "which holds for no sizes of m=5..9, n=2..3"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(graph, bind, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedError, match=told):
        prepare(rlx.compile(graph()), bind)


def test_streamed_weights_are_refused() -> None:
    g = rlx.Graph("two")
    x = g.input("x", (1, 64), "f32")
    for i in range(2):
        x = ops.tanh(x @ g.param(f"w{i}", (64, 64), "f32", value=np.ones((64, 64), np.float32)))
    g.output("y", x)
    with pytest.raises(UnsupportedError, match="weight_budget"):
        prepare(rlx.compile(g, weight_budget=24 << 10), {})


@pytest.mark.parametrize("name", ["int", "3d", "a-b", "", "é"])
def test_names_must_be_identifiers(name: str) -> None:
    with pytest.raises(ConfigError, match="is not an identifier of C"):
        checked_name(name)
