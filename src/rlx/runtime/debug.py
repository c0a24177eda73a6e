"""Debug modes of native programs: kernels run one at a time, and each is looked at before the next starts.

`nan` names the first kernel that gives a NaN or an infinity. `poison` tracks which value every piece of the
arena holds. Memory is overwritten before a run and wherever a value ends. A kernel is stopped if it reads a
value that is not there, writes outside its results, or leaves elements of them unwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from rlx.errors import ConfigError, KernelError
from rlx.ir.graph import Node
from rlx.plan.lir import LirBufferSlot
from rlx.runtime.context import Context
from rlx.runtime.memory import POISON

FREE = -1
SMALLEST_CHECKED = 2  # bytes of a float whose poisoned pattern no computation gives

Describe: TypeAlias = Callable[[Node], str]


class Watch:
    """Looks at a run before and after each of its steps, which are the kernels of the schedule."""

    def __init__(self, context: Context, describe: Describe) -> None:
        self.context, self.describe = context, describe

    def before(self, number: int) -> None:
        """Step `number` is about to run."""

    def after(self, number: int) -> None:
        """Step `number` has run."""

    def moved(self, later: Context, done: int) -> Watch:
        """The watch of a run that goes on in another context, whose first `done` steps are behind it."""
        return type(self)(later, self.describe)

    def kernels(self, number: int) -> list[Node]:
        return [self.context.graph.nodes[id] for id in self.context.steps[number].nodes]

    def stored_results(self, kernel: Node) -> list[Node]:
        """Values that a kernel writes to memory."""
        return [r for r in self.context.graph.results(kernel) if self.context.stores(r.id)]

    def fault(self, kernel: Node, what: str) -> KernelError:
        return KernelError(f"kernel {self.describe(kernel)} {what}", kernel.where)


class FiniteWatch(Watch):
    """Stops at the first kernel whose result is not finite."""

    def after(self, number: int) -> None:
        for kernel in self.kernels(number):
            for result in self.stored_results(kernel):
                if result.dtype.is_float:
                    values = self.context.array(result)
                    if not np.isfinite(values.astype(np.float32)).all():
                        raise self.fault(kernel, "produced a NaN or infinity")


class PoisonWatch(Watch):
    """Knows which value owns every block of the arena; blocks that none owns hold poison and must keep it."""

    def __init__(self, context: Context, describe: Describe) -> None:
        super().__init__(context, describe)
        self.plan = context.plan
        self.block = self.plan.alignment
        context.arena.poison()
        self.owner = np.full(-(-context.arena.nbytes // self.block), FREE, np.int64)
        for node in context.graph.outputs.values():
            context.raw(node.id).fill(POISON)
        self.ending: dict[int, list[int]] = {}
        # Values of the arena; those that are in states are not tracked.
        self.life = {v: span for v, span in self.plan.lifetimes.items() if v in context.memory}
        for value, (_, last) in self.life.items():
            self.ending.setdefault(last, []).append(value)

    def moved(self, later: Context, done: int) -> Watch:
        """Values that were carried over are written already; all else is overwritten."""
        kept = {v: later.memory[v].copy() for v in self._alive(later, done)}
        outputs = {n.id: later.raw(n.id).copy() for n in later.graph.outputs.values()}
        made = PoisonWatch(later, self.describe)
        for value, data in kept.items():
            later.memory[value][:] = data
            made._blocks(value)[:] = value
        for value, data in outputs.items():
            later.raw(value)[:] = data
        return made

    def _alive(self, later: Context, done: int) -> list[int]:
        """Values that steps before `done` wrote and later ones read."""
        plan = later.plan
        alive = [v for v, (first, last) in plan.lifetimes.items() if first < done <= last]
        return [v for v in alive if v in later.memory and plan.assignments[v].space == "activation"]

    def before(self, number: int) -> None:
        self.context.scratch.poison()
        for kernel in self.kernels(number):
            self._check_workspace(kernel)
            for operand in kernel.operands:
                root = self.plan.root(operand.id)
                if root not in self.life:
                    continue
                there = self._blocks(root)
                wrong = there[there != root]
                if wrong.size:
                    found = int(wrong[0])
                    why = "is freed, or was never written" if found == FREE else f"%{found} has overwritten"
                    raise self.fault(kernel, f"reads %{root}, which {why}")

    def after(self, number: int) -> None:
        for kernel in self.kernels(number):
            for result in self.stored_results(kernel):
                if result.id in self.life:
                    self._enter(kernel, result.id)
                self._check_written(kernel, result)
            if kernel.id in self.plan.work:  # what bodies have computed ends with them
                self._bytes(self.plan.work[kernel.id].slot).fill(POISON)
        for value in self.ending.get(number, ()):
            blocks = self._blocks(value)
            if (blocks == value).all():  # else another value has taken its place
                self._room(value).fill(POISON)
                blocks[:] = FREE
        self._check_free(number)

    def _check_workspace(self, kernel: Node) -> None:
        """Bodies run in memory that no value owns."""
        if kernel.id in self.plan.work:
            slot = self.plan.work[kernel.id].slot
            first = slot.offset // self.block
            for other in np.unique(self.owner[first : first - (-slot.size // self.block)]):
                if other != FREE:
                    raise self.fault(kernel, f"has its workspace over %{other}, which is still needed")

    def _enter(self, kernel: Node, value: int) -> None:
        """A value begins: in free memory, or in the place of the operand that it takes over."""
        blocks = self._blocks(value)
        for other in np.unique(blocks):
            if other not in (FREE, value, self.plan.shared.get(value)):
                raise self.fault(kernel, f"writes %{value} over %{other}, which is still needed")
        blocks[:] = value

    def _check_written(self, kernel: Node, result: Node) -> None:
        """No element of a float result still is poison. Integers may be all ones by themselves."""
        size = result.dtype.itemsize
        if not result.dtype.is_float or size < SMALLEST_CHECKED:
            return
        words = self.context.raw(result.id).view(f"u{size}")
        left = int(np.count_nonzero(words == np.iinfo(words.dtype).max))
        if left:
            raise self.fault(kernel, f"did not write {left} of {words.size} elements of %{result.id}")

    def _check_free(self, number: int) -> None:
        """Memory that no value owns is as it was."""
        arena = self.context.arena.array
        whole = arena.size // self.block
        spoilt = (arena[: whole * self.block].reshape(whole, self.block) != POISON).any(axis=1)
        stray = np.flatnonzero(spoilt & (self.owner[:whole] == FREE))
        kernel = self.kernels(number)[0]
        if stray.size:
            raise self.fault(
                kernel, f"wrote at byte {int(stray[0]) * self.block} of the arena, which is free"
            )
        for result in self.stored_results(kernel):
            if result.id in self.life and self._owned(result.id):
                slot = self.plan.assignments[result.id]
                if (self._room(result.id)[slot.size :] != POISON).any():
                    raise self.fault(
                        kernel, f"wrote past the end of %{result.id}, which has {slot.size} bytes"
                    )

    def _owned(self, value: int) -> bool:
        return bool((self._blocks(value) == value).all())

    def _blocks(self, value: int) -> np.ndarray:
        slot = self.plan.assignments[value]
        first = slot.offset // self.block
        return self.owner[first : first - (-slot.size // self.block)]

    def _room(self, value: int) -> np.ndarray:
        """All bytes of a value's blocks."""
        return self._bytes(self.plan.assignments[value])

    def _bytes(self, slot: LirBufferSlot) -> np.ndarray:
        room = -(-slot.size // self.block) * self.block
        return self.context.arena.array[slot.offset : slot.offset + room]


WATCHES: dict[str, type[Watch]] = {"nan": FiniteWatch, "poison": PoisonWatch}


def check_mode(debug: str | None) -> str | None:
    """Refuse a debug mode that does not exist.

    >>> check_mode("poison")
    'poison'
    """
    if debug is not None and debug not in WATCHES:
        raise ConfigError(f"unknown debug mode {debug!r}; use 'nan' or 'poison'")
    return debug
