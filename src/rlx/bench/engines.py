"""Engines that run a workload. Each is made in a process of its own, at its best documented settings."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.bench.workloads.base import Arrays, Run, Workload


@dataclass(frozen=True)
class Engine:
    """`prepare(workload, threads)` gives what is timed; `can` says whether the workload has a way for it."""

    package: str
    can: Callable[[Workload], bool]
    prepare: Callable[[Workload, int], Run]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _fastest(ways: list[Run]) -> Run:
    """The best of several ways to say the same, by a few timings of each."""

    def spent(way: Run) -> float:
        way()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
        return min(times)

    return ways[0] if len(ways) == 1 else min(ways, key=spent)


def _feeds(w: Workload) -> list[Arrays]:
    return w.sweep or [w.feed]


def _in_turn(runs: list[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]

    def run() -> list[Any]:
        return [value for once in runs for value in once()]

    return run


def _rlx(w: Workload, threads: int, **options: Any) -> Run:
    """RLX through `bind`: fixed buffers, as a server would run it."""
    from rlx.compile import compile
    from rlx.frontend.onnx import from_onnx

    if w.rlx is not None:
        return w.rlx(threads)
    assert w.graph is not None or w.onnx is not None
    graph = w.graph() if w.graph else from_onnx(w.onnx())  # type: ignore[misc]
    program = compile(graph, threads=threads, **(w.options | options))

    def bound(feed: Arrays) -> Run:
        outputs = program.run(feed)  # its own arrays, reused for every run that follows
        call = program.bind(feed, outputs)

        def run() -> list[np.ndarray]:
            call()
            return list(outputs.values())

        return run

    return _in_turn([bound(feed) for feed in _feeds(w)])


def _onnxruntime(w: Workload, threads: int) -> Run:
    """ONNX Runtime with IO binding and all optimisations."""
    import onnxruntime as ort

    assert w.onnx is not None
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(w.onnx().SerializeToString(), options, providers=["CPUExecutionProvider"])

    def bound(feed: Arrays) -> Run:
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        kept = [np.empty_like(a) for a in session.run(None, feed)]
        for out, array in zip(session.get_outputs(), kept, strict=True):
            binding.bind_output(out.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

        def run() -> list[np.ndarray]:
            session.run_with_iobinding(binding)
            return kept

        return run

    return _in_turn([bound(feed) for feed in _feeds(w)])


def _openvino(w: Workload, threads: int, precision: str = "f32") -> Run:
    """OpenVINO with the latency hint; shapes made static where there is one."""
    import openvino as ov

    assert w.onnx is not None
    core = ov.Core()
    model = core.read_model(w.onnx().SerializeToString())
    if w.sweep is None:
        model.reshape({name: list(a.shape) for name, a in w.feed.items()})
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
    }
    compiled = core.compile_model(model, "CPU", settings)

    def bound(feed: Arrays) -> Run:
        request = compiled.create_infer_request()
        for i, port in enumerate(compiled.inputs):
            request.set_input_tensor(i, ov.Tensor(feed[port.any_name], shared_memory=True))
        count = len(compiled.outputs)

        def run() -> list[np.ndarray]:
            request.infer()
            return [request.get_output_tensor(i).data for i in range(count)]

        return run

    return _in_turn([bound(feed) for feed in _feeds(w)])


def _numpy(w: Workload, threads: int) -> Run:
    assert w.numpy is not None
    return _fastest(w.numpy(w.feed))


def _torch(w: Workload, threads: int) -> Run:
    """PyTorch eager in inference mode, with preallocated results where the workload says how."""
    import torch

    from rlx.bench.framework_ops import interpreted, torch_table

    torch.set_num_threads(threads)
    ways = []
    for feed in _feeds(w):
        tensors = {k: torch.from_numpy(v) for k, v in feed.items()}
        if w.torch is not None:
            found = w.torch(tensors)
        else:
            assert w.onnx is not None
            code = interpreted(w.onnx(), torch_table(), torch.from_numpy)
            found = [functools.partial(code.run, code.weights, tensors)]
        ways.append(_fastest(found))
    once = _in_turn(ways)

    def run() -> Any:
        with torch.no_grad():
            return once()

    return run


def _jax(w: Workload, threads: int) -> Run:
    """jax.jit; the results of the last call are donated, so that memory is reused."""
    import jax
    import jax.numpy as jnp

    from rlx.bench.framework_ops import interpreted, jax_table

    if w.jax is not None:
        return _fastest(w.jax({k: jnp.asarray(v) for k, v in w.feed.items()}))
    assert w.onnx is not None
    code = interpreted(w.onnx(), jax_table(), np.asarray)
    weights = {k: jnp.asarray(v) if v.dtype.kind == "f" else v for k, v in code.weights.items()}
    real = {k: v for k, v in weights.items() if not isinstance(v, np.ndarray)}
    fixed = {
        k: v for k, v in weights.items() if isinstance(v, np.ndarray)
    }  # sizes and axes: known when tracing

    def bound(feed: Arrays) -> Run:
        tensors = {k: jnp.asarray(v.astype(np.int32) if v.dtype == np.int64 else v) for k, v in feed.items()}
        first = jax.jit(lambda r, t: code.run(r | fixed, t))
        again = jax.jit(lambda r, t, old: code.run(r | fixed, t), donate_argnums=2, keep_unused=True)
        kept = [first(real, tensors)]

        def run() -> list[Any]:
            kept[0] = jax.block_until_ready(again(real, tensors, kept[0]))
            return kept[0]

        return run

    return _in_turn([bound(feed) for feed in _feeds(w)])


def _of_onnx(w: Workload) -> bool:
    return w.onnx is not None


ENGINES: dict[str, Engine] = {
    "rlx": Engine("rlx", lambda w: True, _rlx),
    "rlx-f32": Engine("rlx", lambda w: True, lambda w, threads: _rlx(w, threads, precision="f32")),
    "onnxruntime": Engine("onnxruntime", _of_onnx, _onnxruntime),
    "openvino": Engine("openvino", _of_onnx, _openvino),
    "openvino-bf16": Engine("openvino", _of_onnx, lambda w, threads: _openvino(w, threads, "bf16")),
    "torch": Engine("torch", lambda w: w.torch is not None or w.onnx is not None, _torch),
    "jax": Engine("jax", lambda w: w.jax is not None or w.onnx is not None, _jax),
    "numpy": Engine("numpy", lambda w: w.numpy is not None, _numpy),
}


def installed() -> list[str]:
    """Engines whose package is here."""
    return [name for name, engine in ENGINES.items() if engine.installed]
