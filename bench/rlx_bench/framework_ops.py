"""ONNX models run node by node in torch or jax, so that these take part without a model of their own.

The table of a framework says what each operator is there; under jax.jit the walk over the nodes happens once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.records import dataclass

Table = dict[str, Callable[..., Any]]


@dataclass
class Interpreted:
    """A model as code: `run(weights, feed)` gives its outputs in order."""

    nodes: list[tuple[Callable[..., Any], list[str], list[str], dict[str, Any]]]
    weights: dict[str, Any]
    outputs: list[str]

    def run(self, weights: dict[str, Any], feed: dict[str, Any]) -> list[Any]:
        values = {**weights, **feed}
        for function, inputs, outputs, attrs in self.nodes:
            result = function(*[values[i] if i else None for i in inputs], **attrs)
            values.update(
                zip(outputs, result if isinstance(result, (tuple, list)) else (result,), strict=False)
            )
        return [values[name] for name in self.outputs]


def interpreted(model: Any, table: Table, convert: Callable[[np.ndarray], Any]) -> Interpreted:
    """Small integer weights (sizes, axes, permutations) stay NumPy arrays."""
    from onnx import helper, numpy_helper

    missing = {node.op_type for node in model.graph.node} - set(table)
    if missing:
        raise UnsupportedError(f"this framework's table has no {', '.join(sorted(missing))}")
    nodes = [
        (
            table[node.op_type],
            list(node.input),
            list(node.output),
            {a.name: helper.get_attribute_value(a) for a in node.attribute},
        )
        for node in model.graph.node
    ]
    weights = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        small = value.dtype.kind in "iu" and value.size <= 16
        weights[tensor.name] = value if small else convert(value.copy())
    return Interpreted(nodes, weights, [o.name for o in model.graph.output])


def _sizes(x: Any, shape: np.ndarray) -> list[int]:
    return [int(x.shape[i]) if s == 0 else int(s) for i, s in enumerate(shape)]


def _window(x: Any, starts: Any, ends: Any, axes: Any) -> Any:
    places = [slice(None)] * x.ndim
    for start, end, axis in zip(starts, ends, axes, strict=True):
        places[int(axis)] = slice(int(start), int(end))
    return x[tuple(places)]


def _shape(x: Any, start: int = 0, end: int | None = None) -> np.ndarray:
    return np.array(x.shape[start:end])


_COMMON: Table = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "MatMul": lambda a, b: a @ b,
    "Identity": lambda x: x,
    "Reshape": lambda x, shape: x.reshape(_sizes(x, shape)),
    "Flatten": lambda x: x.reshape(x.shape[0], -1),
    "Gemm": lambda x, w, b: x @ w + b,
    "Slice": _window,
    "Shape": _shape,
}


def torch_table() -> Table:
    """Operators in torch."""
    import torch
    from torch.nn import functional

    def conv(x: Any, w: Any, b: Any, kernel_shape: Any, strides: Any, pads: Any) -> Any:
        return functional.conv2d(x, w, b, strides, pads[:2])

    def pool(x: Any, kernel_shape: Any, strides: Any, pads: Any) -> Any:
        return functional.max_pool2d(x, kernel_shape, strides, pads[:2])

    def norm(x: Any, scale: Any, shift: Any, axis: int, epsilon: float) -> Any:
        return functional.layer_norm(x, x.shape[-1:], scale, shift, epsilon)

    def unsqueeze(x: Any, axes: np.ndarray) -> Any:
        for axis in axes:
            x = x.unsqueeze(int(axis))
        return x

    return _COMMON | {
        "Gather": lambda x, i, axis=0: functional.embedding(i, x),
        "Cast": lambda x, to: x.float(),
        "Transpose": lambda x, perm: x.permute(perm),
        "Softmax": lambda x, axis: x.softmax(axis),
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "Erf": torch.erf,
        "Sqrt": torch.sqrt,
        "Relu": torch.relu,
        "Max": torch.maximum,
        "ReduceSum": lambda x, axes, keepdims: x.sum([int(a) for a in axes], keepdim=bool(keepdims)),
        "LayerNormalization": norm,
        "Unsqueeze": unsqueeze,
        "Concat": lambda *parts, axis: torch.cat(parts, axis),
        "Split": lambda x, sizes, axis: torch.split(x, [int(s) for s in sizes], axis),
        "Conv": conv,
        "MaxPool": pool,
        "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    }


def jax_table() -> Table:
    """Operators in jax."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any, shift: Any, axis: int, epsilon: float) -> Any:
        return jax.nn.standardize(x, -1, epsilon=epsilon) * scale + shift

    return _COMMON | {
        "Gather": lambda x, i, axis=0: jnp.take(x, i, axis),
        "Cast": lambda x, to: x.astype(jnp.float32),
        "Transpose": lambda x, perm: x.transpose(perm),
        "Softmax": lambda x, axis: jax.nn.softmax(x, axis),
        "Sigmoid": jax.nn.sigmoid,
        "Tanh": jnp.tanh,
        "Erf": jax.scipy.special.erf,
        "Sqrt": jnp.sqrt,
        "Relu": jax.nn.relu,
        "Max": jnp.maximum,
        "ReduceSum": lambda x, axes, keepdims: x.sum(tuple(int(a) for a in axes), keepdims=bool(keepdims)),
        "LayerNormalization": norm,
        "Unsqueeze": lambda x, axes: jnp.expand_dims(x, tuple(int(a) for a in axes)),
        "Concat": lambda *parts, axis: jnp.concatenate(parts, axis),
        "Split": lambda x, sizes, axis: jnp.split(x, np.cumsum(sizes)[:-1], axis),
    }
