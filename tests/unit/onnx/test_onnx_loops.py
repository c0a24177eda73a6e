"""ONNX loops as exporters write them: counters and weights that are carried, slices at the counter, data that
end a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import numpy_helper, parser  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import ModelImportError  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")


def parse(text: str, opset: int = 13, **weights: np.ndarray) -> Any:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def ops_of(graph: Any) -> set[str]:
    return {n.op.name for n in graph.nodes}


def compiled(model: Any) -> Any:
    """The program of a model, which has no host thunks."""
    program = rlx.compile(rlx.from_onnx(model), threads=1)
    assert program.stats["host_thunks"] == []
    return program


RECURRENT = """
main (float[B, T, 4] x) => (float[B, T, 4] y, float[B, 4] last) {
    rows = Transpose <perm = [1, 0, 2]> (x)
    shape = Shape (rows)
    steps32 = Cast <to = 6> (shape)
    zero = Constant <value = int64[1] {0}> ()
    one = Constant <value = int64[1] {1}> ()
    first = Slice (steps32, zero, one, zero)
    n = Squeeze (first, zero)
    n_float = Cast <to = 1> (n)
    none = Constant <value = float {0}> ()
    go = Less (none, n_float)
    begin = Constant <value = int32 {0}> ()
    start = ReduceSum <keepdims = 0> (rows, zero)
    h0 = Mul (start, none)
    i_end, h_end, n_end, w_end, all = Loop ("", go, begin, h0, n, w) <
        body = step (int64 count, bool on, int32 i, float[B, 4] h, int32 limit, float[4, 4] v)
            => (bool again, int32 i_next, float[B, 4] h_next, int32 limit, float[4, 4] v, float[B, 4] out) {
        step_one = Constant <value = int32 {1}> ()
        i_next = Add (i, step_one)
        row = Gather (rows, i)
        mixed = MatMul (h, v)
        sum = Add (mixed, row)
        h_next = Tanh (sum)
        out = Identity (h_next)
        left = Cast <to = 1> (i_next)
        right = Cast <to = 1> (limit)
        again = Less (left, right)
    }>
    y = Transpose <perm = [1, 0, 2]> (all)
    i_float = Cast <to = 1> (i_end)
    by_steps = Mul (h_end, i_float)
    last = Identity (by_steps)
}
"""


def test_a_while_that_counts_is_a_scan() -> None:
    """As TensorFlow's exporter writes a recurrent layer: no number of trips, a counter that is compared with
    a size, weights handed from step to step."""
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    model = parse(RECURRENT, w=w)
    graph = rlx.from_onnx(model)
    (scan,) = (n for n in graph.nodes if n.bodies)
    assert scan.op.name == "scan" and str(scan.attrs["length"]) == "T" and scan.attrs["carries"] == 1
    program = compiled(model)
    for batch, steps in ((1, 3), (2, 7), (3, 1)):
        x = np.random.default_rng(steps).normal(size=(batch, steps, 4)).astype(np.float32)
        h, rows = np.zeros((batch, 4), np.float32), []
        for t in range(steps):
            h = np.tanh(h @ w + x[:, t])
            rows.append(h)
        out = program.run({"x": x})
        np.testing.assert_allclose(out["y"], np.stack(rows, 1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out["last"], h * steps, rtol=1e-5, atol=1e-6)


def test_a_scan_of_no_steps() -> None:
    program = compiled(parse(RECURRENT, w=np.eye(4, dtype=np.float32)))
    out = program.run({"x": np.ones((2, 0, 4), np.float32)})
    assert out["y"].shape == (2, 0, 4) and out["last"].tolist() == [[0] * 4] * 2


SET_VALUE = """
main (float[B, 3] x) => (float[B, N, 3] y) {
    batch_shape = Shape (x)
    zero1 = Constant <value = int64[1] {0}> ()
    one1 = Constant <value = int64[1] {1}> ()
    batch = Slice (batch_shape, zero1, one1)
    rest = Constant <value = int64[2] {601, 3}> ()
    full = Concat <axis = 0> (batch, rest)
    buffer = ConstantOfShape (full)
    last = Constant <value = int64[1] {600}> ()
    begin = Constant <value = int64[1] {0}> ()
    most = Constant <value = int64[1] {1024}> ()
    last_float = Cast <to = 1> (last)
    one_float = Constant <value = float[1] {1}> ()
    count_float = Add (last_float, one_float)
    count = Cast <to = 7> (count_float)
    go = Less (begin, count)
    i_end, x_end, last_end, y = Loop (most, go, begin, x, last, buffer) <
        body = step (int64 number, bool on, int64[1] i, float[B, 3] v, int64[1] limit, float[B, 601, 3] b)
               => (bool again, int64[1] i_out, float[B, 3] v_out, int64[1] limit, float[B, 601, 3] b_next) {
        f_one = Constant <value = float[1] {1}> ()
        axis = Constant <value = int64[1] {1}> ()
        i_float = Cast <to = 1> (i)
        i_more = Add (i_float, f_one)
        i_next = Cast <to = 7> (i_more)
        b_shape = Shape (b)
        size = Gather <axis = 0> (b_shape, axis)
        end = Min (size, i_next)
        old = Slice (b, i, end, axis, axis)
        old_shape = Shape (old)
        value = Unsqueeze (v, axis)
        scaled = Mul (value, i_float)
        wide = Expand (scaled, old_shape)
        at = Squeeze (i)
        at_end = Squeeze (end)
        by = Squeeze (axis)
        range = Range (at, at_end, by)
        dims = Constant <value = int64[3] {1, -1, 1}> ()
        column = Reshape (range, dims)
        i_zero = Constant <value = int64[1] {0}> ()
        i_two = Constant <value = int64[1] {2}> ()
        i_three = Constant <value = int64[1] {3}> ()
        front = Slice (old_shape, i_zero, axis)
        back = Slice (old_shape, i_two, i_three)
        repeats = Concat <axis = 0> (front, axis, back)
        places = Tile (column, repeats)
        b_next = ScatterElements <axis = 1> (b, places, wide)
        limit_float = Cast <to = 1> (limit)
        limit_more = Add (limit_float, f_one)
        limit_next = Cast <to = 7> (limit_more)
        less = Less (i_next, limit_next)
        less_number = Cast <to = 7> (less)
        less_same = Add (less_number, i_zero)
        again = Cast <to = 9> (less_same)
        i_wide = Unsqueeze (i_next, i_zero)
        i_same = Add (i_wide, i_zero)
        i_out = Squeeze (i_same, i_zero)
        f_zero = Constant <value = float[1] {0}> ()
        v_wide = Unsqueeze (v, i_zero)
        v_same = Add (v_wide, f_zero)
        v_out = Squeeze (v_same, i_zero)
    }>
}
"""


def test_slices_at_a_counter() -> None:
    """As Paddle's exporter writes `buffer[:, i] = value` in a loop; values pass through + 0."""
    model = parse(SET_VALUE)
    (scan,) = (n for n in rlx.from_onnx(model).nodes if n.bodies)
    assert scan.op.name == "scan" and scan.attrs["length"] == 601 and scan.attrs["carries"] == 1
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    want = np.arange(601, dtype=np.float32)[None, :, None] * x[:, None]
    np.testing.assert_array_equal(compiled(model).run({"x": x})["y"], want)


