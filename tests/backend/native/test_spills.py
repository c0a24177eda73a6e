"""No innermost loop of a trained model keeps vectors in memory for want of registers, except for a reason.

`allowed_spills.txt` lists the exceptions. The slow test also finds lines that are no longer needed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

import pytest

import rlx
from rlx.api.compile import plan
from rlx.codegen.native import jit
from rlx.records import dataclass
from rlx.target.cpu import resolve
from rlx.zoo.samples import FEEDS
from spills import in_innermost_loops, spills_of

TARGETS = ("x86-64-v3", "x86-64-v4")
QUICK = ("magika",)


@dataclass(frozen=True)
class Allowed:
    """A line of the list; `kernel` is a pattern."""

    target: str
    most: int
    kernel: str
    reason: str


def allowed() -> list[Allowed]:
    lines = (Path(__file__).parent / "allowed_spills.txt").read_text(encoding="utf-8").splitlines()
    fields = [[field.strip() for field in line.split("|")] for line in lines if line and line[0] != "#"]
    return [Allowed(target, int(most), kernel, reason) for target, most, kernel, reason in fields]


def spills(id: str, target: str, zoo_path: Callable[..., Path]) -> dict[str, int]:
    pytest.importorskip("onnx")
    return spills_of(plan(rlx.from_onnx(zoo_path(id)), target=target))


def limit(kernel: str, target: str) -> int:
    lines = [line for line in allowed() if line.target == target and fnmatch.fnmatchcase(kernel, line.kernel)]
    return max((line.most for line in lines), default=0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("id", QUICK)
def test_model(id: str, target: str, zoo_path: Callable[..., Path]) -> None:
    found = spills(id, target, zoo_path)
    assert {kernel: n for kernel, n in found.items() if n > limit(kernel, target)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_model(target: str, zoo_path: Callable[..., Path]) -> None:
    """No kernel has more than its line says, and no line says more than a kernel has."""
    found = [(kernel, n) for id in FEEDS for kernel, n in spills(id, target, zoo_path).items()]
    assert {kernel: n for kernel, n in found if n > limit(kernel, target)} == {}
    for line in allowed():
        if line.target == target:
            assert line.most == max(
                (n for kernel, n in found if fnmatch.fnmatchcase(kernel, line.kernel)), default=0
            ), line


def test_every_exception_has_a_reason() -> None:
    assert allowed() and all(line.reason and line.most > 0 and line.target in TARGETS for line in allowed())


def test_spills_are_found() -> None:
    """Of a loop with more sums than a target has registers, and of none outside of loops."""
    sums = range(24)
    carried = "\n".join(f"%s{i} = phi <8 x float> [zeroinitializer, %entry], [%t{i}, %loop]" for i in sums)
    added = "\n".join(
        f"%p{i} = getelementptr <8 x float>, ptr %x, i64 {i}\n%v{i} = load volatile <8 x float>, ptr %p{i}\n"
        f"%t{i} = fadd <8 x float> %s{i}, %v{i}"
        for i in sums
    )
    stored = "\n".join(
        f"%q{i} = getelementptr <8 x float>, ptr %y, i64 {i}\nstore <8 x float> %t{i}, ptr %q{i}"
        for i in sums
    )
    text = f"""define void @f(ptr %x, ptr %y, i64 %n) {{
entry:
br label %loop
loop:
%i = phi i64 [0, %entry], [%j, %loop]
{carried}
{added}
%j = add i64 %i, 1
%more = icmp slt i64 %j, %n
br i1 %more, label %loop, label %done
done:
{stored}
ret void
}}"""
    for name, spilled in (("x86-64-v3", True), ("x86-64-v4", False)):
        found = in_innermost_loops(jit.assembly(text, resolve(name), comments=True))
        assert bool(found) is spilled and all(function == "f" for function, _ in found)
