"""Programs exported to C for AArch64: cross-compiled, run by QEMU, compared with the reference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_OPS, Case, assert_close, cases, features

import rlx
from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate

pytestmark = pytest.mark.slow

SAMPLE = (
    "add attention bitcast cast cond conv conv_integer cos erf fft_split gather gelu layer_norm loop matmul "
    "matmul_integer max_pool quantize remainder scan scatter softmax sort topk where"
).split()


@pytest.fixture(autouse=True)
def needs_emulator(require) -> None:  # type: ignore[no-untyped-def]
    require("aarch64")


def run(
    graph: Graph, sizes: dict[str, int], feed: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """Outputs of the example program of an export, under QEMU."""
    program = rlx.compile(graph, threads=1)
    fixed = {name: (size, size) for name, size in sizes.items()}
    program.export(folder, "c", bind=fixed, name="net", target="aarch64")
    command = ["aarch64-linux-gnu-gcc", "-static", "main.c", "libnet.a", "-pthread", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    for i, node in enumerate(program.inputs):
        np.ascontiguousarray(feed[node.attrs["name"]]).tofile(folder / f"{i}.bin")
    files = [f"{i}.bin" for i in range(len(program.inputs))]
    done = subprocess.run(
        ["qemu-aarch64-static", "./main", "net.weights", *files], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    out, at = {}, 0
    for name, node in zip(program.output_names, program.outputs, strict=True):
        shape = node.tensor.bind(sizes)
        count = int(np.prod(shape, dtype=np.int64)) * node.dtype.itemsize
        out[name] = np.frombuffer(done.stdout[at : at + count], np.uint8).view(node.dtype.np).reshape(shape)
        at += count
    assert at == len(done.stdout)
    return out


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


def test_most_ops(tmp_path: Path) -> None:
    assert sum(check_case(hardest(cases(op)), tmp_path) for op in ALL_OPS) > 200
