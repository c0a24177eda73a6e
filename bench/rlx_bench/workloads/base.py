"""What a workload is: one computation that is given to every engine in the form that suits it best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.records import dataclass
from rlx.runtime.memory import ALIGN_FROM, allocate

Arrays = dict[str, np.ndarray]
Run = Callable[[], Any]
"""Runs once; gives its results in the order of the model's outputs."""


@dataclass
class Workload:
    """One row of the table.

    `onnx` makes the model that RLX, ONNX Runtime and OpenVINO run, and that torch and jax run node by node
    (jax compiled) unless the workload has code of its own for them. `path` is the file of the model, where
    there is one. `peers` are the engines to beat.
    """

    name: str
    feed: Arrays
    peers: tuple[str, ...]
    onnx: Callable[[], Any] | None = None
    path: Path | None = None
    graph: Callable[[], Any] | None = None
    """An RLX graph, where there is no ONNX model for all engines (training), or peers get a better one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of rlx.compile."""
    numpy: Callable[[Arrays], list[Run]] | None = None
    torch: Callable[[dict[str, Any]], list[Run]] | None = None
    jax: Callable[[dict[str, Any]], list[Run]] | None = None
    """Each gives one or more ways; the fastest is kept."""
    flops: float = 0.0
    bytes: float = 0.0
    """Least number of bytes read and written, for workloads that memory bounds."""
    writes: bool = True
    """Whether half of `bytes` are written."""
    sweep: list[Arrays] | None = None
    """Feeds of other sizes: a run takes all of them, one after the other."""
    copies: int = 1
    """How many times the computation stands in the model: short ones are repeated inside it."""
    tolerance: float = 1e-4
    """Largest difference between engines, relative to the largest value."""
    dtype: str = "f32"
    by_run: bool = False
    """Whether engines are called as in their first example (`prog.run`), instead of with bound buffers."""
    in_mean: bool = True
    """Whether the row counts in the geometric mean. Log-mel rows do not: a ratio of 100 says nothing of other
    rows."""

    def source(self) -> Any:
        """The model as ONNX Runtime and OpenVINO take it: the path of its file, or its bytes."""
        assert self.onnx is not None
        return str(self.path) if self.path is not None else self.onnx().SerializeToString()

    def as_graph(self) -> Any:
        """The model as RLX and the NumPy reference take it."""
        from rlx.frontend.onnx import from_onnx

        if self.graph is not None:
            return self.graph()
        assert self.onnx is not None
        return from_onnx(self.path if self.path is not None else self.onnx())

    @property
    def feeds(self) -> list[Arrays]:
        return self.sweep or [self.feed]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Random numbers; large arrays begin at a cache line, where engines put theirs (NumPy: 16 bytes off)."""
    values: np.ndarray = generator.standard_normal(shape, np.float32) * np.float32(scale)
    if values.nbytes < ALIGN_FROM:
        return values
    placed = allocate(values.nbytes).array.view(np.float32).reshape(shape)
    placed[...] = values
    return placed
