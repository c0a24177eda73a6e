"""Which kernels would keep many cores waiting: the largest share of a thread, by kernel.

    python bench/compiler/shares.py                # the zoo and all networks of bench/networks.py
    python bench/compiler/shares.py vit-b16 --threads 64 --least 0.01

Every kernel computes the shares of all threads, one after the other on this core, and each is timed: the
figures need no machine with so many cores. Listed are kernels that take more than `--least` of the predicted
time of their model, and whose largest share is more than `--most` of all: exit code 1 if there is one that
`shares_allowed.txt` does not name with a reason. Kernels in bodies of loops and branches are not listed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from rlx.api.compile import compile
from rlx.errors import RlxError
from rlx_bench.shares import shares
from rlx_bench.workloads import make, models_named

ALLOWED = Path(__file__).with_name("shares_allowed.txt")


def allowed() -> dict[str, list[str]]:
    """Model -> beginnings of names of kernels, of lines `model: kernel: reason`."""
    found = dict[str, list[str]]()
    lines = ALLOWED.read_text().splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            model, kernel, _ = line.split(": ", 2)
            found.setdefault(model, []).append(kernel)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="zoo, networks, or single ones; all by default")
    parser.add_argument("--threads", "-t", type=int, default=16)
    parser.add_argument("--least", type=float, default=0.05, help="part of the time of a model")
    parser.add_argument("--most", type=float, default=0.25, help="largest share of a thread")
    given = parser.parse_args()
    try:
        specs = models_named(given.models or ("zoo", "networks"))
    except RlxError as error:
        parser.error(str(error))
    known, kernels, bad = allowed(), 0, 0
    for name, spec in specs.items():
        workload = make(spec)
        found = shares(compile(workload.as_graph(), threads=1), workload.feed, given.threads)
        kernels += len(found)
        for kernel in found:
            if kernel.part > given.least and kernel.largest > given.most:
                fine = any(kernel.name.split(" ", 1)[1].startswith(k) for k in known.get(name, ()))
                bad += not fine
                told = f"{kernel.part:.0%} of its time, {kernel.largest:.0%} on one thread"
                print(f"{name}: {kernel.name[:80]}: {told}{' (allowed)' if fine else ''}", flush=True)
    print(f"{kernels} kernels of {len(specs)} models on {given.threads} threads: {bad} too unevenly shared")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
