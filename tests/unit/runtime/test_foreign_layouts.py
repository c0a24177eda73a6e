"""Emitters read the layout that a plan states, or refuse it: a graph may state any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stored_models import layout_graph

import rlx
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.cpu.product.packing import panels_of
from rlx.ir.dtype import dtype
from rlx.ir.op import get_op
from rlx.kernel.layout import Layout
from rlx.kernel.panels import ChannelBlocks, KernelPanels, Panels, QuantLayout
from rlx.kernel.quads import QuadPanels
from rlx.ops.math.contract import dot_general
from rlx.ops.storage.packing import from_blocks, read_as, store_as, to_blocks
from rlx.ops.storage.sparse import columns_of
from rlx.ops.storage.winograd import WinogradLayout, transform_kernel
from rlx.target.cpu import resolve, targets

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("columns", [8, 64, 128])
def test_emitters_refuse_other_panels_of_a_kernel(columns: int) -> None:
    """The host computes what no kernel of the target reads; the result is right."""
    graph = layout_graph(columns)
    program = rlx.compile(graph, cache=False)
    x = RNG.standard_normal((1, 4, 12, 12)).astype(np.float32)
    want = rlx.ops.conv(x, graph_value(graph), padding=1)
    np.testing.assert_allclose(program(x), want, rtol=1e-4, atol=1e-4)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    native = columns == 2 * resolve("host").lanes("f32")
    assert native or any("cannot read the layout" in why for why in told), told


def graph_value(graph: rlx.Graph) -> np.ndarray:
    (unpack,) = (n for n in graph.nodes if n.op is read_as)
    value: np.ndarray = unpack.op.ref(graph.param_values["w"], **unpack.attrs)
    return value


@pytest.mark.parametrize("change", [{"lanes": 1}, {"columns": 4}, {"columns": 1024}, {"group": 2}])
def test_emitters_refuse_other_panels_of_a_matrix(change: dict[str, int]) -> None:
    """Panels with fewer lanes are smaller than the vectors that a kernel reads."""
    lanes = resolve("host").lanes("f32")
    layout = Panels(**{"k": 32, "n": 137, "columns": 2 * lanes, "lanes": lanes, "group": 1} | change)
    w = RNG.standard_normal((32, 137)).astype(np.float32)
    g = rlx.Graph("panels")
    x = g.input("x", (8, 32), "f32")
    p = g.param("w", (layout.elements,), "f32", layout.layout.pack(w))
    g.output("y", x @ read_as(p, layout=layout.layout))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 32)).astype(np.float32)
    np.testing.assert_allclose(program(given), given @ w, rtol=1e-4, atol=1e-4)
    assert "cannot read the layout" in program.stats["host_thunks"][0]["why"]


LANES = resolve("host").lanes("f32")


def convolved(x: Any, y: Any, w: np.ndarray, kernel: Layout, groups: int) -> list[str]:
    """Run a convolution whose image is read as `x`, result stored as `y` and weights read as `kernel`; why
    parts of it run on the host."""
    g = rlx.Graph("stated")
    image = RNG.standard_normal((1, 2 * LANES, 6, 6)).astype(np.float32)
    given = g.input("x", image.shape if x is None else x.pack(image).shape, "f32")
    p = g.param("w", (kernel.elements,), "f32", kernel.pack(w))
    read = given if x is None else read_as(given, layout=x)
    made = rlx.ops.conv(read, read_as(p, layout=kernel), padding=1, groups=groups)
    g.output("y", made if y is None else store_as(made, layout=y))
    want = rlx.ops.conv(image, w, padding=1, groups=groups)
    program = rlx.compile(g, cache=False)
    got = program(image if x is None else x.pack(image))
    np.testing.assert_allclose(got if y is None else y.unpack(got), want, rtol=1e-4, atol=1e-4)
    return [thunk["why"] for thunk in program.stats["host_thunks"]]


def own_and_foreign_images() -> dict[str, tuple[Any, Any, Any, int, bool]]:
    """Layouts of image, result and weights, the number of groups, and whether kernels read and write them."""
    channels, blocks = 2 * LANES, ChannelBlocks(4, 2 * LANES, LANES).layout
    half = ChannelBlocks(4, channels, LANES // 2).layout
    last = Layout.parse(f"?,{channels},?,? -> ?,?,?,{channels}: 0:{channels}={channels}@1")
    shape, depthwise = (channels, channels, 3, 3), (channels, 1, 3, 3)
    direct = KernelPanels(shape, 1, 2 * LANES, LANES, LANES).layout
    planar = KernelPanels(shape, 1, 2 * LANES, LANES, 1).layout
    by_channel = KernelPanels(depthwise, 1, LANES, LANES, 1).layout
    turned = KernelPanels(depthwise, 1, 2 * LANES, LANES, 1).layout
    return {
        "direct": (blocks, blocks, direct, 1, True),
        "planar": (None, None, planar, 1, True),
        "depthwise": (blocks, blocks, by_channel, channels, True),
        "image, channels last": (last, blocks, direct, 1, False),
        "result, channels last": (blocks, last, direct, 1, True),  # a kernel of its own moves it
        "result, half of the lanes": (blocks, half, direct, 1, False),
        "weights for planes": (blocks, blocks, planar, 1, False),
        "weights for blocks": (None, None, direct, 1, False),
        "weights of depthwise": (blocks, blocks, turned, channels, False),
    }


@pytest.mark.parametrize("case", own_and_foreign_images())
def test_emitters_of_convolutions_refuse_what_they_do_not_read(case: str) -> None:
    """Every stated layout is compared with the kernel's own; the host computes what none reads."""
    x, y, kernel, groups, native = own_and_foreign_images()[case]
    w = RNG.standard_normal(kernel.sizes).astype(np.float32)
    told = convolved(x, y, w, kernel, groups)
    assert bool(told) is not native, told
    assert native or any("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("lanes", [LANES, LANES // 2, 1])
def test_emitters_of_quantised_weights_refuse_other_lanes(lanes: int) -> None:
    layout = QuantLayout(32, 24, 4, 16, lanes)
    codes = RNG.integers(-8, 8, (32, 24)).astype(np.int8)
    g = rlx.Graph("bits")
    x = g.input("x", (8, 32), "f32")
    packed = layout.pack(codes, np.full((2, 24), 0.5, np.float32))
    p = g.param("w", packed.shape, "u8", packed)
    parts = [read_as(p, layout=own) for own in layout.layouts]
    g.output("y", x @ get_op("dequantize_groups")(*parts, bits=4, group=16))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 32)).astype(np.float32)
    np.testing.assert_allclose(program(given), given @ (codes * np.float32(0.5)), rtol=1e-4, atol=1e-4)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    assert bool(told) is (lanes != LANES) and all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("change", ["group", "zeros", "order"])
