"""Named CPU targets: everything the code generator may ask about a machine is a field here.

Plans and objects are for a named target, never for "this machine": the same program for the same
named target is the same text anywhere. `resolve("host")` only picks a name: the best that this machine runs,
or the lesser one that `RLX_HOST` names. Code beyond the host is never loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Mapping

from rlx import config
from rlx.errors import CompileError, ConfigError
from rlx.records import dataclass
from rlx.system import SYSTEM
from rlx.target import cpuid, hwcaps
from rlx.target.prices import DEVICES, Again, Prices
from rlx.target.rates import Rates, rates_of

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

    `tiles` gives, per dtype, the register tile (rows, vectors) of the contraction kernels; those of "i8" and
    "u8" read the same weights, so they have as many vectors. `prices` gives what things cost. `features` are
    what the generator writes for; the code of an emulated target does the same with the instructions of a
    lesser one.

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
    prices: Prices = DEVICES["cpu"]
    emulated: bool = False
    widens_rows: bool = False  # rows of bytes become i16 once per product, not once per tile
    tried: bool = True  # its code ran on hardware: else it is the host only where `RLX_HOST` names it

    def has(self, feature: str) -> bool:
        """Whether code for this target may use `feature` (an LLVM feature name such as "fma")."""
        return feature in self.features

    @property
    def rates(self) -> Rates:
        """How fast it is, for predictions."""
        return rates_of(self.name)

    @property
    def again(self) -> Again:
        """What the gate charges for values that are computed again."""
        rates, cores = self.rates, self.prices.cores
        vectors = self.lanes("f32") * cores
        return Again(
            operation_fs=round(1000 * rates.op_ps / vectors),
            reload_fs=round(2000 * rates.load_ps / vectors),
            gather_fs=round(1000 * rates.gather_ps / cores),
            index_fs=round(1000 * rates.index_ps / cores),
        )

    @property
    def x86(self) -> bool:
        return self.triple.startswith("x86_64")

    @property
    def arm(self) -> bool:
        return self.triple.startswith("aarch64")

    @property
    def web(self) -> bool:
        """Whether its code is WebAssembly, which is exported and never loaded here."""
        return self.triple.startswith("wasm32")

    @property
    def has_fma(self) -> bool:
        return self.has("fma") or self.arm

    @property
    def divides_slowly(self) -> bool:
        """Whether 64-bit divisions are checked each time, and not done in 32 bits where these are enough."""
        return self.web

    @property
    def may_fuse(self) -> bool:
        """Whether a product and a sum may be rounded once or twice, depending on the machine."""
        return self.has("relaxed-simd")

    @property
    def has_avx512(self) -> bool:
        return self.has("avx512f")

    @property
    def has_bf16(self) -> bool:
        return self.has("avx512bf16")

    @property
    def converts_f16(self) -> bool:
        """Whether f16 is widened and rounded by instructions of its own."""
        return self.has("f16c") or self.arm

    @property
    def computes_f16(self) -> bool:
        """Whether it adds, multiplies and divides f16 as such."""
        return self.has("fullfp16")

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Floats narrower than f32 whose matmuls it computes faster."""
        return ("bf16",) if self.has_bf16 else ()

    @property
    def has_vnni(self) -> bool:
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def has_quads(self) -> bool:
        """Whether one instruction multiplies bytes and adds four products to a sum."""
        return self.has_vnni or self.has("dotprod")

    @property
    def multiplies_pairs(self) -> bool:
        """Whether one instruction multiplies 16-bit integers and adds neighbouring products."""
        return self.x86 or self.web

    @property
    def sums_in_pairs(self) -> bool:
        """Whether products of bytes whose sums in pairs fit 16 bits are faster than those of widened ones."""
        return self.widens_rows and self.has("avx2")

    @property
    def has_matrices(self) -> bool:
        """Whether it has registers of 16 rows of 64 bytes, and multiplies bytes and bf16 in them."""
        return self.has("amx-tile")

    @property
    def has_seven_bits(self) -> bool:
        """Whether one instruction multiplies signed bytes with others of seven bits, unsigned, and adds four
        products to a sum. Other bytes would be multiplied in a way that depends on the machine."""
        return self.has("relaxed-simd")

    @property
    def small_bytes(self) -> str | None:
        """What products of small weights are faster than those of widened ones, if some are: "pairs" or
        "seven" bits."""
        return "pairs" if self.sums_in_pairs else "seven" if self.has_seven_bits else None

    def lanes(self, dtype: str) -> int:
        """Elements of `dtype` in one vector register."""
        return self.vector_bytes * 8 // BITS[dtype]

    def tile(self, dtype: str) -> tuple[int, int]:
        """(rows, vectors) of the register tile of a contraction over `dtype`."""
        return dict(self.tiles)[dtype]

    @property
    def can_be_emulated(self) -> bool:
        """Whether it has all instructions of the target that emulates others, and more."""
        return set(self.features) > set(_BY_NAME[_EMULATOR].features)

    @property
    def code(self) -> Target:
        """The target whose instructions the code uses: itself, unless it is emulated."""
        return _BY_NAME[_EMULATOR] if self.emulated else self

    def feature_text(self) -> str:
        """The features as LLVM spells them: "+avx2,+fma"."""
        return _spelled(self.features)


