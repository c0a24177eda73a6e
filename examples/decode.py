"""A GPT-2 decoder writes two texts at once: two streams of one program, each with a cache of its own.

    python examples/decode.py

A prompt is read in one step, then tokens come one by one. Keys and values are appended to states in place,
and attention reads the filled part only. The weights are random, so that the example runs anywhere (and
writes nonsense); `rlx.zoo.gpt2.build` takes the weights of GPT-2 under their own names.
"""

from __future__ import annotations

import time

import numpy as np

import rlx
from rlx.zoo.gpt2 import Config, build, random_weights

CONFIG = Config(layers=4, width=256, heads=4, vocabulary=2000, positions=256)
TOKENS = 60


def main() -> None:
    program = rlx.compile(build(CONFIG, random_weights(CONFIG)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocabulary, n) for n in (12, 30)]
    streams = [program.stream() for _ in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        stream.step({"tokens": prompt[:-1], "past": 0}, epilogue=False)
    texts = [list(prompt) for prompt in prompts]
    start = time.perf_counter()
    for _ in range(TOKENS):
        for stream, text in zip(streams, texts, strict=True):
            out = stream.step({"tokens": np.array(text[-1:]), "past": len(text) - 1})
            text.append(int(out["next"]))
    each = (time.perf_counter() - start) / TOKENS / len(streams)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"after {len(prompt)} tokens:", *text[len(prompt) :][:12], "...")
    cache = streams[0].state("k0").buffer.nbytes
    print(f"{each * 1e6:.0f} us per token; keys of a layer take {cache >> 10} KiB")


if __name__ == "__main__":
    main()
