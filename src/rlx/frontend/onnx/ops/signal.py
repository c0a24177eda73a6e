"""Fourier transforms, windows and mel filters."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

D = TypeVar("D", bound=Dim | float)

MOST_POINTS = 1 << 24
"""Points of a window or filter."""


@onnx_op("DFT", since=17)
def dft_by_attribute(n: Call) -> Outputs:
    return transformed(n, int(n.attr("axis", 1)))


@onnx_op("DFT", since=20)
def dft(n: Call) -> Outputs:
    return transformed(n, n.integer(2) if n.value(2) is not None else -2)


def transformed(n: Call, axis: int) -> Node:
    x = n[0]
    size = n.size(1) if n.value(1) is not None else None
    return ops.dft(x, normal_axis("DFT", axis, x.rank), size, n.flag("inverse"), n.flag("onesided"))


@onnx_op("STFT", since=17)
def stft(n: Call) -> Outputs:
    length = n.integer(3) if n.value(3) is not None else None
    x = n[0]
    if x.rank == 2:  # a real signal may leave its last axis out
        x = ops.expand_dims(x, 2)
    return ops.stft_pairs(x, n.integer(1), n.get(2), length, n.flag("onesided", 1))


def check_count(n: D) -> D:
    """Tables are computed while importing, so their sizes must be sensible."""
    if isinstance(n, int) and not 0 <= n <= MOST_POINTS:
        raise ModelImportError(f"its size {n} is not between 0 and {MOST_POINTS}")
    return n


@onnx_op("HannWindow", "HammingWindow", "BlackmanWindow", since=17)
def window(n: Call) -> Outputs:
    size, periodic = check_count(n.size(0)), n.flag("periodic", 1)
    kind = n.dtype("output_datatype", 1)
    if n.proto.op_type == "HammingWindow":
        return ops.hamming_window(size, periodic, kind, alpha=25 / 46)
    make = ops.hann_window if n.proto.op_type == "HannWindow" else ops.blackman_window
    made = make(size, periodic, kind)
    return n.constant(made) if isinstance(made, np.ndarray) else made


@onnx_op("MelWeightMatrix", since=17)
def mel_weight_matrix(n: Call) -> Outputs:
    bins, length, rate = (check_count(n.integer(i)) for i in range(3))
    low, high = (float(n.array(i).reshape(-1)[0]) for i in (3, 4))
    kind = n.dtype("output_datatype", 1)
    return n.importer.constant(
        np.asarray(ops.mel_weight_matrix(bins, length, rate, low, high, kind.np)), n.label
    )
