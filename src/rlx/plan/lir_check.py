"""Proves a buffer plan: nothing alive is overwritten, everything read was written, all
bytes are in bounds.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rlx.errors import PlanError
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.symbols import waits_for_sizes
from rlx.ir.types import TupleType
from rlx.kernel.control import is_laid_out, loop_form, own_symbols

if TYPE_CHECKING:
    from rlx.plan.lir import LirBufferPlan, LirBufferSlot, LirFetch

LEAVES = (Role.INPUT, Role.PARAM, Role.CONSTANT, Role.STATE)
REUSED = ("activation", "heap", "state")  # spaces in which values may follow each other in one place


def check_plan(plan: LirBufferPlan) -> None:
    """Raise a PlanError that names the nodes if the plan is not sound; see `LirBufferPlan.check`."""
    _check_slots(plan)
    if plan.graph is not None:
        _check_schedule(plan, plan.graph)
        _check_sizes(plan, plan.graph)
        _check_lifetimes(plan, plan.graph)
        _check_aliases(plan, plan.graph)
        _check_fetched(plan, plan.graph)
        _check_work(plan, plan.graph)
        _check_states(plan, plan.graph)
    for space in REUSED:
        _check_apart(plan, space)
    _check_ring(plan)


def _check_slots(plan: LirBufferPlan) -> None:
    """Every slot is aligned and is inside its space; leaves of one space are disjoint. What is written over
    a state has the state's slot."""
    ends: dict[str, list[tuple[int, int, int]]] = {}
    for node, slot in plan.assignments.items():
        if slot.offset % plan.alignment:
            raise PlanError(f"%{node} is at offset {slot.offset}, which is not aligned to {plan.alignment}")
        room = plan.space_sizes.get(slot.space, 0)
        if slot.offset + slot.size > room:
            raise PlanError(
                f"%{node} ends at byte {slot.offset + slot.size} of the {slot.space} space, which has {room}"
            )
        over = plan.shared.get(node)
        if slot.space == "state" and over is not None:
            if plan.assignments.get(over) != slot:
                raise PlanError(f"%{node} is written over %{over}, but has another slot")
        elif slot.space not in ("activation", "heap", "ring") and slot.size:
            ends.setdefault(slot.space, []).append((slot.offset, slot.offset + slot.size, node))
    for space, slots in ends.items():
        slots.sort()
        for (_, end, a), (start, _, b) in pairwise(slots):
            if start < end:
                raise PlanError(f"%{a} and %{b} overlap in the {space} space")


def _check_schedule(plan: LirBufferPlan, graph: Graph) -> None:
    """Kernels run once, after what they read; all that outputs need is run."""
    written = {n.id for n in graph.nodes if n.op.role in LEAVES}
    seen: set[int] = set()
    sizes, scheduled = waits_for_sizes(graph), set(plan.schedule)
    for kernel in plan.schedule:
        if not 0 <= kernel < len(graph) or kernel in seen:
            raise PlanError(f"%{kernel} is not a node of graph {graph.name!r}, or runs twice")
        seen.add(kernel)
        node = graph.nodes[kernel]
        for finder in sizes.get(kernel, ()):
            if finder in scheduled and finder not in seen:
                raise PlanError(f"%{kernel} runs before %{finder}, which finds its size", node.where)
        for o in node.operands:
            root = plan.root(o.id)
            if root not in written:
                raise PlanError(f"%{kernel} reads %{root} before it is written", node.where)
        written.update(v.id for v in written_by(graph, node))
    for n in graph.roots():
        if plan.root(n.id) not in written and not isinstance(n.type, TupleType):
            raise PlanError(f"%{n.id} is needed at the end, but nothing in the schedule writes it", n.where)


def written_by(graph: Graph, kernel: Node) -> list[Node]:
    """The values that a kernel writes: itself, or its results."""
    if not isinstance(kernel.type, TupleType):
        return [kernel]
    return [n for n in graph.nodes if n.op.role is Role.RESULT and n.operands[0] is kernel]


def _check_sizes(plan: LirBufferPlan, graph: Graph) -> None:
    """A slot is as large as its value at this binding; that of a weight in parts, as its first part."""
    parts = {f.node: f.size for f in plan.fetches if f.parts and not f.part}
    for node, slot in plan.assignments.items():
        if not 0 <= node < len(graph):
            raise PlanError(f"the plan has a slot for %{node}, which is not a node of graph {graph.name!r}")
        want = evaluate(graph.nodes[node].tensor.nbytes, plan.binding)
        if slot.size != parts.get(node, want):
            raise PlanError(
                f"%{node} is {graph.nodes[node].type}, {want} bytes, but its slot has {slot.size}"
            )


