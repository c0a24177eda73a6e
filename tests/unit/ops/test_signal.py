"""Signal ops against SciPy: windows, stft, istft, welch; peaks, mel filters, gradients on longer signals."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import RlxError
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import gradient_graph

signal = pytest.importorskip("scipy.signal")
SINGLE = {"rtol": 2e-5, "atol": 2e-6}


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize(
    "window",
    [
        "boxcar",
        "hann",
        "hamming",
        "blackman",
        "nuttall",
        "blackmanharris",
        "flattop",
        "bartlett",
        "cosine",
        ("kaiser", 8.6),
    ],
)
def test_windows_are_scipys(window: object, n: int, periodic: bool) -> None:
    want = signal.get_window(window, n, fftbins=periodic)
    np.testing.assert_allclose(ops.get_window(window, n, periodic, "f64"), want, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 9, 16])
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
def test_transforms_are_numpys(n: int, norm: str | None) -> None:
    x, z = noise(3, 9), noise(3, 9) + 1j * noise(3, 9, seed=1)
    for axis in (0, -1):
        np.testing.assert_allclose(ops.fft(z, n, axis, norm), np.fft.fft(z, n, axis, norm), atol=1e-12)
        np.testing.assert_allclose(ops.ifft(z, n, axis, norm), np.fft.ifft(z, n, axis, norm), atol=1e-12)
        np.testing.assert_allclose(ops.rfft(x, n, axis, norm), np.fft.rfft(x, n, axis, norm), atol=1e-12)
        np.testing.assert_allclose(ops.irfft(z, n, axis, norm), np.fft.irfft(z, n, axis, norm), atol=1e-12)


STFT = [
    {},
    {"nperseg": 64, "noverlap": 48, "window": "blackman"},
    {"nperseg": 50, "nfft": 128, "window": ("kaiser", 5.0), "scaling": "psd", "fs": 100.0},
    {"nperseg": 32, "boundary": "even", "detrend": "constant"},
    {"nperseg": 32, "boundary": "odd", "padded": False},
    {"nperseg": 33, "boundary": "constant", "detrend": "linear"},
    {"nperseg": 32, "boundary": None, "padded": False, "axis": 0},
    {"nperseg": 1000},
]


@pytest.mark.parametrize("options", STFT, ids=range(len(STFT)))
def test_stft_is_scipys(options: dict[str, object]) -> None:
    x = noise(300) if "axis" not in options else noise(300, 2)
    with pytest.warns(UserWarning) if options.get("nperseg") == 1000 else _nothing():
        _, _, want = signal.stft(x, **options)
    got = ops.stft(x, **options)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_stft_of_a_complex_signal_has_both_sides() -> None:
    x = noise(200) + 1j * noise(200, seed=1)
    _, _, want = signal.stft(x, nperseg=32, return_onesided=False)
    np.testing.assert_allclose(ops.stft(x, nperseg=32, onesided=False), want, atol=1e-12)
    with pytest.raises(RlxError, match="onesided=False"):
        ops.stft(x, nperseg=32)


ISTFT = [{"nperseg": 64}, {"nperseg": 50, "noverlap": 40, "window": "hamming", "scaling": "psd", "fs": 8.0}]


@pytest.mark.parametrize("options", ISTFT)
def test_istft_is_scipys_and_inverts(options: dict[str, object]) -> None:
    x = noise(2, 320)
    z = ops.stft(x, **options)
    _, want = signal.istft(z, **options)
    got = ops.istft(z, **options)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(got[:, :320], x, atol=1e-12)


WELCH = [
    {},
    {"nperseg": 64, "noverlap": 16, "window": "hamming", "fs": 10.0},
    {"nperseg": 64, "nfft": 100, "scaling": "spectrum", "detrend": False},
    {"nperseg": 63, "detrend": "linear", "average": "median"},
    {"nperseg": 64, "average": "median", "window": np.hanning(64)},
    {"nperseg": 64, "axis": 0},
    {"nperseg": 4000},
]


@pytest.mark.parametrize("options", WELCH, ids=range(len(WELCH)))
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_welch_is_scipys(options: dict[str, object], kind: type) -> None:
    x = noise(2, 1000).astype(kind)
    x = x.T if "axis" in options else x
    if isinstance(options.get("window"), np.ndarray):
        options = {**options, "window": options["window"].astype(kind)}  # type: ignore[union-attr]
    with pytest.warns(UserWarning) if options.get("nperseg") == 4000 else _nothing():
        f, want = signal.welch(x.astype(np.float64), **options)
    got_f, got = ops.welch(x, **options)
    np.testing.assert_allclose(got_f, f)
    np.testing.assert_allclose(got, want, **(SINGLE if kind is np.float32 else {"rtol": 1e-9}))


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_peaks_are_those_of_scipy_and_of_the_fused_form() -> None:
    fs, t = 200.0, np.arange(2000) / 200.0
    x = np.stack(
        [3 * np.sin(2 * np.pi * 17 * t) + np.sin(2 * np.pi * 61 * t), 2 * np.sin(2 * np.pi * 40 * t)]
    )
    x = x + 0.1 * noise(2, 2000)
    f, p = ops.welch(x, fs, nperseg=256)
    at, value = ops.spectral_peaks(p, 3, fs / 256)
    for row in range(2):
        found, _ = signal.find_peaks(p[row])
        best = found[np.argsort(-p[row][found], kind="stable")][:3]
        np.testing.assert_allclose(at[row], f[best])
        np.testing.assert_allclose(value[row], p[row][best])
    fused_at, fused_value = ops.welch_peaks(x, 3, fs, nperseg=256)
    np.testing.assert_allclose(fused_at, at)
    np.testing.assert_allclose(fused_value, value, rtol=1e-12)
    assert abs(at[0, 0] - 17) < 0.5 and abs(at[0, 1] - 61) < 0.5 and abs(at[1, 0] - 40) < 0.5


def test_gradient_of_the_fused_peaks_is_that_of_the_separate_steps() -> None:
    x = noise(3, 400)

    def gradient(fused: bool) -> np.ndarray:
        g = Graph("peaks")
        node = g.input("x", x.shape, "f64")
        with g.building():
            if fused:
                _, value = ops.welch_peaks(node, 4, nperseg=64)
            else:
                _, value = ops.spectral_peaks(ops.welch(node, nperseg=64)[1], 4, 1 / 64)
            g.output("loss", ops.sum(value * value))
        made = gradient_graph(g, "loss", ["x"])
        return rlx.reference.interpreter.evaluate(made, {"x": x})["grad_x"]

    np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-9, atol=1e-12)


def test_mel_filters_cover_the_band_with_equal_areas() -> None:
    bank = ops.mel_filter_bank(40, 2048, 16000.0, dtype=np.float64)
    area = bank.sum(1) * 16000 / 2048
    np.testing.assert_allclose(area, 1.0, rtol=0.05)
    heights = ops.mel_filter_bank(40, 2048, 16000.0, 300.0, 8000.0, scale="htk", norm=None, dtype=np.float64)
    inside = heights[:, 60:900].sum(
        0
    )  # neighbouring triangles add up to 1 between the first and the last centre
    np.testing.assert_allclose(inside, 1.0, rtol=1e-9)
    assert heights[:, :38].max() == 0.0


def test_log_mel_sees_a_tone_in_the_right_band() -> None:
    t = np.arange(16000) / 16000
    out = ops.log_mel(np.sin(2 * np.pi * 1000 * t).astype(np.float32), n_mels=80)
    assert out.shape == (80, 101) and out.dtype == np.float32
    bank = ops.mel_filter_bank(80, 400, 16000.0)
    assert int(out[:, 50].argmax()) == int(bank[:, 25].argmax())


def test_signals_refuse_what_they_cannot_do() -> None:
    with pytest.raises(RlxError, match="unknown window 'hannn'"):
        ops.welch(noise(100), window="hannn")
    with pytest.raises(RlxError, match="noverlap < nperseg"):
        ops.welch(noise(100), nperseg=16, noverlap=16)
    with pytest.raises(RlxError, match="is not one of f32, f64"):
        ops.rfft(np.zeros(4, np.complex64))
    with pytest.raises(RlxError, match="cast it"):
        ops.fft(np.zeros(4, np.float16))
    with pytest.raises(RlxError, match="shorter than the 201 elements"):
        ops.log_mel(noise(100))
    with pytest.raises(RlxError, match="'kaiser:beta'"):
        ops.get_window("kaiser", 8)


@pytest.mark.parametrize("bins", [0, 1, 2, 3, 9])
def test_peaks_of_an_open_number_of_bins(bins: int) -> None:
    """Fewer bins than a peak needs have none, also where only a run knows how many there are."""
    g = rlx.Graph("peaks")
    for name, found in zip("ab", ops.spectral_peaks(g.input("p", (3, "n"), "f32"), 2), strict=True):
        g.output(name, found)
    feed = {"p": np.random.default_rng(bins).random((3, bins)).astype(np.float32)}
    want, got = evaluate(g, feed), rlx.compile(g, cache=False).run(feed)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
