"""LIR: optimised MIR plus a concrete execution plan. A backend sees only this.

The graph's nodes are kernels (regions), views and leaves; the plan says in which order kernels run and where
every value is stored. Offsets are relative to a space; native code gets bases and offsets through a table.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from rlx.config import VERSION
from rlx.errors import PlanError
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.later import later
from rlx.ir.op import Role
from rlx.ir.rewrite import rewrite
from rlx.ir.symbols import found_by_data
from rlx.ir.types import type_symbols
from rlx.plan.lir_check import check_plan
from rlx.plan.phase import Phase, PhaseSchedule
from rlx.records import dataclass

SPACES = ("activation", "weight", "input", "output", "state", "ring", "heap", "scratch")
PLACED = ("activation", "heap")  # spaces in which values take each other's place
ALIGNMENT = 64
LAST_PART = 1 << 20  # above the number of every part of a kernel


@dataclass(frozen=True, slots=True)
class LirBufferSlot:
    """Bytes of one value inside a space."""

    offset: int
    size: int
    space: str = "activation"

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise PlanError(f"space {self.space!r} is unknown; spaces are {', '.join(SPACES)}")
        if self.offset < 0 or self.size < 0:
            raise PlanError(f"a slot of {self.size} bytes at offset {self.offset} is not valid")


@dataclass(frozen=True, slots=True)
class LirViewAlias:
    """A value without storage: it reads part of `root`'s slot. Strides count elements; None is dense."""

    root: int
    byte_offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WeightCut:
    """How a kernel can be run part by part: each computes with the columns that are in pieces of `nbytes` of
    the operand with this number, the last of which may be shorter."""

    operand: int
    nbytes: int


Point = tuple[int, int]
"""Where a run is: before a part (0, where there are none) of a step of the schedule."""


@dataclass(frozen=True, slots=True)
class LirFetch:
    """One filling of a place in the ring: a streamed weight, read from its file to `size` bytes at `offset`.

    Filling may begin when all steps before `at` are done. Step `first` waits for it; `last` is the last
    step that reads it, after which the place is free. A weight that is read in two places of the program is
    fetched twice.

    A fetch may bring one of several `parts` of a weight, from its byte `begin` on (of a whole weight, `parts`
    is 0). The kernel then runs part by part, and number `part` of them is the one that waits for it and reads
    it. Filling may begin when part `at_part` of step `at` does.
    """

    node: int
    offset: int
    size: int
    at: int
    first: int
    last: int
    begin: int = 0
    part: int = 0
    parts: int = 0
    at_part: int = 0

    @property
    def starts(self) -> Point:
        """The point of a run from which on the place may be filled."""
        return self.at, self.at_part

    @property
    def awaited(self) -> Point:
        """The point of a run that waits for it."""
        return self.first, self.part

    @property
    def ends(self) -> Point:
        """The last point of a run that reads it."""
        return self.last, self.part if self.parts else LAST_PART


@dataclass(frozen=True)
class LirIoManifest:
    """Ordered (name, node id) lists of what goes in and out.

    Params have the names that users gave them. A node that holds several (merged weights) is listed under
    each name, and a name under each node that is made of it.
    """

    inputs: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]

    @staticmethod
    def collect(graph: Graph, derived: Graph | None = None) -> LirIoManifest:
        """The manifest of a graph, whose params may be what `derived` makes of the users' own.

        >>> import rlx
        >>> g = rlx.Graph()
        >>> g.output("y", g.input("x", ("n", 64), "f32") @ g.param("w", (64, 64), "f32"))
        >>> from rlx.api.compile import plan
        >>> [name for name, _ in plan(g).plan.io.params]
        ['w']
        """
        made = {} if derived is None else _params_of(derived)
        return LirIoManifest(
            tuple((n.attrs["name"], n.id) for n in graph.inputs),
            tuple((user, n.id) for name, n in graph.params.items() for user in made.get(name, (name,))),
            tuple((name, n.id) for name, n in graph.outputs.items()),
        )

    def names_of(self, node: int) -> str:
        """The params that a node holds; empty, if it holds none."""
        return ", ".join(name for name, id in self.params if id == node)


