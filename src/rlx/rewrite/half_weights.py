"""Weights that a program widens from 16 bits: what reads them directly can read the 16 bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx.ir.dtype import BF16, F16, F32
from rlx.ir.graph import Node
from rlx.ir.op import Role, get_op
from rlx.ops.math.elementwise import cast


class Halves:
    """Finds weights of 16 bits behind those of f32."""

    def __init__(self) -> None:
        self._widening = get_op("cast")
        self._made: dict[int, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """The value in 16 bits that a value of f32 is widened from, moved as that is; None if it is not."""
        if node.id not in self._made:
            self._made[node.id] = self._find(node)
        return self._made[node.id]

    def _find(self, node: Node) -> Node | None:
        if node.dtype is not F32 or node.op.role is not Role.COMPUTE:
            return None
        if node.op is self._widening:
            source = node.operands[0]
            return source if source.dtype in (F16, BF16) else None
        if not node.op.lossless:
            return None
        found = [self.of(o) for o in node.operands]
        parts = [o for o in found if o is not None]
        if len(parts) < len(found) or len({o.dtype for o in parts}) != 1:
            return None
        made: Node = node.op(*parts, **node.attrs)
        return made

    def gathered(self, node: Node, operands: Sequence[Node], fixed: Collection[int]) -> Node | None:
        """An op that chooses elements of a weight, by indices that are none: what it chose is widened."""
        if node.op.moves != (0,) or node.id in fixed or node.operands[0].id not in fixed:
            return None
        half = self.of(operands[0])
        if half is None:
            return None
        made: Node = cast(node.op(half, *operands[1:], **node.attrs), dtype=F32)
        return made
