"""Servers of language models: one stream, 16 streams and prompts of 128 tokens, over HTTP.

    python bench/serve.py                              # zoo:smollm2 on 1 and 2 threads
    python bench/serve.py model.gguf -t 1 --streams 16 --tokens 64
    python bench/serve.py --engine rlx --json
    python bench/serve.py --steps                      # what batch invariance costs

Each server has its own process, which is stopped outside its turns. A prompt counts from its request to its
only token. Streams count from the moment when all of them have begun until the first one ends: the tokens
that arrive then, by the second. "engine" is RLX without HTTP. "alone" is rlx.llm.load, whose attention is not
over pages: the difference to the engine is what batch invariance costs. It reads a prompt with logits behind
its last token, as all do, and behind every token, which streams need. Texts of streams together must be those
of each stream alone. The peer is llama.cpp's own server, in the wheel xllamacpp:

    pip install --no-deps xllamacpp==2026.10.11549
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from llm import model_path
from rlx.cli.output import print_json, print_line, print_note, print_table
from rlx.errors import RlxError
from rlx.llm import Engine, LanguageModel, Request, load
from rlx.llm.source import open_source
from rlx.records import dataclass
from rlx_bench.llm.servers import CONTEXT, Server, check, serving
from rlx_bench.llm.steps import measure_steps
from rlx_bench.machine import kind, processor

PROMPT = 128
NAMES = ("rlx", "llama.cpp")
OPENINGS = (
    "a fox",
    "a ship",
    "an old clock",
    "the rain",
    "a baker",
    "two rivers",
    "a king",
    "the last train",
)
PLACES = ("in winter", "near the sea")


@dataclass(frozen=True)
class Stream:
    """When pieces of an answer arrived, and its text."""

    times: list[float]
    text: str


async def ask(url: str, body: dict[str, object]) -> Stream:
    """One request for a completion, as a stream."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    data = json.dumps({"temperature": 0, "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
    times: list[float] = []
    text = ""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RlxError(f"{url} answered {status!r}: {(await reader.read(2000))!r}")
    async for line in reader:
        if line.startswith(b"data: {"):
            piece = json.loads(line[6:])
            found = piece["choices"][0].get("text") if piece.get("choices") else None
            if found:
                times.append(time.perf_counter())
                text += found
    writer.close()
    return Stream(times, text)


