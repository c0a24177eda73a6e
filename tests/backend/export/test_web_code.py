"""What engines of WebAssembly are slow at is not written: constants in large blocks, moves of single bytes,
masks lane by lane, divisions for every row, more vectors at once than there are registers, constants that are
added to addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import rlx
from rlx.codegen.native.jit import assembly
from rlx.export.export import prepare
from rlx.export.web_code import LOWEST, for_engines, in_memory, with_offsets
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import resolve

WEB = "wasm32"


def kernels(graph: rlx.Graph) -> str:
    """The assembly of a graph's kernels."""
    made = prepare(rlx.compile(graph, threads=1), {}, target=WEB)
    return "".join(assembly(for_engines(kernel), resolve(WEB)) for kernel in made.kernels)


def functions(text: str) -> Iterator[list[str]]:
    """The instructions of each function."""
    for part in text.split("\t.functype\t")[1:]:
        yield re.findall(r"^\t(\w[\w.]*)", part.partition("end_function")[0], re.M)


def check(graph: rlx.Graph, feed: dict[str, np.ndarray], sizes: dict[str, int] | None = None) -> None:
    """In wasmtime it gives what the reference gives."""
    from exported_modules import WebModel

    sizes = sizes or {}
    model = WebModel(rlx.compile(graph, threads=1), {n: (0, max(s, 1)) for n, s in sizes.items()}, WEB)
    if sizes:
        model.bind([sizes[s.name] for s in model.tables.symbols])
    found = model.run(feed)
    for name, value in evaluate(graph, feed).items():
        np.testing.assert_allclose(found[name], value, rtol=2e-6, atol=1e-6)


def test_constants_of_large_blocks_are_read(require) -> None:  # type: ignore[no-untyped-def]
    require("wasmtime")
    graph = rlx.Graph("logs")
    graph.output("y", rlx.ops.log(graph.input("x", (64, 48), "f32")))
    made = prepare(rlx.compile(graph, threads=1), {}, target=WEB)
    plain = "".join(assembly(kernel, resolve(WEB)) for kernel in made.kernels)
    assert plain.count("v128.const") > 4 * kernels(graph).count("v128.const")
    x = np.random.default_rng(1).uniform(-0.1, 9, (64, 48)).astype(np.float32)
    x[0, :6] = 0, -0.0, np.inf, -np.inf, np.nan, 1e-40
    check(graph, {"x": x})


def test_constants_of_small_blocks_stay() -> None:
    """Engines keep those in registers while a loop runs."""
    graph = rlx.Graph("scaled")
    graph.output("y", graph.input("x", (64, 48), "f32") * 3.0 + 2.0)
    for kernel in prepare(rlx.compile(graph, threads=1), {}, target=WEB).kernels:
        assert in_memory(kernel).strip() == kernel.strip()


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (23, 37), (64, 4), (5, 3)])
@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_bytes_are_turned_by_one_shuffle(dtype: str, shape: tuple[int, int], require) -> None:  # type: ignore[no-untyped-def]
    require("wasmtime")
    graph = rlx.Graph("turned")
    graph.output("y", rlx.ops.transpose(graph.input("x", shape, dtype), (1, 0)))
    x = np.random.default_rng(2).integers(0, 128, shape).astype(graph.nodes[0].dtype.np)
    check(graph, {"x": x})
    found = re.findall(r"i8x16.shuffle\t(.*)", kernels(graph))
    whole = [lanes for lanes in found if lanes.startswith("0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7")]
    assert len(whole) == 2  # squares, and what is left at the edges
    assert len(found) <= 5  # of the others, none has bytes of two registers


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 64, 101])
def test_padding_asks_for_all_lanes_or_none(size: int, dtype: str, require) -> None:  # type: ignore[no-untyped-def]
    require("wasmtime")
    graph = rlx.Graph("padded")
    padded = rlx.ops.pad(graph.input("x", ("n",), dtype), ((2, 30),), value=1)
    graph.output("y", rlx.ops.cast(padded, "f32") * 2.0)
    x = np.random.default_rng(3).uniform(-9, 9, size).astype(graph.nodes[0].dtype.np)
    check(graph, {"x": x}, {"n": size})


