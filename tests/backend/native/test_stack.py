"""Arrays on the stack of generated functions: they have the size that is written, and are protected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from machines import to_execute
from rlx.codegen.native.elf import undefined_symbols
from rlx.codegen.native.jit import compile_object
from rlx.target.cpu import Target, targets

OVERFLOW = """
define void @f(i64 %n) {
entry:
  %a = alloca [8 x i64], align 64
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %p = getelementptr i64, ptr %a, i64 %i
  store volatile i64 %i, ptr %p
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the protector is for Linux")
@pytest.mark.parametrize(("count", "survives"), [(8, True), (40, False)])
def test_a_function_that_overwrites_its_stack_does_not_return(count: int, survives: bool) -> None:
    code = f"""
import ctypes
from rlx.codegen.native.jit import compile_and_load
from rlx.target.cpu import resolve
code = compile_and_load({OVERFLOW!r}, resolve("host"))
ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address("f"))({count})
print("returned")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip() == "returned") == survives, done.stderr
    assert done.returncode == (0 if survives else -4)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_the_protector_needs_no_symbol(target: Target) -> None:
    assert not undefined_symbols(compile_object(OVERFLOW, target))


ON_GUARD_PAGES = """
import sys, numpy as np
from op_cases import ALL_OPS, cases
import rlx
from machines import to_execute
from rlx.errors import RlxError
from rlx.fuzz import guarded
guarded.turn_on()
target, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ran = 0
for op in ALL_OPS[first::step]:
    for case in cases(op)[:: int(sys.argv[4])]:
        graph, _ = case.graph()
        try:
            program = rlx.compile(graph, cache=False, threads=1, target=target)
        except RlxError:
            continue
        feed = {name: guarded.array(x.shape, x.dtype) for name, x in case.feed().items()}
        for name, x in case.feed().items():
            feed[name][...] = x
        print(case.id, flush=True)
        program.run(feed)
        guarded.check()
        ran += 1
print("done", ran, len(guarded._kept))
"""


def on_guard_pages(target: str, first: int, step: int, each: int) -> None:
    """Run samples of ops with all their memory, the stack too, between guard pages."""
    words = [target, str(first), str(step), str(each)]
    done = subprocess.run(
        [sys.executable, "-c", ON_GUARD_PAGES, *words],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, f"after {last}: {done.returncode}, {done.stderr[-2000:]}"
    _, ran, arrays = last.split()
    assert int(ran) > 0 and int(arrays) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are for Linux")
@pytest.mark.parametrize("target", ["host", "x86-64-v3"])
def test_arrays_on_the_stack_have_the_size_that_is_written(target: str) -> None:
    """A fifth of the ops, one sample each; a stage of two vectors once got the four that an op asked for."""
    on_guard_pages(to_execute(target), 2, 5, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("target", ["host", "x86-64-v3", "x86-64"])
def test_arrays_on_the_stack_of_all_samples(target: str, part: int) -> None:
    on_guard_pages(to_execute(target), part, 4, 1)
