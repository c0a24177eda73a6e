"""Relocations of AArch64 objects."""

from __future__ import annotations

import mmap
import struct

_ABS64, _PREL64, _PREL32 = 257, 260, 261
_PAGE, _ADD_LOW, _GOT_PAGE, _GOT_LOW = 275, 277, 311, 312
_LOW = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # offsets of loads and stores, which count their own size
_REACH = 1 << 25  # instructions that a call reaches
CALLS = (282, 283)
GOT = (_GOT_PAGE, _GOT_LOW)


def relocate(memory: mmap.mmap | bytearray, place: int, kind: int, target: int, here: int) -> None:
    """Write what a relocation stands for at `place`, whose address is `here`.

    >>> code = bytearray((0x94000000).to_bytes(4, "little"))  # bl
    >>> relocate(code, 0, 283, 0x1010, 0x1000)
    >>> hex(int.from_bytes(code, "little"))
    '0x94000004'
    """
    if kind == _ABS64:
        memory[place : place + 8] = struct.pack("<Q", target % 2**64)
    elif kind == _PREL64:
        memory[place : place + 8] = struct.pack("<q", target - here)
    elif kind == _PREL32:
        memory[place : place + 4] = struct.pack("<i", target - here)
    else:
        (code,) = struct.unpack_from("<I", memory, place)
        memory[place : place + 4] = struct.pack("<I", code | _field(kind, target, here))


def _field(kind: int, target: int, here: int) -> int:
    """The bits of an instruction that name an address."""
    if kind in CALLS:
        return _near((target - here) >> 2, _REACH) & 0x3FFFFFF
    if kind in (_PAGE, _GOT_PAGE):
        pages = _near((target >> 12) - (here >> 12), 1 << 20)
        return (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    low = target & 0xFFF
    if kind == _ADD_LOW:
        return low << 10
    if kind == _GOT_LOW:
        return low >> 3 << 10
    if kind in _LOW:
        return low >> _LOW[kind] << 10
    raise ValueError(f"relocation {kind} is not supported")


def _near(distance: int, reach: int) -> int:
    if not -reach <= distance < reach:
        raise ValueError("an address is out of reach")
    return distance
