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
from rlx.cost.time.owners import Box, Owners, Share
from rlx.cost.time.products import attention_work, contract_work
from rlx.cost.time.work import Setting, Work, kernel_ps
from rlx.ir.dim import Dim, evaluate, symbols
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import tensor_types
from rlx.kernel.compose import body_of, compose
from rlx.kernel.control import is_laid_out, loop_form
from rlx.kernel.form import HostCall, dense_strides
from rlx.kernel.nests import (
    AttentionNest,
    ComposeError,
    ContractNest,
    ConvNest,
    Nest,
    Opaque,
    TransformNest,
)
from rlx.kernel.views import view_layouts
from rlx.target.cpu import Target
from rlx.target.prices import SMALL_PS

KEPT = 2  # times the size of L3: bytes that cores move before none of them has a line any more

Places = Mapping[int, tuple[str, int]]
"""Value -> its space and its first byte there, for values between kernels."""


class Clock:
    """Times of the kernels of one graph at known sizes, on all cores that a target is assumed to have."""

    def __init__(self, graph: Graph, binding: Mapping[str, int], target: Target, places: Places) -> None:
        self.graph, self.binding, self.target, self.places = graph, binding, target, places
        self.views, self.owners = view_layouts(graph), Owners()
        self.whole = 0.0  # bytes that a run touches
        self._works: dict[int, tuple[Work, tuple[int, ...]]] = {}
        self._moved = 0.0  # bytes, since the first kernel
        self._touched: dict[int, float] = {}  # value from outside -> when it was read last
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

    def begin(self, kernels: Sequence[Node], arena: int) -> None:
        """Begin a run of these kernels, after others like it; `arena` is the memory that values share."""
        stored = dict[int, float]()  # what comes from outside of the run
        for node in kernels:
            work, roots = self._work(node)
            for t in work.traffic:
                root = roots[t.operand]
                if self.graph.nodes[root].op.role in LEAVES:
                    stored[root] = max(stored.get(root, 0.0), t.nbytes)
        self.whole, self._touched = sum(stored.values()) + arena, {}

    def kernel(self, node: Node) -> int:
        """Picoseconds of the next kernel."""
        (work, roots), rates = self._work(node), self.target.rates
        alone = self.size(kernel_work(node, self.target.prices)) < SMALL_PS
        threads = 1 if alone else self.target.prices.cores
        levels, foreign = list[dict[str, float]](), np.zeros(threads)
        for t in work.traffic:
            written, root = t.operand >= len(node.operands), roots[t.operand]
            start = self.places.get(root)
            if start is None:
                levels.append(self._levels(np.array([self._age(root)]), threads))
                continue
            value = self.graph.nodes[root] if written else node.operands[t.operand]
            box, kept = self._box(value, t.box, start[1]), KEPT * self.target.l3_bytes
            sharing = min(threads, max(work.units, 1))
            met = self.owners.touch(start[0], box, t.share, sharing, written, self._moved, kept)
            foreign[:sharing] += 1000 * np.minimum(met.fetched, t.nbytes) / rates.fetched_rate
            foreign[:sharing] += 1000 * np.minimum(met.taken, t.nbytes) / rates.taken_rate
            levels.append(self._levels(met.ages + t.nbytes, threads))
        self._moved += sum(t.nbytes for t in work.traffic)
        for t in work.traffic:
            self._touched[roots[t.operand]] = self._moved
        waits = float(foreign.max())
        if waits:
            waits += rates.core_ps
        elif any("memory" in found for found in levels):
            waits = rates.far_ps
        return round(kernel_ps(rates, work, levels, threads, waits))

    def loop(self, node: Node) -> None:
        """A loop over bodies runs: every thread reads what it is given, and they share columns of results."""
        threads, kept = self.target.prices.cores, KEPT * self.target.l3_bytes
        own = self._results.get(node.id, {})
        results = [self.graph.nodes[own.get(i, node.id)] for i in range(len(tensor_types(node.type)))]
        for number, value in enumerate((*node.operands, *results)):
            written, root = number >= len(node.operands), self._root(value)
            start, item = self.places.get(root), value.dtype.itemsize
            if start is not None:
                share = Share(item, self.size(value.shape[-1])) if written and value.shape else Share()
                box = self._box(value, None, start[1])
                self.owners.touch(start[0], box, share, threads, written, self._moved, kept)
            self._moved += prod(map(self.size, value.shape)) * item
            self._touched[root] = self._moved

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

    def _levels(self, ages: np.ndarray, threads: int) -> dict[str, float]:
        """Which part of a value is in which cache; `ages` has the bytes that were moved since parts of it
        were touched."""
        target = self.target
        near, nearest = ages <= target.l2_bytes * threads, ages <= target.l1_bytes
        far = np.where(near, 0.0, np.clip(np.minimum(ages, self.whole) / target.l3_bytes - 1.0, 0.0, 1.0))
        parts = {
            "l1": nearest.mean(),
            "l2": (near & ~nearest).mean(),
            "l3": np.where(near, 0.0, 1.0 - far).mean(),
            "memory": far.mean(),
        }
        return {cache: float(part) for cache, part in parts.items() if part}


def _work_of(node: Node, at: Setting) -> Work:
    kernel = compose(body_of(node))
    if isinstance(kernel, Nest):
        return nest_work(kernel, at)
    if isinstance(kernel, ContractNest):
        return contract_work(kernel, at)
    if isinstance(kernel, ConvNest):
        return conv_work(kernel, at)
    if isinstance(kernel, AttentionNest):
        return attention_work(kernel, at)
    return transform_work(kernel, at) if isinstance(kernel, TransformNest) else opaque_work(kernel, at)
