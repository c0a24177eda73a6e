"""Was the gate right? Builds both sides of fusion decisions, times them, and compares with the prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rlx import config
from rlx.codegen.cpu.build import supports
from rlx.cost.decision import Decision, time_text
from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel, is_scalar_constant
from rlx.errors import RlxError
from rlx.fuse.facts import Facts
from rlx.fuse.grow import FuseOptions, fuse
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import substitute_dims
from rlx.ir.text.write import graph_text
from rlx.ir.types import TensorType
from rlx.plan.build import Planner
from rlx.plan.lir import LirModule
from rlx.plan.predict import predicted_steps
from rlx.records import dataclass
from rlx.rewrite.basic import materialize_outputs
from rlx.runtime.native_code import native_code
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import resolve

ROUNDS = 15
LEAST_NS = 1_000_000  # that one round takes, so that the clock does not matter
CLOSE = 0.02  # sides whose times differ by less cannot be distinguished on a busy machine


@dataclass(frozen=True)
class Measured:
    """A decision, and what both sides really take."""

    decision: Decision
    apart_ns: float
    joined_ns: float
    gain_ps: int | None = None  # of joining, by the predicted times of both sides (`rlx.plan.predict`)

    @property
    def close(self) -> bool:
        """Whether the two sides take the same time within noise: then no sign is right or wrong."""
        return abs(self.apart_ns - self.joined_ns) < CLOSE * min(self.apart_ns, self.joined_ns)

    @property
    def right(self) -> bool:
        """Whether joining helps where the gate said so, and does not where it refused."""
        return (self.joined_ns < self.apart_ns) == self.decision.verdict


def measure_decisions(module: LirModule, count: int = 20, threads: int | None = None) -> list[Measured]:
    """Time both sides of the largest decisions of a program that can be built both ways: half of them kept,
    half refused, or what there is.

    Refusals for another reason than the price (ops that do not fit one kernel, or are better off in another)
    are left out: the gate has predicted nothing about them.
    """
    if module.unfused is None:
        raise RlxError(f"program {module.name!r} was read from a file; compile it to measure its decisions")
    gate = IoFusionGate(**module.gate)
    largest = module.decisions.largest(len(module.decisions))
    kept = _Measurements(module, threads, (d for d in largest if d.verdict))
    refused = _Measurements(
        module,
        threads,
        (d for d in largest if not d.verdict and not gate.accepts(d.score_ps, d.compute_ps_added)),
    )
    out = refused.take(count // 2)
    out += kept.take(count - len(out))
    out += refused.take(count - len(out))
    return sorted(out, key=lambda m: (-abs(m.decision.net_ps), m.decision.region, m.decision.rule))


class _Measurements:
    """Measures decisions of one program in the order given, as many as requested."""

    def __init__(self, module: LirModule, threads: int | None, decisions: Iterable[Decision]) -> None:
        assert module.unfused is not None
        self.module, self.threads, self.decisions = module, threads, iter(decisions)
        self.facts = Facts(module.unfused, IoModel(module.unfused, module.plan.binding))
        self.kept = {frozenset(d.region) for d in module.decisions.kept()}
        self.seen: set[str] = set()

    def take(self, count: int) -> list[Measured]:
        """The next `count` that can be built both ways."""
        out: list[Measured] = []
        while len(out) < count and (decision := next(self.decisions, None)) is not None:
            graph = _part(self.facts, decision.region, self.module.plan.binding)
            text = graph_text(graph, locations=False) if graph is not None else ""
            if graph is None or text in self.seen:  # the layers of a model are alike
                continue
            self.seen.add(text)
            sides = _sides(graph, _alone(decision, self.kept), self.module, self.threads)
            if sides is not None:
                apart, joined = sides
                apart_ns, joined_ns = _time(apart.run, joined.run)
                gain = apart.picoseconds - joined.picoseconds
                out.append(Measured(decision, apart_ns, joined_ns, gain))
        return out


def _alone(decision: Decision, kept: set[frozenset[int]]) -> int | None:
    """The op that a refused decision was about: without it, the region is a kernel. None: all of them."""
    region = frozenset(decision.region)
    found = [i for i in decision.region if region - {i} in kept]
    return decision.region.index(found[0]) if found and not decision.verdict else None


def report(measured: Sequence[Measured]) -> str:
    """The table of a measurement, and the share of decisions whose sign was right, of those that have one."""
    lines = ["Decisions measured: predicted gain, and what joining really gains"]
    for m in measured:
        d = m.decision
        mark = "keep  " if d.verdict else "refuse"
        real = time_text(round((m.apart_ns - m.joined_ns) * 1000))
        verdict = "even " if m.close else "right" if m.right else "WRONG"
        lines.append(
            f"  {verdict}  {mark} {d.rule:<12} predicted {time_text(d.net_ps):>9}, measured {real:>9} "
            f"({m.apart_ns / 1e3:.1f} -> {m.joined_ns / 1e3:.1f} us)"
        )
    decided = [m for m in measured if not m.close]
    agree = [(m.joined_ns < m.apart_ns) == (m.gain_ps > 0) for m in decided if m.gain_ps is not None]
    if agree:
        lines.append(f"  {sum(agree)} of {len(agree)} signs are those of the times that `explain` predicts")
    right = sum(m.right for m in decided)
    share = round(100 * right / len(decided)) if decided else 0
    even = len(measured) - len(decided)
    told = f"; {even} within {CLOSE:.0%}, too close to call" if even else ""
    lines.append(f"  {right} of {len(decided)} signs predicted right ({share} %){told}")
    return "\n".join(lines)


def kernel_times(program: CompiledProgram, binding: Mapping[str, int]) -> dict[int, float]:
    """Microseconds that each kernel of a program takes at these sizes, the best of some runs with random
    inputs; none where runs change states.

    >>> import rlx
    >>> g = Graph("tanh")
    >>> g.output("y", rlx.ops.tanh(g.input("x", ("n", 64), "f32")))
    >>> (took,) = kernel_times(rlx.compile(g), {"n": 8}).values()
    >>> took > 0
    True
    """
    graph = program.lir.outline
    if graph.state_inputs:
        return {}
    rng = np.random.default_rng(0)
    inputs = {
        n.attrs["name"]: _values(TensorType(n.dtype, n.tensor.bind(dict(binding))), rng) for n in graph.inputs
    }
    return {node.id: took for node, took in program.profile(inputs, ROUNDS)}


def measured(module: LirModule, threads: int) -> str:
    """The report of the largest decisions of a program."""
    return report(measure_decisions(module, threads=threads))


# -- one decision as a separate program


def _part(facts: Facts, region: Iterable[int], binding: dict[str, int]) -> Graph | None:
    """The ops of a region as a separate graph, at fixed sizes; None if it is none that can be fed."""
    members = set(region)
    graph, made = Graph("part"), dict[int, Node]()
    nodes = facts.graph.nodes

    def fixed(t: TensorType) -> TensorType:
        return TensorType(t.dtype, t.bind(binding))

    def visit(node: Node) -> Node:
        if node.id in made:
            return made[node.id]
        inside = node.id in members or facts.io.is_view(node) or is_scalar_constant(node)
        if inside:
            operands = [visit(o) for o in node.operands]
            attrs = {k: substitute_dims(v, binding) for k, v in node.attrs.items()}
            made[node.id] = graph.add(node.op, operands, attrs, node.bodies, where=node.where)
        else:
            role = "param" if node.op.role in (Role.PARAM, Role.CONSTANT) else "input"
            number = len(graph.inputs) + len(graph.params)
            attrs = {"name": f"v{number}", "type": fixed(node.tensor)}
            made[node.id] = graph.add(get_op(role), (), attrs, where=node.where)
        return made[node.id]

    if not members or any(nodes[i].op.role is not Role.COMPUTE for i in members):
        return None
    try:
        with graph.building():
            for i in sorted(members):
                visit(nodes[i])
            outputs = facts.outputs(sorted(members), members)
            graph.set_outputs({f"y{k}": made[i] for k, i in enumerate(outputs)})
    except RlxError:
        return None
    rng = np.random.default_rng(0)
    for name, node in graph.params.items():
        graph.param_values[name] = _values(node.tensor, rng)
    return graph


def _values(t: TensorType, rng: np.random.Generator) -> np.ndarray:
    """Numbers of a type that upset nobody: small floats, and zeros as indices."""
    shape = tuple(int(d) for d in t.shape if isinstance(d, int))
    if t.dtype.is_float:
        return (rng.standard_normal(shape) * 0.1).astype(t.dtype.np)
    if t.dtype.is_bool:
        return rng.random(shape) < 0.8
    return np.zeros(shape, t.dtype.np)


@dataclass(frozen=True)
class _Side:
    """A way to run a part: the bound program, its number of kernels, and what they are predicted to take."""

    run: Callable[[], None]
    kernels: int
    picoseconds: int


def _sides(
    graph: Graph, alone: int | None, module: LirModule, threads: int | None
) -> tuple[_Side, _Side] | None:
    """Two ways to run a part: cut as the decision would, and as one kernel; None if it is never one."""
    facts = Facts(graph, IoModel(graph))
    ids = [n.id for n in facts.kernels]
    pairs = [(a, b) for a in ids for b in ids if a < b]
    gate = IoFusionGate(**module.gate)
    joined = _program(graph, gate, dict.fromkeys(pairs, True), module.target, threads)
    cut = {(a, b): alone is not None and ids[alone] not in (a, b) for a, b in pairs}
    apart = _program(graph, gate, cut, module.target, threads)
    if joined is None or apart is None or joined.kernels != 1:
        return None
    return (apart, joined) if apart.kernels > 1 else None


def _program(
    graph: Graph, gate: IoFusionGate, pins: dict[tuple[int, int], bool], target: str, threads: int | None
) -> _Side | None:
    """A bound program; None if the host would have to compute a part of it."""
    mir, _ = fuse(materialize_outputs(graph), FuseOptions(gate, resolve(target), None, pins, supports))
    planner = Planner(mir, {})
    lir = LirModule(mir, planner.plan(), target=target, planner=planner)
    kernels, code = native_code(lir, resolve(target), cache=True)
    if kernels.thunks:
        return None
    program = CompiledProgram(lir, kernels, code, config.thread_count(threads))
    rng = np.random.default_rng(0)
    inputs = {n.attrs["name"]: _values(n.tensor, rng) for n in mir.inputs}
    outputs = {k: np.empty(n.tensor.bind({}), n.dtype.np) for k, n in mir.outputs.items()}
    predicted = sum(step.picoseconds for step in predicted_steps(lir).values())
    return _Side(program.bind(inputs, outputs), len(lir.plan.schedule), predicted)


def _time(*runs: Callable[[], None]) -> tuple[float, ...]:
    """Nanoseconds per run of each, the best of several rounds taken in turns."""
    repeats = []
    for run in runs:
        run()
        start = time.perf_counter_ns()
        run()
        once = max(time.perf_counter_ns() - start, 1)
        repeats.append(max(LEAST_NS // once, 1))
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for i, (run, times) in enumerate(zip(runs, repeats, strict=True)):
            start = time.perf_counter_ns()
            for _ in range(times):
                run()
            best[i] = min(best[i], (time.perf_counter_ns() - start) / times)
    return tuple(best)
