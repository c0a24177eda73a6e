"""Code that is there early: units of a program are first compiled without optimisation, and again with it
while the program runs.

Both have the same interface and give the same bits, so that the better code takes the place of the other one
at any time, even between two kernels of a run: the address of a kernel is one word of a record. The former
code stays loaded, as a thread may be in it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rlx import progress
from rlx.codegen.native.jit import QUICK, Code, Compiling, HasKernels, load_all
from rlx.runtime.background import let_run_first
from rlx.system import SYSTEM
from rlx.target.cpu import Target

SAVED_PS = 25_000_000
"""Picoseconds of a core that a line of LLVM IR takes less without optimisation (6 us instead of 31)."""
LONGER = 5
"""How much longer unoptimised code runs, in times of the optimised (zoo and networks: 3.5 to 6)."""

Store = Callable[[Sequence[bytes]], bytes]
"""Joins the objects of a program to the blob that is stored, and stores it."""

_under_way: dict[tuple[str, str], QuickCode] = {}  # by key of the code and target


class HasRun(Protocol):
    """A program, as far as its code must know it."""

    @property
    def has_run(self) -> bool: ...


class QuickUnits:
    """Compiles units as they come: those without which a run would take longer than they take to compile are
    optimised at once.

    A run takes `LONGER` times its predicted `work` more if all of its code is quick. Units are optimised
    until the lines of all that came so far would have saved as much, and quick from then on: in a long run
    the tiles that many kernels share, which come early, are good ones.
    """

    def __init__(self, target: Target, work: int) -> None:
        self.compiling = Compiling(target)
        self.quick: dict[int, str] = {}
        self._extra, self._saved, self._count = LONGER * work, 0, 0

    def add(self, text: str) -> None:
        """Compile a unit."""
        self._saved += text.count("\n") * SAVED_PS
        if self._saved >= self._extra:
            self.quick[self._count] = text
            self.compiling.add(text, QUICK)
        else:
            self.compiling.add(text)
        self._count += 1


class QuickCode(Code):
    """Loaded code of which some units are quick; `improve` replaces them."""

    def __init__(
        self,
        objects: Sequence[bytes],
        quick: Mapping[int, str],
        kernels: Sequence[str],
        target: Target,
        key: str,
        store: Store,
        needed: bool,
    ) -> None:
        first = load_all(objects, target)
        super().__init__(first.find, target, [first])
        self._objects, self._quick, self._kernels = list(objects), dict(quick), kernels
        self._store, self._needed = store, needed
        self._programs: list[weakref.ref[HasKernels]] = []
        self._moved: dict[int, int] = {}  # address of a kernel -> that of its better code
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._blob = b""
        self._key = key, target.name

    @property
    def is_quick(self) -> bool:
        """Whether runs still use unoptimised code."""
        return not self._moved

    def follow(self, program: HasKernels) -> None:
        if not self._over.is_set():
            self._programs.append(weakref.ref(program))
        if self._moved:  # before or after this line, the other thread sees the program
            program.move_kernels(self._moved)

    def improve(self, has_run: Callable[[], bool]) -> None:
        """Begin to make the better code, once a first run is over."""
        _under_way[self._key] = self
        threading.Thread(target=self._improve, args=(has_run,), name="rlx-better-code").start()

    def finish(self) -> None:
        """Return when no thread works on the code any more."""
        self._needed = True
        self._over.wait()

    def blob(self) -> bytes:
        """The better code as it is stored, once it is there."""
        self.finish()
        if self._failure is not None:
            raise self._failure
        return self._blob

    def _improve(self, has_run: Callable[[], bool]) -> None:
        try:
            with progress.unwatched():
                let_run_first(has_run)
                self._make_better()
        except BaseException as e:  # raised in the thread that asks; runs go on with the code there is
            self._failure = e
        finally:
            if _under_way.get(self._key) is self:
                del _under_way[self._key]
            self._over.set()
            for done in (self._programs, self._objects, self._quick):
                done.clear()

    def _make_better(self) -> None:
        SYSTEM.give_back_memory()  # what LLVM used before: threads that are new take memory of their own
        compiling = Compiling(self.target, self._is_wanted)
        for text in self._quick.values():
            compiling.add(text)
        for number, made in zip(self._quick, compiling.objects(), strict=True):
            self._objects[number] = made
        self._take_over(load_all(self._objects, self.target))
        self._blob = self._store(self._objects)
        progress.info("native code for %s: optimised", self.target.name)

    def _is_wanted(self) -> bool:
        """Whether somebody will use the code: a process that ends does not wait for what nobody stores."""
        return self._needed or threading.main_thread().is_alive()

    def _take_over(self, better: Code) -> None:
        moved = {self.address(name): better.address(name) for name in self._kernels}
        self.keep(better)
        self.find, self._moved = better.find, moved
        for program in [found() for found in list(self._programs)]:
            if program is not None:
                program.move_kernels(moved)


def in_the_making(key: str, target: Target) -> QuickCode | None:
    """The code with this key, if a thread makes it."""
    return _under_way.get((key, target.name))


def improve_code(code: object, program: HasRun) -> None:
    """Let a thread optimise the code of a program, if it is quick code."""
    found = weakref.ref(program)

    def has_run() -> bool:
        there = found()
        return there is None or there.has_run

    if isinstance(code, QuickCode):
        code.improve(has_run)


def is_quick(code: object) -> bool:
    """Whether a part of the code is not optimised."""
    return isinstance(code, QuickCode) and code.is_quick


def wait_for_code(code: object) -> None:
    """Return when the code is as good as it gets."""
    if isinstance(code, QuickCode):
        code.blob()


def _finish_all() -> None:
    """Before a fork: the threads that optimise are not in the child, which would run quick code forever."""
    for code in list(_under_way.values()):
        code.finish()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_all)
