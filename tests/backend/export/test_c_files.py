"""The files of an export to C: compiled by gcc, linked in every way, run as programs of their own."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import rlx
from exported_programs import Example, built, feed_files
from machines import to_execute
from rlx import ops
from rlx.export.errors import Code
from rlx.ir.graph import Graph, Node
from rlx.target.cpu import resolve, runs_here


@pytest.fixture(autouse=True)
def needs_gcc(require) -> None:  # type: ignore[no-untyped-def]
    require("gcc")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def encoder(name: str = "encoder", seed: int = 0) -> Graph:
    """An encoder layer: attention and a product, each with a norm."""
    g = Graph(name)
    x = g.input("x", ("batch", "seq", 32), "f32")
    mask = g.input("mask of tokens", ("batch", "seq"), "bool")
    number = iter(range(100))

    def param(*shape: int) -> Node:
        i = next(number)
        return g.param(f"w{i}", shape, "f32", value=0.3 * values(*shape, seed=seed + i))

    q, k, v = (ops.transpose((x @ param(32, 32)).reshape("batch", "seq", 4, 8), (0, 2, 1, 3)) for _ in "qkv")
    hidden = ops.where(mask.reshape("batch", 1, 1, "seq"), 0.0, -1e9)
    scores = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)) * 8**-0.5 + hidden)
    heads = ops.transpose(scores @ v, (0, 2, 1, 3)).reshape("batch", "seq", 32)
    x = ops.layer_norm(x + heads @ param(32, 32), param(32), param(32))
    x = ops.layer_norm(x + ops.gelu(x @ param(32, 64)) @ param(64, 32), param(32), param(32))
    g.output("y", x)
    g.output("mean", ops.mean(x, axis=1))
    return g


def gcc(folder: Path, output: str, *arguments: str) -> Path:
    return built(folder, "gcc", output, *arguments)


def joined(program: rlx.CompiledProgram, feed: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(value.tobytes() for value in program.run(feed).values())


FEED = {"x": values(2, 7, 32), "mask of tokens": np.arange(14).reshape(2, 7) % 3 > 0}
BIND = {"batch": (1, 2), "seq": (1, 7)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[rlx.CompiledProgram, Path]:
    folder = tmp_path_factory.mktemp("encoder")
    program = rlx.compile(encoder(), threads=1)
    made = program.export(folder, bind=BIND)
    assert {"encoder.h", "libencoder.a", "libencoder.so", "encoder.weights", "main.c"} <= made.files.keys()
    return program, folder


def test_the_example_has_the_bits_of_the_program(exported: tuple[rlx.CompiledProgram, Path]) -> None:
    """With the static archive, with the objects and with the shared library."""
    program, folder = exported
    objects = [str(p) for p in (folder / "objects").iterdir()]
    for kind, files in (
        ("archive", ["libencoder.a"]),
        ("objects", objects),
        ("shared", ["-L.", "-lencoder", f"-Wl,-rpath,{folder}"]),
    ):
        main = gcc(folder, f"main_{kind}", "main.c", *files)
        run = subprocess.run(
            [main, "encoder.weights", *feed_files(folder, FEED.values())], cwd=folder, capture_output=True
        )
        assert run.returncode == 0 and not run.stderr, run.stderr
        assert run.stdout == joined(program, FEED), kind


def test_errors_have_a_text_and_end_the_example(exported: tuple[rlx.CompiledProgram, Path]) -> None:
    _, folder = exported
    main = gcc(folder, "errors", "main.c", "libencoder.a")
    run = subprocess.run([main, "nowhere"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("encoder: error 2: the weights cannot be opened")


def both_models(folder: Path, target: str) -> tuple[Path, bytes]:
    """A program of two models with the same kernels, one with its weights inside, and what it must print.
    Three threads run them at once, two of them the same model."""
    programs = {
        name: rlx.compile(encoder(seed=seed), threads=1, target=target)
        for name, seed in (("one", 0), ("two", 9))
    }
    for name, program in programs.items():
        program.export(folder / name, bind=BIND, name=name, embed=name == "two")
    assert not (folder / "two" / "two.weights").exists()
    (folder / "both.c").write_text(BOTH)
    files = [f"{name}/lib{name}.a" for name in programs]
    main = gcc(folder, "both", "both.c", "-g", "-D_POSIX_C_SOURCE=200809L", "-Ione", "-Itwo", *files)
    one, two = (joined(program, FEED) for program in programs.values())
    assert one != two
    return main, one + two + one


def test_two_models_in_one_program_and_weights_inside(tmp_path: Path) -> None:
    main, printed = both_models(tmp_path, "host")
    run = subprocess.run([main, *feed_files(tmp_path, FEED.values())], cwd=tmp_path, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


VALGRIND = ("valgrind", "--error-exitcode=9", "--leak-check=full", "-q")


def test_an_example_without_inputs_has_no_warning(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("gcc")
    g = Graph("constant")
    with g.building():
        window = ops.hamming_window(9)
    g.output("y", window)
    program = rlx.compile(g, threads=1)
    assert Example(program, tmp_path, {}).run({})["y"].tobytes() == program.run({})["y"].tobytes()


@pytest.mark.slow
def test_valgrind_finds_nothing_in_two_models(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("valgrind")
    main, printed = both_models(tmp_path, to_execute("x86-64-v3"))
    command = [*VALGRIND, main, *feed_files(tmp_path, FEED.values())]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert run.returncode == 0 and not run.stderr, run.stderr[-3000:]
    assert run.stdout == printed


@pytest.mark.slow
def test_valgrind_finds_nothing(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """No leak and no invalid access, as x86-64-v3: valgrind knows no AVX-512."""
    require("valgrind")
    program = rlx.compile(encoder(), threads=1)
    program.export(tmp_path, bind=BIND, target="x86-64-v3")
    main = gcc(tmp_path, "main", "main.c", "libencoder.a", "-g")
    command = [*VALGRIND, str(main), "encoder.weights"]
    run = subprocess.run([*command, *feed_files(tmp_path, FEED.values())], cwd=tmp_path, capture_output=True)
    assert run.returncode == 0, run.stderr[-3000:]
    wanted = rlx.compile(encoder(), threads=1, target="x86-64-v3")
    assert run.stdout == joined(wanted, FEED)


@pytest.mark.slow
def test_cmake_builds_the_example(  # type: ignore[no-untyped-def]
    exported: tuple[rlx.CompiledProgram, Path], require, tmp_path: Path
) -> None:
    require("cmake")
    _, folder = exported
    for command in (["cmake", "-S", str(folder), "-B", str(tmp_path)], ["cmake", "--build", str(tmp_path)]):
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    assert (tmp_path / "encoder_main").exists()


BOTH = """
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "one.h"
#include "two.h"

