"""Loading object files that our generator has made: sections to memory, relocations, symbols. No LLVM.

LLVM's library takes 50 ms and 100 MB to load; a program that was compiled before needs nothing else of it.
What is read here is what our objects hold: ELF for x86-64 and AArch64, position-independent code, constants.
Anything else is refused, and so is a damaged file.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlx.errors import CompileError
from rlx.system import SYSTEM

_MACHINE_X86_64, _MACHINE_AARCH64 = 62, 183
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_SYMTAB, _RELA, _NOBITS = 2, 4, 8  # kinds of sections
_WRITE, _ALLOC, _EXECUTE = 1, 2, 4  # flags of sections
_ABS64, _PC32, _PLT32, _PC64 = 1, 2, 4, 24  # relocations
_GOT = (9, 41, 42)
_ARM_ABS64, _ARM_PREL64, _ARM_PREL32 = 257, 260, 261
_PAGE, _ADD_LOW, _GOT_PAGE, _GOT_LOW = 275, 277, 311, 312
_ACCESSES = {
    278: 0,
    284: 1,
    285: 2,
    286: 3,
    299: 4,
}  # offsets of loads and stores, which count their own size
_REACH = 1 << 25  # instructions that a call reaches
_ARM_CALLS = (282, 283)
_ARM_GOT = (_GOT_PAGE, _GOT_LOW)
# A jump to the address that follows it.
_JUMPS = {
    _MACHINE_X86_64: b"\xff\x25\x00\x00\x00\x00",
    _MACHINE_AARCH64: b"\x50\x00\x00\x58\x00\x02\x1f\xd6",  # ldr x16, .+8; br x16
}
_HERE = {"x86_64": _MACHINE_X86_64, "AMD64": _MACHINE_X86_64, "aarch64": _MACHINE_AARCH64}
_ENTRY = 16  # bytes of a jump or an address in the tables of symbols that are outside
_ALIGNMENT = 64
_MOST_BYTES = 1 << 31  # relative addresses reach no further


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int


class ObjectFile:
    """The tables of an ELF object."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        try:
            self._read()
        except (struct.error, ValueError, IndexError) as error:
            raise CompileError("the object is damaged: recompile it") from error

    def _read(self) -> None:
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (self.machine,) = struct.unpack_from("<H", self.data, 18)
        (table,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        self.sections = [_Section(*_SECTION.unpack_from(self.data, table + i * size)) for i in range(count)]
        if any(s.kind != _NOBITS and s.offset + s.size > len(self.data) for s in self.sections):
            raise ValueError("a section lies outside the file")
        self.symbols = [symbol for s in self.sections if s.kind == _SYMTAB for symbol in self._symbols(s)]

    def _symbols(self, table: _Section) -> Iterator[_Symbol]:
        names = self.sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, _SYMBOL.size):
            name, _, _, section, value, _ = _SYMBOL.unpack_from(self.data, at)
            end = self.data.index(b"\0", names + name)
            yield _Symbol(self.data[names + name : end].decode(), section, value)

    def relocations(self) -> Iterator[tuple[_Section, int, int, int, int]]:
        """(section, offset in it, kind, symbol, addend) of every relocation."""
        for table in self.sections:
            if table.kind == _RELA:
                for at in range(table.offset, table.offset + table.size, _RELOCATION.size):
                    offset, info, addend = _RELOCATION.unpack_from(self.data, at)
                    yield self.sections[table.info], offset, info & 0xFFFFFFFF, info >> 32, addend


def undefined_symbols(data: bytes) -> tuple[str, ...]:
    """Names that an object expects from the process that loads it."""
    return tuple(symbol.name for symbol in ObjectFile(data).symbols[1:] if symbol.section == 0)


def defined_symbols(data: bytes) -> tuple[str, ...]:
    """Names that an object has for others."""
    return tuple(symbol.name for symbol in ObjectFile(data).symbols[1:] if symbol.section and symbol.name)


def is_loadable(data: bytes) -> bool:
    """Whether this loader is for objects like this one, on a machine like this one."""
    return ObjectFile(data).machine == _HERE.get(platform.machine())


