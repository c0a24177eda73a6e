"""Every refusal of RLX is an `RlxError`: one sentence that names the thing and says what to do."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from types import FrameType

_INSTALLED = ("site-packages", "dist-packages")
_INTERNAL_NAMES = ("<frozen ", "<__array_function__", "<rlx ")  # importlib, NumPy, code that RLX wrote
_IS_USERS: dict[str, bool] = {}  # by file name; asked for every node of a graph
_WHERE: ContextVar[tuple[str, ...] | None] = ContextVar("rlx_where", default=None)


def source_location() -> str | None:
    """file:line of the user's line that is running; None if no code of the user runs in this thread.

    Frames of RLX, of Python's library (contextlib, functools, threading) and of NumPy are skipped.
    """
    frame = _users_frame(sys._getframe(1))
    return None if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the user's line that is running; in a thread without one, at the line of RLX that warns."""
    own = sys._getframe(1)
    frame = _users_frame(own) or own
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of the user's code, from this one outwards."""
    while frame is not None:
        file = frame.f_code.co_filename
        users = _IS_USERS.get(file)
        if users is None:
            users = _IS_USERS[file] = is_users(file)
        if users:
            return frame
        frame = frame.f_back
    return None


def is_users(file: str) -> bool:
    """Whether code in a file is the user's: not of RLX, NumPy or Python's library."""
    if file.startswith("<"):  # a prompt, a notebook, exec
        return not file.startswith(_INTERNAL_NAMES)
    folders = os.path.abspath(file).split(os.sep)
    installed = next((i for i, folder in enumerate(folders) if folder in _INSTALLED), None)
    if installed is not None and folders[installed + 1 : installed + 2] == ["numpy"]:
        return False
    library = sysconfig.get_path("stdlib").split(os.sep)
    if installed is None and folders[: len(library)] == library:
        return False
    own = os.path.dirname(os.path.abspath(__file__)).split(os.sep)
    return folders[: len(own)] != own


def how_to_install(extra: str) -> str:
    """What a user with a clone of RLX does to add an optional part.

    >>> print(how_to_install("mpi"))
    in your clone of RLX run: pip install '.[mpi]'
    """
    return f"in your clone of RLX run: pip install '.[{extra}]'"


class provenance:
    """`with provenance(where):` what is created or refused inside comes from these source locations."""

    __slots__ = ("_token", "_where")

    def __init__(self, where: tuple[str, ...]) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._token = _WHERE.set(self._where)

    def __exit__(self, *raised: object) -> None:
        _WHERE.reset(self._token)


def current_where() -> tuple[str, ...]:
    """The source locations of what is done now: those that `provenance` set, else the line of the user."""
    where = _WHERE.get()
    if where is not None:
        return where
    line = source_location()
    return () if line is None else (line,)


class RlxError(Exception):
    """Base of all errors raised on purpose by RLX.

    `where` holds the source locations (user code or model nodes) that the error is about.

    >>> str(RlxError("bad shape", where=("model.py:3",)))
    'bad shape (at model.py:3)'
    """

    def __init__(self, message: str, where: Sequence[str] = ()) -> None:
        self.message = message
        self.where = tuple(where)
        super().__init__(message if not where else f"{message} (at {', '.join(where)})")


class TypeMismatchError(RlxError, TypeError):
    """The type rule of an op refuses its operands or attributes.

    It finds its source location by itself, because many places raise it while a graph is built.
    """

    def __init__(self, message: str, where: Sequence[str] = ()) -> None:
        super().__init__(message, where or current_where())


class ShapeError(TypeMismatchError):
    """Dims that must be equal or in range are not."""


class DTypeError(TypeMismatchError):
    """A dtype is unknown, unsupported here, or two operands disagree."""


class OpAttributeError(TypeMismatchError):
    """An op attribute is missing, unknown or of the wrong kind."""


class MissingAttribute(RlxError, AttributeError):
    """A traced value does not have what arrays have under this name."""


class UnknownOpError(RlxError, LookupError):
    """No op of that name is declared."""


class VerifyError(RlxError):
    """A graph breaks a rule of its level."""


class ParseError(RlxError, ValueError):
    """Text that is not a valid graph or plan."""


class OutOfMemoryError(RlxError, MemoryError):
    """The operating system refused memory."""


class FormatError(RlxError, ValueError):
    """A file that is damaged, truncated or has another format version."""


class GradientError(RlxError):
    """The requested gradient does not exist."""


class TransformError(RlxError):
    """A transform (grad, vmap, jvp, jit) cannot be applied."""


class GuardError(RlxError, ValueError):
    """A size given at run time breaks an assumption made at compile time."""


class InputError(RlxError, ValueError):
    """Inputs of a program do not fit: missing, unknown, wrong shape or dtype."""


class PlanError(RlxError):
    """A memory plan is not valid."""


class BudgetError(RlxError, MemoryError):
    """No plan fits the memory budget."""


class InternalError(RlxError):
    """RLX failed where it should not: a bug. The graph it failed on is saved, so that it can be reported."""


class CompileError(RlxError):
    """Native code could not be generated."""


class KernelError(RlxError):
    """A kernel reported a fault while running."""


class ModelImportError(RlxError):
    """A model file cannot be imported."""


class UnsupportedError(RlxError, NotImplementedError):
    """A feature that this build, device or backend does not have."""


class DeviceError(RlxError):
    """A device is missing, lost or used wrongly."""


class BufferUseError(RlxError, BufferError):
    """A buffer or arena was used in a way that is not allowed."""


class CopyError(RlxError):
    """An asynchronous copy was used in a way that is not allowed."""


class ConfigError(RlxError, ValueError):
    """An option or environment variable has a value that RLX does not know."""


class ZooError(RlxError):
    """A model of the zoo cannot be fetched or fails its checksum."""


class CollectiveError(RlxError):
    """Base of all errors of ranks, transports and collectives."""


_OLD_NAMES: dict[str, type[RlxError]] = {  # they leave with 0.2
    "TypeError_": TypeMismatchError,
    "AttributeError_": OpAttributeError,
    "ImportError_": ModelImportError,
    "BufferError_": BufferUseError,
}


def __getattr__(name: str) -> type[RlxError]:
    """Error classes under their old names, with a warning."""
    error = _OLD_NAMES.get(name)
    if error is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn(f"{name} is now {error.__name__}", DeprecationWarning)
    return error
