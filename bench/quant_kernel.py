"""Speed of products with weights of 4, 6 and 8 bits, as a share of the read bandwidth of the same round.

    python bench/quant_kernel.py --threads 1 --peers
    python bench/quant_kernel.py --precision i8 --shape 128 576 1536 --shape 1 576 1536

Several copies of the weights are used in turn, so that they come from memory and not from a cache. The peer
is ONNX Runtime's MatMulNBits, in f32 and with activations rounded to 8 bits (accuracy level 4).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gemm_kernel import Array, Team, empty
from rlx.codegen.cpu.product.quant_gemm import emit_quant_gemm, quant_layout
from rlx.codegen.native.irtext import Int, Module, Value, constant, vector
from rlx.codegen.native.jit import Code, compile_and_load
from rlx.ir.dim import sym
from rlx.target.cpu import Target, resolve

COPIES_BYTES = 160 << 20
SHAPES = [(1, 4096, 4096), (2, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096), (128, 4096, 4096)]


def emit_read(module: Module) -> None:
    """read(p, n): sum n bytes with plain vector loads, to see what memory gives."""
    fn = module.function("read", [("ptr", "p"), ("i64", "n")])
    pointer, n = fn.args
    lanes, chains = module.target.lanes("f32"), 8
    type_ = vector("float", lanes)

    def step(at: Int, sums: list[Value]) -> list[Value]:
        places = [fn.gep(fn.gep(pointer, at, "i8"), i * lanes, "float") for i in range(chains)]
        return [fn.fadd(total, fn.load(type_, place)) for total, place in zip(sums, places, strict=True)]

    sums = fn.loop(0, n, chains * lanes * 4, [constant(type_, 0.0)] * chains, step)
    sink = fn.alloca(type_)
    for total in sums:
        fn.store(total, sink)


class Bench:
    """Weights in several copies, the kernel, and the plain read of the same bytes."""

    def __init__(self, target: Target, team: Team, k: int, n: int, bits: int, args: Any) -> None:
        self.team, self.k, self.n, self.bits, self.group = team, k, n, bits, args.group
        self.layout = quant_layout(k, n, target, bits, args.group, "f16", precision=args.precision)
        rng = np.random.default_rng(0)
        low = -(1 << (bits - 1))
        self.q = rng.integers(low, -low, (k, n)).astype(np.int8)
        self.scales = rng.uniform(0.01, 0.02, (self.layout.groups, n)).astype(np.float16)
        packed = self.layout.pack(self.q, self.scales)
        self.copies = max(2, COPIES_BYTES // packed.nbytes)
        self.memory = empty((self.copies, -(-packed.nbytes // 4))).view(np.uint8)
        self.memory[:, : packed.nbytes] = packed
        module = Module(target)
        emit_read(module)
        dim_value = lambda fn, _: fn.field(fn.args[0], 6)  # noqa: E731
        info = emit_quant_gemm(
            module, "kernel", sym("m"), self.layout, dim_value=dim_value, precision=args.precision
        )
        self.scratch_bytes = info.scratch_bytes_per_thread
        self.scratch = empty((team.threads * self.scratch_bytes // 4,))
        self.code: Code = compile_and_load(module.text(), target)
        word = ctypes.c_int64
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, word, word, word)(self.code.address("kernel"))
        self.read_call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, word)(self.code.address("read"))
        self.turn = 0

    def next_copy(self) -> Array:
        self.turn = (self.turn + 1) % self.copies
        copy: Array = self.memory[self.turn]
        return copy

    def product(self, a: Array, c: Array) -> float:
        """Seconds of one product."""
        pointers = [a.ctypes.data, self.next_copy().ctypes.data, c.ctypes.data]
        table = np.array([0, self.scratch.ctypes.data, self.scratch_bytes, *pointers, len(a)], np.int64)
        threads = self.team.threads
        return self.team.run(lambda i: self.call(table.ctypes.data, i, threads, 0))

    def read(self) -> float:
        """Bytes per second of a plain read of the weights."""
        copy, threads = self.next_copy(), self.team.threads
        part = self.layout.nbytes // threads // 512 * 512
        return part * threads / self.team.run(lambda i: self.read_call(copy.ctypes.data + i * part, part))

    def reference(self, a: Array) -> Array:
        spread = np.repeat(self.scales.astype(np.float64), self.group, axis=0)[: self.k]
        wanted: Array = a.astype(np.float64) @ (self.q * spread)
        return wanted


def onnxruntime_timer(bench: Bench, a: Array, level: int, threads: int) -> tuple[Callable[[], float], Array]:
    """MatMulNBits over as many weight copies; seconds of one product, and its result."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    k, n, group = bench.k, bench.n, bench.group
    codes = (
        (bench.q.astype(np.int32) + (1 << (bench.bits - 1))).astype(np.uint8).T.reshape(n, k // group, group)
    )
    if bench.bits == 4:
        codes = (codes[:, :, 0::2] | codes[:, :, 1::2] << 4).astype(np.uint8)
    scales = np.ascontiguousarray(bench.scales.astype(np.float32).T)
    sessions = []
    out = np.zeros((len(a), n), np.float32)
    attributes = {"K": k, "N": n, "bits": bench.bits, "block_size": group, "accuracy_level": level}
    for _ in range(bench.copies):
        node = helper.make_node("MatMulNBits", ["a", "b", "s"], ["y"], domain="com.microsoft", **attributes)
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("a", TensorProto.FLOAT, [None, k])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, n])],
            [numpy_helper.from_array(codes, "b"), numpy_helper.from_array(scales, "s")],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        made = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = made.io_binding()
        binding.bind_input("a", "cpu", 0, np.float32, a.shape, a.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        sessions.append((made, binding))
    turn = 0

    def once() -> float:
        nonlocal turn
        turn = (turn + 1) % len(sessions)
        made, binding = sessions[turn]
        start = time.perf_counter()
        made.run_with_iobinding(binding)
        return time.perf_counter() - start

    once()
    return once, out


def error(found: Array, wanted: Array) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def report(args: argparse.Namespace, bench: Bench, m: int) -> None:
    a = np.random.default_rng(1).standard_normal((m, bench.k), np.float32)
    c = np.zeros((m, bench.n), np.float32)
    bench.product(a, c)
    wanted = bench.reference(a)
    timers: dict[str, Callable[[], float]] = {"rlx": lambda: bench.product(a, c)}
    notes = f"error {error(c, wanted):.0e}"
    outputs = []  # kept, because ONNX Runtime writes into them
    for level in (0, 4) if args.peers and bench.bits != 6 else ():
        timers[f"ort{level}"], out = onnxruntime_timer(bench, a, level, args.threads)
        outputs.append(out)
        notes += f", ort{level} {error(out, wanted):.0e}"
    spent: dict[str, list[float]] = {name: [] for name in timers}
    shares: list[float] = []
    for _ in range(args.rounds):
        top = bench.read()
        for name, timer in timers.items():
            spent[name].append(timer())
        shares.append(bench.layout.nbytes / spent["rlx"][-1] / top)
    ours = statistics.median(spent["rlx"])
    ratios = "  ".join(f"{x} {statistics.median(t) / ours:.2f}x" for x, t in spent.items() if x != "rlx")
    label = f"int{bench.bits} {m}x{bench.k}x{bench.n}"
    bandwidth, flops = bench.layout.nbytes / ours / 1e9, 2 * m * bench.k * bench.n / ours / 1e9
    print(
        f"{label:20}{ours * 1e6:10.1f} us {bandwidth:6.1f} GB/s"
        f" {100 * statistics.median(shares):5.1f} % of reading"
        f" {flops:6.1f} GF  {ratios}  {notes}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--target", default="host")
    parser.add_argument("--precision", choices=("f32", "bf16", "i8"), default="f32")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--bits", type=int, action="append", choices=(4, 6, 8))
    parser.add_argument("--peers", action="store_true", help="also time ONNX Runtime")
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "K", "N"))
    args = parser.parse_args()
    target, team = resolve(args.target), Team(args.threads)
    for bits in args.bits or (4, 6, 8):
        for m, k, n in args.shape or SHAPES:
            report(args, Bench(target, team, k, n, bits, args), m)


if __name__ == "__main__":
    main()
