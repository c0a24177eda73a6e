"""Symbolic sizes: normal form, bounds, text, compiled evaluation, all checked against plain integers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from processes import outputs_by_hash_seed
from rlx.errors import ParseError, ShapeError
from rlx.ir.dim import (
    CeilDiv,
    Constraint,
    Dim,
    Expr,
    Sym,
    ceildiv,
    compile_dims,
    dim_max,
    dim_min,
    divides,
    evaluate,
    known_eq,
    known_le,
    known_lt,
    lower_bound,
    parse_dim,
    substitute,
    sym,
    symbols,
    upper_bound,
)

Binding = dict[str, int]
Tree = tuple[Dim, Callable[[Binding], int]]
"""A dim made by the operators under test, and the same computation on plain integers."""

RANGES = {"a": (0, None), "b": (1, None), "c": (2, 6), "batch size": (0, 9)}
n, m, b1 = sym("n"), sym("m"), sym("b", min=1)


class Undefined(Exception):
    """A divisor is not positive for this binding."""


def positive(value: int) -> int:
    if value <= 0:
        raise Undefined
    return value


def ceiling(x: int, y: int) -> int:
    return -(-x // y)


OPERATORS: dict[str, tuple[Callable[[Dim, Dim], Dim], Callable[[int, int], int]]] = {
    "+": (lambda x, y: x + y, lambda x, y: x + y),
    "-": (lambda x, y: x - y, lambda x, y: x - y),
    "*": (lambda x, y: x * y, lambda x, y: x * y),
    "//": (lambda x, y: x // y, lambda x, y: x // positive(y)),
    "%": (lambda x, y: x % y, lambda x, y: x % positive(y)),
    "ceildiv": (ceildiv, lambda x, y: ceiling(x, positive(y))),
    "min": (dim_min, min),
    "max": (dim_max, max),
}


def leaf_symbol(name: str) -> Tree:
    low, high = RANGES[name]
    return sym(name, low, high), lambda binding: binding[name]


def leaf_int(value: int) -> Tree:
    return value, lambda binding: value


def combine(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    def build(op: str, left: Tree, right: Tree) -> Tree:
        symbolic, plain = OPERATORS[op]
        if op in ("//", "%", "ceildiv") and isinstance(right[0], int) and right[0] <= 0:
            right = leaf_int(1 - right[0])
        return symbolic(left[0], right[0]), lambda binding: plain(left[1](binding), right[1](binding))

    return st.builds(build, st.sampled_from(list(OPERATORS)), children, children)


leaves = st.one_of(
    st.sampled_from(list(RANGES)).map(leaf_symbol),
    st.integers(-4, 12).map(leaf_int),
)
trees = st.recursive(leaves, combine, max_leaves=7)
bindings = st.fixed_dictionaries(
    {name: st.integers(low, 20 if high is None else high) for name, (low, high) in RANGES.items()}
)


def value_of(tree: Tree, binding: Binding) -> int:
    try:
        return tree[1](binding)
    except Undefined:
        assume(False)
        raise


# -- the normal form means the same as the computation it came from


@given(trees, bindings)
def test_normal_form_keeps_the_value(tree: Tree, binding: Binding) -> None:
    expected = value_of(tree, binding)
    assert evaluate(tree[0], binding) == expected


@given(trees)
def test_text_round_trips(tree: Tree) -> None:
    text = str(tree[0])
    again = parse_dim(text)
    assert again == tree[0]
    assert str(again) == text
    assert hash(again) == hash(tree[0])


@given(trees, bindings)
def test_bounds_hold(tree: Tree, binding: Binding) -> None:
    value = value_of(tree, binding)
    low, high = lower_bound(tree[0]), upper_bound(tree[0])
    assert low is None or low <= value
    assert high is None or value <= high


@given(trees, trees, bindings)
def test_known_answers_never_lie(left: Tree, right: Tree, binding: Binding) -> None:
    x, y = value_of(left, binding), value_of(right, binding)
    assert known_eq(left[0], right[0]) in (None, x == y)
    assert known_le(left[0], right[0]) in (None, x <= y)
    assert known_lt(left[0], right[0]) in (None, x < y)


@given(trees, st.integers(1, 9), bindings)
def test_divides_never_lies(tree: Tree, k: int, binding: Binding) -> None:
    assert divides(k, tree[0]) in (None, value_of(tree, binding) % k == 0)


@given(trees, trees, trees)
def test_ring_laws(x: Tree, y: Tree, z: Tree) -> None:
    a, b, c = x[0], y[0], z[0]
    assert a + b == b + a and a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert a * (b + c) == a * b + a * c
    assert a - a == 0 and 0 - (0 - a) == a


@given(trees, trees, bindings)
def test_substitute_then_evaluate(tree: Tree, replacement: Tree, binding: Binding) -> None:
    """Replacing a symbol by a dim is evaluating with that dim's value."""
    low, high = RANGES["c"]
    inner = value_of(replacement, binding)
    assume(low <= inner <= high)
    expected = value_of(tree, {**binding, "c": inner})
    assert evaluate(substitute(tree[0], {"c": replacement[0]}), binding) == expected


