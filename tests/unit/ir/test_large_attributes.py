"""Attributes that are larger than anybody means: the graph and its code stay small, or the op refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.errors import ParseError, RlxError
from rlx.ir.text.read import parse_graph
from rlx.target.cpu import resolve

FAR = 1 << 16
MOST_NODES, MOST_CODE = 200, 300_000
Calls = dict[str, Callable[[Any, Any], Any]]

CALLS: Calls = {
    "lrn": lambda x, w: rlx.ops.lrn(x, size=1 << 40),
    "reflect": lambda x, w: rlx.ops.pad(x, ((0, 0), (FAR, 3), (0, 0), (0, 0)), mode="reflect"),
    "wrap": lambda x, w: rlx.ops.pad(x, ((0, 0), (2, FAR), (0, 0), (0, 0)), mode="wrap"),
    "stride": lambda x, w: rlx.ops.conv(x, w, strides=(1, FAR), padding=((0, 0), (64, 0)), groups=2),
    "stride of lines": lambda x, w: rlx.ops.conv(x, w, strides=(FAR, 1), padding=1, groups=2),
    "dilation": lambda x, w: rlx.ops.conv(x, w, dilations=(FAR, 1), padding=((FAR, FAR), (0, 0)), groups=2),
    "transposed": lambda x, w: rlx.ops.conv_transpose(x, w, strides=2, dilations=(FAR - 1, 1), groups=1),
}


@pytest.mark.parametrize("target", ["host", "x86-64-v3"])
@pytest.mark.parametrize("name", CALLS)
def test_code_does_not_grow_with_attributes(name: str, target: str) -> None:
    g = rlx.Graph(name)
    x = g.input("x", (2, 4, 6, 5), "f32")
    w = g.constant(np.ones((4, 2, 3, 2), np.float32))
    g.output("y", CALLS[name](x, w))
    lir = plan(g, target=target)
    assert lir.unfused is not None and len(lir.unfused.nodes) < MOST_NODES
    made = build_kernels(lir, resolve(target))
    assert sum(map(len, made.texts)) < MOST_CODE
    weights = sum(n.tensor.numel for n in lir.mir.params.values())
    assert weights < MOST_CODE, "weights are not spread out"


def test_a_transform_of_very_many_points() -> None:
    """Its factors were looked for one by one, and would have been part of its code."""
    g = rlx.Graph("long")
    g.output("y", rlx.ops.fft(g.input("x", (4,), "c64"), n=(1 << 31) - 1))
    lir = plan(g)
    thunks = build_kernels(lir, resolve("host")).thunks.values()
    assert any("has too many factors" in thunk.why for thunk in thunks), thunks


@pytest.mark.parametrize(
    "layout",
    [
        "3,10 -> 36: 0:3=3@-4 0:10=3@12,4@1",
        "3,10 -> 36: 0:3=3@0 0:10=3@12,4@1",
        "-3,10 -> 36: 0:3=3@4 0:10=3@12,4@1",
        "3,10 -> 36: 0:3=3@4 0:10=3@12,4@1 +1",
        "3,10 -> 36: 0:3=3@4 0:10=3@9999999999,4@1",
    ],
)
def test_layouts_stay_inside_their_storage(layout: str) -> None:
    """A layout of -4 columns ended the process."""
    text = f"""graph "g" {{
      %0 = input() {{name="x", type=f32[36]}}
      %1 = read_as(%0) {{layout="{layout}"}}
      output "y" = %1
    }}"""
    with pytest.raises(ParseError, match=r"layout|side of a box"):
        parse_graph(text)
    right = "3,10 -> 36: 0:3=3@4 0:10=3@12,4@1"
    assert right in str(parse_graph(text.replace(layout, right)))


def test_results_are_right() -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 2)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((3, 2, 3, 2)).astype(np.float32)
    for f in (
        lambda x, w: rlx.ops.conv_transpose(x, w, strides=(2, 3), dilations=(7, 2)),
        lambda x, w: rlx.ops.pad(x, ((0, 0), (0, 0), (80, 3), (1, 90)), mode="reflect"),
        lambda x, w: rlx.ops.lrn(x, size=99, alpha=0.3),
    ):
        np.testing.assert_allclose(rlx.jit(f)(x, w), f(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["-1", "-9223372036854775808", "18446744073709551616"])
def test_no_value_has_such_a_size(size: str) -> None:
    """A size of -1 went through to native code, which ended the process."""
    text = f"""graph "g" {{
      %0 = input() {{name="x", type=f32[]}}
      %1 = broadcast_to(%0) {{shape=({size},)}}
      output "y" = %1
    }}"""
    with pytest.raises(ParseError, match=r"has a size below 0|more elements than RLX can count"):
        parse_graph(text)
    with pytest.raises(RlxError, match=r"sizes of at least 0|more elements than RLX can count"):
        rlx.Graph("g").input("x", (2, int(size)), "f32")


def test_filters_are_not_made_without_end() -> None:
    with pytest.raises(RlxError, match="filters from"):
        rlx.compile(_log_mel(1 << 31))


def _log_mel(count: int) -> rlx.Graph:
    g = rlx.Graph("mel")
    g.output("y", rlx.ops.log_mel(g.input("x", (160,), "f32"), n_fft=8, hop=3, n_mels=count))
    return g


def test_no_memory_to_compile_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 16.0 GiB")

    g = rlx.Graph("large")
    g.output("y", rlx.ops.tanh(g.input("x", (2,), "f32")))
    monkeypatch.setattr("rlx.api.planning.lower", refuse)
    with pytest.raises(RlxError, match="not enough memory for this model: Unable to"):
        rlx.compile(g)
