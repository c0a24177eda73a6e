"""Ranges of sizes that an exported program is made for, and the most that a size can be within them.

An exported program allocates nothing while it runs: every value has room for the most bytes that it takes
for any sizes in the ranges. Bounds come from intervals, so a size need not grow with its symbols: N - M is
largest where N is largest and M is smallest.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import ConfigError, UnsupportedError
from rlx.ir.dim import Constraint, Dim, substitute, sym, upper_bound
from rlx.ir.graph import Graph
from rlx.ir.symbols import graph_symbols

USUAL = 128
"""The largest size of a symbol that neither the caller nor the graph bounds, if none larger is assumed."""
_MOST = 1 << 62  # of a size that native code computes in 64 bits

Ranges = Mapping[str, tuple[int, int]]
"""From symbols to their smallest and their largest size."""


def ranges_of(
    graph: Graph, assumed: Mapping[str, int], given: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """The range of every symbol of a graph: the given one, else from 0 to the largest size assumed, or 128;
    always within the bounds that the graph declares.

    >>> import rlx
    >>> g = rlx.Graph()
    >>> _ = g.input("x", ("batch", "seq"), "f32")
    >>> ranges_of(g, {"batch": 1, "seq": 384}, {"batch": (1, 8)})
    {'batch': (1, 8), 'seq': (0, 384)}
    """
    names = graph.symbols()
    for name in given:
        if name not in names:
            has = f"its symbols: {', '.join(names)}" if names else "all its sizes are fixed"
            raise ConfigError(f"bind: program {graph.name!r} has no symbol {name!r}; {has}")
    declared = graph_symbols(graph) if names else {}
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        least, most = declared[name][0] if name in declared else (0, None)
        if name not in given:
            high = max(assumed.get(name, 0), USUAL) if most is None else most
            found[name] = (least, max(least, high))
            continue
        low, high = given[name]
        if not least <= low <= high or (most is not None and high > most):
            bounds = f"{least}.." if most is None else f"{least}..{most}"
            raise ConfigError(
                f"bind: {name}={low}..{high} is not a range within {bounds}, which the graph allows; "
                f"give for example {name}={max(least, 1)}..{most or USUAL}"
            )
        found[name] = (low, high)
    return found


def within(d: Dim, ranges: Ranges) -> Dim:
    """A size whose symbols know their ranges; those of a single size are that number.

    >>> upper_bound(within(sym("n") - sym("m"), {"n": (0, 9), "m": (2, 3)}))
    7
    """
    if isinstance(d, int):
        return d
    known = {name: low if low == high else sym(name, low, high) for name, (low, high) in ranges.items()}
    return substitute(d, known)


def most(d: Dim, ranges: Ranges, what: str) -> int:
    """The most that a size can be for sizes in the ranges, at least 0. `what` names it in the refusal of a
    size without bounds.

    >>> most(4 * sym("n") - sym("m"), {"n": (1, 8), "m": (3, 100)}, "x")
    29
    """
    if isinstance(d, int):
        return max(d, 0)
    found = upper_bound(within(d, ranges))
    if found is None or found >= _MOST:
        raise UnsupportedError(
            f"{what} has the size {d}, which has no bound for the sizes of this export; bind its symbols to "
            "smaller ranges"
        )
    return max(found, 0)


def settled(c: Constraint, ranges: Ranges) -> bool | None:
    """Whether a guard holds for all sizes in the ranges (True), for none (False), or depends on them.

    >>> settled(Constraint("min", sym("n"), 2), {"n": (2, 5)})
    True
    """
    return Constraint(c.kind, within(c.lhs, ranges), within(c.rhs, ranges)).known()