@given(st.lists(trees, max_size=6), bindings)
def test_compiled_equals_evaluated(forest: list[Tree], binding: Binding) -> None:
    expected = tuple(value_of(t, binding) for t in forest)
    names = sorted(binding)
    function = compile_dims([t[0] for t in forest], names)
    assert function([binding[name] for name in names]) == expected


@given(trees)
def test_pickle_and_copy(tree: Tree) -> None:
    for other in (pickle.loads(pickle.dumps(tree[0])), copy.deepcopy(tree[0])):
        assert other == tree[0] and hash(other) == hash(tree[0])
        assert lower_bound(other) == lower_bound(tree[0])


@given(st.text(min_size=1))
@example("past_sequence_length + 1")
@example("a`b\\c\n\r")
@example("min")
@example("ünïcode")
def test_any_symbol_name_round_trips(name: str) -> None:
    d = 2 * sym(name) // 3
    again = parse_dim(str(d))
    assert again == d and symbols(again) == (name,)
    assert "\n" not in str(d)


# -- what the normal form looks like


@pytest.mark.parametrize(
    ("d", "text"),
    [
        (2 * sym("seq") + 1, "2*seq+1"),
        (1 - n, "-n+1"),
        (sym("seq") * sym("batch"), "batch*seq"),
        (n * n * m, "m*n**2"),
        (sym("seq") // 2, "seq//2"),
        ((sym("seq") + 1) // 3, "(seq+1)//3"),
        (-(n // 2), "-(n//2)"),
        (3 * (n // 2) - n % 4, "-(n%4)+3*(n//2)"),
        (ceildiv(sym("h"), 2), "ceildiv(h,2)"),
        ((sym("h") + 1) // 2, "ceildiv(h,2)"),
        (-(-sym("h") // 2), "ceildiv(h,2)"),
        (ceildiv(n, b1), "ceildiv(n,b)"),
        ((n + b1 - 1) // b1, "ceildiv(n,b)"),
        (dim_min(sym("b"), sym("a")), "min(a,b)"),
        (dim_max(1, n), "max(n,1)"),
        (dim_min(n, dim_min(m, 7), 9), "min(m,n,7)"),
        (sym("seq") % 4, "seq%4"),
        ((-n) % 16, "(-n)%16"),
        (sym("batch size") + 1, "`batch size`+1"),
        (sym("unk__12"), "unk__12"),
        (n // (m + 1), "n//(m+1)"),
        (5 // b1, "5//b"),
    ],
)
def test_text(d: Dim, text: str) -> None:
    assert str(d) == text
    assert parse_dim(text) == d


@pytest.mark.parametrize(
    ("d", "simple"),
    [
        ((4 * n) // 4, n),
        ((4 * n + 3) // 4, n),
        ((4 * n - 1) // 4, n - 1),
        ((4 * n + n % 4) // 4, n),
        ((4 * n + sym("r", max=3)) // 4, n),
        ((4 * n) % 4, 0),
        ((4 * n + 7) % 4, 3),
        ((n % 8) % 4, n % 4),
        ((3 * n) // 2, n + n // 2),
        ((2 * n + 1) // 4, n // 2),
        ((2 * n) % 4, 2 * (n % 2)),
        (n // 2 // 3, n // 6),
        (ceildiv(ceildiv(n, 2), 2), ceildiv(n, 4)),
        ((n + 2 - 3) // 2 + 1, ceildiv(n, 2)),
        ((n * m) // m, n),
        ((n * m * 6) // (2 * m), 3 * n),
        ((n * m + n) // (m + 1), n),
        ((n * m + n) % (m + 1), 0),
        ((n * m) % (m * 4), m * (n % 4)),
        (n // 1, n),
        (n % 1, 0),
        (0 // b1, 0),
        (sym("c", max=6) // 7, 0),
        (sym("c", max=6) % 7, sym("c")),
        (dim_min(n, n + 1), n),
        (dim_max(n, n // 2), n),
        (dim_max(n, 0), n),
        (dim_min(n, dim_max(n, m)), n),
        (dim_max(dim_min(n, m), n), n),
        (n - n, 0),
        (n // -2, -ceildiv(n, 2)),
        (n % -4, -((-n) % 4)),
    ],
)
def test_simplifications(d: Dim, simple: Dim) -> None:
    assert d == simple
    assert hash(d) == hash(simple)


def test_constants_collapse_to_int() -> None:
    for d in (n + 3 - n, (n * 0) + 2, (2 * n + 5) % 2, ceildiv(7, 2), dim_min(3, 4), parse_dim("2*3+1")):
        assert type(d) is int


def test_numpy_integers_are_integers() -> None:
    for d in (np.int64(3) + n, n * np.int32(2), np.int64(8) // b1, n // np.int64(4), np.uint8(3) - n):
        assert isinstance(d, Expr)
    assert np.int64(3) + n == n + 3
    assert type(np.int64(3) + n - n) is int
    with pytest.raises(TypeError):
        n + 1.5  # type: ignore[operator]
    with pytest.raises(TypeError):
        n // "2"  # type: ignore[operator]


def test_structure_can_be_walked() -> None:
    atom = ceildiv(n, 4).atom  # type: ignore[union-attr]
    assert isinstance(atom, CeilDiv) and atom.args == (n, 4)
    symbol = sym("seq", 1, 8).atom
    assert isinstance(symbol, Sym) and (symbol.name, symbol.min, symbol.max) == ("seq", 1, 8)
    assert (n + 1).atom is None  # type: ignore[union-attr]


# -- knowledge


def test_known_eq() -> None:
    assert known_eq(n + n, 2 * n) is True
    assert known_eq(n, n + 1) is False
    assert known_eq(2 * n, 2 * m + 1) is False
    assert known_eq(n + 1, 0) is False
    assert known_eq(n, m) is None
    assert known_eq(4 * (n // 4) + n % 4, n) is True
    assert known_eq(n - n // 2, ceildiv(n, 2)) is True
    assert known_eq(dim_min(n + 1, 5), dim_min(n, 4) + 1) is True
    assert known_eq(dim_min(n, m) + dim_max(n, m), n + m) is True
    assert known_eq(n // 2, n // 3) is None


def test_known_order() -> None:
    assert known_le(n // 2, n) is True
    assert known_le(ceildiv(n, 2), n) is True
    assert known_lt(ceildiv(n, 2), n) is None
    assert known_le(dim_min(n, m), n) is True
    assert known_le(n, dim_max(m, n)) is True
    assert known_le(n, n * b1) is True
    assert known_lt(n % 4, 4) is True
    assert known_le(n % m, n) is True
    assert known_lt(n, n) is False
    assert known_le(n, 3) is None
    assert known_le(4 * (n // 4), n) is True


def test_bounds() -> None:
    c = sym("c", 2, 6)
    assert (lower_bound(c), upper_bound(c)) == (2, 6)
    assert (lower_bound(3 - c), upper_bound(3 - c)) == (-3, 1)
    assert (lower_bound(c * c), upper_bound(c * c)) == (4, 36)
    assert (lower_bound(c // 4), upper_bound(ceildiv(c, 4))) == (0, 2)
    assert (lower_bound(n), upper_bound(n)) == (0, None)
    assert upper_bound(100 // b1) == 100
    assert lower_bound(n * b1 - n) == 0


def test_divides() -> None:
    assert divides(4, 8 * n + 4) is True
    assert divides(4, 8 * n + 2) is False
    assert divides(4, n) is None
    assert divides(m, n * m) is True
    assert divides(4, 12) is True


def test_constraint() -> None:
    eq = Constraint("eq", n, m + 1, ("model.py:3",))
    assert eq.check({"n": 4, "m": 3}) and not eq.check({"n": 4, "m": 4})
    assert eq.describe() == "n equals m+1" and eq.known() is None
    multiple = Constraint("multiple", n, 4)
    assert multiple.check({"n": 8}) and not multiple.check({"n": 9})
    assert multiple.describe() == "n is a multiple of 4"
    least = Constraint("min", n, 2)
    assert least.check({"n": 2}) and not least.check({"n": 1})
    assert least.describe() == "n is at least 2"
    other = Constraint("ne", n, 4)
    assert other.check({"n": 3}) and not other.check({"n": 4}) and other.describe() == "n differs from 4"
    assert other.known() is None and Constraint("ne", n, n + 1).known() is True
    assert Constraint("eq", n, n + 1).known() is False
    assert Constraint("multiple", 8 * n, 4).known() is True
    assert Constraint("min", n, 0).known() is True
    assert len({eq, Constraint("eq", n, m + 1, ("model.py:3",))}) == 1
    with pytest.raises(ShapeError, match="unknown constraint kind 'max'; use eq, ne, multiple, min"):
        Constraint("max", n, 2)


# -- errors


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it ends too early"),
        ("n+", "it ends too early"),
        ("n m", "'m' is not expected there"),
        ("(n", r"'\)' is missing"),
        ("n $ 2", r"'\$ 2' is not understood"),
        ("n/2", "'/2' is not understood"),
        ("n**m", "a power must be a number up to 1000, not 'm'"),
        ("n**99999", "a power must be a number up to 1000"),
        ("ceildiv(n)", "ceildiv takes two sizes"),
        ("min()", r"'\)' is not expected there"),
        ("n//0", "cannot divide the size n by 0"),
        ("n%(1-1)", "modulo 0"),
        ("`n", "is not understood"),
        ("``", "is not understood"),
        ("(" * 5000 + "n" + ")" * 5000, "nested more than 100 deep"),
        ("-" * 50000, "it ends too early"),
        ("9" * 5000, "a number has more than 1000 digits"),
        ("n**" + "9" * 5000, "a power must be a number up to 1000, not '9999"),
        ("(n+m)**9", "only a symbol or a function can be raised to a power"),
        ("*".join(f"(a{i}+b{i})" for i in range(60)), "would have more than 10000 terms"),
    ],
)
def test_parse_errors(text: str, why: str) -> None:
    with pytest.raises(ParseError, match=f"cannot read the size .*{why}"):
        parse_dim(text)


@given(st.text(alphabet="nm01 +-*/%(),`minaxceildv", max_size=20))
def test_parser_raises_only_parse_errors(text: str) -> None:
    try:
        parse_dim(text)
    except ParseError:
        pass


def test_parse_uses_given_symbols() -> None:
    assert lower_bound(parse_dim("n+1", {"n": sym("n", min=3)})) == 4


def test_error_texts() -> None:
    with pytest.raises(
        ShapeError, match=r"symbol `batch size` has no size; give one, .* \{'batch size': 128\}"
    ):
        evaluate(sym("batch size") + 1, {"n": 3})
    with pytest.raises(ShapeError, match="cannot divide the size n by 0"):
        n // 0
    with pytest.raises(ShapeError, match="cannot divide the size n by 0"):
        ceildiv(n, 0)
    with pytest.raises(ShapeError, match="cannot take the size n modulo 0"):
        n % 0
    with pytest.raises(
        ShapeError, match=r"the divisor of n//\(m-1\) must be positive, but these sizes make it -1"
    ):
        evaluate(n // (m - 1), {"n": 3, "m": 0})
    with pytest.raises(ShapeError, match="non-empty name"):
        sym("")
    with pytest.raises(ShapeError, match="0 <= min <= max"):
        sym("n", min=4, max=3)
    with pytest.raises(ShapeError, match="give at least one"):
        dim_min()
    with pytest.raises(ShapeError, match="negative power"):
        n**-1


@pytest.mark.parametrize("use", [bool, int, float, range, lambda d: d < 3, lambda d: 3 >= d])
def test_a_symbolic_size_has_no_value(use: Callable[[Expr], object]) -> None:
    with pytest.raises(
        ShapeError, match="the size n is symbolic, so it has no value yet; bind its symbols first"
    ):
        use(n)


def test_compile_errors() -> None:
    with pytest.raises(ShapeError, match=r"symbol n is not among the names given \(m\); add it"):
        compile_dims([n], ["m"])
    with pytest.raises(ShapeError, match=r"expected 2 sizes \(m, n\), got 1"):
        compile_dims([n], ["m", "n"])([1])
    with pytest.raises(ShapeError, match=r"the divisor of n//m must be positive"):
        compile_dims([n // m], ["m", "n"])([0, 4])


def test_compiled_function_shares_work() -> None:
    """Four thousand dims over one deep expression: every distinct one is computed once."""
    deep = ceildiv(n * m + 7, 3) * (n % 5 + 1)
    dims: list[Dim] = [deep + i % 50 for i in range(4000)]
    function = compile_dims(dims, ["m", "n"])
    assert function.__code__.co_nlocals < 60  # type: ignore[attr-defined]
    assert function([3, 11]) == tuple(evaluate(d, {"m": 3, "n": 11}) for d in dims)


def test_no_dependence_on_the_hash_seed() -> None:
    program = (
        "from rlx.ir.dim import *; s=[sym(x) for x in 'hgfedcba'];"
        "print(sum(s)*sum(s[:3]), dim_min(*s), dim_max(*s, 3), (sum(s)*5)//(s[0]+s[1]), (s[2]*7-s[1])%12)"
    )
    assert len(outputs_by_hash_seed(program)) == 1


def test_a_remainder_is_below_its_divisor() -> None:
    n, i = sym("n"), sym("i") % sym("n")
    assert known_lt(i, n) is True and dim_min(i + 1, n) == i + 1 and known_le(0, i) is True
    assert known_lt(i + 1, n) is None
