"""A wider search for an order of steps with a lower peak, for programs that miss their memory budget.

The heuristics of `rlx.plan.schedule` follow one path each. This search goes step by step too, but keeps the
best orders begun so far, and knows of results that are written in place. It counts looks and not time, so
that every machine finds the same order.
"""

from __future__ import annotations

from rlx.plan.memory.steps import Steps, Value

LOOKS = 20_000  # ready steps that are looked at in all
WIDEST = 64  # orders that are kept
NARROWEST = 2


class _State:
    """An order begun: the steps done as a set of bits, the reads that are left, bytes alive, peak so far."""

    __slots__ = ("done", "left", "level", "order", "peak")

    def __init__(
        self, done: int, order: tuple[int, ...], left: dict[Value, int], level: int, peak: int
    ) -> None:
        self.done, self.order, self.left, self.level, self.peak = done, order, left, level, peak


def reorder(program: Steps) -> Steps:
    """The order with the lowest peak that is found; the given one if none is better.

    Two branches that shrink are better run one after the other:

    >>> from rlx.plan.memory.steps import Step
    >>> def step(i, *reads):
    ...     return Step(i, tuple((r, 0) for r in reads), ((i, 0),))
    >>> given = Steps((step(0), step(1, 0), step(2, 0), step(3, 1), step(4, 2), step(5, 3, 4)),
    ...               {0: 8, 1: 1000, 2: 1000, 3: 8, 4: 8, 5: 8})
    >>> best = reorder(given)
    >>> [s.kernel for s in best.steps], best.peak(), given.peak()
    ([0, 1, 3, 2, 4, 5], 1016, 2008)
    """
    found = _Beam(program).run()
    if found is None:
        return program
    made = program.with_steps([program.steps[i] for i in found])
    return made if made.fullness() < program.fullness() else program


class _Beam:
    def __init__(self, program: Steps) -> None:
        self.program = program
        steps = program.steps
        writer = {v: i for i, s in enumerate(steps) for v in s.writes}
        self.needs = [0] * len(steps)  # bits of the steps that each must come after
        readers: dict[Value, int] = {}
        for i, s in enumerate(steps):
            for v in dict.fromkeys(s.reads):
                if v in writer:
                    self.needs[i] |= 1 << writer[v]
                    readers[v] = readers.get(v, 0) + 1
        runs: dict[int, int] = {}
        for i, s in enumerate(steps):
            runs[s.kernel] = runs.get(s.kernel, 0) | 1 << i
        for i, s in enumerate(steps):
            for earlier in program.after.get(s.kernel, ()):
                self.needs[i] |= runs.get(earlier, 0)
        self.readers = {v: n for v, n in readers.items() if v[0] in program.sizes}

    def run(self) -> list[int] | None:
        count = len(self.program.steps)
        if count < 3:
            return None
        states = [_State(0, (), dict(self.readers), 0, 0)]
        width = max(NARROWEST, min(WIDEST, LOOKS // (4 * count)))
        looks = 0
        for _ in range(count):
            following: dict[int, _State] = {}
            for state in states:
                for i in self._ready(state):
                    looks += 1
                    made = self._advance(state, i)
                    known = following.get(made.done)
                    if known is None or _rank(made) < _rank(known):
                        following[made.done] = made
            states = sorted(following.values(), key=_rank)[:width]
            if looks > LOOKS:
                width = NARROWEST
        return list(states[0].order) if states else None

    def _ready(self, state: _State) -> list[int]:
        done = state.done
        return [i for i, need in enumerate(self.needs) if not done >> i & 1 and need & ~done == 0]

    def _advance(self, state: _State, i: int) -> _State:
        program, step = self.program, self.program.steps[i]
        left = dict(state.left)
        ends = 0
        ended: list[Value] = []
        for v in dict.fromkeys(step.reads):
            if v in left:
                left[v] -= 1
                if left[v] == 0 and not self._stays(v):
                    ends += program.sizes[v[0]]
                    ended.append(v)
        begins = sum(program.sizes.get(v[0], 0) for v in step.writes)
        in_place = len(step.writes) == 1 and any(v in ended for v in step.overwrites)
        top = state.level + (0 if in_place else begins) + program.work.get(step.kernel, 0)
        unread = sum(
            program.sizes.get(v[0], 0) for v in step.writes if v not in self.readers and not self._stays(v)
        )
        level = state.level + begins - ends - unread
        return _State(state.done | 1 << i, (*state.order, i), left, level, max(state.peak, top))

    def _stays(self, v: Value) -> bool:
        return v[0] in self.program.kept or (v[0] in self.program.always and v[1] == 0)


def _rank(state: _State) -> tuple[int, int, tuple[int, ...]]:
    return state.peak, state.level, state.order
