"""`python -m rlx.fuzz files`: mutated files are refused by an RlxError or work; nothing else may happen."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlx.errors import RlxError
from rlx.files import Json
from rlx.fuzz import guarded
from rlx.fuzz.case import raised_in
from rlx.fuzz.documents import (
    MAKERS,
    SPARSE,
    USERS,
    Document,
    as_op,
    as_sparse,
    graph_of,
    ops,
    with_other_words,
)
from rlx.fuzz.mutate import attribute_of, mutated
from rlx.fuzz.onnx_models import model_files, mutated_model
from rlx.fuzz.worker import Child, say
from rlx.ir.op import Op

PER_SOURCE = 20  # mutants of one sound file: making it costs a compilation
PER_CHILD = 200  # the system has room for so many guard pages
SECONDS = 30.0  # that one mutant may take, on a busy machine
MEMORY = 8 << 30  # bytes of address space: larger requests get a MemoryError
OP = "op"  # graphs of one op, whose attributes are mutated one after the other


def kinds() -> tuple[str, ...]:
    """What blocks of mutants are, in turn: every second one is an op."""
    others = (*MAKERS, SPARSE, *(("onnx",) if model_files() else ()))
    return tuple(kind for other in others for kind in (OP, other))


class Source:
    """Mutants by number: the same in every process."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self._made: tuple[int, Document | None] = (-1, None)
        order = random.Random(f"{seed}/ops")
        self._ops = order.sample(ops(), len(ops()))
        self._first = order.randrange(1000)  # sample of each op

    def op(self, block: int) -> tuple[Op, int]:
        """The op of a block, and which of its samples: all ops come before one comes again."""
        turn, number = divmod(block // 2, len(self._ops))
        return self._ops[number], self._first + turn

    def label(self, number: int) -> str:
        """What a mutant consists of, in a word or two."""
        block = number // PER_SOURCE
        kind = kinds()[block % len(kinds())]
        return self.op(block)[0].name if kind == OP else kind

    def sound(self, block: int) -> Document | None:
        """The file that a block of mutants comes from; a program that does not compile gives none, which is a
        finding of the other fuzzer."""
        if self._made[0] != block:
            try:
                self._made = (block, self._make(block))
            except Exception:
                self._made = (block, None)
        return self._made[1]

    def _make(self, block: int) -> Document | None:
        kind = kinds()[block % len(kinds())]
        if kind == OP:
            op, sample = self.op(block)
            return as_op(op, sample, weights=sample % 2 == 1)
        if kind == SPARSE:
            return as_sparse(np.random.default_rng((self.seed, block)), self.folder)
        graph = graph_of(self.seed, block) if kind in MAKERS else None
        return None if graph is None else MAKERS[kind](graph, self.folder)

    def mutant(self, number: int) -> Document | None:
        block, turn = divmod(number, PER_SOURCE)
        kind = kinds()[block % len(kinds())]
        chance = random.Random(f"{self.seed}/{number}")
        if kind == "onnx":
            return Document("onnx", {}, mutated_model(chance))
        document = self.sound(block)
        if document is None:
            return None
        if kind == SPARSE:
            return with_other_words(document, np.random.default_rng((self.seed, number)))
        if kind == OP:
            text = attribute_of(self.op(block)[0], document.texts["text"], turn, chance)
            return replace(document, texts={"text": text})
        name = chance.choice(sorted(document.texts))
        return replace(document, texts={**document.texts, name: mutated(document.texts[name], chance)})


def check(document: Document, folder: Path) -> str | None:
    """Read and use a mutant; what it raised, if that is not an RlxError."""
    try:
        USERS[document.kind](document, folder)
    except RlxError:
        return None
    except Exception as e:
        return f"{type(e).__name__} in {raised_in(e)}: {e}"
    return None


def work(seed: int, start: int, stop: int) -> None:
    """The child's side."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    guarded.turn_on()
    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as name:
        source = Source(seed, Path(name))
        for number in range(start, stop):
            say(at=number)
            document = source.mutant(number)
            what = None if document is None else check(document, Path(name))
            if document is not None and what is not None:
                say(
                    found=number,
                    signature=[source.label(number), what.split(":")[0]],
                    text=reproducer(seed, number, what),
                )


def reproducer(seed: int, number: int, what: str) -> str:
    """Python text that creates the mutant again and uses it. Locations in its text are those of the script,
    so the mutation may be another one there; the command has the same."""
    return f"""# mutated file: {" ".join(what.split())[:300]}
# the same mutant: python -m rlx.fuzz work-files {seed} {number} {number + 1}
import tempfile
from pathlib import Path
from rlx.fuzz import guarded
from rlx.fuzz.files import Source
from rlx.fuzz.documents import USERS

guarded.turn_on()
folder = Path(tempfile.mkdtemp())
mutant = Source({seed}, folder).mutant({number})
print(mutant.kind, mutant.texts or mutant.kept)
USERS[mutant.kind](mutant, folder)
"""


def run(seed: int, start: int, stop: int, host: str) -> Iterator[Json]:
    """Check mutants start .. stop: `{"done": count}` now and then, `{"found": ..., "text": ...}`."""
    at = start
    while at < stop:
        end = min(stop, at + PER_CHILD)
        with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder:
            for said in Child(host, ["work-files", str(seed), str(at), str(end)], folder).said(SECONDS):
                if "at" in said:
                    at = said["at"]
                    yield {"done": at}
                elif "found" in said:
                    yield said
                else:
                    text = reproducer(seed, at, said["lost"])
                    label = Source(seed, Path(folder)).label(at)
                    yield {"found": at, "signature": [label, said["lost"]], "text": text}
                    end = at + 1
        at = end
        yield {"done": at}
