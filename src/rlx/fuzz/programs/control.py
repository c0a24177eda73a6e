"""Moves that write control flow: branches, scans and loops over what is there."""

from __future__ import annotations

from collections.abc import Callable

from rlx.fuzz.programs.draw import Draw
from rlx.fuzz.programs.inputs import Values

BODIES = (
    "ops.tanh({a} * 0.5 + {b})",
    "ops.softmax({a} + {b}, axis=-1)",
    "ops.where({b} > 0, {a}, -{a})",
    "{a} - ops.mean({a}) + ops.sin({b})",
    "ops.maximum({a}, {b}) * 0.7",
    "ops.layer_norm({a}) + {b}",
)


def body(d: Draw, a: str, b: str) -> str:
    return d.choose(BODIES).format(a=a, b=b)


def branch(d: Draw) -> object:
    x = d.floating()
    threshold = d.number(-3, 3) + 0.001
    condition = d.choose((f"ops.sum({x}) > {threshold}", f"ops.max({x}) < {threshold}", "flag"))
    if condition == "flag":
        condition = d.input("bool", [])
    y = d.choose((x, d.choose(d.known([d.kind(x)]))))
    other = d.choose(("a * 0.5", "-a", "ops.exp(ops.tanh(a))"))
    return d.emit(f"ops.cond({condition}, lambda a: {body(d, 'a', 'a')}, lambda a: {other}, {y})")


def scan(d: Draw) -> object:
    """A recurrence over rows; now and then its body multiplies by a weight."""
    x = d.floating(1)
    start = d.choose((f"{x}[0] * 0.5", f"ops.sum({x}, axis=0)", f"ops.zeros_like({x}[0])"))
    step = body(d, "c", "row")
    if d.rank(x) >= 2 and d.chance(0.4):
        n = d.named(d.shape(x)[-1:])[0]
        step = f"ops.tanh(c @ {d.input(d.kind(x), [n, n], Values(-0.5, 0.5))} + row)"
    back = ", reverse=True" if d.chance(0.3) else ""
    return d.emit(f"ops.scan(lambda c, row: (({step}),) * 2, {start}, {x}{back})", 2)


def loop(d: Draw) -> object:
    x = d.floating()
    trips = d.input("i64", [], Values(0, 4)) if d.chance(0.5) else str(d.random.randint(0, 4))
    go = d.choose(("True", "ops.sum(c) < 5.3"))
    step = f"lambda i, c: ({go}, {body(d, 'c', x)}, None)"
    return d.emit(f"ops.loop({step}, {x}, trips={trips})[0]")


CONTROL: tuple[tuple[float, Callable[[Draw], object]], ...] = ((0.8, branch), (1.0, scan), (0.5, loop))
