"""Products by expert: only chosen matrices are read, and the bits of a row are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from machines import executable, on_targets
from rlx import ops
from rlx.errors import DTypeError, FormatError, KernelError
from rlx.ir.dtype import dtype
from rlx.kernel.nibbles import packed, unpacked
from rlx.llm import config as configs
from rlx.llm.decoder import build
from rlx.llm.hf import HfFolder
from rlx.llm.names import renamed
from rlx.reference.interpreter import evaluate

EXPERTS, OUT, SIZE = 9, 22, 96
FLOATS = ("f32", "f16", "bf16")
CODED = {"i4": 32, "i4 with zeros": 16, "i8": 32, "i8 with zeros": 16, "e2m1": 32}


def weights(kind: str, seed: int = 0) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Operands after x and choice, and attributes."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return [rng.standard_normal((EXPERTS, OUT, SIZE)).astype(dtype(kind).np)], {}
    coding, group = kind.split()[0], CODED[kind]
    factors = rng.uniform(0.1, 1, (2, EXPERTS, OUT, SIZE // group)).astype(np.float32)
    codes = rng.integers(0, 256, (EXPERTS, OUT, SIZE if coding == "i8" else SIZE // 2))
    codes = codes.astype(np.uint8 if coding != "i8" else np.int8)
    return [codes, *factors[: 1 + ("zeros" in kind)]], {"coding": coding, "group": group}


def graph(kind: str, chosen: int = 2, repeated: bool = True) -> rlx.Graph:
    g = rlx.Graph("experts")
    x = g.input("x", ("n", SIZE) if repeated else ("n", chosen, SIZE), "f32")
    parts, attrs = weights(kind)
    params = [g.param(f"w{i}", p.shape, dtype(p.dtype).name, value=p) for i, p in enumerate(parts)]
    g.output("y", ops.expert_matmul(x, g.input("choice", ("n", chosen), "i64"), *params, **attrs))
    return g


def rows(count: int, seed: int = 1, chosen: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, SIZE)).astype(np.float32)
    return {"x": x, "choice": rng.integers(0, EXPERTS, (count, chosen))}


@on_targets(executable())
@pytest.mark.parametrize("kind", [*FLOATS, *CODED])
def test_a_row_is_computed_as_if_it_were_alone(kind: str, target: Any) -> None:
    g, feed = graph(kind), rows(61)
    programs = [rlx.compile(g, target=target.name, threads=n) for n in (1, 2)]
    assert not programs[0].stats["host_thunks"]
    found = programs[0].run(feed)["y"]
    want = evaluate(g, feed)["y"]
    assert np.abs(found - want).max() < 1e-6 * np.abs(want).max() * np.sqrt(SIZE)
    np.testing.assert_array_equal(programs[1].run(feed)["y"], found, "threads")
    for start, stop in ((0, 1), (3, 4), (5, 9), (10, 40), (60, 61)):
        part = {name: value[start:stop] for name, value in feed.items()}
        np.testing.assert_array_equal(programs[0].run(part)["y"], found[start:stop])


@pytest.mark.parametrize("value", [-1, EXPERTS, 1 << 40])
def test_experts_that_do_not_exist_are_refused(value: int) -> None:
    feed = rows(3)
    feed["choice"][1, 1] = value
    for work in (rlx.compile(graph("f32")).run, lambda given: evaluate(graph("f32"), given)):
        with pytest.raises(KernelError, match="out of range"):
            work(feed)


def test_strides() -> None:
    """Operands that are views, and rows that differ among the choices of a token."""
    g, rng = rlx.Graph("strided"), np.random.default_rng(0)
    shapes = {"x": (SIZE, 2, 7), "choice": (2, 7), "w": (SIZE, OUT, EXPERTS)}
    given = {name: g.input(name, s, "i64" if name == "choice" else "f32") for name, s in shapes.items()}
    g.output("y", ops.expert_matmul(*(ops.transpose(value) for value in given.values())))
    feed = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    feed["choice"] = rng.integers(0, EXPERTS, shapes["choice"])
    program = rlx.compile(g)
    assert not program.stats["host_thunks"]
    np.testing.assert_allclose(program.run(feed)["y"], evaluate(g, feed)["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("coding", ["i4", "e2m1"])
def test_codes_survive_packing(coding: str) -> None:
    codes = unpacked(np.arange(256, dtype=np.uint8).reshape(2, 128), coding)
    np.testing.assert_array_equal(unpacked(packed(codes, coding), coding), codes)


TOUCHED = """
import ctypes, mmap
import numpy as np
import rlx
from rlx import ops

