"""Random numbers from a counter: Philox 4x32-10 (Salmon and others, 2011), a function of key and position.

A key is u32[2]. Number i of a tensor is word i % 4 of block i // 4, whose counter is (offset + i // 4,
stream) as two 64-bit halves: the same key gives the same numbers for any threads, backend and run, and a
shorter tensor is the beginning of a longer one. There is no hidden state: draw twice with one key and you get
the same numbers twice, so give each use its own key with `random_split` or `random_fold`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OpAttributeError, TypeMismatchError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, dims, dtype_kind, integer
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, F64, U32, U64, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Sizes, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import Scalar, axes, call, const, convert, load, select
from rlx.ops.array.create import as_shape
from rlx.ops.array.shape import flat_index
from rlx.ops.math.elementwise import add, bitwise_and, cast, cos, log, minimum, mod, mul, shift_right, sqrt
from rlx.ops.nn.blocks import given
from rlx.ops.rules import lift_all, shape_of

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
ROUNDS = 10
LOW = 0xFFFFFFFF

# Streams separate numbers that are drawn from one key for different purposes.
DRAW, SECOND_DRAW, SPLIT, FOLD = 0, 1, 2, 3


def philox(counter: Sequence[np.ndarray], key: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Philox 4x32-10 on arrays: four counter words and two key words in, four random words out.

    >>> [hex(int(w)) for w in philox([np.uint32(0)] * 4, [np.uint32(0)] * 2)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c = [np.asarray(w, np.uint64) for w in counter]
    k = [np.asarray(w, np.uint64) for w in key]
    half, low = np.uint64(32), np.uint64(LOW)
    for _ in range(ROUNDS):
        p, q = c[0] * np.uint64(MULTIPLIERS[0]), c[2] * np.uint64(MULTIPLIERS[1])
        c = [(q >> half) ^ c[1] ^ k[0], q & low, (p >> half) ^ c[3] ^ k[1], p & low]
        k = [(w + np.uint64(step)) & low for w, step in zip(k, KEY_STEPS, strict=True)]
    return [np.asarray(w).astype(np.uint32) for w in c]


def _philox_scalar(counter: Sequence[Scalar], key: Sequence[Scalar]) -> list[Scalar]:
    """The same as expressions of a kernel; u32 arithmetic wraps."""

    def product(x: Scalar, factor: int) -> tuple[Scalar, Scalar]:
        wide = call("mul", convert(x, U64), const(factor, U64))
        return convert(call("shift_right", wide, const(32, U64)), U32), convert(wide, U32)

    def xor(*words: Scalar) -> Scalar:
        first, *rest = words
        for w in rest:
            first = call("bitwise_xor", first, w)
        return first

    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        (p_high, p_low), (q_high, q_low) = product(c[0], MULTIPLIERS[0]), product(c[2], MULTIPLIERS[1])
        c = [xor(q_high, c[1], k[0]), q_low, xor(p_high, c[3], k[1]), p_low]
        k = [call("add", w, const(step, U32)) for w, step in zip(k, KEY_STEPS, strict=True)]
    return c


@declare
class _random_bits(Op):
    """Random u32 or u64 numbers of a shape, for each key of [..., 2]; `offset` (u64, one per key) moves the
    block counter, `stream` is its upper half."""

    name = "random_bits"
    attrs = {"shape": Attr(dims), "dtype": Attr(dtype_kind, U32), "stream": Attr(integer, DRAW)}
    not_differentiable = "random bits depend on nothing continuous"

    def infer(
        self, key: TensorType, *offset: TensorType, shape: Shape, dtype: DType, stream: int
    ) -> TensorType:
        if key.dtype is not U32 or key.rank == 0 or key.shape[-1] != 2:
            raise TypeMismatchError(
                f"random_bits: a key is u32[2], got {key}; make one with rlx.ops.random_key(seed)"
            )
        if dtype not in (U32, U64):
            raise DTypeError(f"random_bits: gives u32 or u64, not {dtype}")
        if not 0 <= stream < 1 << 64:
            raise OpAttributeError(f"random_bits: stream {stream} is not a number of 64 bits")
        if len(offset) > 1:
            raise TypeMismatchError(
                f"random_bits: takes a key and perhaps an offset, got {1 + len(offset)} operands"
            )
        for t in offset:
            if t.dtype is not U64:
                raise DTypeError(f"random_bits: offset {t} must be u64")
            require_shape(
                t.shape, key.shape[:-1], f"random_bits: offset {t} is not one number per key of {key}"
            )
        return TensorType(dtype, (*key.shape[:-1], *shape))

    def ref(
        self, key: np.ndarray, *offset: np.ndarray, shape: Sequence[int], dtype: DType, stream: int
    ) -> np.ndarray:
        lead, count = key.shape[:-1], math.prod(shape)
        per = 4 if dtype is U32 else 2
        block = np.arange(-(-count // per), dtype=np.uint64)
        for start in offset:
            block = block + start[..., None]
        counter = [
            block & np.uint64(LOW),
            block >> np.uint64(32),
            np.uint64(stream & LOW),
            np.uint64(stream >> 32),
        ]
        words = philox(list(map(np.asarray, counter)), [key[..., 0, None], key[..., 1, None]])
        whole = np.stack(np.broadcast_arrays(*words), -1).reshape(*lead, block.shape[-1] * 4)
        if dtype is U64:
            pairs = whole.astype(np.uint64).reshape(*lead, -1, 2)
            whole = pairs[..., 0] | pairs[..., 1] << np.uint64(32)
        return np.ascontiguousarray(whole[..., :count]).reshape((*lead, *shape))

    def batch(
        self, flags: Sequence[bool], key: Node, *offset: Node, shape: Shape, dtype: DType, stream: int
    ) -> Node:
        made: Node = _random_bits(*lift_all(flags, (key, *offset)), shape=shape, dtype=dtype, stream=stream)
        return made

    def lower(self, key: TensorType, *offset: TensorType, shape: Shape, dtype: DType, stream: int) -> Form:
        space = (*key.shape[:-1], *shape)
        at = axes(len(space))
        lead = at[: key.rank - 1]
        number = flat_index(at[key.rank - 1 :], shape)
        per = 4 if dtype is U32 else 2
        block = convert(number // per, U64)
        for k, _ in enumerate(offset, 1):
            block = call("add", block, load(k, lead, U64))
        high = convert(call("shift_right", block, const(32, U64)), U32)
        counter = [convert(block, U32), high, const(stream & LOW, U32), const(stream >> 32, U32)]
        words = _philox_scalar(counter, [load(0, [*lead, i], U32) for i in (0, 1)])
        if dtype is U64:
            wide = [convert(w, U64) for w in words]
            words = [
                call("bitwise_or", a, call("shift_left", b, const(32, U64))) for a, b in (wide[:2], wide[2:])
            ]
        chosen = words[-1]
        for i in range(per - 2, -1, -1):
            chosen = select(call("equal", number % per, const(i)), words[i], chosen)
        return Map(space, chosen)

    def cost(self, key: TensorType, *offset: TensorType, shape: Shape, dtype: DType, stream: int) -> Dim:
        count: Dim = TensorType(dtype, (*key.shape[:-1], *shape)).numel
        return count * ROUNDS * 8

    def samples(self) -> list[Sample]:
        key, start = Arg("u32[2]", 0, 2**32 - 1), Arg("u64[]", 0, 2**40)
        return [
            Sample((key,), {"shape": (5,)}),
            Sample((key,), {"shape": (2, 3), "dtype": "u64"}),
            Sample((key,), {"shape": ()}),
            Sample((key,), {"shape": (0, 3)}),
            Sample((key, start), {"shape": (17,), "stream": 1 << 33}),
            Sample(
                (key, np.array(2**64 - 1, np.uint64)), {"shape": (9,), "stream": 2**64 - 1, "dtype": "u64"}
            ),
            Sample((Arg("u32[3,2]", 0, 2**32 - 1), Arg("u64[3]", 0, 99)), {"shape": (33,)}),
            Sample((Arg("u32[n,2]", 0, 2**32 - 1),), {"shape": ("n", 2)}),
        ]


# -- keys


def random_key(seed: Any) -> Any:
    """The key of a seed: a Python int of up to 64 bits, or an integer node.

    >>> random_key(7)
    array([7, 0], dtype=uint32)
    """
    if isinstance(seed, Node):
        if seed.rank or not seed.dtype.is_int:
            raise TypeMismatchError(f"random_key: seed {seed.type} is not one integer")
        wide = cast(seed, dtype=U64)
        halves = shift_right(wide.reshape(1), np.array([0, 32], np.uint64))
        return cast(halves, dtype=U32)
    number = int(seed)
    if not -(1 << 63) <= number < 1 << 64:
        raise OpAttributeError(f"random_key: seed {number} does not fit 64 bits")
    return np.array([number & LOW, number >> 32 & LOW], np.uint32)


@of_one
def random_split(key: Operand, count: Dim = 2) -> Tensor:
    """`count` new keys [count, 2] from one, independent of each other and of what is drawn with it.

    >>> random_split(random_key(0), 3).shape
    (3, 2)
    """
    return _random_bits(key, shape=(count, 2), stream=SPLIT)


@of_one
def random_fold(key: Operand, data: Operand) -> Tensor:
    """A new key from a key and an integer, for example the number of a step or a layer.

    >>> bool((random_fold(random_key(0), 1) == random_fold(random_key(0), 2)).any())
    False
    """
    offset = (
        cast(data, dtype=U64)
        if isinstance(data, Node)
        else np.asarray(int(np.asarray(data)) & (1 << 64) - 1, np.uint64)
    )
    return _random_bits(key, offset, shape=(2,), stream=FOLD)


# -- distributions


@of_one
def random_bits(
    key: Operand, shape: Sizes, dtype: DTypeLike = "u32", offset: Operand | None = None, stream: int = DRAW
) -> Tensor:
    """Random integers over all values of u32 or u64.

    >>> random_bits(random_key(0), 4)
    array([1713891541, 3781805453, 3159862348, 2600524760], dtype=uint32)
    """
    return _random_bits(key, *given(offset), shape=as_shape(shape), dtype=dtype, stream=stream)


def _need_float(name: str, kind: DTypeLike) -> DType:
    found = dtype(kind)
    if not found.is_float or found.storage_only:
        raise DTypeError(f"{name}: gives floating-point numbers, not {found}; cast the result")
    return found


@of_one
def unit(key: Operand, shape: Sizes, kind: DType) -> Tensor:
    """Uniform in [0, 1): as many bits as the dtype has in its mantissa, so that every value is exact."""
    digits = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}[kind.name]
    source = "u64" if kind is F64 else "u32"
    bits = shift_right(random_bits(key, shape, source), (64 if kind is F64 else 32) - digits)
    return mul(cast(bits, dtype=kind), 2.0**-digits)


@of_one
def uniform(
    key: Operand, shape: Sizes = (), low: float = 0.0, high: float = 1.0, dtype: DTypeLike = "f32"
) -> Tensor:
    """Uniform floating-point numbers in [low, high).

    >>> x = uniform(random_key(1), 1000, -1.0, 1.0)
    >>> bool(((x >= -1) & (x < 1)).all()), bool(abs(x.mean()) < 0.1)
    (True, True)
    """
    kind = _need_float("uniform", dtype)
    if not low < high:
        raise OpAttributeError(f"uniform: low {low} is not below high {high}")
    x = unit(key, shape, kind)
    if (low, high) == (0.0, 1.0):
        return x
    last = np.nextafter(np.asarray(high).astype(kind.np), np.asarray(low).astype(kind.np))
    return minimum(add(mul(x, high - low), low), last)  # the sum may round up to high


@of_one
def normal(
    key: Operand, shape: Sizes = (), mean: float = 0.0, std: float = 1.0, dtype: DTypeLike = "f32"
) -> Tensor:
    """Normal numbers by Box and Muller: sqrt(-2 log u) cos(2 pi v) for uniform u in (0, 1] and v in [0, 1).

    u has 24 bits (53 for f64), so that no value is further than 5.8 (8.6) deviations from the mean.

    >>> x = normal(random_key(1), 1000)
    >>> bool(abs(x.mean()) < 0.1), bool(abs(x.std() - 1) < 0.1)
    (True, True)
    """
    kind = _need_float("normal", dtype)
    if kind is F64:
        near, angle = (random_bits(key, shape, "u64", stream=s) for s in (DRAW, SECOND_DRAW))
        digits, wide = 53, F64
        near, angle = shift_right(near, 11), shift_right(angle, 11)
    else:
        both = random_bits(key, shape, "u64")
        digits, wide = 24, F32
        near, angle = shift_right(both, 40), bitwise_and(shift_right(both, 8), (1 << 24) - 1)
    u = (cast(near, dtype=wide) + 1.0) * 2.0**-digits
    turn = cast(angle, dtype=wide) * (2.0 * math.pi * 2.0**-digits)
    x = sqrt(log(u) * -2.0) * cos(turn)
    x = x if (mean, std) == (0.0, 1.0) else x * std + mean
    return x if kind is wide else cast(x, dtype=kind)


@of_one
def bernoulli(key: Operand, p: Operand = 0.5, shape: Sizes | None = None) -> Tensor:
    """True with probability p, a number or a floating-point tensor; its shape by default.

    >>> bernoulli(random_key(3), 1.0, 4).tolist(), bernoulli(random_key(3), 0.0, 2).tolist()
    ([True, True, True, True], [False, False])
    """
    size = shape_of(p) if shape is None else as_shape(shape)
    if isinstance(p, (int, float)):
        return uniform(key, size) < float(p)
    kind = p.dtype if isinstance(p, Node) else dtype(np.asarray(p).dtype)
    return unit(key, size, _need_float("bernoulli", kind)) < p


@of_one
def dropout_mask(key: Operand, shape: Sizes, rate: float = 0.5) -> Tensor:
    """Which elements dropout keeps: true with probability 1 - rate. Pass it to `dropout` as its mask.

    >>> dropout_mask(random_key(0), (2, 3), 0.0).all()
    np.True_
    """
    if not 0 <= rate < 1:
        raise OpAttributeError(f"dropout_mask: rate {rate} is not in [0, 1)")
    return bernoulli(key, 1.0 - rate, shape)


@of_one
def randint(key: Operand, shape: Sizes, low: int, high: int, dtype: DTypeLike = "i64") -> Tensor:
    """Integers in [low, high), each of them likely to within (high - low) / 2**64.

    >>> x = randint(random_key(5), 1000, -3, 4)
    >>> int(x.min()), int(x.max())
    (-3, 3)
    """
    kind = _integer("randint", dtype)
    low, high = int(low), int(high)
    if not kind.min_value <= low < high <= kind.max_value + 1:
        raise OpAttributeError(f"randint: [{low}, {high}) is empty or does not fit {kind}")
    if high - low >= 1 << 63:
        raise OpAttributeError(f"randint: [{low}, {high}) is too wide; draw random_bits instead")
    drawn = mod(random_bits(key, shape, "u64"), high - low)
    whole = cast(drawn, dtype="i64") + low if kind is not U64 else drawn + low
    return cast(whole, dtype=kind)


def _integer(name: str, kind: DTypeLike) -> DType:
    found = dtype(kind)
    if not found.is_int or found.storage_only:
        raise DTypeError(f"{name}: gives integers, not {found}")
    return found


__all__ = [
    "bernoulli",
    "dropout_mask",
    "normal",
    "randint",
    "random_bits",
    "random_fold",
    "random_key",
    "random_split",
    "uniform",
]
