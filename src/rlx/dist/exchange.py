"""A whole exchange between ranks that map each other's heaps, in one native call.

The call meets the others, copies or reduces what is there for this rank, and meets them again. Arrays in the
heap are read where they lie; others go piece by piece through the staging areas. A call that has copied a
megabyte finds Python's own memory gone from the caches, where every line of Python costs a microsecond; so a
call with the same arrays as one before needs no more of it than to find its table.

While it waits, the call looks after deaths and deadlines through a callback. What it cannot do (ranks bring
different lengths, some have their arrays in the heap and some not) is left to `MappedTransport.exchange`,
which goes on after the first meeting.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dist import copies, sync
from rlx.dist.heap import RING_BYTES, STAGE_BYTES
from rlx.dist.transport import DONE, Outgoing, address_of

if TYPE_CHECKING:
    from rlx.backend.cpu.irtext import Function, Int, Module
    from rlx.backend.cpu.irtypes import Value
    from rlx.backend.cpu.target import Target

# The call's table, in 8-byte fields. First whom to call and what to post, then where everybody's memory lies;
# what this rank has (its array, `REGIONS` pairs of offset and length at `CUTS`, the longest of them, how much
# of each is staged at once), what it wants (`SIZE` bytes from `START` on of everybody's array, those of rank
# r at `TO` + r * `STRIDE`), and how. Last come `FACTS` triples that `again` compares before all else.
(POST, BARRIER, WAIT, LOOK, TAG, LENGTH, PLACE, HEAPS, STAGES, POSITION) = range(10)
(ARRAY, REGIONS, CUTS, LONGEST, SLOT, START, SIZE, TO, STRIDE) = range(10, 19)
(SENDER, SHARE, REDUCE, ITEM, FILL, COPY, POINTERS, FACTS, COMPARED, FIELDS) = range(19, 29)

# What it returns besides DONE and a verdict of the first meeting: the callback ended the wait, the arrays are
# not those that the table was made for.
ENDED, CHANGED = 2 * DONE, 4 * DONE
# Error codes of the kernel that a compiled program calls.
STOPPED, DIFFERENT = 1001, 1002
KERNEL_ARGUMENT = 3  # the address of its table, behind the fields that every kernel has

NOBODY = -1
_DIFFER = sync.TAGS_DIFFER | sync.LENGTHS_DIFFER


def emit(target: Target) -> str:
    """LLVM IR of the exchange, of the call that compares first, and of the kernel for compiled programs."""
    from rlx.backend.cpu.irtext import Module

    module = Module(target)
    _emit_copy(module)
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
    loop, array, cuts = f.field(table, FILL, "ptr"), f.field(table, ARRAY, "ptr"), f.field(table, CUTS, "ptr")

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
    return f.field(f.field(table, POSITION, "ptr"), 0)


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

        staged = f.cmp("eq", f.field(table, PLACE), 0)
        f.branch(f.value(staged), lambda: f.call("rlx_fill", [table, f.value(0)]))
        verdict = self.meet(f.field(table, LENGTH), f.field(table, PLACE))
        f.branch(f.cmp("ne", f.and_(verdict, _DIFFER | ENDED), 0), lambda: f.return_(verdict))
        f.branch(
            f.cmp("eq", f.and_(verdict, sync.SOME_PLACES), 0), self.staged, lambda: self.in_place(verdict)
        )
        f.return_(f.value(DONE))

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

    def source(self, member: Value) -> Value:
        """Where the pointer to a member's data stands."""
        return self.f.gep(self.sources, member, "i64")

    # ---- arrays that lie in the heap

    def in_place(self, verdict: Value) -> None:
        f, table = self.f, self.table

        def place(member: Value) -> Value:
            return f.field(self.places, f.mul(member, 2))

        def need(member: Value) -> None:
            # Some have their arrays elsewhere: nothing is moved, all know it.
            f.branch(f.cmp("eq", place(member), 0), lambda: f.return_(verdict))
            offset = f.add(f.sub(place(member), 1), f.field(table, START))
            heap = f.field(f.field(table, HEAPS, "ptr"), member, "ptr")
            f.store(f.gep(heap, offset, "i8"), self.source(member), 8)

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
            position = _position(f, table)
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
            self.act(f.value(done), _piece(f, table, f.field(table, SIZE), done), f.value(2))
            moved = f.add(position, f.mul(f.field(table, REGIONS), slot))
            full = f.cmp("sgt", f.add(moved, STAGE_BYTES), RING_BYTES)
            f.store(f.select(full, f.value(0), f.value(moved)), f.field(table, POSITION, "ptr"), 8)
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
            f.call("rlx_move", [place, source, size, f.field(table, COPY, "ptr")])

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
    f = module.function("rlx_meet", [("ptr", "args"), ("i64", "thread"), ("i64", "threads")])
    args = f.args[0]
    verdict = f.call("rlx_exchange", [f.field(args, KERNEL_ARGUMENT, "ptr")], "i64")
    ended = f.cmp("ne", f.and_(verdict, ENDED), 0)
    error = f.select(ended, f.value(STOPPED), f.value(DIFFERENT))
    f.branch(f.cmp("ne", verdict, DONE), lambda: f.store(error, f.field(args, 0, "ptr"), 8))
    f.return_()