@functools.cache
def _spelled(features: tuple[str, ...]) -> str:
    return ",".join("+" + feature for feature in features)


_SSE2 = ("cx8", "fxsr", "mmx", "sse", "sse2", "x87")
_V2 = (*_SSE2, "cmov", "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_V4_NARROW = (*_V4, "avx512bf16", "avx512vnni")
_X86_TRIPLE = "x86_64-unknown-linux-gnu"
_ARM_TRIPLE = "aarch64-unknown-linux-gnu"
_NEON = ("fp-armv8", "neon")
_SIMD128 = ("bulk-memory", "bulk-memory-opt", "nontrapping-fptoint", "sign-ext", "simd128")
_WEB_TRIPLE = "wasm32-unknown-unknown"


def _tiles(**tiles: tuple[int, int]) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple(sorted(tiles.items()))


def _x86(
    name: str,
    cpu: str,
    features: tuple[str, ...],
    vector_bytes: int,
    registers: int,
    tile: tuple[int, int],
    signed_bytes: tuple[int, int] | None = None,
    widens_rows: bool = False,
    tried: bool = True,
) -> Target:
    tiles = _tiles(f64=tile, f32=tile, bf16=tile, f16=tile, u8=tile, i8=signed_bytes or tile)
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
        widens_rows=widens_rows,
        tried=tried,
    )


def _arm(name: str, features: tuple[str, ...], unsigned_bytes: tuple[int, int] | None = None) -> Target:
    tile = (8, 3)
    tiles = _tiles(f64=tile, f32=tile, bf16=tile, f16=tile, i8=tile, u8=unsigned_bytes or tile)
    return Target(
        name, _ARM_TRIPLE, "generic", tuple(sorted(features)), 16, 32, 32 << 10, 1 << 20, 8 << 20, tiles
    )


_NAMED = (  # best first
    _x86("x86-64-v4-amx", "x86-64-v4", (*_V4_NARROW, *cpuid.MATRICES), 64, 32, (8, 3), tried=False),
    _x86("x86-64-v4-bf16-vnni", "x86-64-v4", _V4_NARROW, 64, 32, (8, 3)),
    _x86("x86-64-v4", "x86-64-v4", _V4, 64, 32, (8, 3)),
    # Signed bytes need registers for what is added to them and for the sums of that.
    _x86("x86-64-v3-vnni", "x86-64-v3", (*_V3, "avxvnni"), 32, 16, (6, 2), signed_bytes=(5, 2)),
    _x86("x86-64-v3", "x86-64-v3", _V3, 32, 16, (6, 2), widens_rows=True),
    _x86("x86-64-v2", "x86-64-v2", _V2, 16, 16, (5, 2), widens_rows=True),
    _x86("x86-64", "x86-64", _SSE2, 16, 16, (5, 2), widens_rows=True),
    # Both bytes of its dot product are signed: unsigned ones need registers for what is taken off them.
    _arm("aarch64-dotprod", (*_NEON, "dotprod", "fullfp16"), unsigned_bytes=(6, 3)),
    _arm("aarch64", _NEON),
)


def _web(name: str, features: tuple[str, ...]) -> Target:
    # The fastest of those tried in V8, which keeps one of 16 registers for itself. Vectors of bytes are
    # widened as they are read, for as many rows as there are.
    tile, of_bytes = (3, 3), (5, 2)
    tiles = _tiles(f64=tile, f32=tile, bf16=tile, f16=tile, i8=of_bytes, u8=of_bytes)
    return Target(
        name,
        _WEB_TRIPLE,
        "generic",
        tuple(sorted(features)),
        16,
        16,
        32 << 10,
        1 << 20,
        8 << 20,
        tiles,
        widens_rows=True,
    )


_WEB = (
    _web("wasm32-relaxed", (*_SIMD128, "relaxed-simd")),
    _web("wasm32", _SIMD128),
)
_BY_NAME: Mapping[str, Target] = {target.name: target for target in (*_NAMED, *_WEB)}

_EMULATE, _EMULATOR = "emulate:", "x86-64-v3"


def targets() -> tuple[Target, ...]:
    """All named targets of machines, the most capable first.

    >>> [target.name for target in targets()][-2:]
    ['aarch64-dotprod', 'aarch64']
    """
    return _NAMED


