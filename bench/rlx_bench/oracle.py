"""What results are compared with: the NumPy reference, node by node. RLX's own results decide nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import rlx
from rlx.codegen.cpu.generator import source_version
from rlx.config import CACHE
from rlx.files import replacing
from rlx.ir.dtype import ParamValue
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx_bench.workloads.base import Workload

MEANING = ("ops", "reference", "frontend", "ir", "transform")
"""Folders of RLX that decide what the reference gives."""


def expected(w: Workload) -> list[np.ndarray]:
    """Results of all feeds, one after the other.

    Large convolutions take the reference seconds, so results are kept in the folder `expected` of the cache.
    """
    graph = w.as_graph()
    path = CACHE.get() / "expected" / f"{_digest(w, graph)}.npz"
    if not path.exists():
        results = list[np.ndarray]()
        for feed in w.feeds:
            read = {name: feed[name] for name in (node.attrs["name"] for node in graph.inputs)}
            results += evaluate(graph, read).values()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, *results)
    with np.load(path) as stored:
        return [stored[f"arr_{i}"] for i in range(len(stored.files))]


def _digest(w: Workload, graph: Graph) -> str:
    """Of the graph with its weights, the feeds, and the code that gives them a meaning."""
    found = hashlib.sha256(source_version(str(Path(rlx.__file__).parent), MEANING).encode())
    found.update(str(graph).encode())
    tables: list[Mapping[str, ParamValue]] = [graph.param_values, *w.feeds]
    for values in tables:
        for name, array in sorted(values.items()):
            held = np.ascontiguousarray(array)
            found.update(f"{name} {held.dtype} {held.shape} ".encode())
            found.update(held.view(np.uint8).reshape(-1).data if held.ndim else held.tobytes())
    return found.hexdigest()[:32]


def difference(results: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Largest difference, relative to the largest value of each result.

    >>> difference([np.array([1.0, 3.0])], [np.array([1.0, 4.0])])
    0.25
    >>> difference([np.array([1.0])], [np.array([1.0, 4.0])])
    inf
    """
    if len(results) != len(wanted):
        return float("inf")
    worst = 0.0
    for a, b in zip(results, wanted, strict=True):
        if a.shape != b.shape:
            return float("inf")
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0)
        largest = np.abs(b.astype(np.float64)).max(initial=0)
        share = float(apart / max(largest, 1e-30))
        worst = max(worst, float("inf") if np.isnan(share) else share)
    return worst