@functools.cache
def _code() -> Any:
    return sync.load_cached(emit)


def kernel() -> int:
    """Where the kernel for compiled programs begins."""
    address: int = _code().address("rlx_meet")
    return address


def lines(nbytes: int) -> int:
    """Bytes of the cache lines that hold `nbytes`, at least one."""
    return max(1, -(-nbytes // copies.LINE)) * copies.LINE


def slot_bytes(regions: Sequence[tuple[int, int]], longest: int) -> int:
    """How much of every region is staged at once."""
    return min(STAGE_BYTES // len(regions) // copies.LINE * copies.LINE, lines(longest))


class Exchanger:
    """The native call of one group, and its position in the ring of staging memory.

    Every piece of an exchange is staged behind the one before. A line that comes round again has left the
    other cores' own caches; to write one that is still there takes five times as long.
    """

    def __init__(self, post: int, heaps: Sequence[int], stages: Sequence[int], me: int) -> None:
        code = _code()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
        self.run = prototype(code.address("rlx_exchange"))
        self.again = prototype(code.address("rlx_again"))
        self._memory = np.array([*heaps, *stages, 0], np.int64)
        address, self._n, self._me = address_of(self._memory), len(heaps), me
        native: Any = sync.sync().code
        self._common = np.zeros(FIELDS, np.int64)
        self._common[POST] = post
        self._common[[BARRIER, WAIT]] = [native.address(f"rlx_{name}") for name in ("barrier", "wait")]
        self._common[[HEAPS, STAGES, POSITION]] = [address + 8 * self._n * part for part in range(3)]

    @property
    def position(self) -> int:
        """Where in the ring the next piece begins, on all ranks."""
        return int(self._memory[-1])

    def advance(self, used: int) -> None:
        """Go past a piece; there is always room for the largest."""
        moved = self.position + used
        self._memory[-1] = 0 if moved + STAGE_BYTES > RING_BYTES else moved

    def table(
        self, tag: int, out: Outgoing, place: int, look: int, facts: Sequence[tuple[int, int, int]] = ()
    ) -> np.ndarray[Any, Any]:
        """All that the call needs to know of an exchange whose results go to `out.into`."""
        assert out.into is not None
        n, nbytes, regions, fields = self._n, out.array.nbytes, out.regions, FIELDS
        pieces = [self._common, np.zeros(2 * n, np.int64), np.array(regions, np.int64).reshape(-1)]
        table = np.concatenate([*pieces, np.array(facts, np.int64).reshape(-1)])
        address, start, size = address_of(table), *regions[self._me if len(regions) > 1 else 0]
        longest = max(length for _, length in regions)
        total = nbytes if out.share else size * (1 if out.reduce else n)
        past = [copies.code_for(nbytes), 0 if out.overlaps(n) else copies.code_for(total)]
        table[[LOOK, TAG, LENGTH, PLACE]] = look, tag, nbytes, place
        table[[ARRAY, REGIONS, LONGEST]] = address_of(out.array), len(regions), longest
        table[[SLOT, START, SIZE]] = slot_bytes(regions, longest), start, size
        table[[TO, STRIDE]] = out.into
        table[[SENDER, SHARE]] = NOBODY if out.sender is None else out.sender, out.share
        table[[REDUCE, ITEM, FILL, COPY]] = out.reduce, out.array.itemsize, *past
        table[[POINTERS, CUTS]] = address + 8 * fields, address + 8 * (fields + 2 * n)
        table[[FACTS, COMPARED]] = address + 8 * (fields + 2 * n + 2 * len(regions)), len(facts)
        return table


# Where NumPy's array object holds what it knows, behind the object's own fields, as its C interface says:
# address of the data, number of dimensions, their sizes, (strides, base,) element type, flags.
_DATA, _RANK, _SHAPE, _DTYPE, _FLAGS = (object.__basicsize__ + 8 * index for index in (0, 1, 2, 5, 6))
_WORD, _INT = -1, 2**32 - 1


def facts_of(array: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """(address, value, mask) of the words that make an array what it is, to find it unchanged.

    >>> a = np.zeros((2, 3))
    >>> [value for _, value, _ in facts_of(a)][-2:]
    [2, 3]
    """
    masks = {_DATA: _WORD, _RANK: _INT, _SHAPE: _WORD, _DTYPE: _WORD, _FLAGS: _INT}
    known = [(id(array) + offset, mask) for offset, mask in masks.items()]
    sizes = ctypes.c_int64.from_address(id(array) + _SHAPE).value
    known += [(sizes + 8 * axis, _WORD) for axis in range(array.ndim)]
    return [(place, ctypes.c_int64.from_address(place).value, mask) for place, mask in known]
