"""RLX_HOST: RLX sees a lesser machine, and nothing beyond it is loaded, cached for it or shown."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import config, cores
from rlx.codegen.native import jit
from rlx.errors import CompileError, ConfigError
from rlx.fuzz import hosts
from rlx.runtime.store.cache import ObjectCache
from rlx.runtime.store.trust import Keyring
from rlx.target import cpu, cpuid
from rlx.target.cpu import (
    Target,
    emulated,
    host,
    host_features,
    machine_features,
    missing_here,
    resolve,
    runs_here,
    targets,
)
from rlx.target.cpuid import MATRICES

X86 = platform.machine() in ("x86_64", "AMD64")
needs_x86 = pytest.mark.skipif(not X86, reason="names of x86 targets")
RUNNABLE = [target for target in targets() if runs_here(target)]
"""As the tests were started, the best first; RLX_HOST is then changed within this."""

# How Linux spells in /proc/cpuinfo what LLVM calls otherwise.
PROC_NAMES = {
    "avx_vnni": "avxvnni",
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "pni": "sse3",
    "abm": "lzcnt",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "lahf_lm": "sahf",
    "fpu": "x87",
}


def double() -> rlx.Graph:
    g = rlx.Graph("double")
    g.output("y", g.input("x", ("n",), "f32") * 2.0)
    return g


def python(text: str, **variables: str) -> str:
    """What a process of its own prints."""
    env = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# -- what the machine is


@needs_x86
def test_features_are_those_that_linux_sees() -> None:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("this system has no /proc/cpuinfo")
    flags = next(line for line in info.read_text().splitlines() if line.startswith("flags"))
    told = {PROC_NAMES.get(flag, flag) for flag in flags.partition(":")[2].split()}
    asked = {feature for target in targets() if target.x86 for feature in target.features}
    assert machine_features() & asked == told & asked


@needs_x86
def test_features_need_no_llvm() -> None:
    text = "import sys; from rlx.target.cpu import host; host(); print('llvmlite' in sys.modules)"
    assert python(text) == "False\n"


@needs_x86
def test_a_system_that_lets_nothing_be_executed_still_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CompileError("the system does not let memory become executable")

    known = machine_features()
    monkeypatch.setattr(cpuid.SYSTEM, "protect", refuse)
    asked = {feature for target in targets() if target.x86 for feature in target.features}
    assert machine_features.__wrapped__() & asked == known & asked


def processor(leaves: dict[tuple[int, int], tuple[int, ...]], kept: int) -> set[str]:
    return cpuid._found(lambda number, sub: leaves.get((number, sub), (0, 0, 0, 0)), lambda: kept)


ALL = 0xFFFFFFFF
EVERYTHING = {
    (0, 0): (7, 0, 0, 0),
    (1, 0): (0, 0, ALL, ALL),
    (7, 0): (1, ALL, ALL, ALL),
    (7, 1): (ALL, 0, 0, 0),
    (0x80000000, 0): (0x80000008, 0, 0, 0),
    (0x80000001, 0): (0, 0, ALL, ALL),
}


def test_registers_that_the_system_does_not_keep_are_not_used() -> None:
    best, v3 = resolve("x86-64-v4-bf16-vnni"), resolve("x86-64-v3")
    assert set(best.features) <= processor(EVERYTHING, 0xE7)
    assert processor(EVERYTHING, 0x07) >= set(v3.features) and "avx512f" not in processor(EVERYTHING, 0x07)
    assert processor(EVERYTHING, 0x67) & {"avx2", "avx512f"} == {"avx2"}  # upper halves alone
    assert not {"avx", "fma", "f16c", "avx2", "avxvnni"} & processor(EVERYTHING, 0x03)
    without = {**EVERYTHING, (1, 0): (0, 0, ALL & ~(1 << 27), ALL)}  # XGETBV would be illegal
    assert not {"avx", "xsave"} & processor(without, 0xE7)


def test_vnni_without_avx512_is_bit_4_of_leaf_7_1() -> None:
    others = {**EVERYTHING, (7, 1): (1 << 4, 0, 0, 0)}
    found, without = processor(others, 0x07), processor({**others, (7, 1): (ALL & ~(1 << 4), 0, 0, 0)}, 0x07)
    assert found - without == {"avxvnni"} and set(resolve("x86-64-v3-vnni").features) <= found


BITS = {22: "amx-bf16", 24: "amx-tile", 25: "amx-int8"}


@pytest.mark.parametrize("bit", BITS)
def test_amx_is_three_bits_of_leaf_7_and_two_of_what_the_system_keeps(bit: int) -> None:
    a, b, c, _ = EVERYTHING[7, 0]
    assert processor({**EVERYTHING, (7, 0): (a, b, c, 1 << bit)}, 0x600E7) & {*MATRICES} == {BITS[bit]}
    for kept in (0xE7, 0x200E7, 0x400E7):
        assert not processor(EVERYTHING, kept) & {*MATRICES}
    assert set(resolve("x86-64-v4-amx").features) <= processor(EVERYTHING, 0x600E7)


def test_amx_needs_the_permission_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(may: bool) -> bool:
        asked.append(may)
        return may

    every = {*resolve("x86-64-v4-amx").features}
    for may in (False, True):
        monkeypatch.setattr(cpuid.SYSTEM, "let_use_matrices", lambda may=may: answer(may))
        assert cpuid.granted(every) == (every if may else every - {*MATRICES})
    assert asked == [False, True]
    assert (
        cpuid.granted(every - {"amx-int8"}) == every - {*MATRICES} and len(asked) == 2
    )  # nothing to ask for


@needs_x86
def test_linux_is_asked_for_the_tile_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); kernels and machines without it refuse."""
    from rlx.system.linux import Linux

    calls: list[list[int]] = []

    class Library:
        def syscall(self, *words: ctypes.c_long) -> int:
            calls.append([word.value for word in words])
            return -len(calls) + 1

    linux = Linux()
    assert linux.let_use_matrices() in (False, True)
    monkeypatch.setattr(linux, "c_library", Library)
    assert [linux.let_use_matrices(), linux.let_use_matrices()] == [True, False]
    assert calls == [[158, 0x1023, 18]] * 2


