"""LLVM IR text -> object bytes -> callable addresses, through llvmlite.

The IR is explicit vector code, so no LLVM pass pipeline runs by default (same speed, half the time).
A program comes in several modules, and `Compiling` makes their code side by side while others are written.
Objects hold no addresses of this process and can be cached. `llvm_compiles` counts code generations, so
tests can assert that a new shape compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from rlx import config
from rlx.codegen.native import stack_guard
from rlx.codegen.native.elf import (
    MappedObject,
    defined_symbols,
    is_loadable,
    process_symbol,
    undefined_symbols,
)
from rlx.cores import usable_cores
from rlx.errors import CompileError
from rlx.system import SYSTEM
from rlx.target.cpu import Target, host, missing_here, runs_here

if TYPE_CHECKING:
    from llvmlite.binding import ContextRef, ModuleRef, TargetMachine, TargetRef

    from rlx.codegen.native.notation import Native

    CType = type[ctypes.c_int64 | ctypes.c_int32 | ctypes.c_void_p]

llvm_compiles = 0
_counting, _describing = threading.Lock(), threading.Lock()
_MOST_WORKERS = 8
BEST, QUICK = 2, 0
"""Efforts of the code generator. Without any, it takes a fifth of the time, and code has twice the size."""
_C_TYPES: dict[str, CType] = {"i64": ctypes.c_int64, "i32": ctypes.c_int32, "ptr": ctypes.c_void_p}


@functools.cache
def _llvm() -> ModuleType:
    """llvmlite, ready for code of this machine; imported on first use because it takes 50 ms."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.load_library_permanently("")  # the symbols of this process: libc's `syscall`, for one
    return cast(ModuleType, llvm)


def _description(triple: str) -> TargetRef:
    """LLVM's description of a kind of machine. Others than this one are made ready with the first use of one:
    that takes 7 MB of memory, which few programs need."""
    llvm = _llvm()
    with _describing:  # others are known by their names before they are ready, and LLVM aborts
        try:
            return llvm.Target.from_triple(triple)
        except RuntimeError:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(triple)


@functools.cache
def llvm_version() -> str:
    """Version of llvmlite and so of its LLVM, part of every cache key; read without importing it."""
    package = importlib.util.find_spec("llvmlite")
    if package is not None and package.origin is not None:
        file = Path(package.origin).with_name("_version.py")
        told = re.search(r"version_version = '(.+)'", file.read_text()) if file.exists() else None
        if told is not None:
            return told[1]
    return ".".join(str(part) for part in _llvm().llvm_version_info)


def _machine(target: Target, level: int) -> TargetMachine:
    try:
        description = _description(target.triple)
    except RuntimeError as error:
        raise CompileError(f"this LLVM has no code generator for target {target.name}: {error}") from error
    cpu, features = target.code.cpu, target.code.feature_text()
    reloc = "static" if target.web else "pic"  # a module of its own, not a library of another one
    return description.create_target_machine(
        cpu=cpu, features=features, opt=level, reloc=reloc, codemodel="default", jit=True
    )


def parse(
    text: str, target: Target, level: int = 2, passes: int = 0, context: ContextRef | None = None
) -> tuple[ModuleRef, TargetMachine]:
    """The module of `text`, checked, and the machine that makes its code (options as in `compile_object`). It
    has its own context unless one is given: other threads compile, too."""
    llvm = _llvm()
    try:
        text = stack_guard.with_handler(text, target.triple)
        module = llvm.parse_assembly(text, context or llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"generated code is not valid LLVM IR: {error}") from error
    machine = _machine(target, level)
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    stack_guard.protect(module)
    if passes:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=passes))
        builder.getModulePassManager().run(module, builder)
    elif target.computes_f16 and "half" in text:
        _narrow_f16(module, machine)
    return module, machine


def _narrow_f16(module: ModuleRef, machine: TargetMachine) -> None:
    """Sums, products and quotients of two f16 that are widened, computed and rounded become instructions of
    f16: f32 has more than twice the bits, so that rounding twice is rounding once."""
    llvm = _llvm()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    manager = llvm.create_new_module_pass_manager()
    manager.add_instruction_combine_pass()
    manager.run(module, builder)


