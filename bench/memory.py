"""What weights take: memory of a cold start, of a loaded file, of eight processes with one file, and on disk.

    python bench/memory.py [mlp int4 minilm ppocr-cls open-nsfw smollm2] [--processes 8] [--times 1]

Every figure comes from a process of its own, in MiB. `model` is the file that the model comes from, `weights`
what kernels read, `.rlx` the file that `save` writes, `entry` that of the cache. `peak` is the largest
resident memory of a cold start: `rlx.load` with an empty cache, a run, and storing the program; `rss` what is
resident then; `loaded` the largest for the `.rlx` file. `private` is the memory of one of several processes,
each of which has loaded the `.rlx` file and run it; `pss` counts shared pages as their shares. All of these
are above a process that does the same with a graph of one op, which the first line shows. `cpu` is CPU time
of the cold start without imports, the least of `--times`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlx import config, zoo

MIB = 1 << 20
ZOO = ("minilm", "ppocr-cls", "open-nsfw", "smollm2")
MADE = ("mlp", "int4")
SIDE = 4096
COLUMNS = ("model", "weights", ".rlx", "entry", "peak", "rss", "loaded", "private", "pss")


def write_model(name: str, path: Path) -> None:
    """An ONNX file with random weights: two layers of f32, or a matrix of four bits in groups of 32."""
    from rlx.zoo.onnx_writer import OnnxWriter

    writer, generator = OnnxWriter(), np.random.default_rng(0)
    if name == "int4":
        group = 32
        codes = generator.integers(0, 256, (SIDE, SIDE // group, group // 2), np.uint8)
        scales = generator.random((SIDE, SIDE // group), np.float32)
        weights = writer.weight("w", codes), writer.weight("s", scales)
        about = {"K": SIDE, "N": SIDE, "bits": 4, "block_size": group}
        writer.op("MatMulNBits", "x", *weights, outputs=["y"], domain="com.microsoft", **about)
    else:
        first, second = (
            writer.weight(f"w{i}", generator.random((SIDE, SIDE), np.float32) - np.float32(0.5))
            for i in range(2)
        )
        hidden = writer.op("Relu", writer.op("MatMul", "x", first))
        writer.op("MatMul", hidden, second, outputs=["y"])
    rows = {"x": (np.float32, (1, SIDE))}
    model = writer.model(name, rows, {"y": (np.float32, (1, SIDE))}, contrib=name == "int4")
    path.write_bytes(model.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"default: {' '.join((*MADE, *ZOO))}")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--times", type=int, default=1, help="cold starts per model")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        _alone(*args.alone)
        return
    print(f"{'MiB':<12}" + "".join(f"{name:>10}" for name in COLUMNS) + f"{'cpu s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        empty = _measured("", Path(folder), args)
        _tell("one op", empty)
        for model in args.models or (*MADE, *ZOO):
            found = _measured(model, Path(folder), args)
            above = {name: found[name] - empty[name] for name in ("peak", "rss", "loaded", "private", "pss")}
            _tell(model, found | above)


def _tell(name: str, found: dict[str, float]) -> None:
    told = "".join(f"{found[column] / MIB:10.1f}" for column in COLUMNS)
    print(f"{name:<12}{told}{found['cpu']:10.2f}", flush=True)


def _measured(model: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """All figures of a model; those of the small graph if it has no name."""
    source, file = folder / f"{model}.onnx", folder / f"{model or 'small'}.rlx"
    if model in MADE:
        write_model(model, source)
        name = str(source)
    else:
        name = f"zoo:{model}" if model else ""
    starts = []
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as cache:
            Path(cache, "zoo").symlink_to(config.CACHE.get() / "zoo")
            starts.append(_child("cold", name, cache=cache).found())
            entries = list(Path(cache, "programs").glob("*.rlx"))
            entry = entries[0].stat().st_size if entries else 0
    best = min(starts, key=lambda start: float(start["cpu"]))
    _child("save", name, str(file)).found()
    loaded = _child("load", str(file)).found()
    several = [_child("wait", str(file)) for _ in range(args.processes)]
    for child in several:
        child.line()  # all of them have run
    shares = [_shares(child.process.pid) for child in several]
    for child in several:
        child.found()
    size = 0 if not model else (source if model in MADE else zoo.path(model)).stat().st_size
    return {
        "model": size,
        "weights": best["weights"],
        ".rlx": file.stat().st_size,
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
    weights = program.stats["weights"]
    print(json.dumps({"peak": status["VmHWM"], "rss": status["VmRSS"], "cpu": cpu, "weights": weights}))


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
