"""Compiled objects on disk, shared by all processes of a user.

An entry is one file (`rlx.ir.text.container` has its layout): the code is its only part, the header has its
full key and an HMAC. It is written beside its name and renamed into place, so readers see a whole file or
none. Anything that does not fit (damaged, of another key, signed by somebody else) is a miss with a warning
that names the file: the code is then simply made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from rlx import config
from rlx.codegen.cpu.generator import generator_version
from rlx.codegen.native.jit import llvm_version
from rlx.errors import FormatError, warn
from rlx.files import LIKELY_LOCKED, Json, remove_abandoned, replacing, unfinished_files
from rlx.ir.text.container import CODE, VERSION, File, write_to
from rlx.records import dataclass
from rlx.runtime.store.trust import MAC_BYTES, Keyring, keyring
from rlx.target.cpu import Target, host

DEFAULT_LIMIT = 1 << 30
STREAMED = "streamed"
"""Folder of the cache for weights of programs that have no file of their own."""
_CODE = "code"
_NO_MAC = "0" * 2 * MAC_BYTES
_SUFFIX = ".rlxo"


class CacheWarning(UserWarning):
    """A cache entry was not used, or the cache cannot be written; results are not affected."""


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds, and what this process got from it."""

    directory: Path
    entries: int
    nbytes: int
    limit: int
    hits: int
    misses: int
    rejected: int


class ObjectCache:
    """Objects by `code_key` and target; the LLVM and generator versions are added here.

    >>> import tempfile
    >>> from rlx.target.cpu import resolve
    >>> from rlx.runtime.store.trust import Keyring
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = ObjectCache(Path(folder), keyring=Keyring(b"k" * 32))
    ...     cache.put("c0ffee", resolve("x86-64"), b"object")
    ...     cache.get("c0ffee", resolve("x86-64")), cache.get("c0ffee", resolve("x86-64-v3"))
    (b'object', None)
    """

    def __init__(
        self, directory: Path | None = None, limit: int = DEFAULT_LIMIT, keyring: Keyring | None = None
    ) -> None:
        self.directory = Path(directory) if directory is not None else config.CACHE.get()
        self.limit = limit
        self._keyring = keyring
        self._hits = self._misses = self._rejected = 0
        self._unchecked = (
            limit  # bytes written since the directory was last measured; the first put measures it
        )
        self._writable = True

    def get(self, code_key: str, target: Target) -> bytes | None:
        """The object stored for `code_key` on `target`, or None."""
        label = _label(code_key, target)
        path = self._path(label)
        try:
            content = path.read_bytes()
        except OSError:
            self._misses += 1
            return None
        try:
            found = self._opened(content, path, label)
        except FormatError as e:
            self._misses += 1
            self._rejected += 1
            warn(f"cache entry {e.message}; the code is compiled again", CacheWarning)
            return None
        self._hits += 1
        _touch(path)
        return found

    def put(self, code_key: str, target: Target, object_bytes: bytes) -> None:
        """Store an object. A directory that cannot be written costs one warning, never an error."""
        if not self._writable or len(object_bytes) > self.limit:
            return
        label = _label(code_key, target)
        path = self._path(label)
        header = {"label": label, "mac": _NO_MAC}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as file:
                write_to(file, CODE, header, {_CODE: object_bytes}, (), self._seal)
                self._unchecked += file.seek(0, os.SEEK_END)
            if self._unchecked > self.limit // 32:
                self._evict()
        except OSError as error:
            self._writable = False
            warn(
                f"the code cache {self.directory} cannot be written ({error.strerror}); "
                "set RLX_CACHE to a directory that can",
                CacheWarning,
            )

    def get_or_make(self, code_key: str, target: Target, make: Callable[[], bytes]) -> bytes:
        """The stored object, or the one that `make` compiles, which is then stored."""
        found = self.get(code_key, target)
        if found is None:
            found = make()
            self.put(code_key, target, found)
        return found

    def info(self) -> CacheInfo:
        """Size of the cache, and hits and misses of this process."""
        entries = self._entries() + unfinished_files(self.directory / "objects")
        nbytes = sum(status.st_size for _, status in entries)
        return CacheInfo(
            self.directory, len(entries), nbytes, self.limit, self._hits, self._misses, self._rejected
        )

    def clear(self) -> int:
        """Delete every entry, and what killed processes left; returns how many files there were."""
        entries = self._entries()
        for path, _ in entries:
            path.unlink(missing_ok=True)
        return len(entries) + remove_abandoned(self.directory / "objects", LIKELY_LOCKED)

    def _path(self, label: str) -> Path:
        return self.directory / "objects" / (hashlib.sha256(label.encode()).hexdigest() + _SUFFIX)

    def ring(self) -> Keyring:
        """The key given, or the user's as it is now: one kept from elsewhere would refuse good code."""
        return self._keyring or keyring()

    def _seal(self, header: Json) -> None:
        header["mac"] = self.ring().sign(_signed(header)).hex()

    def _opened(self, content: bytes, path: Path, label: str) -> bytes:
        """The object in a file's content; FormatError says what is wrong with it."""
        file = File.of_bytes(content, CODE, os.fspath(path))
        if file.header.get("label") != label:
            raise file.fail("it belongs to other code")
        try:
            mac = bytes.fromhex(file.header["mac"])
        except (KeyError, TypeError, ValueError):
            mac = b""
        if not self.ring().verify(_signed(file.header), mac):
            raise file.fail("it was not signed with this user's key and is not run")
        file.check_gaps()
        return file.part(_CODE)

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """Entries with their status, the least recently used first. Files may vanish while we look."""
        found = []
        for path in (self.directory / "objects").glob("*" + _SUFFIX):
            try:
                found.append((path, path.stat()))
            except OSError:
                continue
        return sorted(found, key=lambda entry: (entry[1].st_mtime_ns, entry[0].name))

    def _evict(self) -> None:
        """Make room: delete the entries used least recently, and unfinished writes of processes that died."""
        self._unchecked = 0
        entries = self._entries()
        size = sum(status.st_size for _, status in entries)
        room = self.limit if size <= self.limit else self.limit * 9 // 10
        for path, status in entries:
            if size <= room:
                break
            path.unlink(missing_ok=True)
            size -= status.st_size
        remove_abandoned(self.directory / "objects")


def default_cache() -> ObjectCache:
    """The cache in the folder `RLX_CACHE`; one object per folder, so that it warns only once."""
    return _cache_at(config.CACHE.get())


@functools.lru_cache(maxsize=8)
def _cache_at(directory: Path) -> ObjectCache:
    return ObjectCache(directory)


def _label(code_key: str, target: Target) -> str:
    """Everything that decides whether an object is the right one, and that this version reads its file."""
    machine = (target.name, target.triple, target.code.cpu, target.code.feature_text(), host().name)
    layout = f"{CODE.begins} {VERSION}"
    return "\n".join((layout, code_key, *machine, llvm_version(), generator_version()))


def _signed(header: Json) -> bytes:
    """What a signature covers: all of the header, with the SHA-256 of the code. The label is part of it: good
    code under the name of another one is refused."""
    covered = {key: value for key, value in header.items() if key != "mac"}
    return b"rlx code 1\n" + json.dumps(covered, sort_keys=True).encode()


def _touch(path: Path) -> None:
    """Note the use of an entry; a cache that cannot be written is still read."""
    try:
        os.utime(path)
    except OSError:
        pass
