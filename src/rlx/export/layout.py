"""Where everything is in the context of an exported program."""

from __future__ import annotations

from rlx.codegen.native.irtext import Function, Int, Value
from rlx.export.sizes import Words
from rlx.export.tables import Tables
from rlx.ir.dim import Dim
from rlx.ir.weights import round_up

# Words of a context.
ERROR, WEIGHTS, BOUND, STARTED, SPOILT, OWN_BYTES, MAPPED, MAPPED_BYTES, THREADS, RECORDS, SEEN = range(11)
# What threads write while others wait is on cache lines of its own.
ARRIVED, EPOCH, GO, ASLEEP, QUIT = 16, 24, 32, 40, 48
_FIRST_SIZE = 56
THREAD_BYTES = 64
"""Of every thread: the context, its number, and what the system calls it."""
_PAGE = 4096
_LARGE = 1 << 20

MAGIC = int.from_bytes(b"RLXWGTS1", "little")
WEIGHT_HEADER = 4096
"""Bytes before the weights: a magic number, the version of the program, bytes and checksum of the weights."""


class ContextLayout:
    """The offset of every space in a context, and the words in front of them."""

    def __init__(self, tables: Tables) -> None:
        self.words = Words(tables, _FIRST_SIZE)
        end = self.words.end
        self.shapes: list[int] = []  # the word where the shape of each input and output begins
        for entry in (*tables.inputs, *tables.outputs):
            self.shapes.append(end)
            end += len(entry.shape)
        self.spaces: dict[str, int] = {}
        at = 8 * end
        for space in ("state", "input", "output", "activation"):
            size = tables.spaces[space]
            # Large outputs begin mid-page: loads with the last address bits of a recent store wait for it.
            at = round_up(at, _PAGE) + (_PAGE // 2 if space == "output" and size >= _LARGE else 0)
            self.spaces[space] = at
            at += size
        self.spaces["scratch"] = round_up(at, _PAGE)

    def bytes(self, scratch: int, threads: int) -> int:
        """Bytes of a context: scratch and facts of every thread come last."""
        return self.spaces["scratch"] + (scratch + THREAD_BYTES) * threads


def size_value(f: Function, context: Value, words: Words, d: Dim) -> Int:
    """A size where sizes are bound: a number, or a word of the context."""
    word = words.at(d)
    return words.number(d) if word is None else f.field(context, word)


def move(f: Function, kind: str, target: Value, source: Value, nbytes: Int) -> None:
    """Copy bytes ("memcpy"), or set them to that of `source` ("memset")."""
    name = f"llvm.{kind}.p0.{'p0.' if kind == 'memcpy' else ''}i64"
    f.module.declare(name, "void", ["ptr", source.type, "i64", "i1"])
    f.emit(f"call void @{name}({target}, {source}, {f.value(nbytes)}, i1 false)")
