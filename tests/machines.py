"""The targets whose code a test can execute here; what the machine lacks beyond AVX2 is emulated.

Where `RLX_HOST` plays a lesser machine, nothing is: the real one has run the rest, and emulation is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from rlx import config
from rlx.target.cpu import Target, emulated, host, resolve, runs_here, targets

Test = TypeVar("Test", bound=Callable[..., Any])

AARCH64_PYTHON = config.CACHE.get() / "aarch64-python"
"""Where `.ci/aarch64_python` unpacks Python for AArch64."""


def executable(*names: str) -> list[Target]:
    """Those of the named targets (all, if none is named) that run here, themselves or emulated."""
    wanted = [resolve(name) for name in names] or targets()
    return [made for target in wanted if (made := _as_it_runs(target)) is not None]


def to_execute(name: str) -> str:
    """The name to compile for in a test of target `name`; skips where neither it nor its emulation runs."""
    found = _as_it_runs(resolve(name))
    if found is None:
        pytest.skip(f"this machine cannot run code for {name}")
    return found.name


def on_targets(found: Sequence[Target | str]) -> Callable[[Test], Test]:
    """Decorator: a test with the parameter `target`, for code that is executed.

    By default a case runs on the best of these targets that is not emulated and on one other, which one
    depends on the case: each target gets its share. `-m slow` has the rest. Where `RLX_HOST` plays a lesser
    machine, a case runs on the best target only: the others are the host of another run.
    """

    def decorated(test: Test) -> Test:
        given: Any = pytest.mark.parametrize("target", found, ids=name_of)
        marked: Test = pytest.mark.on_targets(given(test))
        return marked

    return decorated


def name_of(target: Target | str) -> str:
    return target if isinstance(target, str) else target.name


def another() -> str:
    """The name of the least target that runs here beside the host; skips where the host is the least."""
    found = [target.name for target in targets() if runs_here(target) and target is not host()]
    if not found:
        pytest.skip(f"{host().name} is the only target that this machine runs")
    return found[-1]


def _as_it_runs(target: Target) -> Target | None:
    if runs_here(target):
        return target
    if config.HOST.get() is not None or not target.can_be_emulated:
        return None
    return emulated(target) if runs_here(emulated(target)) else None
