"""Hard circumstances: memory between fences, a thousand programs made and dropped, no memory left."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import zlib
from typing import Any

import numpy as np
import pytest
from op_cases import ALL_CASES, IDS, Case, assert_close

import rlx
from measured import grows
from rlx.ir.dim import symbols
from rlx.reference.interpreter import evaluate
from rlx.runtime import context, weights
from rlx.runtime.barriers import all_shared
from rlx.runtime.memory import allocate


def fenced(array: np.ndarray) -> np.ndarray:
    """The same values in memory that ends at a page nobody may touch."""
    region = allocate(max(array.nbytes, 1), guard=True)
    held: np.ndarray = region.array[: array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    return held


def run_between_fences(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, outputs, weights, activations and scratch end at fences; a stray access ends the process."""

    def guarded(nbytes: int, **options: Any) -> Any:
        return allocate(nbytes, **{**options, "guard": True})

    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    monkeypatch.setattr(context, "allocate", guarded)
    monkeypatch.setattr(weights, "allocate", guarded)
    program = rlx.compile(graph, threads=2)
    feed = {name: fenced(a) if a.size else a for name, a in case.feed().items()}
    known = {s for node in graph.inputs for d in node.shape for s in symbols(d)}
    sizes_from_data = any(s not in known for n in graph.outputs.values() for d in n.shape for s in symbols(d))
    with all_shared():
        if program.stats["host_thunks"] or sizes_from_data or any(v.size == 0 for v in want.values()):
            got = program.run(feed)
        else:
            got = {name: fenced(np.zeros_like(v)) for name, v in program.run(feed).items()}
            program.bind(feed, got)()
    for name, value in want.items():
        assert_close(got[name], value)


IN_CI = [c for c in ALL_CASES if zlib.crc32(c.id.encode()) % 16 == 0]


@pytest.mark.parametrize("case", IN_CI, ids=[c.id for c in IN_CI])
def test_a_sample_stays_inside_its_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_between_fences(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=IDS)
def test_every_case_stays_inside_its_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_between_fences(case, monkeypatch)


programs_made = itertools.count()


def make_run_drop(times: int) -> None:
    for i in itertools.islice(programs_made, times):
        g = rlx.Graph("cycle")
        x = g.input("x", ("n", 8), "f32")
        w = g.param("w", (8,), "f32", value=np.full(8, i, np.float32))
        g.output("y", rlx.ops.relu(x * w + float(i)))  # other code every time
        out = rlx.compile(g, cache=False, threads=2)(np.ones((3, 8), np.float32))
        assert out[0, 0] == 2.0 * i


@pytest.mark.slow
def test_a_thousand_programs_made_run_and_dropped_take_no_memory() -> None:
    assert not grows(lambda: make_run_drop(1000), most=16 << 20)


def test_a_hundred_programs_made_run_and_dropped_take_no_memory() -> None:
    make_run_drop(30)
    assert not grows(lambda: make_run_drop(100), most=8 << 20)


def test_a_run_without_enough_memory_says_so_and_the_next_works() -> None:
    """In a process that may have 3 GiB of addresses."""
    code = """
        import resource
        import numpy as np, rlx
        from rlx.runtime.memory import OutOfMemoryError

        g = rlx.Graph("wide")
        x = g.input("x", (1, "n"), "f32")
        g.output("y", rlx.ops.sum(rlx.ops.cumsum(rlx.ops.transpose(x) * x, axis=0) * 2.0))
        program = rlx.compile(g, threads=1)
        assert program(np.ones((1, 4), np.float32)) == 80.0
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        try:
            program(np.ones((1, 100_000), np.float32))
        except OutOfMemoryError as error:
            print(error)
        else:
            raise SystemExit("80 GB were found")
        assert program(np.ones((1, 4), np.float32)) == 80.0
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "no room for 80,000,000,000 bytes" in done.stdout
