"""Large weights are streamed in parts, and their kernels run part by part: same plan rules, same bits."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming_models import layers

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.driver.copy import CopyStats
from rlx.driver.region import FileMemory
from rlx.errors import BudgetError, CopyError, PlanError
from rlx.ir.graph import Graph
from rlx.plan import stream
from rlx.plan.explain import explain
from rlx.plan.lir import LirModule
from rlx.plan.stream import stream_weights
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter
from rlx.runtime.native.reader import Fill, Reader

TARGET = "x86-64-v3"
WIDTH = 320


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of at most 64 KiB, so that small weights have several."""
    monkeypatch.setattr(stream, "MOST_GROUP", 64 << 10)
    yield


def ragged(width: int = WIDTH) -> Graph:
    """Products whose columns do not fill their last panel, and one with a large bias that is streamed too."""
    rng = np.random.default_rng(0)
    g = rlx.Graph("ragged")
    x = g.input("x", ("n", width), "f32") * 0.5 + 0.25  # may become the prologue of a product
    for i, columns in enumerate((width, 1000, width)):
        shape = (x.shape[-1], columns)
        w = g.param(f"w{i}", shape, "f32", rng.normal(0, 0.1, shape).astype(np.float32))
        b = g.param(f"b{i}", (columns,), "f32", rng.normal(0, 0.1, columns).astype(np.float32))
        x = ops.gelu(x @ w + b)
    g.output("y", x)
    return g


def sample(rows: int, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)


# -- the plan


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, int], dict[int, int], int]:
    weights = draw(st.integers(1, 10))
    cuts = {n: 64 * draw(st.integers(1, 8)) for n in range(weights) if draw(st.booleans())}
    sizes = {n: draw(st.integers(1, 6000)) for n in range(weights)}
    step = st.lists(st.integers(0, weights - 1), max_size=3)
    reads = draw(st.lists(step, min_size=1, max_size=16))
    for read in reads:  # a kernel has one operand that it can read in parts
        able = [n for n in read if n in cuts]
        for n in able[1:]:
            cuts.pop(n, None)
    return reads, sizes, cuts, draw(st.integers(64, 20_000))


