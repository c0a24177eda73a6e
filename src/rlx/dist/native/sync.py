"""Native rendezvous: epoch words that ranks share, written as LLVM IR with acquire and release order.

Every rank owns one *line* per group, which it alone writes: its epoch (how many barriers it has entered, 32
bits that may wrap) and, for each parity of the epoch, a post: a tag that says what it came for, the length
of its data and, if they lie in its heap, their place. A waiter reads the others' lines, so a missing rank
is visible without any further bookkeeping. Waiting spins briefly, then sleeps in a futex for one short
slice; Python looks after deadlines and deaths between slices.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from rlx.records import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.codegen.native.irtext import Function, Int, Module
    from rlx.codegen.native.irtypes import Value
    from rlx.codegen.native.jit import Code
    from rlx.target.cpu import Target

# A line, in bytes: epoch i32, sleepers i32, then a post of three i64 for even and for odd epochs. The 64
# bytes in use are one cache line; the rest keeps the neighbour's line out of the prefetcher's way.
LINE_BYTES = 128
EPOCH, SLEEPERS, POSTS, POST_BYTES = 0, 4, 16, 24

# The waiter's private table, in 8-byte fields; (length, place) of every member follow from RECEIVED on.
LINES, MEMBERS, ME, MY_EPOCH, SPINS, SECONDS, NANOSECONDS, TAG, LENGTH, PLACE, RECEIVED = range(11)

# What `barrier` and `wait` return: bits that say what was posted, or -1 - i when member i has not arrived
# yet.
LENGTHS_DIFFER, TAGS_DIFFER, SOME_PLACES = 1, 2, 4

# The last rounds of spinning give the core away, those before only pause.
YIELDS = 336

_FUTEX_ON_X86, _FUTEX_ON_ARM = 202, 98
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1


def _at(f: Function, pointer: Value, offset: int) -> Value:
    return f.gep(pointer, offset, "i8")


def _futex(f: Function, word: Value, operation: int, value: Value, timeout: Value) -> None:
    from rlx.codegen.native.irtypes import constant

    zero = constant("i64", 0)
    number = constant("i64", _FUTEX_ON_X86 if f.module.target.x86 else _FUTEX_ON_ARM)
    args = [number, word, constant("i64", operation), value, timeout, zero, zero]
    f.call("syscall", args, "i64", fixed=1)


def _wake(f: Function, word: Value) -> None:
    """After a change of `word`: wake those who sleep on it. The sleepers' count stands beside the word."""
    from rlx.codegen.native.irtypes import constant

    # Sequentially consistent with the sleeper's "count myself, then look again": one of the two sees the
    # other.
    sleepers = f.atomic_load("i32", _at(f, word, SLEEPERS), "seq_cst")
    everybody, nothing = constant("i64", _EVERYBODY), constant("ptr", 0)
    f.branch(f.cmp("ne", sleepers, 0), lambda: _futex(f, word, _FUTEX_WAKE, everybody, nothing))


def _emit_reached(module: Module) -> None:
    """i1 reached(word, goal): whether the counter is at or past the goal, seen modulo 2**32."""
    f = module.function("rlx_reached", [("ptr", "word"), ("i32", "goal")], internal=True, returns="i1")
    word, goal = f.args
    distance = f.sub(f.atomic_load("i32", word, "seq_cst"), goal)
    f.return_(f.value(f.cmp("sge", distance, 0)))


def _emit_wait_word(module: Module) -> None:
    """i64 wait_word(word, goal, spins, timespec): spin, then sleep one slice; 1 if the goal is reached."""
    params = [("ptr", "word"), ("i32", "goal"), ("i64", "spins"), ("ptr", "slice")]
    f = module.function("rlx_wait_word", params, returns="i64")
    word, goal, spins, time_slice = f.args
    pauses = f.sub(spins, YIELDS)

    def reached() -> Value:
        return f.call("rlx_reached", [word, goal], "i1")

    def spin_on(carried: list[Value]) -> Value:
        return f.value(f.and_(f.not_(reached()), f.cmp("slt", carried[0], spins)))

    def spin(carried: list[Value]) -> list[Value]:
        # At first the other is only late by a moment; later it may be waiting for this very core.
        f.branch(f.cmp("slt", carried[0], pauses), f.pause, lambda: f.call("sched_yield", [], "i32"))
        return [f.value(f.add(carried[0], 1))]

    def sleep() -> None:
        sleepers = _at(f, word, SLEEPERS)
        one = f.value(1, "i32")
        f.atomic_rmw("add", sleepers, one, "seq_cst")
        seen = f.atomic_load("i32", word, "seq_cst")
        early = f.cmp("slt", f.sub(seen, goal), 0)
        f.branch(early, lambda: _futex(f, word, _FUTEX_WAIT, f.zext(seen, "i64"), time_slice))
        f.atomic_rmw("sub", sleepers, one, "seq_cst")

    f.while_loop([0], spin_on, spin)
    f.branch(f.value(f.not_(reached())), sleep)
    f.return_(f.zext(reached(), "i64"))


