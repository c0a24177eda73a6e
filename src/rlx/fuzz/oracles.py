"""Ways to run a program and what each must give: the oracles of the fuzzer.

The judge of values is the NumPy reference with the table of `rlx.fuzz.bounds`. Two runs that must do the same
arithmetic are compared bit by bit.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlx import config
from rlx.backend.reference.interpreter import evaluate
from rlx.backend.reference.lir import LirInterpreter
from rlx.compile import compile, lower, plan
from rlx.cost.io import IoModel
from rlx.errors import BudgetError, GradientError, RlxError, TransformError, UnsupportedError
from rlx.functions import jit
from rlx.fuzz.bounds import Bounded, Follower, NotFollowed, assert_within
from rlx.fuzz.program import Program
from rlx.fuzz.twins import eager
from rlx.ir.graph import Graph
from rlx.ir.op import Level, Role
from rlx.ir.parse import parse_graph
from rlx.ir.text import graph_text
from rlx.ir.verify import verify
from rlx.session import load

T = TypeVar("T")
Arrays = list[np.ndarray]
LEGITIMATE = (GradientError, TransformError, UnsupportedError)
"""Refusals of transforms that are no findings: mathematics has no gradient there, or RLX says it has none."""


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
    """Run a stage. Errors of kinds that are `allowed` end the check, all others are findings."""
    try:
        return do()
    except (Finding, Refused):
        raise
    except allowed as e:
        raise Refused(str(e)) from e
    except Exception as e:
        raise Finding(oracle, f"{type(e).__name__} in {raised_in(e)}", str(e)) from e


def raised_in(error: BaseException) -> str:
    """The function of RLX that raised."""
    frames, trace = ["?"], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/rlx/" in code.co_filename and "/rlx/fuzz/" not in code.co_filename:
            frames.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        trace = trace.tb_next
    return frames[-1]


@dataclass
class Truth:
    """What a program must give at some sizes."""

    plain: Arrays
    bounded: Sequence[Bounded] | None  # None where errors cannot be followed


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
        else:
            plain = attempt("eager", lambda: eager(p, p.arrays(sizes)), (RlxError,))
        allowed = LEGITIMATE if p.transform else ()
        graph = attempt("trace", lambda: p.graph(weights=False, sizes=sizes), allowed)
        feed = p.feed(graph, sizes)
        want = attempt("reference", lambda: list(evaluate(graph, feed).values()))
        if plain is None:
            plain = want
        else:
            same_bits("eager and graph", plain, want)
        return Truth(plain, attempt("bounds", lambda: bounds(graph, feed)))

    @functools.cached_property
    def here(self) -> Truth:
        return self.truth()

    @functools.cached_property
    def weights(self) -> bool:
        """Whether inputs that are marked so are weights; what is open in one way is an input in all."""
        p = self.program
        opened = set(p.others) if "symbolic" in p.ways else set()
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
        options = {"cache": False, "threads": 1, **options}
        program = attempt(f"{oracle}: compile", lambda: compile(graph, **options))
        feed = self.program.feed(graph, sizes)
        return attempt(f"{oracle}: run", lambda: list(program.run(feed).values()))

    def judged(self, oracle: str, got: Arrays, truth: Truth | None = None) -> Arrays:
        """Results that lie within the table's bounds."""
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


def bounds(graph: Graph, feed: Mapping[str, np.ndarray]) -> list[Bounded] | None:
    """The table, followed through the graph."""
    try:
        with np.errstate(all="ignore"):
            return list(Follower(lower(graph), dict(feed), {}).outputs().values())
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


def static(case: Case) -> None:
    """Every size known: the reference's values."""
    _ = case.base


def symbolic(case: Case) -> None:
    """Open sizes: the bits of the static program, and the reference's values at other sizes."""
    p = case.program
    if not p.others:
        return static(case)
    truth = case.here
    graph = attempt("symbolic: trace", lambda: p.graph(p.open_sizes(), case.weights), (RlxError,))
    program = attempt("symbolic: compile", lambda: compile(graph, cache=False, threads=1))
    for sizes, there in ((p.sizes, truth), (p.others, None)):
        if there is None:
            there = case.truth(sizes)
        feed = p.feed(graph, sizes)
        if _is_guarded(graph, feed):
            continue
        got = attempt("symbolic: run", lambda feed=feed: list(program.run(feed).values()))  # type: ignore[misc]
        case.judged("symbolic", got, there)
        if there is truth:
            case.same("symbolic and static", got)


def _is_guarded(graph: Graph, feed: Mapping[str, np.ndarray]) -> bool:
    """Whether sizes break what the graph had to assume of a broadcast: that an open size is not 1."""
    from rlx.ir.bind import match_shape
    from rlx.ir.dim import evaluate as value_of

    binding: dict[str, int] = {}
    for node in graph.inputs:
        match_shape(node.shape, feed[node.attrs["name"]].shape, binding, "an input")
    broken = [c for c in graph.constraints if not c.check(binding)]
    return bool(broken) and all(
        c.kind == "eq" and 1 in (value_of(c.lhs, binding), value_of(c.rhs, binding)) for c in broken
    )


