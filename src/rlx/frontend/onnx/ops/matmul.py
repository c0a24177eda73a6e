"""Products of matrices."""

from __future__ import annotations

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.math import old_broadcast
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node


@onnx_op("MatMul")
def matmul(a: Node, b: Node) -> Node:
    return ops.matmul(a, b)


def scaled(x: Node, factor: float) -> Node:
    """x times an attribute, which integers take as an integer."""
    if factor == 1.0:
        return x
    return x * (int(factor) if x.dtype.is_int and factor == int(factor) else factor)


def general_product(n: Call, a: Node, b: Node, c: Node | None) -> Node:
    """alpha * A' B' + beta * C."""
    if n.flag("transA"):
        a = ops.transpose(a)
    if n.flag("transB"):
        b = ops.transpose(b)
    y = scaled(ops.matmul(a, b), n.attr("alpha", 1.0))
    beta = n.attr("beta", 1.0)
    return y if c is None else y + scaled(c, beta)


@onnx_op("Gemm")
def gemm_with_attributes(n: Call) -> Outputs:
    c = n[2]
    if c.rank == 1 and n.attr("broadcast", 0):
        c = old_broadcast(n, n[0], c)
    return general_product(n, n[0], n[1], c)


@onnx_op("Gemm", since=7)
def gemm(n: Call) -> Outputs:
    return general_product(n, n[0], n[1], n.get(2))


@onnx_op("Einsum")
def einsum(*operands: Node, equation: str) -> Node:
    return ops.einsum(equation, *operands)
