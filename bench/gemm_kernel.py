"""Speed of the GEMM kernels, as a share of the FMA peak measured in the same round.

    python bench/gemm_kernel.py --threads 1 --peers

Every round times the peak loop and then each engine once, so that a change of clock or a noisy neighbour
hits all of them; medians over rounds are printed. Kernels are repeated inside a native loop, so short shapes
measure the kernel and not Python. From peers the time of an almost empty call is taken off.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rlx.codegen.cpu.product.gemm import GemmSpec, emit_gemm
from rlx.codegen.cpu.product.microkernel import Kind, kind_of, tile_of
from rlx.codegen.cpu.product.packing import pack_weights
from rlx.codegen.native.irtext import Function, Int, Module, Value
from rlx.codegen.native.jit import Code, compile_and_load
from rlx.ir.dim import Dim, evaluate, sym
from rlx.target.cpu import Target, resolve

Array = NDArray[Any]
Timer = Callable[[], float]
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8, "i32": np.int32}
SUMS = {"i8": "i32", "u8": "i32"}
WEIGHTS = {"u8": "i8"}

WEIGHT_SHAPES = [(m, 384, 1536) for m in (*range(1, 18), 127, 128, 129)]
WEIGHT_SHAPES += [(128, 384, 384), (128, 1536, 384), (512, 768, 3072), (1024, 1024, 1024), (2048, 2048, 2048)]
WEIGHT_SHAPES += [(127, 383, 1001), (1, 4096, 4096), (3, 77, 13), (33, 100, 17), (5, 1000, 7), (1, 384, 384)]
STRIDED_SHAPES = [  # batch, m, k, n, transposed operands
    (12, 128, 32, 128, "b"),
    (12, 128, 128, 32, ""),
    (12, 127, 64, 127, "b"),
    (12, 127, 127, 64, ""),
    (1, 8, 384, 384, ""),
    (1, 1, 512, 512, ""),
    (1, 128, 384, 1536, ""),
    (1, 127, 383, 1001, ""),
    (1, 3, 77, 13, ""),
    (1, 384, 128, 1536, "a"),
    (1, 1024, 1024, 1024, ""),
    (1, 1024, 1024, 1024, "b"),
    (1, 1024, 1024, 1024, "a"),
    (1, 2048, 2048, 2048, ""),
    (1, 2048, 2048, 2048, "a"),
    (1, 384, 8192, 384, "a"),
]


def empty(shape: tuple[int, ...], dtype: str = "f32") -> Array:
    """Zeroed memory on huge pages where the system gives them, as the runtime allocates it."""
    count, page = int(np.prod(shape)), 2 << 20
    nbytes = max(1, count) * np.dtype(NUMPY[dtype]).itemsize
    region = mmap.mmap(-1, nbytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(region, np.uint8)
    start = -raw.ctypes.data % page
    found: Array = raw[start : start + nbytes].view(NUMPY[dtype])[:count].reshape(shape)
    return found


def filled(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "f32") -> Array:
    out = empty(shape, dtype)
    out[...] = rng.standard_normal(shape, np.float32) * (1 if dtype in ("f32", "bf16") else 20)
    return out


class Team:
    """Python threads that enter native code together; ctypes releases the GIL."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.cpus = sorted(os.sched_getaffinity(0))

    def run(self, work: Callable[[int], object]) -> float:
        """Seconds from the first start to the last end."""
        if self.threads == 1:
            start = time.perf_counter()
            work(0)
            return time.perf_counter() - start
        gate, spans = threading.Barrier(self.threads), [(0.0, 0.0)] * self.threads

        def member(index: int) -> None:
            os.sched_setaffinity(0, {self.cpus[index % len(self.cpus)]})  # of this thread only
            gate.wait()
            start = time.perf_counter()
            work(index)
            spans[index] = (start, time.perf_counter())

        members = [threading.Thread(target=member, args=(i,)) for i in range(self.threads)]
        for thread in members:
            thread.start()
        for thread in members:
            thread.join()
        return max(end for _, end in spans) - min(start for start, _ in spans)


