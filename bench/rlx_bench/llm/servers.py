"""Servers of language models, each in a process of its own: RLX's, and llama.cpp's with as many slots."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rlx
from rlx.records import dataclass
from rlx_bench.llm.llama_cpp import PeerError
from rlx_bench.llm.peers import installed

CONTEXT = 1024  # tokens of a slot
_LLAMA = """
import sys
import xllamacpp
path, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:])
how = xllamacpp.CommonParams()
how.model.path, how.n_parallel, how.n_ctx, how.port = path, slots, slots * context, 0
how.cpuparams.n_threads = how.cpuparams_batch.n_threads = threads
how.cache_prompt, how.verbosity = False, 0
server = xllamacpp.Server(how)
print(f"RLX-BENCH {server.listening_address}", flush=True)
sys.stdin.read()
"""


def check(name: str) -> str:
    """The version of a server; raises what is missing."""
    if name == "rlx":
        return rlx.__version__
    return installed("xllamacpp", "xllamacpp")


def _command(name: str, path: Path, threads: int, slots: int) -> list[str]:
    if name == "llama.cpp":
        return [sys.executable, "-c", _LLAMA, str(path), str(threads), str(slots), str(CONTEXT)]
    options = ["--port", "0", "--json", "--quiet", "-t", str(threads), "--slots", str(slots)]
    return [sys.executable, "-m", "rlx", "serve", str(path), *options, "--context", str(CONTEXT)]


@dataclass(frozen=True)
class Server:
    """A server that is stopped outside its turns: idle threads of some still spin."""

    url: str
    pid: int

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Its address, while it goes on."""
        os.kill(self.pid, signal.SIGCONT)
        try:
            yield self.url
        finally:
            os.kill(self.pid, signal.SIGSTOP)


@contextmanager
def serving(name: str, path: Path, threads: int, slots: int) -> Iterator[Server]:
    """A server that has loaded the model."""
    check(name)
    process = subprocess.Popen(
        _command(name, path, threads, slots),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        server = Server(_address(name, process), process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        yield server
    finally:
        process.kill()
        process.communicate()


def _address(name: str, process: subprocess.Popen[str]) -> str:
    """What a server prints when it listens."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("RLX-BENCH "):
            return line.removeprefix("RLX-BENCH ").strip()
        said += line
        if name == "rlx" and line == "}\n":
            return str(json.loads(said)["url"])
    raise PeerError(f"the server of {name} ended before it listened: {said[-300:]}")
