"""Static archives and objects that hold data, written without a linker or a compiler."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from rlx.codegen.native.elf import defined_symbols
from rlx.target.cpu import Target

_MAGIC = b"!<arch>\n"
_LONGEST_NAME = 15
_MACHINES = {"x86_64": 62, "aarch64": 183}
_PAGE = 4096


def archive(members: Mapping[str, bytes]) -> bytes:
    """A static archive of objects, in the format of GNU `ar`, with an index of their symbols. It depends on
    the members alone: there are no dates in it.

    >>> archive({})[:8]
    b'!<arch>\\n'
    """
    long_names = b"".join(f"{n}/\n".encode() for n in members if len(n) > _LONGEST_NAME)
    symbols = [(name, list(defined_symbols(data))) for name, data in members.items()]
    letters = b"".join(s.encode() + b"\0" for _, found in symbols for s in found)
    count = sum(len(found) for _, found in symbols)
    head = [_member("/", b"\0" * (4 + 4 * count) + letters)]
    if long_names:
        head.append(_member("//", long_names))
    at, starts, parts = len(_MAGIC) + sum(map(len, head)), dict[str, int](), list[bytes]()
    for name, data in members.items():
        starts[name] = at
        short = f"{name}/" if len(name) <= _LONGEST_NAME else f"/{long_names.index(f'{name}/'.encode())}"
        parts.append(_member(short, data))
        at += len(parts[-1])
    offsets = [starts[name] for name, found in symbols for _ in found]
    head[0] = _member("/", struct.pack(f">{count + 1}I", count, *offsets) + letters)
    return b"".join([_MAGIC, *head, *parts])


def _member(name: str, data: bytes) -> bytes:
    fields = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
    return fields + data + b"\n" * (len(data) % 2)


def data_object(symbol: str, data: Sequence[bytes], target: Target) -> bytes:
    """An object that holds read-only data under a symbol, at a page, for the linkers of a target.

    >>> from rlx.target.cpu import resolve
    >>> made = data_object("weights", [b"abc"], resolve("x86-64"))
    >>> defined_symbols(made), made[4096:4099]
    (('weights',), b'abc')
    """
    machine = next(number for name, number in _MACHINES.items() if target.triple.startswith(name))
    size = sum(map(len, data))
    names = b"\0.rodata\0.symtab\0.strtab\0.note.GNU-stack\0"
    strings = b"\0" + symbol.encode() + b"\0"
    # A global symbol of 2 (hidden) visibility and kind 1 (object) in section 1.
    symtab = bytes(24) + struct.pack("<IBBHQQ", 1, 0x11, 2, 1, 0, size)
    at = _PAGE + size
    symtab_at = -(-at // 8) * 8
    strings_at = symtab_at + len(symtab)
    names_at = strings_at + len(strings)
    table_at = -(-(names_at + len(names)) // 8) * 8
    sections = [
        (0,) * 10,
        (1, 1, 2, 0, _PAGE, size, 0, 0, _PAGE, 0),
        (9, 2, 0, 0, symtab_at, len(symtab), 3, 1, 8, 24),
        (17, 3, 0, 0, strings_at, len(strings), 0, 0, 1, 0),
        (25, 1, 0, 0, names_at, 0, 0, 0, 1, 0),
        (17, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
    ]
    table = b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, table_at, 0, 64, 0, 0, 64, len(sections), 5)
    tail = bytes(symtab_at - at) + symtab + strings + names
    tail += bytes(table_at - names_at - len(names)) + table
    return b"".join([head, bytes(_PAGE - len(head)), *data, tail])
