"""The gate itself: what it overlooks, what it finds, and what an update keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from emission import emit, first_cases
from replay.canonical import canonical, canonical_text
from replay.records import Digests, Key, Records, digest_of_arrays
from rlx.target.cpu import resolve

KERNEL = """define void @{k}(ptr %{x}) #0 {{
entry:
  store i8 0, ptr %{x}, align 1{dead}
  %{v} = load float, ptr %{x}, align 4
  br label %{next}
{next}:
  %{w} = fadd float %{v}, {number}
  call void @{helper}(float %{w})
  ret void
}}"""
HELPER = "define hidden void @{helper}(float %y) #0 {{\nentry:\n  ret void\n}}"
NAMES = {"k": "k0", "x": "x", "v": "v1", "next": "then2", "w": "v3", "helper": "h", "number": "1.0"}


def text(dead: str = "", **names: str) -> str:
    given = {**NAMES, **names}
    modules = [HELPER.format(**given), KERNEL.format(dead=f"\n  {dead}" if dead else "", **given)]
    return canonical_text(modules, [("kernel", given["k"])])


@pytest.mark.parametrize(
    "names",
    [
        {"k": "other", "helper": "tail"},
        {"x": "pointer", "v": "a", "w": "b.1", "next": "loop"},
        {"dead": "%d = load float, ptr %x, align 4\n  %e = fadd float %d, 2.0"},
        {"dead": "%d = call float @llvm.fabs.f32(float 2.0)"},
    ],
)
def test_names_and_dead_values_do_not_show(names: dict[str, str]) -> None:
    assert text(**names) == text()


@pytest.mark.parametrize(
    "change",
    [
        {"number": "1.5"},
        {"dead": "%d = call float @h2(float 2.0)"},
        {"dead": "%d = load atomic i32, ptr %x acquire, align 4"},
        {"dead": "%d = atomicrmw add ptr %x, i32 1 acq_rel"},
        {"dead": "store float 0.0, ptr %x, align 4"},
    ],
)
def test_what_code_does_shows(change: dict[str, str]) -> None:
    assert text(**change) != text()


def test_a_value_in_a_cycle_of_its_own_is_dead() -> None:
    loop = "define void @k() {{\nentry:\n  br label %l\nl:\n{}  br label %l\n}}"
    phi = "  %i = phi i64 [ 0, %entry ], [ %j, %l ]\n  %j = add i64 %i, 1\n"
    assert canonical_text([loop.format(phi)], [("", "k")]) == canonical_text([loop.format("")], [("", "k")])


def test_functions_without_a_caller_and_modules_do_not_show() -> None:
    one, two = HELPER.format(helper="h"), KERNEL.format(dead="", **NAMES)
    joined = canonical_text([f"{one}\n{two}\ndefine void @lost() {{\n  ret void\n}}"], [("kernel", "k0")])
    assert joined == text()


KEY = Key("add", "aarch64")


def test_an_update_keeps_bits_that_it_cannot_compute(tmp_path: Path) -> None:
    records = Records(tmp_path / "ops.txt", "accept")
    records.write({KEY: Digests("p", "i", None)})
    assert records.read()[KEY].bits == "-"
    records.write({KEY: Digests("p", "i", "b")})  # on a machine that runs it
    records.write({KEY: Digests("p2", "i", None)})
    assert records.read()[KEY] == Digests("p2", "i", "b")
    for ir in ("i2", "i3"):  # other code: the bits are of neither
        records.write({KEY: Digests("p2", ir, None)})
        assert records.read()[KEY] == Digests("p2", ir, "stale:b")
    assert records.unrecorded({KEY: Digests("p2", "i3", "c")}) == [KEY]
    assert not records.differences({KEY: Digests("p2", "i3", "c")})
    records.write({KEY: Digests("p2", "i3", "c")})
    assert records.read()[KEY].bits == "c"


def test_a_difference_is_named_with_the_way_to_accept_it(tmp_path: Path) -> None:
    records = Records(tmp_path / "ops.txt", "pytest tests/replay --update-replay")
    records.write({KEY: Digests("p", "i", "b")})
    assert records.differences({KEY: Digests("p", "i", "b")}) == []
    assert records.differences({KEY: Digests("p", "i", None)}) == []
    told = records.differences({KEY: Digests("p", "j", "c"), Key("sub", "x86-64"): Digests("p", "i", None)})
    assert told[:3] == [
        "add on aarch64: the emitted IR changed (i -> j)",
        "add on aarch64: the output bits changed (b -> c)",
        "sub on x86-64: nothing is recorded",
    ]
    assert told[-1] == "Accept it: pytest tests/replay --update-replay"
    assert "the plan changed" in records.differences({KEY: Digests("q", "i", "b")})[0]


def test_bits_have_names_types_and_shapes() -> None:
    one = np.zeros(4, np.int32)
    others = [{"y": one}, {"x": one.view(np.float32)}, {"x": one.reshape(2, 2)}, {"x": -one.view(np.float32)}]
    assert len({digest_of_arrays(a) for a in ({"x": one}, *others)}) == 5


@pytest.mark.parametrize("name", ["softmax", "matmul", "conv", "attention"])
def test_threads_do_not_decide_about_bits(name: str) -> None:
    case = first_cases()[name]
    found = {digest_of_arrays(rlx.compile(case.graph()[0], threads=n).run(case.feed())) for n in (1, 2, 3)}
    assert len(found) == 1


ELSEWHERE = """
import sys
from emission import emit, first_cases
from replay.canonical import canonical
from rlx.target.cpu import resolve
for name in sys.argv[1:]:
    print(canonical(emit(name, first_cases()[name].graph()[0], resolve("x86-64-v4")).kernels))
"""


def test_code_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With another hash seed, cache, number of threads, and none of NumPy's faster kernels."""
    names = ["softmax", "matmul", "conv", "log_mel", "gru"]
    here = [canonical(emit(n, first_cases()[n].graph()[0], resolve("x86-64-v4")).kernels) for n in names]
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *names],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "models"), str(tests.parent / "src")]),
            "PYTHONHASHSEED": "17",
            "RLX_CACHE": str(tmp_path),
            "RLX_THREADS": "1",
            "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 X86_V3",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "\n".join(here) + "\n"
