"""A GPT-style model whose weights exceed the memory they are granted: memory, and speed against both limits.

Weights are random and made one at a time, the `.rlx` file is written without ever holding all of them, and
one process runs the model with the budget while another has it whole in memory. They take turns, and the best
times count: other programs on the machine can only disturb.

One token is bound by reading the file: its speed is compared with reading and computing nothing, in the same
process, with one thread and with two, whichever is faster: once all weights of the model, which is what a
token needs, and once those bytes that a run really reads, as the budget keeps some in memory. A long prompt
is bound by compute: its time is compared with the resident program's.

Run: python bench/weight_streaming.py [--budget 200MiB] [--layers 14] [--width 1536] [--prompt 512]
With --file the model is made there once and kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from overlap import go_first
from rlx import ops
from rlx.config import parse_bytes
from rlx.ir.graph import Graph, Node
from rlx.runtime.native.reader import EVERYTHING, Fill, Reader
from rlx.runtime.native.streaming import PIECE, StreamedWeights


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    layers: int = 14
    width: int = 1536
    vocabulary: int = 8192
    context: int = 1024

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)


def build(model: Model) -> Graph:
    """A GPT with symbolic sequence length; params have no values yet."""
    g, d = rlx.Graph("gpt"), model.width
    ids = g.input("ids", ("seq",), "i64")
    seq = ids.shape[0]
    with g.building():
        positions = ops.iota((seq,), 0)
    x = ops.embedding(g.param("tokens", (model.vocabulary, d), "f32"), ids)
    x = x + ops.embedding(g.param("positions", (model.context, d), "f32"), positions)
    for i in range(model.layers):
        x = x + _attention(g, f"{i}.", _norm(g, f"{i}.norm1", x), model)
        h = ops.gelu(_linear(g, f"{i}.up", _norm(g, f"{i}.norm2", x), 4 * d))
        x = x + _linear(g, f"{i}.down", h, d)
    last = ops.slice_axis(_norm(g, "norm", x), 0, seq - 1, 1)
    g.output("logits", _linear(g, "head", last, model.vocabulary))
    return g


def _linear(g: Graph, name: str, x: Node, width: int) -> Node:
    w = g.param(f"{name}.w", (x.shape[-1], width), "f32")
    made: Node = x @ w + g.param(f"{name}.b", (width,), "f32")
    return made


def _norm(g: Graph, name: str, x: Node) -> Node:
    d = x.shape[-1]
    made: Node = ops.layer_norm(x, g.param(f"{name}.w", (d,), "f32"), g.param(f"{name}.b", (d,), "f32"))
    return made


def _attention(g: Graph, prefix: str, x: Node, model: Model) -> Node:
    seq, d, heads = x.shape[0], model.width, model.heads

    def split(t: Node) -> Node:
        parted: Node = ops.transpose(ops.reshape(t, (1, seq, heads, d // heads)), (0, 2, 1, 3))
        return parted

    q, k, v = (split(_linear(g, prefix + name, x, d)) for name in ("q", "k", "v"))
    context = ops.attention(q, k, v, causal=True)
    joined = ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (seq, d))
    return _linear(g, prefix + "out", joined, d)


def fill(graph: Graph, folder: Path) -> int:
    """Give every param a random value in a file; returns the bytes of all of them."""
    rng, total = np.random.default_rng(0), 0
    for number, (name, node) in enumerate(graph.params.items()):
        shape = node.tensor.bind({})
        value = rng.standard_normal(shape, np.float32)
        value *= 0.02 if len(shape) == 1 else shape[0] ** -0.5
        if "norm" in name and name.endswith(".w"):
            value += 1
        path = folder / f"{number}.raw"
        value.tofile(path)
        graph.set_param(name, np.memmap(path, np.float32, "r", shape=shape))
        total += value.nbytes
    return total


def make(model: Model, path: Path, budget: str) -> dict[str, int]:
    """Write the program of a model to `path`; never more than one weight at a time is in memory."""
    graph = build(model)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        total = fill(graph, Path(folder))
        rlx.compile(graph, weight_budget=budget, weight_file=path, assume={"seq": 128})
    return {"weights": total, "peak": peak_memory()}


def peak_memory() -> int:
    """Bytes that this process had in memory at most (VmHWM), mapped pages of files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


# -- one process per program


def all_weights(weights: StreamedWeights) -> Reader:
    """Who reads every weight of a file, through the ring of its program."""
    assert weights.ring is not None
    address, room = int(weights.ring.ctypes.data), weights.ring.nbytes // PIECE * PIECE
    fills, at = [], 0
    for number in weights._numbers.values():
        offset, nbytes = weights._file.place(number)
        for begin in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - begin)
            fills.append(Fill(offset + begin, address + at, size, 0, EVERYTHING))
            at = (at + PIECE) % room
    return Reader(weights._source, fills)


def best_read(reader: Reader) -> float:
    """Seconds to read everything and compute nothing, by one thread or two."""
    times = []
    for helping in (True, False):
        reader.begin()
        began = time.perf_counter()
        reader.read_all(helping)
        times.append(time.perf_counter() - began)
        reader.settle()
    return min(times)


