"""Programs exported to C for AArch64: cross-compiled, run by QEMU, compared with the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, by_op, cases, features
from zoo_inputs import MODELS, example_inputs

import rlx
from exported_programs import Example
from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate

pytestmark = pytest.mark.slow

SAMPLE = (
    "add attention bitcast cast cond conv conv_integer cos erf fft_split gather gelu layer_norm loop matmul "
    "matmul_integer max_pool quantize remainder scan scatter softmax sort topk where"
).split()


# The compiler, its options and the emulator.
ON_ARM = ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64-static"])


@pytest.fixture(autouse=True)
def needs_emulator(require) -> None:  # type: ignore[no-untyped-def]
    require("aarch64")


def run(
    graph: Graph, sizes: dict[str, int], feed: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """Outputs of the example program of an export, under QEMU."""
    example = Example(rlx.compile(graph, threads=1), folder, sizes, "aarch64")
    return example.run(feed, *ON_ARM)


def check_case(case: Case, folder: Path) -> bool:
    graph, feed = case.graph()[0], case.feed()
    try:
        got = run(graph, case.binding(), feed, folder)
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


@pytest.mark.parametrize("id", MODELS)
def test_models(id: str, zoo_path: Callable[..., Path], tmp_path: Path) -> None:
    zoo_path(id)
    program = rlx.load(f"zoo:{id}", threads=1)
    feed = example_inputs(program, id)
    got = Example(program, tmp_path, MODELS[id], "aarch64").run(feed, *ON_ARM)
    for name, value in program.run(feed).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)


def test_most_ops(tmp_path: Path) -> None:
    assert sum(check_case(hardest(cases(op)), tmp_path) for op in ALL_OPS) > 200


@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_case(case, Path(folder))
