"""Losses of classifiers: negative log likelihood and cross entropy, as in ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, AttrValue, integer, one_of, optional
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.addressing import OutOfRangeError, as_indices
from rlx.ops.array.gather import gather, gather_elements
from rlx.ops.array.shape import reshape
from rlx.ops.math.elementwise import cast, equal, not_equal, where
from rlx.ops.math.reduce import sum as sum_all
from rlx.ops.math.stats import mean
from rlx.ops.nn.blocks import given, log_softmax, refuse_negative
from rlx.ops.rules import expand_in_f32, in_f32, is_integer, is_real_float, need_dtype, same_dtype


def _nll_ref(
    scores: np.ndarray, labels: np.ndarray, *weights: np.ndarray, ignore_index: int | None, reduction: str
) -> np.ndarray:
    classes = scores.shape[1]
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    bad = ~ignored & ((labels < 0) | (labels >= classes))
    if bad.any():
        raise OutOfRangeError(f"nll_loss: label {int(labels[bad][0])} is out of range for {classes} classes")
    one_hot = (np.moveaxis(labels[..., None] == np.arange(classes), -1, 1)) & ~ignored[:, None]
    weight = (weights[0] if weights else np.ones(classes)).astype(np.float64)
    per_class = weight.reshape(-1, *(1,) * (labels.ndim - 1))
    loss = np.where(one_hot, -scores.astype(np.float64) * per_class, 0).sum(1)
    if reduction == "mean":
        loss = loss.sum() / np.where(one_hot, per_class, 0).sum()
    elif reduction == "sum":
        loss = loss.sum()
    return np.asarray(loss, scores.dtype)


def _nll_expand(scores: Node, labels: Node, *weights: Node, ignore_index: int | None, reduction: str) -> Node:
    ignored = None if ignore_index is None else equal(labels, ignore_index)
    at = labels if ignored is None else where(ignored, 0, labels)
    at = refuse_negative(at, scores.shape[1])
    column = (labels.shape[0], 1, *labels.shape[1:])
    loss: Node = -reshape(gather_elements(scores, reshape(at, column), axis=1), labels.shape)
    weight: Node | None = None
    if weights:
        weight = gather(weights[0], at)
        loss = loss * weight
    if ignored is not None:
        loss = where(ignored, 0.0, loss)
    if reduction == "none":
        return loss
    if reduction == "mean" and weight is None and ignored is None:
        return mean(loss)
    total: Node = sum_all(loss)
    if reduction == "sum":
        return total
    if ignore_index is not None and ignored is not None:
        used = cast(not_equal(labels, ignore_index), dtype=scores.dtype)
        weight = used if weight is None else where(ignored, 0.0, weight)
    assert weight is not None, "the mean without weights is above"
    return total / sum_all(weight)


class _Loss(Op):
    """Base: scores [batch, classes, ...], integer labels [batch, ...] and perhaps weights [classes]."""

    level = Level.HIR
    attrs = {
        "ignore_index": Attr(optional(integer), None),
        "reduction": Attr(one_of("mean", "sum", "none"), "mean"),
    }

    def infer(self, *types: TensorType, ignore_index: int | None, reduction: str) -> TensorType:
        if len(types) not in (2, 3):
            raise TypeMismatchError(
                f"{self.name}: takes scores, labels and perhaps weights, got {len(types)} operands"
            )
        scores, labels = types[:2]
        need_dtype(self.name, scores, is_real_float)
        need_dtype(self.name, labels, is_integer)
        if scores.rank < 2:
            raise ShapeError(f"{self.name}: scores {scores} are not [batch, classes, ...]")
        want = (scores.shape[0], *scores.shape[2:])
        told = f"{self.name}: labels {labels} do not match scores {scores}, whose axis 1 is the classes"
        require_shape(labels.shape, want, told)
        for w in types[2:]:
            same_dtype(self.name, (scores, w))
            told = f"{self.name}: weights {w} are not one per class of scores {scores}"
            if w.rank != 1:
                raise ShapeError(told)
            require_equal(w.shape[0], scores.shape[1], told)
        return scores.with_shape(want if reduction == "none" else ())

    def samples(self) -> list[Sample]:
        row = np.array([2, 0, 1])
        block = np.array([[0, -1, 2], [1, 1, -1]])

        def one(scores: str, labels: Any, *weights: str, grad: bool = True, **attrs: object) -> Sample:
            return Sample((Arg(scores), labels, *(Arg(w, 0.2, 2.0) for w in weights)), attrs, grad=grad)

        return [
            *(one("f32[3,4]", row, reduction=r) for r in ("mean", "sum", "none")),
            *(one("f32[3,4]", row.astype(np.int32), "f32[4]", reduction=r) for r in ("mean", "sum", "none")),
            *(one("f32[2,3,3]", block, ignore_index=-1, reduction=r) for r in ("mean", "sum", "none")),
            *(
                one("f32[2,3,3]", block, "f32[3]", ignore_index=-1, reduction=r)
                for r in ("mean", "sum", "none")
            ),
            one("f32[1,1]", np.array([0])),
            one("f32[3,4]", np.array([2, 9, 1]), "f32[4]", ignore_index=9),
            one("f32[0,4]", np.zeros(0, np.int64), reduction="sum", grad=False),
            Sample((Arg("f32[n,4,m]"), Arg("i64[n,m]", 0, 3)), grad=False),
            Sample((Arg("f32[n,4,m]"), Arg("i64[n,m]", 0, 3)), {"ignore_index": 2}, grad=False),
            one("f16[3,17]", row, "f16[17]", grad=False),
        ]


@declare
class _nll_loss(_Loss):
    """-scores[label] * weights[label]; the mean divides by the weights of the labels that count."""

    name = "nll_loss"
    ref = staticmethod(in_f32(_nll_ref))
    expand = staticmethod(expand_in_f32(_nll_expand))


def _cross_entropy_ref(scores: np.ndarray, *rest: np.ndarray, **attrs: AttrValue) -> np.ndarray:
    wide = scores.astype(np.float64)
    wide = wide - np.max(wide, axis=1, keepdims=True, initial=-np.inf)
    log_p = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return _nll_ref(log_p, *rest, **attrs).astype(scores.dtype)


@declare
class _cross_entropy(_Loss):
    """nll_loss of log_softmax(scores) over the classes."""

    name = "cross_entropy"
    ref = staticmethod(in_f32(_cross_entropy_ref))
    expand = staticmethod(
        expand_in_f32(lambda scores, *rest, **attrs: _nll_expand(log_softmax(scores, axis=1), *rest, **attrs))
    )


@of_one
def nll_loss(
    log_p: Operand,
    labels: Operand,
    weights: Operand | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log likelihood of labels [batch, ...] under log_p [batch, classes, ...], as ONNX's.

    A label equal to `ignore_index` does not count; any other outside the classes is an error when the program
    runs. reduction is "mean" (divided by the weights of the labels that count), "sum" or "none".

    >>> float(nll_loss(np.array([[-0.5, -2.0]]), np.array([1])))
    2.0
    """
    return _nll_loss(
        log_p, as_indices(labels), *given(weights), ignore_index=ignore_index, reduction=reduction
    )


@of_one
def cross_entropy(
    scores: Operand,
    labels: Operand,
    weights: Operand | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """nll_loss of log_softmax(scores): scores [batch, classes, ...] before any softmax, as ONNX's.

    >>> float(cross_entropy(np.array([[0.0, 0.0]]), np.array([1])).round(4))
    0.6931
    """
    return _cross_entropy(
        scores, as_indices(labels), *given(weights), ignore_index=ignore_index, reduction=reduction
    )


__all__ = ["cross_entropy", "nll_loss"]
