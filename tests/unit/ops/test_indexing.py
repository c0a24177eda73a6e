"""Indexing of nodes is NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.errors import DTypeError, GuardError, RlxError, ShapeError
from rlx.ir.text.read import parse_graph
from rlx.ops.array.addressing import OutOfRangeError
from rlx.reference.interpreter import evaluate


def run(x: np.ndarray, index: Any, shape: tuple[Any, ...] | None = None) -> np.ndarray:
    g = rlx.Graph()
    g.output("y", g.input("x", x.shape if shape is None else shape, x.dtype)[index])
    return evaluate(g, {"x": x})["y"]


X = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)

INDICES: list[Any] = [
    0, -1, (1, 2), (1, -5, 2), slice(1, 3), slice(None, None, -1), slice(3, 0, -2), slice(-2, None),
    slice(10, 2), slice(-100, 100, 3), slice(2, 2), (Ellipsis, 1), (0, Ellipsis, slice(1)), (None, 2, None),
    (Ellipsis, None), [0, 2], np.array([[1, -1], [0, 0]]), (slice(None), [4, 0]), (1, [0, 0, 3]),
    (1, slice(None), [2, 0]), ([1, 2], slice(None), -1), (Ellipsis, [0, 2], 1), (0, None, [1, 2]),
    np.int64(2), (), [],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("shape", [(4, 5, 3), ("n", "m", "k")], ids=["static", "symbolic"])
def test_index_is_numpys(index: Any, shape: tuple[Any, ...]) -> None:
    want = X[np.asarray(index, int) if index == [] else index] if isinstance(index, list) else X[index]
    np.testing.assert_array_equal(run(X, index, shape), want)


bounds = st.one_of(st.none(), st.integers(-8, 8))
slices = st.builds(slice, bounds, bounds, st.one_of(st.none(), st.integers(-3, 3).filter(bool)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 6), slices, st.booleans())
def test_slices_clamp_as_python_does(size: int, index: slice, symbolic: bool) -> None:
    x = np.arange(size, dtype=np.int32)
    np.testing.assert_array_equal(run(x, index, ("n",) if symbolic else (size,)), x[index])


def test_index_by_a_node() -> None:
    g = rlx.Graph()
    x, i, j = g.input("x", (4, 5, 3)), g.input("i", (2, 2), "i32"), g.input("j", (), "i64")
    g.set_outputs({"a": x[i], "b": x[:, i], "c": x[j], "d": x[j, 1:, j], "e": x[j, :, i]})
    at, one = np.array([[0, -1], [2, 1]], np.int32), np.array(2)
    got = evaluate(g, {"x": X, "i": at, "j": one})
    want = [X[at], X[:, at], X[2], X[2, 1:, 2], X[2][:, at].transpose(1, 2, 0)]
    for a, b in zip(got.values(), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (4, ShapeError, "index 4 is out of range for axis 0 of size 4"),
        ((0, -6), ShapeError, "index -6 is out of range for axis 1 of size 5"),
        ((0, 0, 0, 0), ShapeError, "4 indices are too many for 3 axes"),
        ((Ellipsis, 0, Ellipsis), ShapeError, "only one '...'"),
        (slice(None, None, 0), ShapeError, "must be a number that is not 0"),
        (X[..., 0] > 1, DTypeError, "boolean mask"),
        (True, DTypeError, "boolean mask"),
        (np.array([0.5]), DTypeError, "must hold integers, not float64"),
        (([0], [1]), ShapeError, "gather_nd"),
        (1.5, RlxError, "float is not an index"),
    ],
)
def test_refusals(index: Any, error: type[RlxError], text: str) -> None:
    with pytest.raises(error, match=text.replace("...", r"\.\.\.").replace("(", r"\(")):
        run(X, index)


def test_an_integer_beyond_a_symbolic_size_is_a_guard() -> None:
    np.testing.assert_array_equal(run(X, (3, 0), ("n", 5, 3)), X[3, 0])
    with pytest.raises(GuardError, match="n is at least 4"):
        run(X[:3], (3, 0), ("n", 5, 3))


def test_an_index_out_of_range_is_reported() -> None:
    with pytest.raises(OutOfRangeError, match="gather: index 7 is out of range for an axis of size 4"):
        rlx.ops.gather(X, [0, 7])


BEYOND = {
    "steps": "starts=(0,), sizes=({n},), steps=(1000,)",
    "starts": "starts=({n},), sizes=({n},), steps=(1,)",
    "sizes": "starts=(0,), sizes=({2*n},), steps=(1,)",
    "backwards": "starts=(0,), sizes=({n},), steps=(-1,)",
}


@pytest.mark.parametrize("attrs", BEYOND.values(), ids=BEYOND)
def test_a_slice_that_may_leave_its_axis_is_guarded(attrs: str) -> None:
    """Of a text graph, say: what cannot be proved for all sizes is checked at those of a run."""
    size = "2*n" if "2*n" in attrs else "n"
    text = f"""graph "beyond" {{
  %0 = input() {{name="x", type=f32[n]}} : f32[n]
  %1 = slice(%0) {{{attrs}}} : f32[{size}]
  %2 = exp(%1) : f32[{size}]
  output "y" = %2
}}"""
    program = rlx.compile(parse_graph(text))
    with pytest.raises(GuardError):
        program.run({"x": np.ones(9, np.float32)})
    assert program.run({"x": np.ones(0, np.float32)})["y"].shape == (0,)  # which reads nothing
