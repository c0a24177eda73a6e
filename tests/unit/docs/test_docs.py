"""The pages of docs/ say what the code says: generated ones are up to date, others name what exists."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlx.target.cpu import targets
from rlx_bench.workloads.products import SWEEP

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in ("api.md", "ops.md")]
FOLDERS = ("", "src/rlx/", "docs/")  # that paths on pages start from; a plain name may be anywhere


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run python docs/make_api.py: {done.stdout}{done.stderr}"


def test_the_readme_shows_rows_of_the_page_of_benchmarks() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_readme_table.py"))
    readme, page = ROOT / "README.md", maker["PAGE"]
    text = readme.read_text(encoding="utf-8")
    made = maker["with_table"](text, page.read_text(encoding="utf-8"))
    assert made == text, "run python docs/make_readme_table.py"
    drawn = (ROOT / "docs" / "benchmarks.svg").read_text(encoding="utf-8")
    assert drawn == maker["chart"](page.read_text(encoding="utf-8")), "run python docs/make_readme_table.py"
    measured = maker["commit"](page.read_text(encoding="utf-8"))
    assert f"not measured since {measured}" in text or f"measured at commit {measured}" in text


def test_every_kind_of_machine_is_listed_with_its_commit() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_readme_table.py"))
    index = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    pages = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
    assert maker["PAGE"] in pages
    for page in pages:
        (row,) = (line for line in index.splitlines() if f"(benchmarks/{page.name})" in line)
        assert maker["commit"](page.read_text(encoding="utf-8")) in row, f"docs/benchmarks.md: {page.stem}"


def code_of(page: Path) -> list[str]:
    """What a page sets in code, within its sentences."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"`([^`]+)`", prose)


def resolved(name: str) -> Any:
    """What a dotted name stands for: modules as far as they go, then attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_on_pages_exist(page: Path) -> None:
    unknown = []
    for code in code_of(page):
        for path in re.findall(r"(?<![\w/.<>-])(?:[\w.*-]+/)*[\w*-]+\.(?:py|md|toml)\b", code):
            places = [f + path for f in FOLDERS]
            if "/" not in path:
                places += [f"src/**/{path}", f"tests/**/{path}"]
            if not any(any(ROOT.glob(place)) for place in places):
                unknown.append(path)
        for name in re.findall(r"(?<![\w/.-])rlx(?:\.[A-Za-z_]\w*)+(?!\w|/)", code):
            try:
                resolved(name)
            except AttributeError:
                unknown.append(name)
            except ModuleNotFoundError as e:  # an optional package may be missing
                unknown += [name] * (e.name or "").startswith("rlx")
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    unknown += [link for link in links if not (page.parent / link).exists()]
    assert not unknown, f"{page.name} names what does not exist: {', '.join(unknown)}"


# What pages once said, and the word that people search for.
PLAIN_WORDS = {
    "past the caches": "non-temporal",
    "requests ahead": "prefetch",
    "beside": "next to",
    "told": "reported",
    "lies in": "is stored in",
    "lie in": "are stored in",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_usual_words(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = [f"{old!r}: {new!r}" for old, new in PLAIN_WORDS.items() if re.search(rf"\b{old}\b", prose)]
    assert not found, f"{page.name} has other words than usual: {', '.join(found)}"


def test_the_page_of_the_engine_has_every_target() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|.*\|$", (ROOT / "docs/notes/cpu.md").read_text("utf-8"), flags=re.M)
    known = [target.name for target in targets()]
    assert [name for name in rows if name.split("-")[0] in ("x86", "aarch64")] == known


def test_the_page_of_products_has_the_whole_sweep() -> None:
    """As `rlx bench gemm --page docs/gemm.md` writes it: every shape at one and at two threads."""
    page = (ROOT / "docs" / "gemm.md").read_text()
    rows = [tuple(line.split(" | ")[:2]) for line in page.splitlines() if line.startswith("| gemm ")]
    wanted = [(f"| gemm {m}x{k}x{n}", threads) for m, k, n in SWEEP for threads in "12"]
    assert rows == wanted
    assert "Made by `rlx bench gemm " in page and "Interrupted" not in page
    assert "(docs/gemm.md)" in (ROOT / "README.md").read_text()
