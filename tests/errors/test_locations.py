"""Errors and nodes name the line of the user, never a line of Python's library, of NumPy or of RLX."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.api.jit import JitWarning
from rlx.errors import ShapeError, is_users, source_location
from rlx.runtime.store.artifact import ArtifactWarning

HERE = Path(__file__).name


def lines_later(count: int) -> str:
    """This file, and the line that is `count` lines after the caller's."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{HERE}:{frame.f_back.f_lineno + count}"


def vectors() -> tuple[rlx.Node, rlx.Node]:
    g = rlx.Graph("net")
    return g.input("a", (3,), "f32"), g.input("b", (4,), "f32")


def test_through_functools() -> None:
    a, b = vectors()
    expected = lines_later(2)
    with pytest.raises(ShapeError) as raised:
        functools.reduce(rlx.ops.add, [a, b])
    assert raised.value.where == (expected,)


def test_through_partial_and_map() -> None:
    a, b = vectors()
    for call in (functools.partial(rlx.ops.add, a, b), lambda: list(map(rlx.ops.add, [a], [b]))):
        with pytest.raises(ShapeError, match=rf"\(at {HERE}:\d+\)"):
            call()


def test_through_a_context_manager() -> None:
    """`contextlib.py:81` was named for functions of RLX that are decorated with a context manager."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        yield

    @scope()
    def decorated() -> str | None:
        return source_location()

    assert (decorated() or "").startswith(f"{HERE}:")
    g = rlx.Graph("net")
    g.output("y", rlx.ops.exp(g.input("x", (2, 3), "f32")))
    with pytest.raises(rlx.errors.RlxError) as raised:
        rlx.compile(g, assume={"m": 3})
    assert all(where.startswith(f"{HERE}:") for where in raised.value.where)


def test_in_a_thread_of_the_user() -> None:
    a, b = vectors()

    def work() -> None:
        rlx.ops.add(a, b)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ShapeError, match=rf"\(at {HERE}:\d+\)"):
        pool.submit(work).result()


def test_in_a_thread_without_code_of_the_user() -> None:
    """No location is better than `threading.py:982`."""
    a, b = vectors()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ShapeError) as raised:
        pool.submit(rlx.ops.add, a, b).result()
    assert raised.value.where == () and "(at" not in str(raised.value)


def test_what_is_the_users() -> None:
    library = sysconfig.get_path("stdlib")
    installed = sysconfig.get_path("purelib")
    assert not is_users(contextlib.__file__) and not is_users(f"{library}/threading.py")
    assert not is_users(np.__file__) and not is_users("<frozen importlib._bootstrap>")
    assert not is_users("<__array_function__ internals>")
    assert not is_users(rlx.__file__) and not is_users(rlx.ops.__file__ or "")
    assert is_users("<stdin>") and is_users("<ipython-input-3-abc>") and is_users("model.py")
    assert is_users(f"{installed}/their_package/model.py") and is_users(__file__)
    assert is_users(f"{installed}/numpy_helpers/model.py")


# -- warnings


def test_a_warning_names_the_line_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`contextlib.py:81` was named for a file that somebody else has signed."""
    g = rlx.Graph("net")
    g.output("y", rlx.ops.exp(g.input("x", (2, 3), "f32")))
    rlx.compile(g).save(tmp_path / "net.rlx")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    expected = lines_later(2)
    with pytest.warns(ArtifactWarning, match="not signed by this user") as told:
        rlx.load(tmp_path / "net.rlx", cache=False)
    assert f"{Path(told[0].filename).name}:{told[0].lineno}" == expected


def test_a_warning_of_jit_names_the_line_of_the_call() -> None:
    f = rlx.jit(lambda x: x * float(x.shape[0]))
    with pytest.warns(JitWarning) as told:
        for n in range(2, 20):
            f(np.ones(n, np.float32))
    # The collector, which runs in between, may warn of what other tests left open.
    assert [Path(w.filename).name for w in told if w.category is JitWarning] == [HERE]


def test_a_warning_in_a_thread_without_code_of_the_user() -> None:
    """A line of RLX is named, as there is no better one; never `threading.py:1045`."""
    with pytest.warns(DeprecationWarning) as told, ThreadPoolExecutor(1) as pool:
        pool.submit(getattr, rlx.errors, "TypeError_").result()
    assert told[0].filename == rlx.errors.__file__


def test_all_warnings_of_rlx_go_this_way() -> None:
    package = Path(rlx.__file__).parent
    found = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if "warnings.warn(" in path.read_text(encoding="utf-8")
    ]
    assert not found, "call rlx.errors.warn, which finds the user's line"
