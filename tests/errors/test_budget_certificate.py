"""What a memory budget that cannot be met is answered with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import BudgetError, provenance
from rlx.ir.graph import Graph


def two_norms() -> Graph:
    g = Graph("norms")
    x = g.input("x", ("rows", 256), "f32")
    with provenance(("model.py:7",)):
        left = ops.cumsum(x, axis=1)
    with provenance(("model.py:8",)):
        right = ops.cumsum(x, axis=0)
    with provenance(("model.py:9",)):
        g.output("y", rlx.ops.cumsum(left * right, axis=1))
    return g


def test_the_certificate_names_what_is_alive_together(golden: Callable[[str, str], None]) -> None:
    lir = plan(two_norms(), target="x86-64-v3", budget="100KiB")
    with pytest.raises(BudgetError) as caught:
        lir.specialize({"rows": 128})
    golden("errors/budget", str(caught.value))
