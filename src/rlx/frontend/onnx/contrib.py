"""Common ops of ONNX Runtime's own domain (com.microsoft)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.errors import ImportError_
from rlx.frontend.onnx.attention import join_heads, split_heads
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.ir.graph import Node

MS = "com.microsoft"


@onnx_op("Gelu", domain=MS)
def gelu(n: Call) -> Any:
    return ops.gelu(n[0])


@onnx_op("BiasGelu", domain=MS)
def bias_gelu(n: Call) -> Any:
    return ops.gelu(n[0] + n[1])


@onnx_op("FastGelu", domain=MS)
def fast_gelu(n: Call) -> Any:
    return ops.gelu(n[0] if n.get(1) is None else n[0] + n[1], approximate="tanh")


@onnx_op("QuickGelu", domain=MS)
def quick_gelu(n: Call) -> Any:
    return ops.swish(n[0], alpha=n.attr("alpha", 1.702))


# -- normalisations


@onnx_op("SimplifiedLayerNormalization", ignored=("stash_type",))
@onnx_op("SimplifiedLayerNormalization", domain=MS, ignored=("stash_type",))
def simplified_layer_norm(n: Call) -> Any:
    return ops.rms_norm(n[0], n[1], int(n.attr("axis", -1)), n.attr("epsilon", 1e-5))


@onnx_op("LayerNormalization", domain=MS, ignored=("stash_type",))
def layer_norm(n: Call) -> Any:
    return ops.layer_norm(n[0], n[1], n.get(2), int(n.attr("axis", -1)), n.attr("epsilon", 1e-5))


@onnx_op("SkipLayerNormalization", domain=MS)
def skip_layer_norm(n: Call) -> Any:
    total = n[0] + n[1] if n.get(4) is None else n[0] + n[1] + n[4]
    return ops.layer_norm(total, n[2], n.get(3), -1, n.attr("epsilon", 1e-12)), None, None, total


@onnx_op("SkipSimplifiedLayerNormalization", domain=MS)
def skip_simplified_layer_norm(n: Call) -> Any:
    total = n[0] + n[1] if n.get(3) is None else n[0] + n[1] + n[3]
    return ops.rms_norm(total, n[2], -1, n.attr("epsilon", 1e-12)), None, None, total


@onnx_op("EmbedLayerNormalization", domain=MS, ignored=("mask_index_type",))
def embed_layer_norm(n: Call) -> Any:
    ids, segments = n[0], n.get(1)
    positions = ops.gather(n[3], n[8] if n.get(8) is not None else ops.iota((ids.shape[1],)))
    total = ops.gather(n[2], ids) + positions
    if segments is not None and n.get(4) is not None:
        total = total + ops.gather(n[4], segments)
    normal = ops.layer_norm(total, n[5], n[6], -1, n.attr("epsilon", 1e-12))
    mask = ops.zeros((ids.shape[0],), "i32") if n.get(7) is None else ops.sum(ops.cast(n[7], "i32"), axis=1)
    return normal, mask, total


# -- products


def flipped(x: Node, batch: bool, matrix: bool) -> Any:
    """The transposes that FusedMatMul reads its operands through."""
    order = list(range(x.rank))
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if matrix:
        order[-1], order[-2] = order[-2], order[-1]
    return ops.transpose(x, order) if batch or matrix else x


@onnx_op("FusedMatMul", "TransposeMatMul", domain=MS)
def fused_matmul(n: Call) -> Any:
    a = flipped(n[0], n.flag("transBatchA"), n.flag("transA"))
    b = flipped(n[1], n.flag("transBatchB"), n.flag("transB"))
    alpha = n.attr("alpha", 1.0)
    y = ops.matmul(a, b)
    return y if alpha == 1.0 else y * alpha


@onnx_op("MatMulNBits", domain=MS, ignored=("accuracy_level",))
def matmul_nbits(n: Call) -> Any:
    """Weights in 2, 4 or 8 bits, in blocks along k, each block with a scale and perhaps a zero point."""
    x, scales = n[0], n[2]
    k, columns = int(n.attr("K")), int(n.attr("N"))
    bits, block = int(n.attr("bits", 4)), int(n.attr("block_size"))
    if n.get(4) is not None:
        raise ImportError_("g_idx is not supported")
    blocks = -(-k // block)
    raw = n.known(1)
    if raw is None:
        raise ImportError_("its weights must be constant")
    weight = unpacked(raw.reshape(columns, blocks, -1), bits)[..., :block].reshape(columns, blocks * block)
    zero = None
    if n.get(3) is not None:
        points = n.known(3)
        if points is None:
            raise ImportError_("its zero points must be constant")
        if points.dtype == np.uint8:
            zero = unpacked(points.reshape(columns, -1), bits)[:, :blocks]
        else:
            zero = points.reshape(columns, blocks)
    middle = 1 << (bits - 1)
    codes = (weight[:, :k].T.astype(np.int16) - middle).astype(np.int8)
    centred = n.importer.constant(codes, f"{n.label}.codes")
    scale = ops.transpose(ops.reshape(scales, (columns, blocks)))
    shift = None if zero is None else zero.T.astype(np.float32) - middle
    shifts = None if shift is None else n.importer.constant(shift, f"{n.label}.zeros")
    matrix = ops.dequantize_groups(centred, scale, shifts, bits=bits, group=block)
    y = ops.matmul(x, ops.cast(matrix, x.dtype))
    return y if n.get(5) is None else y + n[5]


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits from bytes, low bits first."""
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((data[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*data.shape[:-1], -1)


@onnx_op("FusedConv", domain=MS)
def fused_conv(n: Call) -> Any:
    from rlx.frontend.onnx.conv import conv_options

    y = ops.conv(n[0], n[1], n.get(2), **conv_options(n, n[1]))
    if n.get(3) is not None:
        y = y + n[3]
    return activated(n, y)


@onnx_op("FusedGemm", domain=MS)
def fused_gemm(n: Call) -> Any:
    from rlx.frontend.onnx.matmul import general_product

    return activated(n, general_product(n, n[0], n[1], n.get(2)))


def activated(n: Call, y: Any) -> Any:
    """The activation that a fused op ends with."""
    numbers = n.attr("activation_params", [])
    name = n.attr("activation", "")
    known: dict[str, Any] = {
        "": lambda v: v,
        "Relu": ops.relu,
        "Sigmoid": ops.sigmoid,
        "Tanh": ops.tanh,
        "LeakyRelu": lambda v: ops.leaky_relu(v, alpha=numbers[0] if numbers else 0.01),
        "Clip": lambda v: ops.clip(v, numbers[0], numbers[1]),
        "HardSigmoid": lambda v: ops.hard_sigmoid(v, alpha=numbers[0], beta=numbers[1]),
    }
    if name not in known:
        raise ImportError_(f"its activation {name!r} is not supported")
    return known[name](y)


# -- rotary positions


@onnx_op("RotaryEmbedding", domain=MS, ignored=("is_packed_batching", "scale"))
def rotary_embedding(n: Call) -> Any:
    x, ids, cos, sin = n[0], n[1], n[2], n[3]
    heads, size = int(n.attr("num_heads", 0)), int(n.attr("rotary_embedding_dim", 0))
    flat = x.rank == 3
    if flat:
        half = cos.shape[-1]
        x = split_heads(x, heads or int(x.shape[-1] // (size or 2 * half)))
    if ids.rank == 1:
        ids = ops.reshape(ids + ops.iota((x.shape[2],)), (1, -1))
    cos, sin = (ops.expand_dims(ops.gather(t, ids), 1) for t in (cos, sin))
    y = ops.rope(x, cos, sin, interleaved=n.flag("interleaved"))
    return join_heads(y) if flat else y