def _count() -> None:
    global llvm_compiles
    with _counting:
        llvm_compiles += 1


def compile_object(text: str, target: Target, level: int = 2, passes: int = 0) -> bytes:
    """Object file of the module `text`.

    `level` is the effort of the code generator; `passes` 1..3 runs LLVM's IR passes first.

    >>> from rlx.target.cpu import resolve
    >>> compile_object("define void @f() { ret void }", resolve("x86-64"))[1:4]
    b'ELF'
    """
    return generate(*parse(text, target, level, passes))


def compile_linked(texts: Sequence[str], target: Target) -> bytes:
    """One object of several modules, for formats that have no linker here.

    >>> from rlx.target.cpu import resolve
    >>> compile_linked(["define void @f() { ret void }"], resolve("wasm32"))[:4]
    b'\\x00asm'
    """
    context = _llvm().create_context()
    module, machine = parse("", target, context=context)
    for text in texts:
        module.link_in(parse(text, target, context=context)[0])
    return generate(module, machine)


def generate(module: ModuleRef, machine: TargetMachine) -> bytes:
    """Object file of a parsed module: what counts as one run of LLVM."""
    _count()
    ffi = _llvm().ffi
    # llvmlite lets one thread at a time into LLVM. Modules with contexts of their own need not wait for each
    # other, and this is the call that takes long: it goes past that lock.
    emit = ffi.lib.LLVMPY_TargetMachineEmitToMemory
    with ffi.OutputString() as failure:
        made = getattr(emit, "_cfn", emit)(machine, module, 1, failure)
        if not made:
            raise CompileError(f"LLVM generated no code: {failure}")
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(made), ffi.lib.LLVMPY_GetBufferSize(made))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(made)


class Compiling:
    """Objects of modules, made in threads of their own as the modules come. LLVM needs no Python lock.

    >>> from rlx.target.cpu import resolve
    >>> compiling = Compiling(resolve("x86-64"))
    >>> for name in ("f", "g"):
    ...     compiling.add(f"define void @{name}() {{ ret void }}")
    >>> [made[1:4] for made in compiling.objects()]
    [b'ELF', b'ELF']
    """

    def __init__(self, target: Target, wanted: Callable[[], bool] | None = None) -> None:
        """With `wanted`, nobody may wait for the objects: a process ends after the modules that are being
        compiled; those that it is not wanted for any more are not begun."""
        self._target, self._wanted = target, wanted
        self._waiting: queue.SimpleQueue[tuple[int, str, int] | None] = queue.SimpleQueue()
        self._made: dict[int, bytes | BaseException] = {}
        self._workers: list[threading.Thread] = []
        self._added = 0
        self._most = min(_MOST_WORKERS, usable_cores())

    def add(self, text: str, level: int = BEST) -> None:
        """Compile a module."""
        self._waiting.put((self._added, text, level))
        self._added += 1
        if len(self._workers) < self._most:
            daemon = self._wanted is None  # else LLVM could be at work when the process ends
            worker = threading.Thread(target=self._work, name="rlx-llvm", daemon=daemon)
            worker.start()
            self._workers.append(worker)

    def objects(self) -> list[bytes]:
        """Wait for all modules; their objects in the order in which they were added."""
        for _ in self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join()
        self._workers.clear()
        out = []
        for number in range(self._added):
            made = self._made[number]
            if isinstance(made, BaseException):
                raise made
            out.append(made)
        return out

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None:
            number, text, level = given
            try:
                if self._wanted is not None and not self._wanted():
                    raise CompileError("the process ends: its code is not optimised any more")
                self._made[number] = compile_object(text, self._target, level)
            except BaseException as e:  # raised in the thread that asks
                self._made[number] = e


