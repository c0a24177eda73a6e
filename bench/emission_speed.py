"""What writing LLVM IR costs, in one checkout and in another: CPU time by family of kernels, as ratios.

    git worktree add --detach /tmp/before COMMIT
    python bench/emission_speed.py /tmp/before . [product conv ...] [--rounds 20] [--slowest 10]

Both checkouts write the same kernels, each in a process of its own: those of the samples of every op and of
models of the zoo, for two named targets. LLVM is not asked. Kernels are matched by program, target and place.
Those whose code differs are left out and counted; of kernels with equal code, the first one counts.

A round writes every kernel once in both processes, which take turns. The time of a kernel is the least CPU
time of its rounds. Garbage is collected between rounds only, as compiling does it. Functions of the notation
are parsed when they are first used, before the rounds; the last line has the CPU time of the first writing of
all kernels, which has it all.

The ratio is after / before, of sums over a family. Its interval (95 %) is that of the ratios of five parts of
the rounds. Other load on the machine slows both processes, in moments of its own: many rounds help.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rlx_bench.harness import Worker
from versions import interval

HERE = Path(__file__).resolve().parent
FAMILIES = ("product", "conv", "rows", "attention", "fft", "special")
MODELS = "minilm magika silero-op15 ppocr-det ppocr-rec ppocr-cls basic-pitch whisper80 open-nsfw"
PARTS = 5  # of the rounds

Rounds = list[list[float]]  # seconds of every kernel in every round


def worker(checkout: Path) -> Worker:
    """A process that writes the kernels of a checkout; programs and comparisons are ours."""
    tests = HERE.parent / "tests"
    folders = [checkout.resolve() / "src", HERE, tests, tests / "models"]
    return Worker("rlx", 1, "emission_worker", [str(folder) for folder in folders])


def chosen(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The kernels to compare: equal code, each code once. Says what was left out."""
    both = [key for key in before if key in after]
    other = sum(before[key] != after[key] for key in both)
    first: dict[str, str] = {}
    for key in both:
        if before[key] == after[key]:
            first.setdefault(before[key][1], key)
    alone = len(before.keys() ^ after.keys())
    print(
        f"{len(both)} kernels, of which {len(first)} distinct ones are compared; left out: "
        f"{other} with other code, {alone} that only one checkout has",
        flush=True,
    )
    return list(first.values())


def take_turns(workers: Sequence[Worker], count: int) -> list[Rounds]:
    """The rounds of both checkouts."""
    found: list[Rounds] = [[] for _ in workers]
    for i in range(count + 1):
        for n in (0, 1) if i % 2 == 0 else (1, 0):
            times = workers[n].ask("round")["times"]
            if i:  # the first round fills caches
                found[n].append(times)
    return found


def least(rounds: Rounds, places: Sequence[int]) -> float:
    """The sum of the least times of kernels.

    >>> least([[1.0, 5.0], [2.0, 4.0]], [0, 1])
    5.0
    """
    return sum(min(times[i] for times in rounds) for i in places)


def report(family: str, places: Sequence[int], before: Rounds, after: Rounds) -> None:
    """Print the line of a family."""
    old, new = least(before, places), least(after, places)
    parts = [least(after[p::PARTS], places) / least(before[p::PARTS], places) for p in range(PARTS)]
    low, _, high = interval(parts)
    times = f"{old * 1e3:8.1f}ms {new * 1e3:8.1f}ms"
    print(f"{family:12} {len(places):7} {times}   {new / old:.3f} [{low:.3f}, {high:.3f}]", flush=True)


def slowest(keys: Sequence[str], before: Rounds, after: Rounds, count: int) -> None:
    """Print the kernels that lose most time."""
    pairs = [(least(before, [i]), least(after, [i]), key) for i, key in enumerate(keys)]
    for old, new, key in sorted(pairs, key=lambda pair: pair[0] - pair[1])[:count]:
        print(f"{(new - old) * 1e6:+8.0f}us {new / old:.2f}  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=MODELS, help="of the zoo; fetched if they are not in the cache")
    parser.add_argument("--slowest", type=int, default=0, help="list the kernels that lose most time")
    given = parser.parse_args()
    workers = [worker(given.before), worker(given.after)]
    try:
        made = [each.ask("make", families=given.families, models=given.models.split()) for each in workers]
        family_of = {key: family for key, (family, _) in made[0]["kernels"].items()}
        keys = chosen(*(each["kernels"] for each in made))
        for each in workers:
            each.ask("choose", keys=keys)
        before, after = take_turns(workers, math.ceil(given.rounds / PARTS) * PARTS)
    finally:
        for each in workers:
            each.close()
    print(f"{'family':12} {'kernels':>7} {'before':>10} {'after':>10}   ratio, 95 % interval")
    for family in given.families:
        places = [i for i, key in enumerate(keys) if family_of[key] == family]
        if places:
            report(family, places, before, after)
    slowest(keys, before, after, given.slowest)
    print("first writing:", ", ".join(f"{each['first']:.2f} s" for each in made))


if __name__ == "__main__":
    main()
