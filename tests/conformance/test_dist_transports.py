"""One conformance suite, every transport: results are NumPy's in rank order, the same bits everywhere."""

from __future__ import annotations

import functools

import pytest

import rlx.dist as dist
from conformance import dist_cases as cases
from conformance.dist_ranks import fork_ranks, results

RANKS = (1, 2, 3, 4, 7)
HEAP = 8 << 20
LARGE = ("f32", "bf16")


@functools.cache
def local_digests(n: int, dtypes: tuple[str, ...], large: tuple[str, ...] = ()) -> dict[str, str]:
    ranks = dist.run_threads(n, lambda t: cases.everything(t, dtypes, large), HEAP, timeout=120)
    assert all(digests == ranks[0] for digests in ranks)
    return ranks[0]


@pytest.mark.parametrize("n", RANKS)
def test_threads(n: int) -> None:
    digests = local_digests(n, cases.ALL if n == 4 else cases.FEW)
    assert len(digests) > 100


@pytest.mark.parametrize("n", RANKS)
def test_processes(n: int) -> None:
    dtypes = cases.ALL if n == 4 else cases.FEW
    expected = local_digests(n, dtypes)  # also compiles the kernels that the processes inherit
    ranks = results(fork_ranks(n, lambda t: cases.everything(t, dtypes), HEAP, timeout=120, limit=300))
    assert all(digests == expected for digests in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("n", RANKS)
def test_everything_everywhere(n: int) -> None:
    expected = local_digests(n, cases.ALL, LARGE)
    ranks = results(
        fork_ranks(n, lambda t: cases.everything(t, cases.ALL, LARGE), HEAP, timeout=120, limit=600)
    )
    assert all(digests == expected for digests in ranks)


def test_large_arrays_of_processes() -> None:
    suite = functools.partial(cases.Suite, dtypes=(), large=("f32",))
    expected = dist.run_threads(2, lambda t: suite(t).run(), HEAP, timeout=120)[0]
    assert results(fork_ranks(2, lambda t: suite(t).run(), HEAP, timeout=120, limit=300)) == [expected] * 2
