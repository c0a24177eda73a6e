"""Shared test tools: golden texts, optional parts, zoo models, number of workers."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture import providers

import rlx
from machines import AARCH64_PYTHON
from rlx import zoo
from rlx.config import HOST, REQUIRE
from rlx.errors import RlxError, ZooError
from rlx.ir.node import Node
from rlx.target.cpu import targets

pytest.register_assert_rewrite("stored_programs")

TESTS = Path(__file__).parent
collect_ignore = ["fuzz/readers"]  # programs that need atheris; test_readers.py replays what they kept
GOLDEN = TESTS / "golden"

# The same examples on every run, however long a machine takes for them and whatever earlier runs have found;
# `--hypothesis-profile=explore` looks further.
patient = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("fixed", patient, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", patient, max_examples=2000)
hypothesis.settings.load_profile("fixed")
# Hypothesis also draws constants that it finds in the modules imported so far, which depend on what else a
# worker has run, and on every edit: the same test would see other examples from run to run.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )
    parser.addoption(
        "--update-replay", action="store_true", help="record the digests of tests/replay instead of comparing"
    )
    parser.addoption(
        "--replay-texts", metavar="DIR", help="write the plans and the code that tests/replay digests to DIR"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        unknown = _required() - PARTS.keys()
    except RlxError as error:
        raise pytest.UsageError(str(error)) from None
    if unknown:
        raise pytest.UsageError(
            f"RLX_REQUIRE names unknown parts {sorted(unknown)}; known are {', '.join(sorted(PARTS))}"
        )
    if not hasattr(config, "workerinput"):  # workers inherit the environment
        _share_bytecode(config)


def _share_bytecode(config: pytest.Config) -> None:
    """Where Python may not write bytecode, processes that tests start share that of a folder for this run.

    Compiling the source of RLX takes three times as long as all else that a small program does.
    """
    if os.environ.get("PYTHONDONTWRITEBYTECODE") and not os.environ.get("PYTHONPYCACHEPREFIX"):
        folder = tempfile.TemporaryDirectory(prefix="rlx-bytecode-", ignore_cleanup_errors=True)
        patch = pytest.MonkeyPatch()
        patch.delenv("PYTHONDONTWRITEBYTECODE")
        patch.setenv("PYTHONPYCACHEPREFIX", folder.name)
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(patch.undo)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of `machines.on_targets` that are left to -m slow: all but the best target and one other.

    Emulated targets, which are slow, are the last.
    """
    order = {target.name: number for number, target in enumerate(targets())}
    groups: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("on_targets") is not None:
            target = item.callspec.params["target"]  # type: ignore[attr-defined]
            name = target if isinstance(target, str) else target.name
            real = name.removeprefix("emulate:")
            best_first = order.get(real, -1) + (len(order) if name != real else 0)
            groups.setdefault(item.nodeid.replace(name, ""), []).append((best_first, item))
    for case, group in groups.items():
        _, *others = [item for _, item in sorted(group, key=lambda entry: entry[0])]
        kept = zlib.crc32(case.encode()) % len(others) if others and HOST.get() is None else -1
        for number, item in enumerate(others):
            if number != kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)  # works without pytest-xdist too
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers for the whole suite, none for named files: starting workers costs more than it saves."""
    named_files = config.invocation_params.args and any(
        Path(str(arg).partition("::")[0]).suffix == ".py" for arg in config.invocation_params.args
    )
    return 0 if named_files else 2


# --- optional parts -------------------------------------------------------------------------------


def _needs_modules(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        return f"Python package {absent[0]!r} is not installed" if absent else None

    return missing


def _needs_programs(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [name for name in names if shutil.which(name) is None]
        return f"{absent[0]} is not installed" if absent else None

    return missing


def _opencl_missing() -> str | None:
    if reason := _needs_modules("pyopencl")():
        return reason
    import pyopencl

    try:
        found = pyopencl.get_platforms()
    except pyopencl.Error as error:
        return f"no OpenCL driver: {error}"
    return None if found else "no OpenCL driver is installed"


def _mpi_missing() -> str | None:
    if reason := _needs_modules("mpi4py")():
        return reason
    return None if shutil.which("mpiexec") else "mpiexec is not installed"


def _models_missing() -> str | None:
    """One small model stands for all: without an index none can be fetched."""
    try:
        zoo.fetch("basic-pitch")
    except ZooError as error:
        return str(error)
    return None


def _qemu_missing() -> str | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "other x86 processors are emulated on Linux for x86-64 only"
    return None if shutil.which("qemu-x86_64") else "qemu-x86_64 is not installed (Debian: qemu-user)"


def _aarch64_python_missing() -> str | None:
    if reason := _needs_programs("qemu-aarch64-static")():
        return reason
    return None if (AARCH64_PYTHON / "python").exists() else "run .ci/aarch64_python, which unpacks it"


# Each part says why it is missing, or None when it is there.
PARTS: dict[str, Callable[[], str | None]] = {
    "onnx": _needs_modules("onnx"),
    "onnxruntime": _needs_modules("onnxruntime"),
    "scipy": _needs_modules("scipy"),
    "demo": _needs_modules("click", "rich", "tokenizers", "safetensors"),
    "serve": _needs_modules("click", "starlette", "uvicorn", "tokenizers", "jinja2", "llguidance"),
    "openai": _needs_modules("openai"),
    "torch": _needs_modules("torch"),
    "transformers": _needs_modules("torch", "transformers", "safetensors"),
    "models": _models_missing,
    "opencl": _opencl_missing,
    "mpi": _mpi_missing,
    "qemu": _qemu_missing,
    "gcc": _needs_programs("gcc"),
    "clang": _needs_programs("clang"),
    "cmake": _needs_programs("cmake"),
    "valgrind": _needs_programs("valgrind"),
    "node": _needs_programs("node"),
    "curl": _needs_programs("curl"),
    "browser": _needs_programs("chromium", "chromedriver", "node"),
    "aarch64": _needs_programs("qemu-aarch64-static", "aarch64-linux-gnu-gcc"),
    "aarch64-python": _aarch64_python_missing,
    "wasmtime": _needs_modules("wasmtime"),
}


def _required() -> frozenset[str]:
    return REQUIRE.get()


class Require:
    """`require("onnx")` skips the test when that part is missing, or fails it when RLX_REQUIRE lists it."""

    def __init__(self) -> None:
        self._reasons: dict[str, str | None] = {}

    def __call__(self, part: str) -> None:
        if part not in PARTS:
            pytest.fail(f"test requires the unknown part {part!r}; known are {', '.join(sorted(PARTS))}")
        if part not in self._reasons:
            self._reasons[part] = PARTS[part]()
        if reason := self._reasons[part]:
            self.missing(part, reason)

    @staticmethod
    def missing(part: str, reason: str) -> None:
        if part in _required():
            pytest.fail(f"RLX_REQUIRE lists {part!r}, but: {reason}", pytrace=False)
        pytest.skip(f"optional part {part!r}: {reason}")


@pytest.fixture(scope="session")
def require() -> Require:
    """A function that skips (or, by RLX_REQUIRE, fails) the test when an optional part is missing."""
    return Require()


@pytest.fixture(scope="session")
def zoo_path(require: Require) -> Callable[..., Path]:
    """`zoo_path(id, file=None)`: path of a zoo model, fetched on first use."""

    def fetched(id: str, file: str | None = None) -> Path:
        require("models")
        try:
            zoo.fetch(id)
        except ZooError as error:
            Require.missing("models", str(error))
        return zoo.path(id, file)

    return fetched


# --- programs from files --------------------------------------------------------------------------


@pytest.fixture(params=["fresh", "stored"])
def each_origin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of models run twice: with programs as they were compiled, and as they come from their files."""
    if request.param == "stored":
        from stored_programs import from_file

        compile, load = rlx.compile, rlx.load
        monkeypatch.setattr(rlx, "compile", lambda *args, **how: from_file(compile(*args, **how)))
        monkeypatch.setattr(rlx, "load", lambda *args, **how: from_file(load(*args, **how)))


