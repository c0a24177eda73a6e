"""Times of several engines as a bar chart: an SVG file, one group of named bars for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {"rlx": "#1a7f4b", "RLX": "#1a7f4b"}
OTHER = "#9aa5b1"
LONGEST = 4.0  # times RLX's own time: longer bars are cut, and their label still says the time
LEFT, WIDTH, RIGHT = 130, 520, 150  # pixels: names, bars, labels
BAR, GAP, TOP = 16, 34, 78

Group = tuple[str, Mapping[str, tuple[float, str]]]
"""The name of a workload, and for each engine its time in seconds and as text."""


def svg(title: str, note: str, groups: Sequence[Group]) -> str:
    """The chart of some workloads. A bar is as long as its engine's time relative to RLX's, the first engine.

    >>> times = {"RLX": (1e-3, "1.00 ms"), "torch": (2e-3, "2.00 ms")}
    >>> text = svg("RLX and torch", "two cores", [("softmax", times)])
    >>> [word in text for word in ("RLX and torch", "two cores", "softmax", "2.00 ms, 2.00x")]
    [True, True, True, True]
    """
    parts: list[str] = []
    y = TOP
    for name, times in groups:
        parts.append(f'<text x="12" y="{y + 12}" class="workload">{escape(name)}</text>')
        y += 20
        (own, _), *_ = times.values()
        for engine, (seconds, text) in times.items():
            parts += _bar(y, engine, seconds / own, text)
            y += BAR + 2
        y += GAP - 20
    unit = LEFT + WIDTH / LONGEST
    line = f'<line x1="{unit:.1f}" y1="{TOP}" x2="{unit:.1f}" y2="{y - 10}" class="unit"/>'
    return "\n".join([_head(title, note, y), *parts, line, "</svg>", ""])


def _bar(y: int, engine: str, ratio: float, text: str) -> list[str]:
    length = WIDTH * min(ratio, LONGEST) / LONGEST
    label = text if ratio == 1 else f"{text}, {ratio:.2f}x"
    middle = y + BAR - 4
    return [
        f'<text x="{LEFT - 8}" y="{middle}" class="engine">{escape(engine)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLOURS.get(engine, OTHER)}"/>',
        f'<text x="{LEFT + length + 6:.1f}" y="{middle}" class="label">{escape(label)}</text>',
    ]


def _head(title: str, note: str, height: int) -> str:
    width = LEFT + WIDTH + RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img" aria-label="{escape(title)}">',
            "<style>text { font: 13px sans-serif; fill: #1f2933 } .title { font: bold 18px sans-serif }"
            " .workload { font-weight: bold } .engine { text-anchor: end } .unit { stroke: #1f2933;"
            " stroke-dasharray: 3 3 }</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="28" class="title">{escape(title)}</text>',
            f'<text x="12" y="50">{escape(note)}</text>',
        ]
    )
