"""Modules that can only be imported together are a knot; an import inside a function hides one, or says why.

Imports for type checkers alone do not count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
LARGEST_KNOT = 1
"""Modules: none needs itself, also when imports inside functions count."""
MOST_LATE_IMPORTS = 59
"""Import statements of RLX's own modules inside functions."""


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((SOURCE / "rlx").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def source(path: Path) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def imports(tree: ast.AST, names: dict[str, Path], late: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, imported module of RLX, inside a function)"""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name, late) for a in node.names if a.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                inner = f"{node.module}.{a.name}"
                if inner in names or node.module in names:
                    yield node.lineno, inner if inner in names else node.module, late
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, names, late or inside)


def knots(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            found.append(stack[at:])
            del stack[at:]

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


def test_no_module_needs_itself() -> None:
    names = modules()
    edges = {n: {m for _, m, _ in imports(source(path)[1], names)} - {n} for n, path in names.items()}
    large = [sorted(knot) for knot in knots(edges) if len(knot) > LARGEST_KNOT]
    assert not large, f"modules import each other in a circle, late imports counted: {large}"


def test_imports_inside_functions_are_few_and_say_why() -> None:
    names = modules()
    late, silent = set(), []
    for name, path in names.items():
        lines, tree = source(path)
        for line, _, inside in imports(tree, names):
            if inside:
                late.add((name, line))
                # wiring.py gives one reason for all of its own
                if "  # " not in lines[line - 1] and name != "rlx.wiring":
                    silent.append(f"{name}:{line}")
    assert not silent, f"an import inside a function has its reason beside it: {silent}"
    assert len(late) <= MOST_LATE_IMPORTS, f"{len(late)} imports inside functions; import at the top"


def test_the_search_finds_knots() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert sorted(map(sorted, knots(edges))) == [["a"], ["b", "c"], ["d"], ["e"]]
    names = dict.fromkeys(("rlx.ir.node", "rlx.ir.op", "rlx.ops"), SOURCE)
    text = (
        "if TYPE_CHECKING:\n    import rlx.ops\nif not TYPE_CHECKING:\n    from rlx.ir import op\n"
        "def late():\n    from rlx.ops import add\n    import json\n"
    )
    assert list(imports(ast.parse(text), names)) == [(4, "rlx.ir.op", False), (6, "rlx.ops", True)]
