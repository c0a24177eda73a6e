"""Sizes of 0, 1 and a few at run time, through every kind of kernel, with inputs that end at a fence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import Guarded
from machines import on_targets
from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import resolve, runs_here

SIZES = (0, 1, 2, 5)
NAMES = ("host", "x86-64-v3", "x86-64")
TARGETS = list(dict.fromkeys(t.name for t in map(resolve, NAMES) if runs_here(t)))


class Made(Graph):
    """A graph whose inputs and weights are quickly said."""

    def x(self, *shape: Any, dtype: str = "f32") -> Node:
        return self.input(f"x{len(self.inputs)}", shape, dtype)

    def w(self, *shape: int) -> Node:
        value = np.random.default_rng(len(self.params)).standard_normal(shape).astype(np.float32) / 5
        return self.param(f"w{len(self.params)}", shape, "f32", value)


def feed_forward(g: Made) -> Any:
    x = g.x("n", "m", 24)
    h = ops.layer_norm(x, g.w(24), g.w(24))
    return ops.linear(ops.gelu(ops.linear(h, g.w(24, 40), g.w(40))), g.w(40, 24)) + x


def gated(g: Made) -> Any:
    x = g.x("n", 24)
    h = ops.rms_norm(x, g.w(24))
    return ops.linear(ops.silu(ops.linear(h, g.w(24, 40))) * ops.linear(h, g.w(24, 40)), g.w(40, 24))


def scaled_product(g: Made) -> Any:
    return ops.relu((g.x("n", "k") * 2.0) @ g.x("k", "m")) + 1.0


def batched_product(g: Made) -> Any:
    return ops.tanh(g.x("b", "n", "k") @ ops.transpose(g.x("b", "m", "k"), (0, 2, 1)))


def rows(g: Made) -> Any:
    x = g.x("n", "m")
    return (
        ops.softmax(x * 2.0),
        ops.softmax(x, axis=0),
        ops.log_softmax(x),
        ops.layer_norm(x),
        ops.var(x, axis=0),
    )


def reductions(g: Made) -> Any:
    x = g.x("n", "m")
    return (
        ops.sum(x * x, axis=1),
        ops.max(x, axis=0),
        ops.prod(x),
        ops.logsumexp(x, axis=1),
        ops.mean(x, axis=1),
    )


def attention(g: Made) -> Any:
    q, k, v = g.x("b", 4, "n", 16), g.x("b", 2, "m", 16), g.x("b", 2, "m", 16)
    return ops.attention(q, k, v, g.x("b", 1, 1, "m"))


def causal(g: Made) -> Any:
    x = g.x("b", "n", 32)
    b, n = x.shape[:2]
    q, k, v = (
        ops.transpose(ops.reshape(part, (b, n, 2, 16)), (0, 2, 1, 3))
        for part in ops.split(ops.linear(x, g.w(32, 96)), 3, axis=-1)
    )
    mixed = ops.transpose(ops.attention(q, k, v, causal=True), (0, 2, 1, 3))
    return ops.linear(ops.reshape(mixed, (b, n, 32)), g.w(32, 32)) + x


def convolutions(g: Made) -> Any:
    x = g.x("n", 16, "h", "w")
    y = ops.relu(ops.conv(x, g.w(32, 16, 3, 3), g.w(32), padding=1))
    return ops.conv(ops.conv(y, g.w(32, 1, 3, 3), padding=1, groups=32), g.w(16, 32, 1, 1)) + x


def winograd(g: Made) -> Any:
    return ops.relu(ops.conv(g.x("n", 64, 14, 14), g.w(64, 64, 3, 3), g.w(64), padding=1))


def strided(g: Made) -> Any:
    x = g.x("n", 3, "h", "w")
    return ops.conv(x, g.w(16, 3, 3, 3), padding=1, strides=2), ops.max_pool(x, 3, padding=1, strides=2)


def transposed_convolution(g: Made) -> Any:
    return ops.relu(ops.conv_transpose(g.x("n", 4, "h", "w"), g.w(4, 8, 3, 3), strides=2))


def lstm(g: Made) -> Any:
    return ops.lstm(g.x("s", "n", 6), g.w(1, 32, 6), g.w(1, 32, 8), g.w(1, 64))


def running(g: Made) -> Any:
    x = g.x("n", "m")
    return ops.sort(x, axis=1), ops.argsort(x, axis=0), ops.cumsum(x * 2.0, axis=1), ops.cumsum(x, axis=0)


def moves(g: Made) -> Any:
    x = g.x("n", 7)
    y = ops.concat([x, ops.flip(x, 0) * 2.0], axis=0)
    return (
        y,
        ops.transpose(x) + 1.0,
        ops.pad(x, ((1, 2), (0, 1))),
        ops.expand_dims(x, 2) * ops.expand_dims(x, 1),
    )


def lookups(g: Made) -> Any:
    at = g.x("n", 1, dtype="i64")
    added = ops.scatter_nd(g.w(11, 5), at, g.x("n", 5), reduction="add")
    return ops.gather(g.w(11, 9), at, axis=0) * 2.0, added + 1.0, ops.one_hot(at, 5)


def spectrum(g: Made) -> Any:
    return ops.square(ops.real(ops.rfft(g.x("n", 20))))


def selection(g: Made) -> Any:
    return ops.argwhere(g.x("n", "m") > 0.0)


KERNELS = [
    feed_forward,
    gated,
    scaled_product,
    batched_product,
    rows,
    reductions,
    attention,
    causal,
    convolutions,
    winograd,
    strided,
    transposed_convolution,
    lstm,
    running,
    moves,
    lookups,
    spectrum,
    selection,
]


@pytest.mark.parametrize(
    ("build", "target"),
    [(build, TARGETS[i % len(TARGETS)]) for i, build in enumerate(KERNELS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_small_sizes_are_the_reference(build: Callable[[Made], Any], target: str) -> None:
    check(build, target)


@pytest.mark.slow
@on_targets(TARGETS)
@pytest.mark.parametrize("build", KERNELS, ids=lambda build: build.__name__)
def test_small_sizes_on_every_target(build: Callable[[Made], Any], target: str) -> None:
    check(build, target)


def check(build: Callable[[Made], Any], target: str) -> None:
    g = Made(build.__name__)
    with g.building():
        made = build(g)
    for i, node in enumerate(made if isinstance(made, tuple | list) else [made]):
        g.output(f"y{i}", node)
    one, two = (rlx.compile(g, target=target, threads=n) for n in (1, 2))
    names = sorted({s for node in g.inputs for s in map(str, node.shape) if not s.isdigit()})
    guarded, rng = Guarded(), np.random.default_rng(0)
    for sizes in itertools.product(SIZES, repeat=len(names)):
        binding = dict(zip(names, sizes, strict=True))
        feed = {}
        for node in g.inputs:
            shape = node.tensor.bind(binding)
            values = rng.integers(0, 5, shape) if str(node.dtype) == "i64" else rng.standard_normal(shape)
            feed[node.attrs["name"]] = guarded.copy(values.astype(node.dtype.np), at_end=True)
        with np.errstate(all="ignore"):
            want = evaluate(g, feed)
        got, again = one.run(feed), two.run(feed)
        for name, value in want.items():
            assert got[name].shape == value.shape and got[name].dtype == value.dtype, binding
            np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-5, err_msg=f"{name} at {binding}")
            assert got[name].tobytes() == again[name].tobytes(), f"{name} at {binding}"
