"""Training steps and gradients (ai.onnx.preview.training)."""

from __future__ import annotations

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node
from rlx.transform.grad import backward, ones_like, zeros_like

TRAINING = "ai.onnx.preview.training"


def groups(n: Call, kinds: int) -> list[list[Node]]:
    """Operands after rate and count: all parameters, then all gradients, then each kind of state."""
    operands = n.nodes(2)
    each = len(operands) // kinds
    return [operands[i * each : (i + 1) * each] for i in range(kinds)]


@onnx_op("Adagrad", domain=TRAINING)
def adagrad(n: Call) -> Outputs:
    rate, step = n[0], ops.cast(n[1], n[0].dtype)
    decay, eps, norm = n.attr("decay_factor", 0.0), n.attr("epsilon", 0.0), n.attr("norm_coefficient", 0.0)
    now = rate / (step * decay + 1.0)
    new, sums = [], []
    for x, g, h in zip(*groups(n, 3), strict=True):
        g = x * norm + g
        h = h + g * g
        new.append(x - now * g / (ops.sqrt(h) + eps))
        sums.append(h)
    return (*new, *sums)


@onnx_op("Adam", domain=TRAINING)
def adam(n: Call) -> Outputs:
    rate, step = n[0], ops.cast(n[1], n[0].dtype)
    alpha, beta, eps = n.attr("alpha", 0.9), n.attr("beta", 0.999), n.attr("epsilon", 0.0)
    norm, after = n.attr("norm_coefficient", 0.0), n.attr("norm_coefficient_post", 0.0)
    one = n.constant(1, n[0].dtype)
    root = ops.sqrt(1.0 - ops.pow(one * beta, step)) / (1.0 - ops.pow(one * alpha, step))
    adjusted = ops.where(ops.greater(step, 0.0), rate * root, rate)
    new, means, squares = [], [], []
    for x, g, v, h in zip(*groups(n, 4), strict=True):
        g = x * norm + g
        v = v * alpha + g * (1.0 - alpha)
        h = h * beta + g * g * (1.0 - beta)
        new.append((x - adjusted * v / (ops.sqrt(h) + eps)) * (1.0 - after))
        means.append(v)
        squares.append(h)
    return (*new, *means, *squares)


@onnx_op("Momentum", domain=TRAINING)
def momentum(n: Call) -> Outputs:
    rate, step = n[0], n[1]
    alpha, beta, norm = n.attr("alpha"), n.attr("beta"), n.attr("norm_coefficient")
    nesterov = n.choice("mode", "standard", ("standard", "nesterov")) == "nesterov"
    first = ops.equal(step, 0)
    weight = ops.where(first, n.constant(1, rate.dtype), n.constant(beta, rate.dtype))
    new, states = [], []
    for x, g, v in zip(*groups(n, 3), strict=True):
        g = x * norm + g
        v = v * alpha + g * weight
        new.append(x - rate * (g + v * alpha if nesterov else v))
        states.append(v)
    return (*new, *states)


@onnx_op("Gradient", domain=TRAINING, ignored=("zs",))
def gradient(n: Call) -> Outputs:
    """dy/dx for values of the graph around, by reverse mode."""
    names, y = n.attr("xs"), n.scope.lookup(n.attr("y"))
    if not isinstance(y, Node):
        raise ModelImportError(f"{n.attr('y')!r} is not a tensor")
    xs = [n[i] for i in range(len(names))]
    found = backward(y.graph, {y.id: ones_like(y)}, xs)
    return tuple(zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True))
