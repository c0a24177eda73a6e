"""Shape arithmetic as torch's exporters write it: one native program for every size, as NumPy computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import parser  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import GuardError, RlxError  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")

SIZES = ((4, 8), (1, 3), (6, 5))


def model(inputs: str, nodes: str, output: str = "float[K] y") -> Any:
    """A model of opset 18; c0, c1, ... and m1 (for -1) are vectors of one integer, s0, s1, ... scalars."""
    constants = "".join(
        f"c{i} = Constant <value_ints = [{i}]> () s{i} = Constant <value_int = {i}> () " for i in range(5)
    )
    constants += (
        "m1 = Constant <value_ints = [-1]> () far = Constant <value_ints = [9223372036854775807]> () "
    )
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => ({output}) {{ {constants} {nodes} }}'
    return parser.parse_model(text)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def strided_positions(x: np.ndarray) -> np.ndarray:
    half = (x.shape[1] - 1) // 2 + 1
    return np.arange(half).astype(np.int64)


def same_padding(x: np.ndarray) -> np.ndarray:
    """What a window of 3 at stride 2 lacks; the sum is negative before it is halved for no size here."""
    n = x.shape[1]
    lacks = (-(-n // 2) - 1) * 2 + 1 - n
    return np.pad(x, ((0, 0), (2 + int(lacks / 2), 0)))


def windows(x: np.ndarray) -> np.ndarray:
    """The batch is found again by dividing the number of windows by their number per row."""
    return x.reshape(x.shape[0], -1, 1)


APPENDING = """
    t = Transpose (x) n = Shape <start = 1> (x) trips = Squeeze (n, c0) go = Constant <value = bool {1}> ()
    b = Shape <end = 1> (x) h0 = ConstantOfShape (b) empty = SequenceEmpty ()
    h, ys = Loop (trips, go, h0, empty) <body = step (int64 i, bool on, float[B] before, seq(float[B]) some)
        => (bool on2, float[B] after, seq(float[B]) more) {
            on2 = Identity (on) row = Gather <axis = 0> (t, i) after = Add (before, row)
            more = SequenceInsert (some, after) }>
