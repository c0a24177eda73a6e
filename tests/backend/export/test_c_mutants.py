"""An exported program with files and arguments that are wrong: an error code with a text, and never a crash.

A program in C opens mutants of a file of weights and calls every function with wild numbers. What it prints
is compared with what must come out; what it must not do, valgrind finds (`-m slow`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import rlx
from exported_programs import built
from machines import to_execute
from rlx import ops
from rlx.export.errors import TEXTS, Code
from rlx.ir.graph import Graph

TURNS = 6  # calls of bind for each model that opens
MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net.h"

static uint64_t state;

static uint64_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state >> 8;
}

static int64_t number(void) {
    const int64_t wild[] = {-1, 0, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 62, -8, 4096};
    return next() % 3 == 0 ? wild[next() % 8] : (int64_t)(next() % 14);
}

static void touch(net *model) {
    int which = (int)number();
    net *given = next() % 8 == 0 ? NULL : model;
    const void *found[] = {net_input(given, which), net_output(given, which), net_input_shape(given, which),
                           net_output_shape(given, which)};
    for (int i = 0; i < 4; i++) {
        int known = given != NULL && which >= 0 && which < (i % 2 == 0 ? 2 : 1);
        if ((found[i] != NULL) != known) printf("odd: %d of %d\n", i, which);
    }
}

int main(int argc, char **argv) {
    state = strtoull(argv[1], NULL, 10);
    for (int i = 2; i < argc; i++) {
        const int counts[] = {1, 1, 1, 2, 3, 0, -1};
        int threads = counts[next() % 7], valid = 1;
        net *model = (net *)&state;
        int code = net_open(&model, argv[i], threads);
        printf("open %d: %d %s\n", threads, code, net_error(code));
        if ((model == NULL) != (code != 0)) printf("odd: a model with code %d\n", code);
        touch(model);
        for (int turn = 0; code == 0 && turn < TURNS; turn++) {
            int64_t sizes[] = {number(), number()};
            int none = next() % 16 == 0;
            int bound = net_bind(model, none ? NULL : sizes);
            printf("bind %d %lld %lld: %d %s\n", none, (long long)sizes[0], (long long)sizes[1], bound,
                   net_error(bound));
            touch(model);
            if (bound == 0) {
                float *x = net_input(model, 0);
                int64_t *picks = net_input(model, 1), wild = next() % 2;
                valid = 1;
                for (int64_t j = 0; j < sizes[0] * sizes[1]; j++) x[j] = (float)j;
                for (int64_t j = 0; j < sizes[1]; j++) {
                    picks[j] = wild ? number() : (int64_t)(next() % (uint64_t)sizes[1]);
                    valid &= picks[j] >= -sizes[1] && picks[j] < sizes[1];
                }
            }
            int ran = net_run(model);
            printf("run %d: %d %s\n", valid, ran, net_error(ran));
        }
        net_close(NULL);
        net_close(model);
    }
    return 0;
}
"""
HIGH = {"k": 12, "n": 9}


def network() -> Graph:
    """A product, a guard on sizes, and an index that data choose."""
    g = Graph("net")
    x, picks = g.input("x", ("n", "k"), "f32"), g.input("picks", ("n",), "i64")
    w = g.param("w", (24, 16), "f32", value=np.linspace(-1, 1, 384, dtype=np.float32).reshape(24, 16))
    rows = ops.softmax(ops.reshape(x, (-1, 24)) @ w)
    g.output("y", ops.sum(rows) + ops.sum(ops.gather(x, picks, axis=0)))
    return g


