"""A program that grows line by line: each line is tried on a graph, whose types say what may follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rlx.errors import RlxError
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.program import HEADER, Input, Size, Step
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.types import TupleType

T = TypeVar("T")

SIZES = (2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 64, 65, 100, 127)
"""Odd ones, primes, and those around the number of lanes of a vector."""
MOST_ELEMENTS = 20_000
FLOATS = ("f32", "f64", "f16", "bf16")
INTS = ("i64", "i32", "i16", "i8", "u8", "u16", "u32", "u64")


class NotHere(Exception):
    """A move that nothing in the program so far is fit for."""


class Crashed(Exception):
    """The last line raised what is not an RlxError: the program is a finding, and complete."""


class Draw:
    """The program so far. `values` are names of what exists, `node` knows the type of each."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.graph = Graph("scratch")
        self.space: dict[str, Any] = {}
        exec(HEADER, self.space)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[str] = []
        self.indexed: list[tuple[str, str, int]] = []  # indices, what they index, along which axis
        names = "nmkpq"[: self.random.randint(1, 4)]
        self.sizes = dict(zip(names, self.random.sample(SIZES, len(names)), strict=True))
        if len(names) > 1 and self.chance(0.2):  # two sizes that are equal by chance
            self.sizes[names[1]] = self.sizes[names[0]]
        if self.chance(0.08):
            self.sizes[self.choose(names)] = 0
        if self.chance(0.08):
            self.sizes[self.choose(names)] = 1
        self.main = (
            self.choose(FLOATS) if self.chance(0.25) else self.choose(INTS) if self.chance(0.1) else "f32"
        )

    # What chance decides.
    def choose(self, options: Sequence[T]) -> T:
        if not options:
            raise NotHere
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self, low: float, high: float) -> float:
        """A number with few digits, as people write them."""
        return round(self.random.uniform(low, high), 2)

    # What is there.
    def node(self, name: str) -> Node:
        made: Node = self.space[name]
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(d) for d in self.node(name).shape)

    def kind(self, name: str) -> str:
        return str(self.node(name).dtype)

    def rank(self, name: str) -> int:
        return self.node(name).rank

    def known(self, kinds: Sequence[str] | None = None, rank: int = 0, most_rank: int = 9) -> list[str]:
        """Values of some dtypes and ranks, the latest last."""
        return [
            v
            for v in self.values
            if (kinds is None or self.kind(v) in kinds) and rank <= self.rank(v) <= most_rank
        ]

    def value(self, kinds: Sequence[str] | None = None, rank: int = 0, most_rank: int = 9) -> str:
        """One of them, more often a late one; a new input where there is none."""
        fit = self.known(kinds, rank, most_rank)
        if not fit or self.chance(0.06):
            most = min(most_rank, 4)
            count = self.random.randint(min(rank, most), max(rank, min(most, 3)))
            return self.input(self.choose(kinds or (self.main,)), [self.size() for _ in range(count)])
        return self.choose(fit[-3:]) if self.chance(0.7) else self.choose(fit)

    def floating(self, rank: int = 0, most_rank: int = 9) -> str:
        return self.value(
            [self.main] if self.main in FLOATS and self.chance(0.8) else FLOATS, rank, most_rank
        )

    def size(self) -> Size:
        """A size of the program, by name, or a small number."""
        return self.choose((1, 2, 3)) if self.chance(0.15) else self.choose(sorted(self.sizes))

    def named(self, shape: Sequence[int]) -> list[Size]:
        """A shape by names of sizes, where there are such."""
        names = {n: name for name, n in self.sizes.items() if n > 1}
        return [names.get(n, n) for n in shape]

    @property
    def has_special_values(self) -> bool:
        """Whether any value so far may be infinite or NaN because an input is."""
        return any(x.values.special for x in self.inputs)

    def axis(self, name: str) -> int:
        rank = self.rank(name)
        if rank == 0:
            raise NotHere
        return self.random.randint(-rank, rank - 1)

    def axes(self, name: str) -> object:
        """One axis, several, or None for all."""
        rank = self.rank(name)
        if rank == 0 or self.chance(0.15):
            return None
        if self.chance(0.5):
            return self.axis(name)
        return tuple(sorted(self.random.sample(range(rank), self.random.randint(1, rank))))

    def partner(self, name: str) -> str:
        """A value of the same dtype that broadcasts with another: one that is there, or a new input."""
        shape, kind = self.shape(name), self.kind(name)
        fit = [v for v in self.values if self.kind(v) == kind and _broadcasts(self.shape(v), shape)]
        if fit and self.chance(0.6):
            return self.choose(fit)
        cut = shape[self.random.randint(0, len(shape)) :] if shape and self.chance(0.5) else shape
        dims = [1 if self.chance(0.2) else d for d in self.named(cut)]
        return self.input(kind, dims)

    # What is added.
    def input(
        self, kind: str, dims: Sequence[Size], values: Values | None = None, weight: float = 0.25
    ) -> str:
        """A new input; numbers come from a range that the dtype holds. `weight` is the chance that a graph
        has it as a weight."""
        name = f"x{len(self.inputs)}"
        shape = [d if isinstance(d, int) else self.sizes[d] for d in dims]
        if int(np.prod(shape)) > MOST_ELEMENTS or len(self.inputs) >= 8:
            raise NotHere
        if values is None:
            t = dtype(kind)
            top = self.choose((3, 100, 1_000_000)) if t.is_int else 2.0
            low, high = max(-top, t.min_value), min(top, t.max_value)
            values = Values(low, high, special=t.is_float and self.chance(0.03))
        fixed, mapped = self.chance(weight), self.chance(0.8)
        self.inputs.append(Input(name, kind, tuple(dims), values, fixed, mapped))
        self.space[name] = self.graph.input(name, shape, kind)
        self.values.append(name)
        return name

    def emit(self, text: str, count: int = 1) -> list[str]:
        """A line; the names of its results. A line that the type rules refuse is not a move."""
        try:
            with self.graph.building():
                made = eval(text, self.space)
        except RlxError as e:
            raise NotHere from e
        except Exception:  # a finding: it ends the program, and is met again when that is checked
            self.steps.append(Step(tuple(f"v{len(self.values) + i}" for i in range(count)), text))
            raise Crashed from None
        nodes = made if isinstance(made, (tuple, list)) else (made,)
        nodes = [n if isinstance(n, Node) else self.graph.constant(np.asarray(n)) for n in nodes]
        for node in nodes:
            self._check(node)
        results = [f"v{len(self.values) + i}" for i in range(len(nodes))]
        self.space |= dict(zip(results, nodes, strict=True))
        self.steps.append(Step(tuple(results), text))
        self.values += results
        return results

    def _check(self, node: Node) -> None:
        if isinstance(node.type, TupleType) or not all(isinstance(d, int) for d in node.shape):
            raise NotHere
        if int(np.prod([int(d) for d in node.shape])) > MOST_ELEMENTS or node.rank > 5:
            raise NotHere


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(x == y or 1 in (x, y) for x, y in pairs)
