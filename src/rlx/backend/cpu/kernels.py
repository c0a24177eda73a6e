"""What the runtime knows of native kernels: names, sizes they read, scratch. Needs no emitter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rlx.ir.dim import Dim, parse_dim


@dataclass(frozen=True)
class EmittedKernel:
    """What the runtime must know of a kernel: which sizes it reads and how much scratch it needs."""

    name: str
    dims: tuple[Dim, ...]
    scratch_per_thread: Dim = 0
    serial: bool = False
    reveals: bool = False  # the last size of its result is found by running it: it is left in scratch


@dataclass(frozen=True)
class HostThunk:
    """A node that no native kernel exists for: it runs by its reference, between native segments."""

    node: int
    why: str


@dataclass
class KernelSet:
    """Native kernels of a program: which one each node runs, and the IR text that defines them."""

    kernels: dict[int, EmittedKernel]
    thunks: dict[int, HostThunk]
    text: str
    distinct: int
    loops: dict[int, dict[int, EmittedKernel]] = field(default_factory=dict)
    """Loop node -> kernels of its body."""

    def describe(self) -> str:
        """Everything but the code, as JSON text; `recall` is its inverse."""
        thunks = {str(id): t.why for id, t in self.thunks.items()}
        loops = {str(id): _describe(kernels) for id, kernels in self.loops.items()}
        data = {
            "kernels": _describe(self.kernels),
            "thunks": thunks,
            "distinct": self.distinct,
            "loops": loops,
        }
        return json.dumps(data)

    @staticmethod
    def recall(text: str) -> KernelSet:
        data = json.loads(text)
        thunks = {int(id): HostThunk(int(id), why) for id, why in data["thunks"].items()}
        loops = {int(id): _recall(kernels) for id, kernels in data["loops"].items()}
        return KernelSet(_recall(data["kernels"]), thunks, "", data["distinct"], loops)


def _describe(kernels: dict[int, EmittedKernel]) -> dict[str, list[object]]:
    return {
        str(id): [k.name, [str(d) for d in k.dims], str(k.scratch_per_thread), k.serial, k.reveals]
        for id, k in kernels.items()
    }


def _recall(data: dict[str, list[Any]]) -> dict[int, EmittedKernel]:
    return {
        int(id): EmittedKernel(name, tuple(parse_dim(d) for d in dims), parse_dim(scratch), serial, reveals)
        for id, (name, dims, scratch, serial, reveals) in data.items()
    }
