"""Linear models and support vector machines (ai.onnx.ml), as scikit-learn's exporters write them."""

from __future__ import annotations

import math

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ml.features import ML
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Labels, Outputs, Value
from rlx.ir.graph import Node
from rlx.ir.tree import Nest

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def rows_of(n: Call) -> Node:
    """The input as rows of f32; one axis is one row."""
    x = ops.cast(n[0], "f32")
    return x if x.rank > 1 else ops.expand_dims(x, 0)


# -- what follows the scores


def transformed(scores: Node, after: str) -> Node:
    """Scores of two classes or more, as `post_transform` wants them."""
    if after == "SOFTMAX":
        return ops.softmax(scores, 1)
    if after == "LOGISTIC":
        return ops.sigmoid(scores)
    if after == "PROBIT":
        return probit(scores)
    if after == "SOFTMAX_ZERO":  # a score of 0 stays 0
        weight = ops.exp(scores - ops.max(scores, 1, True))
        weight = ops.where(ops.greater(ops.abs(scores), 1e-7), weight, 0.0)
        return weight / ops.sum(weight, 1, True)
    return scores


def probit(p: Node) -> Node:
    """The quantile of a normal distribution, by Winitzki's approximation, which ONNX Runtime uses."""
    x = 2.0 * p - 1.0
    log = ops.log1p(-(x * x)) / 0.147
    half = 2.0 / (math.pi * 0.147) + 0.0735 * log
    return math.sqrt(2.0) * ops.sign(x) * ops.sqrt(-log / (ops.sqrt(half * half - log) + half))


def with_other(score: Node, after: str, mirrored: bool) -> Node:
    """Scores of two classes by the score of the second one."""
    if after == "LOGISTIC":
        return ops.concat([ops.sigmoid(-score), ops.sigmoid(score)], 1)
    return ops.concat([-score if mirrored else 1.0 - score, score], 1)


def labelled(n: Call, numbers: Node, text: str, ints: str) -> Value:
    """Labels of classes by their numbers: text, or integers that the program looks up."""
    words = n.attr(text, None)
    if words:
        n.attr(ints, None)
        return Labels(numbers, np.array(words, dtype=object))
    labels = np.array(n.attr(ints), np.int64)
    return ops.gather(n.constant(labels), numbers)


# -- linear models


@onnx_op("LinearRegressor", domain=ML)
def linear_regressor(n: Call) -> Outputs:
    targets = int(n.attr("targets", 1))
    weights = np.array(n.attr("coefficients"), np.float32).reshape(targets, -1)
    y = ops.matmul(rows_of(n), n.weight(np.ascontiguousarray(weights.T), "weights"))
    bias = n.attr("intercepts", None)
    y = y if bias is None else y + n.constant(np.array(bias, np.float32))
    after = n.choice("post_transform", "NONE", TRANSFORMS if targets > 1 else ("NONE", "PROBIT"))
    return transformed(y, after)


@onnx_op("LinearClassifier", domain=ML, ignored=("multi_class",))
def linear_classifier(n: Call) -> Outputs:
    bias = np.array(n.attr("intercepts"), np.float32)
    weights = np.array(n.attr("coefficients"), np.float32).reshape(len(bias), -1)
    after = n.choice("post_transform", "NONE", TRANSFORMS)
    product = n.weight(np.ascontiguousarray(weights.T), "weights")
    scores = ops.matmul(rows_of(n), product) + n.constant(bias)
    if len(bias) > 1:
        label = labelled(n, ops.argmax(scores, axis=1), "classlabels_strings", "classlabels_ints")
        return label, transformed(scores, after)
    classes = len(n.attr("classlabels_strings", None) or n.attr("classlabels_ints", None) or ())
    if classes != 2:
        raise ModelImportError(f"it has one score and {classes} classes; RLX takes two classes there")
    picked = ops.cast(ops.squeeze(ops.greater(scores, 0.0), 1), "i64")
    label = labelled(n, picked, "classlabels_strings", "classlabels_ints")
    if after == "PROBIT":
        raise ModelImportError("post_transform PROBIT of one score is not supported")
    return label, with_other(scores, after, mirrored=False)


# -- support vector machines


def kernel_of(n: Call, x: Node, vectors: np.ndarray) -> Node:
    """[rows, vectors]: how near each row is to each support vector."""
    kind = n.choice("kernel_type", "LINEAR", KERNELS)
    gamma, shift, degree = (float(p) for p in [*n.attr("kernel_params", []), 0.0, 0.0, 0.0][:3])
    if kind == "RBF":
        apart = ops.expand_dims(x, 1) - n.weight(vectors[None], "vectors")
        return ops.exp(-gamma * ops.sum(apart * apart, axis=2))
    product = ops.matmul(x, n.weight(np.ascontiguousarray(vectors.T), "vectors"))
    if kind == "LINEAR":
        return product
    inner = product * gamma + shift
    return ops.tanh(inner) if kind == "SIGMOID" else ops.pow(inner, degree)


@onnx_op("SVMRegressor", domain=ML)
def svm_regressor(n: Call) -> Outputs:
    x = rows_of(n)
    count = int(n.attr("n_supports", 0))
    weights, rho = (np.array(n.attr(k), np.float32) for k in ("coefficients", "rho"))
    if count:
        vectors = np.array(n.attr("support_vectors"), np.float32).reshape(count, -1)
        x = kernel_of(n, x, vectors)
    else:
        n.attr("support_vectors", None), n.attr("kernel_params", None)
        n.choice("kernel_type", "LINEAR", ("LINEAR",))
    y = ops.matmul(x, n.weight(weights.reshape(-1, 1), "weights")) + float(rho[0])
    n.choice("post_transform", "NONE", ("NONE",))
    if n.flag("one_class"):
        return ops.where(ops.greater(y, 0.0), n.constant(1.0, "f32"), n.constant(-1.0, "f32"))
    return y