class MappedObject:
    """An object in memory, ready to be called. Dropping it unmaps the code.

    Code is mapped readable and executable, constants read-only: nothing is writable and executable at once.
    """

    def __init__(self, data: bytes, others: Mapping[str, int] | None = None) -> None:
        """`others` are addresses of functions that the object may call, besides those of the process."""
        self._file = ObjectFile(data)
        try:
            self._map(others or {})
        except (struct.error, ValueError, IndexError, KeyError) as error:
            raise CompileError(f"the object cannot be loaded ({error}): recompile it") from error

    def address(self, name: str) -> int | None:
        """Address of the function `name`, if there is one."""
        return self.functions.get(name)

    def _map(self, others: Mapping[str, int]) -> None:
        file = self._file
        names = [s.name for s in file.symbols if s.section == 0 and s.name]
        outside = {name: others.get(name) or process_symbol(name) for name in names}
        groups = self._groups(len(outside))
        size = groups[-1]
        if size > _MOST_BYTES:
            raise ValueError(f"{size} bytes of code")
        self._memory = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        base = self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for section, start in self._starts.items():
            if section.kind != _NOBITS:
                self._memory[start : start + section.size] = file.data[section.offset :][: section.size]
        self._jumps = {name: self._jump + i * _ENTRY for i, name in enumerate(outside)}
        self._pointers: dict[_Symbol, int] = {}
        for name, place in self._jumps.items():
            jump = _JUMPS[file.machine] + struct.pack("<Q", outside[name])
            self._memory[place : place + len(jump)] = jump
        for section, offset, kind, symbol, addend in file.relocations():
            if section in self._starts:
                self._relocate(self._starts[section] + offset, kind, file.symbols[symbol], addend, outside)
        self.functions = {
            s.name: base + self._starts[file.sections[s.section]] + s.value
            for s in file.symbols
            if s.name and 0 < s.section < len(file.sections) and file.sections[s.section] in self._starts
        }
        self._protect(groups)

    def _groups(self, outside: int) -> tuple[int, int, int]:
        """Place all sections: code and jumps, constants and pointers, data; returns the three ends."""
        self._starts: dict[_Section, int] = {}
        at, ends = 0, []
        for wanted in (_EXECUTE, 0, _WRITE):
            for section in self._file.sections:
                if section.flags & _ALLOC and self._kind(section) == wanted:
                    at = _round_up(at, max(section.align, _ALIGNMENT))
                    self._starts[section] = at
                    at += section.size
            if wanted == _EXECUTE:
                self._jump = at = _round_up(at, _ENTRY)
                at += outside * _ENTRY
            elif wanted == 0:
                self._pointer = at = _round_up(at, _ENTRY)
                at += len(self._file.symbols) * 8
            at = _round_up(at, mmap.PAGESIZE)
            ends.append(at)
        return ends[0], ends[1], ends[2]

    def _kind(self, section: _Section) -> int:
        """Whether a section is code, constant or data; what only relocation writes to is constant."""
        if section.flags & _EXECUTE:
            return _EXECUTE
        names = self._file.sections[struct.unpack_from("<H", self._file.data, 62)[0]].offset
        relocated = self._file.data.startswith(b".data.rel.ro", names + section.name)
        return _WRITE if section.flags & _WRITE and not relocated else 0

    def _relocate(self, place: int, kind: int, symbol: _Symbol, addend: int, outside: dict[str, int]) -> None:
        arm = self._file.machine == _MACHINE_AARCH64
        memory, here = self._memory, self._base + place
        if symbol.section:
            target = self._base + self._starts[self._file.sections[symbol.section]] + symbol.value
        elif kind in (_ARM_CALLS if arm else (_PC32, _PLT32)):
            target = self._base + self._jumps[symbol.name]  # the symbol itself may lie too far away
        else:
            target = outside[symbol.name]
        if kind in (_ARM_GOT if arm else _GOT):
            at = self._pointer + 8 * self._pointers.setdefault(symbol, len(self._pointers))
            memory[at : at + 8] = struct.pack("<Q", target)
            target = self._base + at
        if arm:
            relocate_arm(memory, place, kind, target + addend, here)
        elif kind == _ABS64:
            memory[place : place + 8] = struct.pack("<Q", (target + addend) % 2**64)
        elif kind == _PC64:
            memory[place : place + 8] = struct.pack("<q", target + addend - here)
        elif kind in (_PC32, _PLT32, *_GOT):
            memory[place : place + 4] = struct.pack("<i", target + addend - here)
        else:
            raise ValueError(f"relocation {kind} is not supported")

    def _protect(self, ends: tuple[int, int, int]) -> None:
        """Make code executable. Where instructions have a cache of their own, Linux empties it for pages that
        become executable for the first time; nothing is written to them afterwards."""
        for start, end, execute in ((0, ends[0], True), (ends[0], ends[1], False)):
            if end > start:
                SYSTEM.protect(self._base + start, end - start, execute)


def relocate_arm(memory: mmap.mmap | bytearray, place: int, kind: int, target: int, here: int) -> None:
    """Write what a relocation of AArch64 stands for at `place`, whose address is `here`.

    >>> code = bytearray((0x94000000).to_bytes(4, "little"))  # bl
    >>> relocate_arm(code, 0, 283, 0x1010, 0x1000)
    >>> hex(int.from_bytes(code, "little"))
    '0x94000004'
    """
    if kind == _ARM_ABS64:
        memory[place : place + 8] = struct.pack("<Q", target % 2**64)
    elif kind == _ARM_PREL64:
        memory[place : place + 8] = struct.pack("<q", target - here)
    elif kind == _ARM_PREL32:
        memory[place : place + 4] = struct.pack("<i", target - here)
    else:
        (code,) = struct.unpack_from("<I", memory, place)
        memory[place : place + 4] = struct.pack("<I", code | _field(kind, target, here))


def _field(kind: int, target: int, here: int) -> int:
    """The bits of an instruction that name an address."""
    if kind in _ARM_CALLS:
        return _near((target - here) >> 2, _REACH) & 0x3FFFFFF
    if kind in (_PAGE, _GOT_PAGE):
        pages = _near((target >> 12) - (here >> 12), 1 << 20)
        return (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    low = target & 0xFFF
    if kind == _ADD_LOW:
        return low << 10
    if kind == _GOT_LOW:
        return low >> 3 << 10
    if kind in _ACCESSES:
        return low >> _ACCESSES[kind] << 10
    raise ValueError(f"relocation {kind} is not supported")


def _near(distance: int, reach: int) -> int:
    if not -reach <= distance < reach:
        raise ValueError("an address is out of reach")
    return distance


def process_symbol(name: str) -> int:
    """Address of a function of this process: libc's `memcpy`, for one."""
    try:
        found = ctypes.cast(getattr(SYSTEM.c_library(), name), ctypes.c_void_p).value
    except AttributeError:
        found = None
    if not found:
        raise CompileError(f"the object calls {name}, which this process does not have")
    return found


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
