"""Predicted times of the steps of a plan, with those of bodies and of kernels that run in slices."""

from __future__ import annotations

from collections.abc import Container, Mapping

from rlx.cost.io import TRIPS
from rlx.cost.time.kernels import Clock
from rlx.ir.graph import Graph, Node
from rlx.kernel.control import loop_form
from rlx.plan.kernel_costs import Costs, KernelCost, StepTime
from rlx.plan.lir import LirBufferPlan, LirModule
from rlx.plan.memory.slices import slices_of
from rlx.target.cpu import Target, resolve


def kernel_costs(module: LirModule, thunks: Container[int] = ()) -> list[KernelCost]:
    """Predicted IO and time of every kernel, in the order in which they run; of those that run in slices, of
    all slices.

    The host waits for the operands of `thunks`, and reads them back where memory is not shared.
    """
    return [cost for costs in costs_of_steps(module, thunks).values() for cost in costs]


def costs_of_steps(module: LirModule, thunks: Container[int] = ()) -> dict[int, list[KernelCost]]:
    """The costs of every step of the schedule, by node id; a step that runs in slices has several kernels.

    Times of native kernels of a CPU are predicted, all others go by the gate's prices.
    """
    native = module.options.get("device", "cpu") == "cpu" and module.target != ""
    return Costs(module, thunks).steps(predicted_steps(module, thunks) if native else {})


def predicted_steps(module: LirModule, thunks: Container[int] = ()) -> dict[int, StepTime]:
    """Times of all steps of a program for a CPU that native code computes, by node id.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> g = rlx.Graph("hello")
    >>> g.output("y", rlx.ops.tanh(g.input("x", (64, 64), "f32") * 2.0))
    >>> (step,) = predicted_steps(plan(g, target="x86-64-v3")).values()
    >>> 100_000 < step.picoseconds < 5_000_000
    True
    """
    return _times(module.mir, module.plan, module.plan.binding, resolve(module.target), thunks)


def _times(
    graph: Graph, plan: LirBufferPlan, outside: Mapping[str, int], target: Target, thunks: Container[int] = ()
) -> dict[int, StepTime]:
    binding = {**outside, **plan.binding}
    slots = plan.assignments.items()
    places = {id: (s.space, s.offset) for id, s in slots if s.space in ("activation", "output")}
    clock = Clock(graph, binding, target, places)
    native = [graph.nodes[id] for id in plan.schedule if id not in thunks]
    native = [node for node in native if clock.knows(node)]
    plain = [node for node in native if loop_form(node) is None]
    repeats = len(plain) < len(native)
    clock.begin(plain, plan.arena_size, repeats)
    loops = {node.id: _loop(node, plan, clock, target) for node in native if loop_form(node) is not None}
    out: dict[int, StepTime] = {}
    for again in (False, True):  # a run before, after which caches hold what they hold in all others
        if again:
            clock.begin(plain, plan.arena_size, repeats)
        for node in native:
            if node.id in loops:
                out[node.id] = loops[node.id]
                clock.loop(node, loops[node.id].picoseconds)
            else:
                out[node.id] = StepTime(clock.kernel(node))
    return out


def _loop(node: Node, plan: LirBufferPlan, clock: Clock, target: Target) -> StepTime:
    """Bodies times trips; of bodies that exclude each other, the dearer one."""
    form = loop_form(node)
    assert form is not None and node.id in plan.work, "the plan has room for bodies that it runs"
    config = dict(form.config)
    trips = next((clock.size(config[k]) for k in TRIPS if config.get(k) is not None), 1)
    bodies = [
        _times(body, inside, clock.binding, target)
        for body, inside in zip(node.bodies, plan.work[node.id].bodies, strict=True)
    ]
    took = max(sum(t.picoseconds for t in body.values()) for body in bodies)
    cut = slices_of(plan, node)
    if cut is not None:
        return StepTime(took * cut.count, bodies[0])
    return StepTime((took + round(target.rates.launch_ps)) * trips)
