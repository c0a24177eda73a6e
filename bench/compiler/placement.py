"""How close memory plans come to the lower bound, and what planning costs.

Graphs have the shapes of known models, without their arithmetic: sizes and edges are all that a planner sees.
The second binding of a graph (another batch or sequence) is placed by replaying the order that won for the
first.

    python bench/compiler/placement.py            # all sets
    python bench/compiler/placement.py resnet     # those whose name contains the word
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rlx.plan.memory.place import Block, Placement, check_placement, place, replay
from rlx.plan.schedule import Dag, lifetimes, schedule

F32 = 4
REPEATS = 7


@dataclass
class Model:
    """A graph under construction: every node makes one value."""

    sizes: list[int] = field(default_factory=list)
    operands: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def op(self, elements: int, *operands: int) -> int:
        self.sizes.append(elements * F32)
        self.operands.append(operands)
        return len(self.sizes) - 1

    def dag(self) -> Dag:
        numbers = range(len(self.sizes))
        return Dag(numbers, dict(enumerate(self.operands)), dict(enumerate(self.sizes)), outputs=self.outputs)


def transformer(batch: int, seq: int, hidden: int, heads: int, layers: int, flash: bool) -> Model:
    """An encoder; without flash attention the scores and weights of every head are stored."""
    model = Model()
    tokens = batch * seq
    x = model.op(tokens * hidden, model.op(tokens * hidden))
    mask = model.op(tokens)
    for _ in range(layers):
        qkv = model.op(3 * tokens * hidden, x)
        if flash:
            mixed = model.op(tokens * hidden, qkv, mask)
        else:
            weights = model.op(batch * heads * seq * seq, model.op(batch * heads * seq * seq, qkv), mask)
            mixed = model.op(tokens * hidden, weights, qkv)
        x = model.op(tokens * hidden, model.op(tokens * hidden, mixed, x))
        x = model.op(tokens * hidden, model.op(tokens * hidden, model.op(4 * tokens * hidden, x), x))
    model.outputs.append(model.op(batch * hidden, x, mask))
    return model


def resnet50(batch: int) -> Model:
    model = Model()
    x = model.op(batch * 64 * 56 * 56, model.op(batch * 64 * 112 * 112))
    side, channels = 56, 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            reduced = model.op(batch * channels * side * side, x)
            side //= 2 if stage and not block else 1
            spatial = model.op(batch * channels * side * side, reduced)
            shortcut = x if block else model.op(4 * batch * channels * side * side, x)
            x = model.op(4 * batch * channels * side * side, spatial, shortcut)
        channels *= 2
    model.outputs.append(model.op(batch * 1000, model.op(batch * 2048, x)))
    return model


def unet(batch: int) -> Model:
    model = Model()
    side, channels = 256, 32
    x, skips = model.op(batch * 3 * side * side), []
    for _ in range(5):
        x = model.op(batch * channels * side * side, model.op(batch * channels * side * side, x))
        skips.append(x)
        side //= 2
        x = model.op(batch * channels * side * side, x)
        channels *= 2
    for skip in reversed(skips):
        channels //= 2
        side *= 2
        up = model.op(batch * channels * side * side, x)
        joined = model.op(2 * batch * channels * side * side, up, skip)
        x = model.op(batch * channels * side * side, model.op(batch * channels * side * side, joined))
    model.outputs.append(model.op(batch * side * side, x))
    return model


def detector(side: int) -> Model:
    """A mobile backbone with a feature pyramid, exported breadth first as some tools do."""
    model = Model()
    cell = side // 4
    x, features = model.op(6 * side * side), []
    for level, channels in enumerate((48, 96, 192, 384)):
        area = (cell >> level) ** 2
        for _ in range(4):
            wide = model.op(2 * channels * area, model.op(2 * channels * area, x))
            gate = model.op(2 * channels, wide)
            x = model.op(channels * area, model.op(2 * channels * area, wide, gate), x)
        features.append(x)
        x = model.op(channels * area // 4, x)
    lateral = [model.op(96 * (cell >> level) ** 2, feature) for level, feature in enumerate(features)]
    top, pyramid = lateral[3], [lateral[3]]
    for level in (2, 1, 0):
        area = (cell >> level) ** 2
        top = model.op(96 * area, model.op(96 * area, top), lateral[level])
        pyramid.append(top)
    smooth = [model.op(24 * (cell >> level) ** 2, p) for level, p in zip((3, 2, 1, 0), pyramid, strict=True)]
    joined = model.op(96 * cell * cell, *[model.op(24 * cell * cell, s) for s in smooth])
    model.outputs.append(model.op(side * side, model.op(6 * side * side, joined)))
    return model


def cnn_training(batch: int) -> Model:
    """Forward, then backward through convolution, batch norm and relu; gradients of weights are outputs."""
    shapes = [(16, 32), (16, 32), (32, 16), (32, 16), (64, 8), (64, 8), (128, 4)]
    model = Model()
    layers, x = [], model.op(batch * 3 * 32 * 32)
    for channels, side in shapes:
        size = batch * channels * side * side
        convolved = model.op(size, x)
        moments = model.op(2 * channels, convolved)
        layers.append((x, convolved, moments, model.op(size, convolved, moments)))
        x = layers[-1][3]
    grad = model.op(batch * 10, x)
    for number, (source, convolved, moments, result) in reversed(list(enumerate(layers))):
        channels, side = shapes[number]
        size = batch * channels * side * side
        grad = model.op(size, model.op(size, grad, result), convolved, moments)
        model.outputs.append(model.op(channels * 9 * (shapes[number - 1][0] if number else 3), grad, source))
        grad = model.op(model.sizes[source] // F32, grad)
    return model


def random_dag(count: int, seed: int) -> Model:
    chance = random.Random(seed)
    model = Model()
    for node in range(count):
        reads = {
            max(0, node - 1 - int(chance.expovariate(0.25))) for _ in range(chance.choice((1, 1, 1, 2, 3)))
        }
        model.op(16 * int(2 ** chance.uniform(0, 12)), *sorted(reads) if node else ())
    model.outputs.append(count - 1)
    return model


def random_intervals(count: int, seed: int, lifetime: int) -> list[Block]:
    """Intervals without a graph behind them: harder than any model."""
    chance = random.Random(seed)
    blocks = []
    for key in range(count):
        first = chance.randrange(count)
        last = first + int(chance.expovariate(1 / lifetime))
        blocks.append(Block(key, 64 * chance.randrange(1, 1000), first, last))
    return blocks


# Name -> the graph at its first binding and, where sizes are symbolic, at a second one.
MODELS: dict[str, tuple[Callable[[], Model], Callable[[], Model] | None]] = {
    "minilm b1 s128": (
        lambda: transformer(1, 128, 384, 12, 6, True),
        lambda: transformer(32, 37, 384, 12, 6, True),
    ),
    "minilm unfused": (
        lambda: transformer(1, 128, 384, 12, 6, False),
        lambda: transformer(1, 16, 384, 12, 6, False),
    ),
    "gpt2 unfused": (
        lambda: transformer(1, 256, 768, 12, 12, False),
        lambda: transformer(1, 512, 768, 12, 12, False),
    ),
    "resnet50": (lambda: resnet50(1), lambda: resnet50(8)),
    "unet": (lambda: unet(1), lambda: unet(4)),
    "detector": (lambda: detector(640), lambda: detector(416)),
    "cnn training": (lambda: cnn_training(32), lambda: cnn_training(7)),
    "random dag 100": (lambda: random_dag(100, 1), None),
    "random dag 300": (lambda: random_dag(300, 2), None),
    "random dag 1000": (lambda: random_dag(1000, 3), None),
}
INTERVALS: dict[str, Callable[[], list[Block]]] = {
    "intervals 100 x 8": lambda: random_intervals(100, 1, 8),
    "intervals 300 x 8": lambda: random_intervals(300, 2, 8),
    "intervals 1000 x 8": lambda: random_intervals(1000, 3, 8),
    "intervals 100 x 30": lambda: random_intervals(100, 4, 30),
    "intervals 300 x 60": lambda: random_intervals(300, 5, 60),
}


def blocks_of(dag: Dag, order: tuple[int, ...]) -> list[Block]:
    return [Block(root, dag.sizes[root], *span) for root, span in lifetimes(dag, order).items()]


def best_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processor time of the best of several runs, so that other load does not count."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def place_row(name: str, blocks: list[Block], plan: Placement) -> str:
    check_placement(blocks, plan.offsets, plan.total)
    times = [
        best_ms(lambda: place(blocks)),
        best_ms(lambda: replay(plan.order, blocks)),
        best_ms(lambda: check_placement(blocks, plan.offsets)),
    ]
    milliseconds = " ".join(f"{t:8.2f}" for t in times)
    bound = plan.lower_bound / 2**20
    return f"{name:20} {len(blocks):5} {bound:9.3f} {plan.ratio:7.4f} {plan.heuristic:19} {milliseconds}"


def main(words: list[str]) -> None:
    print(
        f"{'set':20} {'block':>5} {'bound MiB':>9} {'arena/b':>7} {'found by':19} {'place':>8} {'replay':>8} "
        f"{'check':>8} | {'replayed':>8} | {'schedule':>8} {'peak/given':>10} by  (times in ms)"
    )
    for name, (first, second) in MODELS.items():
        if words and not any(word in name for word in words):
            continue
        dag = first().dag()
        order = schedule(dag)
        blocks = blocks_of(dag, order.order)
        plan = place(blocks)
        replayed = "-"
        if second is not None:
            other = second().dag()
            replayed = f"{replay(plan.order, blocks_of(other, order.order)).ratio:.4f}"
        print(
            f"{place_row(name, blocks, plan)} | {replayed:>8} | {best_ms(partial(schedule, dag)):8.2f} "
            f"{order.peak / order.given_peak:10.4f} {order.heuristic}"
        )
    for name, make in INTERVALS.items():
        if not words or any(word in name for word in words):
            blocks = make()
            print(place_row(name, blocks, place(blocks)))


if __name__ == "__main__":
    main(sys.argv[1:])
