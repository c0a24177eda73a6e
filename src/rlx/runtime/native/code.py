"""What pool, driver and reader share: waiting, sleeping and telling the time, as emitted code.

These are the only native code that is not a kernel. It is written for the baseline of the instruction
set, because nothing in it gains from vectors.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Mapping

from rlx.codegen.native.irtext import Bool, Function, Int, Module, Number, Value, constant
from rlx.codegen.native.jit import Code, compile_and_load, compile_object, load
from rlx.runtime.store.cache import ObjectCache
from rlx.target.cpu import Target, resolve

_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_POLL_MICROSECONDS = 50
_MXCSR_DEFAULT = 0x1F80  # all exceptions masked, round to nearest, denormals kept

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
    """The key and the object of the functions that `emit` writes."""
    text = _text(emit, target)
    key = hashlib.sha256(f"{target.triple}\n{text}".encode()).hexdigest()
    if key not in _known:
        _known[key] = cache.get_or_make(key, target, lambda: compile_object(text, target))
    return key, _known[key]


def offer(objects: Mapping[str, bytes]) -> None:
    """Take these objects where `cached` is asked for their keys: a file that is trusted brings them along, so
    that it runs without a compiler."""
    _known.update(objects)


def _text(emit: Callable[[Module], None], target: Target) -> str:
    module = Module(target)
    emit(module)
    return module.text()


def clock(f: Function) -> Value:
    """Nanoseconds of the clock behind Python's `time.perf_counter_ns`; about 25 ns to read."""
    spec = f.alloca("i64", 2)
    f.call("clock_gettime", [constant("i32", _CLOCK_MONOTONIC), spec], "i32")
    seconds, nanoseconds = f.field(spec, 0), f.field(spec, 1)
    return f.value(f.add(f.mul(seconds, 1_000_000_000), nanoseconds))


def wait_while(f: Function, condition: Callable[[], Bool], spins: Int) -> None:
    """Wait for another thread that works: pause `spins` times, then yield, as it may need this very core."""

    def once(carried: list[Value]) -> list[Int]:
        (tries,) = carried
        f.branch(f.cmp("slt", tries, spins), f.pause, lambda: f.call("sched_yield", [], "i32"))
        return [f.add(tries, 1)]

    f.while_loop([0], lambda _: condition(), once)


def sleep_while(f: Function, word: Value, expected: Value) -> None:
    """Sleep until `wake` is called on `word`, unless it no longer holds `expected`. May return early.

    Without futexes (any system but Linux) this naps and lets the caller look again.
    """
    number = _futex_number(f.module.target)
    if number is None:
        f.call("usleep", [constant("i32", _POLL_MICROSECONDS)], "i32")
    else:
        # The futex compares 32 bits: the low half of the word, which comes first on both machines.
        arguments: list[Number] = [
            number,
            word,
            constant("i32", _FUTEX_WAIT_PRIVATE),
            f.trunc(expected, "i32"),
            constant("ptr", 0),
        ]
        f.call("syscall", arguments, "i64", fixed=1)


def wake(f: Function, word: Value) -> None:
    """Wake the thread that sleeps on `word`."""
    number = _futex_number(f.module.target)
    if number is not None:
        arguments: list[Number] = [number, word, constant("i32", _FUTEX_WAKE_PRIVATE), constant("i32", 1)]
        f.call("syscall", arguments, "i64", fixed=1)


def _futex_number(target: Target) -> int | None:
    if sys.platform != "linux":
        return None
    return 202 if target.x86 else 98


def default_float_mode(f: Function) -> Callable[[], None]:
    """Round to nearest and keep denormals from here on; the returned function emits the way back.

    Other libraries change this mode in the threads they load in. Results must not depend on that, nor on
    which thread computes them.
    """
    if f.module.target.x86:
        modes = f.alloca("i32", 2, align=4)
        wanted = f.gep(modes, 1, "i32")
        f.call("llvm.x86.sse.stmxcsr", [modes])
        f.store(constant("i32", _MXCSR_DEFAULT), wanted)
        f.call("llvm.x86.sse.ldmxcsr", [wanted])
        undo, saved = "llvm.x86.sse.ldmxcsr", modes
    else:
        saved = f.call("llvm.aarch64.get.fpcr", [], "i64")
        f.call("llvm.aarch64.set.fpcr", [0])
        undo = "llvm.aarch64.set.fpcr"

    def restore() -> None:
        f.call(undo, [saved])

    return restore
