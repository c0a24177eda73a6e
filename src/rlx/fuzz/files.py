"""`python -m rlx.fuzz files`: mutated files are refused by an RlxError or work; nothing else may happen."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.errors import RlxError
from rlx.fuzz.case import raised_in
from rlx.fuzz.documents import MAKERS, USERS, Document, graph_of
from rlx.fuzz.mutate import mutated
from rlx.fuzz.onnx_models import model_files, mutated_model
from rlx.fuzz.worker import Child, say

PER_SOURCE = 20  # mutants of one sound file: making it costs a compilation
PER_CHILD = 500
SECONDS = 60.0  # that one mutant may take, on a busy machine
MEMORY = 8 << 30  # bytes of address space: who asks for more gets a MemoryError


def kinds() -> tuple[str, ...]:
    return (*MAKERS, *(("onnx",) if model_files() else ()))


class Source:
    """Mutants by number: the same in every process."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self._made: tuple[int, Document | None] = (-1, None)

    def sound(self, block: int) -> Document | None:
        """The file that a block of mutants comes from."""
        if self._made[0] != block:
            kind = kinds()[block % len(kinds())]
            document: Document | None = None
            if kind in MAKERS:
                graph = graph_of(self.seed, block)
                try:
                    document = None if graph is None else MAKERS[kind](graph, self.folder)
                except Exception:  # a program that does not compile is a finding of the other fuzzer
                    document = None
            self._made = (block, document)
        return self._made[1]

    def mutant(self, number: int) -> Document | None:
        block = number // PER_SOURCE
        chance = random.Random(f"{self.seed}/{number}")
        if kinds()[block % len(kinds())] == "onnx":
            return Document("onnx", {}, mutated_model(chance))
        document = self.sound(block)
        if document is None:
            return None
        name = chance.choice(sorted(document.texts))
        return replace(document, texts={**document.texts, name: mutated(document.texts[name], chance)})


def check(document: Document, folder: Path) -> str | None:
    """Read and use a mutant; what it raised, if that is no RlxError."""
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
    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as name:
        source = Source(seed, Path(name))
        for number in range(start, stop):
            say(at=number)
            document = source.mutant(number)
            what = None if document is None else check(document, Path(name))
            if document is not None and what is not None:
                say(
                    found=number,
                    signature=[document.kind, what.split(":")[0]],
                    text=reproducer(seed, number, what),
                )


def reproducer(seed: int, number: int, what: str) -> str:
    """Python text that makes the mutant again and uses it."""
    return f"""# mutated file: {" ".join(what.split())[:300]}
import tempfile
from pathlib import Path
from rlx.fuzz.files import Source
from rlx.fuzz.documents import USERS

folder = Path(tempfile.mkdtemp())
mutant = Source({seed}, folder).mutant({number})
print(mutant.kind, mutant.texts or mutant.kept)
USERS[mutant.kind](mutant, folder)
"""


def run(seed: int, start: int, stop: int, host: str) -> Iterator[dict[str, Any]]:
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
                    yield {"found": at, "signature": ["process", said["lost"]], "text": text}
                    end = at + 1
        at = end
        yield {"done": at}
