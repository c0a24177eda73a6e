"""A small typed layer over LLVM IR text: modules, functions, memory and control.

>>> from rlx.target.cpu import resolve
>>> module = Module(resolve("x86-64-v3"))
>>> f = module.function("double_all", [("ptr", "x"), ("i64", "n")])
>>> x, n = f.args
>>> def body(i, carried):
...     p = f.gep(x, i, "float")
...     f.store(f.fmul(f.load("<8 x float>", p), 2.0), p)
>>> f.loop(0, n, 8, [], body)
[]
>>> "fmul <8 x float>" in module.text()
True
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlx.codegen.native.irflow import Flow
from rlx.codegen.native.irops import Bool, Int, Number
from rlx.codegen.native.irtypes import (
    Value,
    constant,
    element,
    lanes_of,
    like,
    literals,
    mangle,
    size_bytes,
    vector,
    width,
)
from rlx.errors import CompileError
from rlx.target.cpu import Target

__all__ = [
    "Bool",
    "Function",
    "Int",
    "Module",
    "Number",
    "Value",
    "constant",
    "lanes_of",
    "like",
    "vector",
    "width",
]


class Module:
    """One LLVM module under construction for one target."""

    def __init__(
        self,
        target: Target,
        flush_bf16: bool = False,
        source_lines: bool = False,
        weights_stay: bool = True,
    ) -> None:
        self.flush_bf16 = flush_bf16  # rounding to bf16 may make denormals zeros
        self.weights_stay = weights_stay  # whether caches hold all weights from one run to the next
        self.source_lines = source_lines  # whether `@native` functions note their lines, as comments
        self.target = target
        self.relaxed = target.may_fuse  # asked with every choice of lanes
        self.declared: dict[str, str] = {}  # lines of intrinsics and functions of the process
        self.tables: dict[str, str] = {}
        self._functions: dict[str, Function] = {}
        self._taken: set[str] = set()
        self._table_names: dict[str, str] = {}

    def function(
        self,
        name: str,
        params: Sequence[tuple[str, str]],
        internal: bool = False,
        noinline: bool = False,
        returns: str = "void",
    ) -> Function:
        """Start a function. A parameter is (type, name); attributes may follow a type ("ptr noalias")."""
        if self.defines(name):
            raise CompileError(f"function {name!r} is defined twice in one module")
        made = Function(self, name, params, internal, noinline, returns)
        self._functions[name] = made
        return made

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is written inside stays only if no exception leaves the block."""
        kept = (dict(self._functions), dict(self.declared), dict(self.tables), dict(self._table_names))
        try:
            yield
        except Exception:
            self._functions, self.declared, self.tables, self._table_names = kept
            raise

    def defines(self, name: str) -> bool:
        """Whether a function of that name was started: shared helpers are written once."""
        return name in self._functions or name in self._taken

    def take(self) -> list[Function]:
        """The functions since the last call, which are complete; the module goes on without their text."""
        taken = list(self._functions.values())
        self._taken.update(self._functions)
        self._functions = {}
        return taken

    def declare(self, name: str, returns: str, params: Sequence[str], variadic: bool = False) -> None:
        """Declare an external function or intrinsic; the same declaration may be repeated."""
        listed = ", ".join([*params, *(["..."] if variadic else [])])
        line = f"declare {returns} @{name}({listed})"
        if self.declared.setdefault(name, line) != line:
            raise CompileError(f"function {name!r} is declared with two signatures")

    def table(self, name: str, element_type: str, values: Sequence[float | str]) -> Value:
        """Pointer to a constant array, stored once for equal contents; a "ptr" is given by function name."""
        if element_type == "ptr":
            items = ", ".join(f"ptr @{value}" for value in values)
        else:
            numbers = [value for value in values if not isinstance(value, str)]
            items = ", ".join(literals(element_type, numbers))
        body = f"constant [{len(values)} x {element_type}] [{items}], align 64"
        known = self._table_names.setdefault(body, name)
        if known == name and self.tables.setdefault(name, body) != body:
            raise CompileError(f"table {name!r} is defined twice with different contents")
        return Value("ptr", f"@{known}")

    def variable(self, name: str, type_: str) -> Value:
        """Pointer to a variable that keeps its value between calls, first 0. Kernels have none."""
        self.tables[name] = f"global {type_} zeroinitializer"
        return Value("ptr", f"@{name}")

    def text(self) -> str:
        """The whole module as LLVM IR."""
        declared = [line for name, line in sorted(self.declared.items()) if name not in self._functions]
        return self.assembled(self.tables, declared, [f.text() for f in self._functions.values()])

    def assembled(self, tables: Mapping[str, str], declared: list[str], functions: list[str]) -> str:
        """A module of these parts."""
        constants = [f"@{name} = private unnamed_addr {body}" for name, body in tables.items()]
        return "\n".join([*constants, *declared, *functions, self._attributes()]) + "\n"

    def _attributes(self) -> str:
        code = self.target.code
        return _attributes(code.cpu, code.feature_text(), self.target.vector_bytes * 8)


