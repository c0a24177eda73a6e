"""Adding an op is writing one declaration: the generated tests find it, and find what is wrong with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ("test_ops_generated.py", "test_text.py", "test_verify.py")

CUBE = '''
from rlx.ir.form import Map
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.scalar import axes, call, load
from rlx.ops.rules import is_real, need_dtype


@declare
class toy_cube(Op):
    """x * x * x as an op of its own, lowered to one loop."""

    name = "toy_cube"
    arity = 1

    def infer(self, x):
        need_dtype("toy_cube", x, is_real)
        return x

    def ref(self, x):
        return x * x * x

    def vjp(self, g, y, x):
        return [g * x * x * 3.0]

    def batch(self, flags, x):
        return self(x)

    def lower(self, x):
        value = load(0, axes(x.rank), x.dtype)
        return Map(x.shape, call("mul", call("mul", value, value), value))

    def cost(self, x):
        return x.numel * 2

    def samples(self):
        return [Sample((Arg("f32[3,5]"),)), Sample((Arg("f32[n]"),)), Sample((Arg("i32[0]"),), grad=False)]
'''


def example() -> str:
    """The declaration that CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"^## Add an op$.*?```python\n(.*?)```", text, re.S | re.M)
    assert found, "CONTRIBUTING.md has lost its section «Add an op»"
    return found[1]


def generated_tests(folder: Path, source: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run what is generated for an op declared in a module that nothing of RLX knows of."""
    (folder / "toy_module.py").write_text(source, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    files = [str(ROOT / "tests" / "unit" / file) for file in GENERATED]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "toy_module",
        *files,
        "-k",
        name,
    ]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", ["soft_cap", "toy_cube"])
def test_a_declaration_is_all_it_takes(name: str, tmp_path: Path) -> None:
    done = generated_tests(tmp_path, CUBE if name == "toy_cube" else example(), name)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    samples = 4 if name == "soft_cap" else 3
    assert passed and int(passed[1]) >= 5 * samples, (
        done.stdout
    )  # types, meaning, gradient, batch, text, verifier


WRONG = {
    "type rule": ("return x\n", "return x.with_shape((*x.shape, 1))\n", "test_type_rule_is_the_reference"),
    "lowering": ('"mul", value, value', '"add", value, value', "test_expansion_or_lowering_is_the_reference"),
    "gradient": ("* 3.0", "* 2.0", "test_gradient_and_jvp_are_finite_differences"),
    "batching": ("return self(x)", "return self(x) + x", "test_batching_is_a_loop"),
}


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """One op per mistake, all in one run."""
    source = CUBE.replace("toy_cube", "toy_right")
    for i, (right, wrong, _) in enumerate(WRONG.values()):
        assert right in CUBE
        body = CUBE.replace(right, wrong, 1).replace("toy_cube", f"toy_wrong{i}")
        source += "\n" + body[body.index("@declare") :]
    done = generated_tests(tmp_path, source, "toy_")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED \S*::(\w+)\[(toy_\w+)-", done.stdout, re.M)
    assert not [name for _, name in failed if name == "toy_right"], done.stdout
    for i, (_, _, test) in enumerate(WRONG.values()):
        assert (test, f"toy_wrong{i}") in failed, done.stdout


def test_a_declaration_that_is_not_whole_is_refused() -> None:
    from rlx.ir.op import Op, declare, get_op

    with pytest.raises(
        TypeError, match="op 'toy_half' is not whole: it lacks ref, batch, lower, cost, samples, vjp"
    ):
        declare(type("toy_half", (Op,), {"name": "toy_half", "infer": lambda self, x: x}))
    with pytest.raises(TypeError, match="op 'exp' is declared twice"):
        declare(type(get_op("exp")))
    with pytest.raises(TypeError, match="an op declaration needs a name"):
        declare(type("nameless", (Op,), {}))
