"""Array functions against NumPy and ONNX: values, symbolic sizes, and the texts of refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import ops
from rlx.errors import GuardError, RlxError, TransformError
from rlx.ir.dim import sym, upper_bound
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import gradient_graph
from rlx.transform.vmap import batch_graph

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def run(
    function: Callable[..., Any], *arrays: np.ndarray, shapes: Sequence[Any] | None = None
) -> list[np.ndarray]:
    """Results of a function of nodes, built into a graph and evaluated."""
    g = rlx.Graph()
    given_shapes = [a.shape for a in arrays] if shapes is None else shapes
    nodes = [g.input(f"x{i}", s, a.dtype) for i, (a, s) in enumerate(zip(arrays, given_shapes, strict=True))]
    with g.building():
        made = function(*nodes)
        g.set_outputs(list(made) if isinstance(made, tuple) else [made])
    return list(evaluate(g, {f"x{i}": a for i, a in enumerate(arrays)}).values())


CASES: list[tuple[str, Callable[[Any], Any], Callable[[np.ndarray], Any]]] = [
    ("expand_dims", lambda x: ops.expand_dims(x, (0, -1)), lambda x: np.expand_dims(x, (0, -1))),
    ("squeeze", lambda x: ops.squeeze(ops.expand_dims(x, 1)), lambda x: x),
    ("flatten", ops.flatten, np.ravel),
    ("flatten axis", lambda x: ops.flatten(x, 2), lambda x: x.reshape(6, 4)),
    ("moveaxis", lambda x: ops.moveaxis(x, (0, 1), (-1, 0)), lambda x: np.moveaxis(x, (0, 1), (-1, 0))),
    ("swapaxes", lambda x: ops.swapaxes(x, 0, -1), lambda x: np.swapaxes(x, 0, -1)),
    ("split", lambda x: ops.split(x, 2, -1), lambda x: np.split(x, 2, -1)),
    ("split at", lambda x: ops.split(x, [1, 1], 1), lambda x: np.split(x, [1, 1], 1)),
    ("split sizes", lambda x: ops.split(x, axis=1, sizes=(1, 2)), lambda x: np.split(x, [1], 1)),
    ("stack", lambda x: ops.stack([x, x * 2.0], -2), lambda x: np.stack([x, x * 2], -2)),
    ("tile", lambda x: ops.tile(x, (2, 1, 1, 3)), lambda x: np.tile(x, (2, 1, 1, 3))),
    ("tile last", lambda x: ops.tile(x, 2), lambda x: np.tile(x, 2)),
    ("repeat", lambda x: ops.repeat(x, 3), lambda x: np.repeat(x, 3)),
    ("repeat axis", lambda x: ops.repeat(x, 2, -1), lambda x: np.repeat(x, 2, -1)),
    ("repeat each", lambda x: ops.repeat(x, [2, 0, 1], 1), lambda x: np.repeat(x, [2, 0, 1], 1)),
    ("roll", lambda x: ops.roll(x, 5), lambda x: np.roll(x, 5)),
    ("roll axes", lambda x: ops.roll(x, (1, 2), (2, 2)), lambda x: np.roll(x, (1, 2), (2, 2))),
    ("pad", lambda x: ops.pad(x, 1, value=3), lambda x: np.pad(x, 1, constant_values=3)),
    ("pad edge", lambda x: ops.pad(x, (2, 0), "edge"), lambda x: np.pad(x, (2, 0), "edge")),
    ("triu", lambda x: ops.triu(x, 1), lambda x: np.triu(x, 1)),
    ("tril", lambda x: ops.tril(x, -1), lambda x: np.tril(x, -1)),
    ("diagonal", lambda x: ops.diagonal(x, 1, 0, 2), lambda x: np.diagonal(x, 1, 0, 2)),
    ("diag", lambda x: ops.diag(x[0], -1), lambda x: np.diag(x[0], -1)),
    ("take", lambda x: ops.take(x, [[5, -1]]), lambda x: np.take(x, [[5, -1]])),
    ("take_along_axis", lambda x: ops.take_along_axis(x, np.array([[[1], [0], [2]]]), -1),
     lambda x: np.take_along_axis(x, np.array([[[1], [0], [2]]]), -1)),
    ("cumsum", ops.cumsum, np.cumsum),
    ("cumprod", lambda x: ops.cumprod(x, 1), lambda x: np.cumprod(x, 1)),
    ("cummax", lambda x: ops.cummax(-x, 2), lambda x: np.maximum.accumulate(-x, 2)),
    ("sort", lambda x: ops.sort(-x, 0), lambda x: np.sort(-x, 0)),
    ("argsort", lambda x: ops.argsort(-x, 1), lambda x: np.argsort(-x, 1, kind="stable")),
    ("zeros_like", ops.zeros_like, np.zeros_like),
    ("ones_like", lambda x: ops.ones_like(x, "i32"), lambda x: np.ones_like(x, np.int32)),
    ("nonzero", lambda x: ops.nonzero(x % 3.0), lambda x: np.nonzero(x % 3)),
    ("argwhere", lambda x: ops.argwhere(x % 3.0), lambda x: np.argwhere(x % 3)),
    ("compress", lambda x: ops.compress(x[0, :, 0] > 1.0, x, 1), lambda x: np.compress(x[0, :, 0] > 1, x, 1)),
    ("unique", lambda x: ops.unique(x % 5.0, return_index=True, return_inverse=True, return_counts=True),
     lambda x: [a.reshape(-1) for a in np.unique(x % 5, True, True, True)]),
    ("unique axis", lambda x: ops.unique(ops.tile(x, (2, 1, 1)), 0),
     lambda x: np.unique(np.tile(x, (2, 1, 1)), axis=0)),
    ("meshgrid", lambda x: ops.meshgrid(x[0, 0], x[0, :, 1], x[:, 0, 0]),
     lambda x: np.meshgrid(x[0, 0], x[0, :, 1], x[:, 0, 0])),
    ("meshgrid ij", lambda x: ops.meshgrid(x[0, 0], x[0, :, 1], indexing="ij"),
     lambda x: np.meshgrid(x[0, 0], x[0, :, 1], indexing="ij")),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 4), ("n", 3, "m")], ids=["static", "symbolic"])
@pytest.mark.parametrize(("name", "function", "want"), CASES, ids=[c[0] for c in CASES])
def test_function_is_numpys(name: str, function: Any, want: Any, shape: tuple[Any, ...]) -> None:
    expected = want(X)
    got = run(function, X, shapes=[shape])
    for a, b in zip(got, expected if isinstance(expected, (tuple, list)) else [expected], strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


n = sym("n")


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda: ops.arange(n), np.arange(5)),
        (lambda: ops.arange(n, 0, -2), np.arange(5, 0, -2)),
        (lambda: ops.arange(1, n + 3, 2, dtype="f32"), np.arange(1, 8, 2, dtype=np.float32)),
        (lambda: ops.linspace(-1, 2, n), np.linspace(-1, 2, 5, dtype=np.float32)),
        (lambda: ops.linspace(-1, 2, n, endpoint=False), np.linspace(-1, 2, 5, False, dtype=np.float32)),
        (lambda: ops.eye(n, 3, -1), np.eye(5, 3, -1, np.float32)),
        (lambda: ops.full((n, 2), 1.5), np.full((5, 2), 1.5, np.float32)),
        (lambda: ops.zeros((n,), "bool"), np.zeros(5, bool)),
        (lambda: ops.iota((2, n), 1), np.broadcast_to(np.arange(5), (2, 5))),
        (lambda: ops.one_hot(ops.arange(n), n), np.eye(5, dtype=np.float32)),
    ],
)
def test_tensors_of_symbolic_size(function: Callable[[], Any], want: np.ndarray) -> None:
    got = run(lambda x: (function(), x), np.zeros(5, np.float32), shapes=[("n",)])[0]
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_arange_and_linspace_of_numbers() -> None:
    np.testing.assert_array_equal(ops.arange(0.5, -1.0, -0.3), np.arange(0.5, -1.0, -0.3).astype(np.float32))
    np.testing.assert_array_equal(ops.linspace(0, 1, 1), np.linspace(0, 1, 1, dtype=np.float32))
    assert ops.arange(5, 2).shape == (0,)
    assert ops.linspace(0, 1, 7, dtype="f64")[-1] == 1.0


def test_top_k_is_onnxs() -> None:
    x = np.array([[1, 5, 5, 2], [7, 0, 7, 7]], np.float32)
    values, places = ops.top_k(x, 3)
    np.testing.assert_array_equal(values, [[5, 5, 2], [7, 7, 7]])
    np.testing.assert_array_equal(places, [[1, 2, 3], [0, 2, 3]])
    values, places = ops.top_k(x, 1, axis=0, largest=False)
    np.testing.assert_array_equal(places, [[0, 1, 0, 0]])
    values, _ = ops.top_k(np.array([1, np.nan, 3], np.float32), 2)
    np.testing.assert_array_equal(values, np.array([np.nan, 3], np.float32))


def onnx_run(kind: str, *arrays: np.ndarray, **attributes: Any) -> np.ndarray:
    """One ONNX node by ONNX's own reference."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    names = [f"x{i}" for i in range(len(arrays))]
    node = onnx.helper.make_node(kind, names, ["y"], **attributes)
    inputs = [
        onnx.helper.make_tensor_value_info(k, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for k, a in zip(names, arrays, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_tensor_value_info("y", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    return np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "add", "mul", "max", "min"]))
def test_scatters_are_onnxs(seed: int, reduction: str) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(-4, 5, (4, 3)).astype(np.float32)
    axis = int(rng.integers(0, 2))
    shape = (3, 3) if axis == 0 else (4, 2)
    index = rng.integers(-data.shape[axis], data.shape[axis], shape)
    if reduction == "none":  # ONNX leaves equal indices undefined
        index = np.stack(
            [rng.permutation(data.shape[axis])[: shape[axis]] for _ in range(shape[1 - axis])], axis
        )
        index = index.reshape(shape)
    updates = rng.integers(-4, 5, shape).astype(np.float32)
    got = ops.scatter_elements(data, index, updates, axis, reduction)
    np.testing.assert_array_equal(
        got, onnx_run("ScatterElements", data, index, updates, axis=axis, reduction=reduction)
    )
    places = np.stack([rng.permutation(4)[:3], rng.integers(0, 3, 3)], 1)
    values = rng.integers(-4, 5, 3).astype(np.float32)
    got = ops.scatter_nd(data, places, values, reduction)
    np.testing.assert_array_equal(got, onnx_run("ScatterND", data, places, values, reduction=reduction))


def test_gathers_are_onnxs() -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, 3, 4)).astype(np.float32)
    for index, batch_dims in (
        (rng.integers(0, 2, (5, 2)), 0),
        (rng.integers(0, 3, (2, 5, 1)), 1),
        (rng.integers(0, 4, (2, 3, 2, 1)), 2),
    ):
        got = ops.gather_nd(data, index, batch_dims)
        np.testing.assert_array_equal(got, onnx_run("GatherND", data, index, batch_dims=batch_dims))
    index = rng.integers(-4, 4, (2, 3, 6))
    np.testing.assert_array_equal(
        ops.gather_elements(data, index, 2), onnx_run("GatherElements", data, index, axis=2)
    )
    blocks = rng.standard_normal((2, 8, 3, 2)).astype(np.float32)
    for mode in ("DCR", "CRD"):
        want = onnx_run("DepthToSpace", blocks, blocksize=2, mode=mode)
        np.testing.assert_array_equal(ops.depth_to_space(blocks, 2, mode), want)
    np.testing.assert_array_equal(ops.space_to_depth(ops.depth_to_space(blocks, 2), 2), blocks)


