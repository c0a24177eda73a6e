"""The IO fusion gate: a rewrite stays only when the IO it saves is worth more than what it costs."""

from __future__ import annotations

from dataclasses import field, fields
from types import MappingProxyType

from rlx.records import dataclass

from ..errors import DeviceError
from .profile import FusionBenefit, GraphIoProfile, IoPrices, Number, ceil_ps, fusion_benefit


@dataclass(frozen=True)
class IoFusionGate:
    """The constants of a device and the decision rule. Bandwidths are bytes per ns (= GB/s).

    The published decision of the original system, to the digit:

    >>> dense = GraphIoProfile(3, 0, 33_554_432, 184_549_376)
    >>> fused = GraphIoProfile(4, 1, 1_048_576, 219_152_384)
    >>> discrete = IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000)
    >>> discrete.score_ns(fusion_benefit(dense, fused)), discrete.should_fuse(dense, fused)
    (-24566383.68, False)
    """

    dispatch_ns: Number
    roundtrip_ns: Number
    memory_bw: Number
    host_readback_bw: Number
    unified_memory: bool
    host_thunk_penalty_ns: Number
    min_gain_ns: Number
    legacy_unified_readback: bool = False
    _prices: IoPrices = field(init=False, repr=False, compare=False)
    _thunk_penalty_ps: int = field(init=False, repr=False, compare=False)
    _min_gain_ps: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        prices = IoPrices.of(
            self.dispatch_ns,
            self.roundtrip_ns,
            self.memory_bw,
            self.host_readback_bw,
            self.unified_memory,
            self.legacy_unified_readback,
        )
        object.__setattr__(self, "_prices", prices)
        thunk_penalty = ceil_ps("host_thunk_penalty_ns", self.host_thunk_penalty_ns)
        object.__setattr__(self, "_thunk_penalty_ps", thunk_penalty)
        object.__setattr__(self, "_min_gain_ps", ceil_ps("min_gain_ns", self.min_gain_ns))

    def score_ps(self, benefit: FusionBenefit) -> int:
        """Whole picoseconds of IO saved, rounded down; every added host wait costs the thunk penalty."""
        added_syncs = max(0, -benefit.sync_points_saved)
        return self._prices.score_ps(benefit) - added_syncs * self._thunk_penalty_ps

    def score_ns(self, benefit: FusionBenefit) -> float:
        """`score_ps` in nanoseconds."""
        return self.score_ps(benefit) / 1000

    @property
    def least_gain_ps(self) -> int:
        """`min_gain_ns` in picoseconds."""
        return self._min_gain_ps

    def accepts(self, score_ps: int, compute_ps_added: int = 0) -> bool:
        """The verdict on a score: IO saved minus compute added must reach `min_gain_ns`."""
        return score_ps - compute_ps_added >= self._min_gain_ps

    def should_fuse(self, before: GraphIoProfile, after: GraphIoProfile, compute_ps_added: int = 0) -> bool:
        """Whether the rewrite from `before` to `after` pays."""
        return self.accepts(self.score_ps(fusion_benefit(before, after)), compute_ps_added)

    def constants(self) -> dict[str, Number | bool]:
        """The constants in force, by name in declaration order, as the plan text records them.

        >>> default_gate("cpu").constants()["memory_bw"]
        25
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


# Constants that ship. They only have to be right in proportion; `calibrate` measures a given machine.
# Columns: dispatch_ns, roundtrip_ns, memory_bw, host_readback_bw, unified_memory, host_thunk_penalty_ns,
# min_gain_ns.
DEFAULT_GATES = MappingProxyType(
    {
        # Measured, 2-core Zen 4. Dispatch: one record of the native driver and its barrier, 70-500 ns hot.
        # Bandwidth: DRAM reads at 31, sustained mixed traffic somewhat less. Leaving native code: one foreign
        # call (2 us); a host thunk also lets the pool fall asleep, 35-77 us to wake.
        "cpu": IoFusionGate(200, 2_000, 25, 25, True, 80_000, 100),
        # Measured on PoCL: 2 us per batched dispatch, 14 us dispatch + finish, 32 MB copied in 3-8 ms.
        # Kernels run on the host's cores, hence the CPU's memory bandwidth.
        "opencl": IoFusionGate(2_000, 14_000, 25, 8, False, 100_000, 1_000),
        # WebGPU. Overheads measured through wgpu on a software adapter: 29 us per dispatch in a pass, 179 us
        # submit + wait, 4 MB read in 0.5 ms. The memory bandwidth is that of the published discrete gate.
        "gpu": IoFusionGate(29_000, 179_000, 100, 8, False, 1_000_000, 10_000),
        # The original system's published discrete gate; not measured here (no such device).
        "cuda": IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        "rocm": IoFusionGate(3_000, 30_000, 100, 40, False, 25_000_000, 10_000),
        # The original system's published unified gate; not measured here (no such device).
        "metal": IoFusionGate(500, 5_000, 200, 200, True, 2_000_000, 1_000),
        # Not measured: memory bandwidth of a v5e data sheet, PCIe for readback, and a runtime that compiles
        # the whole program, so a launch is cheap and a host wait is dear.
        "tpu": IoFusionGate(1_000, 100_000, 819, 16, False, 25_000_000, 1_000),
        # Measured through wasmtime: 34-55 us per call into the module, once per schedule; kernels inside call
        # each other directly on one thread, and memory is the host's.
        "wasm": IoFusionGate(50, 45_000, 15, 15, True, 100_000, 50),
    }
)


def default_gate(device: str) -> IoFusionGate:
    """The gate that ships for `device`.

    >>> default_gate("cpu").unified_memory, default_gate("opencl").unified_memory
    (True, False)
    """
    try:
        return DEFAULT_GATES[device]
    except KeyError:
        known = ", ".join(DEFAULT_GATES)
        raise DeviceError(f"no gate for device {device!r}; use one of {known}, or pass gate=") from None
