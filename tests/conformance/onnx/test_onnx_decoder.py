"""A decoder as exporters of language models write it is one program, for prompts and tokens of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import rlx  # noqa: E402
from conformance.ort_session import open_session  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")

LAYERS, HEADS, FEW, DIM, WORDS, WIDTH, INNER = 2, 4, 2, 16, 50, 64, 48
MS = "com.microsoft"


class Exporter:
    """Nodes and weights of a model in the making."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def random(self, name: str, *shape: int) -> str:
        return self.weight(name, (self.rng.standard_normal(shape) * 0.3).astype(np.float32))

    def add(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any) -> str:
        made = helper.make_node(op, inputs, outputs, name=f"{op}_{outputs[0]}", domain=domain, **attrs)
        self.nodes.append(made)
        return outputs[0]

    def product(self, x: str, name: str, rows: int, columns: int) -> str:
        """A product with weights of 4 bits in blocks."""
        codes = self.rng.integers(0, 256, (columns, rows // 16, 8)).astype(np.uint8)
        scales = self.rng.uniform(0.01, 0.05, columns * (rows // 16)).astype(np.float32)
        weights = [self.weight(f"{name}.codes", codes), self.weight(f"{name}.scales", scales)]
        how = {"K": rows, "N": columns, "bits": 4, "block_size": 16}
        return self.add("MatMulNBits", [x, *weights], [name], MS, **how)


def decoder(attention: str, cache: Any = "past") -> Any:
    """Model with inputs ids [b, s], seen [b, t] and past keys and values [b, heads, cache, dim]."""
    e = Exporter()
    kv = FEW if attention == "GroupQueryAttention" else HEADS
    codes = e.rng.integers(0, 256, (WORDS, WIDTH // 2)).astype(np.uint8)
    table = [e.weight("table", codes), "ids", e.random("table.scales", WORDS, WIDTH // 16)]
    how = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    x = e.add("GatherBlockQuantized", table, ["embedded"], MS, **how)
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2)))
    turns = [e.weight(f.__name__, f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    one = e.weight("one", np.array([1], np.int64))
    count = e.add("ReduceSum", ["seen", one], ["count"], keepdims=0)
    last = e.add("Cast", [e.add("Sub", [count, one], ["last64"])], ["last"], to=TensorProto.INT32)
    shape = e.add("Shape", ["seen"], ["shape"])
    total = e.add("Gather", [shape, e.weight("axis", np.array(1, np.int64))], ["total64"], axis=0)
    total = e.add("Cast", [total], ["total"], to=TensorProto.INT32)
    normal = e.add("SimplifiedLayerNormalization", [x, e.random("n", WIDTH)], ["normal"], epsilon=1e-5)
    for i in range(LAYERS):
        past, present = ([f"{side}.{i}.{t}" for t in ("key", "value")] for side in ("past", "present"))
        if attention == "GroupQueryAttention":
            qkv = e.product(normal, f"qkv{i}", WIDTH, (HEADS + 2 * FEW) * DIM)
            inputs = [qkv, "", "", *past, last, total, *turns]
            sizes = {"num_heads": HEADS, "kv_num_heads": FEW, "do_rotary": 1, "local_window_size": 6}
        else:
            parts = [e.product(normal, f"{t}{i}", WIDTH, HEADS * DIM) for t in "qkv"]
            for j in range(2):
                turned = [parts[j], "places", *turns]
                parts[j] = e.add("RotaryEmbedding", turned, [f"{'qk'[j]}{i}.turned"], MS, num_heads=HEADS)
            inputs, sizes = [*parts, "", "", "", *past], {"num_heads": HEADS, "unidirectional": 1}
        mixed = e.add(attention, inputs, [f"mixed{i}", *present], MS, **sizes)
        mixed = e.product(mixed, f"out{i}", HEADS * DIM, WIDTH)
        sums = [f"inner{i}", "", "", f"sum{i}"]
        normal = e.add("SkipSimplifiedLayerNormalization", [x, mixed, e.random(f"n{i}", WIDTH)], sums, MS)
        gate, up = (e.product(normal, f"{t}{i}", WIDTH, INNER) for t in ("gate", "up"))
        gate = e.add("Mul", [gate, e.add("Sigmoid", [gate], [f"sigmoid{i}"])], [f"silu{i}"])
        down = e.product(e.add("Mul", [gate, up], [f"gated{i}"]), f"down{i}", INNER, WIDTH)
        sums = [f"next{i}", "", "", f"x{i}"]
        scale = e.random(f"m{i}", WIDTH)
        normal = e.add("SkipSimplifiedLayerNormalization", [f"sum{i}", down, scale], sums, MS)
        x = f"x{i}"
    e.add("MatMul", [normal, e.random("head", WIDTH, WORDS)], ["logits"])
    info = helper.make_tensor_value_info
    inputs = [info("ids", TensorProto.INT64, ["b", "s"]), info("seen", TensorProto.INT64, ["b", "t"])]
    if attention != "GroupQueryAttention":
        inputs = [inputs[0], info("places", TensorProto.INT64, ["b", "s"])]
        unread = {"count", "last64", "last", "shape", "total64", "total"}
        e.nodes = [n for n in e.nodes if not unread & {*n.output}]
    names = [f"{i}.{t}" for i in range(LAYERS) for t in ("key", "value")]
    inputs += [info(f"past.{n}", TensorProto.FLOAT, ["b", kv, cache, DIM]) for n in names]
    outputs = [info("logits", TensorProto.FLOAT, ["b", "s", WORDS])]
    outputs += [info(f"present.{n}", TensorProto.FLOAT, ["b", kv, None, DIM]) for n in names]
    graph = helper.make_graph(e.nodes, "decoder", inputs, outputs, e.weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def check_decoding(model: Any, batch: int, room: int, prompt: int, steps: int) -> None:
    """Both engines decode the same tokens, each with its own cache, prompt first."""
    program = rlx.compile(rlx.from_onnx(model))
    assert not program.stats["host_thunks"]
    session = open_session(model)
    asked = [i for i in session.get_inputs() if i.name.startswith("past")]
    caches = [{i.name: np.zeros((batch, i.shape[1], room, DIM), np.float32) for i in asked} for _ in range(2)]
    ids = np.random.default_rng(batch).integers(0, WORDS, (batch, prompt))
    done = 0
    for _ in range(steps):
        end = done + ids.shape[1]
        feed = {"ids": ids}
        if any(i.name == "seen" for i in session.get_inputs()):
            feed["seen"] = np.ones((batch, end), np.int64)
        else:
            feed["places"] = np.broadcast_to(np.arange(done, end), (batch, end - done)).copy()
        outs = [o.name for o in session.get_outputs()]
        want = dict(zip(outs, session.run(None, feed | caches[0]), strict=True))
        got = program.run(feed | caches[1])
        assert set(got) == set(want)
        for name, w in want.items():
            assert got[name].shape == w.shape
            np.testing.assert_allclose(got[name], w, rtol=2e-3, atol=2e-4)
        for cache, made in zip(caches, (want, got), strict=True):
            for name in cache:
                cache[name] = np.array(made[name.replace("past", "present")])
        ids, done = np.argmax(want["logits"][:, -1:], axis=-1), end


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_grows(batch: int) -> None:
    check_decoding(decoder("GroupQueryAttention"), batch, 0, prompt=5, steps=5)


@pytest.mark.parametrize("cache", ["room", 12])
def test_a_cache_with_room(cache: Any) -> None:
    check_decoding(decoder("GroupQueryAttention", cache), 2, 12, prompt=4, steps=6)


def test_heads_without_groups() -> None:
    check_decoding(decoder("MultiHeadAttention"), 2, 0, prompt=4, steps=4)


def test_a_cache_that_a_stream_keeps() -> None:
    """With room for all tokens, past and present are one state."""
    model = decoder("GroupQueryAttention", 12)
    names = [f"{i}.{t}" for i in range(LAYERS) for t in ("key", "value")]
    shapes: dict[str, Any] = {"ids": (1, "s"), "seen": (1, "t")}
    shapes |= {f"past.{n}": (1, FEW, 12, DIM) for n in names}
    states = {f"past.{n}": f"present.{n}" for n in names}
    stream = rlx.compile(rlx.from_onnx(model, shapes=shapes, states=states)).stream()
    session = open_session(model)
    cache = {name: np.zeros((1, FEW, 12, DIM), np.float32) for name in states}
    ids, done = np.array([[3, 41, 5]]), 0
    for _ in range(4):
        feed = {"ids": ids, "seen": np.ones((1, done + ids.shape[1]), np.int64)}
        want, *caches = session.run(None, feed | cache)
        np.testing.assert_allclose(stream.step(feed)["logits"], want, rtol=2e-3, atol=2e-4)
        cache = dict(zip(states, caches, strict=True))
        ids, done = np.argmax(want[:, -1:], axis=-1), done + ids.shape[1]
