"""The one layout of RLX's files: a checked header, parts, and arrays. Graphs, plans, programs and cached code
have it.

    mark, 8 bytes | version u32 | 0 u32 | bytes of the header u64 | bytes of the file u64 | SHA-256
    header: JSON; "parts" and "arrays" describe what follows, everything else belongs to the writer
    parts:  texts and code, each with its SHA-256 in the header
    arrays: from the next multiple of 2 MiB on (4 KiB if they are few), each at a multiple of 64 bytes

The mark says what a file holds (`Kind`). The first SHA-256 covers the fields before it and the header; the
header covers the rest. Arrays may be larger than one wants to hash at every start: they have a digest of page
sums, which reads them at the speed of memory and finds accidents, and a SHA-256, which is what signatures
cover. Tables of a header give arrays names: `{"params": {"w": 0}}`. Reading a file runs nothing in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary, open_plain, replacing
from rlx.ir.dtype import DType, dtype, pack, unpack
from rlx.ir.weights import round_up, weight_start
from rlx.records import dataclass

VERSION = 2
ALIGNMENT = 64
HUGE_PAGE = 2 << 20
_PAGE = 4096  # of the page sums, whatever the machine's pages are
_BLOCK = 8 << 20  # bytes that are hashed at a time
_PREFIX = struct.Struct("<8sIIQQ32s")
PREFIX_BYTES = _PREFIX.size
_MOST_HEADER = 1 << 30
_MOST_ELEMENTS = 2**40
_NO_DIGEST = "0" * 64
_OWN = {"parts": list, "arrays": list, "array_bytes": int, "array_sums": str, "array_sha256": str}
"""What a header has in every file, with its type."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Kind:
    """What a file holds."""

    mark: bytes
    what: str
    again: str  # how to get one of this version

    @property
    def begins(self) -> str:
        """The mark as text."""
        return self.mark.rstrip(b"\0").decode()


GRAPH = Kind(b"RLXGRAPH", "graph file", "save the graph again")
PLAN = Kind(b"RLXPLAN\0", "plan file", "save it again")
PROGRAM = Kind(b"RLXPROG\0", "compiled program", "compile it again")
CODE = Kind(b"RLXCODE\0", "file of compiled code", "compile it again")


@dataclass(frozen=True)
class Part:
    """Where a part is, counted from the end of the header, and its SHA-256."""

    offset: int
    size: int
    sha256: str


# -- writing


