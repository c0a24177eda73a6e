"""Exports of programs that a memory budget has cut: within the budget, with the bits of the program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from exported_programs import ExportError, Library
from rlx import ops
from rlx.errors import BudgetError
from rlx.export.export import prepare
from rlx.export.tables import Repeat, every_step
from rlx.ir.graph import Graph

BUDGET = 200 << 10


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def wide(rows: int | str) -> Graph:
    """A layer whose values inside are 16 times as wide as outside, which rows can share."""
    g = Graph("wide")
    x = g.input("x", (rows, 32), "f32")
    up, down = (g.param(n, s, "f32", value=values(*s)) for n, s in (("up", (32, 512)), ("down", (512, 32))))
    g.output("y", x + ops.gelu(x @ up) @ down)
    return g


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_have_the_bits_of_the_program(tmp_path: Path, threads: int) -> None:
    """Also where the last slice has fewer rows, where there is only one, and where there are no rows."""
    program = rlx.compile(wide("n"), threads=1, budget=BUDGET)
    library = Library(program, tmp_path, {"n": (0, 300)})
    loop, _ = (s for s in every_step(library.tables.steps) if isinstance(s, Repeat))
    (inner,) = program.lir.planner.inner.values()
    assert inner.cut is not None and library.tables.spaces["activation"] <= BUDGET
    model = library.open(threads=threads)
    whole = []
    for n in (300, 0, 1, 299, 97, 98, 99, 100, 101, 196, 64):
        model.bind([n])
        feed = {"x": values(n, 32, seed=n)}
        got = model.run(feed)["y"]
        assert got.tobytes() == program.run(feed)["y"].tobytes(), n
        whole.append(rlx.ir.dim.evaluate(loop.limit, {"n": n}))
    assert whole[0] > 2 and {0, 1} <= set(whole)
    with pytest.raises(ExportError, match="size 'n' must be from 0 to 300"):
        model.bind([301])
    model.close()


def test_fixed_sizes_in_webassembly(require) -> None:  # type: ignore[no-untyped-def]
    require("wasmtime")
    from exported_modules import WebModel

    program = rlx.compile(wide(300), threads=1, budget=BUDGET)
    model = WebModel(program, {})
    assert model.tables.spaces["activation"] <= BUDGET
    feed = {"x": values(300, 32)}
    np.testing.assert_allclose(model.run(feed)["y"], program.run(feed)["y"], rtol=1e-4, atol=1e-4)


def test_a_budget_holds_for_the_largest_sizes() -> None:
    """They are those of the ranges, not those that the program was compiled for."""
    program = rlx.compile(wide("n"), budget=BUDGET, assume={"n": 8})
    with pytest.raises(BudgetError, match=f"at n = 100000 needs .*, but its budget is {BUDGET}"):
        prepare(program, {"n": (0, 100000)})