@pytest.mark.parametrize("sizes", [(2, 3, 5), (1, 1, 1), (0, 4, 2), (3, 0, 2), (3, 2, 0), (5, 7, 11)])
def test_short_rows_are_found_once_per_line(sizes: tuple[int, int, int], require) -> None:  # type: ignore[no-untyped-def]
    """Rows of four elements, the third axis resized: divisions are not in the innermost loop."""
    require("wasmtime")
    graph = rlx.Graph("lines")
    x, y = graph.input("x", ("a", "b", "c", 4), "f32"), graph.input("y", ("a", "c", 4), "f32")
    wide = rlx.ops.reshape(y, ("a", 1, "c", 4))
    graph.output("z", rlx.ops.exp(x) * wide)
    rng, (a, b, c) = np.random.default_rng(4), sizes
    feed = {"x": rng.normal(size=(a, b, c, 4)), "y": rng.normal(size=(a, c, 4))}
    check(graph, {n: v.astype(np.float32) for n, v in feed.items()}, dict(zip("abc", sizes, strict=True)))


def test_a_row_reads_a_vector_when_it_is_multiplied() -> None:
    """Twelve vectors of a constant matrix, and as many sums, do not fit 15 registers."""
    graph, rng = rlx.Graph("row"), np.random.default_rng(5)
    w = graph.param("w", (128, 512), "f32", rng.normal(size=(128, 512)).astype(np.float32))
    graph.output("y", graph.input("x", (1, 128), "f32") @ w)
    wide = [f for f in functions(kernels(graph)) if f.count("f32x4.mul") == 12]
    assert wide
    for code in wide:
        steps = [name for name in code if name in ("v128.load", "f32x4.mul")]
        first = steps.index("f32x4.mul")
        assert steps[first:][:23] == (["f32x4.mul", "v128.load"] * 12)[:23]


@pytest.mark.parametrize("blocked", [False, True])
def test_depthwise_convolutions_take_one_product_at_a_time(blocked: bool) -> None:
    """Products of all taps, made before the first is added, do not fit the registers."""
    graph, rng = rlx.Graph("depthwise"), np.random.default_rng(6)
    x = graph.input("x", (1, 32, 24, 24), "f32")

    def conv(x: rlx.Node, name: str, groups: int, size: int) -> rlx.Node:
        shape = (32, 32 // groups, size, size)
        w = graph.param(name, shape, "f32", rng.normal(size=shape).astype(np.float32))
        return rlx.ops.conv(x, w, padding=((size // 2, size // 2),) * 2, groups=groups)

    y = conv(conv(x, "before", 1, 1), "w", 32, 5) if blocked else conv(x, "w", 32, 5)
    graph.output("y", conv(y, "after", 1, 1) if blocked else y)
    parts = [part.partition("end_function")[0] for part in kernels(graph).split("\t.functype\t")[1:]]
    found = [part for part in parts if part.count("f32x4.mul") >= 20 and (".strip" in part) is blocked]
    assert found
    for part in found:
        steps = re.findall(r"f32x4\.(mul|add)", part)
        assert steps == ["mul", "add"] * (len(steps) // 2)


def test_constants_of_addresses_are_part_of_instructions() -> None:
    graph, rng = rlx.Graph("tile"), np.random.default_rng(7)
    w = graph.param("w", (64, 96), "f32", rng.normal(size=(64, 96)).astype(np.float32))
    graph.output("y", graph.input("x", (12, 64), "f32") @ w)
    text = kernels(graph)
    own = r"i32\.const\t\d+\n\ti32\.add \n\tv128\.load\w*\t0"
    assert len(re.findall(r"\tv128\.load\w*\t[1-9]", text)) > 4 * len(re.findall(own, text))


@pytest.mark.parametrize(("offset", "apart"), [(-4, False), (4, True), (LOWEST - 4, True), (LOWEST, False)])
def test_addresses_minus_their_offset_are_not_negative(offset: int, apart: bool) -> None:
    lines = ["define float @f(ptr %p, i64 %i) {", f"  %j = add i64 %i, {offset}"]
    lines += [
        "  %q = getelementptr i8, ptr %p, i64 %j",
        "  %x = load float, ptr %q, align 4",
        "  ret float %x",
        "}",
    ]
    text = with_offsets("\n".join(lines))
    assert ("nuw" in text) is apart
    assert (f"f32.load\t{offset}" in assembly(text, resolve(WEB))) is apart
