"""IR and assembly of single kernels: every kernel has both, and they are the code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import llvmlite.binding as llvm
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.codegen.cpu import special
from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.native import jit
from rlx.errors import ConfigError, InputError
from rlx.runtime.listing import Listing
from rlx.target.cpu import resolve

LABEL = re.compile(r"\.L[\w.]+")


def small() -> rlx.Graph:
    """A matmul with an epilogue, a reduction, twice the same map, and a loop."""
    g = rlx.Graph("small")
    x, w = g.input("x", ("n", 32), "f32"), g.input("w", (32, 32), "f32")
    g.output("soft", ops.softmax(ops.gelu(x @ w), axis=-1))
    g.output("sorted", ops.sort(ops.exp(x), axis=-1))
    for name in "ab":
        g.output(name, ops.tanh(g.input(f"{name}_in", (5, 4), "f32")))
    last, _ = ops.scan(lambda h, row: (ops.tanh(h @ w + row), h), g.input("h", (32,), "f32"), x)
    g.output("last", last)
    return g


def body(assembly: str, symbol: str) -> list[str]:
    """The instructions of a function, with labels by the order in which they occur."""
    inside = assembly.split(f"\n{symbol}:\n")[1].split(".Lfunc_end")[0]
    inside = re.sub(r"^\t# \w+\.py:\d+  .*\n", "", inside, flags=re.MULTILINE)
    numbers: dict[str, str] = {}
    return LABEL.sub(lambda m: numbers.setdefault(m[0], f".L{len(numbers)}"), inside).splitlines()


def test_dump_writes_ir_and_assembly_of_every_kernel(tmp_path: Path) -> None:
    program = rlx.compile(small(), dump=tmp_path)
    names = {f.stem for f in tmp_path.glob("kernel-*")}
    assert len(names) == program.stats["kernels"] > program.stats["distinct_kernels"]
    assert names >= {f"kernel-{id}" for id in program.kernels.kernels}
    listing = Listing(program.lir)
    assert names == {f"kernel-{name[1:]}" for name in listing.names}
    for name in listing.names:
        symbol, stem = listing.symbol(name), f"kernel-{name[1:]}"
        module = llvm.parse_assembly((tmp_path / f"{stem}.ll").read_text())
        module.verify()
        assert not module.get_function(symbol).is_declaration
        lines = (tmp_path / f"{stem}.s").read_text().splitlines()
        assert lines[0] == f"# kernel {name} of small for {program.lir.target}" and f"{symbol}:" in lines


def test_comments_show_the_lines_that_wrote_the_code() -> None:
    """Of the notation, in the file that they name: in IR, and in what LLVM made of it."""
    g = rlx.Graph("sorted")
    g.output("y", ops.sort(g.input("x", (4, 40), "f32")))
    listing = Listing(plan(g, target="x86-64-v3"))
    (name,) = listing.names
    for text, comment in ((listing.ir(name), "  ;"), (listing.assembly(name), "\t#")):
        shown = re.findall(rf"^{comment} special\.py:(\d+)  (.*)$", text, re.MULTILINE)
        assert len(set(shown)) > 20
        source = Path(special.__file__).read_text(encoding="utf-8").splitlines()
        assert all(source[int(number) - 1].strip() == line for number, line in shown)


def test_the_assembly_is_that_of_the_code_that_runs() -> None:
    """A kernel alone and the module that is compiled for the program have the same instructions."""
    lir = plan(small(), target="x86-64-v3")
    target, listing = resolve("x86-64-v3"), Listing(plan(small(), target="x86-64-v3"))
    texts = build_kernels(lir, target).texts
    whole = "\n".join(jit.assembly(text, target) for text in texts)
    for name in listing.names:
        symbol = listing.symbol(name)
        assert body(listing.assembly(name), symbol) == body(whole, symbol), name


def test_kernels_of_a_loop_are_named_by_it() -> None:
    listing = Listing(plan(small()))
    inside = [name for name in listing.names if "." in name]
    loop = inside[0].partition(".")[0]
    assert inside and listing.find(loop) == inside and listing.find(inside[0]) == [inside[0]]


def test_a_kernel_on_the_host_has_no_assembly() -> None:
    g = rlx.Graph("host")
    g.output("y", ops.unique(g.input("x", (8,), "f32")))
    listing = Listing(plan(g))
    with pytest.raises(InputError, match=r"kernel %1 has no assembly: the host runs it \(.+ sorts them\)"):
        listing.find("%1")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot dump kernels to .*file: "):
        Listing(plan(small())).write(tmp_path / "file")
