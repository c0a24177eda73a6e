"""Compiling and loading: the counter, refusals instead of process aborts, memory that comes back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest

from measured import grows
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Module
from rlx.errors import CompileError, UnsupportedError
from rlx.target.cpu import Target, host_features, missing_here, resolve, runs_here, targets

RUNNABLE = [target for target in targets() if runs_here(target)]


def forty_two(target: Target) -> str:
    module = Module(target)
    module.function("answer", [], returns="i64").return_(42)
    return module.text()


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda target: target.name)
def test_compile_load_call(target: Target) -> None:
    code = jit.load(jit.compile_object(forty_two(target), target), target)
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("answer"))() == 42


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_every_target_emits_an_object(target: Target) -> None:
    data = jit.compile_object(forty_two(target), target)
    assert data[:4] == b"\x7fELF"
    assert data == jit.compile_object(forty_two(target), target), "the same text gives the same bytes"
    assert "answer" in jit.assembly(forty_two(target), target)


def test_only_code_generation_counts() -> None:
    host = resolve("host")
    before = jit.llvm_compiles
    data = jit.compile_object(forty_two(host), host)
    assert jit.llvm_compiles == before + 1
    jit.load(data, host).address("answer")
    assert jit.llvm_compiles == before + 1


def test_code_for_another_machine_is_refused() -> None:
    arm = resolve("aarch64")
    with pytest.raises(CompileError, match="cannot run here"):
        jit.load(jit.compile_object(forty_two(arm), arm), arm)


def test_missing_feature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.target.cpu.host_features", lambda: frozenset({"sse2"}))
    best = resolve("x86-64-v4")
    assert "avx512f" in missing_here(best)
    with pytest.raises(CompileError, match="avx512f"):
        jit.load(b"", best)


def test_host_is_the_best_named_target() -> None:
    host = resolve("host")
    assert (host in targets() or host.emulated) and resolve(host) is host
    assert set(host.code.features) <= host_features()


def test_unknown_target_lists_the_names() -> None:
    with pytest.raises(CompileError, match="x86-64-v3"):
        resolve("pentium")


def test_missing_function_is_named() -> None:
    host = resolve("host")
    code = jit.compile_and_load(forty_two(host), host)
    with pytest.raises(CompileError, match="'question'"):
        code.address("question")


def test_bad_text_is_an_error() -> None:
    with pytest.raises(CompileError, match="not valid LLVM IR"):
        jit.compile_object("define void @f() { nonsense }", resolve("x86-64"))


def test_unresolved_symbol_is_an_error_not_an_abort() -> None:
    host = resolve("host")
    module = Module(host)
    module.function("f", []).call("rlx_no_such_function", [1])
    data = jit.compile_object(module.text(), host)
    assert jit.undefined_symbols(data) == ("rlx_no_such_function",)
    with pytest.raises(CompileError, match="rlx_no_such_function"):
        jit.load(data, host)


@pytest.mark.parametrize("size", [0, 3, 40, 100, 300])
def test_truncated_object_is_an_error(size: int) -> None:
    host = resolve("host")
    data = jit.compile_object(forty_two(host), host)
    with pytest.raises(CompileError):
        jit.load(data[:size], host)


def test_instruction_that_a_target_lacks_never_reaches_llvm() -> None:
    for lanes, feature in ((16, "avx512vnni"), (8, "avxvnni")):
        given = [(f"<{lanes} x i32>", "t"), (f"<{4 * lanes} x i8>", "a"), (f"<{4 * lanes} x i8>", "b")]
        f = Module(resolve("x86-64-v3")).function("f", given)
        with pytest.raises(UnsupportedError, match=rf"{feature}.*x86-64-v3"):
            f.dot_u8i8(*f.args)


def test_dropped_code_gives_its_memory_back() -> None:
    host = resolve("host")
    data = jit.compile_object(forty_two(host), host)

    def cycles() -> None:
        for _ in range(300):
            jit.load(data, host).address("answer")

    assert not grows(cycles, most=4 << 20)


def test_targets_need_no_llvmlite() -> None:
    program = "import sys, rlx.target.cpu, rlx.codegen.native.irtext; print('llvmlite' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_modules_of_one_program_are_compiled_side_by_side_and_come_back_in_order() -> None:
    target = resolve("host")
    texts = [f"define i64 @f{n}() {{ ret i64 {n} }}" for n in range(20)]
    before = jit.llvm_compiles
    compiling = jit.Compiling(target)
    for text in texts:
        compiling.add(text)
    objects = compiling.objects()
    assert jit.llvm_compiles == before + len(texts)
    assert objects == [jit.compile_object(text, target) for text in texts]
    code = jit.load_all(objects, target)
    assert [ctypes.CFUNCTYPE(ctypes.c_int64)(code.address(f"f{n}"))() for n in range(20)] == list(range(20))
    with pytest.raises(CompileError, match="no function 'g'"):
        code.address("g")


def test_a_module_that_is_not_valid_fails_the_program_in_the_thread_that_waits() -> None:
    compiling = jit.Compiling(resolve("host"))
    for text in ("define void @f() { ret void }", "define void @f() { nonsense }"):
        compiling.add(text)
    with pytest.raises(CompileError, match="not valid LLVM IR"):
        compiling.objects()


def test_threads_wait_until_other_machines_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM knows other kinds of machines by name before it can make code for them, and then aborts."""
    state, gap, seen = ["none"], threading.Event(), list[str]()

    class Target:
        @staticmethod
        def from_triple(triple: str) -> str:
            seen.append(state[0])
            if state[0] == "none":
                raise RuntimeError("no such machine")
            return triple

    class Llvm:
        def __init__(self) -> None:
            self.Target = Target

        def initialize_all_targets(self) -> None:
            state[0] = "names only"
            other.start()
            gap.wait(0.2)  # the other thread does not come while this one is here

        def initialize_all_asmprinters(self) -> None:
            state[0] = "ready"

    def describe() -> None:
        jit._description("other")
        gap.set()

    other = threading.Thread(target=describe)
    monkeypatch.setattr(jit, "_llvm", Llvm)
    jit._description("other")
    other.join()
    assert seen == ["none", "ready", "ready"]
