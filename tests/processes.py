"""Scripts that are run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def outputs_by_hash_seed(script: str, seeds: Sequence[str] = ("0", "1", "77")) -> set[str]:
    """What a script prints under each hash seed; one text if it does not depend on hashes."""
    command = [sys.executable, "-c", script]
    path = os.pathsep.join(sys.path)
    found = set()
    for seed in seeds:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        found.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    return found
