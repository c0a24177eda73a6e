"""Exports to WebAssembly next to native code and to onnxruntime-web, in Node and in a headless Chromium.

    python bench/web.py                                  # the zoo's models, one thread
    python bench/web.py minilm magika -t 1 -t 2          # models, numbers of threads
    python bench/web.py qdq-transformer int8:128,384,1536 int8:128,384,1536,8    # weights of 7 and 8 bits
    python bench/web.py --language smollm2               # a language model, next to wllama
    python bench/web.py --only-export                    # write the files that the measurement reads
    python bench/web.py ppocr-cls --kernels wasm32       # kernels one by one in Node, next to native ones

Node (22 or later) and onnxruntime-web are taken from --packages, a folder `node_modules` of npm:

    npm install --prefix DIR node@24 onnxruntime-web @wllama/wllama

Nothing is fetched by pages: a server of this command serves the files to this machine. What is missing is
left out. Every engine runs in turn with the others, RLX for `x86-64` (SSE2) too; outputs are compared with
the NumPy reference. *first* is the time from nothing loaded to the first result, in a new worker.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlx.cli.output import print_line, print_note, print_table
from rlx.errors import ConfigError
from rlx_bench.harness import Expected
from rlx_bench.machine import processor
from rlx_bench.report import markdown_table
from rlx_bench.web.exports import write_exports
from rlx_bench.web.kernels import HEAD as kernels_head
from rlx_bench.web.kernels import NATIVE, kernel_times
from rlx_bench.web.kernels import cells as kernel_cells
from rlx_bench.web.language import LANGUAGE_HEAD, language_cells, measure_language, write_language
from rlx_bench.web.measure import HEAD, Places, WebRow, cells, measure
from rlx_bench.web.places import chromium
from rlx_bench.workloads import specs_named


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=["zoo"], help="zoo (the default), networks, or single ones"
    )
    parser.add_argument("--threads", "-t", type=int, action="append", help="may be repeated; 1")
    parser.add_argument("--language", metavar="ID", help="a language model of the zoo in place of models")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of three timings each")
    parser.add_argument("--starts", type=int, default=3, help="first results of each; 0 leaves them out")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="a folder node_modules of npm")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep exports there, and use them again")
    parser.add_argument("--no-browser", action="store_true", help="measure in Node only")
    parser.add_argument("--only-export", action="store_true", help="write exports into --folder and end")
    parser.add_argument(
        "--kernels", metavar="TARGET", help="kernels one by one; those in loops and branches are left out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    try:
        specs = specs_named(given.models)
    except ConfigError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.only_export:
            if given.language:
                write_language(given.language, folder)
                return
            for spec in specs:
                print_note(f"{spec}: {', '.join(map(str, write_exports(spec, folder).values()))}")
            return
        packages = given.packages and given.packages.resolve()
        node = str(packages / "node/bin/node") if packages else shutil.which("node")
        if given.kernels:
            if node is None:
                parser.error("there is no Node: install it, or give --packages")
            for spec in specs:
                kernels, web, native = kernel_times(spec, given.kernels, node)
                print_line(f"{spec} {given.kernels}: {web:.0f} us a run, {NATIVE} {native:.0f} us")
                print_table(kernels_head, [kernel_cells(kernel) for kernel in kernels])
            return
        served = {"made": folder, **({"packages": packages} if packages else {})}
        browser = None if given.no_browser else stack.enter_context(chromium(served))
        places = Places(folder, packages, node, browser)
        if given.language:
            if browser is None:
                parser.error("language models are measured in a browser")
            print_line(processor())
            lines = [
                line
                for count in given.threads or [1]
                for line in language_cells(
                    measure_language(
                        given.language, count, browser, folder, packages is not None, given.starts, print_note
                    ),
                    count,
                )
            ]
            print_table(LANGUAGE_HEAD, lines)
            return
        expected = stack.enter_context(Expected())
        rows = list[WebRow]()
        for threads in given.threads or [1]:
            for spec in specs:
                rows.append(measure(spec, threads, places, given.rounds, given.starts, expected, print_note))
                for line in cells(rows[-1]):  # as they come: a long run may be ended
                    print_note("  ".join(line))
    print_line(processor())
    table = [line for row in rows for line in cells(row)]
    if given.markdown:
        print_line("\n".join(markdown_table(HEAD, table)))
    else:
        print_table(HEAD, table)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
