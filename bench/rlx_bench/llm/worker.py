"""One engine with one language model in one process: reads commands as JSON lines, answers with times."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from rlx_bench.commands import answer_commands
from rlx_bench.llm.peers import PEERS, peak_memory
from rlx_bench.quiet import take_precedence

WINDOW = 512  # tokens that perplexity reads at a time


class _Bench:
    def __init__(self, engine: str, threads: int) -> None:
        self.peer, self.threads = PEERS[engine], threads

    def load(self, path: str, context: int) -> dict[str, Any]:
        start = time.perf_counter()
        self.session = self.peer.load(path, self.threads, context)
        return {"seconds": time.perf_counter() - start}

    def prefill(self, tokens: list[int], samples: int) -> dict[str, Any]:
        """Seconds for each token of a prompt."""
        given = np.array(tokens, np.int32)
        times = [self.session.prefill(given) / len(given) for _ in range(samples + 1)]
        return {"times": times[1:]}  # the first wakes threads and fills caches

    def decode(self, tokens: list[int], after: int, samples: int) -> dict[str, Any]:
        """Seconds for each token behind the first `after`, one by one."""
        given = np.array(tokens, np.int32)
        self.session.prefill(given[:after])
        return {"times": [self.session.decode(given, after) for _ in range(samples)]}

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak_memory()}

    def save(self, tokens: list[int], path: str) -> dict[str, Any]:
        """Write the logits after a prompt, if the engine gives them."""
        found = self.session.logits(np.array(tokens, np.int32))
        if found is not None:
            np.save(path, found[-1])
        return {"saved": found is not None}

    def perplexity(self, tokens: list[int]) -> dict[str, Any]:
        """As `LanguageModel.perplexity`, from the logits of whichever engine."""
        from rlx.llm.sample import log_softmax_at, perplexity_of  # here: it is not in the memory of peers

        logs = []
        for at in range(0, len(tokens) - 1, WINDOW):
            part = np.array(tokens[at : at + WINDOW], np.int32)
            if len(part) > 1:
                found = self.session.logits(part)
                if found is None:
                    return {"perplexity": None}
                logs.append(log_softmax_at(found[:-1], part[1:]))
        return {"perplexity": perplexity_of(np.concatenate(logs))}


if __name__ == "__main__":
    take_precedence()
    answer_commands(_Bench(sys.argv[1], int(sys.argv[2])))
