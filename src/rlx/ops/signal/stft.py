"""Short-time Fourier transforms with SciPy's semantics: windows, a taper and the split transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, AttrValue, boolean, integer, one_of, real, string
from rlx.ir.dim import Dim, known_le
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.padding import pad
from rlx.ops.array.shape import broadcast_to, reshape, slice_axis, transpose
from rlx.ops.array.window import fold_windows, windows
from rlx.ops.math.complex import complex_of, imag, make_complex, real_of
from rlx.ops.math.complex import real as real_part
from rlx.ops.math.elementwise import sqrt, where
from rlx.ops.math.reduce import sum as sum_over
from rlx.ops.rules import normal_axis, shape_of
from rlx.ops.signal.fft import dft, resized
from rlx.ops.signal.fft_split import fft_split, half_bins, irfft_split, rfft_split
from rlx.ops.signal.tapers import Window, parse_window, window_values

SEGMENTS = {
    "window": Attr(string, "hann"),  # the taper's name; a taper that is an operand goes before it
    "nperseg": Attr(integer),
    "noverlap": Attr(integer),
    "nfft": Attr(integer),
}
DETREND = Attr(one_of("none", "constant", "linear"), "none")
BOUNDARIES = ("none", "zeros", "even", "odd", "constant")


def check_segments(
    name: str, x: TensorType, taper: Sequence[TensorType], window: str, nperseg: int, noverlap: int, nfft: int
) -> None:
    """Segments must have elements, move on, and fit their transform; a taper must have nperseg elements."""
    if x.dtype.name not in ("f32", "f64", "c64", "c128"):
        raise DTypeError(f"{name}: operand {x} is not f32, f64, c64 or c128; cast it")
    if x.rank < 1:
        raise ShapeError(f"{name}: operand {x} has no time axis")
    if nperseg < 1 or not 0 <= noverlap < nperseg or nfft < nperseg:
        raise ShapeError(
            f"{name}: nperseg {nperseg}, noverlap {noverlap} and nfft {nfft} do not satisfy "
            "0 <= noverlap < nperseg <= nfft"
        )
    own = real_of(x.dtype) if x.dtype.is_complex else x.dtype
    for t in taper:
        if t.dtype is not own or t.shape != (nperseg,):
            raise ShapeError(f"{name}: the window {t} is not {own}[{nperseg}]")
    if not taper:
        parse_window(window)


def taper_of(taper: Sequence[Node], window: str, nperseg: int, like: Node) -> Node:
    """The taper as a node: an operand, or the constant of a named window."""
    return taper[0] if taper else like.graph.constant(window_values(window, nperseg).astype(like.dtype.np))


def _line(n: int) -> np.ndarray:
    """A straight line with mean 0 and norm 1 (0 for a single point)."""
    t = np.arange(n) - (n - 1) / 2
    return t / max(float(np.sqrt(np.sum(t * t))), 1.0)


def detrended(frames: Node, detrend: str) -> Node:
    """Frames without their mean, or without their least-squares line; a projection, so its own adjoint."""
    if detrend == "none":
        return frames
    n = int(frames.shape[-1])
    last = frames.rank - 1
    made: Node = frames - sum_over(frames, axis=last, keepdims=True) * (1.0 / n)
    if detrend == "linear":
        line = frames.graph.constant(_line(n).astype(frames.dtype.np))
        made = made - sum_over(made * line, axis=last, keepdims=True) * line
    return made


def segment_spectra(
    parts: Sequence[Node],
    taper: Node,
    *,
    nperseg: int,
    noverlap: int,
    nfft: int,
    detrend: str,
    onesided: bool,
) -> tuple[Node, Node]:
    """Transforms of tapered segments of [.., time], given by one part or two: parts [.., segments, bins]."""
    made = []
    for part in parts:
        frames = detrended(windows(part, (nperseg,), strides=nperseg - noverlap), detrend)
        made.append(resized(frames * taper, frames.rank - 1, nfft))
    if onesided:
        re, im = rfft_split(made[0])
    else:
        zero = made[0].graph.constant(np.zeros((), made[0].dtype.np))
        re, im = fft_split(made[0], made[1] if len(made) == 2 else broadcast_to(zero, made[0].shape))
    return re, im


def ref_spectra(
    x: np.ndarray, taper: np.ndarray, *, nperseg: int, noverlap: int, nfft: int, detrend: str, onesided: bool
) -> np.ndarray:
    """The reference of `segment_spectra`, in f64: complex [.., segments, bins]."""
    step = nperseg - noverlap
    bins = nfft // 2 + 1 if onesided else nfft
    count = max((x.shape[-1] - nperseg) // step + 1, 0)
    out = np.zeros((*x.shape[:-1], count, bins), np.complex128)
    t = np.vander(np.arange(nperseg, dtype=np.float64), 2)
    for i in range(count):
        frame = x[..., i * step : i * step + nperseg].astype(
            np.complex128 if x.dtype.kind == "c" else np.float64
        )
        if detrend == "constant":
            frame = frame - frame.mean(-1, keepdims=True)
        elif detrend == "linear" and nperseg > 1:
            rows = frame.reshape(-1, nperseg).T
            frame = (rows - t @ np.linalg.lstsq(t, rows, rcond=None)[0]).T.reshape(frame.shape)
        elif detrend == "linear":
            frame = frame * 0
        out[..., i, :] = (np.fft.rfft if onesided else np.fft.fft)(frame * taper.astype(np.float64), nfft)
    return out


def _is_complex(x: Node) -> bool:
    return x.dtype.is_complex


def _padded_length(n: Dim, nperseg: int, noverlap: int, boundary: str, padded: bool) -> Dim:
    """Elements after the boundary and the padding to whole segments."""
    total = n if boundary == "none" else n + 2 * (nperseg // 2)
    if padded:
        total = total + (-(total - nperseg) % (nperseg - noverlap)) % nperseg
    return total


def _extended(part: Node, nperseg: int, noverlap: int, boundary: str, padded: bool) -> Node:
    """The signal with its boundary and zeros to whole segments."""
    n, side = part.shape[-1], nperseg // 2
    lead = ((0, 0),) * (part.rank - 1)
    y = part
    if boundary == "zeros":
        y = pad(y, (*lead, (side, side)))
    elif boundary == "constant":
        y = pad(y, (*lead, (side, side)), mode="edge")
    elif boundary == "even":
        y = pad(y, (*lead, (side, side)), mode="reflect")
    elif boundary == "odd":
        y = _odd(y, side)
    if padded:
        rest = _padded_length(n, nperseg, noverlap, boundary, True) - y.shape[-1]
        y = pad(y, (*lead, (0, rest)))
    return y


def _odd(part: Node, side: int) -> Node:
    """The signal mirrored through its end points: 2x - x in the middle. Short ones repeatedly."""
    y, lead = part, ((0, 0),) * (part.rank - 1)
    while side > 0:
        n = y.shape[-1]
        step = min(side, n - 1) if isinstance(n, int) and n > 1 else side
        around = (*lead, (step, step))
        y = pad(y, around, mode="edge") * 2.0 - pad(y, around, mode="reflect")
        side -= step
    return y


def _ref_extended(x: np.ndarray, nperseg: int, noverlap: int, boundary: str, padded: bool) -> np.ndarray:
    n, side = x.shape[-1], nperseg // 2
    lead = ((0, 0),) * (x.ndim - 1)
    if boundary == "odd":
        x = np.pad(x, (*lead, (side, side)), "reflect", reflect_type="odd")
    elif boundary != "none":
        mode: Any = {"zeros": "constant", "constant": "edge", "even": "reflect"}[boundary]
        x = np.pad(x, (*lead, (side, side)), mode)
    total = _padded_length(n, nperseg, noverlap, boundary, padded)
    return np.pad(x, (*lead, (0, int(total) - x.shape[-1])))


@of_one
def amplitude(taper: Operand, scaling: str, fs: float) -> Tensor:
    """What an stft is multiplied by: "spectrum" gives amplitudes, "psd" the root of a power density."""
    if isinstance(taper, Node):
        return 1.0 / (sum_over(taper) if scaling == "spectrum" else sqrt(sum_over(taper * taper) * fs))
    weights = np.asarray(taper)
    return 1.0 / (np.sum(weights) if scaling == "spectrum" else np.sqrt(np.sum(weights * weights) * fs))


def _short_frames(type_: str, *taper: str | Arg, grad: bool = True, **more: object) -> Sample:
    attrs = {"nperseg": 4, "noverlap": 2, "nfft": 4, **more}
    return Sample((Arg(type_), *taper), attrs, grad=grad)


@declare
class _stft(Op):
    """Transforms of overlapping tapered segments: [.., time] -> complex [.., bins, segments]."""

    name = "stft"
    level = Level.HIR
    attrs = {
        **SEGMENTS,
        "detrend": DETREND,
        "onesided": Attr(boolean, True),
        "boundary": Attr(one_of(*BOUNDARIES), "zeros"),
        "padded": Attr(boolean, True),
        "scaling": Attr(one_of("spectrum", "psd"), "spectrum"),
        "fs": Attr(real, 1.0),
    }

    def infer(self, x: TensorType, *taper: TensorType, **how: AttrValue) -> TensorType:
        check_segments(self.name, x, taper, how["window"], how["nperseg"], how["noverlap"], how["nfft"])
        if how["onesided"] and x.dtype.is_complex:
            raise DTypeError(f"stft: one side is enough only for a real signal, not {x}; give onesided=False")
        if how["boundary"] not in ("none", "zeros"):
            require_at_least(x.shape[-1], 1, f"stft: {x} has no elements to continue at its ends")
        total = _padded_length(x.shape[-1], how["nperseg"], how["noverlap"], how["boundary"], how["padded"])
        if known_le(total, how["nperseg"] - 1) is True:
            raise ShapeError(f"stft: {x} has fewer elements than one segment of {how['nperseg']}")
        count = (total - how["nperseg"]) // (how["nperseg"] - how["noverlap"]) + 1
        bins = half_bins(how["nfft"]) if how["onesided"] else how["nfft"]
        own = x.dtype if x.dtype.is_complex else complex_of(x.dtype)
        return TensorType(own, (*x.shape[:-1], bins, count))

    def ref(self, x: np.ndarray, *taper: np.ndarray, scaling: str, fs: float, **how: AttrValue) -> np.ndarray:
        boundary, padded, window = how.pop("boundary"), how.pop("padded"), how.pop("window")
        shape = taper[0].astype(np.float64) if taper else window_values(window, how["nperseg"])
        wide = _ref_extended(x, how["nperseg"], how["noverlap"], boundary, padded)
        out = np.moveaxis(ref_spectra(wide, shape, **how), -1, -2) * amplitude(shape, scaling, fs)
        return np.asarray(
            out.astype(np.complex64 if x.dtype in (np.float32, np.complex64) else np.complex128)
        )

    def expand(self, x: Node, *taper: Node, scaling: str, fs: float, **how: AttrValue) -> Node:
        boundary, padded, window = how.pop("boundary"), how.pop("padded"), how.pop("window")
        parts = [real_part(x), imag(x)] if _is_complex(x) else [x]
        shape = taper_of(taper, window, how["nperseg"], parts[0])
        wide = [_extended(p, how["nperseg"], how["noverlap"], boundary, padded) for p in parts]
        factor = amplitude(shape, scaling, fs)
        re, im = (_swapped(p * factor) for p in segment_spectra(wide, shape, **how))
        made: Node = make_complex(re, im)
        return made

    def samples(self) -> list[Sample]:
        return [
            _short_frames("f32[9]"),
            _short_frames(
                "f32[2,10]", nperseg=5, noverlap=1, nfft=8, window="hamming", scaling="psd", fs=2.0
            ),
            _short_frames("f32[9]", Arg("f32[4]", 0.5, 1.5), noverlap=3, detrend="constant"),
            _short_frames("f32[8]", window="boxcar", boundary="none", padded=False, detrend="linear"),
            _short_frames("f32[8]", boundary="even", onesided=False, window="kaiser:4.0"),
            _short_frames("f32[8]", boundary="odd", padded=False),
            _short_frames("f32[2]", boundary="odd", padded=False),  # shorter than its boundary
            _short_frames("f32[8]", boundary="constant", nperseg=1, noverlap=0, nfft=2),
            _short_frames("c64[8]", onesided=False),
            _short_frames("f32[0,8]", grad=False),
            _short_frames("f32[n,m]", grad=False),
        ]


def _swapped(x: Node) -> Node:
    made: Node = transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))
    return made


@declare
class _istft(Op):
    """The real signal of a onesided `stft`: overlap-add of tapered segments over the taper's power."""

    name = "istft"
    level = Level.HIR
    attrs = {
        **SEGMENTS,
        "boundary": Attr(boolean, True),
        "scaling": Attr(one_of("spectrum", "psd"), "spectrum"),
        "fs": Attr(real, 1.0),
    }

    def infer(self, z: TensorType, *taper: TensorType, **how: AttrValue) -> TensorType:
        check_segments(self.name, z, taper, how["window"], how["nperseg"], how["noverlap"], how["nfft"])
        if not z.dtype.is_complex or z.rank < 2 or z.shape[-2] != half_bins(how["nfft"]):
            raise ShapeError(f"istft: {z} is not complex [.., {half_bins(how['nfft'])} bins, segments]")
        return TensorType(real_of(z.dtype), (*z.shape[:-2], _joined_length(z.shape[-1], **how)))

    def ref(self, z: np.ndarray, *taper: np.ndarray, window: str, **how: AttrValue) -> np.ndarray:
        nperseg, step = how["nperseg"], how["nperseg"] - how["noverlap"]
        shape = taper[0].astype(np.float64) if taper else window_values(window, nperseg)
        frames = np.fft.irfft(z.astype(np.complex128), how["nfft"], axis=-2)[..., :nperseg, :]
        total = np.zeros((*z.shape[:-2], nperseg + (z.shape[-1] - 1) * step))
        power = np.zeros(total.shape[-1])
        for i in range(z.shape[-1]):
            total[..., i * step : i * step + nperseg] += frames[..., i] * shape
            power[i * step : i * step + nperseg] += shape * shape
        out = total / np.where(power > 1e-10, power, 1.0) / amplitude(shape, how["scaling"], how["fs"])
        side = nperseg // 2 if how["boundary"] else 0
        narrow = np.float32 if z.dtype == np.complex64 else np.float64
        return np.asarray(out[..., side : out.shape[-1] - side].astype(narrow))

    def expand(self, z: Node, *taper: Node, window: str, **how: AttrValue) -> Node:
        nperseg, nfft = how["nperseg"], how["nfft"]
        step = nperseg - how["noverlap"]
        z = _swapped(z)  # [.., segments, bins]
        segments = z.shape[-2]
        re = real_part(z)
        shape = taper_of(taper, window, nperseg, re)
        frames = irfft_split(re, imag(z), n=nfft) * (1.0 / nfft)
        frames = resized(frames, frames.rank - 1, nperseg)
        size = (nperseg + (segments - 1) * step,)
        total = fold_windows(frames * shape, size, strides=step)
        power = fold_windows(broadcast_to(shape * shape, (segments, nperseg)), size, strides=step)
        one = z.graph.constant(np.ones((), re.dtype.np))
        out = total / (where(power > 1e-10, power, one) * amplitude(shape, how["scaling"], how["fs"]))
        made: Node = out
        if how["boundary"]:
            made = slice_axis(out, out.rank - 1, nperseg // 2, _joined_length(segments, **how))
        return made

    def samples(self) -> list[Sample]:
        return [
            _short_frames("c64[3,5]"),
            _short_frames(
                "c64[2,5,4]", nperseg=5, noverlap=3, nfft=8, window="hamming", scaling="psd", fs=2.0
            ),
            _short_frames("c64[3,5]", Arg("f32[4]", 0.5, 1.5), boundary=False),
            _short_frames("c64[0,3,5]", grad=False),
            _short_frames("c64[n,3,m]", grad=False),
        ]


def _joined_length(segments: Dim, *, nperseg: int, noverlap: int, boundary: bool, **how: object) -> Dim:
    return nperseg + (segments - 1) * (nperseg - noverlap) - (2 * (nperseg // 2) if boundary else 0)


def segment_attrs(
    name: str, n: Dim | None, window: Any, nperseg: Any, noverlap: int | None, nfft: int | None
) -> tuple[dict[str, AttrValue], tuple[Tensor, ...]]:
    """Attributes of segments with SciPy's defaults, and the taper as an operand if it is an array."""
    operands: tuple[Tensor, ...] = ()
    if not isinstance(window, (str, tuple)):
        operands, length = (window,), shape_of(window)[0]
        if nperseg is not None and nperseg != length:
            raise ShapeError(f"{name}: nperseg {nperseg} differs from the length {length} of the window")
        nperseg = int(length)
    size = 256 if nperseg is None else nperseg
    if not isinstance(size, (int, np.integer)):
        raise ShapeError(f"{name}: segments need a length that is a number, not {size}")
    if isinstance(n, int) and n < size and not operands:  # a short signal is one segment
        size = n
    overlap = size // 2 if noverlap is None else noverlap
    text = "hann" if operands else window if isinstance(window, str) else ":".join(map(str, window))
    attrs = {"window": text, "nperseg": size, "noverlap": overlap, "nfft": size if nfft is None else nfft}
    return attrs, operands


@of_one
def at_last(x: Operand, axis: int, name: str) -> Tensor:
    """x with an axis moved to the end."""
    rank = len(shape_of(x))
    axis = normal_axis(name, axis, rank)
    return x if axis == rank - 1 else transpose(x, (*(i for i in range(rank) if i != axis), axis))


@of_one
def back_from(x: Operand, source: int, axis: int) -> Tensor:
    """x with axis `source` moved to `axis` (counted from the start)."""
    rank = len(shape_of(x))
    source = source % rank
    order = [i for i in range(rank) if i != source]
    order.insert(axis, source)
    return x if order == [*range(rank)] else transpose(x, order)


@of_one
def stft(
    x: Operand,
    fs: float = 1.0,
    window: Window | Operand = "hann",
    nperseg: int | None = 256,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: str | bool = False,
    onesided: bool = True,
    boundary: str | None = "zeros",
    padded: bool = True,
    axis: int = -1,
    scaling: str = "spectrum",
) -> Tensor:
    """The short-time Fourier transform: what scipy.signal.stft gives as Zxx.

    Bins take the place of the time axis; segments are the last axis.

    window: a name, ("kaiser", beta) or an array. detrend: False, "constant", "linear".

    >>> stft(np.ones(16), nperseg=8).shape
    (5, 5)
    """
    axis = normal_axis("stft", axis, len(shape_of(x)))
    x = at_last(x, axis, "stft")
    attrs, taper = segment_attrs("stft", shape_of(x)[-1], window, nperseg, noverlap, nfft)
    how = {
        "detrend": detrend or "none",
        "onesided": onesided,
        "boundary": boundary or "none",
        "padded": padded,
    }
    return back_from(_stft(x, *taper, **attrs, **how, scaling=scaling, fs=fs), -2, axis)


@of_one
def istft(
    z: Operand,
    fs: float = 1.0,
    window: Window | Operand = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    boundary: bool = True,
    scaling: str = "spectrum",
) -> Tensor:
    """The signal of a onesided `stft` [.., bins, segments]: what scipy.signal.istft gives as x.

    >>> istft(stft(np.arange(16.0), nperseg=8), nperseg=8).round(6)[:4]
    array([0., 1., 2., 3.])
    """
    bins = shape_of(z)[-2]
    size = nperseg if nperseg is not None else 2 * (bins - 1)
    attrs, taper = segment_attrs("istft", None, window, size, noverlap, nfft)
    return _istft(z, *taper, **attrs, boundary=boundary, scaling=scaling, fs=fs)


@of_one
def stft_pairs(
    x: Operand, step: int, window: Operand | None = None, length: int | None = None, onesided: bool = True
) -> Tensor:
    """ONNX STFT: x [N, time, 1 or 2 parts] -> [N, segments, bins, 2]; no boundary and no scaling.

    >>> stft_pairs(np.ones((1, 8, 1)), 2, length=4).shape
    (1, 3, 3, 2)
    """
    shape = shape_of(x)
    if len(shape) != 3:
        raise ShapeError(f"stft_pairs: x of rank {len(shape)} is not [N, time, 1 or 2 parts]")
    size = length if length is not None else shape[1] if window is None else shape_of(window)[0]
    frames = transpose(windows(transpose(x, (0, 2, 1)), (size,), strides=step), (0, 2, 3, 1))
    if window is not None:
        frames = frames * reshape(window, (size, 1))
    return dft(frames, axis=2, onesided=onesided)
