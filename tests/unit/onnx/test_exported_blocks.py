"""Blocks as exporters write them, from primitive ops: each becomes one kernel, and computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.ir.graph import Graph
from rlx.ir.op import Role
from rlx.plan.lir import LirModule
from rlx.reference.interpreter import evaluate

pytestmark = pytest.mark.usefixtures("each_origin")

WIDTH = 16


def gelu_erf(x: Any) -> Any:
    """Div by sqrt(2), Erf, Add 1, Mul, Mul 0.5: torch's exporter, and Keras'."""
    return x * (ops.erf(x / math.sqrt(2.0)) + 1.0) * 0.5


def gelu_tanh(x: Any) -> Any:
    """GPT-2's: a cube by Pow, as exporters have it."""
    cubed = ops.pow(x, 3.0)
    return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * cubed)))


def gelu_sigmoid(x: Any) -> Any:
    return x * ops.sigmoid(1.702 * x)


def silu(x: Any) -> Any:
    return x * ops.sigmoid(x)


def silu_by_exp(x: Any) -> Any:
    return x / (1.0 + ops.exp(-x))


def hard_swish(x: Any) -> Any:
    return x * ops.minimum(ops.maximum(x + 3.0, 0.0), 6.0) / 6.0


def mish(x: Any) -> Any:
    return x * ops.tanh(ops.log(1.0 + ops.exp(x)))


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    """ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul, Add."""
    centred = x - ops.mean(x, axis=-1, keepdims=True)
    variance = ops.mean(ops.pow(centred, 2.0), axis=-1, keepdims=True)
    return centred / ops.sqrt(variance + 1e-5) * scale + shift


def layer_norm_by_moments(x: Any, scale: Any, shift: Any) -> Any:
    """TensorFlow's: E[x^2] - E[x]^2, and a reciprocal root."""
    mean = ops.mean(x, axis=-1, keepdims=True)
    variance = ops.mean(x * x, axis=-1, keepdims=True) - mean * mean
    factor = ops.rsqrt(variance + 1e-3) * scale
    return x * factor + (shift - mean * factor)


def rms_norm(x: Any, scale: Any) -> Any:
    """Llama's: Pow, ReduceMean, Add, Sqrt, Reciprocal, Mul, Mul."""
    power = ops.mean(ops.pow(x, 2.0), axis=-1, keepdims=True)
    return scale * (x * ops.reciprocal(ops.sqrt(power + 1e-6)))


def softmax(x: Any) -> Any:
    e = ops.exp(x - ops.max(x, axis=-1, keepdims=True))
    return e / ops.sum(e, axis=-1, keepdims=True)


def log_softmax(x: Any) -> Any:
    shifted = x - ops.max(x, axis=-1, keepdims=True)
    return shifted - ops.log(ops.sum(ops.exp(shifted), axis=-1, keepdims=True))


def swiglu(x: Any) -> Any:
    """A split in halves, silu of one times the other."""
    half = WIDTH // 2
    return silu(ops.slice_axis(x, x.rank - 1, 0, half)) * ops.slice_axis(x, x.rank - 1, half, half)


def rope(x: Any, cos: Any, sin: Any) -> Any:
    """Llama's: halves turned by Slice, Neg, Concat, then x * cos + turned * sin."""
    half = WIDTH // 2
    last = x.rank - 1
    turned = ops.concat([-ops.slice_axis(x, last, half, half), ops.slice_axis(x, last, 0, half)], last)
    return x * cos + turned * sin


