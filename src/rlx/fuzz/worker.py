"""Programs are checked in a child process: one that crashes it, or hangs, is a finding like any other."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlx import config
from rlx.files import Json
from rlx.fuzz.case import Finding
from rlx.fuzz.hosts import environment
from rlx.fuzz.oracles import check
from rlx.fuzz.programs.grammar import draw_program
from rlx.fuzz.programs.program import Program
from rlx.fuzz.report import reproducer
from rlx.fuzz.shrink import shrink

SECONDS = 120.0  # of work that one program may take
LOOK = 5.0  # seconds between two looks at a process that says nothing
SHRINK_SECONDS = 60.0
SHRUNK = 2  # findings of one signature that are shrunk in a child
PER_CHILD = 400  # programs; then a fresh process


class Child:
    """A process that checks programs and says what it is at, line by line in JSON."""

    def __init__(self, host: str, arguments: Sequence[str], folder: str) -> None:
        known = {**os.environ, **environment(host), config.CACHE.name: folder, "TMPDIR": folder}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlx.fuzz", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=known,
        )
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def worked(self) -> float:
        """Seconds of CPU time that the process has used; 0 after its end."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def line(self, seconds: float) -> bytes | None:
        """Its next line. `queue.Empty` if it works for longer than this, or sleeps for so long.

        A process that waits for its turn on a busy machine does neither.
        """
        before = mark = self.worked()
        awake = time.monotonic()
        while True:
            try:
                return self.lines.get(timeout=min(LOOK, seconds))
            except queue.Empty:
                worked, now = self.worked(), time.monotonic()
                if worked - mark > 0.1:
                    mark, awake = worked, now
                if worked - before > seconds or now - awake > seconds:
                    raise

    def said(self, seconds: float) -> Iterator[Json]:
        """What it says until it ends; `{"lost": why}` is last if it crashed or hung."""
        try:
            while (line := self.line(seconds)) is not None:
                yield json.loads(line)
            if code := self.process.wait():
                why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                yield {"lost": f"the process ended by {why}"}
        except queue.Empty:
            yield {"lost": f"no answer within {seconds:.0f} s"}
        finally:
            self.process.kill()
            self.process.wait()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


@dataclass(frozen=True)
class Hunt:
    """Which programs are checked, as which machine, and how."""

    seed: int
    host: str = "host"
    poison: bool = False
    way: str | None = None  # the only way in which programs are checked

    def program(self, number: int) -> Program:
        drawn = draw_program(self.seed, number, self.poison)
        return drawn if self.way is None else replace(drawn, ways=(self.way,))


def work(hunt: Hunt, start: int, stop: int) -> None:
    """The child's side: check programs of a seed, shrink what is found."""
    seen: dict[tuple[str, str], int] = {}
    for number in range(start, stop):
        say(at=number)
        program = hunt.program(number)
        finding = check(program)
        if finding is None:
            continue
        seen[finding.signature] = seen.get(finding.signature, 0) + 1
        if seen[finding.signature] <= SHRUNK:
            program, finding = shrink(program, finding, check, SHRINK_SECONDS)
        say(found=number, signature=finding.signature, text=reproducer(program, finding))


def check_one() -> None:
    """The child's side for one program that may crash it; the parent pickles it to stdin."""
    finding = check(pickle.load(sys.stdin.buffer))
    if finding is not None:
        say(found=0, signature=finding.signature, detail=finding.detail)


def check_apart(program: Program, host: str, seconds: float = SECONDS) -> Finding | None:
    """`check` in its own process."""
    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder:
        child = Child(host, ["check-one"], folder)
        assert child.process.stdin is not None
        child.process.stdin.write(pickle.dumps(program))
        child.process.stdin.close()
        for said in child.said(seconds):
            if "lost" in said:
                return Finding("process", said["lost"], "no Python exception")
            oracle, kind = said["signature"]
            return Finding(oracle, kind, said["detail"])
    return None


def run(hunt: Hunt, start: int, stop: int) -> Iterator[Json]:
    """Check programs start .. stop of a seed; says `{"done": count}` and `{"found": ..., "text": ...}`."""
    at = start
    while at < stop:
        with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder:
            end = min(stop, at + PER_CHILD)
            arguments = ["work", str(hunt.seed), str(at), str(end), hunt.way or ""]
            arguments += ["--poison"] if hunt.poison else []
            for said in Child(hunt.host, arguments, folder).said(SECONDS + SHRUNK * SHRINK_SECONDS):
                if "at" in said:
                    at = said["at"]
                    yield {"done": at}
                elif "found" in said:
                    yield said
                else:
                    yield lost(hunt, at, said["lost"])
                    end = at + 1
            at = end
            yield {"done": at}


def lost(hunt: Hunt, number: int, why: str) -> Json:
    """The finding of a program that took its process with it, shrunk in separate processes."""
    program = hunt.program(number)
    finding = check_apart(program, hunt.host)
    if finding is None:
        finding = Finding("process", why, "seen once, in a process that had checked other programs before")
    else:
        program, finding = shrink(program, finding, lambda p: check_apart(p, hunt.host), 2 * SHRINK_SECONDS)
    return {"found": number, "signature": finding.signature, "text": reproducer(program, finding)}
