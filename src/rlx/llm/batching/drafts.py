"""Drafts of an engine: tokens that may follow each run, which a step checks together with the newest one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlx.llm.batching.pages import PAGE, pages_for
from rlx.llm.batching.schedule import Batch, Part, Scheduler
from rlx.llm.batching.sequence import Run
from rlx.llm.draft import PROPOSED, Lookup

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

MOST_PROPOSED = 16
"""Tokens of a step that are proposals, of all runs together: with many runs, steps are full without them."""


_Part = tuple[Run, int, int]
"""A run, its first token of a step, and how many there are of it."""


class Drafts(Protocol):
    """What proposes tokens for several runs at once."""

    def propose(self, runs: Sequence[Run], now: Scheduler, count: int) -> None:
        """Set the `proposals` of runs that have one token to compute, at most `count` for each."""


def propose(drafts: Drafts, now: Scheduler, longest: int) -> int:
    """Let drafts propose for the runs that generate; how many tokens."""
    runs = [run for run in now.running if run.left == 1 and run.room > 1]
    count = min(PROPOSED, MOST_PROPOSED // max(len(runs), 1))
    if not runs or not count:
        return 0
    drafts.propose(runs, now, count)
    for run in runs:  # the token that is chosen after the last one has a place, too
        del run.proposals[max(min(run.room - 1, longest - len(run.tokens)), 0) :]
    return sum(len(run.proposals) for run in runs)


class LookupDrafts:
    """By what was in the text before."""

    def __init__(self) -> None:
        self._lookup = Lookup()

    def propose(self, runs: Sequence[Run], now: Scheduler, count: int) -> None:
        for run in runs:
            run.proposals = self._lookup.propose(run.tokens, count)


class ModelDrafts:
    """By a small model. Its keys and values are in pages of the same numbers as those of the large one, so
    that who has a page has both; `Scheduler.drafted` says how many tokens of each page it has computed.
    """

    def __init__(
        self, program: CompiledProgram, pages: int, positions: int, most: int, vocabulary: int
    ) -> None:
        self._stream = program.stream(sizes={"pages": pages})
        self._positions, self._most, self._vocabulary = positions, most, vocabulary

    def propose(self, runs: Sequence[Run], now: Scheduler, count: int) -> None:
        """One step for each of `count` tokens; the first also computes what the model has not seen yet."""
        late: list[_Part] = []  # runs of which too much is missing: they get a part of it
        guessing: list[_Part] = []
        room = self._most
        for run in runs:
            if not self._knows(run) or len(run.tokens) + count > self._positions:
                continue
            seen = self._seen(run, now)
            missing = min(len(run.tokens) - seen, room)
            room -= missing
            if seen + missing < len(run.tokens):
                late += [(run, seen, missing)] * (missing > 0)
            elif now.grow(run, len(run.tokens) + count - 1):
                guessing.append((run, seen, missing))
        for _ in range(count):
            if not guessing and not late:
                return
            for (run, _, _), row in zip(guessing, self._step(guessing, late, now), strict=True):
                run.proposals.append(int(np.argmax(row[: self._vocabulary])))
            late, guessing = [], [(run, start + new, 1) for run, start, new in guessing]

    def _knows(self, run: Run) -> bool:
        """Whether its table has all tokens: those of padded tables need not be there."""
        return max(run.tokens) < self._vocabulary

    def _seen(self, run: Run, now: Scheduler) -> int:
        """How many tokens at the start the draft has computed; at least one is left to compute."""
        seen = 0
        for page in run.pages:
            seen += int(now.drafted[page])
            if now.drafted[page] < PAGE:
                break
        return min(seen, len(run.tokens) - 1)

    def _step(self, guessing: list[_Part], late: list[_Part], now: Scheduler) -> np.ndarray:
        """Compute tokens of runs; the logits of the last token of each that is guessed."""
        parts: list[Part] = [(run, start, start + new, [new - 1], []) for run, start, new in guessing]
        parts += [(run, start, start + new, [], []) for run, start, new in late]
        logits: np.ndarray = self._stream.step(Batch.placed(Batch.arrays(parts), self._own(now.table)))[
            "logits"
        ]
        for run, start, end, _, _ in parts:
            for at in range(start // PAGE, pages_for(end)):
                now.drafted[run.pages[at]] = min(end - at * PAGE, PAGE)
        return logits

    def _own(self, table: np.ndarray) -> np.ndarray:
        """The table of pages, as far as the context of the draft reaches."""
        return np.ascontiguousarray(table[:, : pages_for(self._positions)])
