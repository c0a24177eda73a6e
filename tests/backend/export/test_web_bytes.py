"""Products of bytes in WebAssembly: weights of seven bits, larger ones that wait, engines that are wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from exact_integers import WEIGHTS, left, product, weights
from node_programs import Node
from rlx.codegen.native.jit import assembly
from rlx.export.export import prepare
from rlx.target.cpu import resolve, web_targets

RELAXED = "wasm32-relaxed"
TARGETS = [target.name for target in web_targets()]
SIZES = [(4, 1), (5, 17), (7, 8), (33, 50), (383, 131)]  # odd k, ragged columns, many panels


def graph(dtype: str, w: np.ndarray, m: Any = "m") -> rlx.Graph:
    g = rlx.Graph("bytes")
    x, right = g.input("x", (m, w.shape[0]), dtype), g.param("w", w.shape, "i8", w)
    g.output("y", rlx.ops.dot_general(x, right, ((1,), (0,)), out_dtype="i32"))
    return g


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["u8", "i8"])
@pytest.mark.parametrize("how", WEIGHTS)
def test_sums_are_exact(target: str, dtype: str, how: str, require) -> None:  # type: ignore[no-untyped-def]
    """In wasmtime: one row, rows of one and two tiles, whatever the weights are."""
    require("wasmtime")
    from exported_modules import WebModel

    rng = np.random.default_rng(len(how))
    for k, n in [*SIZES, *rng.integers(1, 90, (2, 2)).tolist()]:
        w = weights(rng, how, k, n)
        model = WebModel(rlx.compile(graph(dtype, w), threads=1), {"m": (0, 40)}, target)
        for m in (0, 1, 2, 3, 7, int(rng.integers(8, 40))):
            x = left(rng, dtype, m, k)
            model.bind([m])
            np.testing.assert_array_equal(model.run({"x": x})["y"], product(x, w))


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_sums_are_exact_in_node(dtype: str, require) -> None:  # type: ignore[no-untyped-def]
    """With both compilers of V8, one and two threads."""
    require("node")
    node, rng = Node(), np.random.default_rng(3)
    for how in ("small", "outliers", "large"):
        for k, n in SIZES:
            w = weights(rng, how, k, n)
            program = rlx.compile(graph(dtype, w), threads=1)
            for m, threads in ((1, 1), (2, 1), (20, 1), (20, 2)):
                x = left(rng, dtype, m, k)
                found = node.run(program, {"m": m}, {"x": x}, RELAXED, threads)["y"]
                np.testing.assert_array_equal(found, product(x, w))
    assert node.process.stdin and node.process.stdout
    node.process.stdin.close()
    node.process.wait()
    node.process.stdout.close()


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_rows_that_are_computed(dtype: str, require) -> None:  # type: ignore[no-untyped-def]
    """What quantises the left operand runs inside of the product; sums of rows leave out what is past their
    end, where the quantised value of nothing is not zero."""
    require("wasmtime")
    from exported_modules import WebModel

    rng = np.random.default_rng(5)
    low, high = (0, 255) if dtype == "u8" else (-128, 127)
    for how, (m, k, n) in (("small", (9, 37, 50)), ("outliers", (1, 131, 64)), ("small", (40, 63, 33))):
        w = weights(rng, how, k, n)
        x = rng.integers(low, high, (m, k), endpoint=True).astype(np.float32)
        g = rlx.Graph("computed")
        given = rlx.ops.clip(g.input("x", (m, k), "f32") + 7.0, low, high)
        right = g.param("w", w.shape, "i8", w)
        g.output("y", rlx.ops.dot_general(rlx.ops.cast(given, dtype), right, ((1,), (0,)), out_dtype="i32"))
        model = WebModel(rlx.compile(g, threads=1), {}, RELAXED)
        np.testing.assert_array_equal(model.run({"x": x})["y"], product(np.clip(x + 7, low, high), w))


@pytest.mark.parametrize("target", TARGETS)
def test_values_decide(target: str) -> None:
    """Only where few weights need more than seven bits are products of bytes used."""
    rng = np.random.default_rng(7)
    seven = rng.integers(-64, 64, (384, 48)).astype(np.int8)
    few, columns = seven.copy(), np.arange(-64, 32, 2)
    few[::40] = 127
    given = {
        "seven": (seven, True),
        "columns": ((seven + columns).clip(-128, 127).astype(np.int8), True),  # each has its own 128 levels
        "few": (few, True),
        "all": (weights(rng, "large", 384, 48), False),
    }
    for name, (w, small) in given.items():
        made = prepare(rlx.compile(graph("u8", w, 8), threads=1), {}, target=target)
        text = "".join(assembly(kernel, resolve(target)) for kernel in made.kernels)
        quads = target == RELAXED and small
        assert ("relaxed_dot_i8x16_i7x16_add_s" in text) == quads, name
        assert ("i32x4.dot_i16x8_s" in text) != quads, name


def test_an_engine_that_multiplies_wrong_is_refused(tmp_path: Path, require) -> None:  # type: ignore[no-untyped-def]
    """`load` multiplies bytes of seven bits before it trusts them; other models do not ask for that."""
    require("node")
    rng = np.random.default_rng(8)
    for name, how in (("small", "small"), ("large", "large")):
        folder = tmp_path / name
        w = weights(rng, how, 64, 24) if how == "large" else rng.integers(0, 128, (64, 24)).astype(np.int8)
        program = rlx.compile(graph("u8", w, 4), threads=1)
        program.export(folder, "wasm", name="net", target=RELAXED)
        loader = folder / "net.mjs"
        assert loader.read_text().count("f() !== 1") == 1
        loader.write_text(loader.read_text().replace("f() !== 1", "f() === 1"))  # as if it were wrong
        (folder / "try.mjs").write_text(
            'import { load } from "./net.mjs";\n'
            "const said = (text) => console.log(text);\n"
            'load(undefined, { threads: 1 }).then(() => said("loaded"), (error) => said(error.message));\n'
        )
        flags = Node.flags()
        done = subprocess.run(["node", *flags, "try.mjs"], cwd=folder, capture_output=True, text=True)
        wanted = "this engine multiplies bytes wrong" if name == "small" else "loaded"
        assert done.stdout.startswith(wanted), done.stdout + done.stderr
