"""A compiled program that is one rank's part of a sharded one: its collectives meet the other ranks.

Every rank compiles the same graph to the same code and plan; weights hold the rank's parts. Operands of
collectives are in the symmetric heap at the same offsets on all ranks: others read them where they are.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rlx.ir.operand import Arrays
from rlx.dist.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from rlx.dist.environment import init
from rlx.dist.errors import TransportError
from rlx.dist.native_collectives import NativeCall, NativeMeetings
from rlx.dist.rank_files import FACT, described, rank_file
from rlx.dist.transports.shm import SharedMemoryTransport
from rlx.dist.transport import Array, SymmetricTransport, address_of
from rlx.dist.types import ReduceKind, SymmetricBuffer
from rlx.errors import InputError, UnsupportedError
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.plan.lir import PLACED, LirBufferPlan
from rlx.ir.mesh import Mesh, Placements
from rlx.rewrite.sharding.propagate import Sharded, shard
from rlx.plan.collectives import Exchange, exchanges, report
from rlx.runtime.context import Context, Step
from rlx.runtime.native.driver import RecordError
from rlx.ir.dtype import plain_array
from rlx.runtime.program import CompiledProgram
from rlx.runtime.store.save import save

Meeting = Callable[[], None]


# How data move, by what ops call it. Operand and result are flat; parts of ranks are one after the other.


def _reduce(group: SymmetricTransport, x: Array, result: Array, kind: ReduceKind, in_place: bool) -> None:
    if not in_place:
        result[:] = x
    all_reduce(group, None, result, kind)


def _gather(group: SymmetricTransport, x: Array, result: Array, kind: ReduceKind, in_place: bool) -> None:
    all_gather(group, None, x, out=result)


def _scatter(group: SymmetricTransport, x: Array, result: Array, kind: ReduceKind, in_place: bool) -> None:
    reduce_scatter(group, None, x, kind, out=result)


def _swap(group: SymmetricTransport, x: Array, result: Array, kind: ReduceKind, in_place: bool) -> None:
    all_to_all(group, None, x, out=result)


MOVES = {"all_reduce": _reduce, "all_gather": _gather, "reduce_scatter": _scatter, "all_to_all": _swap}


def one_rank(
    graph: Graph,
    mesh: Mesh,
    shardings: Mapping[str, Placements],
    transport: SymmetricTransport | None,
    assume: Mapping[str, int] | None,
) -> tuple[Graph, Callable[..., RankProgram]]:
    """This rank's part of a MIR graph with its values, and the function that builds its program."""
    transport = transport or init()
    if transport.num_ranks != mesh.size:
        raise TransportError(
            f"{mesh} has {mesh.size} ranks, but the transport has {transport.num_ranks}; start the job with "
            f"`rlx launch -n {mesh.size}` or pass transport="
        )
    sharded = shard(graph, mesh, shardings, assume)
    sharded.fill(graph, int(transport.this_rank))
    return sharded.graph, functools.partial(RankProgram, sharded=sharded, transport=transport)