def rope_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """GPT-J's: neighbours are turned."""
    shape = (*x.shape[:-1], WIDTH // 2, 2)
    pairs = ops.reshape(x, shape)
    even = ops.slice_axis(pairs, x.rank, 0, 1)
    odd = ops.slice_axis(pairs, x.rank, 1, 1)
    turned = ops.reshape(ops.concat([-odd, even], x.rank), x.shape)
    return x * cos + turned * sin


class Block(NamedTuple):
    name: str
    kind: str
    build: Callable[..., Any]
    shapes: list[tuple[Any, ...]]
    params: list[tuple[int, ...]] = []


ROWS: list[tuple[Any, ...]] = [("n", WIDTH)]
LINEAR: list[tuple[int, ...]] = [(WIDTH, WIDTH), (WIDTH,)]
HEADS: list[tuple[Any, ...]] = [(2, 3, "n", WIDTH), ("n", WIDTH), ("n", WIDTH)]
BLOCKS = [
    *(Block(f.__name__, "map", f, ROWS) for f in (gelu_erf, gelu_tanh, gelu_sigmoid)),
    *(Block(f.__name__, "map", f, ROWS) for f in (silu, silu_by_exp, hard_swish, mish, swiglu)),
    *(Block(f.__name__, "reduce", f, ROWS) for f in (softmax, log_softmax)),
    *(
        Block(f.__name__, "reduce", f, ROWS, [(WIDTH,), (WIDTH,)])
        for f in (layer_norm, layer_norm_by_moments)
    ),
    Block("rms_norm", "reduce", rms_norm, ROWS, [(WIDTH,)]),
    *(Block(f.__name__, "map", f, HEADS) for f in (rope, rope_interleaved)),
    Block(
        "residual, layer_norm",
        "reduce",
        lambda x, y, a, b: layer_norm(x + y, a, b),
        ROWS * 2,
        [(WIDTH,), (WIDTH,)],
    ),
    *(
        Block(f"product, {f.__name__}", "contract", lambda x, w, b, f=f: f(x @ w + b), ROWS, LINEAR)
        for f in (gelu_erf, gelu_tanh, silu)
    ),
    Block(
        "convolution, batch norm, hard_swish",
        "conv",
        lambda x, w, a, b: hard_swish(ops.conv(x, w, padding=1) * a + b),
        [("n", 3, 8, 8)],
        [(8, 3, 3, 3), (8, 1, 1), (8, 1, 1)],
    ),
]  # fmt: skip


def built(block: Block) -> Graph:
    g = rlx.Graph(block.name)
    rng = np.random.default_rng(1)
    xs = [g.input(f"x{i}", s, "f32") for i, s in enumerate(block.shapes)]
    ws = [g.param(f"w{i}", s, "f32", rng.standard_normal(s, np.float32)) for i, s in enumerate(block.params)]
    g.output("y", block.build(*xs, *ws))
    return g


def kinds(lir: LirModule) -> list[str]:
    nodes = [lir.mir.nodes[i] for i in lir.plan.schedule]
    return [n.attrs["kind"] if n.op.role is Role.REGION else n.op.name for n in nodes]


@pytest.mark.parametrize("block", BLOCKS, ids=[b.name for b in BLOCKS])
def test_an_exported_block_is_one_kernel(block: Block) -> None:
    g = built(block)
    lir = plan(g, checks=True)
    assert kinds(lir) == [block.kind]
    rng = np.random.default_rng(2)
    feed = {
        f"x{i}": rng.standard_normal([5 if d == "n" else d for d in shape], np.float32)
        for i, shape in enumerate(block.shapes)
    }
    got, want = rlx.compile(g).run(feed)["y"], evaluate(g, feed)["y"]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_gated_feed_forward_is_products_only() -> None:
    """Llama's: silu(x @ gate) * (x @ up), then down with a residual."""
    g = rlx.Graph("feed forward")
    x = g.input("x", ("n", WIDTH), "f32")
    rng = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> Any:
        return g.param(name, shape, "f32", rng.standard_normal(shape, np.float32) / 4)

    inner = silu(x @ weight("gate", WIDTH, 64)) * (x @ weight("up", WIDTH, 64))
    g.output("y", x + inner @ weight("down", 64, WIDTH))
    found = kinds(plan(g))
    assert set(found) == {"contract"} and len(found) <= 3
    feed = {"x": rng.standard_normal((7, WIDTH), np.float32)}
    np.testing.assert_allclose(rlx.compile(g).run(feed)["y"], evaluate(g, feed)["y"], rtol=1e-4, atol=1e-4)
