"""Emulated targets give the bits of the real ones: of a run where the machine can, else the recorded ones."""

from __future__ import annotations

import itertools

import pytest

import rlx
from replay.records import STALE, UNKNOWN, Digests, Key, Records, digest_of_arrays
from replay.test_replay import FIRST, FOLDER
from rlx.target.cpu import Target, emulated, resolve, runs_here, targets

EMULATED = [target for target in targets() if target.can_be_emulated]
RECORDED = Records(FOLDER / "ops.txt", "pytest tests/replay --update-replay").read()
FLOATS, INTEGERS = ("matmul", "conv", "softmax", "exp", "fft"), ("matmul_integer", "conv_integer")
BY_DEFAULT = [(name, t) for t in EMULATED for name in (FLOATS if t.has_avx512 else INTEGERS)]
EXACT = {"avxvnni"}
"""Features whose instructions round nothing: a target with no others beyond the code has the bits of that."""

SAME_BITS = {"x86-64-v4-amx": "x86-64-v4-bf16-vnni"}
"""Targets that differ in products of bf16 and weights that are summed in f32, which no first sample has."""


def ran(name: str, target: Target) -> str:
    program = rlx.compile(FIRST[name].graph()[0], target=target.name, threads=2, cache=False)
    bits = digest_of_arrays(program.run(FIRST[name].feed()))
    joined = Digests.joined([Digests("", "", bits)]).bits  # as bits of an op's cases are recorded
    assert joined is not None
    return joined


def real(name: str, target: Target) -> str | None:
    """Bits of the real target, if they can be known here."""
    if runs_here(target):
        return ran(name, target)
    if set(target.features) - set(emulated(target).code.features) <= EXACT:
        return real(name, emulated(target).code)
    if target.name in SAME_BITS:
        return real(name, resolve(SAME_BITS[target.name]))
    known = RECORDED.get(Key(name, target.name), Digests("", "", None)).bits
    return None if known is None or known.startswith((UNKNOWN, STALE)) else known


def check(name: str, target: Target) -> None:
    if not runs_here(emulated(target)):
        pytest.skip(f"emulation needs {emulated(target).code.name}")
    made, wanted = ran(name, emulated(target)), real(name, target)
    if wanted is None:
        pytest.skip(f"it ran, but nobody has recorded bits of {target.name} that this machine cannot run")
    assert made == wanted


@pytest.mark.parametrize(("name", "target"), BY_DEFAULT, ids=lambda given: getattr(given, "name", given))
def test_op(name: str, target: Target) -> None:
    check(name, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [case for case in itertools.product(sorted(FIRST), EMULATED) if case not in BY_DEFAULT],
    ids=lambda given: getattr(given, "name", given),
)
def test_every_op(name: str, target: Target) -> None:
    check(name, target)
