"""Exports to WebAssembly in Node, through the ES module that users load: ops and trained models."""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, by_op, cases
from zoo_inputs import MODELS, example_inputs

import rlx
from exported_programs import feed_files
from rlx.errors import UnsupportedError
from rlx.ir.op import Op
from rlx.reference.interpreter import evaluate
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import web_targets

SCRIPT = Path(__file__).with_name("run_cases.mjs")
SAMPLE = "attention conv conv_integer gather matmul matmul_integer scan sort".split()
TARGETS = [target.name for target in web_targets()]


class Node:
    """A process of Node that runs one export after the other."""

    def __init__(self) -> None:
        version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
        older = int(version.lstrip("v").partition(".")[0]) < 22
        flags = ["--experimental-wasm-relaxed-simd"] if older else []
        pipe = subprocess.PIPE
        command = ["node", *flags, str(SCRIPT)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(
        self,
        program: CompiledProgram,
        sizes: dict[str, int],
        feed: dict[str, np.ndarray],
        target: str,
        threads: int = 1,
    ) -> dict[str, np.ndarray]:
        assert self.process.stdin and self.process.stdout
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ranges = {symbol: (0, size + 3) for symbol, size in sizes.items()}
            program.export(folder, "wasm", bind=ranges, name="net", target=target)
            feed_files(folder, (feed[node.attrs["name"]] for node in program.inputs))
            asked = {"folder": name, "sizes": sizes, "threads": threads}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        out = {}
        for node, output, text in zip(program.outputs, program.output_names, answer["outputs"], strict=True):
            raw = np.frombuffer(base64.b64decode(text), np.uint8)
            out[output] = raw.view(node.dtype.np).reshape(node.tensor.bind(sizes))
        return out


@functools.cache
def node() -> Node:
    """One process for all tests of this module."""
    return Node()


@pytest.fixture(scope="module", autouse=True)
def ends() -> Iterator[None]:
    yield
    if node.cache_info().currsize:
        process = node().process
        assert process.stdin and process.stdout
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def needs_node(require) -> None:  # type: ignore[no-untyped-def]
    require("node")


def check_case(case: Case, target: str) -> bool:
    graph, feed = case.graph()[0], case.feed()
    try:
        got = node().run(rlx.compile(graph, threads=1), case.binding(), feed, target)
    except UnsupportedError:
        return False
    for name, value in evaluate(graph, feed).items():
        assert_close(got[name], value)
    return True


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.name in SAMPLE], ids=lambda op: op.name)
def test_a_sample_of_ops(op: Op) -> None:
    assert check_case(cases(op)[0], TARGETS[len(op.name) % 2])


@pytest.mark.slow
@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    for target in TARGETS:
        check_case(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("id", MODELS)
def test_models(id: str, zoo_path: Callable[..., Path]) -> None:
    zoo_path(id)
    program = rlx.load(f"zoo:{id}", threads=1)
    feed = example_inputs(program, id)
    want = program.run(feed)
    for target, threads in zip(TARGETS, (1, 2), strict=True):
        got = node().run(program, MODELS[id], feed, target, threads)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)
