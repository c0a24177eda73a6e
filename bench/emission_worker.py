"""Writes the kernels of one checkout and tells the CPU time of each: a process of `emission_speed.py`."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from op_cases import ALL_CASES

import rlx
from replay.canonical import canonical_text
from replay.records import digest
from rlx import zoo
from rlx.api.compile import plan
from rlx.codegen.cpu import build
from rlx.codegen.native.irtext import Module
from rlx.ir.graph import Graph
from rlx.target.cpu import resolve
from rlx.zoo.minilm import load_graph
from rlx_bench.quiet import take_precedence

try:
    from rlx.codegen.native.notation import with_room
except ImportError:  # versions whose emitters are plain Python have no need of it

    def with_room(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


FAMILIES = {
    "ContractNest": "product",
    "ConvNest": "conv",
    "Nest": "rows",
    "AttentionNest": "attention",
    "TransformNest": "fft",
    "Opaque": "special",
}
TARGETS = ("x86-64-v3", "x86-64-v4")


class Writing:
    """All kernels of one checkout: each can be written again and again."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[[], str]] = {}  # by program, target and place
        self.chosen: list[list[Callable[[], str]]] = []  # by program

    def make(self, families: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
        """Write everything once: family and digest of each kernel, and what it took in all."""
        told: dict[str, tuple[str, str]] = {}
        first = 0.0
        for label, graph in programs(models):
            for target in TARGETS:
                place = 0
                for again, family, spent in written(graph, target):
                    place += 1
                    if family in families:
                        first += spent
                        key = f"{label} {target} {place}"
                        self.kernels[key] = again
                        told[key] = family, digest(canonical_text([again()], [("kernel", "k")]))
        return {"kernels": told, "first": first}

    def choose(self, keys: Sequence[str]) -> dict[str, Any]:
        """Write only these kernels from now on."""
        by_program = groupby(keys, lambda key: key.rpartition(" ")[0])
        self.chosen = [[self.kernels[key] for key in group] for _, group in by_program]
        self.kernels = {}
        gc.collect()
        gc.freeze()
        gc.disable()
        return {"chosen": len(keys)}

    def round(self) -> dict[str, Any]:
        """CPU seconds of each kernel, written once; those of a program as one compilation writes them."""
        times: list[float] = []
        for writes in self.chosen:
            start = time.process_time()
            spent = with_room(timed, writes)
            around = time.process_time() - start - sum(spent)
            times += [spent[0] + around, *spent[1:]]
        gc.collect()
        return {"times": times}


def timed(writes: Sequence[Callable[[], str]]) -> list[float]:
    """CPU seconds of each call."""
    times, now = [], time.process_time
    for write in writes:
        start = now()
        write()
        times.append(now() - start)
    return times


def programs(models: Sequence[str]) -> Iterator[tuple[str, Graph]]:
    """All that is written: samples of ops and models of the zoo."""
    for case in ALL_CASES:
        yield case.id, case.graph()[0]
    for name in models:
        path = zoo.fetch(name)
        yield name, load_graph(path.parent) if path.suffix == ".safetensors" else rlx.from_onnx(path)


def written(graph: Graph, target: str) -> list[tuple[Callable[[], str], str, float]]:
    """Of each kernel: what writes it into a module of its own, its family, CPU seconds of the first time."""
    emit, found = build.emit_kernel, []

    def noted(module: Module, name: str, kernel: Any, inputs: Any, outputs: Any) -> Any:
        def again() -> str:
            fresh = Module(module.target, module.flush_bf16)
            emit(fresh, "k", kernel, inputs, outputs)
            return fresh.text()

        start = time.process_time()
        made = emit(module, name, kernel, inputs, outputs)
        found.append((again, FAMILIES[type(kernel).__name__], time.process_time() - start))
        return made

    build.emit_kernel = noted
    try:
        build.build_kernels(plan(graph, target=target), resolve(target))
    finally:
        build.emit_kernel = emit
    return found


def main() -> None:
    take_precedence()
    writing = Writing()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(writing, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
