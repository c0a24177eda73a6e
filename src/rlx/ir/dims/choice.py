"""Choices by size that change how results are rounded: one rule, for known and for symbolic sizes.

A call's bits must not depend on earlier calls. A program with symbols therefore makes each such choice as a
program for the sizes of the call would, notes the rule, and serves only calls for which every rule gives the
same answer. Where kernels for numbers add in another order than those for symbols, the size must be a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeVar

from rlx.errors import RlxError
from rlx.ir.dim import Dim, evaluate, symbols
from rlx.ir.dims.read import READER
from rlx.records import dataclass

T = TypeVar("T", bound=Hashable)


class NumberNeeded(RlxError):
    """A program for symbols would round in another way than one for numbers."""

    def __init__(self, names: frozenset[str], reason: str, where: tuple[str, ...]) -> None:
        super().__init__(reason, where)
        self.names = names


@dataclass(frozen=True)
class Choice:
    """What a rule answered for sizes."""

    rule: Callable[..., Hashable]
    sizes: tuple[Dim, ...]
    answer: Hashable

    def holds(self, binding: Mapping[str, int]) -> bool:
        return self.rule(*(evaluate(d, binding) for d in self.sizes)) == self.answer


class SizeChoices:
    """Choices of a compilation for calls of other sizes, too; `sizes` are those of the first one."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.made = sizes, list[Choice]()

    def knows(self, sizes: Iterable[Dim]) -> bool:
        """Whether a call decides these sizes; data may decide them, too."""
        return all(name in self.sizes for d in sizes for name in symbols(d))


CHOICES: ContextVar[SizeChoices | None] = ContextVar("rlx_size_choices", default=None)


def choose(rule: Callable[..., T], sizes: Sequence[Dim], usual: Sequence[int]) -> T:
    """The rule's answer: for sizes, for those of the call, or without a call for what is usual.

    >>> choose(lambda n: n > 4, (5,), usual=(1,))
    True
    """
    choices = CHOICES.get()
    if choices is None or not choices.knows(sizes):
        return rule(*(d if isinstance(d, int) else u for d, u in zip(sizes, usual, strict=True)))
    answer = rule(*(evaluate(d, choices.sizes) for d in sizes))
    if any(not isinstance(d, int) for d in sizes):
        choices.made.append(Choice(rule, tuple(sizes), answer))
    return answer


def need_numbers(sizes: Sequence[Dim], reason: str, where: tuple[str, ...] = ()) -> None:
    """Refuse symbols here, in a compilation that could have numbers in their place; a trace reads them."""
    reader, choices = READER.get(), CHOICES.get()
    if reader is not None:
        for d in sizes:
            if not isinstance(d, int) and reader.knows(d):
                reader.read(d)
    if choices is not None and choices.knows(sizes):
        names = frozenset(name for d in sizes for name in symbols(d))
        if names:
            raise NumberNeeded(names, reason, where)
