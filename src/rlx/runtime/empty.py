"""Kernels that do nothing, as many as one likes: what is left is the time that dispatching takes."""

from __future__ import annotations

import functools

from rlx import config
from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Code
from rlx.runtime.native.code import build
from rlx.runtime.native.driver import OPERANDS, NativeProgram, Record


def run_empty_records(count: int) -> None:
    """Run so many empty kernels in the native driver, on all threads, with a barrier before each.

    >>> run_empty_records(3)
    """
    _program(count, config.THREADS.get()).run()


@functools.cache
def _program(count: int, threads: int) -> NativeProgram:
    code = _code()
    records = [Record(code.address("nothing"), OPERANDS, str(number)) for number in range(count)]
    return NativeProgram(records, threads=threads, keep=(code,))


@functools.cache
def _code() -> Code:
    def emit(module: Module) -> None:
        module.function("nothing", KERNEL_ARGS)

    return build(emit)
