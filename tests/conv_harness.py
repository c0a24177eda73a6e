"""Convolutions under test: cases by shape, programs without host thunks, which forms run on which targets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import rlx
from rlx.ir.graph import Graph
from rlx.target.cpu import Target


@dataclass(frozen=True)
class Case:
    """One convolution; `symbolic` leaves all sizes but channels to the run."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    more: dict[str, Any] = field(default_factory=dict)
    symbolic: bool = False

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.x))}*{'x'.join(map(str, self.w))}"
        more = "".join(f" {k}={v}" for k, v in self.more.items())
        return text + more + (" symbolic" if self.symbolic else "")

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of the input, as a graph declares it."""
        return ("n", self.x[1], *"abc"[: len(self.x) - 2]) if self.symbolic else self.x


def compiled(graph: Graph, target: Target | str = "host", threads: int = 1, **options: Any) -> Any:
    name = target if isinstance(target, str) else target.name
    program = rlx.compile(graph, target=name, threads=threads, **options)
    assert not program.stats["host_thunks"]
    return program


def in_turn(*axes: Mapping[str, Any]) -> list[Any]:
    """Every other point of a grid of three or more axes, values by name: still every value of an axis meets
    every value of any other. The rest is under `-m slow`."""
    return [
        pytest.param(
            *(value for _, (_, value) in point),
            id="-".join(name for _, (name, _) in point),
            marks=[pytest.mark.slow] * (sum(i for i, _ in point) % 2),
        )
        for point in itertools.product(*(list(enumerate(axis.items())) for axis in axes))
    ]
