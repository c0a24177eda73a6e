"""rlx demo: semantic search with a real sentence encoder, compiled and run natively."""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np

from rlx.cli.output import console, human_bytes, print_json, print_table, progress

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
QUERIES = ("a pet taking a nap", "machine learning", "what will the weather be like?")


class Encoder:
    """Tokenizer and compiled program: sentences in, unit vectors out."""

    def __init__(self, say: Any) -> None:
        from rlx import zoo
        from rlx.compile import compile
        from rlx.zoo.minilm import load_graph

        say("fetching the model (once)")
        folder = zoo.fetch("minilm", notify=say).parent
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


def search(encoder: Encoder, sentences: list[str], query: str) -> tuple[list[tuple[float, str]], float]:
    """The best matches of a query, and the seconds that encoding it took."""
    vectors = encoder(sentences)
    start = time.perf_counter()
    asked = encoder([query])[0]
    seconds = time.perf_counter() - start
    scores = vectors @ asked
    order = np.argsort(-scores, kind="stable")[:3]
    return [(float(scores[i]), sentences[i]) for i in order], seconds


def summary(encoder: Encoder, sentences: list[str]) -> dict[str, Any]:
    """What was compiled: ops before and after fusion, memory, times."""
    from rlx.compile import lower, optimize

    program = encoder.program
    feed = encoder.feed(sentences)
    batch, seq = feed["input_ids"].shape
    binding = {"batch": batch, "seq": seq}
    times = []
    for _ in range(10):
        start = time.perf_counter()
        program.run(feed)
        times.append((time.perf_counter() - start) / batch)
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
        "ms_per_sentence": round(sorted(times)[len(times) // 2] * 1e3, 3),
    }


@click.command()
@click.option("--query", "-q", multiple=True, help="What to search for; may be given several times.")
@click.option("--sentence", "-s", multiple=True, help="A sentence to search in; the built-in ones otherwise.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
def demo(query: tuple[str, ...], sentence: tuple[str, ...], as_json: bool) -> None:
    """Search sentences by meaning with all-MiniLM-L6-v2, compiled to native code on this machine."""
    sentences, queries = list(sentence) or list(SENTENCES), list(query) or list(QUERIES)
    with progress("loading") as say:
        encoder = Encoder(say)
        found = {q: search(encoder, sentences, q) for q in queries}
        facts = summary(encoder, sentences)
    if as_json:
        answers = {q: [{"score": s, "sentence": t} for s, t in hits] for q, (hits, _) in found.items()}
        print_json({"answers": answers, **facts})
        return
    out = console()
    out.print("[bold]all-MiniLM-L6-v2[/bold], compiled by RLX for this machine\n")
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
    ]
    print_table(("what", "value"), rows)
    for q, (hits, seconds) in found.items():
        out.print(f"\n[bold]{q}[/bold]  ({seconds * 1e3:.1f} ms)")
        for score, text in hits:
            out.print(f"  {score:.3f}  {text}")
