"""The pipeline, readable as prose: graph in, compiled program out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlx.ir.graph import Graph

if TYPE_CHECKING:
    from rlx.ir.lir import LirModule

# Passes, planner and backend are imported where they are used: `import rlx` stays light.


def lower(graph: Graph) -> Graph:
    """HIR -> MIR: every block in terms of primitive ops."""
    from rlx.passes.basic import remove_dead
    from rlx.transform.expand import expand_graph

    return remove_dead(expand_graph(graph))


def optimize(graph: Graph) -> Graph:
    """MIR -> MIR: folded and cleaned."""
    from rlx.passes.basic import fold_constants, remove_dead

    return remove_dead(fold_constants(graph))


def plan(graph: Graph, target: str = "host", assume: Mapping[str, int] | None = None, **options: Any) -> LirModule:
    """Everything up to LIR: no native code is made."""
    from rlx.backend.cpu.build import panel_tiles
    from rlx.backend.cpu.target import resolve
    from rlx.ir.lir import LirModule
    from rlx.passes.basic import materialize_outputs, split_derived
    from rlx.passes.fuse import fuse
    from rlx.passes.layout import pack_weights
    from rlx.plan.build import Planner

    machine = resolve(target)
    mir = pack_weights(optimize(lower(graph)), panel_tiles(machine))
    main, derived = split_derived(materialize_outputs(mir))
    kernels = fuse(main)
    planner = Planner(kernels, assume or {})
    return LirModule(kernels, planner.plan(planner.binding), derived, machine.name, options, planner=planner)


def compile(
    graph: Graph,
    device: str = "cpu",
    target: str = "host",
    threads: int | None = None,
    precision: str = "f32",
    budget: int | str | None = None,
    assume: Mapping[str, int] | None = None,
    cache: bool = True,
    debug: str | None = None,
) -> Any:
    """Compile a graph for a device; the result is called, bound, explained and saved.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> rlx.compile(g)(np.array([1, 2, 3], np.float32))
    array([2., 4., 6.], dtype=float32)
    """
    from rlx.backend.cpu.target import resolve
    from rlx.runtime.native_code import native_code
    from rlx.runtime.pool import CPUS
    from rlx.runtime.program import CompiledProgram

    machine = resolve(target)
    lir = plan(graph, machine.name, assume)
    kernels, code = native_code(lir, machine, cache)
    return CompiledProgram(lir, kernels, code, threads or len(CPUS), debug)
