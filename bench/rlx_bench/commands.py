"""Processes that answer commands: JSON lines come in, a JSON line for each goes out."""

from __future__ import annotations

import json
import sys


def _told(error: Exception) -> str:
    """The line of an error that says what is wrong: the first, of OpenVINO's the last.

    >>> _told(RuntimeError("Exception from core.cpp:84:\\nException from b.cpp:3:\\nno such op"))
    'no such op'
    """
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[-1 if lines[0].startswith("Exception from") else 0]


def answer_commands(bench: object) -> None:
    """Call what each line of stdin names, a method of `bench`, and print what it gives."""
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(bench, command.pop("do"))(**command)
        except Exception as error:  # reported; the harness continues with the other engines
            answer = {"error": f"{type(error).__name__}: {_told(error)}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