def test_leaves_beyond_the_last_are_not_features() -> None:
    old = {**EVERYTHING, (0, 0): (5, 0, 0, 0)}
    assert not {"avx2", "bmi2", "avx512f"} & processor(old, 0xE7)
    assert not {"avx512bf16", "avxvnni"} & processor({**EVERYTHING, (7, 0): (0, ALL, ALL, ALL)}, 0xE7)
    assert "lzcnt" not in processor({**EVERYTHING, (0x80000000, 0): (0x80000000, 0, 0, 0)}, 0xE7)


# -- the host


def see(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    """Make the machine one that has these features."""
    monkeypatch.delenv("RLX_HOST", raising=False)
    monkeypatch.setattr(cpu, "machine_features", lambda: features)
    monkeypatch.setattr(cpu, "_host", functools.cache(cpu._host.__wrapped__))


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda target: target.name)
def test_the_host_is_what_the_variable_names(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_HOST", target.name)
    monkeypatch.delenv("RLX_TARGET", raising=False)
    assert host() is resolve("host") is target and host_features() == set(target.features)
    better = [other for other in RUNNABLE if set(other.features) > set(target.features)]
    assert runs_here(target) and not any(runs_here(other) for other in better)
    assert all(set(missing_here(other)) == set(other.features) - set(target.features) for other in better)
    program = rlx.compile(double())
    assert program.lir.target == target.name
    assert program(np.ones(3, np.float32)).tolist() == [2, 2, 2]


@needs_x86
@pytest.mark.parametrize(
    ("lacking", "name"),
    [
        ((), "x86-64-v4-bf16-vnni"),
        (("avx512bf16",), "x86-64-v4"),
        (("avx512f",), "x86-64-v3-vnni"),
        (("avx512f", "avxvnni"), "x86-64-v3"),
        (("avx512f", "avx2"), "x86-64-v2"),
        (("avx512f", "avx2", "sse4.2"), "x86-64"),
    ],
)
def test_the_host_is_the_best_target_that_the_machine_runs(
    lacking: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = frozenset(feature for target in targets() for feature in target.features)
    see(monkeypatch, every.difference(lacking))
    assert host() is resolve(name) and runs_here(host())


@needs_x86
def test_a_target_whose_code_was_not_run_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, frozenset(feature for target in targets() for feature in target.features))
    untried = [target for target in targets() if not target.tried]
    assert [target.name for target in untried] == ["x86-64-v4-amx"]
    for target in untried:
        assert host() is not target and runs_here(target)  # `target=` names it, and code for it runs
        monkeypatch.setenv("RLX_HOST", target.name)
        assert host() is target


@needs_x86
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pentium", "names no target; this machine can be seen as .*x86-64"),
        ("host", "names no target"),
        ("emulate:x86-64-v3", "names no target"),
        ("aarch64", "is beyond this machine .missing: its instruction set.; choose .*x86-64"),
    ],
)
def test_a_host_that_cannot_be_is_refused(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_HOST", name)
    with pytest.raises(ConfigError, match=f"RLX_HOST='{name}' {told}"):
        host()


@needs_x86
def test_a_host_above_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, frozenset(resolve("x86-64-v3").features))
    monkeypatch.setenv("RLX_HOST", "x86-64-v4")
    with pytest.raises(ConfigError, match=r"beyond this machine .missing: avx512bw.*; choose x86-64-v3,"):
        host()
    monkeypatch.setenv("RLX_HOST", "emulate:x86-64-v4")
    assert host() is emulated(resolve("x86-64-v4")) and runs_here(host())


