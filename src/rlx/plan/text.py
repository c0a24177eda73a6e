"""Plans as text: one file that says everything, can be compared line by line, and is read back.

    rlx plan 1
    compiler "0.1.0"
    target "x86-64-v4"
    option "precision" = "f32"
    gate "dispatch_ns" = 200
    graph "hello" { ... }             the graph of kernels
    weights graph "hello.weights" { ... }     what derives packed weights from params, if anything
    plan {
      alignment 64
      bind "seq" = 128                sizes of symbols
      space activation 8192           bytes
      order %5 %7                     kernels
      slot %0 input 0 4096            space, offset, bytes
      slot %5 activation 0 4096 steps 0 1
      slot %7 activation 0 4096 steps 1 2 over %5      in the storage of %5, which ends
      fetch %3 ring 0 4096 at 0 steps 2 3      offset, bytes; filled from, awaited at, read until
      fetch %4 ring 0 64 at 1 steps 2 2 part 1 of 2 from 64 after 3    byte of the weight; part of step 1
      view %6 of %5 at 64 strides 1 16         bytes into it; strides in elements, or dense
      work %9 4096 512 carries 1 {    bytes for the bodies of %9 and their carried values
        body { ... }                  a plan for each body
      }
      phase prologue %0 %1
      input "x" %0
      output "y" %7
    }
    again "operation_fs" = 4375       what fusion charged for computing values again
    decision {...}                    JSON, one line each: what fusion decided
    stage "expand" 136                what was done to get here: a stage, and the values in the graph after it
    firing {...}                      a rewrite, with its rule and place
    earlier {...}                     a decision of a stage before fusion

Without locations, names of graphs and this record it is the input of the fingerprint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlx.config import VERSION
from rlx.cost.decision import Decision, DecisionLog, decision_ops
from rlx.errors import ParseError
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import Printer, string_text
from rlx.ir.verify import verify
from rlx.plan.build import Planner
from rlx.plan.lir import (
    LirBufferPlan,
    LirBufferSlot,
    LirFetch,
    LirIoManifest,
    LirModule,
    LirViewAlias,
    LirWorkspace,
)
from rlx.plan.phase import Phase, PhaseSchedule
from rlx.rewrite.pipeline import Trace
from rlx.rewrite.rules import Firing

FORMAT = 1


def module_text(module: LirModule, blobs: dict[str, np.ndarray] | None = None, locations: bool = True) -> str:
    """The text of a program and its plan; large constants are added to `blobs` by digest."""
    return "\n".join(_lines(module, blobs, locations, named=True)) + "\n"


def canonical_text(module: LirModule) -> str:
    """What decides about the bytes of a program: all of its text but display names, lines of source and the
    record of decisions."""
    return "\n".join(_lines(module, None, locations=False, named=False)) + "\n"


def _lines(
    module: LirModule, blobs: dict[str, np.ndarray] | None, locations: bool, named: bool
) -> Iterator[str]:
    printer = Printer(locations, blobs)
    yield f"rlx plan {FORMAT}"
    yield f"compiler {string_text(VERSION)}"
    yield f"target {string_text(module.target)}"
    for key, value in sorted(module.options.items()):
        yield f"option {string_text(key)} = {json.dumps(value)}"
    for key, value in module.gate.items():
        yield f"gate {string_text(key)} = {json.dumps(value)}"
    yield from _graph_lines(printer, module.mir, named)
    if module.derived is not None:
        first, *rest = _graph_lines(printer, module.derived, named)
        yield f"weights {first}"
        yield from rest
    yield "plan {"
    for line in _plan_lines(module.plan):
        yield "  " + line
    yield "}"
    if named:
        yield from _record_lines(module)


def _record_lines(module: LirModule) -> Iterator[str]:
    """How the program came to be: decisions, stages, rewrites."""
    for key, value in module.again.items():
        yield f"again {string_text(key)} = {json.dumps(value)}"
    for decision in module.decisions:
        told = replace(decision, ops=decision_ops(decision, module.unfused))
        yield f"decision {json.dumps(told.to_json())}"
    if module.trace is not None:
        for name, count in module.trace.stages:
            yield f"stage {string_text(name)} {count}"
        for firing in module.trace.firings:
            yield f"firing {json.dumps(asdict(firing))}"
        for decision in module.trace.decisions:
            yield f"earlier {json.dumps(decision.to_json())}"


def _graph_lines(printer: Printer, graph: Graph, named: bool) -> Iterator[str]:
    lines = printer.graph_lines(graph)
    first = next(lines)
    yield first if named else 'graph "" {'
    yield from lines


def _plan_lines(plan: LirBufferPlan) -> Iterator[str]:
    yield f"alignment {plan.alignment}"
    if plan.heuristic:
        yield f"heuristic {string_text(plan.heuristic)}"
    for name in plan.dynamic_symbols:
        yield f"bind {string_text(name)} = {plan.binding[name]}"
    for space, size in plan.space_sizes.items():
        yield f"space {space} {size}"
    yield f"order {_ids(plan.schedule)}"
    for node in sorted(plan.assignments):
        yield _slot_line(plan, node)
    for f in plan.fetches:
        parts = f" part {f.part} of {f.parts} from {f.begin}" if f.parts else ""
        after = f" after {f.at_part}" if f.at_part else ""
        yield f"fetch %{f.node} ring {f.offset} {f.size} at {f.at} steps {f.first} {f.last}{parts}{after}"
    for node in sorted(plan.view_aliases):
        alias = plan.view_aliases[node]
        strides = "dense" if alias.strides is None else " ".join(["strides", *map(str, alias.strides)])
        yield f"view %{node} of %{alias.root} at {alias.byte_offset} {strides}"
    for node in sorted(plan.work):
        work = plan.work[node]
        yield f"work %{node} {work.slot.offset} {work.slot.size} carries {work.carries} {{"
        for body in work.bodies:
            yield "  body {"
            for line in _plan_lines(body):
                yield "    " + line
            yield "  }"
        yield "}"
    for phase in Phase:
        found = sorted(plan.phases.nodes_in(phase))
        if found:
            yield f"phase {phase} {_ids(found)}"
    for kind in ("inputs", "params", "outputs"):
        for name, node in getattr(plan.io, kind):
            yield f"{kind[:-1]} {string_text(name)} %{node}"


def _slot_line(plan: LirBufferPlan, node: int) -> str:
    slot = plan.assignments[node]
    line = f"slot %{node} {slot.space} {slot.offset} {slot.size}"
    if node in plan.lifetimes:
        first, last = plan.lifetimes[node]
        line += f" steps {first} {last}"
    return line if node not in plan.shared else f"{line} over %{plan.shared[node]}"


def _ids(nodes: list[int]) -> str:
    return " ".join(f"%{n}" for n in nodes)


# -- reading


def parse_module(text: str, blobs: Mapping[str, np.ndarray] | None = None) -> LirModule:
    """The program that `module_text` wrote. It is verified, and its plan checked, before it is handed out."""
    return _Reader(text, blobs or {}).module()


def read_buffers(text: str, graph: Graph, derived: Graph | None) -> LirBufferPlan:
    """The memory plan in a program's text, whose graphs were read before; it is not checked."""
    reader = _Reader(text, {})
    reader.at = reader.lines.index("plan {")
    return _PlanReader(reader, graph, derived).read()


