"""The code of single kernels for people to read: LLVM IR as emitted, and the assembly that LLVM makes of it.
Comments in both say which lines of the code generator wrote what follows.

A listing emits the kernels of a plan anew, so it also works where native code came from the cache or a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from rlx.codegen.cpu.build import build_kernels
from rlx.codegen.cpu.kernels import BodyKernels, EmittedKernel
from rlx.codegen.cpu.units import excerpt
from rlx.codegen.native.jit import assembly
from rlx.codegen.native.line_info import as_comments, with_debug_lines
from rlx.errors import ConfigError, InputError
from rlx.ir.graph import Graph, Node
from rlx.plan.kernel_costs import kernel_name
from rlx.plan.lir import LirModule
from rlx.target.cpu import resolve


class Listing:
    """IR and assembly of every native kernel of a plan.

    Kernels have the names that `explain` shows, like `%4`. A kernel inside a loop is named by the loop, the
    number of its body and its own number: `%12.0.3`.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> listing = Listing(plan(g, target="x86-64-v3"))
    >>> listing.names
    ['%1']
    >>> listing.ir("%1").splitlines()[:2]
    ['; kernel %1 of double for x86-64-v3', '; map: mul']
    >>> "k0:" in listing.assembly("%1").splitlines()
    True
    """

    def __init__(self, lir: LirModule) -> None:
        self._target = resolve(lir.target)
        made = build_kernels(lir, self._target, source_lines=True)
        self._texts, self._title = made.texts, f"of {lir.name} for {lir.target}"
        self._thunks = {f"%{id}": thunk.why for id, thunk in made.thunks.items()}
        found = _named("%", lir.mir, BodyKernels(made.kernels, made.inner))
        self._kernels: Mapping[str, tuple[Node, EmittedKernel]] = dict(found)
        self._assemblies: dict[str, str] = {}  # by function: equal kernels share one

    @property
    def names(self) -> list[str]:
        """The kernels in the order in which they run, those of loops after the others."""
        return list(self._kernels)

    def symbol(self, name: str) -> str:
        """The native function of a kernel; equal kernels have the same."""
        return self._kernels[name][1].name

    def ir(self, name: str) -> str:
        """A module with the kernel, then all functions and tables that it uses."""
        return self._head(name, ";") + excerpt(self._texts, self.symbol(name))

    def assembly(self, name: str) -> str:
        """The assembly of that module, for the plan's target."""
        symbol = self.symbol(name)
        if symbol not in self._assemblies:
            text = excerpt(self._texts, symbol)
            made = assembly(with_debug_lines(text), self._target)
            self._assemblies[symbol] = as_comments(made, text)
        return self._head(name, "#") + self._assemblies[symbol]

    def _head(self, name: str, comment: str) -> str:
        """What the kernel computes and where that was written, as comments."""
        node = self._kernels[name][0]
        lines = [f"kernel {name} {self._title}", kernel_name(node), *(f"at {place}" for place in node.where)]
        return "".join(f"{comment} {' '.join(line.splitlines())}\n" for line in lines)

    def find(self, asked: str) -> list[str]:
        """The kernels that a user means: one, or those of a loop. The percent sign may be left out.

        >>> from rlx.api.compile import plan
        >>> g = Graph("double")
        >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
        >>> Listing(plan(g)).find("1")
        ['%1']
        """
        name = asked if asked.startswith("%") else f"%{asked}"
        if name in self._kernels:
            return [name]
        if inside := [each for each in self._kernels if each.startswith(f"{name}.")]:
            return inside
        if name in self._thunks:
            raise InputError(f"kernel {name} has no assembly: the host runs it ({self._thunks[name]})")
        near = get_close_matches(name, self._kernels, 1)
        hint = f"did you mean {near[0]}? The" if near else "the"
        raise InputError(f"unknown kernel {asked!r}; {hint} kernels are {', '.join(self._kernels)}")

    def write(self, folder: Path) -> None:
        """Files `kernel-4.ll` and `kernel-4.s` for kernel %4, and so on for all."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in self._kernels:
                stem = f"kernel-{name[1:]}"
                (folder / f"{stem}.ll").write_text(self.ir(name), encoding="utf-8")
                (folder / f"{stem}.s").write_text(self.assembly(name), encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"cannot dump kernels to {folder}: {e.strerror or e}") from e


def _named(prefix: str, graph: Graph, made: BodyKernels) -> Iterator[tuple[str, tuple[Node, EmittedKernel]]]:
    """Kernels of a graph and of the bodies inside it, each with its name."""
    for id, kernel in made.kernels.items():
        yield f"{prefix}{id}", (graph.nodes[id], kernel)
    for id, bodies in made.inner.items():
        for number, (body, inside) in enumerate(zip(graph.nodes[id].bodies, bodies, strict=True)):
            yield from _named(f"{prefix}{id}.{number}.", body, inside)
