"""Who depends on whom, as bit sets: would a group of kernels wait for itself?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.fuse.facts import Facts
from rlx.ir.op import Role
from rlx.records import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """What a set of kernels waits for, what waits for it, and the set itself."""

    above: int
    below: int
    own: int

    def __or__(self, other: Span) -> Span:
        return Span(self.above | other.above, self.below | other.below, self.own | other.own)

    @property
    def acyclic(self) -> bool:
        """Whether no kernel outside of the set both waits for it and feeds it."""
        return not self.above & self.below & ~self.own


class Reach:
    """Ancestors and descendants of every kernel among the kernels, kept right while groups form."""

    def __init__(self, facts: Facts) -> None:
        self._bit = {n.id: i for i, n in enumerate(facts.kernels)}
        count = len(facts.kernels)
        self._above = [0] * count
        self._below = [0] * count
        reads: list[list[int]] = []
        for i, node in enumerate(facts.kernels):
            roots = (facts.io.root(o) for o in node.operands)
            owners = {(r.operands[0].id if r.op.role is Role.RESULT else r.id) for r in roots}
            own = [self._bit[o] for o in sorted(owners) if o in self._bit]
            reads.append(own)
            for j in own:
                self._above[i] |= self._above[j] | 1 << j
        for i in reversed(range(count)):
            for j in reads[i]:
                self._below[j] |= self._below[i] | 1 << i

    def __contains__(self, node: int) -> bool:
        return node in self._bit

    def span(self, members: Iterable[int]) -> Span:
        above = below = own = 0
        for m in members:
            i = self._bit[m]
            above |= self._above[i]
            below |= self._below[i]
            own |= 1 << i
        return Span(above, below, own)

    def join(self, members: Sequence[int], single_output: bool) -> None:
        """These kernels are one from now on.

        With a single output nothing new follows: whoever needs the group needs its last member, and with that
        all of it. Otherwise everything below one member now waits for all that any member waits for.
        """
        if single_output or len(members) == 1:
            return
        span = self.span(members)
        above, below = span.above | span.own, span.below | span.own
        for i in _bits(below):
            self._above[i] |= above
        for i in _bits(above):
            self._below[i] |= below


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