def web_targets() -> tuple[Target, ...]:
    """The targets of WebAssembly, for exports: no process loads their code.

    >>> [target.name for target in web_targets()]
    ['wasm32-relaxed', 'wasm32']
    """
    return _WEB


@functools.cache
def emulated(target: Target) -> Target:
    """`target` with the instructions of x86-64-v3, to test its plans and kernels on machines that lack some.

    Instructions beyond x86-64-v3 are replaced by generic ones with the same bits (`twins.py`).

    >>> emulated(resolve("x86-64-v4")).lanes("f32"), emulated(resolve("x86-64-v4")).code.name
    (16, 'x86-64-v3')
    """
    if not target.can_be_emulated:
        there = ", ".join(t.name for t in _NAMED if t.can_be_emulated)
        raise CompileError(f"target {target.name} needs no emulation; only {there} can be emulated")
    return dataclasses.replace(target, name=_EMULATE + target.name, emulated=True)


@functools.cache
def machine_features() -> frozenset[str]:
    """Features of this machine that the operating system lets programs use, in LLVM's names."""
    if _is_x86():
        try:
            return cpuid.features()
        except CompileError:  # a system that lets no memory become executable: it runs no code, but can plan
            pass
    if not _is_x86():
        return frozenset(_NEON) | hwcaps.features()  # the first two every AArch64 has, whatever is listed
    import llvmlite.binding as llvm

    found = {name for name, there in llvm.get_host_cpu_features().items() if there}
    return frozenset(cpuid.granted(found) | {"x87"})  # LLVM assumes it


def host() -> Target:
    """The machine as RLX sees it: what `RLX_HOST` names, else the most capable target that runs here and that
    was tried on hardware."""
    return _host(config.HOST.get())


def host_text() -> str:
    """The host for people: its name and, where that is not this machine, what the machine is.

    >>> from unittest import mock
    >>> best = _host(None).name
    >>> with mock.patch.dict("os.environ", {config.HOST.name: best}):
    ...     host_text() == f"{best} (RLX_HOST; this machine is {best})"
    True
    """
    if config.HOST.get() is None:
        return host().name
    return f"{host().name} ({config.HOST.name}; this machine is {_host(None).name})"


@functools.cache
def _host(name: str | None) -> Target:
    features = machine_features()
    there = [target for target in _NAMED if target.x86 == _is_x86() and not _missing(target, features)]
    if name is None:
        # Every x86-64 machine runs the baseline; anything else only emits for AArch64.
        tried = [target for target in there if target.tried]
        return tried[0] if tried else _BY_NAME["x86-64" if _is_x86() else "aarch64"]
    choices = ", ".join(target.name for target in there) or "no target"
    try:
        chosen = resolve(name) if name != "host" else None
    except CompileError:
        chosen = None
    if chosen is None:
        raise ConfigError(
            f"environment variable {config.HOST.name}={name!r} names no target; this machine can be seen as "
            f"{choices}, or emulate:x86-64-v4"
        )
    if chosen.code not in there:
        lacking = ", ".join(_missing(chosen, features)) if chosen.x86 == _is_x86() else "its instruction set"
        raise ConfigError(
            f"environment variable {config.HOST.name}={name!r} is beyond this machine (missing: {lacking}); "
            f"choose {choices}, or unset it"
        )
    return chosen


def host_features() -> frozenset[str]:
    """Features that code may use here, in LLVM's names: those of the machine, or of what `RLX_HOST` names."""
    name = config.HOST.get()
    return machine_features() if name is None else frozenset(_host(name).code.features)


def runs_here(target: Target) -> bool:
    """Whether code for `target` may run here: the machine can execute it, and `RLX_HOST` names no lesser one.

    >>> runs_here(resolve("host"))
    True
    """
    return SYSTEM.runs_native_code and target.x86 == _is_x86() and not target.web and not missing_here(target)


def missing_here(target: Target) -> tuple[str, ...]:
    """The features of code for `target` that the host does not have."""
    return _missing(target, host_features())


def _missing(target: Target, there: frozenset[str]) -> tuple[str, ...]:
    return tuple(feature for feature in target.code.features if feature not in there)


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def resolve(name: str | Target) -> Target:
    """The target called `name`; "host" is the machine as RLX sees it (`host`).

    >>> resolve("x86-64").has_fma
    False
    """
    if isinstance(name, Target):
        return name
    if name == "host":
        return host()
    if name.startswith(_EMULATE) and name.removeprefix(_EMULATE) in _BY_NAME:
        return emulated(_BY_NAME[name.removeprefix(_EMULATE)])
    if name not in _BY_NAME:
        raise CompileError(f"unknown target {name!r}: choose host, {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