class Stored(Protocol):
    """An array, or what becomes one when it is written."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def __array__(self, /) -> np.ndarray: ...


Seal = Callable[[dict[str, object]], None]
"""Puts signatures into a complete header, in place of stand-ins that are as long."""


def write(
    path: str | os.PathLike[str],
    kind: Kind,
    header: Mapping[str, object],
    parts: Mapping[str, bytes],
    arrays: Sequence[Stored],
    seal: Seal = lambda header: None,
    written: Callable[[np.ndarray], None] = lambda array: None,
) -> None:
    """Write a file, which is replaced in one step. `header` must be JSON; names of it stay the caller's.
    `written` is called with every array that is in the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/a", PLAN, {"name": "a"}, {"text": b"hello"}, [np.arange(3)])
    ...     file = File(folder + "/a", PLAN)
    ...     file.header["name"], file.part("text"), file.array(0)
    ('a', b'hello', array([0, 1, 2]))
    """
    try:
        with replacing(path) as file:
            write_to(file, kind, header, parts, arrays, seal, written)
    except OSError as e:
        raise FormatError(f"cannot write {os.fspath(path)}: {e.strerror or e}") from e


def write_to(
    file: BinaryIO,
    kind: Kind,
    header: Mapping[str, object],
    parts: Mapping[str, bytes],
    arrays: Sequence[Stored],
    seal: Seal = lambda header: None,
    written: Callable[[np.ndarray], None] = lambda array: None,
) -> None:
    """Write to a file that is open for reading, too."""
    table: list[tuple[str, int, int, str]] = []
    entries: list[tuple[str, list[int], int]] = []
    packed = bool(header.get("packed"))
    at = end = 0
    for name, content in parts.items():
        table.append((name, at, len(content), hashlib.sha256(content).hexdigest()))
        at = round_up(at + len(content), ALIGNMENT)
    for array in arrays:
        nbytes = dtype(array.dtype).nbytes(math.prod(array.shape)) if packed else array.nbytes
        start = weight_start(end, nbytes)
        entries.append((str(dtype(array.dtype)), list(array.shape), start))
        end = start + nbytes
    described: dict[str, Any] = {
        **header,
        "parts": table,
        "arrays": entries,
        "array_bytes": round_up(end, _PAGE),
        "array_sums": _NO_DIGEST,
        "array_sha256": _NO_DIGEST,
    }
    length = len(_encoded(described))  # digests are as long as their stand-ins
    base = round_up(_PREFIX.size + length, ALIGNMENT)
    first = first_array(base + at, described["array_bytes"])
    total = first + described["array_bytes"]
    for (_, offset, _, _), content in zip(table, parts.values(), strict=True):
        file.seek(base + offset)
        file.write(content)
    pieces = _Pieces(file, first)
    for (_, _, offset), array in zip(entries, arrays, strict=True):
        dense = np.ascontiguousarray(array)  # computed here, if it is a lazy one
        pieces.put(offset, pack(dense, dense.dtype) if packed else dense.reshape(-1).view(np.uint8))
        written(dense)
    pieces.flush()
    file.truncate(total)
    if file.seek(0, os.SEEK_END) < total:  # a file in memory does not grow by that
        file.write(bytes(total - file.tell()))
    file.flush()
    described["array_sums"], described["array_sha256"] = digests(read_blocks(file, first, total))
    seal(described)
    encoded = _encoded(described)
    assert len(encoded) == length, "a seal is as long as its stand-in"
    file.seek(0)
    file.write(prefix(kind, encoded, total))
    file.write(encoded)


class _Pieces:
    """Arrays on their way to a file, in pieces that are huge pages of it: Linux keeps each on one such page,
    which is mapped later.

    >>> import io
    >>> file = io.BytesIO(b"head")
    >>> pieces = _Pieces(file, 4)
    >>> pieces.put(2, np.array([7, 8], np.uint8))
    >>> pieces.flush()
    >>> list(file.getvalue()[4:])
    [0, 0, 7, 8]
    """

    def __init__(self, file: BinaryIO, first: int) -> None:
        self.file, self.at = file, first  # where the piece begins
        self.piece, self.filled = np.zeros(HUGE_PAGE, np.uint8), 0
        self.end = 0  # of what has been put, from the first array on

    def put(self, offset: int, raw: Bytes) -> None:
        """Take bytes that come `offset` behind the first; offsets ascend. What is between them is zero."""
        for part in (np.broadcast_to(np.uint8(0), offset - self.end), raw):
            while part.size:
                count = min(part.size, HUGE_PAGE - self.filled)
                self.piece[self.filled : self.filled + count] = part[:count]
                part, self.filled = part[count:], self.filled + count
                if self.filled == HUGE_PAGE:
                    self.flush()
        self.end = offset + raw.size

    def flush(self) -> None:
        """Write what is there."""
        self.file.seek(self.at)
        self.file.write(self.piece[: self.filled].data)
        self.at, self.filled = self.at + self.filled, 0


def numbered(tables: Mapping[str, Mapping[str, Stored]]) -> tuple[dict[str, dict[str, int]], list[Stored]]:
    """Tables of arrays by name as a header has them, and all arrays in order."""
    arrays = [array for table in tables.values() for array in table.values()]
    numbers = iter(range(len(arrays)))
    return {kind: {name: next(numbers) for name in table} for kind, table in tables.items()}, arrays


def first_array(end_of_parts: int, array_bytes: int) -> int:
    """Where arrays begin: on a huge page if they fill one."""
    return round_up(end_of_parts, HUGE_PAGE if array_bytes >= HUGE_PAGE else _PAGE)


def _encoded(header: Mapping[str, object]) -> bytes:
    return json.dumps(header).encode()


def prefix(kind: Kind, header: bytes, total: int, version: int | None = None) -> bytes:
    """The fields in front of a header, with the digest of both."""
    fields = (kind.mark, VERSION if version is None else version, 0, len(header), total)
    return _PREFIX.pack(*fields, hashlib.sha256(_PREFIX.pack(*fields, b"") + header).digest())


def digests(blocks: Iterable[Bytes]) -> tuple[str, str]:
    """Both digests of the arrays, in one pass: `page_sums` and `sha256`."""
    sums, whole = hashlib.sha256(), hashlib.sha256()
    for block in blocks:
        sums.update(_sums(block))
        whole.update(block.data)
    return sums.hexdigest(), whole.hexdigest()


def _sums(block: Bytes) -> bytes:
    sums: bytes = block.view(np.uint64).reshape(-1, _PAGE // 8).sum(axis=1, dtype=np.uint64).tobytes()
    return sums


def page_sums(blocks: Iterable[Bytes]) -> str:
    """A digest of the sums of all pages: damage to any word shows, at the price of reading the words once."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(_sums(block))
    return digest.hexdigest()


