"""Predicted times of kernels in the order in which they run.

The time of a kernel is its launch and the slowest of its instructions, of the bytes that pass between a core
and each cache, and of lines that another core has. What a kernel reads is in the cache that holds as many
bytes as were moved since somebody touched it: results of the kernel before are near, weights are far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from rlx.cost.io import ASSUMED_SIZE, LEAVES
from rlx.cost.operations import kernel_work
from rlx.cost.time.convs import conv_work
from rlx.cost.time.nests import nest_work
from rlx.cost.time.others import opaque_work, transform_work
from rlx.cost.time.owners import Box, Owners, Share, Touched
from rlx.cost.time.products import attention_work, contract_work
from rlx.cost.time.work import Setting, Work, kernel_ps
from rlx.ir.dim import Dim, evaluate, symbols
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.text.write import graph_text
from rlx.ir.types import tensor_types
from rlx.kernel.compose import body_of, compose
from rlx.kernel.control import is_laid_out, loop_form
from rlx.kernel.form import HostCall, dense_strides
from rlx.kernel.nests import (
    AttentionNest,
    ComposeError,
    ContractNest,
    ConvNest,
    Kernel,
    Nest,
    Opaque,
    TransformNest,
)
from rlx.kernel.views import view_layouts
from rlx.target.cpu import Target
from rlx.target.prices import FEW_PS, SMALL_PS

KEPT = 2  # times the size of L3: bytes that cores move before none of them has a line any more
LINES_OF_MAP, LINES_OF_REDUCTION = 1, 4  # of code that come one after the other

Places = Mapping[int, tuple[str, int]]
"""Value -> its space and its first byte there, for values between kernels."""


class Clock:
    """Times of the kernels of one graph at known sizes, on all cores that a target is assumed to have."""

    def __init__(self, graph: Graph, binding: Mapping[str, int], target: Target, places: Places) -> None:
        self.graph, self.binding, self.target, self.places = graph, binding, target, places
        self.views, self.owners = view_layouts(graph), Owners()
        self.whole = 0.0  # bytes that a run touches
        self.few = False  # whether one thread runs everything
        self._works: dict[int, tuple[Work, tuple[int, ...]]] = {}
        self._moved = 0.0  # bytes, since the first kernel
        self._touched: dict[int, float] = {}  # value from outside -> when it was read last
        self._began, self._now, self._run = 0.0, 0.0, 0.0  # picoseconds: of runs before, of this, of the last
        self._took: dict[int, float] = {}  # by kernel, in the run before
        self._ran: dict[object, tuple[float, float]] = {}  # code -> bytes moved, and when in this run
        self._read_at: dict[int, float] = {}  # value from outside -> when in this run it was read last
        self._results: dict[int, dict[int, int]] = {}  # node with several results -> number -> value
        for node in graph.nodes:
            if node.op.role is Role.RESULT:
                self._results.setdefault(node.operands[0].id, {})[node.attrs["index"]] = node.id

    def size(self, d: Dim) -> int:
        """A size at the sizes of the plan."""
        if isinstance(d, int):
            return d
        return evaluate(d, {s: self.binding.get(s, ASSUMED_SIZE) for s in symbols(d)})

    def knows(self, node: Node) -> bool:
        """Whether it can tell the time of a node: the host computes those that it cannot."""
        if loop_form(node) is not None:
            return is_laid_out(node)
        if node.op.host_only is not None:
            return False
        try:
            kernel = compose(body_of(node))
        except ComposeError:
            return False
        return not (isinstance(kernel, Opaque) and isinstance(kernel.form, HostCall))

    def begin(self, kernels: Sequence[Node], arena: int, repeats: bool = False) -> None:
        """Begin a run of these kernels, after others like it; `arena` is the memory that values share.
        `repeats` says that there are loops, too."""
        stored = dict[int, float]()  # what comes from outside of the run
        for node in kernels:
            work, roots = self._work(node)
            for t in work.traffic:
                root = roots[t.operand]
                if self.graph.nodes[root].op.role in LEAVES:
                    stored[root] = max(stored.get(root, 0.0), t.nbytes)
        self.whole, self._touched = sum(stored.values()) + arena, {}
        self._run, self._began, self._now = self._now, self._began + self._now, 0.0
        self._read_at, self._ran = {}, {}
        self.few = not repeats and sum(map(self._size_of, kernels)) < FEW_PS

    def kernel(self, node: Node) -> int:
        """Picoseconds of the next kernel."""
        (work, roots), rates = self._work(node), self.target.rates
        alone = self.few or self._size_of(node) < SMALL_PS
        threads = 1 if alone else self.target.prices.cores
        sharing = min(threads, max(work.units, 1))
        idle = threads - sharing  # a thread begins where the one before it ends: of one unit, the last has it
        clock = self._began + self._now + self._took.get(node.id, 0.0) / 2  # halfway through
        levels, foreign = list[dict[str, float]](), np.zeros(threads)
        for t in work.traffic:
            written, root = t.operand >= len(node.operands), roots[t.operand]
            start = self.places.get(root)
            if start is None:
                last = self._read_at.get(root)
                elapsed = self._run if last is None else self._now - last
                levels.append(self._levels(np.array([self._age(root)]), np.array([elapsed]), threads))
                continue
            value = self.graph.nodes[root] if written else node.operands[t.operand]
            box, kept = self._box(value, t.box, start[1]), KEPT * self.target.l3_bytes
            met = self.owners.touch(start[0], box, t.share, sharing, written, self._moved, kept, idle, clock)
            foreign[:sharing] += self._waiting(met, t.nbytes, written)
            levels.append(self._levels(met.ages + t.nbytes, met.elapsed, threads))
        self._moved += sum(t.nbytes for t in work.traffic)
        for t in work.traffic:
            self._touched[roots[t.operand]], self._read_at[roots[t.operand]] = self._moved, self._now
        waits = float(foreign.max())
        if waits:
            waits += rates.core_ps
        else:
            waits = rates.far_ps * max((found.get("memory", 0.0) for found in levels), default=0.0)
        took = self._start_ps(node, work) + kernel_ps(rates, work, levels, threads, waits)
        self._took[node.id] = took
        self._now += took
        return round(took)

    def loop(self, node: Node, took: float) -> None:
        """A loop over bodies runs: every thread reads what it is given. They share columns of results, unless
        the kernels that write these are small: then the first thread has them."""
        threads, kept = self.target.prices.cores, KEPT * self.target.l3_bytes
        ends = [value for body in node.bodies for value in body.outputs.values()]
        ends = [value.operands[0] if value.op.role is Role.RESULT else value for value in ends]
        alone = all(value.op.role in LEAVES or self._size_of(value) < SMALL_PS for value in ends)
        own = self._results.get(node.id, {})
        results = [self.graph.nodes[own.get(i, node.id)] for i in range(len(tensor_types(node.type)))]
        for number, value in enumerate((*node.operands, *results)):
            written, root = number >= len(node.operands), self._root(value)
            start, item = self.places.get(root), value.dtype.itemsize
            if start is not None:
                columns = written and bool(value.shape) and not alone
                share = Share(item, self.size(value.shape[-1])) if columns else Share()
                box = self._box(value, None, start[1])
                self.owners.touch(start[0], box, share, threads, written, self._moved, kept)
            self._moved += prod(map(self.size, value.shape)) * item
            self._touched[root], self._read_at[root] = self._moved, self._now + took
        self._now += took

    def _size_of(self, node: Node) -> int:
        """What threads are given work by."""
        return self.size(kernel_work(node, self.target.prices))

    def _waiting(self, met: Touched, most: float, written: bool) -> np.ndarray:
        """How long each thread waits for lines of others. Stores wait by themselves, as long as few do."""
        rates = self.target.rates
        lines = np.minimum(met.fetched + met.taken, most)
        room = rates.stores * self.target.vector_bytes if written else 0
        beyond = np.maximum(1.0 - room / np.maximum(lines, 1.0), 0.0)
        fetched, taken = np.minimum(met.fetched, most), np.minimum(met.taken, most)
        waits: np.ndarray = 1000 * beyond * (fetched / rates.fetched_rate + taken / rates.taken_rate)
        return waits

    # -- what a kernel does

    def _work(self, node: Node) -> tuple[Work, tuple[int, ...]]:
        """What a kernel does, and the values whose storage its operands and results are in."""
        if node.id not in self._works:
            results = tensor_types(node.type)
            own = self._results.get(node.id, {})
            written = (own.get(i, node.id) for i in range(len(results)))
            types = [*(o.tensor for o in node.operands), *results]
            at = Setting(
                self.target,
                self.size,
                tuple(self._strides(o) for o in node.operands),
                tuple(prod(map(self.size, t.shape)) * t.dtype.itemsize for t in types),
                tuple(t.dtype.itemsize for t in types),
            )
            self._works[node.id] = _work_of(node, at), (*map(self._root, node.operands), *written)
        return self._works[node.id]

    def _strides(self, node: Node) -> tuple[int, ...]:
        """Elements from one index to the next of a value, by axis."""
        view = self.views.get(node.id)
        return tuple(map(self.size, dense_strides(node.shape) if view is None else view.layout.strides))

    def _root(self, node: Node) -> int:
        """The value whose storage another one uses."""
        while True:
            view = self.views.get(node.id)
            if view is not None:
                node = self.graph.nodes[view.root]
            elif node.reader_side:
                node = node.operands[0]
            else:
                return node.id

    # -- where its operands are

    def _box(self, node: Node, part: Box | None, start: int) -> Box:
        """The bytes of a space that are touched of a value which begins at `start`, or of a part of it."""
        item, view = node.dtype.itemsize, self.views.get(node.id)
        offset = start if view is None else start + item * self.size(view.layout.offset)
        if part is not None and part.offset >= 0:
            return replace(part, offset=offset + part.offset)
        steps = tuple(item * s for s in self._strides(node))
        return Box(offset, tuple(self.size(d) for d in node.shape), steps, item)

    def _age(self, root: int) -> float:
        """Bytes that were moved since a value from outside was read; before that, a whole run."""
        last = self._touched.get(root)
        return self.whole if last is None else min(self._moved - last, self.whole)

    def _left(self, elapsed: np.ndarray | float) -> np.ndarray:
        """The part of L3 that others have taken after some time."""
        return np.asarray(1.0 - np.exp(-np.asarray(elapsed) / self.target.rates.l3_ps))

    def _start_ps(self, node: Node, work: Work) -> float:
        """What it takes until the first instructions of a kernel are there: its code ran one run ago, or as
        that of an equal kernel before."""
        rates, target = self.target.rates, self.target
        code = (graph_text(body_of(node), locations=False), *map(self._strides, node.operands))
        moved, then = self._ran.get(code, (self._moved - self.whole, self._now - self._run))
        self._ran[code] = self._moved, self._now
        age = self._moved - moved
        if age <= target.l2_bytes:
            return 0.0
        far = 1.0 if age > 2 * target.l3_bytes else float(self._left(self._now - then))
        return work.lines * (far * rates.far_ps + (1.0 - far) * rates.near_ps)

    def _levels(self, ages: np.ndarray, elapsed: np.ndarray, threads: int) -> dict[str, float]:
        """Which part of a value is in which cache; `ages` has the bytes that were moved since parts of it
        were touched, `elapsed` the time that went by. L3 is shared with others, who take part of it."""
        target = self.target
        near, nearest = ages <= target.l2_bytes * threads, ages <= target.l1_bytes
        full = np.clip(np.minimum(ages, self.whole) / target.l3_bytes - 1.0, 0.0, 1.0)
        far = np.where(near, 0.0, np.maximum(full, self._left(elapsed)))
        parts = {
            "l1": nearest.mean(),
            "l2": (near & ~nearest).mean(),
            "l3": np.where(near, 0.0, 1.0 - far).mean(),
            "memory": far.mean(),
        }
        return {cache: float(part) for cache, part in parts.items() if part}


def _work_of(node: Node, at: Setting) -> Work:
    kernel = compose(body_of(node))
    work = _of_kind(kernel, at)
    if isinstance(kernel, Nest):
        work.lines = LINES_OF_REDUCTION if kernel.stats else LINES_OF_MAP
    return work


def _of_kind(kernel: Kernel, at: Setting) -> Work:
    if isinstance(kernel, Nest):
        return nest_work(kernel, at)
    if isinstance(kernel, ContractNest):
        return contract_work(kernel, at)
    if isinstance(kernel, ConvNest):
        return conv_work(kernel, at)
    if isinstance(kernel, AttentionNest):
        return attention_work(kernel, at)
    return transform_work(kernel, at) if isinstance(kernel, TransformNest) else opaque_work(kernel, at)
