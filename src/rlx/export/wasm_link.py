"""Linking WebAssembly: an object of LLVM becomes a module. No linker is needed.

The object holds a whole program, so all that is left to do is to give data and the stack their addresses, to
apply relocations, and to say what is exported. Whatever else an object could hold is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rlx.errors import CompileError
from rlx.export.web_code import LOWEST
from rlx.ir.weights import round_up

PAGE = 1 << 16
STACK = 1 << 18
_HEADER = b"\0asm\x01\0\0\0"
_TYPE, _IMPORT, _FUNCTION, _TABLE, _MEMORY, _GLOBAL, _EXPORT = 1, 2, 3, 4, 5, 6, 7
_ELEMENT, _CODE, _DATA = 9, 10, 11
_KINDS = ("function", "table", "memory", "global")
_SEGMENTS, _SYMBOLS = 5, 8  # parts of the section "linking"
_UNDEFINED, _EXPLICIT_NAME = 0x10, 0x40  # flags of symbols
_WITH_ADDEND = (3, 4, 5, 8, 9)  # relocations
_END, _I32_CONST, _I32, _FUNCREF = 0x0B, 0x41, 0x7F, 0x70


class _Reader:
    """Reads numbers and names from bytes."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def unsigned(self) -> int:
        return self._number()[0]

    def signed(self) -> int:
        value, bits = self._number()
        return value - (1 << bits) if value >> bits - 1 else value

    def _number(self) -> tuple[int, int]:
        """A number without its sign, and how many bits it is written in."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, shift

    def raw(self) -> bytes:
        size = self.unsigned()
        self.at += size
        return self.data[self.at - size : self.at]

    def name(self) -> str:
        return self.raw().decode()


def unsigned(value: int, width: int = 0) -> bytes:
    """A number as LEB128, in at least `width` bytes.

    >>> unsigned(300), unsigned(1, 3)
    (b'\\xac\\x02', b'\\x81\\x80\\x00')
    """
    out = bytearray()
    while value >= 0x80 or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int, width: int = 0) -> bytes:
    """A signed number as LEB128, in at least `width` bytes.

    >>> signed(-1), signed(64)
    (b'\\x7f', b'\\xc0\\x00')
    """
    out = bytearray()
    while not -64 <= value < 64 or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value & 0x7F)
    return bytes(out)


class _Symbol(NamedTuple):
    kind: int  # 0 function, 1 data, 2 global, 5 table
    name: str
    number: int  # of the function, or of the segment of data; -1 if it is not in the object
    offset: int = 0


class _Relocation(NamedTuple):
    kind: int
    offset: int
    symbol: int
    addend: int


class _Segment(NamedTuple):
    start: int  # of its bytes in the section
    data: bytes
    alignment: int


class _Object:
    """What an object of LLVM holds."""

    def __init__(self, data: bytes) -> None:
        if data[:8] != _HEADER:
            raise CompileError("LLVM gave no WebAssembly object")
        self.sections: dict[int, bytes] = {}
        self.symbols: list[_Symbol] = []
        self.relocations: dict[str, list[_Relocation]] = {"reloc.CODE": [], "reloc.DATA": []}
        self._alignments: list[int] = []
        reader = _Reader(data, 8)
        while reader.at < len(data):
            kind, payload = reader.byte(), reader.raw()
            if kind:
                self.sections[kind] = payload
            else:
                self._custom(_Reader(payload))
        self._check_imports()

    def _custom(self, reader: _Reader) -> None:
        name = reader.name()
        if name == "linking":
            reader.unsigned()  # the version
            while reader.at < len(reader.data):
                kind, part = reader.byte(), _Reader(reader.raw())
                if kind == _SYMBOLS:
                    self.symbols = [self._symbol(part) for _ in range(part.unsigned())]
                elif kind == _SEGMENTS:
                    for _ in range(part.unsigned()):
                        part.name()
                        self._alignments.append(1 << part.unsigned())
                        part.unsigned()
        elif name in self.relocations:
            reader.unsigned()  # the section
            for _ in range(reader.unsigned()):
                kind, offset, symbol = reader.byte(), reader.unsigned(), reader.unsigned()
                addend = reader.signed() if kind in _WITH_ADDEND else 0
                self.relocations[name].append(_Relocation(kind, offset, symbol, addend))

    @staticmethod
    def _symbol(part: _Reader) -> _Symbol:
        kind, flags = part.byte(), part.unsigned()
        if kind == 1:
            name = part.name()
            if flags & _UNDEFINED:
                return _Symbol(kind, name, -1)
            index, offset, _ = part.unsigned(), part.unsigned(), part.unsigned()
            return _Symbol(kind, name, index, offset)
        index = part.unsigned()
        if kind == 3:
            return _Symbol(kind, "", index)
        named = not flags & _UNDEFINED or flags & _EXPLICIT_NAME
        return _Symbol(kind, part.name() if named else "", index)

    def _check_imports(self) -> None:
        """Memory, table and stack pointer are this module's own; functions of others there are none."""
        reader = _Reader(self.sections.get(_IMPORT, b"\0"))
        for _ in range(reader.unsigned()):
            reader.name()
            name, kind = reader.name(), reader.byte()
            if _KINDS[kind] == "function":
                raise CompileError(f"the program calls {name}, which WebAssembly does not have")
            if _KINDS[kind] == "global":
                reader.at += 2
                if name != "__stack_pointer":
                    raise CompileError(f"the program reads the global {name}, which is not known")
                continue
            if _KINDS[kind] == "table":
                reader.byte()
            if reader.byte() & 1:  # it has a largest size, too
                reader.unsigned()
            reader.unsigned()

    def segments(self) -> list[_Segment]:
        """Constants and variables."""
        payload = self.sections.get(_DATA, b"\0")
        reader, found = _Reader(payload), []
        for number in range(reader.unsigned()):
            if reader.byte() != 0 or reader.byte() != _I32_CONST:
                raise CompileError("the object has data of a kind that is not known")
            reader.signed()
            if reader.byte() != _END:
                raise CompileError("the object has data at an address that is computed")
            data = reader.raw()
            found.append(_Segment(reader.at - len(data), data, self._alignments[number]))
        return found


