"""Common ops of ONNX Runtime's own domain (com.microsoft)."""

from __future__ import annotations

from collections.abc import Callable

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.attention import join_heads, split_heads
from rlx.frontend.onnx.ops.conv import conv_options
from rlx.frontend.onnx.ops.matmul import general_product
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

MS = "com.microsoft"


@onnx_op("Gelu", domain=MS)
def gelu(x: Node) -> Node:
    return ops.gelu(x)


@onnx_op("BiasGelu", domain=MS)
def bias_gelu(x: Node, bias: Node) -> Node:
    return ops.gelu(x + bias)


@onnx_op("FastGelu", domain=MS)
def fast_gelu(x: Node, bias: Node | None = None) -> Node:
    return ops.gelu(x if bias is None else x + bias, approximate="tanh")


@onnx_op("QuickGelu", domain=MS)
def quick_gelu(x: Node, *, alpha: float = 1.702) -> Node:
    return ops.swish(x, alpha=alpha)


# -- normalisations


@onnx_op("SimplifiedLayerNormalization", ignored=("stash_type",))
@onnx_op("SimplifiedLayerNormalization", domain=MS, ignored=("stash_type",))
def simplified_layer_norm(n: Call) -> Outputs:
    x, scale = n[0], n[1]
    axis, eps = normal_axis(n.proto.op_type, int(n.attr("axis", -1)), x.rank), n.attr("epsilon", 1e-5)
    wide = ops.cast(x, "f32") if scale.dtype is not x.dtype else x
    y = ops.cast(ops.rms_norm(wide, ops.cast(scale, wide.dtype), axis, eps), scale.dtype)
    return y, (moments(x, axis, eps, centred=False)[1] if n.wants(1) else None)


def moments(x: Node, axis: int, eps: float, centred: bool) -> tuple[Node, Node]:
    """Mean (0 if not centred) and inverse deviation of what a norm sees, in f32 for halves."""
    y = ops.cast(x, "f32") if x.dtype.bits < 32 else x
    axes = tuple(range(axis, x.rank))
    mean = ops.mean(y, axes, keepdims=True) if centred else ops.zeros((*x.shape[:axis], *(1,) * len(axes)))
    y = y - mean if centred else y
    return mean, ops.rsqrt(ops.mean(y * y, axes, keepdims=True) + eps)


def skip_norm(n: Call, scale: Node, shift: Node | None, bias: Node | None, centred: bool) -> Outputs:
    """The norm of input + skip (+ bias), its moments, and that sum."""
    total = n[0] + n[1] if bias is None else n[0] + n[1] + bias
    eps = n.attr("epsilon", 1e-12)
    y = ops.layer_norm(total, scale, shift, -1, eps) if centred else ops.rms_norm(total, scale, -1, eps)
    seen = moments(total, total.rank - 1, eps, centred) if n.wants(1) or n.wants(2) else (None, None)
    return y, *seen, total


@onnx_op("LayerNormalization", domain=MS, ignored=("stash_type",))
def layer_norm(
    x: Node, scale: Node, bias: Node | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Node:
    return ops.layer_norm(x, scale, bias, axis, epsilon)


@onnx_op("SkipLayerNormalization", domain=MS)
def skip_layer_norm(n: Call) -> Outputs:
    return skip_norm(n, n[2], n.get(3), n.get(4), centred=True)


@onnx_op("SkipSimplifiedLayerNormalization", domain=MS)
def skip_simplified_layer_norm(n: Call) -> Outputs:
    return skip_norm(n, n[2], None, n.get(3), centred=False)


@onnx_op("EmbedLayerNormalization", domain=MS, ignored=("mask_index_type",))
def embed_layer_norm(n: Call) -> Outputs:
    ids, segments = n[0], n.get(1)
    positions = ops.gather(n[3], n[8] if n.get(8) is not None else ops.iota((ids.shape[1],)))
    total = ops.gather(n[2], ids) + positions
    if segments is not None and n.get(4) is not None:
        total = total + ops.gather(n[4], segments)
    normal = ops.layer_norm(total, n[5], n[6], -1, n.attr("epsilon", 1e-12))
    mask = ops.zeros((ids.shape[0],), "i32") if n.get(7) is None else ops.sum(n[7], axis=1, dtype="i32")
    return normal, mask, total


# -- matmuls


def flipped(x: Node, batch: bool, matrix: bool) -> Node:
    """The transposes that FusedMatMul reads its operands through."""
    order = list(range(x.rank))
    if batch:
        order = [*order[1:-1], order[0], order[-1]]
    if matrix:
        order[-1], order[-2] = order[-2], order[-1]
    return ops.transpose(x, order) if batch or matrix else x


@onnx_op("FusedMatMul", "TransposeMatMul", domain=MS)
def fused_matmul(n: Call) -> Outputs:
    a = flipped(n[0], n.flag("transBatchA"), n.flag("transA"))
    b = flipped(n[1], n.flag("transBatchB"), n.flag("transB"))
    alpha = n.attr("alpha", 1.0)
    y = ops.matmul(a, b)
    return y if alpha == 1.0 else y * alpha


@onnx_op("FusedConv", domain=MS)
def fused_conv(n: Call) -> Outputs:
    y = ops.conv(n[0], n[1], n.get(2), **conv_options(n, n[1]))
    if n.get(3) is not None:
        y = y + n[3]
    return activated(n, y)


@onnx_op("FusedGemm", domain=MS)
def fused_gemm(n: Call) -> Outputs:
    return activated(n, general_product(n, n[0], n[1], n.get(2)))


def activated(n: Call, y: Node) -> Node:
    """The activation that a fused op ends with."""
    numbers = n.attr("activation_params", [])
    name = n.attr("activation", "")
    known: dict[str, Callable[..., Node]] = {
        "": lambda v: v,
        "Relu": ops.relu,
        "Sigmoid": ops.sigmoid,
        "Tanh": ops.tanh,
        "LeakyRelu": lambda v: ops.leaky_relu(v, alpha=numbers[0] if numbers else 0.01),
        "Clip": lambda v: ops.clip(v, numbers[0], numbers[1]),
        "HardSigmoid": lambda v: ops.hard_sigmoid(v, alpha=numbers[0], beta=numbers[1]),
    }
    if name not in known:
        raise ModelImportError(f"its activation {name!r} is not supported")
    return known[name](y)


# -- rotary positions


@onnx_op("RotaryEmbedding", domain=MS, ignored=("is_packed_batching", "scale"))
def rotary_embedding(n: Call) -> Outputs:
    x, ids, cos, sin = n[0], n[1], n[2], n[3]
    heads, size = int(n.attr("num_heads", 0)), int(n.attr("rotary_embedding_dim", 0))
    flat = x.rank == 3
    if flat:
        x = split_heads(x, heads or int(x.shape[-1] // (size or 2 * cos.shape[-1])))
    if size and cos.shape[-1] != size // 2:
        raise ModelImportError(
            f"rotary_embedding_dim {size} needs {size // 2} angles, but cos is {cos.tensor}"
        )
    if ids.rank == 1:
        ids = ops.reshape(ids + ops.iota((x.shape[2],)), (1, -1))
    cos, sin = (ops.expand_dims(ops.gather(t, ids), 1) for t in (cos, sin))
    y = ops.rope(x, cos, sin, interleaved=n.flag("interleaved"))
    return join_heads(y) if flat else y
