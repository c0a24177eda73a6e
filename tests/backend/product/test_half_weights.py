"""Matmuls of f32 with weights of 16 bits: the bits of the matmul with the same weights in f32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rlx
from gemm_harness import FILLER, NUMPY, TARGETS, Array, Guarded, Kernel, build, every_target, random
from instructions import beyond
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.product import gemm
from rlx.codegen.cpu.product.gemm import GemmSpec
from rlx.codegen.cpu.product.packing import pack_weights, panels_of
from rlx.codegen.native.elf import defined_symbols, undefined_symbols
from rlx.codegen.native.jit import compile_object
from rlx.ir.dim import sym
from rlx.ir.dtype import dtype
from rlx.runtime.recover import recoverable
from rlx.target.cpu import Target, targets
from spills import spills_of

ROWS = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 25, 31, 49, 65, 129)
HALVES = ["bf16", "f16"]


def kernel_of(target: Target, k: int, n: int, half: str | None, columns: bool = False) -> Kernel:
    """The kernel for rows of A, or for one that is stored by columns."""
    strides = (1, sym("m")) if columns else (k, 1)
    spec = GemmSpec(sym("m"), n, k, strides, (), (n, 1), b_packed=True, b_dtype=half)
    return build(target, spec, ("m",))


def matrix(k: int, n: int, half: str) -> Array:
    """Random weights, among them the least and the largest numbers, zeros of both signs and subnormals."""
    w = random((k, n), half, 2)
    info = np.finfo(NUMPY[half]) if half == "f16" else None
    edges = [0.0, -0.0, 6e-8, -1e-5, 65504.0] if info else [0.0, -0.0, 1e-40, -1e-39, 1e38]
    flat = w.reshape(-1)
    flat[:: max(1, flat.size // 40)] = np.resize(edges, len(flat[:: max(1, flat.size // 40)])).astype(w.dtype)
    return w


@every_target
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("k", "n", "columns"), [(33, 50, False), (64, 48, False), (7, 101, True)])
def test_bits_are_those_of_f32(target: Target, half: str, k: int, n: int, columns: bool) -> None:
    w = matrix(k, n, half)
    packed = panels_of(k, n, target).layout.pack(w)
    wide = pack_weights(w.astype(np.float32), target)
    kernels = [
        (kernel_of(target, k, n, half, columns), packed),
        (kernel_of(target, k, n, None, columns), wide),
    ]
    for m in ROWS:
        a = random((k, m) if columns else (m, k), seed=m)
        found = []
        for kernel, weights in kernels:
            guard = Guarded()
            c = guard.array((m, n), np.float32, at_end=True)
            c[...] = FILLER
            kernel.run([guard.copy(a, True), guard.copy(weights, True), c], {"m": m}, threads=1 + m % 3)
            found.append(c.tobytes())
        assert found[0] == found[1], m


@every_target
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("k", "n"), [(35, 250), (128, 192)])
def test_weights_from_memory_are_prefetched(
    target: Target, half: str, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and two rows have code of their own then; the bits are the same."""
    w, near = matrix(k, n, half), kernel_of(target, k, n, half)
    monkeypatch.setattr(gemm, "_STAYS_IN_L3", 1 << 60)
    far = kernel_of(target, k, n, half)
    packed = panels_of(k, n, target).layout.pack(w)
    for m in (1, 2, 3):
        a, found = random((m, k), seed=m), []
        for kernel in (near, far):
            guard = Guarded()
            c = guard.array((m, n), np.float32, at_end=True)
            c[...] = FILLER
            kernel.run([guard.copy(a, True), guard.copy(packed, True), c], {"m": m}, threads=m)
            found.append(c.tobytes())
        assert found[0] == found[1], m


def test_panels_too_large_for_the_cache_are_widened_in_every_tile() -> None:
    target, k, n, m = TARGETS[0], 1 << 16, 17, 65
    w = random((k, n), "bf16", 2)
    kernel = kernel_of(target, k, n, "bf16")
    assert kernel.scratch == 0
    a, c = random((m, k), seed=1), np.empty((m, n), np.float32)
    kernel.run([a, panels_of(k, n, target).layout.pack(w), c], {"m": m})
    d = np.empty_like(c)
    kernel_of(target, k, n, None).run([a, pack_weights(w.astype(np.float32), target), d], {"m": m})
    assert c.tobytes() == d.tobytes()


# ---- programs


def weight(g: rlx.Graph, name: str, shape: tuple[int, ...], half: str | None, kind: str) -> rlx.Node:
    """A param in 16 bits, widened where it is used, or the same numbers as a param of f32."""
    value = random(shape, kind, len(name) + len(shape))
    if half is None:
        return g.param(name, shape, "f32", value=value.astype(np.float32))
    made: rlx.Node = rlx.ops.cast(g.param(name, shape, half, value=value), "f32")
    return made


def layer(half: str | None, kind: str) -> rlx.Graph:
    """A norm, three matmuls that become one, a transposed one with bias and activation."""
    g = rlx.Graph("layer")
    x = g.input("x", ("m", 48), "f32")
    normed = rlx.ops.rms_norm(x, weight(g, "norm", (48,), half, kind))
    for name in "qkv":
        g.output(name, normed @ weight(g, f"w{name}", (48, 96), half, kind))
    up = rlx.ops.matmul(normed, rlx.ops.transpose(weight(g, "up", (130, 48), half, kind)))
    g.output("y", rlx.ops.silu(up + weight(g, "bias", (130,), half, kind)))
    return g


