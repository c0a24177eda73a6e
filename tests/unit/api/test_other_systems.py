"""RLX on macOS and Windows, as far as Linux can show it: what they lack is hidden.

Import, the NumPy reference and the tools for files work there. Native code is written, but not run. None of
this was tested on such a machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.system import SYSTEM, System
from rlx.system.macos import MacOS

# What only some systems have. Everything else in RLX asks `rlx.system`.
OF_ONE_SYSTEM = re.compile(
    r"sys\.platform|os\.name\b|platform\.system\(|import (fcntl|msvcrt|resource)\b"
    r"|os\.(sched_|memfd|geteuid|sysconf|setpriority|pread|preadv|fork)|MADV_|MAP_|CDLL\(|/proc/|/sys/"
)
KNOWN = {
    "dist/heap.py": "ranks as processes begin with rlx.system's shared memory, which refuses other systems",
    "dist/launch.py": "the same",
    "dist/transports/mpi_job.py": "the same",
    "fuzz/files.py": "the fuzzer is for Linux",
    "fuzz/worker.py": "the same",
    "runtime/native/bus_guard.py": "names of what native code for Linux is given",
    "target/cpuid.py": "why a file of Linux is not enough",
}


def test_nothing_else_asks_which_system_it_is() -> None:
    package = Path(rlx.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.parent.name != "system" and OF_ONE_SYSTEM.search(path.read_text(encoding="utf-8"))
    }
    assert found <= KNOWN.keys(), f"ask rlx.system instead: {sorted(found - KNOWN.keys())}"
    assert found == KNOWN.keys(), f"no longer needed: {sorted(KNOWN.keys() - found)}"


def test_every_system_says_what_it_lacks() -> None:
    assert not SYSTEM.lacks and SYSTEM.runs_native_code
    for other in (System(), MacOS()):
        assert not other.runs_native_code and len(other.lacks) >= 4


def test_every_way_to_read_at_a_place_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100)))
    for system in (SYSTEM, MacOS(), System()):
        with file.open("rb", buffering=0) as opened:
            opened.seek(7)
            out = np.zeros(20, np.uint8)
            assert system.read_at(opened.fileno(), out, 90) == 10
            assert out.tolist() == [*range(90, 100), *[0] * 10] and opened.tell() == 7


def test_a_lock_keeps_others_out_until_the_file_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as first:
        assert SYSTEM.lock(first)
        with (tmp_path / "file").open() as second:
            assert not SYSTEM.lock(second, wait=False)
            first.close()
            assert SYSTEM.lock(second, wait=False)


# Packages of others and the standard library are imported as on Linux. Then everything that the system lacks
# is taken away, before RLX is imported.
HIDE = """
import ctypes, importlib, json, mmap, os, platform, shutil, signal, subprocess, sys, tempfile, types
import click, llvmlite.binding, ml_dtypes, numpy, onnx, onnx.helper, rich.console, rich.table
import click.testing, importlib.metadata, pickle, sysconfig, weakref, zipfile

sysconfig.get_paths()

def hide(module, *names):
    for name in names:
        for found in [n for n in vars(module) if n == name or name.endswith("*") and n.startswith(name[:-1])]:
            delattr(module, found)

LINUX = "memfd_create MFD_* sched_* pidfd_open preadv* SCHED_* eventfd* splice".split()
NOT_WINDOWS = (
    "fork* register_at_fork geteuid getuid getpgid killpg setsid setpriority PRIO_* pread pwrite "
    "sysconf* uname statvfs mkfifo O_NONBLOCK O_NOFOLLOW O_CLOEXEC fchmod set_blocking"
).split()
hide(mmap, "MADV_HUGEPAGE", "MAP_POPULATE", "MAP_NORESERVE")
flock = importlib.import_module("fcntl")
machine = platform.machine()
platform.machine = lambda: machine
sys.modules["resource"] = None
sys.modules["rlx.system.linux"] = None
find = ctypes.CDLL
missing = {"sched_getcpu", "prctl", "process_vm_readv", "syscall"}

