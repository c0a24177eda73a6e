"""Shortcuts that row kernels take, written as ops: bits do not depend on which ops share a kernel.

A statistic is the result of a reduction, or computed from such results alone. Dividing a row by a statistic
takes one division per row, one multiplication per element. exp of a distance from a statistic takes one
step less than others, since its argument is already rounded. If emitters chose these on their own, a value
would have other bits in another kernel than that of its statistic.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.ir.dim import known_eq
from rlx.ir.dtype import F32, F64
from rlx.ir.graph import NAMED, Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.kernel.form import Map, Reduce
from rlx.kernel.scalar import Scalar
from rlx.rewrite.basic import remove_dead
from rlx.rewrite.rules import Firing, Subject

STEPS = ("round", "floor", "ceil", "trunc", "floor_div", "mod", "fmod", "sign")


def use_statistics(graph: Graph, log: list[Firing]) -> Graph:
    """x / statistic as x * (1 / statistic), and exp(x - statistic) as one op.

    >>> import rlx
    >>> g = Graph()
    >>> x = g.input("x", (2, 8), "f32")
    >>> g.output("y", rlx.ops.softmax(x))
    >>> [n.op.name for n in use_statistics(rlx.lower(g), []).nodes if n.op.role is Role.COMPUTE]
    ['reduce_max', 'exp_difference', 'reduce_sum', 'div', 'mul']
    """
    subjects = {n.id: Subject(n) for n in graph.nodes}
    known, numbers = _statistics(subjects)
    if not known:
        return graph
    no_rows = known | numbers
    stepped = _stepped(subjects)
    inverses: dict[int, Node] = {}
    fired = len(log)

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        found = subjects[node.id].applied if node.op.role is Role.COMPUTE else None
        if found is None or node.dtype not in (F32, F64):
            return None
        prim, args = found
        if prim == "div" and node.id not in stepped and _is_by_row(known, no_rows, *args):
            log.append(Firing("one division per row", node.id, node.op.name, node.where))
            made: Node = get_op("mul")(operands[0], _inverse(operands[1], inverses))
            return made
        inner = subjects[args[0].id].applied if prim == "exp" and node.dtype is F32 else None
        if inner is not None and inner[0] == "sub" and _is_by_row(known, no_rows, *inner[1]):
            log.append(Firing("exponential of a distance", node.id, node.op.name, node.where))
            made = get_op("exp_difference")(*operands[0].operands)
            return made
        return None

    made = rewrite(graph, visit)
    return remove_dead(made) if len(log) > fired else graph


def _statistics(subjects: Mapping[int, Subject]) -> tuple[set[int], set[int]]:
    """Values that reductions give, and what is computed from nothing else but numbers; then those numbers.

    A number is what constants and sizes alone give, of any shape: where sizes are known, it is folded.
    """
    out: set[int] = set()
    numbers: set[int] = set()
    for i, subject in subjects.items():
        form, node = subject.form, subject.node
        read = [o for o in node.operands if o.id not in numbers]
        if not read and node.op.role not in NAMED and node.op.effects == "none":
            numbers.add(i)
        elif isinstance(form, Reduce) or (isinstance(form, Map) and all(o.id in out for o in read)):
            out.add(i)
    return out, numbers


def _stepped(subjects: Mapping[int, Subject]) -> set[int]:
    """Values of which a last bit may decide a whole unit, because what reads them rounds to whole numbers."""
    out: set[int] = set()
    for i, subject in reversed(list(subjects.items())):
        body = subject.body
        if body is not None and (i in out or any(_is_step(e) for e in body.walk())):
            out.update(o.id for o in subject.node.operands)
    return out


def _is_step(e: Scalar) -> bool:
    """Whether a primitive jumps; indices are made of whole numbers anyway."""
    return (e.prim in STEPS or (e.prim == "cast" and e.dtype.is_int)) and e.args[0].dtype.is_float


def _is_by_row(known: set[int], no_rows: set[int], x: Node, statistic: Node) -> bool:
    """Whether there are several elements, of something that is computed or given, to one statistic."""
    if statistic.id not in known or x.id in no_rows:
        return False
    while (moved := Subject(statistic)).moved is not None:
        statistic = moved.node.operands[0]
    return known_eq(statistic.tensor.numel, x.tensor.numel) is not True


def _inverse(statistic: Node, made: dict[int, Node]) -> Node:
    """1 / statistic, taken before the statistic is repeated."""
    if statistic.id not in made:
        if Subject(statistic).moved is not None:
            inner = _inverse(statistic.operands[0], made)
            made[statistic.id] = statistic.op(inner, **statistic.attrs)
        else:
            one = statistic.graph.constant(np.ones((), statistic.dtype.np))
            made[statistic.id] = get_op("div")(one, statistic)
    return made[statistic.id]
