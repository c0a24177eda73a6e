"""Outside ops/ no file switches on an op's name: what an op does is said in its declaration only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "rlx"

# The ops themselves, the registry that finds them by name, and a translator of names into those of ONNX.
MAY_KNOW_NAMES = ("ops/", "ir/op.py", "fuzz/to_onnx.py")


def is_op(node: ast.expr) -> bool:
    """`op`, `some_op` or `anything.op`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "op" or name.endswith("_op")


def is_op_of_node(node: ast.expr) -> bool:
    """`node.op`; a plain `op` may be anything, such as a collective's kind."""
    return isinstance(node, ast.Attribute) and is_op(node)


def is_op_name(node: ast.expr) -> bool:
    """`op.name`, `node.op.name` or `op_name`."""
    if isinstance(node, ast.Attribute) and node.attr == "name" and is_op(node.value):
        return True
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith("op_name")


def is_constant(node: ast.expr) -> bool:
    """A table or collection of the module, by convention: ALL_CAPS."""
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2].isupper()


def holds_strings(node: ast.expr) -> bool:
    """A string, a collection that has one, or a constant."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(holds_strings(item) for item in node.elts)
    if isinstance(node, ast.Call):  # frozenset({"add", "mul"})
        return any(holds_strings(argument) for argument in node.args)
    return is_constant(node)


def is_declared_op(node: ast.expr, ops_modules: set[str]) -> bool:
    """`ops.matmul` or `matmul`, imported from rlx.ops."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ops_modules


def names_imported_from_ops(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rlx":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "ops"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlx.ops"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


class _Unaliased(ast.NodeTransformer):
    """Puts `node.op.name` where a function reads a variable that it is stored in."""

    def __init__(self) -> None:
        self.aliases: dict[str, ast.expr] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.aliases = self.aliases, dict(self.aliases)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    self._take(target, inner.value)
        made = self.generic_visit(node)
        self.aliases = outer
        return made

    def _take(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._take(one, its)
        elif isinstance(target, ast.Name):
            found = value.elt if isinstance(value, ast.ListComp) else value
            if is_op_name(found):
                self.aliases[target.id] = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.aliases.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def switches(source: str) -> Iterator[tuple[int, str]]:
    """Places of a file that choose by the name, or the identity, of an op."""
    tree = _Unaliased().visit(ast.parse(source))
    declared = names_imported_from_ops(tree)
    for node in ast.walk(tree):
        found = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            by_name = any(map(is_op_name, sides)) and any(map(holds_strings, sides))
            by_identity = any(map(is_op_of_node, sides)) and any(
                is_constant(side) or is_declared_op(side, declared) for side in sides
            )
            found = by_name or by_identity
        elif isinstance(node, ast.Match):
            found = is_op_name(node.subject)
        elif isinstance(node, ast.Subscript):  # TABLE[node.op.name]
            found = is_constant(node.value) and (is_op_name(node.slice) or is_op_of_node(node.slice))
        elif isinstance(node, ast.Call):
            found = is_dispatching_call(node)
        if found:
            yield node.lineno, ast.unparse(node).splitlines()[0]


def is_dispatching_call(node: ast.Call) -> bool:
    """`op.name.startswith("x")`, `TABLE.get(op.name)`, `getattr(self, "emit_" + op.name)`."""
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in ("startswith", "endswith"):
            return is_op_name(node.func.value)
        if node.func.attr == "get":
            return is_constant(node.func.value) and any(
                is_op_name(key) or is_op_of_node(key) for key in node.args
            )
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
        return any(isinstance(part, ast.expr) and is_op_name(part) for part in ast.walk(node.args[1]))
    return False


def test_no_file_outside_ops_switches_on_an_ops_name() -> None:
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(MAY_KNOW_NAMES)
    ]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in files
        for line, text in switches(path.read_text(encoding="utf-8"))
    ]
    assert files
    assert not found, "say it in the op's declaration instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'if node.op.name == "add": pass',
        'if "add" != op.name: pass',
        'x = node.op.name in ("add", "mul")',
        "x = node.op.name not in FUSIBLE",
        'x = node.op.name in frozenset({"add"})',
        'x = op_name == "add"',
        'def f(node):\n    name, attrs = node.op.name, node.attrs\n    return name == "add"',
        "def f(node):\n    name = node.op.name\n    return RULES[name]",
        'def f(nodes):\n    names = [n.op.name for n in nodes]\n    return names != ["add", "cast"]',
        'match node.op.name:\n    case "add": pass',
        'x = op.name.startswith("reduce_")',
        "emit = EMITTERS[node.op.name]",
        "emit = EMITTERS[node.op]",
        "x = node.op in HEAVY",
        "emit = self.EMITTERS.get(node.op.name)",
        'emit = getattr(self, f"emit_{node.op.name}")',
        "from rlx import ops\nx = node.op is ops.matmul",
        "from rlx.ops.contract import matmul\nx = node.op == matmul",
    ],
)
def test_switches_are_found(source: str) -> None:
    assert list(switches(source))


@pytest.mark.parametrize(
    "source",
    [
        "x = f'{node.op.name}({args})'",
        "x = a.op.name == b.op.name",
        "x = node.op is other.op",
        "x = node.op.role is Role.INPUT",
        "x = registry[name]",
        'x = knob.name == "RLX_CACHE"',
        "x = node.op is not None",
        'x = collective.op == "broadcast"',  # an Op is never equal to a string: this is another op
    ],
)
def test_other_uses_are_fine(source: str) -> None:
    assert not list(switches(source))
