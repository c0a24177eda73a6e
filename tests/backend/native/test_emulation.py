"""Code beyond AVX2 without its instructions: their twins, and whole programs, have the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.codegen.native import jit, twins, vmath_core
from rlx.codegen.native.elf import undefined_symbols
from rlx.codegen.native.irtext import Function, Module, Value, lanes_of, vector
from rlx.codegen.native.notation import write
from rlx.errors import CompileError, UnsupportedError
from rlx.ir.graph import Node
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, emulated, resolve, runs_here

BEST, NARROW = resolve("x86-64-v4-bf16-vnni"), resolve("x86-64-v3-vnni")
TWIN = emulated(BEST)
LLVM = {"f4": "float", "f8": "double", "i4": "i32", "u2": "i16", "i2": "i16", "u1": "i8", "i1": "i8"}

pytestmark = pytest.mark.skipif(
    not runs_here(TWIN), reason=f"emulation needs {TWIN.code.name}, and this machine is less"
)
Body = Callable[..., Value]


def bits(target: Target, body: Body, out: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    """`body` of vectors of the operands' whole rows, row by row."""
    module, every = Module(target), (*operands, out)
    f = module.function("kernel", [("ptr", f"a{i}") for i in range(len(every))])
    types = [vector(LLVM[x.dtype.str[1:]], x.shape[1]) for x in every]
    loaded = [f.load(type_, place) for type_, place in zip(types, f.args, strict=False) if place]
    made = body(f, *loaded[:-1])
    f.store(f.bitcast(made, types[-1]), f.args[-1])
    made_object = jit.compile_object(module.text(), target)
    assert not undefined_symbols(made_object)
    code = jit.load(made_object, target)
    native = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(every))(code.address("kernel"))
    for row in range(out.shape[0]):
        native(*(x[row].ctypes.data for x in every))
    return out


