from __future__ import annotations

import doctest
import os
from pathlib import Path

import pytest

from rlx import config
from rlx.errors import ConfigError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in config.KNOBS:
        monkeypatch.delenv(knob.name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.CACHE.get() == tmp_path / "rlx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.CACHE.get() == Path.home() / ".cache" / "rlx"
    assert config.THREADS.get() >= 1
    assert config.TARGET.get() == "host"
    assert config.DEBUG.get() is None
    assert config.TRACEBACK.get() is False
    assert config.REQUIRE.get() == frozenset()


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (config.CACHE, "~/elsewhere", Path.home() / "elsewhere"),
        (config.THREADS, " 4 ", 4),
        (config.THREADS, "", config.THREADS.default()),
        (config.TARGET, "x86-64-v3", "x86-64-v3"),
        (config.DEBUG, "poison", "poison"),
        (config.TRACEBACK, "On", True),
        (config.TRACEBACK, "0", False),
        (config.REQUIRE, "onnx, models,", frozenset({"onnx", "models"})),
    ],
)
def test_a_variable_is_read_when_asked_for(
    knob: config.Knob[object], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knob.name, text)
    assert knob.get() == value


@pytest.mark.parametrize(
    ("knob", "text", "message"),
    [
        (config.THREADS, "0", "RLX_THREADS='0' is not valid: it must be a whole number of at least 1"),
        (config.THREADS, "two", "RLX_THREADS='two' is not valid: it must be a whole number"),
        (config.DEBUG, "all", "RLX_DEBUG='all' is not valid: it must be 'nan'"),
        (config.TRACEBACK, "maybe", "RLX_TRACEBACK='maybe' is not valid: it must be 1 or 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    knob: config.Knob[object], text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(ConfigError, match=message):
        knob.get()


def test_names_are_unique_and_prefixed() -> None:
    names = [knob.name for knob in config.KNOBS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("RLX_") for name in names)


def test_the_examples_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_THREADS", "7")
    before = dict(os.environ)
    assert doctest.testmod(config).attempted
    assert dict(os.environ) == before
