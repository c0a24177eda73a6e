"""Matmuls that differ in width only share one kernel, which reads its widths at run time: same bits."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu import build
from rlx.codegen.cpu.build import FAMILY, build_kernels, emit_kernel, slots_of
from rlx.codegen.cpu.product.contraction import sharing
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import with_room
from rlx.ir.graph import Graph, Node
from rlx.kernel.compose import body_of, compose
from rlx.kernel.nests import ContractNest
from rlx.kernel.views import view_layouts
from rlx.reference.interpreter import evaluate
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import resolve

NEVER = 1 << 30
ROWS = (1, 2, 3, 5, 8, 13, 30)


def chain(widths: list[int], rows: int | str = "n", residual: bool = False, dtype: str = "f32") -> Graph:
    """Matmul, bias and relu, once for each width; with `residual`, sums of two matmuls."""
    g, rng = Graph("chain"), np.random.default_rng(7)
    x = g.input("x", (rows, 24), dtype)

    def weight(name: str, *shape: int) -> Node:
        value = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype.replace("f", "float"))
        return g.param(name, shape, dtype, value=value)

    for i, n in enumerate(widths):
        k = int(x.shape[1])
        y = ops.matmul(x, weight(f"w{i}", k, n)) + weight(f"b{i}", n)
        x = ops.relu(y + ops.matmul(x, weight(f"v{i}", k, n))) if residual else ops.relu(y)
    g.output("y", x)
    return g


def widths(count: int, step: int = 8) -> list[int]:
    """Different ones, in no order, of many panels and of less than one."""
    return [16 + step * (number * 5 % count) for number in range(count)]


def lines(graph: Graph, target: str) -> tuple[int, int]:
    """Lines of text that LLVM gets, and kernels that differ."""
    made = build_kernels(plan(graph, target=target), resolve(target))
    return made.text.count("\n"), made.distinct


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4", "aarch64", "wasm32"])
def test_the_amount_of_code_does_not_depend_on_the_number_of_widths(target: str) -> None:
    few, _ = lines(chain(widths(3 * FAMILY)), target)
    many, distinct = lines(chain(widths(4 * FAMILY)), target)
    assert many == few
    assert distinct <= 2  # columns in whole vectors, or not


def test_few_widths_have_code_of_their_own() -> None:
    _, distinct = lines(chain(widths(FAMILY - 2, step=16)), "x86-64-v3")
    assert distinct == FAMILY - 2


def bits(program: CompiledProgram, rows: int, dtype: str) -> bytes:
    x = np.random.default_rng(rows).standard_normal((rows, 24)).astype(dtype.replace("f", "float"))
    return np.asarray(program(x)).tobytes()


@pytest.mark.parametrize(("dtype", "residual"), [("f32", False), ("f32", True), ("f64", False)])
@pytest.mark.parametrize("step", [8, 3])
def test_bits_do_not_depend_on_sharing(
    step: int, dtype: str, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = chain(widths(5, step), residual=residual, dtype=dtype)
    monkeypatch.setattr(build, "FAMILY", 1)
    shared = [rlx.compile(graph, cache=False, threads=threads) for threads in (1, 2)]
    monkeypatch.setattr(build, "FAMILY", NEVER)
    alone = rlx.compile(graph, cache=False, threads=1)
    assert shared[0].stats["distinct_kernels"] < alone.stats["distinct_kernels"]
    for rows in ROWS:
        assert {bits(p, rows, dtype) for p in shared} == {bits(alone, rows, dtype)}


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
def test_kernels_of_equal_keys_have_equal_code(target: str) -> None:
    """All that the code depends on is in the key, or is read at run time."""
    machine, found = resolve(target), dict[tuple[object, ...], set[str]]()
    for graph in (
        chain(widths(6)),
        chain(widths(6, 5)),
        chain(widths(6), residual=True),
        chain(widths(4), 1),
        chain(widths(4), 7, dtype="f64"),
        chain([900, 1000, 1100, 40, 3000, 2000]),
    ):
        lir = plan(graph, target=target)
        views = view_layouts(lir.mir)
        for id in lir.plan.schedule:
            node = lir.mir.nodes[id]
            kernel, (inputs, outputs) = compose(body_of(node)), slots_of(node, views)
            own = sharing(kernel, inputs, outputs, machine) if isinstance(kernel, ContractNest) else None
            if own is None:
                continue
            module = Module(machine)
            made = with_room(emit_kernel, module, "k", kernel, inputs, outputs, True)
            assert own.fitted(made) == made
            found.setdefault(own.key, set()).add(module.text())
    assert {len(texts) for texts in found.values()} == {1} and len(found) > 6


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_known_rows_share_too(rows: int) -> None:
    graph = chain(widths(3 * FAMILY), rows)
    program = rlx.compile(graph, cache=False)
    assert program.stats["distinct_kernels"] <= 2
    assert "contractions that differ in width only share one kernel" in program.explain()
    x = np.random.default_rng(0).standard_normal((rows, 24)).astype(np.float32)
    np.testing.assert_allclose(program(x), evaluate(graph, {"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_weights_beyond_the_caches_take_part() -> None:
    """Whether weights are far is found at run time: 36 MB and 1 KB in one family."""
    graph = chain([16 * i for i in range(2, FAMILY + 2)] + [3008, 3024], "n")
    program = rlx.compile(graph, cache=False)
    assert program.stats["distinct_kernels"] <= 2
    for rows in (1, 2, 7):
        x = np.random.default_rng(rows).standard_normal((rows, 24)).astype(np.float32)
        np.testing.assert_allclose(program(x), evaluate(graph, {"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_a_stored_program_runs_them(tmp_path: object) -> None:
    graph = chain(widths(FAMILY + 1))
    program = rlx.compile(graph, cache=False)
    program.save(f"{tmp_path}/chain.rlx")
    again = rlx.load(f"{tmp_path}/chain.rlx")
    assert bits(again, 5, "f32") == bits(program, 5, "f32")


def test_a_weight_that_streams_is_cut_where_its_own_panels_are(tmp_path: object) -> None:
    graph = chain(widths(FAMILY + 1, step=64))
    program = rlx.compile(graph, cache=False)
    streamed = rlx.compile(graph, cache=False, weight_budget="256KiB", weight_file=f"{tmp_path}/weights")
    assert bits(streamed, 5, "f32") == bits(program, 5, "f32")
