"""Objects for AArch64 in memory: mapped and relocated here, run at the same address by QEMU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.native.elf import MappedObject, ObjectFile, is_loadable, relocate_arm
from rlx.codegen.native.jit import compile_object
from rlx.target.cpu import resolve

RUN = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
typedef void kernel(void *args, long thread, long threads, long part);
int main(int argc, char **argv) {
    char *base = (char *)strtoul(argv[1], 0, 16);
    size_t bytes = strtoul(argv[2], 0, 10);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    char *at = mmap(base, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    FILE *code = fopen("code.bin", "rb");
    if (at != base || fread(at, 1, bytes, code) != bytes) return 2;
    if (mprotect(at, bytes, PROT_READ | PROT_EXEC)) return 4;
    static long error, args[64];
    static float x[6 * 40], w[40 * 48 * 2], y[6 * 48], scratch[1 << 16];
    FILE *in = fopen("in.bin", "rb");
    if (fread(x, 4, 240, in) != 240 || fread(w, 1, sizeof(w), in) == 0) return 3;
    args[0] = (long)&error; args[1] = (long)scratch; args[2] = sizeof(scratch);
    args[3] = (long)x; args[4] = (long)w; args[5] = (long)y; args[6] = 6;
    ((kernel *)strtoul(argv[3], 0, 16))(args, 0, 1, 0);
    fwrite(y, 4, 6 * 48, stdout);
    return (int)error + 0 * argc;
}
"""


def test_fields_of_instructions() -> None:
    """Each kind of field, for addresses before and after."""
    for kind, code, target, here, want in (
        (275, 0x90000000, 0x12345678, 0x10000000, 0x90011A20 | (0x2345 & 3) << 29),
        (277, 0x91000000, 0x12345678, 0, 0x91000000 | 0x678 << 10),
        (286, 0xF9400000, 0x12345678, 0, 0xF9400000 | (0x678 >> 3) << 10),
        (299, 0x3DC00000, 0x12345670, 0, 0x3DC00000 | (0x670 >> 4) << 10),
        (282, 0x14000000, 0x1000, 0x2000, 0x14000000 | 0x3FFFC00),
    ):
        data = bytearray(code.to_bytes(4, "little"))
        relocate_arm(data, 0, kind, target, here)
        assert int.from_bytes(data, "little") == want, kind
    with pytest.raises(ValueError, match="out of reach"):
        relocate_arm(bytearray(4), 0, 283, 1 << 40, 0)
    with pytest.raises(ValueError, match="relocation 999"):
        relocate_arm(bytearray(4), 0, 999, 0, 0)


def test_objects_of_other_machines_are_left_to_llvm() -> None:
    text = "define void @f() { ret void }"
    assert is_loadable(compile_object(text, resolve("host")))
    assert not is_loadable(compile_object(text, resolve("aarch64" if resolve("host").x86 else "x86-64")))


@pytest.mark.slow
def test_a_mapped_kernel_runs_under_qemu(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A matmul with an epilogue: calls, tables of functions and constants, relocated by our own loader."""
    require("aarch64")
    rng = np.random.default_rng(0)
    w = rng.normal(size=(40, 48)).astype(np.float32)
    g = rlx.Graph("product")
    g.output("y", ops.gelu(g.input("x", ("n", 40), "f32") @ g.param("w", (40, 48), "f32", value=w)))
    lir = plan(g, target="aarch64")
    made = build_kernels(lir, resolve("aarch64"))
    (kernel,) = made.kernels.values()
    data = compile_object(made.text, resolve("aarch64"))
    assert len({kind for _, _, kind, _, _ in ObjectFile(data).relocations()}) >= 3
    mapped = MappedObject(data)
    size = len(mapped._memory)
    (tmp_path / "code.bin").write_bytes(ctypes.string_at(mapped._base, size))
    x = rng.normal(size=(6, 40)).astype(np.float32)
    from rlx.runtime.weights import Weights

    (weight,) = Weights(lir).memory.values()
    (tmp_path / "in.bin").write_bytes(x.tobytes() + weight.tobytes())
    (tmp_path / "run.c").write_text(RUN)
    command = ["aarch64-linux-gnu-gcc", "-static", "-O1", "run.c", "-o", "run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    address = mapped.address(kernel.name)
    assert address is not None and kernel.dims == lir.mir.inputs[0].shape[:1]
    run = subprocess.run(
        ["qemu-aarch64-static", "./run", hex(mapped._base), str(size), hex(address)],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    got = np.frombuffer(run.stdout, np.float32).reshape(6, 48)
    np.testing.assert_allclose(got, rlx.compile(g)(x), rtol=2e-5, atol=2e-5)
