"""A page that says what a compiled program does: stages, kernels, memory, and why it was fused so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from rlx.config import bytes_text
from rlx.cost.decision import Decision, decision_ops, ops_text, time_text
from rlx.cost.profile import GraphIoProfile
from rlx.ir.dim import Dim, evaluate, symbols
from rlx.ir.graph import Graph, Node
from rlx.ir.symbols import found_by_data
from rlx.ir.types import tensor_types
from rlx.plan.kernel_costs import KernelCost, kernel_name
from rlx.plan.lir import LirBufferPlan, LirModule, LirWorkspace
from rlx.plan.memory.slices import slices_of
from rlx.plan.phase import Phase
from rlx.plan.predict import kernel_costs
from rlx.plan.states import why_copied
from rlx.plan.stream import stream_lines
from rlx.records import dataclass

WIDTH = 100
TIMELINE = 60  # columns
BARS = " ▁▂▃▄▅▆▇█"
LARGEST = 10
REFUSED = 8
LONGEST_LAYER = 100  # kernels that are looked at as one repeating block
COLUMN = " " * 30  # where the text of a kernel goes on
SPACE_TEXTS = {
    "activation": "values between kernels; places are shared over time",
    "weight": "shared by all runs",
    "input": "memory of the caller",
    "output": "memory of the caller",
    "state": "kept from step to step",
    "ring": "weights that are streamed",
    "scratch": "for kernels to work in, all threads",
}
_IDS = re.compile(r"%\d+")


def explain(
    module: LirModule,
    thunks: Mapping[int, str] | None = None,
    scratch: int = 0,
    host: str | None = None,
    measured: Mapping[int, float] | None = None,
) -> str:
    """The page of a program, at the sizes that its plan is for. `thunks` says which kernels the host runs,
    `scratch` how many bytes kernels get to work in, `host` what machine it runs on, `measured` how many
    microseconds steps took.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> g = rlx.Graph("hello")
    >>> g.output("y", rlx.ops.tanh(g.input("x", (64, 64), "f32") * 2.0))
    >>> print(explain(plan(g, target="x86-64-v3")).splitlines()[0])
    hello for x86-64-v3: 1 kernel, 0 B of activations, 0 B of weights
    """
    costs = kernel_costs(module, thunks or {})
    parts = [
        _head(module, host),
        _stages(module),
        _kernels(module, costs, thunks or {}, measured or {}),
        _memory(module.plan, module.mir, scratch),
        _budget(module),
        stream_lines(module.plan),
        _decisions(module),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


# -- sections


def _head(module: LirModule, host: str | None) -> list[str]:
    plan = module.plan
    count = len(plan.schedule)
    sizes = ", ".join(f"{s} = {plan.binding[s]}" for s in plan.dynamic_symbols)
    weights = plan.sizes()["weight"]
    lines = [
        f"{module.name} for {module.target}: {count} kernel{'s' * (count != 1)}, "
        f"{bytes_text(plan.arena_size)} of activations, {bytes_text(weights)} of weights"
    ]
    if host is not None:
        lines.append(f"  host {host}")
    if sizes:
        lines += _wrapped(
            f"planned for {sizes}; other sizes reuse this code; nothing is recompiled", "  ", ""
        )
    for kind, items in (("in ", plan.io.inputs), ("out", plan.io.outputs)):
        for name, node in items:
            lines.append(f"  {kind}  {name}: {module.mir.nodes[node].type}")
    return lines + _states(module)


def _states(module: LirModule) -> list[str]:
    """Every state and how a run replaces it."""
    lines = []
    new, why = {s.name: s.output for s in module.mir.states}, why_copied(module.mir)
    for name, old in module.mir.state_inputs.items():
        value = new.get(name, old)
        if value is old:
            how = "never replaced"
        elif name in why:
            how = f"replaced by a copy, %{value.id}: {why[name]}"
        else:
            how = f"%{value.id} is written in place"
        lines += _wrapped(f"  state {name}: {old.type}, {how}", "    ", first="")
    return lines


def _stages(module: LirModule) -> list[str]:
    trace = module.trace
    if trace is None:
        return []
    fired = Counter(f.rule for f in trace.firings)
    lines = ["Stages that changed the graph: values in it after each"]
    before = -1
    for name, count in trace.stages:
        if count != before:
            lines.append(f"  {count:5}  {name}")
        before = count
    if fired:
        told = ", ".join(f"{rule} ({n})" for rule, n in fired.most_common())
        lines += _wrapped(f"rules that fired: {told}", "         ", first="         ")
    if module.derived is not None:
        lines.append(f"  {len(module.derived.outputs):5}  weights are prepared once, at load")
    return lines


def _kernels(
    module: LirModule, costs: Sequence[KernelCost], thunks: Mapping[int, str], measured: Mapping[int, float]
) -> list[str]:
    if not costs:
        return []
    total = sum(c.picoseconds for c in costs) or 1
    lines = [
        f"Kernels in order: predicted {time_text(total).lstrip('+')} in all, "
        f"{bytes_text(sum(c.io.device_traffic_bytes for c in costs))} moved",
        "  A kernel is one native function: values between the ops in it never reach memory.",
        *_phases(module.plan),
        *_segments(module, thunks),
        *_measured_in_all(measured),
        f"      time  share{'  measured' * bool(measured)}    moved  kernel",
    ]
    places = {c.node.where for c in costs}
    located = len(places) > len(costs) // 4
    rows = _Rows(module.mir, module.plan.binding, total, thunks, located, module.plan.work, measured)
    at = 0
    for length, times in _repeats([(kernel_name(c.node), c.node.type, c.io) for c in costs]):
        block, last = costs[at : at + length], costs[at + length * times - 1]
        if times > 1:
            lines.append(
                f"  {times} times, %{block[0].node.id} to %{last.node.id}; shares are of all of them:"
            )
        for number, c in enumerate(block):
            lines += rows.row(c, costs[at + number : at + length * times : length])
        at += length * times
    return lines


def _measured_in_all(measured: Mapping[int, float]) -> list[str]:
    if not measured:
        return []
    total = time_text(round(sum(measured.values()) * 1e6)).lstrip("+")
    return [f"  Measured {total} in all, the best of some runs, on the thread that took longest."]


def _phases(plan: LirBufferPlan) -> list[str]:
    """How a stream runs the program, if it does not run all of it at every step."""
    told = {Phase.PROLOGUE: "once per stream", Phase.EPILOGUE: "after the last heavy step"}
    counts = {phase: len(plan.nodes_in_phase(phase)) for phase in told}
    parts = [f"{text}: {counts[phase]}" for phase, text in told.items() if counts[phase]]
    return [f"  Kernels that run {', '.join(parts)}."] if parts else []


def _segments(module: LirModule, thunks: Mapping[int, str]) -> list[str]:
    """Where a run stops between native calls, if it does."""
    pieces = module.segments(thunks)
    if len(pieces) == 1:
        return []
    hosts = sum(s.on_host for s in pieces)
    most = found_by_data(module.outline)
    finders = [
        f"%{s.kernels[0]} finds {', '.join(_with_bound(name, most[name]) for name in s.defines)}"
        for s in pieces
        if s.defines
    ]
    told = [f"{hosts} of them on the host"] * bool(hosts) + finders
    return _wrapped(f"A run has {len(pieces)} segments: {'; '.join(told)}.", "    ", "  ")


def _with_bound(name: str, most: Dim | None) -> str:
    """A size that data decide, with what memory is planned for."""
    return name if most is None else f"{name} (at most {most})"


@dataclass(frozen=True)
class _Rows:
    """Lines of the table of kernels."""

    graph: Graph
    binding: Mapping[str, int]
    total: int
    thunks: Mapping[int, str]
    locations: bool
    work: Mapping[int, LirWorkspace]
    measured: Mapping[int, float]

    def row(self, c: KernelCost, alike: Sequence[KernelCost]) -> list[str]:
        """A kernel and others like it: time and bytes of one of them, the share of all."""
        whole = sum(other.picoseconds for other in alike)
        share = round(100 * whole / self.total)
        time = time_text(whole // len(alike)).lstrip("+")
        moved = bytes_text(c.io.device_traffic_bytes)
        text = f"{time:>9}  {share:4} %{self._measured(alike)} {moved:>8}  %{c.node.id} "
        text += f"{kernel_name(c.node)} -> {_type_text(c.node, self.binding)}"
        lines = _wrapped(text, COLUMN, first="|" if len(alike) > 1 else " ")
        if self.locations and c.node.where:
            more = f" and {len(c.node.where) - 1} more" if len(c.node.where) > 1 else ""
            lines.append(f"{COLUMN}@ {c.node.where[0]}{more}")
        if c.node.graph is not self.graph:  # one of a chain that runs in slices
            return lines
        if c.node.id in self.thunks:
            lines.append(f"{COLUMN}runs on the host: {self.thunks[c.node.id]}")
        elif c.node.id in self.work:
            lines += self._bodies(c.node, self.work[c.node.id], COLUMN)
        return lines

    def _measured(self, alike: Sequence[KernelCost]) -> str:
        """The column of measured times, if there is one."""
        if not self.measured:
            return ""
        found = [
            self.measured[c.node.id]
            for c in alike
            if c.node.graph is self.graph and c.node.id in self.measured
        ]
        text = time_text(round(sum(found) / len(found) * 1e6)).lstrip("+") if found else "-"
        return f" {text:>9}"

    def _bodies(self, node: Node, work: LirWorkspace, indent: str) -> list[str]:
        """The kernels of bodies, which run inside the program."""
        lines = []
        for body, plan in zip(node.bodies, work.bodies, strict=True):
            lines.append(f"{indent}{body.name}:")
            for kernel in (body.nodes[id] for id in plan.schedule):
                text = f"%{kernel.id} {kernel_name(kernel)} -> {_type_text(kernel, self.binding)}"
                lines += _wrapped(text, f"{indent}    ", first=f"{indent}  ")
                if kernel.id in plan.work:
                    lines += self._bodies(kernel, plan.work[kernel.id], f"{indent}    ")
        return lines


def _repeats(items: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Cuts a sequence into blocks (length, times): layers that repeat, and what stands alone.

    >>> list(_repeats("xabababy"))
    [(1, 1), (2, 3), (1, 1)]
    """
    number = {item: i for i, item in enumerate(dict.fromkeys(items))}
    keys, at = [number[item] for item in items], 0
    while at < len(keys):
        best = (1, 1)
        for length in range(1, min(LONGEST_LAYER, (len(keys) - at) // 2) + 1):
            block, times = keys[at : at + length], 1
            while keys[at + length * times : at + length * (times + 1)] == block:
                times += 1
            if times > 1 and length * times > best[0] * best[1]:
                best = (length, times)
        yield best
        at += best[0] * best[1]


def _type_text(node: Node, binding: Mapping[str, int]) -> str:
    """The type of a value at the sizes in force; what data decides keeps its name."""
    texts = []
    for t in tensor_types(node.type):
        known = (evaluate(d, binding) if binding.keys() >= set(symbols(d)) else d for d in t.shape)
        texts.append(str(t.with_shape(tuple(known))))
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _memory(plan: LirBufferPlan, graph: Graph, scratch: int) -> list[str]:
    live = plan.live_bytes()
    bound = max(live, default=0)
    lines = ["Memory"]
    for space, size in (plan.sizes() | ({"scratch": scratch} if scratch else {})).items():
        if size:
            lines.append(f"  {bytes_text(size):>9}  {space:<10}  {SPACE_TEXTS.get(space, '')}".rstrip())
    if not bound:
        return lines
    over = (
        "the least that this order needs"
        if plan.arena_size <= bound
        else f"{plan.arena_size / bound:.3f} x bound"
    )
    lines.append(
        f"  activations would take {bytes_text(plan.total_unshared_bytes())} without sharing; "
        f"{bytes_text(plan.arena_size)} is {over}"
    )
    if plan.shared:
        lines.append(f"  {len(plan.shared)} results take the place of an operand that ends with them")
    peak = live.index(bound)
    lines.append(f"  alive at each step, most at step {peak} (kernel %{plan.schedule[peak]}):")
    lines.append(f"  |{_timeline(live)}|")
    lines.append(f"Largest values, of {sum(n not in plan.shared for n in plan.lifetimes)} that need a place")
    largest = sorted(
        (n for n in plan.lifetimes if plan.assignments[n].space == "activation"),
        key=lambda n: (-plan.assignments[n].size, n),
    )[:LARGEST]
    for n in largest:
        first, last = plan.lifetimes[n]
        at = graph.nodes[n].where[0] if graph.nodes[n].where else ""
        taken = bytes_text(plan.assignments[n].size)
        text = f"  {taken:>9}  %{n} {_type_text(graph.nodes[n], plan.binding)}, steps {first} to {last}"
        text += f", in place of %{plan.shared[n]}" if n in plan.shared else ""
        lines.append(text + (f"  @ {at}" if at else ""))
    return lines


def _budget(module: LirModule) -> list[str]:
    """What a memory budget changed."""
    fitted = module.planner.fitted if module.planner is not None else None
    if fitted is None:
        return []
    lines = [
        f"Budget: {bytes_text(fitted['bytes'])} of activations; {bytes_text(fitted['before'])} before, "
        f"{bytes_text(fitted['after'])} now"
    ]
    if fitted["reordered"]:
        lines.append("  kernels run in another order")
    for node, work in module.plan.work.items():
        cut = slices_of(module.plan, module.mir.nodes[node])
        if cut is not None:
            count = len(work.bodies[0].schedule)
            lines.append(f"  {count} kernels run in {cut}: %{node}, inside which they have their own numbers")
    again = fitted["recomputed"]
    if again:
        share = 100 * fitted["ps_added"] / max(fitted["ps"], 1)
        count = sum(len(r["kernels"]) for r in again)
        lines.append(
            f"  {count} kernel{'s' * (count > 1)} run{'s' * (count == 1)} again instead of keeping results: "
            f"predicted {time_text(fitted['ps_added'])}, {share:.1f} % more"
        )
    for r in again:
        at = f"  @ {', '.join(r['where'][:2])}" if r["where"] else ""
        lines += _wrapped(f"{r['value']} by {'; '.join(r['kernels'])}{at}", "      ", first="    ")
    return lines if len(lines) > 1 else [f"{lines[0]}: nothing had to change"]


def _timeline(live: Sequence[int]) -> str:
    """Bytes over time as a row of bars, the highest of each column."""
    columns = min(TIMELINE, len(live))
    most = max(live) or 1
    out = []
    for c in range(columns):
        part = live[
            c * len(live) // columns : max((c + 1) * len(live) // columns, c * len(live) // columns + 1)
        ]
        out.append(BARS[-(-max(part) * (len(BARS) - 1) // most)])
    return "".join(out)


def _decisions(module: LirModule) -> list[str]:
    log = [*(module.trace.decisions if module.trace is not None else ()), *module.decisions]
    if not log:
        return []
    kept = [d for d in log if d.verdict]
    refused = [d for d in log if not d.verdict]
    saved = GraphIoProfile()
    for d in kept:
        saved += d.before - d.after
    lines = [
        f"Fusion: {len(kept)} of {len(log)} candidates kept; they save {saved.kernel_launches} launches and "
        f"{bytes_text(max(saved.device_traffic_bytes, 0))} of traffic",
        "  A candidate is kept if the IO it saves is worth more than the compute it adds.",
    ]
    if module.gate:
        gate = ", ".join(f"{k} {v}" for k, v in module.gate.items() if not isinstance(v, bool))
        lines += _wrapped(f"the gate: {gate}", "  ")
    if module.again:
        again = ", ".join(f"{k} {v}" for k, v in module.again.items())
        lines += _wrapped(f"to compute again, per element: {again}", "  ")
    rules = Counter(d.rule for d in kept)
    lines.append("  kept: " + ", ".join(f"{rule} ({n})" for rule, n in rules.most_common()))
    if refused:
        lines.append(
            f"Refused, those with most at stake of {len(refused)}: what joining would save, and why not"
        )
        for d in _worth_telling(refused, module.unfused):
            lines += _wrapped(_refusal(d, module.unfused), "    ", first="  ")
        lines.append("  ask why_not(a, b) about two nodes by their numbers before fusion")
    return lines


def _worth_telling(refused: Sequence[Decision], unfused: Graph | None) -> list[Decision]:
    """Different refusals, largest first: the layers of a model refuse the same things."""
    seen: set[tuple[str, ...]] = set()
    out = []
    for d in sorted(refused, key=lambda d: (-abs(d.net_ps), d.region, d.rule)):
        key = (_IDS.sub("", d.reason), *decision_ops(d, unfused))
        if key not in seen:
            seen.add(key)
            out.append(d)
    return out[:REFUSED]


def _refusal(d: Decision, unfused: Graph | None) -> str:
    ops = decision_ops(d, unfused)
    names = f" {ops_text(ops)}" if ops else ""
    if d.region:
        names += f" [%{d.region[0]}..%{d.region[-1]}]"
    gain = f"io {time_text(d.score_ps)}, compute {time_text(-d.compute_ps_added)}"
    return f"{d.rule}{names}: {gain}: {d.reason}"


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    """Lines of at most WIDTH characters; those after the first are indented."""
    lines = []
    words = text.lstrip(" ")
    now = (indent if first is None else first) + " " * (len(text) - len(words))
    fresh = True
    for word in words.split(" "):
        if not fresh and len(now) + 1 + len(word) > WIDTH:
            lines.append(now)
            now, fresh = indent, True
        now += word if fresh else " " + word
        fresh = False
    return [*lines, now]
