"""The functions of an exported program that only C has: they map files and allocate."""

from __future__ import annotations

from rlx.codegen.native.irtext import Module, Value
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.waiting import wake
from rlx.codegen.native.words import (
    at,
    atomic_rmw,
    atomic_store,
    byte_at,
    external,
    field,
    i32,
    i64,
    ptr,
    select,
    sext,
    store,
)
from rlx.export.errors import Code
from rlx.export.layout import (
    GO,
    MAPPED,
    MAPPED_BYTES,
    OWN_BYTES,
    QUIT,
    RECORDS,
    THREAD_BYTES,
    THREADS,
    WEIGHT_HEADER,
)
from rlx.export.tables import Tables
from rlx.export.threads import rlx_worker
from rlx.ir.weights import round_up

# Numbers of Linux, the same on every processor that there is a target for.
_READ_ONLY, _CLOSE_ON_EXEC, _SEEK_END = 0, 0o2000000, 2
_PROT_READ, _PROT_WRITE, _PRIVATE, _ANONYMOUS = 1, 2, 2, 0x20

_open = external("open", i32, fixed=2)
_close = external("close", i32)
_lseek = external("lseek", i64)
_read = external("read", i64)
_mmap = external("mmap", ptr)
_munmap = external("munmap", i32)
_bytes = external("rlx_bytes", i64)
_init = external("rlx_init", i32)
_enlist = external("rlx_enlist", ptr)
_pthread_create = external("pthread_create", i32)
_pthread_join = external("pthread_join", i32)

WEIGHTS_SYMBOL = "rlx_weights"
EMBEDDED = f"@{WEIGHTS_SYMBOL} = external hidden constant [0 x i8]"
"""Declares weights that are part of the program."""


@native
def rlx_open(result: ptr, path: ptr, threads: i32, *, embedded: int | None) -> i32:
    """Map the weights and make a context; on failure the result is null. Embedded weights of so many bytes
    are used where the path is null."""
    if result == ptr(0):
        return i32(Code.ARGUMENT)
    store(ptr(0), result)
    if threads < 1:
        return i32(Code.ARGUMENT)
    mapped, nbytes = ptr(0), i64(0)
    if path == ptr(0):
        if embedded is None:
            return i32(Code.OPEN)
        nbytes = i64(embedded)
    else:
        file = _open(path, i32(_READ_ONLY | _CLOSE_ON_EXEC))
        if file < 0:
            return i32(Code.OPEN)
        nbytes = _lseek(file, i64(0), i32(_SEEK_END))
        if nbytes < WEIGHT_HEADER:
            _close(file)
            return select(nbytes < 0, i32(Code.OPEN), i32(Code.TRUNCATED))
        mapped = _mmap(ptr(0), nbytes, i32(_PROT_READ), i32(_PRIVATE), file, i64(0))
        readable = _read(file, ptr(0), i64(0)) == 0  # a folder opens, but has nothing to read or to map
        _close(file)
        if mapped == ptr(-1):
            return select(readable, i32(Code.MEMORY), i32(Code.OPEN))
    size = _bytes(threads)
    context = _mmap(ptr(0), size, i32(_PROT_READ | _PROT_WRITE), i32(_PRIVATE | _ANONYMOUS), i32(-1), i64(0))
    if context == ptr(-1):
        if path != ptr(0):
            _munmap(mapped, nbytes)
        return i32(Code.MEMORY)
    store(size, at(context, OWN_BYTES))
    if path != ptr(0):
        store(mapped, at(context, MAPPED))
        store(nbytes, at(context, MAPPED_BYTES))
    if embedded is not None:
        mapped = select(path == ptr(0), ptr(Value("ptr", f"@{WEIGHTS_SYMBOL}")), mapped)
    code = _init(context, mapped, nbytes)
    if code == 0:
        code = start_threads(context, threads)
    if code != 0:
        rlx_close(context)
        return code
    store(context, result)
    return i32(Code.OK)


@inline
def start_threads(context: ptr, threads: i32) -> i32:
    """Start all threads but the first, which is the caller's."""
    records, code = _enlist(context, threads), i32(Code.OK)
    store(records, at(context, RECORDS))
    for thread in range(i64(1), sext(threads, i64)):
        record = byte_at(records, thread * THREAD_BYTES)
        worker = ptr(Value("ptr", f"@{rlx_worker.name}"))
        if code == 0 and _pthread_create(at(record, 2), ptr(0), worker, record) != 0:
            context[THREADS] = thread
            code = i32(Code.THREADS)
    return code


@native
def rlx_close(context: ptr) -> None:
    """Release a context and its weights; null is allowed."""
    if context != ptr(0):
        if context[THREADS] > 1:
            atomic_store(i64(1), at(context, QUIT))
            atomic_rmw("add", at(context, GO), i64(1), "seq_cst")
            wake(at(context, GO), everybody=True)
            for thread in range(i64(1), context[THREADS]):
                record = byte_at(field(context, RECORDS, ptr), thread * THREAD_BYTES)
                _pthread_join(record[2], ptr(0))
        if context[MAPPED_BYTES] != 0:
            _munmap(field(context, MAPPED, ptr), context[MAPPED_BYTES])
        _munmap(context, context[OWN_BYTES])


def write_c_functions(module: Module, tables: Tables, embedded: bool) -> None:
    """Write what opens and closes a program; `embedded` weights are part of it."""
    rlx_close.emit(module)
    rlx_open.emit(module, embedded=WEIGHT_HEADER + round_up(tables.spaces["weight"], 8) if embedded else None)
