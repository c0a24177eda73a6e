"""docs/design.md follows one program through RLX. The modules it names exist, and they run in that order."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import rlx
from rlx.ir.graph import Graph

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "rlx"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
USER = "your code"
K, N = 37, 41  # sizes that no other test uses, so that nothing of this program is known already


class Step(NamedTuple):
    """One row of the page's walk: a function, its module, and the module that calls it."""

    module: str
    function: str
    caller: str


def walk() -> list[Step]:
    """The rows of the walk."""
    rows = re.findall(r"^\| `([\w/]+\.py): ([\w.]+)` \| (.*?) \|", PAGE, re.M)
    return [Step(module, function, caller.strip("`")) for module, function, caller in rows]


def stated_folders() -> list[str]:
    """The order of folders that the page states in one line."""
    line = next(line for line in PAGE.splitlines() if line.startswith("`api` -> "))
    return re.findall(r"`(\w+)`", line)


def imports_of(module: str) -> set[str]:
    """Modules of RLX that a module imports, as paths: at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    paths = [name.removeprefix("rlx.").replace(".", "/") for name in names if name.startswith("rlx.")]
    found = {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}
    return {path for path in found if (PACKAGE / path).exists()}


def functions_of(module: str) -> set[str]:
    """Functions of a module, methods with their class."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{owner.name}.{node.name}" for node in owner.body if isinstance(node, ast.FunctionDef)}
    return found


def test_the_walk_names_functions_that_exist() -> None:
    assert len(walk()) > 20, "docs/design.md has lost the table of its walk"
    for step in walk():
        assert step.function in functions_of(step.module), f"{step.module} has no {step.function}"


def test_callers_import_what_they_call() -> None:
    reached: set[str] = set()  # modules of the walk so far, and what they import
    for step in walk():
        if step.caller != USER:
            assert step.caller in reached, f"{step.caller} calls {step.module} before the walk has reached it"
            known = imports_of(step.caller)
            if "ir/later.py" in known:  # the table of functions that are built on their callers
                known = known | imports_of("wiring.py")
            assert step.module in known, f"{step.caller} does not import {step.module}"
            reached |= {step.caller} | imports_of(step.caller)
        reached |= {step.module} | imports_of(step.module)


def test_the_walk_goes_down_the_folders_once() -> None:
    folders = list(dict.fromkeys(step.module.partition("/")[0] for step in walk()))
    assert folders == stated_folders()
    below = [stated_folders().index(step.module.partition("/")[0]) for step in walk()]
    assert [i for i in below if i] == sorted(i for i in below if i), (
        "only api is visited again on the way down"
    )


def layer() -> Graph:
    g: Graph = rlx.Graph("layer")
    x = g.input("x", ("n", K), "f32")
    w, b = g.param("w", (K, N), "f32"), g.param("b", (N,), "f32")
    g.output("y", rlx.ops.relu(x @ w + b))
    return g


def onnx_layer(path: Path) -> None:
    """The same layer as an ONNX file, with weights of one."""
    import onnx
    from onnx import helper, numpy_helper

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", K), ("y", N))
    )
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (K, N)), ("b", (N,)))
    ]
    graph = helper.make_graph(nodes, "layer", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_a_program_takes_the_walk(tmp_path: Path, require: Callable[[str], None]) -> None:
    require("onnx")
    onnx_layer(tmp_path / "layer.onnx")
    wanted = [(str(PACKAGE / step.module), step.function) for step in walk()]
    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename, code.co_qualname) in wanted:
            called.append((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    threading.setprofile(note)  # code is generated in another thread
    sys.setprofile(note)
    try:
        program = rlx.load(tmp_path / "layer.onnx", cache=False)
        y = program.run({"x": np.ones((3, K), np.float32)})["y"]
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    np.testing.assert_array_equal(y, np.full((3, N), K + 1, np.float32))
    assert list(dict.fromkeys(called)) == wanted


def test_the_levels_are_those_of_the_page(tmp_path: Path) -> None:
    rlx.compile(layer(), dump=str(tmp_path), cache=False)
    rows = re.findall(r"^\| [HML]IR \| `(\w+)` \| (.*?) \|", PAGE, re.M)
    assert [stage for stage, _ in rows] == ["input", "expand", "fuse"]
    for stage, nodes in rows:
        (file,) = tmp_path.glob(f"*-{stage}.txt")
        found = re.findall(r"^  %\d+ = (\w+)\(", file.read_text(encoding="utf-8"), re.M)
        assert ", ".join(op for op in found if op not in ("input", "param", "constant")) == nodes
