"""The lock file of the zoo as typed records."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from rlx.errors import ZooError
from rlx.records import dataclass

LOCK_FILE = Path(__file__).with_name("lock.toml")
FORMAT = 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Names become file and folder names in the cache: nothing that could climb out of it.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class File:
    """One file of a model: `member` of the wheel becomes `name` in the cache."""

    name: str
    member: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Wheel:
    """One wheel, named to the byte."""

    package: str
    version: str
    file: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def tags(self) -> tuple[list[str], list[str], list[str]]:
        """Python, ABI and platform tags from the file name.

        >>> Wheel("p", "1", "p-1-cp311-cp311-linux_x86_64.any.whl", "", 0).tags
        (['cp311'], ['cp311'], ['linux_x86_64', 'any'])
        """
        python, abi, platform = self.file.removesuffix(".whl").rsplit("-", 3)[1:]
        return python.split("."), abi.split("."), platform.split(".")


@dataclass(frozen=True)
class Model:
    """One entry of the zoo; `files[0]` is its main file.

    `kind` is "model", "language" (a model for `rlx.llm`) or "data" (test input).
    """

    id: str
    kind: str
    note: str
    licence: str
    wheel: Wheel
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes it takes in the cache."""
        return sum(file.size for file in self.files)


def parse_lock(text: str) -> dict[str, Model]:
    """Read and check the text of a lock file; entries keep its order.

    >>> parse_lock("format = 1")
    {}
    """
    try:
        data = tomllib.loads(text)
        if data["format"] != FORMAT:
            raise ZooError(f"zoo lock file has format {data['format']!r}; this version of RLX reads {FORMAT}")
        wheels = {
            package: Wheel(package=package, **entry) for package, entry in data.get("wheel", {}).items()
        }
        models = {id: _model(id, entry, wheels) for id, entry in data.get("model", {}).items()}
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ZooError(
            f"zoo lock file is malformed: {type(error).__name__}: {error}; reinstall rlx"
        ) from error
    for wheel in wheels.values():
        _check(wheel.package, wheel.sha256, wheel.file, wheel.package, wheel.version)
    for model in models.values():
        _check(model.id, model.wheel.sha256, model.id)
        for file in model.files:
            _check(model.id, file.sha256, file.name)
    return models


def _model(id: str, entry: dict[str, Any], wheels: dict[str, Wheel]) -> Model:
    files = tuple(File(**file) for file in entry["files"])
    return Model(
        id=id,
        kind=entry.get("kind", "model"),
        note=entry["note"],
        licence=entry["licence"],
        wheel=wheels[entry["wheel"]],
        files=files,
    )


def _check(owner: str, sha256: str, *names: str) -> None:
    bad = [name for name in names if not _PLAIN_NAME.fullmatch(name)]
    if bad:
        raise ZooError(f"zoo lock file: {owner} has the name {bad[0]!r}, which is not a plain file name")
    if not _SHA256.fullmatch(sha256):
        raise ZooError(f"zoo lock file: {owner} has {sha256!r} where a SHA-256 in hex must be")


@cache
def locked() -> dict[str, Model]:
    """The models of the lock file that ships with RLX, by id."""
    return parse_lock(LOCK_FILE.read_text(encoding="utf-8"))