def test_half_precision_is_summed_in_f32() -> None:
    ones = np.ones(3000, ml_dtypes.bfloat16)
    at = np.zeros(3000, np.int64)
    assert (
        float(ops.scatter(np.zeros(1, ml_dtypes.bfloat16), at, ones, reduction="add")[0]) == 3008.0
    )  # 3000 rounded
    g = rlx.Graph()
    x = g.input("x", (1,), "bf16")
    g.output("y", ops.sum(ops.gather(x, at)))
    grads = evaluate(gradient_graph(g, "y", ["x"]), {"x": np.ones(1, ml_dtypes.bfloat16)})
    assert float(grads["grad_x"][0]) == 3008.0


def test_of_equal_places_the_last_one_gets_the_gradient() -> None:
    g = rlx.Graph()
    x, u = g.input("x", (3,), "f64"), g.input("u", (3,), "f64")
    g.output("y", ops.sum(ops.scatter(x, [1, 1, 2], u) * np.array([1.0, 10.0, 100.0])))
    grads = evaluate(gradient_graph(g, "y", ["x", "u"]), {"x": np.zeros(3), "u": np.ones(3)})
    np.testing.assert_array_equal(grads["grad_x"], [1, 0, 0])
    np.testing.assert_array_equal(grads["grad_u"], [0, 10, 100])


