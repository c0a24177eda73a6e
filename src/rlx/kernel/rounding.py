"""Sizes that decide in which order kernels add: where a call has them, they must be numbers.

Kernels for symbolic sizes exist, but some add in another order than those for numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlx.errors import RlxError
from rlx.ir.dim import Dim, evaluate, sym, symbols
from rlx.ir.dims.choice import CHOICES, SizeChoices, choose, need_numbers
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.resize import with_sizes
from rlx.ir.types import Shape, TensorType, tensor_types
from rlx.ir.weights import weight_ids
from rlx.kernel.compose import compose
from rlx.kernel.form import Contract, Conv, Form, Reduce, Template
from rlx.kernel.lowering import lower_node
from rlx.kernel.nests import Kernel
from rlx.kernel.order import adds_by_columns

FEW_ROWS = 3
"""Rows of a product up to which transposing B costs more than summing across vectors."""

MOST_PHASES, MOST_REACH = 64, 1024
"""Strides and reaches of windows up to which kernels for planar images are written out."""

Lanes = Callable[[str], int]
Order = Callable[[Kernel, Sequence[TensorType]], Shape | None]
"""What decides in which order a kernel adds, for operands of some types."""


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


def has_planar_kernel(form: Conv, dtypes: Sequence[str]) -> bool:
    """Whether a convolution of planar images has its own kernel, with one order for all sizes of images: it
    is in f32, with static channels and window. Others are plain sums, which choose their order by sizes."""
    static = all(isinstance(d, int) and d > 0 for d in form.w)
    # Its code has every line that a window reaches and every phase of a stride.
    windows = zip(form.w[2:], form.dilations, strict=True)
    short = all((k - 1) * dilation < MOST_REACH for k, dilation in windows if isinstance(k, int))
    known = static and short and form.fill == 0 and max(form.strides, default=1) <= MOST_PHASES
    return known and len(form.strides) <= 3 and all(d == "f32" for d in dtypes)


def rounds_by_kernel(graph: Graph) -> bool:
    """Whether bits depend on which ops are one kernel.

    Attention keeps the scores of 16-bit floats in f32. Sums over several axes run along all of them at once
    where every operand of the kernel allows it. Mean and variance of a long row are taken in one pass if they
    are in one kernel.
    """
    readers = graph.users()
    for node in graph.nodes:
        if node.op.role is not Role.COMPUTE or not readers[node.id]:
            continue
        if node.op.heavy and any(t.dtype.is_float and t.dtype.bits == 16 for t in tensor_types(node.type)):
            return True
        form = lower_node(node) if node.op.family == "reduction" else None
        if isinstance(form, Reduce) and node.dtype.is_float and form.combine in ("sum", "prod"):
            sizes = [form.space[i] for i in form.axes if form.space[i] != 1]
            if len(sizes) > 1 or (_adds_squares(node) and is_long_row(math.prod(sizes))):
                return True
    return False


def check_order(graph: Graph, order: Order) -> Graph:
    """The graph of kernels; refused if one with symbols adds in another order than one with numbers."""
    choices = CHOICES.get()
    if choices is None:
        return graph
    for node in graph.nodes:
        if node.op.role is not Role.REGION:
            for body in node.bodies:
                check_order(body, order)
            continue
        _check_directions(choices, node.bodies[0])
        _check_kernel(choices, node, order)
    return graph


def _check_directions(choices: SizeChoices, body: Graph) -> None:
    """Lanes of sums run along rows or columns; an axis that is 1 at the sizes of a call is neither."""
    for node in body.nodes:
        form = lower_node(node) if node.op.role is Role.COMPUTE and not node.bodies else None
        if not isinstance(form, Reduce) or not form.rounds:
            continue
        shapes = [o.shape for o in node.operands]
        dims = (*form.space, *(d for shape in shapes for d in shape))
        names = sorted({name for d in dims for name in symbols(d)})
        if not names or not choices.knows(dims):
            continue

        def direction(
            *sizes: int, form: Reduce = form, shapes: list[Shape] = shapes, names: list[str] = names
        ) -> bool:
            binding = dict(zip(names, sizes, strict=True))
            at = [tuple(evaluate(d, binding) for d in shape) for shape in (form.space, *shapes)]
            return adds_by_columns(replace(form, space=at[0]), at[1:])

        open_sizes = tuple(sym(name) for name in names)
        if choose(direction, open_sizes, [1 for _ in names]) != adds_by_columns(form, shapes):
            need_numbers(open_sizes, "decides in which direction a sum runs", node.where)


def _check_kernel(choices: SizeChoices, node: Node, order: Order) -> None:
    """A kernel composed for numbers has shorter indices than one for symbols: axes that are one in memory."""
    body = node.bodies[0]
    names = sorted({name for i in body.inputs for d in i.shape for name in symbols(d)})
    if not names or not choices.knows(tuple(sym(name) for name in names)):
        return

    def order_at(body: Graph, binding: Mapping[str, int]) -> Shape | None:
        found = order(compose(body), [i.tensor for i in body.inputs])
        return found and tuple(evaluate(d, binding) for d in found)

    def is_the_same(*sizes: int, fixed: Sequence[str] = ()) -> bool:
        """Whether a kernel adds as one for numbers; `fixed` sizes are numbers in both."""
        binding = dict(zip(names, sizes, strict=True))
        try:
            known = order_at(with_sizes(body, binding), binding)
            return order_at(with_sizes(body, {name: binding[name] for name in fixed}), binding) == known
        except RlxError:
            return False

    if order(compose(body), [i.tensor for i in body.inputs]) is None:
        return
    open_sizes = tuple(sym(name) for name in names)
    if choose(is_the_same, open_sizes, [1 for _ in names]) is False:
        at = [choices.sizes[name] for name in names]
        one = next((name for name in names if is_the_same(*at, fixed=[name])), None)
        needed = open_sizes if one is None else (sym(one),)
        need_numbers(needed, "decides in which order a kernel adds", node.where)


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
            padding = [d for pair in node.attrs["padding"] for d in pair]
            sizes = (*w.shape, x.shape[1], *padding)
            need_numbers(sizes, "decides in which order a convolution adds", node.where)
            form, dtypes = lower_node(node), [t.dtype.name for t in (x.tensor, w.tensor, node.tensor)]
            wide = node.dtype.is_float and node.dtype.bits > 16  # narrow ones are computed in f32
            if wide and isinstance(form, Conv) and not has_planar_kernel(form, dtypes):
                need_numbers(x.shape[2:], "decides in which order a convolution adds", node.where)
        elif node.op.heavy or node.op.family in ("fourier", "reduction"):
            _check_form(node, lower_node(node), lanes, weights)
    return graph


def _check_form(node: Node, form: Form, lanes: Lanes, weights: set[int]) -> None:
    if isinstance(form, Template) and form.kind == "fft":
        length = dict(form.config)["shape"][-1]
        need_numbers((length,), "is the length of a Fourier transform", node.where)
    elif isinstance(form, Reduce) and _adds_squares(node):
        sizes = [form.space[i] for i in form.axes]
        if choose(lambda *at: is_long_row(math.prod(at)), sizes, [1 for _ in sizes]):
            need_numbers(sizes, "decides how the variance of a row is added", node.where)
    elif isinstance(form, Contract):
        product, width = _product_sizes(form), lanes(form.accumulate.name)

        def rule(m: Dim, n: Dim, k: Dim) -> bool:
            return runs_along_k(m, n, k, width)

        for o in node.operands[:2]:  # stored as its kernel likes it, where its sizes are numbers
            if o.id in weights and not o.tensor.is_static and choose(rule, product, (1, 1, 1)):
                need_numbers(o.shape, "decides how a constant is stored", node.where)
        b = node.operands[_right_place(form)]
        if b.id in weights or not _may_lie_along_k(b, form):
            return
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


def _may_lie_along_k(b: Node, form: Contract) -> bool:
    """Whether neighbours along the contracted axis of the right operand may be neighbours in memory."""
    place = _right_place(form)
    ends = [j for j in range(b.rank) if all(d == 1 for d in b.shape[j + 1 :])]
    return b.op.role is Role.COMPUTE or not b.rank or any(pair[place] in ends for pair in form.contract)


def _right_place(form: Contract) -> int:
    """Which operand kernels take for the right one: a single column is a row of the transpose."""
    return 0 if is_one_column(form) else 1


def is_one_column(form: Contract) -> bool:
    """Whether the right operand of a product has one column."""
    taken = {j for _, j in (*form.batch, *form.contract)}
    return all(d == 1 for j, d in enumerate(form.rhs) if j not in taken)


def _product_sizes(form: Contract) -> tuple[Dim, Dim, Dim]:
    """Rows, columns and depth of the product that kernels see: a single column is a row of the transpose."""
    left = {*range(len(form.lhs))} - {i for i, _ in (*form.batch, *form.contract)}
    right = {*range(len(form.rhs))} - {j for _, j in (*form.batch, *form.contract)}
    m = math.prod(form.lhs[i] for i in sorted(left))
    n = math.prod(form.rhs[j] for j in sorted(right))
    k = math.prod(form.lhs[i] for i, _ in form.contract)
    return (n, m, k) if is_one_column(form) else (m, n, k)
