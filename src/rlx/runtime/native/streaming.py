"""Weights that exceed their budget: they stay in a file and are read into a ring ahead of the kernels.

The plan says which weights are resident, where the others come to lie in the ring and from which point of a
run on each may be read (`LirFetch`). A native thread reads with `pread` while kernels run; between kernels of
the same native call there are gates, at which a run waits for what it reads next, and helps to read it
(`runtime/native/reader.py`). Nothing is read through the mapping of the file, whose pages would count as
memory of this process.

There is one ring per program, whatever the number of sizes it runs with: runs of several threads take turns.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import config
from rlx.driver.copy import CopyStats
from rlx.driver.region import FileMemory
from rlx.errors import CopyError, FormatError, UnsupportedError
from rlx.files import remove_abandoned, unfinished_name
from rlx.ir.dtype import ParamValue
from rlx.ir.op import Role
from rlx.plan.lir import LAST_PART, LirBufferPlan, LirModule, Point
from rlx.runtime.derive import lazy_weights
from rlx.runtime.memory import allocate
from rlx.runtime.native.reader import Fill, Reader
from rlx.runtime.store import container, save
from rlx.runtime.store.cache import STREAMED
from rlx.runtime.store.container import Container, file_identity
from rlx.runtime.weights import Gate, Weights

if TYPE_CHECKING:
    from rlx.runtime.store.origin import Origin


FAST = 3e9  # bytes per second and thread from which on a file must be in memory
PIECE = 512 << 10  # bytes of a read: enough for one call, few enough to share a weight among threads


class _Load:
    """How many cores reading took of late. It decides who gets them.

    Where reading takes most of a core or more, the reader has one, and kernels the others: they help to read
    when they wait. Where it takes less, kernels have all cores, and a reader beside them would only push them
    aside: they read what they need at gates, unless it comes from a disk.
    """

    FORGET, ENTER, LEAVE = 0.7, 0.75, 0.55

    def __init__(self) -> None:
        self.high = False
        self._busy = self._wall = 0.0
        self._seen = self._seen_busy = 0.0

    def resume(self, busy: float) -> None:
        """A run begins; the time since the last one does not count."""
        self._seen, self._seen_busy = time.perf_counter(), busy

    def note(self, busy: float) -> None:
        """Between two stretches: seconds that the reader has been busy up to now."""
        now = time.perf_counter()
        self._wall = self.FORGET * self._wall + now - self._seen
        self._busy = self.FORGET * self._busy + busy - self._seen_busy
        self._seen, self._seen_busy = now, busy
        self.high = self._busy > (self.LEAVE if self.high else self.ENTER) * self._wall


class StreamedWeights(Weights):
    """Weights of a program whose plan has a budget, in the arrays of a file."""

    _reads: Reader  # if anything is streamed

    def __init__(
        self, lir: LirModule, values: dict[str, ParamValue], file: Container, numbers: Mapping[int, int]
    ) -> None:
        super().__init__(lir, values, {})
        self._file, self._numbers = file, dict(numbers)
        self._source = FileMemory(file.path)
        if file_identity(self._source.descriptor, file.is_own) != file.identity:
            raise FormatError(f"{file.path} was replaced while it was opened; load it again")
        self._known = file.identity
        plan = self._plan = lir.planner.plan()
        self._fetches = plan.fetches
        self._lock = threading.Lock()
        self._load = _Load()
        self._read_resident()
        if self._fetches:
            self.ring = allocate(plan.sizes()["ring"], fence=True).array
            fills, counts = self._fills()
            self.reader = self._reads = Reader(self._source, fills)
            self.gates = _gates(plan, counts)

    def _fills(self) -> tuple[list[Fill], list[int]]:
        """What the reader has to do for all fetches, in pieces that several threads can share, and for each
        fetch how many of these there are up to its end."""
        assert self.ring is not None
        fills: list[Fill] = []
        counts: list[int] = []
        base = int(self.ring.ctypes.data)
        for f in self._fetches:
            start = self._file.place(self._numbers[f.node])[0] + f.begin
            for at in range(0, f.size, PIECE):
                nbytes = min(PIECE, f.size - at)
                ends = at + nbytes == f.size
                place = base + f.offset + at
                fills.append(Fill(start + at, place, nbytes, _position(f.starts), _position(f.ends), ends))
            counts.append(len(fills))
        return fills, counts

    def _read_resident(self) -> None:
        slots = {n: s for n, s in self._plan.assignments.items() if s.space == "weight"}
        self.region = allocate(max(self._plan.sizes()["weight"], 64), fence=True)
        for node, slot in slots.items():
            if node in self._numbers:
                place = self.region.array[slot.offset : slot.offset + slot.size]
                self._source.read_into(self._file.place(self._numbers[node])[0], place)
                self.memory[node] = place

    @property
    def everything(self) -> Mapping[int, np.ndarray]:
        stored = {node: self._file.raw(number) for node, number in self._numbers.items()}
        return stored if self._fetches else {**stored, **self.memory}

    def set(self, name: str, value: np.ndarray) -> None:
        if not self._fetches:
            super().set(name, value)
            return
        raise UnsupportedError(
            f"param {name!r} cannot be set: weights of program {self.lir.name!r} are streamed from "
            f"{self._file.path}; load it without weight_budget"
        )

    # -- during a run

    def running(self) -> AbstractContextManager[None]:
        return self._run() if self._fetches else super().running()

    @contextmanager
    def _run(self) -> Iterator[None]:
        with self._lock:
            self._check_unchanged()
            self._reads.begin()
            self._load.resume(self._reads.stats.busy)
            try:
                yield
            finally:
                self._reads.settle()  # nothing may write to the ring after a run, however it ended

    def reach(self, step: int) -> None:
        gate = self.gates.get((step, 0))
        if gate is not None:
            self._reads.arrive(*gate)

    def share_cores(self) -> bool:
        done = self._reads.stats
        self._load.note(done.busy)
        # What comes from a disk costs no core: the reader goes on beside all kernels.
        from_memory = done.bytes > FAST * done.busy
        self._reads.pause(from_memory and not self._load.high)
        return self._load.high

    def failure(self) -> CopyError | None:
        return self._reads.failure()

    def read_only(self, helping: bool = True) -> float:
        """Seconds to read what a run reads, in the same order to the same places, with nothing to compute:
        by the reader thread alone, or with the help of this one."""
        with self._run():
            began = time.perf_counter()
            self._reads.read_all(helping)
            return time.perf_counter() - began

    def _check_unchanged(self) -> None:
        """The file must be what was loaded. One that was touched, renamed or unlinked is hashed once."""
        now = file_identity(self._source.descriptor, self._file.is_own)
        if now == self._known:
            return
        size, known = now[2], self._known[2]
        if now[:4] != self._known[:4] or not self._file.is_same(self._source.descriptor):
            what = "was written to" if size == known else f"has {size} bytes instead of {known}"
            raise FormatError(f"{self._file.path} {what} since it was opened; restore it, or load it again")
        self._known = now

    @property
    def stats(self) -> dict[str, Any]:
        done = self._reads.stats if self._fetches else CopyStats()
        sizes = self._plan.sizes()
        return {
            "file": self._file.path,
            "resident_bytes": sizes["weight"],
            "ring_bytes": sizes["ring"],
            "bytes_per_run": sum(f.size for f in self._fetches),
            "fetches_per_run": len(self._fetches),
            "fetches": done.copies,
            "bytes": done.bytes,
            "reading_seconds": done.busy,
            "waiting_seconds": done.waited,
            "overlap": done.overlap,
        }


def _position(point: Point) -> int:
    """A point of a run as one number, in the same order."""
    step, part = point
    return step * (LAST_PART + 1) + part


def _gates(plan: LirBufferPlan, counts: Sequence[int]) -> dict[Point, Gate]:
    """Where a run stops, and which fills it needs there: those of fetches that are awaited up to there and
    not given up before. `counts` has the number of fills up to the end of each fetch."""
    gates: dict[Point, Gate] = {}
    befores, fetches = [0, *counts], plan.fetches
    first = stop = 0
    for point in plan.stops():
        while stop < len(fetches) and fetches[stop].awaited <= point:
            stop += 1
        while first < stop and fetches[first].ends < point:
            first += 1
        gates[point] = (_position(point), befores[first], befores[stop])
    return gates


def streamed_weights(
    lir: LirModule, values: dict[str, ParamValue], file: Container, entries: Iterable[tuple[int, int]]
) -> StreamedWeights:
    """Weights where they lie in a file; every one must have the size of its node."""
    numbers: dict[int, int] = {}
    nodes = lir.outline.nodes
    for id, number in entries:
        if not 0 <= id < len(nodes) or nodes[id].op.role not in (Role.PARAM, Role.CONSTANT):
            raise file.fail(f"it has a weight for %{id}, which is none in its plan")
        if file.place(number)[1] != nodes[id].tensor.nbytes:
            raise file.fail(f"it has a weight of {file.place(number)[1]} bytes for {nodes[id]}")
        numbers[id] = number
    missing = [f.node for f in lir.planner.plan().fetches if f.node not in numbers]
    if missing:
        name = lir.planner.io.names_of(missing[0]) or f"%{missing[0]}"
        raise UnsupportedError(
            f"weight {name!r} of program {lir.name!r} has no value; give every param one before compiling "
            "with a weight_budget"
        )
    return StreamedWeights(lir, values, file, numbers)


def streamed(lir: LirModule, origin: Origin, path: str | os.PathLike[str] | None) -> Weights:
    """Compute the weights of a program one by one into a file, and stream them from there.

    With a `path` it becomes a whole `.rlx` file. Without, it holds weights only, lies in the cache, and has
    no name any more when this returns: it is gone when the program is. Weights that fit need none.
    """
    if path is None and not lir.plan.fetches:
        return Weights(lir)
    values = dict((lir.derived or lir.mir).param_values)
    weights = lazy_weights(lir, values)
    if path is not None:
        save.write(path, lir, origin, weights, values)
        file = Container(path)
        return streamed_weights(lir, values, file, file.header["variants"][0]["weights"])
    folder = config.CACHE.get() / STREAMED
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise FormatError(f"cannot write weights to {folder}: {e.strerror or e}; set RLX_CACHE") from e
    remove_abandoned(folder)
    name = unfinished_name(folder / "weights")
    try:
        container.write(name, {}, {}, list(weights.values()))
        return streamed_weights(lir, values, Container(name), zip(weights, range(len(weights)), strict=True))
    finally:
        name.unlink(missing_ok=True)
