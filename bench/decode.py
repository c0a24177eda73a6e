"""Time per token of a decoder as its cache fills: how much of the growth is attention's own work.

    python bench/decode.py [--layers 4 --width 768 --heads 12 --threads 1]

Steps at several fillings of the cache take turns, so that noise meets all alike; the least time of each
counts. On one thread (the default) it is CPU time, which other processes disturb less. Attention's own time
is what its kernels took in the same program, by the program's own clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

import rlx
from rlx.kernel.compose import body_of, compose
from rlx.kernel.nests import AttentionNest
from rlx.runtime.execution import Given
from rlx.runtime.program import CompiledProgram
from rlx.runtime.stream import Stream
from rlx.runtime.trace import spans
from rlx.zoo.gpt2 import Config, build, random_weights

FILLED = (64, 256, 512, 1023)


def attention_kernels(program: CompiledProgram) -> set[int]:
    """Kernels that are attention."""
    regions = [program.lir.mir.nodes[k] for k in program.lir.plan.schedule if program.lir.mir.nodes[k].bodies]
    return {n.id for n in regions if isinstance(compose(body_of(n)), AttentionNest)}


def own_time(program: CompiledProgram, stream: Stream, filled: int, rounds: int) -> float:
    """Least microseconds of all attention kernels in a step, on the thread that had most to do."""
    wanted = attention_kernels(program)
    binding = {"past": filled, "new": 1}
    context = program._make_context(binding, profile=True)
    token, empty = np.array([1]), np.empty((0, 0), np.int8)
    given = [empty if name == "past" else token for name in program.input_names]
    best = np.inf
    for _ in range(rounds):
        program.execute(context, Given(given, stream._memory, dict(binding)))
        spent: dict[int, float] = {}
        for span in spans(context):
            if span.node.id in wanted:
                spent[span.thread] = spent.get(span.thread, 0.0) + span.microseconds
        best = min(best, max(spent.values()))
    return best


def step_times(stream: Stream, filled: Sequence[int], rounds: int) -> dict[int, float]:
    """Least microseconds of a step at each filling, taken in turns."""
    clock = time.thread_time if stream.program.threads == 1 else time.perf_counter
    token, best = np.array([1]), dict.fromkeys(filled, np.inf)
    for _ in range(rounds):
        for past in filled:
            given = {"tokens": token, "past": past}
            start = clock()
            stream.step(given)
            best[past] = min(best[past], (clock() - start) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("layers", 4), ("width", 768), ("heads", 12), ("vocabulary", 8192), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    config = Config(args.layers, args.width, args.heads, args.vocabulary, 1024)
    program = rlx.compile(build(config, random_weights(config)), threads=args.threads)
    stream = program.stream()
    prompt = np.random.default_rng(0).integers(0, config.vocabulary, 1023)
    stream.step({"tokens": prompt, "past": 0}, epilogue=False)
    times = step_times(stream, FILLED, args.rounds)
    own = {past: own_time(program, stream, past, args.rounds // 2) for past in FILLED}
    print(f"{config}, {args.threads} threads, {len(program.lir.plan.schedule)} kernels")
    print("cached tokens   us per token   attention's own us   the rest")
    for past in FILLED:
        print(f"{past:13} {times[past]:14.1f} {own[past]:20.1f} {times[past] - own[past]:10.1f}")
    first, last = FILLED[0], FILLED[-1]
    longer, attention = times[last] - times[first], own[last] - own[first]
    rest = [times[past] - own[past] for past in (first, last)]
    print(f"From {first} to {last} cached tokens a step takes {longer:.1f} us longer;")
    print(f"attention by itself takes {attention:.1f} us longer.")
    print(f"The rest of a step changes by {rest[1] / rest[0] - 1:+.1%}.")


if __name__ == "__main__":
    main()