def _check_lifetimes(plan: LirBufferPlan, graph: Graph) -> None:
    """The lifetime of a value covers the steps that write it and read it, through views too."""
    last = len(plan.schedule) - 1
    used: dict[int, tuple[int, int]] = {}
    for step, kernel in enumerate(plan.schedule):
        node = graph.nodes[kernel]
        touched = [plan.root(o.id) for o in node.operands] + [v.id for v in written_by(graph, node)]
        for value in touched:
            first, _ = used.get(value, (step, step))
            used[value] = (first, step)
    for n in graph.ends():
        value = plan.root(n.id)
        used[value] = (used.get(value, (last, last))[0], last)
    for value, (first, end) in used.items():
        slot = plan.assignments.get(value)
        if slot is None:
            if not isinstance(graph.nodes[value].type, TupleType):
                raise PlanError(f"%{value} is used, but has no slot")
            continue
        alone = slot.space == "state" and value not in plan.lifetimes
        if slot.space not in REUSED or (alone and value not in plan.shared):
            continue
        start, stop = plan.lifetimes.get(value, (0, -1))
        if start > first or stop < end:
            raise PlanError(f"%{value} is used in steps {first} to {end}, but lives from {start} to {stop}")


def _check_aliases(plan: LirBufferPlan, graph: Graph) -> None:
    """A view reads only bytes of its root."""
    for node, alias in plan.view_aliases.items():
        if alias.root in plan.view_aliases or alias.root not in plan.assignments:
            raise PlanError(f"%{node} is a view of %{alias.root}, which has no slot of its own")
        value = graph.nodes[node]
        itemsize = value.dtype.itemsize
        shape = [evaluate(d, plan.binding) for d in value.shape]
        if 0 in shape:
            continue
        strides = alias.strides
        if strides is None:
            low, high = 0, itemsize
            for d in shape:
                high *= d
        else:
            steps = [(d - 1) * s * itemsize for d, s in zip(shape, strides, strict=True)]
            low = sum(s for s in steps if s < 0)
            high = sum(s for s in steps if s > 0) + itemsize
        size = plan.assignments[alias.root].size
        if alias.byte_offset + low < 0 or alias.byte_offset + high > size:
            raise PlanError(
                f"%{node} reads bytes {alias.byte_offset + low} to {alias.byte_offset + high} "
                f"of %{alias.root}, which has {size}"
            )


def _check_work(plan: LirBufferPlan, graph: Graph) -> None:
    """Every node whose bodies are laid out has room for them, and their plans are sound too."""
    wanted = {k for k in plan.schedule if is_laid_out(graph.nodes[k])}
    for node in sorted(wanted ^ plan.work.keys()):
        told = (
            "has no workspace for its bodies"
            if node in wanted
            else "has a workspace, but no bodies to lay out"
        )
        raise PlanError(f"%{node} {told}", graph.nodes[node].where)
    for node, work in plan.work.items():
        form = loop_form(graph.nodes[node])
        assert form is not None, "it is laid out"
        bodies = graph.nodes[node].bodies
        if work.carries != form.carries or len(work.bodies) != len(bodies):
            raise PlanError(f"the workspace of %{node} is for other bodies than it has")
        for body, inside in zip(bodies, work.bodies, strict=True):
            sizes = {s: n for s, n in inside.binding.items() if s not in own_symbols(form)}
            if inside.graph is not body or any(plan.binding.get(s) != n for s, n in sizes.items()):
                raise PlanError(f"the workspace of %{node} is for another body, or other sizes, than it has")
            if any(inside.binding.get(s, 0) < 1 for s in own_symbols(form)):
                raise PlanError(f"the workspace of %{node} is for slices of no rows")
            check_plan(inside)
        end, room = work.slot.offset + work.slot.size, plan.arena_size
        if work.slot.space != "activation" or work.slot.size < work.needed or end > room:
            raise PlanError(
                f"the workspace of %{node} is {work.slot.size} bytes of the {work.slot.space} space, to byte "
                f"{end}; its bodies need {work.needed} of the activation space, which has {room}"
            )
        if work.slot.offset % plan.alignment:
            raise PlanError(f"the workspace of %{node} is not aligned to {plan.alignment}")


def _slot(plan: LirBufferPlan, key: int) -> LirBufferSlot:
    """The slot of a value, or (for ~node) the workspace of a node."""
    return plan.assignments[key] if key >= 0 else plan.work[~key].slot


def _name(key: int) -> str:
    return f"%{key}" if key >= 0 else f"the workspace of %{~key}"


def _check_states(plan: LirBufferPlan, graph: Graph) -> None:
    """The new value of a state is where the old one was."""
    for s in graph.states:
        if plan.assignments.get(s.output.id) != plan.assignments.get(s.input.id):
            raise PlanError(f"the new value of state {s.name!r}, %{s.output.id}, is not written to its slot")
        if s.output is not s.input and s.input.id not in plan.lifetimes:
            raise PlanError(f"state {s.name!r}, %{s.input.id}, is written over, but has no lifetime")


