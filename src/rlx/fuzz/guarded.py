"""Everything that kernels touch is between guard pages: an access outside ends the process, to the byte.

Weights one by one, arenas, scratch, inputs, outputs, and arrays on the stack of generated functions, which
become static memory: programs have one thread then. Ends of what is not a multiple of 64 bytes are marked,
and `check` looks whether the mark is still there.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence

import numpy as np

from rlx import config
from rlx.codegen.native import stack_guard
from rlx.ir.weights import round_up
from rlx.runtime import context
from rlx.runtime.memory import OutputPool, Region, allocate
from rlx.runtime.weights import Weights

ALIGNMENT = 64
MARK = 0xC7
ALLOCA = re.compile(r"alloca \[(\d+) x (?:<(\d+) x )?(\w+)>?\], align \d+")
BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_kept: list[tuple[Region, int]] = []  # code may be run as long as the process lives
_checked = 0
_cache: tempfile.TemporaryDirectory[str] | None = None


def array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros that end where their page ends, as far as their alignment allows.

    >>> array((3,), np.dtype(np.float32)).tolist()
    [0.0, 0.0, 0.0]
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return allocate(round_up(size, ALIGNMENT), guard=True).array[:size].view(dtype).reshape(shape)


def turn_on() -> None:
    """From now on in this process; earlier programs stay as they are.

    Code has addresses of this process then: the cache is one of its own."""
    global _cache
    _cache = tempfile.TemporaryDirectory(prefix="rlx-guarded-")
    os.environ[config.CACHE.name] = _cache.name
    load = Weights.load

    def load_apart(self: Weights) -> None:
        load(self)
        for id, data in self.memory.items():
            self.memory[id] = array(data.shape, data.dtype)
            self.memory[id][...] = data

    Weights.load = load_apart  # type: ignore[method-assign]
    context.allocate = _between  # type: ignore[assignment]
    OutputPool.empty = lambda self, shape, dtype: array(shape, dtype)  # type: ignore[method-assign]
    stack_guard.with_handler = lambda text, triple: ALLOCA.sub(_stack, text)


def _between(nbytes: int, **_: object) -> Region:
    return allocate(round_up(nbytes, ALIGNMENT), guard=True)


def _stack(found: re.Match[str]) -> str:
    count, lanes, kind = found.groups()
    bits = BITS.get(kind) or max(int(kind.removeprefix("i")), 8)
    size = int(count) * int(lanes or 1) * bits // 8
    region = allocate(round_up(size, ALIGNMENT), guard=True)
    region.array[size:] = MARK
    _kept.append((region, size))
    return f"getelementptr i8, ptr inttoptr (i64 {region.address} to ptr), i64 0"


def check() -> None:
    """Arrays on the stack that were made since the last call end where they end."""
    global _checked
    for region, size in _kept[_checked:]:
        region.check()
        if not (region.array[size:] == MARK).all():
            raise AssertionError(f"a kernel wrote behind an array of {size} bytes on its stack")
    _checked = len(_kept)