async def together(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
    return await asyncio.gather(*(ask(url, {"prompt": list(p), "max_tokens": tokens}) for p in prompts))


def rate(streams: Sequence[Sequence[float]]) -> float:
    """Pieces a second, from the moment when all streams have begun until one ends; of all, if none is then.

    >>> rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0]])
    2.0
    """
    begin, end = max(s[0] for s in streams), min(s[-1] for s in streams)
    if not any(begin < t <= end for s in streams for t in s):
        begin, end = min(s[0] for s in streams), max(s[-1] for s in streams)
    return sum(begin < t <= end for s in streams for t in s) / (end - begin)


class Prompts:
    """Prompts that no server has seen before, so that none is in a cache."""

    def __init__(self, path: Path) -> None:
        self.tokenizer, self.random = open_source(path).tokenizer, random.Random(0)

    def noise(self) -> list[int]:
        """As many tokens as are measured."""
        count = len(self.tokenizer.tokens)
        return [
            self.random.randrange(count // 40, count) for _ in range(PROMPT)
        ]  # the first ones are special

    def stories(self, count: int) -> list[list[int]]:
        """Beginnings of stories, which go on."""
        pairs = [(who, where) for who in OPENINGS for where in PLACES]
        number = self.random.randrange(10**6)
        texts = [
            f"Story {number + i}. Once upon a time there was {who} {where}. One day,"
            for i, (who, where) in enumerate(pairs * -(-count // len(pairs)))
        ]
        return [self.tokenizer.encode(text) for text in texts[:count]]


def measure_server(url: str, prompts: Prompts, streams: int, tokens: int) -> dict[str, float]:
    """Tokens a second of one round."""
    found = {}
    for name, count in (("1 stream", 1), (f"{streams} streams", streams)):
        given = prompts.stories(count)
        found[name] = rate([s.times for s in asyncio.run(together(url, given, tokens))])
    start = time.perf_counter()
    asyncio.run(ask(url, {"prompt": prompts.noise(), "max_tokens": 1}))
    found[f"prompt of {PROMPT}"] = PROMPT / (time.perf_counter() - start)
    return found


def equal_texts(url: str, prompts: Prompts, streams: int, tokens: int) -> int:
    """How many streams have the same text together and alone."""
    given = prompts.stories(streams)
    mixed = [s.text for s in asyncio.run(together(url, given, tokens))]
    alone = [asyncio.run(ask(url, {"prompt": p, "max_tokens": tokens})).text for p in given]
    return sum(a == b for a, b in zip(mixed, alone, strict=True))


def measure_engine(engine: Engine, prompts: Prompts, streams: int, tokens: int) -> dict[str, float]:
    """The same without HTTP."""
    found = {}
    for name, count in (("1 stream, engine", 1), (f"{streams} streams, engine", streams)):
        times: list[list[float]] = [[] for _ in range(count)]
        running = [
            engine.submit(Request(tuple(p), tokens), lambda piece, t=t: t.append(time.perf_counter()))  # type: ignore[misc]
            for p, t in zip(prompts.stories(count), times, strict=True)
        ]
        for generation in running:
            generation.wait()
        found[name] = rate([t[:-1] for t in times])
    start = time.perf_counter()
    engine.submit(Request(tuple(prompts.noise()), 1)).wait()
    found[f"prompt of {PROMPT}, engine"] = PROMPT / (time.perf_counter() - start)
    return found


def measure_alone(model: LanguageModel, prompts: Prompts, tokens: int) -> dict[str, float]:
    """The same with the program for one sequence."""
    start = time.perf_counter()
    model.state.logits(prompts.noise())
    middle = time.perf_counter()
    model.logits(prompts.noise())
    end = time.perf_counter()
    given = prompts.stories(1)[0]
    for _ in model.stream_tokens(given, 1):
        pass
    begin = time.perf_counter()
    count = sum(1 for _ in model.stream_tokens(given, tokens))
    return {
        f"prompt of {PROMPT}, alone": PROMPT / (middle - start),
        f"prompt of {PROMPT}, alone, all logits": PROMPT / (end - middle),
        "1 stream, alone": count / (time.perf_counter() - begin),
    }


def measure(spec: str, threads: int, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Measure -> server -> tokens a second in all rounds."""
    path = Path(spec) if Path(spec).is_dir() else model_path(spec)
    rows: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = dict[str, Server]()
        for name in args.engine or NAMES:
            try:
                servers[name] = stack.enter_context(serving(name, path, threads, args.streams))
            except RlxError as error:
                print_note(f"{name}: {error}")
        engine = stack.enter_context(Engine(path, slots=args.streams, context=CONTEXT, threads=threads))
        model = load(path, context=CONTEXT, threads=threads)
        prompts = Prompts(path)
        for turn in range(args.rounds + 1):  # the first wakes threads and fills caches
            timed = {}
            for name, server in servers.items():
                with server.turn() as url:
                    timed[name] = measure_server(url, prompts, args.streams, args.tokens)
            own = timed.setdefault("rlx", {})
            own |= measure_engine(engine, prompts, args.streams, args.tokens)
            own |= measure_alone(model, prompts, args.tokens)
            for name, found in timed.items():
                for what, value in found.items():
                    rows.setdefault(what, {}).setdefault(name, []).extend([value] * (turn > 0))
        if "rlx" in servers:
            with servers["rlx"].turn() as url:
                equal = equal_texts(url, prompts, args.streams, args.tokens)
            print_note(f"{equal} of {args.streams} streams have the text that they have alone")
    return rows


def show_steps(args: argparse.Namespace) -> None:
    """A table of steps on one sequence and on pages; the last column is the median of ratios of pairs."""
    cells = []
    for spec in args.models:
        for threads in args.threads or (1, 2):
            for (past, new), times in measure_steps(model_path(spec), threads, args.rounds).items():
                shown = [f"{statistics.median(t) * 1e3:.2f} ms" for t in times]
                ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
                cells.append([f"{spec}, {new} after {past}", str(threads), *shown, f"{ratio:.3f}"])
    print_line(f"{processor()} ({kind()})")
    print_table(["step", "threads", "one sequence", "pages", "ratio"], cells)


def cell(values: Sequence[float]) -> str:
    """
    >>> cell([99.0, 100.0, 101.0]), cell([])
    ('100 ±1%', '-')
    """
    if not values:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{statistics.median(values):.0f} ±{(high - low) / 2 / middle:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", default=["zoo:smollm2"], help="[zoo:smollm2], or a folder"
    )
    parser.add_argument("-t", "--threads", type=int, action="append", help="may be repeated [1 and 2]")
    parser.add_argument("-e", "--engine", choices=NAMES, action="append", help="may be repeated [all]")
    parser.add_argument("--streams", type=int, default=16, help="at once [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--steps", action="store_true", help="steps of programs, for one sequence and on pages"
    )
    args = parser.parse_args()
    if args.steps:
        show_steps(args)
        return
    found = {
        spec: {threads: measure(spec, threads, args) for threads in args.threads or (1, 2)}
        for spec in args.models
    }
    if args.json:
        print_json({"kind": kind(), "tokens a second": found})
        return
    cells = [
        [f"{spec}, {what}", str(threads), *(cell(by_name.get(name, [])) for name in NAMES)]
        for spec, by_threads in found.items()
        for threads, rows in by_threads.items()
        for what, by_name in rows.items()
    ]
    print_line(f"{processor()} ({kind()})")
    print_table(["model", "threads", *NAMES], cells)
    for name in NAMES:
        try:
            print_line(f"  {name} {check(name)}")
        except RlxError as error:
            print_line(f"  {name}: {error}")


if __name__ == "__main__":
    main()
