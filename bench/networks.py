"""Networks beyond the zoo, which are written with fixed seeds: speed, cold starts, host thunks.

    python bench/networks.py                        # all networks, 1 and 2 threads
    python bench/networks.py zoo networks           # and the trained models of the zoo, on real input
    python bench/networks.py vit-b16 magika -t 1 --rounds 3
    python bench/networks.py --small --rounds 1     # at the sizes of the tests: a check of this command

Every network is one ONNX file in the cache, which RLX, ONNX Runtime and OpenVINO read. Outputs are compared
with the NumPy reference. *cold* is a fresh process with an empty cache, from `rlx.load` to the first result,
without imports. *ratio* is the time of the best peer by RLX's, with buffers bound; with a †, of a peer that
uses wider instructions than RLX may (RLX_HOST).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlx.errors import RlxError
from rlx_bench import cold, harness, known, report
from rlx_bench.machine import kind, processor
from rlx_bench.workloads import make, models_named

HEAD = ("network", "rlx", "best peer", "ratio", "of machine", "error")


def line(row: harness.Row) -> str:
    """A measured network."""
    own, best, share = row.of("rlx"), row.best_peer(), row.share()
    errors = "; ".join(f"{m.engine}: {m.error}" for m in row.engines if m.error)
    cells = [
        report.time_text(own.median) if own else "fails",
        f"{report.time_text(best.median)} {best.engine}" if best else "-",
        report.ratio_text(row),
        "-" if share is None else f"{share:.0%}",
        "-" if own is None else f"{own.difference:.1e}",
    ]
    text = f"{row.workload:<22}{cells[0]:>12}{cells[1]:>24}" + "".join(f"{c:>11}" for c in cells[2:])
    return text + (f"  {errors}" if errors else "")


def cold_line(name: str, found: list[cold.Cold]) -> str:
    """Cold starts of a network."""
    cells = [f"{c.median:.2f} s {c.peak / 2**20:.0f} MiB" if c.seconds else "fails" for c in found]
    thunks = [t for c in found for t in c.thunks]
    errors = [f"{c.engine}: {c.error}" for c in found if c.error]
    more = [f"host thunks: {', '.join(thunks)}"] * bool(thunks) + errors
    return f"{name:<22}" + "".join(f"{c:>20}" for c in cells) + f"{len(thunks):>8}  " + "; ".join(more)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="networks (the default), zoo, or single ones")
    parser.add_argument("--threads", "-t", type=int, action="append", help="may be repeated; 1 and 2")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds of three timings each; 0 leaves them out"
    )
    parser.add_argument("--cold-rounds", type=int, default=3, help="cold starts of each; 0 leaves them out")
    parser.add_argument("--small", action="store_true", help="at the sizes of the tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    given = parser.parse_args()
    try:
        specs = list(models_named(given.models or ("networks",), given.small).values())
    except RlxError as error:
        parser.error(str(error))
    print(f"{processor()} ({kind()})")
    rows, starts = list[harness.Row](), dict[str, list[cold.Cold]]()
    if given.rounds:
        for row in harness.measure(specs, given.threads or (1, 2), None, given.rounds):
            if row.threads not in {r.threads for r in rows}:
                widths = (22, 12, 24, 11, 11, 11)
                heads = (
                    f"{n:<{w}}" if i == 0 else f"{n:>{w}}"
                    for i, (n, w) in enumerate(zip(HEAD, widths, strict=True))
                )
                print(f"\nthreads {row.threads}\n" + "".join(heads))
            rows.append(row)
            print(line(row), flush=True)
        print("\n" + report.summary(rows))
    if given.cold_rounds:
        engines = [e for e in cold.ENGINES_WITH_FILES if cold.ENGINES[e].installed]
        print(f"\n{'cold start':<22}" + "".join(f"{e:>20}" for e in engines) + f"{'thunks':>8}")
        for spec in specs:
            workload = make(spec)
            starts[workload.name] = cold.measure(workload, given.cold_rounds)
            print(cold_line(workload.name, starts[workload.name]), flush=True)
        own = [found[0].median for found in starts.values() if found[0].seconds]
        thunks = sum(len(found[0].thunks) for found in starts.values())
        if own:
            print(
                f"rlx: median {statistics.median(own):.2f} s, worst {max(own):.2f} s over {len(own)} models; "
                f"{thunks} host thunks"
            )
    for text in known.slow_peers(rows):
        print(f"suspicious: {text}")
    if given.json is not None:
        told = {name: [vars(c) for c in found] for name, found in starts.items()}
        given.json.write_text(json.dumps({"rows": report.as_json(rows), "cold": told}, indent=1))


if __name__ == "__main__":
    main()
