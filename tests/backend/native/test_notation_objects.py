"""Objects of Python inside native functions: buffers whose items are in memory, numbers with operators."""

from __future__ import annotations

import ctypes

import pytest

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import constant, literals
from rlx.codegen.native.jit import compile_and_load
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.operators import InMemory
from rlx.codegen.native.words import at, i64, load, loop, ptr, store
from rlx.errors import CompileError
from rlx.target.cpu import resolve


class Pair:
    """Two words."""

    def __init__(self, a: i64, b: i64) -> None:
        self.a, self.b = a, b

    @inline
    def __add__(self, other: Pair) -> Pair:
        return Pair(self.a + other.a, self.b - other.b)


class Pairs(InMemory):
    """Pairs of words in memory."""

    def __init__(self, pointer: ptr) -> None:
        self.pointer = pointer

    @inline
    def __getitem__(self, i: int) -> Pair:
        place = at(self.pointer, i * 2)
        return Pair(load(i64, place), load(i64, at(place, 1)))

    @inline
    def __setitem__(self, i: int, x: Pair) -> None:
        place = at(self.pointer, i * 2)
        store(x.a, place)
        self.store(x.b, place)

    @inline
    def store(self, x: i64, place: ptr) -> None:
        """Its name is that of a word, which it calls."""
        store(x, at(place, 1))


@native
def running(words: ptr, n: i64) -> None:
    """Sums of first words, differences of second ones."""
    pairs = Pairs(words)
    for i in loop(1, n):
        pairs[i] = pairs[i - 1] + pairs[i]


def test_items_in_memory_take_run_time_indices() -> None:
    host = resolve("host")
    module = Module(host)
    running.emit(module)
    code = compile_and_load(module.text(), host)
    words = (ctypes.c_int64 * 6)(1, 2, 10, 20, 100, 200)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("running"))
    function(ctypes.addressof(words), 3)
    assert list(words) == [1, 2, 11, -18, 111, -218]


@native
def listed(words: ptr, n: i64) -> i64:
    return [words[0], words[1]][n]  # type: ignore[return-value]


def test_items_of_a_list_do_not() -> None:
    with pytest.raises(CompileError, match="known at run time only"):
        listed.emit(Module(resolve("x86-64")))


@pytest.mark.parametrize("type_", ["float", "double", "half", "bfloat", "i32"])
def test_a_table_is_written_as_its_constants(type_: str) -> None:
    values = [0, 1, -1.0, 0.1, 3.5e38, float("inf"), -0.0, 1e-45]
    chosen = [int(v) for v in values[:3]] if type_ == "i32" else values[:4] if type_ == "half" else values
    for part in (chosen, chosen[:4]):
        assert literals(type_, part) == [str(constant(type_, v)) for v in part]
