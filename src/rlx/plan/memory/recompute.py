"""Kernels that run again, so that their results need not wait in memory for late readers.

Typical of training: activations of the forward pass are alive until the backward pass reads them. A value
that is alive at the fullest step but not used there is given up after its last early reader and computed
again before its first late one. Of all such values the one is taken that frees most bytes per added time;
what it is computed from is kept alive, or computed again too, whichever is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlx.plan.memory.steps import Step, Steps, Value
from rlx.records import dataclass

MOST_AGAIN = 12  # kernels that run again for one value
MOST_LOOKED_AT = 24  # values tried per round, the largest


@dataclass(frozen=True)
class Again:
    """One decision: the value, the kernels that run again for it, and their time."""

    value: int
    kernels: tuple[int, ...]
    picoseconds: int


def recompute_once(program: Steps, costs: Mapping[int, int]) -> tuple[Steps, Again] | None:
    """The steps in which one more value is computed again; None if no choice lowers the peak.

    `costs` are picoseconds by kernel; a kernel without one must not run twice.

    >>> def step(i, *reads):
    ...     return Step(i, tuple((r, 0) for r in reads), ((i, 0),))
    >>> sizes = {0: 100, 1: 100, 2: 10, 3: 10}
    >>> early = Steps((step(0), step(1, 0), step(2, 1), step(3, 2, 0)), sizes, kept=frozenset({3}))
    >>> early.peak()
    210
    >>> made, again = recompute_once(early, {0: 5})
    >>> [(s.kernel, s.version) for s in made.steps], made.peak(), again.kernels
    ([(0, 0), (1, 0), (2, 0), (0, 1), (3, 0)], 200, (0,))
    """
    live, now = program.live_bytes(), program.fullness()
    top = now[0]
    best: tuple[tuple[float, int, int], Steps, Again] | None = None
    for value, kernels, made in _choices(program, live.index(top) if live else 0, costs):
        after = made.fullness()
        if after >= now:
            continue
        time = sum(costs[k] for k in kernels)
        # A plateau that gets shorter is a gain too, though a small one.
        freed = (top - after[0]) or 1
        rank = (-freed / max(time, 1), after[0], value[0])
        if best is None or rank < best[0]:
            best = rank, made, Again(value[0], kernels, time)
    return None if best is None else best[1:]


def _choices(
    program: Steps, peak: int, costs: Mapping[int, int]
) -> Iterator[tuple[Value, tuple[int, ...], Steps]]:
    """Values that could be given up at the fullest step, the kernels that run again, and the steps then."""
    spans = program.spans()
    touched = {*program.steps[peak].reads, *program.steps[peak].writes} if program.steps else set()
    waiting = [
        v
        for v, (first, last) in spans.items()
        if first < peak < last and v not in touched and v[0] not in program.kept | program.always
    ]
    waiting.sort(key=lambda v: (-program.sizes[v[0]], v))
    writer = {v: i for i, s in enumerate(program.steps) for v in s.writes}
    for value in waiting[:MOST_LOOKED_AT]:
        late = [i for i in range(peak + 1, len(program.steps)) if value in program.steps[i].reads]
        seen: set[tuple[int, ...]] = set()
        for deep in (False, True):
            again = _needed(program, value, late[0], writer, spans, deep, costs)
            if again is not None and tuple(again) not in seen:
                seen.add(tuple(again))
                kernels = tuple(program.steps[i].kernel for i in again)
                yield value, kernels, _inserted(program, again, late[0])


def _needed(
    program: Steps,
    value: Value,
    at: int,
    writer: Mapping[Value, int],
    spans: Mapping[Value, tuple[int, int]],
    deep: bool,
    costs: Mapping[int, int],
) -> list[int] | None:
    """Steps that run again before step `at` for a value; with `deep`, also for what has ended by then."""
    found: set[int] = set()
    todo = [writer[value]]
    while todo:
        i = todo.pop()
        if i in found:
            continue
        step = program.steps[i]
        if step.kernel not in costs or len(found) == MOST_AGAIN:
            return None
        found.add(i)
        ended = (v for v in step.reads if v in spans and spans[v][1] < at)
        if deep:
            todo += [writer[v] for v in ended]
    return sorted(found)


def _inserted(program: Steps, again: list[int], at: int) -> Steps:
    """Run some steps a second time before step `at`; later readers read what they write."""
    version = 1 + max((s.version for s in program.steps), default=0)
    renamed: dict[Value, Value] = {}
    copies = []
    for i in again:
        step = program.steps[i].reading(renamed)
        writes = tuple((node, version) for node, _ in step.writes)
        renamed |= dict(zip(program.steps[i].writes, writes, strict=True))
        copies.append(Step(step.kernel, step.reads, writes, step.overwrites, version))
    later = [s.reading(renamed) for s in program.steps[at:]]
    return program.with_steps([*program.steps[:at], *copies, *later]).without_idle()
