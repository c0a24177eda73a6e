"""Comparing graphs: are they the same program, and if not, where do they differ?

Display names of graphs, source locations and values of params and states do not count.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from rlx.ir.graph import Graph, Node
from rlx.ir.text.write import Printer

_MOST_EDITS = 400  # above that, finding the best match takes too long


def structurally_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs compute the same by the same nodes.

    The order of independent nodes does not count, nor do nodes that nothing reads.

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
    """The interface, then operands before their readers, in the order that the outputs need them."""
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
    printer = Printer(locations, titles=False)
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

    As many nodes as possible are matched with one of the same op, attributes and type, in order. Where as
    many are left on both sides between two matches, they are changed versions of each other.
    """
    printer = Printer(locations=False, titles=False)
    left, right = ([_by_itself(n, printer) for n in g.nodes] for g in (a, b))
    found: dict[int, int] = {}
    i = j = 0
    for i_next, j_next in [*_common(left, right), (len(left), len(right))]:
        if i_next - i == j_next - j:
            found.update(zip(range(j, j_next), range(i, i_next), strict=True))
        if j_next < len(right):
            found[j_next] = i_next
        i, j = i_next + 1, j_next + 1
    return found


def _by_itself(node: Node, printer: Printer) -> str:
    """What a node is, whatever it reads."""
    names = {n.id: "_" for n in (node, *node.operands)}
    return "\n".join(printer.node_lines(node, names))


def _common(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of a longest common subsequence, by the algorithm of Myers.

    Layers of a model look alike, so only the greatest number of pairs shows which belong together.
    Texts that differ in very many places are left to difflib, which finds long runs faster.
    """
    n, m = len(left), len(right)
    reached = {1: 0}  # diagonal -> how far along `left` the paths with so many edits get
    trace: list[dict[int, int]] = []
    for edits in range(min(n + m, _MOST_EDITS) + 1):
        trace.append(dict(reached))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reached[k - 1] < reached[k + 1])
            i = reached[k + 1] if down else reached[k - 1] + 1
            while i < n and i - k < m and left[i] == right[i - k]:
                i += 1
            reached[k] = i
            if i >= n and i - k >= m:
                return _path(trace, n, m)
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [(block.a + s, block.b + s) for block in blocks for s in range(block.size)]


def _path(trace: Sequence[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    """Walk back along the furthest paths; diagonal steps are the pairs."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trace) - 1, -1, -1):
        before, k = trace[edits], i - j
        down = k == -edits or (k != edits and before[k - 1] < before[k + 1])
        came = k + 1 if down else k - 1
        i_from = before[came] if edits else 0
        j_from = i_from - came if edits else 0
        i_turn = i_from if down or not edits else i_from + 1
        while i > i_turn:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        i, j = i_from, j_from
    return pairs[::-1]
