"""The IO fusion gate: a rewrite stays only when the IO it saves is worth more than what it costs."""

from __future__ import annotations

from dataclasses import field, fields
from types import MappingProxyType

from rlx.cost.profile import FusionBenefit, GraphIoProfile, IoPrices, ceil_ps, fusion_benefit
from rlx.records import dataclass
from rlx.target.prices import DEVICES, Number, Prices, prices_of


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

    @classmethod
    def of(cls, prices: Prices) -> IoFusionGate:
        """The gate of a device."""
        names = [f.name for f in fields(cls) if f.init and hasattr(prices, f.name)]
        return cls(**{name: getattr(prices, name) for name in names})

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


DEFAULT_GATES = MappingProxyType({device: IoFusionGate.of(prices) for device, prices in DEVICES.items()})


def default_gate(device: str) -> IoFusionGate:
    """The gate that ships for `device`.

    >>> default_gate("cpu").unified_memory, default_gate("opencl").unified_memory
    (True, False)
    """
    return IoFusionGate.of(prices_of(device))
