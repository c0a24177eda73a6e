"""Engines that run a workload. Each is made in a process of its own, at its best documented settings.

Where documentation leaves a choice, a few timings of each decide; `choices` tells what was taken.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.records import dataclass
from rlx_bench.workloads.base import Arrays, Run, Workload


@dataclass(frozen=True)
class Engine:
    """`prepare(workload, threads)` gives what is timed; `can` says whether the workload has a way for it.
    `settings` is how it is run, in words. `to_avx2` are variables that keep it to AVX2; None if none do."""

    package: str
    can: Callable[[Workload], bool]
    prepare: Callable[[Workload, int], Run]
    settings: str = ""
    to_avx2: Mapping[str, str] | None = None

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


choices: list[str] = []
"""What was chosen for the workload that is being prepared in this process."""

beyond: list[str] = []
"""Wider instructions than it was limited to, which the engine uses for that workload."""


def _fastest(ways: list[Run], names: Sequence[str] = ()) -> Run:
    """The best of several ways to say the same, by a few timings of each."""

    def spent(way: Run) -> float:
        way()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
        return min(times)

    if len(ways) == 1:
        return ways[0]
    times = [spent(way) for way in ways]
    best = times.index(min(times))
    choices.append(names[best] if names else f"way {best + 1} of {len(ways)}")
    return ways[best]


def _in_turn(runs: list[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]

    def run() -> list[Any]:
        return [value for once in runs for value in once()]

    return run


def _rlx(w: Workload, threads: int, **options: Any) -> Run:
    """RLX through `bind`, with fixed buffers as a server would run it, or through `run`."""
    from rlx.api.compile import compile

    program = compile(w.as_graph(), threads=threads, **(w.options | options))

    def bound(feed: Arrays) -> Run:
        read = {name: feed[name] for name in program.input_names}  # one model does not read all its inputs
        if w.by_run:
            return lambda: list(program.run(read).values())
        outputs = program.run(read)  # its own arrays, reused for every run that follows
        call = program.bind(read, outputs)

        def run() -> list[np.ndarray]:
            call()
            return list(outputs.values())

        return run

    return _in_turn([bound(feed) for feed in w.feeds])


def _onnxruntime(w: Workload, threads: int) -> Run:
    """ONNX Runtime with all optimisations, and IO binding unless `run` is measured."""
    import onnxruntime as ort

    model = w.source()

    def session_with(**entries: str) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        for key, value in entries.items():
            options.add_session_config_entry(f"session.{key}", value)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def bound(session: Any, feed: Arrays) -> Run:
        if w.by_run:
            return lambda: session.run(None, feed)
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

    ways = [session_with()]
    if threads > 1:  # how finely work is cut is a choice that its documentation leaves
        ways.append(session_with(dynamic_block_base="4"))
    names = ["plain", "dynamic_block_base=4"]
    return _fastest([_in_turn([bound(way, feed) for feed in w.feeds]) for way in ways], names)


def _openvino(w: Workload, threads: int, precision: str = "f32") -> Run:
    """OpenVINO with the latency hint; shapes made static where there is one.

    Next to weights of 4 or 8 bits it rounds f32 to 8 bits, whatever the precision hint; a group of 0 turns
    that off.
    """
    import openvino as ov

    core = ov.Core()
    model = core.read_model(w.source())
    if w.sweep is None:
        model.reshape({port.any_name: list(w.feed[port.any_name].shape) for port in model.inputs})
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    compiled = core.compile_model(model, "CPU", settings)
    if os.environ.keys() >= _ONEDNN.keys():
        names = {
            str(op.get_rt_info()["primitiveType"].value) for op in compiled.get_runtime_model().get_ops()
        }
        beyond.extend(sorted(name for name in names if re.search("avx512|amx|mlas", name)))

    def bound(feed: Arrays) -> Run:
        if w.by_run:
            return lambda: list(compiled(feed, share_inputs=True, share_outputs=True).values())
        request = compiled.create_infer_request()
        for i, port in enumerate(compiled.inputs):
            request.set_input_tensor(i, ov.Tensor(feed[port.any_name], shared_memory=True))
        count = len(compiled.outputs)

        def run() -> list[np.ndarray]:
            request.infer()
            return [request.get_output_tensor(i).data for i in range(count)]

        return run

    return _in_turn([bound(feed) for feed in w.feeds])


def _numpy(w: Workload, threads: int) -> Run:
    assert w.numpy is not None
    return _fastest(w.numpy(w.feed))


def _torch(w: Workload, threads: int) -> Run:
    """PyTorch eager in inference mode, with preallocated results where the workload says how."""
    import torch

    from rlx_bench.framework_ops import interpreted, torch_table

    torch.set_num_threads(threads)
    ways = []
    for feed in w.feeds:
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


def _torch_compile(w: Workload, threads: int) -> Run:
    """The model traced at its sizes, torch.compile with frozen weights; compiling is not timed."""
    import torch
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    from rlx_bench.framework_ops import interpreted, torch_table

    assert w.onnx is not None
    torch.set_num_threads(threads)
    config.freezing, config.compile_threads = True, 1  # no compiler processes that outlive the preparation
    # Constants of one element are numbers: the compiler's own pattern for attention wants its scale so.
    at_least = {"Max": lambda a, b: a.clamp(min=b) if isinstance(b, float) else torch.maximum(a, b)}
    code = interpreted(
        w.onnx(),
        torch_table() | at_least,
        lambda a: float(a.item()) if a.size == 1 and a.dtype.kind == "f" else torch.from_numpy(a),
    )
    names = list(w.feed)
    tensors = [torch.from_numpy(w.feed[name]) for name in names]
    with torch.no_grad():
        traced = make_fx(lambda *given: code.run(code.weights, dict(zip(names, given, strict=True))))(
            *tensors
        )
        try:
            config.pattern_matcher = True
            model = torch.compile(traced)
            model(*tensors)
        except torch._dynamo.exc.BackendCompilerFailed:  # its pattern for attention with a mask may fail
            choices.append("pattern matcher off, which fails")
            torch._dynamo.reset()
            config.pattern_matcher = False
            model = torch.compile(traced)

    def run() -> Any:
        with torch.no_grad():
            return model(*tensors)

    return run


def _jax(w: Workload, threads: int) -> Run:
    """jax.jit; the results of the last call are donated, so that memory is reused."""
    import jax
    import jax.numpy as jnp

    from rlx_bench.framework_ops import interpreted, jax_table

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

    return _in_turn([bound(feed) for feed in w.feeds])


def _of_onnx(w: Workload) -> bool:
    return w.onnx is not None


TORCH_COMPILE = "torch-compile"
_ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
_TORCH = {**_ONEDNN, "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_NUMPY = {"OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX"}

ENGINES: dict[str, Engine] = {
    "rlx": Engine("rlx", lambda w: True, _rlx, "buffers bound once", {}),
    "rlx-f32": Engine(
        "rlx", lambda w: True, lambda w, threads: _rlx(w, threads, precision="f32"), "in f32", {}
    ),
    "onnxruntime": Engine(
        "onnxruntime", _of_onnx, _onnxruntime, "IO binding, all optimisations, spinning threads"
    ),
    "openvino": Engine(
        "openvino",
        _of_onnx,
        _openvino,
        "latency hint, f32, activations not rounded to 8 bits, shapes made static, shared input memory",
        _ONEDNN,
    ),
    "openvino-bf16": Engine(
        "openvino",
        _of_onnx,
        lambda w, threads: _openvino(w, threads, "bf16"),
        "latency hint, bf16",
        _ONEDNN,
    ),
    "torch": Engine(
        "torch",
        lambda w: w.torch is not None or w.onnx is not None,
        _torch,
        "eager without gradients, results in reused memory where there is a way",
        _TORCH,
    ),
    TORCH_COMPILE: Engine(
        "torch",
        lambda w: _of_onnx(w) and w.sweep is None,
        _torch_compile,
        "torch.compile, weights frozen",
        _TORCH,
    ),
    "jax": Engine(
        "jax",
        lambda w: w.jax is not None or w.onnx is not None,
        _jax,
        "jax.jit, memory of the last results donated",
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    ),
    "numpy": Engine("numpy", lambda w: w.numpy is not None, _numpy, "results in reused memory", _NUMPY),
}


def installed() -> list[str]:
    """Engines whose package is here."""
    return [name for name, engine in ENGINES.items() if engine.installed]
