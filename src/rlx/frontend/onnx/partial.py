"""Values that are known while a model is imported: a partial evaluator over nodes of small tensors.

A known value is an array of numbers, or an object array whose elements are numbers, sizes (`Dim`, so a symbol
stays a symbol), exact quotients of sizes, or UNKNOWN. Shape arithmetic of models (Shape, Gather, Concat, Mul,
Where, ...) is imported as ordinary nodes; whoever needs a shape asks here, and the nodes themselves die when
nothing else reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

from rlx.errors import RlxError
from rlx.frontend.onnx.scaled import LARGEST, MOST_DENOMINATOR, simple_fraction
from rlx.ir.assume import ConstraintLog, inferring, require_at_least
from rlx.ir.body import Body
from rlx.ir.dim import (
    Dim,
    Expr,
    ceildiv,
    dim_max,
    dim_min,
    divides,
    floordiv,
    known_eq,
    known_le,
    known_lt,
    mod,
    sym,
    symbols,
)
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import TensorType, TupleType
from rlx.records import dataclass

MOST_ELEMENTS = 4096
"""Larger tensors are data, not shapes."""


class Unknown:
    """An element about which nothing is known."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


@dataclass(frozen=True, repr=False)
class Undecided(Unknown):
    """A comparison of two sizes that depends on symbols; `relation` is eq, ne, lt or le."""

    lhs: Dim
    rhs: Dim
    relation: str = "eq"

    def negated(self) -> Undecided:
        """The opposite."""
        if self.relation in ("eq", "ne"):
            return Undecided(self.lhs, self.rhs, "ne" if self.relation == "eq" else "eq")
        return Undecided(self.rhs, self.lhs, "le" if self.relation == "lt" else "lt")


@dataclass(frozen=True)
class Quotient:
    """A size divided by a number, as models compute it in floating point before rounding to a size again."""

    size: Dim
    by: int


@dataclass(frozen=True, repr=False)
class Scaled(Unknown):
    """A size times a float that is no simple fraction: only known once it is rounded, down or up."""

    down: Dim | Unknown
    up: Dim | Unknown


def _number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, np.generic))


def _parts(x: Any) -> tuple[Dim, int] | None:
    """x as an exact quotient (size, by)."""
    if isinstance(x, Quotient):
        return x.size, x.by
    if isinstance(x, Expr):
        return x, 1
    if isinstance(x, (bool, np.bool_)) or not _number(x):
        return None
    if isinstance(x, (int, np.integer)):
        return int(x), 1
    if not np.isfinite(x):
        return None
    exact = Fraction(float(x))
    return (exact.numerator, exact.denominator) if exact.denominator <= MOST_DENOMINATOR else None


def _quotient(size: Dim, by: int) -> Any:
    if by < 0:
        size, by = -size, -by
    if by == 1:
        return size
    return floordiv(size, by) if divides(by, size) is True else Quotient(size, by)


Rule = Callable[..., Any]


def _exact(f: Callable[[Dim, int, Dim, int], Any]) -> Rule:
    """A rule of two exact quotients."""

    def rule(a: Any, b: Any) -> Any:
        left, right = _parts(a), _parts(b)
        return UNKNOWN if left is None or right is None else f(*left, *right)

    return rule


def _divide(a: Dim, p: int, b: Dim, q: int) -> Any:
    """(a / p) / (b / q), for a divisor that is a number or divides exactly."""
    if isinstance(b, int):
        return UNKNOWN if b == 0 else _quotient(a * q, p * b)
    return _quotient(floordiv(a, b) * q, p) if divides(b, a) is True else UNKNOWN


def _scaled(a: Any, b: Any, dtype: DType) -> Any:
    """A product in floating point."""
    found = ELEMENT["mul"](a, b)
    size, factor = (a, b) if isinstance(a, Expr) else (b, a)
    if (
        found is not UNKNOWN
        or not isinstance(size, Expr)
        or not _number(factor)
        or known_le(0, size) is not True
    ):
        return found
    simple = simple_fraction(float(factor), dtype.np)
    if simple is None:
        return UNKNOWN
    require_at_least(LARGEST - size, 0, f"{size} is too large")
    fraction, down, up = simple
    times, by = size * fraction.numerator, fraction.denominator
    return Scaled(floordiv(times, by) if down else UNKNOWN, ceildiv(times, by) if up else UNKNOWN)


