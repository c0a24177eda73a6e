"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

REDUCE: dict[str, Callable[..., Node]] = {
    "ReduceSum": ops.sum,
    "ReduceMean": ops.mean,
    "ReduceMax": ops.max,
    "ReduceMin": ops.min,
    "ReduceProd": ops.prod,
    "ReduceL1": ops.norm_l1,
    "ReduceL2": ops.norm_l2,
    "ReduceLogSum": ops.log_sum,
    "ReduceLogSumExp": ops.logsumexp,
    "ReduceSumSquare": ops.sum_square,
}
OF_BOOL = {"ReduceMax": ops.any, "ReduceMin": ops.all}
KEEP = {"ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare"}  # integers wrap in their own dtype
OF_FLOATS = {"ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"}


def reduced(op: str, x: Node, axes: Sequence[int] | None, keepdims: bool) -> Node:
    """One reduction; integers go through f64 where the result is a float rounded towards zero."""
    made: Node
    if x.dtype.is_bool:
        made = OF_BOOL[op](x, axis=axes, keepdims=keepdims)
    elif op in OF_FLOATS and x.dtype.is_int:
        wide = REDUCE[op](ops.cast(x, "f64"), axis=axes, keepdims=keepdims)
        made = ops.cast(wide, x.dtype)
    else:
        own = {"dtype": x.dtype} if op in KEEP else {}
        made = REDUCE[op](x, axis=axes, keepdims=keepdims, **own)
    return made


@onnx_op(*REDUCE)
def reduce_by_attribute(n: Call) -> Outputs:
    axes = n.attr("axes", None)
    return reduced(n.proto.op_type, n[0], tuple(axes) if axes is not None else None, n.flag("keepdims", 1))


@onnx_op("ReduceSum", since=13)
@onnx_op(*(name for name in REDUCE if name != "ReduceSum"), since=18)
def reduce_by_input(n: Call) -> Outputs:
    axes: tuple[int, ...] | None = n.ints(1) if n.get(1) is not None else ()
    nothing = n.flag("noop_with_empty_axes")
    keepdims = n.flag("keepdims", 1)
    if not axes:
        axes = () if nothing else None
    return reduced(n.proto.op_type, n[0], axes, keepdims)


@onnx_op("ArgMax", "ArgMin")
def arg_extreme(n: Call) -> Outputs:
    x = n[0]
    function = ops.argmax if n.proto.op_type == "ArgMax" else ops.argmin
    axis = normal_axis(n.proto.op_type, int(n.attr("axis", 0)), x.rank)
    return function(x, axis=axis, keepdims=n.flag("keepdims", 1), last=n.flag("select_last_index"))
