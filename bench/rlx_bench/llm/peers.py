"""Engines for language models. Each is made in a process of its own, at its best documented settings."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Protocol

import numpy as np

import rlx
from rlx.records import dataclass
from rlx_bench.llm.llama_cpp import RELEASE, IkLlamaCpp, LlamaCpp, PeerError, folder
from rlx_bench.machine import limited


class Session(Protocol):
    """A model that one engine has loaded."""

    def prefill(self, tokens: np.ndarray) -> float:
        """Seconds until the logits after a prompt are there, from the start."""

    def decode(self, tokens: np.ndarray, after: int) -> float:
        """Seconds for a token on average: one by one, behind the first `after` of them."""

    def logits(self, tokens: np.ndarray) -> np.ndarray | None:
        """Logits behind each token; None if the engine gives none."""


class RlxSession:
    """`rlx.llm.load`, as users call it."""

    def __init__(self, path: str, threads: int, context: int, activations: str = "f32") -> None:
        import rlx.llm

        self.model = rlx.llm.load(path, threads=threads, context=context, activations=activations)

    def prefill(self, tokens: np.ndarray) -> float:
        given = tokens.tolist()
        self.model.state.tokens.clear()
        start = time.perf_counter()
        self.model.state.logits(given)
        return time.perf_counter() - start

    def decode(self, tokens: np.ndarray, after: int) -> float:
        given = tokens.tolist()
        self.prefill(tokens[:after])
        start = time.perf_counter()
        for end in range(after + 1, len(given) + 1):
            self.model.state.logits(given[:end])
        return (time.perf_counter() - start) / (len(given) - after)

    def logits(self, tokens: np.ndarray) -> np.ndarray | None:
        return self.model.state.every(tokens.tolist(), "logits")

    def weights(self) -> int:
        """Bytes of what is read for each token: params but for tables of which a token reads a row."""
        graph = self.model.program.graph
        params = {p.id: p for p in graph.params.values()}
        tables = {"gather", "gather_stored"}
        read = {o.id for n in graph.nodes if n.op.name not in tables for o in n.operands} & params.keys()
        return sum(int(params[i].tensor.nbytes) for i in read)


class CSession:
    """llama.cpp and its relative, through their C interface."""

    def __init__(self, made: LlamaCpp | IkLlamaCpp) -> None:
        self.made = made

    def prefill(self, tokens: np.ndarray) -> float:
        self.made.forget()
        start = time.perf_counter()
        self.made.step(tokens)
        return time.perf_counter() - start

    def decode(self, tokens: np.ndarray, after: int) -> float:
        self.prefill(tokens[:after])
        ones = [tokens[i : i + 1] for i in range(after, len(tokens))]
        start = time.perf_counter()
        for one in ones:
            self.made.step(one)
        return (time.perf_counter() - start) / len(ones)

    def logits(self, tokens: np.ndarray) -> np.ndarray | None:
        self.made.forget()
        return self.made.step(tokens, every=True)


class OpenVinoSession:
    """openvino-genai's pipeline, which chooses tokens itself; its own clock is read."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        import openvino_genai as genai

        alone = genai.SchedulerConfig()
        alone.enable_prefix_caching = False  # a prompt that came before would not be computed again
        self.pipeline = genai.LLMPipeline(path, "CPU", scheduler_config=alone, INFERENCE_NUM_THREADS=threads)

    def _generate(self, tokens: np.ndarray, count: int) -> tuple[float, float]:
        """Milliseconds until the first token, and between two."""
        import openvino as ov
        import openvino_genai as genai

        how = genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = count, True, False
        ids = tokens.astype(np.int64)[None]
        given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        told = self.pipeline.generate(given, how).perf_metrics
        return told.get_ttft().mean, told.get_tpot().mean

    def prefill(self, tokens: np.ndarray) -> float:
        return self._generate(tokens, 1)[0] / 1e3

    def decode(self, tokens: np.ndarray, after: int) -> float:
        return self._generate(tokens[:after], len(tokens) - after + 1)[1] / 1e3

    def logits(self, tokens: np.ndarray) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class Peer:
    """How an engine loads a model, what it is called and run with. `to_avx2` are variables that limit it."""

    load: Callable[[str, int, int], Session]
    settings: str
    check: Callable[[], str]
    """Makes sure that it is here, and tells its version; raises what is missing."""
    to_avx2: Mapping[str, str]


def installed(name: str, module: str) -> str:
    """The version of a package; raises if it is not here."""
    if importlib.util.find_spec(module) is None:
        raise PeerError(f"{name} is not installed: pip install --no-deps {name}")
    return version(name)


def _package(name: str, module: str) -> Callable[[], str]:
    return lambda: installed(name, module)


def _libraries() -> str:
    folder()
    return RELEASE


PEERS = {
    "rlx": Peer(RlxSession, "rlx.llm.load; matmuls in f32", lambda: rlx.__version__, {}),
    "rlx-i8": Peer(
        lambda path, threads, context: RlxSession(path, threads, context, "i8"),
        'rlx.llm.load(..., activations="i8"); activations of 8 bits for quantised weights',
        lambda: rlx.__version__,
        {},
    ),
    "ik_llama.cpp": Peer(
        lambda *how: CSession(IkLlamaCpp(*how)),
        "ik-llama-cpp-python, weights repacked, flash attention; activations of 8 bits for quantised weights",
        _package("ik-llama-cpp-python", "ik_llama_cpp"),
        {},
    ),
    "llama.cpp": Peer(
        lambda *how: CSession(LlamaCpp(*how)),
        "libraries of @node-llama-cpp/linux-x64, the fastest for this CPU; activations of 8 bits for "
        "quantised weights",
        _libraries,
        {},
    ),
    "openvino-genai": Peer(
        OpenVinoSession,
        "its own settings: activations of 8 bits, bf16 where the CPU has it",
        _package("openvino-genai", "openvino_genai"),
        {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
}


def limits(name: str) -> Mapping[str, str]:
    """Variables that keep a peer to what RLX may use here."""
    return PEERS[name].to_avx2 if limited() else {}


def peak_memory() -> int:
    """Most bytes that this process had in memory at once."""
    with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) << 10