class RankProgram(CompiledProgram):
    """What `rlx.compile(g, mesh=..., transport=...)` returns on each rank. All ranks run it together.

    Inputs are this rank's parts of those that are sharded, outputs likewise. One run at a time.
    """

    has_variants = False  # all ranks run the same code
    quick = False  # ranks meet

    def __init__(self, *given: Any, sharded: Sharded, transport: SymmetricTransport, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sharded, self.transport, self.mesh = sharded, transport, sharded.mesh
        self._groups = self._split()
        self._region: SymmetricBuffer | None = None  # of the heap; large enough for all plans so far
        self._running = threading.Lock()
        processes = {a: g for a, g in self._groups.items() if isinstance(g, SharedMemoryTransport)}
        self._native = {axis: NativeMeetings(group) for axis, group in processes.items()}

    def _split(self) -> dict[str, SymmetricTransport]:
        """A transport per axis that has anybody to meet; all ranks come here in the same order."""
        axes = [axis for axis, ranks in self.mesh.axes.items() if ranks > 1]
        if len(axes) == 1:
            return {axes[0]: self.transport}
        return {axis: self.transport.split(self.mesh.groups(axis)) for axis in axes}

    # -- facts

    def exchanges(self, binding: Mapping[str, int] | None = None) -> list[Exchange]:
        """Collectives in the order in which they run, with the bytes that each rank receives."""
        return exchanges(self.lir, None if binding is None else self.plan_for(binding))

    @property
    def stats(self) -> dict[str, Any]:
        """Sizes and counts, and every collective with the bytes that this rank receives in it."""
        facts = super().stats
        met = self.exchanges()
        own = {e.node for e in met}
        facts["host_thunks"] = [t for t in facts["host_thunks"] if t["node"] not in own]
        facts["collectives"] = [{"node": e.node, "what": e.what, "bytes": e.bytes} for e in met]
        facts["bytes_moved"] = sum(e.bytes for e in met)
        facts["mesh"], facts["rank"] = dict(self.mesh.axes), int(self.transport.this_rank)
        return facts

    def _host_reasons(self) -> dict[int, str]:
        own = {e.node for e in self.exchanges()}
        return {id: why for id, why in super()._host_reasons().items() if id not in own}

    def explain(self, *given: Any, **options: Any) -> str:
        """The page of the program, and which collectives were inserted why."""
        return super().explain(*given, **options) + "\n" + report(self.lir, self.sharded) + "\n"

    def save(self, path: str | os.PathLike[str], targets: Sequence[str] = ()) -> None:
        """Write this rank's part to its own file: `minilm.rlx` becomes `minilm.0of2.rlx` on rank 0.

        All ranks save together; `rlx.load` of the same path on as many ranks reads them. When it returns, the
        files of all ranks are written.
        """
        own = rank_file(path, int(self.transport.this_rank), self.transport.num_ranks)
        save(self, own, targets, {FACT: described(self)})
        self.transport.barrier()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"program {self.graph.name!r} is one rank's part and cannot be copied or pickled; save it on all "
            "ranks and rlx.load the file there"
        )

    def set_param(self, name: str, value: np.ndarray) -> None:
        """Give a parameter its whole value; this rank keeps its part."""
        source = self.lir.derived or self.lir.mir
        if name in source.params:
            want = list(source.params[name].shape)
            for axis, dim in self.sharded.parts.get(name, ()):
                want[dim] = want[dim] * self.mesh.axes[axis]
            if np.shape(value) != tuple(want):
                raise InputError(f"param {name!r} has the whole shape {tuple(want)}, got {np.shape(value)}")
            value = self.sharded.part(name, plain_array(value, f"param {name!r}"), int(self.transport.this_rank))
        super().set_param(name, value)

    # -- running

    def _run(self, given: Sequence[object], states: dict[str, np.ndarray] | None = None) -> list[np.ndarray]:
        with self._running:
            return super()._run(given, states)

    def _make_context(self, binding: Mapping[str, int], profile: bool = False) -> Context:
        context = super()._make_context(binding, profile)
        context.meetings = {
            e.node: self._meeting(context, self.lir.mir.nodes[e.node]) for e in self.exchanges()
        }
        return context

    def _heap(self, plan: LirBufferPlan) -> np.ndarray | None:
        """This rank's heap memory for a plan. All ranks plan the same sizes in the same order.

        Contexts over an earlier, smaller region keep it; sizes double, so that all of them stay below two of
        the largest.
        """
        need = plan.sizes()["heap"]
        if self._region is None or self._region.len < need:
            if need > self.transport.heap_size:
                raise TransportError(
                    f"program {self.graph.name!r} needs {need} bytes of heap per rank, the job has "
                    f"{self.transport.heap_size}; start it with `rlx launch --heap BYTES`"
                )
            doubled = 0 if self._region is None else 2 * self._region.len
            self._region = self.transport.alloc(max(need, min(doubled, self.transport.heap_size // 4)))
        try:
            return self.transport.view(self.transport.this_rank, self._region)
        except TransportError:  # ranks of several machines share no memory: collectives copy
            return np.zeros(need, np.uint8)

    def _native_meeting(self, context: Context, id: int) -> NativeCall | None:
        """The kernel of a collective between processes whose operand is in the heap, whole."""
        node, plan = self.lir.mir.nodes[id], context.plan
        if node.op.family != "collective" or node.attrs["axis"] not in self._native:
            return None
        operand, alias = node.operands[0], plan.view_aliases.get(node.operands[0].id)
        dense = alias is None or alias.strides is None
        fixed = plan.slot(operand.id).space == "heap" and plan.slot(id).space in PLACED
        in_place = plan.shared.get(id) == operand.id
        if context.sizes is not None or not dense or not fixed or in_place != node.op.in_place:
            return None
        make = getattr(self._native[node.attrs["axis"]], node.op.meeting)  # type: ignore[attr-defined]
        x, result = (address_of(context.array(n).reshape(-1)) for n in (operand, node))
        nbytes = evaluate(operand.tensor.nbytes, plan.binding)
        made: NativeCall | None = make(x, result, nbytes, node.dtype, self._kind(node))
        return made

    def _kind(self, node: Node) -> ReduceKind:
        return ReduceKind(node.attrs.get("kind", ReduceKind.SUM))

    def kernel_error(self, e: RecordError, binding: Mapping[str, int]) -> Exception:
        node = self.lir.mir.nodes[int(e.name)]
        if node.op.family != "collective":
            return super().kernel_error(e, binding)
        failure = self._native[node.attrs["axis"]].failure(e.code)
        if not isinstance(failure, Exception):  # such as KeyboardInterrupt
            raise failure
        return failure

    def _meeting(self, context: Context, node: Node) -> Meeting:
        """The collective of a node on the memory of a context."""
        group, operand = self._groups[node.attrs["axis"]], node.operands[0]
        kind = self._kind(node)
        in_place = context.plan.shared.get(node.id) == operand.id
        move = MOVES[node.op.meeting]  # type: ignore[attr-defined]
        alias = context.plan.view_aliases.get(operand.id)
        moves_about = context.sizes is not None or (alias is not None and alias.strides is not None)
        own = all(context.plan.slot(n.id).space in PLACED for n in (operand, node))

        def arrays() -> tuple[np.ndarray, np.ndarray]:
            return context.array(operand).reshape(-1), context.array(node).reshape(-1)

        fixed = arrays() if own and not moves_about else None

        def meet() -> None:
            x, result = fixed or arrays()
            move(group, x, result, kind, in_place)

        return meet

    def _run_unwatched(self, context: Context, step: Step) -> tuple[dict[str, int], Arrays | None]:
        meeting = context.meetings.get(step.nodes[0]) if step.thunk is not None else None
        if meeting is None:
            return super()._run_unwatched(context, step)
        start = time.perf_counter_ns()
        meeting()
        step.span = (start, time.perf_counter_ns())
        return {}, None