# --- proofs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def barriers_are_proved() -> Iterator[None]:
    """Every native program of every test: threads meet wherever calls touch the same bytes."""
    from rlx.runtime import barriers, context

    def settle_and_verify(turns: Sequence[barriers.Turn], threads: int) -> None:
        barriers.settle(turns, threads)
        barriers.verify(turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "settle", settle_and_verify)
        yield


@pytest.fixture(scope="session", autouse=True)
def files_need_not_survive_a_power_failure() -> Iterator[None]:
    """Tests write thousands of files. Waiting for the disk changes nothing that a test can see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


class NodesCompared(BaseException):
    """Not an Exception, so that nothing on its way takes it for a refusal."""


@pytest.fixture(scope="session", autouse=True)
def nodes_are_compared_by_identity() -> Iterator[None]:
    """In every test: code of RLX never compares nodes by value, as that adds nodes to their graph."""
    package = str(Path(rlx.__file__).parent)

    def checked(name: str) -> Callable[[Node, object], Any]:
        compare = getattr(Node, name)

        def method(self: Node, other: object) -> Any:
            caller = sys._getframe(1)
            if caller.f_code.co_filename.startswith(package):
                raise NodesCompared(f"{caller.f_code.co_filename}:{caller.f_lineno}: {self!r}, {other!r}")
            return compare(self, other)

        # Locations of errors skip code of RLX, so also this.
        method.__code__ = method.__code__.replace(co_filename=compare.__code__.co_filename)
        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__eq__", "__ne__"):
            patch.setattr(Node, name, checked(name))
        yield


# --- numbers --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request: pytest.FixtureRequest) -> None:
    """A generator that tests of a file share begins anew for each, whatever others have drawn before it."""
    module = getattr(request.node, "module", None)  # doctests have none
    for value in vars(module).values() if module else ():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(1).bit_generator.state


# --- golden texts ---------------------------------------------------------------------------------


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: text must equal tests/golden/<name>.txt, which `--update-golden` rewrites."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist; run pytest --update-golden and review it", pytrace=False)
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} differs; pytest --update-golden accepts it"
        )

    return check
