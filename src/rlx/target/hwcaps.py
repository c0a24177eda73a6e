"""Features of an AArch64 processor, as the kernel gives them to every process. LLVM reads another source,
which describes the wrong machine under an emulator.
"""

from __future__ import annotations

from rlx.system import SYSTEM

_BITS = {"dotprod": (20,), "fullfp16": (9, 10)}
"""What LLVM's features need in the first word: HWCAP_ASIMDDP; HWCAP_FPHP and HWCAP_ASIMDHP."""


def features(word: int | None = None) -> frozenset[str]:
    """Features beyond those that every AArch64 has, in LLVM's names; of a word, or of this machine.

    >>> sorted(features(1 << 20 | 1 << 9)), sorted(features(1 << 20 | 1 << 10 | 1 << 9)), sorted(features(0))
    (['dotprod'], ['dotprod', 'fullfp16'], [])
    """
    word = SYSTEM.hardware_word() if word is None else word
    return frozenset(name for name, bits in _BITS.items() if all(word >> bit & 1 for bit in bits))
