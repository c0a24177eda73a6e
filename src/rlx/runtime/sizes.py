"""Sizes that change from run to run, such as the tokens in a cache: memory is planned for the largest once.

A size input (`g.size`) is an input without elements, whose first dim is a symbol with a bound; an op like
`nonzero` finds a size with a bound in its data. Where nothing but sizes of kernels depends on the symbol,
every value gets room for the bound; a run at another size stores a few words into the argument tables and
plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlx.codegen.cpu.kernels import KernelSet
from rlx.ir.bind import check_constraints, size_symbol
from rlx.ir.dim import (
    Dim,
    compile_dims,
    evaluate,
    known_le,
    never_falls,
    substitute,
    sym,
    symbols,
    upper_bound,
)
from rlx.ir.symbols import found_by_data
from rlx.plan.lir import LirModule

Evaluate = Callable[[Sequence[int]], tuple[int, ...]]


class Sizes:
    """Which symbols need no new plan, how much room they get, and what guards speak of them."""

    def __init__(self, lir: LirModule, kernels: KernelSet) -> None:
        graph = lir.outline
        self.symbols = graph.symbols()
        bounds: dict[str, Dim | None] = {}
        for node in graph.inputs:
            found = size_symbol(node.tensor)
            if found is not None:
                bounds[found.name] = found.max
        bounds |= found_by_data(graph)
        self.room: dict[str, Dim] = {}  # the most that each can be, in terms of sizes that are planned for
        for name, most in bounds.items():
            if most is None or not all(never_falls(most, s) for s in self.room):
                continue
            most = substitute(most, self.room)
            if _movable(name, most, lir, kernels):
                self.room[name] = most
        self._fixed = {name: most for name, most in self.room.items() if isinstance(most, int)}
        self.guards = [c for c in lir.planner.guards if self.moves(c.lhs) or self.moves(c.rhs)]
        self._known: dict[tuple[Dim, ...], Evaluate] = {}

    def room_at(self, binding: Mapping[str, int]) -> dict[str, int]:
        """How large each of these sizes can be where the others are those of a binding."""
        if len(self._fixed) == len(self.room):
            return self._fixed
        return {name: evaluate(most, binding) for name, most in self.room.items()}

    def moves(self, d: Dim) -> bool:
        """Whether a size changes with the symbols that need no new plan."""
        return not isinstance(d, int) and any(s in self.room for s in symbols(d))

    def check(self, binding: Mapping[str, int]) -> None:
        """Guards at the sizes in force; the plan has not seen them."""
        check_constraints(self.guards, binding)

    def function(self, dims: Sequence[Dim]) -> Evaluate:
        """All of these at once, from values of all symbols in order."""
        key = tuple(dims)
        if key not in self._known:
            self._known[key] = compile_dims(key, self.symbols)
        return self._known[key]


def _movable(name: str, most: Dim, lir: LirModule, kernels: KernelSet) -> bool:
    """Whether memory for the largest size serves all: nothing grows when the size falls, and only
    addresses inside the program's own memory move."""
    planner = lir.planner
    bounded = {name: sym(name, 0, upper_bound(most))}

    def grows(d: Dim) -> bool:
        if never_falls(d, name):
            return True
        return known_le(substitute(d, bounded), substitute(d, {name: most})) is True

    for stored in planner.stored:
        if name in symbols(stored.size):
            kept = stored.space in ("weight", "state", "ring")
            if kept or (stored.space == "activation" and not grows(stored.size)):
                return False
    inside = {s.node for s in planner.stored if s.space in ("activation", "weight")}
    if any(name in symbols(v.offset) and v.root not in inside for v in planner.aliases.values()):
        return False
    if any(name in body.symbols for inner in planner.inner.values() for body in inner.bodies):
        return False
    if any(i.cut is not None and name in symbols(i.cut.size) for i in planner.inner.values()):
        return False  # slices are laid out for the number of rows there is
    if any(name in symbols(d) for k in kernels.in_bodies() for d in (*k.dims, k.scratch_per_thread)):
        return False
    return all(grows(k.scratch_per_thread) for k in kernels.kernels.values())
