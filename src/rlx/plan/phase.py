"""Phases of a stream: what runs once, what runs every step, what runs after the last heavy step."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from enum import StrEnum

from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op, Role
from rlx.ir.symbols import sizes_of
from rlx.ir.types import type_symbols


class Phase(StrEnum):
    """PROLOGUE runs once per stream, STEADY_STATE every step, EPILOGUE after the last heavy step."""

    PROLOGUE = "prologue"
    STEADY_STATE = "steady"
    EPILOGUE = "epilogue"


class PhaseSchedule:
    """The phase of every node.

    >>> s = PhaseSchedule()
    >>> s.set(3, Phase.PROLOGUE)
    >>> s.get(3), len(s), s.nodes_in(Phase.PROLOGUE)
    (<Phase.PROLOGUE: 'prologue'>, 1, {3})
    """

    def __init__(self) -> None:
        self._of: dict[int, Phase] = {}

    def set(self, node: int, phase: Phase) -> None:
        self._of[node] = phase

    def get(self, node: int) -> Phase:
        return self._of.get(node, Phase.STEADY_STATE)

    def iter(self) -> Iterator[tuple[int, Phase]]:
        return iter(self._of.items())

    def __len__(self) -> int:
        return len(self._of)

    def nodes_in(self, phase: Phase) -> builtins.set[int]:
        return {n for n, p in self._of.items() if p is phase}

    def nodes_in_ordered(self, phase: Phase, order: list[int]) -> list[int]:
        """Nodes of a phase in schedule order."""
        return [n for n in order if self.get(n) is phase]


def ops_inside(node: Node) -> Iterator[Op]:
    """The op of a node and, through bodies, of everything inside it."""
    yield node.op
    for body in node.bodies:
        for inner in body.nodes:
            yield from ops_inside(inner)


def derive_phases(graph: Graph) -> PhaseSchedule:
    """The phase of every node.

    Prologue: what depends only on params, constants, `once` inputs and their sizes. Epilogue: sampling and
    everything after the last heavy step that no new state needs. The rest, and all of a graph without a heavy
    step, is steady state. No phase reads what a later one computes, and what reads a state's old value is
    steady.
    """
    schedule = PhaseSchedule()
    once: set[int] = set()
    states = {s.output.id for s in graph.states}
    given = {s for n in graph.inputs if n.attrs["once"] for s in type_symbols(n.type)}  # sizes that last
    for node in graph.nodes:
        role = node.op.role
        if role in (Role.PARAM, Role.CONSTANT) or (role is Role.INPUT and node.attrs["once"]):
            once.add(node.id)
        elif node.operands and node.id not in states and all(o.id in once for o in node.operands):
            if sizes_of(node) <= given:
                once.add(node.id)
        first = node.id in once or role in (Role.INPUT, Role.PARAM, Role.CONSTANT)
        schedule.set(node.id, Phase.PROLOGUE if first else Phase.STEADY_STATE)
    heavy = {n.id for n in graph.nodes if n.id not in once and any(op.heavy for op in ops_inside(n))}
    if not heavy:
        return schedule
    needed = heavy | states | _readers_of_states(graph)
    for node in reversed(graph.nodes):
        if node.id in needed:
            needed.update(o.id for o in node.operands)
    after = set(heavy)  # the heavy steps, what follows them, what samples, and what follows that
    for node in graph.nodes:
        if any(o.id in after for o in node.operands) or any(op.selects for op in ops_inside(node)):
            after.add(node.id)
        if node.id in after and node.id not in needed and schedule.get(node.id) is not Phase.PROLOGUE:
            schedule.set(node.id, Phase.EPILOGUE)
    return schedule


def _readers_of_states(graph: Graph) -> set[int]:
    """What reads a state, through views too: it runs before the state is replaced."""
    old = {s.input.id for s in graph.states if s.output is not s.input}
    found: set[int] = set()
    for node in graph.nodes:
        if any(o.id in old for o in node.operands):
            found.add(node.id)
            if node.op.role is Role.COMPUTE and node.op.has("view"):
                old.add(node.id)
    return found


def runs_in_streams(graph: Graph) -> bool:
    """Whether a program has something that outlives a step: states, or inputs that are given once."""
    return bool(graph.states) or any(n.attrs.get("once") for n in graph.inputs)