@given(programs())
def test_any_plan_with_parts_is_sound(
    program: tuple[list[list[int]], dict[int, int], dict[int, int], int],
) -> None:
    reads, sizes, cuts, budget = program
    try:
        found = stream_weights(reads, sizes, budget, cuts)
    except BudgetError as e:
        least = e.least  # type: ignore[attr-defined]
        assert least > budget
        found = stream_weights(reads, sizes, least, cuts)
        budget = least
    ring = found.fetches
    fetched = {f.node for f in ring}
    read = {n for r in reads for n in r}
    resident = sum(-(-s // 64) * 64 for n, s in sizes.items() if n in read - fetched)
    assert resident + found.ring <= budget or not ring
    for step, nodes in enumerate(reads):
        for node in set(nodes) & fetched:
            there = [f for f in ring if f.node == node and f.first <= step <= f.last]
            assert sum(f.size for f in there) == sizes[node]
            if len(there) > 1:
                assert [f.part for f in there] == list(range(len(there)))
                assert all(f.begin % cuts[node] == 0 and f.parts == len(there) for f in there)
    for i, f in enumerate(ring):
        assert 0 <= f.offset and f.offset + f.size <= found.ring
        assert f.starts <= f.awaited <= f.ends
        for other in ring[:i]:
            apart = other.offset + other.size <= f.offset or f.offset + f.size <= other.offset
            assert apart or other.ends < f.starts
            assert other.starts <= f.starts


@pytest.fixture
def module(small_parts: None) -> LirModule:
    return plan(layers(4, 256), target=TARGET, weight_budget=400 << 10)


def test_text_and_explain_show_the_parts(module: LirModule) -> None:
    fetches = module.plan.fetches
    assert any(f.parts > 1 for f in fetches) and any(f.at_part for f in fetches)
    module.plan.check()
    blobs: dict[str, np.ndarray] = {}
    again = LirModule.from_text(module.to_text(blobs), blobs)
    assert again.plan.fetches == fetches and again.to_text() == module.to_text()
    first = next(f for f in fetches if f.parts)
    assert f"%{first.node} in {first.parts} parts at {first.offset}" in explain(module)


def test_the_oracle_reads_parts_as_planned(module: LirModule) -> None:
    x = sample(3, 256)
    expected = evaluate(layers(4, 256), {"x": x})["y"]
    found = LirInterpreter(module, poison=True).run({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_part": 0, "at": 0}, "overlap in the ring"),
        ({"begin": 64}, "does not follow the part before it"),
        ({"parts": 0}, "does not follow|has no slot"),
        ({"size": 64}, "does not follow|have .* bytes"),
    ],
)
def test_the_proof_finds_wrong_parts(module: LirModule, changes: dict[str, int], message: str) -> None:
    fetches = list(module.plan.fetches)
    number = max(i for i, f in enumerate(fetches) if f.part)
    changed = replace(fetches[number], **changes)
    if "at" in changes:  # all before it must begin as early, to be in order
        fetches = [replace(f, at=0, at_part=0) for f in fetches]
        changed = fetches[number]
    fetches[number] = changed
    with pytest.raises(PlanError, match=message):
        replace(module.plan, fetches=tuple(fetches)).check()


# -- runs


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_compute_the_same_bits(small_parts: None, threads: int) -> None:
    g = ragged()
    whole = rlx.compile(g, threads=threads)
    program = rlx.compile(g, weight_budget=300 << 10, threads=threads)
    fetches = program.lir.plan.fetches
    assert max(f.parts for f in fetches) > 2
    for rows in (1, 2, 3, 40, 131, 1):
        np.testing.assert_array_equal(program(sample(rows)), whole(sample(rows)))
    facts = program.stats["streaming"]
    assert facts["bytes"] == 6 * facts["bytes_per_run"]
    assert facts["fetches"] == 6 * facts["fetches_per_run"] == 6 * len(fetches)


def test_a_budget_of_a_few_columns_works() -> None:
    g = ragged()
    with pytest.raises(BudgetError, match="smallest budget that works is") as e:
        rlx.compile(g, weight_budget=1024)
    least = int(str(e.value).split("works is ")[1].split()[0])
    assert least < 4 * WIDTH * WIDTH, "no weight has to fit as a whole"
    program = rlx.compile(g, weight_budget=least)
    np.testing.assert_array_equal(program(sample(5)), rlx.compile(g)(sample(5)))


def test_a_file_is_planned_in_parts_when_it_is_loaded(small_parts: None, tmp_path: Path) -> None:
    path = tmp_path / "ragged.rlx"
    rlx.compile(ragged()).save(path)
    expected = rlx.load(path)(sample(4))
    program = rlx.load(path, weight_budget="300KiB")
    assert any(f.parts for f in program.lir.planner.plan().fetches)
    np.testing.assert_array_equal(program(sample(4)), expected)
    (traced,) = program.trace({"x": sample(4)})
    assert len({span.node.id for span in traced.spans}) == 3, "gates are no kernels"


@pytest.mark.parametrize("debug", ["nan", "poison"])
def test_debug_modes_run_parts(small_parts: None, debug: str) -> None:
    g = ragged()
    program = rlx.compile(g, weight_budget=300 << 10, debug=debug)
    np.testing.assert_array_equal(program(sample(4)), rlx.compile(g)(sample(4)))


def test_a_failing_part_is_named(small_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = ragged()
    program = rlx.compile(g, weight_budget=300 << 10)
    expected, weights = program(sample(2)), program._weights
    monkeypatch.setattr(weights, "_check_unchanged", lambda: None)
    descriptor, folder = weights._source.descriptor, os.open(tmp_path, os.O_RDONLY)
    kept = os.dup(descriptor)
    os.dup2(folder, descriptor)
    try:
        for _ in range(2):
            with pytest.raises(CopyError, match=os.strerror(errno.EISDIR)):
                program(sample(2))
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(folder)
    np.testing.assert_array_equal(program(sample(2)), expected)


# -- the reader by itself


def reader_of(path: Path, ring: np.ndarray, places: list[tuple[int, int, int]]) -> Reader:
    """Fills of 100 bytes: (slot, after, last) each, from the file one behind the other."""
    fills = [
        Fill(100 * i, ring.ctypes.data + 100 * slot, 100, after, last)
        for i, (slot, after, last) in enumerate(places)
    ]
    return Reader(FileMemory(path), fills)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(i // 100 for i in range(1000)))
    return path


def test_a_place_is_filled_when_the_run_has_passed_its_reader(numbers: Path) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 2, 3)])
    for _ in range(3):
        reader.begin()
        for position in range(4):
            reader.arrive(position, position, position + 1)
            assert set(ring[100 * (position % 2) :][:100].tolist()) == {position}
        reader.settle()
    assert reader.stats.copies == 12 and reader.stats.bytes == 1200


def test_a_run_that_passes_over_kernels_reads_less(numbers: Path) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 2, 3)])
    reader.begin()
    reader.arrive(3, 3, 4)
    reader.settle()
    assert reader.stats.copies == 1 and set(ring[100:].tolist()) == {3}


