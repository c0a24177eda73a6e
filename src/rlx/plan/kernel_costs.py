"""What kernels of a plan are called, what they move, and what they cost by the gate's prices."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import field
from itertools import groupby

from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel
from rlx.cost.operations import kernel_operations
from rlx.cost.profile import FusionBenefit, GraphIoProfile
from rlx.ir.dim import evaluate, symbols
from rlx.ir.graph import Node
from rlx.ir.op import Role
from rlx.plan.lir import LirModule
from rlx.plan.memory.slices import slices_of
from rlx.records import dataclass
from rlx.target.prices import prices_of


@dataclass(frozen=True, eq=False)
class KernelCost:
    """What one kernel is predicted to move and to take."""

    node: Node
    io: GraphIoProfile
    operations: int
    picoseconds: int

    def __mul__(self, times: int) -> KernelCost:
        return KernelCost(self.node, self.io * times, self.operations * times, self.picoseconds * times)


@dataclass(frozen=True)
class StepTime:
    """The time of a step; `inside` has those of the kernels of one slice, if it runs in slices."""

    picoseconds: int
    inside: Mapping[int, StepTime] = field(default_factory=dict)


def priced_costs(module: LirModule) -> list[KernelCost]:
    """Costs of all kernels by the gate's prices, which plans are made by."""
    return [cost for costs in Costs(module, ()).steps({}).values() for cost in costs]


@dataclass(frozen=True)
class Costs:
    """Puts costs together."""

    module: LirModule
    thunks: Container[int]

    def steps(self, times: Mapping[int, StepTime]) -> dict[int, list[KernelCost]]:
        """Costs of all steps; `times` has those that are known better than by prices."""
        module, out = self.module, dict[int, list[KernelCost]]()
        io = IoModel(module.mir, module.plan.binding)
        for kernel in module.plan.schedule:
            node, time = module.mir.nodes[kernel], times.get(kernel)
            cut = slices_of(module.plan, node)
            if cut is not None:
                # Not a changed copy: a stored module reads its fields from a file.
                body, buffers = node.bodies[0], module.plan.work[kernel].bodies[0]
                inside = LirModule(body, buffers, options=module.options, gate=module.gate)
                costs = Costs(inside, ()).steps(time.inside if time is not None else {})
                out[kernel] = [c * cut.count for found in costs.values() for c in found]
                continue
            profile = io.profile(node)
            if kernel in self.thunks:
                read_back = max(profile.device_traffic_bytes - io.bytes(node), 0)
                profile += GraphIoProfile(0, max(1 - profile.sync_points, 0), read_back, 0)
            heavy, light = _work(node, module.plan.binding)
            took = self._priced(profile, heavy, light) if time is None else time.picoseconds
            out[kernel] = [KernelCost(node, profile, heavy + light, took)]
        return out

    def _priced(self, io: GraphIoProfile, heavy: int, light: int) -> int:
        prices = prices_of(self.module.options.get("device", "cpu"))
        gate = IoFusionGate(**self.module.gate) if self.module.gate else None
        return _time(gate, io, prices.contraction_ps * heavy + prices.elementwise_ps * light)


def _time(gate: IoFusionGate | None, io: GraphIoProfile, compute: int) -> int:
    """Dispatch, and the slower of moving and computing."""
    if gate is None:
        return compute
    launches = gate.score_ps(FusionBenefit(io.kernel_launches, io.sync_points, io.host_output_bytes, 0))
    moving = gate.score_ps(FusionBenefit(0, 0, 0, io.device_traffic_bytes))
    return launches + max(moving, compute)


def _work(node: Node, binding: Mapping[str, int]) -> tuple[int, int]:
    """Operations of contractions and of everything else in a kernel, at sizes."""
    heavy, light = (
        evaluate(count, {s: binding.get(s, 1) for s in symbols(count)}) for count in kernel_operations(node)
    )
    return heavy, light


def kernel_name(node: Node) -> str:
    """A kernel by its kind and the ops in it.

    >>> from rlx import Graph, ops
    >>> from rlx.api.compile import plan
    >>> g = Graph()
    >>> g.output("y", ops.softmax(g.input("x", (4, 4), "f32")))
    >>> lir = plan(g)
    >>> kernel_name(lir.mir.nodes[lir.plan.schedule[0]])
    'reduce: reduce_max, exp_difference, reduce_sum, div, mul'
    """
    if node.op.role is not Role.REGION:
        return node.op.name
    names: list[str] = []
    for n in node.bodies[0].nodes:
        if n.op.role is Role.COMPUTE and not n.op.has("view") and not n.reader_side:
            names.append(n.op.name)
    grouped = [(name, sum(1 for _ in run)) for name, run in groupby(names)]
    text = ", ".join(name if n == 1 else f"{n} {name}" for name, n in grouped)
    return f"{node.attrs['kind']}: {text}" if text else f"{node.attrs['kind']}: move"
