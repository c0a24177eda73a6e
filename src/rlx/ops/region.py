"""A fused region: several MIR ops as one kernel. Its body stays readable and runnable by the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import TypeMismatchError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, string
from rlx.ir.graph import Graph
from rlx.ir.op import BodyRunner, Op, Role, Sample, declare
from rlx.ir.operand import Arrays
from rlx.ir.types import TensorType, TupleType, Type


@declare
class region(Op):
    """A kernel of several ops; `kind` names its root (map, reduce, contract, conv, attention, ...)."""

    name = "region"
    role = Role.REGION
    bodies = 1
    attrs = {"kind": Attr(string)}

    def infer(self, *types: TensorType, kind: str, bodies: Sequence[Graph]) -> Type:
        (body,) = bodies
        if len(types) != len(body.inputs):
            raise TypeMismatchError(
                f"region {body.name!r} takes {len(body.inputs)} operands, got {len(types)}"
            )
        for t, node in zip(types, body.inputs, strict=True):
            if t.dtype is not node.dtype:
                raise TypeMismatchError(f"region {body.name!r}: operand {t} where its body reads {node.type}")
            require_shape(
                t.shape, node.shape, f"region {body.name!r}: operand {t} where its body reads {node.type}"
            )
        items = tuple(n.tensor for n in body.outputs.values())
        return items[0] if len(items) == 1 else TupleType(items)

    def ref(self, *arrays: np.ndarray, kind: str, run: BodyRunner) -> Arrays:
        out = run(0, arrays)
        return out[0] if len(out) == 1 else tuple(out)

    def samples(self) -> list[Sample]:
        return []
