"""Which kernels take how long in V8, next to the same kernels as native code."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.export.export import prepare
from rlx.export.layout import ERROR, WEIGHT_HEADER, ContextLayout
from rlx.export.prepared import Prepared
from rlx.export.tables import Assumed, KernelCall, Place, Step
from rlx.export.wasm import module_of
from rlx.export.weights import write_weights
from rlx.ir.dim import substitute
from rlx.records import dataclass
from rlx_bench.web.exports import sizes_of
from rlx_bench.workloads import make
from rlx_bench.workloads.base import Arrays

HERE = Path(__file__).parent
NATIVE = "x86-64"
# Everything is compiled for good before it runs.
FLAGS = ("--no-liftoff", "--no-wasm-lazy-compilation")


@dataclass(frozen=True)
class KernelTime:
    """A kernel: what it does, and microseconds of a call in V8 and as native code (None: no such kernel)."""

    name: str
    web: float
    native: float | None


def kernel_times(
    spec: str, target: str, node: str, rounds: int = 300
) -> tuple[list[KernelTime], float, float]:
    """The kernels of a workload in the order of a run, then microseconds of a whole run: web, native."""
    workload = make(spec)
    graph = workload.as_graph()
    program = rlx.compile(graph, threads=1, target=NATIVE, **workload.options)
    feed = {name: workload.feed[name] for name in program.input_names}
    sizes = sizes_of(program, feed)
    prepared = prepare(program, {n: (min(s, 1), s) for n, s in sizes.items()}, "net", target)
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), prepared, feed, sizes)
        command = [node, *FLAGS, str(HERE / "kernels.mjs"), folder, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    web: dict[str, Any] = json.loads(done.stdout)
    names = [step.kernel for step in _calls(prepared.tables.steps)]
    native, whole = _native_times(program, feed, rounds)
    if len(native) == len(names):  # the same kernels, in the same order
        pairs: list[tuple[str, float | None]] = list(native)
    else:
        pairs = [(name, None) for name in names]
    found = [KernelTime(name, w, n) for (name, n), w in zip(pairs, web["kernels"], strict=True)]
    return found, web["whole"], whole


def _native_times(
    program: rlx.CompiledProgram, feed: Arrays, rounds: int
) -> tuple[list[tuple[str, float]], float]:
    """Kernels with the median of their times, and the median of a run."""
    program.trace(feed, max(rounds // 4, 1))
    runs = program.trace(feed, rounds)
    named = [
        (program.describe(spans[0].node), statistics.median(span.microseconds for span in spans))
        for spans in zip(*(run.spans for run in runs), strict=True)  # a node may have several kernels
    ]
    wholes = [(run.spans[-1].end_ns - run.spans[0].start_ns) / 1e3 for run in runs]
    return named, statistics.median(wholes)


def _calls(steps: Sequence[Step]) -> Iterator[KernelCall]:
    """Calls of kernels that every run has; those in loops and branches are left out."""
    for step in steps:
        if isinstance(step, KernelCall):
            yield step
        elif isinstance(step, Assumed):
            yield from _calls(step.steps)


def _write(folder: Path, program: Prepared, feed: Arrays, sizes: Mapping[str, int]) -> None:
    """A module that exports its kernels, its weights and inputs, and the arguments of every call."""
    tables, layout = program.tables, ContextLayout(program.tables)
    calls = list(_calls(tables.steps))

    def field(place: Place) -> tuple[str, int]:
        offset = int(substitute(place.offset, sizes))
        if place.space == "weight":
            return "weight", WEIGHT_HEADER + offset
        return "context", layout.spaces[place.space] + offset

    head = [("context", 8 * ERROR), ("context", layout.spaces["scratch"]), ("number", tables.scratch)]
    listed = [
        {
            "kernel": call.kernel,
            "fields": [
                *head,
                *map(field, call.places),
                *(("number", int(substitute(d, sizes))) for d in call.sizes),
            ],
        }
        for call in calls
    ]
    names = [f"{i}.bin" for i in range(len(tables.inputs))]
    for name, entry in zip(names, tables.inputs, strict=True):
        np.ascontiguousarray(feed[entry.name]).tofile(folder / name)
    bound = [sizes[s.name] for s in tables.symbols]
    (folder / "calls.json").write_text(json.dumps({"calls": listed, "inputs": names, "sizes": bound}))
    module = module_of(program, also=dict.fromkeys(call.kernel for call in calls))
    (folder / "net.wasm").write_bytes(module.data)
    write_weights(folder / "net.weights", tables, program.version)


HEAD = ("kernel", "x86-64, us", "web, us", "times as fast", "lost, us")


def cells(found: KernelTime) -> list[str]:
    """The line of a kernel. Of the time that it loses, less than nothing is time that it gains."""
    if found.native is None:
        return [found.name, "-", f"{found.web:.1f}", "-", "-"]
    times = [f"{found.native:.1f}", f"{found.web:.1f}", f"{found.native / found.web:.2f}"]
    return [found.name, *times, f"{found.web - found.native:.1f}"]
