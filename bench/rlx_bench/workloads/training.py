"""One training step: forward, gradients and the update of the weights, compiled as one function."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from rlx_bench.workloads.base import Run, Workload, normal, rng
from rlx_bench.workloads.languages import jax_language, rlx_language, torch_language

PEERS = ("torch", "jax")
RATE = 0.01


def _workload(
    name: str, feed: dict[str, np.ndarray], weights: tuple[str, ...], loss: Any, flops: float
) -> Workload:
    """`loss(xp, **tensors)` is written in a small common language, see `languages`."""

    def graph() -> Any:
        from rlx.api.functions import value_and_grad
        from rlx.ir.graph import Graph

        language, g = rlx_language(), Graph("step")
        with g.building():
            named = {k: g.input(k, v.shape, v.dtype) for k, v in feed.items()}
            fixed = {k: v for k, v in named.items() if k not in weights}
            value = value_and_grad(
                lambda *w: loss(language, **fixed, **dict(zip(weights, w, strict=True))),
                argnums=tuple(range(len(weights))),
            )
            total, gradients = value(*(named[w] for w in weights))
            g.output("loss", total)
            for w, gradient in zip(weights, gradients, strict=True):
                g.output(f"{w}_next", named[w] - RATE * gradient)
        return g

    def torch_ways(tensors: dict[str, Any]) -> list[Run]:
        import torch

        language = torch_language()

        def step() -> list[Any]:
            leaves = {w: tensors[w].detach().requires_grad_() for w in weights}
            with torch.enable_grad():
                total = loss(language, **(tensors | leaves))
            gradients = torch.autograd.grad(total, list(leaves.values()))
            return [
                total.detach(),
                *(
                    torch.sub(w.detach(), g, alpha=RATE)
                    for w, g in zip(leaves.values(), gradients, strict=True)
                ),
            ]

        return [step]

    def jax_ways(tensors: dict[str, Any]) -> list[Run]:
        import jax

        language = jax_language()

        def step(tensors: dict[str, Any], old: Any) -> Any:
            leaves = {w: tensors[w] for w in weights}
            total, gradients = jax.value_and_grad(lambda w: loss(language, **(tensors | w)))(leaves)
            return total, [tensors[w] - RATE * gradients[w] for w in weights]

        compiled = jax.jit(step, donate_argnums=1, keep_unused=True)
        kept = [jax.jit(lambda t: step(t, None))(tensors)]

        def run() -> list[Any]:
            kept[0] = compiled(tensors, kept[0])
            total, moved = jax.block_until_ready(kept[0])
            return [total, *moved]

        return [run]

    return Workload(
        name, feed, PEERS, graph=graph, torch=torch_ways, jax=jax_ways, flops=flops, tolerance=1e-3
    )


def mlp(batch: int = 128) -> Workload:
    """784-512-512-10, relu, cross entropy, plain SGD."""
    generator, sizes = rng(), (784, 512, 512, 10)
    feed = {
        "x": normal(generator, batch, 784),
        "hot": np.eye(10, dtype=np.float32)[generator.integers(0, 10, batch)],
    }
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        feed |= {f"w{i}": normal(generator, a, b, scale=a**-0.5), f"b{i}": np.zeros(b, np.float32)}

    def loss(xp: Any, x: Any, hot: Any, w0: Any, b0: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        h = xp.relu(x @ w0 + b0)
        h = xp.relu(h @ w1 + b1)
        return -xp.mean(xp.log_softmax(h @ w2 + b2) * hot) * 10.0

    flops = 6.0 * batch * sum(a * b for a, b in itertools.pairwise(sizes))
    return _workload(f"train step MLP b{batch}", feed, tuple(feed)[2:], loss, flops)


def transformer_block(batch: int = 8, seq: int = 128, width: int = 256, heads: int = 4) -> Workload:
    """Attention and feed-forward with pre-norm; squared loss, plain SGD."""
    generator, scale = rng(), width**-0.5
    feed = {"x": normal(generator, batch, seq, width), "goal": normal(generator, batch, seq, width)}
    shapes = {
        "wqkv": (width, 3 * width),
        "wo": (width, width),
        "w1": (width, 4 * width),
        "w2": (4 * width, width),
    }
    feed |= {name: normal(generator, *shape, scale=scale) for name, shape in shapes.items()}

    def loss(xp: Any, x: Any, goal: Any, wqkv: Any, wo: Any, w1: Any, w2: Any) -> Any:
        depth = width // heads
        mixed = xp.transpose(xp.reshape(xp.norm(x) @ wqkv, (batch, seq, 3, heads, depth)), (2, 0, 3, 1, 4))
        q, k, v = mixed[0], mixed[1], mixed[2]
        weights = xp.softmax(q @ xp.transpose(k, (0, 1, 3, 2)) * depth**-0.5)
        context = xp.reshape(xp.transpose(weights @ v, (0, 2, 1, 3)), (batch, seq, width))
        x = x + context @ wo
        x = x + xp.gelu(xp.norm(x) @ w1) @ w2
        return xp.mean((x - goal) * (x - goal))

    products = sum(a * b for a, b in shapes.values())
    flops = 6.0 * batch * seq * products + 12.0 * batch * seq * seq * width
    return _workload(f"train step transformer b{batch} s{seq} d{width}", feed, tuple(shapes), loss, flops)
