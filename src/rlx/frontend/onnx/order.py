"""The order of a model's nodes: what a node reads comes before it, whatever order the file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from rlx.errors import ModelImportError
from rlx.frontend.onnx.proto import label_of, names_read, subgraphs

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


MOST_NAMED = 8
"""How many nodes of a cycle a message names."""


def in_order(nodes: Sequence[NodeProto], is_known: Callable[[str], bool]) -> list[NodeProto]:
    """Nodes so that each comes after those whose results it reads. Those that can keep their place do.

    `is_known` says which names have a value before any of the nodes runs.
    """
    makers: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name not in makers and not is_known(name):
                makers[name] = i
    needs = [{makers[name] for name in _reads(node) if name in makers} for node in nodes]
    if all(at < i for i, found in enumerate(needs) for at in found):
        return list(nodes)
    readers: dict[int, list[int]] = {}
    for i, found in enumerate(needs):
        for at in found:
            readers.setdefault(at, []).append(i)
    missing = {i: len(found) for i, found in enumerate(needs)}
    ready = [i for i, count in missing.items() if not count]
    heapify(ready)
    out: list[NodeProto] = []
    while ready:
        i = heappop(ready)
        del missing[i]
        out.append(nodes[i])
        for reader in readers.get(i, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    if missing:
        cycle = _cycle(missing, needs)
        shown = ", ".join(label_of(nodes[i]) for i in cycle[:MOST_NAMED])
        more = f" and {len(cycle) - MOST_NAMED} more" if len(cycle) > MOST_NAMED else ""
        raise ModelImportError(f"these nodes read each other's results in a circle: {shown}{more}")
    return out


def _reads(node: NodeProto) -> set[str]:
    """Names that a node reads, by itself or in its sub-graphs, which have their own names."""
    found = set(node.input)
    for inner in subgraphs(node):
        found |= _free_names(inner)
    return found


def _free_names(graph: GraphProto) -> set[str]:
    """Names that a sub-graph takes from around it."""
    own = {info.name for info in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    own |= {name for node in graph.node for name in node.output}
    return (names_read(graph) | {info.name for info in graph.output}) - own


def _cycle(left: Mapping[int, int], needs: Sequence[set[int]]) -> list[int]:
    """Nodes of one circle among those that never became ready."""
    at = min(left)
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(seen)
        at = min(i for i in needs[at] if i in left)
    return [i for i, place in seen.items() if place >= seen[at]]
