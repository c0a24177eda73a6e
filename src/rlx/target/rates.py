"""How fast a named target is: instructions, caches, cores. `explain` predicts times of kernels with them.

Plans depend on four of these numbers: the gate charges an operation, a load, an element loaded by itself and
an operation on its index when a kernel computes values again (`Target.again`). A change of those may change
plans. All others may follow the machines that people have. They say what code of RLX reaches on one core, not
what a data sheet promises. Times of instructions are for a vector of the target's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from rlx.records import dataclass


@dataclass(frozen=True)
class Rates:
    """What one core of a target does in which time. Names end in `_ps` for picoseconds, and in `_rate` for
    bytes per nanosecond."""

    # Instructions.
    fma_ps: float  # a multiply-add of a register tile
    chain_ps: float  # from one addition to the next of the same sum
    op_ps: float  # a simple operation of an elementwise body
    load_ps: float  # a vector that is loaded or stored
    gather_ps: float  # an element that is loaded or stored by itself
    index_ps: float  # an operation on the index of one lane, where every lane has its own
    window: float  # operations of a chain next to which other points are computed: longer chains wait
    byte_pairs: (
        float  # multiply-adds whose time it takes to multiply pairs of bytes, without an instruction for it
    )

    # Loops and calls.
    call_ps: float  # a register tile: sums set to zero and handed on
    row_ps: float  # a row of a loop nest
    loop_ps: float  # a short loop inside others: the jump out of it
    divide_ps: float  # a division of an index by a size that only the run knows
    combine_ps: float  # the lanes of a reduction, combined
    launch_ps: float  # a kernel

    # Caches and memory.
    l1_rate: float
    l2_rate: float
    l3_rate: float
    memory_rate: float
    all_memory_rate: float  # of all cores together
    strided: float  # times as long for lines that no prefetcher asks for
    l1_ways: int
    l2_ways: int

    # Other cores.
    fetched_rate: float  # lines that another core has
    taken_rate: float  # lines to write of which others have copies, too
    stores: int  # that wait for their lines while the core goes on
    far_ps: float  # until the first line comes that is in memory
    core_ps: float  # until the first line comes that another core has
    near_ps: float  # until a line of code comes that is in L3
    l3_ps: float  # after which others that share L3 have taken most of what nobody touched


# Measured on two cores of an EPYC of family 26 (Zen 5, 4.4 GHz), with the code for 512-bit vectors and, as
# RLX_HOST=x86-64-v3, with that for 256-bit ones: the same times, of twice as many instructions.
# A core of Zen 3 has three quarters of the multiply-adds (103 GFLOP/s) and copies at 41 GB/s, this one at 47.
_ZEN5 = Rates(
    fma_ps=113,
    chain_ps=900,
    op_ps=140,
    load_ps=230,
    gather_ps=400,
    index_ps=40,
    window=27,
    byte_pairs=1.25,
    call_ps=12_000,
    row_ps=800,
    loop_ps=5_000,
    divide_ps=3_000,
    combine_ps=5_000,
    launch_ps=25_000,
    l1_rate=250,
    l2_rate=220,
    l3_rate=120,
    memory_rate=22,
    all_memory_rate=42,
    strided=3.0,
    l1_ways=8,
    l2_ways=16,
    fetched_rate=44,
    taken_rate=45,
    stores=104,
    far_ps=100_000,
    core_ps=30_000,
    near_ps=12_000,
    l3_ps=2_500_000_000,
)
# Not measured: a core of half the clock, as phones, small servers and browsers have it.
_SLOWER = replace(
    _ZEN5,
    **{
        name: 2 * getattr(_ZEN5, name)
        for name in ("fma_ps", "chain_ps", "op_ps", "load_ps", "gather_ps", "index_ps")
    },
)
RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "x86-64-v4-amx": _ZEN5,  # not measured: as if it multiplied with VNNI and BF16 of AVX-512
        "x86-64-v4-bf16-vnni": _ZEN5,
        "x86-64-v4": _ZEN5,
        "x86-64-v3-vnni": _ZEN5,
        "x86-64-v3": _ZEN5,
        "x86-64-v2": _ZEN5,
        "x86-64": _ZEN5,
        "aarch64-dotprod": _SLOWER,
        "aarch64": _SLOWER,
        "wasm32-relaxed": _SLOWER,
        "wasm32": _SLOWER,
    }
)


def rates_of(target: str) -> Rates:
    """The rates that ship for a named target.

    >>> rates_of("x86-64-v3").fma_ps == rates_of("x86-64-v4").fma_ps
    True
    """
    return RATES[target.removeprefix("emulate:")]
