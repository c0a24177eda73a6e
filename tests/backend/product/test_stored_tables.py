"""Tables of rows that matmuls read as columns are stored once, as those read them."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from gemm_harness import NUMPY, TARGETS, Array, every_target, random
from rlx.api.compile import plan
from rlx.ir.dtype import dtype
from rlx.runtime.recover import recoverable
from rlx.target.cpu import Target

ROWS, WIDTH = 210, 96
PLAIN = ["f32", "f16", "bf16"]
CODED = [(4, False, "f16"), (4, True, "f32"), (8, False, "f16"), (8, True, "f16")]


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
    bits: int, zeros: bool, kind: str, tied: bool = True, rounded: bool = False
) -> tuple[rlx.Graph, Array]:
    """A table of small integers with factors for each 32; the matmul may round its rows."""
    rng, g = np.random.default_rng(bits), rlx.Graph("coded")
    codes = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (WIDTH, ROWS)).astype(np.int8)
    made = rng.uniform(0.1, 1, (1 + zeros, WIDTH // 32, ROWS)).astype(NUMPY[kind])
    factors = [made[0], *made[1:].astype(np.float32)]  # zeros need not be f16
    held = [g.param(f"factors{i}", f.shape, dtype(f.dtype), value=f) for i, f in enumerate(factors)]
    stored = g.param("codes", codes.shape, "i8", value=codes)
    matrix = rlx.ops.dequantize_groups(stored, *held, bits=bits, group=32)
    rows = rlx.ops.gather(rlx.ops.transpose(matrix), g.input("at", ("m", 2), "i32"))
    g.output("rows", rows)
    if tied and rounded:
        x = rlx.ops.tanh(rows)
        g.output("x", x)
        g.output("rounded", rlx.ops.coded_matmul(x, stored, *held, bits=bits, group=32))
    elif tied:
        g.output("y", rlx.ops.matmul(rlx.ops.tanh(rows), matrix))
    return g, rlx.ops.dequantize_groups(codes, *factors, bits=bits, group=32).T


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
@pytest.mark.parametrize(("bits", "zeros", "kind"), CODED)
def test_a_table_of_codes_stays_codes(target: Target, bits: int, zeros: bool, kind: str, tied: bool) -> None:
    program = check(target, *coded(bits, zeros, kind, tied))
    columns = ROWS + 2 * target.lanes("f32")
    factors = dtype(kind).bits + 32 * zeros
    assert program.memory({"m": 1})["weight"] <= columns * WIDTH * (bits + factors / 32) / 8 + 4096


@every_target
@pytest.mark.parametrize(("bits", "zeros", "kind"), CODED)
def test_a_table_is_read_from_the_panels_of_rounded_rows(
    target: Target, bits: int, zeros: bool, kind: str
) -> None:
    graph, table = coded(bits, zeros, kind, rounded=True)
    program = check(target, graph, table)
    columns, factors = ROWS + 2 * target.lanes("f32"), dtype(kind).bits + 32 * zeros
    assert program.memory({"m": 1})["weight"] <= columns * WIDTH * (bits + factors / 32) / 8 + 4096
    params = [program.param_values[name] for name in ("codes", *(f"factors{i}" for i in range(1 + zeros)))]
    found = program.run({"at": np.array([[3, 7]], np.int32)})
    np.testing.assert_array_equal(
        found["rounded"], rlx.ops.coded_matmul(found["x"], *params, bits=bits, group=32)
    )


def test_a_table_that_no_matmul_reads_has_rows() -> None:
    program = check(TARGETS[0], *plain("bf16", tied=False))
    assert program.memory({"m": 1})["weight"] <= ROWS * WIDTH * 2 + 4096


@pytest.mark.parametrize("make", [lambda: plain("f16")[0], lambda: coded(4, True, "f32")[0]])
def test_params_of_tables_are_found_in_panels(make: object) -> None:
    graph = make()  # type: ignore[operator]
    lir = plan(graph, target="x86-64-v3")
    assert len(lir.mir.params) == 1
    assert recoverable(lir, {n.id for n in lir.mir.params.values()}).keys() == graph.params.keys()
