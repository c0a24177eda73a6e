"""What type rules must assume about sizes: proved, refuted, or entered in the log of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar

from rlx.errors import ShapeError, current_where, provenance
from rlx.ir.dim import Constraint, Dim, known_eq, known_le


class ConstraintLog:
    """Collects equalities that a type rule had to assume."""

    def __init__(self, known: Iterable[Constraint] = ()) -> None:
        self.items: list[Constraint] = []
        self.known = {(c.kind, c.lhs, c.rhs) for c in known}

    def assume(self, constraint: Constraint) -> None:
        key = (constraint.kind, constraint.lhs, constraint.rhs)
        if key not in self.known:
            self.known.add(key)
            self.items.append(constraint)

    def take(self) -> list[Constraint]:
        """What was assumed since the last time."""
        items, self.items = self.items, []
        return items

    def forget(self) -> None:
        """Drop what was assumed since the last time: the rule that needed it has refused."""
        self.known -= {(c.kind, c.lhs, c.rhs) for c in self.take()}


_LOG: ContextVar[ConstraintLog | None] = ContextVar("rlx_constraints", default=None)


def require_equal(a: Dim, b: Dim, what: Callable[[], str] | str) -> Dim:
    """Prove, refute (ShapeError) or assume that two dims are equal; returns the simpler one."""
    if a is b or a == b:
        return a
    verdict = known_eq(a, b)
    if verdict is False:
        raise ShapeError(what if isinstance(what, str) else what())
    if verdict is None:
        log = _LOG.get()
        if log is not None:
            first, second = sorted((a, b), key=str)
            log.assume(Constraint("eq", first, second, current_where()))
    return a if isinstance(a, int) else b if isinstance(b, int) else a


def require_at_least(a: Dim, b: Dim, what: str) -> None:
    """Prove, refute (ShapeError) or assume that a >= b."""
    verdict = known_le(b, a)
    if verdict is False:
        raise ShapeError(what)
    log = _LOG.get()
    if verdict is None and log is not None:
        log.assume(Constraint("min", a, b, current_where()))


def require_shape(a: Sequence[Dim], b: Sequence[Dim], what: str) -> tuple[Dim, ...]:
    """Ranks and dims of two shapes must agree."""
    if len(a) != len(b):
        raise ShapeError(what)
    return tuple(require_equal(x, y, what) for x, y in zip(a, b, strict=True))


class inferring(provenance):
    """`with inferring(log, where):` type rules inside enter what they assume in `log`, as from `where`."""

    __slots__ = ("_log", "_outer")

    def __init__(self, log: ConstraintLog, where: tuple[str, ...]) -> None:
        super().__init__(where)
        self._log = log

    def __enter__(self) -> None:
        super().__enter__()
        self._outer = _LOG.set(self._log)

    def __exit__(self, *raised: object) -> None:
        _LOG.reset(self._outer)
        super().__exit__(*raised)
