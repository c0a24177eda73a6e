"""What the runtime knows of native kernels: how they are called, names, sizes they read, scratch. Needs no
emitter.

A kernel is `void kernel(ptr args, i64 thread, i64 threads, i64 part)`. `part` is 0, or the word of
`part_word`: which part of a weight that is cut this call computes with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from rlx.errors import FormatError, PlanError
from rlx.files import Json
from rlx.ir.dim import Dim, compile_dims, evaluate, parse_dim
from rlx.plan.lir import LirBufferPlan, WeightCut
from rlx.records import dataclass

ABI = 2
"""Version of the call: arguments of kernels, and the fixed fields of their argument blocks. It is stored with
kernels and compared when they are loaded."""
KERNEL_ARGS = (("ptr", "args"), ("i64", "thread"), ("i64", "threads"), ("i64", "part"))
PART_BITS = 32  # of the argument `part`: the first piece; above them, where the part ends


@dataclass(frozen=True)
class EmittedKernel:
    """What the runtime must know of a kernel: which sizes it reads and how much scratch it needs."""

    name: str
    dims: tuple[Dim, ...]
    scratch_per_thread: Dim = 0
    serial: bool = False
    reveals: bool = False  # the last size of its result is found by running it: it is left in scratch
    picoseconds: Dim = 0  # of one core, roughly: whether threads should share it
    cut: WeightCut | None = None  # how it can be run part by part


def part_word(first: int, stop: int) -> int:
    """The argument that makes a kernel compute with pieces first..stop of its weight only.

    >>> hex(part_word(2, 5))
    '0x500000002'
    """
    if not 0 <= first < stop < 1 << PART_BITS - 1:
        raise PlanError(f"pieces {first} to {stop} of a weight are too many; read it in larger ones")
    return first | stop << PART_BITS


@dataclass(frozen=True)
class HostThunk:
    """A node that no native kernel exists for: it runs by its reference, between native segments."""

    node: int
    why: str


@dataclass(frozen=True)
class BodyKernels:
    """Kernels of a body, by node id, and of the bodies inside it."""

    kernels: dict[int, EmittedKernel]
    inner: dict[int, tuple[BodyKernels, ...]]

    def all(self) -> Iterator[EmittedKernel]:
        """Every kernel, those of inner bodies too."""
        yield from self.kernels.values()
        for bodies in self.inner.values():
            for body in bodies:
                yield from body.all()

    def scratch(self, plan: LirBufferPlan, outside: Mapping[str, int]) -> int:
        """The most scratch per thread that a kernel needs, at the sizes that the body is planned for."""
        binding = {**outside, **plan.binding}
        most = max((evaluate(k.scratch_per_thread, binding) for k in self.kernels.values()), default=0)
        return max(most, _most_scratch(self.inner, plan, binding))

    def to_json(self) -> Json:
        inner = {str(id): [b.to_json() for b in bodies] for id, bodies in self.inner.items()}
        return {"kernels": _describe(self.kernels), "inner": inner}

    @staticmethod
    def from_json(data: Json) -> BodyKernels:
        inner = {int(id): tuple(map(BodyKernels.from_json, bodies)) for id, bodies in data["inner"].items()}
        return BodyKernels(_recall(data["kernels"]), inner)


@dataclass
class KernelSet:
    """Native kernels of a program: which one each node runs, and the texts of the modules that have them."""

    kernels: dict[int, EmittedKernel]
    thunks: dict[int, HostThunk]
    texts: tuple[str, ...]
    distinct: int
    inner: dict[int, tuple[BodyKernels, ...]] = field(default_factory=dict)
    """Node with bodies -> the kernels of each body."""
    _times: dict[tuple[str, ...], Callable[[Sequence[int]], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All modules."""
        return "\n".join(self.texts)

    def picoseconds(self, plan: LirBufferPlan) -> dict[int, int]:
        """Picoseconds of one core per kernel, at the sizes of a plan."""
        symbols = plan.dynamic_symbols
        if symbols not in self._times:
            self._times[symbols] = compile_dims([k.picoseconds for k in self.kernels.values()], symbols)
        return dict(zip(self.kernels, self._times[symbols]([plan.binding[s] for s in symbols]), strict=True))

    @property
    def cuts(self) -> dict[int, WeightCut]:
        """How kernels can be run part by part, by node."""
        return {id: kernel.cut for id, kernel in self.kernels.items() if kernel.cut is not None}

    def shared_code(self) -> list[str]:
        """A line for each kernel that several contractions share, which pass it their widths."""
        given = (k.name for k in self.kernels.values() if any(isinstance(d, int) for d in k.dims))
        return [
            f"{count} contractions that differ in width only share one kernel, which reads widths at run time"
            for count in Counter(given).values()
        ]

    def in_bodies(self) -> Iterator[EmittedKernel]:
        """Kernels of all bodies, however deep."""
        for bodies in self.inner.values():
            for body in bodies:
                yield from body.all()

    @property
    def names(self) -> list[str]:
        """Functions that records call, each once."""
        return list(dict.fromkeys(k.name for k in (*self.kernels.values(), *self.in_bodies())))

    def scratch_in_bodies(self, plan: LirBufferPlan) -> int:
        """The most scratch per thread that a kernel of a body needs."""
        return _most_scratch(self.inner, plan, plan.binding)

    def describe(self) -> str:
        """Everything but the code, as JSON text; `recall` is its inverse."""
        thunks = {str(id): t.why for id, t in self.thunks.items()}
        whole = BodyKernels(self.kernels, self.inner)
        return json.dumps({"abi": ABI, **whole.to_json(), "thunks": thunks, "distinct": self.distinct})

    @staticmethod
    def recall(text: str) -> KernelSet:
        """The kernels that `describe` wrote; refused if this runtime calls kernels in another way."""
        data = json.loads(text)
        if data.get("abi") != ABI:
            raise FormatError(
                f"its kernels are called by version {data.get('abi')} of the convention, but this RLX calls "
                f"them by version {ABI}; compile it again"
            )
        thunks = {int(id): HostThunk(int(id), why) for id, why in data["thunks"].items()}
        whole = BodyKernels.from_json(data)
        return KernelSet(whole.kernels, thunks, (), data["distinct"], whole.inner)


def _most_scratch(
    inner: Mapping[int, tuple[BodyKernels, ...]], plan: LirBufferPlan, binding: Mapping[str, int]
) -> int:
    found = [
        body.scratch(inside, binding)
        for id, bodies in inner.items()
        for body, inside in zip(bodies, plan.work[id].bodies, strict=True)
    ]
    return max(found, default=0)


def _describe(kernels: dict[int, EmittedKernel]) -> dict[str, list[object]]:
    return {
        str(id): [
            k.name,
            [str(d) for d in k.dims],
            str(k.scratch_per_thread),
            k.serial,
            k.reveals,
            str(k.picoseconds),
            k.cut and [k.cut.operand, k.cut.nbytes],
        ]
        for id, k in kernels.items()
    }


def _recall(data: dict[str, list[Any]]) -> dict[int, EmittedKernel]:
    return {
        int(id): EmittedKernel(
            name,
            tuple(parse_dim(d) for d in dims),
            parse_dim(scratch),
            serial,
            reveals,
            parse_dim(time),
            WeightCut(*cut) if cut else None,
        )
        for id, (name, dims, scratch, serial, reveals, time, cut) in data.items()
    }