def test_sizes_that_depend_on_data_have_bounded_symbols() -> None:
    g = rlx.Graph()
    x = g.input("x", (2, 3))
    (rows, _), again = ops.nonzero(x), ops.nonzero(x)
    (count,), (other,) = rows.shape, again[0].shape
    assert count != other and upper_bound(count) == 6
    assert [str(ops.nonzero(rlx.Graph().input("x", (2,)))[0].type) for _ in range(2)] == [
        "i64[nonzero_1]"
    ] * 2


def test_data_dependent_sizes_do_not_batch() -> None:
    g = rlx.Graph()
    g.output("y", ops.nonzero(g.input("x", (4,)))[0])
    with pytest.raises(TransformError, match="nonzero has a result of another size for each batch"):
        batch_graph(g, {"x": 0}, 3)


def test_wrong_guesses_about_symbolic_sizes_are_guards() -> None:
    x = np.zeros((3, 2), np.float32)
    for function, text in (
        (lambda x: ops.split(x, 2, 0), "n is a multiple of 2"),
        (lambda x: ops.squeeze(x, 0), "n equals 1|1 equals n"),
        (lambda x: ops.pad(x, ((3, 0), (0, 0)), "reflect"), "n is at least 4"),
        (lambda x: ops.top_k(x, 4, 0), "n is at least 4"),
        (lambda x: ops.dynamic_slice(x, [0], [4], axes=[0]), "n is at least 4"),
    ):
        with pytest.raises(GuardError, match=text):
            run(function, x, shapes=[("n", 2)])
    for function in (lambda x: ops.argmax(x, axis=0), lambda x: ops.argmin(x, axis=0, last=True)):
        with pytest.raises(GuardError, match="n is at least 1"):
            run(function, x[:0], shapes=[("n", 2)])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: ops.gather(x, [0], 3), "gather: axis 3 is out of range for rank 3"),
        (lambda x: ops.gather(x, [0.5]), "gather: operand f64[1] is not of an integer dtype"),
        (
            lambda x: ops.gather_nd(x, np.zeros((2, 4), int)),
            "gather_nd: tuples of 4 after 0 batch axes do not fit",
        ),
        (
            lambda x: ops.gather_elements(x, np.zeros((2, 4, 4), int)),
            "indices i64[2,4,4] reach beyond axis 1",
        ),
        (
            lambda x: ops.scatter(x, [0], np.zeros((2, 3, 4), np.float32)),
            "updates f32[2,3,4] must be f32[1,3,4]",
        ),
        (
            lambda x: ops.scatter(x > 0.0, [0], np.ones((1, 3, 4), bool), reduction="add"),
            "'add' does not apply to bool",
        ),
        (
            lambda x: ops.scatter(x, [0], x[:1], reduction="mean"),
            "needs one of 'none', 'add', 'mul', 'max', 'min'",
        ),
        (lambda x: ops.dynamic_slice(x, [0], [5], axes=[2]), "a slice of 5 does not fit axis 2"),
        (lambda x: ops.dynamic_slice(x, [0.5], [1], axes=[2]), "a start is f64[]; it must be a scalar i64[]"),
        (lambda x: ops.dynamic_slice(x, [0, 0], [1]), "3 axes need as many starts and sizes, got 2"),
        (
            lambda x: ops.dynamic_update_slice(x, x[:, :2], [0], axes=[0]),
            "differ on axis 1, which has no start",
        ),
        (lambda x: ops.split(x, 2, 1), "axis 1 of size 3 does not divide into 2 equal parts"),
        (lambda x: ops.split(x, sizes=(1, 2)), "sizes (1, 2) do not add up to axis 0 of size 2"),
        (lambda x: ops.squeeze(x, 1), "squeeze: axis 1 of [2,3,4] is 3, not 1"),
        (lambda x: ops.stack([]), "stack: needs at least one operand"),
        (lambda x: ops.tile(x, -1), "repeats (1, 1, -1) of f32[2,3,4] are negative"),
        (lambda x: ops.pad(x, 1, "mirror"), "unknown mode 'mirror'; use 'constant', 'reflect'"),
        (lambda x: ops.pad(x, -2), "crops more than"),
        (lambda x: ops.top_k(x, 5), "k is 5, more than the sorted axis of f32[2,3,4] holds"),
        (
            lambda x: ops.argmax(x[:, :0], axis=1),
            "argmax: axis 1 of f32[2,0,4] has no elements to choose from",
        ),
        (lambda x: ops.sort(ops.sum(x)), "sort: axis -1 is out of range for rank 0"),
        (lambda x: ops.triu(x[0, 0]), "trilu: f32[4] needs at least two axes"),
        (lambda x: ops.diag(x), "diag: takes one or two axes, got 3"),
        (lambda x: ops.one_hot(x, 3), "one_hot: operand f32[2,3,4] is not of an integer dtype"),
        (lambda x: ops.depth_to_space(x, 2), "depth_to_space: f32[2,3,4] is not of the form [N, C, H, W]"),
        (lambda x: ops.cumsum(x, 5), "cumsum: axis 5 is out of range for rank 3"),
        (lambda x: ops.arange(0, 5, 0), "the step must be a number that is not 0"),
        (lambda x: ops.moveaxis(x, (0, 0), (1, 2)), "do not pair distinct axes"),
    ],
)
def test_refusals_name_the_thing(function: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(RlxError) as caught:
        run(function, X)
    assert text in str(caught.value)


@pytest.mark.parametrize("sizes", [(3, 1), ("m", 1)], ids=["numbers", "symbol"])
def test_einsum_sums_what_one_operand_has_before_it_multiplies(sizes: tuple[Any, int]) -> None:
    """An axis of size 1 broadcasts as one that is not there; times an infinity, the order counts."""
    g = rlx.Graph()
    x, y = g.input("x", (1, sizes[0]), "f32"), g.input("y", (2, sizes[1]), "f32")
    g.output("z", ops.einsum("...i,...i->...", x, y))
    arrays = {"x": np.float32([[-0.5, 1.5, -0.25]]), "y": np.float32([[2.0], [np.inf]])}
    want = np.float32([1.5, np.inf])
    np.testing.assert_array_equal(evaluate(g, arrays)["z"], want)
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)["z"], want)