def _params_of(derived: Graph) -> dict[str, tuple[str, ...]]:
    """The params that every result of a graph of weights is made of; those of constants alone keep their
    names."""
    found: list[dict[str, None]] = []  # in the order of nodes, names in their order
    for node in derived.nodes:
        own = {node.attrs["name"]: None} if node.op.role is Role.PARAM else {}
        found.append(own | {name: None for o in node.operands for name in found[o.id]})
    return {name: tuple(found[n.id]) or (name,) for name, n in derived.outputs.items()}


@dataclass(frozen=True)
class LirWorkspace:
    """Memory that a node with bodies has while it runs, as a slot of the activation space.

    It holds a second place for each of its carried values (the first is the result), one for the word whether
    a loop goes on, and the activations of its bodies, of which only one runs at a time. Inputs and outputs of
    a body have no place here: they are the operands and results of the node.
    """

    slot: LirBufferSlot
    bodies: tuple[LirBufferPlan, ...]
    carries: int = 0

    @property
    def carry_offsets(self) -> list[int]:
        """Where the second place of each carried value is in the slot, and where the last one ends."""
        carried = self.bodies[0].io.outputs[: self.carries]
        rooms = [_room(self.bodies[0].assignments[node].size) for _, node in carried]
        return [0, *accumulate(rooms)]

    @property
    def flag_offset(self) -> int:
        """Where the word is that says whether a loop continues."""
        return self.carry_offsets[-1]

    @property
    def arena_offset(self) -> int:
        """Where the activations of the bodies begin."""
        return self.flag_offset + ALIGNMENT

    @property
    def needed(self) -> int:
        """Bytes of all of this."""
        return self.arena_offset + max(_room(b.arena_size) for b in self.bodies)


