"""Loops that append to a sequence at each step, as scripts write `ys.append(y)`: rows that are stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.frontend.onnx.proto import names_read, subgraphs
from rlx.frontend.onnx.value import Rows, Value
from rlx.ir.graph import Node

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


def without_appending(
    body: GraphProto, carried: Sequence[Value]
) -> tuple[GraphProto, list[Value], list[int]]:
    """The body with sequences that start empty and only grow by one element at their end as rows to stack
    instead of carries; the other carries; places of the sequences among all carries."""
    makers = {name: node for node in body.node for name in node.output}
    places = [k for k, v in enumerate(carried) if isinstance(v, list) and not v and _grows(body, makers, k)]
    if not places:
        return body, list(carried), []
    changed = type(body)()
    changed.CopyFrom(body)
    for k in reversed(places):
        grown = changed.output[1 + k].name
        element = makers[grown].input[1]
        del changed.input[2 + k], changed.output[1 + k]
        kept = [node for node in changed.node if grown not in node.output]
        del changed.node[:]
        changed.node.extend(kept)
        changed.output.add(name=element)
    return changed, [v for k, v in enumerate(carried) if k not in places], places


def _grows(body: GraphProto, makers: dict[str, NodeProto], k: int) -> bool:
    """Whether a step computes carry k by appending to it, and does nothing else with it."""
    before, after = body.input[2 + k].name, body.output[1 + k].name
    maker = makers.get(after)
    if maker is None or maker.op_type != "SequenceInsert" or [*maker.input][2:] not in ([], [""]):
        return False
    readers = [node for node in body.node if before in node.input or after in node.input]
    inner = [graph for node in body.node for graph in subgraphs(node)]
    inside = {name for graph in inner for name in (*names_read(graph), *(info.name for info in graph.output))}
    return maker.input[0] == before and readers == [maker] and inside.isdisjoint((before, after))


def with_sequences(made: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """Results of the changed loop as those of the loop: rows are sequences again, at their places."""
    count = len(made) - len(places)
    out, rows = list(made[:count]), list(made[count:])
    for k, stacked in zip(places, reversed(rows), strict=True):
        assert isinstance(stacked, Node)
        out.insert(k, Rows(stacked))
    return out
