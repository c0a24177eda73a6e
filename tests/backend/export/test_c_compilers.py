"""Exports to C as users build them: by gcc and by clang, for two targets, with the bits of the program."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, by_op, cases, features
from zoo_inputs import MODELS, example_inputs

import rlx
from exported_programs import Example
from machines import to_execute
from rlx.errors import UnsupportedError

COMPILERS, TARGETS = ("gcc", "clang"), ("x86-64", "x86-64-v3")
PAIRS = list(product(COMPILERS, TARGETS))
# Kernels of several kinds; each is built in one of the four ways.
SAMPLE = "attention conv gather layer_norm matmul matmul_integer scan softmax".split()


def check_case(case: Case, target: str, compilers: tuple[str, ...]) -> bool:
    """Whether a case can be exported; then it has the bits of the program."""
    graph, feed = case.graph()[0], case.feed()
    program = rlx.compile(graph, threads=1, target=to_execute(target))
    with tempfile.TemporaryDirectory() as folder:
        try:
            example = Example(program, Path(folder), case.binding())
        except UnsupportedError:
            assert program.stats["host_thunks"] or "nonzero" in case.id
            return False
        for compiler in compilers:
            want, got = program.run(feed), example.run(feed, compiler)
            for name, value in want.items():
                assert got[name].shape == value.shape and got[name].tobytes() == value.tobytes(), name
    return True


@pytest.mark.parametrize(("number", "name"), list(enumerate(SAMPLE)), ids=SAMPLE)
def test_a_sample_of_ops(number: int, name: str, require) -> None:  # type: ignore[no-untyped-def]
    compiler, target = PAIRS[number % len(PAIRS)]
    require(compiler)
    (op,) = (op for op in ALL_OPS if op.name == name)
    hardest = max(cases(op), key=lambda case: (case.symbolic, len(features(case))))
    assert any(check_case(case, target, (compiler,)) for case in (hardest, cases(op)[0]))


@pytest.fixture
def both_compilers(require) -> None:  # type: ignore[no-untyped-def]
    for compiler in COMPILERS:
        require(compiler)


@pytest.mark.slow
@pytest.mark.usefixtures("both_compilers")
@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    for target in TARGETS:
        check_case(case, target, COMPILERS)


@pytest.mark.slow
@pytest.mark.usefixtures("both_compilers")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("id", MODELS)
def test_models(id: str, target: str, zoo_path: Callable[..., Path], tmp_path: Path) -> None:
    zoo_path(id)
    program = rlx.load(f"zoo:{id}", threads=1, target=to_execute(target))
    feed = example_inputs(program, id)
    want, example = program.run(feed), Example(program, tmp_path, MODELS[id])
    for compiler in COMPILERS:
        for name, value in example.run(feed, compiler).items():
            assert value.tobytes() == want[name].tobytes(), name
