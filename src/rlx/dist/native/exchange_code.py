"""The native code of an exchange (see `exchange`) as LLVM IR, and the table that tells it what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.dist.native import copies
from rlx.dist.native import sync
from rlx.dist.heap import RING_BYTES, STAGE_BYTES
from rlx.dist.transport import DONE

if TYPE_CHECKING:
    from rlx.codegen.native.irtext import Function, Int, Module
    from rlx.codegen.native.irtypes import Value
    from rlx.target.cpu import Target

# The call's table, in 8-byte fields. First whom to call and what to post, then where everybody's memory lies;
# what this rank has (its array, `REGIONS` pairs of offset and length at `CUTS`, the longest of them, how much
# of each is staged at once), what it wants (`SIZE` bytes from `START` on of everybody's array, those of rank
# r at `TO` + r * `STRIDE`), and how. Last come `FACTS` triples that `again` compares before all else.
(POST, BARRIER, WAIT, LOOK, TAG, LENGTH, PLACE, AWAY, ALWAYS, HEAPS, STAGES, PROCESSES, RING) = range(13)
(ARRAY, REGIONS, CUTS, LONGEST, SLOT, TOO_LONG, START, SIZE, TO, STRIDE) = range(13, 23)
(SENDER, SHARE, REDUCE, ITEM, FILL, PAST, COPY, POINTERS, FACTS, COMPARED, FIELDS) = range(23, 34)

# The ring's own fields: where the next piece begins, how often it came round, how many fills in a row were
# slow, and for how many calls the cores of the other ranks still count as far away.
POSITION, ROUNDS, SLOW, FAR, RING_FIELDS = range(5)
# Cores that do not share a cache take ten times as long to hand lines over, and a virtual machine may move to
# such cores at any time. Some fills in a row of so many bytes that are so much slower than a copy tell; then
# data go past the caches or are read in the other processes' own memory, until it is tried again.
MEASURED_BYTES, FAR_FACTOR, SLOW_FILLS, FAR_CALLS = 64 << 10, 6, 3, 64

# What it returns besides DONE and a verdict of the first meeting: the callback ended the wait, the arrays are
# not those that the table was made for, another process's memory could not be read.
ENDED, CHANGED, UNREADABLE = 2 * DONE, 4 * DONE, 8 * DONE
# Error codes of the kernel that a compiled program calls.
STOPPED, DIFFERENT = 1001, 1002
KERNEL_ARGUMENT = 3  # the address of its table, behind the fields that every kernel has

NOBODY = -1
_DIFFER = sync.TAGS_DIFFER | sync.LENGTHS_DIFFER


def emit(target: Target) -> str:
    """LLVM IR of the exchange, of the call that compares first, and of the kernel for compiled programs."""
    from rlx.codegen.native.irtext import Module

    module = Module(target)
    _emit_copy(module)
    _emit_read(module)
    _emit_meet(module)
    _emit_fill(module)
    _Exchange(module)
    _emit_again(module)
    _emit_kernel(module)
    return module.text()


def _emit_copy(module: Module) -> None:
    """void copy(to, source, bytes, loop): by the loop that stores past the caches, if one is given."""
    params = [("ptr", "to"), ("ptr", "source"), ("i64", "bytes"), ("ptr", "loop")]
    f = module.function("rlx_move", params, internal=True)
    to, source, size, loop = f.args
    address = f.op("i64", f"ptrtoint {to} to i64")
    short = f.cmp("slt", size, copies.LEAST_BYTES)
    plain = f.value(f.or_(short, f.cmp("eq", f.op("i64", f"ptrtoint {loop} to i64"), 0)))
    there = f.cmp("eq", address, f.op("i64", f"ptrtoint {source} to i64"))  # in place already
    f.branch(f.value(there), lambda: f.return_())
    f.branch(
        plain,
        lambda: f.call("memmove", [to, source, size], "ptr"),
        lambda: f.call(loop, [to, source, size, f.value(f.and_(f.sub(0, address), copies.LINE - 1))]),
    )
    f.return_()


def _emit_read(module: Module) -> None:
    """i64 read(process, to, source, bytes): from its own memory; 0 if that went well."""
    params = [("i64", "process"), ("ptr", "to"), ("ptr", "source"), ("i64", "bytes")]
    f = module.function("rlx_read", params, internal=True, returns="i64")
    process, to, source, size = f.args
    vectors = f.alloca("i64", 4)
    here, there = vectors, f.gep(vectors, 2, "i64")
    one = f.value(1)

    def read(carried: list[Value]) -> list[Value]:
        (done,) = carried
        left = f.value(f.sub(size, done))
        for vector, start in ((here, to), (there, source)):
            f.store(f.gep(start, done, "i8"), vector, 8)
            f.store(left, f.gep(vector, 1, "i64"), 8)
        pid = f.trunc(process, "i32")
        got = f.call("process_vm_readv", [pid, here, one, there, one, f.value(0)], "i64")
        f.branch(f.cmp("sle", got, 0), lambda: f.return_(one))
        return [f.value(f.add(done, got))]

    f.while_loop([0], lambda carried: f.cmp("slt", carried[0], size), read)
    f.return_(f.value(0))


def _emit_meet(module: Module) -> None:
    """i64 meet(table, length, place): post, and wait for all; the verdict, or ENDED by the callback."""
    params = [("ptr", "table"), ("i64", "length"), ("i64", "place")]
    f = module.function("rlx_meet_all", params, internal=True, returns="i64")
    table, length, place = f.args
    post = f.field(table, POST, "ptr")
    for value, field in ((f.field(table, TAG), sync.TAG), (length, sync.LENGTH), (place, sync.PLACE)):
        f.store(value, f.gep(post, field, "i64"), 8)

    def look_and_wait(_: list[Value]) -> list[Value]:
        ended = f.call(f.field(table, LOOK, "ptr"), [], "i64")
        wait = f.field(table, WAIT, "ptr")
        return f.if_value(
            f.cmp("ne", ended, 0), lambda: [f.value(ENDED)], lambda: [f.call(wait, [post], "i64")]
        )

    first = f.call(f.field(table, BARRIER, "ptr"), [post], "i64")
    f.return_(f.while_loop([first], lambda carried: f.cmp("slt", carried[0], 0), look_and_wait)[0])


def _piece(f: Function, table: Value, total: Int, done: Int) -> Value:
    """Bytes of the piece that begins `done` bytes into `total`."""
    return f.value(f.smax(f.smin(f.value(f.sub(total, done)), f.field(table, SLOT)), f.value(0)))


def _emit_fill(module: Module) -> None:
    """void fill(table, done): copy the next piece of every region that others read into the stage."""
    f = module.function("rlx_fill", [("ptr", "table"), ("i64", "done")], internal=True)
    table, done = f.args
    post = f.field(table, POST, "ptr")
    me, regions = f.field(post, sync.ME), f.field(table, REGIONS)
    stage = f.gep(f.field(f.field(table, STAGES, "ptr"), me, "ptr"), _position(f, table), "i8")
    loop, array, cuts = _loop_for(f, table), f.field(table, ARRAY, "ptr"), f.field(table, CUTS, "ptr")

    def send(receiver: Int, _: list[Value]) -> None:
        offset = f.field(cuts, f.mul(receiver, 2))
        length = f.field(cuts, f.add(f.mul(receiver, 2), 1))
        to = f.gep(stage, f.mul(receiver, f.field(table, SLOT)), "i8")
        source = f.gep(array, f.add(offset, done), "i8")
        others = f.or_(f.cmp("ne", receiver, me), f.cmp("eq", regions, 1))
        f.branch(
            f.value(others), lambda: f.call("rlx_move", [to, source, _piece(f, table, length, done), loop])
        )

    sender = f.field(table, SENDER)
    sends = f.or_(f.cmp("eq", sender, NOBODY), f.cmp("eq", sender, me))
    alone = f.cmp("eq", f.field(post, sync.MEMBERS), 1)
    needed = f.and_(f.value(sends), f.not_(f.value(alone)))
    f.branch(f.value(needed), lambda: f.loop(0, regions, 1, [], send))
    f.return_()


def _position(f: Function, table: Value) -> Value:
    return f.field(f.field(table, RING, "ptr"), POSITION)


def _far(f: Function, table: Value) -> Value:
    """For how many calls the others count as far away; 0 if they are near."""
    return f.field(f.field(table, RING, "ptr"), FAR)


def _loop_for(f: Function, table: Value) -> Value:
    """How to write what others will read."""
    return f.select(f.cmp("ne", _far(f, table), 0), f.field(table, PAST, "ptr"), f.field(table, FILL, "ptr"))


def _clock(f: Function) -> Value:
    """Nanoseconds of the monotonic clock."""
    time = f.alloca("i64", 2)
    f.call("clock_gettime", [f.value(1, "i32"), time], "i32")
    return f.value(f.add(f.mul(f.field(time, 0), 10**9), f.field(time, 1)))


class _Exchange:
    """Writes `i64 rlx_exchange(table)`."""

    def __init__(self, module: Module) -> None:
        self.f = f = module.function("rlx_exchange", [("ptr", "table")], returns="i64")
        (self.table,) = f.args
        table = self.table
        self.post = post = f.field(table, POST, "ptr")
        self.members, self.me = f.field(post, sync.MEMBERS), f.field(post, sync.ME)
        self.places = f.gep(post, sync.RECEIVED + 1, "i64")
        self.sources = f.field(table, POINTERS, "ptr")
        self.destinations = f.gep(self.sources, self.members, "i64")
        self.only = f.field(table, SENDER)
        self.shares = f.value(f.cmp("ne", f.field(table, SHARE), 0))

        place = self.offer()
        f.branch(f.cmp("eq", place, 0), self.first_fill)
        verdict = self.meet(f.field(table, LENGTH), place)
        f.branch(f.cmp("ne", f.and_(verdict, _DIFFER | ENDED), 0), lambda: f.return_(verdict))
        f.branch(
            f.cmp("eq", f.and_(verdict, sync.SOME_PLACES), 0), self.staged, lambda: self.in_place(verdict)
        )
        f.return_(f.value(DONE))

    def offer(self) -> Value:
        """What to post: a place in the heap, or in this process's own memory if the others are far, or 0."""
        f, table = self.f, self.table
        far, ring = _far(f, table), f.field(table, RING, "ptr")
        counts = f.and_(f.cmp("ne", far, 0), f.cmp("ne", f.field(table, TOO_LONG), 0))
        f.branch(f.value(counts), lambda: f.store(f.sub(far, 1), f.gep(ring, FAR, "i64"), 8))
        away = f.value(f.or_(f.cmp("ne", _far(f, table), 0), f.cmp("ne", f.field(table, ALWAYS), 0)))
        given = f.field(table, PLACE)
        elsewhere = f.select(away, f.field(table, AWAY), f.value(0))
        return f.select(f.cmp("ne", given, 0), given, elsewhere)

    def first_fill(self) -> None:
        """Fill the stage, and see how long it takes; not while the ring's memory is new."""
        f, table = self.f, self.table
        ring, limit = f.field(table, RING, "ptr"), f.field(table, TOO_LONG)
        begin = _clock(f)
        f.call("rlx_fill", [table, f.value(0)])
        is_slow = f.cmp("sgt", f.sub(_clock(f), begin), limit)

        def judge() -> None:
            slow = f.select(is_slow, f.value(f.add(f.field(ring, SLOW), 1)), f.value(0))
            f.store(slow, f.gep(ring, SLOW, "i64"), 8)
            told = f.cmp("sge", slow, SLOW_FILLS)
            f.branch(told, lambda: f.store(f.value(FAR_CALLS), f.gep(ring, FAR, "i64"), 8))

        near = f.and_(f.cmp("eq", _far(f, table), 0), f.cmp("ne", limit, 0))
        f.branch(f.value(f.and_(near, f.cmp("ne", f.field(ring, ROUNDS), 0))), judge)

    def meet(self, length: Value, place: Value) -> Value:
        return self.f.call("rlx_meet_all", [self.table, length, place], "i64")

    def meet_again(self) -> None:
        """A meeting that only says that everybody has come so far."""
        f = self.f
        verdict = self.meet(f.value(0), f.value(0))
        f.branch(f.cmp("ne", f.and_(verdict, sync.TAGS_DIFFER | ENDED), 0), lambda: f.return_(verdict))

    def senders(self, body: Callable[[Value], None]) -> None:
        """For the one sender, or for all: oneself first and so on round, so that nobody is crowded."""
        f = self.f

        def visit(turn: Int, _: list[Value]) -> None:
            around = f.value(f.add(self.me, turn))
            wrapped = f.value(f.sub(around, self.members))
            body(f.select(f.cmp("slt", around, self.members), around, wrapped))

        f.branch(
            f.cmp("eq", self.only, NOBODY),
            lambda: f.loop(0, self.members, 1, [], visit),
            lambda: body(self.only),
        )

    def place(self, member: Value) -> Value:
        """What a member has posted: 1 + offset in its heap, minus an address in its own memory, or 0."""
        return self.f.field(self.places, self.f.mul(member, 2))

    def source(self, member: Value) -> Value:
        """Where the pointer to a member's data stands."""
        return self.f.gep(self.sources, member, "i64")

    # ---- arrays that lie in the heap

    def in_place(self, verdict: Value) -> None:
        f, table = self.f, self.table

        def need(member: Value) -> None:
            place = self.place(member)
            # Some have their arrays elsewhere: nothing is moved, all know it.
            f.branch(f.cmp("eq", place, 0), lambda: f.return_(verdict))
            heap = f.add(f.field(f.field(table, HEAPS, "ptr"), member), f.sub(place, 1))
            address = f.select(f.cmp("slt", place, 0), f.value(f.sub(0, place)), f.value(heap))
            f.store(f.add(address, f.field(table, START)), self.source(member), 8)

        def everywhere(member: Int, _: list[Value]) -> None:
            f.store(f.field(self.sources, member, "ptr"), f.gep(self.destinations, member, "i64"), 8)

        self.senders(need)
        f.branch(self.shares, lambda: f.loop(0, self.members, 1, [], everywhere))
        self.act(f.value(0), f.field(table, SIZE), self.members)
        self.meet_again()  # nobody may change its array before all have read it

    # ---- arrays that are staged

    def staged(self) -> None:
        f, table = self.f, self.table
        slot, longest = f.field(table, SLOT), f.field(table, LONGEST)
        several = f.cmp("ne", f.field(table, REGIONS), 1)
        shift = f.select(several, f.value(f.mul(self.me, slot)), f.value(0))

        def piece(done: Int, _: list[Value]) -> None:
            position, ring = _position(f, table), f.field(table, RING, "ptr")
            here = f.value(f.add(position, shift))

            def stand(member: Value) -> None:
                stage = f.field(f.field(table, STAGES, "ptr"), member, "ptr")
                f.store(f.gep(stage, here, "i8"), self.source(member), 8)

            self.senders(stand)
            own_stage = f.field(self.sources, self.me, "ptr")
            own = f.gep(f.field(table, ARRAY, "ptr"), f.add(f.field(table, START), done), "i8")
            needs_no_detour = f.or_(f.cmp("eq", self.only, NOBODY), f.cmp("eq", self.only, self.me))
            f.branch(f.value(needs_no_detour), lambda: f.store(own, self.source(self.me), 8))

            def results_for_all() -> None:
                f.store(own, self.destinations, 8)
                f.store(own_stage, f.gep(self.destinations, 1, "i64"), 8)

            f.branch(self.shares, results_for_all)
            # The reduction writes them to both places, or the others' copy goes past the caches afterwards.
            size, far = _piece(f, table, f.field(table, SIZE), done), f.cmp("ne", _far(f, table), 0)
            self.act(f.value(done), size, f.select(far, f.value(1), f.value(2)))
            past = f.field(table, PAST, "ptr")
            f.branch(
                f.value(f.and_(far, self.shares)), lambda: f.call("rlx_move", [own_stage, own, size, past])
            )
            moved = f.add(position, f.mul(f.field(table, REGIONS), slot))
            full = f.value(f.cmp("sgt", f.add(moved, STAGE_BYTES), RING_BYTES))
            f.store(f.select(full, f.value(0), f.value(moved)), f.gep(ring, POSITION, "i64"), 8)
            rounds = f.add(f.field(ring, ROUNDS), f.zext(full, "i64"))
            f.store(rounds, f.gep(ring, ROUNDS, "i64"), 8)
            following = f.value(f.add(done, slot))
            more = f.value(f.cmp("slt", following, longest))
            f.branch(more, lambda: f.call("rlx_fill", [table, following]))
            f.branch(f.value(f.or_(more, self.shares)), self.meet_again)
            f.branch(self.shares, lambda: self.collect(f.value(done), position))

        f.loop(0, f.smax(longest, f.value(1)), slot, [], piece)

    def collect(self, done: Value, position: Value) -> None:
        """Copy the results of one piece from the stages of the ranks that have reduced them."""
        f, table = self.f, self.table
        cuts, array = f.field(table, CUTS, "ptr"), f.field(table, ARRAY, "ptr")

        def take(owner: Int, _: list[Value]) -> None:
            offset = f.field(cuts, f.mul(owner, 2))
            size = _piece(f, table, f.field(cuts, f.add(f.mul(owner, 2), 1)), done)
            stage = f.field(f.field(table, STAGES, "ptr"), owner, "ptr")
            source = f.gep(stage, f.add(position, f.mul(owner, f.field(table, SLOT))), "i8")
            to = f.gep(array, f.add(offset, done), "i8")
            f.branch(
                f.cmp("ne", owner, self.me),
                lambda: f.call("rlx_move", [to, source, size, f.field(table, COPY, "ptr")]),
            )

        f.loop(0, f.field(table, REGIONS), 1, [], take)

    # ---- what happens between two meetings

    def act(self, done: Value, size: Value, places: Value) -> None:
        """Reduce or copy `size` bytes from everybody, which belong `done` bytes into the results."""
        f, table = self.f, self.table
        to = f.gep(f.field(table, TO, "ptr"), done, "i8")

        def reduce() -> None:
            f.branch(f.value(f.not_(self.shares)), lambda: f.store(to, self.destinations, 8))
            count = f.select(self.shares, places, f.value(1))
            elements = f.value(f.udiv(size, f.field(table, ITEM)))
            f.call(f.field(table, REDUCE, "ptr"), [self.sources, self.members, count, elements])

        def copy(member: Value) -> None:
            place = f.gep(to, f.mul(member, f.field(table, STRIDE)), "i8")
            source = f.field(self.sources, member, "ptr")

            def read() -> None:
                process = f.field(f.field(table, PROCESSES, "ptr"), member)
                failed = f.call("rlx_read", [process, place, source, size], "i64")
                f.branch(f.cmp("ne", failed, 0), lambda: f.return_(f.value(UNREADABLE)))

            elsewhere = f.and_(f.cmp("slt", self.place(member), 0), f.cmp("ne", member, self.me))
            loop = f.field(table, COPY, "ptr")
            f.branch(f.value(elsewhere), read, lambda: f.call("rlx_move", [place, source, size, loop]))

        f.branch(f.cmp("eq", f.field(table, REDUCE), 0), lambda: self.senders(copy), reduce)


