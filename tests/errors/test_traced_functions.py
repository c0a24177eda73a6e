"""Mistakes of people who write their first jitted function: each message says what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import RlxError

X = np.ones((4, 8), np.float32)
HERE = r"\(at test_traced_functions\.py:\d+\)$"


def assign(x: Any) -> Any:
    x[0] = 1.0
    return x


TRACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "method": (lambda x: x.sum(), r"a traced value has no attribute 'sum'; call rlx\.ops\.sum\(x\)"),
    "attribute": (lambda x: x.device, "a traced value has no attribute 'device'"),
    "item": (lambda x: x[0, 0].item(), "has no value while the graph is built; return it from the function"),
    "private": (lambda x: x.__iadd__(1), "'Node' object has no attribute '__iadd__'"),
    "assignment": (assign, r"cannot be changed in place; make a new value with rlx\.ops\.where"),
    "ufunc": (np.sin, r"NumPy cannot compute with a traced value.*call the function of rlx\.ops"),
    "ufunc inside": (lambda x: np.exp(x) * 2, r"NumPy cannot compute with a traced value"),
    "reduction of NumPy": (lambda x: np.sum(x), r"NumPy cannot compute with a traced value"),
    "function of NumPy": (lambda x: np.concatenate([x, x]), r"functions of rlx\.ops can"),
    "math": (lambda x: math.sqrt(x[0, 0]), "keep it a node"),
    "result of text": (lambda x: "done", "a traced function returned a str; return arrays, numbers or nests"),
    "result of objects": (lambda x: {1, 2}, "a traced function returned a set"),
    "integer division": (
        lambda x: ops.cast(x, "i32") / 2,
        r"cast it, for example rlx\.ops\.cast\(x, 'f32'\)",
    ),
    "two open sizes": (
        lambda x: ops.reshape(x, (-1, -1)),
        r"\[-1,-1\] leaves 2 sizes open; only one may be -1",
    ),
    "a size by name": (
        lambda x: ops.reshape(x, ("n",)),
        "has the size 'n', which no input has; give a number",
    ),
    "scan": (
        lambda x: ops.scan(lambda c: c, x, x),
        r"scan: its function is called as f\(carry, x\): too many",
    ),
    "cond": (
        lambda x: ops.cond(True, lambda: x, lambda: x, x),
        r"cond: its function is called as f\(operand0\)",
    ),
    "loop": (
        lambda x: ops.while_loop(lambda c: c < 3, lambda: 1, x[0, 0]),
        r"while_loop: .* f\(carry\): too many",
    ),
    "no function": (lambda x: ops.scan(x, x, x), r"scan: needs a function f\(carry, x\), got a Node"),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_cannot_be_traced(name: str) -> None:
    function, message = TRACED[name]
    with pytest.raises(RlxError, match=message):
        rlx.jit(function)(X)


def test_the_line_is_the_users() -> None:
    for name in (
        "method",
        "ufunc inside",
        "reduction of NumPy",
        "assignment",
        "two open sizes",
        "a size by name",
    ):
        with pytest.raises(RlxError, match=HERE):
            rlx.jit(TRACED[name][0])(X)


def scaled(x: Any, scale: Any) -> Any:
    return x * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, r"scaled \(test_traced_functions\.py:\d+\) takes \(x.*, scale.*\): missing .*'scale'"),
        ((X, 1.0, 2.0), {}, "too many positional arguments"),
        ((X,), {"factor": 2.0}, "missing a required argument: 'scale'"),
        ((X, "fast"), {}, "argument scale is of type str; give arrays and numbers, and name other.* static="),
        ((X, [X, "fast"]), {}, r"argument scale\[1\] is of type str"),
        ((X,), {"scale": b"2"}, "argument scale is of type bytes"),
        ((X, np.array(["a"])), {}, "argument scale is an array of <U1"),
        ((X, np.array([1, None])), {}, "argument scale is an array of object"),
        (
            (X, np.ones(3, ">f4")),
            {},
            r"argument scale is an array of >f4: .*call \.astype\('float32'\) first",
        ),
        (
            (X, 2**70),
            {},
            r"argument scale is 1180591620717411303424, which does not fit 64 bits; give a float",
        ),
    ],
)
def test_arguments_that_are_no_arrays(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(RlxError, match=message):
        rlx.jit(scaled)(*args, **kwargs)


def test_numbers_that_no_integer_holds() -> None:
    np.testing.assert_array_equal(rlx.jit(lambda x: x * 2**70)(X), X * np.float32(2.0**70))


@pytest.mark.parametrize("static", [1, "scale", (1,), ["scale"]])
def test_one_static_argument_needs_no_tuple(static: Any) -> None:
    """A name is a name, not its letters."""
    f = rlx.jit(lambda x, scale: x * {"double": 2.0}[scale], static=static)
    np.testing.assert_array_equal(f(X, "double"), X * 2)


def test_functions_of_python() -> None:
    """Those that do not say what they take, too."""
    np.testing.assert_array_equal(rlx.jit(abs)(-X), X)
    with pytest.raises(RlxError, match="iterate over indices"):
        rlx.jit(max)(X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rlx.grad(3), r"rlx\.grad takes a function, got a value of type int"),
        (lambda: rlx.vmap(None), r"rlx\.vmap takes a function"),
        (lambda: rlx.jvp(3, (X,), (X,)), r"rlx\.jvp takes a function"),
        (
            lambda: rlx.grad(scaled, argnums="x"),
            r"argnums='x'; give the places of arguments, such as 0 or \(0, 2\)",
        ),
        (
            lambda: rlx.grad(scaled, argnums=2)(X, 1.0),
            r"argnums names argument 2, but scaled .* got 2 by place",
        ),
        (lambda: rlx.grad(scaled)(X), "takes .*: missing a required argument: 'scale'"),
        (lambda: rlx.vmap(scaled)(X, scale=X), "vmap: give 'scale' by place"),
        (lambda: rlx.vmap(scaled)(X), "takes .*: missing a required argument"),
        (lambda: rlx.jvp(ops.tanh, X, X), "jvp: primals is of type ndarray; give a tuple"),
        (
            lambda: rlx.jvp(ops.tanh, (X,), (X[0],)),
            r"primal 0 is f32\[4,8\], its tangent f32\[8\]; give equal",
        ),
        (lambda: rlx.jvp(ops.tanh, (X,), ([X, X],)), "the primals hold 1 arrays, the tangents 2"),
    ],
)
def test_transforms(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RlxError, match=message):
        call()


def test_gradients_by_name() -> None:
    """Arguments by name are passed on; gradients are those of arguments by place."""
    loss = rlx.grad(lambda x, scale=1.0: ops.sum(x * x) * scale)
    np.testing.assert_array_equal(loss(X, scale=3.0), 6 * X)
    np.testing.assert_array_equal(rlx.jit(lambda x: loss(x, scale=3.0))(X), 6 * X)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("a", "b", "kind"), [(0.0, -1e9, "float32"), (1, 0, "int64"), (1, 0.5, "float32"), (True, False, "bool")]
)
def test_where_of_numbers(a: Any, b: Any, kind: str, jitted: bool) -> None:
    """The condition says nothing about the dtype of what is chosen."""

    def f(x: Any) -> Any:
        return ops.where(x > 0.0, a, b)

    x = np.array([-1, 1], np.float32)
    got = (rlx.jit(f) if jitted else f)(x)
    assert got.dtype == kind
    np.testing.assert_array_equal(got, np.where(x > 0, a, b).astype(kind))
