"""Errors inside the compiler: the graph is saved, and the message says how to report it.

Refusals are `RlxError`s and pass, as do errors of the system (no memory, no space on the disk). Whatever else
escapes from a stage of the compiler, a KeyError say, is a bug of RLX and becomes an `InternalError`.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from rlx.errors import InternalError, RlxError

Work = TypeVar("Work", bound=Callable[..., Any])


def reports_crashes(work: Work) -> Work:
    """Decorator of a function of a graph: what it raises beyond refusals becomes an `InternalError`.

    >>> from rlx.ir.graph import Graph
    >>> @reports_crashes
    ... def buggy(graph):
    ...     return {}["x"]
    >>> try:
    ...     buggy(Graph("net"))
    ... except InternalError as e:
    ...     print(e.message.partition(";")[0])
    RLX failed inside buggy (KeyError: 'x')
    """

    @functools.wraps(work)
    def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return work(graph, *args, **kwargs)
        except (RlxError, OSError, MemoryError):
            raise
        except Exception as e:
            raise InternalError(_message(work.__name__, graph, e), _where(e)) from e

    return watched  # type: ignore[return-value]


def _message(inside: str, graph: Any, error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    told = f"RLX failed inside {inside} ({text}); this is a bug of RLX, not of your program."
    path = _saved(graph)
    file = f"the file {path}, which holds the graph without its weights, and " if path else ""
    return f"{told} To report it, open an issue with {file}the whole traceback"


def _where(error: Exception) -> tuple[str, ...]:
    """The innermost place of RLX's own code that was running."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
            place = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return (place,) if place else ()


def _saved(graph: Any) -> str | None:
    """Where the graph was saved; None if that failed too, as the graph may be what is wrong."""
    from rlx.ir.serialize import save

    try:
        handle, path = tempfile.mkstemp(prefix="rlx-failed-", suffix=".graph")
        os.close(handle)
        save(graph, path, values=False)
    except Exception:  # the first error is the one to tell
        return None
    return path
