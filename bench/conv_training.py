"""A conv net's training step through rlx.jit, weights as arguments, against a graph with the same sizes.

python bench/conv_training.py [--rounds 20]

CPU time of one thread, least of the rounds. "other sizes first": after a call with another batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rlx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
from sample_training import loss_of, training_graph


def steps(batch: int, size: int, channels: int, layers: int) -> dict[str, Callable[[], object]]:
    """Ways to run the same step."""
    graph, feed = training_graph(layers, batch, size, channels)
    weights = [value for name, value in feed.items() if name not in ("x", "wanted")]
    fixed = rlx.compile(graph, threads=1)
    step = rlx.value_and_grad(loss_of(layers))
    first, later = rlx.jit(step, threads=1), rlx.jit(step, threads=1)
    x, wanted = feed["x"], feed["wanted"]
    later(weights, np.concatenate([x, x]), np.concatenate([wanted, wanted]))
    return {
        "fixed sizes": lambda: fixed.run(feed),
        "jit": lambda: first(weights, x, wanted),
        "jit, other sizes first": lambda: later(weights, x, wanted),
    }


def least_seconds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU time of each way, interleaved."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for batch, size, channels, layers in ((2, 16, 8, 4), (8, 32, 32, 4), (4, 64, 32, 3)):
        found = least_seconds(steps(batch, size, channels, layers), rounds)
        fixed = found["fixed sizes"]
        print(f"batch {batch}, images of {size}, {channels} channels, {layers} layers: {fixed * 1e3:.2f} ms")
        for name, seconds in found.items():
            print(f"    {name:24} {seconds / fixed:5.2f} x")


if __name__ == "__main__":
    main()
