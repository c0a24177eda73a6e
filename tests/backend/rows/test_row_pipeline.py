"""Kernels past the caches: the same bits as pass after pass, for every length, number of rows and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import every_target
from rlx import ops
from rlx.codegen.cpu.rows import moments, nest_base, row_nest, row_pipeline
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate
from rlx.runtime.memory import allocate
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import Target

Body = Callable[[Node, Node], Node]


def _normalised(x: Node, w: Node) -> Node:
    """Two reductions, then scale and shift by a row."""
    mean = ops.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    deviation = ops.sqrt(ops.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return centred / deviation * w + w


def _kept_long(x: Node, w: Node) -> Node:
    """exp(x) is computed in the first pass and needed in the third: two rows of it are under way."""
    e = ops.exp(x)
    total = ops.sum(e, axis=-1, keepdims=True)
    spread = ops.sum(ops.abs(x - total), axis=-1, keepdims=True)
    return e * spread + total


BODIES: dict[str, Body] = {
    "softmax": lambda x, w: ops.softmax(x, axis=-1),
    "log_softmax": lambda x, w: ops.log_softmax(x, axis=-1),
    "normalised": _normalised,
    "normalised in one pass": lambda x, w: ops.layer_norm(x, w, w),
    "kept long": _kept_long,
    "one reduction": lambda x, w: x / ops.sum(ops.abs(x), axis=-1, keepdims=True),
    "one reduction, scaled": lambda x, w: x / ops.sum(ops.abs(x), axis=-1, keepdims=True) * w,
    "two operands": lambda x, w: ops.softmax(x, axis=-1) * w + x,
    "map": lambda x, w: x * w + ops.sigmoid(x),
    # exp of a sum with a row that all rows share is kept: its last pass loads the shared row no more
    "softmax, shifted": lambda x, w: ops.softmax(x + w, axis=-1),
    "softmax, scaled": lambda x, w: ops.softmax(x * w, axis=-1),
    "softmax, masked": lambda x, w: ops.softmax(ops.where(w > 0.0, x, -1e9), axis=-1),
    "softmax of a norm": lambda x, w: ops.softmax(ops.layer_norm(x, w, w), axis=-1),
    "two norms": lambda x, w: ops.layer_norm(ops.layer_norm(x, w, w), w, w),
}


def graph(body: Body, shape: tuple[int | str, ...]) -> Graph:
    g = Graph("rows")
    g.output("y", body(g.input("x", shape, "f32"), g.input("w", shape[-1:], "f32")))
    return g


def feed(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "x": rng.standard_normal(shape, dtype=np.float32),
        "w": rng.standard_normal(shape[-1], dtype=np.float32),
    }


def run(g: Graph, arrays: dict[str, np.ndarray], shape: tuple[int, ...], **options: Any) -> np.ndarray:
    """The result of a program that is compiled for this run only."""
    return result(rlx.compile(g, cache=False, **options), arrays, shape)


def result(program: CompiledProgram, arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The result in memory that begins at a cache line, as stores past the caches need."""
    out = allocate(int(np.prod(shape)) * 4).array.view(np.float32).reshape(shape)
    program.bind(arrays, {"y": out})()
    return out


def on_threads(program: CompiledProgram, threads: int) -> CompiledProgram:
    """The same code for another number of threads."""
    return CompiledProgram(program.lir, program.kernels, program._code, threads)


@pytest.fixture
def past_the_caches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, every kernel that can do so stores past the caches."""
    return lambda: monkeypatch.setattr(nest_base, "stream_bytes", lambda target: 1)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 16), (7, 208), (2, 5, 96)], ids=str)
def test_same_bits_as_pass_after_pass(
    name: str,
    shape: tuple[int, ...],
    past_the_caches: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name.endswith("one pass"):
        monkeypatch.setattr(moments, "is_long_row", lambda size: isinstance(size, int))
    g, arrays = graph(BODIES[name], shape), feed(shape)
    plain = run(g, arrays, shape, threads=1)
    past_the_caches()
    program = rlx.compile(g, cache=False)
    for threads in (1, 3):
        assert result(on_threads(program, threads), arrays, shape).tobytes() == plain.tobytes()
    np.testing.assert_allclose(plain, evaluate(g, arrays)["y"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", BODIES)
def test_symbolic_rows_compile_and_agree(name: str) -> None:
    """A program with symbolic sizes holds both versions of a kernel: that past the caches is written too."""
    shape = (3, 64)
    arrays, symbolic = feed(shape), graph(BODIES[name], ("n", "m"))
    got = rlx.compile(symbolic, cache=False).run(arrays)["y"]
    np.testing.assert_allclose(got, evaluate(symbolic, arrays)["y"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["normalised", "normalised in one pass", "one reduction, scaled"])
@pytest.mark.parametrize("shape", [(2, 64), (3, 16), (4, 1024), (7, 208), (2, 5, 96)], ids=str)
def test_two_rows_at_a_time(
    name: str,
    shape: tuple[int, ...],
    past_the_caches: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What all rows share is read once for two of them; a last row may be left over."""
    monkeypatch.setattr(moments, "is_long_row", lambda size: isinstance(size, int))
    g, arrays = graph(BODIES[name], shape), feed(shape)
    plain = run(g, arrays, shape, threads=1)
    past_the_caches()
    monkeypatch.setattr(row_pipeline, "crowded_bytes", lambda target: 1)
    together, emit = [], row_nest.RowPipeline.emit
    monkeypatch.setattr(
        row_nest.RowPipeline, "emit", lambda self: (together.append(self.together), emit(self))
    )
    program = rlx.compile(g, cache=False)
    for threads in (1, 2, 3):
        assert result(on_threads(program, threads), arrays, shape).tobytes() == plain.tobytes()
    assert set(together) == {2}


