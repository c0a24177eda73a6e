"""Ways to run a program and what each must give: the oracles of the fuzzer.

The judge of values is the NumPy reference with the table of `rlx.fuzz.bounds`. Two runs that must do the same
arithmetic are compared bit by bit.
"""

from __future__ import annotations

import os
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlx import config
from rlx.api.compile import compile, plan
from rlx.api.functions import jit
from rlx.api.lowering import lower
from rlx.api.session import load
from rlx.cost.io import IoModel
from rlx.errors import BudgetError, GuardError, RlxError, UnsupportedError
from rlx.frontend.onnx import from_onnx
from rlx.fuzz.case import LEGITIMATE, Case, Finding, Refused, Truth, as_run, attempt, bounds, same_bits
from rlx.fuzz.hosts import named
from rlx.fuzz.programs.program import BATCH, Program
from rlx.fuzz.to_onnx import CannotWrite, to_onnx
from rlx.ir.bind import holds, match_shape
from rlx.ir.graph import NAMED, Graph
from rlx.ir.op import Level, Role
from rlx.ir.rewrite import dims_in
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter
from rlx.runtime.barriers import all_shared


def static(case: Case) -> None:
    """Every size known: the reference's values."""
    _ = case.base


def symbolic(case: Case) -> None:
    """Open sizes: the reference's values at the sizes of the program, and at others.

    Kernels are chosen without the sizes, so bits may be other ones. Calls of a function are another matter.
    """
    p = case.program
    if not p.others:
        return static(case)
    truth = case.here
    graph = opened(case, "symbolic")
    program = attempt("symbolic: compile", lambda: compile(graph, threads=1))
    for sizes, there in ((p.sizes, truth), (p.others, None)):
        if there is None:
            there = case.truth(sizes)
        feed = p.feed(graph, sizes)
        broken = breaks_guard(graph, feed)
        if p.keeps_sizes and broken:
            continue
        got = attempt(
            "symbolic: run",
            lambda feed=feed: list(program.run(feed).values()),  # type: ignore[misc]
            (GuardError,) if broken and holds_sizes(graph) else (),
        )
        case.judged("symbolic", got, there)


def opened(case: Case, oracle: str) -> Graph:
    """The program with open sizes. A graph has no call that could answer whether an open size equals a
    number, so a program that asks is another one there."""
    p = case.program
    if p.others and p.asks_about_sizes:
        raise Refused("it asks about open sizes")
    return attempt(f"{oracle}: trace", lambda: p.graph(p.open_sizes(), case.weights), (RlxError,))


def breaks_guard(graph: Graph, feed: Mapping[str, np.ndarray]) -> bool:
    """Whether sizes break what the graph assumed. Of a plain program a run takes a variant then; gradients,
    and shapes that were read, belong to sizes that are equal, so a size of 1 is refused there."""
    return bool(broken_kinds(graph, feed))


def holds_sizes(graph: Graph) -> bool:
    """Whether an attribute has an open size. It may be meant before or after it is stretched, so a run that
    stretches it may be refused."""
    values = [v for n in graph.nodes if n.op.role not in NAMED for v in n.attrs.values()]
    return any(True for value in values for _ in dims_in(value))


def broken_kinds(graph: Graph, feed: Mapping[str, np.ndarray]) -> set[str]:
    """Kinds of assumptions of the graph that sizes break."""
    binding: dict[str, int] = {}
    for node in graph.inputs:
        match_shape(node.shape, feed[node.attrs["name"]].shape, binding, "an input")
    return {c.kind for c in graph.constraints if not holds(c, binding)}


