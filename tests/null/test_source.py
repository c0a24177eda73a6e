"""Rules that every file of the repository keeps."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from pathlib import Path

from rlx import config

ROOT = Path(__file__).parents[2]
MOST_LINES = 600
MOST_FILES = 25

# Written in pieces, so that this file keeps its own rule.
REGISTRY_HOSTS = tuple(
    ".".join(pieces)
    for pieces in (
        ("pypi", "org"),
        ("pypi", "python", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("yarnpkg", "com"),
        ("anaconda", "org"),
        ("crates", "io"),
        ("rubygems", "org"),
        ("ghcr", "io"),
        ("docker", "io"),
        ("pytorch", "org"),
    )
)

SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "venv", "node_modules"}


def repository_files() -> list[Path]:
    """Every file of the repository; of the hidden folders (.git, .venv, caches) only .ci is walked."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        top = Path(folder) == ROOT
        folders[:] = sorted(
            name
            for name in folders
            if name == ".ci"
            or not (name.startswith(".") or name == "__pycache__" or (top and name in SKIPPED_FOLDERS))
        )
        found += [Path(folder) / name for name in sorted(names)]
    return found


def test_no_file_is_too_long() -> None:
    python = [path for path in repository_files() if path.suffix == ".py"]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python}
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MOST_LINES]
    assert lengths
    assert not long, f"over {MOST_LINES} lines, split by subject: {long}"


def test_no_folder_is_too_full() -> None:
    """Source files, of which a reader of the folder list must see each."""
    counts = Counter(path.parent for path in repository_files() if path.suffix == ".py")
    full = [f"{folder.relative_to(ROOT)}: {n} files" for folder, n in counts.items() if n > MOST_FILES]
    assert counts
    assert not full, f"over {MOST_FILES} files, split by subject: {full}"


def test_no_registry_is_named() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="ignore").lower()
        found += [f"{path.relative_to(ROOT)}: {host}" for host in REGISTRY_HOSTS if host in text]
    assert not found, f"where packages come from is the user's setting: {found}"


def test_only_config_reads_rlx_variables() -> None:
    reads = re.compile(r"(environ|getenv)\b[^\n]*RLX_")
    package = ROOT / "src" / "rlx"
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path != package / "config.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if reads.search(line)
    ]
    assert not found, f"add a knob to rlx/config.py: {found}"


def test_readme_has_the_table_of_knobs() -> None:
    assert config.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_extra_names_a_framework() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = {re.split(r"[^a-z0-9-]", requirement.lower())[0] for requirement in wanted}
    assert not names & {
        "torch",
        "tensorflow",
        "tensorflow-cpu",
        "sentence-transformers",
        "transformers",
        "jax",
    }
    core = {re.split(r"[^a-z0-9_-]", requirement.lower())[0] for requirement in project["dependencies"]}
    assert core == {"numpy", "ml_dtypes", "llvmlite"}
