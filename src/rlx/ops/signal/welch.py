"""Power spectra by Welch's method with SciPy's semantics, their peaks, and both in one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.attr import Attr, AttrValue, integer, one_of, real
from rlx.ir.dim import Dim, dim_max, known_le
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, MultiOp, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType, TupleType
from rlx.ops.array.create import zeros
from rlx.ops.array.scatter import scatter_elements
from rlx.ops.array.shape import broadcast_to, concat, reshape, slice_axis
from rlx.ops.array.sorting import sort, top_k
from rlx.ops.array.window import fold_windows
from rlx.ops.math.elementwise import cast, greater, logical_and, round, where
from rlx.ops.math.reduce import sum as sum_over
from rlx.ops.nn.sampling import extent_of
from rlx.ops.rules import is_real_float, need_dtype, normal_axis, shape_of
from rlx.ops.signal.fft import resized
from rlx.ops.signal.fft_split import half_bins, irfft_split
from rlx.ops.signal.stft import (
    DETREND,
    SEGMENTS,
    at_last,
    back_from,
    check_segments,
    detrended,
    ref_spectra,
    segment_attrs,
    segment_spectra,
    taper_of,
)
from rlx.ops.signal.tapers import Window, window_values

WELCH = {
    **SEGMENTS,
    "detrend": Attr(DETREND.kind, "constant"),
    "scaling": Attr(one_of("density", "spectrum"), "density"),
    "fs": Attr(real, 1.0),
}


def _segments(x: TensorType, nperseg: int, noverlap: int) -> Dim:
    return (x.shape[-1] - nperseg) // (nperseg - noverlap) + 1


def _check(name: str, x: TensorType, taper: Sequence[TensorType], how: Mapping[str, AttrValue]) -> None:
    check_segments(name, x, taper, how["window"], how["nperseg"], how["noverlap"], how["nfft"])
    if x.dtype.is_complex:
        raise DTypeError(f"{name}: the signal {x} is complex; transform its real and imaginary parts")
    if known_le(x.shape[-1], how["nperseg"] - 1) is True:
        raise ShapeError(f"{name}: {x} has fewer elements than one segment of {how['nperseg']}")


def bin_weights(nfft: int) -> np.ndarray:
    """2 for bins that stand for two frequencies, 1 for those that stand for themselves."""
    weights = np.full(nfft // 2 + 1, 2.0)
    weights[0] = 1.0
    if nfft % 2 == 0:
        weights[-1] = 1.0
    return weights


@of_one
def power_scale(taper: Operand, scaling: str, fs: float) -> Tensor:
    """What squared magnitudes are multiplied by: a density per hertz, or the power of a sine."""
    taper = taper if isinstance(taper, Node) else np.asarray(taper)
    total: Callable[[Tensor], Tensor] = sum_over if isinstance(taper, Node) else np.sum
    if scaling == "density":
        return 1.0 / (total(taper * taper) * fs)
    return 1.0 / (total(taper) * total(taper))


def segment_powers(
    x: Node, taper: Node, *, scaling: str, fs: float, nfft: int, **segments: AttrValue
) -> Node:
    """The power of each bin of each segment, [.., segments, bins]."""
    re, im = segment_spectra([x], taper, nfft=nfft, onesided=True, **segments)
    weights = x.graph.constant(bin_weights(nfft).astype(x.dtype.np))
    made: Node = (re * re + im * im) * (weights * power_scale(taper, scaling, fs))
    return made


def _ref_powers(
    x: np.ndarray, taper: np.ndarray, *, scaling: str, fs: float, nfft: int, **segments: AttrValue
) -> np.ndarray:
    z = ref_spectra(x, taper, nfft=nfft, onesided=True, **segments)
    return np.asarray(np.abs(z) ** 2 * bin_weights(nfft) * power_scale(taper, scaling, fs))


def _median_bias(n: int) -> float:
    """How much a median of n exponential values exceeds their mean."""
    pairs = 2 * np.arange(1.0, (n - 1) // 2 + 1)
    return 1 + float(np.sum(1.0 / (pairs + 1) - 1.0 / pairs))


def _averaged(powers: Node, average: str) -> Node:
    """The mean, or the median without its bias, over segments."""
    segments, axis = powers.shape[-2], powers.rank - 2
    made: Node
    if average == "mean":
        made = sum_over(powers, axis=axis) / extent_of(segments, powers.dtype)
        return made
    assert isinstance(segments, int)
    ordered = sort(powers, axis=axis)
    middle = [slice_axis(ordered, axis, i, 1) for i in ((segments - 1) // 2, segments // 2)]
    made = reshape(middle[0] + middle[1], (*powers.shape[:-2], powers.shape[-1]))
    made = made * (0.5 / _median_bias(segments))
    return made


@declare
class _welch(Op):
    """The power spectrum of [.., time] averaged over tapered segments: [.., bins]."""

    name = "welch"
    level = Level.HIR
    attrs = {**WELCH, "average": Attr(one_of("mean", "median"), "mean")}

    def infer(self, x: TensorType, *taper: TensorType, **how: AttrValue) -> TensorType:
        _check(self.name, x, taper, how)
        if how["average"] == "median" and not isinstance(x.shape[-1], int):
            raise ShapeError(f"welch: the median of segments of {x} needs a known length; use average='mean'")
        return x.with_shape((*x.shape[:-1], half_bins(how["nfft"])))

    def ref(
        self, x: np.ndarray, *taper: np.ndarray, average: str, window: str, **how: AttrValue
    ) -> np.ndarray:
        shape = taper[0].astype(np.float64) if taper else window_values(window, how["nperseg"])
        powers = _ref_powers(x, shape, **how)
        if average == "mean":
            return np.asarray(powers.mean(-2).astype(x.dtype))
        return np.asarray(np.median(powers, -2) / _median_bias(powers.shape[-2])).astype(x.dtype)

    def expand(self, x: Node, *taper: Node, average: str, window: str, **how: AttrValue) -> Node:
        return _averaged(segment_powers(x, taper_of(taper, window, how["nperseg"], x), **how), average)

    def samples(self) -> list[Sample]:
        def one(type_: str, *taper: Any, grad: bool = True, **more: object) -> Sample:
            attrs = {"nperseg": 4, "noverlap": 2, "nfft": 4, **more}
            return Sample((Arg(type_), *taper), attrs, grad=grad)

        return [
            one("f32[12]"),
            one("f32[2,17]", nperseg=5, noverlap=1, nfft=8, window="hamming", scaling="spectrum", fs=2.0),
            one("f32[12]", Arg("f32[4]", 0.5, 1.5), noverlap=3, detrend="linear"),
            one("f32[12]", detrend="none", average="median"),
            one("f32[11]", noverlap=0, average="median", nfft=7),
            one("f32[4]", window="boxcar"),
            one("f32[0,8]", grad=False),
            one("f32[n,m]", grad=False),
        ]


def frequencies(nfft: int, fs: float) -> np.ndarray:
    """The frequency of each bin of a onesided transform, as numpy.fft.rfftfreq.

    >>> frequencies(4, 8.0)
    array([0., 2., 4.])
    """
    return np.arange(nfft // 2 + 1) * (fs / nfft)


def _arranged(
    x: Operand, axis: int, name: str, window: Any, nperseg: Any, noverlap: Any, nfft: Any
) -> Tensor:
    x = at_last(x, axis, name)
    attrs, taper = segment_attrs(name, shape_of(x)[-1], window, nperseg, noverlap, nfft)
    return x, taper, attrs


def welch(
    x: Operand,
    fs: float = 1.0,
    window: Window | Operand = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: str | bool = "constant",
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[np.ndarray, Tensor]:
    """Frequencies and power spectrum by Welch's method, as scipy.signal.welch of a real signal.

    The frequencies are a NumPy array; in the spectrum, bins take the place of the time axis.

    >>> f, p = welch(np.sin(np.arange(64.0)), nperseg=16)
    >>> p.shape, float(f[p.argmax()])
    ((9,), 0.1875)
    """
    axis = normal_axis("welch", axis, len(shape_of(x)))
    x, taper, attrs = _arranged(x, axis, "welch", window, nperseg, noverlap, nfft)
    p = _welch(x, *taper, **attrs, detrend=detrend or "none", scaling=scaling, fs=fs, average=average)
    return frequencies(attrs["nfft"], fs), back_from(p, -1, axis)


# -- peaks


@declare
class _spectral_peaks(MultiOp):
    """The k highest strict local maxima along the last axis: positions times `spacing`, and values.

    Highest first; of equal ones the lower position. Where there are fewer than k, the rest is 0 at 0.
    """

    name = "spectral_peaks"
    level = Level.HIR
    arity = 1
    attrs = {"k": Attr(integer), "spacing": Attr(real, 1.0)}

    def infer(self, p: TensorType, *, k: int, spacing: float) -> TupleType:
        need_dtype(self.name, p, is_real_float)
        if p.rank < 1 or k < 1:
            raise ShapeError(f"spectral_peaks: {p} has no axis of bins, or k = {k} is not positive")
        return TupleType((p.with_shape((*p.shape[:-1], k)),) * 2)

    def ref(self, p: np.ndarray, *, k: int, spacing: float) -> tuple[np.ndarray, np.ndarray]:
        return ref_peaks(p, k, spacing)

    def expand(self, p: Node, *, k: int, spacing: float) -> tuple[Node, Node]:
        bins, last = p.shape[-1], p.rank - 1
        inner = dim_max(bins - 2, 0)
        zero = p.graph.constant(np.zeros((), p.dtype.np))
        if known_le(inner, 0) is True:
            none = broadcast_to(zero, (*p.shape[:-1], k))
            return none, none
        left, middle, right = (slice_axis(p, last, i, inner) for i in range(3))
        is_peak = logical_and(greater(middle, left), greater(middle, right))
        lowest = p.graph.constant(np.asarray(-np.inf, p.dtype.np))
        ranked = where(is_peak, middle, lowest)
        if known_le(k, inner) is not True:  # so few bins that some of the k are missing
            missing = broadcast_to(lowest, (*p.shape[:-1], k))
            ranked = concat([ranked, missing], last)
        value, position = top_k(ranked, k)
        found = value > float("-inf")
        at = (cast(position, dtype=p.dtype) + 1.0) * spacing
        return where(found, at, zero), where(found, value, zero)

    def joined(self, p: Node, *, k: int, spacing: float) -> Node | None:
        """Peaks of a mean spectrum at its own frequencies are `welch_peaks` of the signal."""
        how = dict(p.attrs)
        if p.op is not _welch or len(p.operands) != 1 or how.pop("average") != "mean":
            return None
        if spacing != how["fs"] / how["nfft"]:
            return None
        return p.graph.add(get_op("welch_peaks"), p.operands, {"k": k, **how})

    def samples(self) -> list[Sample]:
        def one(type_: str, k: int, spacing: float = 1.0, grad: bool = True) -> Sample:
            return Sample((Arg(type_, 0.0, 2.0, distinct=True),), {"k": k, "spacing": spacing}, grad=grad)

        return [
            one("f32[9]", 2),
            one("f32[3,17]", 3, 0.5),
            one("f32[0]", 2, grad=False),
            one("f32[5]", 7),
            one("f32[2]", 1),
            one("f32[0,5]", 1, grad=False),
            one("f32[n,m]", 2, grad=False),
            Sample((np.array([0, 2, 2, 1, 3, 0], np.float32),), {"k": 2}, grad=False),
        ]


def ref_peaks(p: np.ndarray, k: int, spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """The reference of `spectral_peaks`."""
    rows = p.reshape(math.prod(p.shape[:-1]), p.shape[-1])
    at, value = np.zeros((len(rows), k), p.dtype), np.zeros((len(rows), k), p.dtype)
    for r, row in enumerate(rows):
        peaks = [i for i in range(1, len(row) - 1) if row[i] > row[i - 1] and row[i] > row[i + 1]]
        for j, i in enumerate(sorted(peaks, key=lambda i: -float(row[i]))[:k]):
            at[r, j], value[r, j] = i * spacing, row[i]
    shape = (*p.shape[:-1], k)
    return at.reshape(shape), value.reshape(shape)


def spectral_peaks(p: Operand, k: int, spacing: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k highest strict local maxima along the last axis: positions times spacing, values; 0 if missing.

    >>> spectral_peaks(np.array([0.0, 2.0, 1.0, 5.0, 0.0]), 2)
    (array([3., 1.]), array([5., 2.]))
    """
    at, value = _spectral_peaks(p, k=k, spacing=spacing)
    return at, value


