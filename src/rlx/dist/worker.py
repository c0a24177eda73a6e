"""What the launcher runs in every rank's process: the user's script, and a last word if it fails.

`python -m rlx.dist.worker script.py ARGS` or `python -m rlx.dist.worker -m module ARGS`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback

from rlx.dist import environment
from rlx.dist.cores import bind
from rlx.dist.errors import RanksMissing
from rlx.system import SYSTEM

# How Open MPI and MPICH number the ranks of one host.
_LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_REPORT_CHARACTERS = 16_000


def _die_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher dies, however it dies."""
    launcher = os.environ.get(environment.LAUNCHER_PID)
    if launcher is None:
        return
    SYSTEM.die_with_parent()
    if os.getppid() != int(launcher):  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def _set_torchrun_variables() -> None:
    """Under mpiexec: the names that scripts know, from those that MPI sets."""
    found = environment.mpi_rank()
    if found is not None:
        os.environ.setdefault("RANK", str(found[0]))
        os.environ.setdefault("WORLD_SIZE", str(found[1]))
    for names in _LOCAL_RANKS:
        if all(name in os.environ for name in names):
            os.environ.setdefault("LOCAL_RANK", os.environ[names[0]])
            os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ[names[1]])


def _bind() -> None:
    """Take one's share of this host's cores, if the launcher said so and it is known who else is here."""
    rank, ranks = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if os.environ.get(environment.BIND) == "1" and rank is not None and ranks is not None:
        bind(int(rank), int(ranks))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def _traceback_of(error: BaseException) -> str:
    """The traceback from the user's script on, without this file and runpy."""
    frames = error.__traceback__
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _report(error: BaseException) -> None:
    """Hand the traceback to the launcher, or print it where there is none (under mpiexec)."""
    facts = {
        "summary": "".join(traceback.format_exception_only(error)).strip()[:1000],
        "traceback": _traceback_of(error)[-_REPORT_CHARACTERS:],
        # Ranks that only suffer from another's failure name the culprits.
        "blames": list(error.ranks) if isinstance(error, RanksMissing) else None,
    }
    descriptor = os.environ.get(environment.REPORT_FD)
    if descriptor is not None:
        with open(int(descriptor), "wb", closefd=False) as pipe:  # all of it, however small the pipe is
            pipe.write(json.dumps(facts).encode())
    else:
        print(
            f"rank {os.environ.get('RANK', '?')} failed:\n{facts['traceback']}", file=sys.stderr, flush=True
        )


def _note_ending(code: int) -> None:
    """Tell a launcher of this host how it ended: mpiexec sometimes says that all was well."""
    folder = os.environ.get(environment.ENDINGS)
    if folder is not None and os.path.isdir(folder):
        with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
            file.write(str(code))


def main(arguments: list[str]) -> int:
    """Run the script and return the exit code of this process."""
    _die_with_launcher()
    _set_torchrun_variables()
    _bind()
    try:
        _run(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        _note_ending(code)
        if code:
            environment.abort_if_joined(f"ended with exit code {code}")
            if isinstance(exit_.code, str):
                print(exit_.code, file=sys.stderr)
            environment.end_mpi_job(code)
        return code
    except BaseException as error:
        _report(error)
        _note_ending(1)
        summary = "".join(traceback.format_exception_only(error)).strip()
        environment.abort_if_joined(summary)
        environment.end_mpi_job(1)
        return 1
    _note_ending(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
