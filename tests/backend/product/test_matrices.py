"""AMX without its instructions: their twins do what Intel's pseudo-code says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from amx_model import dot_bf16, dot_bytes, tile_load
from rlx.codegen.cpu.product import matrices
from rlx.codegen.cpu.product.matrices import COUNT, LINE, ROWS, STATE_BYTES, Matrices, shapes
from rlx.codegen.native import jit
from rlx.codegen.native.elf import undefined_symbols
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import write
from rlx.errors import UnsupportedError
from rlx.target.cpu import emulated, resolve, runs_here

BEST = resolve("x86-64-v4-amx")
TWIN = emulated(BEST)
Array = NDArray[np.uint8]
Registers = list[Array]

pytestmark = pytest.mark.skipif(
    not runs_here(TWIN), reason=f"emulation needs {TWIN.code.name}, and this machine is less"
)


# ---- the twins


def run(body: Callable[[Matrices, list], None], *operands: np.ndarray) -> None:
    """`body` with emulated registers, which hold noise before."""
    module = Module(TWIN)
    f = module.function("kernel", [("ptr", f"a{i}") for i in range(len(operands) + 1)])
    write(f, lambda: body(Matrices(f.args[0]), f.args[1:]))
    made = jit.compile_object(module.text(), TWIN)
    assert not undefined_symbols(made)
    code = jit.load(made, TWIN)
    native = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(operands) + 1))(code.address("kernel"))
    state = np.full(STATE_BYTES, 0xA5, np.uint8)
    native(state.ctypes.data, *(x.ctypes.data for x in operands))


SHAPES = [  # rows, bytes of a row of the sums; bytes of a row of A
    (16, 64, 64),
    (1, 64, 64),
    (16, 4, 64),
    (16, 64, 4),
    (7, 20, 36),
    (1, 4, 4),
]


def noise(nbytes: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def as_bf16(seed: int) -> Array:
    """Numbers of all sizes, with denormals, infinities, NaN and zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 16, ROWS * LINE // 2, dtype=np.uint16)
    tame = rng.normal(0, 1, words.size).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(rng.random(words.size) < 0.02, words, tame).view(np.uint8)


def as_f32(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, ROWS * LINE // 4).astype(np.float32)
    x[::7] = 1e-40
    x[::31] = -np.inf
    return x.view(np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", ["tdpbusd", "tdpbssd", "tdpbf16ps"])
def test_products_are_those_of_the_manual(name: str, shape: tuple[int, int, int]) -> None:
    rows, wide, deep = shape
    of = [(rows, wide), (rows, deep), (deep // 4, wide)]
    table = np.frombuffer(shapes(*of, *[(3, 8)] * (COUNT - 3)), np.uint8).copy()
    narrow = name == "tdpbf16ps"
    sums, a, b = (
        (as_f32(1), as_bf16(2), as_bf16(3)) if narrow else (noise(ROWS * LINE, seed) for seed in (1, 2, 3))
    )
    if not narrow:
        a[: deep // 2], b[: wide // 2] = 0x80, 0x80
    out = np.full(ROWS * LINE, 7, np.uint8)

    def body(registers: Matrices, places: list) -> None:
        registers.configure(places[0])
        for number, place in enumerate(places[1:4]):
            registers.load(number, place, LINE)
        if narrow:
            registers.dot_bf16(0, 1, 2)
        else:
            registers.dot_bytes(0, 1, 2, signed=name == "tdpbssd")
        registers.store(0, places[4], LINE)
        registers.release()

    run(body, table, sums, a, b, out)
    loaded = [tile_load(s, x, LINE) for s, x in zip(of, (sums, a, b), strict=True)]
    if narrow:
        wanted = dot_bf16(of, *loaded)
    else:
        wanted = dot_bytes(of, *loaded, np.int8 if name == "tdpbssd" else np.uint8)
    found = out.reshape(ROWS, LINE)
    assert (found[rows:] == 7).all() and (found[:, wide:] == 7).all()
    got, want = found[:rows, :wide], wanted[:rows, :wide]
    if narrow:  # of NaN only that they are
        x, y = (np.ascontiguousarray(z).view(np.float32) for z in (got, want))
        assert (np.isnan(x) == np.isnan(y)).all() and not np.isnan(y).all()
        got, want = (np.where(np.isnan(z), 0, z) for z in (x, y))
    assert got.tobytes() == want.tobytes()


def test_rows_may_be_apart_and_registers_keep_to_their_shapes() -> None:
    of = [(5, 12), (16, 64), *[(2, 4)] * (COUNT - 2)]
    table = np.frombuffer(shapes(*of), np.uint8).copy()
    source = noise(ROWS * 100, 5)
    small, whole = np.full(5 * 40, 9, np.uint8), np.full(ROWS * LINE, 9, np.uint8)

    def body(registers: Matrices, places: list) -> None:
        registers.configure(places[0])
        registers.load(0, places[1], 100)
        registers.store(0, places[2], 40)
        registers.load(1, places[1], 100)
        registers.zero(1)
        registers.store(1, places[3], LINE)

    run(body, table, source, small, whole)
    wanted = np.full((5, 40), 9, np.uint8)
    wanted[:, :12] = tile_load(of[0], source, 100)[:5, :12]
    assert (small.reshape(5, 40) == wanted).all() and not whole.any()


def test_new_shapes_clear_all_registers() -> None:
    table = np.frombuffer(shapes(*[(16, 64)] * COUNT), np.uint8).copy()
    source, out = noise(ROWS * LINE, 6), np.full((COUNT, ROWS * LINE), 9, np.uint8)

    def body(registers: Matrices, places: list) -> None:
        registers.configure(places[0])
        for number in range(COUNT):
            registers.load(number, places[1], LINE)
        registers.configure(places[0])
        for number in range(COUNT):
            registers.store(number, matrices.byte_at(places[2], number * ROWS * LINE), LINE)

    run(body, table, source, out)
    assert not out.any()


def test_other_targets_have_no_such_registers() -> None:
    module = Module(resolve("x86-64-v4-bf16-vnni"))
    f = module.function("kernel", [("ptr", "place")])
    with pytest.raises(UnsupportedError, match="ldtilecfg needs amx-tile, which target x86-64-v4-bf16"):
        write(f, lambda: Matrices(None).configure(f.args[0]))