def as_onnx(case: Case) -> None:
    """The program as a model of ONNX, with open sizes: the same meaning, and what its graph must give."""
    try:
        import onnx  # noqa: F401

    except ImportError:
        return static(case)
    p, truth = case.program, case.here
    graph = opened(case, "onnx")
    if broken_kinds(graph, p.feed(graph)) - {"eq"}:  # which a model does not state: sizes that broadcast do
        return static(case)
    try:
        model = to_onnx(graph)
    except CannotWrite:
        return static(case)
    if case.random.random() < 0.3:  # other tools write nodes in any order
        nodes = list(model.graph.node)
        case.random.shuffle(nodes)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    read = attempt("onnx: import", lambda: from_onnx(model), (UnsupportedError,))
    feed = p.feed(read)
    meant = attempt("onnx: reference", lambda: list(evaluate(as_run(read, feed)[0], feed).values()))
    own = Truth(meant, attempt("onnx: bounds", lambda: bounds(read, feed)))
    case.judged("onnx: meaning", meant, truth.or_as_far_as(own))
    program = attempt("onnx: compile", lambda: compile(read, threads=1))
    case.judged("onnx", attempt("onnx: run", lambda: list(program.run(feed).values())), own)
    if p.others:
        there = case.truth(p.others)
        feed = p.feed(read, p.others)
        if (p.keeps_sizes and breaks_guard(read, feed)) or broken_kinds(graph, p.feed(graph, p.others)) - {
            "eq"
        }:
            return
        allowed = (GuardError,) if breaks_guard(read, feed) and holds_sizes(read) else ()
        got = attempt("onnx: run at other sizes", lambda: list(program.run(feed).values()), allowed)
        case.judged("onnx at other sizes", got, there.or_as_far_as(Truth(there.plain, bounds(read, feed))))


def jitted(case: Case) -> None:
    """rlx.jit: at the sizes of the program, at others, and again, and with open sizes from the first call on:
    the bits of a call do not depend on earlier calls."""
    p = case.program
    f = jit(p.function(), threads=1)
    truth = case.here
    first = attempt("jit", lambda: list(f(*p.arrays())))
    case.judged("jit", first, truth)
    if p.others:
        there = case.truth(p.others)
        case.judged(
            "jit, second call", attempt("jit, second call", lambda: list(f(*p.arrays(p.others)))), there
        )
        same_bits("jit, third call", attempt("jit, third call", lambda: list(f(*p.arrays()))), first)
        dynamic = jit(p.function(), cache=False, threads=1, dynamic=True)
        same_bits("jit, open sizes", attempt("jit, open sizes", lambda: list(dynamic(*p.arrays()))), first)


def threads(case: Case) -> None:
    """The bits do not depend on the number of threads, even where threads share less than is worth it."""
    with all_shared():
        case.same("threads", case.run("threads", case.graph, threads=case.random.choice((2, 3))))


def poison(case: Case) -> None:
    """Freed memory is overwritten: nobody reads it."""
    case.same("poison", case.run("poison", case.graph, debug="poison"))


def flipped(case: Case) -> None:
    """Fusion decided otherwise: the same values."""
    pins = attempt("pins: plan", lambda: pins_for(case.graph, case.program.number))
    case.judged("pins", case.run("pins", case.graph, pins=pins))


def pins_for(graph: Graph, number: int) -> dict[tuple[int, int], bool]:
    """All pairs of neighbours separate, all together, or each as chance has it."""
    chance = random.Random(number)
    kind = chance.choice(("apart", "together", "any"))
    return {pair: kind == "together" or (kind == "any" and chance.random() < 0.5) for pair in _pairs(graph)}


def _pairs(graph: Graph) -> list[tuple[int, int]]:
    """Ops of which one reads the other, through views too."""
    lir = plan(graph)
    assert lir.unfused is not None
    io = IoModel(lir.unfused, lir.plan.binding)
    pairs = []
    for node in lir.unfused.nodes:
        if node.op.role is Role.COMPUTE and not io.is_view(node):
            roots = [io.root(o) for o in node.operands]
            pairs += [(r.id, node.id) for r in roots if r.op.role is Role.COMPUTE]
    return pairs


def planned(case: Case) -> None:
    """The plan, run by the reference on overwritten memory."""
    lir = attempt("plan", lambda: plan(case.graph, checks=True))
    attempt("plan: check", lir.plan.check)
    feed = case.program.feed(case.graph)
    case.judged(
        "plan", attempt("plan: run", lambda: list(LirInterpreter(lir, poison=True).run(feed).values()))
    )


