"""LLVM IR in a form that only changes when the code does.

Local names, labels, functions and tables are numbered in the order in which they are first met, instructions
whose value nobody reads are left out, and so are functions that no kernel calls. How functions are spread
over modules does not show.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlx.codegen.cpu.kernels import BodyKernels, EmittedKernel, KernelSet

_EXPORT = re.compile(r"^define (?!internal)[^@]*@([\w.$-]+)\(", re.MULTILINE)
_FUNCTION = re.compile(r"^define .*?^\}$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"^@([\w.$-]+) = (.*)$", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^attributes .*$", re.MULTILINE)
_GLOBAL = re.compile(r"@([\w.$-]+)")
_LOCAL = re.compile(r"%([\w.$-]+)")
_RESULT = re.compile(r"  %([\w.$-]+) = (.*)")
_LABEL = re.compile(r"([\w.$-]+):")
# What is called: a function, an address, or assembly that does more than give a value.
_CALLEE = re.compile(r"(?:tail )?call [^@%]*(?:@([\w.$-]+)|(%)|(asm sideeffect))")


def canonical(kernels: KernelSet) -> str:
    """The whole code of a program: kernels in the order in which they run, then those of bodies."""
    whole = BodyKernels(kernels.kernels, kernels.inner)
    return canonical_text(kernels.texts, (_head(k) for k in whole.all()))


def canonical_module(text: str) -> str:
    """A module of the runtime: what it exports, by name, and all that this needs.

    >>> module = "define void @b() {\\n  ret void\\n}\\ndefine internal void @a() {\\n  ret void\\n}"
    >>> print(canonical_module(module))
    export b @0
    define void @0() {
      ret void
    }
    """
    names = sorted(found[1] for found in _EXPORT.finditer(text))
    return canonical_text([text], ((f"export {name}", name) for name in names))


def canonical_text(texts: Iterable[str], heads: Iterable[tuple[str, str]]) -> str:
    """What `heads` (a line and the name of a function) need of the modules `texts`.

    >>> text = "define void @k(ptr %x) {\\nentry:\\n  %a = load i8, ptr %x\\n  ret void\\n}"
    >>> print(canonical_text([text], [("kernel", "k")]))
    kernel @0
    define void @0(ptr %0) {
    1:
      ret void
    }
    """
    functions: dict[str, str] = {}
    tables: dict[str, str] = {}
    attributes: dict[str, None] = {}
    for text in texts:
        for function in _FUNCTION.findall(text):
            functions[_GLOBAL.findall(function[: function.index("(")])[0]] = function
        tables |= dict(_TABLE.findall(text))
        attributes |= dict.fromkeys(_ATTRIBUTES.findall(text))
    numbers: dict[str, int] = {}
    waiting: list[str] = []

    def number(found: re.Match[str]) -> str:
        name = found[1]
        if name not in functions and name not in tables:
            return found[0]  # an intrinsic, or a function of the process
        if name not in numbers:
            numbers[name] = len(numbers)
            waiting.append(name)
        return f"@{numbers[name]}"

    lines = [f"{head} {_GLOBAL.sub(number, '@' + name)}" for head, name in heads]
    for name in waiting:  # grows while it is read
        if name in functions:
            lines.append(_GLOBAL.sub(number, _function(functions[name])))
        else:
            lines.append(f"@{numbers[name]} = " + _GLOBAL.sub(number, tables[name]))
    return "\n".join([*lines, *attributes])


def _function(text: str) -> str:
    """A function without its dead instructions, its values and labels numbered."""
    head, *lines = text.splitlines()
    made: dict[str, str] = {}  # value -> what computes it
    needed: list[str] = []
    for line in lines:
        found = _RESULT.match(line)
        if found is None:
            needed += _LOCAL.findall(line)
        else:
            made[found[1]] = found[2]
            if _acts(found[2]):
                needed.append(found[1])
    live: set[str] = set()
    while needed:
        name = needed.pop()
        if name not in live:
            live.add(name)
            needed += _LOCAL.findall(made.get(name, ""))
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"%{numbers.setdefault(found[1], len(numbers))}"

    out = [_LOCAL.sub(number, head)]
    for line in lines:
        found, label = _RESULT.match(line), _LABEL.fullmatch(line)
        if label is not None:
            out.append(f"{numbers.setdefault(label[1], len(numbers))}:")
        elif found is None or found[1] in live:
            out.append(_LOCAL.sub(number, line))
    return "\n".join(out)


def _acts(instruction: str) -> bool:
    """Whether an instruction with a result does more than give it."""
    if instruction.startswith(("load atomic", "load volatile", "atomicrmw", "cmpxchg")):
        return True
    called = _CALLEE.match(instruction)
    return called is not None and not (called[1] or "").startswith("llvm.")


def _head(kernel: EmittedKernel) -> tuple[str, str]:
    """What the runtime is told about a kernel, but for the time it takes."""
    told = [f"kernel dims={[str(d) for d in kernel.dims]} scratch={kernel.scratch_per_thread}"]
    told += ["serial"] * kernel.serial + ["reveals"] * kernel.reveals
    if kernel.cut is not None:
        told.append(f"cut={kernel.cut.operand}:{kernel.cut.nbytes}")
    return " ".join(told), kernel.name
