"""The Fourier kernel against NumPy in f64: every kind, both signs, lengths of all
sorts, few rows and many.
"""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ops.fft_split import fft_split, irfft_split, rfft_split

SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 25, 31, 32, 37, 48, 64, 100, 127, 128)
LONG = (200, 201, 256, 331, 400, 401, 500, 512, 961, 1009, 1024, 1200, 2000, 4096)
EPS = {np.float32: 6e-8, np.float64: 1.1e-16}


def compiled(build, *types, target: str = "host", threads: int = 1):
    """A program of one function of inputs with these (shape, dtype)."""
    graph = rlx.Graph("transform")
    inputs = [
        graph.input(f"x{i}", shape, np.dtype(kind).name.replace("float", "f"))
        for i, (shape, kind) in enumerate(types)
    ]
    with graph.building():
        for i, y in enumerate(build(*inputs)):
            graph.output(f"y{i}", y)
    return rlx.compile(graph, target=target, threads=threads, cache=False)


def run(program, *arrays):
    assert program.stats["host_thunks"] == []
    out = program(*arrays)
    return out if isinstance(out, tuple) else (out,)


def assert_accurate(got: np.ndarray, want: np.ndarray, n: int, kind: type) -> None:
    """The error of a transform grows like the root of the sum of squares times log n."""
    assert got.shape == want.shape
    if want.size:
        bound = EPS[kind] * (3 + 2 * np.log2(n)) * max(1.0, np.sqrt(np.mean(np.abs(want) ** 2)))
        assert np.abs(got - want).max() <= 3 * bound


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def check_complex(n: int, rows: tuple[int, ...], kind: type, sign: int, **options) -> None:
    re, im = noise(*rows, n).astype(kind), noise(*rows, n, 2)[..., 0].astype(kind)
    shape = (*rows, n)
    program = compiled(lambda a, b: fft_split(a, b, sign=sign), (shape, kind), (shape, kind), **options)
    z = re.astype(np.float64) + 1j * im
    want = np.fft.fft(z) if sign < 0 else np.fft.ifft(z) * n
    y = run(program, re, im)
    assert_accurate(y[0] + 1j * y[1].astype(np.complex128), want, n, kind)


def check_real(n: int, rows: tuple[int, ...], kind: type, **options) -> None:
    x = noise(*rows, n).astype(kind)
    y = run(compiled(lambda a: rfft_split(a), ((*rows, n), kind), **options), x)
    assert_accurate(y[0] + 1j * y[1].astype(np.complex128), np.fft.rfft(x.astype(np.float64)), n, kind)


def check_back(n: int, rows: tuple[int, ...], kind: type, **options) -> None:
    shape = (*rows, n // 2 + 1)
    re, im = noise(*shape).astype(kind), noise(*shape, 2)[..., 0].astype(kind)
    y = run(compiled(lambda a, b: [irfft_split(a, b, n=n)], (shape, kind), (shape, kind), **options), re, im)
    assert_accurate(y[0], np.fft.irfft(re.astype(np.float64) + 1j * im, n) * n, n, kind)


@pytest.mark.parametrize("rows", [(), (19,)], ids=["one row", "rows"])
@pytest.mark.parametrize("kind", [np.float32, np.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("n", SMALL + LONG)
def test_any_length(n: int, kind: type, rows: tuple[int, ...]) -> None:
    check_complex(n, rows, kind, -1 if n % 2 else 1)
    check_real(n, rows, kind)
    check_back(n, rows, kind)
