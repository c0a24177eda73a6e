"""What planning costs: CPU time per stage from MIR to LIR, for graphs of about 1,000 nodes.

    python bench/plan_speed.py [bert|convnet|random] [--nodes 1000] [--times 3] [--profile 30]

Verifiers are off. Every run is a process of its own, which has planned tiny graphs before (so that modules
are loaded) and no other: tables that outlive a plan are empty. Figures are milliseconds of CPU time of the
fastest run. Load on the machine still slows a run down; the yardstick, a fixed piece of Python timed in the
same processes, says by how much: compare ratios to it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rlx
from rlx.api.compile import plan
from rlx.api.lowering import lower
from rlx.ir.graph import Graph, Node

sys.path.append(str(Path(__file__).parents[1] / "tests" / "models"))
from random_programs import random_program

ops = rlx.ops


def bert(nodes: int) -> Graph:
    """Encoder layers as exporters write them: attention in primitive ops, symbolic batch and sequence."""
    g = Graph("bert")
    hidden, heads = 384, 12
    x = g.input("x", ("batch", "seq", hidden), "f32")
    mask = g.input("mask", ("batch", "seq"), "i64")
    batch, seq, _ = x.shape
    seen = ops.reshape((1.0 - ops.cast(mask, "f32")) * -1e9, (batch, 1, 1, seq))

    def linear(value: Node, width: int) -> Node:
        count = len(g.params)
        return value @ g.param(f"w{count}", (value.shape[-1], width)) + g.param(f"b{count}", (width,))

    def norm(value: Node) -> Node:
        count = len(g.params)
        scale, shift = g.param(f"s{count}", (hidden,)), g.param(f"t{count}", (hidden,))
        return ops.layer_norm(value, scale, shift)

    def split(value: Node) -> Node:
        return ops.transpose(ops.reshape(value, (batch, seq, heads, hidden // heads)), (0, 2, 1, 3))

    while len(g) < nodes * 0.54:  # what the expansion of norms and activations leaves room for
        q, k, v = (split(linear(x, hidden)) for _ in range(3))
        scores = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)) * 0.17677669 + seen, axis=-1)
        mixed = ops.reshape(ops.transpose(scores @ v, (0, 2, 1, 3)), (batch, seq, hidden))
        x = norm(x + linear(mixed, hidden))
        x = norm(x + linear(ops.gelu(linear(x, 4 * hidden)), hidden))
    g.output("y", x)
    return g


def convnet(nodes: int) -> Graph:
    """Residual blocks with convolutions, batch norms, hard activations and squeeze-excitation."""
    g = Graph("convnet")
    x = g.input("x", ("batch", 3, "height", "width"), "f32")
    rng = np.random.default_rng(0)

    def conv(value: Node, out: int, size: int, stride: int = 1, groups: int = 1) -> Node:
        count = len(g.params)
        shape = (out, int(value.shape[1]) // groups, size, size)
        weight = g.param(f"w{count}", shape, value=rng.standard_normal(shape).astype(np.float32))
        bias = g.param(f"b{count}", (out,), value=np.zeros(out, np.float32))
        return ops.conv(value, weight, bias, strides=stride, padding=size // 2, groups=groups)

    x = ops.hard_swish(conv(x, 16, 3, 2))
    layer = 0
    while len(g) < nodes * 0.53:
        width = 16 * (1 + layer % 4)
        y = ops.hard_swish(conv(x, 2 * width, 1))
        y = ops.hard_swish(conv(y, 2 * width, 3 + 2 * (layer % 2), groups=2 * width))
        s = ops.mean(y, axis=(2, 3), keepdims=True)
        s = ops.hard_sigmoid(conv(ops.relu(conv(s, width // 2, 1)), 2 * width, 1))
        y = conv(y * s, width, 1)
        x = x + y if int(x.shape[1]) == width else y
        layer += 1
    g.output("y", ops.mean(x, axis=(2, 3)))
    return g


def mixed(nodes: int) -> Graph:
    """The random programs of the fusion tests: every form, views of all kinds, several readers."""
    made: Graph = random_program(seed=1, size=int(nodes * 0.36), symbolic=True)[0]
    return made


KINDS: dict[str, Callable[[int], Graph]] = {"bert": bert, "convnet": convnet, "random": mixed}


def yardstick() -> float:
    """Milliseconds of CPU time for a fixed amount of Python: tuples, dicts and method calls."""
    gc.disable()  # its cost depends on what else is in memory
    start = time.process_time()
    known: dict[tuple[int, str], int] = {}
    for i in range(60_000):
        key = (i % 997, str(i % 13))
        known[key] = known.get(key, 0) + len(key)
    spent = (time.process_time() - start) * 1e3
    gc.enable()
    return spent


def prepared(kind: str, nodes: int) -> Graph:
    """MIR to plan, in a process that has loaded all it needs for that."""
    for make in KINDS.values():
        plan(make(20))
    return lower(KINDS[kind](nodes))


def spent_on(mir: Graph) -> dict[str, float]:
    """Milliseconds of CPU time per stage, from MIR to LIR."""
    start = time.process_time()
    lir = plan(mir)
    total = time.process_time() - start
    stages = dict(lir.trace.seconds)
    stages["schedule and place"] = total - sum(stages.values())
    stages["all"] = total
    return {name: seconds * 1e3 for name, seconds in stages.items()}


def run_alone(kind: str, nodes: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, kind, "--nodes", str(nodes), "--alone"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def show(kind: str, nodes: int, times: int) -> None:
    runs = [run_alone(kind, nodes) for _ in range(times)]
    best = min(runs, key=lambda run: run["all"])
    count, stick = best.pop("nodes"), min(run.pop("yardstick") for run in runs)
    print(f"{kind}: {count} nodes of MIR; yardstick {stick:.1f} ms")
    for stage, spent in best.items():
        print(f"  {stage:<24} {spent:8.1f} ms {1e3 * spent / count:8.1f} us per node")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="show that many functions by their own time")
    parser.add_argument("--alone", action="store_true", help="one run in this process, as JSON")
    args = parser.parse_args()
    for kind in args.kinds or KINDS:
        if args.alone:
            mir = prepared(kind, args.nodes)
            print(json.dumps({**spent_on(mir), "nodes": len(mir), "yardstick": yardstick()}))
        elif args.profile:
            mir, profile = prepared(kind, args.nodes), cProfile.Profile(time.process_time)
            profile.runcall(spent_on, mir)
            pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
        else:
            show(kind, args.nodes, args.times)


if __name__ == "__main__":
    main()
