"""Small programs as users write them, on every target that runs here, with fixed and symbolic sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from machines import on_targets
from rlx import Graph, ops
from rlx.errors import BudgetError, RlxError
from rlx.ir.dtype import dtype
from rlx.ir.op import get_op
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import runs_here, targets

TARGETS = [t.name for t in targets() if runs_here(t)]


def norm(x: Any, w: Any, b: Any) -> Any:
    return ops.layer_norm(x, w, b)


def second_order(x: Any, w: Any, b: Any) -> Any:
    first = rlx.grad(lambda x: ops.sum(ops.square(norm(x, w, b)) * w))
    return rlx.grad(lambda x: ops.sum(first(x) * ops.sin(x)))(x)


ROWS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "softmax of a sum": lambda x, w, b: ops.softmax(x + b),
    "softmax of a product": lambda x, w, b: ops.softmax(x * w),
    "softmax of a norm": lambda x, w, b: ops.softmax(norm(x, w, b)),
    "softmax with a mask": lambda x, w, b: ops.softmax(ops.where(w > 0.0, x, -1e9)),
    "softmax with a mask that is added": lambda x, w, b: ops.softmax(x + ops.where(w > 0.0, w * 0.0, -1e9)),
    "two norms": lambda x, w, b: norm(norm(x, w, b), w, b),
    "a norm after a softmax": lambda x, w, b: norm(ops.softmax(x + b), w, b),
    "second-order gradient of a norm": second_order,
}


def in_f64(function: Callable[..., Any], arrays: list[np.ndarray]) -> np.ndarray:
    """What the reference gives in double precision."""
    g = Graph()
    nodes = [g.input(f"a{i}", a.shape, "f64") for i, a in enumerate(arrays)]
    with g.building():
        g.output("y", function(*nodes))
    feed = {f"a{i}": a.astype(np.float64) for i, a in enumerate(arrays)}
    return np.asarray(evaluate(g, feed)["y"])


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@on_targets(TARGETS)
@pytest.mark.parametrize("name", ROWS)
def test_rows_with_shared_operands(name: str, target: str, dynamic: bool) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 64), (64,), (64,))]
    got = rlx.jit(ROWS[name], target=target, dynamic=dynamic)(*arrays)
    want = in_f64(ROWS[name], arrays)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@on_targets(TARGETS)
def test_a_slice_of_a_broadcast(target: str, dynamic: bool) -> None:
    """Also at other sizes than those of the first call: a guard was wrong there."""

    def f(x: Any) -> Any:
        return ops.broadcast_to(x, (2, x.shape[1]))[:, :4] + 1.0

    jitted = rlx.jit(f, target=target, dynamic=dynamic)
    for columns in (9, 7, 12):
        x = np.arange(columns, dtype=np.float32)[None]
        np.testing.assert_array_equal(jitted(x), np.broadcast_to(x, (2, columns))[:, :4] + 1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@on_targets(TARGETS)
@pytest.mark.parametrize("dilation", [2, 3])
def test_a_dilated_convolution_of_arguments(dilation: int, target: str, dynamic: bool) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.integers(-8, 8, (1, 3, 16, 16)), rng.integers(-8, 8, (4, 3, 3, 3))
    arrays = [x.astype(np.float32), w.astype(np.float32)]

    def f(x: Any, w: Any) -> Any:
        return ops.conv(x, w, dilations=dilation)

    got = rlx.jit(f, target=target, dynamic=dynamic)(*arrays)
    np.testing.assert_array_equal(got, in_f64(f, arrays))  # small integers: exact in f32


@on_targets(TARGETS)
@pytest.mark.parametrize("mask", ["Where(keep, scores, low)", "Add(scores, bias)"], ids=["where", "add"])
def test_masks_of_an_onnx_model_with_an_open_batch(
    mask: str, target: str, require: Callable[[str], None]
) -> None:
    require("onnx")
    import onnx.parser

    extra = "bool[M] keep" if mask.startswith("Where") else "float[M] bias"
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        masked (float[batch, N, K] q, float[batch, K, M] k, {extra}) => (float[batch, N, M] y) {{
            low = Constant <value_float = -10000.0> ()
            scores = MatMul(q, k)
            masked = {mask}
            y = Softmax <axis = -1> (masked)
        }}""")
    program = rlx.load(model, target=target)
    rng = np.random.default_rng(3)
    for batch, n, m in ((1, 3, 8), (2, 5, 16), (3, 1, 33)):
        q, k = (rng.standard_normal(s).astype(np.float32) for s in ((batch, n, 4), (batch, 4, m)))
        last = rng.random(m) < 0.6
        last[0] = True
        bias = np.where(last, 0, -10000).astype(np.float32)
        scores = q.astype(np.float64) @ k + bias
        e = np.exp(scores - scores.max(-1, keepdims=True))
        got = program.run({"q": q, "k": k, **({"keep": last} if "keep" in extra else {"bias": bias})})["y"]
        np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def check_graph(graph: Graph, target: str, *feeds: dict[str, np.ndarray]) -> None:
    """A graph gives natively what the reference gives, to the bit."""
    program = rlx.compile(graph, target=target, cache=False)
    for feed in feeds:
        got, want = program.run(feed), evaluate(graph, feed)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, strict=True)


