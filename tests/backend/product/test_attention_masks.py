"""Masks that hide keys from all queries of a block: the bits as without these keys; infinities count."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import rlx
from machines import executable
from rlx import ops
from rlx.fuzz.bounds import assert_by_table
from rlx.reference.interpreter import evaluate
from rlx.runtime.program import CompiledProgram

QUERIES, KEYS, DEPTH = 70, 300, 20
LAST = 128  # of the keys that are seen: the end of a block
LOWEST = float(np.finfo(np.float32).min)
FILLS = {"-inf": -np.inf, "lowest": LOWEST, "-1e9": -1e9, "-1e4": -1e4, "bool": None}
TARGETS = [t.name for t in executable()]


def graph(keys: int, kind: str) -> rlx.Graph:
    g = rlx.Graph()
    q, k, v = (g.input(n, (2, s, DEPTH), "f32") for n, s in (("q", QUERIES), ("k", keys), ("v", keys)))
    mask = g.input("mask", (QUERIES, keys), kind)
    scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) * 0.25
    scores = ops.where(mask, scores, -np.inf) if kind == "bool" else scores + mask
    g.output("y", ops.matmul(ops.softmax(scores), v))
    return g


@functools.cache
def program(keys: int, kind: str, target: str) -> CompiledProgram:
    made = rlx.compile(graph(keys, kind), target=target, threads=1)
    assert [d.rule for d in made.decisions if d.verdict] == ["attention"]
    return made


def masked(fill: float | None, keep: np.ndarray) -> np.ndarray:
    return keep if fill is None else np.where(keep, 0, fill).astype(np.float32)


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = {"q": QUERIES, "k": KEYS, "v": KEYS}
    return {name: rng.standard_normal((2, n, DEPTH), np.float32) for name, n in rows.items()}


def cut(given: dict[str, np.ndarray], keys: int) -> dict[str, np.ndarray]:
    parts = {"k": given["k"][:, :keys], "v": given["v"][:, :keys], "mask": given["mask"][:, :keys]}
    return {"q": given["q"], **{name: np.ascontiguousarray(x) for name, x in parts.items()}}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("target", TARGETS)
def test_hidden_keys_change_no_bit(target: str, fill: str) -> None:
    given, kind = arrays(1), "bool" if FILLS[fill] is None else "f32"
    seen = np.tril(np.ones((QUERIES, KEYS), bool), LAST - QUERIES)
    given["mask"] = masked(FILLS[fill], seen)
    all_keys = program(KEYS, kind, target).run(given)["y"]
    first_keys = program(LAST, kind, target).run(cut(given, LAST))["y"]
    assert all_keys.tobytes() == first_keys.tobytes()


@pytest.mark.parametrize("width", [1, 40, 90])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("target", TARGETS)
def test_keys_outside_a_sliding_window_change_no_bit(target: str, fill: str, width: int) -> None:
    """Those before it and after it, also inside of a block; other numbers there are as good."""
    given, kind = arrays(4), "bool" if FILLS[fill] is None else "f32"
    ahead = np.arange(KEYS) - np.arange(QUERIES)[:, None] - LAST
    given["mask"] = masked(FILLS[fill], (ahead >= 0) & (ahead < width))
    all_keys = program(KEYS, kind, target).run(given)["y"]
    later = {name: np.ascontiguousarray(x[:, LAST:]) for name, x in given.items() if name != "q"}
    assert (
        all_keys.tobytes() == program(KEYS - LAST, kind, target).run(later | {"q": given["q"]})["y"].tobytes()
    )
    for name in "kv":
        given[name][:, LAST + QUERIES + width :] = arrays(5)[name][:, LAST + QUERIES + width :]
        given[name][:, :LAST] *= 3
    assert all_keys.tobytes() == program(KEYS, kind, target).run(given)["y"].tobytes()


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("k", np.nan), ("k", np.inf), ("v", np.nan), ("v", np.inf), ("q", 1e30), ("q", np.nan)],
)
def test_what_is_not_finite_is_not_hidden(name: str, value: float, fill: str) -> None:
    """0 times infinity is not a number, and neither is a score of infinity that a mask lowers."""
    given, kind = arrays(2), "bool" if FILLS[fill] is None else "f32"
    given["mask"] = masked(FILLS[fill], np.tril(np.ones((QUERIES, KEYS), bool), LAST - QUERIES))
    given[name][0, -1, 3] = value
    if value == 1e30:
        given["k"][0, -1, 3] = 1e30
    got, want = program(KEYS, kind, "host").run(given), evaluate(graph(KEYS, kind), given)
    np.testing.assert_array_equal(np.isnan(got["y"]), np.isnan(want["y"]))
    assert_by_table(graph(KEYS, kind), given, got, want)


@pytest.mark.parametrize("lift", [1e-3, 90.0, 200.0, 1e4])
def test_keys_that_a_mask_lowers_a_little_are_weighed(lift: float) -> None:
    """Keys whose scores outweigh what a mask takes from them; other rows see them as nothing."""
    given = arrays(3)
    given["k"][:, LAST:] *= lift
    given["mask"] = masked(-100.0, np.arange(KEYS)[None] < np.full((QUERIES, 1), LAST))
    g = graph(KEYS, "f32")
    assert_by_table(g, given, program(KEYS, "f32", "host").run(given), evaluate(g, given))
