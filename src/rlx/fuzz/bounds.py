"""How far a native result may be from the truth: one table of rounding, followed through a graph.

| op | its own rounding |
|---|---|
| elementwise | 4 ulp of its dtype |
| sums, running sums, scattered sums of K terms | K eps sum abs(x) |
| contractions, convolutions, transforms, maps of K > 3 elements | 2 K eps sum abs(a) abs(b) |
| moves, comparisons, extremes, sorts, integers, floor and the like | none |
| one addition or product whose result the dtype holds | none |
| rows rounded to bytes times codes | none; where they are off, a step of their groups more |

Values are computed in f64 by the reference. What operands are off by is carried on: linearly through sums and
products, elsewhere by looking at what the op gives at both ends of its operands' intervals. What is compared
is not judged where the intervals meet. A complex number
is off by a distance in the plane; an index, where rounding may decide it, by a place. Bodies of loops and
branches are followed step by step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rlx.api.lowering import lower
from rlx.ir.bind import match_shape
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.node import is_among
from rlx.ir.op import Op, Role, get_op
from rlx.ir.rewrite import substitute_dims
from rlx.ir.types import tensor_types
from rlx.kernel.form import (
    CodedContract,
    Contract,
    Conv,
    Cumulate,
    Form,
    HostCall,
    Map,
    Pieces,
    Reduce,
    Scatter,
    Sort,
    Template,
)
from rlx.kernel.scalar import EXACT, PRIMITIVES
from rlx.ops.array.addressing import OutOfRangeError
from rlx.reference.interpreter import Interpreter

ELEMENTWISE_ULPS = 4
ADDED_UP = ("sum", "add")
ROUNDED = "fc"  # kinds of dtypes
MOST_CORNERS = 3  # operands whose errors are looked at together
NEAREST = ("add", "mul", "sub")  # rounded once: a result that the dtype has is the result


@dataclass
class Bounded:
    """A value in f64 or c128 (integers as they are) and how far a computed one may be from it."""

    value: np.ndarray
    error: np.ndarray | float = 0.0


class NotFollowed(Exception):
    """The graph holds an op through which errors are not followed."""


class Follower(Interpreter):
    """Walks a graph of primitive ops with values and bounds."""

    def __init__(
        self, graph: Graph, feed: Mapping[str, np.ndarray | Bounded], binding: Mapping[str, int]
    ) -> None:
        super().__init__(graph, binding)
        self.known: dict[int, tuple[Bounded, ...]] = {}
        self.feed = feed

    def outputs(self) -> dict[str, Bounded]:
        for node in self.graph.nodes:
            self.known[node.id] = self.step(node)
        return {name: self.known[node.id][0] for name, node in self.graph.outputs.items()}

    def step(self, node: Node) -> tuple[Bounded, ...]:
        role = node.op.role
        if role is Role.INPUT:
            given = self.feed[node.attrs["name"]]
            return (given if isinstance(given, Bounded) else Bounded(widened(given)),)
        if role is Role.CONSTANT:
            return (Bounded(widened(node.attrs["value"].array)),)
        if role is Role.PARAM:
            return (Bounded(widened(np.asarray(self.graph.param_values[node.attrs["name"]]))),)
        if role is Role.RESULT:
            return (self.known[node.operands[0].id][node.attrs["index"]],)
        if role is not Role.COMPUTE or node.op.effects not in ("none", "ordered"):
            raise NotFollowed(node.op.name)
        operands = [self.known[o.id][0] for o in node.operands]
        if node.bodies:
            return self.through_bodies(node, operands)
        if is_about_bits(node.op) or not node.op.has("lower") or isinstance(self.form(node), HostCall):
            return self.exactly(node, operands)
        if isinstance(self.form(node), CodedContract):
            return (self.rounded_rows(node, operands),)
        if node.op.family == "fourier" and not all(np.isfinite(o.value).all() for o in operands):
            raise NotFollowed("which sums an infinite number spoils is up to the algorithm")
        values = self.apply(node, [o.value for o in operands])
        errors = [self.carried(node, operands, values, i) for i in range(len(values))]
        own = self.rounding(node, operands, values)
        if rounds_once(self.form(node)):
            kept = [(e == 0) & self.is_kept(node, v) for e, v in zip(errors, values, strict=True)]
            own = [np.where(k, 0.0, r) for k, r in zip(kept, own, strict=True)]
        # An unknown error times 0 is NaN: the error stays unknown.
        totals = [np.nan_to_num(e + r, nan=np.inf, posinf=np.inf) for e, r in zip(errors, own, strict=True)]
        return tuple(Bounded(v, t) for v, t in zip(values, totals, strict=True))

    def is_kept(self, node: Node, value: np.ndarray) -> np.ndarray:
        """Where the dtype of a node holds a value as it is; the truth of f64 is rounded itself."""
        if node.dtype.np == value.dtype and value.dtype.kind in ROUNDED:
            return np.zeros(value.shape, bool)
        with np.errstate(all="ignore"):
            return value.astype(node.dtype.np).astype(value.dtype) == value

    def exactly(self, node: Node, operands: Sequence[Bounded]) -> tuple[Bounded, ...]:
        """What an op gives that every backend computes alike, if its operands are exact."""
        if any(np.any(o.error) for o in operands):
            raise NotFollowed(node.op.name)
        arrays = [o.value.astype(n.dtype.np) for o, n in zip(operands, node.operands, strict=True)]
        return tuple(Bounded(v) for v in self.apply(node, arrays))

    def rounded_rows(self, node: Node, operands: Sequence[Bounded]) -> Bounded:
        """A product of rows that are rounded to bytes: exact in all bits, unless rows are off."""
        x, *weights = operands
        if any(np.any(w.error) for w in weights):
            raise NotFollowed("weights in codes that are off")
        if not np.any(x.error):
            return self.exactly(node, operands)[0]
        (value,) = self.apply(node, [o.value for o in operands])
        error = np.broadcast_to(x.error, x.value.shape)
        k, group = x.value.shape[-1], node.attrs["group"]
        sizes = np.abs(x.value) + error
        largest = [sizes[..., i : i + group].max(-1, keepdims=True) for i in range(0, k, group)]
        step = np.repeat(np.concatenate(largest, -1), group, axis=-1)[..., :k] / 100
        matrix = np.abs(get_op("dequantize_groups").ref(*[w.value for w in weights], **node.attrs))
        total = np.matmul(error + step, matrix.astype(np.float64))
        return Bounded(value, np.nan_to_num(total, nan=np.inf, posinf=np.inf))

    def through_bodies(self, node: Node, operands: Sequence[Bounded]) -> tuple[Bounded, ...]:
        """The op's reference moves pairs of values and errors about; its bodies are followed."""
        attrs = {k: self.bound_attr(v) for k, v in node.attrs.items()}
        out = node.op.ref(*map(paired, operands), **attrs, run=_Bodies(node, self.binding))
        return tuple(unpaired(a) for a in (out if isinstance(out, tuple) else (out,)))

    def form(self, node: Node) -> Form:
        made: Form = node.op.lower(*[o.tensor for o in node.operands], **node.attrs)
        return made

    def apply(self, node: Node, arrays: Sequence[np.ndarray], **changed: object) -> list[np.ndarray]:
        """What the op gives, with some attributes changed; casts between floats keep the value."""
        if node.op.family == "cast" and node.dtype.is_float and arrays[0].dtype == np.float64:
            return [arrays[0]]
        attrs = {k: self.bound_attr(v) for k, v in node.attrs.items()} | changed
        with np.errstate(all="ignore"):
            out = node.op.ref(*arrays, **attrs)
        return [widened(np.asarray(a)) for a in (out if isinstance(out, tuple) else (out,))]

    def bound_attr(self, value: Any) -> Any:
        return substitute_dims(value, self.binding)

    def is_linear(self, form: object) -> bool:
        if isinstance(form, (Contract, Conv)):
            return True
        return isinstance(form, (Reduce, Cumulate, Scatter)) and form.combine in ADDED_UP

    def carried(
        self, node: Node, operands: Sequence[Bounded], values: Sequence[np.ndarray], number: int
    ) -> np.ndarray | float:
        """What errors of operands do to a result."""
        total: np.ndarray | float = 0.0
        form = self.form(node)
        if compares(form) and node.operands[0] is not node.operands[1]:
            return undecided(*operands)
        if isinstance(form, Reduce) and form.combine in ("argmax", "argmin"):
            return unsure_place(operands[0], values[number], form)
        if isinstance(form, Sort):
            return unsure_order(operands[0], values, number)
        if is_wave(form):  # what is between the ends of an interval counts, too
            return np.minimum(operands[0].error, 2.0)
        if node.op.family == "fourier":
            return sum_of_errors(operands)
        sizes = magnitudes(operands)
        if multiplies(form) and operands[0].value.dtype.kind in ROUNDED:  # factors may diverge
            larger = self.apply(node, [sizes[0] + operands[0].error, *sizes[1:]])[number]
            return larger - self.apply(node, sizes)[number]
        for i, operand in enumerate(operands):
            if not np.any(operand.error):
                continue
            error = np.broadcast_to(operand.error, operand.value.shape)
            if self.is_linear(form) and operand.value.dtype.kind in ROUNDED:
                # A product of two errors counts, too: where the values are 0 it is all that there is.
                grown = [
                    s + operands[j].error if s.dtype.kind in ROUNDED else s for j, s in enumerate(sizes[:i])
                ]
                parts = [*grown, error, *sizes[i + 1 :]]
                total = total + self.apply(node, parts, **padding_size(form, exact=i == 0))[number]
                continue
            if is_among(node.operands[i], node.operands[:i]):
                continue  # moved with the first
            moved = []
            for end in ends(operand.value, error):
                same = [o is node.operands[i] for o in node.operands]
                parts = [end if s else o.value for s, o in zip(same, operands, strict=True)]
                moved.append(distance(self.moved(node, parts, i, operand.value)[number], values[number]))
            if not np.isfinite(error).all():  # where the ends are infinite, what is NaN has no bound
                moved = [np.where(np.isnan(m), np.inf, m) for m in moved]
            total = total + functools.reduce(np.fmax, moved)
        if wraps(form):
            total = np.maximum(total, wrapped(*operands))
        if not self.is_linear(form):
            total = np.fmax(total, self.at_corners(node, operands, values[number], number))
        return total

    def at_corners(
        self, node: Node, operands: Sequence[Bounded], value: np.ndarray, number: int
    ) -> np.ndarray | float:
        """What errors of several operands do together: a power may grow by more than its parts say."""
        off = list({n.id: i for i, n in enumerate(node.operands) if np.any(operands[i].error)}.values())
        if not 1 < len(off) <= MOST_CORNERS:
            return 0.0
        choices = [ends(o.value, np.broadcast_to(o.error, o.value.shape)) for o in (operands[i] for i in off)]
        total: np.ndarray | float = 0.0
        for corner in itertools.product(*choices):
            at = dict(zip((node.operands[i].id for i in off), corner, strict=True))
            parts = [at.get(n.id, o.value) for n, o in zip(node.operands, operands, strict=True)]
            try:
                total = np.fmax(total, distance(self.apply(node, parts)[number], value))
            except OutOfRangeError:  # an index: its own error is all that counts
                return 0.0
        return total

    def moved(self, node: Node, parts: list[np.ndarray], i: int, exact: np.ndarray) -> list[np.ndarray]:
        """What an op gives at an end of an operand's interval. An index stays within what indices are there,
        of all places or, where each column is an axis, of its column: kernels read nothing else."""
        end, tried = parts[i], parts
        for over in (None, tuple(range(exact.ndim - 1))):
            try:
                return self.apply(node, tried)
            except OutOfRangeError:
                low, high = exact.min(over, keepdims=True), exact.max(over, keepdims=True)
                tried = [np.clip(end, low, high) if p is end else p for p in parts]
        return self.apply(node, tried)

    def rounding(
        self, node: Node, operands: Sequence[Bounded], values: Sequence[np.ndarray]
    ) -> list[np.ndarray | float]:
        """What the op itself may add."""
        form = self.form(node)
        out: list[np.ndarray | float] = []
        for i, (t, value) in enumerate(zip(tensor_types(node.type), values, strict=True)):
            if not (t.dtype.is_float or t.dtype.is_complex):
                out.append(0.0)
                continue
            info = ml_dtypes.finfo(t.dtype.np)
            eps, grain = float(info.eps), float(info.smallest_subnormal)  # below the normal numbers
            terms, size = self.sum_of(node, form, operands, i)
            if size is not None:
                lost = self.lost_between(node, form, operands, i, info)
                out.append(terms * eps * size + ELEMENTWISE_ULPS * eps * np.abs(value) + terms * lost + grain)
            elif isinstance(form, (Map, Pieces)) and not moves_only(form):
                out.append(ELEMENTWISE_ULPS * eps * np.abs(value) + grain)
            else:
                out.append(0.0)
        return out

    def lost_between(
        self, node: Node, form: object, operands: Sequence[Bounded], number: int, info: Any
    ) -> np.ndarray | float:
        """What a product may lose on its way, whatever the order of its factors: the small ones first are
        rounded as numbers near 0 are, and the large ones then multiply that; or those first overflow."""
        if not multiplies(form):
            return 0.0
        sizes = magnitudes(operands)
        largest = self.apply(node, [np.maximum(sizes[0] + operands[0].error, 1.0), *sizes[1:]])[number]
        smallest = self.apply(node, [np.minimum(sizes[0], 1.0), *sizes[1:]])[number]
        lost = np.where(smallest < float(info.tiny), float(info.smallest_subnormal) * largest, 0.0)
        return np.where(largest > float(info.max), np.inf, lost)

    def sum_of(
        self, node: Node, form: object, operands: Sequence[Bounded], number: int
    ) -> tuple[float, np.ndarray | float | None]:
        """(terms, sum of their sizes) of an op that adds up; a factor of 2 where they are products."""
        sizes = magnitudes(operands)

        def extent(dims: Sequence[Any]) -> float:
            return float(math.prod(self.bound_attr(tuple(dims)))) or 1.0

        if isinstance(form, Contract):
            return 2 * extent([form.lhs[a] for a, _ in form.contract]), self.apply(node, sizes)[number]
        if isinstance(form, Conv):
            return 2 * extent(form.w[1:]), self.apply(node, sizes, **padding_size(form))[number]
        if isinstance(form, Reduce) and form.combine in ADDED_UP:
            return extent([form.space[a] for a in form.axes]), self.apply(node, sizes)[number]
        if isinstance(form, Reduce) and form.combine == "prod":
            return extent([form.space[a] for a in form.axes]), np.abs(self.apply(node, sizes)[number])
        if isinstance(form, Cumulate) and form.combine in (*ADDED_UP, "prod"):
            return extent([form.space[form.axis]]), self.apply(node, sizes)[number]
        if isinstance(form, Scatter) and form.combine in (*ADDED_UP, "mul"):
            return extent(form.space), self.apply(node, sizes)[number]
        if isinstance(form, Map) and (loads := sum(e.prim == "load" for e in form.body.walk())) > 3:
            return 2.0 * loads, max(float(s.max(initial=0)) for s in sizes if s.dtype.kind == "f")
        if isinstance(form, Template):
            count = max((o.value.size for o in operands), default=1)
            return 2.0 * count, max(
                (float(s.max(initial=0)) for s in sizes if s.dtype.kind == "f"), default=0.0
            )
        return 0.0, None


