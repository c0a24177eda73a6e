"""Programs that `rlx.load` has compiled before, by the model file they came from.

The name of an entry is a digest of what identifies the file to the system (device, inode, size, time of
change), of the options, and of this compiler: finding one reads no model and imports no frontend. An entry
also lists the other files of the model; if one of them has changed it is not used. Entries are `.rlx` files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx import config, progress
from rlx.errors import FormatError, warn
from rlx.files import LIKELY_LOCKED, Identity, identity, remove_abandoned, unfinished_files
from rlx.runtime.background import let_run_first
from rlx.runtime.store.artifact import Artifact
from rlx.runtime.store.cache import STREAMED, CacheInfo, CacheWarning, ObjectCache
from rlx.runtime.store.trust import keyring
from rlx.system import SYSTEM

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

Known = tuple[str, Identity | None]
"""A file of a model, and what it was before it was read."""
DEFAULT_LIMIT = 8 << 30
_SUFFIX = ".rlx"
_STORING = "rlx-store"  # the name of threads that store


class ProgramStore:
    """The folder `programs` of the cache."""

    def __init__(self, directory: Path | None = None, limit: int = DEFAULT_LIMIT) -> None:
        self.directory = (directory or config.CACHE.get()) / "programs"
        self.limit = limit

    def find(self, model: Known, options: Mapping[str, object]) -> Artifact | None:
        """The stored program of a model file, or None."""
        path = self._path(model, options)
        wait_until_stored(path)
        try:
            found = Artifact(path)
        except FormatError as e:
            if path.exists():
                warn(f"{e}; the model is compiled again", CacheWarning)
            return None
        if not all(list(identity(name) or ()) == known for name, *known in _listed(found)):
            return None
        try:
            # The entries used least recently go first; when they were written stays.
            os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        except OSError:
            pass
        return found

    def put(
        self,
        program: CompiledProgram,
        model: Known,
        options: Mapping[str, object],
        others: Iterable[Known] = (),
    ) -> None:
        """Store a program as it is now, in a thread of its own: its caller need not wait for the disk. What
        cannot be written costs a warning, never an error. A program whose model has changed since it was
        `known` is not stored: it may be made of the old file, the new one, or both."""
        if program.origin is None:
            return
        known = [model, *others]
        files = [[name, *(state or ())] for name, state in known[1:]]
        size = sum(len(m) for m in program.weight_memory.values())
        size += sum(value.nbytes for value in program.stored_params.values())
        if size > self.limit // 2:
            return
        path, lir, origin = self._path(model, options), program.lir, program.origin
        weights, values = dict(program.weight_memory), dict(program.stored_params)
        before = list(_storing.values())
        # Folder and key of now: the environment may be another when the thread comes to it.
        cache = ObjectCache(keyring=keyring())
        check = functools.partial(_check_unchanged, known)
        at_once = "weight_budget" in lir.options  # there is no memory to store and to run at once

        def store() -> None:
            from rlx.runtime.store.save import write  # start time: what is found is not written

            if not at_once:
                let_run_first(lambda: program.has_run)
                SYSTEM.yield_to_others()
            for earlier in before:  # in order: the last one is the one to keep if there is no room for all
                earlier.join()
            write(path, lir, origin, weights, values, facts={"files": files}, cache=cache, last=check)
            self._evict()

        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            _not_stored(e)
            return
        thread = threading.Thread(target=_tried, args=(store,), name=_STORING)
        thread.start()  # Python ends after it
        _storing[path] = thread
        if at_once:
            wait_until_stored(path)

    def info(self) -> CacheInfo:
        """How many programs there are, and their bytes; files that are not finished count."""
        entries = self._entries() + [f for folder in self._folders for f in unfinished_files(folder)]
        nbytes = sum(status.st_size for _, status in entries)
        return CacheInfo(self.directory, len(entries), nbytes, self.limit, 0, 0, 0)

    def clear(self) -> int:
        """Delete every entry, and what killed processes left; returns how many files there were."""
        entries = self._entries()
        for path, _ in entries:
            path.unlink(missing_ok=True)
        return len(entries) + sum(remove_abandoned(folder, LIKELY_LOCKED) for folder in self._folders)

    @property
    def _folders(self) -> list[Path]:
        """Where files with weights are written: programs, and weights that are streamed."""
        return [self.directory, self.directory.parent / STREAMED]

    def _path(self, model: Known, options: Mapping[str, object]) -> Path:
        key = json.dumps([model[1], options, compiler_version()], sort_keys=True)
        return self.directory / (hashlib.sha256(key.encode()).hexdigest() + _SUFFIX)

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """Entries with their status, the least recently used first."""
        if threading.current_thread().name != _STORING:
            wait_until_stored()
        found = []
        for path in self.directory.glob("*" + _SUFFIX):
            try:
                found.append((path, path.stat()))
            except OSError:
                continue
        return sorted(
            found, key=lambda entry: (max(entry[1].st_atime_ns, entry[1].st_mtime_ns), entry[0].name)
        )

    def _evict(self) -> None:
        entries = self._entries()
        size = sum(status.st_size for _, status in entries)
        for path, status in entries[:-1]:
            if size <= self.limit:
                break
            path.unlink(missing_ok=True)
            size -= status.st_size
        for folder in self._folders:
            remove_abandoned(folder)


_storing: dict[Path, threading.Thread] = {}


def wait_until_stored(path: Path | None = None) -> None:
    """Return when all programs that this process stores, or that at `path`, are in their files."""
    for stored in list(_storing) if path is None else [path]:
        thread = _storing.get(stored)
        if thread is not None:
            thread.join()
            if _storing.get(stored) is thread:  # others who wait for it must find it until it is over
                _storing.pop(stored, None)


def _tried(store: Callable[[], None]) -> None:
    try:
        with progress.unwatched():
            store()
    except (OSError, FormatError) as e:
        _not_stored(e)


def _not_stored(e: Exception) -> None:
    warn(f"the compiled model was not stored: {e}", CacheWarning)


def _check_unchanged(known: Iterable[Known]) -> None:
    """The last look before a file gets its name: everything that was read is as it was before."""
    for name, state in known:
        if state is None or identity(name) != state:
            raise FormatError(f"{name} has changed while it was compiled; load it again")


def _listed(found: Artifact) -> list[list[Any]]:
    files: Any = found.facts.get("files")
    if isinstance(files, list) and all(isinstance(f, list) and f and isinstance(f[0], str) for f in files):
        return files
    return [["", 0]]  # matches nothing


@functools.cache
def compiler_version() -> str:
    """A digest of names, sizes and times of RLX's own files: an edited compiler makes programs anew.

    >>> len(compiler_version())
    64
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(n for n in names if n.endswith(".py")):
            path = os.path.join(folder, name)
            status = os.stat(path)
            line = f"{path[len(str(root)) :]} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(line.encode())
    return digest.hexdigest()
