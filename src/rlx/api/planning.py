"""From a graph to a plan: the stages of the compiler, in their order. No native code is generated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rlx.api.lowering import lower, optimize
from rlx.codegen.cpu.build import cuts, order_of, panel_tiles, supports
from rlx.codegen.cpu.conv.conv import conv_target
from rlx.collector import graphs_hold
from rlx.cost import IoFusionGate, calibrate, default_gate
from rlx.cost.decision import Decision
from rlx.errors import ConfigError, UnsupportedError
from rlx.fuse import grow as fusion
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.kernel.rounding import check_order, check_rounding
from rlx.plan.build import Planner
from rlx.plan.lir import LirModule
from rlx.plan.memory.budget import fit_budget
from rlx.plan.states import settle_states
from rlx.rewrite.basic import materialize_operands, materialize_outputs, split_derived
from rlx.rewrite.bodies import prepare_bodies
from rlx.rewrite.conv_axes import drop_unit_axes
from rlx.rewrite.conv_layout import lay_out_convolutions
from rlx.rewrite.hoist_products import products_ahead
from rlx.rewrite.hoist_weights import hoist_weights
from rlx.rewrite.integer import use_integer_products
from rlx.rewrite.join import join_blocks
from rlx.rewrite.merge import merge_products
from rlx.rewrite.pipeline import Stage, Trace, run_stages
from rlx.rewrite.precision import lower_precision
from rlx.rewrite.quant_weights import pack_quantised_weights
from rlx.rewrite.sparse import find_sparse_weights
from rlx.rewrite.statistics import use_statistics
from rlx.rewrite.weight_layout import pack_weights
from rlx.runtime.empty import run_empty_records
from rlx.target.cpu import resolve
from rlx.target.prices import Machine
from rlx.target.tiles import ConvTarget

if TYPE_CHECKING:
    from rlx.api.options import Options, Settled


class Planning:
    """One run of the stages. What a stage finds besides a graph is a field here."""

    def __init__(self, options: Settled) -> None:
        self.options = options
        self.machine, supported = machine_of(options.device, options.target)
        self.gate = _gate(options.gate, options.device)
        self.trace = Trace(options.checks, options.dump, options.override or {})
        self.prices = self.machine.prices
        self.fusing = fusion.FuseOptions(self.gate, self.machine, options.assume, supports=supported)
        self.derived: Graph | None = None  # params -> weights as kernels read them
        self.unfused: Graph | None = None
        self.decisions: Sequence[Decision] = ()

    def plan(self, graph: Graph) -> LirModule:
        """The plan of a graph."""
        options = self.options
        mir = run_stages(graph, self.stages(graph), self.trace)
        kept: dict[str, Any] = {"precision": options.precision}
        if options.device != "cpu":
            kept["device"] = options.device
        if not options.winograd:
            kept["winograd"] = False
        if options.budget is None:
            planner = Planner(mir, options.assume or {})
        else:
            kept["budget"] = options.budget
            # Streamed weights come kernel by kernel.
            can_slice = options.device == "cpu" and options.weight_budget is None
            constants = self.gate.constants()
            mir, planner = fit_budget(mir, options.assume or {}, kept["budget"], constants, can_slice)
        planner.name_weights(self.derived)
        made = LirModule(
            mir,
            planner.plan(),
            derived=self.derived,
            target=self.machine.name,
            options=kept,
            gate=self.gate.constants(),
            decisions=self.decisions,
            planner=planner,
            unfused=self.unfused,
            trace=self.trace,
            again=asdict(self.machine.again),
        )
        if options.weight_budget is not None:
            made.set_weight_budget(options.weight_budget, cuts(made) if options.device == "cpu" else {})
        return made

    def stages(self, graph: Graph) -> Sequence[Stage]:
        return (
            Stage("input", lambda g: g, Level.HIR),
            Stage("join blocks", self.join, Level.HIR),
            Stage("expand", self.expand),
            *self.layouts(),
            Stage("bodies", lambda g: hoist_weights(g, self.lay_out)),
            Stage("derive weights", self.derive),  # what was no view may be one of a derived weight
            Stage("outputs", lambda g: materialize_outputs(materialize_operands(g))),
            Stage("fuse", self.fuse),
            *([Stage("states", settle_states)] if graph.states else []),
        )

    def layouts(self) -> Sequence[Stage]:
        """What also runs on bodies. Some layouts are read by kernels of the CPU, and by no others."""
        shared = (
            Stage("integer products", self.use_integers),
            Stage("simplify", lambda g: optimize(g, self.trace.firings)),
            Stage("statistics", lambda g: use_statistics(g, self.trace.firings)),
        )
        narrow = (
            Stage("precision", self.narrow),
            Stage("merge products", self.merge),
            Stage("convolution axes", drop_unit_axes),
        )
        if self.options.device != "cpu":
            return (*shared, *narrow)
        machine, convolutions = resolve(self.options.target), self.convolutions()
        assert convolutions is not None
        return (
            *shared,
            Stage("sparse weights", find_sparse_weights),
            *narrow,
            Stage("lay out convolutions", lambda g: self._told(lay_out_convolutions(g, convolutions))),
            Stage("quantised weights", lambda g: pack_quantised_weights(g, machine.lanes("f32"))),
            Stage("pack weights", lambda g: pack_weights(g, panel_tiles(machine))),
        )

    def lay_out(self, body: Graph) -> Graph:
        for stage in self.layouts():
            body = stage.run(body)
        return body

    def convolutions(self) -> ConvTarget | None:
        if self.options.device != "cpu":
            return None
        return conv_target(resolve(self.options.target), bool(self.options.winograd))

    def expand(self, hir: Graph) -> Graph:
        mir = lower(hir)
        if self.options.device == "cpu":
            mir = check_rounding(mir, resolve(self.options.target).lanes)
        return products_ahead(mir, self.trace.firings)

    # -- stages that report what they decided

    def join(self, hir: Graph) -> Graph:
        return self._told(join_blocks(hir, self.gate, self.options.assume, self.options.device))

    def use_integers(self, mir: Graph) -> Graph:
        return self._told(use_integer_products(mir, self.trace.firings, self.prices))

    def narrow(self, mir: Graph) -> Graph:
        options, convolves = self.options, self.convolutions()
        multiplied = resolve(options.target).multiplied if options.device == "cpu" else ()
        return self._told(
            lower_precision(
                mir, options.precision, self.gate, options.assume, multiplied, convolves, self.prices
            )
        )

    def merge(self, mir: Graph) -> Graph:
        return self._told(merge_products(mir, self.gate, self.options.assume))

    def _told(self, made: tuple[Graph, Sequence[Decision]]) -> Graph:
        graph, decisions = made
        self.trace.decisions += decisions
        return graph

    # -- stages that leave something besides the graph

    def derive(self, mir: Graph) -> Graph:
        main, self.derived = split_derived(mir)
        return main

    def fuse(self, mir: Graph) -> Graph:
        self.unfused = prepare_bodies(mir, lambda body: fusion.fuse(body, self.fusing)[0])
        # Pins name nodes of the main graph; a body numbers its own.
        fused, self.decisions = fusion.fuse(self.unfused, replace(self.fusing, pins=self.options.pins))
        if self.options.device != "cpu":
            return fused
        machine = resolve(self.options.target)
        return check_order(fused, lambda kernel, types: order_of(kernel, types, machine))


def plan_graph(graph: Graph, options: Options) -> LirModule:
    """The plan of a graph."""
    graphs_hold(sum(value.nbytes for value in graph.param_values.values()))
    return Planning(options.settled()).plan(graph)


def machine_of(device: str, target: str) -> tuple[Machine, fusion.Supports]:
    """The machine that kernels are compiled for, and which of them its backend has."""
    if device == "cpu":
        return resolve(target), supports
    if device != "opencl":
        raise UnsupportedError(
            f"device {device!r} cannot run programs in this version; use 'cpu' or 'opencl'"
        )
    from rlx.codegen.opencl.build import resolve as resolve_opencl  # start time: with the device only

    machine = resolve_opencl(target)
    return machine, machine.supports


def _gate(given: IoFusionGate | str | None, device: str) -> IoFusionGate:
    if given is None or isinstance(given, IoFusionGate):
        return given or default_gate(device)
    if given != "calibrated":
        raise ConfigError(f"unknown gate {given!r}; give an IoFusionGate, or 'calibrated'")
    return calibrate(device, run_empty_records)