experts, out, size, count = 64, 8, 512, 40
room = mmap.mmap(-1, experts * out * size * 4)  # four pages for each expert
w = np.frombuffer(room, np.float32).reshape(experts, out, size)
w[:] = np.random.default_rng(0).standard_normal(w.shape)
choice = np.random.default_rng(1).choice([3, 17, 63], (count, 2))
x = np.ones((count, size), np.float32)
want = np.einsum("tk,tcnk->tcn", x, w[choice])
protect = ctypes.CDLL(None, use_errno=True).mprotect
for e in set(range(experts)) - set(choice.ravel().tolist()):
    assert protect(ctypes.c_void_p(w[e].ctypes.data), ctypes.c_size_t(w[e].nbytes), 0) == 0
g = rlx.Graph("touched")
operands = g.input("x", ("n", size), "f32"), g.input("choice", ("n", 2), "i64"), g.input("w", w.shape, "f32")
g.output("y", ops.expert_matmul(*operands))
program = rlx.compile(g, threads=2)
for rows in (1, count):
    got = program.run({"x": x[:rows], "choice": choice[:rows], "w": w})["y"]
    np.testing.assert_allclose(got, want[:rows], rtol=1e-4, atol=1e-4)
print("only", len(set(choice.ravel().tolist())), "of", experts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory that cannot be read is made by mprotect")
def test_matrices_that_nobody_chose_are_not_read() -> None:
    """Reading one of them would end the process: their memory cannot be read."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", TOUCHED], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "only 3 of 64\n"), done.stderr


def test_the_work_is_that_of_the_chosen() -> None:
    """However many experts there are."""
    costs = []
    for count in (4, 400):
        g = rlx.Graph("work")
        x, choice = g.input("x", (10, SIZE), "f32"), g.input("choice", (10, 2), "i64")
        y = ops.expert_matmul(x, choice, g.param("w", (count, OUT, SIZE), "f32"))
        costs.append(y.op.cost(*(o.tensor for o in y.operands)))
    assert costs == [2 * 10 * 2 * SIZE * OUT] * 2


def test_what_other_experts_are_does_not_show(tmp_path: Path) -> None:
    """Experts that no token of a text chooses may be NaN: logits are the same bits."""
    config = {**tiny.CONFIGS["qwen3moe"], "num_experts": 24, "num_hidden_layers": 2}
    given, tokens = tiny.random_weights(config), [3, 17, 41, 5, 90]
    spoiled = dict(given)
    for i in range(2):
        for e in range(24):
            names = [name for name in given if f"layers.{i}.mlp.experts.{e}." in name]
            trial = {**spoiled, **{name: np.full_like(given[name], np.nan) for name in names}}
            if np.isfinite(tiny.logits(config, trial, tokens)).all():
                spoiled = trial
    assert sum(np.isnan(value).any() for value in spoiled.values()) > 3 * 20
    found = []
    for name, values in (("given", given), ("spoiled", spoiled)):
        folder = HfFolder(tiny.write_folder(tmp_path / name, config, values))
        program = rlx.compile(build(configs.from_hf("x", folder.config), renamed(folder.tensors), 32))
        assert not program.stats["host_thunks"]
        feed = {"past": 0, "tokens": np.array(tokens), "wanted": np.arange(len(tokens))}
        found.append(program.stream().step(feed)["logits"])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("which", ["scales", "zeros"])
def test_factors_that_f32_does_not_hold_are_refused(which: str) -> None:
    """The reference rounded them to f32; the kernel did not compile."""
    factors = {"scales": np.ones((3, 7, 1), np.float32), which: np.ones((3, 7, 1))}
    codes = np.ones((3, 7, 16), np.int8)
    with pytest.raises(DTypeError, match="must be f32, f16 or bf16"):
        rlx.jit(lambda x: ops.expert_matmul(x, [[1]], codes, **factors, coding="i8", group=16))(
            np.ones((1, 16), np.float32)
        )


def test_folders_without_an_expert_are_refused(tmp_path: Path) -> None:
    config = tiny.CONFIGS["qwen3moe"]
    values = tiny.random_weights(config)
    del values["model.layers.1.mlp.experts.2.up_proj.weight"]
    folder = HfFolder(tiny.write_folder(tmp_path, config, values))
    with pytest.raises(FormatError, match=r"the experts of 'blk\.1\.ffn_up_exps\.weight' are not 5 matrices"):
        renamed(folder.tensors)
