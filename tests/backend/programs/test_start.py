"""How little is done again: a new size compiles nothing, and a program from a file loads no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

import rlx
from measured import units
from rlx.codegen.cpu import build
from rlx.codegen.native import jit
from rlx.config import CACHE
from rlx.ir.text.files import save
from rlx.runtime.program import CompiledProgram
from rlx.zoo.minilm import build as encoder

CONFIG = {"num_attention_heads": 2, "hidden_size": 32, "layer_norm_eps": 1e-12, "num_hidden_layers": 6}
MOST_UNITS = 5  # of CPU time for a new size, the run itself included: about 2; code would take some hundreds


def weights() -> dict[str, np.ndarray]:
    """Random weights of MiniLM's layers, but narrow."""
    rng = np.random.default_rng(0)
    hidden, inner = 32, 64
    shapes = {
        "embeddings.word_embeddings.weight": (50, hidden),
        "embeddings.position_embeddings.weight": (64, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    linear = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(CONFIG["num_hidden_layers"]):  # type: ignore[arg-type]
        layer = f"encoder.layer.{i}"
        for name, shape in linear.items():
            shapes[f"{layer}.{name}.weight"], shapes[f"{layer}.{name}.bias"] = shape, shape[:1]
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return rlx.compile(encoder(CONFIG, weights()), threads=1)


def run(program: CompiledProgram, batch: int, length: int) -> np.ndarray:
    ids = np.arange(batch * length).reshape(batch, length) % 50
    mask = np.ones((batch, length), np.int64)
    return np.asarray(program.run({"input_ids": ids, "attention_mask": mask})["sentence_embedding"])


def test_a_new_sequence_length_calls_neither_the_generator_nor_llvm(
    program: CompiledProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(program, 1, 16)

    def refuse(*_: object) -> None:
        raise AssertionError("a new size wrote a kernel")

    monkeypatch.setattr(build, "emit_kernel", refuse)
    compiles, key = jit.llvm_compiles, program.lir.code_key
    lengths = iter(range(17, 33))
    spent = units(lambda: run(program, 1, next(lengths)), rounds=16)
    assert run(program, 3, 7).shape == (3, 32)
    assert jit.llvm_compiles == compiles and program.lir.code_key == key
    assert program.lir.specialize({"batch": 1, "seq": 33}).code_key == key
    assert spent < MOST_UNITS
    np.testing.assert_array_equal(run(program, 1, 16), first)


LOAD = """
import sys, numpy as np, rlx
program = rlx.load(sys.argv[1])
program(*(np.ones((1, 5), node.dtype.np) for node in program.inputs))
print(*sorted(m for m in sys.modules if m.partition(".")[0] in ("rlx", "llvmlite")))
"""

COMPILER = ("rlx.rewrite", "rlx.fuse", "rlx.cost", "rlx.ops", "rlx.frontend", "rlx.kernel.compose")


def loops() -> rlx.Graph:
    """A loop over rows, with a branch inside that has a constant and a guard of its own."""
    g = rlx.Graph("loops")
    rows, more = g.input("rows", ("n", 5), "f32"), g.input("more", ("m", 5), "f32")

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        table = np.arange(5, dtype=np.float32)
        same = rlx.ops.cond(
            rlx.ops.sum(row) > 0, lambda: rlx.ops.sum(rows * more, axis=0), lambda: row * table
        )
        return carry + same, carry

    g.output("last", rlx.ops.scan(step, rlx.ops.zeros((5,), "f32"), rows)[0])
    return g


@pytest.mark.parametrize("kind", ["encoder", "loops"])
def test_a_program_from_a_file_loads_no_compiler(kind: str, program: CompiledProgram, tmp_path: Path) -> None:
    file = tmp_path / "program.rlx"
    (program if kind == "encoder" else rlx.compile(loops())).save(file)
    command = [sys.executable, "-c", LOAD, str(file)]
    # With an empty cache: pool and driver come from the file, too.
    env = {**os.environ, CACHE.name: str(tmp_path / "cache")}
    loaded = subprocess.run(command, check=True, stdout=PIPE, text=True, env=env).stdout.split()
    assert "rlx.runtime.program" in loaded
    assert not [m for m in loaded if m.startswith((*COMPILER, "llvmlite"))]


COLD = """
import sys, numpy as np, rlx
from rlx.codegen.native import jit
program = rlx.load(sys.argv[1], background=False)
compiled = jit.llvm_compiles
ids = np.ones((1, 5), np.int64)
program(ids, ids)
print(compiled, jit.llvm_compiles - compiled)
"""


def test_the_first_run_of_a_cold_start_compiles_nothing(tmp_path: Path) -> None:
    """Pool and driver are made while LLVM works on the kernels, which come in several modules."""
    file = tmp_path / "encoder.txt"
    save(encoder(CONFIG, weights()), file)
    env = {**os.environ, CACHE.name: str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", COLD, str(file)], check=True, stdout=PIPE, text=True, env=env
    )
    compiled, later = map(int, done.stdout.split())
    assert compiled > 3 and later == 0
