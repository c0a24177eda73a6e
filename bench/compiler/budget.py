"""What memory budgets cost: bytes of activations and time with and without, results compared bit by bit.

    python bench/compiler/budget.py [--share 0.7] [--rounds 10] [--threads 1] [--model minilm|training|all]

Both programs run in turn, so that whatever else the machine does falls on both; the best of each counts. On a
machine that is busy with other things, trust the CPU time of one thread and not the time on the wall.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from rlx import ops
from rlx.cost.decision import bytes_text
from rlx.ir.graph import Graph, Node

Case = tuple[Graph, dict[str, np.ndarray], dict[str, int]]


def minilm(batch: int = 32, seq: int = 128) -> Case:
    """The trained encoder at b32 s128: fits by slices of the batch."""
    from rlx import zoo
    from rlx.zoo.minilm import load_graph

    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30000, (batch, seq))
    feed = {"input_ids": ids, "attention_mask": np.ones((batch, seq), np.int64)}
    return load_graph(zoo.fetch("minilm").parent), feed, {"batch": batch, "seq": seq}


def training(layers: int = 4, batch: int = 16, size: int = 32, channels: int = 32) -> Case:
    """Loss and gradients of conv + relu layers, a pool and a dense layer: fits by computing again."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        shapes |= {f"kernel{i}": (channels, channels if i else 3, 3, 3), f"bias{i}": (channels, 1, 1)}
    shapes |= {"dense": (channels * (size // 4) ** 2, 10), "x": (batch, 3, size, size), "wanted": (batch, 10)}

    def loss(weights: list[Node], x: Node, wanted: Node) -> Node:
        h = x
        for i in range(layers):
            h = ops.relu(ops.conv(h, weights[2 * i], padding=((1, 1), (1, 1))) + weights[2 * i + 1])
        error = ops.reshape(ops.avg_pool(h, (4, 4), strides=(4, 4)), (batch, -1)) @ weights[-1] - wanted
        made: Node = ops.mean(error * error)
        return made

    g = Graph("training")
    with g.building():
        *weights, x, wanted = (g.input(name, shape, "f32") for name, shape in shapes.items())
        value, grads = rlx.value_and_grad(loss)(weights, x, wanted)
    g.output("loss", value)
    for name, grad in zip(shapes, grads, strict=False):
        g.output(f"d_{name}", grad)
    rng = np.random.default_rng(0)
    return g, {name: (rng.standard_normal(s) / 10).astype(np.float32) for name, s in shapes.items()}, {}


CASES: dict[str, Callable[[], Case]] = {"minilm": minilm, "training": training}


def changes(program: Any) -> str:
    """What the budget did, in a few words."""
    from rlx.plan.memory.slices import slices_of

    fitted, plan = program.stats["budget"], program.lir.plan
    words = [str(s) for n in plan.work if (s := slices_of(plan, program.lir.mir.nodes[n])) is not None]
    again = sum(len(r["kernels"]) for r in fitted["recomputed"])
    if again:
        words.append(f"{again} kernels again, predicted +{100 * fitted['ps_added'] / fitted['ps']:.1f} %")
    return "; ".join(words) or ("another order" if fitted["reordered"] else "nothing")


def measure(name: str, share: float, rounds: int, threads: int | None) -> str:
    """One line of the table."""
    graph, feed, sizes = CASES[name]()
    free = rlx.compile(graph, assume=sizes, threads=threads)
    before = free.memory(sizes)["activation"]
    start = time.perf_counter()
    held = rlx.compile(graph, assume=sizes, budget=int(before * share), threads=threads)
    seconds = time.perf_counter() - start
    after = held.memory(sizes)["activation"]
    want, got = free.run(feed), held.run(feed)
    same = all(np.array_equal(got[k], want[k]) for k in want)
    wall, cpu = [float("inf")] * 2, [float("inf")] * 2
    for _ in range(rounds):
        for i, program in enumerate((free, held)):
            start, spent = time.perf_counter(), time.process_time()
            program.run(feed)
            wall[i] = min(wall[i], time.perf_counter() - start)
            cpu[i] = min(cpu[i], time.process_time() - spent)
    return (
        f"{name:<9} {bytes_text(before):>9} -> {bytes_text(after):>9} ({after / before:.3f})  "
        f"wall {1e3 * wall[0]:.1f} -> {1e3 * wall[1]:.1f} ms ({wall[1] / wall[0]:.3f})  "
        f"CPU {1e3 * cpu[0]:.1f} -> {1e3 * cpu[1]:.1f} ms ({cpu[1] / cpu[0]:.3f})  "
        f"bits {'equal' if same else 'DIFFER'}, compiled in {seconds:.1f} s: {changes(held)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--share", type=float, default=0.7, help="budget as a share of the default peak")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", choices=(*CASES, "all"), default="all")
    options = parser.parse_args()
    for name in CASES if options.model == "all" else (options.model,):
        print(measure(name, options.share, options.rounds, options.threads), flush=True)


if __name__ == "__main__":
    main()
