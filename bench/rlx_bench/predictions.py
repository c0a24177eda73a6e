"""What `explain` predicts for every kernel of a program, next to what the kernel takes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.plan.kernel_costs import kernel_name
from rlx.plan.predict import costs_of_steps
from rlx.records import dataclass
from rlx.runtime.program import CompiledProgram
from rlx.runtime.trace import best_times
from rlx_bench.flops import sizes_in
from rlx_bench.workloads.base import Arrays

NEAR, FAR, SUM = 1.5, 5.0, 1.25
"""Factors: most kernels should be within the first of their prediction, all within the second, sums within
the third."""


@dataclass(frozen=True)
class Prediction:
    """One kernel, or a whole program: microseconds."""

    name: str
    predicted: float
    measured: float

    @property
    def factor(self) -> float:
        """How far off the prediction is, 1 or more."""
        if not self.predicted or not self.measured:
            return 1.0 if self.predicted == self.measured else math.inf
        return max(self.predicted / self.measured, self.measured / self.predicted)


def kernel_names(program: CompiledProgram) -> dict[int, str]:
    """What every kernel is called, by node id."""
    return {id: f"%{id} {kernel_name(program.graph.nodes[id])}" for id in program.lir.plan.schedule}


def measured(program: CompiledProgram, feed: Arrays, rounds: int) -> dict[str, float]:
    """Kernel -> its time in a run with this feed; the median of some runs. The best one is a lucky one:
    kernels of 1 to 20 us that happen to find their lines in their own core."""
    read, names = {name: feed[name] for name in program.input_names}, kernel_names(program)
    times = [best_times([run]) for run in program.trace(read, rounds)]
    return {names[id]: statistics.median(run[id] for run in times if id in run) for id in times[0]}


def predictions(program: CompiledProgram, feed: Arrays, took: Mapping[str, float]) -> list[Prediction]:
    """Every kernel that a run with this feed has, in the order in which they run, next to what it took.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("tanh")
    >>> g.output("y", rlx.ops.tanh(g.input("x", ("n", 64), "f32")))
    >>> program, feed = rlx.compile(g, threads=1), {"x": np.ones((64, 64), np.float32)}
    >>> (found,) = predictions(program, feed, measured(program, feed, 1))
    >>> found.name, found.predicted > 0, found.measured > 0
    ('%1 map: tanh', True, True)
    """
    sizes = sizes_in(program.inputs, {name: feed[name] for name in program.input_names})
    costs = costs_of_steps(program.lir.specialize(sizes), program.kernels.thunks)
    return [
        Prediction(name, sum(cost.picoseconds for cost in costs[id]) / 1e6, took[name])
        for id, name in kernel_names(program).items()
        if name in took  # not those of a branch that was not taken
    ]


def save(file: Path, models: Mapping[str, Sequence[Prediction]]) -> None:
    """Write all kernels of some models to a file."""
    told = {name: [vars(kernel) for kernel in found] for name, found in models.items()}
    file.write_text(json.dumps(told, indent=1))


def saved_times(file: Path) -> dict[str, dict[str, float]]:
    """Model -> kernel -> the time that was saved.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder, "all.json"), {"model": [Prediction("%1 map: tanh", 1.0, 2.0)]})
    ...     saved_times(Path(folder, "all.json"))
    {'model': {'%1 map: tanh': 2.0}}
    """
    told = json.loads(file.read_text())
    return {name: {kernel["name"]: kernel["measured"] for kernel in found} for name, found in told.items()}


def whole(name: str, kernels: Sequence[Prediction]) -> Prediction:
    """The sum of all kernels."""
    return Prediction(name, sum(k.predicted for k in kernels), sum(k.measured for k in kernels))


def share_within(found: Sequence[Prediction], factor: float) -> float:
    """The part of predictions that are off by no more than a factor.

    >>> share_within([Prediction("a", 1.0, 1.4), Prediction("b", 9.0, 1.0)], NEAR)
    0.5
    """
    return sum(p.factor <= factor for p in found) / len(found) if found else 1.0
