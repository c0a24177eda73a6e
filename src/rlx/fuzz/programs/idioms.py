"""Moves of several ops at once, as people write them: what one of them gives, the next reads directly."""

from __future__ import annotations

from collections.abc import Callable

from rlx.fuzz.programs.draw import Draw, NotHere
from rlx.fuzz.programs.inputs import Values


def normalised(d: Draw) -> object:
    """A norm of a sum or product with a row, a mask or another norm."""
    x = d.floating(1)
    kind, row = d.kind(x), d.named(d.shape(x)[-1:])
    inner = d.choose(
        (
            f"{x} + {d.input(kind, row)}",
            f"{x} * {d.input(kind, row)}",
            f"ops.where({d.input('bool', d.named(d.shape(x)[-2:]))}, {x}, -1e4)",
            f"ops.layer_norm({x}, {d.input(kind, row)}, {d.input(kind, row)})",
            f"ops.gelu({x}) * ops.sigmoid({x})",
        )
    )
    outer = d.choose(("ops.softmax({}, axis=-1)", "ops.log_softmax({}, axis=-1)", "ops.rms_norm({})"))
    return d.emit(outer.format(inner))


def slice_of_view(d: Draw) -> object:
    """Part of a view, whose elements are elsewhere or are repeated."""
    x = d.value(rank=1)
    rank = d.rank(x)
    perm = tuple(d.random.sample(range(rank), rank))
    view = d.choose(
        (
            f"ops.broadcast_to({x}, ({d.random.randint(2, 3)}, *{x}.shape))",
            f"ops.broadcast_to({x}[:1], ({d.random.randint(2, 4)}, *{x}.shape[1:]))",
            f"ops.transpose({x}, {perm})",
            f"ops.expand_dims({x}, 0)",
            f"ops.flip({x}, {d.axis(x)})",
            f"ops.reshape({x}, ({x}.shape[0], -1))",
            f"{x}[::2]",
        )
    )
    part = d.choose(("[..., 1:]", "[..., :2]", "[..., ::2]", "[1:]", "[:, :2]", "[..., -1]", "[..., ::-1]"))
    return d.emit(view + part)


def products_of_one(d: Draw) -> object:
    """Two or three products of one value, what follows each alike: heads, gates, cells."""
    x = d.floating(2, 3)
    kind, width = d.kind(x), d.named(d.shape(x)[-1:])
    n = d.choose((3, 4, 8))
    ways = ("{0}", "ops.tanh({0})", "{0} > 0.1", "ops.softmax({0}, axis=-1)", "{0} + 0.5")
    scans = "ops.scan(lambda c, row: ((ops.tanh(c * 0.5 + row),) * 2), ops.zeros_like({0}[0]), {0})"
    end = scans if d.chance(0.4) else d.choose(ways)
    made: list[str] = []
    for _ in range(d.choose((2, 2, 3))):
        w = d.input(kind, [*width, n], weight=0.8)
        made = d.emit(end.format(d.emit(f"ops.matmul({x}, {w})")[0]), 2)
    return made


def widened_weights(d: Draw) -> object:
    """Products of f32 with weights that come in 16 bits; rows or columns of them, now and then both."""
    x = d.value(["f32"], 2, 3)
    width, n = d.named(d.shape(x)[-1:]), d.choose((3, 8, 17, 50))
    turned = d.chance(0.5)
    w = d.input(d.choose(("f16", "bf16")), [n, *width] if turned else [*width, n], weight=0.9)
    wide = d.emit(f"ops.cast({w}, 'f32')")[0]
    made = d.emit(f"ops.matmul({x}, {f'ops.transpose({wide})' if turned else wide})")
    if d.chance(0.3):
        made += d.emit(f"ops.embedding({wide}, {d.input('i64', [d.size()], Values(0, 2))})")
    return made


def open_window(d: Draw) -> object:
    """A convolution whose image and window both have sizes of the program."""
    small = [name for name, n in d.sizes.items() if 1 < n <= 5]
    large = [name for name, n in d.sizes.items() if 7 <= n <= 33]
    if not small or not large:
        raise NotHere
    kernel, side, spatial = d.choose(small), d.choose(large), d.choose((1, 2))
    x = d.input("f32", [1, 2, *[side] * spatial])
    w = d.input("f32", [3, 2, *[kernel] * spatial], weight=0.1)
    return d.emit(f"ops.conv({x}, {w}, dilations={d.choose((1, 2, 3))}, strides={d.choose((1, 2))})")


IDIOMS: tuple[tuple[float, Callable[[Draw], object]], ...] = (
    (1.5, normalised),
    (1.5, slice_of_view),
    (0.8, products_of_one),
    (0.6, open_window),
    (0.6, widened_weights),
)
