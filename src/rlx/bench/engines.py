"""Engines that run a workload. Each is made in a process of its own, at its best documented settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.bench.workloads import Workload

Run = Callable[[], Any]
Prepared = tuple[Run, Callable[[], list[np.ndarray]]]


def rlx_engine(w: Workload, threads: int) -> Prepared:
    """RLX through `bind`: fixed buffers, as a server would run it."""
    from rlx.compile import compile

    program = compile(w.graph(), threads=threads)
    outputs = program.run(w.feed)  # its own arrays, reused for every run that follows
    return program.bind(w.feed, outputs), lambda: list(outputs.values())


def ort_engine(w: Workload, threads: int) -> Prepared:
    """ONNX Runtime with IO binding and all optimisations."""
    import onnxruntime as ort

    assert w.onnx is not None
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(w.onnx().SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in w.feed.items():
        binding.bind_cpu_input(name, array)
    shapes = session.run(None, w.feed)
    kept = [np.empty_like(a) for a in shapes]
    for out, array in zip(session.get_outputs(), kept, strict=True):
        binding.bind_output(out.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return lambda: session.run_with_iobinding(binding), lambda: kept


def openvino_engine(w: Workload, threads: int) -> Prepared:
    """OpenVINO with the latency hint and f32 inference, shapes made static."""
    import openvino as ov

    assert w.onnx is not None
    core = ov.Core()
    model = core.read_model(w.onnx().SerializeToString())
    model.reshape({name: list(a.shape) for name, a in w.feed.items()})
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
    }
    compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    for i, port in enumerate(compiled.inputs):
        request.set_input_tensor(i, ov.Tensor(w.feed[port.any_name], shared_memory=True))
    return request.infer, lambda: [
        np.array(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))
    ]


def numpy_engine(w: Workload, threads: int) -> Prepared:
    assert w.numpy is not None
    plain = w.numpy
    kept: list[list[np.ndarray]] = [[]]

    def run() -> None:
        kept[0] = plain(w.feed)

    return run, lambda: kept[0]


def torch_engine(w: Workload, threads: int) -> Prepared:
    """PyTorch eager in inference mode; outputs are fresh tensors from its caching allocator."""
    import torch

    assert w.torch is not None
    torch.set_num_threads(threads)
    code, feed = w.torch, {k: torch.from_numpy(v) for k, v in w.feed.items()}
    kept: list[Any] = [None]

    def run() -> None:
        with torch.inference_mode():
            kept[0] = code(feed)

    return run, lambda: [kept[0].numpy()]


ENGINES: dict[str, tuple[str, Callable[[Workload], bool], Callable[[Workload, int], Prepared]]] = {
    "rlx": ("rlx", lambda w: True, rlx_engine),
    "onnxruntime": ("onnxruntime", lambda w: w.onnx is not None, ort_engine),
    "openvino": ("openvino", lambda w: w.onnx is not None, openvino_engine),
    "torch": ("torch", lambda w: w.torch is not None, torch_engine),
    "numpy": ("numpy", lambda w: w.numpy is not None, numpy_engine),
}


def installed() -> list[str]:
    """Engines whose package is here."""
    return [
        name for name, (package, _, _) in ENGINES.items() if importlib.util.find_spec(package) is not None
    ]
