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
from rlx.runtime.native import streaming


@pytest.fixture(autouse=True)
def no_hangs() -> Iterator[None]:
    """A run that hangs ends the whole test process, with a traceback."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_truncated_file_is_refused_when_it_is_loaded(layers_file: Path) -> None:
    os.truncate(layers_file, layers_file.stat().st_size - 4096)
    with pytest.raises(FormatError, match="truncated"):
        rlx.load(layers_file, weight_budget=BUDGET)


def test_a_damaged_weight_is_refused_when_it_is_loaded(layers_file: Path) -> None:
    with open(layers_file, "r+b") as file:
        file.seek(-WEIGHT, os.SEEK_END)
        file.write(b"damaged!")
    with pytest.raises(FormatError, match="do not match their checksum"):
        rlx.load(layers_file, weight_budget=BUDGET)


def test_a_file_that_is_truncated_later_is_named_and_works_again_when_restored(
    streamed: Any, layers_file: Path, layers_result: np.ndarray
) -> None:
    whole = layers_file.read_bytes()
    os.truncate(layers_file, len(whole) // 2)
    for _ in range(2):
        with pytest.raises(
            FormatError, match=rf"{layers_file.name} has \d+ bytes instead of .* load it again"
        ):
            streamed(sample())
    with open(layers_file, "r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(streamed(sample()), layers_result)


def test_a_file_that_shrinks_during_a_run_is_named(
    streamed: Any, layers_file: Path, layers_result: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights = layers_file.read_bytes(), streamed._weights
    monkeypatch.setattr(weights, "_check_unchanged", lambda: os.truncate(layers_file, 1 << 20))
    with pytest.raises(CopyError, match=r"layers.rlx: the file ends before; it was truncated"):
        streamed(sample())
    monkeypatch.undo()
    with open(layers_file, "r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(streamed(sample()), layers_result)


def test_a_file_that_is_written_to_is_named(streamed: Any, layers_file: Path) -> None:
    os.utime(layers_file)
    streamed(sample())  # as the cache does with what was used; the content is the same
    changed = layers()
    changed.set_param("w3", np.ones((WIDTH, WIDTH), np.float32))
    rlx.compile(changed).save(layers_file.with_name("other.rlx"))
    layers_file.write_bytes(layers_file.with_name("other.rlx").read_bytes())  # same inode, same size
    with pytest.raises(FormatError, match="was written to since it was opened"):
        streamed(sample())
    assert rlx.load(layers_file, weight_budget=BUDGET)(sample()).shape == (3, WIDTH)


def test_weights_that_are_overwritten_in_place_are_noticed(streamed: Any, layers_file: Path) -> None:
    """Only times tell: name, inode, size and header are the same."""
    with open(layers_file, "r+b") as file:
        file.seek(-WEIGHT, os.SEEK_END)
        file.write(b"others!!")
    for _ in range(2):
        with pytest.raises(FormatError, match="was written to since it was opened"):
            streamed(sample())


def test_a_file_that_is_replaced_is_still_read_whole(
    streamed: Any, layers_file: Path, tmp_path: Path, layers_result: np.ndarray
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    np.testing.assert_array_equal(streamed(sample()), layers_result)
    os.replace(other, layers_file)
    np.testing.assert_array_equal(streamed(sample()), layers_result)
    layers_file.unlink()
    np.testing.assert_array_equal(streamed(sample()), layers_result)


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    layers_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = streaming.FileMemory

    def swapped(path: str) -> Any:
        content = layers_file.read_bytes()
        layers_file.unlink()
        layers_file.write_bytes(content)
        return real(path)

    monkeypatch.setattr(streaming, "FileMemory", swapped)
    with pytest.raises(FormatError, match="was replaced while it was opened; load it again"):
        rlx.load(layers_file, weight_budget=BUDGET)


def test_a_read_error_is_named_and_later_runs_work(
    streamed: Any, tmp_path: Path, layers_result: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads from the descriptor of a folder fail with EISDIR: a real error of the system."""
    weights = streamed._weights
    descriptor, folder = weights._source.descriptor, os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(weights, "_check_unchanged", lambda: None)
    kept = os.dup(descriptor)
    os.dup2(folder, descriptor)
    try:
        for _ in range(2):
            with pytest.raises(CopyError, match=os.strerror(errno.EISDIR)):
                streamed(sample())
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(folder)
    monkeypatch.undo()
    np.testing.assert_array_equal(streamed(sample()), layers_result)


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
