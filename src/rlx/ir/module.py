"""A MIR graph that has passed the verifier, as an object that a user can hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.rewrite import rewrite
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify


class MirModule:
    """A verified MIR program. It prints as text and parses back.

    >>> g = Graph("double")
    >>> x = g.input("x", (2,), "f32")
    >>> g.output("y", x + x)
    >>> module = MirModule.from_graph(g)
    >>> module.name, len(module), MirModule.from_text(str(module)).as_graph().outputs["y"]
    ('double', 2, %1 = add(%0, %0) : f32[2])
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = verify(graph, Level.MIR)

    @classmethod
    def from_graph(cls, graph: Graph) -> MirModule:
        """The module of a graph without HIR ops; anything else is refused (`rlx.lower` expands HIR ops)."""
        return cls(graph)

    @classmethod
    def from_text(cls, text: str, blobs: Mapping[str, np.ndarray] | None = None) -> MirModule:
        """The module that `to_text` wrote."""
        return cls(parse_graph(text, blobs))

    def to_text(self, locations: bool = True, blobs: dict[str, np.ndarray] | None = None) -> str:
        """The text of the program; arrays too large for it are added to `blobs`."""
        return graph_text(self._graph, locations, blobs)

    def as_graph(self) -> Graph:
        """The graph itself, to look at."""
        return self._graph

    def into_graph(self) -> Graph:
        """A graph of the caller's own, which may be added to without changing the module."""
        return rewrite(self._graph, lambda node, operands, out: None, keep_dead=True)

    @property
    def name(self) -> str:
        return self._graph.name

    def __len__(self) -> int:
        return len(self._graph)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<MIR module {self.name!r}: {len(self)} nodes>"
