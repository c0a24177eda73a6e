"""One engine with one language model in one process: reads commands as JSON lines, answers with times."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from rlx_bench.commands import answer_commands
from rlx_bench.llm.peers import PEERS, RlxSession, peak_memory
from rlx_bench.quiet import take_precedence

WINDOW = 512  # tokens that perplexity reads at a time
COMPARED = 4  # windows whose probabilities are compared


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """
    >>> np.exp(log_probabilities(np.log(np.array([[1.0, 3.0]])))).round(6).tolist()
    [[0.25, 0.75]]
    """
    least = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = least - np.log(np.exp(least, dtype=np.float64).sum(-1, keepdims=True))
    return found.astype(np.float32)


def divergence(truth: np.ndarray, found: np.ndarray) -> float:
    """The mean over tokens of the Kullback-Leibler divergence of `found` from `truth`, both as logarithms.

    >>> divergence(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])).__round__(6)
    0.143841
    """
    total = 0.0
    for one, other in zip(truth, found, strict=True):
        wide = one.astype(np.float64)
        total += float((np.exp(wide) * (wide - other)).sum())
    return total / len(truth)


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

    def weights(self) -> dict[str, Any]:
        """Bytes of weights that RLX's matmuls read for a token."""
        assert isinstance(self.session, RlxSession)
        return {"bytes": self.session.weights()}

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak_memory()}

    def save(self, tokens: list[int], path: str) -> dict[str, Any]:
        """Write the logits after a prompt, if the engine gives them."""
        found = self.session.logits(np.array(tokens, np.int32))
        if found is not None:
            np.save(path, found[-1])
        return {"saved": found is not None}

    def perplexity(self, tokens: list[int], truth: str) -> dict[str, Any]:
        """As `LanguageModel.perplexity`, from the logits of whichever engine; and, over the first windows,
        how far its probabilities are from those in `truth`, which it writes if the file is not there."""
        from rlx.llm.sample import log_softmax_at, perplexity_of  # here: it is not in the memory of peers

        logs: list[np.ndarray] = []
        first: list[np.ndarray] = []
        for at in range(0, len(tokens) - 1, WINDOW):
            part = np.array(tokens[at : at + WINDOW], np.int32)
            if len(part) > 1:
                found = self.session.logits(part)
                if found is None:
                    return {"perplexity": None, "divergence": None}
                logs.append(log_softmax_at(found[:-1], part[1:]))
                if len(first) < COMPARED:
                    first.append(log_probabilities(found))
        if not os.path.exists(truth):
            np.save(truth, np.concatenate(first))
        apart = divergence(np.load(truth, mmap_mode="r"), np.concatenate(first))
        return {"perplexity": perplexity_of(np.concatenate(logs)), "divergence": apart}


if __name__ == "__main__":
    take_precedence()
    answer_commands(_Bench(sys.argv[1], int(sys.argv[2])))
