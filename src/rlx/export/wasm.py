"""Export to WebAssembly: a module, its weights, and an ES module that loads and runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rlx import progress
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import compile_linked
from rlx.config import bytes_text
from rlx.errors import UnsupportedError
from rlx.export.code import PUBLIC, CodeWriter
from rlx.export.layout import WEIGHT_HEADER
from rlx.export.prepared import Prepared
from rlx.export.wasm_link import PAGE, Linked, link
from rlx.export.web_code import for_engines
from rlx.export.web_files import declarations, script
from rlx.export.weights import write_weights
from rlx.ir.weights import round_up

MOST_BYTES = 1 << 31
"""What a module may take: addresses beyond are negative to some engines."""

# LLVM calls this for products of 128 bits, which WebAssembly lacks: low words, then the upper halves.
_PRODUCT = """
define void @__multi3(ptr %result, i64 %a, i64 %a_high, i64 %b, i64 %b_high) {
  %a0 = and i64 %a, 4294967295
  %a1 = lshr i64 %a, 32
  %b0 = and i64 %b, 4294967295
  %b1 = lshr i64 %b, 32
  %p00 = mul i64 %a0, %b0
  %p01 = mul i64 %a0, %b1
  %p10 = mul i64 %a1, %b0
  %p11 = mul i64 %a1, %b1
  %carried = lshr i64 %p00, 32
  %middle = add i64 %p10, %carried
  %m0 = and i64 %middle, 4294967295
  %m1 = lshr i64 %middle, 32
  %second = add i64 %p01, %m0
  %s1 = lshr i64 %second, 32
  %upper = add i64 %p11, %m1
  %high = add i64 %upper, %s1
  %cross = mul i64 %a, %b_high
  %crossed = mul i64 %a_high, %b
  %with = add i64 %high, %cross
  %all = add i64 %with, %crossed
  %low = mul i64 %a, %b
  store i64 %low, ptr %result
  %next = getelementptr i64, ptr %result, i64 1
  store i64 %all, ptr %next
  ret void
}
"""


def module_of(program: Prepared, threaded: bool = False, also: Iterable[str] = ()) -> Linked:
    """The WebAssembly module of a program. Its memory, which is its own or shared by threads, is grown by the
    caller. `also` are kernels that it exports besides."""
    features = (*program.target.features, *(["atomics"] if threaded else []))
    module = Module(replace(program.target, features=features))
    CodeWriter(program.tables, module, program.version, threaded).write()
    texts = [*map(for_engines, program.kernels), module.text()]
    if any("i128" in text for text in texts):
        texts.append(_PRODUCT)
    public = (*PUBLIC, "rlx_enlist", "rlx_worker") if threaded else PUBLIC
    exports = {name: name.removeprefix("rlx_") for name in public} | {name: name for name in also}
    made = link(compile_linked(texts, module.target), exports, MOST_BYTES // PAGE, shared=threaded)
    total = made.pages * PAGE + weight_bytes(program) + program.memory
    if total > MOST_BYTES:
        raise UnsupportedError(
            f"program {program.tables.name!r} needs {bytes_text(total)} ({bytes_text(weight_bytes(program))} "
            f"of weights and {bytes_text(program.memory)} of memory), but WebAssembly has "
            f"{bytes_text(MOST_BYTES)}; bind smaller sizes or use weights of fewer bits"
        )
    return made


def weight_bytes(program: Prepared) -> int:
    """Bytes of the weights file."""
    return WEIGHT_HEADER + round_up(program.tables.spaces["weight"], 8)


def write_wasm(program: Prepared, folder: Path) -> None:
    """Write all files of an export to WebAssembly."""
    name = program.name
    progress.info("compiling %s.wasm: %d kernels", name, len(program.kernels))
    (folder / f"{name}.wasm").write_bytes(module_of(program).data)
    progress.info("compiling %s.threads.wasm: %d kernels", name, len(program.kernels))
    threaded = module_of(program, threaded=True)
    (folder / f"{name}.threads.wasm").write_bytes(threaded.data)
    write_weights(folder / f"{name}.weights", program.tables, program.version)
    (folder / f"{name}.mjs").write_text(
        script(program, weight_bytes(program), (threaded.pages, MOST_BYTES // PAGE)), encoding="utf-8"
    )
    (folder / f"{name}.d.mts").write_text(declarations(program), encoding="utf-8")
