"""Native functions in Python's syntax compute what Python does, fold what it knows, and name its lines."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notation_harness import refusal, run, text
from rlx.codegen.native.irtext import Function, Module
from rlx.codegen.native.jit import compile_and_load
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    alloca,
    builder,
    external,
    i32,
    i64,
    leave,
    load,
    loop,
    ptr,
    sdiv,
    select,
    store,
    trunc,
    udiv,
    ult,
    variable,
    zext,
)
from rlx.errors import CompileError
from rlx.target.cpu import resolve

HERE = Path(__file__).name


# ---- operators


def mixed(a: Any, b: Any) -> Any:
    return (a + b) * 3 - (a & b) + (a | 7) - (b ^ a) + (a << 2) - (b >> 3) + -a + ~b


def divided(a: Any, b: Any) -> Any:
    return a // b * 1000 + a % b


@pytest.mark.parametrize("rule", [mixed, divided])
def test_operators_compute_what_python_does(rule: Callable[[Any, Any], Any]) -> None:
    expand = inline(rule)

    @native
    def both(a: i64, b: i64) -> i64:
        return expand(a, b)

    rng = random.Random(3)
    for _ in range(20):
        a, b = rng.randint(-(10**6), 10**6), rng.choice([-7, -1, 1, 3, 8, 1000])
        assert run(both, a, b) == rule(a, b)


@native
def compare(a: i64, b: i64) -> i64:
    return (
        zext(a < b, i64)
        + zext(a <= b, i64) * 2
        + zext(a > b, i64) * 4
        + zext(a >= b, i64) * 8
        + zext(a == b, i64) * 16
        + zext(a != b, i64) * 32
    )


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1), (-1, 1), (5, 5)])
def test_comparisons_are_signed(a: int, b: int) -> None:
    assert run(compare, a, b) == (a < b) + 2 * (a <= b) + 4 * (a > b) + 8 * (a >= b) + 16 * (a == b) + 32 * (
        a != b
    )


def test_what_python_knows_is_computed_at_once() -> None:
    @native
    def known_only(x: i64, *, n: int) -> i64:
        total = 0
        for k in range(n):
            if k % 2 == 1 and n > 2:
                total += k
        return x + total

    body = text(known_only, n=6)
    assert "br " not in body and "icmp" not in body and "add i64 %x, 9" in body
    assert run(known_only, 1, n=2) == 1


def test_min_and_max_take_run_time_values() -> None:
    @native
    def clamp(x: i64) -> i64:
        return max(min(x, 10), -3)

    assert [run(clamp, x) for x in (-9, 4, 99)] == [-3, 4, 10]


# ---- branches


@native
def collatz(n: i64) -> i64:
    steps = 0
    while n != 1:
        if n & 1 == 0:
            n = udiv(n, 2)
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def test_a_loop_with_a_branch() -> None:
    assert [run(collatz, n) for n in (1, 6, 27)] == [0, 8, 111]


@native
def sign(x: i64) -> i64:
    if x < 0:
        return -1
    elif x == 0:
        return 0
    else:
        return 1


def test_every_side_may_return() -> None:
    assert [run(sign, x) for x in (-5, 0, 7)] == [-1, 0, 1]


@native
def first_zero(words: ptr, n: i64) -> i64:
    for i in range(n):
        if words[i] == 0:
            return i
    return -1


def test_a_loop_may_return_early() -> None:
    words = np.array([3, 1, 0, 0], np.int64)
    assert run(first_zero, words.ctypes.data, 4) == 2
    assert run(first_zero, words.ctypes.data, 2) == -1


@inline
def named(x: i64) -> i64:
    if x < 10:
        return x * 2
    y = x - 10
    if y < 10:
        return y * 3
    return y


def test_an_expanded_function_returns_from_branches() -> None:
    @native
    def twice(x: i64) -> i64:
        return named(x) + 1000 * named(x + 10)

    for x in (1, 12, 30):
        plain = [v * 2 if v < 10 else (v - 10) * 3 if v < 20 else v - 10 for v in (x, x + 10)]
        assert run(twice, x) == plain[0] + 1000 * plain[1]


def test_and_or_and_if_else_compute_only_what_is_needed() -> None:
    @native
    def careful(words: ptr) -> i64:
        if words != 0 and words[0] == 5:  # would crash on the null pointer
            return 1
        if words == 0 or words[0] == 6:
            return 2
        return words[1] if words[0] == 7 else 3

    for first, expected in ((5, 1), (6, 2), (7, 99), (8, 3)):
        words = np.array([first, 99], np.int64)
        assert run(careful, words.ctypes.data) == expected
    assert run(careful, 0) == 2


def test_and_on_known_values_is_pythons() -> None:
    @native
    def folded(x: i64, *, table: list[int] | None) -> i64:
        return x + (len(table) if table is not None and len(table) > 1 else 7)

    assert "br " not in text(folded, table=None)
    assert run(folded, 1, table=[1, 2, 3]) == 4 and run(folded, 1, table=None) == 8


def test_lists_of_values_are_carried() -> None:
    @native
    def fibonacci(n: i64) -> i64:
        pair = [0, 1]
        for _ in range(n):
            pair = [pair[1], pair[0] + pair[1]]
        return pair[0]

    assert [run(fibonacci, n) for n in (0, 1, 10, 50)] == [0, 1, 55, 12586269025]


def test_only_names_that_are_read_later_become_phis() -> None:
    @native
    def lean(x: i64) -> i64:
        kept = i64(0)
        if x > 3:
            scratch = x * 5
            kept = scratch + 1
        scratch = x
        return kept + scratch

    assert text(lean).count("phi") == 1
    assert run(lean, 4) == 25 and run(lean, 1) == 1


def test_a_side_that_returns_adds_no_phi() -> None:
    @native
    def guarded(x: i64) -> i64:
        y = x
        if x < 0:
            y = 0
            return y
        return y + 1

    assert "phi" not in text(guarded)
    assert run(guarded, -4) == 0 and run(guarded, 4) == 5


# ---- loops


def test_range_unrolls_what_is_known_and_loop_never() -> None:
    @native
    def unrolled(words: ptr) -> None:
        for i in range(3):
            words[i] = i

    @native
    def looped(words: ptr) -> None:
        for i in loop(0, 3):
            words[i] = i

    assert "phi" not in text(unrolled) and text(unrolled).count("store") == 3
    assert "phi" in text(looped) and text(looped).count("store") == 1


def test_python_loops_break_and_continue() -> None:
    @native
    def picked(x: i64, *, table: list[int]) -> i64:
        for item in table:
            if item < 0:
                continue
            if item > 9:
                break
            x += item
        return x

    assert run(picked, 100, table=[1, -5, 2, 50, 3]) == 103


def test_a_loop_steps() -> None:
    @native
    def stepped(n: i64) -> i64:
        total = 0
        for i in range(2, n, 3):
            total += i
        return total

    assert run(stepped, 12) == sum(range(2, 12, 3)) and run(stepped, 0) == 0


# ---- functions


@native(internal=True)
def half(x: i64) -> i64:
    return sdiv(x, 2)


def test_a_called_function_is_written_once() -> None:
    @native
    def quarter(x: i64) -> i64:
        return half(half(x))

    assert text(quarter).count("define internal i64 @half") == 1
    assert run(quarter, 44) == 11


def test_parameters_may_have_names_that_the_builder_uses() -> None:
    @native
    def named_alike(entry: i64, v1: i64, then2: i64) -> i64:
        if entry > v1:
            return then2
        return v1 - entry

    assert run(named_alike, 5, 3, 9) == 9 and run(named_alike, 3, 5, 9) == 2


def test_nested_functions_are_expanded() -> None:
    @native
    def squares(x: i64, y: i64) -> i64:
        def square(v: i64) -> i64:
            return v * v

        def larger(a: i64, b: i64) -> i64:
            if a > b:
                return a
            return b

        return larger(square(x), square(y))

    assert run(squares, -5, 3) == 25 and text(squares).count("define") == 1


def test_old_builder_code_can_expand_a_function() -> None:
    @inline
    def bounded(f: Function, x: Any) -> Any:
        if x < 0:
            x = 0
        return x

    module = Module(resolve("x86-64"))
    f = module.function("plain", [("i64", "x")], returns="i64")
    f.return_(bounded(f, f.args[0]))
    assert "icmp slt i64 %x, 0" in module.text()


def test_instructions_and_external_functions() -> None:
    absolute = external("llabs", i64)

    @native
    def through_memory(x: i64) -> i64:
        space = alloca(i64, 2)
        store(trunc(absolute(x), i32), space)
        space[1] = 5
        space[1] += 2
        assert builder().name == "through_memory"
        return zext(load(i32, space), i64) + select(x < 0, space[1], 0)

    assert run(through_memory, -40) == 47 and run(through_memory, 40) == 40


@native
def count_inside(words: ptr, n: i64, *, least: int | None) -> i64:
    found = 0
    for i in range(n):
        inside = ult(words[i], 8)
        if least is not None:  # decided now: no branch
            inside &= words[i] >= least
        found += zext(inside, i64)
    return found


def test_comparisons_without_a_sign() -> None:
    words = np.array([-1, 0, 3, 7, 8], np.int64)
    assert run(count_inside, words.ctypes.data, 5, least=None) == 3
    assert run(count_inside, words.ctypes.data, 5, least=2) == 2
    assert text(count_inside, least=None).count("br i1") == text(count_inside, least=2).count("br i1")


@native
def next_number() -> i64:
    place = variable("last", i64)
    place[0] += 1
    return place[0]


def test_a_variable_keeps_its_value_between_calls() -> None:
    host = resolve("host")
    module = Module(host)
    next_number.emit(module)
    code = compile_and_load(module.text(), host)
    call = ctypes.CFUNCTYPE(ctypes.c_int64)(code.address(next_number.name))
    assert [call(), call(), call()] == [1, 2, 3]


def test_an_expanded_function_can_leave_the_native_one() -> None:
    @inline
    def checked(x: i64) -> i64:
        if x < 0:
            leave(-1)
        return x * 2

    @native
    def checked_twice(x: i64, y: i64) -> i64:
        return checked(x) + checked(y)

    assert [run(checked_twice, *pair) for pair in ((1, 2), (-3, 2), (3, -2))] == [6, -1, -1]


# ---- errors


def test_errors_name_the_line() -> None:
    @native
    def wrong_types(x: i64, y: i32) -> i64:
        z = x + 1
        return z + y  # this line

    message = refusal(wrong_types)
    assert re.match(rf".*{HERE}:\d+: in wrong_types: operands of one instruction differ", message)
    assert message.endswith("return z + y  # this line")


def test_a_name_without_a_value_on_one_side() -> None:
    @native
    def one_sided(x: i64) -> i64:
        if x > 0:
            y = x
        return y

    assert "'y' has no value here" in refusal(one_sided)


def test_a_name_with_two_types() -> None:
    @native
    def two_types(x: i64, p: ptr) -> i64:
        y: Any = x
        if x > 0:
            y = p
        return y

    assert "'y' is ptr on one side of this `if` and i64 on the other" in refusal(two_types)


def test_a_loop_that_changes_a_type() -> None:
    @native
    def narrowed(x: i64) -> i64:
        y: Any = x
        while y > 3:
            y = trunc(y, i32)
        return y

    assert "'y' is i64 before this loop, but i32 after a round" in refusal(narrowed)


def test_a_number_is_not_a_condition() -> None:
    @native
    def truthy(x: i64) -> i64:
        if x:
            return 1
        return 0

    assert "compare it with 0" in refusal(truthy)


def test_an_operand_is_a_number() -> None:
    @native
    def below(x: i64, *, limit: Any) -> i64:
        return select(x < limit, i64(1), i64(0))

    assert text(below, limit=np.int32(5)) == text(below, limit=5)
    assert "takes values and numbers, not [5]" in refusal(below, limit=[5])


def test_a_missing_return() -> None:
    @native
    def silent(x: i64) -> i64:
        if x > 0:
            return x

    assert "can end without a return" in refusal(silent)


def test_lists_do_not_change_inside_a_branch() -> None:
    @native
    def mutating(x: i64) -> i64:
        held = [x, x]
        if x > 0:
            held[0] = 3
        return held[0]

    assert "assign a new list" in refusal(mutating)


def test_a_run_time_value_where_python_decides() -> None:
    @native
    def undecided(x: i64) -> i64:
        for item in (1, 2):
            if x == item:
                break
        return x

    assert "known at run time only" in refusal(undecided)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("while x > 0: break", "carry a flag"),
        ("try: pass\n    finally: pass", "has no exceptions"),
        ("return 0 < x < 3", "joined by &"),
        ("y = (z := x)", "a statement of its own"),
        ("for i in range(x): pass\n    return i", "has no value after this loop"),
    ],
)
def test_syntax_that_is_refused(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    path.write_text(f"def written(x: i64) -> i64:\n    {line}\n    return x\n")
    names = {"i64": i64}
    exec(compile(path.read_text(), str(path), "exec"), names)
    function: Any = names["written"]
    message = refusal(native(function))
    assert why in message and f"{path}:" in message


def test_a_file_that_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "written.py"
    path.write_text("def written(x: i64) -> i64:\n    return x\n")
    names = {"i64": i64}
    exec(compile(path.read_text(), str(path), "exec"), names)
    path.write_text("y = 3\nz = 4\n")
    function: Any = names["written"]
    assert "has changed since it was imported" in refusal(native(function))


def test_python_may_run_without_debug_ranges(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from rlx.codegen.native.irtext import Module\n"
        "from rlx.codegen.native.notation import native\n"
        "from rlx.codegen.native.words import i64\n"
        "from rlx.target.cpu import resolve\n"
        "@native\n"
        "def tripled(x: i64) -> i64:\n"
        "    return (\n"
        "        3\n"
        "        * x\n"
        "    )\n"
        "module = Module(resolve('x86-64'))\n"
        "tripled.emit(module)\n"
        "print('mul i64 3, %x' in module.text())\n"
    )
    command = [sys.executable, "-X", "no_debug_ranges", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout == "True\n"


def test_parameters_need_types() -> None:
    with pytest.raises(CompileError, match="parameter 'x' needs a type"):
        native(lambda x: x)  # type: ignore[misc]


def test_a_word_outside_a_native_function() -> None:
    with pytest.raises(CompileError, match="no native function is being written"):
        load(i64, ptr(0))


# ---- lines of the source


def test_source_lines_are_comments_only() -> None:
    plain, noted = text(collatz), text(collatz, source_lines=True)
    comments = re.findall(rf"^  ; {HERE}:(\d+)  (.*)$", noted, re.MULTILINE)
    lines = Path(__file__).read_text().splitlines()
    assert [line for _, line in comments][:2] == ["steps = 0", "while n != 1:"]
    assert all(lines[int(n) - 1].strip() == line for n, line in comments)
    assert "".join(re.sub(r"^  ;.*\n", "", noted, flags=re.MULTILINE)) == plain