def wild(rows: int, lanes: int, dtype: type = np.float32) -> np.ndarray:
    """Numbers of all sizes, with denormals, infinities, NaN and zeros of both signs among them."""
    rng = np.random.default_rng(7)
    width = np.dtype(dtype).itemsize
    words = rng.integers(0, 256, (rows, lanes, width), dtype=np.uint8).view(dtype)[..., 0].copy()
    tame = rng.normal(0, 1, (rows, lanes)).astype(dtype)
    x: np.ndarray = np.where(rng.random((rows, lanes)) < 0.3, words, tame)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e38, -3e38, 1.0], dtype)
    return np.where(rng.random((rows, lanes)) < 0.2, rng.choice(special, (rows, lanes)), x)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bits; of NaN only that they are."""
    if a.dtype.kind == "f":
        assert (np.isnan(a) == np.isnan(b)).all()
        a, b = (np.where(np.isnan(x), 0, x) for x in (a, b))
    assert a.tobytes() == b.tobytes()


def as_bf16(f: Function, x: Value) -> Value:
    return f.bitcast(x, vector("bfloat", x.width))


def bf16(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # NaN that signal
        return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def whole(kind: str, lanes: int, seed: int) -> np.ndarray:
    info = np.iinfo(kind)
    made = np.random.default_rng(seed).integers(info.min, info.max, (40, lanes), kind, endpoint=True)
    made[0], made[1] = info.min, info.max
    return made


def powers(rows: int, lanes: int, dtype: type) -> np.ndarray:
    n = np.random.default_rng(3).uniform(-2500, 2500, (rows, lanes)).astype(dtype)
    n[::2] /= 10
    n[0, :4] = [np.nan, np.inf, -np.inf, 0.5]
    return n


Operands = tuple[Body, np.ndarray, list[np.ndarray]]


def dots(lanes: int) -> dict[str, Operands]:
    """The dot products of VNNI, of `lanes` sums."""
    return {
        "vpdpbusd": (
            lambda f, t, a, b: f.dot_u8i8(t, a, b),
            np.zeros((40, lanes), np.int32),
            [whole("i4", lanes, 1), whole("u1", 4 * lanes, 2), whole("i1", 4 * lanes, 3)],
        ),
        "vpdpwssd": (
            lambda f, t, a, b: f.add_dot_i16(t, a, b),
            np.zeros((40, lanes), np.int32),
            [whole("i4", lanes, 1), whole("i2", 2 * lanes, 2), whole("i2", 2 * lanes, 3)],
        ),
    }


TABLE = [float(i * i - 8) for i in range(16)]
CASES: dict[str, Operands] = {
    **dots(16),
    "dpbf16ps": (
        lambda f, t, a, b: f.dot_bf16(t, as_bf16(f, a), as_bf16(f, b)),
        np.zeros((300, 16), np.float32),
        [wild(300, 16), bf16(wild(300, 32)), bf16(wild(300, 32)[::-1])],
    ),
    "cvtne2ps2bf16": (
        lambda f, a, b: f.round_to_bf16(a, b),
        np.zeros((300, 32), np.uint16),
        [wild(300, 16), wild(300, 16)[::-1].copy()],
    ),
    "pmaddwd": (
        lambda f, a, b: f.dot_i16(a, b),
        np.zeros((40, 16), np.int32),
        [whole("i2", 32, 2), whole("i2", 32, 3)],
    ),
    "permd": (
        lambda f, k: write(f, vmath_core.pick_power, f.bitcast(k, vector("float", 16)), TABLE),
        np.zeros((40, 16), np.int32),
        [whole("i4", 16, 1)],
    ),
    "permw": (
        lambda f, k: f.intrinsic(
            "llvm.x86.avx512.permvar.hi.512",
            k.type,
            lanes_of(k.type, [i * 77 for i in range(32)]),
            k,
            feature="avx512bw",
            twin=twins.look_up,
        ),
        np.zeros((40, 32), np.int16),
        [whole("i2", 32, 1)],
    ),
    "permi2w": (
        lambda f, k: f.intrinsic(
            "llvm.x86.avx512.vpermi2var.hi.512",
            k.type,
            lanes_of(k.type, [i * 77 for i in range(32)]),
            k,
            lanes_of(k.type, [i * 77 for i in range(32, 64)]),
            feature="avx512bw",
            twin=twins.look_up_in_two,
        ),
        np.zeros((40, 32), np.int16),
        [whole("i2", 32, 1)],
    ),
    "range": (
        lambda f, x: write(f, vmath_core.nearer_to_zero, x, 1.5),
        np.zeros((300, 16), np.float32),
        [wild(300, 16)],
    ),
    "scalef f32": (
        lambda f, p, n: write(f, vmath_core.scale, p, n),
        np.zeros((300, 16), np.float32),
        [wild(300, 16), powers(300, 16, np.float32)],
    ),
    "scalef f64": (
        lambda f, p, n: write(f, vmath_core.scale, p, n),
        np.zeros((300, 8), np.float64),
        [wild(300, 8, np.float64), powers(300, 8, np.float64)],
    ),
}


@pytest.mark.skipif(not runs_here(BEST), reason=f"needs {BEST.name}")
@pytest.mark.parametrize("name", CASES)
def test_an_instruction_and_its_twin_agree(name: str) -> None:
    body, out, operands = CASES[name]
    same(bits(BEST, body, out.copy(), *operands), bits(TWIN, body, out.copy(), *operands))


@pytest.mark.parametrize("target", [BEST, NARROW], ids=lambda target: target.name)
@pytest.mark.parametrize("name", dots(8))
def test_integers_are_exact(name: str, target: Target) -> None:
    """Twins are compared with NumPy. Where the machine has the instruction, it is compared, too."""
    lanes = target.lanes("i32")
    body, out, (total, a, b) = dots(lanes)[name]
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(40, lanes, -1).sum(axis=2)
    wanted = (total + products).astype(np.int32)
    for machine in filter(runs_here, (target, emulated(target))):
        same(bits(machine, body, out.copy(), total, a, b), wanted)


def test_an_instruction_without_a_twin_is_refused_by_name() -> None:
    f = Module(TWIN).function("f", [("<16 x float>", "x")])
    with pytest.raises(UnsupportedError, match=r"avx512\.rcp14.* is not emulated"):
        f.intrinsic("llvm.x86.avx512.rcp14.ps.512", "<16 x float>", f.args[0], feature="avx512f")
    with pytest.raises(CompileError, match="x86-64-v3 needs no emulation; only x86-64-v4-amx"):
        emulated(resolve("x86-64-v3"))


def test_the_plan_is_that_of_the_target() -> None:
    from rlx.api.compile import plan
    from rlx.plan.text import canonical_text

    graph = network()
    real, twin = (canonical_text(plan(graph, target=t.name)) for t in (BEST, TWIN))
    assert twin.replace("emulate:", "") == real


def network() -> rlx.Graph:
    g, rng = rlx.Graph("network"), np.random.default_rng(1)

    def weight(name: str, *shape: int) -> Node:
        return g.param(name, shape, "f32", rng.normal(0, 0.2, shape).astype(np.float32))

    x = rlx.ops.relu(rlx.ops.conv(g.input("image", (2, 3, 12, 12), "f32"), weight("w", 20, 3, 3, 3)))
    x = rlx.ops.gelu(rlx.ops.matmul(rlx.ops.reshape(x, (2, 20, 100)), weight("v", 100, 37)))
    g.output("y", rlx.ops.softmax(x))
    return g


@pytest.mark.parametrize(("precision", "error"), [("f32", 1e-5), ("bf16", 2.0**-7)])
def test_a_network_has_the_bits_of_the_target(precision: str, error: float) -> None:
    graph = network()
    feed = {"image": np.random.default_rng(2).normal(0, 1, (2, 3, 12, 12)).astype(np.float32)}
    ran = rlx.compile(graph, target=TWIN.name, precision=precision).run(feed)["y"]
    np.testing.assert_allclose(ran, evaluate(graph, feed)["y"], rtol=0, atol=error)
    if runs_here(BEST):
        real = rlx.compile(graph, target=BEST.name, precision=precision).run(feed)["y"]
        assert ran.tobytes() == real.tobytes()
