"""Mixtures of experts (com.microsoft): MoE, and QMoE with weights of few bits.

All experts are computed, side by side as the columns of one matmul and the rows of the next; those that a
token did not choose get a factor of 0. A token costs as much as one in a dense layer of all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.contrib.basic import MS
from rlx.frontend.onnx.contrib.blocks import unpacked
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Dim
from rlx.ir.graph import Node

ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "relu": ops.relu,
    "gelu": lambda h: ops.gelu(h, approximate="tanh"),
    "silu": ops.silu,
    "identity": lambda h: h,
}
Layer = tuple[Node, "Node | None", int]
"""Weights [inputs, outputs] of all experts, their biases in a row or None, and the outputs of one expert."""


@onnx_op("MoE", domain=MS)
def mixture(n: Call) -> Outputs:
    def inner(i: int) -> Layer | None:
        w, bias = n.get(i), n.get(i + 1)
        if w is None:
            return None
        experts, out, width = w.shape
        columns = ops.transpose(ops.reshape(w, (experts * out, width)))
        return columns, None if bias is None else ops.reshape(bias, (-1,)), int(out)

    w = n[4]
    rows = ops.reshape(ops.transpose(w, (0, 2, 1)), (w.shape[0] * w.shape[2], w.shape[1]))
    return mixed(n, inner(2), rows, n.get(5), inner(6))


@onnx_op("QMoE", domain=MS, ignored=("accuracy_level",))
def quantised_mixture(n: Call) -> Outputs:
    """Each expert's rows of codes have a scale, or one for each block of `block_size`."""
    unusual = "only weights of integer codes with scales are supported"
    if any(n.value(i) is not None for i in range(14, 21)) or str(n.attr("quant_type", "int")) != "int":
        raise ModelImportError(unusual)
    if n.flag("weights_prepacked") or any(n.attr(f"fc{i}_expert_weight_bits", 0) for i in (1, 2, 3)):
        raise ModelImportError(unusual)
    bits, block = int(n.attr("expert_weight_bits", 4)), int(n.attr("block_size", 0))
    if bits not in (4, 8):
        raise ModelImportError(f"its weights have {bits} bits; RLX knows 4 and 8")

    def matrix(i: int, points: int, last: bool) -> tuple[Node, int]:
        """Weights of all experts as [inputs, outputs]: outputs side by side; in the last matmul, inputs."""
        packed = n.known(i)
        if packed is None:
            raise ModelImportError("its weights must be constant")
        experts, out = packed.shape[:2]
        codes = unpacked(packed, bits)
        width = codes.shape[2]
        group, middle = block or width, 1 << (bits - 1)
        groups = -(-width // group)
        if last and width % group:
            raise ModelImportError(
                f"block_size {block} does not divide the {width} inner features of an expert"
            )
        order = (0, 2, 1) if last else (2, 0, 1)
        shape = (-1, out) if last else (-1, experts * out)

        def laid(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x.transpose(order)).reshape(shape)

        levels = (codes.astype(np.int16) - middle).astype(np.int8)
        centred = n.weight(laid(levels), f"{i}")
        scales = ops.reshape(ops.transpose(ops.reshape(n[i + 1], (experts, out, groups)), order), shape)
        zeros = None
        if n.get(points) is not None:
            found = n.known(points)
            if found is None:
                raise ModelImportError("its zero points must be constant")
            level = unpacked(found.reshape(experts, out, -1), bits)[..., :groups].astype(np.float32) - middle
            zeros = n.weight(laid(level), f"{points}")
        return ops.dequantize_groups(centred, scales, zeros, bits=bits, group=group), int(out)

    def inner(i: int, points: int) -> Layer | None:
        if n.value(i) is None:
            return None
        weights, out = matrix(i, points, last=False)
        bias = n.get(i + 2)
        return weights, None if bias is None else ops.reshape(bias, (-1,)), out

    return mixed(n, inner(2, 11), matrix(5, 12, last=True)[0], n.get(7), inner(8, 13))


def mixed(n: Call, first: Layer | None, rows: Node, bias: Node | None, third: Layer | None) -> Node:
    """Two matmuls around an activation; each expert's part of the sum times its factor."""
    if n.flag("use_sparse_mixer"):
        raise ModelImportError("use_sparse_mixer is not supported; export with use_sparse_mixer=0")
    assert first is not None
    x, factors = n[0], chosen(n)
    experts = factors.shape[1]
    flat = ops.reshape(x, (-1, x.shape[-1]))
    h = side_by_side(flat, first, experts)
    inner = activated(n, h, None if third is None else side_by_side(flat, third, experts))
    weighed = ops.reshape(inner * ops.expand_dims(factors, 2), (flat.shape[0], -1))
    y = ops.matmul(weighed, ops.cast(rows, x.dtype))
    if bias is not None:
        y = y + ops.matmul(factors, bias)
    return ops.reshape(y, x.shape)


def side_by_side(flat: Node, layer: Layer, experts: Dim) -> Node:
    """[tokens, experts, outputs]: a matmul with the weights of all experts."""
    weights, bias, out = layer
    h = ops.matmul(flat, ops.cast(weights, flat.dtype))
    return ops.reshape(h if bias is None else h + bias, (flat.shape[0], experts, out))


def chosen(n: Call) -> Node:
    """[tokens, experts]: what each expert counts, 0 for all but the k best."""
    router = n[1]
    count = int(n.attr("k", 1))
    best = ops.top_k(router, count, axis=1)[1]
    experts = ops.iota((router.shape[1],))
    picked = ops.any(ops.equal(ops.expand_dims(best, 2), experts), axis=1)
    chance = ops.where(picked, ops.softmax(router, 1), n.constant(0, router.dtype))
    return chance / ops.sum(chance, 1, True) if n.flag("normalize_routing_weights") else chance


def activated(n: Call, h: Node, other: Node | None) -> Node:
    """The activation of what the first layer (and a third next to it) give."""
    kind = n.choice("activation_type", "relu", (*ACTIVATIONS, "swiglu"))
    fusion = int(n.attr("swiglu_fusion", 0))
    alpha, beta = float(n.attr("activation_alpha", 1.0)), float(n.attr("activation_beta", 0.0))
    limit = float(n.attr("swiglu_limit", math.inf))
    if kind != "swiglu":
        y = ACTIVATIONS[kind](h)
        return y if other is None else y * other
    half = h.shape[2] // 2
    if fusion == 1:  # gate, value, gate, value ...
        h, other = (ops.slice_axis(h, 2, i, half, 2) for i in range(2))
    elif fusion == 2:
        h, other = (ops.slice_axis(h, 2, i * half, half) for i in range(2))
    elif other is None:
        raise ModelImportError("swiglu needs a third layer or swiglu_fusion")
    if math.isfinite(limit):
        h, other = ops.minimum(h, limit), ops.clip(other, -limit, limit)
    return ops.swish(h, alpha=alpha) * (other + beta)
