"""What the machine can do right now: multiply-adds on registers, and plain reads and copies of memory.

They run in RLX's process, each right after a timing of RLX and for as long: shares are of the same moments.
"""

from __future__ import annotations

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.product.microkernel import kind_of, tile_of
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.codegen.native.jit import compile_and_load
from rlx.records import dataclass
from rlx.runtime.memory import PAGE, allocate
from rlx.runtime.native.driver import NativeProgram, Record
from rlx.target.cpu import Target, resolve
from rlx_bench.workloads.base import Run, Workload

_FIELD = 3  # the first field of a kernel's arguments that is its own
_UNROLL = 8


@dataclass(frozen=True)
class Yardstick:
    """A native loop and how much it does in one run: flops or bytes."""

    run: Run
    amount: float


def _kernel(module: Module, name: str) -> Function:
    return module.function(name, KERNEL_ARGS)


def peak(target: Target, threads: int, dtype: str = "f32", turns: int = 2_000_000) -> Yardstick:
    """Independent multiply-adds on registers, on every thread."""
    rows, vectors = tile_of(dtype, target)
    kind, chains = kind_of(dtype, target), rows * vectors
    room = chains * kind.lanes * 4
    module = Module(target)
    fn = _kernel(module, "peak")
    place = fn.gep(fn.field(fn.args[0], _FIELD, "ptr"), fn.mul(fn.args[1], room), "i8")
    factor = kind.read_b(fn, place, None)
    step = lambda _, totals: [kind.multiply_add(fn, factor, factor, total) for total in totals]  # noqa: E731
    for i, total in enumerate(fn.loop(0, turns // chains, 1, [kind.zero] * chains, step)):
        fn.store(total, fn.gep(place, i * kind.lanes, kind.accumulator))
    memory = allocate(room * threads)
    amount = 2.0 * kind.lanes * kind.group * (turns // chains) * chains * threads
    return Yardstick(_program(module, "peak", [memory.address], threads, memory), amount)


def stream(target: Target, threads: int, nbytes: int, writes: bool) -> list[Yardstick]:
    """Read `nbytes` of memory, and with `writes` store as many: once through the caches, once past them.

    Stores begin in the middle of a page, as RLX's large outputs do: a load with the last 12 address bits of a
    recent store waits for it, which makes a copy between two beginnings of pages 10 % slower.
    """
    source, sink = allocate(nbytes), allocate((nbytes if writes else 1 << 16) + PAGE // 2)
    source.array[:] = 1
    sink.array[:] = 1
    found = []
    for past_caches in (False, True) if writes else (False,):
        module = Module(target)
        fn = _kernel(module, "stream")
        lanes = target.lanes("f32")
        type_, block = vector("float", lanes), _UNROLL * lanes * 4
        blocks = nbytes // block
        _, thread, count, _ = fn.args
        begin, end = (fn.mul(fn.udiv(fn.mul(fn.add(thread, k), blocks), count), block) for k in (0, 1))
        reads, stores = fn.field(fn.args[0], _FIELD, "ptr"), fn.field(fn.args[0], _FIELD + 1, "ptr")

        def step(at: Int, sums: list[Value]) -> list[Value]:
            places = [fn.add(at, i * lanes * 4) for i in range(_UNROLL)]  # noqa: B023
            values = [fn.load(type_, fn.gep(reads, p, "i8")) for p in places]  # noqa: B023
            if not writes:
                return [fn.fadd(total, value) for total, value in zip(sums, values, strict=True)]  # noqa: B023
            for value, p in zip(values, places, strict=True):
                fn.store(value, fn.gep(stores, p, "i8"), align=64, nontemporal=past_caches)  # noqa: B023
            return []

        sums = fn.loop(begin, end, block, [] if writes else [constant(type_, 0.0)] * _UNROLL, step)
        for i, total in enumerate(sums):
            fn.store(total, fn.gep(stores, i * lanes, "float"))
        fields = [source.address, sink.address + PAGE // 2]
        run = _program(module, "stream", fields, threads, (source, sink))
        found.append(Yardstick(run, float(blocks * block * (2 if writes else 1))))
    return found


def _program(module: Module, name: str, fields: list[int], threads: int, keep: object) -> Run:
    code = compile_and_load(module.text(), module.target)
    record = Record(code.address(name), _FIELD + len(fields))
    program = NativeProgram([record], threads, keep=(code, keep))
    program.args(0)[_FIELD:] = fields
    return program.run


def yardsticks(w: Workload, threads: int) -> list[Yardstick]:
    """Those that bound a workload; of several the best counts."""
    target = resolve("host")
    if w.bytes:
        nbytes = int(min(max(w.bytes / (2 if w.writes else 1), 1 << 20), 256 << 20))
        return stream(target, threads, nbytes, w.writes)
    return [peak(target, threads, w.dtype)] if w.flops else []


def peaks(threads: int) -> dict[str, list[Yardstick]]:
    """Those that do not depend on a workload: f32 multiply-adds, and ways to copy more than caches hold."""
    target = resolve("host")
    return {"flops": [peak(target, threads)], "copy": stream(target, threads, 128 << 20, writes=True)}