def read_trace(text: str) -> Trace | None:
    """The record of stages in a program's text; None if it has none."""
    reader = _Reader(text, {})
    for number, line in enumerate(reader.lines):
        reader.at = number  # so that a fault names its line
        word, _, rest = line.partition(" ")
        if word in RECORD:
            reader.record(word, rest)
    return reader.trace if reader.trace.stages else None


RECORD = ("stage", "firing", "earlier")
_NODE = re.compile(r"%(\d{1,12})$")
_FETCH = re.compile(
    r"(%\d{1,12}) ring (\d{1,18}) (\d{1,18}) at (\d{1,12}) steps (\d{1,12}) (\d{1,12})"
    r"(?: part (\d{1,12}) of (\d{1,12}) from (\d{1,18}))?(?: after (\d{1,12}))?$"
)


class _Reader:
    def __init__(self, text: str, blobs: Mapping[str, np.ndarray]) -> None:
        self.lines, self.blobs, self.at = text.splitlines(), blobs, 0
        self.trace = Trace()

    def fail(self, what: str) -> ParseError:
        return ParseError(f"line {self.at + 1} of the plan: {what}")

    def line(self) -> str | None:
        """The next line that says something, without moving on."""
        while self.at < len(self.lines) and not self.lines[self.at].strip():
            self.at += 1
        return self.lines[self.at] if self.at < len(self.lines) else None

    def block(self) -> str:
        """A block in braces: from here to the brace in the first column."""
        start = self.at
        while self.at < len(self.lines) and self.lines[self.at] != "}":
            self.at += 1
        if self.at == len(self.lines):
            self.at = start
            raise self.fail("this block is not closed")
        self.at += 1
        return "\n".join(self.lines[start : self.at])

    def module(self) -> LirModule:
        if self.line() != f"rlx plan {FORMAT}":
            raise self.fail(f"not a plan of format {FORMAT}; it should begin with 'rlx plan {FORMAT}'")
        self.at += 1
        head: dict[str, dict[str, Any]] = {"option": {}, "gate": {}, "again": {}}
        words = {"compiler": "", "target": ""}
        graphs: dict[str, Graph] = {}
        plan: LirBufferPlan | None = None
        decisions = []
        while (line := self.line()) is not None:
            word, _, rest = line.partition(" ")
            if word in words:
                words[word] = self.value(rest)
            elif word in head:
                key, _, value = rest.partition(" = ")
                head[word][self.value(key)] = self.value(value)
            elif word == "graph" or line.startswith("weights graph"):
                graphs[word] = self.graph(word)
                continue
            elif line == "plan {":
                if "graph" not in graphs:
                    raise self.fail("the plan comes before its graph")
                plan = _PlanReader(self, graphs["graph"], graphs.get("weights")).read()
                continue
            elif word == "decision":
                decisions.append(self.value(rest))
            elif word in RECORD:
                self.record(word, rest)
            else:
                raise self.fail(f"{line[:40]!r} is not a line of a plan")
            self.at += 1
        if plan is None or "graph" not in graphs:
            raise self.fail("the graph or the plan is missing")
        plan.check()
        mir = graphs["graph"]
        planner = Planner.replaying(mir, plan)
        planner.budget = head["option"].get("budget")
        return LirModule(
            mir,
            plan,
            graphs.get("weights"),
            words["target"],
            head["option"],
            head["gate"],
            DecisionLog.from_json(decisions),
            planner,
            trace=self.trace if self.trace.stages else None,
            again=head["again"],
        )

    def record(self, word: str, rest: str) -> None:
        """A line about how the program came to be."""
        if word == "stage":
            rest, _, count = rest.rpartition(" ")
            if not count.isdecimal():
                raise self.fail(f"stage {rest[:40]} has no number of values after it")
            self.trace.stages.append((str(self.value(rest)), int(count)))
        elif word == "earlier":
            self.trace.decisions.append(Decision.from_json(self.value(rest)))
        else:
            facts = self.value(rest)
            try:
                self.trace.firings.append(Firing(**{**facts, "where": tuple(facts["where"])}))
            except (TypeError, KeyError):
                raise self.fail(f"{rest[:40]!r} is not a record of a rewrite") from None

    def value(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise self.fail(f"{text[:40]!r} is not a value") from None

    def graph(self, word: str) -> Graph:
        start = self.at
        text = self.block().removeprefix("weights ")
        try:
            return verify(parse_graph(text, self.blobs), Level.MIR)
        except ParseError as e:
            self.at = start
            raise self.fail(f"in this graph, {e.message}") from e


class _PlanReader:
    """The lines between `plan {` and its brace."""

    def __init__(self, reader: _Reader, graph: Graph, derived: Graph | None = None) -> None:
        self.reader, self.graph, self.derived = reader, graph, derived
        self.slots: dict[int, LirBufferSlot] = {}
        self.views: dict[int, LirViewAlias] = {}
        self.life: dict[int, tuple[int, int]] = {}
        self.shared: dict[int, int] = {}
        self.spaces: dict[str, int] = {}
        self.binding: dict[str, int] = {}
        self.order: list[int] = []
        self.fetches: list[LirFetch] = []
        self.phases = PhaseSchedule()
        self.io: dict[str, list[tuple[str, int]]] = {"input": [], "param": [], "output": []}
        self.alignment, self.heuristic = 64, ""
        self.work: dict[int, LirWorkspace] = {}

    def read(self) -> LirBufferPlan:
        reader = self.reader
        close = reader.lines[reader.at].partition(reader.lines[reader.at].strip())[0] + "}"
        reader.at += 1
        while True:
            line = reader.line()
            if line is None:
                raise reader.fail("the plan is not closed")
            if line == close:
                reader.at += 1
                break
            word, _, rest = line.strip().partition(" ")
            read = getattr(self, f"read_{word}", None)
            if read is None:
                raise reader.fail(f"{line.strip()[:40]!r} is not a line of a plan")
            try:
                read(rest)
            except (ValueError, IndexError) as e:
                if isinstance(e, ParseError):
                    raise
                raise reader.fail(f"{line.strip()[:60]!r} is not understood") from None
            reader.at += 1
        io = LirIoManifest(tuple(self.io["input"]), tuple(self.io["param"]), tuple(self.io["output"]))
        if io != LirIoManifest.collect(self.graph, self.derived):
            raise reader.fail("inputs, params and outputs of the plan are not those of its graph")
        return LirBufferPlan(
            self.slots,
            self.order,
            self.views,
            self.phases,
            io,
            self.life,
            self.spaces,
            self.alignment,
            self.graph.symbols(),
            self.binding,
            self.shared,
            self.heuristic,
            self.work,
            self.graph,
            fetches=tuple(self.fetches),
        )

    def node(self, word: str) -> int:
        found = _NODE.match(word)
        if not found or int(found[1]) >= len(self.graph):
            raise self.reader.fail(f"{word!r} is not a node of the graph")
        return int(found[1])

    def read_alignment(self, rest: str) -> None:
        self.alignment = int(rest)
        if self.alignment < 1:
            raise self.reader.fail(f"an alignment of {rest} bytes is not possible")

    def read_heuristic(self, rest: str) -> None:
        self.heuristic = str(self.reader.value(rest))

    def read_bind(self, rest: str) -> None:
        name, _, value = rest.partition(" = ")
        self.binding[self.reader.value(name)] = int(value)

    def read_space(self, rest: str) -> None:
        space, size = rest.split()
        self.spaces[space] = int(size)

    def read_order(self, rest: str) -> None:
        self.order = [self.node(w) for w in rest.split()]

    def read_slot(self, rest: str) -> None:
        name, space, offset, size, *more = rest.split()
        node = self.node(name)
        self.slots[node] = LirBufferSlot(int(offset), int(size), space)
        words = iter(more)
        for word in words:
            if word == "steps":
                self.life[node] = (int(next(words)), int(next(words)))
            elif word == "over":
                self.shared[node] = self.node(next(words))
            else:
                raise self.reader.fail(f"{word!r} is not a property of a slot")

    def read_fetch(self, rest: str) -> None:
        found = _FETCH.match(rest)
        if found is None:
            raise self.reader.fail(
                "a fetch is written: fetch %2 ring 0 4096 at 0 steps 1 1, then perhaps part 0 of 2 from 0, "
                "after 1"
            )
        name, offset, size, at, first, last, part, parts, begin, after = found.groups("0")
        numbers = (offset, size, at, first, last, begin, part, parts, after)
        self.fetches.append(LirFetch(self.node(name), *map(int, numbers)))

    def read_view(self, rest: str) -> None:
        name, of, root, at, offset, kind, *strides = rest.split()
        if (of, at) != ("of", "at") or kind not in ("dense", "strides"):
            raise self.reader.fail("a view is written: view %2 of %1 at 0 dense")
        steps = None if kind == "dense" else tuple(map(int, strides))
        node = self.node(name)
        if steps is not None and len(steps) != self.graph.nodes[node].rank:
            raise self.reader.fail(
                f"%{node} has {self.graph.nodes[node].rank} axes, but {len(steps)} strides"
            )
        self.views[node] = LirViewAlias(self.node(root), int(offset), steps)

    def read_work(self, rest: str) -> None:
        name, offset, size, word, carries, brace = rest.split()
        if (word, brace) != ("carries", "{"):
            raise self.reader.fail("a workspace is written: work %9 0 512 carries 1 {")
        node = self.node(name)
        self.reader.at += 1
        plans = []
        for body in self.graph.nodes[node].bodies:
            if (self.reader.line() or "").strip() != "body {":
                raise self.reader.fail(f"a plan for each of the bodies of %{node} should follow")
            plans.append(_PlanReader(self.reader, body).read())
        if not plans or (self.reader.line() or "").strip() != "}":
            raise self.reader.fail(f"the workspace of %{node} is not closed, or has plans for more bodies")
        self.work[node] = LirWorkspace(LirBufferSlot(int(offset), int(size)), tuple(plans), int(carries))

    def read_phase(self, rest: str) -> None:
        phase, *nodes = rest.split()
        for word in nodes:
            self.phases.set(self.node(word), Phase(phase))

    def read_input(self, rest: str) -> None:
        self._io("input", rest)

    def read_param(self, rest: str) -> None:
        self._io("param", rest)

    def read_output(self, rest: str) -> None:
        self._io("output", rest)

    def _io(self, kind: str, rest: str) -> None:
        name, _, node = rest.rpartition(" ")
        self.io[kind].append((self.reader.value(name), self.node(node)))
