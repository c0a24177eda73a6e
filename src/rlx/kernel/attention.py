"""Attention from primitives: two contractions with a softmax between them as one kernel.

The ops between the contractions are composed like any reduction nest. Then their expressions are matched, so
it does not matter which ops, views and orders a model uses to write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field

from rlx.ir.dim import Dim
from rlx.ir.dims.choice import need_numbers
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.composer import Composer, strip_rows
from rlx.kernel.form import Contract, Form
from rlx.kernel.legality import OTHER_ROW, conflict, same_space
from rlx.kernel.lowering import lower_node
from rlx.kernel.nests import AttentionNest, ComposeError, Kernel, Mask, Stat, Store
from rlx.kernel.scalar import Scalar, axes, axis, is_acc, load, rebuild, replace_axes
from rlx.records import dataclass

MOST_NEGATIVE = {"f32": -3.0e38, "f64": -1.0e308}  # a softmax that clamps its maximum here hides whole rows


def holds_attention(body: Graph) -> bool:
    """Whether a body has two contractions, as attention has."""
    heavy = [n for n in body.nodes if n.op.heavy and n.op.role is Role.COMPUTE and not n.bodies]
    if len(heavy) < 2:
        return False
    live = body.live()
    return sum(isinstance(lower_node(n), Contract) for n in heavy if n.id in live) == 2


@dataclass
class _Softmax:
    """What was found between the contractions."""

    score: Scalar
    masked: bool
    sink: Scalar | None


class AttentionComposer(Composer):
    """Composes a body whose first contraction gives scores, and whose second weighs
    values by their softmax.
    """

    def __init__(self, body: Graph) -> None:
        super().__init__(body)
        self.first: tuple[Contract, Node] | None = None
        self.softmax: _Softmax | None = None

    def _root(self, node: Node, form: Form) -> None:
        if not isinstance(form, Contract) or self.contract is not None:
            kind = "contract" if isinstance(form, Contract) else "conv"
            raise ComposeError(conflict("attention", kind), node.where)
        if self.first is None:
            self.first = (form, node)
            number = len(self.inputs)  # scores are read like one more operand
            self.values[node.id] = load(number, axes(node.rank), form.dtype)
            return
        self.softmax = self._find_softmax(node)
        self.rows, self.stats = None, []  # what follows is an epilogue
        self.contract = (form, node)
        self.values[node.id] = Scalar("acc", axes(node.rank), form.dtype, 0)

    # -- the softmax

    def _find_softmax(self, second: Node) -> _Softmax:
        weights = second.operands[0]
        assert self.first is not None
        scores = self.first[1]
        value = self.values[weights.id]
        if self.rows is None or len(self.stats) != 2 or not self._scores_of(value):
            raise ComposeError(
                "two contractions without a softmax between them are two kernels", second.where
            )
        full, reduced = self.rows
        rank = len(full)
        if (
            reduced != (rank - 1,)
            or not same_space(weights.shape, full)
            or not same_space(scores.shape, full)
        ):
            raise ComposeError("the softmax between two contractions runs along other axes", second.where)
        if not self._reads_own_row(value, axes(rank), range(rank - 1)):
            raise ComposeError(OTHER_ROW, second.where)
        top, total = self.stats
        score = strip_rows(top.body)
        if top.combine != "max" or total.combine != "sum" or not self._own_place(score):
            raise ComposeError("the ops between two contractions are not a softmax of scores", second.where)
        found = _match_softmax(score, total, strip_rows(_uncast(value)))
        if found is None:
            raise ComposeError("the ops between two contractions are not a softmax of scores", second.where)
        masked, sink = found
        inner = {i for i in (rank - 2, rank - 1) if full[i] != 1}
        if sink is not None and inner & {e.data for e in sink.walk() if e.prim == "axis"}:
            raise ComposeError("a sink of attention has one score for each head", second.where)
        return _Softmax(self._as_acc(score), masked, sink)

    def _scores_of(self, value: Scalar) -> list[Scalar]:
        number = len(self.inputs)
        return [e for e in value.walk() if e.prim == "load" and e.data == number]

    def _own_place(self, score: Scalar) -> bool:
        """Scores are read at their own point only."""
        assert self.first is not None
        at = axes(self.first[1].rank)
        found = self._scores_of(score)
        return bool(found) and all(e.args == at for e in found)

    def _as_acc(self, score: Scalar) -> Scalar:
        number = len(self.inputs)

        def change(e: Scalar, _: tuple[Scalar, ...]) -> Scalar | None:
            return Scalar("acc", (), e.dtype, 0) if e.prim == "load" and e.data == number else None

        return rebuild(score, change)

    # -- the end

    def _finish(self) -> Kernel:
        if self.first is None or self.contract is None or self.softmax is None:
            raise ComposeError("attention needs two contractions")
        first, scores = self.first
        second, root = self.contract
        assert isinstance(second, Contract)
        shared = len(first.batch)
        left = [i for i in range(len(first.lhs)) if i not in [p for p, _ in (*first.batch, *first.contract)]]
        right = [j for j in range(len(first.rhs)) if j not in [q for _, q in (*first.batch, *first.contract)]]
        if len(right) != 1 or not left or len(first.contract) != 1:
            raise ComposeError("scores have one axis of keys and one of queries", scores.where)
        rank = scores.rank
        query = rank - 2
        free = [
            j for j in range(len(second.rhs)) if j not in [q for _, q in (*second.batch, *second.contract)]
        ]
        if [p for p, _ in second.contract] != [rank - 1] or len(free) != 1:
            raise ComposeError("values are weighed along their axis of keys", root.where)
        if any(p == query for p, _ in second.batch):
            raise ComposeError("every query has values of its own", root.where)
        (depth_q, depth_k), ((_, key_v),) = first.contract[0], second.contract
        q_at = {i: n for n, (i, _) in enumerate(first.batch)} | {i: shared + n for n, i in enumerate(left)}
        k_at = {j: n for n, (_, j) in enumerate(first.batch)} | {right[0]: query, depth_k: query + 1}
        v_at = {j: p for p, j in second.batch} | {key_v: query, free[0]: query + 1}
        q_at[depth_q] = query + 1
        q, k, v = (
            self._operand(node, places)
            for node, places in (
                (scores.operands[0], q_at),
                (scores.operands[1], k_at),
                (root.operands[1], v_at),
            )
        )
        found = read_score(self.softmax.score, query)
        return AttentionNest(
            batch=scores.shape[:query],
            queries=scores.shape[query],
            keys=scores.shape[query + 1],
            depth=first.lhs[depth_q],
            value_depth=second.rhs[free[0]],
            q=q,
            k=k,
            v=v,
            score=self.softmax.score,
            plain=found is not None,
            scale=1.0 if found is None else found.scale,
            masks=() if found is None else tuple(found.masks),
            left=None if found is None else found.left,
            right=None if found is None else found.right,
            masked=self.softmax.masked,
            sink=self.softmax.sink,
            accumulate=first.accumulate,
            stores=tuple(self._stores(root, second, rank)),
        )

    def _operand(self, node: Node, places: dict[int, int]) -> Scalar:
        value = replace_axes(self.values[node.id], [axis(places[i]) for i in range(node.rank)])
        inner = _uncast(value)  # half precision is widened as it is read
        if inner.prim != "load" or inner.dtype.bits > value.dtype.bits:
            raise ComposeError("an operand of attention is computed, not read", node.where)
        if node.reader_side or any(affine(i, max(places.values()) + 1) is None for i in inner.args):
            need_numbers(node.shape, "decides how attention reads its operands", node.where)
            raise ComposeError("an operand of attention lies in memory in no regular way", node.where)
        return value

    def _stores(self, root: Node, second: Contract, rank: int) -> Iterator[Store]:
        """Stores over (batch..., query, value), whatever order the second contraction gives its axes."""
        batch = [p for p, _ in second.batch]
        order = [*batch, *(p for p in range(rank - 1) if p not in batch), rank - 1]
        place = [axis(p) for p in order]
        for node in self.body.outputs.values():
            source, steps = self._stored_as(node, root.shape, lambda v: _at(v, root.rank))
            if not same_space(source.shape, root.shape) or not _at(self.values[source.id], root.rank):
                raise ComposeError(f"{node.op.name} changes the shape of attention's result", node.where)
            body = strip_rows(replace_axes(self.values[source.id], place))
            strides: list[Dim] = [0] * rank
            for position, p in enumerate(order):
                strides[p] = steps[position]
            yield Store(body, True, tuple(strides))


def _at(value: Scalar, rank: int) -> bool:
    return all(e.args == axes(rank) for e in value.walk() if e.prim == "acc")


def _uncast(value: Scalar) -> Scalar:
    return value.args[0] if value.prim == "cast" else value


def _match_softmax(score: Scalar, total: Stat, weights: Scalar) -> tuple[bool, Scalar | None] | None:
    """Whether rows without any key give zeros, and the sink, if there is one; None if the expressions are no
    softmax of the score.

    exp(score - top) / total, where top and total may both be clamped: so a row of -inf becomes zeros. With a
    sink, top is the larger of both, and total has exp(sink - top) added.
    """
    parts = _quotient(weights)
    if parts is None:
        return None
    exponential, divisor = parts
    if strip_rows(total.body) != exponential:
        return None
    difference = exponential.args[0] if exponential.prim == "exp" else exponential
    if difference.prim not in ("sub", "exp_difference") or difference.args[0] != score:
        return None
    sink = _sink(difference.args[1], divisor)
    if sink is not None:
        return True, sink
    top = _clamped(difference.args[1], 0)
    bottom = _clamped(divisor, 1)
    if top is None or bottom is None:
        return None
    hides = top <= MOST_NEGATIVE.get(score.dtype.name, -math.inf) and top != -math.inf and bottom == 1.0
    if hides:
        return True, None
    return (False, None) if top == bottom == -math.inf else None


def _sink(top: Scalar, divisor: Scalar) -> Scalar | None:
    """The score that is read beside those of keys: it is in the maximum, and its term in the divisor."""
    if top.prim != "maximum" or divisor.prim != "add":
        return None
    for largest, sink in (top.args, top.args[::-1]):
        for total, term in (divisor.args, divisor.args[::-1]):
            if not (is_acc(largest, 0) and is_acc(total, 1) and sink.prim == "load"):
                continue
            difference = term.args[0] if term.prim == "exp" else term
            if difference.prim in ("sub", "exp_difference") and difference.args == (sink, top):
                return sink
    return None


def _quotient(value: Scalar) -> tuple[Scalar, Scalar] | None:
    """(a, b) of a / b, also where that is a product with 1 / b."""
    if value.prim == "div":
        return value.args[0], value.args[1]
    if value.prim == "mul":
        for one, other in (value.args, value.args[::-1]):
            if other.prim == "div" and other.args[0].prim == "const" and other.args[0].data == 1.0:
                return one, other.args[1]
    return None


def _clamped(value: Scalar, number: int) -> float | None:
    """The lower limit of an accumulated value: -inf if there is none; None if it is something else."""
    if is_acc(value, number):
        return -math.inf
    if value.prim == "maximum":
        for one, other in (value.args, value.args[::-1]):
            if is_acc(one, number) and other.prim == "const":
                return float(other.data)
    return None


# -- reading the score


@dataclass
class Score:
    """A score as scale, masks and window around the product."""

    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    left: Dim | None = None
    right: Dim | None = None


def read_score(score: Scalar, query: int) -> Score | None:
    """The parts of a score, from the outside in; None if it is another function of the product.

    `query` is the number of the axis of queries, the next one counts keys. Masks come in the order in which
    they apply.
    """
    found = Score()
    at = score
    scaled = False
    while at.prim != "acc":
        if at.prim == "cast":
            at = at.args[0]
            continue
        step = _read_scale(at) if at.prim in ("mul", "div") else None
        if step is not None:
            at, factor = step
            found.scale *= factor
            scaled = True
            continue
        if scaled:  # a mask inside of a scale would be scaled too
            return None
        inner = _read_mask(at, query, found)
        if inner is None:
            return None
        at = inner
    found.masks.reverse()
    return found


def _read_scale(at: Scalar) -> tuple[Scalar, float] | None:
    a, b = at.args
    if b.prim == "const":
        return (a, float(b.data)) if at.prim == "mul" else (a, 1 / float(b.data)) if b.data else None
    if at.prim == "mul" and a.prim == "const":
        return b, float(a.data)
    return None


def _holds_product(value: Scalar) -> bool:
    return any(e.prim == "acc" for e in value.walk())


def _read_mask(at: Scalar, query: int, found: Score) -> Scalar | None:
    """Take one mask off a score: what is left of it, or None."""
    if at.prim == "add":
        inside, outside = at.args if _holds_product(at.args[0]) else at.args[::-1]
        plain = _uncast(outside)
        if _holds_product(outside) or plain.prim != "load":
            return None
        found.masks.append(Mask("add", plain))
        return inside
    if at.prim != "where" or _holds_product(at.args[0]):
        return None
    condition, yes, no = at.args
    negated = not _holds_product(yes)
    inside, fill = (no, yes) if negated else (yes, no)
    if fill.prim != "const" or not _holds_product(inside):
        return None
    if not _read_condition(condition, query, float(fill.data), negated, found):
        return None
    return inside


def _read_condition(condition: Scalar, query: int, fill: float, negated: bool, found: Score) -> bool:
    """Enter what a condition hides; False if it is none that masks and a window can say."""
    if condition.prim == "logical_not":
        return _read_condition(condition.args[0], query, fill, not negated, found)
    if condition.prim == ("logical_or" if negated else "logical_and"):
        return all(_read_condition(c, query, fill, negated, found) for c in condition.args)
    if condition.prim == "load":
        found.masks.append(Mask("keep", condition, fill, negated))
        return True
    return fill == -math.inf and _read_window(condition, query, negated, found)


COMPARISONS = {"less_equal": (1, 0), "less": (1, -1), "greater_equal": (-1, 0), "greater": (-1, -1)}


def _read_window(condition: Scalar, query: int, negated: bool, found: Score) -> bool:
    """key <= query + c bounds the window to the right, key >= query - c to the left."""
    if condition.prim not in COMPARISONS:
        return False
    sign, slack = COMPARISONS[condition.prim]
    parts = [affine(side, query + 2) for side in condition.args]
    if parts[0] is None or parts[1] is None:
        return False
    steps = [
        a - b if isinstance(a, int) and isinstance(b, int) else None
        for a, b in zip(parts[0][0], parts[1][0], strict=True)
    ]
    rests = [to_dim(p[1]) for p in parts if p is not None]
    if None in steps or any(r is None for r in rests) or any(s != 0 for s in steps[:query]):
        return False
    # sign * (lhs - rhs) <= slack, with lhs - rhs = key_step * key + query_step * query + rest
    left_rest, right_rest = rests
    assert left_rest is not None and right_rest is not None
    rest = (left_rest - right_rest) * sign
    query_step, key_step = (s * sign for s in steps[query:] if s is not None)
    if negated:  # not (a <= slack) is -a <= -slack - 1
        query_step, key_step, rest, slack = -query_step, -key_step, -rest, -slack - 1
    if (query_step, key_step) == (-1, 1) and found.right is None:
        found.right = slack - rest
        return True
    if (query_step, key_step) == (1, -1) and found.left is None:
        found.left = slack - rest
        return True
    return False
