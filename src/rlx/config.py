"""Every environment variable that RLX reads, with its type, in one table.

A variable is read when its value is needed, never at import, so it can be changed at any time:

>>> from unittest import mock
>>> with mock.patch.dict("os.environ", RLX_THREADS="3"):
...     THREADS.get()
3

An argument given in code always wins over the environment; the environment wins over the default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from rlx.cores import usable_cores
from rlx.errors import ConfigError
from rlx.records import dataclass

VERSION = "0.1.0"
"""Of the compiler: part of every plan."""

# Covariant, so that knobs of different types stand in one table.
T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: its name, how its text is parsed, and its default.

    `parse` raises ValueError with the values that it accepts.

    >>> Knob("RLX_DEMO_SIZE", "a size", parse=int, default=lambda: 7, default_text="7").get()
    7
    """

    name: str
    meaning: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    default_text: str

    def get(self) -> T:
        """The current value; an empty variable counts as not set."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"environment variable {self.name}={text!r} is not valid: {error}; change or unset it"
            ) from None


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "rlx"


_BYTES = re.compile(r"(\d+(?:\.\d+)?) *([a-z]*)")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(given: int | str, option: str = "budget") -> int:
    """A number of bytes, from a number or from text with a unit; `option` is what an error names.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 kb"), parse_bytes(100)
    (67108864, 1500, 100)
    """
    found = None if isinstance(given, bool) else _BYTES.fullmatch(str(given).lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(
            f"{option} {given!r} is not a number of bytes; write for example '64MiB' or 67108864"
        )
    unit = _UNITS[found[2]]
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def bytes_text(count: int) -> str:
    """A byte count in the unit that reads best.

    >>> bytes_text(512), bytes_text(40_000), bytes_text(3 << 20)
    ('512 B', '39.1 KiB', '3 MiB')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _directory(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("it must be a whole number of at least 1")
    return int(text)


def _flag(text: str) -> bool:
    values = {
        "1": True,
        "yes": True,
        "true": True,
        "on": True,
        "0": False,
        "no": False,
        "false": False,
        "off": False,
    }
    if text.lower() not in values:
        raise ValueError("it must be 1 or 0")
    return values[text.lower()]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError("it must be a number of seconds above 0")
    return seconds


def _debug_mode(text: str) -> str | None:
    if text not in ("nan", "poison"):
        raise ValueError(
            "it must be 'nan' (find the kernel that first gives a NaN) or 'poison' (overwrite freed memory)"
        )
    return text


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


CACHE: Knob[Path] = Knob(
    "RLX_CACHE", "folder for compiled code and fetched models", _directory, _default_cache, "~/.cache/rlx"
)
THREADS: Knob[int] = Knob(
    "RLX_THREADS",
    "default number of threads",
    _count,
    usable_cores,
    "cores of this process, or its CPU quota",
)


def thread_count(given: int | None) -> int:
    """Number of threads of a program: the given one, else the default.

    >>> thread_count(3)
    3
    """
    if given is None:
        return THREADS.get()
    if isinstance(given, bool) or not hasattr(given, "__index__") or given < 1:
        raise ConfigError(f"threads={given!r} is not a number of threads; give a whole number of at least 1")
    return int(given)


HOST: Knob[str | None] = Knob(
    "RLX_HOST",
    "CPU target to treat this machine as; newer code is refused. Without AVX-512, tests use "
    "`emulate:x86-64-v4`",
    str,
    lambda: None,
    "this machine",
)
TARGET: Knob[str] = Knob(
    "RLX_TARGET", "default CPU target to compile for (`rlx devices` lists them)", str, lambda: "host", "host"
)
DEBUG: Knob[str | None] = Knob(
    "RLX_DEBUG", "default debug mode: nan or poison", _debug_mode, lambda: None, "off"
)
TRACEBACK: Knob[bool] = Knob(
    "RLX_TRACEBACK", "1: the command line shows the full traceback of an error", _flag, lambda: False, "0"
)
DIST_TIMEOUT: Knob[float] = Knob(
    "RLX_DIST_TIMEOUT",
    "default number of seconds that a rank waits for other ranks",
    _seconds,
    lambda: 30.0,
    "30",
)
WINOGRAD: Knob[bool] = Knob(
    "RLX_WINOGRAD",
    "0: never use Winograd's algorithm for convolutions",
    _flag,
    lambda: True,
    "1",
)
REQUIRE: Knob[frozenset[str]] = Knob(
    "RLX_REQUIRE",
    "tests: optional parts that must be installed, separated by commas",
    _names,
    frozenset,
    "none",
)

KNOBS: tuple[Knob[object], ...] = (
    CACHE,
    THREADS,
    HOST,
    TARGET,
    DEBUG,
    TRACEBACK,
    DIST_TIMEOUT,
    WINOGRAD,
    REQUIRE,
)


def table() -> str:
    """The variables as a Markdown table, as in the README.

    >>> print(table().splitlines()[2])
    | `RLX_CACHE` | `~/.cache/rlx` | folder for compiled code and fetched models |
    """
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    rows += [f"| `{knob.name}` | `{knob.default_text}` | {knob.meaning} |" for knob in KNOBS]
    return "\n".join(rows)
