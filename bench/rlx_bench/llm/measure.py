"""Language models on all engines in one interleaved run: speed, load time, memory, and whether they agree.

Processes, turns and spreads are those of `rlx_bench.harness`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from rlx.config import CACHE
from rlx.llm.gguf import open_gguf
from rlx.records import dataclass
from rlx_bench.harness import EngineError, Measured, Row, Worker, is_own, turns
from rlx_bench.llm.llama_cpp import PeerError
from rlx_bench.llm.peers import PEERS, limits
from rlx_bench.oracle import difference

MODULE, LIMITS = "rlx_bench.llm.worker", "rlx_bench.llm.limits"
CONTEXT = 1024
STORING = 120.0  # seconds: programs are stored in the background, and a process waits for that at its end
APART = 0.25
"""Activations of 8 bits move logits by a few percent of the largest; what is further off is wrong."""
LOAD, MEMORY, DECODE = "load", "memory", "decode"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured: prompts of so many tokens, and `decode` tokens one by one behind `after`."""

    prompts: tuple[int, ...] = (128, 512)
    decode: int = 32
    after: int = 128
    rounds: int = 5


def measure(
    name: str, path: Path, threads: int, engines: Sequence[str], plan: Plan, say: Say
) -> Generator[Row, None, None]:
    """Rows of one model: prompts, decoding, loading, memory."""
    measures = [*(f"prefill {count}" for count in plan.prompts), DECODE]
    rows = {
        what: {e: Measured(e) for e in engines} for what in (*measures, LOAD, MEMORY)
    }  # what -> engine -> times

    def failed(engine: str, error: Exception) -> None:
        for found in rows.values():
            found[engine].error = str(error)
        ready.pop(engine, None)

    tensors = open_gguf(path).tensors
    vocabulary = tensors["token_embd.weight"].shape[0]
    matrices = [t for name, t in tensors.entries.items() if name.startswith("blk.") and len(t.shape) == 2]
    flops = 2.0 * sum(t.elements for t in matrices)  # for each token of a prompt: all but logits
    read = 0.0  # bytes of weights for each token that is decoded
    random = np.random.default_rng(0)
    longest = max(*plan.prompts, plan.after + plan.decode)
    tokens = random.integers(0, vocabulary, longest).tolist()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        ready: dict[str, Worker] = {}
        machine = Worker("the machine", threads, LIMITS)
        stack.callback(machine.close, 0.5)
        for e in engines:
            say(f"{name}: loading with {e}")
            try:
                PEERS[e].check()
                if is_own(e):  # the first load compiles; from then on the program is in the cache
                    rows[LOAD][e].ready = _first_load(e, threads, path, folder)
                    _first_load(e, threads, path)
                ready[e] = _worker(e, threads, stack)
                rows[LOAD][e].times.append(_load(ready[e], path))
                saved = ready[e].ask("save", tokens=tokens[: plan.prompts[0]], path=f"{folder}/{e}.npy")
                if not saved["saved"]:
                    ready[e].ask("prefill", tokens=tokens[: plan.prompts[0]], samples=1)
            except (EngineError, PeerError) as error:
                failed(e, error)
        for e, samples in turns(engines, plan.rounds, threads):
            if e not in ready:
                continue
            say(f"{name}: timing {e}")
            try:
                for what, count in zip(measures, plan.prompts, strict=False):
                    found = ready[e].ask("prefill", tokens=tokens[:count], samples=samples)
                    rows[what][e].times += found["times"]
                    if is_own(e):
                        rows[what][e].rates += machine.ask("rates", what="flops", samples=samples)["rates"]
                given = tokens[: plan.after + plan.decode]
                found = ready[e].ask("decode", tokens=given, after=plan.after, samples=samples)
                rows[DECODE][e].times += found["times"]
                if is_own(e):
                    rows[DECODE][e].rates += machine.ask("rates", what="bytes", samples=samples)["rates"]
                    read = float(ready[e].ask("weights")["bytes"])
            except EngineError as error:
                failed(e, error)
        for e in tuple(ready):
            rows[MEMORY][e].times.append(float(ready[e].ask("memory")["bytes"]))
        _compare(Path(folder), rows)
    for what, found in rows.items():
        does = (flops if what in measures[:-1] else 0.0, read if what == DECODE else 0.0)
        yield Row(f"{name}, {what}", threads, *does, list(found.values()))


def _worker(engine: str, threads: int, stack: ExitStack) -> Worker:
    worker = Worker(engine, threads, MODULE, variables=limits(engine))
    stack.callback(worker.close, 0.5)
    return worker


def _first_load(engine: str, threads: int, path: Path, cache: str | None = None) -> float:
    """Seconds of RLX in a process of its own; it has stored the program when this returns."""
    worker = Worker(engine, threads, MODULE, variables={CACHE.name: cache} if cache else {})
    try:
        return _load(worker, path)
    finally:
        worker.close(STORING)


def _load(worker: Worker, path: Path) -> float:
    return float(worker.ask("load", path=str(path), context=CONTEXT)["seconds"])


def _compare(folder: Path, rows: dict[str, dict[str, Measured]]) -> None:
    """Logits after the first prompt, against RLX's: an engine that is far off has not been measured."""
    own = folder / "rlx.npy"
    if not own.exists():
        return
    wanted = [np.load(own)]
    for path in folder.glob("*.npy"):
        apart = difference([np.load(path)], wanted)
        for found in rows.values():
            found[path.stem].difference = apart
            if not apart <= APART:
                found[path.stem].error = f"its logits differ from RLX's by {apart:.2g} of the largest"


Found = dict[str, float | str | None]


def perplexity(
    path: Path, tokens: Sequence[int], threads: int, engines: Sequence[str], truth: Path, say: Say
) -> tuple[Found, Found]:
    """Of each engine on the same tokens its perplexity, or what went wrong; None where there are no logits.
    And its mean KL divergence from the probabilities in `truth`, which the first engine writes if there are
    none."""
    found: Found = {}
    apart: Found = {}
    for e in engines:
        say(f"{path.name}: perplexity with {e}")
        with ExitStack() as stack:
            try:
                PEERS[e].check()
                worker = _worker(e, threads, stack)
                _load(worker, path)
                told = worker.ask("perplexity", tokens=list(tokens), truth=str(truth))
                found[e], apart[e] = told["perplexity"], told["divergence"]
            except (EngineError, PeerError) as error:
                found[e] = apart[e] = str(error)
    return found, apart