def _emit_again(module: Module) -> None:
    """i64 again(table): the exchange, if the arrays are what they were: (*address ^ value) & mask is 0."""
    f = module.function("rlx_again", [("ptr", "table")], returns="i64")
    (table,) = f.args
    facts = f.field(table, FACTS, "ptr")

    def compare(index: Int, _: list[Value]) -> None:
        fact = f.gep(facts, f.mul(index, 3), "i64")
        word = f.load("i64", f.field(fact, 0, "ptr"), 8)
        changed = f.and_(f.xor(word, f.field(fact, 1)), f.field(fact, 2))
        f.branch(f.cmp("ne", changed, 0), lambda: f.return_(f.value(CHANGED)))

    f.loop(0, f.field(table, COMPARED), 1, [], compare)
    f.return_(f.call("rlx_exchange", [table], "i64"))


def _emit_kernel(module: Module) -> None:
    """void rlx_meet(args, thread, threads): the exchange as a kernel of a program, for one thread."""
    f = module.function("rlx_meet", KERNEL_ARGS)
    args = f.args[0]
    verdict = f.call("rlx_exchange", [f.field(args, KERNEL_ARGUMENT, "ptr")], "i64")
    ended = f.cmp("ne", f.and_(verdict, ENDED), 0)
    error = f.select(ended, f.value(STOPPED), f.value(DIFFERENT))
    f.branch(f.cmp("ne", verdict, DONE), lambda: f.store(error, f.field(args, 0, "ptr"), 8))
    f.return_()


@functools.cache
def native() -> Any:
    """The code, compiled once per user and loaded once per process."""
    return sync.load_cached(emit)


def kernel() -> int:
    """Where the kernel for compiled programs begins."""
    address: int = native().address("rlx_meet")
    return address
