"""How evenly threads share kernels: what every thread would take, timed one after the other on one core."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.plan.kernel_costs import kernel_name
from rlx.plan.predict import costs_of_steps
from rlx.records import dataclass
from rlx.runtime.native.driver import OPERANDS, SCRATCH, SCRATCH_BYTES, NativeProgram
from rlx.runtime.program import CompiledProgram
from rlx_bench.flops import sizes_in
from rlx_bench.workloads.base import Arrays

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
ROUNDS = 3


@dataclass(frozen=True)
class Share:
    """A kernel: its part of the predicted time of a model, and the largest share of it that a thread has."""

    name: str
    part: float
    largest: float


def shares(program: CompiledProgram, feed: Arrays, threads: int, rounds: int = ROUNDS) -> list[Share]:
    """Every kernel that a run with this feed has; the program is compiled for one thread.

    >>> import rlx
    >>> g = rlx.Graph("tanh")
    >>> g.output("y", rlx.ops.tanh(g.input("x", (256, 256), "f32")))
    >>> (found,) = shares(rlx.compile(g, threads=1), {"x": np.ones((256, 256), np.float32)}, 4)
    >>> found.part, bool(found.largest < 0.5)
    (1.0, True)
    """
    read = {name: feed[name] for name in program.input_names}
    module, thunks = program.lir.specialize(sizes_in(program.inputs, read)), program.kernels.thunks
    costs = {id: sum(c.picoseconds for c in own) for id, own in costs_of_steps(module, thunks).items()}
    walk = _Walk({str(id): kernel.serial for id, kernel in program.kernels.kernels.items()}, threads)
    before = NativeProgram._enter
    NativeProgram._enter = lambda native: walk.run(native)  # type: ignore[method-assign,assignment]
    try:
        for _ in range(rounds):
            program.run(read)
    finally:
        NativeProgram._enter = before  # type: ignore[method-assign]
    total = max(sum(costs.values()), 1)
    nodes = program.graph.nodes
    return [
        Share(
            f"%{label} {kernel_name(nodes[int(label)])}", costs.get(int(label), 0) / total, t.max() / t.sum()
        )
        for label, t in walk.times.items()
    ]


class _Walk:
    """Runs the records of native programs as the driver does, with the shares of all threads in turn."""

    def __init__(self, serial: dict[str, bool], threads: int) -> None:
        self.serial, self.threads = serial, threads
        self.times: dict[str, NDArray[np.float64]] = {}  # by label, the best of each thread

    def run(self, program: NativeProgram) -> None:
        index = 0
        while index < len(program.records):
            record, args = program.records[index], program.args(index)
            index += 1
            if record.jump:
                if ctypes.c_byte.from_address(int(args[OPERANDS])).value == 0:
                    index = int(args[OPERANDS + 1])
            elif self.serial.get(record.name, True):
                KERNEL(record.kernel)(args.ctypes.data, 0, 1, record.part)
                if record.name in self.serial:
                    self.times[record.name] = np.ones(1)
            else:
                self.share(record.name, KERNEL(record.kernel), args, record.part)
        program._errors[:] = 0  # loops ask for pauses there

    def share(self, label: str, kernel: Any, args: NDArray[np.int64], part: int) -> None:
        scratch, times, address = int(args[SCRATCH]), [], args.ctypes.data
        for thread in range(self.threads):
            args[SCRATCH] = scratch - thread * int(args[SCRATCH_BYTES])  # all have the same memory
            start = time.perf_counter_ns()
            kernel(address, thread, self.threads, part)
            times.append(time.perf_counter_ns() - start)
        args[SCRATCH] = scratch
        best = np.minimum(times, self.times.get(label, np.inf))
        self.times[label] = best
