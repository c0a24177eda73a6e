"""Products of dequantised bytes become integer products: when, and within which bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from measured import units
from rlx import Graph, ops
from rlx.api.compile import plan
from rlx.api.lowering import lower
from rlx.rewrite.integer import use_integer_products

RNG = np.random.default_rng(21)
BOUND = 2.0**-20  # of a value in quanta: what roundings to f32 behind exact sums may add up to, bias included


def number(g: Graph, value: Any, kind: Any = np.float32) -> Any:
    return g.constant(np.asarray(value, kind))


def codes(kind: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(kind)
    return np.asarray(RNG.integers(info.min, info.max + 1, shape), kind)


def weight(g: Graph, value: np.ndarray) -> Any:
    made = g.param("w", value.shape, "i8" if value.dtype == np.int8 else "u8")
    g.set_param("w", value)
    return made


def integer_sums(graph: Graph) -> list[Any]:
    """Products of the lowered graph after the pass."""
    made, _ = use_integer_products(lower(graph))
    return [made.nodes[i] for i in sorted(made.live()) if made.nodes[i].op.heavy]


def matmul_case(g: Graph, x: Any, w: np.ndarray, scales: np.ndarray) -> tuple[Any, Callable[..., Any]]:
    b = ops.dequantize(weight(g, w), number(g, scales), number(g, np.zeros(len(scales)), np.int8), axis=1)
    return x @ b, lambda x, w: x @ w


def gemm_case(g: Graph, x: Any, w: np.ndarray, scales: np.ndarray) -> tuple[Any, Callable[..., Any]]:
    b = ops.dequantize(weight(g, w.T.copy()), number(g, scales), axis=0)
    return x @ ops.transpose(b, (1, 0)), lambda x, w: x @ w


def conv_case(g: Graph, x: Any, w: np.ndarray, scales: np.ndarray) -> tuple[Any, Callable[..., Any]]:
    kernel = w.T.reshape(w.shape[1], 8, 3, 3).copy()
    b = ops.dequantize(weight(g, kernel), number(g, scales), axis=0)
    image = ops.reshape(x, (2, 8, 6, 6))

    def real(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        made = ops.conv(x.reshape(2, 8, 6, 6), w.T.reshape(w.shape[1], 8, 3, 3), padding=1, strides=2)
        return np.asarray(made)

    return ops.conv(image, b, padding=1, strides=2), real


@pytest.mark.parametrize("case", [matmul_case, gemm_case, conv_case])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_results_are_the_real_ones_but_for_ties(case: Any, kind: Any) -> None:
    """Rounded to bytes, a result is that of exact arithmetic unless this lies within BOUND of a half."""
    g = Graph("qdq")
    x, w = codes(kind, 8, 72), codes(np.int8, 72, 20)
    scales = RNG.uniform(0.001, 0.01, 20).astype(np.float32)
    sx, zx, sy, zy = np.float32(0.037), np.asarray(17, kind), np.float32(0.9), np.asarray(5, kind)
    value = ops.dequantize(
        g.input("x", x.shape, np.dtype(kind).name.replace("uint", "u").replace("int", "i")),
        number(g, sx),
        g.constant(zx),
    )
    y, exact = case(g, value, w, scales)
    g.output("y", ops.quantize(ops.relu(y), number(g, sy), g.constant(zy)))
    (heavy,) = integer_sums(g)
    assert heavy.dtype.name == "i32" and {o.dtype.name for o in heavy.operands} <= {"u8", "i8"}
    program = rlx.compile(g)
    got = program.run({"x": x})["y"].astype(int)
    real = (x.astype(np.float64) - zx) * float(sx)
    level = np.maximum(exact(real, w.astype(np.float64) * scales.astype(np.float64)), 0) / float(sy)
    info = np.iinfo(kind)
    want = np.clip(np.rint(level) + zy, info.min, info.max).astype(int)
    near = np.abs(level - np.floor(level) - 0.5) <= BOUND * (1 + np.abs(level))
    assert np.abs(got - want).max() <= 1
    assert not np.any((got != want) & ~near)


@pytest.mark.parametrize("case", [matmul_case, gemm_case, conv_case])
def test_weights_are_not_stored_in_f32(case: Any) -> None:
    g = Graph("qdq")
    value = ops.dequantize(g.input("x", (8, 72), "u8"), number(g, 0.1))
    g.output("y", case(g, value, codes(np.int8, 72, 20), np.full(20, 0.01, np.float32))[0])
    lir = plan(g)
    sizes = [p.tensor.numel for p in lir.mir.params.values() if p.dtype.name == "f32"]
    assert max(sizes, default=0) <= 20
    (decision,) = [d for d in lir.trace.decisions if d.rule.startswith("integer")]
    assert decision.verdict and decision.compute_ps_added < 0
    assert any(f.rule == decision.rule for f in lir.trace.firings)


def refusal(g: Graph, y: Any) -> str:
    g.output("y", y)
    made, (decision,) = use_integer_products(lower(g))
    assert not decision.verdict
    assert all(n.dtype.name == "f32" for n in made.nodes if n.op.heavy)
    return decision.reason


def test_what_is_refused_and_why() -> None:
    g = Graph()
    x = ops.dequantize(g.input("x", (4, 8), "u8"), number(g, 0.5))
    along_k = ops.dequantize(g.input("w", (8, 3), "i8"), g.input("s", (8,), "f32"), axis=0)
    assert refusal(g, x @ along_k) == "a scale or zero point varies along a summed axis"
    g = Graph()
    half = ops.dequantize(g.input("w", (8, 3), "i8"), number(g, 0.5))
    assert refusal(g, g.input("x", (4, 8), "f32") @ half) == "its left factor is not quantised"
    g = Graph()
    a, b = (
        ops.dequantize(g.input(n, s, "u8"), number(g, 1.0))
        for n, s in (("a", (1, 40_000)), ("b", (40_000, 1)))
    )
    assert refusal(g, a @ b) == "sums of 40000 products may not fit i32"
    g = Graph()
    a, b = (
        ops.dequantize(g.input(n, s, "u8"), number(g, 1.0)) for n, s in (("a", (1, "k")), ("b", ("k", 1)))
    )
    assert refusal(g, a @ b) == "sums of k products may not fit i32"
    g = Graph()
    image = ops.dequantize(g.input("x", (1, 2, 5), "u8"), number(g, 0.5), g.input("z", (), "u8"))
    kernel = ops.dequantize(g.input("w", (3, 2, 3), "i8"), number(g, 0.5))
    assert (
        refusal(g, ops.conv(image, kernel, padding=1))
        == "padding is the zero point, which is not a known number"
    )


def test_sums_as_large_as_can_be_fit() -> None:
    """33,025 products of 255 and 255 are the most that i32 holds."""
    g = Graph()
    a, b = (
        ops.dequantize(g.input(n, s, "u8"), number(g, 1.0))
        for n, s in (("a", (1, 33_025)), ("b", (33_025, 1)))
    )
    g.output("y", a @ b)
    assert [n.dtype.name for n in integer_sums(g)] == ["i32"]
    full = {"a": np.full((1, 33_025), 255, np.uint8), "b": np.full((33_025, 1), 255, np.uint8)}
    assert rlx.compile(g).run(full)["y"] == np.float32(33_025 * 255 * 255)


def test_codes_that_are_only_moved_stay_codes() -> None:
    """Pool, transpose and reshape between dequantise and quantise by the same numbers touch no f32."""
    g = Graph()
    scale, zero = number(g, 0.3), number(g, 7, np.uint8)
    x = ops.dequantize(g.input("x", (1, 4, 6, 6), "u8"), scale, zero)
    y = ops.reshape(ops.transpose(ops.max_pool(x, 3, strides=2, padding=1), (0, 2, 3, 1)), (9, 4))
    g.output("y", ops.quantize(y, scale, zero))
    made, _ = use_integer_products(lower(g))
    assert all(made.nodes[i].dtype.name == "u8" for i in made.live() if made.nodes[i].operands)
    image = codes(np.uint8, 1, 4, 6, 6)
    want = np.asarray(ops.max_pool(image, 3, strides=2, padding=1)).transpose(0, 2, 3, 1).reshape(9, 4)
    np.testing.assert_array_equal(rlx.compile(g).run({"x": image})["y"], want)


@pytest.mark.parametrize(("kind", "zero", "kept"), [(np.uint8, 0, 0), (np.int8, -128, 0), (np.uint8, 5, 1)])
def test_a_relu_that_rounding_does_anyway_is_dropped(kind: Any, zero: int, kept: int) -> None:
    """And scales of what it bounds are divided all the same, so that nothing is multiplied behind it."""
    g = Graph("relu")
    name = {np.uint8: "u8", np.int8: "i8"}[kind]
    x, w = codes(kind, 8, 72), codes(np.int8, 72, 20)
    sx, sy, scales = np.float32(0.037), np.float32(0.9), RNG.uniform(0.001, 0.01, 20).astype(np.float32)
    value = ops.dequantize(g.input("x", x.shape, name), number(g, sx), number(g, 3, kind))
    added = ops.dequantize(g.input("a", (8, 20), name), number(g, sy), number(g, 2, kind))
    y = ops.relu(matmul_case(g, value, w, scales)[0] + added)
    g.output("y", ops.quantize(y, number(g, sy), number(g, zero, kind)))
    lir = plan(g)
    (region,) = [lir.mir.nodes[i] for i in lir.plan.schedule]
    names = [n.op.name for n in region.bodies[0].nodes]
    assert names.count("maximum") == kept and names.count("mul") <= 2
    a = codes(kind, 8, 20)
    got = rlx.compile(g).run({"x": x, "a": a})["y"].astype(int)
    product = (x.astype(np.float64) - 3) @ w * float(sx) * scales.astype(np.float64)
    level = np.maximum(product / float(sy) + (a.astype(np.float64) - 2), 0)
    want = np.clip(np.rint(level) + zero, np.iinfo(kind).min, np.iinfo(kind).max)
    near = np.abs(level - np.floor(level) - 0.5) <= BOUND * (1 + np.abs(level))
    assert not np.any((got != want) & ~near) and np.abs(got - want).max() <= 1


def test_graphs_without_bytes_are_left_alone() -> None:
    g = Graph()
    g.output("y", g.input("x", (2, 3), "f32") @ g.input("w", (3, 2), "f32"))
    assert use_integer_products(g) == (g, [])


def dynamic_layers(count: int) -> Graph:
    """Convolutions of bytes whose scale each is made from the values, with connections past every layer."""
    g = Graph()
    value = g.input("x", (1, 4, 6, 6), "f32")
    w = g.constant(codes(np.int8, 4, 4, 3, 3))
    for _ in range(count):
        step, scale, zero = ops.dynamic_quantize(value)
        sums = ops.cast(ops.conv_integer(step, w, zero, padding=1), "f32") * scale
        value = ops.maximum(sums, 0.0) + value
    g.output("y", value)
    return lower(g)


def test_skip_connections_are_looked_at_once() -> None:
    """A value that every layer reads more than once has 2**layers paths to the input."""
    short, long = dynamic_layers(5), dynamic_layers(20)
    assert units(lambda: use_integer_products(long)) < 12 * units(lambda: use_integer_products(short))
