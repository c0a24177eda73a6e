"""Every public op with an axis takes a negative one, which counts from the end, and refuses others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import RlxError
from rlx.ir.tree import flatten
from rlx.reference.interpreter import evaluate

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
AT = np.array([1, 0])
ROWS = np.ones((2, 3, 1), np.float32)
PLACES = np.array([[[1, 0, 2, 1, 1, 0, 0, 2]]] * 2)
SCALE, ZERO = np.array([0.1, 0.2, 0.3], np.float32), np.array([1, 0, 2], np.int8)

# op -> (axis from the front, what calls it with an axis): x has shape [2, 3, 8].
CASES: dict[str, tuple[int, Callable[[Any, int], Any]]] = {
    "append": (1, lambda x, a: ops.append(x, x[:, :1], 0, a)),
    "compress": (1, lambda x, a: ops.compress(np.array([True, False, True]), x, a)),
    "concat": (1, lambda x, a: ops.concat([x, x], a)),
    "dequantize": (1, lambda x, a: ops.dequantize(ops.cast(x, "i8"), SCALE, ZERO, axis=a)),
    "dft": (1, lambda x, a: ops.dft(ops.stack([x, x], -1), axis=a if a >= 0 else a - 1)),
    "diagonal": (1, lambda x, a: ops.diagonal(x, 0, 2, a)),
    "dynamic_slice": (1, lambda x, a: ops.dynamic_slice(x, [1], [2], axes=(a,))),
    "dynamic_update_slice": (1, lambda x, a: ops.dynamic_update_slice(x, x[:, :2], [1], axes=(a,))),
    "expand_dims": (3, ops.expand_dims),
    "fake_quantize": (1, lambda x, a: ops.fake_quantize(x, SCALE, ZERO, axis=a)),
    "gather": (1, lambda x, a: ops.gather(x, AT, a)),
    "gather_elements": (1, lambda x, a: ops.gather_elements(x, PLACES, a)),
    "iota": (1, lambda x, a: x + ops.cast(ops.iota((2, 3, 8), axis=a), "f32")),
    "irfft": (2, lambda x, a: ops.irfft(ops.rfft(x, axis=2), axis=a)),
    "layer_norm": (2, lambda x, a: ops.layer_norm(x, axis=a)),
    "one_hot": (1, lambda x, a: ops.one_hot(PLACES[0], 4, axis=a)),
    "quantize": (1, lambda x, a: ops.quantize(x, SCALE, ZERO, axis=a)),
    "repeat": (1, lambda x, a: ops.repeat(x, 2, a)),
    "resize": (1, lambda x, a: ops.resize(x, size=(6,), axes=(a,))),
    "rms_norm": (2, lambda x, a: ops.rms_norm(x, axis=a)),
    "roll": (1, lambda x, a: ops.roll(x, 1, a)),
    "scatter": (1, lambda x, a: ops.scatter(x, AT, x[:, :2], a)),
    "scatter_elements": (1, lambda x, a: ops.scatter_elements(x, PLACES, x[:, :1], a)),
    "slice_axis": (1, lambda x, a: ops.slice_axis(x, a, 1, 2)),
    "split": (2, lambda x, a: ops.split(x, 2, a)),
    "squeeze": (1, lambda x, a: ops.squeeze(x[:, :1], a)),
    "stack": (1, lambda x, a: ops.stack([x, x], a if a >= 0 else a - 1)),
    "stft": (2, lambda x, a: ops.stft(x, nperseg=4, axis=a)),
    "swapaxes": (1, lambda x, a: ops.swapaxes(x, a, 0)),
    "take": (1, lambda x, a: ops.take(x, AT, a)),
    "take_along_axis": (1, lambda x, a: ops.take_along_axis(x, PLACES, a)),
    "top_k": (2, lambda x, a: ops.top_k(x, 2, a)),
    "transpose": (2, lambda x, a: ops.transpose(x, (0, a, 1))),
    "unique": (1, lambda x, a: ops.unique(x, axis=a)),
    "write_pages": (
        2,
        lambda x, a: ops.write_pages(x[..., None], ROWS, AT, a if a >= 0 else a - 1),
    ),
    "welch": (2, lambda x, a: ops.welch(x, nperseg=4, axis=a)[1]),
    "welch_peaks": (2, lambda x, a: ops.welch_peaks(x, 2, nperseg=4, axis=a)),
}
# Theirs are names of axes of a mesh.
MESH = ("all_gather", "all_reduce", "all_to_all", "broadcast", "rank_index", "reduce_scatter")
FLAGS = ("all", "any")


def parameters(name: str) -> list[str]:
    f = getattr(ops, name)
    return list(f.attrs if isinstance(f, rlx.ir.op.Op) else inspect.signature(f).parameters)


AXIAL = sorted(n for n in ops.__all__ if {"axis", "axes", "axis1"} & set(parameters(n)) and n not in MESH)


def call(name: str) -> tuple[int, Callable[[Any, int], Any]]:
    if name in CASES:
        return CASES[name]
    if name in FLAGS:
        return 1, lambda x, a: getattr(ops, name)(x > 0.0, axis=a)
    return 1, lambda x, a: getattr(ops, name)(x, axis=a)


def computed(f: Callable[[Any, int], Any], axis: int) -> list[np.ndarray]:
    """Results on a node, which has no array to ask for its rank."""
    g = rlx.Graph("axes")
    x = g.input("x", X.shape, "f32")
    with g.building():
        for i, y in enumerate(flatten(f(x, axis))[0]):
            g.output(f"y{i}", y)
    return list(evaluate(g, {"x": X}).values())


@pytest.mark.parametrize("name", AXIAL)
def test_a_negative_axis_counts_from_the_end(name: str) -> None:
    axis, f = call(name)
    for way in (computed, lambda f, a: [np.asarray(y) for y in flatten(f(X, a))[0]]):
        here, there = way(f, axis), way(f, axis - (4 if name == "expand_dims" else 3))
        for a, b in zip(here, there, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", AXIAL)
@pytest.mark.parametrize("axis", [7, -7])
def test_an_axis_out_of_range_is_refused(name: str, axis: int) -> None:
    with pytest.raises(RlxError, match=r"ax[ei]s"):
        computed(call(name)[1], axis)


def test_argmax_of_everything() -> None:
    assert ops.argmax(X).item() == X.argmax() and ops.argmin(X).item() == X.argmin()
    assert ops.argmax(X, keepdims=True).shape == (1, 1, 1)
