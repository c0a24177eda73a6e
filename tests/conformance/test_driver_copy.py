"""Copy engines of every kind: tiles, tails, tokens, bounds, aliasing, buffers filled ahead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rlx.driver import Buffer, FileMemory, Tile, open_device
from rlx.driver.copy import (
    BarrierToken,
    CopyEngine,
    DoubleBuffer,
    RingBuffer,
    SyncCopy,
    ThreadCopy,
    pipelined,
)
from rlx.errors import CopyError

GUARD = 0xA5
Place = Callable[[Any], Buffer]
Hold = Callable[[CopyEngine], AbstractContextManager[None]]

same_engine = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60
)


def random_bytes(n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 4096, 100_003, (1 << 21) + 7])
def test_a_run_of_bytes_arrives_and_nothing_else(engine: CopyEngine, place: Place, n: int) -> None:
    source = random_bytes(n)
    room = place(np.full(n + 20, GUARD, np.uint8))
    engine.wait(
        engine.issue(source if room.device != "cpu" else place(source), room.view("u8", (n,), offset=9))
    )
    back = room.read()
    np.testing.assert_array_equal(back[9 : 9 + n], source)
    assert (back[:9] == GUARD).all() and (back[9 + n :] == GUARD).all()


@pytest.mark.parametrize("kind", ["f32", "bf16", "i4", "c128"])
def test_typed_buffers_are_tiles(engine: CopyEngine, place: Place, kind: str) -> None:
    from rlx.ir.dtype import convert

    source = place(convert(np.arange(7), kind))
    target = Buffer.empty((7,), kind, source.device)
    engine.wait(engine.issue(source, target))
    assert target.read().tolist() == source.read().tolist()


@same_engine
@given(
    rows=st.integers(1, 9),
    row=st.integers(1, 40),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    starts=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    cut=st.integers(0, 400),
    routes=st.tuples(st.booleans(), st.booleans()),
)
def test_random_tiles_arrive_and_nothing_else(
    engine: CopyEngine,
    place: Place,
    rows: int,
    row: int,
    gaps: tuple[int, int],
    starts: tuple[int, int],
    cut: int,
    routes: tuple[bool, bool],
) -> None:
    """Rows at any two pitches, ragged at the end, between host and device in every direction."""
    pitches = (row + gaps[0], row + gaps[1])
    count = min(cut, rows * row)
    source = random_bytes(starts[0] + rows * pitches[0])
    target = np.full(starts[1] + rows * pitches[1], GUARD, np.uint8)
    expected = target.copy()
    for k in range(count):
        r, c = divmod(k, row)
        expected[starts[1] + r * pitches[1] + c] = source[starts[0] + r * pitches[0] + c]

    host_source, host_target = routes[0], routes[1] and not routes[0]
    src: Any = source if host_source else place(source)
    dst: Any = target if host_target else place(target)
    src_tile = Tile.of(src).rectangle(rows, row, pitches[0], offset=starts[0])
    dst_tile = Tile.of(dst).rectangle(rows, row, pitches[1], offset=starts[1])
    engine.wait(engine.issue(src_tile, dst_tile, count))
    np.testing.assert_array_equal(target if host_target else dst.read(), expected)


def test_copies_finish_in_the_order_of_issue(engine: CopyEngine, place: Place) -> None:
    a, b, c = (
        place(random_bytes(50_000)),
        place(np.zeros(50_000, np.uint8)),
        place(np.zeros(50_000, np.uint8)),
    )
    engine.issue(a, b)
    last = engine.issue(b, c)
    engine.wait(last)
    np.testing.assert_array_equal(c.read(), a.read())


def test_many_copies_are_in_flight_at_once(engine: CopyEngine, place: Place) -> None:
    sources = [place(np.full(64, k % 251, np.uint8)) for k in range(600)]
    room = place(np.zeros(600 * 64, np.uint8))
    tokens = [engine.issue(s, room.view("u8", (64,), offset=64 * k)) for k, s in enumerate(sources)]
    engine.drain()
    assert all(engine.done(token) for token in tokens)
    np.testing.assert_array_equal(room.read().reshape(600, 64), np.arange(600)[:, None] % 251 + np.zeros(64))
    assert engine.stats.copies == 600


# --- tokens ---------------------------------------------------------------------------------------


def test_waiting_twice_is_fine(engine: CopyEngine, place: Place) -> None:
    token = engine.issue(place(random_bytes(10)), place(random_bytes(10)))
    engine.wait(token)
    engine.wait(token)
    engine.drain()
    engine.wait(token)
    assert engine.done(token)


def test_foreign_and_invented_tokens_are_refused(engine: CopyEngine, place: Place) -> None:
    with SyncCopy() as other:
        foreign = other.issue(random_bytes(4), np.zeros(4, np.uint8))
    for ask in (engine.wait, engine.done):
        with pytest.raises(CopyError, match="belongs to another engine"):
            ask(foreign)
        with pytest.raises(CopyError, match="is not a token of an issue"):
            ask(object.__new__(BarrierToken))
        with pytest.raises(CopyError, match="is not a token of an issue"):
            ask(7)  # type: ignore[arg-type]
    with pytest.raises(CopyError, match="cannot be created directly; use the one that issue"):
        BarrierToken(engine, 1)


# --- bounds and aliasing --------------------------------------------------------------------------


def test_bounds_are_checked_at_issue(engine: CopyEngine, place: Place) -> None:
    a, b = place(random_bytes(16)), place(np.full(8, GUARD, np.uint8))
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.issue(a, b), "cannot copy 16 bytes into a destination of 8 bytes"),
        (lambda: engine.issue(b, a, 9), "cannot copy 9 bytes out of a source of 8 bytes"),
        (lambda: engine.issue(b, a, -1), "cannot copy -1 bytes"),
        (lambda: engine.issue(Tile.of(a).part(10, 7), b), r"bytes 10\.\.17 are outside the tile of 16 bytes"),
        (lambda: engine.issue(Tile.of(a).rectangle(3, 2, 8), b), "outside"),
        (lambda: engine.issue(Tile(a.memory, 12, 1, 5, 5), b), r"tile bytes 12\.\.17 are outside"),
        (lambda: engine.issue(Tile(a.memory, -1, 1, 5, 5), b), "are outside"),
        (lambda: engine.issue(Tile(a.memory, 0, 2, 5, 4), b), "2 rows of 5 bytes cannot have pitch 4"),
        (lambda: engine.issue("text", b), "str is not memory"),
    ]
    for call, message in refusals:
        with pytest.raises(CopyError, match=message):
            call()
    engine.drain()
    assert (b.read() == GUARD).all() and engine.stats.copies == 0


def test_rows_of_different_length_are_refused(engine: CopyEngine, place: Place) -> None:
    a, b = place(random_bytes(60)), place(random_bytes(60))
    with pytest.raises(CopyError, match="rows of 4 bytes cannot be copied to rows of 5 bytes"):
        engine.issue(Tile.of(a).rectangle(5, 4, 10), Tile.of(b).rectangle(4, 5, 10))


def test_aliasing_is_checked_at_issue(engine: CopyEngine, place: Place) -> None:
    room = place(random_bytes(96))
    before = room.read()
    whole = Tile.of(room)
    for src, dst in [
        (whole.part(0, 10), whole.part(9, 10)),
        (whole.part(9, 10), whole.part(0, 10)),
        (whole, whole),
        (whole.rectangle(4, 8, 16), whole.rectangle(4, 8, 16, offset=7)),
        (whole.rectangle(4, 8, 16), whole.rectangle(3, 8, 24, offset=8)),
    ]:
        with pytest.raises(CopyError, match="source and destination of a copy overlap"):
            engine.issue(src, dst, min(src.nbytes, dst.nbytes))
    np.testing.assert_array_equal(room.read(), before)
    # Interleaved rows share a span, but no byte.
    engine.wait(engine.issue(whole.rectangle(4, 8, 16), whole.rectangle(4, 8, 16, offset=8)))
    after = room.read()[:64].reshape(4, 2, 8)
    np.testing.assert_array_equal(after[:, 0], after[:, 1])
    engine.wait(engine.issue(whole.part(0, 10), whole.part(10, 10)))


def test_read_only_destinations_are_refused(engine: CopyEngine, place: Place) -> None:
    with pytest.raises(CopyError, match="destination is read-only"):
        engine.issue(place(random_bytes(3)), b"abc")


def test_memory_out_of_reach_is_refused(
    engine: CopyEngine, require: Callable[[str], None], tmp_path: Any
) -> None:
    require("opencl")
    there = Buffer.empty((4,), "u8", "opencl")
    if type(engine).__name__ == "QueueCopy":
        with pytest.raises(CopyError, match="both sides of this copy are host memory"):
            engine.issue(random_bytes(4), np.zeros(4, np.uint8))
        (tmp_path / "f").write_bytes(b"abcd")
        with pytest.raises(CopyError, match="cannot reach file memory"):
            engine.issue(FileMemory(tmp_path / "f"), there)
    else:
        with pytest.raises(CopyError, match=r"cannot reach opencl memory; use .*open_device\('opencl'\)"):
            engine.issue(random_bytes(4), there)


# --- the life of an engine ------------------------------------------------------------------------


def test_closing_finishes_the_copies_and_is_final(engine: CopyEngine, place: Place) -> None:
    target = place(np.zeros(1 << 20, np.uint8))
    token = engine.issue(place(np.full(1 << 20, 3, np.uint8)), target)
    engine.close()
    engine.close()
    assert (target.read() == 3).all()
    engine.wait(token)
    with pytest.raises(CopyError, match="is closed; make a new one"):
        engine.issue(place(random_bytes(2)), target)


def test_statistics_count_bytes_and_time(engine: CopyEngine, place: Place) -> None:
    a, b = place(random_bytes(1 << 22)), place(np.zeros(1 << 22, np.uint8))
    before = engine.stats
    assert before.copies == before.bytes == 0 and before.overlap == 0
    for _ in range(3):
        engine.wait(engine.issue(a, b))
    engine.wait(engine.issue(a, b, 1000))
    done = engine.stats.since(before)
    assert (done.copies, done.bytes) == (4, 3 * (1 << 22) + 1000)
    assert 0 < done.busy < 10 and done.waited > 0 and done.bytes_per_second > 0
    assert 0 <= done.overlap <= 1


# --- buffers that are filled ahead ----------------------------------------------------------------


@pytest.fixture(params=["thread", "opencl"])
def asynchronous(request: pytest.FixtureRequest, require: Callable[[str], None]) -> Any:
    """(engine, device name) of the engines that really copy in the background."""
    if request.param == "opencl":
        require("opencl")
        with open_device("opencl").copy_engine() as engine:
            yield engine, "opencl"
    else:
        with ThreadCopy() as engine:
            yield engine, "cpu"


def test_an_unfinished_fill_cannot_be_read_or_filled_again(asynchronous: Any, hold: Hold) -> None:
    engine, device = asynchronous
    pair = DoubleBuffer(Buffer.empty((8,), "u8", device), Buffer.empty((8,), "u8", device))
    first, second = pair.current, pair.next
    with hold(engine):
        token = pair.fill(engine, np.full(8, 1, np.uint8))
        assert not engine.done(token)
        assert pair.current is first  # the other buffer is free to use
        with pytest.raises(CopyError, match="buffer b is still being filled"):
            pair.fill(engine, np.full(8, 2, np.uint8))
        pair.swap()
        for read in (lambda: pair.current, pair.pair):
            with pytest.raises(
                CopyError, match=r"buffer b is current, but its fill is unfinished; call ready\(\)"
            ):
                read()
        assert pair.next is first
    filled = pair.ready()
    assert pair.current is second
    assert (filled.read() if isinstance(filled, Buffer) else filled).tolist() == [1] * 8
    pair.swap()
    pair.fill(engine, np.full(8, 2, np.uint8))
    pair.swap()
    pair.ready()
    assert pair.current.read().tolist() == [2] * 8


def test_a_ring_holds_as_many_fills_as_it_has_buffers_to_spare(asynchronous: Any, hold: Hold) -> None:
    engine, device = asynchronous
    ring = RingBuffer(3, nbytes=4, on=device)
    with hold(engine):
        for k in range(2):
            ring.fill(engine, np.full(4, k, np.uint8))
        with pytest.raises(CopyError, match="all 2 buffers ahead are filled"):
            ring.fill(engine, np.zeros(4, np.uint8))
        ring.advance()
        with pytest.raises(CopyError, match="ring buffer 1 is current, but its fill is unfinished"):
            _ = ring.current
    for k in range(2):
        tile = ring.ready()
        assert (tile.read() if isinstance(tile, Buffer) else tile).tolist() == [k] * 4
        if k == 0:
            ring.advance()
    with pytest.raises(CopyError, match="no buffer ahead is filled"):
        ring.advance()


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("tiles", [0, 1, 2, 7])
def test_pipelined_computes_on_every_tile_in_order(
    engine: CopyEngine, place: Place, depth: int, tiles: int
) -> None:
    """Tiles of a matrix by columns, so 2-D, the last one narrower than the rest."""
    matrix = np.random.default_rng(0).random((6, max(1, 4 * tiles - 1))).astype(np.float32)
    parts = [matrix[:, 4 * k : 4 * k + 4] for k in range(tiles)]
    spare = [place(np.zeros(6 * 4, np.float32)) for _ in range(depth)]
    buffers = DoubleBuffer(*spare) if depth == 2 else RingBuffer(spare)

    def compute(tile: Any) -> np.ndarray[Any, Any]:
        return np.array(tile.read() if isinstance(tile, Buffer) else tile)

    run = pipelined(parts, compute, engine, buffers)
    assert run.tiles == tiles and run.bytes == sum(part.nbytes for part in parts)
    for got, part in zip(run.results, parts, strict=True):
        np.testing.assert_array_equal(got, part)


def test_a_failing_compute_leaves_engine_and_buffers_usable(engine: CopyEngine, place: Place) -> None:
    tiles = [np.full(8, k, np.uint8) for k in range(6)]
    ring = RingBuffer([place(np.zeros(8, np.uint8)) for _ in range(3)])
    values: list[int] = []

    def compute(tile: Any) -> None:
        values.append(int((tile.read() if isinstance(tile, Buffer) else tile)[0]))
        if len(values) == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        pipelined(tiles, compute, engine, ring)
    assert values == [0, 1, 2]
    assert pipelined(tiles, lambda tile: None, engine, ring).tiles == 6
