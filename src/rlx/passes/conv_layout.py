"""Layouts of convolutions: kernels are packed in the panels that native kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir.graph import Graph, Node, rewrite
from rlx.ir.op import get_op
from rlx.ops.conv_packing import KernelLayout


@dataclass(frozen=True)
class ConvTarget:
    """What a target's convolution kernels work in: floats of a vector, output channels of a panel."""

    lanes: int
    columns: int


def lay_out_convolutions(graph: Graph, target: ConvTarget) -> Graph:
    """Convolutions that have a packed kernel read their weights from panels."""
    convolution = get_op("conv")

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op is not convolution:
            return None
        layout = kernel_layout(node, target)
        if layout is None:
            return None
        x, w = operands
        packed = get_op("unpack_kernel")(get_op("pack_kernel")(w, **vars(layout)), **vars(layout))
        made: Node = convolution(x, packed, **node.attrs)
        return made

    return rewrite(graph, visit)


def kernel_layout(node: Node, target: ConvTarget) -> KernelLayout | None:
    """The panels of a planar convolution; None where another kernel does better or only a general one fits."""
    x, w = (o.tensor for o in node.operands)
    if any(t.dtype.name != "f32" for t in (x, w, node.tensor)) or not w.is_static or not 3 <= w.rank <= 5:
        return None
    shape = tuple(int(d) for d in w.shape)  # type: ignore[arg-type]
    groups = node.attrs["groups"]
    if 0 in shape or shape[0] // groups < (target.lanes // 4 if groups == 1 else target.lanes // 2):
        return None
    if all(d == 1 for d in (*shape[2:], *node.attrs["strides"])) and not any(
        any(p) for p in node.attrs["padding"]
    ):
        return None  # a planar 1x1 window is a product of matrices
    return KernelLayout(shape, groups, target.columns, target.lanes, 1)
