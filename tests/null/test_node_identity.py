"""`==` on nodes is elementwise, so that RLX's own code compares nodes by identity.

Three nets: a plugin of mypy (`tests/mypy_nodes.py`) reads the types of the source, `tests/conftest.py` makes
every test stop where code of RLX compares nodes, and records that hold nodes have no `==`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx import Graph, records

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rlx"

COMPARED = """
from rlx.ir.node import Node

def f(a: Node, b: Node, many: list[Node], some: tuple[Node, ...], named: dict[str, Node]) -> object:
    yield a == b  # wrong
    yield a != b  # wrong
    yield a == None  # wrong
    yield a in many  # wrong
    yield a not in some  # wrong
    yield many.index(a)  # wrong
    yield many.count(a)  # wrong
    many.remove(a)  # wrong
    yield some == tuple(many)  # wrong
    yield (a, 1) in {(b, 1): 2}  # wrong
    yield a is b
    yield a in {b}
    yield a in {b: 1}
    yield "a" in named
    yield a.id == b.id
"""


def test_mypy_reports_comparisons_of_nodes(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert settings["plugins"] == ["tests/mypy_nodes.py"]
    (tmp_path / "rlx" / "ir").mkdir(parents=True)
    (tmp_path / "rlx" / "ir" / "node.py").write_text("class Node:\n    id: int\n", encoding="utf-8")
    (tmp_path / "sample.py").write_text(COMPARED, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nplugins = {ROOT / 'tests' / 'mypy_nodes.py'}\n", encoding="utf-8"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "mypy", "--no-incremental", "sample.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    told = {int(n) for n in re.findall(r"sample.py:(\d+): error: nodes are compared by value", ran.stdout)}
    lines = COMPARED.splitlines()
    assert told == {i for i, line in enumerate(lines, 1) if "# wrong" in line}, ran.stdout + ran.stderr
    assert ran.stdout.count("error") == len(told) + 1  # and the line that counts them


@pytest.mark.parametrize(
    "compare", ["a == b", "a != b", "a in [b, a]", "[b, a].index(a)", "(a, 1) == (b, 1)"]
)
def test_a_comparison_by_code_of_rlx_stops_every_test(compare: str) -> None:
    """Code that says it is of the package: what `tests/conftest.py` guards against."""
    g = Graph()
    a, b = g.input("a", (2,), "f32"), g.input("b", (2,), "f32")
    code = compile(compare, str(Path(rlx.__file__).parent / "passes" / "new.py"), "eval")
    with pytest.raises(BaseException, match=r"passes/new\.py:1"):
        eval(code, {"a": a, "b": b})
    assert len(g.nodes) == 2


def test_records_that_hold_nodes_have_no_equality() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            made = [ast.unparse(d) for d in node.decorator_list if "dataclass" in ast.unparse(d)]
            fields = [ast.unparse(s.annotation) for s in node.body if isinstance(s, ast.AnnAssign)]
            if made and "eq=False" not in made[0] and any(re.search(r"\bNode\b", f) for f in fields):
                found.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert not found, f"their == would compare nodes; give eq=False: {found}"


def test_a_record_without_equality_is_itself() -> None:
    @records.dataclass(frozen=True, eq=False)
    class Held:
        node: Any

    one, other = Held(1), Held(1)
    assert one == one and one != other and len({one, other}) == 2
