"""The native functions of an exported program, which are the same for C and for WebAssembly.

`rlx_init` makes a context in memory of the caller's, `rlx_bind` sets sizes, `rlx_run` runs all steps, and
`rlx_reset` begins a stream anew. They allocate nothing, keep nothing outside a context and call nothing but
kernels; where those use AMX, `rlx_init` asks Linux for it. A context begins with words (`Context`), then come
sizes, shapes and the spaces of the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rlx.codegen.native.irtext import Bool, Int, Module, Value
from rlx.codegen.native.notation import native
from rlx.codegen.native.words import at, byte_at, external, i32, i64, ptr, select, store, target
from rlx.config import VERSION
from rlx.export.errors import Code, guard_code, size_code, texts_of
from rlx.export.layout import (
    BOUND,
    ERROR,
    MAGIC,
    SPOILT,
    STARTED,
    THREAD_BYTES,
    THREADS,
    WEIGHT_HEADER,
    WEIGHTS,
    ContextLayout,
    move,
    size_value,
)
from rlx.export.sizes import Evaluator
from rlx.export.steps import StepWriter, rlx_steps
from rlx.export.tables import Argument, Tables
from rlx.export.threads import rlx_enlist, rlx_work, rlx_worker, start_others
from rlx.ir.weights import round_up
from rlx.system.base import ASK_FOR_MATRICES

_syscall = external("syscall", i64, fixed=1)
rlx_reset, rlx_bind = external("rlx_reset"), external("rlx_bind", i32)

PUBLIC = tuple(
    f"rlx_{name}"
    for name in "bind run reset init input output input_shape output_shape error version bytes".split()
)
"""Functions that callers see."""


class CodeWriter:
    """Writes the functions of a program into a module."""

    def __init__(self, tables: Tables, module: Module, version: int, threaded: bool) -> None:
        self.tables, self.module, self.version, self.threaded = tables, module, version, threaded
        self.layout = ContextLayout(tables)

    def write(self) -> None:
        """All functions that C and WebAssembly share."""
        tables = self.tables
        StepWriter(tables, self.layout, self.module, self.threaded).write()
        self._write_reset()
        self._write_bind()
        rlx_run.emit(self.module, keeps=bool(tables.states), threaded=self.threaded)
        if self.threaded:
            rlx_enlist.emit(self.module, scratch=(self.layout.spaces["scratch"], tables.scratch))
            rlx_worker.emit(self.module)
        rlx_checksum.emit(self.module)
        size = tables.spaces["weight"]
        rlx_init.emit(self.module, version=_signed(self.version), size=size, fixed=not tables.symbols)
        self._write_offsets("rlx_input", [self.place(e) for e in tables.inputs])
        self._write_offsets("rlx_output", [self.place(e) for e in tables.outputs])
        shapes = [8 * word for word in self.layout.shapes]
        self._write_offsets("rlx_input_shape", shapes[: len(tables.inputs)])
        self._write_offsets("rlx_output_shape", shapes[len(tables.inputs) :])
        self._write_errors()
        f = self.module.function("rlx_version", [], returns="i64")
        f.return_(_signed(self.version))
        f = self.module.function("rlx_bytes", [("i32", "threads")], returns="i64")
        room = f.mul(f.sext(f.args[0], "i64"), tables.scratch + THREAD_BYTES)
        f.return_(f.add(room, self.layout.spaces["scratch"]))

    def place(self, entry: Argument) -> int:
        """The offset of an input or output in a context."""
        offset = entry.place.offset
        assert isinstance(offset, int), "entries are roots, which have fixed places"
        return self.layout.spaces[entry.place.space] + offset

    def _write_offsets(self, name: str, offsets: Sequence[int]) -> None:
        """A function that gives the address of one of several places in a context, or null."""
        f = self.module.function(name, [("ptr", "context"), ("i32", "number")], returns="ptr")
        context, number = f.args
        if offsets:
            table = self.module.table(f"{name}.offsets", "i64", offsets)
            index = f.zext(number, "i64")
            known = f.and_(f.cmp("ult", index, len(offsets)), f.cmp("ne", context, 0))

            def found() -> None:
                f.return_(f.byte_at(context, f.field(table, index)))

            f.branch(f.value(known, "i1"), found)
        f.return_(Value("ptr", "null"))

    def _write_errors(self) -> None:
        texts = [text.encode() + b"\0" for text in [*texts_of(self.tables), "this code is not known"]]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        letters = self.module.table("rlx_error.letters", "i8", list(b"".join(texts)))
        table = self.module.table("rlx_error.starts", "i64", starts)
        f = self.module.function("rlx_error", [("i32", "code")], returns="ptr")
        index = f.umin(f.zext(f.args[0], "i64"), len(texts) - 1)
        f.return_(f.byte_at(letters, f.field(table, index)))

    def _write_reset(self) -> None:
        f = self.module.function("rlx_reset", [("ptr", "context")])
        (context,) = f.args
        f.branch(f.cmp("eq", context, 0), f.return_)
        weights = f.field(context, WEIGHTS, "ptr")
        for state in self.tables.states:
            assert isinstance(state.place.offset, int), "states are roots, which have fixed places"
            target = f.byte_at(context, self.layout.spaces["state"] + state.place.offset)
            if state.initial is None:
                move(f, "memset", target, f.value(0, "i8"), state.nbytes)
            else:
                assert isinstance(state.initial.offset, int)
                move(f, "memcpy", target, f.byte_at(weights, state.initial.offset), state.nbytes)
        for word in (STARTED, SPOILT):
            f.store(f.value(0), f.at(context, word))
        f.return_()

    def _write_bind(self) -> None:
        """Check sizes and guards, compute what depends on sizes, and keep it; a failure changes nothing."""
        tables, words = self.tables, self.layout.words
        f = self.module.function("rlx_bind", [("ptr", "context"), ("ptr", "sizes")], returns="i32")
        context, given = f.args

        def fail(broken: Bool, code: int) -> None:
            f.branch(broken, lambda: f.return_(f.value(code, "i32")))

        fail(f.cmp("eq", context, 0), Code.ARGUMENT)
        if tables.symbols:
            fail(f.cmp("eq", given, 0), Code.ARGUMENT)
        symbols: dict[str, Int] = {}
        for i, s in enumerate(tables.symbols):
            value = symbols[s.name] = f.field(given, i)
            out = f.or_(f.cmp("slt", value, s.low), f.cmp("sgt", value, s.high))
            fail(f.value(out, "i1"), size_code(i))
        evaluate = Evaluator(f, symbols, lambda broken: fail(broken, Code.DIVISOR))
        for i, guard in enumerate(tables.guards):
            broken = f.not_(f.value(evaluate.condition(guard.condition), "i1"))
            fail(f.value(broken, "i1"), guard_code(tables, i))
        kept: list[tuple[int, Int]] = [(words.symbols[name], value) for name, value in symbols.items()]
        for d, word in words.expressions():
            if word >= words.checked:
                evaluate.refuse = None
            kept.append((word, evaluate.dim(d)))
        evaluate.refuse = None
        for condition, word in words.conditions.items():
            kept.append((word, f.zext(f.value(evaluate.condition(condition), "i1"), "i64")))
        changed = f.value(False, "i1")
        for name in tables.lasting:
            differs = f.cmp("ne", f.field(context, words.symbols[name]), symbols[name])
            changed = f.value(f.or_(changed, differs), "i1")
        for word, computed in kept:
            f.store(computed, f.at(context, word))
        for entry, start in zip((*tables.inputs, *tables.outputs), self.layout.shapes, strict=True):
            for axis, d in enumerate(entry.shape):
                f.store(size_value(f, context, words, d), f.at(context, start + axis))
        f.store(1, f.at(context, BOUND))
        if tables.lasting:
            f.branch(changed, lambda: f.call("rlx_reset", [context]))
        f.return_(f.value(0, "i32"))


def version_of(tables: Tables, texts: Sequence[str]) -> int:
    """A number for what a program computes and how its weights are laid out; not for their values."""
    facts = repr([(e.name, e.dtype.name, e.shape) for e in (*tables.inputs, *tables.outputs)])
    facts += repr((tables.symbols, tables.guards, tables.steps, tables.spaces, list(tables.weights)))
    digest = hashlib.sha256("\n".join([VERSION, facts, *texts]).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _signed(word: int) -> int:
    """A word as the signed number with the same bits."""
    return word - (1 << 64) if word >> 63 else word


@native
def rlx_run(context: ptr, *, keeps: bool, threaded: bool) -> i32:
    """Run all steps. A program that keeps states refuses to go on after a failure, until it is reset."""
    if context == ptr(0):
        return i32(Code.ARGUMENT)
    if context[BOUND] == 0:
        return i32(Code.NOT_BOUND)
    if context[SPOILT] != 0:
        return i32(Code.RESET)
    context[ERROR] = 0
    if threaded:
        start_others(context)
        code = rlx_work(context, i64(0), context[THREADS])
    else:
        code = rlx_steps(context, i64(0), i64(1), ptr(0))
    context[STARTED] = select(code == 0, i64(1), i64(0))
    if keeps:
        context[SPOILT] = select(code == 0, i64(0), i64(1))
    return code


@native
def rlx_checksum(words: ptr, n: i64) -> i64:
    """A number that changes with every bit of n words."""
    total, factor = i64(0), i64(1)
    for i in range(n):
        total += words[i] * factor
        factor += 2
    return total


@native
def rlx_init(context: ptr, weights: ptr, nbytes: i64, *, version: int, size: int, fixed: bool) -> i32:
    """Make a context of memory that is all zeros, for weights with their header; their bytes are checked."""
    if (context == ptr(0)) | (weights == ptr(0)):
        return i32(Code.ARGUMENT)
    if nbytes < 32:
        return i32(Code.TRUNCATED)
    if weights[0] != _signed(MAGIC):
        return i32(Code.DAMAGED)
    if weights[1] != version:
        return i32(Code.VERSION)
    if weights[2] != size:
        return i32(Code.DAMAGED)
    if nbytes < WEIGHT_HEADER + round_up(size, 8):
        return i32(Code.TRUNCATED)
    payload = byte_at(weights, WEIGHT_HEADER)
    if rlx_checksum(payload, round_up(size, 8) // 8) != weights[3]:
        return i32(Code.DAMAGED)
    if target().code.has_matrices:
        if _syscall(*map(i64, ASK_FOR_MATRICES)) != 0:
            return i32(Code.MACHINE)
    store(payload, at(context, WEIGHTS))
    context[THREADS] = 1
    rlx_reset(context)
    if fixed:
        return rlx_bind(context, ptr(0))
    return i32(Code.OK)