@on_targets(TARGETS)
def test_constants_that_have_no_elements_but_an_open_size(target: str) -> None:
    graph = Graph()
    x = graph.input("x", (0, "m", 1), "f32")
    with graph.building():
        zeros = ops.broadcast_to(graph.constant(np.zeros((0, 1, 1), np.float32)), x.shape)
        graph.output("y", x + ops.cos(zeros))
        graph.output("g", rlx.grad(lambda x: ops.sum(ops.sin(x)))(x))
    check_graph(graph, target, *({"x": np.zeros((0, m, 1), np.float32)} for m in (1, 8)))


@on_targets(TARGETS)
def test_rows_of_a_sparse_weight_from_an_open_place(target: str) -> None:
    graph = Graph()
    x = graph.input("x", ("n", 64), "f32")
    with graph.building():
        w = graph.param("w", (128, 64), "f32", np.eye(128, 64, dtype=np.float32))
        (n, _) = x.shape
        rows = get_op("slice")(w, starts=(n, 0), sizes=(64, 64), steps=(1, 1))
        graph.output("y", x @ rows)
    rng = np.random.default_rng(4)
    check_graph(graph, target, *({"x": rng.integers(-8, 8, (n, 64)).astype(np.float32)} for n in (1, 3)))


@on_targets(TARGETS)
@pytest.mark.parametrize("channels", [32, 6])
def test_complex_images_beside_a_convolution(channels: int, target: str) -> None:
    """Blocks of channels hold real numbers only."""
    rng = np.random.default_rng(5)
    x, w = rng.integers(-4, 4, (1, 3, 6, 6)), rng.integers(-4, 4, (channels, 3, 3, 3))
    v = rng.integers(-4, 4, (channels, channels, 1, 1))
    arrays = [a.astype(np.float32) for a in (x, w, v)]

    def f(x: Any, w: Any, v: Any) -> Any:
        y = ops.conv(x, w)
        turned = get_op("complex")(y, ops.flip(y, 3)) * (2 + 1j)
        return ops.conv(ops.imag(turned), v)

    np.testing.assert_array_equal(rlx.jit(f, target=target)(*arrays), f(*arrays))


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "flat": lambda w: ops.reshape(w, (-1,)),
    "turned": ops.transpose,
    "turned, then flat": lambda w: ops.reshape(ops.transpose(w), (-1,)),
    "flipped, then flat": lambda w: ops.reshape(ops.flip(w, 0), (-1,)),
    "a part, then flat": lambda w: ops.reshape(w[..., 1:], (-1,)),
    "negative, turned, then flat": lambda w: ops.reshape(ops.transpose(-w), (-1,)),
}


@pytest.mark.parametrize("make", ["param", "constant"])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_view_of_a_weight_is_an_output(name: str, shape: tuple[int, ...], make: str) -> None:
    """One that only becomes a view when the weight is stored as it is read has storage of its own, too."""
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    graph = Graph()
    x = graph.input("x", (2,), "f32")
    with graph.building():
        w = graph.param("w", shape, "f32", value) if make == "param" else graph.constant(value)
        y = WEIGHTS[name](w)
        graph.set_outputs({"y": y, "again": y, "sum": ops.sum(y) + x})
    check_graph(graph, TARGETS[0], {"x": np.ones(2, np.float32)})


WINDOWS: dict[str, Callable[..., Any]] = {
    "conv": lambda x, w: ops.conv(x, w, strides=2),
    "dilated conv": lambda x, w: ops.conv(x, w, strides=3, dilations=2),
    "conv in groups": lambda x, w: ops.conv(x, w[:, :1], groups=2),
    "conv_transpose": lambda x, w: ops.conv_transpose(x, w, padding=1),
    "max_pool": lambda x, w: ops.max_pool(x, (2,), strides=2) * w[0, 0, 0],
    "avg_pool": lambda x, w: ops.avg_pool(x, (2,), strides=2) * w[0, 0, 0],
}