def _room(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class LirBufferPlan:
    """Where every value is, in which order kernels run, for one binding of the symbols."""

    assignments: dict[int, LirBufferSlot]
    schedule: list[int]
    view_aliases: dict[int, LirViewAlias]
    phases: PhaseSchedule
    io: LirIoManifest
    lifetimes: dict[int, tuple[int, int]]
    space_sizes: dict[str, int]
    alignment: int = ALIGNMENT
    dynamic_symbols: tuple[str, ...] = ()
    binding: dict[str, int] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)  # node -> the node whose storage it reuses in place
    heuristic: str = ""
    work: dict[int, LirWorkspace] = field(default_factory=dict)  # of nodes with bodies
    graph: Graph | None = field(
        default=None, repr=False, compare=False
    )  # the kernels that this is a plan for
    fetches: tuple[LirFetch, ...] = ()  # weights that are streamed through the ring, in the order of filling

    @property
    def arena_size(self) -> int:
        """Bytes of the activation space."""
        return self.space_sizes.get("activation", 0)

    def sizes(self) -> dict[str, int]:
        """Bytes of every space."""
        return {space: self.space_sizes.get(space, 0) for space in SPACES}

    def total_unshared_bytes(self) -> int:
        """Activation bytes if nothing were reused; aliases cost nothing."""
        return sum(s.size for s in self.assignments.values() if s.space == "activation")

    def bytes_saved(self) -> int:
        """What sharing saves."""
        return max(self.total_unshared_bytes() - self.arena_size, 0)

    def slot(self, node: int) -> LirBufferSlot:
        """The slot of a value, of its root if it is a view."""
        node = self.view_aliases[node].root if node in self.view_aliases else node
        if node not in self.assignments:
            raise PlanError(f"%{node} has no slot in this plan")
        return self.assignments[node]

    def is_view(self, node: int) -> bool:
        return node in self.view_aliases

    def phase_of(self, node: int) -> Phase:
        return self.phases.get(node)

    def nodes_in_phase(self, phase: Phase) -> list[int]:
        return self.phases.nodes_in_ordered(phase, self.schedule)

    def root(self, node: int) -> int:
        """The value whose storage a value uses: itself, unless it is a view."""
        alias = self.view_aliases.get(node)
        return node if alias is None else alias.root

    def stops(self) -> list[Point]:
        """Points at which a run stops to let the ring be filled, or to wait for it."""
        return sorted({(0, 0), *(f.starts for f in self.fetches), *(f.awaited for f in self.fetches)})

    def in_parts(self, step: int) -> list[LirFetch]:
        """The fetches of a step whose kernel runs part by part, in order; none for other steps."""
        return [f for f in self.fetches if f.first == step and f.parts]

    def in_states(self) -> dict[int, int]:
        """Values that are written over a state -> the state."""
        found: dict[int, int] = {}
        for node in self.shared:
            if self.assignments[node].space == "state":
                state = self.shared[node]
                while state in self.shared:
                    state = self.shared[state]
                found[node] = state
        return found

    def takes_over(self, node: int, other: int, step: int) -> bool:
        """Whether a value begins at this step in the storage of another, which ends there."""
        return self.shared.get(node) == other and self.lifetimes[other][1] == step == self.lifetimes[node][0]

    def live_bytes(self) -> list[int]:
        """Aligned activation bytes alive at every step; storage shared in place counts once."""
        change = [0] * (len(self.schedule) + 2)
        for node, (first, last) in self.lifetimes.items():
            slot = self.assignments.get(node)
            if slot is None or slot.space != "activation":
                continue
            start = first + (node in self.shared)  # the step before it is the other value's
            if start <= last:
                room = -(-slot.size // self.alignment) * self.alignment
                change[start] += room
                change[last + 1] -= room
        for node, work in self.work.items():
            step = self.schedule.index(node)
            change[step] += _room(work.slot.size)
            change[step + 1] -= _room(work.slot.size)
        return list(accumulate(change))[: len(self.schedule)]

    def lower_bound(self) -> int:
        """Largest sum of aligned live activation bytes at any step: no placement needs less."""
        return max(self.live_bytes(), default=0)

    def check(self) -> None:
        """Prove the plan, or raise a PlanError that names the nodes. No two live slots overlap. Every view is
        inside its root, which lives as long. Every read is of a written slot. Every slot is aligned and in
        its space. No place in the ring is filled again before its last reader.
        """
        check_plan(self)


@dataclass(frozen=True, slots=True)
class LirSegment:
    """Kernels that one native call runs, or one node that the host computes; and the sizes that it finds."""

    kernels: tuple[int, ...]
    on_host: bool = False
    defines: tuple[str, ...] = ()


@dataclass(repr=False)
class LirModule:
    """A program ready for a backend: graph of kernels, plan, derived weights, target and options."""

    mir: Graph
    buffers: LirBufferPlan
    derived: Graph | None = None  # params -> packed, transposed, merged weights; run at load
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    decisions: Any = ()
    planner: Any = None
    unfused: Graph | None = None  # MIR before fusion: what ids in `decisions` mean
    trace: Any = None  # stages and firings of rules
    again: dict[str, int] = field(default_factory=dict)  # what fusion charged for computing values again

    @property
    def name(self) -> str:
        return self.mir.name

    @property
    def arena_size(self) -> int:
        return self.buffers.arena_size

    @property
    def plan(self) -> LirBufferPlan:
        return self.buffers

    @property
    def outline(self) -> Graph:
        """Names, roles, types and operands of all nodes, which is what running needs of the graph."""
        return self.mir

    def as_graph(self) -> Graph:
        """The graph of kernels, shared."""
        return self.mir

    def into_graph(self) -> Graph:
        """A graph of kernels of the caller's own, which may be added to without changing the program."""
        return rewrite(self.mir, lambda node, operands, out: None, keep_dead=True)

    def dynamic_symbols(self) -> tuple[str, ...]:
        return self.mir.symbols()

    def has_dynamic_dims(self) -> bool:
        return bool(self.dynamic_symbols())

    def is_fully_static(self) -> bool:
        return not self.has_dynamic_dims()

    def segments(self, on_host: Collection[int] = ()) -> list[LirSegment]:
        """What runs in one piece, in order. Nodes that find a size in data, and those that the host computes
        (by their declaration, or because the backend says so), are separate segments.

        >>> import rlx
        >>> from rlx.api.compile import plan
        >>> g = rlx.Graph()
        >>> x = g.input("x", (9,), "f32")
        >>> g.output("y", rlx.ops.exp(rlx.ops.compress(x > 0.0, x)))
        >>> [(len(s.kernels), len(s.defines)) for s in plan(g).segments()]
        [(1, 0), (1, 1), (1, 0)]
        """
        unknown, made, batch = set(found_by_data(self.outline)), list[LirSegment](), list[int]()
        for kernel in self.plan.schedule:
            node = self.outline.nodes[kernel]
            host = kernel in on_host or node.op.host_only is not None
            defines = tuple(s for s in type_symbols(node.type) if s in unknown)
            unknown.difference_update(defines)
            if not host and not defines:
                batch.append(kernel)
                continue
            made += [LirSegment(tuple(batch))] * bool(batch)
            made.append(LirSegment((kernel,), host, defines))
            batch = []
        return made + [LirSegment(tuple(batch))] * bool(batch)

    def specialize(self, binding: Mapping[str, int]) -> LirModule:
        """The same program placed for other sizes; kernels, order and code key stay as they are."""
        if self.planner is None:
            raise PlanError(
                f"program {self.name!r} was loaded without its planner and cannot be placed again"
            )
        return replace(self, buffers=self.planner.plan(dict(binding)))

    def set_weight_budget(self, budget: int, cuts: Mapping[int, WeightCut] | None = None) -> None:
        """Plan weights again for a budget of bytes: what does not fit goes through a ring. Of kernels in
        `cuts`, by node, one operand may come in parts.
        """
        self.planner.stream(budget, cuts)
        self.buffers = self.planner.plan()
        self.options = {**self.options, "weight_budget": budget}

    @property
    def code_key(self) -> str:
        """Digest of what the code generator reads: kernels, layouts, target, and its version; no offsets,
        sizes, weights."""
        from rlx.ir.text.write import Printer  # start time: a program from a file has its code

        _, *lines = Printer(locations=False).graph_lines(self.mir)  # the first line holds the display name
        return hashlib.sha256("\n".join([VERSION, self.target, *lines]).encode()).hexdigest()

    def fingerprint(self) -> LirFingerprint:
        """Digest of the whole plan: any other constant, stride, offset or option gives another one."""
        return LirFingerprint.of(self)

    def __str__(self) -> str:
        """The program as text; constants too large for it are named by their digest."""
        return self.to_text({})

    def __repr__(self) -> str:
        size = f"{len(self.plan.schedule)} kernels, {self.arena_size} bytes of activations"
        return f"<lir {self.name!r} for {self.target}: {size}>"

    def to_text(self, blobs: dict[str, np.ndarray] | None = None, locations: bool = True) -> str:
        """The program and its plan as text; constants too large for it are added to `blobs` by digest."""
        return later().plan_text.module_text(self, blobs, locations)

    @staticmethod
    def from_text(text: str, blobs: Mapping[str, np.ndarray] | None = None) -> LirModule:
        """The program that `to_text` wrote, verified and checked."""
        read: LirModule = later().plan_text.parse_module(text, blobs)
        return read

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program with its constants and the values of its params to one file."""
        later().plan_files.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LirModule:
        """Read what `save` wrote: format version and checksum first, then verifier and `check()`."""
        read: LirModule = later().plan_files.load(path)
        return read


class LirFingerprint(str):
    """SHA-256 over the canonical text of a plan, in hexadecimal."""

    @staticmethod
    def of(module: LirModule) -> LirFingerprint:
        """The fingerprint of a program.

        >>> import rlx
        >>> from rlx.api.compile import plan
        >>> def one(factor):
        ...     g = rlx.Graph()
        ...     g.output("y", g.input("x", (2,), "f32") * factor)
        ...     return LirFingerprint.of(plan(g, target="x86-64-v3"))
        >>> one(2.0) == one(2.0), one(2.0) == one(2.5)
        (True, False)
        """
        text = later().plan_text.canonical_text(module)
        return LirFingerprint(hashlib.sha256(text.encode()).hexdigest())


Binding = Mapping[str, int]
Sizes = Mapping[int, Dim]
