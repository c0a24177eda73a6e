"""A small writer of ONNX models: nodes in order, weights and constants by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike
    from onnx import ModelProto, NodeProto, ValueInfoProto

    Info = Mapping[str, tuple[DTypeLike, Sequence[int | str] | None]]


class OnnxWriter:
    """Collects nodes and weights, then builds a ModelProto."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.values: dict[str, np.ndarray] = {}
        self._count = 0

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attrs: Any) -> str:
        """One node; the name of its first output."""
        from onnx import helper

        self._count += 1
        names = list(outputs) or [f"{kind.lower()}_{self._count}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attrs))
        return names[0]

    def weight(self, name: str, value: np.ndarray) -> str:
        """A named initialiser, stored once."""
        self.values.setdefault(name, np.asarray(value, order="C"))  # ascontiguousarray has no rank 0
        return name

    def constant(self, value: ArrayLike, dtype: DTypeLike = np.int64) -> str:
        """An unnamed initialiser; a number becomes a vector of one."""
        self._count += 1
        return self.weight(f"const_{self._count}", np.asarray(value, dtype))

    def scalar(self, name: str, value: float, dtype: DTypeLike = np.float32) -> str:
        """A named initialiser of rank 0."""
        self.values[name] = np.asarray(value, dtype)
        return name

    def model(
        self,
        name: str,
        inputs: Info,
        outputs: Info,
        opset: int = 17,
        contrib: bool = False,
    ) -> ModelProto:
        """The model; inputs and outputs are name -> (NumPy dtype, shape), sizes given as text are dynamic."""
        from onnx import helper, numpy_helper

        def info(values: Info) -> list[ValueInfoProto]:
            kind = helper.np_dtype_to_tensor_dtype
            return [
                helper.make_tensor_value_info(n, kind(np.dtype(d)), s if s is None else list(s))
                for n, (d, s) in values.items()
            ]

        weights = [numpy_helper.from_array(value, n) for n, value in self.values.items()]
        graph = helper.make_graph(self.nodes, name, info(inputs), info(outputs), weights)
        opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid("com.microsoft", 1)] * contrib
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)
