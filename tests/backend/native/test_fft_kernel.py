"""The Fourier kernel against NumPy in f64: every kind, both signs, lengths of all
sorts, few rows and many.
"""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from machines import to_execute
from rlx import ops
from rlx.ops.signal.fft_split import fft_split, irfft_split, rfft_split

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


def check_all(n: int, rows: tuple[int, ...], kind: type, sign: int = -1, **options) -> None:
    check_complex(n, rows, kind, sign, **options)
    check_real(n, rows, kind, **options)
    check_back(n, rows, kind, **options)


@pytest.mark.parametrize("n", SMALL + LONG)
def test_any_length(n: int) -> None:
    """Both dtypes, and both one row and many, in turn."""
    few, many = ((), (19,)) if n % 4 < 2 else ((19,), ())
    check_all(n, few, np.float32, -1 if n % 2 else 1)
    check_all(n, many, np.float64, 1 if n % 2 else -1)


@pytest.mark.slow
@pytest.mark.parametrize("n", SMALL + LONG)
def test_any_length_any_rows(n: int) -> None:
    for kind in (np.float32, np.float64):
        for rows in ((), (1,), (5,), (16,), (19,), (3, 11)):
            check_all(n, rows, kind)


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("n", [16, 37, 200, 256, 401])
def test_on_other_targets(n: int, target: str) -> None:
    check_all(n, (9,) if n % 2 else (), np.float32, target=to_execute(target))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1 << 16, 10007, 3 * 5 * 7 * 11 * 13, 100000, 1 << 20])
def test_long_rows(n: int) -> None:
    for kind in (np.float32, np.float64):
        check_all(n, (2,), kind, 1)


@pytest.mark.slow
def test_every_length_up_to_a_hundred() -> None:
    for n in range(1, 101):
        check_real(n, (3,), np.float64)


@pytest.mark.parametrize("n", [12, 160, 256])
def test_rows_of_any_number_and_any_threads(n: int) -> None:
    kind, shape = np.float32, ("a", "b", n)
    one, two = (compiled(lambda x: rfft_split(x), (shape, kind), threads=t) for t in (1, 2))
    for rows in ((0, 3), (1, 1), (2, 8), (3, 5), (4, 9), (1, 35)):
        x = noise(*rows, n).astype(kind)
        got = run(one, x)
        for a, b in zip(got, run(two, x), strict=True):
            np.testing.assert_array_equal(a, b)
        assert_accurate(
            got[0] + 1j * got[1].astype(np.complex128), np.fft.rfft(x.astype(np.float64)), n, kind
        )


@pytest.mark.parametrize("shape", [(20, 33), (64, 5), (100, 16), (3, 40, 21), (256, 3)])
def test_along_another_axis(shape: tuple[int, ...]) -> None:
    """Neighbours in memory are rows: they are read and stored so, with parts or all of a vector."""
    axis, kind = len(shape) - 2, np.float32
    swap = (*range(axis), axis + 1, axis)

    def build(re, im):
        return [ops.transpose(y, swap) for y in fft_split(ops.transpose(re, swap), ops.transpose(im, swap))]

    re, im = noise(*shape).astype(kind), noise(*shape, 2)[..., 0].astype(kind)
    y = run(compiled(build, (shape, kind), (shape, kind)), re, im)
    want = np.fft.fft(re.astype(np.float64) + 1j * im, axis=axis)
    assert_accurate(y[0] + 1j * y[1].astype(np.complex128), want, shape[axis], kind)


def kinds(program) -> list[str]:
    return [n.attrs["kind"] for n in program.graph.nodes if n.op.name == "region"]


def test_power_of_tapered_frames_is_one_kernel() -> None:
    taper = np.hanning(64).astype(np.float32)

    def build(x):
        re, im = rfft_split(ops.windows(x, (64,), strides=16) * x.graph.constant(taper))
        return [re * re + im * im]

    x = noise(1000).astype(np.float32)
    program = compiled(build, ((1000,), np.float32))
    assert kinds(program) == ["transform"]
    frames = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), 64)[::16] * taper
    want = np.abs(np.fft.rfft(frames)) ** 2
    np.testing.assert_allclose(run(program, x)[0], want, rtol=1e-4, atol=1e-4)


def test_weights_before_and_after_a_transform() -> None:
    """What is stored reads operands of its own; a result that others need is stored
    too; rows may be left out.
    """
    shape, kind = (3, 20, 128), np.float32

    def build(x, w, gain):
        re, im = rfft_split(ops.exp(x) * w)
        return [re * gain + im, re, ops.slice_axis(im * 2.0, 1, 0, 20)]

    x, w, gain = (noise(*s).astype(kind) for s in (shape, (20, 1), (65,)))
    program = compiled(build, (shape, kind), ((20, 1), kind), ((65,), kind))
    got = run(program, x, w, gain)
    z = np.fft.rfft(np.exp(x.astype(np.float64)) * w)
    for a, b in zip(got, (z.real * gain + z.imag, z.real, z.imag * 2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    assert kinds(program) == ["transform"]


def test_rows_that_nobody_reads_are_not_computed() -> None:
    def build(x):
        re, im = rfft_split(x)
        return [ops.slice_axis(re, 0, 0, 19) + ops.slice_axis(im, 0, 0, 19)]

    x = noise(20, 32).astype(np.float32)
    program = compiled(build, ((20, 32), np.float32))
    z = np.fft.rfft(x.astype(np.float64))[:19]
    np.testing.assert_allclose(run(program, x)[0], z.real + z.imag, rtol=1e-4, atol=1e-4)
    assert kinds(program) == ["transform"]


def test_spectral_filtering_there_and_back() -> None:
    shape, kind = (33, 200), np.float32

    def build(x, gain):
        re, im = rfft_split(x)
        return [ops.tanh(irfft_split(re * gain, im * gain, n=200) * (1 / 200))]

    x, gain = noise(*shape).astype(kind), noise(101).astype(kind)
    program = compiled(build, (shape, kind), ((101,), kind))
    want = np.tanh(np.fft.irfft(np.fft.rfft(x.astype(np.float64)) * gain, 200))
    np.testing.assert_allclose(run(program, x, gain)[0], want, rtol=1e-4, atol=1e-5)
    assert kinds(program) == ["transform", "transform"]


def test_a_symbolic_length_runs_on_the_host_and_says_so() -> None:
    program = compiled(lambda x: rfft_split(x), ((4, "n"), np.float32))
    (thunk,) = program.stats["host_thunks"]
    assert "length must be known" in thunk["why"]
    x = noise(4, 30).astype(np.float32)
    np.testing.assert_allclose(program(x)[0], np.fft.rfft(x).real, rtol=1e-4, atol=1e-4)
