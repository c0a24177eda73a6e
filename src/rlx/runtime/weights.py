"""Weights of a program: params, derived weights and constants in one region, shared by all runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import RlxError
from rlx.ir.dtype import LazyArray, ParamValue
from rlx.ir.weights import weight_start
from rlx.plan.lir import ALIGNMENT, LirModule, Point
from rlx.runtime.derive import lazy_weights
from rlx.runtime.memory import Region, allocate
from rlx.runtime.recover import recovered_params

if TYPE_CHECKING:
    from rlx.runtime.native.reader import Reader
    from rlx.runtime.store.container import Container

Gate = tuple[int, int, int]
"""The position of a point of a run, and the fills first..stop that it waits for."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class Params(Mapping[str, np.ndarray]):
    """Values of params as arrays, each made when it is asked for."""

    def __init__(self, values: Mapping[str, ParamValue]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Weights:
    """Memory of every weight node of a program, by node id.

    Weights that were laid out before are given with the `values` of params that they were computed from.
    """

    ring: np.ndarray | None = None  # where streamed weights are placed
    reader: Reader | None = None  # who reads them
    gates: Mapping[Point, Gate] = {}  # where runs wait for them

    def __init__(
        self,
        lir: LirModule,
        values: dict[str, ParamValue] | None = None,
        memory: dict[int, np.ndarray] | None = None,
        file: Container | None = None,
    ) -> None:
        self.lir = lir
        self.values = dict((lir.derived or lir.mir).param_values) if values is None else values
        self.memory: dict[int, np.ndarray] = {} if memory is None else memory
        self.region: Region | None = None
        self._mapped_from = file if file is not None and file.is_guarded else None
        if memory is None:
            self.load()

    def load(self) -> None:
        """Compute derived weights and lay everything out; params without a value are left out."""
        arrays = lazy_weights(self.lir, self.values)
        starts, end = dict[int, int](), 0
        for id, array in arrays.items():
            starts[id] = weight_start(end, array.nbytes)
            end = starts[id] + array.nbytes
        region, memory = allocate(max(end, ALIGNMENT), fence=True), {}
        for id, array in arrays.items():
            memory[id] = place = region.array[starts[id] : starts[id] + array.nbytes]
            array.write_to(place)
        self.memory, self.region = memory, region
        self._mapped_from = None
        self._forget_files()

    def _forget_files(self) -> None:
        """Params that were read from a model file are found in the weights from now on, where they can be."""
        lazy = {name for name, value in self.values.items() if isinstance(value, LazyArray)}
        if lazy:
            self.values |= recovered_params(self.lir, self.memory, lazy)

    @property
    def everything(self) -> Mapping[int, np.ndarray]:
        """Bytes of every weight, in memory or not: what is written to files."""
        return self.memory

    def set(self, name: str, value: np.ndarray) -> None:
        """Give a param a value; what is derived from it follows."""
        source = self.lir.derived or self.lir.mir
        source.set_param(name, value)
        self.values[name] = source.param_values[name]
        self.load()

    # -- what a run reports to its weights; only streamed ones use it

    @property
    def watched(self) -> bool:
        """Whether runs must be held by `running`."""
        return self.ring is not None or self._mapped_from is not None

    def running(self) -> AbstractContextManager[None]:
        """Held by a run from its first step to its last."""
        return _NOTHING if self._mapped_from is None else self._from_file(self._mapped_from)

    @contextmanager
    def _from_file(self, file: Container) -> Iterator[None]:
        """A run that reads weights in a mapped file: if that was truncated meanwhile, there is no result."""
        try:
            yield
        finally:
            file.check_whole()

    def reach(self, step: int) -> None:
        """All kernels before `step` of the schedule are done, which is a host thunk; returns when the weights
        that it reads are in place."""

    def share_cores(self) -> bool:
        """Decide who reads from here on; says whether reading has its own core."""
        return False

    def failure(self) -> RlxError | None:
        """Why weights did not come, after a gate has failed."""
        return None

    @property
    def stats(self) -> dict[str, Any] | None:
        """What streaming has done so far; None for weights that stay in memory."""
        return None
