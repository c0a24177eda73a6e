"""rlx doctor: is this installation complete, and does it compute what it should?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click
import numpy as np

from rlx import config
from rlx.api.compile import compile
from rlx.cli.output import human_bytes, json_option, print_json, print_line, print_table, progress
from rlx.cores import cpu_quota
from rlx.driver import why_unavailable
from rlx.errors import RlxError, how_to_install
from rlx.ir.graph import Graph
from rlx.ops import gelu, softmax
from rlx.records import dataclass
from rlx.reference.interpreter import evaluate
from rlx.runtime.store.cache import CacheWarning, default_cache
from rlx.runtime.store.programs import ProgramStore, wait_until_stored
from rlx.runtime.store.trust import TrustWarning, keyring
from rlx.system import SYSTEM
from rlx.target.cpu import host, host_text

OK, NOTE, FAILED = "ok", "note", "FAILED"
_OLDEST = (3, 11)
_CORE = ("numpy", "ml_dtypes", "llvmlite")
_FOR_USERS = ("cli", "demo", "llm", "serve", "onnx", "opencl", "mpi")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?[^;]*;.*extra == ['\"](\w+)['\"]")
_TOLERANCE = 1e-5
_FINDINGS = (CacheWarning, TrustWarning)  # warnings of RLX that say what is wrong with an installation


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is fine, and what to know or to do."""

    what: str
    verdict: str
    about: str


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this installation: packages, host, cache, compiler, threads and devices.

    It compiles a small graph and compares it with the NumPy reference. It exits with 1 if something FAILED; a
    note says what is not there, and how to get it.
    """
    with progress("looking around"):
        found = examine()
    healthy = all(finding.verdict != FAILED for finding in found)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in found]})
    else:
        print_table(("what", "verdict", "about"), [(f.what, f.verdict, f.about) for f in found])
        print_line()
        print_line("RLX works here." if healthy else "RLX does not work here as it should; see what FAILED.")
    if not healthy:
        ctx.exit(1)


def examine() -> list[Finding]:
    """All findings, whatever any of them runs into.

    >>> [finding.verdict for finding in examine() if finding.what == "python"]
    ['ok']
    """
    found: list[Finding] = []
    wait_until_stored()  # warnings of its thread are not findings, and would be errors there
    for what, look in _CHECKS.items():
        try:
            with warnings.catch_warnings():
                for category in _FINDINGS:
                    warnings.simplefilter("error", category)
                found += (Finding(what if not name else f"{what} {name}", *rest) for name, *rest in look())
        except (RlxError, OSError, ImportError, *_FINDINGS) as error:
            found.append(Finding(what, FAILED, str(error)))
    return found


Found = Iterator[tuple[str, str, str]]  # a name for what is looked at several times, verdict, text


def _python() -> Found:
    about = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    if sys.version_info < _OLDEST:
        yield "", FAILED, f"{about}; RLX needs {'.'.join(map(str, _OLDEST))} or newer"
    else:
        yield "", OK, about


def _system() -> Found:
    if SYSTEM.lacks:
        yield "", NOTE, f"{SYSTEM.name} does not have: {'; '.join(SYSTEM.lacks)}"
    else:
        yield "", OK, f"{SYSTEM.name} {platform.release()}"


def _packages() -> Found:
    for name in _CORE:
        version = _version(name)
        if version is None:
            yield name, FAILED, "it is not installed, and RLX needs it; reinstall RLX"
        else:
            yield name, OK, version


def _extras() -> Found:
    """What each extra of the package names, as its metadata have it."""
    extras: dict[str, list[str]] = {}
    if _version("rlx") is None:
        yield "", NOTE, "the package rlx is not installed, only found; install it to see its extras"
        return
    for text in importlib.metadata.requires("rlx") or ():
        if matched := _REQUIREMENT.match(text):
            extras.setdefault(matched[2], []).append(matched[1])
    for extra in _FOR_USERS:
        if extra not in extras:
            yield extra, NOTE, "the installed package is older than this code; install it again"
            continue
        versions = {name: _version(name) for name in extras[extra] if name != "rlx"}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            yield extra, NOTE, f"{', '.join(missing)} not installed; {how_to_install(extra)}"
        else:
            yield extra, OK, ", ".join(f"{name} {version}" for name, version in versions.items())


def _host() -> Found:
    yield "", OK, f"{host_text()}: {', '.join(host().features)}"


def _cache() -> Found:
    folder = config.CACHE.get()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
    size = default_cache().info().nbytes + ProgramStore().info().nbytes
    free = shutil.disk_usage(folder).free
    yield "", OK, f"{folder}, {human_bytes(size)} of code and programs, {human_bytes(free)} free on its disk"


def _key() -> Found:
    keyring()
    yield "", OK, "code and programs in the cache are signed, and trusted by this user only"


def _compiler() -> Found:
    """A small program, compiled anew, gives what the reference does."""
    if not SYSTEM.runs_native_code:
        yield "", NOTE, SYSTEM.refuse_native_code().message
        return
    graph, feed = _small()
    want, got = evaluate(graph, feed)["y"], compile(graph, cache=False, threads=1).run(feed)["y"]
    off = float(np.abs(got - want).max())
    if off < _TOLERANCE:
        yield "", OK, f"a compiled program is within {off:.1e} of the NumPy reference"
    else:
        yield "", FAILED, f"a compiled program is {off:.1e} off the NumPy reference; please report this"


def _threads() -> Found:
    count, quota = config.THREADS.get(), cpu_quota()
    about = f"{count} by default; this process may use {len(SYSTEM.cpus())} processors"
    about += "" if quota is None else f" and the time of {quota:g}"
    if SYSTEM.runs_native_code:
        graph, feed = _small()
        one, all_ = (compile(graph, threads=n).run(feed)["y"].tobytes() for n in (1, count))
        if one != all_:
            yield "", FAILED, f"{about}; {count} threads give other bits than one: please report this"
            return
    yield "", OK, about


def _opencl() -> Found:
    missing = why_unavailable("opencl")
    yield "", *((OK, "a device was found; rlx devices shows it") if missing is None else (NOTE, missing))


def _mpi() -> Found:
    if importlib.util.find_spec("mpi4py") is None:
        yield "", NOTE, f"the package mpi4py is missing; {how_to_install('mpi')}"
    elif shutil.which("mpiexec") is None:
        yield "", NOTE, "mpiexec is not on the PATH; install Open MPI or MPICH"
    else:
        yield "", OK, f"mpi4py {_version('mpi4py')}, {shutil.which('mpiexec')}"


_CHECKS: dict[str, Callable[[], Found]] = {
    "python": _python,
    "system": _system,
    "package": _packages,
    "extra": _extras,
    "host": _host,
    "cache": _cache,
    "signing key": _key,
    "compiler": _compiler,
    "threads": _threads,
    "OpenCL": _opencl,
    "MPI": _mpi,
}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _small() -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph with a matmul, a map and a reduction, and inputs for it."""
    graph = Graph("checkup")
    w = np.cos(np.arange(24 * 16, dtype=np.float32)).reshape(24, 16)
    x = graph.input("x", ("n", 24), "f32")
    graph.output("y", softmax(gelu(x @ graph.param("w", (24, 16), "f32", value=w))))
    return graph, {"x": np.sin(np.arange(50 * 24, dtype=np.float32)).reshape(50, 24)}
