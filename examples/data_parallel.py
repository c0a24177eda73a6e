"""Training on parts of a batch: every rank differentiates its part, gradients are averaged over the ranks.

    rlx launch -n 2 examples/data_parallel.py

Two ways to say the same. `step` is written for one rank and averages by hand with `rlx.ops.all_reduce`.
`joint_step` is written for the whole batch and knows nothing of ranks: compiled with a mesh and a sharded
batch, it gets its sums over ranks from the compiler. Both give the weights that one rank gets for the joint
batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx
from rlx import ops
from rlx.dist import Mesh, Shard, init

Weights = dict[str, Any]
RATE, STEPS, ROWS = 0.1, 5, 64  # rows of a rank


def loss(weights: Weights, x: Any, y: Any) -> Any:
    """Mean squared error of a network with one attention layer over its rows' features."""
    q, k, v = (ops.reshape(x @ weights[name], (x.shape[0], 4, 8)) for name in ("q", "k", "v"))
    mixed = ops.softmax(q @ ops.transpose(k, (0, 2, 1)) / 8.0**0.5, axis=-1) @ v
    hidden = ops.layer_norm(x @ weights["skip"] + ops.reshape(mixed, (x.shape[0], 32)), weights["scale"])
    return ops.mean((ops.gelu(hidden) @ weights["out"] - y) ** 2.0)


def updated(weights: Weights, gradients: Weights) -> Weights:
    return {name: w - RATE * gradients[name] for name, w in weights.items()}


def joint_step(weights: Weights, x: Any, y: Any) -> tuple[Any, Weights]:
    """One step of gradient descent on a batch."""
    value, gradients = rlx.value_and_grad(loss)(weights, x, y)
    return value, updated(weights, gradients)


def data(rows: int) -> tuple[Weights, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (16, 32), "k": (16, 32), "v": (16, 32), "skip": (16, 32), "out": (32, 4)}
    weights: Weights = {n: (rng.standard_normal(s) / 4).astype(np.float32) for n, s in shapes.items()}
    weights["scale"] = np.ones(32, np.float32)
    x = rng.standard_normal((rows, 16)).astype(np.float32)
    return weights, x, np.tanh(x[:, :4] * x[:, 4:8])


def main() -> None:
    transport = init()
    ranks, rank = transport.num_ranks, int(transport.this_rank)
    mesh = Mesh({"dp": ranks})

    @rlx.jit(mesh=mesh, threads=1)
    def step(weights: Weights, x: Any, y: Any) -> tuple[Any, Weights]:
        value, gradients = rlx.value_and_grad(loss)(weights, x, y)
        mean = {n: ops.all_reduce(g, axis="dp", ranks=ranks, kind="mean") for n, g in gradients.items()}
        return ops.all_reduce(value, axis="dp", ranks=ranks, kind="mean"), updated(weights, mean)

    start, x, y = data(ROWS * ranks)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    batch = len(start)  # arguments are numbered: arg0 ... are the weights, then x and y
    shardings = {f"arg{batch}": {"dp": Shard(0)}, f"arg{batch + 1}": {"dp": Shard(0)}}
    sharded = rlx.jit(joint_step, mesh=mesh, shardings=shardings, threads=1)
    alone = rlx.jit(joint_step, threads=1)

    by_hand, by_compiler, joint = start, start, start
    for _ in range(STEPS):
        value, by_hand = step(by_hand, x[mine], y[mine])
        _, by_compiler = sharded(by_compiler, x[mine], y[mine])
        _, joint = alone(joint, x, y)
    for name, weights in (("averaged by hand", by_hand), ("sums inserted by the compiler", by_compiler)):
        worst = max(float(np.abs(weights[n] - joint[n]).max()) for n in joint)
        if rank == 0:
            print(f"{name}: after {STEPS} steps weights differ from the joint batch's by at most {worst:.1e}")
        assert worst < 1e-6
    if rank == 0:
        print(f"loss {float(value):.4f}")


if __name__ == "__main__":
    main()
