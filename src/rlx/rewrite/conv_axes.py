"""Convolutions over an axis of one element with a window of one are convolutions without that axis."""

from __future__ import annotations

from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.ops.array.shape import reshape


def drop_unit_axes(graph: Graph) -> Graph:
    """Leave spatial axes out where nothing moves along them, so that pixels are adjacent again."""
    convolution = get_op("conv")
    if all(n.op is not convolution for n in graph.nodes):
        return graph

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op is not convolution:
            return None
        x, w = operands
        attrs = dict(node.attrs)
        spatial = range(x.rank - 2)
        idle = [
            i
            for i in spatial
            if x.shape[2 + i] == w.shape[2 + i] == 1
            and attrs["strides"][i] == 1
            and attrs["padding"][i] == (0, 0)
        ]
        kept = [i for i in spatial if i not in idle]
        if not idle or not kept:
            return None
        for name in ("strides", "padding", "dilations"):
            attrs[name] = tuple(attrs[name][i] for i in kept)
        thin = [reshape(t, (*t.shape[:2], *(t.shape[2 + i] for i in kept))) for t in (x, w)]
        made: Node = reshape(convolution(*thin, **attrs), node.shape)
        return made

    return rewrite(graph, visit)