@functools.cache
def _attributes(cpu: str, features: str, vector_bits: int) -> str:
    """What functions ask of LLVM."""
    pairs = {
        "target-cpu": cpu,
        "target-features": features,
        "prefer-vector-width": str(vector_bits),
        "min-legal-vector-width": str(vector_bits),
        "no-trapping-math": "true",
    }
    return "attributes #0 = { nounwind " + " ".join(f'"{k}"="{v}"' for k, v in pairs.items()) + " }"


@functools.cache
def _plain(type_: str) -> str:
    """A parameter's type without the attributes that may follow it."""
    return type_ if type_.startswith("<") else type_.split()[0]


class Function(Flow):
    """One function under construction: methods append instructions and return their values."""

    def __init__(
        self,
        module: Module,
        name: str,
        params: Sequence[tuple[str, str]],
        internal: bool,
        noinline: bool,
        returns: str,
    ) -> None:
        listed = ", ".join(f"{type_} %{param}" for type_, param in params)
        linkage, inline = "internal " if internal else "", " noinline" if noinline else ""
        super().__init__(module, name, returns, f"define {linkage}{returns} @{name}({listed}){inline} #0 {{")
        self.args = [Value(_plain(type_), f"%{param}") for type_, param in params]
        self._allocas: list[str] = []
        self.widened: dict[Value, Value] = {}
        self.same_bits: dict[Value, Value] = {}

    def declaration(self) -> str:
        """The line by which other modules know this function."""
        return f"declare hidden {self.returns} @{self.name}({', '.join(a.type for a in self.args)})"

    def text(self) -> str:
        if not self._ended:
            if self.returns != "void":
                raise CompileError(f"function {self.name!r} ends without returning a value")
            self.return_()
        return "\n".join([self._lines[0], "entry:", *self._allocas, *self._lines[1:], "}"])

    # ---- memory

    def gep(self, pointer: Value, index: Int, element_type: str) -> Value:
        """Address of element `index` of an array; a vector of indices gives a vector of addresses."""
        if index.__class__ is not Value:
            if index == 0:
                return pointer
            if index.__class__ is int:  # as `value` writes it
                return self.op(
                    "ptr", f"getelementptr {element_type}, {pointer.type} {pointer.text}, i64 {index}"
                )
            index = self.value(index)
        result = "ptr" if index.type == "i64" else like(index.type, "ptr")
        place = f"{pointer.type} {pointer.text}, {index.type} {index.text}"
        return self.op(result, f"getelementptr {element_type}, {place}")

    def at(self, pointer: Value, index: Int) -> Value:
        """Address of field `index` of a table of 8-byte fields."""
        return self.gep(pointer, index, "i64")

    def byte_at(self, pointer: Value, offset: Int) -> Value:
        """The address `offset` bytes after `pointer`."""
        return self.gep(pointer, offset, "i8")

    def address_of(self, pointer: Value) -> Value:
        """A pointer as a number: how many bytes after address 0."""
        return self.op("i64", f"ptrtoint {pointer} to i64")

    def field(self, args: Value, index: Int, type_: str = "i64") -> Value:
        """Field `index` of a table of 8-byte fields."""
        return self.load(type_, self.gep(args, index, "i64"), 8)

    def load(self, type_: str, pointer: Value, align: int = 0) -> Value:
        """Load a scalar or vector; the alignment of one element is assumed unless `align` says more."""
        if self._moves_as_bits(type_):
            return self.bitcast(self.load(like(type_, "i16"), pointer, align), type_)
        place = f"{pointer.type} {pointer.text}"
        return self.op(type_, f"load {type_}, {place}, align {align or size_bytes(type_)}")

    def store(self, x: Number, pointer: Value, align: int = 0, nontemporal: bool = False) -> None:
        """Store; `nontemporal` skips the caches, needs full alignment, and `fence()` before others read."""
        if x.__class__ is not Value:
            x = self.value(x)
        if self._moves_as_bits(x.type):
            x = self.bitcast(x, like(x.type, "i16"))
        hint = ", !nontemporal !{i32 1}" if nontemporal else ""
        align = align or (size_bytes(x.type) * x.width if nontemporal else size_bytes(x.type))
        self.emit(f"store {x.type} {x.text}, {pointer.type} {pointer.text}, align {align}{hint}")

    def broadcast(self, pointer: Value, element_type: str, lanes: int) -> Value:
        """One element of memory in every lane."""
        return self.splat(self.load(element_type, pointer), lanes)

    def masked_load(
        self, type_: str, pointer: Value, mask: Value, other: Number = 0, align: int = 0
    ) -> Value:
        """Load the lanes whose mask is set; the rest become `other` and their memory is not touched."""
        rest = self.value(other, type_)
        if self._moves_as_bits(type_):
            bits16 = like(type_, "i16")
            return self.bitcast(
                self.masked_load(bits16, pointer, mask, self.bitcast(rest, bits16), align), type_
            )
        if width(type_) == 1:
            return self.if_value(mask, lambda: [self.load(type_, pointer, align)], lambda: [rest])[0]
        place = f"ptr align {align or size_bytes(type_)} {pointer.text}"
        name = f"llvm.masked.load.{mangle(type_)}.p0"
        if name not in self.module.declared:
            self.module.declare(name, type_, ["ptr", mask.type, type_])
        lanes = f"{mask.type} {mask.text}, {rest.type} {rest.text}"
        return self.op(type_, f"call {type_} @{name}({place}, {lanes})")

    def guarded_load(self, type_: str, pointer: Value, mask: Value) -> Value:
        """A masked load of which most often all lanes exist, or none. WebAssembly has no masked loads: each
        lane is asked for, and read, by itself. There these two cases are asked for first. Floats of 16 bits
        are widened lane by lane anyway, and LLVM cannot widen those of another block."""
        if not self.module.target.web or width(type_) == 1 or element(type_) in ("half", "bfloat"):
            return self.masked_load(type_, pointer, mask)
        zero = constant(type_, 0)
        bits = self.bitcast(mask, f"i{mask.width}")

        def some() -> list[Value]:
            there = self.cmp("ne", bits, 0)
            return self.if_value(there, lambda: [self.masked_load(type_, pointer, mask)], lambda: [zero])

        return self.if_value(self.cmp("eq", bits, -1), lambda: [self.load(type_, pointer)], some)[0]

    def masked_store(self, x: Value, pointer: Value, mask: Value, align: int = 0) -> None:
        """Store the lanes whose mask is set."""
        if x.width == 1:
            self.branch(mask, lambda: self.store(x, pointer, align))
            return
        if self._moves_as_bits(x.type):
            x = self.bitcast(x, like(x.type, "i16"))
        if self.module.target.has_avx512 and x.element in ("i8", "i16", "i32"):
            mask = self._hidden(mask)
        name = f"llvm.masked.store.{mangle(x.type)}.p0"
        if name not in self.module.declared:
            self.module.declare(name, "void", [x.type, "ptr", mask.type])
        place = f"ptr align {align or size_bytes(x.type)} {pointer.text}"
        self.emit(f"call void @{name}({x.type} {x.text}, {place}, {mask.type} {mask.text})")

    def _hidden(self, mask: Value) -> Value:
        """A mask that LLVM knows nothing about. Of a truncation whose one lane it knows to be stored, LLVM 22
        stores the whole wide lane, over what lies behind it."""
        bits, held = f"i{mask.width}", "i64" if mask.width == 64 else "i32"
        word = self.zext(self.bitcast(mask, bits), held)
        word = self.op(held, f'call {held} asm "", "=r,0"({word})')
        return self.bitcast(self.trunc(word, bits), mask.type)

    @staticmethod
    @functools.cache  # asked at every access
    def _moves_as_bits(type_: str) -> bool:
        """16-bit floats move as integers: LLVM would convert those that outlive a block by library calls."""
        return element(type_) in ("bfloat", "half")

    def gather(
        self,
        pointer: Value,
        index: Value,
        element_type: str,
        mask: Value | None = None,
        other: Number | Value = 0,
    ) -> Value:
        """Elements of an array at a vector of indices; lanes off the mask are `other` and read nothing."""
        type_ = like(index.type, element_type)
        if index.width == 1:
            place = self.gep(pointer, index, element_type)
            return self.load(type_, place) if mask is None else self.masked_load(type_, place, mask, other)
        if self._moves_as_bits(type_):
            rest = self.bitcast(self.value(other, type_), like(type_, "i16"))
            return self.bitcast(self.gather(pointer, index, "i16", mask, rest), type_)
        places = self.gep(pointer, index, element_type)
        mask = mask if mask is not None else constant(like(type_, "i1"), True)
        name = f"llvm.masked.gather.{mangle(type_)}.{mangle(places.type)}"
        self.module.declare(name, type_, [places.type, mask.type, type_])
        addresses = f"{places.type} align {size_bytes(type_)} {places.text}"
        return self.op(type_, f"call {type_} @{name}({addresses}, {mask}, {self.value(other, type_)})")

    def scatter(self, x: Value, pointer: Value, index: Value, mask: Value | None = None) -> None:
        """Store lanes to a vector of indices, lane 0 first, so that the last of equal indices wins."""
        places = self.gep(pointer, index, x.element)
        if x.width == 1:
            return self.store(x, places) if mask is None else self.masked_store(x, places, mask)
        if self._moves_as_bits(x.type):
            x = self.bitcast(x, like(x.type, "i16"))
        mask = mask if mask is not None else constant(like(x.type, "i1"), True)
        name = f"llvm.masked.scatter.{mangle(x.type)}.{mangle(places.type)}"
        self.module.declare(name, "void", [x.type, places.type, mask.type])
        self.emit(f"call void @{name}({x}, {places.type} align {size_bytes(x.type)} {places.text}, {mask})")
        return None

    def prefetch(self, pointer: Value, write: bool = False, locality: int = 3) -> None:
        """Ask for the cache line of `pointer`; locality 3 keeps it in all levels, 0 in none."""
        if "llvm.prefetch.p0" not in self.module.declared:
            self.module.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
        self.emit(f"call void @llvm.prefetch.p0({pointer}, i32 {int(write)}, i32 {locality}, i32 1)")

    def alloca(self, type_: str, count: int = 1, align: int = 64) -> Value:
        """Stack space, taken once at function entry wherever it is asked for."""
        name = self._fresh("stack")
        self._allocas.append(f"  %{name} = alloca [{count} x {type_}], align {align}")
        return Value("ptr", f"%{name}")

    def at_entry(self, type_: str, text: str) -> Value:
        """An instruction at function entry, wherever it is asked for: what no loop should repeat."""
        name = self._fresh("entry")
        self._allocas.append(f"  %{name} = {text}")
        return Value(type_, f"%{name}")

    # ---- atomics

    def atomic_load(self, type_: str, pointer: Value, order: str = "acquire") -> Value:
        return self.op(type_, f"load atomic {type_}, {pointer} {order}, align {size_bytes(type_)}")

    def atomic_store(self, x: Value, pointer: Value, order: str = "release") -> None:
        self.emit(f"store atomic {x}, {pointer} {order}, align {size_bytes(x.type)}")

    def atomic_rmw(self, operation: str, pointer: Value, x: Value, order: str = "acq_rel") -> Value:
        """add, sub, xchg, or ... on memory; gives the value before."""
        return self.op(x.type, f"atomicrmw {operation} {pointer}, {x} {order}")

    def compare_exchange(self, pointer: Value, expected: Value, new: Value) -> tuple[Value, Value]:
        """(value before, whether it was `expected` and is now `new`)."""
        pair_type = f"{{ {new.type}, i1 }}"
        pair = self.op(pair_type, f"cmpxchg {pointer}, {expected}, {new} seq_cst seq_cst")
        return self.op(new.type, f"extractvalue {pair}, 0"), self.op("i1", f"extractvalue {pair}, 1")

    def fence(self, order: str = "seq_cst") -> None:
        self.emit(f"fence {order}")

    def pause(self) -> None:
        """Tell the core that this is a spin loop."""
        if self.module.target.x86:
            self.module.declare("llvm.x86.sse2.pause", "void", [])
            self.emit("call void @llvm.x86.sse2.pause()")
        elif self.module.target.arm:
            self.module.declare("llvm.aarch64.hint", "void", ["i32"])
            self.emit("call void @llvm.aarch64.hint(i32 1)")

    # ---- calls

    def call(
        self, callee: str | Value, args: Sequence[Number], returns: str = "void", fixed: int | None = None
    ) -> Value:
        """Call a function by name or through a pointer; a void call gives an empty Value.

        A name that the module does not define is declared as external; `fixed` counts the named parameters
        of a variadic one.
        """
        values = [arg if arg.__class__ is Value else self.value(arg) for arg in args]
        types = [value.type for value in values]
        signature = returns if fixed is None else f"{returns} ({', '.join([*types[:fixed], '...'])})"
        if isinstance(callee, Value):
            place = callee.text
        else:
            place = f"@{callee}"
            if not self.module.defines(callee):
                self.module.declare(callee, returns, types[:fixed], fixed is not None)
        text = f"call {signature} {place}({', '.join([f'{x.type} {x.text}' for x in values])})"
        if returns != "void":
            return self.op(returns, text)
        self.emit(text)
        return Value("void", "")
