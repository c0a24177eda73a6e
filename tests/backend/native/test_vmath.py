"""Vectorised math: errors on every target, special values, the same bits at every width, the page of docs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from backend.native.vmath_measure import (
    COLUMNS,
    DTYPES,
    MEASURED,
    Compiled,
    compiled,
    errors,
    evaluate,
    largest_error,
    operands,
    page,
    read_page,
    samples,
    special_values,
)
from machines import on_targets
from rlx import ops
from rlx.codegen.native import jit, vmath, vmath_exp
from rlx.codegen.native.irtext import Int, Module, Value, constant, vector
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import Word
from rlx.errors import CompileError, DTypeError
from rlx.ir.graph import Graph
from rlx.target.cpu import Target, resolve, runs_here, targets

LIMIT = 4.0  # ulp
PAGE = Path(__file__).parents[3] / "docs" / "vmath.md"
HOST = resolve("host")

long_double = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="no 80-bit long double as reference"
)
each_target = on_targets(MEASURED)  # test_page_of_errors looks at all of them


@each_target
@pytest.mark.parametrize("name", vmath.FUNCTIONS)
def test_f32_error(target: Target, name: str) -> None:
    error, where = largest_error(target, name, "float")
    assert error <= LIMIT, f"{name}{where} is {error:.2f} ulp off"


@long_double
@each_target
@pytest.mark.parametrize("name", vmath.FUNCTIONS)
def test_f64_error(target: Target, name: str) -> None:
    error, where = largest_error(target, name, "double")
    assert error <= LIMIT, f"{name}{where} is {error:.2f} ulp off"


def over(target: Target, emit: Callable[[Word], Word], x: np.ndarray) -> np.ndarray:
    """What `emit` writes for one vector of f32, for all of `x`, which is whole vectors."""
    lanes = target.lanes("f32")
    type_ = vector("float", lanes)
    module = Module(target)
    f = module.function("kernel", [("ptr", "x"), ("ptr", "y"), ("i64", "n")])
    source, out, n = f.args

    def step(i: Int, _: list[Value]) -> None:
        f.store(write(f, emit, Word(f.load(type_, f.gep(source, i, "float")))), f.gep(out, i, "float"))

    f.loop(0, n, lanes, [], step)
    code = jit.compile_and_load(module.text(), target)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(code.address("kernel"))
    found = np.empty_like(x)
    call(x.ctypes.data, found.ctypes.data, x.size)
    return found


def vectors(target: Target, *values: object) -> np.ndarray:
    """All values as f32, repeated to whole vectors."""
    x, lanes = np.concatenate([np.asarray(v, np.float32) for v in values]), target.lanes("f32")
    return np.resize(x, -(-x.size // lanes) * lanes)


@each_target
def test_exp_of_a_distance(target: Target) -> None:
    """One factor gives the bits of two: exp(x - y) must not depend on whether y is known as the maximum."""
    edges = [0.0, 87.3, 87.4, 103.9, 104.0, 131.6, 131.7, 133.0, 176.0, 1e30, np.inf, np.nan]
    nans = np.array([0x7FC00123, 0xFFC00FFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    d = vectors(target, edges, nans, np.linspace(0, 140, 1 << 17), np.abs(samples("float", 4000)))

    @inline
    def negated(x: Word) -> Word:
        return vmath_exp.exp(-x, rounded=True)

    below, plain = over(target, vmath_exp.exp_of_distance, d), over(target, negated, d)
    np.testing.assert_array_equal(below, plain)
    assert (below[d == 0] == 1).all() and (below[d >= 104] == 0).all()
    error, size = errors(below, evaluate("exp", -d)), np.where(d < 200, d, 0)
    assert (error <= 1.5 + 0.05 * size).all()


@each_target
def test_exp2_of_a_distance(target: Target) -> None:
    """The weight of a score in attention: 2**x for x <= 0, exact for whole x, 0 where nothing counts."""
    rng = np.random.default_rng(0)
    values = [np.linspace(-126, 0, 1 << 16), -rng.exponential(1, 1 << 14), -np.arange(127.0)]
    lanes = target.lanes("f32")
    given = vectors(target, *values, np.full(lanes, -np.inf), np.full(lanes, np.nan), [-1e30, -200.0])
    got = over(target, vmath_exp.exp2_of_distance, given)
    want = np.exp2(given.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(given))
    low, whole = given <= -160, (given == np.round(given)) & (given >= -126)
    np.testing.assert_array_equal(got[low], 0)
    np.testing.assert_array_equal(got[whole], want[whole])
    normal = given >= -126
    assert (np.abs(got - want) <= 1.5 * np.spacing(want.astype(np.float32)))[normal].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, function in vmath.FUNCTIONS.items() if function.operands == 1]
)
def test_f32_error_over_all_bit_patterns(name: str) -> None:
    x = np.arange(0, 2**32, 401, dtype=np.uint32).view(np.float32)
    found = errors(compiled(HOST, "float")(name, x), evaluate(name, x))
    assert found.max() <= LIMIT, f"{name}({x[found.argmax()]}) is {found.max():.2f} ulp off"


@long_double
def test_page_of_errors(request: pytest.FixtureRequest) -> None:
    """docs/vmath.md says what is measured here, for the targets that run here."""
    runnable = {target.name for target in MEASURED}
    if request.config.getoption("--update-golden"):
        assert len(runnable) == len(COLUMNS), "the page needs a machine that runs every column"
        PAGE.write_text(page(lambda target, name, element: largest_error(resolve(target), name, element)[0]))
    written = read_page(PAGE.read_text())
    assert set(written) == {
        (t, name, element) for t, _ in COLUMNS for name in vmath.FUNCTIONS for element in DTYPES
    }
    for (target, name, element), shown in written.items():
        if target in runnable:
            error = largest_error(resolve(target), name, element)[0]
            # C libraries differ in the last bits of the reference, hence the slack
            assert abs(shown - error) <= 0.05, (
                f"{name} {element} {target}: {shown} on the page, measured {error}"
            )


@pytest.mark.parametrize("element", DTYPES)
def test_same_bits_at_every_width(element: str) -> None:
    xs = {1: (samples(element, 1000),)}
    for name, function in vmath.FUNCTIONS.items():
        arguments = xs[1] if function.operands == 1 else tuple(x[-4000:] for x in operands(name, element))
        natural = compiled(HOST, element)(name, *arguments)
        for lanes in (1, 2, 4, 8, 16):
            other = compiled(HOST, element, lanes)(name, *arguments)
            same = (natural == other) & (np.signbit(natural) == np.signbit(other))
            assert (same | (np.isnan(natural) & np.isnan(other))).all(), f"{name} at {lanes} lanes"


def test_in_place_and_shared_code_agree() -> None:
    inline, shared = Compiled(HOST, "float", inline=True), Compiled(HOST, "float", inline=False)
    x = samples("float", 500)
    for name, function in vmath.FUNCTIONS.items():
        arguments = (x,) * function.operands
        np.testing.assert_array_equal(inline(name, *arguments), shared(name, *arguments))


@each_target
@pytest.mark.parametrize("element", DTYPES)
def test_exact_where_it_must_be(target: Target, element: str) -> None:
    run = compiled(target, element)
    bias = 126 if element == "float" else 1022
    whole = np.arange(-bias, bias + 2, dtype=DTYPES[element])
    np.testing.assert_array_equal(run("exp2", whole), np.ldexp(DTYPES[element](1), whole.astype(int)))
    np.testing.assert_array_equal(run("log2", np.exp2(whole)), whole)
    for name, x, y in (
        ("exp", 0, 1),
        ("exp2", 0, 1),
        ("cosh", 0, 1),
        ("cos", 0, 1),
        ("log", 1, 0),
        ("erfc", 0, 1),
    ):
        assert run(name, [x])[0] == y, name
    large = np.array([6.0, 10.0, 30.0, np.inf])
    assert (run("erf", large) == 1).all() and (run("erf", -large) == -1).all()
    assert (run("tanh", 4 * large) == 1).all() and (run("tanh", -4 * large) == -1).all()
    assert run("sigmoid", [0.0])[0] == 0.5 and run("sigmoid", [100.0])[0] == 1


@each_target
def test_bounded_functions_stay_in_bounds(target: Target) -> None:
    x = samples("float")
    x = x[np.isfinite(x)]
    for name in ("sin", "cos", "tanh", "erf", "sigmoid"):
        assert np.abs(compiled(target, "float")(name, x)).max() <= 1, name


@each_target
def test_power_has_the_special_values_of_numpy(target: Target) -> None:
    special = special_values(np.float32)
    x, y = (grid.ravel() for grid in np.meshgrid(special, special))
    have = compiled(target, "float")("pow", x, y)
    with np.errstate(all="ignore"):
        want = np.power(x, y)
    edge = ~np.isfinite(want) | (want == 0) | (np.abs(want) == 1)
    np.testing.assert_array_equal(have[edge], want[edge])
    assert (np.signbit(have) == np.signbit(want))[edge & ~np.isnan(want)].all()


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_no_function_calls_a_library(target: Target) -> None:
    """Not even on targets that cannot run here: libm differs from machine to machine."""
    module = Module(target)
    for element in DTYPES:
        lanes = target.vector_bytes // np.dtype(DTYPES[element]).itemsize
        type_ = vector(element, lanes)
        for name, function in vmath.FUNCTIONS.items():
            f = module.function(f"use_{name}_{element}", [(type_, f"x{i}") for i in range(function.operands)],
                                returns=type_)  # fmt: skip
            f.return_(vmath.apply(f, name, *f.args))
    assert jit.undefined_symbols(jit.compile_object(module.text(), target)) == ()


def test_refusals() -> None:
    f = Module(HOST).function("f", [("<4 x float>", "x"), ("<4 x i32>", "i")])
    x, i = f.args
    with pytest.raises(CompileError, match=r"'gamma'.*exp"):
        vmath.apply(f, "gamma", x)
    with pytest.raises(CompileError, match="takes 2 operands, not 1"):
        vmath.apply(f, "pow", x)
    with pytest.raises(DTypeError, match="<4 x i32>"):
        vmath.apply(f, "exp", i)
    with pytest.raises(DTypeError, match="double"):
        vmath.apply(f, "pow", x, constant("<4 x double>", 1.0))


def test_measured_targets_are_the_ones_that_run() -> None:
    assert [target.name for target in MEASURED] == [name for name, _ in COLUMNS if runs_here(resolve(name))]


def test_exp_of_a_distance_from_a_statistic() -> None:
    """Of a rounded argument the error may be a tenth of what half a unit in the argument makes of it."""
    x = np.concatenate([samples("float", 3000), np.linspace(-104, 89, 200_000, dtype=np.float32)])
    g = Graph("rounded")
    a, b = (g.input(each, x.shape, "f32") for each in "ab")
    g.output("y", ops.exp(a - ops.max(b)))
    with np.errstate(all="ignore"):
        found = rlx.compile(g, cache=False).run({"a": x, "b": np.zeros_like(x)})["y"]
    error, size = errors(found, evaluate("exp", x)), np.abs(x)
    allowed = 2.5 + 0.05 * np.where(size < 200, size, 0)
    worst = np.argmax(error - allowed)
    assert error[worst] <= allowed[worst], f"exp({x[worst]}) is {error[worst]:.2f} ulp off"
