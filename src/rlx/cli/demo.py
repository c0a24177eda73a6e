"""rlx demo: semantic search with a real sentence encoder, compiled and run natively."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from rlx import zoo
from rlx.api.compile import compile
from rlx.api.lowering import lower, optimize
from rlx.cli.output import (
    human_bytes,
    json_option,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from rlx.files import Json
from rlx.zoo.minilm import load_graph
from rlx.zoo.minilm_onnx import build_onnx

SENTENCES = (
    "A cat is sleeping on the sofa in the sun.",
    "The stock market fell sharply after the announcement.",
    "She baked a loaf of sourdough bread this morning.",
    "The new compiler makes matrix multiplication faster.",
    "Heavy rain is expected along the coast tonight.",
    "He forgot his umbrella and got completely wet.",
    "The orchestra played Beethoven's seventh symphony.",
    "Neural networks learn from examples.",
    "The train to Vienna leaves at half past nine.",
    "A kitten chased a ball of wool across the floor.",
)
ROUNDS, RUNS = 3, 2  # turns that each engine takes, and runs in one of them
SECONDS_BETWEEN = 0.02  # threads of the engine before must have stopped spinning
QUERIES = ("a pet taking a nap", "machine learning", "what will the weather be like?")


class Encoder:
    """Tokenizer and compiled program: sentences in, unit vectors out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        say("fetching the model (once)")
        folder = self.folder = zoo.fetch("minilm", notify=say).parent
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_padding()
        self.tokenizer.enable_truncation(256)
        self.times: dict[str, float] = {}
        say("building the graph")
        start = time.perf_counter()
        self.graph = load_graph(folder)
        self.times["build graph"] = time.perf_counter() - start
        say("compiling")
        start = time.perf_counter()
        self.program = compile(self.graph)
        self.times["compile"] = time.perf_counter() - start

    def feed(self, sentences: list[str]) -> dict[str, np.ndarray]:
        encoded = self.tokenizer.encode_batch(sentences)
        return {
            "input_ids": np.array([e.ids for e in encoded], np.int64),
            "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
        }

    def __call__(self, sentences: list[str]) -> np.ndarray:
        out: np.ndarray = self.program.run(self.feed(sentences))["sentence_embedding"]
        return out


def search(
    encoder: Encoder, sentences: list[str], vectors: np.ndarray, query: str
) -> tuple[list[tuple[float, str]], float]:
    """The best matches of a query, and the seconds that encoding it took."""
    start = time.perf_counter()
    asked = encoder([query])[0]
    seconds = time.perf_counter() - start
    scores = vectors @ asked
    order = np.argsort(-scores, kind="stable")[:3]
    return [(float(scores[i]), sentences[i]) for i in order], seconds


