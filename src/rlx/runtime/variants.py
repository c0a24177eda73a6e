"""Variants of a program, for sizes that break what it assumes about its symbols.

`f32[N,3] + f32[M,3]` is compiled for N = M. A run with N = 1 and M = 3 takes its own program in which N is 1,
and so broadcasts. A row that is mirrored at its end is taken to be longer than what is added; a run with a
shorter one takes a program for its size. A variant is compiled when a run first needs it, from the graph that
the user gave, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlx.errors import RlxError
from rlx.ir.dim import evaluate, symbols
from rlx.ir.graph import Graph
from rlx.ir.resize import with_sizes
from rlx.kernel.control import broken_guard
from rlx.runtime.native_code import native_code
from rlx.runtime.store.origin import Origin
from rlx.target.cpu import resolve

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

MOST_VARIANTS = 16
"""Of one program; the least recently used one is dropped."""
MOST_ROUTES = 256
"""Sizes whose variant is remembered."""

Sizes = tuple[tuple[str, int], ...]


class Variants:
    """The variants of one program, by the sizes that are fixed in them; `make` is the class of programs."""

    def __init__(self, make: Callable[..., CompiledProgram]) -> None:
        self._make = make
        self.made: dict[Sizes, CompiledProgram] = {}
        self._graphs: dict[Sizes, Graph | None] = {}
        self._routes: dict[Sizes, Sizes | None] = {}
        self._lock = threading.Lock()

    def known(self, binding: Mapping[str, int]) -> CompiledProgram | None:
        """The variant that runs of these sizes have taken before."""
        fixed = self._routes.get(tuple(sorted(binding.items())))
        return None if fixed is None else self.made.get(fixed)

    def find(self, program: CompiledProgram, binding: Mapping[str, int]) -> CompiledProgram | None:
        """The variant whose guards these sizes meet, compiled now if it is new; None if there is none."""
        if program.origin is None:
            return None
        at = tuple(sorted(binding.items()))
        with self._lock:
            if at not in self._routes:
                if len(self._routes) >= MOST_ROUTES:
                    self._routes.clear()
                self._routes[at] = self._fixed(program, binding)
            fixed = self._routes[at]
            if fixed is None:
                return None
            made = self.made.pop(fixed, None) or self._compiled(program, fixed)
            self.made[fixed] = made
            while len(self.made) > MOST_VARIANTS:
                self.made.pop(next(iter(self.made)))
            return made

    def _fixed(self, program: CompiledProgram, binding: Mapping[str, int]) -> Sizes | None:
        """Sizes that must be numbers for the guards to hold; None if that does not help."""
        fixed: dict[str, int] = {}
        graph: Graph | None = program.graph
        while graph is not None:
            broken = broken_guard(graph, binding)
            if broken is None:
                return tuple(sorted(fixed.items())) or None
            sides = [broken.lhs, broken.rhs]
            if broken.kind == "eq":
                sides = [d for d in sides if evaluate(d, binding) == 1]  # which stretches next to others
            named = {s: binding[s] for d in sides for s in symbols(d)}
            if not named.keys() - fixed.keys():
                return None
            fixed |= named
            graph = self._graph(program, tuple(sorted(fixed.items())))
        return None

    def _graph(self, program: CompiledProgram, fixed: Sizes) -> Graph | None:
        """The graph with these sizes; None if an op refuses them."""
        assert program.origin is not None
        if fixed not in self._graphs:
            if len(self._graphs) >= MOST_VARIANTS:
                self._graphs.clear()
            try:
                self._graphs[fixed] = with_sizes(program.origin.graph(), dict(fixed))
            except RlxError:
                self._graphs[fixed] = None
        return self._graphs[fixed]

    def _compiled(self, program: CompiledProgram, fixed: Sizes) -> CompiledProgram:
        assert program.origin is not None
        graph, plan = self._graph(program, fixed), program.origin.plan
        assert graph is not None
        graph.param_values |= program.stored_params
        lir = plan(graph, program.lir.target)
        kernels, code = native_code(lir, resolve(program.lir.target), True)
        return self._make(
            lir, kernels, code, program.threads, program.debug, origin=Origin(lambda: graph, plan)
        )
