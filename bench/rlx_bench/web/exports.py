"""Workloads as files that engines in a browser read: RLX's exports, the ONNX model, and its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.codegen.cpu.generator import source_version
from rlx.ir.bind import match_shape
from rlx_bench.workloads import make
from rlx_bench.workloads.base import Arrays, Workload

TARGETS = ("wasm32", "wasm32-relaxed")
PARTS = ("codegen", "cost", "export", "fuse", "kernel", "ops", "plan", "rewrite", "target")
"""Folders of RLX that decide what an export is."""


def sizes_of(program: rlx.CompiledProgram, feed: Arrays) -> dict[str, int]:
    """The sizes of a program's symbols with these inputs."""
    found: dict[str, int] = {}
    for node in program.inputs:
        name = node.attrs["name"]
        match_shape(node.tensor.shape, feed[name].shape, found, f"input {name!r}")
    return found


def write_feed(folder: Path, feed: Arrays, sizes: dict[str, int]) -> None:
    """Inputs as files that JavaScript reads."""
    inputs = [{"name": n, "type": a.dtype.name, "shape": a.shape} for n, a in feed.items()]
    for i, array in enumerate(feed.values()):
        np.ascontiguousarray(array).tofile(folder / f"{i}.bin")
    (folder / "feed.json").write_text(json.dumps({"inputs": inputs, "sizes": sizes}))


def write_exports(spec: str, folder: Path) -> dict[str, Path]:
    """The folder of each engine, written unless it is there with what this code writes: "ort" has the ONNX
    model, those of targets have RLX's exports."""
    workload, version = make(spec), source_version(str(Path(rlx.__file__).parent), PARTS)
    there = folder / spec.replace(":", "_").replace(",", "_").rstrip("_")
    found = {name: there / name for name in ("ort", *TARGETS)}
    mark = there / "version"
    if mark.exists() and mark.read_text() == version:
        return found
    for place in found.values():
        place.mkdir(parents=True, exist_ok=True)
    program = rlx.compile(workload.as_graph(), threads=1, **workload.options)
    sizes = sizes_of(program, workload.feed)
    ranges = {name: (min(size, 1), size) for name, size in sizes.items()}
    (found["ort"] / "model.onnx").write_bytes(_onnx_bytes(workload))
    for target in TARGETS:
        program.export(found[target], "wasm", bind=ranges, name="net", target=target)
    for place in found.values():
        write_feed(place, workload.feed, sizes)
    mark.write_text(version)
    return found


def _onnx_bytes(workload: Workload) -> bytes:
    source: Any = workload.source()
    return Path(source).read_bytes() if isinstance(source, str) else source
