"""Words of the notation: vectors, floats, and functions of a module that are called by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from notation_harness import run, text
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import Native, native
from rlx.codegen.native.words import (
    Word,
    broadcast,
    builder,
    call,
    fma,
    fmax,
    gep,
    i64,
    iota,
    load,
    ptr,
    reduce,
    reduce_add,
    shuffle,
    splat,
    store,
    transpose,
)
from rlx.errors import CompileError
from rlx.target.cpu import resolve


def test_words_of_vectors() -> None:
    """A square is turned, and rows are combined lane by lane."""

    @native
    def largest_of_sums(given: ptr) -> i64:
        rows = [load("<4 x i64>", gep(given, 4 * i, "i64")) for i in range(4)]
        sums = splat(0, 4, "i64")
        for i, column in enumerate(transpose(rows)):
            sums += column * broadcast(gep(given, i, "i64"), "i64", 4)  # times an element of the first row
        turned = shuffle(sums + iota(4), None, [1, 2, 3, 0])
        return reduce_add(turned) + reduce(lambda a, b: builder().smax(a, b), turned)

    rng = np.random.default_rng(0)
    square = rng.integers(-9, 9, (4, 4))
    held = np.ascontiguousarray(square, np.int64)
    sums = square @ square[0] + np.arange(4)
    assert run(largest_of_sums, held.ctypes.data) == sums.sum() + sums.max()


def test_words_of_floats() -> None:
    @native
    def written(x: ptr) -> None:
        a, b = load("<4 x float>", x), load("<4 x float>", gep(x, 4, "float"))
        store(fmax(fma(a, b, 0.5), 1.0), x)

    assert re.findall(r"f(?:mul|add|cmp \w+) <4 x float>", text(written)) == [
        "fmul <4 x float>",
        "fadd <4 x float>",
        "fcmp uno <4 x float>",
        "fcmp ogt <4 x float>",
    ]


def test_one_of_a_family_is_written_once() -> None:
    @native(internal=True, noinline=True)
    def double(place: ptr, times: Word) -> None:
        place[0] = place[0] * times

    @native
    def both(place: ptr) -> None:
        for times in (2, 3):
            call(double.written("scale", times="i64"), place, times)

    word = np.array([7], np.int64)
    run(both_result(both), word.ctypes.data)
    assert word[0] == 42
    assert text(both).count("define internal void @scale(") == 1


def test_a_word_gets_its_type_where_it_is_written() -> None:
    @native(internal=True)
    def stored(place: ptr, x: Word) -> None:
        store(x, place)

    @native
    def every(place: ptr) -> None:
        for lanes in (2, 4):
            type_ = f"<{lanes} x i64>"
            call(stored.written(f"stored.{lanes}", x=type_), place, load(type_, place))

    heads = re.findall(r"define internal void @stored.*?\(ptr %place, (.*?) %x\)", text(every))
    assert heads == ["<2 x i64>", "<4 x i64>"]
    with pytest.raises(CompileError, match="a parameter that is a Word gets its type by its name"):
        stored.emit(Module(resolve("x86-64")))


def both_result(function: Native[..., None]) -> Native[..., Any]:
    """The function as one that gives a word, which `run` expects."""

    @native
    def result(place: ptr) -> i64:
        function(place)
        return i64(0)

    return result
