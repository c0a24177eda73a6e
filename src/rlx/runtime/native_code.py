"""Native code of a program: taken from the cache when its key is known there, else generated and compiled."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from rlx import progress
from rlx.codegen.cpu.kernels import ABI, KernelSet
from rlx.codegen.native.jit import Compiling, load_all
from rlx.plan.lir import LirModule
from rlx.runtime.native import code as native
from rlx.runtime.native.driver import driver_address, emit_driver, rlx_run_program
from rlx.runtime.native.pool import emit_pool, prepare
from rlx.runtime.native.quick import QuickCode, QuickUnits, in_the_making
from rlx.runtime.store.cache import default_cache
from rlx.system import SYSTEM
from rlx.target.cpu import Target, runs_here

if TYPE_CHECKING:
    from rlx.runtime.store.cache import ObjectCache

_LENGTH = struct.Struct("<Q")
FORMAT = 9  # of the cached blob


def code_version() -> str:
    """What code must have to be loaded: the format of its blob, and how its kernels are called."""
    return f"{FORMAT}.{ABI}"


def native_code(
    lir: LirModule, target: Target, cache: bool, background: bool = False
) -> tuple[KernelSet, object]:
    """The kernels of a program and the loaded code that holds them (None if every node is a host thunk). With
    `background` it may be quick code, which `improve_code` replaces."""
    store = default_cache() if cache else None
    if not background or not SYSTEM.runs_native_code or not runs_here(target):
        return open_blob(code_blob(lir, target, store), target)
    return _quick_code(lir, target, store)


def prepare_runs() -> None:
    """Prepare the code that runs programs, where they do: LLVM compiles it where the cache lacks it."""
    if SYSTEM.runs_native_code:
        prepare()
        driver_address(rlx_run_program)


def code_blob(lir: LirModule, target: Target, cache: ObjectCache | None) -> bytes:
    """What is cached and saved: the description of the kernels, then object files, each after its length."""
    key = _key(lir)
    known = _known(lir, target, cache)
    if known is not None:
        return known
    compiling = Compiling(target)
    try:
        made = _writer().build_kernels(lir, target, compiling.add)
    finally:
        objects = compiling.objects()  # no thread is left behind
    blob = _joined(made.describe().encode(), *objects)
    progress.info("native code of %r for %s: compiled", lir.name, target.name)
    if cache is not None:
        cache.put(key, target, blob)
    return blob


def _writer() -> ModuleType:
    import rlx.codegen.cpu.build as build  # start time: not for code that is there

    return build


def _key(lir: LirModule) -> str:
    return f"{code_version()}-{lir.code_key}"


def _known(lir: LirModule, target: Target, cache: ObjectCache | None) -> bytes | None:
    """Code that the cache has, or that a thread of this process makes."""
    making = in_the_making(_key(lir), target)
    known = making.blob() if making is not None else None if cache is None else cache.get(_key(lir), target)
    if known is not None:
        progress.info("native code of %r for %s: from the cache", lir.name, target.name)
    return known


def _quick_code(lir: LirModule, target: Target, cache: ObjectCache | None) -> tuple[KernelSet, object]:
    """Code that is there as soon as possible."""
    known = _known(lir, target, cache)
    if known is not None:
        return open_blob(known, target)
    units = QuickUnits(target, _writer().predicted_work(lir, target))
    try:
        made = _writer().build_kernels(lir, target, units.add)
    finally:
        objects = units.compiling.objects()  # no thread is left behind
    description = made.describe().encode()

    def store(objects: Sequence[bytes]) -> bytes:
        blob = _joined(description, *objects)
        if cache is not None:
            cache.put(_key(lir), target, blob)
        return blob

    progress.info("native code of %r for %s: compiled", lir.name, target.name)
    if not units.quick:
        return open_blob(store(objects), target)
    kernels = KernelSet.recall(description.decode())
    return kernels, QuickCode(
        objects, units.quick, kernels.names, target, _key(lir), store, cache is not None
    )


def open_blob(blob: bytes, target: Target) -> tuple[KernelSet, object]:
    """Kernels and loaded code of a blob that can be trusted."""
    description, *objects = _pieces(blob)
    return KernelSet.recall(description.decode()), load_all(objects, target) if objects else None


def runtime_blob(target: Target, cache: ObjectCache, streams: bool) -> bytes:
    """The code that runs programs on machines of this kind, guards mapped weights, and reads them if they are
    streamed: a file that has it runs without a compiler."""
    from rlx.runtime.native.bus_guard import emit_bus_guard  # start time: for files that are written

    emitters = [emit_driver, emit_pool, emit_bus_guard]
    if streams:
        from rlx.runtime.native.reader import emit_reader  # start time: few programs stream

        emitters.append(emit_reader)
    found = [native.cached(emit, native.baseline(target.x86), cache) for emit in emitters]
    return _joined(*(piece for key, code in found for piece in (key.encode(), code)))


def open_runtime(blob: bytes) -> None:
    """Let runs take the code of a blob that can be trusted."""
    pieces = _pieces(blob)
    native.offer({key.decode(): code for key, code in zip(pieces[::2], pieces[1::2], strict=True)})


def _joined(*pieces: bytes) -> bytes:
    return b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces)


def _pieces(blob: bytes) -> list[bytes]:
    pieces, at = [], 0
    while at < len(blob):
        (length,) = _LENGTH.unpack_from(blob, at)
        at += _LENGTH.size
        pieces.append(blob[at : at + length])
        at += length
    return pieces
