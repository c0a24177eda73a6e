"""ONNX models whose sizes data decide: ranges, fills, repetitions and reshapes by computed numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, parser  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import rlx  # noqa: E402
from rlx.errors import GuardError, ModelImportError, ShapeError  # noqa: E402
from rlx.ir.symbols import found_by_data  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")

Feed = dict[str, np.ndarray]


def parse(text: str) -> Any:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')


def check(text: str, *feeds: Feed) -> rlx.Graph:
    """One program, all feeds, against ONNX's reference."""
    model = parse(text)
    reference, graph = ReferenceEvaluator(model), rlx.from_onnx(model)
    program = rlx.compile(graph)
    for feed in feeds:
        for want, got in zip(reference.run(None, feed), program.run(feed).values(), strict=True):
            assert got.dtype == np.asarray(want).dtype
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    return graph


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


REGULATOR = """
g (float[T, 4] phones, float[T] durations) => (float[frames, 4] mel, int64[frames] at)
{
    rounded = Ceil (durations)
    each = Cast <to = 7> (rounded)
    axis = Constant <value_ints = [0]> ()
    total = ReduceSum <keepdims = 0> (each, axis)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    frame = Range (zero, total, one)
    ends = CumSum (each, zero)
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze (frame, last)
    row = Unsqueeze (ends, axis)
    over = GreaterOrEqual (column, row)
    number = Cast <to = 7> (over)
    at = ReduceSum <keepdims = 0> (number, last)
    mel = Gather <axis = 0> (phones, at)
}
"""
"""A length regulator: each phone as often as its predicted duration says."""


def test_a_length_regulator() -> None:
    rng = np.random.default_rng(0)
    feeds = []
    for phones, scale in ((5, 3.0), (9, 7.0), (1, 2.0), (4, 0.0)):
        durations = (rng.uniform(0, 1, phones) * scale).astype(np.float32)
        feeds.append({"phones": rng.standard_normal((phones, 4)).astype(np.float32), "durations": durations})
    graph = check(REGULATOR, *feeds)
    for feed in feeds:
        want = np.repeat(feed["phones"], np.ceil(feed["durations"]).astype(int), axis=0)
        np.testing.assert_array_equal(rlx.compile(graph).run(feed)["mel"], want)
    assert len(found_by_data(graph)) == 1


def test_a_regulator_from_a_file(tmp_path: Any) -> None:
    rlx.compile(rlx.from_onnx(parse(REGULATOR))).save(tmp_path / "regulator.rlx")
    program = rlx.load(tmp_path / "regulator.rlx")
    for durations in ([1, 2, 0], [3, 3, 3], [0, 0, 0]):
        feed = {
            "phones": np.arange(12, dtype=np.float32).reshape(3, 4),
            "durations": np.array(durations, np.float32),
        }
        np.testing.assert_array_equal(program.run(feed)["mel"], np.repeat(feed["phones"], durations, axis=0))


def test_masks_of_predicted_lengths_are_of_one_size() -> None:
    """As VITS writes it: a mask and noise of the longest length, and an expansion to it."""
    graph = check(
        """
    g (float[B, 3, 1] x, int64[B] lengths) => (float[B, 3, longest] y, float[B, longest] mask)
    {
        most = ReduceMax <keepdims = 0> (lengths)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        axis = Constant <value_ints = [0]> ()
        last = Constant <value_ints = [1]> ()
        at = Range (zero, most, one)
        row = Unsqueeze (at, axis)
        column = Unsqueeze (lengths, last)
        inside = Less (row, column)
        mask = Cast <to = 1> (inside)
        middle = Unsqueeze (mask, last)
        all = Shape (x)
        few = Constant <value_ints = [2]> ()
        outer = Slice (all, axis, few, axis)
        longest = Unsqueeze (most, axis)
        wide = Concat <axis = 0> (outer, longest)
        spread = Expand (x, wide)
        fill = ConstantOfShape <value = float[1] {2.0}> (wide)
        scaled = Mul (spread, fill)
        y = Mul (scaled, middle)
    }
    """,
        *(
            {
                "x": np.random.default_rng(b).standard_normal((b, 3, 1)).astype(np.float32),
                "lengths": whole(*n),
            }
            for b, n in ((2, (3, 5)), (1, (7,)), (3, (1, 0, 1)))
        ),
    )
    assert len(found_by_data(graph)) == 1  # one number, one size: nothing is left to be checked
    assert not graph.constraints


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_ranges_between_numbers_that_are_fed(kind: str) -> None:
    ends = ((1, 8, 3), (9, -2, -4), (9, -2, 4), (0, 5, 1), (-3, 3, 2))
    check(
        f"g ({kind} a, {kind} b, {kind} c) => ({kind}[k] y) {{ y = Range (a, b, c) }}",
        *({k: np.array(v, kind) for k, v in zip("abc", at, strict=True)} for at in ends),
    )


