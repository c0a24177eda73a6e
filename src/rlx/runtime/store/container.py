"""The layout of `.rlx` files: a checked header, small parts, and arrays that are used where they lie.

    magic "RLXPROG\\0" | version u32 | 0 u32 | bytes of the header u64 | bytes of the file u64 | SHA-256
    header: JSON; "parts" and "arrays" describe what follows, everything else belongs to the writer
    parts:  texts and code, each with its SHA-256 in the header
    arrays: from the next multiple of 2 MiB on (4 KiB if they are few), each at a multiple of 64 bytes

The first SHA-256 covers the fields before it and the header; the header covers the rest. Arrays may be larger
than one wants to hash at every start: they have a digest of page sums, which reads them at the speed of
memory and finds accidents, and a SHA-256, which is what signatures cover. Reading a file runs nothing that is
in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rlx import config
from rlx.errors import FormatError, RlxError
from rlx.files import file_boundary, identity, open_plain, replacing
from rlx.ir.dtype import dtype
from rlx.records import dataclass
from rlx.runtime.memory import allocate, drop_pages, round_up, weight_start
from rlx.runtime.native.bus_guard import Guarded, is_available

MAGIC = b"RLXPROG\0"
VERSION = 1
ALIGNMENT = 64
HUGE_PAGE = 2 << 20
_PAGE = 4096  # of the page sums, whatever the machine's pages are
_BLOCK = 8 << 20  # bytes that are hashed at a time
_PREFIX = struct.Struct("<8sIIQQ32s")
_MOST_HEADER = 1 << 30
_MOST_ELEMENTS = 2**40
MOST_READ = 64 << 20  # bytes of arrays that are read rather than mapped, if the file is not our own
_NO_DIGEST = "0" * 64

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """Where a part lies, counted from the end of the header, and its SHA-256."""

    offset: int
    size: int
    sha256: str


# -- writing


Seal = Callable[[dict[str, Any]], None]
"""Puts signatures into a complete header, in place of stand-ins that are as long."""


def write(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    parts: Mapping[str, bytes],
    arrays: Sequence[Any],
    seal: Seal = lambda header: None,
) -> None:
    """Write a file, which is replaced in one step. `header` must be JSON; names of it stay the caller's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/a.rlx", {"name": "a"}, {"text": b"hello"}, [np.arange(3)])
    ...     file = Container(folder + "/a.rlx")
    ...     file.header["name"], file.part("text"), file.array(0)
    ('a', b'hello', array([0, 1, 2]))
    """
    try:
        with replacing(path) as file:
            _write(file, header, parts, arrays, seal)
    except OSError as e:
        raise FormatError(f"cannot write {os.fspath(path)}: {e.strerror or e}") from e


def _write(
    file: BinaryIO, header: Mapping[str, Any], parts: Mapping[str, bytes], arrays: Sequence[Any], seal: Seal
) -> None:
    table: list[tuple[str, int, int, str]] = []
    entries: list[tuple[str, list[int], int]] = []
    at = end = 0
    for name, content in parts.items():
        table.append((name, at, len(content), hashlib.sha256(content).hexdigest()))
        at = round_up(at + len(content), ALIGNMENT)
    for array in arrays:
        start = weight_start(end, array.nbytes)
        entries.append((str(dtype(array.dtype)), list(array.shape), start))
        end = start + array.nbytes
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
    first = _first_array(base + at, described["array_bytes"])
    total = first + described["array_bytes"]
    for (_, offset, _, _), content in zip(table, parts.values(), strict=True):
        file.seek(base + offset)
        file.write(content)
    for (_, _, offset), array in zip(entries, arrays, strict=True):
        file.seek(first + offset)
        dense = np.ascontiguousarray(array)  # computed here, if it is a lazy one
        file.write(dense.reshape(-1).view(np.uint8).data)
        drop_pages(dense)
    file.truncate(total)
    file.flush()
    described["array_sums"], described["array_sha256"] = _digests(_read_blocks(file, first, total))
    seal(described)
    encoded = _encoded(described)
    assert len(encoded) == length, "a seal is as long as its stand-in"
    file.seek(0)
    file.write(_prefix(encoded, total))
    file.write(encoded)


def _first_array(end_of_parts: int, array_bytes: int) -> int:
    """Where arrays begin: on a huge page if they fill one."""
    return round_up(end_of_parts, HUGE_PAGE if array_bytes >= HUGE_PAGE else _PAGE)


def _encoded(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header).encode()


def _prefix(header: bytes, total: int, version: int = VERSION) -> bytes:
    bare = _PREFIX.pack(MAGIC, version, 0, len(header), total, b"")
    return _PREFIX.pack(MAGIC, version, 0, len(header), total, hashlib.sha256(bare + header).digest())


def _digests(blocks: Iterable[Bytes]) -> tuple[str, str]:
    """Both digests of the arrays, in one pass: `_page_sums` and `_sha256`."""
    sums, whole = hashlib.sha256(), hashlib.sha256()
    for block in blocks:
        sums.update(_sums(block))
        whole.update(block.data)
    return sums.hexdigest(), whole.hexdigest()


def _sums(block: Bytes) -> bytes:
    sums: bytes = block.view(np.uint64).reshape(-1, _PAGE // 8).sum(axis=1, dtype=np.uint64).tobytes()
    return sums


def _page_sums(blocks: Iterable[Bytes]) -> str:
    """A digest of the sums of all pages: damage to any word shows, at the price of reading the words once."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(_sums(block))
    return digest.hexdigest()


