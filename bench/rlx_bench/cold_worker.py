"""One cold start of one engine: from the model's file to the first result. Imports are done before the clock.

It is run as a file: engine, model, feeds (.npz), a file with the names of modules to import first. Without
such a file nothing is measured, and the modules that the start has imported are printed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np

from rlx_bench.start_worker import LOADERS, peak_bytes


def main() -> None:
    engine, path, feeds, *modules = sys.argv[1:]
    with np.load(feeds) as stored:
        feed = {name: stored[name] for name in stored.files}
    for name in json.loads(open(modules[0], encoding="utf-8").read()) if modules else ():
        importlib.import_module(name)
    start = time.perf_counter()
    run = LOADERS[engine](path)
    run(feed)
    seconds = time.perf_counter() - start
    answer: dict[str, Any] = {"seconds": seconds, "peak": peak_bytes()}
    if engine == "rlx":
        program: Any = run
        answer["thunks"] = [f"{t['op']} ({t['why']})" for t in program.__self__.stats["host_thunks"]]
    if not modules:
        answer["modules"] = [name for name, module in sys.modules.items() if _imported(name, module)]
    print(json.dumps(answer))


def _imported(name: str, module: object) -> bool:
    """Whether a module was found by its name; some packages put others into the table."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.name == name and (spec.has_location or spec.origin == "built-in")


if __name__ == "__main__":
    main()
