"""What `explain` predicts for every kernel of a program, next to what the kernel takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

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


def predictions(program: CompiledProgram, feed: Arrays, rounds: int) -> list[Prediction]:
    """Every kernel that a run with this feed has, in the order in which they run; the median of some runs.
    The best one is a lucky one: kernels of 1 to 20 us that happen to find their lines in their own core.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("tanh")
    >>> g.output("y", rlx.ops.tanh(g.input("x", ("n", 64), "f32")))
    >>> (found,) = predictions(rlx.compile(g, threads=1), {"x": np.ones((64, 64), np.float32)}, 1)
    >>> found.name, found.predicted > 0, found.measured > 0
    ('%1 map: tanh', True, True)
    """
    read = {name: feed[name] for name in program.input_names}
    module, thunks = program.lir.specialize(sizes_in(program.inputs, read)), program.kernels.thunks
    costs = costs_of_steps(module, thunks)
    times = [best_times([run]) for run in program.trace(read, rounds)]
    measured = {id: statistics.median(run[id] for run in times if id in run) for id in times[0]}
    return [
        Prediction(
            f"%{id} {kernel_name(program.graph.nodes[id])}",
            sum(cost.picoseconds for cost in costs[id]) / 1e6,
            measured[id],
        )
        for id in costs
        if id in measured  # not those of a branch that was not taken
    ]


def whole(name: str, kernels: Sequence[Prediction]) -> Prediction:
    """The sum of all kernels."""
    return Prediction(name, sum(k.predicted for k in kernels), sum(k.measured for k in kernels))


def share_within(found: Sequence[Prediction], factor: float) -> float:
    """The part of predictions that are off by no more than a factor.

    >>> share_within([Prediction("a", 1.0, 1.4), Prediction("b", 9.0, 1.0)], NEAR)
    0.5
    """
    return sum(p.factor <= factor for p in found) / len(found) if found else 1.0
