"""When every kernel ran, on every thread: the data of a Chrome or Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.ir.graph import Node
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.runtime.context import Context
    from rlx.runtime.program import CompiledProgram


@dataclass(frozen=True, eq=False)
class Span:
    """One kernel or host thunk on one thread, by the clock of `time.perf_counter_ns`."""

    node: Node
    thread: int
    start_ns: int
    end_ns: int
    host: bool = False

    @property
    def microseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


@dataclass(frozen=True)
class Run:
    """One run: from the call to its return, and what happened in between."""

    start_ns: int
    end_ns: int
    spans: list[Span]


def spans(context: Context | None) -> list[Span]:
    """What the steps of a profiled run have noted."""
    out: list[Span] = []
    first = 0
    while context is not None:
        nodes = context.graph.nodes
        end = len(context.steps) if context.later is None else context.left_at
        for step in context.steps[first:end]:
            if step.program is None:
                out.append(Span(nodes[step.nodes[0]], 0, *step.span, host=True))
                continue
            assert step.program.stamps is not None, "the context was made to be profiled"
            records = step.program.records
            for thread, record, start, stop in step.program.stamps.events().tolist():
                if records[record].name:  # gates of streamed weights have none
                    out.append(Span(nodes[int(records[record].name)], thread, start, stop))
        first, context = end, context.later
    return out


def best_times(runs: Sequence[Run]) -> dict[int, float]:
    """Kernel -> microseconds on the thread that took longest, the best of several runs, as they ran."""
    best: dict[int, float] = {}
    for run in runs:
        spent: dict[int, dict[int, float]] = {}
        for span in run.spans:  # a loop has a span per kernel and step
            of_threads = spent.setdefault(span.node.id, {})
            of_threads[span.thread] = of_threads.get(span.thread, 0.0) + span.microseconds
        longest = {id: max(times.values()) for id, times in spent.items()}
        best = {id: min(best.get(id, t), t) for id, t in longest.items()}
    return best


def chrome_trace(program: CompiledProgram, runs: Sequence[Run]) -> dict[str, object]:
    """Runs as a document for Perfetto or chrome://tracing; times in microseconds from the first call.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> program = rlx.compile(g, threads=1)
    >>> events = chrome_trace(program, program.trace({"x": np.ones(8, np.float32)}))["traceEvents"]
    >>> [(e["ph"], e["name"]) for e in events][-2:]
    [('X', 'run 0'), ('X', '%1 (mul)')]
    """
    origin = min((run.start_ns for run in runs), default=0)
    tracks = {0: "calls"} | {s.thread + 1: f"thread {s.thread}" for run in runs for s in run.spans}
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": program.graph.name}}
    ]
    for track, name in sorted(tracks.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})

    def add(name: str, category: str, track: int, start: int, end: int, **args: object) -> None:
        times = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
        place = {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": track}
        events.append({**place, **times, "args": args})

    for number, run in enumerate(runs):
        add(f"run {number}", "run", 0, run.start_ns, run.end_ns)
        for s in run.spans:
            category = "host thunk" if s.host else "kernel"
            facts = {"type": str(s.node.type), "where": list(s.node.where)}
            add(program.describe(s.node), category, s.thread + 1, s.start_ns, s.end_ns, **facts)
    return {"traceEvents": events, "displayTimeUnit": "ns"}
