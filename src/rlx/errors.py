"""Every refusal of RLX is an `RlxError`: one sentence that names the thing and says what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar

_PACKAGE = __name__.partition(".")[0]
_WHERE: ContextVar[tuple[str, ...] | None] = ContextVar("rlx_where", default=None)


def source_location() -> str:
    """file:line of the first stack frame outside this package: the line of the user that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != _PACKAGE and not module.startswith(_PACKAGE + "."):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return _PACKAGE


class provenance:
    """`with provenance(where):` what is made or refused inside comes from these source locations."""

    __slots__ = ("_token", "_where")

    def __init__(self, where: tuple[str, ...]) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._token = _WHERE.set(self._where)

    def __exit__(self, *raised: object) -> None:
        _WHERE.reset(self._token)


def current_where() -> tuple[str, ...]:
    """Where what is done now comes from: what `provenance` says, else the line of the user."""
    where = _WHERE.get()
    return (source_location(),) if where is None else where


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


class TypeError_(RlxError, TypeError):
    """An op was given operands or attributes that its type rule refuses.

    It says by itself where: such errors arise while a graph is built, in many places.
    """

    def __init__(self, message: str, where: Sequence[str] = ()) -> None:
        super().__init__(message, where or current_where())


class ShapeError(TypeError_):
    """Dims that must be equal or in range are not."""


class DTypeError(TypeError_):
    """A dtype is unknown, unsupported here, or two operands disagree."""


class AttributeError_(TypeError_):
    """An op attribute is missing, unknown or of the wrong kind."""


class UnknownOpError(RlxError, LookupError):
    """No op of that name is declared."""


class VerifyError(RlxError):
    """A graph breaks a rule of its level."""


class ParseError(RlxError, ValueError):
    """Text that is not a graph or plan."""


class FormatError(RlxError, ValueError):
    """A file that is damaged, truncated or of another format version."""


class GradientError(RlxError):
    """A gradient was asked for that does not exist."""


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


class CompileError(RlxError):
    """Native code could not be made."""


class KernelError(RlxError):
    """A kernel reported a fault while running."""


class ImportError_(RlxError):
    """A model file cannot be imported."""


class UnsupportedError(RlxError, NotImplementedError):
    """A feature that this build, device or backend does not have."""


class DeviceError(RlxError):
    """A device is missing, lost or used wrongly."""


class BufferError_(RlxError, BufferError):
    """A buffer or arena was used against its contract."""


class CopyError(RlxError):
    """An asynchronous copy was used against its contract."""


class ConfigError(RlxError, ValueError):
    """An option or environment variable has a value that RLX does not know."""


class ZooError(RlxError):
    """A model of the zoo cannot be fetched or fails its checksum."""


class CollectiveError(RlxError):
    """Base of all errors of ranks, transports and collectives."""
