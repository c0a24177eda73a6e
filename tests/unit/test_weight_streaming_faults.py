"""Streamed weights when things go wrong: files that change, reads that fail, exceptions on the host."""

from __future__ import annotations

import errno
import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming_models import BUDGET, WEIGHT, WIDTH, layers, sample

import rlx
from rlx.errors import (
    CopyError,
    FormatError,
    KernelError,
)
from rlx.runtime import streaming


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    result: np.ndarray = rlx.compile(layers())(sample())
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "layers.rlx"
    rlx.compile(layers()).save(path)
    return path


@pytest.fixture
def program(saved: Path) -> Any:
    return rlx.load(saved, weight_budget=BUDGET)


@pytest.fixture(autouse=True)
def no_hangs() -> Iterator[None]:
    """A run that hangs ends the whole test process, with a traceback."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_truncated_file_is_refused_when_it_is_loaded(saved: Path) -> None:
    os.truncate(saved, saved.stat().st_size - 4096)
    with pytest.raises(FormatError, match="truncated"):
        rlx.load(saved, weight_budget=BUDGET)


def test_a_damaged_weight_is_refused_when_it_is_loaded(saved: Path) -> None:
    with open(saved, "r+b") as file:
        file.seek(-WEIGHT, os.SEEK_END)
        file.write(b"damaged!")
    with pytest.raises(FormatError, match="do not fit their checksum"):
        rlx.load(saved, weight_budget=BUDGET)


def test_a_file_that_is_truncated_later_is_named_and_works_again_when_restored(
    program: Any, saved: Path, expected: np.ndarray
) -> None:
    whole = saved.read_bytes()
    os.truncate(saved, len(whole) // 2)
    for _ in range(2):
        with pytest.raises(FormatError, match=rf"{saved.name} has \d+ bytes instead of .* load it again"):
            program(sample())
    with open(saved, "r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(program(sample()), expected)


def test_a_file_that_shrinks_during_a_run_is_named(
    program: Any, saved: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights = saved.read_bytes(), program._weights
    monkeypatch.setattr(weights, "_check_unchanged", lambda: os.truncate(saved, 1 << 20))
    with pytest.raises(CopyError, match=r"layers.rlx: the file ends before; it was truncated"):
        program(sample())
    monkeypatch.undo()
    with open(saved, "r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(program(sample()), expected)


def test_a_file_that_is_written_to_is_named(program: Any, saved: Path) -> None:
    os.utime(saved)
    program(sample())  # as the cache does with what was used; the content is the same
    changed = layers()
    changed.set_param("w3", np.ones((WIDTH, WIDTH), np.float32))
    rlx.compile(changed).save(saved.with_name("other.rlx"))
    saved.write_bytes(saved.with_name("other.rlx").read_bytes())  # same inode, same size
    with pytest.raises(FormatError, match="was written to since it was opened"):
        program(sample())
    assert rlx.load(saved, weight_budget=BUDGET)(sample()).shape == (3, WIDTH)


def test_a_file_that_is_replaced_is_still_read_whole(
    program: Any, saved: Path, tmp_path: Path, expected: np.ndarray
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    np.testing.assert_array_equal(program(sample()), expected)
    os.replace(other, saved)
    np.testing.assert_array_equal(program(sample()), expected)
    saved.unlink()
    np.testing.assert_array_equal(program(sample()), expected)


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streaming.FileMemory

    def swapped(path: str) -> Any:
        content = saved.read_bytes()
        saved.unlink()
        saved.write_bytes(content)
        return real(path)

    monkeypatch.setattr(streaming, "FileMemory", swapped)
    with pytest.raises(FormatError, match="was replaced while it was opened; load it again"):
        rlx.load(saved, weight_budget=BUDGET)


def test_a_read_error_is_named_and_later_runs_work(
    program: Any, tmp_path: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads from the descriptor of a folder fail with EISDIR: a real error of the system."""
    weights = program._weights
    descriptor, folder = weights._source.descriptor, os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(weights, "_check_unchanged", lambda: None)
    kept = os.dup(descriptor)
    os.dup2(folder, descriptor)
    try:
        for _ in range(2):
            with pytest.raises(CopyError, match=os.strerror(errno.EISDIR)):
                program(sample())
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(folder)
    monkeypatch.undo()
    np.testing.assert_array_equal(program(sample()), expected)


def test_an_exception_on_the_host_is_named_and_later_runs_work(tmp_path: Path) -> None:
    """The op stands between two streamed layers, so that reads are under way when it fails."""
    faulty = [True]

    def work(x: np.ndarray) -> np.ndarray:
        if faulty[0]:
            raise ZeroDivisionError("on purpose")
        return np.cumsum(x, -1, dtype=x.dtype)

    total = rlx.register_op("streamed_total", ref=work)
    g = layers(4)
    tanh = g.outputs["y"]
    w = g.param("last", (WIDTH, WIDTH), "f32", np.eye(WIDTH, dtype=np.float32))
    g.set_outputs({"y": total(tanh) @ w})
    faulty[0] = False
    expected = rlx.compile(g)(sample())
    program = rlx.compile(g, weight_budget=2 * WEIGHT + 8192)
    for fails in (True, True, False, True, False):
        faulty[0] = fails
        if fails:
            with pytest.raises(KernelError, match=r"custom.*raised ZeroDivisionError on the host"):
                program(sample())
        else:
            np.testing.assert_array_equal(program(sample()), expected)
