"""Products that compute their left operand: against the reference, and to the bit what two kernels give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import every_target
from rlx import Graph, ops
from rlx.backend.cpu.target import Target
from rlx.backend.reference.interpreter import evaluate
from rlx.ir.compose import compose
from rlx.ir.graph import Node
from rlx.ir.kernel import ContractNest

Made = Callable[[Node, Node, Node], Node]

# How (activations [M, K], one number per k, one number per row) become the left operand.
PROLOGUES: dict[str, Made] = {
    "activation": lambda x, k, m: ops.silu(x),
    "scale by k": lambda x, k, m: x * k,
    "scale by row": lambda x, k, m: x * ops.sigmoid(m),
    "both": lambda x, k, m: ops.maximum(x * m + k, 0.0),
    "residual": lambda x, k, m: ops.tanh(x + x * k) - m,
}
ROWS = (1, 2, 3, 13, 15, 29, 128, 131)


def prologues(prog: Any) -> list[ContractNest]:
    """Kernels of a program that compute an operand."""
    kernels = [compose(n.bodies[0]) for n in prog.lir.mir.nodes if n.bodies and n.op.name == "region"]
    return [k for k in kernels if isinstance(k, ContractNest) and k.has_prologue]


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(prologue: Made, rows: Any, k: int, n: int, end: Callable[[Node], Node] | None = None) -> Graph:
    """prologue(x) @ w, with weights in panels."""
    g = Graph()
    x, m = g.input("x", (rows, k), "f32"), g.input("m", (rows, 1), "f32")
    along = g.param("k", (k,), "f32", values((k,), 1))
    w = g.param("w", (k, n), "f32", values((k, n), 2))
    y = ops.matmul(prologue(x, along, m), w)
    g.set_outputs({"y": y if end is None else end(y)})
    return g


def feed(rows: int, k: int) -> dict[str, np.ndarray]:
    return {"x": values((rows, k), 3), "m": values((rows, 1), 4)}


def apart(graph: Graph) -> dict[tuple[int, int], bool]:
    """Pins that keep every contraction or convolution from the ops that make its left operand."""
    prog = rlx.compile(graph)
    found: dict[tuple[int, int], bool] = {}
    for d in prog.decisions:
        if d.rule == "prologue" and d.verdict:
            heavy = [i for i in d.region if prog.lir.unfused.nodes[i].op.name in ("dot_general", "conv")]
            found |= {(i, heavy[0]): False for i in d.region if i not in heavy and i < heavy[0]}
    assert found
    return found


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.sqrt(want.size + 1))


@every_target
@pytest.mark.parametrize("name", PROLOGUES)
@pytest.mark.parametrize(("k", "n"), [(1, 33), (7, 50), (48, 64), (129, 401)])
def test_every_row_count_from_one_object(target: Target, name: str, k: int, n: int) -> None:
    """Symbolic M, odd sizes, one object; the same bits for any thread count and without fusion."""
    graph = product(PROLOGUES[name], "rows", k, n)
    progs = [rlx.compile(graph, target=target.name, threads=t) for t in (1, 2, 3)]
    assert len(prologues(progs[0])) == 1
    separate = rlx.compile(graph, target=target.name, threads=2, pins=apart(graph))
    assert not prologues(separate)
    for rows in ROWS:
        data = feed(rows, k)
        want = evaluate(graph, data)["y"]
        one, *more = (p.run(data)["y"] for p in progs)
        close(one, want)
        for other in (*more, separate.run(data)["y"]):
            assert one.tobytes() == other.tobytes(), rows