class _Bodies:
    """Runs the bodies of a node on pairs of values and errors, for its reference."""

    def __init__(self, node: Node, binding: Mapping[str, int]) -> None:
        self.node, self.binding = node, binding

    def __call__(self, number: int, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        body = self.node.bodies[number]
        feed = {n.attrs["name"]: unpaired(v) for n, v in zip(body.inputs, values, strict=True)}
        binding = dict(self.binding)
        for n, v in zip(body.inputs, values, strict=True):
            match_shape(n.shape, np.shape(v), binding, "an input of a body")
        return [paired(b) for b in Follower(lower(body), feed, binding).outputs().values()]

    def empty(self, number: int) -> list[np.ndarray]:
        outputs = self.node.bodies[number].outputs.values()
        return [
            paired(Bounded(widened(np.empty(n.tensor.bind(dict(self.binding)), n.dtype.np)))) for n in outputs
        ]

    def planned(self, number: int, symbol: str) -> int | None:
        return None


def is_about_bits(op: Op) -> bool:
    """A cast that keeps the bits has no gradient: what it does to a value is not about its size."""
    return op.family == "cast" and op.not_differentiable is not None


def paired(b: Bounded) -> np.ndarray:
    """A value and its error as one array that can be moved about: as the parts of complex numbers."""
    if b.value.dtype.kind == "f":
        both = np.empty(b.value.shape, np.complex128)
        both.real, both.imag = b.value, b.error  # no arithmetic: either may be infinite
        return both
    if np.any(b.error) or b.value.dtype.kind == "c":
        raise NotFollowed("a loop over what is neither real nor exact")
    return b.value


def unpaired(x: np.ndarray) -> Bounded:
    return Bounded(x.real.copy(), x.imag.copy()) if x.dtype.kind == "c" else Bounded(np.asarray(x))


def sum_of_errors(operands: Sequence[Bounded]) -> np.ndarray | float:
    """What a Fourier transform makes of errors along the last axis, which may have any signs. Factors are at
    most 1; coefficients of a real sequence may stand for two."""
    errors = (np.broadcast_to(o.error, o.value.shape) for o in operands)
    return functools.reduce(np.add, (2.0 * e.sum(-1, keepdims=True) for e in errors))


def padding_size(form: object, exact: bool = False) -> dict[str, object]:
    """The attribute of a convolution by which padding counts with its size; as nothing, if it is exact."""
    return {"fill": 0 if exact else abs(form.fill)} if isinstance(form, Conv) and form.fill else {}


def is_wave(form: object) -> bool:
    """Whether a map is a sine or a cosine: no steeper than 1, and never more than 2 apart."""
    return isinstance(form, Map) and form.body.prim in ("sin", "cos") and form.body.args[0].prim == "load"


def multiplies(form: object) -> bool:
    """Whether a form multiplies many elements of one operand."""
    return isinstance(form, (Reduce, Cumulate)) and form.combine == "prod"


def magnitudes(operands: Sequence[Bounded]) -> list[np.ndarray]:
    """Sizes of what is rounded; the rest as it is."""
    return [np.abs(o.value) if o.value.dtype.kind in ROUNDED else o.value for o in operands]


def ends(value: np.ndarray, error: np.ndarray) -> list[np.ndarray]:
    """Both ends of an interval, four of a disc; of a truth value that may differ, the other one.

    Zero, too, where it is inside: a quotient has no bound there.
    """
    if value.dtype == bool:
        return [value ^ (error > 0)]
    ways = (1, -1, 1j, -1j) if value.dtype.kind == "c" else (1, -1)
    with np.errstate(all="ignore"):
        found = [(value + way * error).astype(value.dtype) for way in ways]
        crosses = np.abs(value) < error
    return [*found, np.where(crosses, 0.0, value)] if value.dtype.kind == "f" and crosses.any() else found


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        return np.where(a == b, 0.0, np.abs(a.astype(wide) - b.astype(wide)))  # infinities are equal, too


def widened(x: np.ndarray) -> np.ndarray:
    """Floats in f64, complex numbers in c128; the rest as it is."""
    if x.dtype.kind in "iub":
        return x
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def rounds_once(form: object) -> bool:
    """Whether a map does at most one operation that rounds, and that one to the nearest number."""
    if not isinstance(form, Map):
        return False
    done = [e.prim for e in form.body.walk() if e.dtype.is_float and e.prim in PRIMITIVES]
    return all(p in EXACT or p in NEAREST for p in done) and sum(p in NEAREST for p in done) <= 1


def wraps(form: object) -> bool:
    """Whether a map is a remainder, which jumps at multiples of its divisor."""
    return isinstance(form, Map) and form.body.prim in ("mod", "fmod")


def wrapped(a: Bounded, b: Bounded) -> np.ndarray:
    """How far a remainder may be off where the operands do not say which multiples are between."""
    with np.errstate(all="ignore"):
        error = np.abs(a.error) + np.abs(np.asarray(a.value / b.value)) * b.error
        multiples = [np.floor((a.value + way * error) / b.value) for way in (1, -1)]
        # The quotient of two floats is rounded itself: a value next to a multiple may be either side of it.
        near = np.abs(a.value / b.value - np.round(a.value / b.value)) <= 1e-12
        jumps = (multiples[0] != multiples[1]) | (near & (error > 0))
        return np.where(jumps, 2 * (np.abs(b.value) + b.error), 0.0)


def compares(form: object) -> bool:
    """Whether a map says something about the order of two numbers."""
    if not isinstance(form, Map) or not form.body.dtype.is_bool or form.body.prim not in PRIMITIVES:
        return False
    return [a.prim for a in form.body.args] == ["load", "load"] and not form.body.args[0].dtype.is_bool


def undecided(a: Bounded, b: Bounded) -> np.ndarray:
    """1 where two numbers are nearer to each other than they are known: any comparison of them may differ."""
    with np.errstate(all="ignore"):
        room = np.add(a.error, b.error)
        return ((room > 0) & (distance(a.value, b.value) <= room)).astype(np.float64)


def unsure_place(x: Bounded, place: np.ndarray, form: Reduce) -> np.ndarray | float:
    """How far the place of an extreme may be off: others may be as good, as far as they are known."""
    error = np.broadcast_to(x.error, x.value.shape)
    if not error.any():
        return 0.0
    (axis,) = form.axes
    value = x.value if form.combine == "argmin" else -x.value
    with np.errstate(all="ignore"):
        best = np.min(value + error, axis=axis, keepdims=True)
        rivals = ~(value - error > best)  # NaN wins
    chosen = place if place.ndim == value.ndim else np.expand_dims(place, axis)
    at = np.arange(value.shape[axis]).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
    off = np.where(rivals, np.abs(at - chosen), 0).max(axis=axis, keepdims=True, initial=0)
    return off.reshape(place.shape).astype(np.float64)


def unsure_order(x: Bounded, results: Sequence[np.ndarray], number: int) -> np.ndarray | float:
    """How far sorted values, or their places, may be off: a value moves by no more than the largest error."""
    error = np.broadcast_to(x.error, x.value.shape)
    if not error.any():
        return 0.0
    most = np.broadcast_to(error.max(axis=-1, keepdims=True, initial=0), results[number].shape)
    if number == 0:
        return most
    with np.errstate(all="ignore"):
        gaps = np.abs(np.diff(np.sort(x.value, axis=-1), axis=-1))
        close = (gaps <= 2 * error.max(axis=-1, keepdims=True, initial=0)).any(axis=-1, keepdims=True)
    return np.where(np.broadcast_to(close, results[number].shape), float(x.value.shape[-1]), 0.0)


def moves_only(form: Map | Pieces) -> bool:
    bodies = [form.body] if isinstance(form, Map) else [p.body for p in form.pieces]
    return all(b.prim in ("load", "const") for b in bodies)


def assert_by_table(
    graph: Graph, feed: dict[str, np.ndarray], got: Mapping[str, np.ndarray], plain: Mapping[str, np.ndarray]
) -> None:
    """All results of a graph are within their bounds; `plain` is what the reference gives."""
    binding: dict[str, int] = {}
    for node in graph.inputs:
        match_shape(node.shape, feed[node.attrs["name"]].shape, binding, "an input")
    truth = Follower(lower(graph), feed, binding).outputs()
    for name, value in plain.items():
        assert_within(got[name], value, truth[name])


def assert_within(got: np.ndarray, plain: np.ndarray, truth: Bounded) -> None:
    """A native result is within its bound; where the truth is not finite, it is what the reference gives.

    Beyond the largest number of its dtype a result may be that number or infinite: rounding decides. So does
    it whether a reference that overflowed on the way is infinite, or NaN as the difference of two that are.
    """
    assert got.dtype == plain.dtype and got.shape == plain.shape
    bound = np.broadcast_to(truth.error, plain.shape)
    if plain.dtype.kind in "iub":
        exact = bound == 0  # elsewhere it is an index or a comparison of values that are not exact
        np.testing.assert_array_equal(got[exact], plain[exact])
        assert (distance(got, plain)[~exact] <= bound[~exact]).all()
        return
    narrow, wide = widened(plain), widened(got)
    real = dtype(plain.dtype).is_float
    overflows = ~np.isfinite(narrow) & np.isfinite(truth.value) & real
    same = ~np.isfinite(narrow) & ~overflows
    np.testing.assert_array_equal(wide[same], narrow[same])
    judged = ~same & np.isfinite(truth.value) & np.isfinite(bound) & ~(overflows & ~np.isfinite(wide))
    value = truth.value
    if real:
        most = float(ml_dtypes.finfo(plain.dtype).max)
        wide, value = np.clip(wide, -most, most), np.clip(value, -most, most)
    single = plain.dtype in (np.float32, np.complex64)
    smallest = 2.0**-126 if single else float(np.finfo(np.float64).tiny)
    if plain.dtype.itemsize == 2:  # below its normal numbers a format rounds to multiples of the least one
        smallest = float(ml_dtypes.finfo(plain.dtype).smallest_subnormal)
    off, room = distance(wide, value)[judged], bound[judged] + smallest
    assert (off <= room).all(), f"off by {off[off > room]}, allowed {room[off > room]}"
