"""Native functions as text, as code that runs, and the errors of those that are refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import compile_and_load
from rlx.codegen.native.notation import Native
from rlx.errors import CompileError
from rlx.target.cpu import resolve


def text(function: Native[..., Any], source_lines: bool = False, **known: Any) -> str:
    module = Module(resolve("x86-64"), source_lines=source_lines)
    function.emit(module, **known)
    return module.text()


def run(function: Native[..., Any], *args: int, **known: Any) -> int:
    """Compile the function and call it with words."""
    host = resolve("host")
    module = Module(host)
    function.emit(module, **known)
    code = compile_and_load(module.text(), host)
    words = [ctypes.c_int64] * len(args)
    result: int = ctypes.CFUNCTYPE(ctypes.c_int64, *words)(code.address(function.name))(*args)
    return result


def refusal(function: Native[..., Any], **known: Any) -> str:
    with pytest.raises(CompileError) as caught:
        text(function, **known)
    return str(caught.value)
