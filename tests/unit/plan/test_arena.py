"""Arenas of whole models: within 3 % of their proven bound, in an order no worse than the one given."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rlx.api.compile import plan

BENCH = Path(__file__).parents[3] / "bench" / "compiler" / "arena.py"


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arena_bench", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


arena = load_bench()


@pytest.mark.parametrize("name", arena.MODELS)
def test_the_arena_is_as_small_as_its_bound(name: str, require: Callable[[str], None]) -> None:
    require("models")
    found = list(arena.rows(name, arena.MODELS[name]))
    assert len(found) == len(arena.MODELS[name].bindings)
    for row in found:
        assert row.ratio <= arena.GOAL, row
        assert row.bound <= row.given_bound, row


def test_a_binding_that_was_not_assumed_meets_the_bound_too(require: Callable[[str], None]) -> None:
    """Planned for the default sizes, then for a page: what replaying finds is no worse."""
    require("models")
    lir = plan(arena.zoo_model("ppocr-det"))
    sizes = dict(zip(lir.dynamic_symbols(), (1, 736, 960), strict=True))
    buffers = lir.specialize(sizes).plan
    buffers.check()
    assert buffers.arena_size <= arena.GOAL * buffers.lower_bound()
