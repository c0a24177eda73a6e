"""Moves that write layers of networks: products, convolutions, pooling, attention, recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.fuzz.programs.draw import INTS, Draw, NotHere
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.program import Size


def product(d: Draw) -> object:
    x = d.floating(1)
    kind, last = d.kind(x), d.named(d.shape(x)[-1:])
    way = d.choose(("matmul", "matmul", "linear", "einsum", "self", "outer", "dot"))
    if way == "linear":
        n = d.size()
        return d.emit(f"ops.linear({x}, {d.input(kind, [*last, n])}, {d.input(kind, [n])})")
    if way == "einsum":
        return d.emit(f"ops.einsum('...i,...i->...', {x}, {d.partner(x)})")
    if way == "self" and d.rank(x) >= 2:
        return d.emit(times(d, x, f"ops.swapaxes({x}, -1, -2)"))
    if way == "outer":
        return d.emit(f"ops.einsum('...i,...j->...ij', {x}, {x})")
    fit = [v for v in d.known([kind], 1) if d.shape(v)[-2:][0] == d.shape(x)[-1]]
    if fit and d.chance(0.4):
        return d.emit(times(d, x, d.choose(fit)))
    return d.emit(times(d, x, d.input(kind, [*last, d.size()], weight=0.5)))


def times(d: Draw, x: str, y: str) -> str:
    """x @ y; called with arrays, `@` is NumPy's own, which accumulates narrow floats in another way."""
    return f"{x} @ {y}" if d.kind(x) in ("f32", "f64") else f"ops.matmul({x}, {y})"


def narrow_product(d: Draw) -> object:
    """Rows of bytes or of bf16, which are computed or not, times weights."""
    kind = d.choose(("u8", "i8", "bf16"))
    whole = kind != "bf16"
    x, rows = d.value([kind], 2, 3), None
    if d.chance(0.4):
        (rows,) = d.emit(f"ops.bitwise_xor({x}, 85)" if whole else f"ops.silu({x})")
    values = Values(-128, 127) if whole else None
    w = d.input("i8" if whole else kind, [*d.named(d.shape(x)[-1:]), d.size()], values, weight=0.8)
    if whole:
        return d.emit(f"ops.matmul_integer({rows or x}, {w})")
    axes = f"(({d.rank(x) - 1},), (0,))"
    return d.emit(f"ops.dot_general({rows or x}, {w}, {axes}, out_dtype='f32')")


