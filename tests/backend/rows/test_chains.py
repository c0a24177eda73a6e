"""Chains of gathers, whose lanes are walked as scalars: every length of rows, every end, and indices that do
not exist."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from machines import executable, on_targets
from rlx import ops
from rlx.errors import KernelError
from rlx.ir.graph import Graph, Node
from rlx.target.cpu import Target

TARGETS = executable()
STEPS = 5
ENDS = {
    "a map": lambda at: at,
    "a sum": lambda at: ops.sum(ops.cast(at, "f32") * 0.1, axis=-1),
    "columns": lambda at: ops.max(at, axis=0),
}


def hops(at: Node, places: Node) -> Node:
    for _ in range(STEPS):
        at = ops.gather(places, at)
    return at


def program(target: Target, end: str, count: int | str = "n") -> rlx.CompiledProgram:
    g = Graph("hops")
    at, places = g.input("at", (3, "m"), "i64"), g.input("places", (count,), "i64")
    g.output("y", ENDS[end](hops(at, places)))
    return rlx.compile(g, target=target)


@on_targets(TARGETS)
@pytest.mark.parametrize("end", ENDS)
def test_rows_of_every_length(end: str, target: Target) -> None:
    rng = np.random.default_rng(5)
    hop = program(target, end)
    assert not hop.stats["host_thunks"]
    for length in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 40):
        places = rng.permutation(29)
        places[::3] -= 29  # counted from the end
        at = rng.integers(-29, 29, (3, length))
        found = hop.run({"at": at, "places": places})["y"]
        for _ in range(STEPS):
            at = places[at]
        if end == "a sum":
            wanted = (at.astype(np.float32) * np.float32(0.1)).sum(-1, dtype=np.float64)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        else:
            np.testing.assert_array_equal(found, at if end == "a map" else at.max(0))


@on_targets(TARGETS)
@pytest.mark.parametrize("wrong", [29, -30, 1 << 40, -(1 << 63)])
def test_an_index_that_does_not_exist(wrong: int, target: Target) -> None:
    """In the middle of a chain, in every lane."""
    hop = program(target, "a map")
    places = np.roll(np.arange(29), 1)
    for lane in range(17):
        at = np.zeros((3, 17), np.int64)
        hop.run({"at": at, "places": places})
        bad = places.copy()
        bad[5] = wrong
        at[1, lane] = 7  # 7 -> 6 -> 5 -> does not exist
        with pytest.raises(KernelError, match="out of range"):
            hop.run({"at": at, "places": bad})


@on_targets(TARGETS)
def test_a_table_without_elements(target: Target) -> None:
    hop = program(target, "a map")
    empty = np.zeros(0, np.int64)
    with pytest.raises(KernelError, match="out of range"):
        hop.run({"at": np.zeros((3, 4), np.int64), "places": empty})
    assert hop.run({"at": np.zeros((3, 0), np.int64), "places": empty})["y"].shape == (3, 0)


@pytest.mark.parametrize("end", ENDS)
def test_masks_show_that_an_index_exists(end: str) -> None:
    """The kernel checks nothing then, and its bits are those of the checked one."""
    rng = np.random.default_rng(6)

    def masked(at: Node, places: Node) -> Node:
        for _ in range(STEPS):
            at = ops.gather(places, ops.bitwise_and(at, 31))
        return ENDS[end](at)

    for count in (32, "n"):
        g = Graph("masked")
        at, places = g.input("at", (3, "m"), "i64"), g.input("places", (count,), "i64")
        g.output("y", masked(at, places))
        made = rlx.compile(g)
        feeds = {"at": rng.integers(0, 99, (3, 21)), "places": rng.integers(0, 99, 32)}
        plain = rlx.jit(masked)(feeds["at"], feeds["places"])
        np.testing.assert_array_equal(made.run(feeds)["y"], plain)