"""

BLOCKS: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = {
    "size of a strided convolution (h - 1 towards zero by 2, plus 1)": (
        """s = Shape <start = 1> (x) n = Squeeze (s, c0) a = Sub (n, s1) d = Div (a, s2) e = Add (d, s1)
           y = Range (s0, e, s1)""",
        "int64[K] y",
        strided_positions,
    ),
    "padding computed from a quotient of unknown sign": (
        """n = Shape <start = 1> (x) p = Add (n, c1) o = Div (p, c2) o1 = Sub (o, c1) o2 = Mul (o1, c2)
           o3 = Add (o2, c1) l = Sub (o3, n) h = Div (l, c2) w = Add (h, c2)
           pads = Concat <axis = 0> (c0, w, c0, c0) y = Pad (x, pads)""",
        "float[B, K] y",
        same_padding,
    ),
    "a size divided by sizes": (
        """s = Shape (x) n = Shape <start = 1> (x) all = ReduceProd (s) b = Div (all, n)
           to = Concat <axis = 0> (b, n, c1) y = Reshape (x, to)""",
        "float[B, K, 1] y",
        windows,
    ),
    "sizes scattered into a shape": (
        """s = Shape (x) n = Shape <start = 1, end = 2> (x) t = ScatterElements <axis = 0> (s, c0, n)
           v = Constant <value_float = 1.0> () y = Expand (v, t)""",
        "float[K, N] y",
        lambda x: np.ones((x.shape[1], x.shape[1]), np.float32),
    ),
    "the last n columns": (
        """n = Shape <start = 0, end = 1> (x) m = Neg (n) z = Concat <axis = 1> (x, x, x, x, x, x)
           y = Slice (z, m, far, c1)""",
        "float[B, K] y",
        lambda x: np.tile(x, 6)[:, -len(x) :],
    ),
    "from the end or the start, by the remainder of a size": (
        """n = Shape <start = 1> (x) h = Div (n, c2) d = Mul (h, c2) r = Sub (d, n)
           y = Slice (x, r, far, c1)""",
        "float[B, K] y",
        lambda x: x[:, -(x.shape[1] % 2) :],
    ),
    "values at a mask": (
        """z = Constant <value_float = 0.0> () m = Greater (x, z) at = NonZero (m) to = Transpose (at)
           flat = Reshape (m, m1) i = Cast <to = 7> (flat) count = ReduceSum (i) v = Expand (z, count)
           y = ScatterND (x, to, v)""",
        "float[B, N] y",
        lambda x: np.where(x > 0, np.float32(0), x),
    ),
    "a size times 1.7, rounded down": (
        """n = Shape <start = 1> (x) f = Cast <to = 1> (n) r = Constant <value_floats = [1.7]> ()
           p = Mul (f, r) g = Floor (p) i = Cast <to = 7> (g) v = Constant <value_float = 1.0> ()
           y = Expand (v, i)""",
        "float[K] y",
        lambda x: np.ones(int(np.float32(x.shape[1]) * np.float32(1.7)), np.float32),
    ),
    "a triangle whose diagonal is a size": (
        """b = Shape <end = 1> (x) o = Sub (b, c1) k = Squeeze (o, c0) y = Trilu <upper = 1> (x, k)""",
        "float[B, N] y",
        lambda x: np.triu(x, x.shape[0] - 1),
    ),
    "a lower triangle": (
        """b = Shape <end = 1> (x) k = Squeeze (b, c0) y = Trilu <upper = 0> (x, k)""",
        "float[B, N] y",
        lambda x: np.tril(x, x.shape[0]),
    ),
    "a range by a size": (
        """s = Shape (x) t = ReduceProd <keepdims = 0> (s) n = Gather <axis = 0> (s, s1)
           y = Range (s0, t, n)""",
        "int64[K] y",
        lambda x: np.arange(0, x.size, x.shape[1]),
    ),
    "the last row beside all rows": (
        """last = Slice (x, m1, far, c0) a = Mul (x, last) b = Greater (a, last) z = Sub (last, x)
           y = Where (b, last, z)""",
        "float[B, N] y",
        lambda x: np.where(x * x[-1:] > x[-1:], x[-1:], x[-1:] - x),
    ),
    "the first row, repeated": (
        """row = Slice (x, c0, c1, c0) s = Shape (x) y = Expand (row, s)""",
        "float[B, N] y",
        lambda x: np.broadcast_to(x[:1], x.shape),
    ),
    "a shape of one row, for many": (
        """row = Slice (x, c0, c1, c0) s = Shape (row) y = Expand (x, s)""",
        "float[B, N] y",
        lambda x: x,
    ),
    "branches of other sizes, by a size": (
        """n = Shape <start = 1> (x) k = Squeeze (n, c0) long = Greater (k, s4)
           z = If (long) <then_branch = a () => (float[P, Q] p) { p = Slice (x, c0, c4, c1) },
                          else_branch = b () => (float[P, Q] q) { q = Neg (x) }>
           y = ReduceSum <keepdims = 0> (z, c1)""",
        "float[B] y",
        lambda x: (x[:, :4] if x.shape[1] > 4 else -x).sum(1),
    ),
    "elements appended in a loop, stacked": (
        APPENDING + "y = ConcatFromSequence <axis = 1, new_axis = 1> (ys)",
        "float[B, K] y",
        lambda x: np.cumsum(x, 1),
    ),
    "elements appended in a loop, joined": (
        APPENDING + "y = ConcatFromSequence <axis = 0> (ys)",
        "float[K] y",
        lambda x: np.cumsum(x, 1).T.reshape(-1),
    ),
    "how many were appended, and the last": (
        APPENDING
        + """count = SequenceLength (ys) f = Cast <to = 1> (count) at = Constant <value_int = -1> ()
             last = SequenceAt (ys, at) y = Add (last, f)""",
        "float[B] y",
        lambda x: x.sum(1) + x.shape[1],
    ),
    "a diagonal of an open size": (
        """t = Transpose (x) p = MatMul (x, t) y = Einsum <equation = "ii->i"> (p)""",
        "float[B] y",
        lambda x: np.einsum("ii->i", x @ x.T),
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str) -> None:
    nodes, output, expected = BLOCKS[name]
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x", nodes, output)))
    assert not program.stats["host_thunks"]
    for size in SIZES:
        x = floats(*size)
        np.testing.assert_allclose(program.run({"x": x})["y"], expected(x), rtol=1e-5, atol=1e-5)


def test_a_size_that_would_be_cut_to_zero_is_refused() -> None:
    """(0 - 1) / 2 is 0 in ONNX, not the -1 that its author meant: neither is computed silently."""
    nodes, output, _ = BLOCKS["size of a strided convolution (h - 1 towards zero by 2, plus 1)"]
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x", nodes, output)))
    with pytest.raises(GuardError, match="N-1 is at least 0"):
        program.run({"x": floats(2, 0)})


def test_a_row_that_is_not_there_is_refused() -> None:
    nodes = "row = Slice (x, c0, c1, c0) y = Add (row, z)"
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x, float[K, N] z", nodes, "float[K, N] y")))
    for rows, others in ((2, 4), (1, 1), (3, 0), (0, 0)):
        x, z = floats(rows, 3), floats(others, 3)
        np.testing.assert_array_equal(program.run({"x": x, "z": z})["y"], x[:1] + z)
    with pytest.raises(GuardError, match=r"min\(B,1\) is at least min\(K,1\)"):
        program.run({"x": floats(0, 3), "z": floats(2, 3)})


def test_a_sequence_of_appended_elements_is_an_output() -> None:
    from rlx import onnx_backend

    x = floats(2, 3)
    prepared = onnx_backend.prepare(model("float[B, N] x", APPENDING, "seq(float[B]) ys"))
    (got,) = prepared.run([x])
    assert isinstance(got, list)
    np.testing.assert_allclose(np.stack(got, 1), np.cumsum(x, 1), rtol=1e-5, atol=1e-5)
    whole = rlx.compile(rlx.from_onnx(model("float[B, N] x", APPENDING, "seq(float[B]) ys")))
    np.testing.assert_allclose(whole.run({"x": x})["ys"].T, np.cumsum(x, 1), rtol=1e-5, atol=1e-5)


def test_sizes_times_fractions() -> None:
    """90 times 1.3 is below 117 in f32, where 10 times 1.3 is 13: only the run finds that size."""
    nodes = """n = Shape <start = 1> (x) f = Cast <to = 1> (n) r = Constant <value_floats = [1.3]> ()
               p = Mul (r, f) i = Cast <to = 7> (p) v = Constant <value_float = 1.0> () y = Expand (v, i)"""
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x", nodes)))
    for columns in (10, 90, 91):
        size = int(np.float32(columns) * np.float32(1.3))
        assert program.run({"x": floats(1, columns)})["y"].shape == (size,)
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x", nodes.replace("[1.3]", "[0.6]"))))
    for columns in (5, 10, 25, 999):
        size = int(np.float32(columns) * np.float32(0.6))
        assert program.run({"x": floats(1, columns)})["y"].shape == (size,)
    with pytest.raises(GuardError, match=r"-N\+16384 is at least 0"):
        program.run({"x": floats(1, 20_000)})


@pytest.mark.parametrize(("scale", "size", "want"), [(1.3, 20, 26), (0.7, 10, 7), (0.3, 10, 3), (2.5, 3, 7)])
def test_resize_by_a_decimal(scale: float, size: int, want: int) -> None:
    """The scale is a float of 32 bits; torch and ONNX Runtime take it for the decimal that it was."""
    nodes = f"roi = Constant <value_floats = [0.0]> () r = Constant <value_floats = [1.0, {scale}]> ()"
    nodes += ' y = Resize <mode = "linear"> (x, , r)'
    for columns in ("N", str(size)):
        program = rlx.compile(rlx.from_onnx(model(f"float[B, {columns}] x", nodes, "float[B, K] y")))
        assert program.run({"x": floats(2, size)})["y"].shape == (2, want)


def test_division_by_a_size_of_zero_is_refused() -> None:
    nodes = "n = Shape <start = 1> (x) q = Div (c4, n) v = Constant <value_float = 1.0> () y = Expand (v, q)"
    program = rlx.compile(rlx.from_onnx(model("float[B, N] x", nodes)))
    assert program.run({"x": floats(1, 2)})["y"].shape == (2,)
    with pytest.raises(RlxError, match="4//N must be positive"):
        program.run({"x": floats(2, 0)})