@pytest.mark.parametrize("offset", [0, 4, 64, 1020, 1024, 3000, 4092])
def test_scratch_lies_apart_from_any_operand(offset: int, past_the_caches: Callable[[], None]) -> None:
    """Where scratch begins depends on where the operand does; the bits do not."""
    shape = (5, 1040)
    g, arrays = graph(BODIES["kept long"], shape), feed(shape)
    usual = rlx.compile(g, cache=False)
    plain = result(on_threads(usual, 1), arrays, shape)
    memory = allocate(arrays["x"].nbytes + 4096).array[offset : offset + arrays["x"].nbytes]
    moved = memory.view(np.float32).reshape(shape)
    moved[...] = arrays["x"]
    assert result(on_threads(usual, 3), arrays | {"x": moved}, shape).tobytes() == plain.tobytes()
    past_the_caches()
    assert run(g, arrays | {"x": moved}, shape, threads=3).tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("columns", [64, "m"])
def test_symbolic_sizes_choose_when_they_are_known(
    name: str, columns: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program on both sides of the size from which stores go past the caches."""
    g = graph(BODIES[name], ("n", columns))
    shapes = [(3, 64), (12, 64), (1, 64), *([(12, 50), (7, 96)] if columns == "m" else [])]
    usual = rlx.compile(g, cache=False)
    plain = [result(usual, feed(shape), shape) for shape in shapes]
    monkeypatch.setattr(nest_base, "stream_bytes", lambda target: 8 * 64 * 4)
    program = rlx.compile(g, cache=False, threads=3)
    for shape, want in zip(shapes, plain, strict=True):
        assert result(program, feed(shape), shape).tobytes() == want.tobytes()


@every_target
def test_targets(target: Target, past_the_caches: Callable[[], None]) -> None:
    shape = (5, 112)
    g, arrays = graph(BODIES["two operands"], shape), feed(shape)
    plain = run(g, arrays, shape, target=target.name)
    past_the_caches()
    assert run(g, arrays, shape, target=target.name).tobytes() == plain.tobytes()


@pytest.mark.parametrize("columns", [63, 65, 100])
def test_rows_that_are_not_whole_vectors_stay_out(columns: int, past_the_caches: Callable[[], None]) -> None:
    g, arrays = graph(BODIES["softmax"], (6, columns)), feed((6, columns))
    past_the_caches()
    found = run(g, arrays, (6, columns), threads=2)
    np.testing.assert_allclose(found, evaluate(g, arrays)["y"], rtol=2e-6)


def test_what_is_not_finite_stays_in_its_row(past_the_caches: Callable[[], None]) -> None:
    shape = (8, 64)
    arrays = feed(shape)
    arrays["x"][1, 3], arrays["x"][3], arrays["x"][5, 0] = np.nan, -np.inf, np.inf
    for name in ("softmax", "log_softmax", "normalised"):
        g = graph(BODIES[name], shape)
        plain = run(g, arrays, shape)
        past_the_caches()
        found = run(g, arrays, shape)
        assert found.tobytes() == plain.tobytes()
        assert np.isfinite(found[[0, 2, 4, 6, 7]]).all()
        assert np.isnan(found[1]).all()


def test_the_pipeline_runs(monkeypatch: pytest.MonkeyPatch, past_the_caches: Callable[[], None]) -> None:
    """What the tests above compare is not the same kernel twice."""
    made = []
    emit = row_nest.RowPipeline.emit
    monkeypatch.setattr(row_nest.RowPipeline, "emit", lambda self: (made.append(self.last), emit(self)))
    g, arrays = graph(BODIES["softmax"], (4, 64)), feed((4, 64))
    run(g, arrays, (4, 64))
    assert made == []
    run(graph(BODIES["softmax"], ("n", 64)), arrays, (4, 64))
    assert made == [2]
    past_the_caches()
    run(g, arrays, (4, 64))
    assert made == [2, 2]
