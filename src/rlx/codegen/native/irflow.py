"""Control of the IR text builder: blocks, branches, loops and returns.

A `Flow` appends lines to one function. `branch`, `if_value`, `loop` and `while_loop` take Python functions
that write their parts. A `Fork` is the same in steps, for callers that decide in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.codegen.native.irlanes import Lanes
from rlx.codegen.native.irops import Bool, Int, Number
from rlx.codegen.native.irtypes import Value
from rlx.errors import CompileError

if TYPE_CHECKING:
    from rlx.codegen.native.irtext import Module

Body = Callable[[Int, list[Value]], "Sequence[Number] | None"]
_new = object.__new__


class Flow(Lanes):
    """The lines of one function, and what decides which of them run."""

    def __init__(self, module: Module, name: str, returns: str, head: str) -> None:
        self.module, self.name, self.returns = module, name, returns
        self._lines = [head]
        self._count = 0
        self._ended = False
        self._block = "entry"
        self.regions = 0  # run-time branches and loops around what `@native` functions write now

    @property
    def ended(self) -> bool:
        """Whether the current block has returned: nothing may follow."""
        return self._ended

    # ---- plumbing

    def emit(self, line: str) -> None:
        """Append one instruction without a result."""
        self._lines.append("  " + line)

    def op(self, type_: str, text: str) -> Value:
        self._count = count = self._count + 1
        made = _new(Value)  # without the call of `__init__`: this is what most of writing is
        made.type = type_
        made.text = name = f"%v{count}"
        self._lines.append(f"  {name} = {text}")
        return made

    def comment(self, text: str) -> None:
        """Append a comment, unless the line before says the same."""
        line = f"  ; {text}"
        if self._lines[-1] != line:
            self._lines.append(line)

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block, self._ended = name, False

    def _jump(self, label: str) -> None:
        """Go to a label unless the block has already returned."""
        if not self._ended:
            self.emit(f"br label %{label}")

    # ---- control

    def return_(self, x: Number | None = None) -> None:
        """Return from the function; nothing may follow in this block."""
        self.emit("ret void" if x is None else f"ret {self.value(x, self.returns)}")
        self._ended = True

    def loop(self, lo: Int, hi: Int, step: Int, carried: Sequence[Number], body: Body) -> list[Value]:
        """for i in range(lo, hi, step): carried = body(i, carried); gives the last carried values.

        `step` is positive. A loop known to be empty or to run once leaves no branch behind.
        """
        start = [x if x.__class__ is Value else self.value(x) for x in carried]
        is_sure = False  # to run
        if isinstance(lo, int) and isinstance(hi, int):
            if lo >= hi:
                return start
            if isinstance(step, int) and lo + step >= hi:
                return self._results(body(lo, start), start)
            is_sure = True
        before, top, done = self._block, self._fresh("loop"), self._fresh("done")
        first_index, limit, by = self._word(lo), self._word(hi), self._word(step)
        if is_sure:
            self.emit(f"br label %{top}")
        else:
            entered = self.op("i1", f"icmp slt i64 {first_index}, {limit}")
            self.emit(f"br i1 {entered.text}, label %{top}, label %{done}")
        self._label(top)
        heads = len(self._lines)
        index = Value("i64", f"%{top}.i")
        inside = [Value(x.type, f"%{top}.{n}") for n, x in enumerate(start)]
        after = self._results(body(index, inside), start)
        following = self.op("i64", f"add i64 {index.text}, {by}")
        again = self.op("i1", f"icmp slt i64 {following.text}, {limit}")
        latch = self._block
        self.emit(f"br i1 {again.text}, label %{top}, label %{done}")
        heading = [f"  %{top}.i = phi i64 [ {first_index}, %{before} ], [ {following.text}, %{latch} ]"]
        for phi, first, later in zip(inside, start, after, strict=True):
            heading.append(
                f"  {phi.text} = phi {phi.type} [ {first.text}, %{before} ], [ {later.text}, %{latch} ]"
            )
        self._lines[heads:heads] = heading
        self._label(done)
        if is_sure or not start:
            return after
        return [self._phi([(a, before), (b, latch)]) for a, b in zip(start, after, strict=True)]

    def _word(self, x: Int) -> str:
        """How instructions on words write `x`."""
        if x.__class__ is int and -(1 << 63) <= x < 1 << 63:
            return str(x)
        value = x if x.__class__ is Value else self.value(x)
        if value.type != "i64":
            raise CompileError(f"a loop of {self.name!r} counts in i64, not in {value.type}")
        return value.text

    def while_loop(
        self,
        carried: Sequence[Number],
        condition: Callable[[list[Value]], Bool],
        body: Callable[[list[Value]], Sequence[Number] | None],
    ) -> list[Value]:
        """while condition(carried): carried = body(carried); gives the last carried values."""
        start = [x if x.__class__ is Value else self.value(x) for x in carried]
        before, top, inner, done = self._block, *map(self._fresh, ("while", "body", "done"))
        self.emit(f"br label %{top}")
        self._label(top)
        heads = len(self._lines)
        inside = [Value(x.type, f"%{top}.{n}") for n, x in enumerate(start)]
        holds = self.value(condition(inside), "i1")
        self.emit(f"br {holds}, label %{inner}, label %{done}")
        self._label(inner)
        after = self._results(body(inside), start)
        latch = self._block
        self.emit(f"br label %{top}")
        self._lines[heads:heads] = [
            f"  {phi.text} = phi {phi.type} [ {first.text}, %{before} ], [ {later.text}, %{latch} ]"
            for phi, first, later in zip(inside, start, after, strict=True)
        ]
        self._label(done)
        return inside

    def _results(self, given: Sequence[Number] | None, start: Sequence[Value]) -> list[Value]:
        """What a loop body gave, as Values of the carried types."""
        if not start and not given:
            return []
        results: list[Value] = []
        for x, first in zip(given or [], start, strict=True):
            result = x if x.__class__ is Value else self.value(x, first.type)
            if result.type != first.type:
                raise CompileError(
                    f"a loop of {self.name!r} carries {first.type}, its body gives {result.type}"
                )
            results.append(result)
        return results

    def _phi(self, sources: Sequence[tuple[Value, str]]) -> Value:
        listed = ", ".join([f"[ {value.text}, %{block} ]" for value, block in sources])
        type_ = sources[0][0].type
        return self.op(type_, f"phi {type_} {listed}")

    def branch(
        self, condition: Bool, then: Callable[[], object], otherwise: Callable[[], object] | None = None
    ) -> None:
        """Run `then` or `otherwise`; a Python bool decides while generating."""
        if isinstance(condition, bool):
            chosen = then if condition else otherwise
            if chosen:
                chosen()
            return
        yes, no, end = self._fresh("then"), self._fresh("else"), self._fresh("end")
        self.emit(f"br {condition}, label %{yes}, label %{no if otherwise else end}")
        self._label(yes)
        then()
        self._jump(end)
        if otherwise:
            self._label(no)
            otherwise()
            self._jump(end)
        self._label(end)

    def if_value(
        self, condition: Bool, then: Callable[[], Sequence[Number]], otherwise: Callable[[], Sequence[Number]]
    ) -> list[Value]:
        """The values of the side that runs; both sides give the same types."""
        if isinstance(condition, bool):
            return [self.value(x) for x in (then if condition else otherwise)()]
        yes, no, end = self._fresh("then"), self._fresh("else"), self._fresh("end")
        self.emit(f"br {condition}, label %{yes}, label %{no}")
        self._label(yes)
        first = [self.value(x) for x in then()]
        first_block = self._block
        self._jump(end)
        self._label(no)
        second = [self.value(x, a.type) for x, a in zip(otherwise(), first, strict=True)]
        second_block = self._block
        self._jump(end)
        self._label(end)
        return [self._phi([(a, first_block), (b, second_block)]) for a, b in zip(first, second, strict=True)]

    def fork(self, condition: Value) -> Fork:
        """Begin the side that runs where `condition` holds."""
        return Fork(self, condition)


class Fork:
    """A branch in steps: the first side begins at once, `otherwise` begins the second, `close` ends both.

    >>> from rlx.codegen.native.irtext import Module
    >>> from rlx.target.cpu import resolve
    >>> f = Module(resolve("x86-64")).function("positive", [("i64", "x")], returns="i64")
    >>> fork = f.fork(f.cmp("sgt", f.args[0], 0))
    >>> fork.otherwise()
    >>> fork.close()
    True
    >>> f.return_(fork.phi(f.args[0], f.value(0)))
    >>> "phi i64 [ %x, %then2 ], [ 0, %else3 ]" in f.text()
    True
    """

    def __init__(self, f: Flow, condition: Value) -> None:
        self._f, self._condition = f, condition
        self._yes, self._no, self._end = map(f._fresh, ("then", "else", "end"))
        self._place = len(f._lines)
        self._leaving: list[str | None] = []  # the last block of each side, None if it returned
        f.emit("")  # written by `close`, which knows whether there are two sides
        f._label(self._yes)

    def otherwise(self) -> None:
        """Begin the side that runs where the condition does not hold."""
        self._leave()
        self._f._label(self._no)

    def close(self) -> bool:
        """End the branch. Whether anything can follow: not if both sides have returned."""
        self._leave()
        other = self._no if len(self._leaving) == 2 else self._end
        self._f._lines[self._place] = f"  br {self._condition}, label %{self._yes}, label %{other}"
        if self._leaving == [None, None]:
            return False
        self._f._label(self._end)
        return True

    def phi(self, first: Value, second: Value) -> Value:
        """The value of the side that ran; to be called after `close`, if there are two and none returned."""
        one, other = self._leaving
        assert one is not None and other is not None, "a side that returned has no value"
        return self._f._phi([(first, one), (second, other)])

    def _leave(self) -> None:
        f = self._f
        self._leaving.append(None if f._ended else f._block)
        f._jump(self._end)