def serve(path: Path, budget: str) -> None:
    """Load a program and run what is asked for on standard input, a line of JSON each."""
    go_first()
    program = rlx.load(path, weight_budget=budget)
    weights = program._weights
    streamed = isinstance(weights, StreamedWeights) and weights.reader is not None
    everything = all_weights(weights) if streamed else None
    for line in sys.stdin:
        seq, reads = json.loads(line)
        ids = np.random.default_rng(seq).integers(0, 256, seq)
        for _ in range(2 if reads else 0):  # steady: what other processes have left in the caches is gone
            program(ids)
        before = program.stats["streaming"]
        began = time.perf_counter()
        logits = program(ids)
        seconds = time.perf_counter() - began
        after = program.stats["streaming"]
        assert after is not None, "the file has a budget"
        reply = {
            "seconds": seconds,
            "reading": after["reading_seconds"] - before["reading_seconds"],
            "waiting": after["waiting_seconds"] - before["waiting_seconds"],
            "logits": logits.ravel()[:64].tolist(),
            "sum": float(np.abs(logits).sum()),
            "bytes": after["bytes_per_run"],
            "plain": best_read(weights.reader) if reads and streamed else 0.0,
            "whole": best_read(everything) if reads and everything is not None else 0.0,
            "peak": peak_memory(),
            "memory": program.memory({"seq": seq}),
        }
        print(json.dumps(reply), flush=True)


class Worker:
    """A process that serves a program."""

    def __init__(self, path: Path, budget: str) -> None:
        command = [sys.executable, __file__, "--serve", str(path), "--budget", budget]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, seq: int, reads: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([seq, reads]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the model ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def worker(path: Path, budget: str) -> Iterator[Worker]:
    """A worker that ends with the block."""
    made = Worker(path, budget)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Result:
    """What was measured. Times are seconds, sizes bytes."""

    weights: int
    budget: int
    maker_peak: int
    peak: int
    activations: int
    equal: bool
    token: float  # one token, streamed
    token_resident: float
    whole: float  # reading all weights, and nothing else
    plain: float  # reading only the bytes of one run
    read: int  # bytes of one run
    prompt: float  # a long prompt, streamed
    prompt_resident: float

    @property
    def of_limit(self) -> float:
        """Speed of one token over that of what binds it: reading all weights, or the resident program."""
        return max(self.whole, self.token_resident) / self.token

    @property
    def slowdown(self) -> float:
        return self.prompt / self.prompt_resident

    @property
    def over(self) -> int:
        """Peak memory beyond budget and activations."""
        return self.peak - self.budget - self.activations

    def __str__(self) -> str:
        def mib(n: int) -> str:
            return f"{n / (1 << 20):.0f} MiB"

        return "\n".join(
            (
                f"weights {mib(self.weights)}, budget {mib(self.budget)}; results equal: {self.equal}",
                f"peak memory {mib(self.peak)}: budget + activations {mib(self.activations)} + "
                f"{mib(self.over)}; the process that wrote the file had {mib(self.maker_peak)}",
                f"one token {self.token * 1e3:.0f} ms; reading all weights {self.whole * 1e3:.0f} ms, "
                f"resident {self.token_resident * 1e3:.0f} ms: {self.of_limit:.0%} of the limit",
                f"a run reads {mib(self.read)}; reading only these {self.plain * 1e3:.0f} ms: "
                f"{self.plain / self.token:.0%}",
                f"prompt {self.prompt * 1e3:.0f} ms; resident {self.prompt_resident * 1e3:.0f} ms: "
                f"{self.slowdown:.2f} times as long",
            )
        )


def measure(model: Model, budget: str, prompt: int, rounds: int, path: Path) -> Result:
    """Make a model, unless there is one, and run it in both ways, in turns."""
    facts = path.with_suffix(".json")
    if not path.exists():
        arguments = [f"--{k}={v}" for k, v in vars(model).items()]
        command = [sys.executable, __file__, "--make", str(path), "--budget", budget, *arguments]
        facts.write_text(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    made = json.loads(facts.read_text())
    kinds = ("token", "token whole", "prompt", "prompt whole")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with worker(path, budget) as streamed, worker(path, "1000GiB") as whole:
        for process in (streamed, whole):  # plans, and pages of the file
            process.run(1)
            process.run(prompt)
        for _ in range(rounds):
            runs["token"].append(streamed.run(1, reads=True))
            runs["token whole"].append(whole.run(1))
        for _ in range(max(2, rounds // 2)):
            runs["prompt"].append(streamed.run(prompt))
            runs["prompt whole"].append(whole.run(prompt))

    def best(kind: str, what: str = "seconds") -> float:
        return float(min(run[what] for run in runs[kind]))

    def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        return bool(a["logits"] == b["logits"] and a["sum"] == b["sum"])

    memory = runs["prompt"][0]["memory"]
    return Result(
        made["weights"],
        parse_bytes(budget),
        made["peak"],
        runs["prompt"][-1]["peak"],
        sum(memory[s] for s in ("activation", "input", "output", "scratch")),
        same(runs["token"][0], runs["token whole"][0]) and same(runs["prompt"][0], runs["prompt whole"][0]),
        best("token"),
        best("token whole"),
        best("token", "whole"),
        best("token", "plain"),
        int(runs["token"][0]["bytes"]),
        best("prompt"),
        best("prompt whole"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="200MiB", help="memory for weights (default 200MiB)")
    for name, value in vars(Model()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the model (default {value})")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt (default 512)")
    parser.add_argument("--rounds", type=int, default=7, help="turns (default 7)")
    parser.add_argument("--folder", help="where the file of the model is made (default: a temporary folder)")
    parser.add_argument("--file", help="where the model is made and kept, or was made before")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = Model(given.layers, given.width, given.vocabulary, given.context)
    if given.make:
        print(json.dumps(make(model, Path(given.make), given.budget)))
    elif given.serve:
        serve(Path(given.serve), given.budget)
    else:
        folder = Path(tempfile.mkdtemp(prefix="rlx-streaming-", dir=given.folder))
        try:
            path = Path(given.file) if given.file else folder / "gpt.rlx"
            print(measure(model, given.budget, given.prompt, given.rounds, path))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