def cached(case: Case) -> None:
    """Made anew: the bits of the first run, whose code other ways take from the cache."""
    case.same("cache", case.run("no cache", case.program.graph(weights=case.weights), cache=False))
    case.same("cache, again", case.run("cache, again", case.program.graph(weights=case.weights)))


def other_target(case: Case) -> None:
    """Code for another target that runs here: the reference's values."""
    others = [name for name in named("all") if name != named("host")[0]]
    if others:
        name = case.random.choice(others)
        case.judged("other target", case.run(f"target {name}", case.graph, target=name))


def split(case: Case) -> None:
    """A batch in parts: each row as the function gives it alone, however many others there are."""
    p = case.program
    if p.transform not in ("", "vmap") or not any(x.mapped for x in p.inputs):
        return
    _ = case.here
    batched = replace(p, transform="vmap", sizes={**p.sizes, BATCH: 3}, others={}, ways=())
    whole = Case(batched, case.folder)
    truth = whole.truth()
    graph = attempt("split: trace", lambda: batched.graph((BATCH,), weights=False), LEGITIMATE)
    program = attempt("split: compile", lambda: compile(graph, threads=1))
    feed = batched.feed(graph)
    mapped = {x.name for x in p.inputs if x.mapped}
    for rows in (slice(0, 3), slice(0, 1), slice(1, 3)):
        part = {k: v[rows] if k in mapped else v for k, v in feed.items()}
        got = attempt("split: run", lambda part=part: list(program.run(part).values()))  # type: ignore[misc]
        whole.judged("split", got, truth.rows(rows))
    alone = replace(p, transform="", ways=()).graph(weights=False)
    first = {k: v[0] if k in mapped else v for k, v in feed.items()}
    row = attempt("split: one row", lambda: list(evaluate(alone, first).values()))
    own = Truth(row, attempt("split: bounds", lambda: bounds(alone, first)))
    one = truth.rows(0)
    whole.judged("split: vmap and one row", one.plain, own.or_as_far_as(one))


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
    """A program from a file, with open sizes if it has any: the bits of the one that was saved."""
    path, p = case.folder / "program.rlx", case.program
    _ = case.base
    graph = opened(case, "save")
    program = attempt("save: compile", lambda: compile(graph, threads=1))
    attempt("save", lambda: program.save(path))
    again = attempt("load", lambda: load(path))
    for sizes in (p.sizes, p.others):
        feed = p.feed(graph, sizes)
        try:
            first = list(program.run(feed).values())
        except RlxError:  # what is open is another way's question
            return
        got = attempt("load: run", lambda feed=feed: list(again.run(feed).values()))  # type: ignore[misc]
        same_bits("load", got, first)


def budget(case: Case) -> None:
    """Less memory: refused, or the same values."""
    lir = attempt("budget: plan", lambda: plan(case.graph))
    most = int(lir.plan.sizes().get("activation", 0) * case.random.choice((0.5, 0.8, 1.0)))
    try:
        plan(case.graph, budget=most)
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


MAIN: dict[str, Callable[[Case], None]] = {
    "static": static,
    "symbolic": symbolic,
    "jit": jitted,
    "onnx": as_onnx,
}
MORE: dict[str, Callable[[Case], None]] = {
    "threads": threads,
    "poison": poison,
    "pins": flipped,
    "plan": planned,
    "cache": cached,
    "save": saved,
    "budget": budget,
    "text": text,
    "target": other_target,
    "split": split,
}
MAIN_WAYS, MORE_WAYS = tuple(MAIN), tuple(MORE)


def check(program: Program) -> Finding | None:
    """Run a program in its ways; what is wrong, if anything is.

    >>> from rlx.fuzz.programs.grammar import draw_program
    >>> check(draw_program(0, 0)) is None
    True
    """
    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder, cache_in(Path(folder) / "cache"):
        case = Case(program, Path(folder))
        for way in program.ways or ("static",):
            try:
                _ = case.here  # what the reference refuses is refused in every way
                (MAIN | MORE)[way](case)
            except Refused:
                continue
            except Finding as finding:
                return finding
            except Exception as e:  # the fuzzer itself failed: a finding, too
                return Finding("fuzzer", f"{type(e).__name__} in {way}", traceback.format_exc(limit=-3))
    return None
