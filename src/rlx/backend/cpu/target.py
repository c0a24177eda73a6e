"""Named CPU targets: everything the code generator may ask about a machine is a field here.

Plans and objects are made for a named target, never for "this machine": the same program for the same
named target is the same text anywhere. `resolve("host")` only picks the best name that this machine runs.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

from rlx.errors import CompileError
from rlx.records import dataclass

BITS = {
    "f64": 64,
    "i64": 64,
    "u64": 64,
    "f32": 32,
    "i32": 32,
    "u32": 32,
    "f16": 16,
    "bf16": 16,
    "i16": 16,
    "u16": 16,
    "i8": 8,
    "u8": 8,
}


@dataclass(frozen=True)
class Target:
    """One machine the generator can write for.

    `tiles` gives, per dtype, the register tile (rows, vectors) of the contraction kernels. `gate` holds the
    default constants of the fusion gate, bandwidths in bytes per nanosecond.

    >>> resolve("x86-64-v3").lanes("f32")
    8
    """

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    vector_bytes: int
    registers: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    tiles: tuple[tuple[str, tuple[int, int]], ...]
    gate: tuple[tuple[str, float], ...]

    def has(self, feature: str) -> bool:
        """Whether code for this target may use `feature` (an LLVM feature name such as "fma")."""
        return feature in self.features

    @property
    def x86(self) -> bool:
        return self.triple.startswith("x86_64")

    @property
    def has_fma(self) -> bool:
        return self.has("fma") or not self.x86

    @property
    def has_avx512(self) -> bool:
        return self.has("avx512f")

    @property
    def has_bf16(self) -> bool:
        return self.has("avx512bf16")

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Floats narrower than f32 whose products it computes faster."""
        return ("bf16",) if self.has_bf16 else ()

    @property
    def has_vnni(self) -> bool:
        return self.has("avx512vnni")

    def lanes(self, dtype: str) -> int:
        """Elements of `dtype` in one vector register."""
        return self.vector_bytes * 8 // BITS[dtype]

    def tile(self, dtype: str) -> tuple[int, int]:
        """(rows, vectors) of the register tile of a contraction over `dtype`."""
        return dict(self.tiles)[dtype]

    def feature_text(self) -> str:
        """The features as LLVM spells them: "+avx2,+fma"."""
        return ",".join("+" + feature for feature in self.features)


_SSE2 = ("cx8", "fxsr", "mmx", "sse", "sse2", "x87")
_V3 = (
    *_SSE2,
    "avx",
    "avx2",
    "bmi",
    "bmi2",
    "cmov",
    "cx16",
    "f16c",
    "fma",
    "lzcnt",
    "movbe",
    "popcnt",
    "sahf",
    "sse3",
    "sse4.1",
    "sse4.2",
    "ssse3",
    "xsave",
)
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_X86_TRIPLE = "x86_64-unknown-linux-gnu"
_ARM_TRIPLE = "aarch64-unknown-linux-gnu"
_GATE = (
    ("dispatch_ns", 300.0),
    ("host_readback_bw", 30.0),
    ("host_thunk_penalty_ns", 20_000.0),
    ("memory_bw", 30.0),
    ("min_gain_ns", 100.0),
    ("roundtrip_ns", 3_000.0),
    ("unified_memory", 1.0),
)


def _tiles(**tiles: tuple[int, int]) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple(sorted(tiles.items()))


def _x86(
    name: str, cpu: str, features: tuple[str, ...], vector_bytes: int, registers: int, tile: tuple[int, int]
) -> Target:
    tiles = _tiles(f64=tile, f32=tile, bf16=tile, f16=tile, i8=tile)
    return Target(
        name,
        _X86_TRIPLE,
        cpu,
        tuple(sorted(features)),
        vector_bytes,
        registers,
        32 << 10,
        1 << 20,
        32 << 20,
        tiles,
        _GATE,
    )


_NAMED = (  # best first
    _x86("x86-64-v4-bf16-vnni", "x86-64-v4", (*_V4, "avx512bf16", "avx512vnni"), 64, 32, (8, 3)),
    _x86("x86-64-v4", "x86-64-v4", _V4, 64, 32, (8, 3)),
    _x86("x86-64-v3", "x86-64-v3", _V3, 32, 16, (6, 2)),
    _x86("x86-64", "x86-64", _SSE2, 16, 16, (5, 2)),
    Target(
        "aarch64",
        _ARM_TRIPLE,
        "generic",
        ("fp-armv8", "neon"),
        16,
        32,
        32 << 10,
        1 << 20,
        8 << 20,
        _tiles(f64=(8, 3), f32=(8, 3), bf16=(8, 3), f16=(8, 3), i8=(8, 3)),
        _GATE,
    ),
)
_BY_NAME: Mapping[str, Target] = {target.name: target for target in _NAMED}

# Linux spells some features differently in /proc/cpuinfo.
_PROC_NAMES = {
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "pni": "sse3",
    "abm": "lzcnt",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "lahf_lm": "sahf",
    "fpu": "x87",
}


def targets() -> tuple[Target, ...]:
    """All named targets, the most capable first.

    >>> [target.name for target in targets()][-2:]
    ['x86-64', 'aarch64']
    """
    return _NAMED


@functools.cache
def host_features() -> frozenset[str]:
    """Features of this machine that the operating system lets programs use, in LLVM's names."""
    found: set[str] = set()
    info = Path("/proc/cpuinfo")
    if platform.machine() in ("x86_64", "AMD64") and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("flags"):
                found = {_PROC_NAMES.get(flag, flag) for flag in line.partition(":")[2].split()}
                break
    if not found:
        import llvmlite.binding as llvm

        found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    return frozenset(found)


def runs_here(target: Target) -> bool:
    """Whether this machine can execute code for `target`."""
    if target.x86 != (platform.machine() in ("x86_64", "AMD64")):
        return False
    return not missing_here(target)


def missing_here(target: Target) -> tuple[str, ...]:
    """The features of `target` that this machine does not have."""
    return tuple(feature for feature in target.features if feature not in host_features())


def resolve(name: str | Target) -> Target:
    """The target called `name`; "host" is the most capable one that this machine runs.

    >>> resolve("x86-64").has_fma
    False
    """
    if isinstance(name, Target):
        return name
    if name == "host":
        return next((target for target in _NAMED if runs_here(target)), _fallback())
    if name not in _BY_NAME:
        raise CompileError(f"unknown target {name!r}: choose host, {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def _fallback() -> Target:
    """Every x86-64 machine runs the baseline; anything else only emits for AArch64."""
    return _BY_NAME["x86-64" if platform.machine() in ("x86_64", "AMD64") else "aarch64"]
