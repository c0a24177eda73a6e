"""Graph in, compiled program out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Unpack

from rlx import progress
from rlx.api.lowering import lower, need_graph, optimize
from rlx.api.options import CompileOptions, Options, shows_options
from rlx.api.planning import machine_of, plan_graph
from rlx.collector import collector_paused
from rlx.crash_report import reports_crashes
from rlx.errors import ConfigError, ShapeError, UnsupportedError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.mesh import meetings
from rlx.ir.symbols import found_by_data
from rlx.ir.types import type_symbols
from rlx.model_kinds import ONNX_BYTES, is_onnx_object
from rlx.plan.lir import LirModule
from rlx.runtime.background import meanwhile
from rlx.runtime.debug import check_mode
from rlx.runtime.native.quick import improve_code
from rlx.runtime.native_code import native_code, prepare_runs
from rlx.runtime.program import CompiledProgram
from rlx.runtime.store.origin import Origin
from rlx.runtime.weights import Weights
from rlx.target.cpu import resolve

# What few programs need is imported where it is used, for the start time of the others.


@shows_options
@reports_crashes
@collector_paused()
def plan(graph: Graph, options: Options | None = None, **given: Unpack[CompileOptions]) -> LirModule:
    """Everything up to LIR: no native code is generated. `rlx.api.planning` lists the stages.

    >>> import rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> plan(g, target="x86-64-v3").target
    'x86-64-v3'
    """
    return plan_graph(graph, Options.of(options, given, "plan"))


@shows_options
@reports_crashes
@collector_paused()
def compile(
    graph: object, options: Options | None = None, **given: Unpack[CompileOptions]
) -> CompiledProgram:
    """Compile a graph for a device; the result is called, bound, explained and saved.

    `graph` may also be an ONNX model: a ModelProto, its bytes, or an ONNXProgram of `torch.onnx.export`. The
    options are the fields of `rlx.Options`, given by name or as one object. On device "opencl" the device
    decides about threads, and what it has no kernel for is a host thunk, named in `stats`.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> rlx.compile(g)(np.array([1, 2, 3], np.float32))
    array([2., 4., 6.], dtype=float32)
    """
    if isinstance(graph, ONNX_BYTES) or is_onnx_object(graph):
        from rlx.frontend.onnx import from_onnx  # start time

        graph = from_onnx(graph)
    source = need_graph(graph, "rlx.compile")
    if not source.outputs and not source.states:
        raise VerifyError(
            f"graph {source.name!r} has no outputs, so it computes nothing; add one: graph.output('y', node)"
        )
    _refuse_open_sizes(source)
    chosen = Options.of(options, given)
    _check_combination(chosen)
    chosen = chosen.settled()
    check_mode(chosen.debug)
    _check_assumed(source, chosen.assume)
    make: Callable[..., CompiledProgram] = CompiledProgram
    if chosen.mesh is not None:
        from rlx.dist.program import one_rank  # start time

        source, make = one_rank(
            optimize(lower(source)), chosen.mesh, chosen.shardings or {}, chosen.transport, chosen.assume
        )
    else:
        _refuse_collectives(source)
    start = time.perf_counter()
    progress.info("compiling %r: %d nodes", source.name, len(source))
    planned = functools.partial(_plan_for, options=chosen)
    if chosen.device != "cpu":
        from rlx.runtime.device_program import compile_for_device  # start time

        return compile_for_device(source, chosen.device, chosen.target, chosen.debug, planned)
    machine = resolve(chosen.target)
    with meanwhile(prepare_runs, "rlx-runs") as prepared:  # half of it is LLVM, which needs no Python
        lir = planned(source, machine.name)
        if chosen.dump is not None:
            from rlx.runtime.listing import Listing  # start time

            Listing(lir).write(Path(chosen.dump))
        origin = Origin(lambda: source, planned)
        weights: Weights | None = None
        if chosen.weight_budget is None:
            early = bool(chosen.background) and chosen.debug is None and chosen.mesh is None
            with meanwhile(lambda: native_code(lir, machine, chosen.cache, early), "rlx-code") as native:
                weights = Weights(lir)
            kernels, code = native()
        else:
            from rlx.runtime.native.streaming import streamed  # start time

            kernels, code = native_code(lir, machine, chosen.cache)
            weights = streamed(lir, origin, chosen.weight_file)
    prepared()
    program = make(lir, kernels, code, chosen.threads, chosen.debug, weights=weights, origin=origin)
    improve_code(code, program)
    if chosen.states is not None:
        program.bind_states(chosen.states)
    progress.info("compiled %r in %.2f s", program, time.perf_counter() - start)
    return program


def _plan_for(graph: Graph, target: str, options: Options) -> LirModule:
    return plan(graph, replace(options, target=target))


def _check_combination(options: Options) -> None:
    """Refuse options that do not go together, before anything is planned."""
    if options.device != "cpu":
        machine_of(options.device, options.target)
        for name in ("weight_budget", "mesh"):
            if getattr(options, name) is not None:
                raise UnsupportedError(
                    f"{name} is for device 'cpu' only; compile for {options.device} without it"
                )
    if options.shardings is not None and options.mesh is None:
        raise ConfigError("shardings need a mesh; give mesh= too")
    if options.weight_budget is None and options.weight_file is not None:
        raise ConfigError("weight_file is only used with weight_budget; give weight_budget= too")
    if options.mesh is not None and options.weight_budget is not None:
        raise UnsupportedError("weight_budget and mesh cannot be combined; leave out one of them")


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
                "give sizes that the program will run with",
                c.where,
            )


def _refuse_open_sizes(graph: Graph) -> None:
    """Every symbol has a size at run time: that of an input or state, or one that an op finds."""
    for name in found_by_data(graph):
        node = next((n for n in graph.nodes if name in type_symbols(n.type)), None)
        if node is not None and not node.op.finds_size and not node.bodies:
            told = f"%{node.id} ({node.op.name}) has the size {name!r}, which no input has"
            raise ShapeError(f"{told}; give a number, -1 in a reshape, or a size of an input", node.where)


def _refuse_collectives(graph: Graph) -> None:
    for node, _ in meetings(graph):
        axis, ranks = node.attrs["axis"], node.attrs["ranks"]
        told = f"%{node.id} ({node.op.name}) is a collective of the {ranks} ranks of axis {axis!r}"
        raise UnsupportedError(f"{told}; compile with mesh= and run it on all ranks", node.where)
