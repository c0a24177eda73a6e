"""Attention of few queries, as when tokens are generated one by one: lanes are features.

A vector of keys is a tile: their products with the query are summed by a transpose in registers, so that the
softmax runs on whole vectors; then each weight is spread over its row of values. Keys and values are read
once. Every output has one order of operations, set by the number of keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.codegen.native import vmath
from rlx.codegen.native.irtext import Function, Int
from rlx.codegen.native.irtypes import Value, constant, vector

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Attention

FEW = 4  # queries up to which rows are faster than blocks of lanes
MOST_VECTORS = 8  # of a head: query and result stay in registers
CHAINS = 2  # sums of values that run side by side
LOG2E = math.log2(math.e)


def row_function(kernel: Attention) -> str | None:
    """The function for one query of a kernel, written if it is not there; None if blocks must serve."""
    spec, lanes = kernel.spec, kernel.lanes
    dense = all(a is None or a.column == 1 for a in (spec.q, spec.k, spec.v, spec.o, spec.mask))
    whole = spec.depth % lanes == 0 and spec.value_depth % lanes == 0
    if not dense or not whole or max(spec.depth, spec.value_depth) > MOST_VECTORS * lanes:
        return None
    name = f"{kernel.name}.row"
    if not kernel.module.defines(name):
        operands = [("ptr", operand) for operand in (*"qkvo", "mask")]
        pointers = [("ptr", "args"), ("ptr noalias", "scratch"), *operands]
        fn = kernel.module.function(name, [*pointers, ("i64", "query")], internal=True, noinline=True)
        _Row(kernel, fn).emit()
    return name


class _Row:
    """One query: running maximum, sum of weights per lane, and chains of sums of values."""

    def __init__(self, kernel: Attention, fn: Function) -> None:
        self.kernel, self.fn, self.spec = kernel, fn, kernel.spec
        self.lanes, self.type = kernel.lanes, kernel.type
        _, self.weights, self.q, self.k, self.v, self.o, self.mask, self.query = fn.args
        self.parts = self.spec.depth // self.lanes
        self.value_parts = self.spec.value_depth // self.lanes
        self.adds = self.spec.mask_kind == "add"  # then log2 e comes after the mask

    def emit(self) -> None:
        fn, spec = self.fn, self.spec
        factor = constant(self.type, spec.scale * (1.0 if self.adds else LOG2E))
        self.q_parts = [fn.fmul(self.vector(self.q, j), factor) for j in range(self.parts)]
        low, self.high = self.range()
        whole = fn.add(low, fn.mul(fn.sdiv(fn.smax(fn.sub(self.high, low), 0), self.lanes), self.lanes))
        zero, least = constant(self.type, 0.0), constant(self.type, -math.inf)
        start = [least, zero, *[zero] * (CHAINS * self.value_parts)]
        carried = fn.loop(low, whole, self.lanes, start, lambda k0, now: self.tile(k0, now, self.inside))
        rest = fn.cmp("slt", whole, self.high)
        carried = fn.if_value(rest, lambda: self.tile(whole, carried, self.at_end), lambda: carried)
        self.write(carried[1], carried[2:])

    def vector(self, base: Value, j: int) -> Value:
        element = self.kernel.element
        place = self.fn.gep(base, self.lanes * j, element)
        return self.fn.fpext(self.fn.load(vector(element, self.lanes), place), "float")

    def range(self) -> tuple[Int, Int]:
        """Keys that the query sees: from, to."""
        fn, spec, table = self.fn, self.spec, self.kernel.table
        high, low = table.dim(fn, spec.keys), 0  # type: Int, Int
        position = fn.add(self.query, table.dim(fn, spec.offset))
        ahead = 0 if spec.causal else spec.right
        if ahead >= 0:
            high = fn.smin(high, fn.add(position, ahead + 1))
        if spec.left >= 0:
            low = fn.smax(fn.sub(position, spec.left), 0)
        return low, high

    def inside(self, base: Value, k0: Int, i: int, step: Int) -> Value:
        """Row of key k0 + i."""
        fn = self.fn
        element = self.kernel.element
        return fn.gep(fn.gep(base, fn.mul(k0, step), element), fn.mul(step, i), element)

    def at_end(self, base: Value, k0: Int, i: int, step: Int) -> Value:
        """The same where the last keys are fewer than lanes: the last one stands in, its weights are 0."""
        fn = self.fn
        last = fn.sub(self.high, 1)
        return fn.gep(base, fn.mul(fn.smin(fn.add(k0, i), last), step), self.kernel.element)

    def tile(
        self, k0: Int, carried: Sequence[Value], row: Callable[[Value, Int, int, Int], Value]
    ) -> list[Value]:
        """Keys from k0 on, one per lane."""
        fn = self.fn
        top, total, *sums = carried
        there = fn.lanes(fn.sub(self.high, k0), self.lanes) if row == self.at_end else None
        scores = self.masked(self.scores(k0, row), k0, there)
        if there is not None:
            scores = fn.select(there, scores, constant(self.type, -math.inf))
        new_top = fn.fmax(top, fn.splat(fn.reduce(fn.fmax, scores), self.lanes))
        unseen = fn.fcmp("oeq", new_top, constant(self.type, -math.inf))
        base = fn.select(unseen, constant(self.type, 0.0), new_top)
        alpha, p = self.power(fn.fsub(top, base)), self.power(fn.fsub(scores, base))
        fn.store(p, self.weights)
        sums = [fn.fmul(s, alpha) for s in sums]
        step = self.kernel.table.dim(fn, self.spec.v.row)
        for i in range(self.lanes):
            weight = fn.broadcast(fn.gep(self.weights, i, "float"), "float", self.lanes)
            start, at = row(self.v, k0, i, step), (i % CHAINS) * self.value_parts
            for j in range(self.value_parts):
                added = fn.fma(weight, self.vector(start, j), sums[at + j])
                if there is not None:  # 0 times what stands in may be NaN
                    added = fn.select(fn.cmp("slt", fn.add(k0, i), self.high), added, sums[at + j])
                sums[at + j] = added
        return [new_top, fn.fma(total, alpha, p), *sums]

    def scores(self, k0: Int, row: Callable[[Value, Int, int, Int], Value]) -> Value:
        """Products with a vector of keys: partial sums of each key are one vector, turned and added up."""
        fn = self.fn
        step = self.kernel.table.dim(fn, self.spec.k.row)
        partial = []
        for i in range(self.lanes):
            start = row(self.k, k0, i, step)
            acc = fn.fmul(self.q_parts[0], self.vector(start, 0))
            for j in range(1, self.parts):
                acc = fn.fma(self.q_parts[j], self.vector(start, j), acc)
            partial.append(acc)
        rows = fn.transpose(partial)
        while len(rows) > 1:
            rows = [fn.fadd(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return rows[0]

    def masked(self, scores: Value, k0: Int, there: Value | None) -> Value:
        """Scores with the mask of their keys; `there` are the lanes that have a key, None for all."""
        fn = self.fn
        if self.spec.mask is None:
            return scores
        element = "float" if self.adds else "i8"
        type_, place = vector(element, self.lanes), fn.gep(self.mask, k0, element)
        value = fn.load(type_, place) if there is None else fn.masked_load(type_, place, there)
        if self.adds:
            return fn.fadd(scores, value)
        seen = fn.value(fn.cmp("ne", value, constant(value.type, 0)))
        return fn.select(seen, scores, constant(self.type, -math.inf))

    def power(self, x: Value) -> Value:
        if self.adds:
            x = self.fn.fmul(x, constant(self.type, LOG2E))
        return vmath.apply(self.fn, "exp2", x, inline=True)

    def write(self, total: Value, sums: Sequence[Value]) -> None:
        fn, n = self.fn, self.value_parts
        factor = self.kernel.factor(fn, fn.splat(fn.reduce_add(total), self.lanes))
        for j in range(n):
            value = sums[j]
            for chain in range(1, CHAINS):
                value = fn.fadd(value, sums[chain * n + j])
            place = fn.gep(self.o, self.lanes * j, self.kernel.o_element)
            fn.store(self.kernel.stored(fn, fn.fmul(value, factor)), place)
