"""What a workload is: one computation that is given to every engine in the form that suits it best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
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
    (jax compiled) unless the workload has code of its own for them. `peers` are the engines to beat.
    """

    name: str
    feed: Arrays
    peers: tuple[str, ...]
    onnx: Callable[[], Any] | None = None
    rlx: Callable[[int], Run] | None = None
    """Code of its own for RLX, given the number of threads (default: the ONNX model, or `graph`, bound)."""
    graph: Callable[[], Any] | None = None
    """An RLX graph in the model's place, where RLX has a builder of its own."""
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
