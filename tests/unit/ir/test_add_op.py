"""Adding an op is writing one declaration: the generated tests find it, and find what is wrong with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEANING = "test_type_rule_and_expansion_or_lowering_are_the_reference"
GENERATED = ("ops/test_ops_generated.py", "ir/test_text.py", "ir/test_verify.py")

CUBE = '''
from rlx.kernel.form import Map
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.kernel.scalar import axes, call, load
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


WRONG = {
    "type rule": ("return x\n", "return x.with_shape((*x.shape, 1))\n", MEANING),
    "lowering": ('"mul", value, value', '"add", value, value', MEANING),
    "gradient": ("* 3.0", "* 2.0", "test_gradient_and_jvp_are_finite_differences"),
    "batching": ("return self(x)", "return self(x) + x", "test_batching_is_a_loop"),
}


def toy_module() -> str:
    """The example, the cube, and the cube with one mistake each."""
    source = example() + CUBE
    for i, (right, wrong, _) in enumerate(WRONG.values()):
        assert right in CUBE
        body = CUBE.replace(right, wrong, 1).replace("toy_cube", f"toy_wrong{i}")
        source += "\n" + body[body.index("@declare") :]
    return source


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[str, str, str]]:
    """(PASSED or FAILED, test, op) -> of how many cases: what is generated for ops that RLX does not know."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_module.py").write_text(toy_module(), encoding="utf-8")
    files = [str(ROOT / "tests" / "unit" / file) for file in GENERATED]
    command = [sys.executable, "-m", "pytest", "-rA", "--tb=no", "-p", "no:cacheprovider", "-p", "toy_module"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    done = subprocess.run(
        [*command, *files, "-k", "toy_ or soft_cap"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # some tests failed, as they should
    found: Counter[tuple[str, str, str]] = Counter()
    for verdict, test, op, cases in re.findall(
        r"^(PASSED|FAILED) \S*::(\w+)\[(\w+)-(\d+)\]", done.stdout, re.M
    ):
        found[verdict, test, op] += int(cases)  # one test for all of them
    return found


@pytest.mark.parametrize(("name", "samples"), [("soft_cap", 4), ("toy_cube", 3)])
def test_a_declaration_is_all_it_takes(
    name: str, samples: int, outcomes: Counter[tuple[str, str, str]]
) -> None:
    assert not [test for verdict, test, op in outcomes if op == name and verdict == "FAILED"]
    for test in ("test_every_op_reads_back", "test_every_op_is_legal_where_it_belongs", MEANING):
        assert outcomes["PASSED", test, name] == samples, test
    for test in ("test_gradient_and_jvp_are_finite_differences", "test_batching_is_a_loop"):
        assert outcomes["PASSED", test, name] >= 1, test


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_wrong_is_found(mistake: str, outcomes: Counter[tuple[str, str, str]]) -> None:
    number = list(WRONG).index(mistake)
    assert outcomes["FAILED", WRONG[mistake][2], f"toy_wrong{number}"] >= 1


def test_a_declaration_that_is_not_whole_is_refused() -> None:
    from rlx.ir.op import Op, declare, get_op

    with pytest.raises(
        TypeError, match="op 'toy_half' is incomplete: it lacks ref, batch, lower, cost, samples, vjp"
    ):
        declare(type("toy_half", (Op,), {"name": "toy_half", "infer": lambda self, x: x}))
    with pytest.raises(TypeError, match="op 'exp' is declared twice"):
        declare(type(get_op("exp")))
    with pytest.raises(TypeError, match="an op declaration needs a name"):
        declare(type("nameless", (Op,), {}))
