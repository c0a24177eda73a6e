"""Native functions in Python's own syntax.

`@native` parses a function once, compiles it once, and runs it on the IR builder whenever a module needs it.
What Python knows while the code is written is computed then. A `Value` is known at run time: operators on it
write instructions; `if`, `while` and `for ... in range(...)` write branches and loops. A name that a branch
or loop assigns, and that is read later, becomes a phi.

>>> from rlx.codegen.native.irtext import Module
>>> from rlx.codegen.native.notation import native
>>> from rlx.codegen.native.words import i64, ptr
>>> from rlx.target.cpu import resolve
>>> @native
... def count_zeros(words: ptr, n: i64) -> i64:
...     found = 0
...     for i in range(n):
...         if words[i] == 0:
...             found += 1
...     return found
>>> module = Module(resolve("x86-64"))
>>> f = count_zeros.emit(module)
>>> [line.strip() for line in module.text().splitlines() if "icmp" in line or "phi" in line]
['%v3 = icmp slt i64 0, %n', '%loop1.i = phi ...', '%loop1.0 = phi ...', ...]

The rules:

- Parameters with a type (`i64`, `ptr`) are those of the native function. Keyword-only parameters are given to
  `emit` and known while the code is written. So is the type of a parameter that is a `Word`.
- Operators mean what they mean in Python: `//` rounds down, `>>` keeps the sign, `<` compares signed numbers.
  Unsigned and truncating forms are words: `udiv`, `lshr`, `sdiv`. `p[i]` is the 8-byte word i at a pointer.
- `p[i] = x` computes p and i before x, where Python computes x first: their instructions come in that order.
- `and`, `or` and `a if c else b` compute the second part only where it is needed: they branch. `&`, `|` and
  `select(c, a, b)` compute both parts, without a branch.
- `while` always loops at run time. `for i in range(...)` does if a bound is a Value; Python repeats the body
  if it knows all bounds, as for any other iterable. `for i in loop(...)` is always a loop at run time.
- `@inline` functions, and functions nested in a native one, are expanded where they are called. A `@native`
  function that is called becomes a call; it is written into the module if that does not have it yet.
- `return` in an expanded function gives its value there. `leave(x)` returns from the native function around.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar, cast, overload

from rlx.codegen.native.control import EXPANDED, current, enter, state
from rlx.codegen.native.irops import Number
from rlx.codegen.native.irtext import Function, Module
from rlx.errors import CompileError

OPEN = "Word"  # the annotation of a parameter whose type differs from one of a family to the next

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Written(Generic[R]):
    """A function in the notation, compiled when it is first needed: with notes of its lines, or without."""

    def __init__(self, function: Callable[..., R], is_native: bool) -> None:
        assert isinstance(function, types.FunctionType)
        self._function, self._is_native = function, is_native
        self.compiled: dict[bool, Callable[..., R]] = {}

    def code(self, marks: bool) -> Callable[..., R]:
        """The function that writes this one; the builder is its first argument."""
        found = self.compiled.get(marks)
        if found is None:
            from rlx.codegen.native.syntax import compiled  # start time: not where objects are cached

            made = compiled(self._function, self._is_native, marks)
            found = self.compiled[marks] = cast(Callable[..., R], made)
        return found


class Native(Generic[P, R]):
    """A native function: `emit` writes it into a module, a call from another one writes a call."""

    def __init__(self, function: Callable[P, R], internal: bool, noinline: bool) -> None:
        self._written = _Written(function, is_native=True)
        self._internal, self._noinline = internal, noinline
        update_wrapper(self, function)
        self.name = function.__name__
        assert isinstance(function, types.FunctionType)
        code, types_ = function.__code__, _annotations(function)
        self.params = [(types_.get(name, ""), name) for name in code.co_varnames[: code.co_argcount]]
        self.known = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        self.returns = types_.get("return", "void")
        for type_, name in self.params:
            if not type_:
                raise CompileError(f"{self.name}: parameter {name!r} needs a type, such as i64 or ptr")

    def emit(self, module: Module, alias: str = "", /, **known: object) -> Function:
        """Write the function into `module`, under another name if `alias` gives one. `known` are its
        keyword-only parameters, and the types of parameters that are a `Word`."""
        types_ = [str(known.pop(n, t)) if t == OPEN else t for t, n in self.params]
        if OPEN in types_:
            raise CompileError(f"{self.name}: a parameter that is a Word gets its type by its name")
        # The builder has a block "entry" and names like "v1" of its own.
        names = [f"{n}_" if n == "entry" or n[-1].isdigit() else n for _, n in self.params]
        params = list(zip(types_, names, strict=True))
        f = module.function(alias or self.name, params, self._internal, self._noinline, self.returns)
        write(f, self._write, f, known)
        return f

    def written(self, alias: str, /, **known: object) -> str:
        """`alias`, under which the module has the function as `known` makes it: one of a family.

        A native function calls it by `call(f.written("sum.4", rows=4), x, y)`. The type of a parameter that
        is a `Word` is given by its name: `f.written("scale.8", factor=vector("float", 8))`.
        """
        module = current().module
        if not module.defines(alias):
            self.emit(module, alias, **known)
        return alias

    def _write(self, f: Function, known: dict[str, object]) -> None:
        self._written.code(f.module.source_lines)(f, *f.args, **known)
        if not f.ended and self.returns != "void":
            raise CompileError(f"{self.name} returns {self.returns}, but can end without a return")

    def __call__(self, *args: Number) -> R:
        """Write a call. The module gets the function first, if it does not have it yet."""
        f = current()
        if len(args) != len(self.params):
            raise CompileError(f"{self.name} takes {len(self.params)} arguments, not {len(args)}")
        if not f.module.defines(self.name):
            self.emit(f.module)
        values = [f.value(arg, type_) for arg, (type_, _) in zip(args, self.params, strict=True)]
        for value, (type_, name) in zip(values, self.params, strict=True):
            if value.type != type_:
                raise CompileError(f"{self.name}: {name!r} is {type_}, not {value.type}")
        return cast(R, f.call(self.name, values, self.returns))


def write(f: Function, function: Callable[..., R], *args: object, **known: object) -> R:
    """Call a function whose words write into `f`. Its errors name their line."""
    before = enter(f)
    try:
        return function(*args, **known)
    except Exception as error:
        located = _located(error, f.name)
        if located is error:
            raise
        raise located from error
    finally:
        enter(before)


def with_room(function: Callable[..., R], *args: object, **known: object) -> R:
    """Call a function that writes many others, with room for the frames of their calls."""
    return function(*args, **known)


# Python takes memory for frames from the system in pieces of 16 KiB, and gives a piece back as soon as it is
# empty. Code that nests as deeply as the notation often calls across the end of a piece, which costs as much
# as writing several instructions. A frame that claims a large stack makes one piece that holds all others;
# that costs as much as writing a hundred, so it is done once for all kernels.
with_room.__code__ = with_room.__code__.replace(co_stacksize=1 << 14)


def emit_all(module: Module, *functions: Native[..., object]) -> None:
    """Write functions into a module, but not again those that calls have brought along."""
    for function in functions:
        if not module.defines(function.name):
            function.emit(module)


def _annotations(function: types.FunctionType) -> dict[str, str]:
    """The types of parameters and of the result, by the names that the source gives them."""
    found: dict[str, str] = {}
    for name, written in function.__annotations__.items():
        meant = function.__globals__.get(written) if isinstance(written, str) else written
        if written == OPEN:
            found[name] = OPEN
        elif isinstance(meant, str):
            found[name] = str(meant)
        elif name != "return" and name in function.__code__.co_varnames[: function.__code__.co_argcount]:
            raise CompileError(
                f"{function.__qualname__}: {name}: {written} is not a type of native functions"
            )
    return found


@overload
def native(function: Callable[P, R]) -> Native[P, R]: ...
@overload
def native(*, internal: bool = ..., noinline: bool = ...) -> Callable[[Callable[P, R]], Native[P, R]]: ...
def native(
    function: Callable[P, R] | None = None, *, internal: bool = False, noinline: bool = False
) -> Native[P, R] | Callable[[Callable[P, R]], Native[P, R]]:
    """Make a Python function a native one; see the module for what it may contain.

    An `internal` function is not visible outside its module; `noinline` keeps LLVM from expanding it.
    """
    if function is not None:
        return Native(function, internal, noinline)
    return lambda function: Native(function, internal, noinline)


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """Make a Python function one that native functions expand where they call it.

    It writes into the function that is being built; if its first parameter (after `self`) is called `f`, into
    that one.
    """
    written = _Written(function, is_native=False)
    code = written._function.__code__
    first = code.co_varnames[: code.co_argcount][:2]
    place = 0 if first[:1] == ("f",) else 1 if first == ("self", "f") else None
    compiled = written.compiled

    def expand(*args: P.args, **options: P.kwargs) -> R:
        f = state.function or current()  # which says what is missing
        marks = f.module.source_lines
        return (compiled.get(marks) or written.code(marks))(f, *args, **options)

    if place is None:
        vars(expand)[EXPANDED] = written.code
        return update_wrapper(expand, function)
    at = place

    def expand_into(*args: P.args, **options: P.kwargs) -> R:
        f = cast(Function, args[at])
        marks = f.module.source_lines
        code = compiled.get(marks) or written.code(marks)
        before = state.function
        if before is f:
            return code(f, *args, **options)
        enter(f)
        try:
            return code(f, *args, **options)
        finally:
            enter(before)

    return update_wrapper(expand_into, function)


def _located(error: Exception, name: str) -> Exception:
    """The error, with the line of the source that it is about."""
    if getattr(error, "__located__", False):
        return error
    import linecache
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    machinery = (_HERE, traceback.__file__.rpartition("/")[0])  # lines there are not what was written wrong
    here = [frame for frame in frames if frame.line and not frame.filename.startswith(machinery)]
    if not here:
        return error
    place = here[-1]
    line = linecache.getline(place.filename, place.lineno or 0).strip()
    where = f"{place.filename}:{place.lineno}: in {name}"
    if isinstance(error, NameError) and "not defined" not in str(error):
        missing = str(error).split("'")[1]
        reason = f"{missing!r} has no value here; it is not assigned on every way to this line"
        error = CompileError(reason).with_traceback(error.__traceback__)
    if type(error) is CompileError:
        error = CompileError(f"{where}: {error}\n    {line}").with_traceback(error.__traceback__)
    else:
        error.add_note(f"{where}\n    {line}")
    vars(error)["__located__"] = True
    return error


_HERE = __file__.rpartition("/")[0] + "/"
