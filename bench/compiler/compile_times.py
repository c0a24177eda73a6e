"""Where the time of a cold compile goes, for models of the zoo: a row per model, a column per stage.

    python bench/compiler/compile_times.py [minilm ppocr-det ...] [--times 2] [--kernels 10]

Every model is compiled in processes of its own, without the cache; figures are CPU milliseconds of the
fastest run. The last columns count what LLVM gets: kernels that differ, functions, and lines of text.
`--kernels` lists the kernels whose text is longest, which is where LLVM spends its time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

MODELS = ("minilm", "magika", "silero-ifless", "ppocr-det", "ppocr-rec", "basic-pitch", "open-nsfw")
STAGES = ("read", "plan", "write", "parse", "generate", "load", "all")
COUNTS = ("nodes", "kernels", "functions", "lines")


class Clock:
    """CPU time by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.spent[name] = (time.process_time() - start) * 1e3


def measure(model: str, longest: int) -> dict[str, float]:
    """One cold compile in this process."""
    from rlx import zoo
    from rlx.api.compile import plan
    from rlx.api.session import read_graph
    from rlx.codegen.cpu.build import build_kernels
    from rlx.codegen.native.jit import generate, load_all, parse
    from rlx.target.cpu import resolve
    from rlx.zoo.minilm import load_graph

    path = zoo.path(model)
    target = resolve("host")
    parse("define void @f() { ret void }", target)  # loads LLVM
    clock = Clock()
    with clock.on("read"):
        graph = load_graph(path.parent) if path.suffix == ".safetensors" else read_graph(path)
    with clock.on("plan"):
        lir = plan(graph)
    with clock.on("write"):
        kernels = build_kernels(lir, target)
    with clock.on("parse"):
        parsed = [parse(text, target) for text in kernels.texts]
    with clock.on("generate"):
        objects = [generate(module, machine) for module, machine in parsed]
    with clock.on("load"):
        load_all(objects, target)
    clock.spent["all"] = sum(spent for name, spent in clock.spent.items() if name != "read")
    sizes = [(text.count("\n"), text.partition("(")[0]) for text in functions(kernels.text)]
    for lines, name in sorted(sizes, reverse=True)[:longest]:
        print(f"{lines:8d}  {name}", file=sys.stderr)
    counts = (len(lir.plan.schedule), kernels.distinct, len(sizes), kernels.text.count("\n"))
    return {**clock.spent, **dict(zip(COUNTS, counts, strict=True))}


def functions(text: str) -> list[str]:
    """The functions that a module defines, as text."""
    return re.findall(r"^define .*?^}", text, re.MULTILINE | re.DOTALL)


def run_alone(model: str, longest: int) -> dict[str, float]:
    command = [sys.executable, __file__, model, "--alone", "--kernels", str(longest)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--kernels", type=int, default=0, help="list that many kernels by length")
    parser.add_argument("--alone", action="store_true", help="one run in this process, as JSON")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.models[0], args.kernels)))
        return
    print(f"{'ms of CPU time':<16}" + "".join(f"{name:>10}" for name in (*STAGES, *COUNTS)))
    for model in args.models or MODELS:
        runs = [run_alone(model, args.kernels) for _ in range(args.times)]
        best = min(runs, key=lambda run: run["all"])
        print(f"{model:<16}" + "".join(f"{best[name]:10.0f}" for name in (*STAGES, *COUNTS)), flush=True)


if __name__ == "__main__":
    main()
