"""Loops of known length as records: every step of the body becomes kernel calls with pointers of its own.

Code does not grow with the number of steps, only the table of records does; carried values alternate between
two buffers, the last step writes the results in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlx.backend.cpu.kernels import EmittedKernel
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.lir import LirBufferPlan
from rlx.ir.op import Role
from rlx.runtime.memory import Region, allocate

if TYPE_CHECKING:
    from rlx.runtime.context import Context


@dataclass(frozen=True)
class Pointer:
    """An address: absolute, or `offset` bytes into a value that is bound at every run."""

    root: int | None
    offset: int


@dataclass
class Call:
    """One kernel call: operand pointers and the sizes it reads."""

    kernel: EmittedKernel
    label: str
    pointers: list[Pointer]
    dims: list[int]


@dataclass
class LoopBuffers:
    """Memory of one loop of one context."""

    plan: LirBufferPlan
    arena: Region
    carries: list[tuple[Region, Region]]
    constants: dict[int, np.ndarray] = field(default_factory=dict)


def scan_calls(
    context: Context, node: Node, kernels: Mapping[int, EmittedKernel], keep: list[object]
) -> list[Call] | None:
    """The calls of a scan, step by step; None for a loop of no steps, which hands its initial values on."""
    body, binding = node.bodies[0], context.plan.binding
    length = (
        node.attrs["length"]
        if isinstance(node.attrs["length"], int)
        else evaluate(node.attrs["length"], binding)
    )
    if length == 0:
        return None
    carries, scanned = node.attrs["carries"], node.attrs["scanned"]
    buffers = _buffers(body, binding, carries)
    keep.append(buffers)
    operands = [context.pointer(o.id) for o in node.operands]
    results = [context.pointer(r.id) for r in context.graph.results(node)]
    outputs = list(body.outputs.values())
    row = [_bytes(n, binding) for n in body.inputs]
    out_row = [_bytes(n, binding) for n in outputs]
    dims = {id: [evaluate(d, binding) for d in k.dims] for id, k in kernels.items()}
    calls: list[Call] = []
    order = range(length - 1, -1, -1) if node.attrs["reverse"] else range(length)
    for step, t in enumerate(order):
        known: dict[int, Pointer] = {}
        for i, n in enumerate(body.inputs):
            if i < carries:
                known[n.id] = operands[i] if step == 0 else _absolute(buffers.carries[i][step % 2])
            elif i < carries + scanned:
                known[n.id] = Pointer(operands[i].root, operands[i].offset + t * row[i])
            else:
                known[n.id] = operands[i]
        for i, n in enumerate(outputs):
            if i >= carries:
                known[n.id] = Pointer(results[i].root, results[i].offset + t * out_row[i])
            else:
                last = step == length - 1
                known[n.id] = results[i] if last else _absolute(buffers.carries[i][(step + 1) % 2])
        calls += _body_calls(body, buffers, known, kernels, dims, str(node.id))
    return calls


def _absolute(region: Region) -> Pointer:
    return Pointer(None, region.address)


def _bytes(node: Node, binding: Mapping[str, int]) -> int:
    return int(np.prod(node.tensor.bind(dict(binding)), dtype=np.int64)) * node.dtype.itemsize


def _buffers(body: Graph, binding: Mapping[str, int], carries: int) -> LoopBuffers:
    from rlx.plan.build import Planner

    plan = Planner(body, {}).plan({s: binding[s] for s in body.symbols()})
    pairs = []
    for n in list(body.outputs.values())[:carries]:
        size = max(_bytes(n, binding), 64)
        pairs.append((allocate(size), allocate(size)))
    made = LoopBuffers(plan, allocate(max(plan.arena_size, 64)), pairs)
    for n in body.nodes:
        if n.op.role is Role.CONSTANT:
            made.constants[n.id] = np.array(n.attrs["value"].array, order="C")
    return made


def _body_calls(
    body: Graph,
    buffers: LoopBuffers,
    known: Mapping[int, Pointer],
    kernels: Mapping[int, EmittedKernel],
    dims: Mapping[int, list[int]],
    label: str,
) -> list[Call]:
    plan = buffers.plan

    def pointer(id: int) -> Pointer:
        alias = plan.view_aliases.get(id)
        root, offset = (alias.root, alias.byte_offset) if alias else (id, 0)
        if root in known:
            return Pointer(known[root].root, known[root].offset + offset)
        if root in buffers.constants:
            return Pointer(None, int(buffers.constants[root].ctypes.data) + offset)
        return Pointer(None, buffers.arena.address + plan.assignments[root].offset + offset)

    out = []
    for id in plan.schedule:
        n = body.nodes[id]
        values = [*n.operands, *body.results(n)]
        out.append(Call(kernels[id], label, [pointer(v.id) for v in values], dims[id]))
    return out
