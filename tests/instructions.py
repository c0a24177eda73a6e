"""What instruction sets the code of an object needs, read from its bytes.

Capstone tells the instruction set of most instructions, but not of FMA, LZCNT and much of AVX-512
and knows neither AVX512-BF16 nor AVX-VNNI nor AMX: encodings and mnemonics tell the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import capstone

from rlx.codegen.native.elf import ObjectFile
from rlx.target.cpu import Target

EXECUTABLE = 4  # flag of a section
FIRST_SET = 128  # groups of Capstone from here on are instruction sets, those before are kinds of jumps

GROUPS = {
    "sse1": "sse",
    "sse41": "sse4.1",
    "sse42": "sse4.2",
    "avx512": "avx512f",
    "bwi": "avx512bw",
    "cdi": "avx512cd",
    "dqi": "avx512dq",
    "vlx": "avx512vl",
    "fc16": "f16c",
    "fparmv8": "fp-armv8",
}
"""Instruction sets that Capstone names otherwise than LLVM."""
ANY_X86_64 = {"mode64", "not64bitmode", "novlx", "cmov"}
"""Groups that every x86-64 machine has; "novlx" is said of encodings that need no AVX512-VL."""
MNEMONICS = (
    (r"lzcnt$", "lzcnt"),  # not tzcnt: LLVM writes bsf with the same bytes where both give the same
    (r"popcnt$", "popcnt"),
    (r"movbe$", "movbe"),
    (r"andn$|bextr$|bls(i|r|msk)$", "bmi"),
    (r"bzhi$|mulx$|pdep$|pext$|rorx$|(sar|shl|shr)x$", "bmi2"),
    (r"vpdp(bus|wss)ds?$", "avx512vnni"),
    (r"round[ps][sd]$|pmul(dq|ld)$|pblendvb$|blendvp[sd]$|p(extr|insr)[bdq]$|pmov[sz]x", "sse4.1"),
)
VEX_MNEMONICS = ((r"vfn?m(add|sub)", "fma"), (r"vcvtp(h2ps|s2ph)$", "f16c"))
"""These are of AVX-512 if they are written with EVEX."""


def needed(code: bytes, target: Target) -> dict[str, str]:
    """The features that the instructions of an object need, each with one that does."""
    out: dict[str, str] = {}
    for address, text, features in _instructions(code, target):
        for feature in features:
            out.setdefault(feature, f"{address:#x}: {text}")
    return out


def beyond(code: bytes, target: Target) -> dict[str, str]:
    """Of the features that an object needs, those that its target does not have."""
    return {feature: text for feature, text in needed(code, target).items() if not target.has(feature)}


def _instructions(code: bytes, target: Target) -> Iterator[tuple[int, str, frozenset[str]]]:
    file = ObjectFile(code)
    decoder = _decoder(target.x86)
    for section in file.sections:
        if not section.flags & EXECUTABLE:
            continue
        data, at = file.data[section.offset : section.offset + section.size], 0
        while at < len(data):
            for address, size, mnemonic, operands in decoder.disasm_lite(data[at:], at):
                encoded = data[address : address + size]
                yield address, f"{mnemonic} {operands}", _features(target.x86, mnemonic, operands, encoded)
                at = address + size
            if at < len(data):
                feature, size = _unknown(data[at : at + 15]) if target.x86 else ("", 0)
                assert feature, f"{target.name}: bytes {data[at : at + 15].hex()} are an unknown instruction"
                yield at, f"bytes {data[at : at + size].hex()}", frozenset({feature})
                at += size


@functools.cache
def _decoder(x86: bool) -> Any:
    kind = (capstone.CS_ARCH_X86, capstone.CS_MODE_64) if x86 else (capstone.CS_ARCH_ARM64, 0)
    made = capstone.Cs(*kind)
    made.detail = True
    return made


_known: dict[tuple[bool, str, int, str], frozenset[str]] = {}


def _features(x86: bool, mnemonic: str, operands: str, encoded: bytes) -> frozenset[str]:
    """What an instruction needs; those that differ in numbers only are looked at once, as that is slow."""
    first = encoded.lstrip(b"\x26\x2e\x36\x3e\x64\x65\x66\xf2\xf3")[0] if x86 else 0
    key = (x86, mnemonic, first, re.sub(r"0x[0-9a-f]+|\d+", "0", operands))
    if key not in _known:
        decoder = _decoder(x86)
        (made,) = decoder.disasm(encoded, 0)
        names = {made.group_name(group) for group in made.groups if group >= FIRST_SET} - ANY_X86_64
        features = {GROUPS.get(name, name) for name in names}
        _known[key] = frozenset(features | _by_encoding(first, mnemonic, operands) if x86 else features)
    return _known[key]


def _by_encoding(first: int, mnemonic: str, operands: str) -> set[str]:
    """What the first byte behind prefixes, the registers and the mnemonic of an x86 instruction tell."""
    features, known = set(), MNEMONICS
    if first == 0x62:
        features.add("avx512f")
    elif first in (0xC4, 0xC5):
        features.add("avx")
        known += VEX_MNEMONICS
    if "zmm" in operands or re.search(r"\bk[0-7]\b", operands):
        features.add("avx512f")
    return features | {feature for pattern, feature in known if re.match(pattern, mnemonic)}


_MAP_0F38 = 2
_BF16 = {(2, 0x52), (2, 0x72), (3, 0x72)}
"""(prefix, opcode) of vdpbf16ps, vcvtneps2bf16 and vcvtne2ps2bf16."""
_VNNI = {(1, 0x50), (1, 0x51), (1, 0x52), (1, 0x53)}
"""The same of vpdpbusd, vpdpbusds, vpdpwssd and vpdpwssds."""
_MATRICES = {
    **dict.fromkeys([(0, 0x49), (3, 0x49), (2, 0x4B), (3, 0x4B)], "amx-tile"),
    **dict.fromkeys([(0, 0x5E), (1, 0x5E), (2, 0x5E), (3, 0x5E)], "amx-int8"),
    (2, 0x5C): "amx-bf16",
}
"""The same of ldtilecfg and tilerelease, tilezero, tilestored, tileloadd; of dot products of AMX."""


def _unknown(data: bytes) -> tuple[str, int]:
    """Feature and bytes of an instruction at the start of `data` that Capstone does not know, if it is one.

    EVEX: 62, three bytes, opcode, ModRM, and what ModRM asks for. VEX: C4 and two bytes.
    """
    if len(data) < 6:
        return "", 0
    if data[0] == 0x62 and data[1] & 7 == _MAP_0F38 and (data[2] & 3, data[4]) in _BF16:
        return "avx512bf16", 5 + _operand_size(data[5:])
    if data[0] == 0xC4 and data[1] & 31 == _MAP_0F38 and (data[2] & 3, data[3]) in _MATRICES:
        return _MATRICES[data[2] & 3, data[3]], 4 + _operand_size(data[4:])
    if data[0] == 0xC4 and data[1] & 31 == _MAP_0F38 and (data[2] & 3, data[3]) in _VNNI:
        return "avxvnni", 4 + _operand_size(data[4:])
    return "", 0


def _operand_size(data: bytes) -> int:
    """Bytes of ModRM and what it asks for."""
    mode, register = data[0] >> 6, data[0] & 7
    if mode == 3:
        return 1
    size = 1 + (register == 4)  # SIB
    far = mode == 0 and (register == 5 or (register == 4 and data[1] & 7 == 5))
    return size + (4 if mode == 2 or far else mode)
