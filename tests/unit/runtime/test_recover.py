"""Params that are found in packed weights: bit for bit, from memory and from files, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from stored_models import network

import rlx
from rlx.api.compile import plan
from rlx.api.session import read_graph
from rlx.errors import FormatError
from rlx.ir.dtype import LazyArray
from rlx.ir.text.files import read_mir
from rlx.runtime.derive import lazy_weights
from rlx.runtime.recover import Recovered, check_recovery, recoverable, recovery
from rlx.runtime.store.artifact import Artifact


def joined_and_quantised() -> rlx.Graph:
    """Three products that become one, a transposed matrix, a table, a matrix of f16, and codes of 4 bits."""
    rng = np.random.default_rng(0)
    g = rlx.Graph("kinds")
    x = g.input("x", ("n", 64), "f32")

    def param(name: str, *shape: int) -> rlx.Node:
        return g.param(name, shape, "f32", rng.standard_normal(shape).astype(np.float32))

    for name in "abc":
        g.output(name, x @ param(f"w{name}", 64, 96))
    g.output("t", rlx.ops.matmul(x, rlx.ops.transpose(param("wt", 48, 64))))
    g.output("rows", rlx.ops.embedding(param("table", 10, 64), g.input("i", ("n",), "i64")))
    half = rng.standard_normal((64, 50)).astype(np.float16)
    g.output("h", x @ rlx.ops.cast(g.param("half", half.shape, "f16", half), "f32"))
    codes = g.param("codes", (64, 40), "i8", rng.integers(-8, 8, (64, 40)).astype(np.int8))
    matrix = rlx.ops.dequantize_groups(codes, param("scales", 2, 40), param("zeros", 2, 40), bits=4, group=32)
    g.output("q", x @ matrix)
    return g


@pytest.mark.parametrize("make", [joined_and_quantised, network])
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
def test_recovered_params_have_the_same_bits(make: object, target: str) -> None:
    graph = make()  # type: ignore[operator]
    lir = plan(graph, target=target)
    weights = lazy_weights(lir, graph.param_values)
    found = recoverable(lir, weights)
    inverse = recovery(lir, found)
    check_recovery(inverse)
    check_recovery(read_mir(str(inverse), {}))
    bytes_of = {id: np.ascontiguousarray(w).reshape(-1).view(np.uint8) for id, w in weights.items()}
    recovered = Recovered(inverse, bytes_of.__getitem__)
    for name in found:
        value, given = recovered.value(name), graph.param_values[name]
        assert value.dtype == given.dtype and value.shape == given.shape
        assert value.tobytes() == np.asarray(given).tobytes()
    if make is joined_and_quantised:
        assert found.keys() == graph.params.keys()


def test_a_file_has_params_once_and_set_param_works(tmp_path: Path) -> None:
    graph = joined_and_quantised()
    feeds = {"x": np.ones((2, 64), np.float32), "i": np.array([1, 2])}
    program = rlx.compile(graph)
    program.save(tmp_path / "kinds.rlx")
    file = Artifact(tmp_path / "kinds.rlx")
    assert file.container.header["packed_params"].keys() == graph.params.keys() - {"table"}
    loaded = rlx.load(tmp_path / "kinds.rlx")
    for name, value in graph.param_values.items():
        assert loaded.param_values[name].tobytes() == np.asarray(value).tobytes()
        assert np.array_equal(read_graph(tmp_path / "kinds.rlx").param_values[name], value)
    changed = -np.asarray(graph.param_values["wb"])
    for p in (program, loaded):
        p.set_param("wb", changed)
    expected, found = program.run(feeds), loaded.run(feeds)
    for name in expected:
        assert np.array_equal(found[name], expected[name]), name
    loaded.save(tmp_path / "again.rlx")
    again = rlx.load(tmp_path / "again.rlx")
    assert np.array_equal(again.param_values["wb"], changed)
    other = rlx.load(tmp_path / "again.rlx", target="x86-64").run(feeds)  # from its graph
    np.testing.assert_allclose(other["b"], expected["b"], rtol=1e-4, atol=1e-4)


def test_a_model_can_be_removed_after_it_was_loaded(tmp_path: Path, require: object) -> None:
    require("onnx")  # type: ignore[operator]
    from rlx.zoo.onnx_writer import OnnxWriter

    writer, rng = OnnxWriter(), np.random.default_rng(0)
    kernel = writer.weight("k", rng.standard_normal((32, 32, 3, 3)).astype(np.float32))  # for Winograd
    matrix = writer.weight("w", rng.standard_normal((34, 300)).astype(np.float32))
    writer.op("MatMul", writer.op("Conv", "x", kernel), matrix, outputs=["y"])
    shapes = {"x": (np.float32, (1, 32, 36, 36))}, {"y": (np.float32, (1, 32, 34, 300))}
    path = tmp_path / "model.onnx"
    path.write_bytes(writer.model("model", *shapes).SerializeToString())
    x = rng.standard_normal((1, 32, 36, 36)).astype(np.float32)
    program = rlx.load(path, cache=False)
    assert all(isinstance(value, LazyArray) for value in program.stored_params.values())
    expected = program(x)
    os.remove(path)
    for name in ("w", "k"):
        program.set_param(name, program.param_values[name].copy())
        assert np.array_equal(program(x), expected)
    program.save(tmp_path / "model.rlx")
    assert np.array_equal(rlx.load(tmp_path / "model.rlx")(x), expected)


@pytest.mark.parametrize(
    "text",
    [
        'graph "p" {\n %0 = param() {name="0", type=f32[4]}\n %1 = exp(%0)\n output "w" = %1\n}\n',
        'graph "p" {\n %0 = param() {name="0", type=f32[1]}\n'
        ' %1 = broadcast_to(%0) {shape=(100000)}\n output "w" = %1\n}\n',
        # each eight times as large as the one before
        'graph "p" {\n %0 = param() {name="0", type=f32[1]}\n %1 = broadcast_to(%0) {shape=(8)}\n'
        ' %2 = broadcast_to(%1) {shape=(8, 8)}\n output "w" = %2\n}\n',
        # many, none of which is too large
        'graph "p" {\n %0 = param() {name="0", type=f32[1]}\n'
        + "".join(f" %{i} = broadcast_to(%0) {{shape=(8)}}\n" for i in range(1, 12))
        + ' output "w" = %11\n}\n',
    ],
)
def test_a_recovery_only_moves_elements(text: str) -> None:
    with pytest.raises(FormatError, match="its params are computed by"):
        check_recovery(read_mir(text, {}))
