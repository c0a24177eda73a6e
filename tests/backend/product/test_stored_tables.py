"""Tables of rows that matmuls read as columns are stored once, as those read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from coded_weights import Coded, coded_weights
from gemm_harness import TARGETS, Array, every_target, random
from rlx.api.compile import plan
from rlx.codegen.cpu.product.quant_gemm import quant_layout
from rlx.ir.dtype import dtype
from rlx.runtime.recover import recoverable
from rlx.target.cpu import Target

ROWS, WIDTH = 210, 96
PLAIN = ["f32", "f16", "bf16"]
SHARED = {"scale": "f16", "minimums": True, "block": 8}
CODED = [
    (4, {"scale": "f16"}),
    (4, {"scale": "f32", "zeros": True}),
    (6, {"scale": "f32"}),
    (6, {"scale": "f16", "zeros": True}),
    (6, {"scale": "f16", "minimums": True, "block": 8}),
    (8, {"scale": "f16", "zeros": True}),
    (8, {"scale": "f16", "block": 2}),
    (8, {"scale": "f16", "minimums": True}),
    (4, SHARED),
]
every_coding = pytest.mark.parametrize(("bits", "shift"), CODED, ids=str)


def plain(kind: str, tied: bool = True) -> tuple[rlx.Graph, Array]:
    """A table of numbers; where it is `tied`, a matmul reads it, too."""
    g = rlx.Graph("plain")
    table = random((ROWS, WIDTH), kind, 3)
    node = g.param("table", table.shape, kind, value=table)
    node = node if kind == "f32" else rlx.ops.cast(node, "f32")
    rows = rlx.ops.gather(node, g.input("at", ("m", 2), "i32"))
    g.output("rows", rows)
    if tied:
        g.output("y", rlx.ops.matmul(rlx.ops.tanh(rows), rlx.ops.transpose(node)))
    return g, table.astype(np.float32)


def coded(
    bits: int, shift: dict[str, Any], tied: bool = True, rounded: bool = False
) -> tuple[rlx.Graph, Array, Coded]:
    """A table of small integers with factors for each 32; the matmul may round its rows."""
    weights, g = coded_weights(quant_layout(WIDTH, ROWS, TARGETS[0], bits, **shift)), rlx.Graph("coded")
    parts = weights.nodes(g)
    matrix = rlx.ops.dequantize_groups(*parts, **weights.options)
    rows = rlx.ops.gather(rlx.ops.transpose(matrix), g.input("at", ("m", 2), "i32"))
    g.output("rows", rows)
    if tied and rounded:
        x = rlx.ops.tanh(rows)
        g.output("x", x)
        g.output("rounded", rlx.ops.coded_matmul(x, *parts, **weights.options))
    elif tied:
        g.output("y", rlx.ops.matmul(rlx.ops.tanh(rows), matrix))
    table = rlx.ops.dequantize_groups(weights.codes, *weights.factors, **weights.options).T
    return g, table, weights


def room_of(target: Target, bits: int, shift: dict[str, Any]) -> int:
    """Bytes that a table may take: those of its storage."""
    return quant_layout(WIDTH, ROWS, target, bits, **shift).nbytes + 256


def check(target: Target, graph: rlx.Graph, table: Array) -> rlx.CompiledProgram:
    program = rlx.compile(graph, target=target.name, threads=2)
    assert not program.stats["host_thunks"]
    for m in (0, 1, 9, 40):
        at = np.random.default_rng(m).integers(-ROWS, ROWS, (m, 2)).astype(np.int32)
        found = program.run({"at": at})
        assert found["rows"].tobytes() == table[at].tobytes()
        if "y" in found:
            wide = table.astype(np.float64)
            wanted = np.tanh(wide[at]) @ wide.T
            assert (abs(found["y"] - wanted) <= 1e-5 * (1 + abs(table).max()) * WIDTH).all()
    for bad in (ROWS, -ROWS - 1):
        with pytest.raises(rlx.errors.RlxError, match="out of range"):
            program.run({"at": np.array([[0, bad]], np.int32)})
    return program


@every_target
@pytest.mark.parametrize("kind", PLAIN)
def test_a_tied_table_is_read_from_its_panels(target: Target, kind: str) -> None:
    program = check(target, *plain(kind))
    columns = ROWS + target.lanes("f32")  # the last vector of columns is filled up
    assert program.memory({"m": 1})["weight"] <= columns * WIDTH * dtype(kind).bits // 8 + 4096


@every_target
@pytest.mark.parametrize("tied", [True, False])
@every_coding
def test_a_table_of_codes_stays_codes(target: Target, bits: int, shift: dict[str, Any], tied: bool) -> None:
    program = check(target, *coded(bits, shift, tied)[:2])
    assert program.memory({"m": 1})["weight"] <= room_of(target, bits, shift)


@every_target
@every_coding
def test_a_table_is_read_from_the_panels_of_rounded_rows(
    target: Target, bits: int, shift: dict[str, Any]
) -> None:
    graph, table, weights = coded(bits, shift, rounded=True)
    program = check(target, graph, table)
    assert program.memory({"m": 1})["weight"] <= room_of(target, bits, shift)
    found = program.run({"at": np.array([[3, 7]], np.int32)})
    wanted = rlx.ops.coded_matmul(found["x"], weights.codes, *weights.factors, **weights.options)
    np.testing.assert_array_equal(found["rounded"], wanted)


def test_a_table_that_no_matmul_reads_has_rows() -> None:
    program = check(TARGETS[0], *plain("bf16", tied=False))
    assert program.memory({"m": 1})["weight"] <= ROWS * WIDTH * 2 + 4096


@pytest.mark.parametrize("make", [lambda: plain("f16")[0], lambda: coded(4, SHARED)[0]])
def test_params_of_tables_are_found_in_panels(make: object) -> None:
    graph = make()  # type: ignore[operator]
    lir = plan(graph, target="x86-64-v3")
    assert len(lir.mir.params) == 1
    assert recoverable(lir, {n.id for n in lir.mir.params.values()}).keys() == graph.params.keys()
