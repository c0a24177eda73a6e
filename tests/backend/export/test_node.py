"""Exports to WebAssembly in Node, through the ES module that users load: ops and trained models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, by_op, cases
from zoo_inputs import MODELS, example_inputs

import rlx
from node_programs import Node
from rlx.errors import UnsupportedError
from rlx.fuzz.case import Case as FuzzCase
from rlx.fuzz.case import Refused
from rlx.fuzz.programs.grammar import draw_program
from rlx.ir.op import Op
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import web_targets

SAMPLE = "attention conv conv_integer gather matmul matmul_integer scan sort".split()
SEED = 18
TARGETS = [target.name for target in web_targets()]


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


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))]
)
def test_random_programs(number: int, tmp_path: Path) -> None:
    """Of the fuzzer, judged as it does, with errors followed through the program."""
    check_random(SEED, number, tmp_path)


def check_random(seed: int, number: int, folder: Path) -> bool:
    """Whether a program can be exported; then its results are within their bounds."""
    case = FuzzCase(draw_program(seed, number), folder)
    try:
        program = rlx.compile(case.graph, threads=1)
        feed = case.program.feed(case.graph)
        for target in TARGETS:
            case.judged(target, list(node().run(program, {}, feed, target).values()))
    except (Refused, UnsupportedError):
        return False
    return True


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