def test_emitters_of_quantised_weights_refuse_other_groups(change: str) -> None:
    """What is decoded is compared as a whole: its parts, and how they belong together."""
    layout = QuantLayout(32, 24, 4, 32, LANES, zeros=True)
    codes = RNG.integers(-8, 8, (32, 24)).astype(np.int8)
    scales, zeros = RNG.uniform(0.5, 1, (2, 1, 24)).astype(np.float32)
    packed = layout.pack(codes, scales, zeros)
    g = rlx.Graph("bits")
    p = g.param("w", packed.shape, "u8", packed)
    x = g.input("x", (8, 32), "f32")
    read, *factors = [read_as(p, layout=own) for own in layout.layouts]
    group = 40 if change == "group" else 32  # one group all the same
    if change == "zeros":
        factors, zeros = factors[:1], np.zeros_like(zeros)
    elif change == "order":
        factors, scales, zeros = factors[::-1], zeros, scales
    g.output("y", x @ get_op("dequantize_groups")(read, *factors, bits=4, group=group))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 32)).astype(np.float32)
    np.testing.assert_allclose(program(given), given @ ((codes - zeros) * scales), rtol=1e-3, atol=1e-3)
    assert ["cannot read the layout" in thunk["why"] for thunk in program.stats["host_thunks"]] == [True]