@pytest.mark.parametrize(
    ("by", "order", "size"),
    [
        pytest.param(by, order, size, id=f"by {'xw'[by]}-{order}-{kind}", marks=marks)
        for by, order in itertools.product((0, 1), (1, 2))
        for size, kind in ((1, "fixed"), ("m", "symbolic"))
        for marks in [() if (by + order + (size == 1)) % 2 else pytest.mark.slow]
    ],
)
@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_where_no_window_fits(name: str, by: int, order: int, size: int | str) -> None:
    """They are zeros; at other sizes of the same program they are not.

    By default half of the cases run: both orders by both operands, each with one kind of size; each kind of
    size has both orders and both operands. The other half is slow.
    """

    def loss(x: Any, w: Any) -> Any:
        return ops.sum(ops.square(WINDOWS[name](x, w)))

    def first(x: Any, w: Any) -> Any:
        return rlx.grad(loss, argnums=by)(x, w)

    def second(x: Any, w: Any) -> Any:
        return rlx.grad(lambda x, w: ops.sum(ops.square(first(x, w))), argnums=by)(x, w)

    graph = Graph()
    x, w = graph.input("x", ("n", 2, size), "f32"), graph.input("w", (2, 2, 2), "f32")
    with graph.building():
        graph.output("forward", WINDOWS[name](x, w))
        graph.output("y", (first if order == 1 else second)(x, w))
    rng = np.random.default_rng(6)
    feeds = []
    for n, m in itertools.product((2, 0), [size] if isinstance(size, int) else [1, 2, 6]):
        feed = {"x": rng.integers(1, 4, (n, 2, m)), "w": rng.integers(1, 4, (2, 2, 2))}
        feeds.append({k: v.astype(np.float32) for k, v in feed.items()})
        want = evaluate(graph, feeds[-1])
        assert want["y"].shape == feed["xw"[by]].shape
        assert bool(want["y"].any()) == bool(want["forward"].size), (m, n)
    check_graph(graph, TARGETS[0], *feeds)


def test_a_strided_convolution_of_an_open_size_has_a_gradient() -> None:
    """Its padding is an amount that only a run knows."""
    f = rlx.jit(rlx.grad(lambda x, w: ops.sum(ops.square(ops.conv(x, w, strides=2)))), dynamic=True)
    rng = np.random.default_rng(7)
    for m in (5, 8, 1):
        x = rng.integers(-2, 3, (1, 2, m)).astype(np.float32)
        w = rng.integers(-2, 3, (2, 2, 2)).astype(np.float32)
        y = ops.conv(x, w, strides=2)
        np.testing.assert_array_equal(f(x, w), ops.conv_transpose(2 * y, w, strides=2, size=(m,)))


PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "kernels of groups": lambda x, w: ops.conv(x, w[:, :1], groups=4),
    "kernels": lambda x, w: ops.conv(x, w[:, :, :2, :2]),
    "lines of groups": lambda x, w: ops.conv(x[:, :, :4], w[:, :2], groups=2, padding=1),
    "pixels of channels": lambda x, w: ops.conv(x[:, :, :, :5], w[:, :1], groups=4, padding=1),
    "channels": lambda x, w: ops.conv(x[:, :2], w[:, :2]),
}


@on_targets(TARGETS)
@pytest.mark.parametrize("name", PARTS)
def test_a_convolution_of_the_first_part_of_something(name: str, target: str) -> None:
    rng = np.random.default_rng(8)
    arrays = [rng.integers(-4, 5, shape).astype(np.float32) for shape in ((2, 4, 6, 7), (4, 4, 3, 3))]
    np.testing.assert_array_equal(rlx.jit(PARTS[name], target=target)(*arrays), PARTS[name](*arrays))


@on_targets(TARGETS)
def test_an_index_within_the_whole_but_not_within_the_part(target: str) -> None:
    x = np.arange(10, dtype=np.float32)
    jitted = rlx.jit(lambda x, i: ops.take(x[:3], i), target=target)
    np.testing.assert_array_equal(jitted(x, np.array([2, -1, 0])), x[:3][[2, -1, 0]])
    for outside in (3, -4):
        with pytest.raises(RlxError, match="out of range"):
            jitted(x, np.array([outside]))


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "f64", "i8", "u64"])
def test_clip_keeps_the_dtype(kind: str) -> None:
    x = np.arange(5).astype(dtype(kind).np)
    for f in (lambda x: ops.clip(x, 1, 3), lambda x: ops.clip(x, 1), lambda x: ops.clip(x, max=3)):
        want = f(x.astype(np.float64)).astype(x.dtype)
        np.testing.assert_array_equal(f(x), want, strict=True)
        np.testing.assert_array_equal(rlx.jit(f)(x), want, strict=True)


