"""Tapering windows of signals, by name as SciPy calls them: hann, hamming, blackman, kaiser and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from rlx.errors import OpAttributeError
from rlx.ir.attr import Attr, boolean, dim, dtype_kind, reals
from rlx.ir.dim import Dim
from rlx.ir.dtype import F64, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Level, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Tensor
from rlx.ir.types import TensorType
from rlx.ops.math.elementwise import cast, cos, maximum
from rlx.ops.nn.sampling import extent_of, positions
from rlx.ops.rules import is_real_float, need_dtype

# windows that are a sum of cosines: coefficients of cos(0), -cos(t), cos(2t), ...
Window: TypeAlias = str | tuple[str | float, ...]
"""A window by its name: "hann", ("kaiser", 8.6) or "kaiser:8.6"."""

COSINES = {
    "boxcar": (1.0,),
    "hann": (0.5, 0.5),
    "hamming": (0.54, 0.46),
    "blackman": (0.42, 0.5, 0.08),
    "nuttall": (0.3635819, 0.4891775, 0.1365995, 0.0106411),
    "blackmanharris": (0.35875, 0.48829, 0.14128, 0.01168),
    "flattop": (0.21557895, 0.41663158, 0.277263158, 0.083578947, 0.006947368),
}


def _cosines(t: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    terms = [c * np.cos(k * t) * (-1) ** k for k, c in enumerate(coefficients)]
    return np.asarray(np.sum(terms, axis=0))


@declare
class _cosine_window(Op):
    """A window that is a sum of cosines, for sizes known only when the program runs too."""

    name = "cosine_window"
    level = Level.HIR
    arity = 0
    attrs = {
        "n": Attr(dim),
        "coefficients": Attr(reals),
        "periodic": Attr(boolean, True),
        "dtype": Attr(dtype_kind, "f32"),
    }
    not_differentiable = "it depends on no value"

    def infer(self, *, n: Dim, coefficients: Sequence[float], periodic: bool, dtype: DType) -> TensorType:
        out = TensorType(dtype, (n,))
        need_dtype(self.name, out, is_real_float)
        return out

    def ref(self, *, n: int, coefficients: Sequence[float], periodic: bool, dtype: DType) -> np.ndarray:
        if n <= 1:
            return np.ones(n, dtype.np)
        return _cosines(np.arange(n) * (2 * np.pi / (n if periodic else n - 1)), coefficients).astype(
            dtype.np
        )

    def expand(self, *, n: Dim, coefficients: Sequence[float], periodic: bool, dtype: DType) -> Node:
        size, at = extent_of(n, F64), positions(n, F64)
        steps = size if periodic else size - 1.0
        steps = max(steps, 1.0) if isinstance(steps, float) else maximum(steps, 1.0)
        t = (at * (2 * math.pi)) / steps
        total: Tensor = at * 0.0 + coefficients[0]
        for k, c in enumerate(coefficients[1:], 1):
            total = total + cos(t * float(k)) * (c * (-1) ** k)
        only = minimum_one(size)  # a single element is 1
        made: Node = cast(total * (1.0 - only) + only, dtype=dtype)
        return made

    def samples(self) -> list[Sample]:
        out = [
            Sample((), {"n": n, "coefficients": COSINES[name], "periodic": periodic})
            for name, n, periodic in (("hann", 8, True), ("blackman", 7, False), ("boxcar", 1, True))
        ]
        return [*out, Sample((), {"n": 0, "coefficients": (0.5, 0.5), "dtype": "f64"})]


def minimum_one(size: Tensor) -> Tensor:
    """1 where a size is 1 (or 0), else 0."""
    return maximum(2.0 - size, 0.0) if isinstance(size, Node) else float(size <= 1)


def parse_window(window: Window) -> tuple[str, float | None]:
    """A window's name and parameter: "hann", ("kaiser", 8.6) or "kaiser:8.6"."""
    text = window if isinstance(window, str) else ":".join(map(str, window))
    name, colon, rest = text.partition(":")
    known = [*COSINES, "bartlett", "cosine", "kaiser"]
    if name not in known or bool(colon) != (name == "kaiser"):
        raise OpAttributeError(f"unknown window {window!r}; use {', '.join(known)} (as 'kaiser:beta')")
    try:
        return name, float(rest) if colon else None
    except ValueError:
        raise OpAttributeError(f"the parameter of the window {window!r} is not a number") from None


def window_values(window: Window, n: int, periodic: bool = True) -> np.ndarray:
    """The n elements of a window in f64; a periodic one is the first n of a symmetric one of n + 1."""
    name, parameter = parse_window(window)
    if n <= 1:
        return np.ones(n)
    steps = n if periodic else n - 1
    t = np.arange(n)
    if name in COSINES:
        return _cosines(t * (2 * np.pi / steps), COSINES[name])
    if name == "bartlett":
        return np.asarray(1 - np.abs(2 * t / steps - 1))
    if name == "cosine":
        return np.asarray(np.sin(np.pi * (t + 0.5) / (steps + 1)))
    assert parameter is not None
    return np.asarray(np.i0(parameter * np.sqrt(1 - (2 * t / steps - 1) ** 2)) / np.i0(parameter))


def get_window(window: Window, n: Dim, periodic: bool = True, dtype: DTypeLike = "f32") -> Tensor:
    """A window of n elements by name, as scipy.signal.get_window; n may be symbolic for sums of cosines.

    boxcar, hann, hamming, blackman, nuttall, blackmanharris, flattop, bartlett, cosine, ("kaiser", beta).

    >>> get_window("hann", 4)
    array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    if isinstance(n, (int, np.integer)):
        return window_values(window, int(n), periodic).astype(_np(dtype))
    name, _ = parse_window(window)
    if name not in COSINES:
        raise OpAttributeError(f"the window {window!r} needs a size that is a number, not {n}")
    return _cosine_window(n=n, coefficients=COSINES[name], periodic=periodic, dtype=dtype)


def _np(d: DTypeLike) -> np.dtype:
    return dtype(d).np


def hann_window(n: Dim, periodic: bool = True, dtype: DTypeLike = "f32") -> Tensor:
    """The Hann window.

    >>> hann_window(4)
    array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    return get_window("hann", n, periodic, dtype)


def hamming_window(n: Dim, periodic: bool = True, dtype: DTypeLike = "f32", alpha: float = 0.54) -> Tensor:
    """The Hamming window alpha - (1 - alpha) * cos(t); ONNX has alpha = 25 / 46.

    >>> hamming_window(2)
    array([0.08, 1.  ], dtype=float32)
    """
    return _cosine_window(n=n, coefficients=(alpha, 1 - alpha), periodic=periodic, dtype=dtype)


def blackman_window(n: Dim, periodic: bool = True, dtype: DTypeLike = "f32") -> Tensor:
    """The Blackman window.

    >>> blackman_window(3, periodic=False).round(2)
    array([-0.,  1., -0.], dtype=float32)
    """
    return get_window("blackman", n, periodic, dtype)


def kaiser_window(n: int, beta: float = 12.0, periodic: bool = True, dtype: DTypeLike = "f32") -> Tensor:
    """The Kaiser window with shape beta.

    >>> kaiser_window(3, 0.0)
    array([1., 1., 1.], dtype=float32)
    """
    return get_window(("kaiser", beta), n, periodic, dtype)
