"""How matmuls are shared among many threads: every tile once, equal shares, few bytes read by each thread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gemm_harness import TARGETS, Array, every_f32_target, run_strided, run_weights
from machines import on_targets
from rlx.codegen.cpu.product.gemm_cut import BANDS, Cut, PanelCosts, Part, Tiles, bands_for, share
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import write
from rlx.target.cpu import Target, resolve

ROWS, COLUMNS, LANES = 8, 48, 16
THREADS = (3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 48, 64)
SHAPES = [
    (m, n) for m in (128, 197, 512, 1024, 4096, 12544) for n in (384, 768, 1000, 1536, 3072, 4096, 50257)
]


def cut_of(m: int, n: int, threads: int, least: int = 4) -> tuple[Tiles, Cut]:
    """What the kernel of an m x n product of f32 computes, of known numbers."""

    def made() -> tuple[Tiles, Cut]:
        tiles = Tiles.of(f, m, ROWS)
        full, tail = divmod(n, COLUMNS)
        panels = PanelCosts(full, COLUMNS // LANES, -(-tail // LANES))
        bands = bands_for(threads, tiles.count // least, m, n)
        return tiles, Cut(tiles.count, panels, bands, threads)

    f = Module(resolve("x86-64-v4")).function("cut", [])
    return write(f, made)


def parts(cut: Cut, threads: int, items: int = 1) -> list[list[tuple[int, Part]]]:
    """The parts of every thread, with the number of their matmul."""

    def made() -> list[list[tuple[int, Part]]]:
        each, out = cut.weight(), []
        for thread in range(threads):
            start, end = share(each * items, thread, threads)
            own = []
            for item in range(start // each, -(-end // each)):
                first, last = max(start - item * each, 0), min(end - item * each, each)
                low, high = cut.bands_of(first, last)
                own += [(item, cut.part(band, first, last)) for band in range(low, high)]
            out.append([(item, part) for item, part in own if part.start < part.end])
        return out

    f = Module(resolve("x86-64-v4")).function("cut", [])
    return write(f, made)


def tiles_of(part: Part) -> tuple[Array, Array]:
    """Row tiles and panels of the tiles of a part."""
    height, units = part.high - part.low, np.arange(part.start, part.end)
    return part.low + units % height, units // height


@pytest.mark.parametrize("threads", [1, 2, *THREADS])
def test_every_tile_belongs_to_one_thread(threads: int) -> None:
    for m, n, items in (
        (1, 7, 1),
        (40, 48, 3),
        (129, 100, 1),
        (4096, 384, 1),
        (197, 1000, 5),
        (2048, 2048, 1),
    ):
        tiles, cut = cut_of(m, n, max(threads // items, 1))
        panels = -(-n // COLUMNS)
        seen = [
            (i, *place)
            for own in parts(cut, threads, items)
            for i, p in own
            for place in zip(*tiles_of(p), strict=True)
        ]
        assert sorted(seen) == [
            (i, t, j) for i in range(items) for t in range(int(tiles.count)) for j in range(panels)
        ]


@pytest.mark.parametrize("threads", THREADS)
def test_shares_are_equal_and_threads_read_little(threads: int) -> None:
    """The work of a thread is that of others, but for a tile. What it reads of A and B is near the least:
    that of a rectangle of C as large as its share, as square as C and whole tiles allow."""
    ratios = []
    for m, n in SHAPES:
        tiles, cut = cut_of(m, n, threads)
        reads, work = [], []
        widths = np.minimum(n - np.arange(0, n, COLUMNS), COLUMNS)
        for own in parts(cut, threads):
            rows, panels = (np.concatenate(x) for x in zip(*(tiles_of(part) for _, part in own), strict=True))
            reads.append(len(np.unique(rows)) * m / int(tiles.count) + widths[np.unique(panels)].sum())
            work.append((-(-widths // LANES))[panels].sum())
        assert max(work) - sum(work) / threads <= COLUMNS // LANES
        ratios.append(max(reads) / least_reads(m, n, threads))
    assert max(ratios) < 2.2
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.4


def least_reads(m: int, n: int, threads: int) -> float:
    """Rows and columns that a thread must read of C cut into equal rectangles, of one tile at least."""
    area = max(m * n / threads, ROWS * COLUMNS)
    height = min(max(math.sqrt(area), area / n, ROWS), area / COLUMNS, m)
    return height + area / height


def test_columns_alone_would_read_more() -> None:
    """The test above sees a cut that lets every thread read all of A."""
    tiles, cut = cut_of(4096, 4096, 64)
    assert cut.bands == 8
    whole = Cut(tiles.count, cut.panels, 1, 64)
    ((_, part),) = parts(whole, 64)[3]
    assert len(np.unique(tiles_of(part)[0])) == tiles.count
    assert 4096 + 4096 / 64 > 4 * least_reads(4096, 4096, 64)


def test_the_number_of_bands() -> None:
    def bands(threads: int, most: int, a: int, b: int) -> int:
        return int(bands_for(threads, most, a, b))

    f = Module(resolve("x86-64-v4")).function("cut", [])
    for threads in range(1, 65):
        for a, b in ((100, 100), (1000, 10), (10, 1000), (300, 7)):
            found = write(f, bands, threads, 1000, a, b)
            allowed = [r for r in BANDS if r <= threads]
            best = min(allowed, key=lambda r: (a / r + b * r / threads, r))
            assert a / found + b * found / threads <= (a / best + b * best / threads) * (1 + 1e-12)
    assert write(f, bands, 64, 3, 1000, 1000) == 3
    assert write(f, bands, 64, 0, 1000, 1000) == 1


@every_f32_target
def test_bits_do_not_depend_on_bands(target: Target) -> None:
    for m, k, n in ((300, 40, 500), (1200, 20, 70), (97, 33, 1100)):
        wanted = run_weights(target, m, k, n)[0]
        for threads in (2, 3, 7, 16, 61):
            np.testing.assert_array_equal(run_weights(target, m, k, n, threads)[0], wanted)


@every_f32_target
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_bits_do_not_depend_on_bands_where_operands_are_packed(target: Target, transposed: str) -> None:
    for batch, m, n, k in ((1, 1100, 300, 24), (3, 700, 90, 17)):
        wanted = run_strided(target, batch, m, n, k, transposed)[0]
        for threads in (3, 8, 29):
            found = run_strided(target, batch, m, n, k, transposed, threads)[0]
            np.testing.assert_array_equal(found, wanted)


@on_targets(TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "i8", "u8"])
def test_bits_of_narrow_types_do_not_depend_on_bands(target: Target, dtype: str) -> None:
    wanted = run_weights(target, 640, 36, 300, dtype=dtype)[0]
    for threads in (4, 13, 32):
        np.testing.assert_array_equal(run_weights(target, 640, 36, 300, threads, dtype)[0], wanted)
