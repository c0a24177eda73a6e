"""Exponentials of distances below the largest element of a row: what a softmax takes.

Such a distance is never positive, so its exponential needs one factor of two, not two, and no upper bound;
the bits are those of other exponentials of differences. An element that is not a number turns the sum of
exponentials into NaN, and with it every result: so the maximum need not look for it.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.kernel.nests import Nest, Stat, Store
from rlx.kernel.scalar import Scalar, is_acc, rebuild, uses_acc

CARRIES_NAN = ("add", "div", "exp", "exp_below", "exp_difference", "log", "mul", "neg", "rounded", "sub")
"""Primitives that give NaN where any of their arguments is one."""


def use_distances(nest: Nest) -> Nest:
    """The nest with exponentials of distances from a maximum as such, and maxima that need not show NaN."""
    for number, stat in enumerate(nest.stats):
        if stat.combine == "max" and stat.body.dtype.name == "f32" and stat.dtype is stat.body.dtype:
            nest = _below(nest, number)
    return nest


def _below(nest: Nest, number: int) -> Nest:
    """Distances of an element from its own maximum, which is statistic `number`."""
    largest = nest.stats[number]

    def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
        if e.prim != "exp_difference" or args[0] != largest.body or not is_acc(args[1], number):
            return None
        return Scalar("exp_below", args, e.dtype)

    stats: list[Stat] = [replace(s, body=rebuild(s.body, change)) for s in nest.stats]
    stores: list[Store] = [replace(s, body=rebuild(s.body, change)) for s in nest.stores]
    for total, stat in enumerate(stats):
        if stat.combine == "sum" and _is_below(stat.body, largest.body, number):
            others = [s.body for s in stats[number + 1 :] if s is not stat] + [s.body for s in stores]
            if all(_carries(body, total) or not uses_acc(body, number) for body in others):
                stats[number] = replace(largest, combine="largest")
    return replace(nest, stats=tuple(stats), stores=tuple(stores))


def _is_below(e: Scalar, element: Scalar, number: int) -> bool:
    """Whether an expression is the exponential of the distance of an element from maximum `number`."""
    return e.prim == "exp_below" and e.args[0] == element and is_acc(e.args[1], number)


def _carries(body: Scalar, total: int) -> bool:
    """Whether an expression is NaN where statistic `total` is."""
    found = set[Scalar]()
    for e in body.walk():
        if is_acc(e, total) or (e.prim in CARRIES_NAN and not found.isdisjoint(e.args)):
            found.add(e)
    return body in found