def emit_repeat(module: Module, kernel: str) -> None:
    """repeat(args, thread, threads, n): the kernel n times."""
    fn = module.function("repeat", [("ptr", "args"), ("i64", "thread"), ("i64", "threads"), ("i64", "n")])
    args, thread, threads, n = fn.args

    def once(_: Int, __: list[Value]) -> None:
        fn.call(kernel, [args, thread, threads, 0])

    fn.loop(0, n, 1, [], once)


def emit_peak(module: Module, kind: Kind, chains: int) -> None:
    """peak(p, n): n times `chains` independent multiply-adds on registers."""
    fn = module.function("peak", [("ptr", "p"), ("i64", "n")])
    pointer, n = fn.args
    factor = kind.read_b(fn, pointer, None)
    step = lambda _, totals: [kind.multiply_add(fn, factor, factor, total) for total in totals]  # noqa: E731
    for i, total in enumerate(fn.loop(0, n, 1, [kind.zero] * chains, step)):
        fn.store(total, fn.gep(pointer, i * kind.lanes, kind.accumulator))


class Peak:
    """GFLOP/s of the machine right now."""

    def __init__(self, target: Target, team: Team, dtype: str) -> None:
        rows, vectors = tile_of(dtype, target)
        kind = kind_of(dtype, target)
        self.chains, self.team, self.flops = rows * vectors, team, 2 * kind.lanes * kind.group
        module = Module(target)
        emit_peak(module, kind, self.chains)
        self.code = compile_and_load(module.text(), target)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(self.code.address("peak"))
        self.memory = [empty((self.chains * kind.lanes,)) for _ in range(team.threads)]

    def measure(self, seconds: float = 2e-3) -> float:
        turns = int(seconds * 3.5e9 / self.chains)
        spent = self.team.run(lambda i: self.call(self.memory[i].ctypes.data, turns))
        return self.flops * turns * self.chains * self.team.threads / spent / 1e9


@dataclass
class Kernel:
    """A compiled product with its operands, ready to be timed."""

    code: Code
    args: Array
    team: Team
    keep: tuple[Array, ...]
    call: Any = field(init=False)

    def __post_init__(self) -> None:
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.call = ctypes.CFUNCTYPE(None, *types)(self.code.address("repeat"))

    def seconds(self, times: int) -> float:
        threads, address = self.team.threads, self.args.ctypes.data
        return self.team.run(lambda i: self.call(address, i, threads, times)) / times

    def timer(self) -> Timer:
        """One sample of a few milliseconds, so that threads which start at different times do not matter."""
        times = 1
        while times * min(self.seconds(times) for _ in range(5)) < 3e-3:
            times *= 4
        return lambda: self.seconds(times)


def symbols(*names: str) -> tuple[dict[str, Dim], Callable[[Function, Any], Int]]:
    """Symbolic sizes kept in the argument fields after A, B and C."""
    return {name: sym(name) for name in names}, lambda fn, expr: fn.field(
        fn.args[0], 6 + names.index(str(expr))
    )


def weight_code(target: Target, k: int, n: int, dtype: str) -> Code:
    """One object for every m."""
    size, dim_value = symbols("m")
    module = Module(target)
    spec = GemmSpec(
        size["m"], n, k, (k, 1), (), (n, 1), b_packed=True, dtype=dtype, c_dtype=SUMS.get(dtype, "f32")
    )
    emit_gemm(module, "kernel", spec, dim_value=dim_value)
    emit_repeat(module, "kernel")
    return compile_and_load(module.text(), target)