def mutants(data: bytes, count: int) -> list[bytes]:
    """Changed files; the first one is as it was written."""
    rng, made = np.random.default_rng(0), [data]
    wild = [0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, len(data), len(data) + 1]
    while len(made) < count:
        mutant, at = bytearray(data), int(rng.integers(len(data)))
        kind = rng.integers(7)
        if kind == 0:
            mutant[at] ^= 1 << rng.integers(8)
        elif kind == 1:
            del mutant[at:]
        elif kind == 2:  # a word of the head
            word = 8 * int(rng.integers(4))
            mutant[word : word + 8] = wild[rng.integers(len(wild))].to_bytes(8, "little")
        elif kind == 3:
            mutant[at : at + 64] = bytes(len(mutant[at : at + 64]))
        elif kind == 4:
            mutant[at:at] = bytes(int(rng.integers(1, 100)))
        elif kind == 5:
            mutant += bytes(int(rng.integers(1, 5000)))
        else:
            mutant = bytearray(rng.integers(0, 256, int(rng.integers(0, 9000)), np.uint8).tobytes())
        made.append(bytes(mutant))
    return made


def is_same(mutant: bytes, data: bytes) -> bool:
    """Whether all that is read of a file is as it was: not the rest of the head, nor what comes behind."""
    return len(mutant) >= len(data) and mutant[:32] == data[:32] and mutant[4096 : len(data)] == data[4096:]


def check(lines: Sequence[str], data: bytes, files: Sequence[bytes]) -> None:
    """What the program printed is what it must print."""
    known = {str(code.value): text for code, text in TEXTS.items()}
    lines = list(lines)
    refused = {"open": 0, "bind": 0, "run": 0}
    for mutant in files:
        (what, threads), code, text = parsed(lines.pop(0))
        assert what == "open" and text == known[code]
        good = is_same(mutant, data) and int(threads) > 0
        wanted = {Code.OK} if good else {Code.DAMAGED, Code.TRUNCATED, Code.VERSION}
        assert int(code) in (wanted if int(threads) > 0 else {Code.ARGUMENT}), (code, len(mutant))
        refused["open"] += int(code) != 0
        bound = False
        for _ in range(TURNS if good else 0):
            (what, none, k, n), code, text = parsed(lines.pop(0))
            fits = 0 < int(k) <= HIGH["k"] and 0 < int(n) <= HIGH["n"] and int(k) * int(n) % 24 == 0
            assert what == "bind" and (code == "0") == (none == "0" and fits), (k, n, code)
            assert text and text != "this code is not known"
            bound |= code == "0"
            refused["bind"] += code != "0"
            (what, valid), code, text = parsed(lines.pop(0))
            wanted = {Code.OK if valid == "1" else Code.INDEX} if bound else {Code.NOT_BOUND}
            assert what == "run" and int(code) in wanted and text == known[code]
            refused["run"] += code != "0"
    assert not lines and all(refused.values()), refused


def parsed(line: str) -> tuple[list[str], str, str]:
    """ "bind 0 3 4: 5 a text" -> (["bind", "0", "3", "4"], "5", "a text")."""
    head, _, rest = line.partition(": ")
    code, _, text = rest.partition(" ")
    return head.split(), code, text


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    program = rlx.compile(network(), threads=1, target=to_execute("x86-64-v3"))
    program.export(folder, bind={name: (1, high) for name, high in HIGH.items()}, name="net")
    (folder / "mutants.c").write_text(MAIN)
    return folder


@pytest.mark.parametrize(
    ("count", "before"),
    [
        (100, ()),
        pytest.param(500, (), marks=pytest.mark.slow),
        pytest.param(
            500, ("valgrind", "-q", "--error-exitcode=9", "--leak-check=full"), marks=pytest.mark.slow
        ),
    ],
    ids=["sample", "all", "valgrind"],
)
def test_mutants_of_files_and_arguments(  # type: ignore[no-untyped-def]
    exported: Path, require, count: int, before: Sequence[str]
) -> None:
    for part in ("gcc", *before[:1]):
        require(part)
    main = built(exported, "gcc", "mutants", f"-DTURNS={TURNS}", "-g", "mutants.c", "libnet.a")
    data = (exported / "net.weights").read_bytes()
    files = mutants(data, count)
    for number, mutant in enumerate(files):
        (exported / f"{number}.weights").write_bytes(mutant)
    names = [f"{number}.weights" for number in range(count)]
    command = [*before, str(main), str(count + 1), *names]
    done = subprocess.run(command, cwd=exported, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    check(done.stdout.splitlines(), data, files)
