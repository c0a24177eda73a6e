"""A language model in a browser: RLX's exports and wllama, in turns."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import rlx
from rlx import zoo
from rlx.codegen.cpu.generator import source_version
from rlx.records import dataclass
from rlx_bench.harness import EngineError
from rlx_bench.web.exports import PARTS, TARGETS
from rlx_bench.web.places import Chromium, Tab

PROMPT, MADE, CONTEXT, AT_ONCE = 128, 32, 1024, 128


@dataclass
class Language:
    """One engine: tokens per second of a prompt and of an answer, seconds to the first token."""

    engine: str
    prefill: list[float]
    decode: list[float]
    first: list[float]
    error: str = ""


def write_language(id: str, folder: Path) -> dict[str, Path]:
    """Folders of the engines: RLX's exports, and the file itself."""
    path, version = zoo.fetch(id), source_version(str(Path(rlx.__file__).parent), (*PARTS, "llm"))
    found = {name: folder / id / name for name in (*TARGETS, "wllama")}
    mark = folder / id / "version"
    if mark.exists() and mark.read_text() == version:
        return found
    for place in found.values():
        place.mkdir(parents=True, exist_ok=True)
    model = rlx.llm.load(path, context=CONTEXT)
    for target in TARGETS:
        ranges = {"new": (1, AT_ONCE), "wanted": (0, 1)}
        model.program.export(found[target], "wasm", bind=ranges, name="net", target=target)
    shutil.copyfile(path, found["wllama"] / "model.gguf")
    mark.write_text(version)
    return found


def measure_language(
    id: str,
    threads: int,
    chromium: Chromium,
    folder: Path,
    peers: bool,
    rounds: int,
    say: Callable[[str], None],
) -> list[Language]:
    """All engines on one model; each has a new worker in every round."""
    folders = write_language(id, folder)
    engines = [name for name in folders if peers or name != "wllama"]
    rows = {name: Language(name, [], [], []) for name in engines}
    for _ in range(rounds):
        for name in engines:
            row = rows[name]
            if row.error:
                continue
            say(f"{id}: timing {name}")
            tab = Tab(chromium, name)
            at = f"/made/{folders[name].relative_to(folder)}/"
            engine = "wllama" if name == "wllama" else "rlx"
            try:
                opened = tab.ask("open", engine=engine, folder=at, packages="/packages/", threads=threads)
                row.first.append(opened["ready"])
                for number in range(3):
                    found = tab.ask("answer", prompt=PROMPT, made=MADE)
                    if number:  # the first one warms up
                        row.prefill.append(found["prompt"] / found["read"])
                        row.decode.append(found["made"] / found["wrote"])
            except EngineError as error:
                row.error = str(error)
            tab.close()
    return list(rows.values())


LANGUAGE_HEAD = ("engine", "threads", "prefill tokens/s", "decode tokens/s", "first token", "error")


def language_cells(rows: list[Language], threads: int) -> list[list[str]]:
    """Lines of the table."""

    def of(values: list[float], form: str) -> str:
        return form.format(statistics.median(values)) if values else "-"

    return [
        [
            r.engine,
            str(threads),
            of(r.prefill, "{:.0f}"),
            of(r.decode, "{:.1f}"),
            of(r.first, "{:.2f} s"),
            r.error,
        ]
        for r in rows
    ]
