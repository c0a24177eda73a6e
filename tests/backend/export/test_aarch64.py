"""Programs exported to C for AArch64: cross-compiled, run by QEMU, compared with the reference."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, by_op, cases, features
from zoo_inputs import MODELS, example_inputs

import rlx
from exported_programs import Example
from rlx import ops
from rlx.codegen.native.jit import assembly
from rlx.errors import UnsupportedError
from rlx.export.export import prepare
from rlx.ir.graph import Graph
from rlx.ir.op import Op
from rlx.reference.interpreter import evaluate

pytestmark = pytest.mark.slow

SAMPLE = (
    "add attention bitcast cast cond conv conv_integer cos erf fft_split gather gelu layer_norm loop matmul "
    "matmul_integer max_pool quantize remainder scan scatter softmax sort topk where"
).split()


DOTPROD = "aarch64-dotprod"
# The compiler, its options and the emulator, as the least machine that runs a target.
ON_ARM = {
    target: ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64-static", "-cpu", cpu])
    for target, cpu in (("aarch64", "cortex-a53"), ("aarch64-dotprod", "cortex-a76"))
}
INTEGERS = "conv_integer dequantize matmul_integer qlinear_conv qlinear_matmul quantize".split()
"""Ops whose kernels depend on the dot product of bytes."""


@pytest.fixture(autouse=True)
def needs_emulator(require) -> None:  # type: ignore[no-untyped-def]
    require("aarch64")


def run(
    graph: Graph, sizes: dict[str, int], feed: dict[str, np.ndarray], folder: Path, target: str
) -> dict[str, np.ndarray]:
    """Outputs of the example program of an export, under QEMU."""
    example = Example(rlx.compile(graph, threads=1), folder, sizes, target)
    return example.run(feed, *ON_ARM[target])


def check_case(case: Case, folder: Path, target: str = "aarch64") -> bool:
    graph, feed = case.graph()[0], case.feed()
    try:
        got = run(graph, case.binding(), feed, folder, target)
    except UnsupportedError:
        return False
    for name, value in evaluate(graph, feed).items():
        assert_close(got[name], value)
    return True


def hardest(samples: list[Case]) -> Case:
    return max(samples, key=lambda case: len(features(case)))


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.name in SAMPLE], ids=lambda op: op.name)
def test_a_sample_of_ops(op, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert any(check_case(case, tmp_path) for case in (hardest(cases(op)), cases(op)[0]))


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.name in INTEGERS], ids=lambda op: op.name)
def test_integers_by_dot_products(op: Op, tmp_path: Path) -> None:
    assert all(check_case(case, tmp_path, "aarch64-dotprod") for case in cases(op))


def test_f16_is_computed_as_such(tmp_path: Path) -> None:
    """With instructions of f16, without widening, and with the bits of the reference: those of infinities and
    subnormal numbers, too."""
    g = Graph("halves")
    a, b = g.input("a", (4096,), "f16"), g.input("b", (4096,), "f16")
    made_of = {"sum": a + b, "less": a - b, "times": a * b, "over": a / b}
    for name, value in made_of.items():
        g.output(name, value)
    made = prepare(rlx.compile(g, threads=1), {}, target=DOTPROD)
    code = "".join(assembly(kernel, made.target) for kernel in made.kernels)
    for op in ("fadd", "fsub", "fmul", "fdiv"):
        assert re.search(rf"\t{op}\tv\d+\.[48]h", code), op
    assert "fcvtn" not in code
    bits = np.random.default_rng(4).integers(0, 2**16, (2, 4096)).astype(np.uint16).view(np.float16)
    feed = dict(zip("ab", np.where(np.isnan(bits), np.float16(np.inf), bits), strict=True))
    with np.errstate(all="ignore"):
        wanted = evaluate(g, feed)
    for name, got in run(g, {}, feed, tmp_path, DOTPROD).items():
        np.testing.assert_array_equal(got, wanted[name], name)  # NaN where it is NaN
        there = ~np.isnan(got)
        np.testing.assert_array_equal(np.signbit(got)[there], np.signbit(wanted[name])[there], name)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 3, 5), (7, 66, 35), (24, 129, 12), (33, 64, 48)])
def test_matmuls_of_bytes_are_exact(dtype: str, m: int, k: int, n: int, tmp_path: Path) -> None:
    """Also where sums are at their largest."""
    rng = np.random.default_rng(m)
    low, high = (-128, 128) if dtype == "i8" else (0, 256)
    x = rng.integers(low, high, (m, k)).astype({"i8": np.int8, "u8": np.uint8}[dtype])
    w = rng.integers(-128, 128, (k, n)).astype(np.int8)
    x[0], w[:, 0] = low, -128
    g = Graph("bytes")
    g.output("y", ops.matmul_integer(g.input("x", (m, k), dtype), g.param("w", (k, n), "i8", value=w)))
    want = x.astype(np.int64) @ w.astype(np.int64)
    for target in ON_ARM:
        np.testing.assert_array_equal(run(g, {}, {"x": x}, tmp_path, target)["y"], want)


@pytest.mark.parametrize("id", MODELS)
def test_models(id: str, zoo_path: Callable[..., Path], tmp_path: Path) -> None:
    zoo_path(id)
    program = rlx.load(f"zoo:{id}", threads=1)
    feed = example_inputs(program, id)
    target = list(ON_ARM)[len(id) % 2]
    got = Example(program, tmp_path, MODELS[id], target).run(feed, *ON_ARM[target])
    for name, value in program.run(feed).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)


def test_most_ops(tmp_path: Path) -> None:
    assert sum(check_case(hardest(cases(op)), tmp_path) for op in ALL_OPS) > 200


@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_case(case, Path(folder), list(ON_ARM)[case.number % 2])
