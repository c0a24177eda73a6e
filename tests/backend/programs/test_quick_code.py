"""Code that is not optimised runs first, with the same bits, and gives way to the best code at any time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rlx
from emission import first_cases
from rlx.codegen.native.jit import Compiling
from rlx.config import CACHE
from rlx.errors import CompileError
from rlx.ir.text.files import save
from rlx.runtime.native import quick
from rlx.runtime.native_code import code_blob
from rlx.runtime.store.cache import default_cache
from rlx.target.cpu import resolve

FIRST = first_cases()
SAMPLE = {"matmul", "conv", "softmax", "exp", "sum", "attention", "fft", "cumsum", "gather", "layer_norm"}
OPS = [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow, id=n) for n in FIRST]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the threads that optimise until it is set."""
    go = threading.Event()
    monkeypatch.setattr(quick, "let_run_first", lambda has_run: go.wait())
    monkeypatch.setattr(quick, "LONGER", 0)
    yield go
    go.set()


def layers(name: str = "layers", width: int = 24) -> rlx.Graph:
    g = rlx.Graph(name)
    x, random = g.input("x", ("n", width), "f32"), np.random.default_rng(0)
    for i in range(3):
        w = g.constant(random.standard_normal((width, width + i), np.float32))
        x = rlx.ops.softmax(rlx.ops.relu(x @ w))[:, :width]
    g.output("y", x)
    return g


def rows(count: int, width: int = 24) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, width), np.float32)


def compiled(graph: rlx.Graph, **options: object) -> rlx.CompiledProgram:
    return rlx.compile(graph, background=True, cache=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_same_bits(name: str, held: threading.Event) -> None:
    case = FIRST[name]
    graph, feed = case.graph()[0], case.feed()
    program = compiled(graph)
    first = program.run(feed)
    held.set()
    program.wait_for_code()
    for output, wanted in program.run(feed).items():
        assert wanted.tobytes() == first[output].tobytes()


def test_every_user_of_the_code_gets_the_best(held: threading.Event) -> None:
    """Contexts of several sizes, a bound call, a stream."""
    plain = rlx.compile(layers(), cache=False)
    program, x = compiled(layers()), rows(5)
    out = np.zeros_like(x)
    bound = program.bind({"x": x}, {"y": out})
    stream = program.stream()
    early = [program(x), program(rows(40)), stream.step({"x": x})["y"]]
    bound()
    contexts = [context for free in program._free.values() for context in free]
    native = [step.program for context in contexts for step in context.steps if step.program is not None]
    before = [[r.kernel for r in p.records] for p in native]
    assert program.stats["code"] == "quick" and "not optimised yet" in program.explain()
    held.set()
    program.wait_for_code()
    assert program.stats["code"] == "best" and "not optimised yet" not in program.explain()
    for p, old in zip(native, before, strict=True):
        now = p._steps.reshape(len(old), -1)[:, 0].tolist()
        assert not set(now) & set(old) and set(now) <= {
            program._code.address(n) for n in program.kernels.names
        }
    late = [program(x), program(rows(40)), stream.step({"x": x})["y"]]
    for wanted, first, then in zip([plain(x), plain(rows(40)), plain(x)], early, late, strict=True):
        assert wanted.tobytes() == first.tobytes() == then.tobytes()
    assert out.tobytes() == late[0].tobytes()
    out[:] = 0
    bound()
    assert out.tobytes() == late[0].tobytes()


def test_code_changes_while_runs_are_under_way() -> None:
    program, x = compiled(layers("changing")), rows(64)
    wanted, wrong, over = rlx.compile(layers("changing"), cache=False)(x).tobytes(), [], threading.Event()

    def run() -> None:
        while not over.is_set():
            if program(x).tobytes() != wanted:
                wrong.append(program.stats["code"])

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    program.wait_for_code()
    program(x)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_files_and_caches_have_the_best_code(
    held: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE.name, str(tmp_path / "cache"))  # where nobody has stored it before
    program = rlx.compile(layers("stored", 40), background=True)
    saved = threading.Thread(target=program.save, args=(tmp_path / "stored.rlx",))
    saved.start()
    assert program.stats["code"] == "quick" and not (tmp_path / "stored.rlx").exists()
    held.set()
    saved.join()
    target, lir = resolve(program.lir.target), program.lir
    best = code_blob(lir, target, None)
    assert code_blob(lir, target, default_cache()) == best
    x = rows(3, 40)
    loaded = rlx.load(tmp_path / "stored.rlx")
    assert loaded.stats["code"] == "best" and loaded(x).tobytes() == program(x).tobytes()


def test_long_runs_get_optimised_code_at_once() -> None:
    target, text = resolve("host"), "define void @f{}() {{\n  ret void\n}}\n"

    def quick_units(work: int) -> list[int]:
        units = quick.QuickUnits(target, work)
        for number in range(4):
            units.add(text.format(number))
        units.compiling.objects()
        return list(units.quick)

    unit = 3 * quick.SAVED_PS // quick.LONGER  # of work that one of these units pays for
    assert quick_units(0) == [0, 1, 2, 3]
    assert quick_units(5 * unit) == []
    assert quick_units(3 * unit) == [2, 3]  # shared tiles come first


def test_a_program_runs_on_when_its_code_cannot_be_optimised(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, x = compiled(layers("failing")), rows(7)
    first = program(x)

    objects = Compiling.objects

    def fail(self: Compiling) -> list[bytes]:
        objects(self)  # its threads end
        raise CompileError("LLVM generated no code: told so")

    monkeypatch.setattr(Compiling, "objects", fail)
    held.set()
    with pytest.raises(CompileError, match="told so"):
        program.wait_for_code()
    assert program.stats["code"] == "quick" and program(x).tobytes() == first.tobytes()


PROCESS = """
import os, sys, numpy as np, rlx
from rlx.codegen.native import jit
from rlx.runtime.native import quick
quick.LONGER = 0
path, cache, mode = sys.argv[1:]
program = rlx.load(path, cache=cache == "cache")
program(np.ones((3, 24), np.float32))
if mode == "fork":
    child = os.fork()
    if not child:
        program.wait_for_code()
        os._exit(program.stats["code"] != "best")
    assert os.waitpid(child, 0)[1] == 0
print(jit.llvm_compiles)
"""


def in_process(path: Path, tmp_path: Path, cache: str, mode: str = "") -> int:
    env = {**os.environ, CACHE.name: str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, str(path), cache, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return int(done.stdout)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.graph"
    save(layers(), path)
    return path


def test_a_process_ends_with_its_main_thread(model: Path, tmp_path: Path) -> None:
    """What it has not optimised yet is stored first, or, without a cache, left."""
    assert in_process(model, tmp_path, "none") > 0
    assert in_process(model, tmp_path, "cache") > 0
    assert in_process(model, tmp_path, "cache") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_the_best_code(model: Path, tmp_path: Path) -> None:
    assert in_process(model, tmp_path, "cache", "fork") > 0