def test_ranges_of_fractions() -> None:
    ends = ((1, 5.5, 0.5), (5, 1.5, -0.5), (1, -5, 1), (0, 1, 0.1))
    check(
        "g (float a, float b, float c) => (float[k] y) { y = Range (a, b, c) }",
        *({k: np.array(v, np.float32) for k, v in zip("abc", at, strict=True)} for at in ends),
    )


def test_fills_and_tiles_by_fed_numbers() -> None:
    check(
        "g (int64[2] s) => (float[a, b] y) { y = ConstantOfShape (s) }",
        *({"s": whole(*s)} for s in ((2, 3), (0, 3), (4, 1))),
    )
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    check(
        "g (float[M, 2] x, int64[2] r) => (float[a, b] y) { y = Tile (x, r) }",
        *({"x": x, "r": whole(*r)} for r in ((2, 3), (0, 1), (1, 4))),
    )


def test_expand_by_fed_numbers() -> None:
    """1 and the size that is there mean the same; other sizes are refused."""
    text = "g (float[3, 1] x, int64[3] s) => (float[a, b, c] y) { y = Expand (x, s) }"
    x = np.arange(3, dtype=np.float32).reshape(3, 1)
    check(text, *({"x": x, "s": whole(*s)} for s in ((2, 1, 6), (1, 3, 2), (2, 3, 0), (1, 1, 1))))
    with pytest.raises(GuardError, match="is 1 or 3, which does not hold"):
        rlx.compile(rlx.from_onnx(parse(text))).run({"x": x, "s": whole(1, 2, 1)})


HALVES = """
g (float[N, 6] x, float[K] w) => (float[a, b] y)
{
    axis = Constant <value_ints = [0]> ()
    sum = ReduceSum <keepdims = 1> (w, axis)
    rows = Cast <to = 7> (sum)
    rest = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (rows, rest)
    flat = Reshape (x, rest)
    y = Reshape (flat, shape)
}
"""


def test_reshape_by_computed_numbers() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    check(HALVES, *({"x": x, "w": np.array(w, np.float32)} for w in ((1, 2), (4,), (6, 6))))
    program = rlx.compile(rlx.from_onnx(parse(HALVES)))
    with pytest.raises(GuardError):
        program.run({"x": x, "w": np.array([5], np.float32)})
    with pytest.raises(ShapeError, match="a size that data decide is -3"):
        program.run({"x": x, "w": np.array([-3], np.float32)})


def test_a_shape_that_is_fed_must_still_be_known() -> None:
    """-1 and 0 have a meaning of their own there, so that it is no list of sizes."""
    text = "g (float[N, 6] x, int64[2] s) => (float[a, b] y) { y = Reshape (x, s) }"
    with pytest.raises(ModelImportError, match="depends on the value of input 's'"):
        rlx.from_onnx(parse(text))


def test_more_sizes_from_data_than_axes_are_refused_at_once() -> None:
    """A shape of a million numbers would be a million nodes."""
    given = helper.make_tensor_value_info("shape", TensorProto.INT64, [1_000_000])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    nodes = [
        helper.make_node("Abs", ["shape"], ["sizes"]),
        helper.make_node("Expand", ["x", "sizes"], ["y"]),
    ]
    model = helper.make_model(helper.make_graph(nodes, "many", [x, given], [y]))
    with pytest.raises(ModelImportError):
        rlx.from_onnx(model)
