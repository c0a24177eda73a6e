"""The grammar: moves that add a line or two, and how programs are put together from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.fuzz.oracles import MAIN_WAYS, MORE_WAYS
from rlx.fuzz.programs.control import CONTROL
from rlx.fuzz.programs.declared import declared
from rlx.fuzz.programs.draw import FLOATS, INTS, SIZES, Crashed, Draw, NotHere
from rlx.fuzz.programs.idioms import IDIOMS
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.layers import LAYERS
from rlx.fuzz.programs.program import ASKS, BATCH, TRANSFORMS, Program
from rlx.fuzz.programs.zoo_pieces import from_the_zoo
from rlx.fuzz.shrink import types_of, with_input
from rlx.ir.dtype import dtype

Move = Callable[[Draw], object]

UNARY = (
    "neg abs tanh sin cos sigmoid erf square softplus gelu silu relu mish softsign atan log_sigmoid floor "
    "round sign exp elu hard_swish expm1"
).split()
GUARDED = "exp log sqrt rsqrt reciprocal log1p cbrt log2 exp2 asin acosh".split()
BINARY = "add sub mul div maximum minimum hypot logaddexp atan2 pow mod fmod floor_div".split()
INTEGER = "bitwise_and bitwise_or bitwise_xor maximum minimum floor_div mod trunc_div add mul sub".split()
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
REDUCTIONS = "sum mean max min prod var std logsumexp norm_l2 norm_l1 sum_square".split()


def unary(d: Draw) -> object:
    if d.chance(0.25):
        return d.emit(f"ops.{d.choose(GUARDED)}(ops.tanh({d.floating()}) * 0.4 + 1.5)")
    return d.emit(f"ops.{d.choose(UNARY)}({d.floating()})")


def binary(d: Draw) -> object:
    x = d.value()
    if d.kind(x) == "bool":
        return d.emit(f"ops.logical_{d.choose(('and', 'or', 'xor'))}({x}, {d.partner(x)})")
    name = d.choose(INTEGER if d.kind(x) in INTS else BINARY)
    if d.chance(0.2) and name not in ("floor_div", "mod", "trunc_div", "pow", "hypot"):
        number = d.choose((2, 3)) if d.kind(x) in INTS else d.number(-1, 1)
        return d.emit(f"{x} {d.choose('+-*')} {number}")
    y = d.partner(x)
    if name in ("pow", "div", "mod", "fmod", "floor_div", "trunc_div"):  # away from zero
        y = f"(abs({y}) + 1)" if d.kind(x) in INTS else f"(ops.tanh({y}) * 0.4 + 1.5)"
    pair = (x, y) if d.chance(0.7) or name == "pow" else (y, x)
    if name == "pow":
        return d.emit(f"ops.pow(ops.tanh({x}) + 1.5, {y})")
    return d.emit(f"ops.{name}({pair[0]}, {pair[1]})")


def compare(d: Draw) -> object:
    x = d.value([*FLOATS, *INTS])
    other = (
        d.partner(x) if d.chance(0.7) else repr(d.choose((0, 1)) if d.kind(x) in INTS else d.number(-1, 1))
    )
    return d.emit(f"{x} {d.choose(COMPARISONS)} {other}")


def mask(d: Draw) -> object:
    """`where` by a condition that is computed, or an input."""
    x = d.value([*FLOATS, *INTS])
    other = d.partner(x) if d.chance(0.5) else repr(0 if d.kind(x) in INTS else d.number(-1, 1))
    bools = [v for v in d.known(["bool"]) if d.rank(v) <= d.rank(x)]
    if bools and d.chance(0.5):
        return d.emit(f"ops.where({d.choose(bools)}, {x}, {other})")
    if d.chance(0.4):
        dims = d.named(d.shape(x))[d.random.randint(0, d.rank(x)) :]
        return d.emit(f"ops.where({d.input('bool', dims)}, {x}, {other})")
    return d.emit(f"ops.where({x} {d.choose(COMPARISONS[:4])} {d.choose((0, 1))}, {x}, {other})")


def reduce(d: Draw) -> object:
    x = d.value()
    keep = d.choose(("", ", keepdims=True"))
    if d.kind(x) == "bool":
        return d.emit(f"ops.{d.choose(('any', 'all'))}({x}, axis={d.axes(x)}{keep})")
    if d.kind(x) in INTS:
        return d.emit(f"ops.{d.choose(('sum', 'max', 'min', 'prod'))}({x}, axis={d.axes(x)}{keep})")
    if d.chance(0.15):
        return d.emit(f"ops.{d.choose(('argmax', 'argmin'))}({x}, axis={d.axis(x)}{keep})")
    name = d.choose(REDUCTIONS)
    freedom = ", ddof=1" if name in ("var", "std") and d.chance(0.3) else ""
    return d.emit(f"ops.{name}({x}, axis={d.axes(x)}{freedom}{keep})")


def normalise(d: Draw) -> object:
    x = d.floating(1)
    name = d.choose(("softmax", "softmax", "log_softmax", "layer_norm", "rms_norm"))
    kind, size = d.kind(x), d.named(d.shape(x)[-1:])
    if name == "layer_norm" and d.chance(0.7):
        return d.emit(f"ops.layer_norm({x}, {d.input(kind, size)}, {d.input(kind, size)})")
    if name == "rms_norm" and d.chance(0.5):
        return d.emit(f"ops.rms_norm({x}, {d.input(kind, size)})")
    return d.emit(f"ops.{name}({x}, axis={-1 if d.chance(0.6) else d.axis(x)})")


def shape_text(d: Draw, x: str) -> str:
    """x.shape, written so that sizes stay open."""
    return f"*{x}.shape"


def arrange(d: Draw) -> object:
    x = d.value(rank=1)
    rank, axis = d.rank(x), d.axis(x)
    perm = d.random.sample(range(rank), rank)
    swapped = [f"{x}.shape[{i}]" for i in perm]
    texts = {
        "transpose": f"ops.transpose({x}, {tuple(perm)})",
        "T": f"ops.transpose({x})",
        "flatten": f"ops.reshape({x}, (-1,))",
        "rows": f"ops.reshape({x}, ({x}.shape[0], -1))",
        "turned": f"ops.reshape({x}, ({', '.join(swapped)},))",
        "split": f"ops.reshape({x}, ({shape_text(d, x)}, 1))",
        "expand": f"ops.expand_dims({x}, {axis})",
        "squeeze": f"ops.squeeze({x})",
        "flip": f"ops.flip({x}, {axis})",
        "roll": f"ops.roll({x}, {d.random.randint(-3, 3)}, {axis})",
        "swap": f"ops.swapaxes({x}, {axis}, 0)",
        "pad": f"ops.pad({x}, {[(d.random.randint(0, 2), d.random.randint(0, 2)) for _ in range(rank)]})",
        "tile": f"ops.tile({x}, ({d.random.randint(1, 3)},))",
        "repeat": f"ops.repeat({x}, 2, axis={axis})",
        "broadcast": f"ops.broadcast_to({x}, ({d.random.randint(1, 3)}, {shape_text(d, x)}))",
        "spread": f"ops.broadcast_to({x}[:1], ({d.random.randint(2, 4)}, *{x}.shape[1:]))",
        "tril": f"ops.{d.choose(('tril', 'triu'))}({x}, {d.random.randint(-1, 1)})",
        "concat": f"ops.concat([{x}, {d.choose(d.known([d.kind(x)], rank, rank))}], axis={axis})",
        "stack": f"ops.stack([{x}, {x}], axis={axis})",
        "cumulate": f"ops.{d.choose(('cumsum', 'cummax', 'cumprod'))}({x}, {axis})",
    }
    return d.emit(texts[d.choose(sorted(texts))])


def index(d: Draw) -> object:
    """Slices as people write them."""
    x = d.value(rank=1)
    parts, at = [], 0
    for n in d.shape(x)[: d.random.randint(1, d.rank(x))]:
        kinds = [
            ":",
            f":{max(n // 2, 1)}",
            f"{n // 2}:",
            "::2",
            "::-1",
            "1:",
            ":-1",
            "-1:",
            "0",
            "-1",
            "None",
        ]
        part = d.choose(kinds if n > 1 else [":", "::-1", "::2", ":1", "None"])
        parts.append(part)
        at += 1
    if d.chance(0.3):
        parts = ["...", *parts[:1]]
    return d.emit(f"{x}[{', '.join(parts)}]")


def select(d: Draw) -> object:
    """Ops that look up, order or choose."""
    x = d.value([*FLOATS, *INTS], rank=1)
    axis = d.axis(x) % d.rank(x)
    size = d.shape(x)[axis]
    if d.chance(0.5) and size:
        ids = d.input(d.choose(("i64", "i32")), [d.size()], Values(0, size - 1))
        d.indexed.append((ids, x, axis))
        return d.emit(f"ops.take({x}, {ids}, axis={axis})")
    return d.emit(
        d.choose(
            (
                f"ops.sort({x}, axis={axis}, descending={d.chance(0.5)})",
                f"ops.argsort({x}, axis={axis})",
                f"ops.top_k({x}, {d.random.randint(1, max(size, 1))}, axis={axis})",
                f"ops.clip({x}, {d.choose((-1, 0))}, {d.choose((1, 2))})",
                f"ops.cast({x}, {d.choose((*FLOATS, *INTS, 'bool'))!r})",
                f"ops.one_hot(ops.cast({x}, 'i64'), 5)",
            )
        ),
        2,
    )


def cast(d: Draw) -> object:
    x = d.value()
    return d.emit(f"ops.cast({x}, {d.choose((*FLOATS, d.main, d.main, *INTS, 'bool'))!r})")


def python(d: Draw) -> object:
    """What people do with sizes in Python."""
    x = d.floating(1)
    own = [i for i, n in enumerate(d.shape(x)) if n > 1 and n in d.sizes.values()]  # may be open
    at = d.choose(own) if own else d.random.randrange(d.rank(x))
    n = d.choose((d.shape(x)[at], d.choose(SIZES[:6])))  # a size of this call, or any
    return d.emit(
        d.choose(
            (
                f"{x} if {x}.shape[{at}] == {n} else -{x}",
                f"{x} if {x}.shape[{at}] != {n} else {x} * 0.5",
                f"{x} * 2.0 if {x}.shape[{at}] > {n} else {x}",
                f"-{x} if {x}.shape[{at}] in (1, 2, {n}) else {x}",
                f"{x} / {x}.shape[{at}]",
                f"ops.mul({x}, 1.0 / np.sqrt({x}.shape[{at}]))",
                f"{x} - {x}[:1]",
                f"{x} * len({x})",
            )
        )
    )


MOVES: tuple[tuple[float, Move], ...] = (
    (3.0, unary),
    (4.0, binary),
    (1.0, compare),
    (1.0, mask),
    (3.0, reduce),
    (2.5, normalise),
    (3.0, arrange),
    (2.5, index),
    (1.5, select),
    (0.7, cast),
    (1.5, python),
    (5.0, declared),
    (1.5, from_the_zoo),
    *LAYERS,
    *CONTROL,
    *IDIOMS,
)


def draw_program(seed: int, number: int, poison: bool = False) -> Program:
    """Program `number` of a seed: the same in every process.

    >>> draw_program(1, 2) == draw_program(1, 2)
    True
    """
    d = Draw(f"{seed}/{number}")
    for _ in range(d.random.randint(1, 2)):
        first(d)
    weights, moves = [w for w, _ in MOVES], [m for _, m in MOVES]
    try:
        for _ in range(d.random.randint(1, 9)):
            try:
                d.random.choices(moves, weights)[0](d)
            except NotHere:
                continue
    except Crashed:
        outputs: list[str] = list(d.steps[-1].results)
    else:
        outputs = choose_outputs(d)
    return finish(d, outputs, seed * 1_000_003 + number, poison)


def first(d: Draw) -> None:
    """An input to begin with; one that would be too large is a vector."""
    dims = [d.size() for _ in range(d.choose((0, 1, 2, 2, 3, 4)))]
    try:
        d.input(d.main, dims)
    except NotHere:
        d.input(d.main, dims[:1])


def choose_outputs(d: Draw) -> list[str]:
    last = d.steps[-1].results if d.steps else d.values[-1:]
    more = [v for v in d.values if v not in last and d.chance(0.12)]
    return [*last, *more][:4]


def finish(d: Draw, outputs: list[str], number: int, poison: bool) -> Program:
    """Transform, ways of running it, open sizes."""
    transform = ""
    floats = all(v in d.space and d.kind(v) in FLOATS for v in outputs)
    kinds = [dtype(x.dtype) for x in d.inputs]
    smooth = [i for i, kind in enumerate(kinds) if kind.is_float and not kind.storage_only]
    if floats and smooth and d.chance(0.3):
        names = [t for t in TRANSFORMS if t != "jvp" or len(smooth) == len(d.inputs)]
        transform = d.choose(names)
    sizes, others = dict(d.sizes), {}
    if "vmap" in transform:
        sizes[BATCH] = d.choose((1, 2, 3, 5))
        if not any(x.mapped for x in d.inputs):
            transform = ""
    named = sorted({s for x in d.inputs for s in x.shape if isinstance(s, str)} | (sizes.keys() & {BATCH}))
    for name in named:
        if d.chance(0.6) and sizes[name] > 1:
            met = [n for n in named if n != name and sizes[n] == sizes[name]]  # it may broadcast there
            few = (1,) if met and d.chance(0.3) else (*SIZES[:14], 0, 1)
            others[name] = d.choose([s for s in few if s != sizes[name]])
    asks = any(ASKS.search(step.text) for step in d.steps)
    ways = ["jit"] if asks and d.chance(0.7) else [d.choose(MAIN_WAYS)]  # who can answer
    ways += d.random.sample(MORE_WAYS, d.choose((0, 1, 1, 2)))
    if poison:
        ways = [*ways[:1], "poison"]
    wrt = d.choose(smooth) if smooth else 0
    equal = [(a, b) for a in named for b in named if a != b and sizes[a] == sizes[b] > 1]
    if equal and d.chance(0.5):  # what met as equals broadcasts at the other sizes
        one, other = d.choose(equal)
        others = {name: size for name, size in others.items() if name != other} | {one: 1}
    made = Program(
        tuple(d.inputs),
        tuple(d.steps),
        tuple(outputs),
        sizes,
        others,
        transform,
        wrt,
        tuple(dict.fromkeys(ways)),
        number,
    )
    return with_indices_in_range(made, d.indexed) if others else made


def with_indices_in_range(p: Program, indexed: Sequence[tuple[str, str, int]]) -> Program:
    """Indices that fit at both sets of sizes; where an axis is empty at one, or squeezed away, there is no
    second set."""
    types = types_of(replace(p, sizes={**p.sizes, **p.others}))
    for ids, of, axis in indexed:
        if of not in types:  # refused at these sizes
            continue
        shape = types[of][1]
        if not -len(shape) <= axis < len(shape) or shape[axis] == 0:
            return replace(p, others={})
        size = shape[axis]
        at = next(i for i, x in enumerate(p.inputs) if x.name == ids)
        values = p.inputs[at].values
        p = with_input(p, at, replace(p.inputs[at], values=replace(values, high=min(values.high, size - 1))))
    return p
