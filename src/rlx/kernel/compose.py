"""From a region (a body of MIR ops) to one kernel.

`compose(body)` gives the kernel or raises `ComposeError` with the reason why the ops do not fit one kernel.

Most regions are composed in `rlx.kernel.composer`, two contractions with a softmax between them in
`rlx.kernel.attention`, Fourier transforms in `rlx.kernel.spectrum`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import TensorType, tensor_types
from rlx.kernel.attention import AttentionComposer, holds_attention
from rlx.kernel.composer import Composer
from rlx.kernel.nests import Kernel
from rlx.kernel.spectrum import TransformComposer, holds_transform

_KERNELS: WeakKeyDictionary[Graph, tuple[tuple[int, ...], Kernel]] = WeakKeyDictionary()


def compose(body: Graph) -> Kernel:
    """The kernel that computes a region, or ComposeError with the reason.

    Fusion, planner and backend all ask, so the answer is kept as long as the body (and dropped if it grew).
    """
    state = (len(body.nodes), *(n.id for n in body.outputs.values()))
    known = _KERNELS.get(body)
    if known is not None and known[0] == state:
        return known[1]
    kernel = _composer_for(body)(body).run()
    _KERNELS[body] = (state, kernel)
    return kernel


def _composer_for(body: Graph) -> type[Composer]:
    if holds_transform(body):
        return TransformComposer
    return AttentionComposer if holds_attention(body) else Composer


def body_of(node: Node) -> Graph:
    """The body of a region, or a fresh body around a single op."""
    if node.bodies and node.op.role is Role.REGION:
        return node.bodies[0]
    g = Graph(node.op.name)
    inputs = [g.input(f"x{i}", o.shape, o.dtype) for i, o in enumerate(node.operands)]
    with g.building():
        made = g.add(node.op, inputs, node.attrs, node.bodies, where=node.where)
        g.set_outputs(g.results(made))
    return g


def result_types(node: Node) -> tuple[TensorType, ...]:
    """Types of the values that a kernel writes."""
    return tensor_types(node.type)
