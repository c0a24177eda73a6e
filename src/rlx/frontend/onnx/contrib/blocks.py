"""Weights of few bits in blocks (com.microsoft): matmuls, rows of embeddings."""

from __future__ import annotations

import math

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.contrib.basic import MS
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import I8, LazyArray, ParamValue, by_parts
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

_COLUMNS = 64  # that are unpacked together


@onnx_op("MatMulNBits", domain=MS, ignored=("accuracy_level",))
def matmul_nbits(n: Call) -> Outputs:
    """Weights in 2, 4 or 8 bits, in blocks along k, each block with a scale and perhaps a zero point."""
    x, scales = n[0], n[2]
    k, columns = int(n.attr("K")), int(n.attr("N"))
    bits, block = int(n.attr("bits", 4)), int(n.attr("block_size"))
    if n.get(4) is not None:
        raise ModelImportError("g_idx is not supported; quantise without reordering (desc_act=False)")
    blocks = -(-k // block)
    raw = n.stored(1)
    if raw is None:
        raise ModelImportError("its weights must be constant")
    zero = None
    if n.get(3) is not None:
        points = n.known(3)
        if points is None:
            raise ModelImportError("its zero points must be constant")
        if points.dtype == np.uint8:
            zero = unpacked(points.reshape(columns, -1), bits)[:, :blocks]
        else:
            zero = points.reshape(columns, blocks)
    middle = 1 << (bits - 1)
    codes = _codes(raw, k, columns, bits, block)
    centred = ops.transpose(n.weight(codes if isinstance(raw, LazyArray) else np.asarray(codes), "codes"))
    scale = ops.transpose(ops.reshape(scales, (columns, blocks)))
    shift = None if zero is None else zero.T.astype(np.float32) - middle
    shifts = None if shift is None else n.weight(shift, "zeros")
    matrix = ops.dequantize_groups(centred, scale, shifts, bits=bits, group=block)
    y = ops.matmul(x, ops.cast(matrix, x.dtype))
    return y if n.get(5) is None else y + n[5]


def _codes(raw: ParamValue, k: int, columns: int, bits: int, block: int) -> LazyArray:
    """Codes [columns, k] around 0, from blocks along k of unsigned ones. They take more memory than the file,
    so they are made part by part."""
    middle, column, take = np.uint8(1 << (bits - 1)), math.prod(raw.shape) // columns, by_parts(raw)

    def part(start: int, stop: int) -> np.ndarray:
        low, high = start // max(k, 1), -(-stop // max(k, 1))
        out = np.empty((high - low, k), np.int8)
        for first in range(low, high, _COLUMNS):
            last = min(first + _COLUMNS, high)
            blocks = take(first * column, last * column).reshape(last - first, -(-k // block), -1)
            codes = unpacked(blocks, bits)[..., :block].reshape(last - first, -1)[:, :k]
            np.subtract(codes, middle, out=out[first - low : last - low].view(np.uint8))
        return out.reshape(-1)[start - low * k : stop - low * k]

    return LazyArray(I8, (columns, k), lambda: part(0, columns * k).reshape(columns, k), part=part)


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits from bytes, low bits first."""
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((data[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*data.shape[:-1], -1)


@onnx_op("GatherBlockQuantized", domain=MS)
def gather_block_quantized(n: Call) -> Outputs:
    """Rows of codes with a scale (and zero point) per block of an axis: only what is picked is decoded."""
    data, indices, scales = n[0], n[1], n[2]
    bits, block = int(n.attr("bits", 4)), int(n.attr("block_size", 128))
    along, split = (
        normal_axis(n.proto.op_type, int(n.attr(f"{name}_axis", default)), data.rank)
        for name, default in (("gather", 0), ("quantize", 1))
    )
    if along == split:
        raise ModelImportError(f"gather_axis and quantize_axis are both {along}; they must differ")
    bytes_ = data.dtype.name == "u8"
    if bytes_ and (bits not in (2, 4, 8) or split != data.rank - 1):
        raise ModelImportError(f"codes of {bits} bits in bytes along axis {split} are not supported")
    per = 8 // bits if bytes_ else 1

    def picked(x: Node, many: int) -> Node:
        rows = ops.gather(x, indices, along)
        return split_bytes(n, rows, bits) if many > 1 else rows

    codes = ops.cast(picked(data, per), "f32")
    axis = split if split < along else split + indices.rank - 1
    width, blocks = codes.shape[axis], scales.shape[split]

    def spread(x: Node) -> Node:
        return ops.slice_axis(ops.repeat(ops.slice_axis(x, axis, 0, blocks), block, axis), axis, 0, width)

    if n.get(3) is not None:
        codes = codes - spread(ops.cast(picked(n[3], per), "f32"))
    elif bytes_:
        codes = codes - float(1 << (bits - 1))
    return ops.cast(codes * spread(ops.cast(picked(scales, 1), "f32")), scales.dtype)


def split_bytes(n: Call, x: Node, bits: int) -> Node:
    """The numbers of a few bits in bytes, low bits first, along the last axis."""
    shifts = n.constant(np.arange(0, 8, bits, dtype=np.uint8))
    apart = ops.shift_right(ops.expand_dims(x, x.rank), shifts)
    apart = ops.bitwise_and(apart, n.constant((1 << bits) - 1, "u8"))
    return ops.reshape(apart, (*x.shape[:-1], x.shape[-1] * (8 // bits)))