@needs_x86
def test_the_environment_decides_at_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for name in ("x86-64", "", "x86-64"):
        monkeypatch.setenv("RLX_HOST", name)
        names.append(host().name)
    assert names[0] == names[2] == "x86-64" and set(resolve(names[1]).features) <= machine_features()


# -- what it bounds


def beyond(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Make the host the least target; returns one that the machine runs and the host does not."""
    if len(RUNNABLE) < 2:
        pytest.skip("this machine runs one target only")
    monkeypatch.setenv("RLX_HOST", RUNNABLE[-1].name)
    return RUNNABLE[0]


def test_no_code_beyond_the_host_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    best = beyond(monkeypatch)
    made = jit.compile_object("define void @f() { ret void }", best)
    least = RUNNABLE[-1].name
    with pytest.raises(
        CompileError, match=f"{best.name} cannot run here, as RLX_HOST names {least} .missing"
    ):
        jit.load(made, best)
    with pytest.raises(CompileError, match="cannot run here"):
        rlx.compile(double(), target=best.name)
    monkeypatch.setenv("RLX_TARGET", best.name)
    with pytest.raises(CompileError, match="cannot run here"):
        rlx.compile(double())


def test_all_machine_code_passes_one_gate() -> None:
    """Whatever is executed is mapped by `load_all`; CPUID's own page is the one exception."""
    package = Path(rlx.__file__).parent
    mappers = ("MappedObject(", "create_mcjit_compiler", "SYSTEM.protect(")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in mappers)
    }
    assert found == {"codegen/native/elf.py", "codegen/native/jit.py", "target/cpuid.py"}


def test_a_file_with_code_of_a_better_machine_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RLX_HOST", raising=False)
    rlx.compile(double(), target=RUNNABLE[0].name).save(tmp_path / "double.rlx")
    beyond(monkeypatch)
    program = rlx.load(tmp_path / "double.rlx")
    assert program.lir.target == RUNNABLE[-1].name and "it was compiled" in program.notes[-1]
    assert program(np.ones(2, np.float32)).tolist() == [2, 2]


def test_the_code_of_the_runtime_is_for_the_host() -> None:
    """Synchronisation of ranks, exchanges and copies, in a process that sees the least target."""
    text = (
        "from rlx.dist.native import sync; from rlx.dist.transports import exchange;"
        "from rlx.driver.copy.native import native_copy;"
        "print(sync.sync().code.target.name, native_copy().code.target.name)"
    )
    least = RUNNABLE[-1].name
    assert python(text, RLX_HOST=least) == f"{least} {least}\n"


