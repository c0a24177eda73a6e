"""Families of native functions, methods that are expanded, and what Python decides while it writes them."""

from __future__ import annotations

from typing import Any

import pytest

from notation_harness import run
from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    builder,
    call,
    i64,
    loop,
    noalias,
    ptr,
    round_up,
    uge,
    ugt,
    ule,
    umax,
    umin,
    zext,
)
from rlx.errors import CompileError
from rlx.target.cpu import resolve


@native(internal=True, noinline=True)
def power(x: i64, *, exponent: int) -> i64:
    result = i64(1)
    for _ in range(exponent):
        result *= x
    return result


@native
def two_powers(x: i64) -> i64:
    square, cube = power.written("power.2", exponent=2), power.written("power.3", exponent=3)
    again = power.written("power.2", exponent=2)
    return call(square, x, returns=i64) + call(cube, x, returns=i64) + call(again, x, returns=i64)


def test_a_family_has_one_function_for_each_name() -> None:
    module = Module(resolve("x86-64"))
    two_powers.emit(module)
    assert [module.text().count(f"define internal i64 @power.{n}(") for n in (2, 3)] == [1, 1]
    assert run(two_powers, 3) == 9 + 27 + 9


def test_a_function_may_be_written_under_another_name() -> None:
    module = Module(resolve("x86-64"))
    power.emit(module, "power.4", exponent=4)
    assert module.defines("power.4") and not module.defines("power")


def test_a_parameter_may_say_that_nothing_else_points_there() -> None:
    @native
    def copy(to: noalias, source: ptr) -> None:
        to[0] = source[0]

    module = Module(resolve("x86-64"))
    copy.emit(module)
    assert "@copy(ptr noalias %to, ptr %source)" in module.text()


class Scale:
    """Its methods are expanded where they are called."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @inline
    def of(self, x: i64) -> i64:
        return x * self.factor

    @inline
    def into(self, f: Function, x: i64) -> i64:
        assert builder() is f
        return self.of(x) + 1


def test_methods_are_expanded() -> None:
    @native
    def scaled(x: i64, *, by: Scale) -> i64:
        return by.of(x) + by.into(builder(), x)

    assert run(scaled, 5, by=Scale(3)) == 15 + 16


def test_a_method_that_is_given_a_builder_writes_into_it() -> None:
    module = Module(resolve("x86-64"))
    f = module.function("old", [("i64", "x")], returns="i64")
    f.return_(Scale(3).into(f, f.args[0]))
    assert "mul i64 %x, 3" in module.text()
    with pytest.raises(CompileError, match="no native function is being written here"):
        Scale(3).of(f.args[0])


@inline
def digits(x: Any, count: int) -> Any:
    if count == 1:
        return x
    return digits(x, count - 1) * 10 + x


def test_a_function_may_expand_itself() -> None:
    @native
    def repeated(x: i64) -> i64:
        return digits(x, 4)

    assert run(repeated, 7) == 7777


def test_numbers_without_a_sign() -> None:
    @native
    def compared(a: i64, b: i64) -> i64:
        return zext(ule(a, b), i64) + zext(ugt(a, b), i64) * 2 + zext(uge(a, b), i64) * 4

    @native
    def extremes(a: i64, b: i64) -> i64:
        return umin(a, b) * 1000 + umax(a, b)

    assert [run(compared, *pair) for pair in ((1, 2), (2, 2), (-1, 2))] == [1, 5, 6]
    assert run(extremes, 7, 3) == 3007 and run(extremes, -1, 3) == 2999

    @native
    def rounded(a: i64) -> i64:
        return round_up(a, 8)

    assert [run(rounded, n) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


def test_lists_of_values_keep_their_types_in_a_loop() -> None:
    @native
    def fibonacci(n: i64) -> i64:
        pair = [i64(0), i64(1)]
        for _ in loop(n):
            pair = [pair[1], pair[0] + pair[1]]
        return pair[0]

    assert [run(fibonacci, n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]

    @native
    def changed(n: i64) -> i64:
        pair = [n, n]
        for _ in loop(n):
            pair = [n, n == 0]
        return pair[0]

    with pytest.raises(CompileError, match="is i64 before this loop, but i1 after a round"):
        changed.emit(Module(resolve("x86-64")))


def test_what_a_function_is_given_decides_without_a_branch() -> None:
    @native
    def chosen(x: i64, *, by: Scale | None, twice: bool) -> i64:
        if by is not None and isinstance(by, Scale):
            x = by.of(x)
        if twice and not isinstance(x, int):
            x += x
        return x

    assert run(chosen, 5, by=Scale(3), twice=True) == 30
    assert run(chosen, 5, by=None, twice=False) == 5


def test_a_loop_of_one_round_is_its_body() -> None:
    @native
    def once(x: i64, *, rounds: int) -> i64:
        parts = [x, x + 1]
        for i in loop(3, 3 + rounds):
            parts = [parts[1], parts[0] * i]
        return parts[0] * 100 + parts[1]

    modules = [Module(resolve("x86-64")) for _ in range(2)]
    for rounds, module in enumerate(modules, 1):
        once.emit(module, rounds=rounds)
    assert ["phi" in module.text() for module in modules] == [False, True]
    assert [run(once, 5, rounds=n) for n in (0, 1, 2)] == [506, 615, 1524]