static const char **files;
static float out[3][2 * 7 * 32 + 2 * 32];

static void load(const char *path, void *to, size_t bytes) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fread(to, 1, bytes, file) != bytes) fprintf(stderr, "%s\\n", path);
    if (file != NULL) fclose(file);
}

#define RUN(name, path)                                                        \\
    static void *run_##name(void *argument) {                                  \\
        float *result = argument;                                              \\
        name *model;                                                           \\
        const int64_t sizes[] = {2, 7};                                        \\
        int code = name##_open(&model, path, 1);                               \\
        if (code == 0) code = name##_bind(model, sizes);                       \\
        load(files[1], name##_input(model, 0), sizeof(float) * 2 * 7 * 32);    \\
        load(files[2], name##_input(model, 1), 2 * 7);                         \\
        for (int i = 0; i < 50 && code == 0; i++) code = name##_run(model);    \\
        if (code != 0) fprintf(stderr, "%s\\n", name##_error(code));            \\
        memcpy(result, name##_output(model, 0), sizeof(float) * 2 * 7 * 32);   \\
        memcpy(result + 2 * 7 * 32, name##_output(model, 1), sizeof(float) * 2 * 32); \\
        name##_close(model);                                                   \\
        return code == 0 ? NULL : argument;                                    \\
    }

RUN(one, "one/one.weights")
RUN(two, NULL)

int main(int argc, char **argv) {
    pthread_t threads[3];
    void *failed[3];
    files = (const char **)argv;
    if (argc != 3) return 2;
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, i == 1 ? run_two : run_one, out[i]);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], &failed[i]);
    fwrite(out, 1, sizeof(out), stdout);
    return failed[0] != NULL || failed[1] != NULL || failed[2] != NULL;
}
"""


def test_amx_is_asked_for_before_it_is_used(tmp_path: Path) -> None:
    """A library for a machine that this one is not says so; it does not die of an unknown instruction."""
    name = "x86-64-v4-amx"
    if not runs_here(resolve("x86-64-v4-bf16-vnni")):
        pytest.skip("the code that opens a model has AVX-512")
    g = Graph("net")
    w = g.param("w", (64, 48), "i8", np.ones((64, 48), np.int8))
    g.output("y", ops.dot_general(g.input("x", (3, 64), "u8"), w, ((1,), (0,)), out_dtype="i32"))
    rlx.compile(g, threads=1).export(tmp_path, "c", name="net", target=name)
    library, model = ctypes.CDLL(str(tmp_path / "libnet.so")), ctypes.c_void_p()
    code = library.net_open(ctypes.byref(model), str(tmp_path / "net.weights").encode(), 1)
    assert code == (Code.OK if runs_here(resolve(name)) else Code.MACHINE)
    library.net_error.restype = ctypes.c_char_p
    assert b"AMX" in library.net_error(Code.MACHINE)
