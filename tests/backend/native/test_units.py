"""Units of a program: equal functions are compiled once, and calls across units reach them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu import units
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.units import Units
from rlx.codegen.native import jit
from rlx.codegen.native.irtext import Function, Module, Value
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve

Loader = Callable[[Sequence[bytes], Target], jit.Code]
LOADERS: list[Loader] = [jit.load_all, jit._linked_by_llvm]
HOST = resolve("host")


def add(module: Module, name: str, number: int, helper: str | None = None) -> Function:
    """name(x) = x + number, or what `helper` gives for that."""
    f = module.function(name, [("i64", "x")], internal=helper is None, returns="i64")
    total = f.add(f.args[0], number)
    f.return_(total if helper is None else f.op("i64", f"call i64 @{helper}({total})"))
    return f


def kernels(module: Module, made: Units, numbers: Sequence[int]) -> None:
    """k(x) = x + 1 + number for each number."""
    for i, number in enumerate(numbers):
        add(module, f"k{i}", 1, f"k{i}.part")
        add(module, f"k{i}.part", number)
        made.collect()
    made.finish()


def called(code: jit.Code, name: str, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address(name))(x))


@pytest.mark.parametrize("load", LOADERS, ids=["own", "llvm"])
@pytest.mark.parametrize("lines", [1, 2000], ids=["unit each", "one unit"])
def test_equal_functions_are_one(load: Loader, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_LINES", lines)
    module, sent = Module(HOST), list[str]()
    made = Units(module, sent.append)
    kernels(module, made, [5, 7, 5])
    assert sent == made.texts and len(sent) == (2 if lines == 1 else 1)
    assert "".join(sent).count("define ") == 4
    assert [made.name(f"k{i}") for i in range(3)] == ["k0", "k1", "k0"]
    code = load([jit.compile_object(text, HOST) for text in sent], HOST)
    assert [called(code, made.name(f"k{i}"), 100) for i in range(3)] == [106, 108, 106]


@pytest.mark.parametrize("load", LOADERS, ids=["own", "llvm"])
def test_a_function_is_called_in_the_unit_that_has_it(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, through a table, and as a pointer."""
    monkeypatch.setattr(units, "UNIT_LINES", 1)
    module = Module(HOST)
    made = Units(module)
    add(module, "shared", 10)
    made.collect()
    add(module, "k0", 1, "shared")
    made.collect()
    f = module.function("k1", [("i64", "x")], returns="i64")
    entry = f.load("ptr", module.table("k1.table", "ptr", ["shared"]))
    f.return_(f.op("i64", f"call i64 {entry.text}({f.args[0]})"))
    made.collect()
    f = module.function("k2", [("i64", "x")], returns="i64")
    place = f.alloca("ptr")
    f.store(Value("ptr", "@shared"), place)
    f.return_(f.op("i64", f"call i64 {f.load('ptr', place).text}({f.args[0]})"))
    made.collect()
    assert len(made.texts) == 4 and module.defines("shared")
    code = load([jit.compile_object(text, HOST) for text in made.texts], HOST)
    assert [called(code, f"k{i}", 100) for i in range(3)] == [111, 110, 110]


def test_tables_of_equal_functions_are_equal() -> None:
    module = Module(HOST)
    made = Units(module)
    for k in ("k0", "k1"):
        add(module, f"{k}.part", 3)
        f = module.function(k, [("i64", "x")], returns="i64")
        entry = f.load("ptr", module.table(f"{k}.table", "ptr", [f"{k}.part"]))
        f.return_(f.op("i64", f"call i64 {entry.text}({f.args[0]})"))
        made.collect()
    made.finish()
    assert made.name("k1") == "k0" and made.texts[0].count("define ") == 2
    assert "k1" not in made.texts[0]


def test_functions_that_call_themselves_are_compared_without_their_names() -> None:
    module = Module(HOST)
    made = Units(module)
    for k, less in (("k0", 1), ("k00", 1), ("k1", 2)):
        f = module.function(k, [("i64", "x")], returns="i64")
        f.return_(f.op("i64", f"call i64 @{k}({f.add(f.args[0], -less)})"))
        made.collect()
    assert [made.name(k) for k in ("k0", "k00", "k1")] == ["k0", "k0", "k1"]


def test_a_function_that_no_one_has_is_named() -> None:
    text = "declare hidden void @missing()\ndefine void @f() {\n call void @missing()\n ret void }"
    for load in LOADERS:
        with pytest.raises(rlx.errors.CompileError, match="missing"):
            load([jit.compile_object(text, HOST)], HOST)


def network() -> Graph:
    rng, g = np.random.default_rng(0), Graph("net")
    x = g.input("x", ("n", 16, 9, 9), "f32")
    for i, out in enumerate((32, 32, 16)):
        w = g.param(f"w{i}", (out, x.shape[1], 3, 3), "f32")
        g.set_param(f"w{i}", rng.standard_normal(w.shape).astype(np.float32) / 10)
        x = ops.gelu(ops.conv(x, w, padding=1))
    g.output("y", ops.softmax(x, axis=1))
    return g


def test_a_program_computes_the_same_in_any_units(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((2, 16, 9, 9)).astype(np.float32)
    whole = rlx.compile(network(), cache=False)(x)
    before = jit.llvm_compiles
    monkeypatch.setattr(units, "UNIT_LINES", 1)
    parts = rlx.compile(network(), cache=False)
    assert jit.llvm_compiles > before + 2
    np.testing.assert_array_equal(parts(x), whole)


def steps(*lengths: int) -> Graph:
    """Attention over sequences of known lengths, as in a decoder that was unrolled."""
    g = Graph("steps")
    for n in lengths:
        q, k, v = (g.input(f"{name}{n}", (2, n, 32), "f32") for name in "qkv")
        weights = ops.softmax(q @ ops.transpose(k, (0, 2, 1)) * 0.125, axis=-1)
        g.output(f"y{n}", weights @ v)
    return g


def test_steps_of_an_unrolled_decoder_have_their_attention_in_common() -> None:
    def blocks(*lengths: int) -> int:
        lir = plan(steps(*lengths))
        made = build_kernels(lir, HOST)
        assert made.distinct == len(lengths)
        return len(re.findall(r"^define .*\.block\d+\(", made.text, re.MULTILINE))

    assert blocks(9, 10, 11) == blocks(9) > 0
    assert blocks(39, 40) == 2 * blocks(39)  # long ones are worth code of their own


def test_steps_of_an_unrolled_decoder_differ_in_length_only() -> None:
    g, rng = steps(9, 10, 31), np.random.default_rng(2)
    feed = {x.attrs["name"]: rng.standard_normal(x.tensor.bind({})).astype(np.float32) for x in g.inputs}
    got, want = rlx.compile(g).run(feed), evaluate(g, feed)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)
