"""Options: one class from which calls, the command line and the keys of stored programs take their fields."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.api.options import FIELDS, KEPT, CompileOptions, LoadOptions, Options, Role, role
from rlx.cli.explain import explain
from rlx.config import WINOGRAD
from rlx.errors import ConfigError
from rlx.runtime.store.programs import ProgramStore, wait_until_stored

# Another value than the default of every option that decides about the plan.
OTHER: dict[str, Any] = {
    "device": "opencl",
    "target": "aarch64",  # that no machine of x86-64 defaults to
    "precision": "bf16",
    "budget": "64MiB",
    "assume": {"n": 7},
    "weight_budget": "64MiB",
    "winograd": False,
}


def test_type_checkers_see_the_same_options() -> None:
    own = {name: Options.__annotations__[name] for name in FIELDS}
    seen = {**LoadOptions.__annotations__, **CompileOptions.__annotations__}
    assert {name: hint.__forward_arg__ for name, hint in seen.items()} == own


def test_every_option_that_decides_about_the_plan_is_in_the_key() -> None:
    deciding = {name for name in FIELDS if role(name) is Role.PLAN}
    assert OTHER.keys() == deciding and KEPT.keys() <= deciding
    usual = Options().key()
    assert usual.keys() == {*deciding, "host"}
    for name, value in OTHER.items():
        assert Options(**{name: value}).key()[name] != usual[name], name


def test_the_environment_is_in_the_key_as_the_option_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WINOGRAD.name, "0")
    assert Options().key() == Options(winograd=False).key() != Options(winograd=True).key()


@pytest.mark.parametrize("name", [name for name in FIELDS if role(name) is Role.LOCAL])
def test_a_model_with_options_of_this_process_is_not_stored(name: str) -> None:
    assert not Options(**{name: {"x": 1}}).is_storable()
    assert Options().is_storable()


@pytest.mark.parametrize("function", [rlx.compile, rlx.load, rlx.Session])
def test_calls_show_the_options_by_name(function: Any) -> None:
    assert FIELDS.keys() <= inspect.signature(function).parameters.keys()


def test_the_command_line_offers_those_with_a_text() -> None:
    offered = {o.name for o in explain.params}
    assert offered >= {name for name, known in FIELDS.items() if known.metadata["flag"]}


def double() -> rlx.Graph:
    g = rlx.Graph("double")
    g.output("y", g.input("x", ("n",), "f32") * 2.0)
    return g


def test_options_as_one_object() -> None:
    lean = Options(threads=1, debug="nan")
    program = rlx.compile(double(), lean, debug=None)
    assert (program.threads, program.debug) == (1, None)
    session = rlx.Session(lean)
    assert session.compile(double()).debug == "nan"
    assert session.compile(double(), debug=None).threads == 1


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda g: rlx.compile(g, thread=2), "rlx.compile: unknown option 'thread'; did you mean 'threads'?"),
        (lambda g: rlx.Session(colour=2), "rlx.Session: unknown option 'colour'; it takes device, target,"),
        (lambda g: rlx.load("a.onnx", presision=2), "rlx.load: unknown option 'presision'; did you mean"),
        (lambda g: rlx.jit(abs, tread=2), "jit: unknown option 'tread'; did you mean 'threads'?"),
        (
            lambda g: rlx.compile(g, "opencl"),
            "rlx.compile takes options by name, or an rlx.Options; got 'opencl'",
        ),
    ],
)
def test_what_is_not_an_option_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(double())
    assert caught.value.message.startswith(told)


def test_without_winograd_the_plan_says_so() -> None:
    g = rlx.Graph("conv")
    x = g.input("x", (1, 32, 28, 28), "f32")
    g.output("y", rlx.ops.conv(x, g.param("w", (32, 32, 3, 3), "f32", np.ones((32, 32, 3, 3), np.float32))))
    usual, without = (rlx.compile(g, target="x86-64", winograd=w, cache=False).lir for w in (True, False))
    assert "winograd" not in usual.options and without.options["winograd"] is False
    assert usual.fingerprint() != without.fingerprint()


def test_equal_options_find_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "double.txt"
    path.write_text(str(double()))
    rlx.load(path)
    rlx.load(path, precision="f32", threads=2, device="cpu")
    wait_until_stored()
    assert ProgramStore().info().entries == 1