def _emit_arrive(module: Module) -> None:
    """void arrive(table): write the post of the next epoch, then publish the epoch."""
    f = module.function("rlx_arrive", [("ptr", "table")])
    (table,) = f.args
    epoch = f.value(f.add(f.load("i32", f.gep(table, MY_EPOCH, "i64")), 1))
    f.store(epoch, f.gep(table, MY_EPOCH, "i64"))
    line = f.field(f.field(table, LINES, "ptr"), f.field(table, ME), "ptr")
    post = _post(f, line, epoch)
    for index, field in enumerate((TAG, LENGTH, PLACE)):
        f.store(f.field(table, field), f.gep(post, index, "i64"), 8)
    f.atomic_store(epoch, line, "seq_cst")
    _wake(f, line)


def _post(f: Function, line: Value, epoch: Value) -> Value:
    """Where a line holds the post of `epoch`. Two suffice: nobody is more than one barrier ahead."""
    parity = f.zext(f.value(f.and_(epoch, 1)), "i64")
    return f.gep(_at(f, line, POSTS), f.mul(parity, POST_BYTES), "i8")


def _emit_wait(module: Module) -> None:
    """i64 wait(table): until every member has posted the epoch of `arrive`, or one slice has passed."""
    f = module.function("rlx_wait", [("ptr", "table")], returns="i64")
    (table,) = f.args
    epoch = f.load("i32", f.gep(table, MY_EPOCH, "i64"))
    lines, members = f.field(table, LINES, "ptr"), f.field(table, MEMBERS)
    spins, time_slice = f.field(table, SPINS), f.gep(table, SECONDS, "i64")
    tag, length = f.field(table, TAG), f.field(table, LENGTH)

    def arrived(carried: list[Value]) -> Value:
        def look() -> list[Value]:
            line = f.field(lines, carried[0], "ptr")
            return [f.trunc(f.call("rlx_wait_word", [line, epoch, spins, time_slice], "i64"), "i1")]

        return f.if_value(f.cmp("slt", carried[0], members), look, lambda: [f.value(False, "i1")])[0]

    (seen,) = f.while_loop([0], arrived, lambda carried: [f.add(carried[0], 1)])
    f.branch(f.cmp("slt", seen, members), lambda: f.return_(f.sub(-1, seen)))

    def compare(member: Int, carried: list[Value]) -> list[Value]:
        post = _post(f, f.field(lines, member, "ptr"), epoch)
        its_tag, its_length, its_place = (f.field(post, index) for index in range(3))
        received = f.gep(f.gep(table, RECEIVED, "i64"), f.mul(member, 2), "i64")
        f.store(its_length, received, 8)
        f.store(its_place, f.gep(received, 1, "i64"), 8)
        facts = (
            (its_length, length, LENGTHS_DIFFER),
            (its_tag, tag, TAGS_DIFFER),
            (its_place, 0, SOME_PLACES),
        )
        verdict = carried[0]
        for mine, other, bit in facts:
            found = f.select(f.cmp("ne", mine, other), f.value(bit), 0)
            verdict = f.value(f.or_(verdict, f.value(found)))
        return [verdict]

    f.return_(f.loop(0, members, 1, [0], compare)[0])


def _emit_small(module: Module) -> None:
    f = module.function("rlx_barrier", [("ptr", "table")], returns="i64")
    f.call("rlx_arrive", f.args)
    f.return_(f.call("rlx_wait", f.args, "i64"))

    f = module.function("rlx_signal", [("ptr", "word")])
    f.atomic_rmw("add", f.args[0], f.value(1, "i32"), "seq_cst")
    _wake(f, f.args[0])

    f = module.function("rlx_claim", [("ptr", "word"), ("i32", "value")])
    f.compare_exchange(f.args[0], f.value(0, "i32"), f.args[1])


def emit(target: Target) -> str:
    """The whole module as LLVM IR."""
    from rlx.codegen.native.irtext import Module

    module = Module(target)
    for part in (_emit_reached, _emit_wait_word, _emit_arrive, _emit_wait, _emit_small):
        part(module)
    return module.text()


def load_cached(emit: Callable[[Target], str]) -> Code:
    """Code of a module for this machine, compiled once per user."""
    from rlx.codegen.native.jit import compile_object, load
    from rlx.target.cpu import resolve
    from rlx.runtime.store.cache import default_cache

    host = resolve("host")
    text = emit(host)
    key = hashlib.sha256(text.encode()).hexdigest()
    return load(default_cache().get_or_make(key, host, lambda: compile_object(text, host)), host)


@dataclass(frozen=True)
class Sync:
    """The native functions; each releases the GIL while it runs. Arguments are addresses and numbers."""

    barrier: Callable[[int], int]
    wait: Callable[[int], int]
    wait_word: Callable[[int, int, int, int], int]
    signal: Callable[[int], None]
    claim: Callable[[int, int], None]
    code: object


@functools.cache
def sync() -> Sync:
    """Compile and load the functions, once per process."""
    code = load_cached(emit)
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

    def function(name: str, returns: Any, *arguments: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(returns, *arguments)(code.address(f"rlx_{name}"))

    return Sync(
        barrier=function("barrier", i64, pointer),
        wait=function("wait", i64, pointer),
        wait_word=function("wait_word", i64, pointer, i32, i64, pointer),
        signal=function("signal", None, pointer),
        claim=function("claim", None, pointer, i32),
        code=code,
    )
