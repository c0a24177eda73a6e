"""Runs ONNX's own backend suite against rlx.onnx_backend and prints a table by family.

    python bench/onnx_suite.py [--workers 2] [--only REGEX] [--json FILE] [--host] [--passed N] [--native M]

Score: passes out of all tests of the suite; nothing is excluded. The second column counts passes whose
program had no host thunk: every op ran as native code. `--passed N --native M` makes a lower score an error.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
import warnings
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Outcome:
    """What one test did."""

    name: str
    op: str
    passed: bool
    native: bool
    seconds: float
    reason: str


REASONS = {
    r"test_(bernoulli|training_dropout)": "expects the random numbers of NumPy's generator for a seed",
    r"test_image_decoder": "RLX has no decoders of image files",
    r"test_dft_inverse": "expects the rounding noise of NumPy's single-precision FFT (2e-7 where 0 is right)",
    r"test_loop16_seq_none": "the suite itself cannot compare sequences that hold a scalar",
    r"test_attention_4d_causal_fp16_expanded": "differs by one unit in the last place of f16",
}
"""Tests that are known to fail, and why."""

SHORT = {
    "sce": "SoftmaxCrossEntropyLoss",
    "nllloss": "NegativeLogLikelihoodLoss",
    "mvn": "MeanVarianceNormalization",
    "simplernn": "RNN",
    "batchnorm": "BatchNormalization",
    "instancenorm": "InstanceNormalization",
    "l1normalization": "LpNormalization",
    "l2normalization": "LpNormalization",
    "strnorm": "StringNormalizer",
    "basicconv": "Conv",
    "basicdeformconv": "DeformConv",
    "nesterov": "Momentum",
    "trainingdropout": "Dropout",
    "imagedecoder": "ImageDecoder",
}
"""Tests that do not begin with the name of the op they are about."""


def main_op(model: Any, name: str) -> str:
    """The op that a test is about: the longest name of an op that its own name begins with."""
    from rlx.frontend.onnx.registry import entries

    kinds = [node.op_type for node in model.graph.node] if model is not None else []
    plain = name.removeprefix("test_").removeprefix("ai_onnx_ml_").replace("_", "").lower()
    known = {e.op.lower(): e.op for e in entries()} | {k.lower(): k for k in kinds} | SHORT
    fitting = [k for k in known if plain.startswith(k)]
    return known[max(fitting, key=len)] if fitting else kinds[0] if len(set(kinds)) == 1 else "models"


class Suite:
    """The suite's CPU tests, run one by one."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("ONNX_HOME", tempfile.mkdtemp(prefix="rlx-onnx-"))
        from onnx.backend.test.runner import Runner

        from rlx.onnx_backend import RlxBackend

        reps: list[Any] = []
        self.reps = reps

        class Recorded(RlxBackend):
            @classmethod
            def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Any:
                reps.append(super().prepare(model, device, **kwargs))
                return reps[-1]

        self.cases: dict[str, Any] = {}
        for case in Runner(Recorded, __name__).test_cases.values():
            for name in sorted(dir(case)):
                if name.startswith("test_") and name.endswith("_cpu"):
                    self.cases[name.removesuffix("_cpu")] = getattr(case, name)

    def run(self, name: str) -> Outcome:
        """One test; every way of not passing is a failure, skipping included."""
        self.reps.clear()
        start = time.perf_counter()
        reason = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.cases[name](unittest.TestCase())
        except unittest.SkipTest as e:
            reason = f"skipped: {e}"
        except Exception as e:  # every failure is counted and shown
            reason = f"{type(e).__name__}: {e}"
        if not reason and not self.reps:
            reason = "nothing was run"
        thunks = [t for rep in self.reps for t in rep.host_thunks]
        if not reason and thunks:
            note = "host: " + "; ".join(sorted({f"{t['op']} ({t['why']})" for t in thunks}))
        else:
            note = reason
        model = self.reps[0].model.model if self.reps else None
        return Outcome(
            name,
            main_op(model, name),
            not reason,
            not reason and not thunks,
            time.perf_counter() - start,
            note,
        )


_suite: Suite | None = None


def loaded() -> Suite:
    """The suite in a worker, which loads it once: that takes seconds."""
    global _suite
    if _suite is None:
        _suite = Suite()
    return _suite


def names_of(_worker: int) -> list[str]:
    """The names of all tests; asked of every worker, it also makes all of them load the suite at once."""
    return sorted(loaded().cases)


def run_one(name: str) -> Outcome:
    """A test in a worker."""
    return loaded().run(name)


WHOLE_MODELS = {
    f"test_{name}"
    for name in (
        *("densenet121", "vgg19", "resnet50", "shufflenet", "bvlc_alexnet", "zfnet512"),
        *("inception_v1", "inception_v2", "squeezenet"),
    )
}


def run_suite(only: str = "", workers: int = 2) -> list[Outcome]:
    """Outcomes of all tests whose names match, in order of name."""
    if workers <= 1:
        return [run_one(name) for name in names_of(0) if re.search(only, name)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        known, *_ = pool.map(names_of, range(workers))
        names = [name for name in known if re.search(only, name)]
        names.sort(key=lambda name: name not in WHOLE_MODELS)  # the long ones first
        return sorted(pool.map(run_one, names, chunksize=1), key=lambda o: o.name)


def family_of(op: str) -> str:
    """The family of the table that an op is in."""
    from rlx.frontend.onnx.registry import entries

    families = {e.op: e.family for e in reversed(entries())}  # ONNX's own domain comes first, so it stays
    return families.get(op, "models" if op == "models" else "other")


def table(outcomes: list[Outcome]) -> str:
    """Passes by family, in all and natively."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for o in outcomes:
        row = counts[family_of(o.op)]
        row[0] += o.passed
        row[1] += o.native
        row[2] += 1
    lines = [f"{'family':12} {'passed':>7} {'native':>7} {'tests':>6}"]
    lines += [f"{f:12} {p:7} {n:7} {t:6}" for f, (p, n, t) in sorted(counts.items())]
    total = [sum(c[i] for c in counts.values()) for i in range(3)]
    lines.append(f"{'all':12} {total[0]:7} {total[1]:7} {total[2]:6}")
    return "\n".join(lines)


def reason_of(outcome: Outcome) -> str:
    """Why a test fails: as known, else as it says itself."""
    known = [why for pattern, why in REASONS.items() if re.match(pattern, outcome.name)]
    return known[0] if known else " ".join(outcome.reason.split())[:300]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="run the tests whose names match this regular expression")
    parser.add_argument("--json", help="write every outcome to this file")
    parser.add_argument("--host", action="store_true", help="list passes that needed the host, with reasons")
    parser.add_argument("--passed", type=int, default=0, help="fail below this number of passes")
    parser.add_argument("--native", type=int, default=0, help="fail below this number of native passes")
    args = parser.parse_args()
    start = time.perf_counter()
    outcomes = run_suite(args.only, args.workers)
    for o in outcomes:
        if not o.passed or (args.host and not o.native):
            print(f"{'host' if o.passed else 'FAIL'} {o.name}: {reason_of(o)}")
    print(table(outcomes))
    print(f"{time.perf_counter() - start:.1f} s with {args.workers} workers")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump([asdict(o) for o in outcomes], f, indent=1)
    passed, native = sum(o.passed for o in outcomes), sum(o.native for o in outcomes)
    return int(passed < args.passed or native < args.native)


if __name__ == "__main__":
    sys.exit(main())
