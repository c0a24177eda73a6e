"""Convolutions of bytes and bf16 against their definition: geometries, zero points, targets, guard pages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from conv_harness import Case, compiled, in_turn
from gemm_harness import TARGETS, Guarded, every_target
from rlx import ops
from rlx.ir.graph import Graph
from rlx.ir.types import tensor_types
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

CASES = [
    Case((1, 3, 9, 8), (5, 3, 3, 3), {"padding": 1}),
    Case((2, 16, 14, 14), (32, 16, 3, 3), {"padding": 1}),
    Case((1, 17, 9, 23), (37, 17, 3, 3), {"padding": ((0, 2), (1, 0)), "strides": (2, 1)}),
    Case((1, 32, 12, 12), (32, 16, 3, 3), {"padding": 2, "dilations": 2, "groups": 2}),
    Case((2, 5, 33), (24, 5, 5), {"padding": 2, "strides": 2}),
    Case((1, 5, 6, 7, 8), (16, 5, 3, 2, 3), {"padding": 1, "strides": (1, 2, 1), "dilations": (2, 1, 1)}),
    Case((1, 3, 40, 37), (64, 3, 7, 7), {"padding": 3, "strides": 2}),
    Case((2, 18, 7, 7), (40, 18, 1, 1)),
    Case((1, 16, 7, 7), (16, 16, 1, 1), {"strides": 2}),
    Case((1, 33, 9, 11), (33, 1, 3, 3), {"groups": 33, "padding": 1, "strides": 2}),
    Case((1, 16, 9, 30), (16, 1, 5, 5), {"groups": 16, "padding": 2}),
    Case((2, 6, 9, 9), (12, 2, 3, 3), {"groups": 3, "padding": 1}),
    Case((1, 2, 5, 5), (16, 2, 3, 3), {"padding": ((-1, 0), (0, -1))}),
    Case((0, 2, 5, 5), (16, 2, 3, 3), {"padding": 1}),
    Case((1, 1, 1, 1), (1, 1, 1, 1)),
]
CASES += [Case(c.x, c.w, c.more, symbolic=True) for c in CASES[1::3]]
# Every case runs on two targets, in turn, and on the others under `-m slow`.
CASES_ON_TARGETS = [
    pytest.param(
        case, target, id=f"{case}-{target.name}", marks=[pytest.mark.slow] * ((i + j) % len(TARGETS) > 1)
    )
    for i, case in enumerate(CASES)
    for j, target in enumerate(TARGETS)
]


def byte_graph(case: Case, x_zero: np.ndarray, w: np.ndarray, w_zero: np.ndarray | None) -> Graph:
    """A convolution of bytes with a weight, in i32."""
    g = rlx.Graph("bytes")
    x = g.input("x", case.shape, "i8" if x_zero.dtype == np.int8 else "u8")
    weight = g.param("w", w.shape, "i8" if w.dtype == np.int8 else "u8")
    g.set_param("w", w)
    right = None if w_zero is None else g.constant(w_zero)
    g.output("y", ops.conv_integer(x, weight, g.constant(x_zero), right, **case.more))
    return g


def draw(rng: np.random.Generator, kind: Any, shape: Any) -> np.ndarray:
    info = np.iinfo(kind)
    return np.asarray(rng.integers(info.min, info.max + 1, shape), kind)


@pytest.mark.parametrize(("case", "target"), CASES_ON_TARGETS)
def test_bytes_are_summed_exactly(case: Case, target: Target) -> None:
    rng = np.random.default_rng(3)
    for x_kind, w_kind, each in (
        (np.uint8, np.int8, None),
        (np.int8, np.int8, None),
        (np.uint8, np.uint8, case.w[:1]),
    ):
        x, zero, w = draw(rng, x_kind, case.x), draw(rng, x_kind, ()), draw(rng, w_kind, case.w)
        w_zero = None if each is None else draw(rng, w_kind, each)
        want = ops.conv_integer(x, w, zero, w_zero, **case.more)
        graph = byte_graph(case, zero, w, w_zero)
        for threads in (1, 3):
            np.testing.assert_array_equal(compiled(graph, target, threads).run({"x": x})["y"], want)


@pytest.mark.parametrize(("case", "target"), CASES_ON_TARGETS)
def test_bf16_is_summed_in_f32(case: Case, target: Target) -> None:
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in (case.x, case.w))
    g = rlx.Graph("bf16")
    weight = g.param("w", w.shape, "bf16")
    g.set_param("w", w)
    g.output("y", ops.conv(g.input("x", case.shape, "bf16"), weight, out_dtype="f32", **case.more))
    wide = [a.astype(np.float64) for a in (x, w)]
    want, size = ops.conv(*wide, **case.more), ops.conv(*map(np.abs, wide), **case.more)
    outs = [compiled(g, target, threads).run({"x": x})["y"] for threads in (1, 3)]
    np.testing.assert_array_equal(*outs)
    assert np.all(np.abs(outs[0] - want) <= np.prod(case.w[1:]) * 2.0**-23 * size)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_geometry(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    one = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    window, strides, dilations = one(1, 4), one(1, 3), one(1, 2)
    padding = tuple(zip(one(0, 3), one(0, 3), strict=True))
    size = [(k - 1) * d + 1 + n for k, d, n in zip(window, dilations, one(0, 12), strict=True)]
    groups = data.draw(st.sampled_from([1, 1, 2, 5]))
    per_in, per_out = data.draw(st.integers(1, 35)), data.draw(st.integers(1, 40))
    case = Case(
        (data.draw(st.integers(1, 2)), groups * per_in, *size),
        (groups * per_out, per_in, *window),
        {"strides": strides, "padding": padding, "dilations": dilations, "groups": groups},
        symbolic=data.draw(st.booleans()),
    )
    rng = np.random.default_rng(0)
    x, zero, w = draw(rng, np.uint8, case.x), draw(rng, np.uint8, ()), draw(rng, np.int8, case.w)
    got = compiled(byte_graph(case, zero, w, None)).run({"x": x})["y"]
    np.testing.assert_array_equal(got, ops.conv_integer(x, w, zero, **case.more))


@every_target
@pytest.mark.parametrize("at_end", [False, True], ids=["begin", "end"])
def test_no_access_outside(target: Target, at_end: bool) -> None:
    rng = np.random.default_rng(5)
    for case in CASES[:12]:
        x, zero, w = draw(rng, np.uint8, case.x), draw(rng, np.uint8, ()), draw(rng, np.int8, case.w)
        want = ops.conv_integer(x, w, zero, **case.more)
        guarded = Guarded()
        out = guarded.copy(np.zeros(want.shape, np.int32), at_end)
        program = compiled(byte_graph(case, zero, w, None), target)
        program.bind({"x": guarded.copy(x, at_end)}, {"y": out})()
        np.testing.assert_array_equal(out, want)


def quantised_net(kind: str, size: Any) -> Graph:
    """Convolutions, a pool, a residual, a depthwise layer: all quantised, with zero points."""
    rng = np.random.default_rng(6)
    g = rlx.Graph("net")
    scale, zero = (
        g.constant(np.float32(0.05)),
        g.constant(np.asarray(3, {"u8": np.uint8, "i8": np.int8}[kind])),
    )

    def layer(x: Any, channels: int, window: int, **more: Any) -> Any:
        name = f"w{len(g.params)}"
        per_in = x.shape[1] // more.get("groups", 1)
        w = g.param(name, (channels, per_in, window, window), "i8")
        g.set_param(name, draw(rng, np.int8, w.shape))
        each = g.constant(rng.uniform(0.001, 0.004, channels).astype(np.float32))
        bias = g.constant(rng.integers(-900, 900, channels).astype(np.int32))
        w_zero = g.constant(np.zeros(channels, np.int8))
        return ops.qlinear_conv(
            x, scale, zero, w, each, w_zero, scale, zero, bias, padding=window // 2, **more
        )

    x = ops.quantize(g.input("x", (1, 3, size, size), "f32"), scale, zero)
    x = ops.max_pool(layer(x, 32, 5, strides=2), 3, strides=2, padding=1)
    y = layer(layer(x, 48, 1), 32, 3)
    real = lambda a: ops.dequantize(a, scale, zero)  # noqa: E731
    x = ops.quantize(ops.relu(real(y) + real(x)), scale, zero)
    g.output("y", layer(layer(x, 32, 3, groups=32), 20, 1))
    return g


@pytest.mark.parametrize(
    ("kind", "symbolic", "target"),
    in_turn(
        {"u8": "u8", "i8": "i8"},
        {"static": False, "symbolic": True},
        {target.name: target for target in TARGETS},
    ),
)
def test_chains_of_quantised_layers(kind: str, symbolic: bool, target: Target) -> None:
    """A scale is the product of three numbers; which two meet first may move a value by one quantum."""
    g = quantised_net(kind, "s" if symbolic else 37)
    feed = {"x": np.random.default_rng(7).standard_normal((1, 3, 37, 37)).astype(np.float32)}
    got, want = compiled(g, target).run(feed)["y"], evaluate(g, feed)["y"]
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max() <= 1 and np.mean(apart != 0) < 0.01


def test_images_of_bytes_stay_in_blocks() -> None:
    """Between layers there is neither a planar image nor an image of f32."""
    program = compiled(quantised_net("u8", 37))
    mir = program.lir.mir
    stored = [t for i in program.lir.plan.schedule[:-1] for t in tensor_types(mir.nodes[i].type)]
    assert [t.dtype.name for t in stored] == ["u8"] * len(stored)
    assert [t.rank for t in stored] == [5] * len(stored)


def bottlenecks(channels: int, size: Any, kind: str = "u8") -> Graph:
    """Residual blocks from planar bytes to planar bytes, with a scale and zero point for every value."""
    rng, g = np.random.default_rng(16), rlx.Graph("bottlenecks")
    numpy_kind = {"u8": np.uint8, "i8": np.int8}[kind]

    def parameters(n: int) -> tuple[Any, Any]:
        return g.constant(np.float32(0.0313 * 1.0517**n)), g.constant(np.asarray(2 * n, numpy_kind))

    def layer(x: Any, out: int, window: int) -> Any:
        name = f"w{len(g.params)}"
        w = g.param(name, (out, x.shape[1], window, window), "i8")
        g.set_param(name, draw(rng, np.int8, w.shape))
        each = rng.uniform(0.8, 1.2, out) / (74 * window * np.sqrt(x.shape[1]))
        return ops.conv(
            x, ops.dequantize(w, g.constant(each.astype(np.float32)), axis=0), padding=window // 2
        )

    x = ops.dequantize(g.input("x", (1, channels, size, size), kind), *parameters(0))
    for block in range(2):
        y = x
        for n, (out, window) in enumerate([(channels // 2, 1), (channels // 2, 3), (channels, 1)]):
            y = ops.dequantize(ops.quantize(layer(y, out, window), *parameters(n)), *parameters(n))
        code = ops.quantize(ops.relu(y + x), *parameters(3 + block))
        x = ops.dequantize(code, *parameters(3 + block))
    g.output("y", code)
    return g


@every_target
@pytest.mark.parametrize(("channels", "kind"), [(32, "u8"), (32, "i8"), (40, "u8")])
def test_residual_blocks(channels: int, kind: str, target: Target) -> None:
    """A value that is rounded the other way at a tie may move those behind it by a quantum."""
    g = bottlenecks(channels, 11, kind)
    x = draw(np.random.default_rng(17), {"u8": np.uint8, "i8": np.int8}[kind], (1, channels, 11, 11))
    got, want = compiled(g, target).run({"x": x})["y"], evaluate(g, {"x": x})["y"]
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max() <= 1 and np.mean(apart != 0) < 0.01
    np.testing.assert_array_equal(rlx.compile(g, target=target.name, threads=2).run({"x": x})["y"], got)


def test_residuals_are_read_as_bytes_in_blocks() -> None:
    """Planar images are moved once, at either end; what is added is read as the next layer reads it."""
    program = compiled(bottlenecks(32, 11))
    mir = program.lir.mir
    kernels = [mir.nodes[i] for i in program.lir.plan.schedule]
    assert [str(k.tensor.dtype) for k in kernels] == ["u8"] * 8
    images = [[o.rank for o in k.operands if o.dtype.name == "u8" and o.rank > 3] for k in kernels]
    assert images == [[4], [5], [5], [5, 5], [5], [5], [5, 5], [5]]


def test_precision_bf16_takes_convolutions_along() -> None:
    """Where bf16 is multiplied in pairs, images between layers are bf16; one that is added stays f32."""
    rng = np.random.default_rng(8)
    g = rlx.Graph("net")

    def layer(x: Any, channels: int, window: int, **more: Any) -> Any:
        name = f"w{len(g.params)}"
        w = rng.standard_normal((channels, x.shape[1], window, window)).astype(np.float32)
        weight = g.param(name, w.shape, "f32")
        g.set_param(name, w / np.float32(np.sqrt(w[0].size)))
        return ops.relu(ops.conv(x, weight, padding=window // 2, **more))

    x = layer(g.input("x", (1, 3, 40, 40), "f32"), 32, 7, strides=2)
    y = layer(layer(x, 48, 1), 32, 3, strides=1)
    g.output("y", layer(x + y, 32, 1))
    feed = {"x": rng.standard_normal((1, 3, 40, 40)).astype(np.float32)}
    want = evaluate(g, feed)["y"]
    program = compiled(g, precision="bf16")
    got = program.run(feed)["y"]
    cosine = np.sum(got * want) / np.linalg.norm(got) / np.linalg.norm(want)
    assert cosine >= 0.9999
    name = "x86-64-v4-bf16-vnni"
    if name in [t.name for t in TARGETS]:
        nodes = [
            n
            for r in rlx.compile(g, target=name, precision="bf16").lir.mir.nodes
            for b in r.bodies
            for n in b.nodes
        ]
        kinds = [n.operands[0].dtype.name for n in nodes if n.op.family == "conv"]
        assert kinds.count("bf16") >= 3