def test_ranks_inherit_the_host(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    line = "os.write(1, (host().name + '\\n').encode())"  # at once: lines of two ranks do not mix
    script.write_text(f"import os\nfrom rlx.target.cpu import host\n{line}\n")
    least = RUNNABLE[-1].name
    text = f"from rlx.dist.launch import launch; raise SystemExit(launch(2, {str(script)!r}))"
    assert python(text, RLX_HOST=least) == f"{least}\n" * 2


def test_objects_of_one_host_are_not_those_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache, least = ObjectCache(tmp_path, keyring=Keyring(b"k" * 32)), RUNNABLE[-1]
    monkeypatch.setenv("RLX_HOST", RUNNABLE[0].name)
    cache.put("c0ffee", least, b"made there")
    beyond(monkeypatch)
    assert cache.get("c0ffee", least) is None
    monkeypatch.setenv("RLX_HOST", RUNNABLE[0].name)
    assert cache.get("c0ffee", least) == b"made there"


# -- what shows it


def test_commands_tell_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("click")
    from click.testing import CliRunner

    from rlx.cli.devices import devices
    from rlx.cli.explain import explain

    least = RUNNABLE[-1].name
    monkeypatch.setenv("RLX_HOST", least)
    monkeypatch.delenv("RLX_TARGET", raising=False)
    run = CliRunner().invoke
    assert f"host: {least} (RLX_HOST; this machine is " in run(devices, []).output
    told = json.loads(run(devices, ["--json"]).output)
    assert told["host"] == least
    assert [t["name"] for t in told["targets"] if t["runs_here"]] == [least]
    rlx.compile(double()).save(tmp_path / "double.rlx")
    model = str(tmp_path / "double.rlx")
    assert f"host {least} (RLX_HOST; this machine is " in run(explain, [model]).output
    assert json.loads(run(explain, [model, "--json"]).output)["host"] == least
    if X86:
        monkeypatch.setenv("RLX_HOST", "emulate:x86-64-v4")
        if runs_here(emulated(resolve("x86-64-v4"))):
            assert json.loads(run(devices, ["--json"]).output)["targets"][0]["host"]


def test_bench_tells_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx_bench import report

    monkeypatch.setenv("RLX_HOST", RUNNABLE[-1].name)
    assert report.settings([])[0].startswith(f"host: {RUNNABLE[-1].name} (RLX_HOST")


def test_the_fuzzer_sees_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_HOST", raising=False)
    least = RUNNABLE[-1].name
    assert hosts.named("all") == [t.name for t in targets() if runs_here(t)]
    text = "from rlx.target.cpu import host, resolve; from rlx import config;"
    text += "print(host().name, resolve(config.TARGET.get()).name)"
    variables = {**hosts.environment(least)}
    monkeypatch.setenv("RLX_TARGET", RUNNABLE[0].name)  # of the parent: the child must not see it
    assert python(text, **variables) == f"{least} {least}\n"


# -- threads


def groups(root: Path, listed: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(listed)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("listed", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "800000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),  # a container sees its group as the root
        ("0::/docker/0123\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/../other\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a\n", {"a/cpu.max": "broken\n"}, None),
        ("0::/a\n", {}, None),
        (
            "4:memory:/m\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "3:cpuacct,cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (
            "1:cpu:/a/b\n",
            {
                "cpu/a/b/cpu.cfs_quota_us": "-1\n",
                "cpu/a/b/cpu.cfs_period_us": "100000\n",
                "cpu/a/cpu.cfs_quota_us": "100000\n",
                "cpu/a/cpu.cfs_period_us": "100000\n",
            },
            1.0,
        ),
        ("3:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "1\n", "cpu/a/cpu.cfs_period_us": "1\n"}, None),
    ],
)
def test_the_quota_of_a_control_group(
    listed: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert cores.cpu_quota(groups(tmp_path, listed, files)) == quota


def test_systems_without_control_groups_have_no_quota(tmp_path: Path) -> None:
    assert cores.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("mask", "quota", "threads"), [(8, None, 8), (8, 2.5, 3), (8, 0.2, 1), (2, 64.0, 2), (8, 4.0, 4)]
)
def test_threads_default_to_the_smaller(
    mask: int, quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLX_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert config.THREADS.get() == threads
