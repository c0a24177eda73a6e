"""What weights take: memory of a cold start, of a loaded file, of eight processes with one file, and on disk.

    python bench/memory.py [mlp int4 minilm ppocr-cls open-nsfw smollm2] [--processes 8] [--times 1]
    python bench/memory.py zoo networks

Every figure comes from a process of its own, in MiB. `model` is the file that the model comes from, `weights`
what kernels read, `arena` what runs compute in (values between kernels, inputs, outputs, scratch), `.rlx` the
file that `save` writes, `entry` that of the cache. `peak` is the largest resident memory of a cold start:
`rlx.load` with an empty cache, a run, and storing the program; `limit` what it may be: 1.5 times the weights
and 64 MiB. `rss` is what is resident then; `loaded` the largest for the `.rlx` file. `private` is the memory
of one of several processes, each of which has loaded the `.rlx` file and run it, without the arena; `pss`
counts shared pages as their shares. All of these are above a process that does the same with a graph of one
op, which the first line shows. `cpu` is CPU time of the cold start without imports, the least of `--times`.
A `!` marks a peak beyond its limit and the arena, and private memory beyond 5 % of the weights and 4 MiB for
code and plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx import config, zoo

MIB = 1 << 20
DEFAULT = ("mlp", "int4", "minilm", "ppocr-cls", "open-nsfw", "smollm2")
LARGE = 64 * MIB  # that a start may take besides 1.5 times the weights
CODE = 4 * MIB  # that a process may have for itself besides 5 % of the weights
SIDE = 4096
EMPTY = "one op"
COLUMNS = (
    "model",
    "weights",
    "arena",
    ".rlx",
    "entry",
    "peak",
    "limit",
    "rss",
    "loaded",
    "private",
    "pss",
)
ABOVE = ("peak", "rss", "loaded", "private", "pss")


def write_mlp(path: Path) -> None:
    """An ONNX file with random weights: two layers of f32."""
    from rlx.zoo.onnx_writer import OnnxWriter

    writer, generator = OnnxWriter(), np.random.default_rng(0)
    first, second = (
        writer.weight(f"w{i}", generator.random((SIDE, SIDE), np.float32) - np.float32(0.5)) for i in range(2)
    )
    hidden = writer.op("Relu", writer.op("MatMul", "x", first))
    writer.op("MatMul", hidden, second, outputs=["y"])
    rows = {"x": (np.float32, (1, SIDE))}
    model = writer.model("mlp", rows, {"y": (np.float32, (1, SIDE))})
    path.write_bytes(model.SerializeToString())


def models(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Files of models, or `zoo:ID`, by the names of models."""
    from rlx_bench.workloads import make, models_named  # memory: not in processes that are measured

    found: dict[str, str] = {}
    for name in names:
        if name == "smollm2":
            found[name] = f"zoo:{name}"
        elif name == "mlp":
            write_mlp(folder / "mlp.onnx")
            found[name] = str(folder / "mlp.onnx")
        else:
            made = {n: make(spec) for n, spec in models_named([name]).items()}
            found |= {n: str(workload.path or f"zoo:{n}") for n, workload in made.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--times", type=int, default=1, help="cold starts per model")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        _alone(*args.alone)
        return
    print(f"{'MiB':<16}" + "".join(f"{name:>9} " for name in COLUMNS) + f"{'cpu s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        empty = _measured("", Path(folder), args)
        _tell(EMPTY, empty)
        for name, model in models(args.models or DEFAULT, Path(folder)).items():
            found = _measured(model, Path(folder), args)
            found |= {column: found[column] - empty[column] for column in ABOVE}
            found["private"] = max(found["private"] - found["arena"], 0.0)
            _tell(name, found)


def _tell(name: str, found: dict[str, float]) -> None:
    large = {"peak": found["limit"] + found["arena"], "private": 0.05 * found["weights"] + CODE}
    beyond = {column for column, most in large.items() if name != EMPTY and found[column] > most}
    told = "".join(f"{found[column] / MIB:9.1f}{'!' if column in beyond else ' '}" for column in COLUMNS)
    print(f"{name:<16}{told}{found['cpu']:9.2f}", flush=True)


def _measured(model: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """All figures of a model by its file or as `zoo:ID`; those of the small graph if there is none."""
    file, starts = folder / "saved.rlx", []
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as cache:
            Path(cache, "zoo").symlink_to(config.CACHE.get() / "zoo")
            starts.append(_child("cold", model, cache=cache).found())
            entries = list(Path(cache, "programs").glob("*.rlx"))
            entry = entries[0].stat().st_size if entries else 0
    best = min(starts, key=lambda start: float(start["cpu"]))
    _child("save", model, str(file)).found()
    loaded = _child("load", str(file)).found()
    several = [_child("wait", str(file)) for _ in range(args.processes)]
    for child in several:
        child.line()  # all of them have run
    shares = [_shares(child.process.pid) for child in several]
    for child in several:
        child.found()
    path = zoo.path(model.removeprefix("zoo:")) if model.startswith("zoo:") else Path(model)
    return {
        "model": path.stat().st_size if model else 0,
        "weights": best["weights"],
        "arena": best["arena"],
        ".rlx": file.stat().st_size,
        "limit": 1.5 * best["weights"] + LARGE,
        "entry": entry,
        "peak": min(start["peak"] for start in starts),
        "rss": best["rss"],
        "cpu": best["cpu"],
        "loaded": loaded["peak"],
        "private": sum(private for private, _ in shares) / len(shares),
        "pss": sum(pss for _, pss in shares) / len(shares),
    }


class _child:
    """A process that measures itself; one that waits ends when it has been asked for what it found."""

    def __init__(self, *what: str, cache: str | None = None) -> None:
        env = {**os.environ, "RLX_CACHE": cache or str(config.CACHE.get())}
        command = [sys.executable, __file__, "--alone", *what]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def found(self) -> dict[str, float]:
        told, _ = self.process.communicate("\n")
        if self.process.returncode:
            raise SystemExit(f"{self.process.args} failed")
        found: dict[str, float] = json.loads(told)
        return found


def _alone(what: str, name: str = "", file: str = "") -> None:
    """One measurement in this process, as JSON."""
    import rlx

    start = time.process_time()
    program, run = _program(rlx, name)
    run()
    cpu = time.process_time() - start
    if what == "wait":
        print("ready", flush=True)
        sys.stdin.readline()
    elif what == "save":
        program.save(file)
    elif what == "cold":
        from rlx.runtime.store.programs import wait_until_stored

        wait_until_stored()
    status = _status("/proc/self/status")
    spaces = program.memory(program.lir.planner.binding)
    found = {
        "peak": status["VmHWM"],
        "rss": status["VmRSS"],
        "cpu": cpu,
        "weights": program.stats["weights"],
        "arena": sum(size for space, size in spaces.items() if space != "weight"),
    }
    print(json.dumps(found))


def _program(rlx: Any, name: str) -> tuple[Any, Callable[[], object]]:
    if not name:
        g = rlx.Graph("small")
        g.output("y", g.input("x", (8,), "f32") * 2.0)
        program = rlx.compile(g)
    elif name == "zoo:smollm2":
        program = rlx.llm.load(name, context=64).program
    else:
        program = rlx.load(name)
    sizes = program.lir.planner.binding  # that the plan was made for
    given: dict[str, Any] = {
        node.attrs["name"]: np.zeros(node.tensor.bind(sizes), node.dtype.np) for node in program.inputs
    }
    if "past" in program.input_names:
        given["past"] = 0
        return program, lambda: program.stream().step(given)
    return program, lambda: program.run(given)


def _shares(pid: int) -> tuple[int, int]:
    """Private bytes of a process, and its share of all that it uses."""
    found = _status(f"/proc/{pid}/smaps_rollup")
    return found["Private_Clean"] + found["Private_Dirty"], found["Pss"]


def _status(path: str) -> dict[str, int]:
    """Bytes by name, of a file of the system with lines like `VmHWM: 10 kB`."""
    words = [line.split() for line in Path(path).read_text().splitlines()]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}


if __name__ == "__main__":
    main()
