"""Compiling and caching the native code that is not a kernel: pool, driver and reader.

It is written for the baseline of the instruction set, because nothing in it gains from vectors.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping

from rlx.codegen.cpu.generator import generator_version, source_version
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Code, compile_and_load, compile_object, load
from rlx.runtime.store.cache import ObjectCache, default_cache
from rlx.target.cpu import Target, resolve

RUNTIME_FOLDERS = ("driver", "runtime", os.path.join("dist", "native"))
"""Whose source native functions of the runtime are written in, or take constants from."""

# Objects that this process has, by key: whichever cache or file they came from, none is compiled again.
_known: dict[str, bytes] = {}


def baseline(x86: bool | None = None) -> Target:
    """The target that every machine of an instruction set runs; if not told, of the set of this machine."""
    if x86 is None:
        x86 = platform.machine() in ("x86_64", "AMD64")
    return resolve("x86-64" if x86 else "aarch64")


def build(emit: Callable[[Module], None], cache: ObjectCache | None = None) -> Code:
    """Code of the functions that `emit` writes; with a cache it is compiled once per user."""
    if cache is None:
        return compile_and_load(_text(emit, baseline()), baseline())
    return load(cached(emit, baseline(), cache)[1], baseline())


def cached(emit: Callable[[Module], None], target: Target, cache: ObjectCache) -> tuple[str, bytes]:
    """The key and the object of the functions that `emit`, a function of a module, writes.

    The key stands for the source, so that a start which finds the object writes no code.
    """
    parts = (target.triple, emit.__module__, emit.__qualname__, runtime_version())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if key not in _known:
        _known[key] = cache.get_or_make(key, target, lambda: compile_object(_text(emit, target), target))
    return key, _known[key]


def load_for_host(emit: Callable[..., str], *options: object) -> Code:
    """Code of the module that `emit(target, *options)` writes, for this machine; compiled once per user."""
    host = resolve("host")
    parts = (emit.__module__, emit.__qualname__, repr(options), runtime_version())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    made = default_cache().get_or_make(key, host, lambda: compile_object(emit(host, *options), host))
    return load(made, host)


@functools.cache
def runtime_version() -> str:
    """A digest of the source that decides about the native code of the runtime.

    >>> len(runtime_version())
    32
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return generator_version() + source_version(root, RUNTIME_FOLDERS)


def offer(objects: Mapping[str, bytes]) -> None:
    """Take these objects where `cached` is asked for their keys: a file that is trusted brings them along, so
    that it runs without a compiler."""
    _known.update(objects)


def _text(emit: Callable[[Module], None], target: Target) -> str:
    module = Module(target)
    emit(module)
    return module.text()
