"""Attention over pages: rows are the heads that share keys, of one token or of a few of the same sequence.

A page is a tile. Keys have positions innermost and values features innermost, so that both products are
    sums[row, lanes] += number[row, i] * matrix[i, lanes]
with i ascending: features for scores, positions for results. The softmax runs between them, page by page.
Every output has one order of operations, set by its own position and keys alone: how many rows share a tile
changes what is loaded, not what is added. Positions that a row does not see take no part in its results, not
even with a weight of 0. Codes are converted where they are loaded; a score is multiplied by the scale of its
key, a weight by that of its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlx.codegen.cpu.attention.block import narrowed
from rlx.codegen.cpu.attention.page import (
    HIDDEN,
    K_SCALES,
    LENGTHS,
    LOG2E,
    SLOTS,
    TABLE,
    V_SCALES,
    K,
    Q,
    V,
    attend_codes,
    attend_page,
)
from rlx.codegen.cpu.expression import ERROR_INDEX
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, kernel
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.native import vmath
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    Word,
    builder,
    call,
    ceildiv,
    fpext,
    gather,
    gep,
    i1,
    i64,
    iota,
    is_nan,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    ptr,
    reduce_add,
    select,
    sext,
    sitofp,
    splat,
    store,
    udiv,
    ule,
    ult,
    zext,
)
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim

if TYPE_CHECKING:
    from rlx.kernel.form import Template

FLOATS = ("f32", "bf16", "f16")
MOST_ROWS = 8  # of a tile
MOST_DEPTH = 512  # features of a head


@kernel
def emit_paged_attention(frame: KernelFrame, form: Template) -> EmittedKernel:
    """Write the kernel: every thread takes tokens of any heads."""
    return Paged(frame, form).emit()


class Paged:
    """A kernel under construction."""

    def __init__(self, frame: KernelFrame, form: Template) -> None:
        self.frame, config = frame, dict(form.config)
        target = frame.module.target
        self.lanes, self.registers = target.lanes("f32"), target.registers
        (self.tokens, heads, depth), (_, kv_heads, _, page) = frame.inputs[Q].shape, frame.inputs[K].shape
        value_depth, dtype = frame.inputs[V].shape[3], frame.inputs[Q].dtype.name
        if dtype not in FLOATS:
            raise UnsupportedError(f"attention over pages of {dtype} has no native kernel")
        if not isinstance(depth, int) or not isinstance(value_depth, int):
            raise UnsupportedError("the native kernel of paged attention wants heads of a static size")
        if not 0 < max(depth, value_depth) <= MOST_DEPTH:
            raise UnsupportedError(f"the native kernel of paged attention takes 1 to {MOST_DEPTH} features")
        assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(page, int)
        self.depth, self.value_depth, self.page, self.heads = depth, value_depth, page, heads
        self.group = heads // kv_heads
        self.block = max(n for n in range(1, MOST_ROWS + 1) if self.group % n == 0)  # heads of a tile
        self.together = MOST_ROWS // self.block  # tokens of one sequence that share a tile
        self.o_element = MEMORY[frame.outputs[0].dtype.name]
        self.coded = frame.inputs[K].dtype.name == "i8"
        self.sinks = V_SCALES + 1 if self.coded else K_SCALES  # the operand, if there is one
        self.softcap, self.window = float(config["softcap"]), int(config["window"])
        scale = float(config["scale"])
        self.factor = scale / self.softcap if self.softcap else scale * LOG2E
        # Rows of scratch, in floats: queries, weights of a page, results; three vectors for the softmax.
        sizes = [self.padded(n) for n in (depth, page, value_depth)] + [self.lanes] * 3
        self.steps = sizes
        self.starts = [MOST_ROWS * sum(sizes[:i]) for i in range(len(sizes))]

    def padded(self, count: int) -> int:
        return -(-count // self.lanes) * self.lanes

    def dim(self, d: Dim) -> Int:
        return cast("Int", self.frame.dim(builder(), d))

    def vectors(self, rows: int) -> int:
        """Vectors of a matrix that a tile of so many rows multiplies at once."""
        return self.registers // 2 if rows == 1 else max((self.registers - 2) // (rows + 1), 1)

    def element(self, operand: int) -> str:
        return MEMORY[self.frame.inputs[operand].dtype.name]

    @inline
    def floats(self, operand: int, base: ptr, step: Int, j: int, count: int) -> Word:
        """Vector j of `count` elements of an operand as floats; 0 beyond the end."""
        first = j * self.lanes
        element = self.element(operand)
        type_ = vector(element, self.lanes)
        if step == 1 and first + self.lanes <= count:
            found = load(type_, gep(base, first, element))
        elif step == 1:
            found = masked_load(type_, gep(base, first, element), lanes(count - first, self.lanes))
        else:
            places = (iota(self.lanes) + first) * step
            found = gather(base, places, element, lanes(count - first, self.lanes))
        return sitofp(found, "float") if element == "i8" else fpext(found, "float")

    # -- tokens

    @inline
    def emit(self) -> EmittedKernel:
        frame, tokens = self.frame, self.dim(self.tokens)
        low, high = cast("tuple[Int, Int]", frame.share(tokens * (self.heads // self.block)))
        self.scratch = ptr(frame.scratch())
        unit = i64(low)
        while unit < high:
            block = udiv(unit, tokens)
            token = unit - block * tokens
            count = i64(1)
            if self.of_one_sequence(token, min(high - unit, tokens - token)):
                self.attend(token, block, self.together)
                count = i64(self.together)
            else:
                self.attend(token, block, 1)
            unit += count
        return frame.finish(4 * MOST_ROWS * sum(self.steps) + 64)

    @inline
    def of_one_sequence(self, token: Int, room: Int) -> bool:
        """Whether the next tokens may share a tile."""
        same = i1(False)
        if self.together > 1:
            if room >= self.together:
                same = i1(True)
                for i in range(1, self.together):
                    same &= self.number(SLOTS, token + i) == self.number(SLOTS, token)
        return cast("bool", same)

    @inline
    def number(self, operand: int, *index: Int) -> i64:
        """An element of an operand of integers."""
        slot = self.frame.inputs[operand]
        element = MEMORY[slot.dtype.name]
        found = load(element, gep(self.frame.start(operand), self.offset(operand, *index), element))
        if element == "i64":
            return cast("i64", found)
        return sext(found, i64) if slot.dtype.is_signed else zext(found, i64)

    @inline
    def offset(self, operand: int, *index: Int) -> Int:
        flat = i64(0)
        for i, step in zip(index, self.frame.inputs[operand].steps, strict=False):
            flat += i * self.dim(step)
        return flat

    @inline
    def attend(self, token: Int, block: Int, count: int) -> None:
        """Tokens of one sequence, for the heads of a block."""
        frame = self.frame
        slot, width = self.number(SLOTS, token), self.dim(frame.inputs[TABLE].shape[1])
        is_known = ult(slot, self.dim(frame.inputs[TABLE].shape[0]))
        starts: list[Int] = []
        ends: list[Int] = []
        for t in range(count):
            length = self.number(LENGTHS, token + t)
            is_good = is_known & ule(length, width * self.page)
            if is_good:
                pass
            else:
                store(i64(ERROR_INDEX), frame.error)
            end: Int = select(is_good, length, 0)
            start: Int = i64(0)
            if self.window >= 0:
                start = max(end - (self.window + 1), 0)
            starts.append(start)
            ends.append(end)
        head = block * self.block
        self.begin(token, head, count)
        first: Int = starts[0]
        last: Int = ends[0]
        for t in range(1, count):
            first, last = min(first, starts[t]), max(last, ends[t])
        stop = ceildiv(last, self.page)
        for p in loop(udiv(first, self.page), stop):
            lows: list[Int] = [max(start - p * self.page, 0) for start in starts]
            highs: list[Int] = [min(end - p * self.page, self.page) for end in ends]
            is_last = p + 1 == stop
            # Most likely the page that is visited next: of this sequence, or the first one of another.
            after: Int = self.number(SLOTS, min(token + count, self.dim(self.tokens) - 1))
            place = (cast("Int", select(is_last, after, slot)), cast("Int", select(is_last, 0, p + 1)))
            self.visit(slot, p, udiv(head, self.group), lows, highs, place)
        self.finish(token, head, count)

    @inline
    def visit(
        self, slot: Int, p: Int, kv_head: Int, lows: list[Int], highs: list[Int], place: tuple[Int, Int]
    ) -> None:
        """The page that is number p of a sequence: the tokens see positions from low to high. The next page
        will be that at `place` of the table.
        """
        is_seen, is_whole = i1(False), i1(True)
        for low, high in zip(lows, highs, strict=True):
            is_seen |= low < high
            is_whole &= (low == 0) & (high == self.page)
        if is_seen:
            page = self.number(TABLE, slot, p)
            if ult(page, self.dim(self.frame.inputs[K].shape[0])):
                k, v = self.part(K, page, kv_head), self.part(V, page, kv_head)
                later = self.part(K, self.known_page(*place), kv_head)
                matrices = [k, v, later]
                if self.coded:
                    matrices += [self.part(K_SCALES, page, kv_head), self.part(V_SCALES, page, kv_head)]
                if is_whole:
                    rows, bounds = len(lows) * self.block, (i64(0), i64(self.page))
                    self.call_page(rows, 0, matrices, *bounds, self.steps[1] // self.lanes)
                else:
                    for t in range(len(lows)):
                        if lows[t] < highs[t]:
                            self.call_part(t * self.block, matrices, lows[t], highs[t])
            else:
                store(i64(ERROR_INDEX), self.frame.error)

    @inline
    def part(self, operand: int, page: Int, kv_head: Int) -> ptr:
        """What a page has of a head."""
        return gep(self.frame.start(operand), self.offset(operand, page, kv_head), self.element(operand))

    @inline
    def known_page(self, slot: Int, p: Int) -> Int:
        """A page to prefetch, if the table has it; some page otherwise."""
        table = self.frame.inputs[TABLE].shape
        is_known = ult(slot, self.dim(table[0])) & ult(p, self.dim(table[1]))
        index = (cast("Int", select(is_known, x, 0)) for x in (slot, p))
        page = self.number(TABLE, *index)
        return cast("Int", select(ult(page, self.dim(self.frame.inputs[K].shape[0])), page, 0))

    @inline
    def call_part(self, first: int, matrices: list[ptr], low: Int, high: Int, vectors: int = 1) -> None:
        """The rows of a token, of a page of which it does not see all: keys behind those that it sees are not
        read, but for the rest of 1, 2, 4, ... vectors.
        """
        most = self.steps[1] // self.lanes
        if vectors >= most:
            self.call_page(self.block, first, matrices, low, high, most)
        elif high <= vectors * self.lanes:
            self.call_page(self.block, first, matrices, low, high, vectors)
        else:
            self.call_part(first, matrices, low, high, 2 * vectors)

    @inline
    def call_page(
        self, rows: int, first: int, matrices: list[ptr], low: Int, high: Int, vectors: int
    ) -> None:
        function = attend_codes if self.coded else attend_page
        name = f"{self.frame.name}.page{rows}x{vectors}"
        name = function.written(name, kernel=self, rows=rows, vectors=vectors)
        arrays = [self.row(self.scratch, i, first) for i in range(6)]
        call(name, self.frame.args, *arrays, *matrices, low, high)

    @inline
    def row(self, scratch: ptr, array: int, number: Int) -> ptr:
        """A row of one of the arrays in scratch."""
        return gep(scratch, self.starts[array] + number * self.steps[array], "float")

    @inline
    def begin(self, token: Int, head: Int, count: int) -> None:
        """Rows of tokens: their queries, and nothing seen yet."""
        step = self.dim(self.frame.inputs[Q].steps[2])
        zero = splat(0.0, self.lanes)
        for t in range(count):
            for h in loop(self.block):
                r = h + t * self.block
                q = gep(self.frame.start(Q), self.offset(Q, token + t, head + h), self.element(Q))
                for j in range(self.steps[0] // self.lanes):
                    x = self.floats(Q, q, step, j, self.depth) * self.factor
                    store(x, gep(self.row(self.scratch, 0, r), j * self.lanes, "float"))
                for j in range(self.steps[2] // self.lanes):
                    store(zero, gep(self.row(self.scratch, 2, r), j * self.lanes, "float"))
                store(splat(HIDDEN, self.lanes), self.row(self.scratch, 3, r))
                store(zero, self.row(self.scratch, 4, r))

    @inline
    def finish(self, token: Int, head: Int, count: int) -> None:
        """Divide by the sums of weights. What saw no key is 0."""
        type_ = vector("float", self.lanes)
        for t in range(count):
            for h in loop(self.block):
                r = h + t * self.block
                total = splat(reduce_add(load(type_, self.row(self.scratch, 4, r))), self.lanes)
                one = splat(1.0, self.lanes)
                whole = total
                if (
                    len(self.frame.inputs) > self.sinks
                ):  # its weight joins the sum; an infinite one leaves nothing
                    sink = splat(self.sink(token + t, head + h) * LOG2E, self.lanes)
                    top = load(type_, self.row(self.scratch, 3, r))
                    whole = total + Word(vmath.apply(builder(), "exp2", sink - top))
                factor = select((total > 0.0) | is_nan(total), one / whole, 0.0)
                place = ((token + t) * self.heads + head + h) * self.value_depth
                out = gep(self.frame.result(0), place, self.o_element)
                for j in range(self.steps[2] // self.lanes):
                    x = load(type_, gep(self.row(self.scratch, 2, r), j * self.lanes, "float")) * factor
                    to, left = gep(out, j * self.lanes, self.o_element), self.value_depth - j * self.lanes
                    if left >= self.lanes:
                        store(narrowed(x, self.o_element), to)
                    else:
                        masked_store(narrowed(x, self.o_element), to, lanes(left, self.lanes))

    @inline
    def sink(self, token: Int, head: Int) -> Word:
        """The score that a head has beside those of keys."""
        slot = self.frame.inputs[self.sinks]
        index = (token, head) if len(slot.shape) == 2 else (head,)
        element = self.element(self.sinks)
        found = load(element, gep(self.frame.start(self.sinks), self.offset(self.sinks, *index), element))
        return found if element == "float" else fpext(found, "float")
