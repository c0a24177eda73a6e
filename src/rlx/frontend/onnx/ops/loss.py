"""Losses."""

from __future__ import annotations

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue


def loss_options(n: Call) -> dict[str, AttrValue]:
    ignored = n.attr("ignore_index", None)
    return {
        "ignore_index": None if ignored is None else int(ignored),
        "reduction": n.choice("reduction", "mean", ("mean", "sum", "none")),
    }


@onnx_op("NegativeLogLikelihoodLoss")
def nll_loss(n: Call) -> Outputs:
    return ops.nll_loss(n[0], n[1], n.get(2), **loss_options(n))


@onnx_op("SoftmaxCrossEntropyLoss")
def cross_entropy(n: Call) -> Outputs:
    loss = ops.cross_entropy(n[0], n[1], n.get(2), **loss_options(n))
    return (loss, ops.log_softmax(n[0], axis=1)) if n.wants(1) else loss
