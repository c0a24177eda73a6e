"""What things cost on a device, as data that plans depend on.

They only have to be right in proportion; `rlx.cost.calibrate` measures a given machine. What named CPUs take
to compute values again is among their rates (`rates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from rlx.errors import DeviceError
from rlx.records import dataclass

SMALL_PS = 200_000  # work that is not worth sharing: the others would have to fetch it from this core's cache
FEW_PS = 3_000_000  # work of a whole program that is not worth waking other threads for

Number = int | float
"""An exact quantity of time or bandwidth as users write it."""


@dataclass(frozen=True)
class Prices:
    """Prices of one device. Times are nanoseconds (`_ns`) or picoseconds (`_ps`), bandwidths bytes per ns.

    The first seven are the constants of the fusion gate.
    """

    dispatch_ns: Number
    roundtrip_ns: Number
    memory_bw: Number
    host_readback_bw: Number
    unified_memory: bool
    host_thunk_penalty_ns: Number
    min_gain_ns: Number

    # Computing, roughly: who shares work, and what kernels of a budget take. Per operation of the whole
    # device, with as many cores as are assumed to work.
    elementwise_ps: int = 2
    contraction_ps: int = 1
    cores: int = 2
    store_ps: int = 20  # per byte that one core writes in its caches
    narrow_saved_ps: int = 8  # per multiply-add whose 16-bit operands come two at a time
    bytes_saved: tuple[int, int] = (3, 4)  # part of its time that a matmul of bytes saves, next to f32

    # Prologues: what a kernel computes again for every group of columns, thread or band.
    saved_operations: int = 8  # from which kernels keep a value for the next pass
    shared_rows: int = 128  # of a matmul, from which threads share rows; fewer go to all threads
    group_columns: int = 256  # of a right operand that is not in panels, for which rows are computed together
    band_bytes: int = 1 << 19  # of lines that a convolution computes together
    # Per element that a convolution which could read its image in place gets through scratch
    # (single pixels of 96 x 112 x 112 to 24 channels on two threads: 1.88 ms in two kernels, 1.93 ms in one).
    in_place_ps: int = 360

    # Convolutions, on one core.
    flops: float = 117.0  # per ns
    weight_bytes: float = 15.0  # per ns, read from memory once a run, next to a busy core
    scratch_bytes: float = 30.0  # per ns, written to and read from L2
    exact_bytes: float = 60.0  # the same in smaller strips
    moved_elements: float = 3.0  # per ns, from planar to blocked and back

    # Ranks.
    meeting_ns: Number = 8000
    rank_byte_ns: float = 0.1
    rank_sum_byte_ns: float = 0.25
    rank_contraction_ns: float = 0.02  # per operation
    rank_elementwise_ns: float = 0.03


class Machine(Protocol):
    """What kernels are compiled for."""

    @property
    def name(self) -> str: ...

    @property
    def prices(self) -> Prices: ...

    @property
    def again(self) -> Again: ...


@dataclass(frozen=True)
class Again:
    """What the gate charges for computing values again, in femtoseconds of the whole device per element."""

    operation_fs: int  # an instruction of elementwise code
    reload_fs: int  # keeping a value for the next pass over a row, and loading it there
    gather_fs: int  # a value that is loaded by itself
    index_fs: int  # an operation on its index

    @classmethod
    def of(cls, prices: Prices) -> Again:
        """Of a device whose instructions are not known one by one: each takes as long as an operation."""
        operation = 1000 * prices.elementwise_ps
        return cls(operation, 2 * operation, 0, operation)


DEVICES: Mapping[str, Prices] = MappingProxyType(
    {
        # Measured, 2-core Zen 4. Dispatch: one record of the native driver and its barrier, 70-500 ns hot.
        # Bandwidth: DRAM reads at 31, sustained mixed traffic somewhat less. Leaving native code: one foreign
        # call (2 us); a host thunk also lets the pool fall asleep, 35-77 us to wake. Vector code reaches
        # about 70 operations per ns on maps and 300 on matmuls.
        "cpu": Prices(200, 2_000, 25, 25, True, 80_000, 100, elementwise_ps=15, contraction_ps=4),
        # Measured on PoCL: 2 us per batched dispatch, 14 us dispatch + finish, 32 MB copied in 3-8 ms.
        # Kernels run on the host's cores, hence the CPU's memory bandwidth; against native programs, maps
        # take 3.7 times, matmuls 2.5 times as long.
        "opencl": Prices(2_000, 14_000, 25, 8, False, 100_000, 1_000, elementwise_ps=55, contraction_ps=10),
        # WebGPU. Overheads measured through wgpu on a software adapter: 29 us per dispatch in a pass, 179 us
        # submit + wait, 4 MB read in 0.5 ms. The memory bandwidth is that of the published discrete gate.
        "gpu": Prices(29_000, 179_000, 100, 8, False, 1_000_000, 10_000),
        # The original system's published discrete gate; not measured here (no such device).
        "cuda": Prices(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        "rocm": Prices(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        # The original system's published unified gate; not measured here (no such device).
        "metal": Prices(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        # Not measured: memory bandwidth of a v5e data sheet, PCIe for readback, and a runtime that compiles
        # the whole program, so a launch is cheap and a host wait is dear.
        "tpu": Prices(1_000, 100_000, 819, 16, False, 25_000_000, 1_000),
        # Measured through wasmtime: 34-55 us per call into the module, once per schedule; kernels inside call
        # each other directly on one thread, and memory is the host's.
        "wasm": Prices(50, 45_000, 15, 15, True, 100_000, 50),
    }
)


def prices_of(device: str) -> Prices:
    """The prices that ship for a device.

    >>> prices_of("cpu").memory_bw, prices_of("opencl").unified_memory
    (25, False)
    """
    try:
        return DEVICES[device]
    except KeyError:
        known = ", ".join(DEVICES)
        raise DeviceError(f"no prices for device {device!r}; use one of {known}, or pass gate=") from None
