"""The function that runs the steps of an exported program: calls of kernels, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.native.irtext import Int, Module, Number, Value
from rlx.codegen.native.words import external, i32
from rlx.export.errors import Code
from rlx.export.layout import ERROR, STARTED, WEIGHTS, ContextLayout, move, size_value
from rlx.export.tables import (
    Assumed,
    Branch,
    Copy,
    KernelCall,
    Once,
    Place,
    Repeat,
    Step,
    Tables,
    every_step,
)
from rlx.ir.dim import Dim
from rlx.runtime.native.driver import ERROR_SLOT, OPERANDS, SCRATCH, SCRATCH_BYTES

rlx_steps = external("rlx_steps", i32)


class StepWriter:
    """Writes `rlx_steps(context, thread, threads, own)`, which gives an error code; `own` are words that
    the thread has for `rlx_meet`.

    Arguments of kernels are a block on the stack of the thread; kernels read nothing else of it.
    """

    def __init__(self, tables: Tables, layout: ContextLayout, module: Module, threaded: bool) -> None:
        self.tables, self.layout, self.threaded = tables, layout, threaded
        params = [("ptr", "context"), ("i64", "thread"), ("i64", "threads"), ("ptr", "own")]
        self.f = module.function("rlx_steps", params, internal=True, noinline=True, returns="i32")
        self.context, self.thread, self.threads, self.own = self.f.args
        steps = list(every_step(tables.steps))
        calls = [s for s in steps if isinstance(s, KernelCall)]
        fields = max((len(c.places) + len(c.sizes) for c in calls), default=0)
        self.block = self.f.alloca("i64", OPERANDS + fields)
        loops = [s.number for s in steps if isinstance(s, Repeat)]
        self.numbers = self.f.alloca("i64", max(loops) + 1) if loops else None
        self.rows: dict[int, Int] = {}  # loop -> the row that it is at

    def write(self) -> None:
        f = self.f
        f.store(f.at(self.context, ERROR), f.at(self.block, ERROR_SLOT))
        scratch = f.byte_at(self.context, self.layout.spaces["scratch"])
        f.store(scratch, f.at(self.block, SCRATCH))
        f.store(self.tables.scratch, f.at(self.block, SCRATCH_BYTES))
        self.steps(self.tables.steps)
        f.return_(f.value(0, "i32"))

    def steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case KernelCall():
                    self.call(step)
                case Copy():
                    self.copy(step)
                case Branch():
                    self.branch(step)
                case Assumed():
                    self.assumed(step)
                case Repeat():
                    self.repeat(step)
                case Once():
                    self.once(step)

    def size(self, d: Dim) -> Int:
        return size_value(self.f, self.context, self.layout.words, d)

    def address(self, place: Place) -> Value:
        """The address of a place in the steps that loops are in."""
        f, fixed = self.f, place.fixed
        if place.space == "step":
            assert self.numbers is not None, "loops have numbers"
            return f.byte_at(self.numbers, fixed)
        base = f.field(self.context, WEIGHTS, "ptr") if place.space == "weight" else self.context
        total = f.add(self.size(place.moving), fixed + self.layout.spaces.get(place.space, 0))
        for loop, row in place.rows:
            total = f.add(total, f.mul(self.rows[loop], self.size(row)))
        return f.byte_at(base, total)

    # -- one method per kind of step

    def call(self, step: KernelCall) -> None:
        f = self.f
        for number, place in enumerate(step.places, OPERANDS):
            f.store(self.address(place), f.at(self.block, number))
        for number, d in enumerate(step.sizes, OPERANDS + len(step.places)):
            f.store(self.size(d), f.at(self.block, number))
        thread, threads = (f.value(0), f.value(1)) if step.serial else (self.thread, self.threads)
        arguments: list[Number] = [self.block, thread, threads, 0]
        if step.serial:
            self.alone(lambda: f.call(step.kernel, arguments))
        else:
            f.call(step.kernel, arguments)
        failed = self.meet()
        wrong_index = f.value(Code.INDEX, "i32")
        code = f.select(f.value(f.cmp("eq", failed, 1), "i1"), wrong_index, f.value(Code.KERNEL, "i32"))
        f.branch(f.cmp("ne", failed, 0), lambda: f.return_(code))

    def copy(self, step: Copy) -> None:
        source, target = self.address(step.source), self.address(step.target)
        self.alone(lambda: move(self.f, "memcpy", target, source, self.size(step.nbytes)))
        self.meet()

    def branch(self, step: Branch) -> None:
        self.f.branch(
            self.is_set(step.flag), lambda: self.steps(step.then), lambda: self.steps(step.otherwise)
        )

    def assumed(self, step: Assumed) -> None:
        f = self.f
        holds = f.field(self.context, self.layout.words.conditions[step.condition])
        f.branch(f.cmp("eq", holds, 0), lambda: f.return_(f.value(Code.BRANCH, "i32")))
        self.steps(step.steps)

    def once(self, step: Once) -> None:
        f = self.f
        f.branch(f.cmp("eq", f.field(self.context, STARTED), 0), lambda: self.steps(step.steps))

    def repeat(self, step: Repeat) -> None:
        f, limit = self.f, self.size(step.limit)
        if step.trips is not None:
            limit = f.smin(f.field(self.address(step.trips), 0), limit)
            self.meet()

        def goes_on(number: Int, flag: Place | None) -> Value:
            more = f.value(f.cmp("slt", number, limit), "i1")
            return more if flag is None else f.value(f.and_(more, self.is_set(flag)), "i1")

        def enter(number: Int) -> None:
            assert self.numbers is not None, "loops have numbers"
            f.store(number, f.at(self.numbers, step.number))
            last = f.sub(limit, 1)
            self.rows[step.number] = f.sub(last, number) if step.reverse else number

        def there_and_back(carried: list[Value]) -> list[Value]:
            number = carried[0]
            enter(number)
            self.steps(step.there)
            number = f.value(f.add(number, 1))

            def back() -> list[Value]:
                enter(number)
                self.steps(step.back)
                after = f.value(f.add(number, 1))
                return [after, goes_on(after, step.flag)]

            def leave() -> list[Value]:
                self.steps(step.home)
                return [number, f.value(False, "i1")]

            return f.if_value(goes_on(number, step.flag), back, leave)

        first = goes_on(f.value(0), step.go)
        f.while_loop([f.value(0), first], lambda carried: carried[1], there_and_back)

    def is_set(self, flag: Place) -> Value:
        """Whether a byte is not zero. All threads have read it before one of them goes on."""
        found = self.f.value(self.f.cmp("ne", self.f.load("i8", self.address(flag)), 0), "i1")
        self.meet()
        return found

    # -- threads

    def alone(self, write: Callable[[], object]) -> None:
        """Have the first thread do something."""
        if self.threaded:
            self.f.branch(self.f.cmp("eq", self.thread, 0), write)
        else:
            write()

    def meet(self) -> Value:
        """Wait for all threads; gives the error that a kernel stored, or 0."""
        if self.threaded:
            return self.f.call("rlx_meet", [self.context, self.threads, self.own], "i64")
        return self.f.field(self.context, ERROR)
