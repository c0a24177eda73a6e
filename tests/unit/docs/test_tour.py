"""The tour runs as it is written."""

from __future__ import annotations

import doctest
from pathlib import Path

TOUR = Path(__file__).parents[3] / "docs" / "tour.md"


def test_the_tour_runs() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    text = TOUR.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "tour", str(TOUR), 0)
    lines: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=lines.append)
    assert result.attempted > 30 and result.failed == 0, "".join(lines)
