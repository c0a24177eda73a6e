"""What rlx.jit takes as arguments: numbers, and nested containers of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import DTypeError, TypeMismatchError

NUMBERS = [3, 0.1, True, np.float32(0.1), np.float64(0.1), np.int64(3), np.int8(3)]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_number_takes_the_dtype_beside_it(number: Any, dtype: Any) -> None:
    """With the bits of the same number in the text of the function."""
    x = np.array([0.3, -1.7, 5.0], dtype)
    plain = number.item() if isinstance(number, np.generic) else number
    want = rlx.jit(lambda x: x * plain - plain)(x)
    got = rlx.jit(lambda x, s: x * s - s)(x, number)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_numbers_beside_integers_and_comparisons() -> None:
    x = np.array([1, 2, 3], np.int32)
    np.testing.assert_array_equal(rlx.jit(lambda x, s: s - x)(x, 7), 7 - x)
    np.testing.assert_array_equal(rlx.jit(lambda x, s: x == s)(x, np.int64(2)), x == 2)
    np.testing.assert_array_equal(rlx.jit(lambda x, s: s != x)(x.astype(np.float32), 2), x != 2)
    with pytest.raises(DTypeError, match="mul: a number of f64 cannot be combined with a tensor of i32"):
        rlx.jit(lambda x, s: x * s)(x, 0.5)


def test_one_program_for_all_values_of_a_number() -> None:
    f = rlx.jit(lambda x, rate: x - rate * x)
    for rate in (0.5, 0.25, 1.0):
        np.testing.assert_array_equal(f(np.ones(2, np.float32), rate), np.full(2, 1 - rate))
    assert f.stats["traces"] == 1


def test_a_number_that_does_not_fit_is_refused_at_every_call() -> None:
    f = rlx.jit(lambda x, s: x + s)
    x = np.zeros(2, np.uint8)
    np.testing.assert_array_equal(f(x, 200), [200, 200])
    for wrong in (300, -1):
        with pytest.raises(DTypeError, match=f"s is {wrong}, which does not fit u8 .0 to 255.; cast"):
            f(x, wrong)
    assert f.stats["traces"] == 1


def test_numbers_alone_and_in_bodies() -> None:
    assert rlx.jit(lambda s: s * 2)(3).dtype == np.int64 and rlx.jit(lambda s: s)(0.5).dtype == np.float32
    rows = np.ones((3, 2))  # f64
    total = rlx.jit(lambda x, s: ops.scan(lambda c, row: (c + row * s, c), x[0] * 0.0, x)[0])(rows, 0.1)
    np.testing.assert_array_equal(total, (rows[0] * 0.1 + 0.1) + 0.1)
    slope = rlx.jit(lambda x, s: rlx.grad(lambda y: ops.sum(y * s))(x))(rows, 0.1)
    np.testing.assert_array_equal(slope, np.full_like(rows, 0.1))


class Pair(NamedTuple):
    w: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    b: Any
    kind: str = dataclasses.field(default="plain", metadata={"static": True})

    def __post_init__(self) -> None:
        assert self.kind != "wrong"


class Registered:
    def __init__(self, w: Any, b: Any, scale: float) -> None:
        self.w, self.b, self.scale = w, b, scale


rlx.register_pytree(
    Registered, lambda r: ((r.w, r.b), r.scale), lambda scale, parts: Registered(*parts, scale)
)

W, B = np.ones((2, 3), np.float32), np.full(3, 2, np.float32)


@pytest.mark.parametrize(
    "value", [Pair(W, B), Layer(W, B), Registered(W, B, 4.0)], ids=lambda v: type(v).__name__
)
def test_containers_pass(value: Any) -> None:
    made = rlx.jit(lambda p: {"p": p, "sum": p.w + p.b})(value)
    assert type(made["p"]) is type(value)
    np.testing.assert_array_equal(made["p"].w, W)
    np.testing.assert_array_equal(made["sum"], W + B)
    slopes = rlx.grad(lambda p: ops.sum(p.w * p.b))(value)
    assert type(slopes) is type(value)
    np.testing.assert_array_equal(slopes.w, np.broadcast_to(B, W.shape))
    np.testing.assert_array_equal(slopes.b, [2, 2, 2])


def test_what_is_besides_children_is_part_of_the_signature() -> None:
    f = rlx.jit(lambda p: p.w * p.scale)
    assert f(Registered(W, B, 4.0))[0, 0] == 4 and f(Registered(W, B, 5.0))[0, 0] == 5
    g = rlx.jit(lambda p: p.w if p.kind == "plain" else -p.w)
    assert g(Layer(W, B))[0, 0] == 1 and g(Layer(W, B, "other"))[0, 0] == -1
    assert f.stats["traces"] == g.stats["traces"] == 2


def test_sizes_of_fields_are_told_by_their_names() -> None:
    f = rlx.jit(lambda p: ops.sum(p.w))
    f(Layer(W, B))
    f(Layer(np.ones((4, 3), np.float32), B))
    assert f.stats["why"][1] == "p.w.shape[0] is 4, was 2, a symbol from now on"


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeMismatchError, match="Registered is registered already"):
        rlx.register_pytree(Registered, lambda r: ((), None), lambda rest, parts: None)
    with pytest.raises(TypeMismatchError, match="takes a class, got a value of type int"):
        rlx.register_pytree(3, lambda r: ((), None), lambda rest, parts: None)  # type: ignore[arg-type]