@onnx_op("SVMClassifier", domain=ML)
def svm_classifier(n: Call) -> Outputs:
    after = n.choice("post_transform", "NONE", TRANSFORMS)
    text, ints = "classlabels_strings", "classlabels_ints"
    many = len(n.attr(text, None) or n.attr(ints, None) or ())
    sizes = [int(c) for c in n.attr("vectors_per_class", [])]
    weights, rho = (np.array(n.attr(k), np.float32) for k in ("coefficients", "rho"))
    chances = [np.array(n.attr(k, []), np.float32) for k in ("prob_a", "prob_b")]
    if not sum(sizes):
        return svm_without_vectors(n, weights, float(rho[0]), many, after)
    vectors = np.array(n.attr("support_vectors"), np.float32).reshape(sum(sizes), -1)
    pairs = [(i, j) for i in range(many) for j in range(i + 1, many)]
    duel = pair_weights(weights.reshape(many - 1, -1), sizes, pairs)
    near = kernel_of(n, rows_of(n), vectors)
    scores = ops.matmul(near, n.weight(duel, "weights")) + n.constant(rho[: len(pairs)])
    first, second = (np.eye(many, dtype=np.float32)[[p[side] for p in pairs]] for side in (0, 1))
    won = ops.expand_dims(ops.greater(scores, 0.0), 2)
    votes = ops.sum(ops.where(won, n.constant(first), n.constant(second)), axis=1)
    label = labelled(n, ops.argmax(votes, axis=1), text, ints)
    if len(chances[0]):
        at = n.constant(chances[0][: len(pairs)]), n.constant(chances[1][: len(pairs)])
        wins = ops.clip(ops.sigmoid(-(scores * at[0] + at[1])), 1e-7, 1 - 1e-7)
        return label, transformed(coupled(n, wins, pairs, many), after)
    if many > 2:
        return label, transformed(scores, after)
    return label, with_other(scores, after, mirrored=after == "NONE")


def svm_without_vectors(
    n: Call, weights: np.ndarray, rho: float, many: int, after: str
) -> tuple[Value, Node]:
    """One linear score for each class; of two classes, the second wins by any score beyond the limit."""
    n.attr("support_vectors", None), n.attr("kernel_params", None), n.attr("kernel_type", None)
    product = n.weight(weights.reshape(many, -1).T.copy(), "weights")
    scores = ops.matmul(rows_of(n), product) + rho
    numbers = ops.argmax(scores, axis=1)
    if many == 2:
        top = ops.max(scores, 1)
        sure = ops.greater_equal(top, 0.5) if weights.min() >= 0 else ops.greater(top, 0.0)
        numbers = ops.where(sure, n.constant(1, numbers.dtype), numbers)
    return labelled(n, numbers, "classlabels_strings", "classlabels_ints"), transformed(scores, after)


def pair_weights(weights: np.ndarray, sizes: list[int], pairs: list[tuple[int, int]]) -> np.ndarray:
    """[vectors, pairs]: the weights of each pair's classifier, from rows that leave out a class's own."""
    ends = np.cumsum([0, *sizes])
    out = np.zeros((ends[-1], len(pairs)), np.float32)
    for at, (i, j) in enumerate(pairs):
        mine, other = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        out[mine, at], out[other, at] = weights[j - 1, mine], weights[i, other]
    return out


def coupled(n: Call, wins: Node, pairs: list[tuple[int, int]], many: int) -> Node:
    """Chances of classes from chances of pairs: Wu, Lin and Weng's second method, as LIBSVM iterates it.

    Each row goes on until its own error is small; rows that are done keep what they have.
    """
    beats = np.zeros((len(pairs), many * many), np.float32)
    loses = np.zeros_like(beats)
    for at, (i, j) in enumerate(pairs):
        beats[at, i * many + j], loses[at, j * many + i] = 1, 1
    both = ops.matmul(wins, n.constant(beats)) + ops.matmul(1.0 - wins, n.constant(loses))
    r = ops.reshape(both, (-1, many, many))  # [rows, i, j]: the chance of i against j
    back = ops.transpose(r, (0, 2, 1))
    unit = n.constant(np.eye(many, dtype=np.float32))
    q = -(back * r) + unit * ops.expand_dims(ops.sum(back * back, axis=2), 2)
    rows = ops.transpose(q, (1, 0, 2))
    count = wins.shape[0]
    limit = 0.005 / many

    def measured(p: Node) -> tuple[Node, Node, Node]:
        qp = ops.sum(q * ops.expand_dims(p, 1), axis=2)
        whole = ops.sum(p * qp, axis=1, keepdims=True)
        return qp, whole, ops.greater_equal(ops.max(ops.abs(qp - whole), 1, True), limit)

    def turn(carry: Nest, item: Nest) -> tuple[Nest, None]:
        p, qp, whole = carry
        row, mine = item
        own, here = (ops.sum(t * mine, axis=1, keepdims=True) for t in (row, qp))
        step = (whole - here) / own
        whole = (whole + step * (step * own + 2.0 * here)) / ((1.0 + step) * (1.0 + step))
        return ((p + step * mine) / (1.0 + step), (qp + step * row) / (1.0 + step), whole), None

    def better(p: Node) -> Node:
        qp, whole, open_ = measured(p)
        (new, _, _), _ = ops.scan(turn, (p, qp, whole), (rows, unit))
        return ops.where(open_, new, p)

    start = ops.full((count, many), np.float32(1 / many), "f32")
    return ops.while_loop(lambda p: ops.any(measured(p)[2]), better, start, max_trips=100)
