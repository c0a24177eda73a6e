"""What the command line says to a user who made a mistake, and that it prints names as they are."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.cli.main import main

CLI = Path(rlx.__file__).parent / "cli"
NAME = "out[/b] [bold]"


@pytest.fixture(autouse=True)
def own_folders(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require: Callable[[str], None],
    request: pytest.FixtureRequest,
) -> None:
    require("demo")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    if "zoo_path" not in request.fixturenames:
        monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A graph whose output has rich's markup and an escape sequence in its name."""
    g = rlx.Graph("[red]net")
    g.output(f"{NAME}\x1b[31m", rlx.ops.exp(g.input("x", ("n", 4), "f32")))
    g.output("y", rlx.ops.tanh(g.inputs[0]))
    (tmp_path / "net.txt").write_text(str(g))
    return "net.txt"


# -- names are printed as they are


def test_only_one_module_prints() -> None:
    """rich reads markup in what it prints; so nothing but rlx/cli/output.py calls rich, or prints at all.

    main.py prints the one sentence of a refusal itself, as click and rich may be missing."""
    found = []
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {
                ast.Import: lambda n: [alias.name for alias in n.names],
                ast.ImportFrom: lambda n: [n.module or ""],
                ast.Call: lambda n: [ast.unparse(n.func)],
            }.get(type(node), lambda n: [])(node)
            for name in names:
                prints = name in ("print", "click.echo", "click.secho", "sys.stdout.write")
                if (name.partition(".")[0] == "rich" or prints) and path.name != "output.py":
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert {line.partition(":")[0] for line in found} <= {"main.py"}, found


def test_names_with_markup_in_tables(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model]) == 0
    shown = capsys.readouterr().out
    assert f"{NAME}\\x1b[31m" in shown and "\x1b" not in shown
    assert main(["explain", model]) == 0
    shown = capsys.readouterr().out
    assert "[red]net" in shown and NAME in shown and "\x1b" not in shown


def test_names_with_markup_in_refusals(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "-i", "[bold]x[/y]\x1b[31m=ones"]) == 1
    assert "no input '[bold]x[/y]\\x1b[31m'; it has: x" in capsys.readouterr().err
    assert main(["run", "[bold]model[/x]"]) == 1
    assert "[bold]model[/x]" in capsys.readouterr().err


def test_what_is_missing_for_a_device_is_told_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> None:
        raise ImportError("No module named 'pyopencl'")

    monkeypatch.setattr("rlx.driver.opencl.platform.cl", absent)
    assert main(["devices"]) == 0
    assert "pip install '.[opencl]'" in capsys.readouterr().out


def test_a_spinner_with_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.cli.output import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with progress("loading [/x] model[bold].onnx") as say:
        time.sleep(0.2)
        say("loading [/y]")
        time.sleep(0.2)
    assert "[/x] model[bold].onnx" in shown.getvalue()
    assert "loading [/y]" in shown.getvalue()


