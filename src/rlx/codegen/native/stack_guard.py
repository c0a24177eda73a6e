"""A stack protector in generated functions: a kernel that writes past an array on its stack ends the process.

LLVM puts a random word of the C library between the arrays of a function and its return address, and compares
it before the function returns. What it calls if the word has changed is defined in the module itself, so that
objects have no undefined symbol; it executes an instruction that does not exist (SIGILL).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llvmlite.binding import ModuleRef

_HANDLER = "__stack_chk_fail"
_TEXT = f"""
define internal void @{_HANDLER}() noreturn nounwind cold {{
  call void @llvm.trap()
  unreachable
}}
declare void @llvm.trap()
@llvm.compiler.used = appending global [1 x ptr] [ptr @{_HANDLER}], section "llvm.metadata"
"""


def with_handler(text: str, triple: str) -> str:
    """The text of a module, with what a function of it calls whose stack was overwritten.

    >>> with_handler("define void @f() { ret void }", "x86_64-unknown-linux-gnu")
    'define void @f() { ret void }'
    """
    return text + _TEXT if is_needed(text, triple) else text


def is_needed(text: str, triple: str) -> bool:
    """Whether functions have arrays on the stack, on a system whose threads have a random word at hand.
    Elsewhere it is a symbol of the C library, which objects do not have."""
    return " = alloca " in text and triple.startswith("x86_64-") and "-linux" in triple


def protect(module: ModuleRef) -> None:
    """Ask for the protector in every function of a parsed module that has the handler."""
    functions = [f for f in module.functions if not f.is_declaration]
    if any(f.name == _HANDLER for f in functions):
        for function in functions:
            if function.name != _HANDLER:
                function.add_function_attribute("sspstrong")