def coded_product(d: Draw) -> object:
    """Rows rounded to bytes, times weights of 4, 6 or 8 bits; these are constants, as a rule."""
    x, n = d.value(["f32"], 2, 3), d.size()
    depth, bits, group = d.shape(x)[-1], d.choose((4, 4, 6, 8)), d.choose((8, 16, 32, 32, 40, 128))
    top = 1 << (bits - 1)
    shift, count = d.choose(("none", "zeros", "minimums")), -(-depth // group)
    values = Values(0, 2 * top - 1) if shift == "minimums" else Values(-top, top - 1)
    codes = d.input("u8" if shift == "minimums" else "i8", [depth, n], values, weight=0.8)
    block = d.choose((0, 0, 2, 8))  # groups that share a factor; products with one of f16 are exact
    kind = "f16" if block else d.choose(("f32", "f16"))

    def factor(low: float, high: float) -> str:
        if not block:
            return d.input(kind, [count, n], Values(low, high), weight=0.8)
        own = d.input("i8", [count, n], Values(-20, 63), weight=0.8)
        numbers = d.input(kind, [-(-count // block), n], Values(low / 32, high / 32), weight=0.8)
        return f"ops.dequantize_groups({own}, {numbers}, bits=8, group={block})"

    factors = [factor(0.01, 0.3), *([factor(-4.0, 4.0)] if shift != "none" else [])]
    how = f"bits={bits}, group={group}, minimums={shift == 'minimums'}"
    return d.emit(f"ops.coded_matmul({x}, {codes}, {', '.join(factors)}, {how})")


def convolution(d: Draw) -> object:
    """Any rank, groups, strides, paddings and dilations; x and w are arguments or weights."""
    spatial = d.choose((1, 2, 2, 2, 3))
    kind = d.main if d.main not in INTS else "f32"
    groups = d.choose((1, 1, 1, 2))
    channels, out = groups * d.choose((1, 2, 3, 8)), groups * d.choose((1, 2, 5, 16))
    kernel: list[Size] = [_side(d, (1, 2, 3, 3, 5)) for _ in range(spatial)]
    fit = [v for v in d.known([kind], spatial + 2, spatial + 2) if d.shape(v)[1] == channels]
    if fit and d.chance(0.7):
        x = d.choose(fit)
    else:
        sides = [_side(d, (3, 5, 7, 8, 9, 14) if spatial < 3 else (3, 5)) for _ in range(spatial)]
        x = d.input(kind, [d.choose((1, 1, 2, 3)), channels, *sides])
    w = d.input(kind, [out, channels // groups, *kernel])
    bias = f", {d.input(kind, [out])}" if d.chance(0.4) else ""
    options = f", strides={d.choose((1, 1, 2, 3))}, dilations={d.choose((1, 1, 2, 3))}, groups={groups}"
    padding = f", padding={[(d.random.randint(0, 2), d.random.randint(0, 2)) for _ in range(spatial)]}"
    return d.emit(f"ops.conv({x}, {w}{bias}{options}{padding if d.chance(0.6) else ''})")


def _side(d: Draw, usual: Sequence[int]) -> Size:
    """The side of an image or a window: a number, now and then one of the program's sizes."""
    names = [name for name, n in d.sizes.items() if n <= max(usual)]
    return d.choose(names) if names and d.chance(0.25) else d.choose(usual)


def pool(d: Draw) -> object:
    x = d.floating(3, 4)
    spatial = d.rank(x) - 2
    name = d.choose(("max_pool", "avg_pool", "lp_pool", "global_avg_pool", "global_max_pool"))
    if name.startswith("global"):
        return d.emit(f"ops.{name}({x})")
    window = tuple(d.choose((1, 2, 3)) for _ in range(spatial))
    options = f"strides={d.choose((1, 2))}, dilations={d.choose((1, 1, 2))}, ceil_mode={d.chance(0.3)}"
    return d.emit(f"ops.{name}({x}, {window}, {options})")


def channel_norm(d: Draw) -> object:
    x = d.floating(3, 4)
    kind, channels = d.kind(x), d.shape(x)[1]
    scale, bias = (d.input(kind, d.named([channels])) for _ in range(2))
    if d.chance(0.5):
        return d.emit(f"ops.instance_norm({x}, {scale}, {bias})")
    divisors = [n for n in (1, 2, 3, 4) if channels % n == 0]
    return d.emit(f"ops.group_norm({x}, {scale}, {bias}, {d.choose(divisors)})")


def attention(d: Draw) -> object:
    """Where keys are hidden, q, k and v are finite: what infinite ones do there is not specified."""
    kind = d.main if d.main not in INTS else "f32"
    batch, width = d.choose((1, 2)), d.choose((4, 8, 9, 16))
    heads: Size = d.choose((1, 2, 4))
    rows, keys = d.size(), d.size()
    causal = d.chance(0.3)
    mask = d.choose(("bool", kind)) if not causal and d.chance(0.5) else ""
    hides = causal or mask == "bool"
    values = Values() if hides else None
    fit = [v for v in d.known([kind], 4, 4) if d.shape(v)[-1] > 1]
    if fit and d.chance(0.5) and not (hides and d.has_special_values):
        q = d.choose(fit)
        b, heads, n, m = d.named(d.shape(q))
        k, v = d.input(kind, [b, heads, keys, m], values), d.input(kind, [b, heads, keys, m], values)
        rows = n
    else:
        q, k, v = (d.input(kind, [batch, heads, n, width], values) for n in (rows, keys, keys))
    more = ", causal=True" if causal else f", {d.input(mask, [rows, keys])}" if mask else ""
    if d.chance(0.25):
        more += f", sinks={d.input(kind, [heads], Values())}"
    return d.emit(f"ops.attention({q}, {k}, {v}{more})")


def paged_attention(d: Draw) -> object:
    """Keys and values in pages: numbers, or codes of 8 bits with scales."""
    kind = d.main if d.main not in INTS else "f32"
    tokens, kv_heads, page, pages = d.size(), d.choose((1, 2)), d.choose((4, 8, 24)), 3
    heads, depth, width = kv_heads * d.choose((1, 3, 4)), d.choose((4, 9, 16)), d.choose((4, 16, 17))
    coded = d.chance(0.5)
    stored, values = ("i8", Values(-127, 127)) if coded else (kind, Values())
    q = d.input(kind, [tokens, heads, depth], Values())
    k, v = (d.input(stored, [pages, kv_heads, *own], values) for own in ([depth, page], [page, width]))
    table, slots = d.input("i64", [2, 2], Values(0, pages - 1)), d.input("i64", [tokens], Values(0, 1))
    more = f", window={d.choose((0, 3, page))}" if d.chance(0.3) else ""
    if coded:
        small = Values(0.001, 0.02)
        for name, own in (("k", [1, page]), ("v", [page, 1])):
            more += f", {name}_scales={d.input('f32', [pages, kv_heads, *own], small)}"
    lengths = d.input("i64", [tokens], Values(0, 2 * page))
    return d.emit(f"ops.paged_attention({q}, {k}, {v}, {table}, {slots}, {lengths}{more})")


def cell(d: Draw) -> object:
    x = d.floating(3, 3)
    _, _, width = d.shape(x)
    kind, hidden = d.kind(x), d.choose((1, 3, 4, 8))
    name = d.choose(("rnn", "gru", "lstm"))
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[name]
    if width == 0:
        raise NotHere
    ways = d.choose((1, 1, 2))
    both = ", direction='bidirectional'" if ways == 2 else ""
    made: list[str] = []
    for _ in range(d.choose((1, 1, 2))):  # two cells that read one value
        shape = [ways, gates * hidden]
        w = d.input(kind, [*shape, *d.named([width])], Values(-0.5, 0.5), weight=0.7)
        r = d.input(kind, [*shape, hidden], Values(-0.5, 0.5), weight=0.7)
        made += d.emit(f"ops.{name}({x}, {w}, {r}{both})", 2)
    return made


def rotate(d: Draw) -> object:
    return d.emit(f"ops.rope({d.floating(3, 4)})")


LAYERS: tuple[tuple[float, Callable[[Draw], object]], ...] = (
    (2.5, product),
    (1.0, narrow_product),
    (0.3, coded_product),
    (1.5, convolution),
    (0.6, pool),
    (0.4, channel_norm),
    (0.7, attention),
    (0.2, paged_attention),
    (0.3, cell),
    (0.2, rotate),
)
