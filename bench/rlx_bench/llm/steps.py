"""What batch invariance costs: steps on pages, next to those of the program for one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlx.llm import Engine, load

SHAPES = ((100, 1), (1000, 1), (0, 128), (0, 512), (1024, 128))
"""Tokens that are there, and new ones."""
CONTEXT = 2048
Times = dict[tuple[int, int], tuple[list[float], list[float]]]


def measure_steps(path: Path, threads: int, rounds: int) -> Times:
    """Seconds of steps: on one sequence, and on pages. They take turns. What is in memory does not matter."""
    alone = load(path, context=CONTEXT, threads=threads).program.stream()
    with Engine(path, slots=1, prefill_chunk=512, context=CONTEXT, threads=threads) as engine:
        found: Times = {shape: ([], []) for shape in SHAPES}
        for turn in range(rounds + 1):  # the first fills caches
            for (past, new), times in found.items():
                tokens = np.random.default_rng(turn).integers(1000, 40_000, new)
                last = np.array([new - 1])
                one = {"past": past, "tokens": tokens, "wanted": last}
                many = on_pages(past, tokens, last)
                for step, given, spent in (
                    (alone.step, one, times[0]),
                    (engine._stream.step, many, times[1]),
                ):
                    spent += [seconds(step, given)] * (turn > 0)
    return found


def on_pages(past: int, tokens: np.ndarray, wanted: np.ndarray) -> dict[str, object]:
    """The inputs of a step of one sequence in slot 0, whose pages are in order."""
    at = np.arange(past, past + len(tokens))
    none = np.empty(0, np.int64)
    sizes = {"new": len(tokens), "answers": len(wanted), "features": 0}
    places = {"at": at, "slots": np.zeros_like(at), "places": at, "table": np.arange(CONTEXT // 64)[None]}
    return {**sizes, **places, "tokens": tokens, "wanted": wanted, "pooled": none}


def seconds(step: Callable[[dict[str, object]], object], given: dict[str, object]) -> float:
    start = time.perf_counter()
    step(given)
    return time.perf_counter() - start