def test_sentences_with_markup(
    zoo_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo_path("minilm")
    monkeypatch.setattr("rlx.cli.demo.side_by_side", lambda *_: {"ms_per_sentence": 1.0})
    assert main(["demo", "-s", "a [bold]thing[/x]", "-q", "[/y] what?"]) == 0
    shown = capsys.readouterr().out
    assert "a [bold]thing[/x]" in shown and "[/y] what?" in shown


# -- narrow terminals


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_narrow_terminals_keep_what_matters(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optional columns go, names and numbers are whole, nothing is cut off with dots."""
    from rlx.cli.output import print_table

    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [("silero-op15", "1.2 MiB", "silero-vad 6.2.3", "MIT", "voice activity at 16 kHz, opset 15")]
    columns = ("model", "size", "source", "licence", "what it is")
    print_table(columns, rows, right=("size",), optional=("source", "licence"))
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert "silero-op15" in shown and "1.2 MiB" in shown and "…" not in shown
    assert "voice" in shown and "15" in shown.split()
    assert ("silero-vad" in shown) == (width >= 80)


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["run", "net.txt", "--bind", "n=3"], ["x", "y", "float32[3,4]", "min", "max"]),
        (["devices"], ["cpu", "opencl", "yes", "x86-64", "aarch64"]),
        (["zoo", "list"], ["minilm", "whisper80-conv", "MiB"]),
    ],
    ids=["run", "devices", "zoo"],
)
def test_narrow_terminals_of_commands(
    arguments: list[str],
    kept: list[str],
    width: int,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names and numbers of the real tables are whole, and no line is wider than the terminal."""
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    if (
        arguments[0] == "run"
    ):  # names of usual length; test_names_wider_than_the_terminal_are_folded has others
        g = rlx.Graph("net")
        g.output("y", rlx.ops.exp(g.input("x", ("n", 4), "f32")))
        Path(model).write_text(str(g))
    assert main(arguments) == 0
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    table = shown.partition("\n\n")[0] if arguments[0] == "run" else shown
    assert all(len(line.rstrip()) <= width for line in table.splitlines()), table
    assert all(word in table for word in kept) and "…" not in table, table


def test_names_wider_than_the_terminal_are_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlx.cli.output import print_table

    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    name = "".join(chr(97 + i % 26) for i in range(60))
    print_table(("name", "min", "max"), [(name, "-1.25", "3.5")], right=("min", "max"))
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "-1.25" in shown and "3.5" in shown
    folded = "".join(line.split()[0] for line in shown.splitlines()[1:])
    assert folded == name


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["runn"], 2, "No such command 'runn'; did you mean run?"),
        (["comp"], 2, "did you mean compile?"),
        (["explan"], 2, "did you mean explain?"),
        (["zoo", "lst"], 2, "No such command 'lst'; did you mean list?"),
        (["cache", "purge"], 2, "the commands are"),
        (["net.onnx"], 2, "to run a model: rlx run net.onnx"),
        (["zoo:minilm"], 2, "to run a model: rlx run zoo:minilm"),
        (["run", "net.txt", "--thread", "2"], 2, "--threads"),
        (["compile", "net.txt", "-o", "net.foo"], 2, "must end in .rlx (a program) or .plan"),
        (["compile", "net.txt", "-o", "net"], 2, "must end in .rlx (a program) or .plan"),
        (["diff", "net.txt", "missing.txt"], 1, "cannot read the model 'missing.txt'"),
        (["diff", "net.txt", "zoo:nothing"], 1, "the zoo has no model 'nothing'"),
        (["diff", "zoo:minilm"], 2, "Missing argument 'MODEL_B'"),
    ],
)
def test_mistakes(
    arguments: list[str], code: int, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == "" and not Path("net.foo").exists()


def test_code_for_another_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that does not run here: the message says how to write a file for it, and that works."""
    from rlx.target.cpu import runs_here, targets

    other = next(t.name for t in reversed(targets()) if not runs_here(t))
    for command in (["run"], ["explain"]):
        assert main([*command, model, "--target", other, "--no-cache"]) == 1
        shown = capsys.readouterr().err
        assert f"code for target {other} cannot run here" in shown
        assert f"rlx compile MODEL -o FILE.rlx --target {other}" in shown
    for option in ("--target", "--also"):
        assert main(["compile", model, "-o", "net.rlx", option, other]) == 0
        assert other in capsys.readouterr().out


def test_an_unknown_kernel(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rlx.api.session import load

    names = [f"%{id}" for id in load(model).kernels.kernels]
    assert len(names) == 2
    for asked, hint in ((names[0] + "0", f"did you mean {names[0]}? The"), ("softmax", "the")):
        assert main(["explain", model, "--asm", asked]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == f"rlx: unknown kernel {asked!r}; {hint} kernels are {', '.join(names)}\n"


# -- defaults


def test_default_sizes_are_such_that_the_model_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planned size, 128, breaks an assumption of this model; fixed sizes are never changed."""
    g = rlx.Graph("cut")
    x = g.input("x", ("n", 4), "f32")
    g.output("y", rlx.ops.exp(x))
    from rlx.ir.dim import Constraint, sym

    g.assume(Constraint("eq", (sym("n") + 64) // 128, 3, ("cut.py:1",)))
    Path("cut.txt").write_text(str(g))
    assert main(["run", "cut.txt", "--json"]) == 0
    n = json.loads(capsys.readouterr().out)["inputs"]["x"]["shape"][0]
    assert (n + 64) // 128 == 3
    assert main(["explain", "cut.txt", "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["binding"]["n"] + 64) // 128 == 3
    assert main(["run", "cut.txt", "--bind", "n=128"]) == 1
    assert "n=128" in capsys.readouterr().err
    np.save("x.npy", np.zeros((128, 4), np.float32))
    assert main(["run", "cut.txt", "--input", "x=x.npy"]) == 1
    assert "n=128" in capsys.readouterr().err


def test_silero_runs_with_its_defaults(
    zoo_path: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    zoo_path("silero-op15")
    assert main(["run", "zoo:silero-op15"]) == 0
    assert "stateN" in capsys.readouterr().out


def test_diff_takes_models_of_the_zoo(
    zoo_path: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    path = zoo_path("whisper80")
    assert main(["diff", "zoo:whisper80", str(path)]) == 0
    assert capsys.readouterr().out == f"no difference: zoo:whisper80 and {path} have the same graph\n"


def test_equal_plans_say_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.plan", "b.plan"):
        assert main(["compile", model, "-o", name]) == 0
    capsys.readouterr()
    assert main(["diff", "a.plan", "b.plan"]) == 0
    assert capsys.readouterr().out == "no difference: a.plan and b.plan have the same plan\n"


# -- the process


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_cli_extra(package: str) -> None:
    hide = f"import sys; sys.modules[{package!r}] = None"
    code = f"{hide}\nfrom rlx.cli.main import main; sys.exit(main(['zoo', 'list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr == (
        f"rlx: the package {package!r} is missing; in your clone of RLX run: pip install '.[cli]'\n"
    )


def test_python_m_rlx() -> None:
    start = [sys.executable, "-m", "rlx", "--version"]
    done = subprocess.run(start, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"rlx, version {rlx.__version__}\n")


def test_interrupted_while_it_works(tmp_path: Path) -> None:
    """One line, no traceback, nothing on stdout."""
    (tmp_path / "slow.py").write_text(
        "import signal, sys, time, rlx.api.session\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it\n"
        "def load(*_, **__):\n"
        "    print('working', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "rlx.api.session.load = load\n"
        "from rlx.cli.main import main\n"
        "sys.exit(main(['run', 'm.onnx']))\n"
    )
    start = [sys.executable, "slow.py"]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "rlx: interrupted")


def test_a_terminal_without_unicode(model: str) -> None:
    """explain draws bars; they become escapes, not an error."""
    start = [sys.executable, "-m", "rlx", "explain", model]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(start, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_warnings_are_one_line(model: str, tmp_path: Path) -> None:
    assert main(["compile", model, "-o", "net.rlx"]) == 0
    start = [sys.executable, "-m", "rlx", "run", "net.rlx", "--json"]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "another user")}
    done = subprocess.run(start, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout)["notes"]
    assert all(line.startswith("rlx: warning: ") for line in done.stderr.splitlines())
    assert "signed" in done.stderr