@pytest.mark.parametrize("change", ["none", "block", "zeros"])
def test_emitters_of_quantised_weights_refuse_other_blocks(change: str) -> None:
    """Factors that are codes: how many groups share a number, and that there is nothing else."""
    layout = QuantLayout(64, 24, 4, 8, LANES, "f16", minimums=True, block=8)
    codes = RNG.integers(0, 16, (64, 24)).astype(np.uint8)
    of_groups = RNG.integers(0, 64, (2, 8, 24)).astype(np.int8)
    of_blocks = RNG.uniform(0.5, 1, (2, 1, 24)).astype(np.float16)
    packed = layout.pack(codes, of_groups[0], of_blocks[0], of_groups[1], of_blocks[1])
    g = rlx.Graph("bits")
    p = g.param("w", packed.shape, "u8", packed)
    x = g.input("x", (8, 64), "f32")
    read, *parts = [read_as(p, layout=own) for own in layout.layouts]
    wide = of_blocks.astype(np.float32)
    factors = (of_groups * wide).repeat(8, axis=1)
    how = {"bits": 8, "group": 16 if change == "block" else 8}  # one block all the same
    pairs = [(*parts[:2], *parts[3:][: change == "zeros"]), parts[2:]]
    if change == "zeros":  # of scales: what minimums have
        factors[0] = ((of_groups[0] - wide[1]) * wide[0]).repeat(8, axis=0)
    decode = get_op("dequantize_groups")
    nested = [decode(*pair, **how) for pair in pairs]
    g.output("y", x @ decode(read, *nested, bits=4, group=8, minimums=True))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((8, 64)).astype(np.float32)
    wanted = given.astype(np.float64) @ (codes * factors[0].astype(np.float64) - factors[1])
    np.testing.assert_allclose(program(given), wanted, rtol=1e-3, atol=1e-2)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    assert bool(told) is (change != "none") and all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_emitters_refuse_axes_in_front_of_a_matrix(quantised: bool, free: bool) -> None:
    """A kernel reads the panels of one matrix."""
    w = RNG.integers(-8, 8, (2, 32, 96)).astype(np.int8)
    g = rlx.Graph("front")
    if quantised:
        layout = QuantLayout(32, 96, 8, 32, LANES)
        packed = layout.pack(w, np.ones((2, 1, 96), np.float32))
        p = g.param("w", packed.shape, "u8", packed)
        parts = [read_as(p, layout=own) for own in layout.layouts]
        read = get_op("dequantize_groups")(*parts, bits=8, group=32)
    else:
        own = panels_of(32, 96, resolve("host"), "f32").layout
        p = g.param("w", (2, own.elements), "f32", own.pack(w.astype(np.float32)))
        read = read_as(p, layout=own)
    given = RNG.standard_normal((3, 32) if free else (2, 3, 32)).astype(np.float32)
    x = g.input("x", given.shape, "f32")
    g.output("y", dot_general(x, read, ((1,), (1,))) if free else x @ read)
    program = rlx.compile(g, cache=False)
    want = np.einsum("mk,bkn->mbn" if free else "bmk,bkn->bmn", given, w.astype(np.float32))
    np.testing.assert_allclose(program(given), want, rtol=1e-4, atol=1e-3)
    (thunk,) = program.stats["host_thunks"]
    assert "cannot read the layout" in thunk["why"] or "reads whole rows" in thunk["why"]


@pytest.mark.parametrize("columns", [2 * LANES, LANES])
def test_emitters_of_winograd_refuse_other_panels(columns: int) -> None:
    layout = WinogradLayout(4, LANES, 2 * LANES, columns, LANES)
    w = RNG.standard_normal((LANES, 2 * LANES, 3, 3)).astype(np.float32)
    g, unpack = rlx.Graph("winograd"), get_op("unpack_winograd")
    x = from_blocks(g.input("x", (1, 2, 8, 8, LANES), "f32"), 2 * LANES)
    kernel = unpack(transform_kernel(g.constant(w), layout), **{k: getattr(layout, k) for k in unpack.attrs})
    g.output("y", to_blocks(rlx.ops.conv(x, kernel, padding=1), LANES))
    program = rlx.compile(g, cache=False)
    given = RNG.standard_normal((1, 2, 8, 8, LANES)).astype(np.float32)
    want = to_blocks(rlx.ops.conv(from_blocks(given, 2 * LANES), w, padding=1), LANES)
    np.testing.assert_allclose(program(given), want, rtol=1e-3, atol=1e-3)
    told = [thunk["why"] for thunk in program.stats["host_thunks"]]
    assert bool(told) is (columns != 2 * LANES) and all("cannot read the layout" in why for why in told), told


def test_blocks_without_packed_weights_are_refused() -> None:
    g = rlx.Graph("blocks")
    x = g.input("x", (1, 2, 6, 6, LANES), "f32")
    w = RNG.standard_normal((LANES, 2 * LANES, 3, 3)).astype(np.float32)
    g.output("y", to_blocks(rlx.ops.conv(from_blocks(x, 2 * LANES), g.constant(w), padding=1), LANES))
    given = RNG.standard_normal((1, 2, 6, 6, LANES)).astype(np.float32)
    want = to_blocks(rlx.ops.conv(from_blocks(given, 2 * LANES), w, padding=1), LANES)
    np.testing.assert_allclose(rlx.compile(g, cache=False)(given), want, rtol=1e-4, atol=1e-4)


def refusals(target: str, graph: rlx.Graph) -> list[str]:
    """Why a target leaves parts of a graph to the host."""
    made = build_kernels(plan(graph, target=target), resolve(target))
    return [thunk.why for thunk in made.thunks.values()]


def product_of(x: str, stored: str, elements: int, read: Callable[[Any], Any], result: str) -> rlx.Graph:
    """x @ w [32, 137] -> `result`, where `read` gives w from its stored elements."""
    g = rlx.Graph("product")
    p = g.param("w", (elements,), stored, np.zeros(elements, dtype(stored).np))
    g.output("y", dot_general(g.input("x", (8, 32), x), read(p), ((1,), (0,)), out_dtype=result))
    return g


