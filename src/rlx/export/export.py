"""Exporting a compiled program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import progress
from rlx.codegen.cpu.build import build_kernels
from rlx.config import bytes_text
from rlx.errors import ConfigError, UnsupportedError
from rlx.export.bounds import ranges_of
from rlx.export.c import write_c
from rlx.export.names import checked_name, identifier
from rlx.export.page import first_sizes, write_page
from rlx.export.plans import refuse_unfit, tables_of
from rlx.export.prepared import Prepared
from rlx.export.staging import filling
from rlx.export.wasm import write_wasm
from rlx.plan.lir import LirModule
from rlx.runtime.exported import Exported, Page
from rlx.runtime.store.save import lir_for
from rlx.target.cpu import resolve, targets, web_targets

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

KINDS = ("c", "wasm")


def export(
    program: CompiledProgram,
    folder: str | os.PathLike[str],
    kind: str = "c",
    *,
    bind: Mapping[str, tuple[int, int]] | None = None,
    name: str | None = None,
    target: str | None = None,
    embed: bool = False,
    page: bool | Page = False,
) -> Exported:
    """Write a program for C ("c") or WebAssembly ("wasm") to a folder.

    `bind` gives the smallest and largest size of symbols; others range up to what is assumed, or 128. `name`
    begins all names of the export. `target` is a named target other than that of the program. With `embed`,
    weights are part of the library instead of a file. With `page`, a page that runs the model in a browser is
    written, too. The folder gets its files when all are written: an export that fails or is interrupted
    leaves nothing.

    >>> import tempfile, rlx
    >>> g = rlx.Graph("twice")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     made = rlx.compile(g).export(there, bind={"n": (1, 8)}, target="x86-64")
    >>> made.name, made.ranges, "twice.h" in made.files
    ('twice', {'n': (1, 8)}, True)
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} of an export is unknown; choose {' or '.join(KINDS)}")
    if program.lir.target.startswith("opencl"):
        raise UnsupportedError("programs for OpenCL cannot be exported; compile for device 'cpu'")
    if kind == "wasm":
        target = target or "wasm32"
    if target is not None and resolve(target).web is not (kind == "wasm"):
        fitting = ", ".join(t.name for t in (web_targets() if kind == "wasm" else targets()))
        raise ConfigError(f"an export of kind {kind!r} is not for target {target}; choose {fitting}")
    if kind == "wasm" and embed:
        raise ConfigError("weights of WebAssembly are a file, which is streamed; leave out embed")
    if kind != "wasm" and page:
        raise ConfigError("a page runs WebAssembly; export with kind 'wasm', or leave out page")
    prepared = prepare(program, bind or {}, name, target)
    there = Path(folder)
    with filling(there) as staged:
        if kind == "wasm":
            write_wasm(prepared, staged)
            if page:
                sizes = first_sizes(program.lir, prepared.tables.ranges)
                write_page(staged, prepared.name, Page() if page is True else page, sizes)
        else:
            write_c(prepared, staged, embed)
        files = {p.name: p.stat().st_size for p in sorted(staged.iterdir()) if p.is_file()}
    return Exported(
        kind,
        prepared.name,
        prepared.target.name,
        str(there),
        files,
        prepared.tables.ranges,
        prepared.memory,
        prepared.tables.spaces["weight"],
    )


def prepare(
    program: CompiledProgram,
    bind: Mapping[str, tuple[int, int]],
    name: str | None = None,
    target: str | None = None,
) -> Prepared:
    """Plan a program for its target, build its kernels and make its tables."""
    lir = _for_target(program, target)
    machine = resolve(lir.target)
    called = checked_name(name) if name is not None else identifier(lir.name)
    ranges = ranges_of(lir.outline, lir.planner.binding, bind)
    kernels = build_kernels(lir, machine)
    tables = tables_of(lir, kernels, ranges, (lir.derived or lir.mir).param_values)
    made = Prepared(tables, kernels.texts, machine, called)
    progress.info("exporting %r for %s: %s of memory", lir.name, machine.name, bytes_text(made.memory))
    return made


def _for_target(program: CompiledProgram, target: str | None) -> LirModule:
    """The plan of a program for a target, with the values that its params have now."""
    if target is None or resolve(target).name == program.lir.target:
        refuse_unfit(program.lir, program.kernels)
        return program.lir
    return lir_for(program, target)
