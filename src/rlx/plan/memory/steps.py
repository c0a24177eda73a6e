"""A schedule in the abstract: which values every step reads and writes, and the bytes that are alive at each.

The searches for a smaller peak work on this: other orders (`rlx.plan.memory.reorder`), kernels that run again
(`rlx.plan.memory.recompute`). A value is a node and a version; a second run writes another version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from typing import TypeAlias

from rlx.records import dataclass

Value: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One run of a kernel. `overwrites` are values in whose place its result may be written if they end."""

    kernel: int
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    overwrites: tuple[Value, ...] = ()
    version: int = 0

    def reading(self, renamed: Mapping[Value, Value]) -> Step:
        """The same step on other versions of what it reads."""
        return replace(
            self,
            reads=tuple(renamed.get(v, v) for v in self.reads),
            overwrites=tuple(renamed.get(v, v) for v in self.overwrites),
        )


@dataclass(frozen=True)
class Steps:
    """Steps in order, and what their values take.

    `sizes` are aligned bytes by node (values outside the arena have none), `work` bytes that a kernel needs
    besides while it runs, `kept` nodes whose value is alive to the end, `always` those alive all the time.
    `after` maps a kernel to kernels that must run before it though it does not read them.

    >>> a, b, c = Step(1, (), ((1, 0),)), Step(2, ((1, 0),), ((2, 0),), ((1, 0),)), Step(3, ((2, 0),))
    >>> Steps((a, b, c), {1: 64, 2: 64}).live_bytes()
    [64, 64, 64]
    """

    steps: tuple[Step, ...]
    sizes: Mapping[int, int]
    work: Mapping[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()
    after: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def with_steps(self, steps: Sequence[Step]) -> Steps:
        return replace(self, steps=tuple(steps))

    def without_idle(self) -> Steps:
        """The steps whose results someone reads, or the caller gets."""
        read: set[Value] = set()
        steps: list[Step] = []
        for step in reversed(self.steps):
            if not step.writes or any(v in read or (v[0] in self.kept and v[1] == 0) for v in step.writes):
                steps.append(step)
                read.update(step.reads)
        return self.with_steps(steps[::-1])

    def spans(self) -> dict[Value, tuple[int, int]]:
        """First and last step of every value that has room in the arena."""
        out: dict[Value, tuple[int, int]] = {}
        last = len(self.steps) - 1
        for i, step in enumerate(self.steps):
            for value in step.writes:
                if value[0] in self.sizes:
                    out[value] = (i, last if value[0] in self.kept and not value[1] else i)
            for value in step.reads:
                if value in out:
                    out[value] = (out[value][0], max(out[value][1], i))
        return {v: (0, last) if v[0] in self.always and v[1] == 0 else span for v, span in out.items()}

    def shared(self, spans: Mapping[Value, tuple[int, int]]) -> dict[Value, Value]:
        """value -> the dying value in whose place it is written."""
        out: dict[Value, Value] = {}
        for i, step in enumerate(self.steps):
            if len(step.writes) != 1 or spans.get(step.writes[0], (-1,))[0] != i:
                continue
            for value in step.overwrites:
                if value in spans and spans[value][1] == i:
                    out[step.writes[0]] = value
                    break
        return out

    def live_bytes(self) -> list[int]:
        """Bytes alive at every step."""
        change = [0] * (len(self.steps) + 2)
        spans = self.spans()
        shared = self.shared(spans)
        for value, (first, last) in spans.items():
            start = first + (value in shared)  # the step before it is the other value's
            if start <= last:
                change[start] += self.sizes[value[0]]
                change[last + 1] -= self.sizes[value[0]]
        live = list(accumulate(change))[: len(self.steps)]
        return [n + self.work.get(s.kernel, 0) for n, s in zip(live, self.steps, strict=True)]

    def peak(self) -> int:
        return self.fullness()[0]

    def fullness(self) -> tuple[int, int]:
        """The most bytes alive at once, and at how many steps: what searches make smaller."""
        live = self.live_bytes()
        top = max(live, default=0)
        return top, live.count(top)

    def floor(self) -> int:
        """What some step needs for itself alone, in any order and however often kernels run."""
        least = 0
        for step in self.steps:
            values = {v for v in (*step.reads, *step.writes) if v[0] in self.sizes}
            in_place = max((self.sizes[v[0]] for v in step.overwrites if v[0] in self.sizes), default=0)
            needed = sum(self.sizes[v[0]] for v in values) + self.work.get(step.kernel, 0) - in_place
            least = max(least, needed)
        return least