def sha256(blocks: Iterable[Bytes]) -> str:
    """The SHA-256 of blocks of bytes."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.data)
    return digest.hexdigest()


def read_blocks(file: BinaryIO, start: int, end: int) -> Iterator[Bytes]:
    """The bytes of a file from `start` to `end`, read into one buffer: nothing of them stays in memory."""
    buffer = np.empty(min(_BLOCK, end - start), np.uint8)
    file.seek(start)
    for at in range(start, end, _BLOCK):
        block = buffer[: end - at]
        read_into(file, block)
        yield block


def read_into(file: BinaryIO, room: Bytes) -> None:
    """Fill a buffer from a file; OSError if the file ends before."""
    filled = 0
    while filled < len(room):
        count = file.readinto(room[filled:].data)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it was truncated while it was read")
        filled += count


# -- reading


class File:
    """An open file whose prefix and header are right; parts and arrays are checked when they are taken, or
    all at once by `check_all`. All of it is in memory."""

    _head: Bytes

    def __init__(self, path: str | os.PathLike[str], kind: Kind) -> None:
        self.path, self.kind = os.fspath(path), kind
        with file_boundary(self.path), open_plain(path) as file:
            self._open(file, os.fstat(file.fileno()).st_size)

    @classmethod
    def of_bytes(cls, data: bytes, kind: Kind, name: str) -> File:
        """What the bytes of a file hold; `name` is what errors call them."""
        made = cls.__new__(cls)
        made.path, made.kind = name, kind
        made._open(io.BytesIO(data), len(data))
        return made

    def fail(self, why: str) -> FormatError:
        """The error for something that is wrong with this file."""
        return FormatError(f"{self.path}: {why}")

    def _open(self, file: BinaryIO, size: int) -> None:
        kind, found = self.kind, file.read(_PREFIX.size)
        if not found.startswith(kind.mark):
            raise self.fail(f"not a {kind.what}; it should begin with the bytes {kind.begins}")
        if len(found) < _PREFIX.size:
            raise self.fail(f"{size} bytes long, shorter than its header; it is truncated")
        _, version, zero, length, total, digest = _PREFIX.unpack(found)
        if version != VERSION:
            raise self.fail(f"format version {version}, but this RLX reads version {VERSION}; {kind.again}")
        if total != size or length > min(size, _MOST_HEADER):
            raise self.fail(f"{size} bytes long, but should have {total}; it is truncated or damaged")
        header = file.read(length)
        bare = _PREFIX.pack(kind.mark, version, zero, length, total, b"")
        if len(header) != length or hashlib.sha256(bare + header).digest() != digest:
            raise self.fail("its checksum does not match its header; it is damaged")
        self.header = self._parsed(header)
        self._end_of_header = _PREFIX.size + length
        base = round_up(self._end_of_header, ALIGNMENT)
        self._size = size
        self._parts = self._part_table(base)
        end = max((p.offset + p.size for p in self._parts.values()), default=base)
        first = first_array(end, self.header["array_bytes"])
        if first + self.header["array_bytes"] != size or self.header["array_bytes"] % _PAGE:
            raise self.fail("its arrays do not end where the file ends")
        self._first = first
        self._take(file)

    def _take(self, file: BinaryIO) -> None:
        """Have the bytes of the file at hand: `_head` up to the first array, then `_arrays`."""
        room = np.empty(self._size + ALIGNMENT, np.uint8)
        start = -room.__array_interface__["data"][0] % ALIGNMENT  # `ctypes` takes longer than a small file
        whole = room[start : start + self._size]
        file.seek(0)
        read_into(file, whole)
        self._head, self._arrays = whole[: self._first], whole[self._first :]

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or any(type(header.get(k)) is not kind for k, kind in _OWN.items()):
            raise self.fail("its header is malformed; it is damaged")
        return header

    @property
    def facts(self) -> dict[str, Any]:
        """What the writer put into the header."""
        return {key: value for key, value in self.header.items() if key not in _OWN}

    def _part_table(self, base: int) -> dict[str, Part]:
        out: dict[str, Part] = {}
        for entry in self.header["parts"]:
            match entry:
                case [str(name), int(offset), int(size), str(sha256)] if offset >= 0 and size >= 0:
                    out[name] = Part(base + offset, size, sha256)
                case _:
                    raise self.fail("its header describes a part in a way that is not understood")
            if base + offset + size > self._size:
                raise self.fail(f"part {name[:40]!r} is not inside the file")
        return out

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @property
    def part_names(self) -> list[str]:
        """Names of the parts, in the order they were written."""
        return list(self._parts)

    def digest(self, name: str) -> str:
        """The SHA-256 of a part, as the header has it."""
        return self._part(name).sha256

    def part(self, name: str) -> bytes:
        """The bytes of a part, checked against its SHA-256."""
        part = self._part(name)
        content = self._head[part.offset : part.offset + part.size].tobytes()
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise self.fail(f"part {name!r} does not match its checksum; the file is damaged")
        return content

    def text(self, name: str) -> str:
        """A part that is text."""
        try:
            return self.part(name).decode()
        except UnicodeDecodeError:
            raise self.fail(f"part {name!r} is not text") from None

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise self.fail(f"it has no part {name[:40]!r}")
        return self._parts[name]

    @property
    def array_count(self) -> int:
        """How many arrays there are."""
        return len(self.header["arrays"])

    def table(self, name: str) -> dict[str, np.ndarray]:
        """Arrays of a table of the header, by name."""
        return self.arrays_of(self.header.get(name), name)

    def arrays_of(self, numbers: object, what: str) -> dict[str, np.ndarray]:
        """Arrays by name, from a dict with their numbers."""
        if not isinstance(numbers, dict):
            raise self.fail(f"its header has no sound {what}")
        return {key: self.array(number) for key, number in numbers.items()}

    def array(self, number: int) -> np.ndarray:
        """An array, over the memory of the file; elements of less than a byte may be packed there."""
        of, shape, raw = self._array(number)
        if self._is_packed and of.bits < 8:
            return unpack(raw, of, math.prod(shape)).reshape(shape)
        found: np.ndarray = raw.view(of.np).reshape(shape)
        return found

    def raw(self, number: int) -> Bytes:
        """The bytes of an array."""
        return self._array(number)[2]

    def place(self, number: int) -> tuple[int, int]:
        """Where the bytes of an array begin in the file, and how many they are."""
        nbytes = len(self._array(number)[2])
        return self._first + self.header["arrays"][number][2], nbytes

    @property
    def _is_packed(self) -> bool:
        return self.header.get("packed") is True

    def _array(self, number: int) -> tuple[DType, tuple[int, ...], Bytes]:
        entries = self.header["arrays"]
        if type(number) is not int or not 0 <= number < len(entries):
            raise self.fail(f"it has no array {str(number)[:20]}")
        match entries[number]:
            case [str(name), list(shape), int(offset)] if all(type(d) is int and d >= 0 for d in shape):
                pass
            case _:
                raise self.fail(f"array {number} has a description that RLX cannot read")
        try:
            of = dtype(name)
        except RlxError as e:
            raise self.fail(f"array {number}: {e.message}") from None
        if math.prod(max(d, 1) for d in shape) > _MOST_ELEMENTS or len(shape) > 64:
            raise self.fail(f"array {number} has an impossible shape")
        count = math.prod(shape)
        size = of.nbytes(count) if self._is_packed else count * of.np.itemsize
        if offset < 0 or offset % ALIGNMENT or offset + size > len(self._arrays):
            raise self.fail(f"array {number} is not inside the file")
        return of, tuple(shape), self._arrays[offset : offset + size]

    def check_all(self) -> None:
        """Compare every byte with its SHA-256; those between parts must be 0."""
        for name in self._parts:
            self.part(name)
        self.check_gaps()
        self.check_weights()

    def check_gaps(self) -> None:
        """Bytes that belong to nothing must be 0."""
        end = self._end_of_header
        for part in sorted(self._parts.values(), key=lambda p: p.offset):
            if self._head[end : part.offset].any():
                raise self.fail("bytes between its parts are not 0; it is damaged")
            end = max(end, part.offset + part.size)
        if self._head[end:].any():
            raise self.fail("bytes before its arrays are not 0; it is damaged")

    def check_arrays(self, mapped: bool = True) -> None:
        """Compare the arrays with their page sums; if not `mapped`, no page of them stays in memory."""
        if self._digest_of_arrays(page_sums, mapped) != self.header["array_sums"]:
            raise self.fail("its weights do not match their checksum; the file is damaged")

    def check_weights(self, mapped: bool = True) -> None:
        """Compare the arrays with their SHA-256: only this finds weights that somebody changed on purpose."""
        if self._digest_of_arrays(sha256, mapped) != self.header["array_sha256"]:
            raise self.fail("its weights do not match their checksum; the file is damaged")

    def _digest_of_arrays(self, digest: Callable[[Iterable[Bytes]], str], mapped: bool) -> str:
        return digest([self._arrays])  # as one block, so that Python's lock is waited for once