def _sha256(blocks: Iterable[Bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.data)
    return digest.hexdigest()


def _read_blocks(file: BinaryIO, start: int, end: int) -> Iterator[Bytes]:
    """The bytes of a file from `start` to `end`, read into one buffer: nothing of them stays in memory."""
    buffer = np.empty(min(_BLOCK, end - start), np.uint8)
    file.seek(start)
    for at in range(start, end, _BLOCK):
        block = buffer[: end - at]
        if file.readinto(block.data) != len(block):  # type: ignore[attr-defined]
            raise OSError("it ends before its last array")
        yield block


def _is_own(descriptor: int, path: str) -> bool:
    """Whether a file lies in a folder of RLX's cache that nobody else can write to. Such files are replaced,
    never changed."""
    folder, cache = os.path.dirname(os.path.abspath(path)), os.path.abspath(config.CACHE.get())
    if os.path.commonpath([folder, cache]) != cache or not hasattr(os, "geteuid"):
        return False
    user, status = os.geteuid(), [os.stat(folder), os.fstat(descriptor)]
    return all(s.st_uid == user for s in status) and not any(s.st_mode & 0o022 for s in status)


def _held(file: BinaryIO, start: int, size: int) -> Bytes:
    """Bytes of a file in memory of our own; the page behind them cannot be read."""
    region = allocate(size, fence=True)
    file.seek(start)
    if file.readinto(region.array.data) != size:  # type: ignore[attr-defined]
        raise OSError("it was truncated while it was read")
    region.array.flags.writeable = False
    return region.array


# -- reading


def file_identity(descriptor: int, own: bool) -> tuple[Any, ...]:
    """What differs between files: device, inode, size, the prefix with its digest of all the rest; and, if
    the file is not in RLX's own cache, where files are touched and unlinked but never changed, its times."""
    status = os.fstat(descriptor)
    times = () if own else (status.st_mtime_ns, status.st_ctime_ns)
    return status.st_dev, status.st_ino, status.st_size, os.pread(descriptor, _PREFIX.size, 0), *times


class Container:
    """An open file whose prefix and header are right; parts and arrays are checked when they are taken.

    Arrays are read-only, and outlive this object while they are in use. Those of a file in RLX's own cache
    are mapped. Another file may be changed or cut by whoever can write to it: its arrays are read when they
    are first asked for, or, if they are more than `MOST_READ` bytes or are to stay in the file, mapped under
    a guard: see `check_whole`.
    """

    stay_in_file = False  # whether arrays shall take no memory
    _guarded: Guarded | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            with open_plain(path) as file:
                self.status = identity(file.fileno())
                self._open(file)
                self.identity = file_identity(file.fileno(), self.is_own)
        except (OSError, MemoryError) as e:
            raise FormatError(f"cannot read {self.path}: {getattr(e, 'strerror', None) or e}") from e

    def fail(self, why: str) -> FormatError:
        """The error for something that is wrong with this file."""
        return FormatError(f"{self.path}: {why}")

    def _open(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise self.fail("not a compiled program; rlx files begin with the bytes RLXPROG")
        _, version, zero, length, total, digest = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise self.fail(f"format version {version}, but this RLX reads {VERSION}; compile it again")
        if total != size or length > min(size, _MOST_HEADER):
            raise self.fail(f"{size} bytes long, but should have {total}; it is truncated or damaged")
        header = file.read(length)
        bare = _PREFIX.pack(MAGIC, version, zero, length, total, b"")
        if len(header) != length or hashlib.sha256(bare + header).digest() != digest:
            raise self.fail("its checksum does not match its header; it is damaged")
        self.header = self._parsed(header)
        base = round_up(_PREFIX.size + length, ALIGNMENT)
        self._size = size
        self._parts = self._part_table(base)
        end = max((p.offset + p.size for p in self._parts.values()), default=base)
        first = _first_array(end, self.header["array_bytes"])
        if first + self.header["array_bytes"] != size or self.header["array_bytes"] % _PAGE:
            raise self.fail("its arrays do not end where the file ends")
        self._first = first
        self.is_own = _is_own(file.fileno(), self.path)
        if self.is_own:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
            self._head, self._arrays = mapped[:first], mapped[first:]
        else:
            self._head = _held(file, 0, first)
            self._file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)

    @functools.cached_property
    def _arrays(self) -> Bytes:
        """The bytes of all arrays of a file that is not our own."""
        with self._file, file_boundary(self.path):
            if is_available() and (self.stay_in_file or self._size - self._first > MOST_READ):
                self._guarded = Guarded(self._file.fileno(), self._size)
                return self._guarded.array[self._first :]
            return _held(self._file, self._first, self._size - self._first)

    @property
    def is_guarded(self) -> bool:
        """Whether arrays are mapped from a file that somebody may cut."""
        return self._guarded is not None

    def check_whole(self) -> None:
        """Refuse what was computed from arrays that the file no longer has."""
        if self._guarded is not None and self._guarded.broken:
            raise self.fail("it was cut while it was in use; restore it, and load it again")

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            header = None
        kinds = {"parts": list, "arrays": list, "array_bytes": int, "array_sums": str, "array_sha256": str}
        if not isinstance(header, dict) or any(type(header.get(k)) is not kind for k, kind in kinds.items()):
            raise self.fail("its header is malformed; it is damaged")
        return header

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
        return len(self.header["arrays"])

    def array(self, number: int) -> NDArray[Any]:
        """An array, over the memory of the file."""
        of, shape, raw = self._array(number)
        return raw.view(of.np).reshape(shape)

    def raw(self, number: int) -> Bytes:
        """The bytes of an array."""
        return self._array(number)[2]

    def place(self, number: int) -> tuple[int, int]:
        """Where the bytes of an array begin in the file, and how many they are."""
        nbytes = len(self._array(number)[2])
        return self._first + self.header["arrays"][number][2], nbytes

    def _array(self, number: int) -> tuple[Any, tuple[int, ...], Bytes]:
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
        size = math.prod(shape) * of.np.itemsize
        if offset < 0 or offset % ALIGNMENT or offset + size > len(self._arrays):
            raise self.fail(f"array {number} is not inside the file")
        return of, tuple(shape), self._arrays[offset : offset + size]

    def check_arrays(self, mapped: bool = True) -> None:
        """Compare the arrays with their page sums; if not `mapped`, no page of them stays in memory."""
        if self._digest_of_arrays(_page_sums, mapped) != self.header["array_sums"]:
            raise self.fail("its weights do not match their checksum; the file is damaged")

    def _digest_of_arrays(self, digest: Callable[[Iterable[Bytes]], str], mapped: bool) -> str:
        if mapped:  # as one block, so that Python's lock is waited for once
            return digest([self._arrays])
        with file_boundary(self.path), open_plain(self.path) as file:
            if not self.is_own and identity(file.fileno()) != self.status:
                raise self.fail("it was changed while it was opened; load it again")
            return digest(_read_blocks(file, self._first, self._size))

    def is_same(self, descriptor: int) -> bool:
        """Whether an open file, whose times have changed since it was loaded, has the same weights."""
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file, file_boundary(self.path):
            found = _sha256(_read_blocks(file, self._first, self._size))
        return found == self.header["array_sha256"]

    def check_all(self) -> None:
        """Compare every byte that matters with its SHA-256."""
        for name in self._parts:
            self.part(name)
        self.check_weights()

    def check_weights(self, mapped: bool = True) -> None:
        """Compare the arrays with their SHA-256: only this tells weights that somebody changed on purpose."""
        if self._digest_of_arrays(_sha256, mapped) != self.header["array_sha256"]:
            raise self.fail("its weights do not match their checksum; the file is damaged")
