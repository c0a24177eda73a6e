"""Mel filter banks and log-mel spectrograms, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, AttrValue, boolean, integer, one_of, optional, real, string
from rlx.ir.dim import Dim, known_le
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType, parse_type, tensor_types
from rlx.ops.array.padding import pad
from rlx.ops.array.shape import flip, slice_axis, transpose
from rlx.ops.array.window import fold_windows, windows
from rlx.ops.math.contract import matmul
from rlx.ops.math.elementwise import cast, greater, log, maximum, rsqrt, sqrt
from rlx.ops.rules import shape_of
from rlx.ops.signal.fft_split import irfft_split, rfft_split
from rlx.ops.signal.tapers import parse_window, window_values
from rlx.ops.signal.welch import bin_weights

LN10 = float(np.log(10.0))


def _to_mel(f: np.ndarray, scale: str) -> np.ndarray:
    if scale == "htk":
        return np.asarray(2595 * np.log10(1 + f / 700))
    # Slaney: linear below 1 kHz, logarithmic above
    return np.where(f < 1000, f * 3 / 200, 15 + 27 * np.log(np.maximum(f, 1e-9) / 1000) / np.log(6.4))


def _from_mel(m: np.ndarray, scale: str) -> np.ndarray:
    if scale == "htk":
        return np.asarray(700 * (10 ** (m / 2595) - 1))
    return np.where(m < 15, m * 200 / 3, 1000 * np.exp((m - 15) * np.log(6.4) / 27))


MOST_MELS = 1 << 16
"""Filters of a bank: more are not distinct, and are computed when a program is compiled."""


def mel_filter_bank(
    n_mels: int,
    n_fft: int,
    sample_rate: float,
    fmin: float = 0.0,
    fmax: float | None = None,
    scale: str = "slaney",
    norm: str | None = "slaney",
    dtype: np.dtype | type = np.float32,
) -> np.ndarray:
    """Triangular filters [n_mels, n_fft // 2 + 1], evenly spaced on the mel scale ("slaney" or "htk").

    norm "slaney" gives every filter the same area; None gives them height 1.

    >>> mel_filter_bank(4, 16, 8000.0).shape
    (4, 9)
    """
    top = sample_rate / 2 if fmax is None else fmax
    if not 1 <= n_mels <= MOST_MELS or not 0 <= fmin < top:
        raise ShapeError(
            f"mel_filter_bank: {n_mels} filters from {fmin} to {top} Hz are not valid; "
            "give at least 1 filter and 0 <= fmin < fmax"
        )
    ends = _to_mel(np.array([fmin, top], np.float64), scale)
    edges = _from_mel(np.linspace(ends[0], ends[1], n_mels + 2), scale)[:, None]
    f = np.arange(n_fft // 2 + 1) * (sample_rate / n_fft)
    rising = (f - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - f) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0, np.minimum(rising, falling))
    if norm == "slaney":
        filters = filters * (2 / (edges[2:] - edges[:-2]))
    return np.asarray(filters.astype(dtype))


def mel_weight_matrix(
    n_mels: int,
    dft_length: int,
    sample_rate: int,
    lower: float,
    upper: float,
    dtype: np.dtype | type = np.float32,
) -> np.ndarray:
    """ONNX MelWeightMatrix [dft_length // 2 + 1, n_mels]: triangles between whole bins, HTK mel scale.

    >>> mel_weight_matrix(2, 8, 8000, 0.0, 4000.0).shape
    (5, 2)
    """
    ends = _to_mel(np.array([lower, upper], np.float64), "htk")
    mels = ends[0] + np.arange(n_mels + 2) * (ends[1] - ends[0]) / (n_mels + 2)
    edges = ((dft_length + 1) * _from_mel(mels, "htk") // sample_rate).astype(int)
    out = np.zeros((dft_length // 2 + 1, n_mels))
    for i in range(n_mels):
        low, centre, high = edges[i : i + 3]
        up, down = np.arange(low, centre + 1), np.arange(centre, high)
        out[up, i] = (up - low) / (centre - low) if centre > low else 1.0
        if high > centre:
            out[down, i] = (high - down) / (high - centre)
    return np.asarray(out.astype(dtype))


ATTRS = {
    "sample_rate": Attr(real, 16000.0),
    "n_fft": Attr(integer, 400),
    "hop": Attr(integer, 160),
    "n_mels": Attr(integer, 80),
    "fmin": Attr(real, 0.0),
    "fmax": Attr(optional(real), None),
    "window": Attr(string, "hann"),
    "center": Attr(boolean, True),
    "power": Attr(integer, 2),
    "floor": Attr(real, 1e-10),
    "base": Attr(one_of("e", "10"), "e"),
    "scale": Attr(one_of("slaney", "htk"), "slaney"),
    "norm": Attr(one_of("slaney", "none"), "slaney"),
}


def _frames(n: Dim, n_fft: int, hop: int, center: bool) -> Dim:
    total = n + 2 * (n_fft // 2) if center else n
    return (total - n_fft) // hop + 1


def _check(name: str, x: TensorType, how: Mapping[str, AttrValue]) -> None:
    if x.dtype.name not in ("f32", "f64") or x.rank < 1:
        raise DTypeError(f"{name}: the signal {x} is not f32 or f64 [.., time]")
    if how["n_fft"] < 1 or how["hop"] < 1 or how["power"] not in (1, 2):
        raise ShapeError(f"{name}: n_fft {how['n_fft']} and hop {how['hop']} must be positive, power 1 or 2")
    parse_window(how["window"])
    least = how["n_fft"] // 2 + 1 if how["center"] else how["n_fft"]
    if known_le(x.shape[-1], least - 1) is True:
        raise ShapeError(f"{name}: the signal {x} is shorter than the {least} elements that a frame needs")


def _filters(how: Mapping[str, AttrValue]) -> np.ndarray:
    norm = None if how["norm"] == "none" else how["norm"]
    return mel_filter_bank(
        how["n_mels"],
        how["n_fft"],
        how["sample_rate"],
        how["fmin"],
        how["fmax"],
        how["scale"],
        norm,
        np.float64,
    )


def _centred(x: Node, how: Mapping[str, AttrValue]) -> Node:
    """The signal mirrored at both ends, so that frame i is centred on element i * hop."""
    side = how["n_fft"] // 2 if how["center"] else 0
    made: Node = pad(x, (*((0, 0),) * (x.rank - 1), (side, side)), mode="reflect") if side else x
    return made


def _spectra(x: Node, taper: Node, how: Mapping[str, AttrValue]) -> tuple[Node, Node]:
    n_fft = how["n_fft"]
    frames = windows(x, (n_fft,), strides=how["hop"])
    re, im = rfft_split(frames * taper)
    return re, im


def _swapped(x: Operand) -> Tensor:
    rank = len(shape_of(x))
    return transpose(x, (*range(rank - 2), rank - 1, rank - 2))


def _constants(x: Node, how: Mapping[str, AttrValue]) -> tuple[Node, Node]:
    taper = window_values(how["window"], how["n_fft"]).astype(x.dtype.np)
    return x.graph.constant(taper), x.graph.constant(_filters(how).T.astype(x.dtype.np))


@declare
class _log_mel(Op):
    """Logarithm of the mel-filtered spectrum of [.., time], at least log(floor): [.., n_mels, frames]."""

    name = "log_mel"
    level = Level.HIR
    arity = 1
    attrs = ATTRS

    def infer(self, x: TensorType, **how: AttrValue) -> TensorType:
        _check(self.name, x, how)
        frames = _frames(x.shape[-1], how["n_fft"], how["hop"], how["center"])
        return x.with_shape((*x.shape[:-1], how["n_mels"], frames))

    def ref(self, x: np.ndarray, **how: AttrValue) -> np.ndarray:
        mel, _ = _ref_mel(x, how)
        out = np.log(np.maximum(mel, how["floor"])) / (LN10 if how["base"] == "10" else 1.0)
        return np.asarray(np.moveaxis(out, -1, -2).astype(x.dtype))

    def expand(self, x: Node, **how: AttrValue) -> Node:
        taper, filters = _constants(x, how)
        re, im = _spectra(_centred(x, how), taper, how)
        energy = re * re + im * im
        mel = matmul(energy if how["power"] == 2 else sqrt(energy), filters)
        logs = log(maximum(mel, how["floor"]))
        made: Node = _swapped(logs * (1.0 / LN10) if how["base"] == "10" else logs)
        return made

    def vjp(self, g: Node, y: Node, x: Node, **how: object) -> list[Node]:
        made: Node = _log_mel_backward(g, x, **how)
        return [made]

    def samples(self) -> list[Sample]:
        return [Sample((Arg(t),), attrs, grad=grad) for t, attrs, grad in _cases()]


def _cases() -> list[tuple[str, dict[str, AttrValue], bool]]:
    small = {"sample_rate": 8000.0, "n_fft": 8, "hop": 3, "n_mels": 3, "fmax": 3500.0}
    return [
        ("f32[12]", small, True),
        ("f32[2,17]", {**small, "center": False, "base": "10", "n_fft": 9, "norm": "none"}, True),
        ("f32[12]", {**small, "power": 1, "window": "hamming", "scale": "htk", "fmin": 100.0}, True),
        ("f32[0,12]", small, False),
        ("f32[n,12]", {**small, "floor": 0.5}, False),
        ("f32[2,3*m]", small, False),
    ]


def _ref_mel(x: np.ndarray, how: Mapping[str, AttrValue]) -> tuple[np.ndarray, np.ndarray]:
    """Mel spectrum [.., frames, n_mels] and complex spectrum [.., frames, bins], in f64."""
    n_fft, hop = how["n_fft"], how["hop"]
    side = n_fft // 2 if how["center"] else 0
    wide = np.pad(x.astype(np.float64), (*((0, 0),) * (x.ndim - 1), (side, side)), "reflect")
    count = (wide.shape[-1] - n_fft) // hop + 1
    taper = window_values(how["window"], n_fft)
    frames = [np.fft.rfft(wide[..., i * hop : i * hop + n_fft] * taper) for i in range(count)]
    z = np.stack(frames, -2)
    return np.abs(z) ** how["power"] @ _filters(how).T, z


@declare
class _log_mel_backward(Op):
    """The gradient of `log_mel` by the signal: g [.., n_mels, frames] and x [.., time] -> [.., time]."""

    name = "log_mel_backward"
    level = Level.HIR
    arity = 2
    attrs = ATTRS

    def infer(self, g: TensorType, x: TensorType, **how: object) -> TensorType:
        (want,) = tensor_types(get_op("log_mel").infer(x, **how))
        require_shape(
            g.shape, want.shape, f"log_mel_backward: the gradient {g} is not {want}, the log_mel of {x}"
        )
        if g.dtype is not x.dtype:
            raise DTypeError(
                f"log_mel_backward: the gradient {g} and the signal {x} differ in dtype; cast one"
            )
        return x

    def ref(self, g: np.ndarray, x: np.ndarray, **how: AttrValue) -> np.ndarray:
        n_fft, hop = how["n_fft"], how["hop"]
        mel, z = _ref_mel(x, how)
        slope = np.where(mel > how["floor"], 1 / np.maximum(mel, how["floor"]), 0.0)
        inner = np.moveaxis(g.astype(np.float64), -1, -2) * slope / (LN10 if how["base"] == "10" else 1.0)
        towards = inner @ _filters(how) * (2 * z if how["power"] == 2 else z / np.maximum(np.abs(z), 1e-300))
        # adjoint of rfft: n times the real part of the inverse transform of these bins alone
        full = np.zeros((*towards.shape[:-1], n_fft), np.complex128)
        full[..., : towards.shape[-1]] = towards
        frames = np.fft.ifft(full).real * n_fft * window_values(how["window"], n_fft)
        side = n_fft // 2 if how["center"] else 0
        n = x.shape[-1]
        places = np.pad(np.arange(n), side, "reflect")
        out = np.zeros(x.shape, np.float64)
        for i in range(frames.shape[-2]):
            for j in range(n_fft):
                out[..., places[i * hop + j]] += frames[..., i, j]
        return np.asarray(out.astype(x.dtype))

    def expand(self, g: Node, x: Node, **how: object) -> Node:
        return _backward(g, x, how)

    def samples(self) -> list[Sample]:
        out = []
        for text, attrs, grad in _cases():
            t = parse_type(text)
            frames = _frames(t.shape[-1], attrs["n_fft"], attrs["hop"], attrs.get("center", True))
            shape = ",".join(map(str, (*t.shape[:-1], attrs["n_mels"], frames)))
            out.append(Sample((Arg(f"f32[{shape}]"), Arg(text)), attrs, grad=grad))
        return out


def _backward(g: Node, x: Node, how: Mapping[str, AttrValue]) -> Node:
    taper, filters = _constants(x, how)
    wide = _centred(x, how)
    re, im = _spectra(wide, taper, how)
    energy = re * re + im * im
    mel = matmul(energy if how["power"] == 2 else sqrt(energy), filters)
    rises = cast(greater(mel, how["floor"]), dtype=x.dtype)
    inner = _swapped(g) * rises / maximum(mel, how["floor"])
    if how["base"] == "10":
        inner = inner * (1.0 / LN10)
    inner = matmul(inner, transpose(filters, (1, 0)))
    inner = inner * 2.0 if how["power"] == 2 else inner * rsqrt(energy)
    # the adjoint of a onesided transform counts bins once, the inverse interior ones twice
    halves = x.graph.constant((1.0 / bin_weights(how["n_fft"])).astype(x.dtype.np))
    frames = irfft_split(re * inner * halves, im * inner * halves, n=how["n_fft"]) * taper
    return _uncentred(fold_windows(frames, (wide.shape[-1],), strides=how["hop"]), x, how)


def _uncentred(gy: Node, x: Node, how: Mapping[str, AttrValue]) -> Node:
    """The adjoint of `_centred`: what mirrored elements got belongs to those they mirror."""
    side = how["n_fft"] // 2 if how["center"] else 0
    if not side:
        return gy
    n, last = x.shape[-1], x.rank - 1
    lead = ((0, 0),) * last
    far = n - 1 - side
    before = pad(flip(slice_axis(gy, last, 0, side), last), (*lead, (1, far)))
    after = pad(flip(slice_axis(gy, last, n + side, side), last), (*lead, (far, 1)))
    made: Node = slice_axis(gy, last, side, n) + before + after
    return made


def log_mel_backward(g: Node, x: Operand, **options: object) -> Tensor:
    """The gradient of `log_mel(x, **options)` by x, given that of its result.

    >>> log_mel_backward(np.ones((8, 11)), np.sin(np.arange(1600.0)), n_mels=8).shape
    (1600,)
    """
    if options.get("norm", "slaney") is None:
        options = {**options, "norm": "none"}
    return _log_mel_backward(g, x, **options)


@of_one
def log_mel(
    x: Operand,
    sample_rate: float = 16000.0,
    n_fft: int = 400,
    hop: int = 160,
    n_mels: int = 80,
    fmin: float = 0.0,
    fmax: float | None = None,
    window: str = "hann",
    center: bool = True,
    power: int = 2,
    floor: float = 1e-10,
    base: str = "e",
    scale: str = "slaney",
    norm: str | None = "slaney",
) -> Tensor:
    """The log-mel spectrogram [.., n_mels, frames] of signals [.., time].

    center: mirror the ends so that frame i is centred on element i * hop. base of the logarithm: "e" or "10".
    For scale and norm see `mel_filter_bank`.

    >>> log_mel(np.sin(np.arange(1600.0)), n_mels=8).shape
    (8, 11)
    """
    how = {
        "sample_rate": sample_rate,
        "n_fft": n_fft,
        "hop": hop,
        "n_mels": n_mels,
        "fmin": fmin,
        "fmax": fmax,
    }
    more = {"window": window, "center": center, "power": power, "floor": floor, "base": base, "scale": scale}
    return _log_mel(x, **how, **more, norm=norm or "none")
