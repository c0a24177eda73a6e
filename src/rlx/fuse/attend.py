"""Finds attention in a graph: contractions whose left operand is a softmax of the scores of another one.

Only candidates are found here, by who depends on whom; whether one really is attention is for
`rlx.kernel.attention` to say, which composes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.fuse.facts import Facts
from rlx.ir.graph import Node
from rlx.kernel.legality import same_space
from rlx.records import dataclass

MOST_BETWEEN = 24  # ops between the two contractions


@dataclass(frozen=True)
class Candidate:
    """Ops from the contraction that gives scores to the one that weighs values, both included.

    `generated` ones depend on nothing but sizes (positions, causal masks): they are computed in place.
    """

    first: int
    second: int
    nodes: tuple[int, ...]
    generated: tuple[int, ...]


def attention_candidates(facts: Facts) -> Iterator[Candidate]:
    """Every pair of contractions that may be attention, in order."""
    for node in facts.kernels:
        if facts.kind(node) != "contract":
            continue
        weights = facts.io.root(node.operands[0])
        if weights.id in facts.kept or facts.kind(weights) not in ("map", "reduce"):
            continue
        found = _between(facts, weights)
        if found is None:
            continue
        ops, sources = found
        for source in sources:
            first = facts.graph.nodes[source]
            if facts.readers[source] and _same_rows(first, weights):
                path = _depending(facts, ops, source)
                yield Candidate(source, node.id, (source, *path, node.id), _generated(facts, ops, path))


def _same_rows(scores: Node, weights: Node) -> bool:
    """Scores and weights have the same axes, or as many elements through a view."""
    if same_space(scores.shape, weights.shape):
        return True
    return scores.rank > 2 and weights.rank > 2 and same_space(scores.shape[-2:], weights.shape[-2:])


def _between(facts: Facts, weights: Node) -> tuple[list[int], list[int]] | None:
    """Elementwise ops and reductions that lead to the weights, and contractions that feed them."""
    ops: set[int] = set()
    sources: set[int] = set()
    stack = [weights.id]
    while stack:
        i = stack.pop()
        node = facts.graph.nodes[i]
        if i in ops or i in sources or i not in facts.readers:
            continue
        kind = facts.kind(node)
        if kind == "contract":
            sources.add(i)
        elif kind in ("map", "reduce"):
            ops.add(i)
            if len(ops) > MOST_BETWEEN:
                return None
            stack.extend(a.root for a in facts.accesses(node))
    if not any(facts.kind(facts.graph.nodes[i]) == "reduce" for i in ops):
        return None
    return sorted(ops), sorted(sources, reverse=True)


def _depending(facts: Facts, ops: list[int], source: int) -> tuple[int, ...]:
    """Ops that depend on the scores."""
    found = {source}
    for i in ops:
        if any(a.root in found for a in facts.accesses(facts.graph.nodes[i])):
            found.add(i)
    return tuple(i for i in ops if i in found)


def _generated(facts: Facts, ops: list[int], path: tuple[int, ...]) -> tuple[int, ...]:
    """Ops next to the path that read only each other."""
    made: set[int] = set()
    for i in ops:
        if i not in path:
            accesses = facts.accesses(facts.graph.nodes[i])
            if all(a.root in made for a in accesses):
                made.add(i)
    wanted: set[int] = set()
    for i in reversed(ops):
        if i in path or i in wanted:
            wanted.update(a.root for a in facts.accesses(facts.graph.nodes[i]) if a.root in made)
    return tuple(sorted(wanted))
