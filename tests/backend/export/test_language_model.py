"""A language model without Python, where users run it: a prompt, then single tokens on keys that it kept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import rlx
from exported_programs import built
from machines import to_execute
from node_programs import Node
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import web_targets

pytestmark = pytest.mark.slow

PROMPT, NEW = 8, 3
RANGES = {"past": (0, 63), "new": (1, PROMPT), "wanted": (0, 1)}
TOKENS = np.random.default_rng(0).integers(0, 1000, PROMPT + NEW)

# Arguments of both: how many threads, how many tokens are the prompt, and all tokens. Logits come out.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include "net.h"

int main(int argc, char **argv) {
    net *model;
    int code = net_open(&model, "net.weights", atoi(argv[1]));
    for (int64_t past = 0, count = atoi(argv[2]); code == 0 && past + 3 < argc; past += count, count = 1) {
        int64_t sizes[3];
        sizes[NET_SIZE_PAST] = past, sizes[NET_SIZE_NEW] = count, sizes[NET_SIZE_WANTED] = 1;
        if ((code = net_bind(model, sizes)) != 0) break;
        int64_t *tokens = net_input(model, NET_INPUT_TOKENS), *wanted = net_input(model, NET_INPUT_WANTED);
        for (int64_t i = 0; i < count; i++) tokens[i] = atoll(argv[3 + past + i]);
        *wanted = count - 1;
        if ((code = net_run(model)) != 0) break;
        const int64_t *shape = net_output_shape(model, NET_OUTPUT_LOGITS);
        fwrite(net_output(model, NET_OUTPUT_LOGITS), 4, shape[1], stdout);
    }
    if (code != 0) fprintf(stderr, "%s", net_error(code));
    net_close(model);
    return code;
}
"""
SCRIPT = """
import { load } from "./net.mjs";
const [threads, prompt, ...tokens] = process.argv.slice(2).map(Number);
const model = await load(undefined, { threads });
if (model.threads !== threads) throw new Error(`${model.threads} threads`);
for (let past = 0, count = prompt; past < tokens.length; past += count, count = 1) {
  const feed = {
    past: new Int8Array(0),
    tokens: BigInt64Array.from(tokens.slice(past, past + count), BigInt),
    wanted: BigInt64Array.of(BigInt(count - 1)),
  };
  console.log(JSON.stringify([...model.run(feed, { past, new: count, wanted: 1 }).logits]));
}
model.close();
"""
Load = Callable[..., CompiledProgram]


@pytest.fixture(scope="module")
def load(zoo_path: Callable[..., Path]) -> Load:
    def loaded(target: str = "host") -> CompiledProgram:
        model = rlx.llm.load(zoo_path("smollm2"), context=64, threads=1, target=target)
        return model.program

    return loaded


def steps(program: CompiledProgram) -> Iterator[np.ndarray]:
    """The logits of the program itself."""
    stream, past, count = program.stream(), 0, PROMPT
    while past < len(TOKENS):
        feed = {
            "past": np.zeros((past, 0), np.int8),
            "tokens": TOKENS[past : past + count],
            "wanted": np.array([count - 1]),
        }
        yield stream.step(feed)["logits"][0]
        past, count = past + count, 1


def said(folder: Path, *command: str, threads: int) -> bytes:
    """What a driver writes."""
    numbers = [str(n) for n in (threads, PROMPT, *TOKENS)]
    done = subprocess.run([*command, *numbers], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    return done.stdout


def is_close(got: np.ndarray, want: np.ndarray) -> bool:
    """Other vectors sum in another order."""
    return bool(np.abs(got - want).max() < 1e-2 * np.abs(want).max())


def in_c(program: CompiledProgram, folder: Path, target: str | None = None) -> None:
    program.export(folder, "c", bind=RANGES, name="net", target=target)
    (folder / "driver.c").write_text(DRIVER)


@pytest.mark.parametrize(("compiler", "target"), [("gcc", "x86-64-v3"), ("clang", "x86-64")])
def test_in_c_with_the_bits_of_the_program(
    compiler: str, target: str, load: Load, require: Callable[[str], None], tmp_path: Path
) -> None:
    require(compiler)
    program = load(to_execute(target))
    in_c(program, tmp_path)
    made = built(tmp_path, compiler, "driver", "driver.c", "libnet.a")
    want = b"".join(logits.tobytes() for logits in steps(program))
    for threads in (1, 2):
        assert said(tmp_path, str(made), threads=threads) == want


@pytest.mark.parametrize(("target", "cpu"), [("aarch64", "cortex-a53"), ("aarch64-dotprod", "cortex-a76")])
def test_on_aarch64(
    target: str, cpu: str, load: Load, require: Callable[[str], None], tmp_path: Path
) -> None:
    require("aarch64")
    program = load()
    in_c(program, tmp_path, target)
    made = built(tmp_path, "aarch64-linux-gnu-gcc", "driver", "-static", "driver.c", "libnet.a")
    raw = said(tmp_path, "qemu-aarch64-static", "-cpu", cpu, str(made), threads=2)
    got = np.frombuffer(raw, np.float32).reshape(1 + NEW, -1)
    assert all(map(is_close, got, steps(program)))


@pytest.mark.parametrize("target", [t.name for t in web_targets()])
def test_in_node(target: str, load: Load, require: Callable[[str], None], tmp_path: Path) -> None:
    require("node")
    program = load()
    program.export(tmp_path, "wasm", bind=RANGES, name="net", target=target)
    (tmp_path / "driver.mjs").write_text(SCRIPT)
    run = partial(said, tmp_path, "node", *Node.flags(), "driver.mjs")
    lines = run(threads=1)
    got = [np.array(json.loads(line), np.float32) for line in lines.splitlines()]
    assert all(map(is_close, got, steps(program))) and len(got) == 1 + NEW
    assert run(threads=2) == lines  # all bits: JSON has the shortest digits that give a number back
