"""Comparing graphs: are they the same program, and if not, where do they differ?

Display names of graphs, source locations and values of params and states do not count.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from rlx.ir.graph import Graph, Node
from rlx.ir.text import Printer

_CONTEXT = 3  # how far above a node its neighbourhood reaches, when nodes of two graphs are matched


def structurally_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs compute the same by the same nodes.

    The order in which independent nodes were made does not count, nor do nodes that nothing reads.

    >>> def build(first, second):
    ...     g = Graph(first)
    ...     x = g.input("x", (2,), "f32")
    ...     made = {first: None, second: None}
    ...     for name in made:
    ...         made[name] = x._call(name, x)
    ...     g.output("y", made["exp"] + made["tanh"])
    ...     return g
    >>> structurally_equal(build("exp", "tanh"), build("tanh", "exp"))
    True
    """
    return canonical_text(a) == canonical_text(b)


def canonical_text(graph: Graph) -> str:
    """A text that is the same for structurally equal graphs, and for no others."""
    return "\n".join(_canonical_lines(graph, Printer(locations=False)))


def _canonical_lines(graph: Graph, printer: Printer) -> Iterator[str]:
    order = _canonical_order(graph)
    names = {node.id: f"%{i}" for i, node in enumerate(order)}
    yield from printer.symbol_lines(graph)
    yield from sorted(printer.constraint_text(c) for c in graph.constraints)
    for node in order:
        yield _head(node, names, printer)
        for body in node.bodies:
            yield "{"
            yield from _canonical_lines(body, printer)
            yield "}"
    yield "inputs " + " ".join(names[n.id] for n in graph.inputs)
    yield "ordered " + " ".join(names[n.id] for n in graph.nodes if n.op.effects == "ordered")
    yield from printer.closing_lines(graph, names)


def _head(node: Node, names: Mapping[int, str], printer: Printer) -> str:
    return next(printer.node_lines(node, names)).removesuffix(" {")


def _canonical_order(graph: Graph) -> list[Node]:
    """The interface, then operands before their readers, in the order that the outputs ask for them."""
    interface = [*graph.inputs, *(graph.params[k] for k in sorted(graph.params))]
    interface += [graph.state_inputs[k] for k in sorted(graph.state_inputs)]
    order: list[Node] = []
    seen: set[int] = set()
    for root in [*interface, *graph.roots()]:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [o for o in reversed(node.operands) if o.id not in seen]
            if node.id in seen or not waiting:
                stack.pop()
                if node.id not in seen:
                    seen.add(node.id)
                    order.append(node)
            else:
                stack += waiting
    return order


# -- where they differ


def graph_diff(a: Graph, b: Graph, locations: bool = False) -> str:
    """The differences as a unified diff of the two texts; empty if there are none.

    A node of `b` that stands for a node of `a` bears its number, and a new one a number beyond those of `a`:
    an inserted node changes its own line and those of its readers, nothing else.

    >>> def build(activation):
    ...     g = Graph("net")
    ...     x = g.input("x", (2,), "f32")
    ...     g.output("y", x._call(activation, x) + x)
    ...     return g
    >>> print(graph_diff(build("exp"), build("tanh")))
    --- net
    +++ net
    @@ -1,6 +1,6 @@
     graph {
       %0 = input() {name="x", type=f32[2]} : f32[2]
    -  %1 = exp(%0) : f32[2]
    +  %1 = tanh(%0) : f32[2]
       %2 = add(%1, %0) : f32[2]
       output "y" = %2
     }
    """
    printer = Printer(locations)
    own = {n.id: f"%{n.id}" for n in a.nodes}
    names: dict[int, str] = {}
    for j, i in match_nodes(a, b).items():
        names[j] = f"%{i}"
    fresh = len(a)
    for node in b.nodes:
        if node.id not in names:
            names[node.id] = f"%{fresh}"
            fresh += 1
    left, right = list(_lines(a, own, printer)), list(_lines(b, names, printer))
    if left == right:
        return ""
    return "\n".join(_unified(left, right, a.name, b.name))


