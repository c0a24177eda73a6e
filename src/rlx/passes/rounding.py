"""Sizes that decide in which order kernels add: where a call has them, they must be numbers.

Kernels for symbolic sizes exist, but some add in another order than those for numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.ir.compose import lower_node
from rlx.ir.dim import Dim
from rlx.ir.form import Contract, Form, Map, Reduce, Template
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.size_choice import CHOICES, choose, need_numbers
from rlx.ir.types import tensor_types
from rlx.passes.layout import weight_ids

FEW_ROWS = 3
"""Rows of a product up to which transposing B costs more than summing across vectors."""

Lanes = Callable[[str], int]


def is_long_row(size: Dim) -> bool:
    """Whether kernels take mean and variance of a row in one pass.

    In shorter rows a second pass is cheap, and putting lanes together is not.
    """
    return isinstance(size, int) and size >= 512


def runs_along_k(m: Dim, n: Dim, k: Dim, lanes: int) -> bool:
    """Whether vectors of a product run along k, if both operands are stored so."""
    few_columns = isinstance(n, int) and n <= lanes // 2
    few_rows = isinstance(m, int) and m <= FEW_ROWS
    shallow = isinstance(k, int) and k < lanes
    return (few_columns or few_rows) and not shallow


def rounds_by_kernel(graph: Graph) -> bool:
    """Whether bits depend on which ops are one kernel.

    16-bit floats are kept in f32 there, and rounded when they are stored. In the kernel of a statistic, x /
    statistic is x * (1 / statistic), and exp(x - statistic) costs less: these show where a value that several
    ops read may be computed by each of them.
    """
    readers, statistics = graph.users(), set[int]()
    ends = {n.id for n in graph.ends()}
    for node in graph.nodes:
        if node.op.role is not Role.COMPUTE or not readers[node.id]:
            continue
        if any(t.dtype.is_float and t.dtype.bits == 16 for t in tensor_types(node.type)):
            return True
        given = [o.id in statistics for o in node.operands if o.op.role is not Role.CONSTANT]
        if node.op.family == "reduction" or (any(given) and all(given)):
            statistics.add(node.id)
        elif _is_by_a_statistic(node, statistics):
            if node.id in ends or len(readers[node.id]) > 1:
                return True
    return False


def check_rounding(graph: Graph, lanes: Lanes) -> Graph:
    """The graph; refused if a size that decides how a result is rounded is a symbol of the call."""
    if CHOICES.get() is None:
        return graph
    weights = weight_ids(graph)
    for node in graph.nodes:
        for body in node.bodies:
            check_rounding(body, lanes)
        if node.op.family == "conv":
            x, w = node.operands[:2]
            need_numbers((*w.shape, x.shape[1]), "decides in which order a convolution adds", node.where)
        elif node.op.heavy or node.op.family in ("fourier", "reduction"):
            _check_form(node, lower_node(node), lanes, weights)
    return graph


def _is_by_a_statistic(node: Node, statistics: set[int]) -> bool:
    """Whether a node is x / statistic or x - statistic."""
    if node.op.family != "elementwise" or node.operands[-1].id not in statistics:
        return False
    form = lower_node(node)
    return isinstance(form, Map) and form.body.prim in ("div", "sub")


def _check_form(node: Node, form: Form, lanes: Lanes, weights: set[int]) -> None:
    if isinstance(form, Template) and form.kind == "fft":
        length = dict(form.config)["shape"][-1]
        need_numbers((length,), "is the length of a Fourier transform", node.where)
    elif isinstance(form, Reduce) and _adds_squares(node):
        sizes = [form.space[i] for i in form.axes]
        if choose(lambda *at: is_long_row(math.prod(at)), sizes, [1 for _ in sizes]):
            need_numbers(sizes, "decides how the variance of a row is added", node.where)
    elif isinstance(form, Contract) and node.operands[1].id not in weights and _may_lie_along_k(node, form):
        product, width = _product_sizes(form), lanes(form.accumulate.name)

        def rule(m: Dim, n: Dim, k: Dim) -> bool:
            return runs_along_k(m, n, k, width)

        answer = choose(rule, product, (1, 1, 1))
        if answer != rule(*product):
            at = choose(lambda *at: at, product, (1, 1, 1))
            one = [(*product[:i], at[i], *product[i + 1 :]) for i in range(3)]
            needed = next((product[i : i + 1] for i in range(3) if rule(*one[i]) == answer), product)
            need_numbers(needed, "decides in which order a product adds", node.where)


def _adds_squares(node: Node) -> bool:
    """Whether a sum may be one of squared distances: of a value times itself."""
    square = node.operands[0]
    return square.op.family == "elementwise" and len({o.id for o in square.operands}) == 1


def _may_lie_along_k(node: Node, form: Contract) -> bool:
    """Whether neighbours along the contracted axis of the right operand may be neighbours in memory."""
    b = node.operands[1]
    return b.op.role is Role.COMPUTE or not b.rank or any(j == b.rank - 1 for _, j in form.contract)


def _product_sizes(form: Contract) -> tuple[Dim, Dim, Dim]:
    """Rows, columns and depth of the product that kernels see: a single column is a row of the transpose."""
    left = {*range(len(form.lhs))} - {i for i, _ in (*form.batch, *form.contract)}
    right = {*range(len(form.rhs))} - {j for _, j in (*form.batch, *form.contract)}
    m = math.prod(form.lhs[i] for i in sorted(left))
    n = math.prod(form.rhs[j] for j in sorted(right))
    k = math.prod(form.lhs[i] for i, _ in form.contract)
    return (n, m, k) if isinstance(n, int) and n == 1 else (m, n, k)