def strided_code(target: Target, transposed: str, dtype: str) -> tuple[Code, Dim]:
    """One object for every batch, m, n, k and leading stride, and the scratch it needs."""
    names = ("b", "m", "n", "k", "sa", "lda", "sb", "ldb", "sc", "ldc")
    s, dim_value = symbols(*names)
    a = (s["sa"], 1, s["lda"]) if "a" in transposed else (s["sa"], s["lda"], 1)
    b = (s["sb"], 1, s["ldb"]) if "b" in transposed else (s["sb"], s["ldb"], 1)
    spec = GemmSpec(
        s["m"],
        s["n"],
        s["k"],
        a,
        b,
        (s["sc"], s["ldc"], 1),
        batch=(s["b"],),
        dtype=dtype,
        c_dtype=SUMS.get(dtype, "f32"),
    )
    module = Module(target)
    info = emit_gemm(module, "kernel", spec, dim_value=dim_value)
    emit_repeat(module, "kernel")
    return compile_and_load(module.text(), target), info.scratch_bytes_per_thread


def numpy_timer(a: Array, b: Array, out: Array) -> Timer:
    """NumPy with reused memory, net of the call itself."""
    one = np.ones((1, 1), np.float32)
    into = np.ones((1, 1), np.float32)

    def sample(x: Array, y: Array, z: Array, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            np.matmul(x, y, out=z)
        return (time.perf_counter() - start) / times

    times = max(1, int(3e-3 / max(sample(a, b, out, 2), 1e-7)))
    return lambda: max(sample(a, b, out, times) - sample(one, one, into, times), 1e-9)


def onnxruntime_timer(a: Array, b: Array, out: Array, weights: bool, threads: int) -> Timer:
    """ONNX Runtime with bound memory, net of a run of the same length that does nothing."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    def session(
        op: str, inputs: dict[str, Array], constants: dict[str, Array], shape: tuple[int, ...], into: Array
    ) -> Callable[[], object]:
        node = helper.make_node(op, [*inputs, *constants], ["y"])
        graph = helper.make_graph(
            [node],
            "g",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * x.ndim)
                for name, x in inputs.items()
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
            [numpy_helper.from_array(x, name) for name, x in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        made = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = made.io_binding()
        for name, x in inputs.items():
            binding.bind_input(name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, shape, into.ctypes.data)
        kept = (inputs, into)  # the binding holds addresses only

        def run() -> object:
            assert kept
            return made.run_with_iobinding(binding)

        return run

    assert onnx.__version__
    constants = {"b": np.ascontiguousarray(b)} if weights else {}
    inputs = {"a": a} if weights else {"a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)}
    run = session("MatMul", inputs, constants, out.shape, out)
    tiny = np.ones((1, 1), np.float32)
    idle = session("Identity", {"a": tiny}, {}, (1, 1), np.ones((1, 1), np.float32))

    def sample(call: Callable[[], object], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    times = max(1, int(3e-3 / sample(run, 2)))
    return lambda: max(sample(run, times) - sample(idle, times), 1e-9)


def report(label: str, flops: float, peak: Peak, timers: dict[str, Timer], rounds: int) -> None:
    shares: dict[str, list[float]] = {name: [] for name in timers}
    spent: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        top = peak.measure()
        for name, timer in timers.items():
            seconds = timer()
            spent[name].append(seconds)
            shares[name].append(flops / seconds / 1e9 / top)
    ours = statistics.median(spent["rlx"])
    cells = [
        f"{label:34}{ours * 1e6:11.1f} us {flops / ours / 1e9:7.1f} GF"
        f" {100 * statistics.median(shares['rlx']):6.1f} % (best {100 * max(shares['rlx']):5.1f})"
    ]
    cells += [
        f"{name} {statistics.median(times) / ours:5.2f}x" for name, times in spent.items() if name != "rlx"
    ]
    print("  ".join(cells), flush=True)


def peers(args: argparse.Namespace, a: Array, b: Array, out: Array, weights: bool) -> dict[str, Timer]:
    if not args.peers or args.dtype != "f32":
        return {}
    return {"numpy": numpy_timer(a, b, out), "ort": onnxruntime_timer(a, b, out, weights, args.threads)}


def bench_weights(args: argparse.Namespace, target: Target, team: Team, peak: Peak) -> None:
    rng = np.random.default_rng(0)
    codes: dict[tuple[int, int], tuple[Code, Array, Array]] = {}
    for m, k, n in WEIGHT_SHAPES:
        if args.only and args.only not in f"{m}x{k}x{n}":
            continue
        if (k, n) not in codes:
            w = filled(rng, (k, n), WEIGHTS.get(args.dtype, args.dtype))
            flat = pack_weights(w, target, args.dtype)
            packed = empty(flat.shape, WEIGHTS.get(args.dtype, args.dtype))
            packed[...] = flat
            codes[k, n] = (weight_code(target, k, n, args.dtype), w, packed)
        code, w, packed = codes[k, n]
        a, c = filled(rng, (m, k), args.dtype), empty((m, n))
        fields = np.array([0, 0, 0, a.ctypes.data, packed.ctypes.data, c.ctypes.data, m])
        kernel = Kernel(code, fields, team, (a, packed, c))
        timers = {"rlx": kernel.timer(), **peers(args, a, w, empty((m, n)), True)}
        report(f"weights {m}x{k}x{n}", 2.0 * m * k * n, peak, timers, args.rounds)


def bench_strided(args: argparse.Namespace, target: Target, team: Team, peak: Peak) -> None:
    rng = np.random.default_rng(0)
    codes: dict[str, tuple[Code, Dim]] = {}
    for batch, m, k, n, transposed in STRIDED_SHAPES:
        label = f"strided {batch}x{m}x{k}x{n}" + (f" {transposed}^T" if transposed else "")
        if args.only and args.only not in label:
            continue
        if transposed not in codes:
            codes[transposed] = strided_code(target, transposed, args.dtype)
        a = filled(rng, (batch, k, m) if "a" in transposed else (batch, m, k), args.dtype)
        b = filled(rng, (batch, n, k) if "b" in transposed else (batch, k, n), args.dtype)
        code, scratch_bytes = codes[transposed]
        per_thread = -(-evaluate(scratch_bytes, {"k": k}) // 4096) * 4096 + 192
        c, scratch = empty((batch, m, n)), empty((team.threads, per_thread // 4))
        pointers = [0, scratch.ctypes.data, per_thread, a.ctypes.data, b.ctypes.data, c.ctypes.data]
        fields = np.array([*pointers, batch, m, n, k, m * k, a.shape[2], k * n, b.shape[2], m * n, n])
        kernel = Kernel(code, fields, team, (a, b, c, scratch))
        x = a.transpose(0, 2, 1) if "a" in transposed else a
        y = b.transpose(0, 2, 1) if "b" in transposed else b
        timers = {"rlx": kernel.timer(), **peers(args, x, y, empty((batch, m, n)), False)}
        report(label, 2.0 * batch * m * k * n, peak, timers, args.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--target", default="host")
    parser.add_argument("--dtype", choices=("f32", "bf16", "i8", "u8"), default="f32")
    parser.add_argument("--peers", action="store_true", help="also time NumPy and ONNX Runtime")
    parser.add_argument("--only", default="", help="shapes whose label holds this text")
    parser.add_argument("--kind", choices=("all", "weights", "strided"), default="all")
    args = parser.parse_args()
    target, team = resolve(args.target), Team(args.threads)
    peak = Peak(target, team, args.dtype)
    print(
        f"{target.name}, {args.threads} thread(s), peak {max(peak.measure() for _ in range(20)):.1f} GFLOP/s",
        flush=True,
    )
    if args.kind != "strided":
        bench_weights(args, target, team, peak)
    if args.kind != "weights":
        bench_strided(args, target, team, peak)


if __name__ == "__main__":
    main()
