"""Graphs as text: readable, deterministic, and read back by `rlx.ir.text.read` to the same graph.

    graph "hello" {
      symbol seq in 1..512
      assume eq seq, {2*half}  @ "model.py:2"
      %0 = input() {name="x", type=f32[1,seq,4]} : f32[1,seq,4]  @ "model.py:1"
      %1 = constant() {value=f32[2]{1.0, -inf}} : f32[2]
      %2 = region(%0, %1) {kind="map"} : f32[1,seq,2] {
        graph "body" { ... }
      }
      output "y" = %2
      state "cache" = %1
    }

A symbol is listed if it has bounds, an attribute if it differs from its default. Params and states carry no
values. Arrays over 256 bytes are written `blob:sha256`, with the array itself next to the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.attr import REQUIRED, Blob, Described
from rlx.ir.dim import Constraint, Dim, Expr
from rlx.ir.dims.atom import quote
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.node import are_same
from rlx.ir.op import Op, Role
from rlx.ir.symbols import graph_symbols
from rlx.ir.text.arrays import array_text
from rlx.ir.types import TensorType

INLINE_BYTES = 256


def graph_text(graph: Graph, locations: bool = True, blobs: dict[str, np.ndarray] | None = None) -> str:
    """The text of a graph; arrays too large to be written in it are added to `blobs` by digest.

    >>> g = Graph("hello")
    >>> g.output("y", g.input("x", (2, "n"), "f32") * 2.0)
    >>> print(graph_text(g, locations=False))
    graph "hello" {
      %0 = input() {name="x", type=f32[2,n]} : f32[2,n]
      %1 = constant() {value=f32[]{2.0}} : f32[]
      %2 = mul(%0, %1) : f32[2,n]
      output "y" = %2
    }
    """
    return "\n".join(Printer(locations, blobs).graph_lines(graph))


def string_text(value: str) -> str:
    """A quoted string on one line; plain characters stay readable in any script."""
    return json.dumps(value, ensure_ascii=not value.isprintable())


def dim_text(d: Dim) -> str:
    """A size as an attribute value: a number, or an expression in braces."""
    return str(d) if isinstance(d, int) else f"{{{d}}}"


class Printer:
    """Writes graphs line by line, with or without `titles`, the names of graphs.

    `names` gives nodes other names than their ids.
    """

    def __init__(
        self, locations: bool = True, blobs: dict[str, np.ndarray] | None = None, titles: bool = True
    ) -> None:
        self.locations = locations
        self.blobs = blobs
        self.titles = titles
        self._defaults: dict[Op, dict[str, str]] = {}

    def graph_lines(self, graph: Graph, outermost: bool = True) -> Iterator[str]:
        """The lines of a graph, without a common indent."""
        yield f"graph {string_text(graph.name)} {{" if self.titles else "graph {"
        for line in self.inner_lines(graph, outermost):
            yield "  " + line
        yield "}"

    def inner_lines(self, graph: Graph, outermost: bool = True) -> Iterator[str]:
        if outermost:  # bodies speak of the same symbols
            yield from self.symbol_lines(graph)
        for c in graph.constraints:
            yield self.constraint_text(c)
        for node in graph.nodes:
            yield from self.node_lines(node)
        in_order = [n for n in graph.nodes if n.op.role is Role.INPUT]
        if not are_same(graph.inputs, in_order):
            yield f"inputs {', '.join(f'%{n.id}' for n in graph.inputs)}"
        yield from self.closing_lines(graph)

    def symbol_lines(self, graph: Graph) -> Iterator[str]:
        for name, found in graph_symbols(graph).items():
            low = max(b[0] for b in found)
            high = min((b[1] for b in found if b[1] is not None), default=None)
            if low or high is not None:
                yield f"symbol {quote(name)} in {low}..{'' if high is None else high}"

    def constraint_text(self, c: Constraint) -> str:
        return f"assume {c.kind} {dim_text(c.lhs)}, {dim_text(c.rhs)}{self.where_text(c.where)}"

    def closing_lines(self, graph: Graph, names: Mapping[int, str] | None = None) -> Iterator[str]:
        """Outputs and states."""
        for name, node in graph.outputs.items():
            yield f"output {string_text(name)} = {_name(node, names)}"
        for s in graph.states:
            yield f"state {string_text(s.name)} = {_name(s.output, names)}"

    def node_lines(self, node: Node, names: Mapping[int, str] | None = None) -> Iterator[str]:
        """One line per node, more if it has bodies."""
        operands = ", ".join([_name(o, names) for o in node.operands])
        head = f"{_name(node, names)} = {node.op.name}({operands}){self.attrs_text(node)} : {node.type}"
        if self.locations:
            head += self.where_text(node.where)
        if not node.bodies:
            yield head
            return
        yield head + " {"
        for body in node.bodies:
            for line in self.graph_lines(body, outermost=False):
                yield "  " + line
        yield "}"

    def attrs_text(self, node: Node) -> str:
        if not node.attrs:
            return ""
        defaults = self._default_texts(node.op)
        parts = []
        for key, value in node.attrs.items():
            text = self.value_text(value)
            if text != defaults.get(key):
                parts.append(f"{key}={text}")
        return f" {{{', '.join(parts)}}}" if parts else ""

    def _default_texts(self, op: Op) -> Mapping[str, str]:
        texts = self._defaults.get(op)
        if texts is None:
            given = {key: spec for key, spec in op.attrs.items() if spec.default is not REQUIRED}
            texts = {key: self.value_text(spec.kind(spec.default)) for key, spec in given.items()}
            self._defaults[op] = texts
        return texts

    def value_text(self, value: object) -> str:
        """An attribute value; its kind shows, so that it is read back as what it is."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (int, float)):
            return repr(value)
        if isinstance(value, str):
            return string_text(value)
        if isinstance(value, Expr):
            return dim_text(value)
        if isinstance(value, (DType, TensorType)):
            return str(value)
        if isinstance(value, tuple):
            return f"({', '.join([self.value_text(v) for v in value])}{',' if len(value) == 1 else ''})"
        if isinstance(value, Blob):
            return self.blob_text(value)
        if isinstance(value, Described):
            return string_text(str(value))
        raise TypeMismatchError(f"an attribute value of type {type(value).__name__} has no text form")

    def blob_text(self, value: Blob) -> str:
        if value.array.nbytes <= INLINE_BYTES:
            return array_text(value.array)
        if self.blobs is not None:
            self.blobs[value.digest] = value.array
        return f"blob:{value.digest}"

    def where_text(self, where: Sequence[str]) -> str:
        return f"  @ {', '.join(map(string_text, where))}" if where and self.locations else ""


def _name(node: Node, names: Mapping[int, str] | None) -> str:
    return f"%{node.id}" if names is None else names[node.id]
