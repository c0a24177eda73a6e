"""A program being checked: what its ways share, and what a finding is."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlx.api.compile import compile
from rlx.api.lowering import lower
from rlx.errors import GradientError, InternalError, RlxError, TransformError, UnsupportedError
from rlx.fuzz.bounds import Bounded, Follower, NotFollowed, assert_within
from rlx.fuzz.programs.program import PROGRAM, Program
from rlx.fuzz.twins import eager, is_numpys
from rlx.ir.bind import holds, match_shape
from rlx.ir.graph import Graph
from rlx.ir.resize import with_sizes
from rlx.ops.array.addressing import OutOfRangeError
from rlx.reference.interpreter import evaluate

T = TypeVar("T")
Arrays = list[np.ndarray]
LEGITIMATE = (GradientError, TransformError, UnsupportedError)
"""Refusals of transforms that are not findings: there is no gradient, or RLX says it has none."""


class Finding(Exception):
    """The program shows a fault: where, of what kind, and the details."""

    def __init__(self, oracle: str, kind: str, detail: str) -> None:
        super().__init__(f"{oracle}: {kind}: {detail}")
        self.oracle, self.kind, self.detail = oracle, kind, detail

    @property
    def signature(self) -> tuple[str, str]:
        """What stays the same while the program shrinks."""
        return self.oracle, self.kind


class Refused(Exception):
    """The program is refused for a good reason: there is nothing to check."""


def attempt(oracle: str, do: Callable[[], T], allowed: tuple[type[Exception], ...] = ()) -> T:
    """Run a stage. Errors of kinds that are `allowed` end the check, all others are findings.

    Where RLX may refuse sizes, the program itself may ask for an axis that its values do not have there.
    """
    try:
        return do()
    except (Finding, Refused):
        raise
    except Exception as e:
        if isinstance(e, allowed) and not isinstance(e, InternalError):
            raise Refused(str(e)) from e
        if RlxError in allowed and isinstance(e, IndexError) and is_the_programs(e):
            raise Refused(str(e)) from e
        cause = e.__cause__ if isinstance(e, InternalError) and e.__cause__ is not None else e
        raise Finding(oracle, f"{type(cause).__name__} in {raised_in(cause)}", str(e)) from e


def raised_in(error: BaseException) -> str:
    """The function of RLX that raised."""
    frames, trace = ["?"], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/rlx/" in code.co_filename and "/rlx/fuzz/" not in code.co_filename:
            frames.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        trace = trace.tb_next
    return frames[-1]


def is_the_programs(error: BaseException) -> bool:
    """Whether a line of the program itself raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == PROGRAM


@dataclass
class Truth:
    """What a program must give at some sizes."""

    plain: Arrays
    bounded: Sequence[Bounded] | None  # None where errors cannot be followed

    def rows(self, which: slice | int) -> Truth:
        """What holds for some rows of every result, or for one."""
        kept = self.bounded and [
            Bounded(np.asarray(b.value[which]), np.broadcast_to(b.error, b.value.shape)[which])
            for b in self.bounded
        ]
        return Truth([np.asarray(a[which]) for a in self.plain], kept)

    def or_as_far_as(self, other: Truth) -> Truth:
        """This one for a program that rounds as another does, too."""
        if self.bounded is None or other.bounded is None:
            return Truth(self.plain, None)
        pairs = zip(self.bounded, other.bounded, strict=True)
        return Truth(self.plain, [Bounded(a.value, a.error + b.error) for a, b in pairs])


