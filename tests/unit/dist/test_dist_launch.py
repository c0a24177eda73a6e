"""The launcher: environment, exit codes, who is named when a rank fails, and that nothing is left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlx.dist
from conformance.dist_ranks import resources
from rlx.dist import launch as launcher
from rlx.dist.errors import TransportError
from rlx.dist.launch import launch
from rlx.dist.transports import shm

HEAD = """
import os, sys, signal, time
import numpy as np
import rlx.dist as dist
transport = dist.init()
rank = int(transport.this_rank)
"""


LONG = 300.0  # seconds that ranks wait for each other, where only a fault makes them
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rlx.dist.__file__).parents[2])}
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(body, n, *args) -> (exit code, what the launcher said)."""

    def start(body: str, n: int = 2, *args: str, timeout: float = LONG, head: str = HEAD) -> tuple[int, str]:
        script = tmp_path / "script.py"
        script.write_text(head + body)
        said = io.StringIO()
        before = resources()
        code = launch(n, script, args, timeout=timeout, heap_size=1 << 20, stderr=said, env=ENVIRONMENT)
        assert resources() <= before
        return code, said.getvalue()

    return start


def test_ranks_work_together_and_know_who_they_are(run: Run, tmp_path: Path) -> None:
    body = f"""
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), "3")
assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"] and os.environ["RLX_THREADS"]
assert sys.argv[1:] == ["--lr", "0.1"] and __name__ == "__main__"
total = dist.all_reduce(transport, None, np.array([rank + 1]))
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(total[0]))
"""
    assert run(body, 3, "--lr", "0.1") == (0, "")
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["6"] * 3


def test_the_rank_that_raises_is_named_with_its_traceback(run: Run) -> None:
    code, said = run("if rank == 1: raise ValueError('boom')\ntransport.barrier()", 3)
    assert code == 1
    assert "rank 1" in said and "ValueError: boom" in said and 'script.py", line 7' in said
    assert "RankFailed" not in said and "runpy" not in said
    assert "the other ranks (0, 2) were ended" in said


def test_a_killed_rank_is_named(run: Run) -> None:
    code, said = run("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntransport.barrier()")
    assert code == 137 and "rank 0" in said and "killed by SIGKILL" in said


def test_a_stopped_rank_is_named_and_ended(run: Run) -> None:
    code, said = run("if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ntransport.barrier()", timeout=1.0)
    assert code == 1 and "rank 1" in said and "did not come" in said and "Timeout" in said


def test_a_rank_that_never_joins_is_named_without_a_deadline(run: Run) -> None:
    leave = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(0)\n"
    code, said = run("transport.barrier()", head=leave + HEAD)
    assert code == 1 and "rank 1" in said and "before it joined" in said and "Timeout" not in said


