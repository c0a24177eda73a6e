"""Errors inside RLX: the graph is saved, and the message says how to report it.

Refusals are `RlxError`s and pass, as do errors of the system (no space on the disk), warnings
that the user turned into errors, and whatever the user's own code raises. Everything else that escapes, a
KeyError say, is a bug of RLX and becomes an `InternalError`.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from rlx.errors import InternalError, OutOfMemoryError, RlxError, is_users

Work = TypeVar("Work", bound=Callable[..., object])

_OWN = __name__.partition(".")[0]
# Packages that RLX calls; what fails in them, fails in RLX.
_CALLED = ("google", "llvmlite", "ml_dtypes", "mpi4py", "onnx", "pyopencl", "safetensors", "tokenizers")
_KEPT_BYTES = 1024  # of a tensor of an ONNX model: smaller ones are shapes and axes, which matter


def reports_crashes(work: Work) -> Work:
    """Decorator of a function of a graph or file: what it raises beyond refusals becomes an `InternalError`.

    >>> from rlx.ir.graph import Graph
    >>> @reports_crashes
    ... def buggy(graph):
    ...     return Graph.input(graph, *[()][1])
    >>> try:
    ...     buggy(Graph("net"))
    ... except IndexError:
    ...     print("of the user's own code")
    of the user's own code
    """

    @functools.wraps(work)
    def watched(graph: object, *args: object, **kwargs: object) -> object:
        try:
            return work(graph, *args, **kwargs)
        except RlxError:
            raise
        except MemoryError as e:
            raise OutOfMemoryError(f"the system has not enough memory for this model: {e}") from e
        except Exception as e:
            bug = found_bug(work.__name__, e, graph)
            if bug is None:
                raise
            raise bug from e

    return watched  # type: ignore[return-value]


def found_bug(inside: str, error: Exception, subject: object) -> InternalError | None:
    """The report of an error that escaped; None if it is not a bug of RLX and passes.

    `subject` is what RLX worked on: a graph or a function that gives one, an ONNX model, or a file's path.
    """
    if isinstance(error, (RlxError, OSError, MemoryError, Warning)):
        return None
    frames = list(_frames(error))
    if frames and is_users(frames[-1][0].co_filename):
        return None
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    told = f"RLX failed inside {inside} ({text}); this is a bug of RLX, not of your program."
    where = [f"{os.path.basename(code.co_filename)}:{line}" for code, line in frames[-1:]]
    return InternalError(
        f"{told} To report it, open an issue with {_evidence(subject)}the whole traceback", where
    )


def users_line(error: Exception) -> tuple[str, ...]:
    """The innermost line of the user that an error passed."""
    lines = [(code.co_filename, line) for code, line in _frames(error) if is_users(code.co_filename)]
    return tuple(f"{os.path.basename(file)}:{line}" for file, line in lines[-1:])


def _frames(error: Exception) -> Iterator[tuple[CodeType, int]]:
    """Where an error passed, the innermost place last: places of RLX and of the user only."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        own = package == _OWN and not is_users(code.co_filename)
        if own or (is_users(code.co_filename) and package not in _CALLED):
            yield code, trace.tb_lineno
        trace = trace.tb_next


def _evidence(subject: object) -> str:
    """What a report needs besides the traceback."""
    if isinstance(subject, (str, os.PathLike)):
        return f"the model {os.fspath(subject)} and "
    path, what = _saved(subject)
    return f"the file {path}, which holds the {what} without its weights, and " if path else ""


def _saved(subject: object) -> tuple[str | None, str]:
    """Where the graph was saved; None if that failed too, as the graph may be what is wrong."""
    path = None
    try:
        if callable(subject):
            subject = subject()
        is_onnx = hasattr(subject, "SerializeToString")
        handle, path = tempfile.mkstemp(prefix="rlx-failed-", suffix=".onnx" if is_onnx else ".graph")
        os.close(handle)
        _save_onnx(subject, path) if is_onnx else _save_graph(subject, path)
    except Exception:  # the first error is the one to report
        if path is not None:
            os.unlink(path)
        return None, ""
    return path, "model" if is_onnx else "graph"


def _save_graph(graph: Any, path: str) -> None:
    from rlx.ir.text.files import save  # start time: after a failure only

    save(graph, path, values=False)


def _save_onnx(model: Any, path: str) -> None:
    copy = type(model)()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.ByteSize() > _KEPT_BYTES:
            for name in ("raw", "float", "int32", "int64", "double", "uint64"):
                tensor.ClearField(f"{name}_data")
    with open(path, "wb") as file:
        file.write(copy.SerializeToString())
