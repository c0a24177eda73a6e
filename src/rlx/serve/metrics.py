"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Counter:
    """Numbers that only grow, one for each combination of labels.

    >>> c = Counter("rlx_demo_total", "Demonstrations.", ("path",))
    >>> c.add(2, "/")
    >>> print(*c.lines(), sep="\\n")
    # HELP rlx_demo_total Demonstrations.
    # TYPE rlx_demo_total counter
    rlx_demo_total{path="/"} 2
    """

    kind = "counter"

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        self.name, self.meaning, self.labels = name, meaning, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self) -> list[str]:
        head = [f"# HELP {self.name} {self.meaning}", f"# TYPE {self.name} {self.kind}"]
        return head + [
            f"{self.name}{_shown(self.labels, values)} {_number(number)}"
            for values, number in sorted(self._values.items())
        ]


class Histogram:
    """How many seconds things took."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name, self.meaning = name, meaning
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        found = [f"# HELP {self.name} {self.meaning}", f"# TYPE {self.name} histogram"]
        total = 0
        for limit, count in zip([*map("{:g}".format, _SECONDS), "+Inf"], self._counts, strict=True):
            total += count
            found.append(f'{self.name}_bucket{{le="{limit}"}} {total}')
        return [*found, f"{self.name}_sum {_number(self._sum)}", f"{self.name}_count {total}"]


def _shown(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    """
    >>> _number(12345678.0), _number(0.25)
    ('12345678', '0.25')
    """
    return str(int(value)) if value == int(value) else repr(float(value))


class Metrics:
    """What a server counts. All of it happens in the thread of the event loop."""

    def __init__(self) -> None:
        self.requests = Counter("rlx_requests_total", "Requests by path and status.", ("path", "status"))
        self.seconds = Histogram("rlx_request_seconds", "Time from a request to the end of its answer.")
        self.first = Histogram("rlx_first_token_seconds", "Time from a request to its first token.")
        self.prompt = Counter("rlx_prompt_tokens_total", "Tokens of prompts.")
        self.cached = Counter("rlx_cached_tokens_total", "Tokens of prompts that were not computed again.")
        self.made = Counter("rlx_generated_tokens_total", "Tokens that were generated.")
        self.cancelled = Counter("rlx_cancelled_total", "Answers that were not finished: the client left.")

    def text(self, engine: Mapping[str, object]) -> str:
        """All of them, and the numbers of the engine as gauges."""
        lines: list[str] = []
        for one in vars(self).values():
            lines += one.lines()
        for name, value in sorted(engine.items()):
            if isinstance(value, int | float):
                lines += [f"# TYPE rlx_engine_{name} gauge", f"rlx_engine_{name} {_number(value)}"]
        lines += ["# TYPE rlx_threads gauge", f"rlx_threads {threading.active_count()}"]
        return "\n".join(lines) + "\n"
