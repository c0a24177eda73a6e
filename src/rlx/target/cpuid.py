"""What an x86 processor can do, asked by its own instructions: CPUID, and XGETBV for what the system keeps.

/proc/cpuinfo cannot replace it: other systems have none, and under an emulator it describes the machine
outside. LLVM's answer would cost 50 ms and 100 MB at every start.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from rlx.system import SYSTEM

# void ask(u32 leaf, u32 subleaf, u32 out[4]), with the calling convention of all systems but Windows. RBX,
# which CPUID overwrites, belongs to the caller.
_CPUID = bytes.fromhex(
    "53"  # push rbx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "4989d0"  # mov r8, rdx
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8 + 4], ebx
    "41894808"  # mov [r8 + 8], ecx
    "4189500c"  # mov [r8 + 12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
# u32 kept(): the registers that the system saves when it changes threads, the low half of XCR0.
_XGETBV = bytes.fromhex(
    "31c9"  # xor ecx, ecx
    "0f01d0"  # xgetbv
    "c3"  # ret
)
_EAX, _EBX, _ECX, _EDX = range(4)
_OSXSAVE = 1 << 27  # in ECX of leaf 1: XGETBV may be executed
_AVX_STATE, _AVX512_STATE = 0x06, 0xE6  # in XCR0: XMM and YMM; also masks and both kinds of ZMM
_MATRIX_STATE = 0x60000  # in XCR0: the shapes of AMX's registers, and what they hold
MATRICES = ("amx-bf16", "amx-int8", "amx-tile")

# (leaf, subleaf, register): the bit of each feature, in LLVM's names.
_PLAIN = {
    (1, 0, _EDX): {"x87": 0, "cx8": 8, "cmov": 15, "mmx": 23, "fxsr": 24, "sse": 25, "sse2": 26},
    (1, 0, _ECX): {"sse3": 0, "ssse3": 9, "cx16": 13, "sse4.1": 19, "sse4.2": 20, "movbe": 22, "popcnt": 23},
    (7, 0, _EBX): {"bmi": 3, "bmi2": 8},
    (0x80000001, 0, _ECX): {"sahf": 0, "lzcnt": 5},
}
_WITH_XSAVE = {(1, 0, _ECX): {"xsave": 26}}
_WITH_AVX = {
    (1, 0, _ECX): {"fma": 12, "avx": 28, "f16c": 29},
    (7, 0, _EBX): {"avx2": 5},
    (7, 1, _EAX): {"avxvnni": 4},
}
_WITH_AVX512 = {
    (7, 0, _EBX): {"avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31},
    (7, 0, _ECX): {"avx512vnni": 11},
    (7, 1, _EAX): {"avx512bf16": 5},
}
_WITH_MATRICES = {(7, 0, _EDX): {"amx-bf16": 22, "amx-tile": 24, "amx-int8": 25}}


def features() -> frozenset[str]:
    """Features that programs may use here, in LLVM's names. Only for x86-64, not for Windows."""
    with _Instructions() as ask:
        return frozenset(granted(_found(ask.leaf, ask.kept)))


def granted(found: set[str]) -> set[str]:
    """`found` without AMX, unless all of it is there and the system lets this process use it."""
    there = found.issuperset(MATRICES) and SYSTEM.let_use_matrices()
    return found if there else found.difference(MATRICES)


def _found(leaf: Callable[[int, int], tuple[int, ...]], kept: Callable[[], int]) -> set[str]:
    ones = leaf(1, 0)
    state = kept() if ones[_ECX] & _OSXSAVE else 0
    tables = [_PLAIN]
    if ones[_ECX] & _OSXSAVE:
        tables.append(_WITH_XSAVE)
    if state & _AVX_STATE == _AVX_STATE:
        tables.append(_WITH_AVX)
    if state & _AVX512_STATE == _AVX512_STATE:
        tables.append(_WITH_AVX512)
    if state & _MATRIX_STATE == _MATRIX_STATE:
        tables.append(_WITH_MATRICES)
    # Beyond its last leaf a processor repeats another one: that must not be read as features.
    last = {0: leaf(0, 0)[_EAX], 1: leaf(0x80000000, 0)[_EAX]}
    subleaves = leaf(7, 0)[_EAX] if last[0] >= 7 else 0
    found = set()
    for table in tables:
        for (number, sub, register), bits in table.items():
            if number <= last[number >> 31] and sub <= (subleaves if number == 7 else 0):
                word = leaf(number, sub)[register]
                found |= {name for name, bit in bits.items() if word >> bit & 1}
    return found


class _Instructions:
    """A page with the two functions, mapped for the time of a `with`."""

    def __enter__(self) -> _Instructions:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        start = 64  # of the second function
        self._page[: len(_CPUID)] = _CPUID
        self._page[start : start + len(_XGETBV)] = _XGETBV
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        SYSTEM.protect(at, mmap.PAGESIZE, execute=True)
        number = ctypes.c_uint32
        self._ask = ctypes.CFUNCTYPE(None, number, number, ctypes.POINTER(number))(at)
        self.kept: Callable[[], int] = ctypes.CFUNCTYPE(number)(at + start)
        return self

    def __exit__(self, *_: object) -> None:
        del self._ask, self.kept
        self._page.close()

    def leaf(self, number: int, sub: int) -> tuple[int, ...]:
        """EAX, EBX, ECX and EDX of a leaf."""
        out = (ctypes.c_uint32 * 4)()
        self._ask(number, sub, out)
        return tuple(out)