class Case:
    """A program being checked: what ways share."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.random = random.Random(program.number)

    def truth(self, sizes: Mapping[str, int] | None = None) -> Truth:
        """By the reference, at the sizes of the program or at others (where it may be refused)."""
        p = self.program
        plain = None
        if p.transform:  # sizes that f itself refuses say nothing about its transform
            attempt("trace", lambda: replace(p, transform="").graph(weights=False, sizes=sizes), (RlxError,))
        elif is_numpys(p):
            plain = attempt("eager", lambda: eager(p, p.arrays(sizes)), (RlxError,))
        allowed = LEGITIMATE if p.transform else () if plain is not None else (RlxError,)
        graph = attempt("trace", lambda: p.graph(weights=False, sizes=sizes), allowed)
        feed = p.feed(graph, sizes)
        # Data for other sizes may be indices beyond these: refused, and rightly.
        want = attempt("reference", lambda: list(evaluate(graph, feed).values()), (OutOfRangeError,))
        truth = Truth(want, attempt("bounds", lambda: bounds(graph, feed)))
        if plain is not None:  # NumPy sums in an order that depends on where elements are
            self.judged("eager and graph", plain, truth)
        return truth

    @functools.cached_property
    def here(self) -> Truth:
        return self.truth()

    @functools.cached_property
    def weights(self) -> bool:
        """Whether inputs that are marked so are weights; what is open in one way is an input in all."""
        p = self.program
        opened = set(p.others) if {"symbolic", "onnx", "save"} & set(p.ways) else set()
        return not any(x.weight and opened & set(p.dims(x)) for x in p.inputs)

    @functools.cached_property
    def graph(self) -> Graph:
        _ = self.here  # what the reference refuses is refused
        allowed = LEGITIMATE if self.program.transform else ()
        return attempt("trace", lambda: self.program.graph(weights=self.weights), allowed)

    @functools.cached_property
    def base(self) -> Arrays:
        """What the plain program gives natively, judged."""
        return self.judged("static", self.run("static", self.graph))

    def run(
        self, oracle: str, graph: Graph, sizes: Mapping[str, int] | None = None, **options: Any
    ) -> Arrays:
        options = {"threads": 1, **options}
        program = attempt(f"{oracle}: compile", lambda: compile(graph, **options))
        feed = self.program.feed(graph, sizes)
        return attempt(f"{oracle}: run", lambda: list(program.run(feed).values()))

    def judged(self, oracle: str, got: Arrays, truth: Truth | None = None) -> Arrays:
        """Results that are within the table's bounds."""
        truth = truth or self.here
        for i, (value, plain) in enumerate(zip(got, truth.plain, strict=True)):
            if value.dtype != plain.dtype or value.shape != plain.shape:
                raise Finding(oracle, "wrong type", f"{_type(value)}, the reference gives {_type(plain)}")
            if truth.bounded is None:
                continue
            try:
                assert_within(value, plain, truth.bounded[i])
            except AssertionError as e:
                raise Finding(oracle, "wrong value", f"result {i}: {str(e).strip()[:400]}") from None
        return got

    def same(self, oracle: str, got: Arrays) -> None:
        same_bits(oracle, got, self.base)


def as_run(graph: Graph, feed: Mapping[str, np.ndarray]) -> tuple[Graph, dict[str, int]]:
    """What a run of these sizes computes: the graph with the sizes as numbers where they break its guards. A
    run takes a variant then, in which a size of 1 broadcasts."""
    binding: dict[str, int] = {}
    for node in graph.inputs:
        match_shape(node.shape, feed[node.attrs["name"]].shape, binding, "an input")
    if not all(holds(c, binding) for c in graph.constraints):
        graph = with_sizes(graph, binding)
    return graph, binding


def bounds(graph: Graph, feed: Mapping[str, np.ndarray]) -> list[Bounded] | None:
    """The table, followed through the graph."""
    graph, binding = as_run(graph, feed)
    try:
        with np.errstate(all="ignore"):
            return list(Follower(lower(graph), dict(feed), binding).outputs().values())
    except NotFollowed:
        return None


def _type(value: np.ndarray) -> str:
    return f"{value.dtype}{list(value.shape)}"


def same_bits(oracle: str, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    """Equal to the last bit; one NaN is like another."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Finding(oracle, "wrong type", f"result {i} is {_type(a)} against {_type(b)}")
        if a.tobytes() != b.tobytes():
            nan = (a != a) & (b != b)
            if not np.array_equal(a[~nan].reshape(-1).view(np.uint8), b[~nan].reshape(-1).view(np.uint8)):
                off = np.flatnonzero(((a != b) & ~nan).reshape(-1))[:3]
                pairs = [(a.reshape(-1)[j], b.reshape(-1)[j]) for j in off]
                raise Finding(oracle, "other bits", f"result {i}: {pairs or 'the sign of a zero'}")
