"""What one forward pass moves: launches, host waits, bytes; and what a rewrite saves of it, in time.

Everything is an integer. Money is picoseconds: prices given as ns or bytes per ns (ints or floats) become
exact fractions over one common denominator, so a score is one integer dot product and one floor division.
The same model therefore gets the same decisions on every machine.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from fractions import Fraction
from functools import lru_cache

from rlx.errors import ConfigError
from rlx.records import dataclass
from rlx.target.prices import Number


@dataclass(frozen=True, slots=True)
class GraphIoProfile:
    """Predicted IO of one forward pass; profiles add, so a candidate is scored by its region alone.

    >>> matmul, gelu = GraphIoProfile(1, 0, 0, 3_000), GraphIoProfile(1, 0, 0, 2_000)
    >>> matmul + gelu
    GraphIoProfile(kernel_launches=2, sync_points=0, host_output_bytes=0, device_traffic_bytes=5000)
    >>> (matmul + gelu) - gelu == matmul and gelu * 12 == GraphIoProfile(12, 0, 0, 24_000)
    True
    """

    kernel_launches: int = 0
    sync_points: int = 0
    host_output_bytes: int = 0
    device_traffic_bytes: int = 0

    def __add__(self, other: GraphIoProfile) -> GraphIoProfile:
        return GraphIoProfile(
            self.kernel_launches + other.kernel_launches,
            self.sync_points + other.sync_points,
            self.host_output_bytes + other.host_output_bytes,
            self.device_traffic_bytes + other.device_traffic_bytes,
        )

    def __sub__(self, other: GraphIoProfile) -> GraphIoProfile:
        return self + other * -1

    def __mul__(self, times: int) -> GraphIoProfile:
        """The profile of a loop body that runs `times` times."""
        return GraphIoProfile(
            self.kernel_launches * times,
            self.sync_points * times,
            self.host_output_bytes * times,
            self.device_traffic_bytes * times,
        )

    def as_tuple(self) -> tuple[int, int, int, int]:
        """The four counts in field order, as plans and JSON write them."""
        launches, syncs, readback, traffic = astuple(self)
        return launches, syncs, readback, traffic


@dataclass(frozen=True, slots=True)
class FusionBenefit:
    """What a rewrite saves; positive helps, negative hurts.

    >>> saved = FusionBenefit(launches_saved=1, sync_points_saved=0,
    ...                       host_readback_bytes_saved=0, device_traffic_bytes_saved=4_000)
    >>> saved.score_ns(200, 2_000, memory_bw=25, host_readback_bw=25, unified_memory=True)
    360.0
    >>> saved.should_fuse(200, 2_000, 25, 25, True, min_gain_ns=400)
    False
    """

    launches_saved: int = 0
    sync_points_saved: int = 0
    host_readback_bytes_saved: int = 0
    device_traffic_bytes_saved: int = 0

    def score_ns(
        self,
        dispatch_ns: Number,
        roundtrip_ns: Number,
        memory_bw: Number,
        host_readback_bw: Number,
        unified_memory: bool,
        legacy_unified_readback: bool = False,
    ) -> float:
        """The plain score, without the penalty that the gate sets on added host waits."""
        prices = IoPrices.of(
            dispatch_ns, roundtrip_ns, memory_bw, host_readback_bw, unified_memory, legacy_unified_readback
        )
        return prices.score_ps(self) / 1000

    def should_fuse(
        self,
        dispatch_ns: Number,
        roundtrip_ns: Number,
        memory_bw: Number,
        host_readback_bw: Number,
        unified_memory: bool,
        min_gain_ns: Number,
        legacy_unified_readback: bool = False,
    ) -> bool:
        """True when the plain score reaches `min_gain_ns`."""
        prices = IoPrices.of(
            dispatch_ns, roundtrip_ns, memory_bw, host_readback_bw, unified_memory, legacy_unified_readback
        )
        return prices.score_ps(self) >= ceil_ps("min_gain_ns", min_gain_ns)


def fusion_benefit(before: GraphIoProfile, after: GraphIoProfile) -> FusionBenefit:
    """What going from `before` to `after` saves.

    >>> fusion_benefit(GraphIoProfile(3, 0, 8, 100), GraphIoProfile(1, 1, 8, 40)).device_traffic_bytes_saved
    60
    """
    return FusionBenefit(
        before.kernel_launches - after.kernel_launches,
        before.sync_points - after.sync_points,
        before.host_output_bytes - after.host_output_bytes,
        before.device_traffic_bytes - after.device_traffic_bytes,
    )


@dataclass(frozen=True, slots=True)
class IoPrices:
    """Picoseconds per launch, host wait and byte, as integers over one common `denominator`."""

    launch: int
    sync: int
    readback_byte: int
    traffic_byte: int
    denominator: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        dispatch_ns: Number,
        roundtrip_ns: Number,
        memory_bw: Number,
        host_readback_bw: Number,
        unified_memory: bool,
        legacy_unified_readback: bool = False,
    ) -> IoPrices:
        """Exact prices of a device; a bandwidth that is not a positive finite number is refused."""
        traffic = 1 / _bandwidth("memory_bw", memory_bw)
        readback = 1 / _bandwidth("host_readback_bw", host_readback_bw)
        if unified_memory:
            # The host reads the device's own memory: nothing is copied. The original system billed it at
            # 1 byte per ns all the same; the flag keeps its published decisions reproducible.
            readback = Fraction(1 if legacy_unified_readback else 0)
        prices = [
            exact_ns("dispatch_ns", dispatch_ns) * 1000,
            exact_ns("roundtrip_ns", roundtrip_ns) * 1000,
            readback * 1000,
            traffic * 1000,
        ]
        denominator = math.lcm(*(price.denominator for price in prices))
        launch, sync, readback_byte, traffic_byte = (int(price * denominator) for price in prices)
        return IoPrices(launch, sync, readback_byte, traffic_byte, denominator)

    def score_ps(self, benefit: FusionBenefit) -> int:
        """The time that `benefit` saves, rounded down once, after the exact sum."""
        total = (
            benefit.launches_saved * self.launch
            + benefit.sync_points_saved * self.sync
            + benefit.host_readback_bytes_saved * self.readback_byte
            + benefit.device_traffic_bytes_saved * self.traffic_byte
        )
        return total // self.denominator


def exact_ns(name: str, value: Number) -> Fraction:
    """`value` as an exact fraction; refuses negative, infinite and NaN times."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value!r}; give a finite time in ns that is not negative")
    return Fraction(value)


def ceil_ps(name: str, value: Number) -> int:
    """The smallest whole number of picoseconds that is at least `value` ns.

    >>> ceil_ps("min_gain_ns", 0.0625)
    63
    """
    return math.ceil(exact_ns(name, value) * 1000)


def _bandwidth(name: str, value: Number) -> Fraction:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}; give a positive bandwidth in bytes per ns (= GB/s)")
    return Fraction(value)