def _check_apart(plan: LirBufferPlan, space: str) -> None:
    """No two values that are alive at one step share bytes, unless one takes over the other's place."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    spans = dict(plan.lifetimes)
    spans |= {~node: (step, step) for step, node in enumerate(plan.schedule) if node in plan.work}
    for node, (first, last) in spans.items():
        slot = _slot(plan, node) if node < 0 else plan.assignments.get(node)
        if slot is not None and slot.space == space and slot.size:
            begins.setdefault(first, []).append(node)
            ends.setdefault(last, []).append(node)
    alive: list[tuple[int, int]] = []  # (offset, node), disjoint
    for step in sorted({*begins, *(s + 1 for s in ends)}):
        for node in ends.get(step - 1, ()):
            alive.remove((_slot(plan, node).offset, node))
        for node in begins.get(step, ()):
            _enter(plan, alive, node, step)


def _enter(plan: LirBufferPlan, alive: list[tuple[int, int]], node: int, step: int) -> None:
    slot = _slot(plan, node)
    end = slot.offset + slot.size
    # Live ones are disjoint (or share one place), so only a few before and behind can overlap.
    at = bisect.bisect_left(alive, slot.offset, key=lambda entry: entry[0])
    near = at - 1
    while near >= 0 and (near == at - 1 or alive[near][0] == alive[near + 1][0]):
        near -= 1
    for offset, other in alive[max(near, 0) :]:
        if offset >= end:
            break
        theirs = _slot(plan, other)
        if slot.offset >= offset + theirs.size or plan.takes_over(node, other, step):
            continue
        a, b = map(_name, sorted((node, other)))
        raise PlanError(
            f"{a} and {b} overlap: bytes {slot.offset} to {end} and {offset} to {offset + theirs.size} "
            f"are both alive at step {step}"
        )
    bisect.insort(alive, (slot.offset, node))


def _check_fetched(plan: LirBufferPlan, graph: Graph) -> None:
    """Every step that reads a weight in the ring finds it there, in one place."""
    fetches: dict[int, list[LirFetch]] = {}
    for fetch in plan.fetches:
        fetches.setdefault(fetch.node, []).append(fetch)
    for node, times in fetches.items():
        for a, b in pairwise(times):
            if b.awaited <= a.ends:
                raise PlanError(f"%{node} is fetched for step {b.first}, but is there until step {a.last}")
        if any(f.parts for f in times):
            _check_parts(times, graph.nodes[node].tensor.nbytes)
    for step, kernel in enumerate(plan.schedule):
        where = graph.nodes[kernel].where
        for o in graph.nodes[kernel].operands:
            root = plan.root(o.id)
            slot = plan.assignments.get(root)
            if slot is None or slot.space != "ring":
                continue
            if not any(f.first <= step <= f.last for f in fetches.get(root, ())):
                raise PlanError(f"%{kernel} reads %{root} at step {step}, but no fetch brings it", where)


def _check_parts(times: Sequence[LirFetch], nbytes: object) -> None:
    """The parts of a weight follow each other, are all there, and one step reads them."""
    node, end = times[0].node, 0
    for number, f in enumerate(times):
        if (f.part, f.parts, f.begin, f.first, f.last) != (number, len(times), end, f.first, times[0].first):
            raise PlanError(
                f"part {f.part} of {f.parts} of %{node}, from byte {f.begin} on for steps {f.first} to "
                f"{f.last}, does not follow the part before it, which ends at byte {end}"
            )
        end += f.size
    if end != nbytes:
        raise PlanError(f"the {len(times)} parts of %{node} have {end} bytes, but the weight has {nbytes}")


def _check_ring(plan: LirBufferPlan) -> None:
    """Fetches are in order and in bounds; none begins before the last reader of what is in its place."""
    room, begun = plan.space_sizes.get("ring", 0), (0, 0)
    alive: list[LirFetch] = []
    for fetch in plan.fetches:
        slot = plan.assignments.get(fetch.node)
        if slot is None or slot.space != "ring" or (slot.size != fetch.size and not fetch.parts):
            raise PlanError(f"%{fetch.node} is fetched, but has no slot of {fetch.size} bytes in the ring")
        if fetch.offset < 0 or fetch.offset % plan.alignment or fetch.offset + fetch.size > room:
            raise PlanError(
                f"the fetch of %{fetch.node} to byte {fetch.offset} of the ring is not aligned, "
                f"or does not fit its {room} bytes"
            )
        if (
            not begun <= fetch.starts <= fetch.awaited <= fetch.ends
            or fetch.last >= len(plan.schedule)
            or fetch.part < 0
        ):
            raise PlanError(
                f"the fetch of %{fetch.node} begins at step {fetch.at}, is awaited at {fetch.first} and read "
                f"until {fetch.last}, which is not in order"
            )
        begun = fetch.starts
        alive = [f for f in alive if f.ends >= fetch.starts]
        for other in alive:
            if other.offset < fetch.offset + fetch.size and fetch.offset < other.offset + other.size:
                raise PlanError(
                    f"%{fetch.node} and %{other.node} overlap in the ring: %{fetch.node} is fetched from "
                    f"step {fetch.at} on, but %{other.node} is read until step {other.last}"
                )
        alive.append(fetch)