def test_numpy_scalars_keep_their_dtype_where_no_tensor_is_beside_them() -> None:
    """np.float64 is a Python float, too, which counts as f32."""
    x = np.ones(3)
    last, _ = ops.scan(lambda c, row: (c * 1.0, c), x[0] * 0.1, x)
    assert last.dtype == np.float64 and last == 0.1
    assert Graph().constant(np.float64(0.1)).dtype.name == "f64"
    assert Graph().constant(0.1).dtype.name == "f32"


@on_targets(TARGETS)
def test_a_convolution_of_pixels_that_are_repeated(target: str) -> None:
    """The gradient of a mean repeats one pixel; between convolutions, channels lie in blocks."""
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((1, 16, 2, 3), np.float32), rng.standard_normal((16, 16, 1, 1), np.float32)

    def loss(x: Any, w: Any) -> Any:
        pooled = ops.mean(ops.conv(x, w), axis=(2, 3), keepdims=True)
        return ops.sum(ops.sin(ops.conv(pooled, w)))

    got = rlx.jit(rlx.grad(loss), target=target)(x, w)
    want = in_f64(rlx.grad(loss), [x, w])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_attention_without_features() -> None:
    """All scores are 0, so every query gets the mean of the values."""
    q, v = np.zeros((1, 2, 3, 0), np.float32), np.arange(16, dtype=np.float32).reshape(1, 2, 4, 2)
    k = np.zeros((1, 2, 4, 0), np.float32)
    want = np.broadcast_to(v.mean(2, keepdims=True), (1, 2, 3, 2))
    for f in (ops.attention, rlx.jit(ops.attention)):
        np.testing.assert_allclose(f(q, k, v), want, rtol=1e-6)


def test_rows_that_are_picked_from_attention() -> None:
    """Scores inside its kernel are read like an operand, but are none that could be indexed."""

    def f(q: Any, k: Any, v: Any, i: Any, w: Any) -> Any:
        return ops.softmax(ops.take(ops.attention(q, k, v), i, axis=1)) @ w

    for keys in (0, 5):
        x = np.ones((1, 4, keys, 16), np.float32)
        got = rlx.jit(f)(x, x, x, np.array([1], np.int32), np.ones((16, 1), np.float32))
        np.testing.assert_allclose(got, np.ones((1, 1, keys, 1)), rtol=1e-6)


def test_a_table_of_one_row_that_is_a_constant() -> None:
    """Its reader checks indices, so it is in memory, though kernels hold other constants of one element."""
    g = Graph()
    i = g.input("i", ("n",), "i64")
    g.output("y", ops.take(g.constant(np.array([5.0], np.float32)), i, axis=0) * 2.0)
    program = rlx.compile(g)
    np.testing.assert_array_equal(program.run({"i": np.zeros(3, np.int64)})["y"], [10.0, 10.0, 10.0])
    with pytest.raises(RlxError, match="out of range"):
        program.run({"i": np.ones(3, np.int64)})


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("by", [0, 1, 2])
def test_gradients_of_convolutions_in_groups_for_each_example(by: int, batch: int) -> None:
    def loss(x: Any, w: Any, u: Any) -> Any:
        return ops.sum(ops.conv(x, w, groups=2) ** 2) + ops.sum(u)

    rng = np.random.default_rng(2)
    shapes = [(batch, 2, 4, 5, 5), (batch, 4, 2, 3, 3), (batch, 2)]
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    got = rlx.jit(rlx.vmap(rlx.grad(loss, argnums=by)))(*args)
    one = rlx.jit(rlx.grad(loss, argnums=by))
    assert got.shape == shapes[by]
    for n in range(batch):
        np.testing.assert_allclose(got[n], one(*(a[n] for a in args)), rtol=1e-4, atol=1e-3)


def test_a_budget_where_one_of_two_results_is_not_read() -> None:
    """Values that have room all the time are not among those that could be computed again."""

    def loss(x: Any, w: Any) -> Any:
        pooled = ops.max_pool(x, (1,), strides=1)
        real, _ = get_op("rfft_split")(ops.reshape(ops.reshape(pooled, (-1,))[:51], (3, 17)))
        return ops.sum(ops.sin(real @ w))

    rng = np.random.default_rng(3)
    g = Graph()
    x = g.param("x", (7, 7, 7), "f32", rng.standard_normal((7, 7, 7)).astype(np.float32))
    with g.building():
        g.output("y", rlx.grad(loss)(x, g.input("w", (9, 7), "f32")))
    plain = rlx.compile(g)
    feed = {"w": rng.standard_normal((9, 7)).astype(np.float32)}
    want = plain.run(feed)["y"]
    whole = plain.lir.plan.arena_size
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        try:
            tight = rlx.compile(g, budget=int(whole * share))
        except BudgetError:
            break
        np.testing.assert_array_equal(tight.run(feed)["y"], want)
