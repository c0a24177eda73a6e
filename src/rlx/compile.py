"""The pipeline, readable as prose: graph in, compiled program out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from rlx import config, progress
from rlx.collector import collector_paused, graphs_hold
from rlx.crash_report import reports_crashes
from rlx.errors import ConfigError, ShapeError, TypeError_, UnsupportedError, VerifyError
from rlx.frontend.kinds import ONNX_BYTES, instead_of, is_onnx_object

if TYPE_CHECKING:
    from rlx.cost.gate import IoFusionGate
    from rlx.dist.transport import SymmetricTransport
    from rlx.driver.buffer import BufferHandle
    from rlx.ir.graph import Graph
    from rlx.ir.lir import LirModule
    from rlx.ir.mesh import Mesh, Placements
    from rlx.passes.fuse import Supports
    from rlx.passes.pipeline import PathLike
    from rlx.passes.rules import Firing

# Passes, planner and backend are imported where they are used: `import rlx` stays light.


@reports_crashes
def lower(graph: Graph) -> Graph:
    """HIR -> MIR: every block in terms of primitive ops.

    >>> import rlx
    >>> g = rlx.Graph("net")
    >>> x = g.input("x", ("n", 4), "f32")
    >>> g.output("y", rlx.ops.softmax(x, axis=-1))
    >>> [n.op.name for n in rlx.lower(g).nodes]
    ['input', 'reduce_max', 'sub', 'exp', 'reduce_sum', 'div']
    """
    from rlx.ir.op import Level
    from rlx.passes.basic import remove_dead
    from rlx.transform.expand import expand_graph

    _need_graph(graph, "rlx.lower")
    flat = all(n.op.level is Level.MIR and not n.bodies for n in graph.nodes)
    return remove_dead(graph if flat else expand_graph(graph))


@reports_crashes
def optimize(graph: Graph, log: list[Firing] | None = None) -> Graph:
    """HIR or MIR -> MIR: constants folded, algebra, moves and casts simplified, equals merged, the dead gone.

    >>> import rlx
    >>> g = rlx.Graph("net")
    >>> x = g.input("x", ("n", 4), "f32")
    >>> g.output("y", rlx.ops.exp(rlx.ops.transpose(rlx.ops.transpose(x * 1.0))))
    >>> [n.op.name for n in rlx.optimize(g).nodes]
    ['input', 'exp']
    """
    from rlx.ir.op import Level
    from rlx.passes.basic import remove_dead
    from rlx.passes.rules import apply_rules
    from rlx.passes.share import share_bodies
    from rlx.passes.simplify import simplify_rules

    _need_graph(graph, "rlx.optimize")
    if any(n.op.level is not Level.MIR for n in graph.nodes):
        graph = lower(graph)
    return remove_dead(share_bodies(apply_rules(graph, simplify_rules(), log)))


@reports_crashes
@collector_paused()
def plan(
    graph: Graph,
    target: str = "host",
    assume: Mapping[str, int] | None = None,
    gate: IoFusionGate | str | None = None,
    pins: Mapping[tuple[int, int], bool] | None = None,
    precision: str = "f32",
    budget: int | str | None = None,
    checks: bool = False,
    dump: PathLike | None = None,
    override: Mapping[str, PathLike] | None = None,
    weight_budget: int | str | None = None,
    device: str = "cpu",
) -> LirModule:
    """Everything up to LIR: no native code is made.

    The stages are named below, in order. `checks` verifies the graph after each; `dump` is a folder that gets
    the text of each; `override` maps a stage to a file whose graph replaces what the stage gives. `pins` says
    of pairs of nodes (by their ids in `decisions`) whether they shall be one kernel; `gate` decides the rest.
    """
    from rlx.backend.cpu.build import panel_tiles
    from rlx.backend.cpu.conv import conv_target
    from rlx.ir.lir import LirModule
    from rlx.ir.op import Level
    from rlx.passes.ahead import products_ahead
    from rlx.passes.basic import materialize_operands, materialize_outputs, split_derived
    from rlx.passes.bodies import prepare_bodies
    from rlx.passes.conv_axes import drop_unit_axes
    from rlx.passes.conv_layout import lay_out_convolutions
    from rlx.passes.fuse import Options, fuse
    from rlx.passes.hoist import hoist_weights
    from rlx.passes.integer import use_integer_products
    from rlx.passes.join import join_blocks
    from rlx.passes.layout import pack_weights
    from rlx.passes.merge import merge_products
    from rlx.passes.pipeline import Stage, Trace, run_stages
    from rlx.passes.precision import lower_precision
    from rlx.passes.quant_weights import pack_quantised_weights
    from rlx.passes.rounding import check_rounding
    from rlx.passes.sparse import find_sparse_weights
    from rlx.plan.budget import fit_budget
    from rlx.plan.build import Planner
    from rlx.plan.states import settle_states

    graphs_hold(sum(value.nbytes for value in graph.param_values.values()))
    machine, supports = _target(device, target)
    chosen = _gate(gate, device)
    trace = Trace(checks, dump, override or {})
    beside: dict[str, Any] = {}  # what stages give besides a graph

    def join(hir: Graph) -> Graph:
        joined, decisions = join_blocks(hir, chosen, assume, device)
        trace.decisions += decisions
        return joined

    def expand(hir: Graph) -> Graph:
        mir = lower(hir)
        return products_ahead(mir if device != "cpu" else check_rounding(mir, machine.lanes), trace.firings)

    def integers(mir: Graph) -> Graph:
        made, decisions = use_integer_products(mir, trace.firings)
        trace.decisions += decisions
        return made

    def narrow(mir: Graph) -> Graph:
        multiplied = machine.multiplied if device == "cpu" else ()
        convolves = conv_target(machine) if device == "cpu" else None
        lowered, decisions = lower_precision(mir, precision, chosen, assume, multiplied, convolves)
        trace.decisions += decisions
        return lowered

    def merge(mir: Graph) -> Graph:
        merged, decisions = merge_products(mir, chosen, assume)
        trace.decisions += decisions
        return merged

    def derive(mir: Graph) -> Graph:
        main, beside["derived"] = split_derived(mir)
        return main

    def only_host(stage: Stage) -> list[Stage]:
        """A layout that kernels of the CPU read, and no others."""
        return [stage] if device == "cpu" else []

    options = Options(chosen, device, assume, supports=supports)

    def fuse_all(mir: Graph) -> Graph:
        mir = prepare_bodies(mir, lambda body: fuse(body, options)[0])
        # Pins name nodes of the main graph; a body numbers its own.
        fused, beside["decisions"] = fuse(mir, replace(options, pins=pins))
        beside["unfused"] = mir
        return fused

    layouts = (
        Stage("integer products", integers),
        Stage("simplify", lambda g: optimize(g, trace.firings)),
        *only_host(Stage("sparse weights", find_sparse_weights)),
        Stage("precision", narrow),
        Stage("merge products", merge),
        Stage("convolution axes", drop_unit_axes),
        *only_host(Stage("lay out convolutions", lambda g: lay_out_convolutions(g, conv_target(machine)))),
        *only_host(Stage("quantised weights", lambda g: pack_quantised_weights(g, machine.lanes("f32")))),
        *only_host(Stage("pack weights", lambda g: pack_weights(g, panel_tiles(machine)))),
    )

    def lay_out(body: Graph) -> Graph:
        for stage in layouts:
            body = stage.run(body)
        return body

    mir = run_stages(
        graph,
        (
            Stage("input", lambda g: g, Level.HIR),
            Stage("join blocks", join, Level.HIR),
            Stage("expand", expand),
            *layouts,
            Stage("bodies", lambda g: hoist_weights(g, lay_out)),
            Stage("outputs", lambda g: materialize_outputs(materialize_operands(g))),
            Stage("derive weights", derive),
            Stage("fuse", fuse_all),
            *([Stage("states", settle_states)] if graph.states else []),
        ),
        trace,
    )
    used, kept = chosen.constants(), dict[str, Any](precision=precision)
    if device != "cpu":
        kept["device"] = device
    if budget is None:
        planner = Planner(mir, assume or {})
    else:
        kept["budget"] = config.parse_bytes(budget)
        can_slice = device == "cpu" and weight_budget is None  # streamed weights come kernel by kernel
        mir, planner = fit_budget(mir, assume or {}, kept["budget"], used, can_slice)
    made = LirModule(
        mir,
        planner.plan(),
        target=machine.name,
        options=kept,
        gate=used,
        planner=planner,
        trace=trace,
        **beside,
    )
    if weight_budget is not None:
        from rlx.backend.cpu.build import cuts

        parts = cuts(made) if device == "cpu" else {}
        made.set_weight_budget(config.parse_bytes(weight_budget, "weight_budget"), parts)
    return made


def _target(device: str, target: str) -> tuple[Any, Supports]:
    """What kernels are made for, and which of them that backend has."""
    if device == "cpu":
        from rlx.backend.cpu.build import supports
        from rlx.backend.cpu.target import resolve

        return resolve(target), supports
    if device != "opencl":
        raise UnsupportedError(
            f"device {device!r} cannot run programs in this version; use 'cpu' or 'opencl'"
        )
    from rlx.backend.opencl.build import resolve as resolve_opencl

    machine = resolve_opencl(target)
    return machine, machine.supports


def _gate(given: IoFusionGate | str | None, device: str) -> IoFusionGate:
    from rlx.cost import IoFusionGate, calibrate, default_gate

    if given is None or isinstance(given, IoFusionGate):
        return given or default_gate(device)
    if given != "calibrated":
        raise ConfigError(f"unknown gate {given!r}; give an IoFusionGate, or 'calibrated'")
    from rlx.runtime.empty import run_empty_records

    return calibrate(device, run_empty_records)


@reports_crashes
@collector_paused()
def compile(
    graph: Any,
    device: str = "cpu",
    target: str = "host",
    threads: int | None = None,
    precision: str = "f32",
    budget: int | str | None = None,
    assume: Mapping[str, int] | None = None,
    cache: bool = True,
    debug: str | None = None,
    gate: IoFusionGate | str | None = None,
    pins: Mapping[tuple[int, int], bool] | None = None,
    checks: bool = False,
    dump: PathLike | None = None,
    override: Mapping[str, PathLike] | None = None,
    weight_budget: int | str | None = None,
    weight_file: PathLike | None = None,
    mesh: Mesh | None = None,
    shardings: Mapping[str, Placements] | None = None,
    transport: SymmetricTransport | None = None,
    states: Mapping[str, BufferHandle] | None = None,
) -> Any:
    """Compile a graph for a device; the result is called, bound, explained and saved.

    `graph` may also be an ONNX model: a ModelProto, its bytes, or an ONNXProgram of `torch.onnx.export`.
    `assume` gives sizes to optimise for. `budget` is the most memory for activations, like "64MiB": the
    program is made to fit it, or refused with what is alive together and the least budget that works; one
    with symbolic sizes is judged when it meets sizes. `debug` is "nan" (names the first kernel that makes
    one) or "poison" (spoils freed memory and stops kernels that touch it). `gate` decides about fusion: a
    gate, or "calibrated" for constants measured on this machine. With a `mesh` the program is one rank's part
    of the graph: `shardings` says how inputs, params, states and outputs lie on it, `transport` who the other
    ranks are (by default the job that `rlx launch` started). `states` binds states to handles, so that they
    survive runs; without it every run begins with their initial values. The other options are those of
    `plan`.

    With a `weight_budget`, like "200MiB", weights that exceed it stay in a file and are read ahead of the
    kernels that need them: in `weight_file`, which `rlx.load` can open later, or in one of the cache's own.

    On device "opencl" the device decides about threads, and what it has no kernel for is a host thunk, named
    in `stats`.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> rlx.compile(g)(np.array([1, 2, 3], np.float32))
    array([2., 4., 6.], dtype=float32)
    """
    from rlx.backend.cpu.target import resolve
    from rlx.runtime.artifact import Origin
    from rlx.runtime.debug import check_mode
    from rlx.runtime.meanwhile import meanwhile
    from rlx.runtime.native_code import native_code, prepare_runs
    from rlx.runtime.program import CompiledProgram
    from rlx.runtime.weights import Weights

    if isinstance(graph, ONNX_BYTES) or is_onnx_object(graph):
        from rlx.frontend.onnx import from_onnx

        graph = from_onnx(graph)
    _need_graph(graph, "rlx.compile")
    if not graph.outputs and not graph.states:
        raise VerifyError(
            f"graph {graph.name!r} has no outputs, so it computes nothing; add one: graph.output('y', node)"
        )
    _refuse_open_sizes(graph)
    threads, debug = config.thread_count(threads), debug or config.DEBUG.get()
    check_mode(debug)
    if device != "cpu":
        _target(device, target)
        for name, given in (("weight_budget", weight_budget), ("mesh", mesh)):
            if given is not None:
                raise UnsupportedError(f"{name} is for device 'cpu' only; compile for {device} without it")
    _check_assumed(graph, assume)
    if shardings is not None and mesh is None:
        raise ConfigError("shardings need a mesh; give mesh= too")
    if weight_budget is None and weight_file is not None:
        raise ConfigError("weight_file is only used with weight_budget; give weight_budget= too")
    make: Callable[..., Any] = CompiledProgram
    if mesh is not None and weight_budget is not None:
        raise UnsupportedError("weight_budget and mesh cannot be combined; leave out one of them")
    if mesh is not None:
        from rlx.dist.program import one_rank

        graph, make = one_rank(optimize(lower(graph)), mesh, shardings or {}, transport, assume)
    else:
        _refuse_collectives(graph)
    start = time.perf_counter()
    progress.info("compiling %r: %d nodes", graph.name, len(graph))
    planned = functools.partial(
        plan,
        assume=assume,
        precision=precision,
        budget=budget,
        gate=gate,
        pins=pins,
        checks=checks,
        dump=dump,
        override=override,
        weight_budget=weight_budget,
        device=device,
    )
    if device != "cpu":
        from rlx.runtime.device_program import compile_for_device

        return compile_for_device(graph, device, target, debug, planned)
    machine = resolve(config.TARGET.get() if target == "host" else target)
    lir = planned(graph, machine.name)
    origin = Origin(lambda: graph, planned)
    weights: Weights | None = None
    if weight_budget is None:
        with meanwhile(lambda: native_code(lir, machine, cache), "rlx-code") as native:
            weights = Weights(lir)  # LLVM, in the other thread, needs no Python
            prepare_runs()
        kernels, code = native()
    else:
        from rlx.runtime.streaming import streamed

        kernels, code = native_code(lir, machine, cache)
        weights = streamed(lir, origin, weight_file)
    program = make(lir, kernels, code, threads, debug, weights=weights, origin=origin)
    if states is not None:
        program.bind_states(states)
    progress.info("compiled %r in %.2f s", program, time.perf_counter() - start)
    return program


def _need_graph(graph: object, caller: str) -> None:
    from rlx.ir.graph import Graph

    if not isinstance(graph, Graph):
        got = f"got a value of type {type(graph).__name__}"
        instead = instead_of(graph) or "; rlx.load takes files, rlx.jit functions"
        raise TypeError_(f"{caller} takes an rlx.Graph, {got}{instead}")


def _check_assumed(graph: Graph, assume: Mapping[str, int] | None) -> None:
    if not isinstance(assume, (Mapping, NoneType)):
        raise ConfigError(
            f"assume={assume!r} is not a dict of symbol -> size; give for example {{'seq': 128}}"
        )
    known, given = graph.symbols(), assume or {}
    for name, size in given.items():
        if name not in known:
            has = f"its symbols: {', '.join(known)}" if known else "all its sizes are fixed"
            raise ConfigError(f"assume: graph {graph.name!r} has no symbol {name!r}; {has}")
        if not hasattr(size, "__index__"):
            raise ConfigError(f"assume: the size of {name!r} is {size!r}; give a whole number")
    for c in graph.constraints:
        if set(c.symbols) <= given.keys() and not c.check(given):
            sizes = ", ".join(f"{s}={given[s]}" for s in c.symbols)
            raise ConfigError(
                f"assume: the graph needs that {c.describe()}, which does not hold for {sizes}; "
                "give sizes that the program will meet",
                c.where,
            )


def _refuse_open_sizes(graph: Graph) -> None:
    """Every symbol has a size at run time: that of an input or state, or one that an op finds."""
    from rlx.ir.symbols import found_by_data
    from rlx.ir.types import type_symbols

    for name in found_by_data(graph):
        node = next((n for n in graph.nodes if name in type_symbols(n.type)), None)
        if node is not None and not node.op.finds_size and not node.bodies:
            told = f"%{node.id} ({node.op.name}) has the size {name!r}, which no input has"
            raise ShapeError(f"{told}; give a number, -1 in a reshape, or a size of an input", node.where)


def _refuse_collectives(graph: Graph) -> None:
    from rlx.ir.mesh import meetings

    for node, _ in meetings(graph):
        axis, ranks = node.attrs["axis"], node.attrs["ranks"]
        told = f"%{node.id} ({node.op.name}) meets the {ranks} ranks of axis {axis!r}"
        raise UnsupportedError(f"{told}; compile with mesh= and run it on all of them", node.where)
