"""ONNX's standard backend interface: `prepare`, `run_model`, `run_node`, `supports_device`.

Third-party suites drive RLX through it; `rlx.load` is the simpler way to run one model.

>>> import numpy as np, onnx.parser
>>> model = onnx.parser.parse_model('''
...     <ir_version: 8, opset_import: ["": 17]>
...     small (float[N] x) => (float[N] y) { y = Add(x, x) }''')
>>> run_model(model, [np.array([1, 2], np.float32)])[0]
array([2., 4.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from rlx.api.compile import compile
from rlx.errors import DeviceError
from rlx.frontend.onnx.adaptive import AdaptiveModel
from rlx.ir.dtype import plain_array


class RlxBackendRep(BackendRep):
    """A model that runs; `stats` describes the program of the last run."""

    def __init__(self, model: AdaptiveModel) -> None:
        self.model = model

    def run(self, inputs: object, **kwargs: object) -> tuple[object, ...]:
        """Outputs as a named tuple."""
        given = inputs if isinstance(inputs, (list, tuple, dict)) else [inputs]
        out = self.model.run(given)
        return namedtupledict("Outputs", self.model.outputs)(*out)

    @property
    def host_thunks(self) -> list[Mapping[str, object]]:
        """What did not run natively, in any variant of the model that has run so far."""
        found: list[Mapping[str, object]] = []
        for variant in self.model.variants:
            found += variant.imported.host_ops
            if variant.program is not None:
                found += variant.program.stats["host_thunks"]
        return found


class RlxBackend(Backend):
    """RLX on the CPU."""

    @classmethod
    def is_compatible(cls, model: object, device: str = "CPU", **kwargs: object) -> bool:
        """Every model is tried; what RLX lacks is said when it is prepared or run."""
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: object, device: str = "CPU", **kwargs: object) -> RlxBackendRep:
        """A model ready to run; compilation happens with the first inputs."""
        if not cls.supports_device(device):
            raise DeviceError(f"rlx.onnx_backend runs on CPU, not on {device}")
        return RlxBackendRep(AdaptiveModel(model, compile))

    @classmethod
    def run_model(
        cls, model: object, inputs: object, device: str = "CPU", **kwargs: object
    ) -> tuple[object, ...]:
        """Prepare and run once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Iterable[object],
        device: str = "CPU",
        outputs_info: Sequence[tuple[object, tuple[int, ...]]] | None = None,
        **kwargs: object,
    ) -> tuple[object, ...]:
        """Run one node on arrays."""
        arrays = [plain_array(x, "an input") for x in inputs]
        names = [name for name in node.input if name]
        infos = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in zip(names, arrays, strict=False)
        ]
        outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", infos, outputs)
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        assert isinstance(version, int), "versions of opsets are numbers"
        opsets = [onnx.helper.make_opsetid(node.domain, version)]
        return cls.run_model(onnx.helper.make_model(graph, opset_imports=opsets), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """CPU only."""
        return str(device).partition(":")[0].upper() == "CPU"


is_compatible = RlxBackend.is_compatible
prepare = RlxBackend.prepare
run_model = RlxBackend.run_model
run_node = RlxBackend.run_node
supports_device = RlxBackend.supports_device