def library(name, *rest, **more):
    if name is None and sys.platform == "win32":
        raise TypeError("Windows has no library of the process")
    found = find(name, *rest, **more)
    if name is None:
        class Library:
            def __getattr__(self, name):
                if name in missing:
                    raise AttributeError(name)
                return getattr(found, name)
        return Library()
    return found

ctypes.CDLL = library
hide(os, *LINUX)
sys.platform = SYSTEM
if SYSTEM == "win32":
    hide(os, *NOT_WINDOWS)
    hide(mmap, "MAP_*", "PROT_*", "MADV_*")
    hide(signal, "SIGBUS", "SIGHUP", "SIGALRM", "SIGKILL", "alarm")
    sys.modules["fcntl"] = None
    def locking(file, mode, count):
        assert os.lseek(file, 0, os.SEEK_CUR) > 1 << 40, "the lock would keep others from reading"
        flock.flock(file, flock.LOCK_EX | (flock.LOCK_NB if mode == 2 else 0))
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2)
"""

USE = """
import numpy as np
import rlx
from rlx import ops
from rlx.cli.app import app
from rlx.errors import UnsupportedError
from rlx.ir.text.files import load, save
from rlx.reference.interpreter import evaluate
from rlx.system import SYSTEM as here

folder = sys.argv[1]
assert here.name == {"darwin": "macOS", "win32": "Windows"}.get(SYSTEM, "an unknown system"), here.name

g = rlx.Graph("small")
x = g.input("x", ("n", 4), "f32")
w = g.param("w", (4, 3), "f32", value=np.arange(12, dtype=np.float32).reshape(4, 3) / 7)
g.output("y", ops.softmax(ops.gelu(x @ w)))
feed = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}
want = evaluate(g, feed)["y"]

save(g, folder + "/small.graph")
again = load(folder + "/small.graph")
assert str(again) == str(g) and evaluate(again, feed)["y"].tobytes() == want.tobytes()

program = rlx.compile(g)
assert "kernel" in program.explain()
program.save(folder + "/small.rlx", targets=("aarch64",))
refused = []
for run in (lambda: program.run(feed), lambda: rlx.load(folder + "/small.rlx").run(feed)):
    try:
        run()
    except UnsupportedError as error:
        refused.append(str(error))

nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
value = lambda name: onnx.helper.make_tensor_value_info(name, 1, ["n", 4])
model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "relu", [value("x")], [value("y")]))
onnx.save(model, folder + "/relu.onnx")

def command(*arguments):
    done = click.testing.CliRunner().invoke(app, arguments, catch_exceptions=False)
    return done.exit_code, done.output

commands = {
    " ".join(arguments[:1]): command(*(a.replace("DIR", folder) for a in arguments))
    for arguments in (
        ("explain", "DIR/relu.onnx", "--json"),
        ("diff", "DIR/small.rlx", "DIR/relu.onnx"),
        ("compile", "DIR/relu.onnx", "-o", "DIR/relu.rlx", "--target", "aarch64"),
        ("export", "DIR/relu.onnx", "--c", "DIR/relu_c", "--target", "x86-64-v3"),
        ("cache", "info", "--json"),
        ("devices", "--json"),
        ("zoo", "list"),
        ("trust", "--help"),
    )
}
commands["clear"] = command("cache", "clear")
assert "rlx.system.linux" not in {name for name, there in sys.modules.items() if there is not None}
print(json.dumps({"y": want.tolist(), "refused": refused, "commands": commands}))
"""


@pytest.mark.parametrize("system", ["darwin", "win32", "sunos5"])
def test_reference_and_file_tools(system: str, require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("onnx")
    require("demo")
    env = {**os.environ, "RLX_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    text = f"SYSTEM = {system!r}\n{HIDE}{USE}"
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["y"][0][2] == pytest.approx(0.2, abs=0.2)
    assert len(found["refused"]) == 2 and all(
        "native code on Linux only" in text for text in found["refused"]
    )
    wanted = dict.fromkeys(found["commands"], 0) | {"diff": 3}
    assert {name: code for name, (code, _) in found["commands"].items()} == wanted, found["commands"]