@declare
class _welch_peaks(MultiOp):
    """The k highest peaks of the power spectrum of [.., time]: frequencies and powers, [.., k] each.

    The same as `welch` followed by `spectral_peaks`; the gradient goes straight from peaks to segments.
    """

    name = "welch_peaks"
    level = Level.HIR
    arity = 1
    attrs = {"k": Attr(integer), **WELCH}

    def infer(self, x: TensorType, *, k: int, **how: object) -> TupleType:
        _check(self.name, x, (), how)
        if k < 1:
            raise ShapeError(f"welch_peaks: k = {k} is not positive")
        return TupleType((x.with_shape((*x.shape[:-1], k)),) * 2)

    def ref(self, x: np.ndarray, *, k: int, window: str, **how: AttrValue) -> tuple[np.ndarray, np.ndarray]:
        powers = _ref_powers(x, window_values(window, how["nperseg"]), **how)
        at, value = ref_peaks(powers.mean(-2), k, how["fs"] / how["nfft"])
        return at.astype(x.dtype), value.astype(x.dtype)

    def vjp(
        self, g: Sequence[Node | None], y: Sequence[Node], x: Node, *, k: int, **how: AttrValue
    ) -> list[Node | None]:
        incoming = g[1]
        if incoming is None:  # frequencies move in jumps
            return [None]
        segments = _segments(x.tensor, how["nperseg"], how["noverlap"])
        bins, last = half_bins(how["nfft"]), x.rank - 1
        found = cast(greater(y[1], 0.0), dtype=x.dtype)
        at = cast(round(y[0] * (how["nfft"] / how["fs"])), dtype=I64)
        spectrum = zeros((*x.shape[:-1], bins), x.dtype)
        spectrum = scatter_elements(spectrum, at, incoming * found, axis=last, reduction="add")
        each = broadcast_to(reshape(spectrum, (*x.shape[:-1], 1, bins)), (*x.shape[:-1], segments, bins))
        return [_powers_backward(each / extent_of(segments, x.dtype), x, **how)]

    def expand(self, x: Node, *, k: int, **how: AttrValue) -> tuple[Node, Node]:
        at, value = _spectral_peaks(_welch(x, **how), k=k, spacing=how["fs"] / how["nfft"])
        return at, value

    def samples(self) -> list[Sample]:
        def one(type_: str, grad: bool = True, **more: object) -> Sample:
            return Sample(
                (Arg(type_),), {"k": 2, "nperseg": 16, "noverlap": 8, "nfft": 16, **more}, grad=grad
            )

        return [
            one("f32[40]"),
            one("f32[2,33]", k=3, window="hamming", scaling="spectrum", fs=2.0, detrend="linear", nfft=21),
            one("f32[24]", window="kaiser:5.0", detrend="none"),
            one("f32[16]", k=9, window="boxcar"),
            one("f32[0,16]", grad=False),
            one("f32[n,17]", grad=False),
        ]


