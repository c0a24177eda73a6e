"""Code of op samples for any named target: written, not compiled, so that no such machine is needed.

for made in emissions():                    # every sample of every op, on every named target
    for text in made.kernels.texts:         # LLVM IR of each module
        compile_object(text, made.target)   # an object, on any machine
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from op_cases import ALL_CASES, Case

from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.kernels import KernelSet
from rlx.codegen.native.irtext import Module
from rlx.dist.native import copies, exchange_code, reduce, sync
from rlx.dist.types import ReduceKind
from rlx.driver.copy import native as copy_worker
from rlx.ir.dtype import ALL_DTYPES
from rlx.ir.graph import Graph
from rlx.plan.lir import LirModule
from rlx.runtime.native.bus_guard import emit_bus_guard
from rlx.runtime.native.driver import emit_driver
from rlx.runtime.native.pool import emit_pool
from rlx.runtime.native.reader import emit_reader
from rlx.target.cpu import Target, targets


@dataclass(frozen=True)
class Emission:
    """A graph planned and written for a target."""

    label: str  # of the sample, such as "softmax-3"
    target: Target
    lir: LirModule
    kernels: KernelSet


def emit(label: str, graph: Graph, target: Target) -> Emission:
    """Plan a graph and write its kernels; LLVM is not asked."""
    lir = plan(graph, target=target.name)
    return Emission(label, target, lir, build_kernels(lir, target))


def emissions(
    cases: Iterable[Case] = ALL_CASES, machines: Iterable[Target] | None = None
) -> Iterator[Emission]:
    """Every case on every target, cases first."""
    for case in cases:
        graph, _ = case.graph()
        for target in targets() if machines is None else machines:
            yield emit(case.id, graph, target)


def first_cases() -> dict[str, Case]:
    """One sample of each op: the first of its declaration."""
    out: dict[str, Case] = {}
    for case in ALL_CASES:
        out.setdefault(case.op.name, case)
    return out


def runtime_modules(target: Target, all_reductions: bool) -> Iterator[tuple[str, str, int]]:
    """(name, LLVM IR, level of LLVM's passes) of all native code that is no kernel of a program.

    Reductions over ranks store as usual or past the caches. Unless all of them are asked for, every dtype and
    kind has one of the two, in turn.
    """
    for emit_into in (emit_driver, emit_bus_guard, emit_pool, emit_reader):
        module = Module(target)
        emit_into(module)
        yield emit_into.__name__.removeprefix("emit_"), module.text(), 0
    for part in (sync, copies, exchange_code):
        yield part.__name__.rpartition(".")[2], part.emit(target), 0
    yield "copy_worker", copy_worker.emit(target), 0
    computed = [d for d in ALL_DTYPES if not (d.is_complex or d.storage_only)]
    for number, (dtype, kind, stream) in enumerate(itertools.product(computed, ReduceKind, (False, True))):
        chosen = all_reductions or (number // 2) % 2 == stream
        if chosen and not (dtype.is_bool and kind is ReduceKind.MEAN):
            yield f"reduce {dtype} {kind.name} {stream}", reduce.emit(target, dtype.name, kind, stream), 0
