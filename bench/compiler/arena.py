"""How close the arenas of whole models come to their lower bounds, and what the order of kernels gains.

    python bench/compiler/arena.py                # all models
    python bench/compiler/arena.py minilm silero  # those whose name contains a word
    python bench/compiler/arena.py --json

One row per model and binding: bytes of the activation space, the proven bound of the order in force, their
ratio (1.03 is the goal), and the bound of the order in which the model came (which ours may not exceed).
Plans are made as `rlx.compile` makes them, in-place results included; every one is proven by `check()`.
Models of the zoo are fetched once; the others have random weights, which do not matter to a plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx import ops, zoo
from rlx.api.compile import plan
from rlx.cost.decision import bytes_text
from rlx.ir.graph import Graph
from rlx.plan.build import Planner

sys.path.insert(0, str(Path(__file__).parents[1]))
from convnets import RlxBuilder, bottlenecks

GOAL = 1.03


@dataclass(frozen=True)
class Row:
    """The arena of one model at one binding."""

    name: str
    binding: dict[str, int]
    kernels: int
    arena: int
    bound: int
    given_bound: int  # of the order in which the model came
    plan_ms: float

    @property
    def ratio(self) -> float:
        return self.arena / self.bound if self.bound else 1.0

    @property
    def good(self) -> bool:
        return self.ratio <= GOAL and self.bound <= self.given_bound


def gpt2(layers: int = 12, hidden: int = 768, heads: int = 12, vocab: int = 50257) -> Graph:
    """A decoder as GPT-2 is one: learned positions, causal attention, tied output weights."""
    g = rlx.Graph("gpt2")
    ids = g.input("input_ids", ("batch", "seq"), "i64")
    batch, seq = ids.shape
    width = hidden // heads

    def param(name: str, *shape: int) -> Any:
        return g.param(name, shape, "f32", np.zeros(shape, np.float32))

    def norm(x: Any, name: str) -> Any:
        return ops.layer_norm(x, param(f"{name}.w", hidden), param(f"{name}.b", hidden))

    def linear(x: Any, name: str, k: int, n: int) -> Any:
        return x @ param(f"{name}.w", k, n) + param(f"{name}.b", n)

    table = param("wte", vocab, hidden)
    x = ops.take(table, ids, axis=0) + ops.slice_axis(param("wpe", 1024, hidden), 0, 0, seq)
    for i in range(layers):
        qkv = linear(norm(x, f"h{i}.ln1"), f"h{i}.qkv", hidden, 3 * hidden)
        split = ops.reshape(qkv, (batch, seq, 3, heads, width))
        q, k, v = (ops.transpose(split[:, :, part], (0, 2, 1, 3)) for part in range(3))
        mixed = ops.transpose(ops.attention(q, k, v, causal=True), (0, 2, 1, 3))
        x = x + linear(ops.reshape(mixed, (batch, seq, hidden)), f"h{i}.proj", hidden, hidden)
        inner = ops.gelu(linear(norm(x, f"h{i}.ln2"), f"h{i}.up", hidden, 4 * hidden))
        x = x + linear(inner, f"h{i}.down", 4 * hidden, hidden)
    g.output("logits", norm(x, "ln_f") @ ops.transpose(table))
    return g


def resnet50() -> Graph:
    net = RlxBuilder("batch", 224)
    bottlenecks(net, 1, 64)
    return net.graph


def zoo_model(id: str) -> Graph:
    from rlx.api.session import read_graph
    from rlx.zoo.minilm import load_graph

    path = zoo.fetch(id)
    return load_graph(path.parent) if path.suffix == ".safetensors" else read_graph(path)


@dataclass(frozen=True)
class Subject:
    """A model, and sizes by position: the symbols of imported models have names of their own."""

    make: Callable[[], Graph]
    bindings: Sequence[Sequence[int]]


MODELS: Mapping[str, Subject] = {
    "MiniLM": Subject(lambda: zoo_model("minilm"), ((1, 128), (32, 128), (1, 16), (8, 37), (3, 512))),
    "ResNet-50": Subject(resnet50, ((1,), (8,))),
    "GPT-2": Subject(gpt2, ((1, 128), (4, 64), (1, 1024))),
    "magika": Subject(lambda: zoo_model("magika"), ((1,), (16,))),
    "PP-OCRv4 det": Subject(lambda: zoo_model("ppocr-det"), ((1, 640, 640), (1, 480, 640), (1, 960, 736))),
    "basic-pitch": Subject(lambda: zoo_model("basic-pitch"), ((1,), (4,))),
    "silero-vad": Subject(lambda: zoo_model("silero-op15"), ((1, 512), (4, 512))),
    "silero-ifless": Subject(lambda: zoo_model("silero-ifless"), ((1, 512), (4, 512))),
}


def rows(name: str, subject: Subject) -> Iterator[Row]:
    """A row for every binding of one model; the first is the one that it is planned for."""
    graph = subject.make()
    symbols = graph.symbols()
    bindings = [dict(zip(symbols, sizes, strict=False)) for sizes in subject.bindings]
    start = time.perf_counter()
    lir = plan(graph, assume=bindings[0])
    spent = (time.perf_counter() - start) * 1e3
    given = Planner(lir.mir, bindings[0], order=sorted(lir.plan.schedule))
    for binding in {tuple(b.items()): b for b in bindings}.values():
        full = {s: binding.get(s, lir.plan.binding[s]) for s in lir.dynamic_symbols()}
        buffers = lir.specialize(full).plan
        buffers.check()
        bounds = buffers.lower_bound(), given.plan(full).lower_bound()
        yield Row(name, full, len(buffers.schedule), buffers.arena_size, *bounds, spent)


def table(found: Sequence[Row]) -> str:
    lines = [
        f"{'model':13} {'sizes':24} {'kernels':>7} {'arena':>9} {'bound':>9} {'ratio':>6} {'given order':>11}"
    ]
    for row in found:
        sizes = " ".join(f"{k}={v}" for k, v in row.binding.items())[:24]
        lines.append(
            f"{row.name:13} {sizes:24} {row.kernels:7} {bytes_text(row.arena):>9} {bytes_text(row.bound):>9} "
            f"{row.ratio:6.3f} {bytes_text(row.given_bound):>11}" + ("" if row.good else "  MISSED")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only models whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    wanted = {
        name: subject
        for name, subject in MODELS.items()
        if not options.words or any(word.lower() in name.lower() for word in options.words)
    }
    found = [row for name, subject in wanted.items() for row in rows(name, subject)]
    print(json.dumps([asdict(row) for row in found]) if options.json else table(found))
    sys.exit(0 if all(row.good for row in found) else 1)


if __name__ == "__main__":
    main()
