"""Flops of a workload whose maker does not know them, such as a trained model."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.api.lowering import lower
from rlx.cost.operations import kernel_operations
from rlx.ir.bind import check_array
from rlx.ir.dim import evaluate, symbols
from rlx.ir.graph import Node
from rlx_bench.workloads.base import Arrays, Workload


def sizes_in(inputs: Sequence[Node], feed: Arrays) -> dict[str, int]:
    """The sizes that symbols have in a feed.

    >>> import numpy as np
    >>> from rlx.ir.graph import Graph
    >>> sizes_in([Graph().input("x", ("n", 3), "f32")], {"x": np.zeros((5, 3), np.float32)})
    {'n': 5}
    """
    sizes: dict[str, int] = {}
    for node in inputs:
        name = node.attrs["name"]
        check_array(node.tensor, feed[name], sizes, f"input {name!r}")
    return sizes


def counted_flops(w: Workload) -> float:
    """Flops of matmuls, convolutions and recurrent layers, as the model states them: no Winograd, no fusion.

    >>> from rlx_bench.workloads import make
    >>> w = make("gemm:128,384,1536")
    >>> counted_flops(w) == w.flops
    True
    """
    graph = lower(w.as_graph())
    total = 0
    for feed in w.feeds:
        sizes = sizes_in(graph.inputs, feed)
        for node in graph.nodes:
            heavy, _ = kernel_operations(node)
            total += evaluate(heavy, {s: sizes.get(s, 1) for s in symbols(heavy)})
    return float(total)