class Linked(NamedTuple):
    """A module, and the least pages that its memory has."""

    data: bytes
    pages: int


def link(data: bytes, exports: Mapping[str, str], most_pages: int, shared: bool = False) -> Linked:
    """The module of an object that exports its memory, functions by new names, where the heap begins, and the
    stack pointer. A module for threads imports the memory that they share.

    `exports` maps names of functions in the object to names in the module.
    """
    linker = _Linker(_Object(data), most_pages, shared)
    return Linked(linker.module(exports), linker.pages)


class _Linker:
    def __init__(self, object_: _Object, most_pages: int, shared: bool) -> None:
        self.object, self.most_pages, self.shared = object_, most_pages, shared
        self.segments = object_.segments()
        self.addresses: list[int] = []
        at = LOWEST + STACK
        for segment in self.segments:
            at = round_up(at, segment.alignment)
            self.addresses.append(at)
            at += len(segment.data)
        self.heap = round_up(at, 4096)
        self.pages = -(-self.heap // PAGE)
        self.table: dict[int, int] = {}  # function -> its index in the table

    def module(self, exports: Mapping[str, str]) -> bytes:
        code = bytearray(self.object.sections[_CODE])
        for r in self.object.relocations["reloc.CODE"]:
            self._apply(code, r, r.offset)
        contents = [bytearray(segment.data) for segment in self.segments]
        for r in self.object.relocations["reloc.DATA"]:
            number, at = self._segment_at(r.offset)
            self._apply(contents[number], r, at)
        functions = {s.name: s.number for s in self.object.symbols if s.kind == 0}
        missing = exports.keys() - functions.keys()
        if missing:
            raise CompileError(f"the object has no function {sorted(missing)[0]}")
        listed = [(new, 0, functions[old]) for old, new in exports.items()]
        limits = unsigned(self.pages) + unsigned(self.most_pages)
        imported = b"\x01" + _name("env") + _name("memory") + b"\x02\x03" + limits
        parts = [
            (_TYPE, self.object.sections[_TYPE]),
            (_IMPORT, imported if self.shared else b"\0"),
            (_FUNCTION, self.object.sections[_FUNCTION]),
            (_TABLE, b"\x01" + bytes([_FUNCREF, 0]) + unsigned(len(self.table) + 1)),
            (_MEMORY, b"\0" if self.shared else b"\x01\x01" + limits),
            (_GLOBAL, _vector([self._global(LOWEST + STACK, True), self._global(self.heap, False)])),
            (_EXPORT, _vector(map(_export, [("memory", 2, 0), ("stack", 3, 0), ("heap", 3, 1), *listed]))),
            (_ELEMENT, self._elements()),
            (_CODE, bytes(code)),
            (_DATA, _vector(self._data(contents))),
        ]
        return _HEADER + b"".join(bytes([kind]) + unsigned(len(part)) + part for kind, part in parts)

    @staticmethod
    def _global(value: int, changes: bool) -> bytes:
        return bytes([_I32, int(changes), _I32_CONST]) + signed(value) + bytes([_END])

    def _elements(self) -> bytes:
        """The table of functions that are called through pointers; a null pointer is none of them."""
        if not self.table:
            return b"\0"
        start = bytes([0, _I32_CONST]) + signed(1) + bytes([_END])
        return b"\x01" + start + _vector(unsigned(index) for index in self.table)

    def _data(self, contents: Iterable[bytearray]) -> Iterator[bytes]:
        for address, data in zip(self.addresses, contents, strict=True):
            yield bytes([0, _I32_CONST]) + signed(address) + bytes([_END]) + unsigned(len(data)) + data

    def _segment_at(self, offset: int) -> tuple[int, int]:
        """The segment that has a byte of the section of data, and where it has it."""
        for number, segment in enumerate(self.segments):
            if segment.start <= offset < segment.start + len(segment.data):
                return number, offset - segment.start
        raise CompileError("a relocation is outside all data")

    def _apply(self, data: bytearray, r: _Relocation, at: int) -> None:
        """Write what a relocation stands for. Numbers in code have room for five bytes."""
        symbol = self.object.symbols[r.symbol] if r.kind != 6 else None
        if r.kind in (0, 6, 7, 20):  # function, type, global, table: as they are, or the first of their kind
            index = r.symbol if symbol is None else symbol.number if symbol.kind == 0 else 0
            data[at : at + 5] = unsigned(index, 5)
            return
        assert symbol is not None
        if r.kind in (1, 2) and symbol.kind == 0:
            value = self.table.setdefault(symbol.number, len(self.table) + 1)
        elif r.kind in (3, 4, 5) and symbol.kind == 1 and symbol.number >= 0:
            value = self.addresses[symbol.number] + symbol.offset + r.addend
        else:
            raise CompileError(f"relocation {r.kind} of {symbol.name!r} is not known")
        if r.kind in (2, 5):
            data[at : at + 4] = value.to_bytes(4, "little")
        else:
            data[at : at + 5] = (unsigned if r.kind == 3 else signed)(value, 5)


def _vector(parts: Iterable[bytes]) -> bytes:
    listed = list(parts)
    return unsigned(len(listed)) + b"".join(listed)


def _export(entry: tuple[str, int, int]) -> bytes:
    name, kind, index = entry
    return _name(name) + bytes([kind]) + unsigned(index)


def _name(name: str) -> bytes:
    return unsigned(len(name.encode())) + name.encode()