def _floor_divide(a: Dim, p: int, b: Dim, q: int) -> Any:
    """Of whole sizes, by one that is not negative: sizes that make it 0 are refused when the program runs."""
    return floordiv(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _trunc_divide(a: Dim, p: int, b: Dim, q: int) -> Any:
    return _toward_zero(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _toward_zero(a: Dim, b: Dim) -> Dim:
    """a / b without its fraction, for a `b` that is not negative.

    A size less a number, like the h - 1 of a strided window, is assumed to be 0 or more: the quotient is
    then spelled like the sizes of other ops, and only sizes too small to be meant are refused.
    """
    if known_le(0, a) is not True:
        if known_le(a, 0) is True:
            return ceildiv(a, b)
        if not isinstance(a, Expr) or any(c < 0 for _, c in a.terms):
            return dim_max(floordiv(a, b), 0) + dim_min(ceildiv(a, b), 0)
        require_at_least(a, 0, f"{a} must not be negative")
    return floordiv(a, b)


def _mod(a: Dim, p: int, b: Dim, q: int) -> Any:
    return mod(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _fmod(a: Dim, p: int, b: Dim, q: int) -> Any:
    return _mod(a, p, b, q) if known_le(0, a) is True else UNKNOWN


def _extreme(f: Callable[..., Dim]) -> Rule:
    return _exact(lambda a, p, b, q: _quotient(f(a * q, b * p), p * q))


def _compare(relation: str, swapped: bool = False) -> Rule:
    f = known_lt if relation == "lt" else known_le

    def rule(a: Dim, p: int, b: Dim, q: int) -> Any:
        lhs, rhs = (b * p, a * q) if swapped else (a * q, b * p)
        found = f(lhs, rhs)
        return Undecided(lhs, rhs, relation) if found is None else found

    return _exact(rule)


def _negated(f: Callable[[Dim, Dim], bool | None]) -> Callable[[Dim, Dim], bool | None]:
    def rule(a: Dim, b: Dim) -> bool | None:
        found = f(a, b)
        return None if found is None else not found

    return rule


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, (bool, np.bool_)) and isinstance(b, (bool, np.bool_)):
        return bool(a) == bool(b)
    return _exact(_same_quotient)(a, b)


def _same_quotient(a: Dim, p: int, b: Dim, q: int) -> Any:
    found = known_eq(a * q, b * p)
    return Undecided(a * q, b * p) if found is None else found


def _logic(f: Callable[[bool, bool], bool], decisive: bool | None = None) -> Rule:
    def rule(a: Any, b: Any) -> Any:
        for x in (a, b):
            if decisive is not None and not isinstance(x, Unknown) and bool(x) is decisive:
                return decisive
        for x, other in ((a, b), (b, a)):  # beside the value that is not decisive, the other one decides
            if decisive is not None and not isinstance(x, Unknown) and isinstance(other, Undecided):
                return other
        return UNKNOWN if isinstance(a, Unknown) or isinstance(b, Unknown) else f(bool(a), bool(b))

    return rule


def _not(a: Any) -> Any:
    if isinstance(a, Undecided):
        return a.negated()
    return UNKNOWN if isinstance(a, Unknown) else not a


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Unknown):
        return a if _equal(a, b) is True else UNKNOWN
    return a if condition else b


def _rounded(f: Callable[[Dim, int], Any], number: Callable[[float], float]) -> Rule:
    def rule(a: Any) -> Any:
        if _number(a):
            return number(float(a))
        if isinstance(a, Scaled):
            return a.up if number is np.ceil else a.down
        parts = _parts(a)
        return UNKNOWN if parts is None else f(*parts)

    return rule


def _absolute(a: Any) -> Any:
    parts = _parts(a)
    if parts is None:
        return UNKNOWN
    size, by = parts
    return a if known_le(0, size) is True else _quotient(-size, by) if known_le(size, 0) is True else UNKNOWN


def _sign(a: Any) -> Any:
    parts = _parts(a)
    if parts is None:
        return UNKNOWN
    size = parts[0]
    if known_eq(size, 0) is True:
        return 0
    return 1 if known_lt(0, size) is True else -1 if known_lt(size, 0) is True else UNKNOWN


def _power(a: Any, b: Any) -> Any:
    whole = _number(b) and float(b) == int(b) and 0 <= int(b) <= 8
    return a ** int(b) if isinstance(a, Expr) and whole else UNKNOWN


def _cast(a: Any, to: DType) -> Any:
    if isinstance(a, Undecided):
        return a  # as a number it is 0 or 1; arithmetic with it is not known
    if isinstance(a, Scaled) and not to.is_bool:
        return a if to.is_float else a.down
    if isinstance(a, Unknown):
        return UNKNOWN
    if to.is_bool:
        return _not(_equal(a, 0)) if not isinstance(a, (bool, np.bool_)) else bool(a)
    if to.is_float or isinstance(a, Expr):
        return a  # sizes fit every integer dtype they are cast to
    if isinstance(a, Quotient):
        return _toward_zero(a.size, a.by)
    return int(a)


# element by element; all but the last group know what to do with UNKNOWN themselves
ELEMENT: Mapping[str, Rule] = {
    "add": _exact(lambda a, p, b, q: _quotient(a * q + b * p, p * q)),
    "sub": _exact(lambda a, p, b, q: _quotient(a * q - b * p, p * q)),
    "mul": _exact(lambda a, p, b, q: _quotient(a * b, p * q)),
    "div": _exact(_divide),
    "floor_div": _exact(_floor_divide),
    "trunc_div": _exact(_trunc_divide),
    "mod": _exact(_mod),
    "fmod": _exact(_fmod),
    "minimum": _extreme(dim_min),
    "maximum": _extreme(dim_max),
    "relu": lambda a: _extreme(dim_max)(a, 0),
    "less": _compare("lt"),
    "less_equal": _compare("le"),
    "greater": _compare("lt", swapped=True),
    "greater_equal": _compare("le", swapped=True),
    "equal": _equal,
    "not_equal": lambda a, b: _not(_equal(a, b)),
    "logical_and": _logic(operator.and_, decisive=False),
    "logical_or": _logic(operator.or_, decisive=True),
    "logical_xor": _logic(operator.xor),
    "logical_not": _not,
    "where": _choose,
    "floor": _rounded(floordiv, np.floor),
    "ceil": _rounded(ceildiv, np.ceil),
    "trunc": _rounded(_toward_zero, np.trunc),
    "abs": _absolute,
    "neg": lambda a: _exact(lambda x, p, y, q: _quotient(-x, p))(a, 1),
    "sign": _sign,
    "pow": _power,
}

# rearrangements: which of their operands they rearrange (None: all); the others say where
MOVES: Mapping[str, tuple[int, ...] | None] = {
    "reshape": (0,),
    "transpose": (0,),
    "broadcast_to": (0,),
    "slice": (0,),
    "copy": (0,),
    "concat": None,
    "gather": (0,),
    "gather_elements": (0,),
    "gather_nd": (0,),
    "scatter_elements": (0, 2),
    "scatter_nd": (0, 2),
}

REDUCTIONS = {
    "reduce_sum": ("add", 0),
    "reduce_prod": ("mul", 1),
    "reduce_max": ("maximum", None),
    "reduce_min": ("minimum", None),
    "reduce_all": ("logical_and", True),
    "reduce_any": ("logical_or", False),
}


class PartialEvaluator:
    """Answers what is known about the value of a node."""

    def __init__(self) -> None:
        self.given: dict[Node, np.ndarray] = {}
        """Inputs whose values the caller vouches for."""
        self.steps: set[str] = set()
        """Symbols that stand for the step of a loop: never sizes of a program."""
        self._memo: dict[Node, np.ndarray | None] = {}

    def new_step(self, loop: str, count: Dim | None = None) -> Expr:
        """A symbol for the step of a loop, which makes `count` of them at most."""
        name = f"step {len(self.steps)} of {loop}"
        self.steps.add(name)
        if isinstance(count, int):
            return sym(name, 0, max(count - 1, 0))
        step = sym(name)
        within = step if count is None else mod(step, count)
        assert isinstance(within, Expr)
        return within

    def is_step(self, value: Any) -> bool:
        """Whether a size or number differs from step to step of a loop."""
        return isinstance(value, Expr) and not self.steps.isdisjoint(symbols(value))

    def __call__(self, node: Node) -> np.ndarray | None:
        """The value, as far as it is known; None if nothing is."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._memo:
                stack.pop()
                continue
            waiting = [o for o in self._sources(top) if o not in self._memo]
            if waiting:
                stack += waiting
            else:
                self._memo[top] = self._value(top)
        return self._memo[node]

    def unknown_inputs(self, node: Node) -> list[Node]:
        """Inputs (of any graph) whose values would have to be known for the value of a node."""
        seen: dict[Node, None] = {}
        stack, found = [node], []
        while stack:
            top = stack.pop()
            if top in seen:
                continue
            seen[top] = None
            outer = _outer(top)
            if outer is not None:
                stack.append(outer)
            elif top.op.role is Role.INPUT and top not in self.given:
                found.append(top)
            stack += top.operands
        return found

    def _sources(self, node: Node) -> Iterable[Node]:
        outer = _outer(node)
        if outer is not None:
            return (outer,)
        return node.operands if node.op.role is Role.COMPUTE and _is_small(node) else ()

    def _value(self, node: Node) -> np.ndarray | None:
        role = node.op.role
        if node in self.given:
            return self.given[node]
        outer = _outer(node)
        if outer is not None:
            return self._memo[outer]
        if role is Role.CONSTANT:
            array: np.ndarray = node.attrs["value"].array
            return array
        if role is Role.PARAM:
            return node.graph.param_values.get(node.attrs["name"])
        if role is not Role.COMPUTE or not _is_small(node) or node.bodies or node.op.effects != "none":
            return None
        operands = [self._memo[o] for o in node.operands]
        if any(o is None for o in operands):
            return _counted(node)
        log = ConstraintLog()
        with inferring(log, node.where):
            found = evaluate(node, operands)  # type: ignore[arg-type]
        for constraint in log.take():
            node.graph.assume(constraint)
        return found


def _counted(node: Node) -> np.ndarray | None:
    """How many elements of a mask hold, for a sum over one whose positions are asked for, too: their number,
    a size that the run finds. So exporters write x[mask] = value."""
    names = [n.op.name for n in (node, *node.operands)]
    if names != ["reduce_sum", "cast"]:
        return None
    numbers = node.operands[0]
    if len(node.attrs["axes"]) != numbers.rank or not numbers.operands[0].dtype.is_bool:
        return None
    mask = _before_moves(numbers.operands[0])
    for other in node.graph.nodes:
        name = other.op.name
        if name == "nonzero" and _before_moves(other.operands[0]) is mask:
            return _object(other.attrs["count"]).reshape((1,) * node.rank)
    return None


def _before_moves(node: Node) -> Node:
    name = node.op.name
    while name in ("reshape", "copy"):
        node = node.operands[0]
        name = node.op.name
    return node


def evaluate(node: Node, operands: list[np.ndarray]) -> np.ndarray | None:
    """The value of one node from known values of its operands."""
    symbolic = any(o.dtype == object for o in operands) or any(_has_symbol(v) for v in node.attrs.values())
    try:
        with np.errstate(all="ignore"):
            if not symbolic:
                return np.asarray(node.op.ref(*operands, **node.attrs))
            return _plain(_symbolic(node, operands), node.tensor)
    except (RlxError, TypeError, ValueError, ArithmeticError, IndexError):
        return None  # not a fault here: the op says what is wrong when it runs


def _symbolic(node: Node, operands: list[np.ndarray]) -> Any:
    name, attrs = node.op.name, node.attrs
    if name == "dim_value":
        return _object(attrs["dim"])
    if name == "cast":
        return _each(lambda a: _cast(a, attrs["dtype"]), operands[0])
    if name == "mul" and node.dtype.is_float:
        return _each(lambda a, b: _scaled(a, b, node.dtype), *operands)
    if name in ELEMENT:
        return _each(ELEMENT[name], *operands)
    if any(_has_symbol(v) for v in attrs.values()):
        return None
    if name in MOVES and attrs.get("reduction", "none") == "none":
        return _moved(node, operands, MOVES[name])
    if name in REDUCTIONS:
        rule, start = REDUCTIONS[name]
        axes, keep = attrs["axes"], attrs["keepdims"]
        x = operands[0]
        for axis in sorted(axes, reverse=True):
            rows = _rows(x, axis)
            if start is not None:
                rows.insert(0, np.full(np.delete(x.shape, axis), start, object))
            x = reduce(lambda a, b: _each(ELEMENT[rule], a, b), rows)
            if keep:
                x = np.expand_dims(x, axis)
        return x
    if name == "cumsum" and not attrs.get("exclusive") and not attrs.get("reverse"):
        rows = _rows(operands[0], attrs["axis"])
        for i in range(1, len(rows)):
            rows[i] = _each(ELEMENT["add"], rows[i - 1], rows[i])
        return np.stack(rows, attrs["axis"])
    return None


def _rows(x: np.ndarray, axis: int) -> list[np.ndarray]:
    """The slices along an axis, without it."""
    return [np.take(_objects(x), [i], axis).reshape(np.delete(x.shape, axis)) for i in range(x.shape[axis])]


def _moved(node: Node, operands: list[np.ndarray], moved: tuple[int, ...] | None) -> np.ndarray:
    """A rearrangement: done to the numbers of the elements, which then name the elements."""
    elements: list[Any] = []
    numbered = list(operands)
    for i in range(len(operands)) if moved is None else moved:
        x = operands[i]
        numbered[i] = np.arange(len(elements), len(elements) + x.size).reshape(x.shape)
        elements += list(_objects(x).flat)
    order = np.asarray(node.op.ref(*numbered, **node.attrs))
    out = np.empty(order.shape, object)
    for at, number in np.ndenumerate(order):
        out[at] = elements[number]
    return out


def _each(rule: Rule, *arrays: np.ndarray) -> np.ndarray:
    out = np.frompyfunc(rule, len(arrays), 1)(*(_objects(a) for a in arrays))
    return out if isinstance(out, np.ndarray) else _object(out)


def _object(x: Any) -> np.ndarray:
    out = np.empty((), object)
    out[()] = x
    return out


def _objects(array: np.ndarray) -> np.ndarray:
    """The same elements as Python objects."""
    return array if array.dtype == object else array.astype(object)


def _plain(value: np.ndarray | None, t: TensorType) -> np.ndarray | None:
    """Numbers in the dtype of the tensor, where nothing symbolic is left."""
    if value is None or value.dtype != object:
        return value
    if all(_number(x) for x in value.flat):
        return value.astype(t.dtype.np)
    return value


def _is_small(node: Node) -> bool:
    if isinstance(node.type, TupleType):
        return False
    count = node.type.numel
    return isinstance(count, int) and count <= MOST_ELEMENTS


def _has_symbol(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_symbol, value))
    return isinstance(value, Expr)


def _outer(node: Node) -> Node | None:
    """For an input of a body that stands for a value around it: that value."""
    graph: Graph = node.graph
    if node.op.role is Role.INPUT and isinstance(graph, Body):
        for outer, inner in graph.captured.items():
            if inner is node:
                return outer
    return None