def onnxruntime_session(folder: Path, threads: int) -> Any:
    """The same encoder in ONNX Runtime with as many threads; None if that is not installed."""
    if any(importlib.util.find_spec(package) is None for package in ("onnxruntime", "onnx")):
        return None
    import onnxruntime
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    model = build_onnx(config, load_file(folder / "model.safetensors"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def in_turns(engines: dict[str, Callable[[], np.ndarray]]) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, run in engines.items():
            time.sleep(SECONDS_BETWEEN)
            run()
            for _ in range(RUNS):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def side_by_side(encoder: Encoder, feed: dict[str, np.ndarray], say: Callable[[str], None]) -> Json:
    """Time per sentence in RLX and, if installed, in ONNX Runtime; and how much the vectors differ."""
    say("looking for ONNX Runtime")
    session = onnxruntime_session(encoder.folder, encoder.program.threads)
    engines: dict[str, Callable[[], np.ndarray]] = {
        "rlx": lambda: encoder.program.run(feed)["sentence_embedding"]
    }
    if session is not None:
        engines["onnxruntime"] = lambda: session.run(["sentence_embedding"], feed)[0]
    say("timing")
    times = in_turns(engines)
    batch = len(feed["input_ids"])
    facts: Json = {"ms_per_sentence": round(times["rlx"] / batch * 1e3, 3)}
    if session is not None:
        facts["onnxruntime"] = {
            "ms_per_sentence": round(times["onnxruntime"] / batch * 1e3, 3),
            "rlx_is_faster_by": round(times["onnxruntime"] / times["rlx"], 2),
            "largest_difference": float(np.abs(engines["rlx"]() - engines["onnxruntime"]()).max()),
        }
    return facts


def summary(encoder: Encoder, sentences: list[str], say: Callable[[str], None]) -> Json:
    """What was compiled: ops before and after fusion, memory, times."""
    program = encoder.program
    feed = encoder.feed(sentences)
    batch, seq = feed["input_ids"].shape
    binding = {"batch": batch, "seq": seq}
    memory = program.memory(binding)
    return {
        "hir_ops": len(encoder.graph),
        "mir_ops": len(optimize(lower(encoder.graph))),
        "kernels": program.stats["kernels"],
        "distinct_kernels": program.stats["distinct_kernels"],
        "host_thunks": len(program.stats["host_thunks"]),
        "seconds": {k: round(v, 3) for k, v in encoder.times.items()},
        "binding": binding,
        "memory": memory,
        "threads": program.threads,
        **side_by_side(encoder, feed, say),
    }


def typed() -> tuple[list[str], list[str]]:
    """Sentences, an empty line, then queries, from the terminal or a pipe."""
    asks = sys.stdin.isatty()

    def lines(prompt: str, stop_at_blank: bool) -> list[str]:
        found: list[str] = []
        if asks:
            print_note(prompt)
        for line in sys.stdin:
            if not line.strip() and stop_at_blank:
                break
            if line.strip():
                found.append(line.strip())
        return found

    sentences = lines(
        "Type sentences to search in, one per line, then an empty line (none: built-in sentences).", True
    )
    return sentences, lines("Type what to search for, one query per line, then an empty line.", asks)


@click.command()
@click.option("--query", "-q", multiple=True, help="What to search for; may be repeated.")
@click.option(
    "--sentence", "-s", multiple=True, help="A sentence to search in; may be repeated [built-in sentences]."
)
@click.option(
    "--type", "-t", "ask", is_flag=True, help="Read sentences, an empty line, then queries from stdin."
)
@json_option
def demo(query: tuple[str, ...], sentence: tuple[str, ...], ask: bool, as_json: bool) -> None:
    """Search sentences by meaning with all-MiniLM-L6-v2, compiled to native code on this machine.

    If ONNX Runtime is installed, it runs the same model for comparison.
    """
    more, asked = typed() if ask else ([], [])
    sentences = [*sentence, *more] or list(SENTENCES)
    queries = [*query, *asked] or list(QUERIES)
    with progress("loading") as say:
        encoder = Encoder(say)
        vectors = encoder(sentences)
        found = {q: search(encoder, sentences, vectors, q) for q in queries}
        facts = summary(encoder, sentences, say)
    if as_json:
        answers = {q: [{"score": s, "sentence": t} for s, t in hits] for q, (hits, _) in found.items()}
        print_json({"answers": answers, **facts})
        return
    print_line("all-MiniLM-L6-v2, compiled by RLX for this machine\n", bold=True)
    rows = [
        ("graph as written (HIR)", f"{facts['hir_ops']} nodes"),
        ("primitive ops (MIR)", f"{facts['mir_ops']} nodes"),
        ("kernels after fusion (LIR)", f"{facts['kernels']}, of which {facts['distinct_kernels']} distinct"),
        ("host thunks", str(facts["host_thunks"])),
        ("build graph / compile", " / ".join(f"{v:.2f} s" for v in facts["seconds"].values())),
        ("activations (reused)", human_bytes(facts["memory"]["activation"])),
        ("weights", human_bytes(facts["memory"]["weight"])),
        ("scratch", human_bytes(facts["memory"]["scratch"])),
        ("time per sentence", f"{facts['ms_per_sentence']:.2f} ms in a batch of {facts['binding']['batch']}"),
        ("the same in ONNX Runtime", compared(facts.get("onnxruntime"))),
    ]
    print_table(("what", "value"), rows)
    for q, (hits, seconds) in found.items():
        print_line(f"\n{q}  ({seconds * 1e3:.1f} ms)", bold=True)
        for score, text in hits:
            print_line(f"  {score:.3f}  {text}")


def compared(peer: Json | None) -> str:
    """The time of ONNX Runtime, in words."""
    if peer is None:
        return "not installed; to compare: pip install onnxruntime onnx"
    return (
        f"{peer['ms_per_sentence']:.2f} ms: RLX is {peer['rlx_is_faster_by']:.2f}x as fast; "
        f"vectors differ by {peer['largest_difference']:.0e} at most"
    )