def _lines(graph: Graph, names: Mapping[int, str], printer: Printer) -> Iterator[str]:
    yield "graph {"
    yield from (f"  {line}" for line in printer.symbol_lines(graph))
    yield from (f"  {printer.constraint_text(c)}" for c in graph.constraints)
    for node in graph.nodes:
        yield from (f"  {line}" for line in printer.node_lines(node, names))
    yield from (f"  {line}" for line in printer.closing_lines(graph, names))
    yield "}"


def _unified(left: list[str], right: list[str], a_name: str, b_name: str) -> Iterator[str]:
    yield f"--- {a_name}"
    yield f"+++ {b_name}"
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for group in matcher.get_grouped_opcodes(3):
        first, last = group[0], group[-1]
        yield f"@@ -{_span(first[1], last[2])} +{_span(first[3], last[4])} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (" " + line for line in left[i1:i2])
            else:
                yield from _replaced(left[i1:i2], right[j1:j2])


def _span(start: int, stop: int) -> str:
    return f"{start + 1},{stop - start}"


def _replaced(left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    """A changed line follows the line it replaces, where the number of lines is the same."""
    if len(left) == len(right):
        for old, new in zip(left, right, strict=True):
            yield "-" + old
            yield "+" + new
        return
    yield from ("-" + line for line in left)
    yield from ("+" + line for line in right)


# -- which nodes are the same


def match_nodes(a: Graph, b: Graph) -> dict[int, int]:
    """Ids of `b` -> ids of `a` for nodes that stand for each other.

    Nodes with equal neighbourhoods are matched first, so that in a model of many equal layers each keeps its
    own; then what lies between them by itself alone (op, attributes and type); and where as many nodes are
    left on both sides, they are changed versions of each other.
    """
    printer = Printer(locations=False)
    near_a, near_b = _neighbourhoods(a, printer), _neighbourhoods(b, printer)
    found: dict[int, int] = {}
    whole = (0, 0, len(a), len(b))
    for gap in _match_equal(near_a[-1], near_b[-1], whole, found):
        for i, j, i_end, j_end in _match_equal(near_a[0], near_b[0], gap, found):
            if i_end - i == j_end - j:
                found.update(zip(range(j, j_end), range(i, i_end), strict=True))
    return found


_Gap = tuple[int, int, int, int]
"""A stretch of both graphs: start in a, start in b, end in a, end in b."""


def _match_equal(left: Sequence[str], right: Sequence[str], gap: _Gap, found: dict[int, int]) -> list[_Gap]:
    """Enter equal runs of a stretch in `found`; returns the stretches between them."""
    i, j, i_end, j_end = gap
    # Equal ends first: the search between them is quadratic where many nodes are alike.
    while i < i_end and j < j_end and left[i] == right[j]:
        found[j] = i
        i, j = i + 1, j + 1
    while i < i_end and j < j_end and left[i_end - 1] == right[j_end - 1]:
        i_end, j_end = i_end - 1, j_end - 1
        found[j_end] = i_end
    matcher = difflib.SequenceMatcher(None, left[i:i_end], right[j:j_end], autojunk=False)
    rest, i0, j0 = [], i, j
    for block in matcher.get_matching_blocks():
        a, b = i0 + block.a, j0 + block.b
        rest.append((i, j, a, b))
        found.update(zip(range(b, b + block.size), range(a, a + block.size), strict=True))
        i, j = a + block.size, b + block.size
    return rest


def _neighbourhoods(graph: Graph, printer: Printer) -> list[list[str]]:
    """For each depth, what a node is together with the nodes up to that far above it."""
    nothing = dict.fromkeys(range(len(graph)), "_")
    own = ["\n".join(printer.node_lines(n, nothing)) for n in graph.nodes]
    levels = [own]
    for _ in range(_CONTEXT):
        above = levels[-1]
        levels.append([_digest([own[n.id], *(above[o.id] for o in n.operands)]) for n in graph.nodes])
    return levels


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()
