"""Layout: weights of few bits stay so, packed in the order that matmuls read; constants once, at load."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dtype import F16, F32
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.kernel.panels import QuantLayout
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast
from rlx.ops.storage.columns import gather_stored
from rlx.ops.storage.packing import read_as, store_as
from rlx.rewrite.weight_layout import is_row_gather, turned


def pack_quantised_weights(graph: Graph, lanes: int) -> Graph:
    """Products x @ dequantize_groups(...) of f32 with constant codes read the codes. Factors that are
    dequantised themselves stay codes, too.

    Those of rounded rows (`coded_matmul`) have no other kernel: codes that are not constant are packed in
    every run.
    """
    contraction, dequantize, coded = map(get_op, ("dot_general", "dequantize_groups", "coded_matmul"))
    if not any(node.op in (dequantize, coded) for node in graph.nodes):
        return graph
    fixed, gathering = weight_ids(graph), get_op("gather")
    packed: dict[int, Node] = {}
    rounded: dict[tuple[int, ...], list[Node]] = {}
    kept = {_key(node, node.operands[1:]) for node in graph.nodes if node.op is coded and is_stored(node)}

    def weights_of(node: Node) -> Node | None:
        """The quantised matrix that is the right operand [k, n] of a plain matmul of f32."""
        if node.op is not contraction or node.attrs["lhs_batch"]:
            return None
        a, b = node.operands
        plain = (
            node.attrs["rhs_contract"] == (0,) and node.attrs["lhs_contract"] == (a.rank - 1,) and a.rank > 1
        )
        if (
            not plain
            or b.op is not dequantize
            or not b.tensor.is_static
            or b.id not in fixed
            or a.id in fixed
        ):
            return None
        return b if can_be_stored(b) and node.dtype is F32 and a.dtype is F32 else None

    def table_of(node: Node) -> Node | None:
        """The quantised matrix whose columns are the rows that a gather gives."""
        if not is_row_gather(node, gathering) or node.id in fixed:
            return None
        table = node.operands[0]
        id, axis = turned(table, 0)
        b = graph.nodes[id]
        fits = b.op is dequantize and axis == 1 and b.id in fixed and b.tensor.is_static
        return b if fits and can_be_stored(b) else None

    def rounded_parts(how: Node, parts: Sequence[Node]) -> list[Node]:
        """The parts of a matrix as products of rounded rows read them."""
        key = _key(how, parts)
        if key not in rounded:
            rounded[key] = _parts(parts, how, lanes, quads=True)
        return rounded[key]

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        made: Node
        if node.op is coded:
            if not is_stored(node):
                return None
            x, *parts = operands
            made = coded(x, *rounded_parts(node, parts), **node.attrs)
            return made
        b, table = weights_of(node), table_of(node)
        if b is not None:
            if b.id not in packed:
                packed[b.id] = _stored(operands[1], lanes)
            made = dot_general(operands[0], packed[b.id], (node.attrs["lhs_contract"], (0,)))
            return made
        if table is None:
            return None
        own = operands[0].operands[0]
        if _key(table, table.operands) in kept:
            stored: Sequence[Node] = rounded_parts(table, own.operands)
        else:
            if table.id not in packed:
                packed[table.id] = _stored(own, lanes)
            stored = packed[table.id].operands
        layouts = tuple(part.attrs["layout"] for part in _flat(stored))
        own_group, block = table.attrs["group"], _block(stored)
        made = gather_stored(
            stored[0].operands[0], operands[1], layouts=layouts, group=own_group, block=block
        )
        return made

    return rewrite(graph, visit)


def is_stored(product: Node) -> bool:
    """Whether a product of rounded rows has a kernel that reads its codes where they are stored."""
    x, codes = product.operands[:2]
    return x.rank > 1 and codes.rank == 2 and codes.tensor.is_static and can_be_stored(product)


def _key(how: Node, parts: Sequence[Node]) -> tuple[int, ...]:
    """What tells a matrix of codes, scales and zeros from others."""
    return (how.attrs["bits"], how.attrs["group"], how.attrs["minimums"], *(part.id for part in parts))


def can_be_stored(matrix: Node) -> bool:
    """Whether kernels read such codes."""
    return matrix.attrs["bits"] in (4, 6, 8) and matrix.attrs["group"] % 8 == 0


def _stored(matrix: Node, lanes: int) -> Node:
    """The same matrix, of codes, scales and zeros that share the storage that kernels read."""
    made: Node = matrix.op(*_parts(matrix.operands, matrix, lanes), **matrix.attrs)
    return made


def _parts(parts: Sequence[Node], how: Node, lanes: int, quads: bool = False) -> list[Node]:
    """The same codes, scales and zeros, read from the storage that they share; `how` has their attributes."""
    codes, *factors = parts
    k, n = map(int, codes.shape)
    block = _block(parts)
    numbers = [f.operands[1] if block else f for f in factors]
    kinds = [F16 if f.dtype is F16 else F32 for f in numbers]
    names, shifted, minimums = [kind.name for kind in kinds], len(kinds) == 2, how.attrs["minimums"]
    layout = QuantLayout(
        k,
        n,
        how.attrs["bits"],
        how.attrs["group"],
        lanes,
        names[0],
        shifted and not minimums,
        names[-1],
        quads,
        minimums,
        block,
    )
    numbers = [f if f.dtype is kind else cast(f, dtype=kind) for f, kind in zip(numbers, kinds, strict=True)]
    pairs = [(f.operands[0], x) if block else (x,) for f, x in zip(factors, numbers, strict=True)]
    stored = store_as(codes, layout=layout.layouts[0])
    for part, own in zip([x for pair in pairs for x in pair], layout.layouts[1:], strict=True):
        stored = store_as(part, stored, layout=own)
    read, *rest = [read_as(stored, layout=own) for own in layout.layouts]
    if not block:
        return [read, *rest]
    return [
        read,
        *(f.op(*rest[2 * i : 2 * i + 2], **f.attrs) for i, f in enumerate(factors)),
    ]


def _flat(parts: Sequence[Node]) -> list[Node]:
    """Codes and factors, of factors that are codes these and their own."""
    return [x for part in parts for x in (part.operands if part.op.decodes else (part,))]


def _block(parts: Sequence[Node]) -> int:
    """How many groups share a factor of their factors: these are codes of 8 bits times numbers. 0 where they
    are numbers themselves."""
    factors = parts[1:]
    if not all(f.op.decodes and len(f.operands) == 2 and f.attrs["bits"] == 8 for f in factors):
        return 0
    groups = {int(f.attrs["group"]) for f in factors}
    return groups.pop() if len(groups) == 1 and all(f.operands[0].rank == 2 for f in factors) else 0