def test_a_rank_that_does_not_listen_is_ended(run: Run, tmp_path: Path) -> None:
    woken = tmp_path / "woken"
    code, said = run(
        f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
transport.barrier()
if rank == 1: sys.exit(3)
time.sleep(600)
open({str(woken)!r}, "w")
"""
    )
    assert code == 3 and "exit code 3" in said
    assert not woken.exists()


def test_a_report_that_fills_its_pipe_is_read(run: Run) -> None:
    code, said = run(
        """
import fcntl
if rank == 1:
    fcntl.fcntl(int(os.environ["RLX_REPORT_FD"]), 1031, 4096)  # F_SETPIPE_SZ
    raise ValueError("boom " * 2000)
transport.barrier()
"""
    )
    assert code == 1 and "rank 1" in said and "ValueError: boom boom" in said


def test_ranks_are_not_reaped_while_they_may_be_signalled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a process that was reaped may be that of somebody else."""
    killpg, signalled = os.killpg, []

    def checked(group: int, signal_: int) -> None:
        assert Path(f"/proc/{group}").exists()
        signalled.append(group)
        killpg(group, signal_)

    monkeypatch.setattr(os, "killpg", checked)
    assert run("transport.barrier()") == (0, "")
    assert len(signalled) == 2


def test_ranks_die_with_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + f"open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    starter = f"from rlx.dist.launch import launch; launch(2, {str(script)!r})"
    launcher = subprocess.Popen([sys.executable, "-c", starter], env=ENVIRONMENT)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + LONG  # half of what the ranks would sleep
    for file in files:
        while shm.process_started(int(file.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_mpiexec_that_lingers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child ends when it has been seen, and it stays, alone."""
    monkeypatch.setattr(launcher, "MPIEXEC_ALONE_SECONDS", 0.3)
    has_children = launcher._has_children
    body = "import subprocess, time; subprocess.run(['cat']); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE)
    assert process.stdin is not None

    def seen(pid: int) -> bool:
        found = has_children(pid)
        if found:
            process.stdin.close()  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(launcher, "_has_children", seen)
    assert launcher._wait_for_mpiexec(process) is None
    launcher._end_mpiexec(process)
    assert process.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", ""),
        ("raise SystemExit(0)", ""),
        ("raise SystemExit(3)", "rank 1 ended with exit code 3"),
        ("raise ValueError('broken')", "rank 1 ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", "rank 1 was ended"),
    ],
)
def test_an_mpiexec_that_hides_a_failure_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\nif os.environ['RANK'] == '1':\n    pass\n    {body}\n")
    one_by_one = (
        "import os, subprocess, sys\n"
        "for rank in '01':\n"
        "    subprocess.run(sys.argv[1:], env={**os.environ, 'RANK': rank})\n"
    )

    def command(n: int, ranks: list[str], hostfile: object, variables: dict[str, str]) -> Any:
        return [sys.executable, "-c", one_by_one, *ranks], variables

    monkeypatch.setattr(launcher, "mpi_command", command)
    said = io.StringIO()
    assert launch(2, script, mpi=True, stderr=said) == (1 if told else 0)
    assert told in said.getvalue() and bool(told) == bool(said.getvalue())


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    with pytest.raises(TransportError, match="no script"):
        launch(2, tmp_path / "nothing.py")
    with pytest.raises(TransportError, match="0 ranks"):
        launch(0, script)
    with pytest.raises(TransportError, match="hostfile needs MPI"):
        launch(2, script, hostfile="hosts")


BOUND = """
cpus, wanted = sorted(os.sched_getaffinity(0)), os.environ["RLX_THREADS"]
open(sys.argv[1] + f"/{rank}", "w").write(f"{','.join(map(str, cpus))} {wanted}")
"""


@pytest.mark.parametrize("bind", [True, False])
def test_ranks_get_their_share_of_the_cores(tmp_path: Path, bind: bool) -> None:
    every = sorted(os.sched_getaffinity(0))
    script = tmp_path / "script.py"
    script.write_text(HEAD + BOUND)
    free = {name: value for name, value in ENVIRONMENT.items() if name != "RLX_THREADS"}
    for n in (1, 2, len(every) + 1):
        assert launch(n, script, [str(tmp_path)], bind=bind, heap_size=1 << 20, env=free) == 0
        told = [(tmp_path / str(rank)).read_text().split() for rank in range(n)]
        shares = [[int(cpu) for cpu in cpus.split(",")] for cpus, _ in told]
        if bind and n <= len(every):
            assert sorted(cpu for share in shares for cpu in share) == every
            assert [int(threads) for _, threads in told] == [len(share) for share in shares]
        else:
            assert shares == [every] * n
            assert {int(threads) for _, threads in told} == {max(1, len(every) // n)}


def test_a_rank_whose_mpi_job_cannot_be_ended_ends_itself() -> None:
    """Abort waits for ever if mpiexec is gone."""
    code = """
import sys, time, types
from rlx.dist import environment

class Comm:
    def Abort(self, code):
        time.sleep(600)

sys.modules["mpi4py.MPI"] = types.SimpleNamespace(COMM_WORLD=Comm())
environment.MPI_GRACE_SECONDS, environment.MPI_ABORT_SECONDS = 0, 1
environment.end_mpi_job(1)
"""
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -signal.SIGALRM