@pytest.mark.parametrize("target", [target.name for target in targets()])
@pytest.mark.parametrize("element", ["f32", "f64", "bf16", "f16", "i8"])
def test_targets_refuse_other_panels_of_every_dtype(target: str, element: str) -> None:
    own = panels_of(32, 137, resolve(target), element)
    changes = {"columns": 2 * own.columns, "lanes": 2 * own.lanes, "group": 2 * own.group}
    stated = [own, *(replace(own, **{name: value}) for name, value in changes.items())]
    for panels in stated:
        read = functools.partial(read_as, layout=panels.layout)
        result = {"i8": "i32", "f64": "f64"}.get(element, "f32")
        told = refusals(target, product_of(element, element, panels.elements, read, result))
        assert bool(told) is (panels.layout != own.layout), panels
        assert all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("target", [target.name for target in targets()])
def test_targets_refuse_other_quads(target: str) -> None:
    """Only targets that sum bytes in pairs read quads, in panels of their own size."""
    machine, own = resolve(target), panels_of(32, 137, resolve(target), "i8")
    for columns, lanes, seven in ((1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True)):
        quads = QuadPanels(32, 137, columns * own.columns, lanes * own.lanes, 1, seven)
        read = functools.partial(get_op("unpack_quads"), **vars(quads))
        told = refusals(target, product_of("u8", "i8", quads.elements, read, "i32"))
        fits = machine.sums_in_pairs and columns == lanes == 1 and not seven
        assert bool(told) is not fits, quads
        assert all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("target", [target.name for target in targets()])
@pytest.mark.parametrize("result", ["f32", "f64"])
def test_targets_refuse_sparse_weights_of_another_dtype(target: str, result: str) -> None:
    """A kernel multiplies and adds in the dtype that the weights are stored in."""
    stated = {"k": 32, "n": 137, "room": 9, "dtype": dtype("f32")}
    read = functools.partial(get_op("unpack_sparse"), **stated)
    told = refusals(target, product_of("f32", "u8", columns_of(**stated).bytes, read, result))
    assert bool(told) is (result == "f64")
    assert all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("target", [target.name for target in targets()])
def test_targets_refuse_other_kernels_of_bytes(target: str) -> None:
    """Weights of convolutions of bytes are stored in groups of channels."""
    shape, machine = (64, 32, 3, 3), resolve(target)
    lanes, group = machine.lanes("f32"), kind_of("u8", machine).group
    own = KernelPanels(shape, 1, 2 * lanes, lanes, lanes, group)
    blocks = ChannelBlocks(4, 32, lanes).layout
    for layout in (own, replace(own, columns=4 * lanes), replace(own, group=group // 2 or 2)):
        g = rlx.Graph("bytes")
        p = g.param("w", (layout.layout.elements,), "i8", np.zeros(layout.layout.elements, np.int8))
        x = read_as(g.input("x", (1, 32 // lanes, 8, 8, lanes), "u8"), layout=blocks)
        made = rlx.ops.conv(x, read_as(p, layout=layout.layout), padding=1, out_dtype="i32")
        g.output("y", store_as(made, layout=ChannelBlocks(4, 64, lanes).layout))
        told = refusals(target, g)
        assert bool(told) is (layout is not own), layout
        assert all("cannot read the layout" in why for why in told), told


@pytest.mark.parametrize("target", [target.name for target in targets()])
def test_what_the_compiler_lays_out_every_target_reads(target: str) -> None:
    """A refusal here would be a program that is slower and says so nowhere."""
    g = rlx.Graph("all")
    x = g.input("x", ("n", 16, 20, 20), "f32")

    def weights(*shape: int) -> np.ndarray:
        return RNG.standard_normal(shape).astype(np.float32)

    y = rlx.ops.conv(x, g.constant(weights(64, 16, 3, 3)), padding=1)
    y = rlx.ops.conv(rlx.ops.relu(y), g.constant(weights(64, 1, 3, 3)), padding=1, groups=64)
    y = rlx.ops.conv(y, g.constant(weights(32, 64, 1, 1)))
    flat = rlx.ops.mean(y, axis=(2, 3)) @ g.constant(weights(32, 100))
    sparse = weights(100, 64) * (RNG.random((100, 64)) < 0.05)
    g.output("y", flat @ g.constant(sparse.astype(np.float32)))
    for precision in ("f32", "bf16"):
        lir = plan(g, target=target, precision=precision)
        made = build_kernels(lir, resolve(target))
        assert not [thunk.why for thunk in made.thunks.values() if "cannot read the layout" in thunk.why]
