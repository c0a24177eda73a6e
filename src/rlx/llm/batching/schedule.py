"""Which tokens of which runs a step computes, and in which pages their keys and values go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from rlx.llm.batching.pages import PAGE, Pool, Prefix, PrefixTree, pages_for
from rlx.llm.batching.sequence import Run
from rlx.records import dataclass

Part = tuple[Run, int, int, Sequence[int], Sequence[int]]
"""A run, its first token of a step, the one after the last, and which of these are wanted, and pooled."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of a step: some of each run, all in one row."""

    parts: tuple[tuple[Run, int], ...]

    def inputs(self, table: np.ndarray, encoder: bool = False) -> dict[str, object]:
        """What the program takes; that of an encoder has no tokens `wanted`, but lengths of texts."""
        arrays = self.arrays(
            [(run, run.computed, run.computed + n, run.wanted(n), run.pooled(n)) for run, n in self.parts]
        )
        found = self.placed(arrays, table)
        if encoder:
            del found["answers"], found["wanted"]
            counts = [count for _, count in self.parts]
            found["lengths"] = np.repeat(counts, counts)
        return found

    @staticmethod
    def arrays(parts: Sequence[Part]) -> dict[str, np.ndarray]:
        """Tokens with their positions and slots, and those of them that are wanted, of parts of runs."""
        tokens: list[int] = []
        at: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        pooled: list[int] = []
        for run, start, end, own, features in parts:
            first = len(tokens)
            tokens += run.ahead(start, end)
            at += range(start, end)
            slots += [run.slot] * (end - start)
            wanted += [first + i for i in own]
            pooled += [first + i for i in features]
        named = {"tokens": tokens, "at": at, "slots": slots, "wanted": wanted, "pooled": pooled}
        return {name: np.array(values, np.int64) for name, values in named.items()}

    @staticmethod
    def placed(arrays: dict[str, np.ndarray], table: np.ndarray) -> dict[str, object]:
        """The same with the places of the tokens in the pool, and all sizes."""
        pages = table[arrays["slots"], arrays["at"] // PAGE]
        places = pages * PAGE + arrays["at"] % PAGE
        named = (("new", "tokens"), ("answers", "wanted"), ("features", "pooled"))
        sizes = {size: len(arrays[name]) for size, name in named}
        return {**sizes, **arrays, "places": places, "table": table}


class Scheduler:
    """Slots, pages, and the runs that have or want them; one thread uses it.

    Runs get slots in the order in which they came. Where pages run out, those go first that no run uses, then
    those of the run that came last: it waits, and is computed again later.
    """

    def __init__(self, pages: int, slots: int, longest: int, chunk: int) -> None:
        self.chunk = chunk
        self.pool = Pool(pages)
        self.tree = PrefixTree(self.pool)
        self.table = np.zeros((slots, pages_for(longest)), np.int64)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.running: list[Run] = []
        self.waiting: deque[Run] = deque()
        self.prefix_hits = self.prefix_tokens = self.preemptions = 0
        self.drafted = np.zeros(pages, np.int64)
        """Tokens of each page that a draft has computed."""

    # -- who runs

    def admit(self) -> None:
        """Give slots to runs that wait, as long as there are pages for their tokens."""
        while self.waiting and self.free_slots:
            run = self.waiting[0]
            if self.running and (run.suspect or self.running[0].suspect):
                return  # a suspect runs alone
            nodes = self.tree.find(run.tokens, len(run.tokens) - 1) if run.uses_prefixes else []
            self.tree.hold(nodes)
            needed = run.pages_at_first - len(nodes) + len(self.running)  # the others grow, too
            if self.running and needed > self.tree.available:
                self.tree.release(nodes)
                return
            self.waiting.popleft()
            self._start(run, nodes)

    def _start(self, run: Run, nodes: list[Prefix]) -> None:
        """A slot for a run, whose first pages are computed already."""
        run.slot, run.nodes, run.computed = self.free_slots.pop(), nodes, PAGE * len(nodes)
        run.pages = [node.page for node in nodes]
        self.table[run.slot, : len(nodes)] = run.pages
        self.running.append(run)
        if nodes:
            self.prefix_hits += 1
            self.prefix_tokens += run.computed
        run.started(run.computed)

    def leave(self, run: Run) -> None:
        """Take slot and pages from a run."""
        if run.slot < 0:
            return
        self.running.remove(run)
        self.free_slots.append(run.slot)
        for page in run.pages[len(run.nodes) :]:
            self.pool.give(page)
        self.tree.release(run.nodes)
        run.slot, run.computed, run.pages, run.nodes, run.proposals = -1, 0, [], [], []

    def put_back(self, run: Run) -> None:
        """A run waits again, before those that came later."""
        self.leave(run)
        self.waiting.appendleft(run)

    # -- what a step computes

    def batch(self) -> Batch:
        """Tokens for the next step: one of each run that generates, then parts of prompts, oldest first."""
        chosen: dict[Run, int] = {}
        generating = [run for run in self.running if run.left == 1]
        reading = [run for run in self.running if run.left > 1]
        room = max(self.chunk - len(generating), 1)
        for run in (*generating, *reading):
            if run.proposals and not self.grow(run, run.computed + 1 + len(run.proposals)):
                run.proposals = []  # nobody has to leave for them
            count = 1 + len(run.proposals) if run.left == 1 else min(run.left, room)
            if run.slot < 0 or count == 0 or (run.whole and count < run.left):
                continue
            if self._make_room(run, count, chosen):
                chosen[run] = count
                room -= count if run.left > 1 else 0
        return Batch(tuple(chosen.items()))

    def grow(self, run: Run, count: int) -> bool:
        """Pages for so many tokens of a run, as far as there are any that nobody uses; whether there were."""
        while len(run.pages) < pages_for(count):
            page = self.tree.take()
            if page is None:
                return False
            self.table[run.slot, len(run.pages)] = page
            self.drafted[page] = 0
            run.pages.append(page)
        return True

    def _make_room(self, run: Run, count: int, chosen: dict[Run, int]) -> bool:
        """Pages for the next tokens of a run. Others may have to leave; False if it had to do so itself."""
        while not self.grow(run, run.computed + count):
            last = self.running[-1]
            self.preemptions += 1
            self.put_back(last)
            chosen.pop(last, None)
            if last is run:
                return False
        return True

    def advance(self, run: Run, count: int) -> None:
        """Tokens of a run were computed; others may use the pages that are full now."""
        run.computed += count
        for i in run.new_full_pages():
            tokens = run.tokens[i * PAGE : (i + 1) * PAGE]
            node = self.tree.add(run.nodes[-1] if run.nodes else None, tokens, run.pages[i])
            run.nodes.append(node)
            run.pages[i] = self.table[run.slot, i] = node.page

    def checked(self, run: Run, accepted: int) -> None:
        """So many of the proposals of a run were right. What a draft has computed beyond them is wrong."""
        self.advance(run, accepted)
        run.proposals = []
        for i in range(run.computed // PAGE, len(run.pages)):
            own = self.drafted[run.pages[i]]
            self.drafted[run.pages[i]] = min(own, max(run.computed - i * PAGE, 0))

    def forget(self) -> None:
        """Nothing is computed any more: what the pages had is lost."""
        for run in reversed(self.running[:]):
            self.put_back(run)
        self.tree.clear()