def test_nothing_is_read_after_a_run(numbers: Path) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(0, 0, 0), (1, 0, 1), (0, 5, 5)])
    reader.begin()
    reader.arrive(0, 0, 1)
    reader.settle()
    kept = ring.copy()
    reader._worker.stop()  # the thread ends; whatever it had begun is done
    assert np.array_equal(ring, kept) and reader.stats.copies <= 2


def test_gates_do_all_the_reading_while_the_reader_is_paused(numbers: Path) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(i % 2, max(0, i - 1), i) for i in range(6)])
    for paused in (True, False, True):
        reader.pause(paused)
        busy = reader.busy
        reader.begin()
        for position in range(6):
            reader.arrive(position, position, position + 1)
            assert set(ring[100 * (position % 2) :][:100].tolist()) == {position}
        reader.settle()
        assert not paused or reader.busy == busy
    assert reader.stats.copies == 18


@pytest.mark.parametrize(
    ("high", "rate", "paused"), [(False, 9e9, True), (True, 9e9, False), (False, 1e9, False)]
)
def test_who_reads_depends_on_what_binds_and_where_the_file_is(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, high: bool, rate: float, paused: bool
) -> None:
    weights = rlx.compile(ragged(), weight_budget=300 << 10)._weights
    told: list[bool] = []
    monkeypatch.setattr(type(weights._reads), "stats", CopyStats(1, int(rate), 1.0, 0.0))
    monkeypatch.setattr(weights._load, "note", lambda busy: None)
    monkeypatch.setattr(weights._reads, "pause", told.append)
    weights._load.high = high
    assert weights.share_cores() is high and told == [paused]


@pytest.mark.parametrize("helping", [True, False])
def test_reading_everything_reads_every_fill(numbers: Path, helping: bool) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(i % 2, i, i) for i in range(8)])
    reader.begin()
    reader.read_all(helping)
    reader.settle()
    assert reader.stats.copies == 8 and reader.stats.bytes == 800


def test_a_file_that_ends_early_is_named(numbers: Path) -> None:
    ring = np.zeros(200, np.uint8)
    reader = reader_of(numbers, ring, [(0, 0, 0), (1, 0, 1)])
    os.truncate(numbers, 150)
    for _ in range(2):
        reader.begin()
        reader.arrive(0, 0, 1)
        with pytest.raises(CopyError, match=r"bytes 100..200 of .*numbers: the file ends before"):
            reader.arrive(1, 1, 2)
        reader.settle()
    numbers.write_bytes(bytes(1000))
    reader.begin()
    reader.arrive(1, 0, 2)
    reader.settle()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_positions_never_let_a_fill_spoil_what_is_read(sizes: list[int]) -> None:
    """A ring of two places; each position reads a number of fills that were put there before it."""
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(range(len(sizes))))
        file.flush()
        ring = np.zeros(2, np.uint8)
        fills = [
            Fill(i, ring.ctypes.data + i % 2, 1, max(0, i - 1), i, ends_fetch=i % 3 == 0)
            for i in range(len(sizes))
        ]
        reader = Reader(FileMemory(file.name), fills)
        reader.begin()
        seen: list[Any] = []
        for i in range(len(sizes)):
            reader.arrive(i, i, i + 1)
            seen.append(int(ring[i % 2]))
        reader.settle()
        assert seen == list(range(len(sizes)))
