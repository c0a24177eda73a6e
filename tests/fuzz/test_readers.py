"""Bytes that coverage-guided fuzzing has kept: readers give a value or an RlxError, and soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from measured import unit

FOLDER = Path(__file__).parent / "readers"
MOST_UNITS = 5000  # of CPU time, some 5 s
KINDS = ("text", "container", "onnx", "weights")


@pytest.mark.parametrize("name", KINDS)
def test_what_was_kept_is_read(name: str, require, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    if name == "onnx":
        require("onnx")
    require("demo")
    monkeypatch.syspath_prepend(FOLDER)
    import corpus
    import readers

    assert set(readers.READERS) == set(KINDS)
    kept = list(corpus.kept(name))
    assert len(kept) > 20
    for id, data in kept:
        begin = time.thread_time()
        try:
            readers.read(name, data)
        except Exception as e:
            raise AssertionError(f"{name}/{id} raised {type(e).__name__}: {e}") from e
        assert time.thread_time() - begin < MOST_UNITS * unit(), id


def test_the_corpus_is_small() -> None:
    assert sum(p.stat().st_size for p in (FOLDER / "corpus").rglob("*") if p.is_file()) < 1_000_000