def _powers_backward(
    g: Node, x: Node, *, window: str, scaling: str, fs: float, nfft: int, detrend: str, **segments: AttrValue
) -> Node:
    """The gradient of `segment_powers` by the signal, of g [.., segments, bins]."""
    nperseg = segments["nperseg"]
    taper = taper_of((), window, nperseg, x)
    re, im = segment_spectra([x], taper, nfft=nfft, onesided=True, detrend=detrend, **segments)
    # the adjoint of a onesided transform counts bins once, the inverse interior ones twice, as powers do
    inward = g * (2.0 * power_scale(window_values(window, nperseg), scaling, fs))
    frames = irfft_split(re * inward, im * inward, n=nfft)
    frames = detrended(resized(frames, frames.rank - 1, nperseg) * taper, detrend)
    made: Node = fold_windows(frames, (x.shape[-1],), strides=nperseg - segments["noverlap"])
    return made


def welch_peaks(
    x: Operand,
    k: int,
    fs: float = 1.0,
    window: Window | Operand = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: str | bool = "constant",
    scaling: str = "density",
    axis: int = -1,
) -> tuple[Tensor, Tensor]:
    """Frequencies and powers of the k highest peaks of `welch`, highest first; 0 if missing.

    >>> f, p = welch_peaks(np.sin(np.arange(64.0)), 1, nperseg=16)
    >>> f
    array([0.1875])
    """
    axis = normal_axis("welch_peaks", axis, len(shape_of(x)))
    x, taper, attrs = _arranged(x, axis, "welch_peaks", window, nperseg, noverlap, nfft)
    how = {**attrs, "detrend": detrend or "none", "scaling": scaling, "fs": fs}
    if taper:  # a custom window is an operand, which only the separate steps take
        at, value = spectral_peaks(_welch(x, *taper, **how), k, fs / attrs["nfft"])
    else:
        at, value = _welch_peaks(x, k=k, **how)
    return back_from(at, -1, axis), back_from(value, -1, axis)
