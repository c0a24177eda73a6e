"""Memory of outputs: callers own what a run returns, and runs use again what nobody refers to."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rlx

ROWS = 600  # of 2,000 floats: large enough to be kept


def doubled(rows: Any = ROWS) -> Any:
    g = rlx.Graph("doubled")
    x = g.input("x", (rows, 2000), "f32")
    g.output("y", x * 2.0)
    g.output("z", x + 1.0)
    return rlx.compile(g)


def feed(value: float, rows: int = ROWS) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 2000), value, np.float32)}


def test_results_that_are_referred_to_are_left_alone() -> None:
    program = doubled()
    kept = [program.run(feed(i)) for i in range(4)]
    row = program.run(feed(9.0))["y"][7]  # a view holds its memory
    flat = memoryview(program.run(feed(10.0))["y"].reshape(-1))
    for _ in range(3):
        program.run(feed(-1.0))
    for i, out in enumerate(kept):
        assert (out["y"] == 2 * i).all() and (out["z"] == i + 1).all()
    assert (row == 18).all() and flat[0] == flat[-1] == 20


def test_memory_that_was_dropped_is_used_again() -> None:
    program = doubled()
    places = set()
    for i in range(5):
        out = program.run(feed(i))
        places |= {array.ctypes.data for array in out.values()}
        del out
    assert len(places) == 2


def test_other_sizes_free_what_was_kept() -> None:
    program = doubled("n")
    for rows in range(300, 330):
        program.run(feed(1.0, rows))
    assert program._output_memory.kept <= 2 * 330 * 2000 * 4


def test_a_result_outlives_its_program() -> None:
    program = doubled()
    y = program.run(feed(3.0))["y"]
    del program
    assert (y == 6).all() and y.flags.writeable and type(y) is np.ndarray


@pytest.mark.parametrize("threads", [4])
def test_threads_never_share_outputs(threads: int) -> None:
    program, wrong = doubled(), list[float]()

    def work(value: float) -> None:
        for _ in range(30):
            out = program.run(feed(value))
            if not ((out["y"] == 2 * value).all() and (out["z"] == value + 1).all()):
                wrong.append(value)

    workers = [threading.Thread(target=work, args=(float(i),)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
