"""Imports go one way, in the order that docs/design.md states, and `import rlx` stays light."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx.codegen.cpu.generator import FOLDERS, source_version
from rlx.runtime.native.code import RUNTIME_FOLDERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rlx"

# Imports against the order that are there for a good reason: (file, imported part) -> the reason.
# Each must sit inside a function, so that nothing is loaded before it is needed.
ALLOWED_UPWARD: dict[tuple[str, str], str] = {
    ("cost/calibrate.py", "driver"): "a device is measured through its own queue, when a user asks for it",
    ("ir/lir.py", "plan"): "the name of the contract for plans",
    ("ir/phase.py", "plan"): "the name of the contract for phases",
    ("driver/host.py", "runtime"): "host arenas take their pages where programs take theirs",
    ("driver/copy/native.py", "runtime"): "the copy loop is kept in the cache of native code",
}

HEAVY = (
    "llvmlite",
    "onnx",
    "onnxruntime",
    "mpi4py",
    "scipy",
    "pyopencl",
    "torch",
    "click",
    "rich",
    "tokenizers",
    "starlette",
    "uvicorn",
)


def documented_order() -> list[list[str]]:
    """Lines of the block under «Import order»; parts on one line are peers.

    Each line is `name [, name]  description  [name  description]`, columns two or more spaces apart.
    """
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    found = re.search(r"^## Import order.*?```\n(.*?)```", text, re.S | re.M)
    assert found, "docs/design.md has lost its «Import order» block"
    order = []
    for line in found.group(1).splitlines():
        columns = re.split(r"\s{2,}", line.strip())
        names = [name.strip().removesuffix(".py") for column in columns[::2] for name in column.split(",")]
        order.append(names)
    return order


def part_of(module: str) -> str:
    """rlx.ir.dim -> ir; rlx -> the package itself."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(imported rlx module, line, inside a function) for every import of a file, wherever it stands."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    here = parts[:-1]

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = here[: len(here) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            if base == "rlx":  # from rlx import config: the parts are what is imported
                for alias in node.names:
                    yield f"rlx.{alias.name}", node.lineno, inside
            else:
                yield base, node.lineno, inside
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    for module, line, inside in visit(ast.parse(path.read_text(encoding="utf-8")), False):
        if module == "rlx" or module.startswith("rlx."):
            yield module, line, inside


def own_part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def source_files() -> list[Path]:
    # rlx/__init__.py is the front of the house: it may show every part; test_import_is_light keeps it honest.
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_part_is_documented() -> None:
    documented = {name for line in documented_order() for name in line}
    undocumented = {own_part(path) for path in source_files()} - documented
    assert not undocumented, (
        f"docs/design.md, «Import order», does not say where {sorted(undocumented)} belong"
    )


def test_imports_go_one_way() -> None:
    level = {name: index for index, names in enumerate(documented_order()) for name in names}
    wrong, used = [], set()
    for path in source_files():
        name = path.relative_to(PACKAGE).as_posix()
        for module, line, inside in imports_of(path):
            part = part_of(module)
            if part == "":
                wrong.append(f"{name}:{line} imports the package rlx itself; import the part it needs")
            elif part not in level:
                wrong.append(f"{name}:{line} imports {module}, which is no part of the documented order")
            elif level[part] > level[own_part(path)]:
                if (name, part) in ALLOWED_UPWARD and inside:
                    used.add((name, part))
                else:
                    wrong.append(f"{name}:{line} imports {module}, which comes later in the order")
    assert not wrong, "\n".join(wrong)
    assert used == ALLOWED_UPWARD.keys(), f"no longer needed: {sorted(ALLOWED_UPWARD.keys() - used)}"


def test_peers_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in source_files():
        name = path.relative_to(PACKAGE).as_posix()
        for module, _, _ in imports_of(path):
            part = part_of(module)
            if part not in ("", own_part(path)) and (name, part) not in ALLOWED_UPWARD:
                edges.setdefault(own_part(path), set()).add(part)

    def walk(part: str, trail: tuple[str, ...]) -> None:
        assert part not in trail, "import circle: " + " -> ".join((*trail[trail.index(part) :], part))
        for following in sorted(edges.get(part, ())):
            walk(following, (*trail, part))

    for part in sorted(edges):
        walk(part, ())


PROGRAM = {"rlx.plan.lir", "rlx.plan.phase"}
"""What a program is."""
KEPT_PLANS = {
    "rlx.plan.outline",
    "rlx.plan.text",
    "rlx.plan.explain",
    "rlx.plan.kernel_costs",
    "rlx.plan.memory.placer",
}
"""What programs in files are read with, and what places values for other sizes."""


@pytest.mark.parametrize(("part", "allowed"), [("codegen", PROGRAM), ("runtime", PROGRAM | KEPT_PLANS)])
def test_backends_run_no_planner(part: str, allowed: set[str]) -> None:
    """A program has all decisions in it: backends read them, and neither plan, fuse nor rewrite."""
    wrong = [
        f"{path.relative_to(PACKAGE).as_posix()}:{line} imports {module}"
        for path in sorted((PACKAGE / part).rglob("*.py"))
        for module, line, _ in imports_of(path)
        if part_of(module) in ("plan", "fuse", "rewrite", "transform") and module not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["rlx", "rlx.zoo", "rlx.config"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} also loads {done.stdout.strip()}"


def test_the_reader_of_imports_sees_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rlx"
    (package / "ir").mkdir(parents=True)
    monkeypatch.setattr(f"{__name__}.PACKAGE", package)
    file = package / "ir" / "node.py"
    file.write_text(
        "import rlx\nimport rlx.plan\nfrom rlx import ops, config\n"
        "from . import dim\nfrom ..cost import gate\ndef late():\n    from rlx.cli.main import main\n"
    )
    assert list(imports_of(file)) == [
        ("rlx", 1, False),
        ("rlx.plan", 2, False),
        ("rlx.ops", 3, False),
        ("rlx.config", 3, False),
        ("rlx.ir", 4, False),
        ("rlx.cost", 5, False),
        ("rlx.cli.main", 7, True),
    ]


def loaded_by(*parts: str) -> set[Path]:
    """What a module imports when it is loaded, directly or not."""
    found: set[Path] = set()
    todo = [PACKAGE.joinpath(*parts)]
    while todo:
        path = todo.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for module, _, inside in imports_of(path):
            place = PACKAGE.joinpath(*module.split(".")[1:])
            if not inside and place != PACKAGE:
                todo.append(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
    return found


def test_an_edited_generator_has_another_version(tmp_path: Path) -> None:
    """One file of every folder that it imports from, edited by itself."""
    one_of_each = {path.parent: path for path in sorted(loaded_by("codegen", "cpu", "build.py"))}
    assert len(one_of_each) > 6
    tree = shutil.copytree(PACKAGE, tmp_path / "rlx", ignore=shutil.ignore_patterns("__pycache__"))
    versions = {source_version(str(tree))}
    for number, path in enumerate(one_of_each.values(), 2):
        with (tree / path.relative_to(PACKAGE)).open("a") as file:
            file.write("# edited\n")
        versions.add(source_version(str(tree)))
        assert len(versions) == number, path


@pytest.mark.parametrize("module", ["pool.py", "driver.py", "reader.py"])
def test_the_version_of_the_runtime_covers_what_its_native_code_imports(module: str) -> None:
    covered = [PACKAGE / folder for folder in (*FOLDERS, *RUNTIME_FOLDERS)]
    for path in loaded_by("runtime", "native", module):
        assert path.parent == PACKAGE or any(path.is_relative_to(folder) for folder in covered), path
