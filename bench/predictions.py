"""How good the cost model is: what `rlx explain` predicts for every kernel, next to what it takes.

    python bench/predictions.py                       # the zoo and all networks of bench/networks.py
    python bench/predictions.py ppocr-rec vit-b16 --kernels
    python bench/predictions.py --small --rounds 1    # networks at the sizes of the tests
    python bench/predictions.py ppocr-rec --save before.json
    python bench/predictions.py --times before.json   # a changed cost model, and times as they were

A row has the number of kernels, sums of predicted and measured times, and the shares of kernels whose
prediction is within 1.5 and 5 times the measured time, either way. The goal: 80 % of kernels within 1.5, none
beyond 5, every sum within 1.25. Times are medians of some rounds, on as many threads as the model assumes:
run it where nothing else runs. With `--times`, nothing is measured: a kernel has the time that it has in the
files, and kernels that a changed plan no longer has are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlx.api.compile import compile
from rlx.errors import RlxError
from rlx.target.prices import prices_of
from rlx_bench.machine import kind, processor
from rlx_bench.predictions import (
    FAR,
    NEAR,
    SUM,
    Prediction,
    measured,
    predictions,
    save,
    saved_times,
    share_within,
    whole,
)
from rlx_bench.workloads import make, models_named


def line(total: Prediction, kernels: list[Prediction]) -> str:
    """A model."""
    worst = max(kernels, key=lambda k: k.factor)
    return (
        f"{total.name:<18}{len(kernels):>8}{total.predicted:>14.1f}{total.measured:>14.1f}"
        f"{total.predicted / total.measured:>8.2f}{share_within(kernels, NEAR):>10.0%}"
        f"{share_within(kernels, FAR):>10.0%}{worst.factor:>9.1f}  {worst.name[:60]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="zoo, networks, or single ones; all by default")
    parser.add_argument("--threads", "-t", type=int, default=prices_of("cpu").cores)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="networks at the sizes of the tests")
    parser.add_argument("--kernels", action="store_true", help="list the kernels, too")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every kernel")
    parser.add_argument(
        "--times", type=Path, nargs="+", metavar="FILE", help="take measured times from what was saved"
    )
    given = parser.parse_args()
    known = {name: took for file in given.times or () for name, took in saved_times(file).items()}
    try:
        specs = models_named(given.models or tuple(known) or ("zoo", "networks"), given.small)
    except RlxError as error:
        parser.error(str(error))
    print(f"{processor()} ({kind()}), {given.threads} threads; microseconds")
    print(
        f"{'model':<18}{'kernels':>8}{'predicted':>14}{'measured':>14}{'ratio':>8}"
        f"{f'in {NEAR}x':>10}{f'in {FAR:g}x':>10}{'worst':>9}  kernel"
    )
    totals, every = list[Prediction](), dict[str, list[Prediction]]()
    for name, spec in specs.items():
        workload = make(spec)
        program = compile(workload.as_graph(), threads=given.threads)
        took = known.get(name) if given.times else measured(program, workload.feed, given.rounds)
        if took is None:
            parser.error(f"no times of {name} in {', '.join(map(str, given.times))}")
        found = every[name] = predictions(program, workload.feed, took)
        totals.append(whole(name, found))
        print(line(totals[-1], found), flush=True)
        for kernel in found if given.kernels else ():
            print(f"  {kernel.predicted:>12.2f}{kernel.measured:>12.2f}{kernel.factor:>8.1f}x  {kernel.name}")
    kernels = [kernel for found in every.values() for kernel in found]
    print(
        f"{len(kernels)} kernels: {share_within(kernels, NEAR):.0%} within {NEAR}x, "
        f"{share_within(kernels, FAR):.0%} within {FAR:g}x; "
        f"{share_within(totals, SUM):.0%} of {len(totals)} sums within {SUM}x"
    )
    if given.save is not None:
        save(given.save, every)


if __name__ == "__main__":
    main()
