"""Conversions by signature: what the parameters of a function say about an ONNX node is checked."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import entries, find
from rlx.frontend.onnx.signature import by_signature, is_plain
from rlx.ir.graph import Node


def model(op: str, inputs: int = 1, **attributes: object) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(inputs)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in names]
    node = helper.make_node(op, names, ["y"], **attributes)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph([node], "one", infos, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_defaults_of_the_signature_are_those_of_the_op() -> None:
    x = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)
    found = rlx.compile(rlx.from_onnx(model("LeakyRelu")))(x)
    np.testing.assert_allclose(found, np.where(x < 0, x * np.float32(0.01), x))
    found = rlx.compile(rlx.from_onnx(model("LeakyRelu", alpha=0.5)))(x)
    np.testing.assert_allclose(found, np.where(x < 0, x * np.float32(0.5), x))


def test_an_attribute_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelImportError, match="its attribute 'alpha' must be a number, but is 'much'"):
        rlx.from_onnx(model("LeakyRelu", alpha="much"))


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(ModelImportError, match="its attribute 'slope' is not supported"):
        rlx.from_onnx(model("LeakyRelu", slope=0.5))


def test_a_word_that_is_not_in_the_signature_is_refused() -> None:
    with pytest.raises(
        ModelImportError, match="its attribute approximate is 'sigmoid'; RLX knows 'none', 'tanh'"
    ):
        rlx.from_onnx(model("Gelu", approximate="sigmoid"))


def test_a_missing_attribute_without_a_default_is_refused() -> None:
    with pytest.raises(ModelImportError, match="its attribute 'size' is missing"):
        rlx.from_onnx(model("LRN"))


def test_a_missing_input_is_refused() -> None:
    with pytest.raises(ModelImportError, match="its input 1 must be a tensor, but is nothing"):
        rlx.from_onnx(model("PRelu"))


def test_what_no_input_can_be_is_refused_when_declared() -> None:
    def wrong(x: dict[str, int]) -> Node:
        raise AssertionError(x)

    with pytest.raises(TypeError, match="wrong: no input of an ONNX op is read as x"):
        by_signature(wrong)


def test_functions_of_the_node_itself_stay_as_they_are() -> None:
    def plain(n: Call) -> Node:
        return n[0]

    def both(n: Call, x: Node, *, mode: Literal["a", "b"] = "a") -> Node:
        return x

    assert is_plain(plain)
    assert not is_plain(both)
    entry = find("", "LeakyRelu", 20)
    assert entry is not None
    assert entry.convert.__name__ == "leaky_relu"
    assert len({(e.domain, e.op, e.since) for e in entries()}) == len(entries())
