"""The loader of objects: against LLVM's own, and against damage."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from rlx.codegen.native import jit
from rlx.codegen.native.elf import MappedObject, ObjectFile, is_loadable, process_symbol
from rlx.errors import CompileError
from rlx.target.cpu import resolve

TARGET = resolve("x86-64")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="objects are for Linux")

# Calls inside and outside, constants, a table of addresses, a variable, an address taken through the GOT.
TEXT = """
target triple = "x86_64-unknown-linux-gnu"
@table = internal constant [2 x ptr] [ptr @twice, ptr @plus_pi]
@counter = global i64 40
@numbers = internal constant [4 x double] [double 1.5, double 2.5, double 3.5, double 4.5]
declare i64 @labs(i64)
define double @twice(double %x) { %y = fmul double %x, 2.0 ret double %y }
define double @plus_pi(double %x) { %y = fadd double %x, 0x400921FB54442D18 ret double %y }
define double @through(i64 %i, double %x) {
  %p = getelementptr ptr, ptr @table, i64 %i
  %f = load ptr, ptr %p
  %y = call double %f(double %x)
  ret double %y
}
define i64 @absolute(i64 %x) { %y = call i64 @labs(i64 %x) ret i64 %y }
define ptr @outside() { ret ptr @labs }
define i64 @count() {
  %v = load i64, ptr @counter
  %w = add i64 %v, 1
  store i64 %w, ptr @counter
  ret i64 %w
}
define double @number(i64 %i) {
  %p = getelementptr double, ptr @numbers, i64 %i
  %y = load double, ptr %p
  ret double %y
}
"""


@pytest.fixture(scope="module")
def data() -> bytes:
    return jit.compile_object(TEXT, TARGET)


def test_everything_an_object_may_hold(data: bytes) -> None:
    code = MappedObject(data)

    def function(name: str, result: type, *arguments: type):  # type: ignore[no-untyped-def]
        return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))

    i64, f64 = ctypes.c_int64, ctypes.c_double
    assert function("twice", f64, f64)(4.25) == 8.5
    through = function("through", f64, i64, f64)
    assert through(0, 3.0) == 6.0 and through(1, 1.0) == 1.0 + np.pi
    assert function("absolute", i64, i64)(-7) == 7
    assert function("outside", ctypes.c_void_p)() == process_symbol("labs")
    assert [function("count", i64)() for _ in range(2)] == [41, 42]
    assert [function("number", f64, i64)(i) for i in range(4)] == [1.5, 2.5, 3.5, 4.5]
    assert code.address("nothing") is None


def test_nothing_is_writable_and_executable(data: bytes) -> None:
    code = MappedObject(data)
    address = code.address("twice")
    assert address is not None
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                assert rights.startswith("r-x")
                return
    pytest.fail("the code is not mapped")


def test_damage_is_refused(data: bytes) -> None:
    for size in range(0, len(data), 7):
        with pytest.raises(CompileError):
            MappedObject(data[:size])
    rng = np.random.default_rng(0)
    tables = len(data) - len(ObjectFile(data).sections) * 64
    for _ in range(300):  # only the tables: flipped bytes of code are still code
        damaged = bytearray(data)
        damaged[int(rng.integers(tables, len(data)))] ^= 1 << int(rng.integers(8))
        try:
            MappedObject(bytes(damaged))
        except CompileError:
            pass


def test_other_machines_are_not_for_this_loader() -> None:
    arm = resolve("aarch64")
    assert not is_loadable(jit.compile_object("define void @f() { ret void }", arm))
    with pytest.raises(CompileError, match="damaged"):
        is_loadable(b"no object at all")


def test_a_loaded_program_needs_no_llvm(tmp_path) -> None:  # type: ignore[no-untyped-def]
    make = (
        "import numpy as np, rlx, sys\n"
        "g = rlx.Graph('double'); g.output('y', g.input('x', ('n',), 'f32') * 2.0)\n"
        f"rlx.compile(g).save({str(tmp_path / 'double.rlx')!r})\n"
        f"rlx.load({str(tmp_path / 'double.rlx')!r})(np.ones(3, np.float32))\n"
    )
    use = (
        "import numpy as np, rlx, sys\n"
        f"y = rlx.load({str(tmp_path / 'double.rlx')!r})(np.ones(3, np.float32))\n"
        "print(y.sum(), 'llvmlite' in sys.modules)"
    )
    for program, printed in ((make, ""), (use, "6.0 False")):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.strip() == printed, done.stderr