BY_STEP = """
main (float[T, 3] x) => (float[T, 1, 3] y) {{
    shape = Shape (x)
    at = Constant <value = int64 {{0}}> ()
    trips = Gather (shape, at)
    go = Constant <value = bool {{1}}> ()
    y = Loop (trips, go) <
        body = step (int64 i, bool on) => (bool on, float[1, 3] row) {{
        one = Constant <value = int64[1] {{1}}> ()
        start = Reshape (i, one)
        {code}
    }}>
}}
"""


def test_a_slice_at_each_of_a_symbolic_number_of_steps() -> None:
    program = compiled(parse(BY_STEP.format(code="end = Add (start, one) row = Slice (x, start, end)")))
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(program.run({"x": x})["y"], x[:, None])


def test_a_slice_from_the_end_that_moves() -> None:
    code = "minus = Neg (start) low = Sub (minus, one) high = Neg (start) row = Slice (x, low, high)"
    with pytest.raises(ModelImportError, match="in some steps of the loop around it"):
        rlx.from_onnx(parse(BY_STEP.format(code=code)))


def test_a_slice_that_grows_with_the_steps_is_refused() -> None:
    code = """zero = Sub (one, one) end = Add (start, one) part = Slice (x, zero, end)
        row = ReduceMean <axes = [0]> (part)"""
    with pytest.raises(
        ModelImportError, match=r"must be the same in every step of the loop around it.*buffer of the full"
    ):
        rlx.from_onnx(parse(BY_STEP.format(code=code)))