def tied(half: str | None, kind: str) -> rlx.Graph:
    """Rows of a table, and the same table as the last matrix."""
    g = rlx.Graph("tied")
    table = weight(g, "table", (300, 40), half, kind)
    x = rlx.ops.embedding(table, g.input("tokens", ("m",), "i64"))
    g.output("y", rlx.ops.matmul(rlx.ops.tanh(x), rlx.ops.transpose(table)))
    return g


def loop(half: str | None, kind: str) -> rlx.Graph:
    """A recurrent layer, whose body multiplies by weights."""
    g = rlx.Graph("loop")
    w, r = weight(g, "w", (24, 64), half, kind), weight(g, "r", (64, 64), half, kind)
    x = g.input("x", (5, "m", 24), "f32")

    def step(h: rlx.Node, row: rlx.Node) -> tuple[rlx.Node, rlx.Node]:
        made = rlx.ops.tanh(row @ w + h @ r)
        return made, made

    g.output("y", rlx.ops.scan(step, g.input("start", ("m", 64), "f32"), x)[1])
    return g


def narrow(half: str | None, kind: str) -> rlx.Graph:
    """So few columns that lanes run along k."""
    g = rlx.Graph("narrow")
    g.output("y", g.input("x", ("m", 70), "f32") @ weight(g, "w", (70, 2), half, kind))
    return g


def feed_of(graph: rlx.Graph, m: int) -> dict[str, Array]:
    rng = np.random.default_rng(m)
    out = {}
    for node in graph.inputs:
        shape = [m if not isinstance(d, int) else d for d in node.shape]
        values = rng.integers(0, 300, shape) if node.dtype.name == "i64" else rng.standard_normal(shape)
        out[node.attrs["name"]] = values.astype(node.dtype.np)
    return out


@every_target
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("make", [layer, tied, narrow])
def test_programs_have_the_bits_of_f32(
    target: Target, make: Callable[[str | None, str], rlx.Graph], half: str
) -> None:
    stored = rlx.compile(make(half, half), target=target.name, threads=2)
    wide = rlx.compile(make(None, half), target=target.name, threads=2)
    assert not stored.stats["host_thunks"] and stored.stats["kernels"] == wide.stats["kernels"]
    for m in (1, 2, 20, 70):
        feed = feed_of(make(half, half), m)
        found, wanted = stored.run(feed), wide.run(feed)
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted), m


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("make", [layer, tied])
@pytest.mark.parametrize("target", ["x86-64-v4-bf16-vnni", "x86-64-v3", "x86-64", "aarch64", "wasm32"])
def test_weights_stay_in_16_bits(
    target: str, make: Callable[[str | None, str], rlx.Graph], half: str
) -> None:
    lir = plan(make(half, half), target=target)
    matrices = [n for n in lir.mir.params.values() if int(n.tensor.numel) > 200]
    assert matrices and all(n.dtype is dtype(half) for n in matrices), [str(n.type) for n in matrices]


@pytest.mark.parametrize("half", HALVES)
def test_weights_of_the_precision_are_not_rounded_again(half: str) -> None:
    graph = layer(half, half)
    lir = plan(graph, target="x86-64-v3", precision=half)
    assert lir.derived is not None
    params = {n.id for n in lir.mir.params.values()}
    assert {"wq", "wk", "wv", "up"} <= recoverable(lir, params).keys()
    stored, wide = (rlx.compile(g, target="x86-64", precision=half) for g in (graph, layer(None, half)))
    for m in (1, 20):
        found, wanted = (p.run(feed_of(graph, m)) for p in (stored, wide))
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_bodies_of_loops_multiply_by_16_bits() -> None:
    stored, wide = (rlx.compile(loop(half, "bf16")) for half in ("bf16", None))
    assert stored.memory({"m": 1})["weight"] < wide.memory({"m": 1})["weight"] * 0.6
    feed = feed_of(loop("bf16", "bf16"), 3)
    assert stored.run(feed)["y"].tobytes() == wide.run(feed)["y"].tobytes()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", ["wasm32", "wasm32-relaxed"])
def test_webassembly_has_the_bits_of_f32(target: str, half: str, require: Callable[[str], None]) -> None:
    require("wasmtime")
    from exported_modules import WebModel

    found = []
    for stored in (half, None):
        model = WebModel(rlx.compile(tied(stored, half), threads=1), {"m": (0, 80)}, target)
        rows = []
        for m in (1, 2, 70):
            model.bind([m])
            rows.append(model.run(feed_of(tied(half, half), m))["y"].tobytes())
        found.append(rows)
    assert found[0] == found[1]


@pytest.mark.parametrize("half", HALVES)
def test_objects_call_nothing_and_keep_sums_in_registers(half: str) -> None:
    for target in targets():
        lir, there = plan(layer(half, half), target=target.name), set[str]()
        for text in build_kernels(lir, target).texts:
            code = compile_object(text, target)
            assert set(undefined_symbols(code)) <= there
            there |= set(defined_symbols(code))
            assert not beyond(code, target)
        if target.x86:
            assert not spills_of(lir), target.name
