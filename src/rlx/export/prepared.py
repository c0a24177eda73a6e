"""A program that is ready to be written in some language."""

from __future__ import annotations

from functools import cached_property

from rlx.export.code import version_of
from rlx.export.layout import ContextLayout
from rlx.export.tables import Tables
from rlx.records import dataclass
from rlx.target.cpu import Target


@dataclass(frozen=True)
class Prepared:
    """A program on its way to an export: its tables, its kernels as LLVM IR, and what it is called."""

    tables: Tables
    kernels: tuple[str, ...]
    target: Target
    name: str

    @property
    def memory(self) -> int:
        """Bytes of a context for one thread, without weights."""
        return ContextLayout(self.tables).bytes(self.tables.scratch, 1)

    @cached_property
    def version(self) -> int:
        """A number for what it computes and how its weights are laid out."""
        return version_of(self.tables, self.kernels)
