"""Export to C: header, objects, static archive, weights; a shared library where there is a linker."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlx import progress
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Compiling
from rlx.errors import CompileError
from rlx.export.archive import archive, data_object
from rlx.export.c_code import EMBEDDED, WEIGHTS_SYMBOL, write_c_functions
from rlx.export.c_files import cmake, example, header
from rlx.export.code import PUBLIC, CodeWriter
from rlx.export.names import renamed
from rlx.export.prepared import Prepared
from rlx.export.weights import weight_parts, write_weights
from rlx.system import SYSTEM
from rlx.target.cpu import Target

C_PUBLIC = (*PUBLIC, "rlx_open", "rlx_close")
_LINKERS = ("cc", "gcc", "clang", "ld.lld", "ld")


def objects_of(program: Prepared, embed: bool = False) -> list[bytes]:
    """The object files of a program; each may call functions of those before it."""
    tables, name = program.tables, program.name
    module = Module(program.target)
    CodeWriter(tables, module, program.version, threaded=True).write()
    write_c_functions(module, tables, embed)
    text = module.text()
    if embed:
        text = f"{EMBEDDED}\n{text}".replace(f"@{WEIGHTS_SYMBOL}", f"@{name}.weights")
    compiling = Compiling(program.target)
    try:
        for each in renamed([*program.kernels, text], name, C_PUBLIC):
            compiling.add(each)
    finally:
        objects = compiling.objects()  # no thread is left behind
    return objects


def write_c(program: Prepared, folder: Path, embed: bool) -> None:
    """Write all files of an export to C."""
    tables, name, target = program.tables, program.name, program.target
    progress.info("compiling %s for %s: %d kernels", name, target.name, len(program.kernels))
    members = {f"{name}_{i}.o": data for i, data in enumerate(objects_of(program, embed))}
    if embed:
        parts = weight_parts(tables, program.version)
        members[f"{name}_weights.o"] = data_object(f"{name}.weights", [b"".join(parts)], target)
    else:
        write_weights(folder / f"{name}.weights", tables, program.version)
    (folder / "objects").mkdir(exist_ok=True)
    for member, data in members.items():
        (folder / "objects" / member).write_bytes(data)
    (folder / f"lib{name}.a").write_bytes(archive(members))
    (folder / f"{name}.h").write_text(header(program, embed), encoding="utf-8")
    (folder / "main.c").write_text(example(tables, name), encoding="utf-8")
    (folder / "CMakeLists.txt").write_text(cmake(name), encoding="utf-8")
    link_shared(folder, name, sorted(members), target)


def link_shared(folder: Path, name: str, members: Sequence[str], target: Target) -> bool:
    """Link a shared library, if this machine has a linker for the target; says whether it did."""
    if not SYSTEM.runs_native_code or not target.triple.startswith(platform.machine()):
        return False
    linker = next((found for found in map(shutil.which, _LINKERS) if found), None)
    if linker is None:
        return False
    library = f"lib{name}.so"
    files = [str(folder / "objects" / member) for member in members]
    command = [linker, "-shared", "-o", str(folder / library), *files, "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise CompileError(f"{linker} could not link {library}: {made.stderr.strip()[-500:]}")
    return True
