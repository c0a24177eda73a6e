"""What an exported program consists of: sizes and guards, places of values, and steps in order.

A plan for symbolic sizes places values anew for each binding. An exported program has one placement, in
which every value has room for the largest sizes of the ranges. So offsets are numbers, and what depends on
sizes is a list of expressions that `bind` computes. Control flow stays structured: a step may hold steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeAlias

from rlx.errors import UnsupportedError
from rlx.export.bounds import Ranges, settled
from rlx.ir.dim import Constraint, Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.kernel.control import is_branch, loop_form
from rlx.records import dataclass

ENDLESS = (1 << 63) - 1


@dataclass(frozen=True)
class Place:
    """An address: `offset` bytes into a space, and for each loop in `rows` so many bytes more per step.

    Spaces are those of plans; the space "step" holds the numbers of the steps that loops are in.
    """

    space: str
    offset: Dim
    rows: tuple[tuple[int, Dim], ...] = ()

    def __add__(self, more: Dim) -> Place:
        return replace(self, offset=self.offset + more)

    @property
    def fixed(self) -> int:
        """The part of the offset that is a number."""
        return self.offset if isinstance(self.offset, int) else self.offset.const

    @property
    def moving(self) -> Dim:
        """The part of the offset that depends on sizes."""
        return self.offset - self.fixed

    def by_row(self, loop: int, nbytes: Dim) -> Place:
        """The place that moves with the steps of a loop."""
        return replace(self, rows=(*self.rows, (loop, nbytes)))


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel: operands and results, then the sizes that it reads."""

    kernel: str
    places: tuple[Place, ...]
    sizes: tuple[Dim, ...]
    serial: bool = False


@dataclass(frozen=True)
class Copy:
    """Bytes from one place to another."""

    source: Place
    target: Place
    nbytes: Dim


@dataclass(frozen=True)
class Branch:
    """Some steps where a byte is not zero, others where it is."""

    flag: Place
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclass(frozen=True)
class Assumed:
    """Steps that assume something about sizes; a run that comes here with other sizes fails."""

    condition: Condition
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Repeat:
    """A loop over two copies of its body: `there` reads carried values in their results and leaves new ones
    in spare places, `back` does the opposite. `home` copies them to the results where a loop ends in between.

    It takes at most `limit` steps, no more than the word at `trips` says, and goes on while the byte at
    `go` (before the first step) or `flag` (after a step) is not zero. Rows are counted down if `reverse`.
    """

    number: int
    limit: Dim
    there: tuple[Step, ...]
    back: tuple[Step, ...]
    home: tuple[Step, ...]
    trips: Place | None = None
    go: Place | None = None
    flag: Place | None = None
    reverse: bool = False


@dataclass(frozen=True)
class Once:
    """Steps of the prologue, whose results stay from run to run."""

    steps: tuple[Step, ...]


Step: TypeAlias = KernelCall | Copy | Branch | Assumed | Repeat | Once


@dataclass(frozen=True)
class Every:
    """All of these conditions."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Either:
    """At least one of these conditions."""

    parts: tuple[Condition, ...]


Condition: TypeAlias = Constraint | Every | Either


@dataclass(frozen=True)
class Guard:
    """What `bind` checks, and what it says if it does not hold."""

    condition: Condition
    text: str


@dataclass(frozen=True)
class Symbol:
    """A size that `bind` gets, from `low` to `high`."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Argument:
    """An input or output: its place, and the most bytes that it takes."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    place: Place
    nbytes: int


@dataclass(frozen=True)
class State:
    """A state: its place and bytes, and where its first value is among the weights (None: zeros)."""

    name: str
    place: Place
    nbytes: int
    initial: Place | None


@dataclass(frozen=True)
class Tables:
    """A program for other languages; `rlx.export.plans` makes it of a plan."""

    name: str
    target: str
    symbols: tuple[Symbol, ...]
    guards: tuple[Guard, ...]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    states: tuple[State, ...]
    steps: tuple[Step, ...]
    spaces: Mapping[str, int]
    scratch: int
    """Bytes of scratch per thread."""
    lasting: tuple[str, ...] = ()
    """Symbols whose change starts a stream anew: those of states, and of inputs that are given once."""
    weights: Mapping[int, object] = field(default_factory=dict)
    """Arrays by their offset in the weights."""

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The range of every symbol."""
        return {s.name: (s.low, s.high) for s in self.symbols}


def every_step(steps: Sequence[Step]) -> Iterator[Step]:
    """Steps and the steps inside them."""
    for step in steps:
        yield step
        for name in ("steps", "then", "otherwise", "there", "back", "home"):
            yield from every_step(getattr(step, name, ()))


# -- guards


def condition_of(graph: Graph, ranges: Ranges) -> Condition:
    """What a body assumes about sizes; a branch in it needs one body that fits."""
    parts: list[Condition] = []
    for c in graph.constraints:
        if settled(c, ranges) is not True:
            parts.append(c)
    for node in graph.nodes:
        if node.bodies and loop_form(node) is not None:
            inner = [condition_of(body, ranges) for body in node.bodies]
            if is_branch(node):
                if not any(holds_always(c) for c in inner):
                    parts.append(Either(tuple(inner)))
            else:
                parts += inner
    return Every(tuple(p for p in parts if not holds_always(p)))


def holds_always(condition: Condition) -> bool:
    """Whether nothing is left to check."""
    return isinstance(condition, Every) and not condition.parts


def guard_of(c: Constraint, ranges: Ranges) -> Guard | None:
    """A guard that `bind` checks; None if it always holds, refused if it never does."""
    holds = settled(c, ranges)
    if holds is False:
        told = ", ".join(f"{s}={ranges[s][0]}..{ranges[s][1]}" for s in c.symbols)
        raise UnsupportedError(
            f"the program assumes {c.describe()}, which holds for no sizes of {told or 'this program'}; bind "
            "other ranges",
            c.where,
        )
    return None if holds else Guard(c, f"the program assumes {c.describe()}; use other sizes")