def jitted(case: Case) -> None:
    """rlx.jit: at the sizes of the program, at others, and again."""
    p = case.program
    f = jit(p.function(), cache=False, threads=1)
    truth = case.here
    first = attempt("jit", lambda: list(f(*p.arrays())))
    case.judged("jit", first, truth)
    if p.others:
        there = case.truth(p.others)
        case.judged(
            "jit, second call", attempt("jit, second call", lambda: list(f(*p.arrays(p.others)))), there
        )
        same_bits("jit, third call", attempt("jit, third call", lambda: list(f(*p.arrays()))), first)


def threads(case: Case) -> None:
    """The bits do not depend on the number of threads."""
    case.same("threads", case.run("threads", case.graph, threads=case.random.choice((2, 3))))


def poison(case: Case) -> None:
    """Freed memory is spoilt: nobody reads it."""
    case.same("poison", case.run("poison", case.graph, debug="poison"))


def flipped(case: Case) -> None:
    """Fusion decided otherwise: the same values."""
    pins = attempt("pins: plan", lambda: pins_for(case.graph, case.program.number))
    case.judged("pins", case.run("pins", case.graph, pins=pins))


def pins_for(graph: Graph, number: int) -> dict[tuple[int, int], bool]:
    """All pairs of neighbours apart, all together, or each as chance has it."""
    chance = random.Random(number)
    kind = chance.choice(("apart", "together", "any"))
    return {pair: kind == "together" or (kind == "any" and chance.random() < 0.5) for pair in _pairs(graph)}


def _pairs(graph: Graph) -> list[tuple[int, int]]:
    """Ops of which one reads the other, through views too."""
    lir = plan(graph, config.TARGET.get())
    assert lir.unfused is not None
    io = IoModel(lir.unfused, lir.plan.binding)
    pairs = []
    for node in lir.unfused.nodes:
        if node.op.role is Role.COMPUTE and not io.is_view(node):
            roots = [io.root(o) for o in node.operands]
            pairs += [(r.id, node.id) for r in roots if r.op.role is Role.COMPUTE]
    return pairs


def planned(case: Case) -> None:
    """The plan, run by the reference on spoilt memory."""
    lir = attempt("plan", lambda: plan(case.graph, config.TARGET.get(), checks=True))
    attempt("plan: check", lir.plan.check)
    feed = case.program.feed(case.graph)
    case.judged(
        "plan", attempt("plan: run", lambda: list(LirInterpreter(lir, poison=True).run(feed).values()))
    )


def cached(case: Case) -> None:
    """A run from the cache: the bits of the first one."""
    with cache_in(case.folder / "cache"):
        first = case.run("cache", case.graph, cache=True)
        again = case.run("cache, again", case.program.graph(weights=case.weights), cache=True)
    case.same("cache", first)
    case.same("cache, again", again)


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """RLX's cache is elsewhere for a while."""
    before = os.environ.get(config.CACHE.name)
    os.environ[config.CACHE.name] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[config.CACHE.name]
        else:
            os.environ[config.CACHE.name] = before


def saved(case: Case) -> None:
    """A program from a file: the bits of the one that was saved."""
    path = case.folder / "program.rlx"
    with cache_in(case.folder / "cache"):
        program = attempt("save: compile", lambda: compile(case.graph, cache=False, threads=1))
        attempt("save", lambda: program.save(path))
        again = attempt("load", lambda: load(path))
        feed = case.program.feed(case.graph)
        case.same("load", attempt("load: run", lambda: list(again.run(feed).values())))


def budget(case: Case) -> None:
    """Less memory: refused, or the same values."""
    lir = attempt("budget: plan", lambda: plan(case.graph, config.TARGET.get()))
    most = int(lir.plan.sizes().get("activation", 0) * case.random.choice((0.5, 0.8, 1.0)))
    try:
        plan(case.graph, config.TARGET.get(), budget=most)
    except BudgetError:
        return
    except Exception:  # met again, and reported, by the run
        pass
    case.judged("budget", case.run("budget", case.graph, budget=most))


def text(case: Case) -> None:
    """The text of the graph is the graph; lowered, it means the same."""
    blobs: dict[str, np.ndarray] = {}
    words = attempt("text", lambda: graph_text(case.graph, blobs=blobs))
    again = attempt("parse", lambda: parse_graph(words, blobs))
    if graph_text(again) != graph_text(case.graph):
        raise Finding("text", "other text", "parsed and printed again, the text of the graph is another")
    attempt("verify", lambda: verify(again, Level.HIR))
    attempt("verify lowered", lambda: verify(lower(case.graph), Level.MIR))


MAIN: dict[str, Callable[[Case], None]] = {"static": static, "symbolic": symbolic, "jit": jitted}
MORE: dict[str, Callable[[Case], None]] = {
    "threads": threads,
    "poison": poison,
    "pins": flipped,
    "plan": planned,
    "cache": cached,
    "save": saved,
    "budget": budget,
    "text": text,
}
MAIN_WAYS, MORE_WAYS = tuple(MAIN), tuple(MORE)


def check(program: Program) -> Finding | None:
    """Run a program in its ways; what is wrong, if anything is.

    >>> from rlx.fuzz.grammar import draw_program
    >>> check(draw_program(0, 0)) is None
    True
    """
    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder:
        case = Case(program, Path(folder))
        for way in program.ways or ("static",):
            try:
                (MAIN | MORE)[way](case)
            except Refused:
                continue
            except Finding as finding:
                return finding
    return None