STEPS = """
main (float[N] x) => (int64 end, float seen) {{
    start = Constant <value = int64 {{{start}}}> ()
    shape = Shape (x)
    at = Constant <value = int64 {{0}}> ()
    limit = Gather (shape, at)
    trips = Constant <value = int64 {{{trips}}}> ()
    go = {go}
    none = Constant <value = float {{0}}> ()
    end, seen = Loop (trips, go, start, none) <
        body = step (int64 number, bool on, int64 i, float s) => (bool again, int64 i_next, float s_next) {{
        by = Constant <value = int64 {{{by}}}> ()
        i_next = Add (i, by)
        more = ReduceSum <keepdims = 0> (x)
        s_next = Add (s, more)
        again = {again}
    }}>
}}
"""


@settings(deadline=None, max_examples=25)
@given(
    st.integers(-3, 3),
    st.sampled_from([1, 2, 3, -1, -2]),
    st.sampled_from([2**63 - 1, 5000]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_the_number_of_steps(start: int, by: int, trips: int, strict: bool, asked: bool, n: int) -> None:
    """Counters up to a size or down to 0, asked before the first step or not: as Python counts."""
    up = by > 0
    word = ("Less" if strict else "LessOrEqual") if up else ("Greater" if strict else "GreaterOrEqual")
    against = "limit" if up else "at"
    go = f"{word} (start, {against})" if asked else "Constant <value = bool {1}> ()"
    text = STEPS.format(start=start, by=by, trips=trips, go=go, again=f"{word} (i_next, {against})")
    graph = rlx.from_onnx(parse(text, opset=16))
    assert ops_of(graph).isdisjoint({"loop"})

    def goes_on(i: int) -> bool:
        left, right = (i, n) if up else (0, i)
        return left < right if strict else left <= right

    i, steps, on = start, 0, goes_on(start) if asked else True
    while on:
        i, steps, on = i + by, steps + 1, goes_on(i + by)
    from rlx.reference.interpreter import evaluate

    out = evaluate(graph, {"x": np.ones(n, np.float32)})
    assert (int(out["end"]), float(out["seen"])) == (i, float(steps * n))


UNTIL = """
main (float[3] x, float limit) => (float[3] last, float[N, 3] rows, int64 steps, float[K, 3] some) {
    most = Constant <value = int64 {900}> ()
    go = Constant <value = bool {1}> ()
    zero = Constant <value = int64 {0}> ()
    begin = Constant <value = int64[1] {0}> ()
    last, steps, rows = Loop (most, go, x, zero) <
        body = step (int64 i, bool on, float[3] a, int64 c)
            => (bool again, float[3] b, int64 d, float[3] row) {
        one = Constant <value = int64 {1}> ()
        half = Constant <value = float {0.5}> ()
        b = Mul (a, half)
        row = Identity (b)
        d = Add (c, one)
        total = ReduceSum <keepdims = 0> (b)
        again = Less (limit, total)
    }>
    axis = Constant <value = int64[1] {0}> ()
    two = Constant <value = int64[1] {2}> ()
    one1 = Constant <value = int64[1] {1}> ()
    ends = Reshape (steps, one1)
    some = Slice (rows, begin, ends, axis, two)
}
"""


def test_rows_of_a_loop_that_data_end() -> None:
    """With a bound on the steps, rows are written to a buffer and cut there: nothing runs on the host."""
    program = compiled(parse(UNTIL))
    x = np.array([1, 2, 5], np.float32)
    for limit in (3.0, 0.1, 100.0):
        rows, a = [], x
        while True:
            a = a / 2
            rows.append(a)
            if a.sum() <= limit:
                break
        out = program.run({"x": x, "limit": np.float32(limit)})
        np.testing.assert_array_equal(out["rows"], rows)
        np.testing.assert_array_equal(out["some"], np.stack(rows)[::2])
        assert out["steps"] == len(rows) and out["last"].tolist() == rows[-1].tolist()


CUT = """
main (float[N, 4] x, int64[2] starts, int64[2] ends) => (float[A, B] y) {
    axes = Constant <value = int64[2] {0, 1}> ()
    doubled = Add (starts, starts)
    less = Sub (doubled, starts)
    y = Slice (x, less, ends, axes, steps)
}
"""


@pytest.mark.parametrize("steps", [(1, 1), (2, 3), (-1, 1), (-2, -3)])
def test_a_slice_between_places_that_data_know(steps: tuple[int, int]) -> None:
    program = compiled(parse(CUT, steps=np.array(steps)))
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    far = 2**40
    for a, b, c, d in ((0, 1, 4, 3), (-3, 0, far, -1), (5, 3, -far, 0), (2, 2, 2, 2), (far, -far, 0, far)):
        got = program.run({"x": x, "starts": np.array([a, b]), "ends": np.array([c, d])})["y"]
        np.testing.assert_array_equal(got, x[a : c : steps[0], b : d : steps[1]])


PLACEHOLDER = """
main (float[B, 3] x, int64 n) => (float[B, 3] y) {
    nothing = Constant <value = float {0}> ()
    most = Constant <value = int64 {900}> ()
    go = Constant <value = bool {1}> ()
    zero = Constant <value = int64 {0}> ()
    done = Constant <value = bool {0}> ()
    y, c_end, x_end, done_end = Loop (most, go, nothing, zero, x, done) <
        body = step (int64 i, bool on, float[B, 3] unused, int64 c, float[B, 3] a, bool f)
               => (bool again, float[B, 3] made, int64 d, float[B, 3] b, bool f_next) {
        one = Constant <value = int64 {1}> ()
        d = Add (c, one)
        made = Mul (a, a)
        b = Add (a, a)
        enough = Less (n, d)
        f_next = If (enough) <
            then_branch = yes () => (bool t) { t = Constant <value = bool {1}> () },
            else_branch = no () => (bool u) {
                f_number = Cast <to = 7> (f)
                zero1 = Constant <value = int64[1] {0}> ()
                f_same = Add (f_number, zero1)
                u = Cast <to = 9> (f_same)
            }
        >
        again = Not (f_next)
    }>
}
"""


def test_a_carry_that_no_step_reads_and_branches_of_one_element() -> None:
    """Exporters begin what the first step will define as one number, and mix bool and bool[1]."""
    x = np.array([[1, 2, 3], [0, -1, 5]], np.float32)
    out = compiled(parse(PLACEHOLDER)).run({"x": x, "n": np.array(2)})
    np.testing.assert_array_equal(out["y"], (x * 4) ** 2)


def test_weights_of_a_sub_graph_that_is_converted_again_are_one() -> None:
    text = """
    main (float[2, 300] x, float limit) => (float[2, 300] y) {
        most = Constant <value = int64 {3}> ()
        go = Constant <value = bool {1}> ()
        y = Loop (most, go, x) <
            body = step (int64 i, bool on, float[2, 300] a) => (bool on, float[2, 300] b) { b = Add (a, w) }>
    }
    """
    model = parse(text)
    body = model.graph.node[2].attribute[0].g
    body.initializer.append(numpy_helper.from_array(np.ones(300, np.float32), "w"))
    assert list(rlx.from_onnx(model).params) == ["w"]
