"""Programs that come from their files, and the proof that they are what was compiled."""

from __future__ import annotations

import copy
from typing import Any

from rlx.ir.graph import Graph
from rlx.kernel.control import loop_form
from rlx.plan.lir import LirBufferPlan
from rlx.runtime.program import CompiledProgram
from rlx.runtime.store.stored import StoredLir


def from_file(program: CompiledProgram) -> CompiledProgram:
    """The same program, written to a file and read back; it is equal in all that a program says of itself.
    One whose states have memory of this process stays as it is."""
    if program.states:
        return program
    made = copy.copy(program)
    assert isinstance(made.lir, StoredLir), "the code of the file was not used"
    assert_equal(made, program)
    return made


def assert_equal(stored: CompiledProgram, fresh: CompiledProgram) -> None:
    """Plan, guards, control flow, order, memory and explanation are the same."""
    assert stored.lir.to_text({}) == fresh.lir.to_text({})
    assert stored.lir.fingerprint() == fresh.lir.fingerprint()
    assert stored.lir.plan.io == fresh.lir.plan.io == stored.lir.planner.io
    assert stored.lir.planner.to_json() == fresh.lir.planner.to_json()
    assert running_facts(stored.graph) == running_facts(fresh.graph)
    assert stored.lir.segments() == fresh.lir.segments()
    assert stored.stats == fresh.stats
    assert stored.explain() == fresh.explain()
    for more in (0, 3):
        sizes = {name: size + more for name, size in fresh.lir.planner.binding.items()}
        assert places(stored.lir.planner.unchecked(sizes)) == places(fresh.lir.planner.unchecked(sizes))


def places(plan: LirBufferPlan) -> dict[str, Any]:
    """Where a plan has every value, also those of bodies."""
    work = {node: (w.slot, w.carries, [places(body) for body in w.bodies]) for node, w in plan.work.items()}
    return {
        "sizes": plan.space_sizes,
        "slots": plan.assignments,
        "views": plan.view_aliases,
        "fetches": plan.fetches,
        "work": work,
    }


def running_facts(graph: Graph) -> dict[str, Any]:
    """What a run reads of a graph: guards, types, edges, and the same of the bodies of control flow."""
    forms = [loop_form(node) for node in graph.nodes]
    return {
        "name": graph.name,
        "guards": graph.constraints,
        "symbols": graph.symbols(),
        "nodes": [(n.op.name, n.op.role, [o.id for o in n.operands], n.type, n.where) for n in graph.nodes],
        "edges": [[n.id for n in graph.inputs], [(name, n.id) for name, n in graph.outputs.items()]],
        "states": [(s.name, s.output.id) for s in graph.states],
        "forms": forms,
        "bodies": [
            [running_facts(body) for body in node.bodies]
            for node, form in zip(graph.nodes, forms, strict=True)
            if form is not None
        ],
    }