def assembly(text: str, target: Target, level: int = 2, passes: int = 0, comments: bool = False) -> str:
    """Assembly of the module `text`, for people and for tests; with LLVM's comments on loops and spills.

    >>> from rlx.target.cpu import resolve
    >>> loop = "define void @f() { br label %again again: br label %again }"
    >>> "Inner Loop Header" in assembly(loop, resolve("x86-64"), comments=True)
    True
    """
    module, machine = parse(text, target, level, passes)
    machine.set_asm_verbosity(comments)
    _count()
    return str(machine.emit_assembly(module))


class HasKernels(Protocol):
    """What calls kernels by their addresses."""

    def move_kernels(self, moved: Mapping[int, int]) -> None: ...


class Code:
    """A loaded object. Addresses stay valid while it lives; dropping it unmaps the code."""

    def __init__(self, find: Callable[[str], int | None], target: Target, keep: object = None) -> None:
        self.find, self.target, self._keep = find, target, keep

    def keep(self, more: object) -> None:
        """Let something live as long as this."""
        self._keep = self._keep, more

    def follow(self, program: HasKernels) -> None:
        """Note a program that has addresses of this code, should they ever change."""

    def address(self, name: str) -> int:
        """Address of the function `name`."""
        found = self.find(name)
        if not found:
            raise CompileError(f"the loaded code has no function {name!r}")
        return found

    def function(self, native: Native[..., object]) -> Callable[..., int]:
        """A native function for Python to call, which releases Python's lock meanwhile; it takes what its
        parameters say. Keep the code as long as the function."""
        returns = None if native.returns == "void" else _C_TYPES[native.returns]
        takes = [_C_TYPES[type_] for type_, _ in native.params]
        return ctypes.CFUNCTYPE(returns, *takes)(self.address(native.name))


def load(object_bytes: bytes, target: Target) -> Code:
    """Map an object made by `compile_object` into this process.

    >>> from rlx.target.cpu import resolve
    >>> host = resolve("host")
    >>> load(compile_object("define void @f() { ret void }", host), host).address("f") > 0
    True
    """
    return load_all([object_bytes], target)


def load_all(objects: Sequence[bytes], target: Target) -> Code:
    """Map several objects as one code: each may call functions of those before it.

    All machine code that is made or stored comes through here, and none beyond the host does.
    """
    if not SYSTEM.runs_native_code and not target.web:
        return Code(_not_here, target)  # to look at, to save and to export
    if not runs_here(target):
        lacking = ", ".join(missing_here(target)) or "another instruction set"
        if target.web:
            raise CompileError(
                f"code for target {target.name} runs in a browser, not here; export it: "
                "rlx export MODEL --wasm DIR"
            )
        seen = f", as RLX_HOST names {host().name}" if config.HOST.get() else ""
        raise CompileError(
            f"code for target {target.name} cannot run here{seen} (missing: {lacking}); use target='host', "
            f"or write a file for the other machine: rlx compile MODEL -o FILE.rlx --target {target.name}"
        )
    if not all(is_loadable(each) for each in objects):
        return _linked_by_llvm(objects, target)
    mapped: list[MappedObject] = []
    functions: dict[str, int] = {}
    for each in objects:
        mapped.append(MappedObject(each, functions))
        functions |= mapped[-1].functions
    return Code(functions.get, target, mapped)


def _not_here(name: str) -> int:
    raise SYSTEM.refuse_native_code()


def _linked_by_llvm(objects: Sequence[bytes], target: Target) -> Code:
    llvm = _llvm()
    defined = {name for each in objects for name in defined_symbols(each)}
    for name in {name for each in objects for name in undefined_symbols(each)} - defined:
        process_symbol(name)  # LLVM would end the process if it is not there
    machine = _machine(target, 2)
    try:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for each in objects:
            engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(each))
        engine.finalize_object()
    except RuntimeError as error:
        raise CompileError(f"the object for target {target.name} cannot be loaded: {error}") from error
    # The engine uses the machine until its end: they live and die together.
    return Code(engine.get_function_address, target, (engine, machine))


def compile_and_load(text: str, target: Target) -> Code:
    """Compile `text` and load it at once."""
    return load(compile_object(text, target), target)
