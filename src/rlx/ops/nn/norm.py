"""Normalisations: layer, rms, group, instance, batch, and local response over channels.

Statistics take two passes (mean, then squares of distances). Scale and shift of `batch_norm` become one
multiplication and one addition whose factors depend on parameters only, so they fold into a neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, boolean, integer, real
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType, TupleType, Type
from rlx.ops.array.create import iota
from rlx.ops.array.shape import reshape, slice_axis
from rlx.ops.math.contract import einsum
from rlx.ops.math.elementwise import pow, rsqrt
from rlx.ops.math.reduce import reduce_sum
from rlx.ops.math.stats import count, variance
from rlx.ops.nn.blocks import given
from rlx.ops.rules import (
    expand_in_f32,
    in_f32,
    is_real_float,
    need_dtype,
    normal_axis,
    op_call,
    rank_of,
    require_stretch,
    same_dtype,
    shape_of,
)


def _need_floats(name: str, types: Sequence[TensorType]) -> None:
    for t in types:
        need_dtype(name, t, is_real_float)
    same_dtype(name, types)


def _mean(x: Node, axes: Sequence[int]) -> Node:
    made: Node = reduce_sum(x, axes=tuple(axes), keepdims=True) / count(x, axes)
    return made


def _centre_and_scale(x: Node, axes: Sequence[int], eps: float) -> Node:
    """x with mean 0 and variance 1 over axes."""
    apart = x - _mean(x, axes)
    made: Node = apart * rsqrt(_mean(apart * apart, axes) + eps)
    return made


def _standard(x: np.ndarray, axes: tuple[int, ...], eps: float) -> np.ndarray:
    """The same in NumPy, computed in f64."""
    wide = x.astype(np.float64)
    number = np.float64(math.prod(x.shape[a] for a in axes))
    mean = wide.sum(axes, keepdims=True) / number
    var = ((wide - mean) ** 2).sum(axes, keepdims=True) / number
    return np.asarray((wide - mean) / np.sqrt(var + eps))


# -- over the last axes


class _TrailingNorm(Op):
    """Base of norms over the axes from `axis` on; scale and bias broadcast to x."""

    level = Level.HIR
    attrs = {"axis": Attr(integer), "eps": Attr(real, 1e-5)}
    operands: tuple[str, ...] = ("x", "scale", "bias")

    def infer(self, *types: TensorType, axis: int, eps: float) -> TensorType:
        if not 1 <= len(types) <= len(self.operands):
            raise TypeMismatchError(
                f"{self.name}: takes {', '.join(self.operands)}; got {len(types)} operands"
            )
        _need_floats(self.name, types)
        x = types[0]
        if not 0 <= axis < x.rank:
            raise ShapeError(f"{self.name}: axis {axis} is out of range for {x}")
        for what, t in zip(self.operands[1:], types[1:], strict=False):
            require_stretch(t.shape, x.shape, f"{self.name}: {what} {t} does not broadcast to {x}")
        return x

    def samples(self) -> list[Sample]:
        def one(
            *texts: str, axis: int = 1, grad: bool = True, special: bool = False, **attrs: object
        ) -> Sample:
            args = tuple(
                Arg(t, special=special and i == 0) for i, t in enumerate(texts[: len(self.operands)])
            )
            return Sample(args, {"axis": axis, **attrs}, grad=grad)

        return [
            one("f32[3,5]", "f32[5]", "f32[5]"),
            one("f32[2,3,4]", "f32[4]", "f32[4]", axis=2),
            one("f32[2,3,4]", "f32[3,4]", "f32[3,4]", axis=1),
            one("f32[7]", "f32[7]", "f32[1]", axis=0, eps=1e-2),
            one("f32[3,1]", "f32[1]"),
            one("f32[3,17]"),
            one("f32[0,5]", "f32[5]", "f32[5]", grad=False),
            one("f32[3,0]", "f32[0]", "f32[0]", grad=False),
            one("f32[n,m]", "f32[m]", "f32[m]", grad=False),
            one("f32[n,33]", "f32[33]", "f32[33]", grad=False),
            one("f16[3,17]", "f16[17]", "f16[17]", grad=False),
            one("bf16[3,17]", "bf16[17]", "bf16[17]", grad=False),
            one("f32[9,7]", "f32[7]", "f32[7]", grad=False, special=True),
        ]


def _trailing(axis: int, rank: int) -> tuple[int, ...]:
    return tuple(range(axis, rank))


def _layer_norm_ref(x: np.ndarray, *rest: np.ndarray, axis: int, eps: float) -> np.ndarray:
    y = _standard(x, _trailing(axis, x.ndim), eps)
    y = y * rest[0] if rest else y
    return np.asarray(y + rest[1] if len(rest) > 1 else y, x.dtype)


def _layer_norm_expand(x: Node, *rest: Node, axis: int, eps: float) -> Node:
    y = _centre_and_scale(x, _trailing(axis, x.rank), eps)
    y = y * rest[0] if rest else y
    return y + rest[1] if len(rest) > 1 else y


@declare
class _layer_norm(_TrailingNorm):
    """(x - mean) / sqrt(variance + eps) over the axes from `axis` on, times scale plus bias."""

    name = "layer_norm"
    ref = staticmethod(in_f32(_layer_norm_ref))
    expand = staticmethod(expand_in_f32(_layer_norm_expand))


@of_one
def layer_norm(
    x: Operand, scale: Operand | None = None, bias: Operand | None = None, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the axes from `axis` on.

    >>> layer_norm(np.array([1.0, 3.0]), eps=0.0)
    array([-1.,  1.])
    """
    if scale is None and bias is not None:
        raise TypeMismatchError("layer_norm: a bias needs a scale; give ones as the scale")
    return _layer_norm(x, *given(scale, bias), axis=normal_axis("layer_norm", axis, rank_of(x)), eps=eps)


def _rms_norm_ref(x: np.ndarray, *scale: np.ndarray, axis: int, eps: float) -> np.ndarray:
    axes = _trailing(axis, x.ndim)
    wide = x.astype(np.float64)
    square = (wide * wide).sum(axes, keepdims=True) / np.float64(math.prod(x.shape[a] for a in axes))
    y = wide / np.sqrt(square + eps)
    return np.asarray(y * scale[0] if scale else y, x.dtype)


def _rms_norm_expand(x: Node, *scale: Node, axis: int, eps: float) -> Node:
    y = x * rsqrt(_mean(x * x, _trailing(axis, x.rank)) + eps)
    made: Node = y * scale[0] if scale else y
    return made


@declare
class _rms_norm(_TrailingNorm):
    """x / sqrt(mean(x * x) + eps) over the axes from `axis` on, times scale."""

    name = "rms_norm"
    operands = ("x", "scale")
    ref = staticmethod(in_f32(_rms_norm_ref))
    expand = staticmethod(expand_in_f32(_rms_norm_expand))


@of_one
def rms_norm(x: Operand, scale: Operand | None = None, axis: int = -1, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x * x) + eps) * scale over the axes from `axis` on.

    >>> rms_norm(np.array([2.0, -2.0]), eps=0.0)
    array([ 1., -1.])
    """
    return _rms_norm(x, *given(scale), axis=normal_axis("rms_norm", axis, rank_of(x)), eps=eps)


# -- over channels: x is [batch, channels, ...]


def _per_channel(v: Operand, rank: int) -> Tensor:
    """A vector of channels as an operand that broadcasts against x."""
    return reshape(v, (shape_of(v)[0], *(1,) * (rank - 2)))


class _ChannelNorm(Op):
    """Base of norms of [batch, channels, ...] with one scale and one bias per channel."""

    level = Level.HIR
    vectors: tuple[str, ...] = ("scale", "bias")

    def check(self, *types: TensorType) -> TensorType:
        if len(types) != 1 + len(self.vectors):
            raise TypeMismatchError(
                f"{self.name}: takes x, {', '.join(self.vectors)}; got {len(types)} operands"
            )
        _need_floats(self.name, types)
        x = types[0]
        if x.rank < 2:
            raise ShapeError(f"{self.name}: x {x} needs the axes batch and channels")
        for what, t in zip(self.vectors, types[1:], strict=True):
            told = f"{self.name}: {what} {t} is not [{x.shape[1]}], the channels of x {x}"
            if t.rank != 1:
                raise ShapeError(told)
            require_equal(t.shape[0], x.shape[1], told)
        return x


def _group_norm_ref(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, *, groups: int, eps: float
) -> np.ndarray:
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    y = _standard(split, tuple(range(2, split.ndim)), eps).reshape(x.shape)
    shape = (-1, *(1,) * (x.ndim - 2))
    return np.asarray(y * scale.reshape(shape) + bias.reshape(shape), x.dtype)


def _group_norm_expand(x: Node, scale: Node, bias: Node, *, groups: int, eps: float) -> Node:
    channels = x.shape[1]
    split = reshape(x, (x.shape[0], groups, channels // groups, *x.shape[2:]))
    affine = (groups, channels // groups, *(1,) * (x.rank - 2))
    y = _centre_and_scale(split, range(2, split.rank), eps) * reshape(scale, affine) + reshape(bias, affine)
    made: Node = reshape(y, x.shape)
    return made


@declare
class _group_norm(_ChannelNorm):
    """Mean 0 and variance 1 over each group of channels of each sample, then scale and bias per channel."""

    name = "group_norm"
    attrs = {"groups": Attr(integer), "eps": Attr(real, 1e-5)}
    ref = staticmethod(in_f32(_group_norm_ref))
    expand = staticmethod(expand_in_f32(_group_norm_expand))

    def infer(self, *types: TensorType, groups: int, eps: float) -> TensorType:
        x = self.check(*types)
        if groups < 1 or not isinstance(x.shape[1], int) or x.shape[1] % groups:
            raise ShapeError(f"group_norm: the channels of x {x} do not split into {groups} groups")
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,4,3]"), Arg("f32[4]"), Arg("f32[4]")), {"groups": 2}),
            Sample((Arg("f32[1,3,2,5]"), Arg("f32[3]"), Arg("f32[3]")), {"groups": 1, "eps": 1e-2}),
            Sample((Arg("f32[2,6]"), Arg("f32[6]"), Arg("f32[6]")), {"groups": 2}),
            Sample((Arg("f32[0,4,3]"), Arg("f32[4]"), Arg("f32[4]")), {"groups": 4}, grad=False),
            Sample((Arg("f32[n,4,m]"), Arg("f32[4]"), Arg("f32[4]")), {"groups": 2}, grad=False),
            Sample((Arg("f16[2,4,9]"), Arg("f16[4]"), Arg("f16[4]")), {"groups": 2}, grad=False),
        ]


@of_one
def group_norm(x: Operand, scale: Operand, bias: Operand, groups: int, eps: float = 1e-5) -> Tensor:
    """Normalise groups of channels of x [batch, channels, ...]; scale and bias are per channel.

    >>> group_norm(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), groups=1, eps=0.0)
    array([[-1.,  1.]])
    """
    return _group_norm(x, scale, bias, groups=groups, eps=eps)


def _instance_norm_ref(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, *, eps: float) -> np.ndarray:
    shape = (-1, *(1,) * (x.ndim - 2))
    y = _standard(x, tuple(range(2, x.ndim)), eps)
    return np.asarray(y * scale.reshape(shape) + bias.reshape(shape), x.dtype)


def _instance_norm_expand(x: Node, scale: Node, bias: Node, *, eps: float) -> Node:
    y = _centre_and_scale(x, range(2, x.rank), eps)
    made: Node = y * _per_channel(scale, x.rank) + _per_channel(bias, x.rank)
    return made


@declare
class _instance_norm(_ChannelNorm):
    """Mean 0 and variance 1 over each channel of each sample, then scale and bias per channel."""

    name = "instance_norm"
    attrs = {"eps": Attr(real, 1e-5)}
    ref = staticmethod(in_f32(_instance_norm_ref))
    expand = staticmethod(expand_in_f32(_instance_norm_expand))

    def infer(self, *types: TensorType, eps: float) -> TensorType:
        x = self.check(*types)
        if x.rank < 3:
            raise ShapeError(f"instance_norm: x {x} needs axes after batch and channels to average over")
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3,5]"), Arg("f32[3]"), Arg("f32[3]"))),
            Sample((Arg("f32[1,1,2,7]"), Arg("f32[1]"), Arg("f32[1]")), {"eps": 1e-2}),
            Sample((Arg("f32[0,3,5]"), Arg("f32[3]"), Arg("f32[3]")), grad=False),
            Sample((Arg("f32[n,3,m,2]"), Arg("f32[3]"), Arg("f32[3]")), grad=False),
            Sample((Arg("f16[2,3,9]"), Arg("f16[3]"), Arg("f16[3]")), grad=False),
        ]


@of_one
def instance_norm(x: Operand, scale: Operand, bias: Operand, eps: float = 1e-5) -> Tensor:
    """Normalise every channel of every sample of x [batch, channels, ...]; scale and bias are per channel.

    >>> instance_norm(np.array([[[1.0, 3.0]]]), np.ones(1), np.zeros(1), eps=0.0)
    array([[[-1.,  1.]]])
    """
    return _instance_norm(x, scale, bias, eps=eps)


def _batch_norm_ref(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, mean: np.ndarray, var: np.ndarray,
    *, eps: float, training: bool, momentum: float,
) -> Any:  # fmt: skip
    shape = (-1, *(1,) * (x.ndim - 2))
    wide = x.astype(np.float64)
    if not training:
        factor = scale / np.sqrt(var.astype(np.float64) + eps)
        shift = bias - mean * factor
        return np.asarray(wide * factor.reshape(shape) + shift.reshape(shape), x.dtype)
    axes = (0, *range(2, x.ndim))
    number = np.float64(math.prod(x.shape[a] for a in axes))
    own_mean = wide.sum(axes) / number
    own_var = ((wide - own_mean.reshape(shape)) ** 2).sum(axes) / number
    y = (wide - own_mean.reshape(shape)) / np.sqrt(own_var.reshape(shape) + eps)
    y = np.asarray(y * scale.reshape(shape) + bias.reshape(shape), x.dtype)
    new_mean = np.asarray(momentum * mean + (1 - momentum) * own_mean, x.dtype)
    new_var = np.asarray(momentum * var + (1 - momentum) * own_var, x.dtype)
    return y, new_mean, new_var


def _batch_norm_expand(
    x: Node, scale: Node, bias: Node, mean: Node, var: Node, *, eps: float, training: bool, momentum: float
) -> Any:
    if not training:
        factor = scale * rsqrt(var + eps)
        shift = bias - mean * factor
        return x * _per_channel(factor, x.rank) + _per_channel(shift, x.rank)
    axes = (0, *range(2, x.rank))
    batch_mean = reduce_sum(x, axes=axes, keepdims=False) / count(x, axes)
    batch_var = variance(x, axes, keepdims=False)
    factor = scale * rsqrt(batch_var + eps)
    y = (x - _per_channel(batch_mean, x.rank)) * _per_channel(factor, x.rank) + _per_channel(bias, x.rank)
    new_mean = mean * momentum + batch_mean * (1 - momentum)
    new_var = var * momentum + batch_var * (1 - momentum)
    return y, new_mean, new_var


@declare
class _batch_norm(_ChannelNorm):
    """(x - mean) / sqrt(var + eps) * scale + bias, per channel.

    Without training it is x times a factor plus a shift, both of parameters only; infinite parameters mean
    what these two make of them. When training, mean and variance are those of the batch, and the results are
    y and the running mean and variance: old * momentum + batch * (1 - momentum). The variance divides by the
    number of elements.
    """

    name = "batch_norm"
    vectors = ("scale", "bias", "mean", "var")
    attrs = {"eps": Attr(real, 1e-5), "training": Attr(boolean, False), "momentum": Attr(real, 0.9)}
    ref = staticmethod(in_f32(_batch_norm_ref))
    expand = staticmethod(expand_in_f32(_batch_norm_expand))

    def infer(self, *types: TensorType, eps: float, training: bool, momentum: float) -> Type:
        x = self.check(*types)
        return TupleType((x, types[3], types[4])) if training else x

    def samples(self) -> list[Sample]:
        def one(x: str, c: int, kind: str = "f32", grad: bool = True, **attrs: object) -> Sample:
            v = f"{kind}[{c}]"
            return Sample((Arg(f"{kind}{x}"), Arg(v), Arg(v), Arg(v), Arg(v, 0.3, 2.0)), attrs, grad=grad)

        return [
            one("[2,3,5]", 3),
            one("[2,3,1,2]", 3, eps=1e-2),
            one("[4,3]", 3),
            one("[0,3,2]", 3, grad=False),
            one("[n,3,m]", 3, grad=False),
            one("[2,4,9]", 4, "f16", grad=False),
            one("[2,3,5]", 3, training=True),
            one("[3,2,2,2]", 2, training=True, momentum=0.5),
            one("[n,3,m]", 3, training=True, grad=False),
        ]


def batch_norm(
    x: Operand,
    scale: Operand,
    bias: Operand,
    mean: Operand,
    var: Operand,
    eps: float = 1e-5,
    training: bool = False,
    momentum: float = 0.9,
) -> Tensor:
    """Normalise channels of x [batch, channels, ...] by given mean and variance or, training, the batch's.

    Training returns (y, running mean, running variance), the running ones being
    old * momentum + batch * (1 - momentum).

    >>> zero, one = np.zeros(1), np.ones(1)
    >>> batch_norm(np.array([[3.0]]), one * 2, one, one, one, eps=0.0)
    array([[5.]])
    """
    return _batch_norm(x, scale, bias, mean, var, eps=eps, training=training, momentum=momentum)


# -- local response


def _lrn_ref(x: np.ndarray, *, size: int, alpha: float, beta: float, bias: float) -> np.ndarray:
    total = np.zeros(x.shape, np.float64)
    channels = x.shape[1]
    for c in range(channels):
        low, high = max(0, c - (size - 1) // 2), min(channels, c + size // 2 + 1)
        total[:, c] = (x[:, low:high].astype(np.float64) ** 2).sum(1)
    return np.asarray(x / (bias + alpha / size * total) ** beta, x.dtype)


MOST_SHIFTS = 64
"""Channels of a neighbourhood up to which they are added one by one."""


def _lrn_expand(x: Node, *, size: int, alpha: float, beta: float, bias: float) -> Node:
    before, after = (size - 1) // 2, size // 2
    if size > MOST_SHIFTS:
        total = _band_sum(x * x, before, after)
    else:
        around = tuple((before, after) if i == 1 else (0, 0) for i in range(x.rank))
        padded = op_call("pad", x * x, padding=around)
        total = slice_axis(padded, 1, 0, x.shape[1])
        for shift in range(1, size):
            total = total + slice_axis(padded, 1, shift, x.shape[1])
    made: Node = x * pow(total * (alpha / size) + bias, -beta)
    return made


def _band_sum(x: Node, before: int, after: int) -> Node:
    """Sums over the channels around each: a matmul with ones near the diagonal."""
    channels, most = x.shape[1], (1 << 62) - 1
    square = (channels, channels)
    apart = iota(square, 1) - iota(square, 0)
    near = (apart >= -min(before, most)) & (apart <= min(after, most))
    inner: Dim = 1
    for d in x.shape[2:]:
        inner = inner * d
    flat = reshape(x, (x.shape[0], channels, inner))
    total = einsum("ij,njk->nik", op_call("cast", near, dtype=x.dtype), flat)
    made: Node = reshape(total, x.shape)
    return made


@declare
class _lrn(Op):
    """x / (bias + alpha / size * sum of squares of `size` neighbouring channels) ** beta."""

    name = "lrn"
    level = Level.HIR
    arity = 1
    attrs = {
        "size": Attr(integer),
        "alpha": Attr(real, 1e-4),
        "beta": Attr(real, 0.75),
        "bias": Attr(real, 1.0),
    }
    ref = staticmethod(in_f32(_lrn_ref))
    expand = staticmethod(expand_in_f32(_lrn_expand))

    def infer(self, x: TensorType, *, size: int, alpha: float, beta: float, bias: float) -> TensorType:
        need_dtype(self.name, x, is_real_float)
        if x.rank < 2:
            raise ShapeError(f"lrn: x {x} needs the axes batch and channels")
        if size < 1:
            raise OpAttributeError(f"lrn: size {size} is not at least 1")
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,5,3]"),), {"size": 3, "alpha": 0.5}),
            Sample((Arg("f32[2,5,3]"),), {"size": 4, "alpha": 0.5, "beta": 0.5, "bias": 2.0}),
            Sample((Arg("f32[1,1,2]"),), {"size": 1}),
            Sample((Arg("f32[2,2]"),), {"size": 7, "alpha": 0.9}),
            Sample((Arg("f32[2,70,2]"),), {"size": 67, "alpha": 0.9}),
            Sample((Arg("f32[1,3]"),), {"size": 1 << 63}, grad=False),
            Sample((Arg("f32[0,3,2]"),), {"size": 3}, grad=False),
            Sample((Arg("f32[n,4,m]"),), {"size": 5}, grad=False),
            Sample((Arg("f16[1,4,3]"),), {"size": 3}, grad=False),
        ]


@of_one
def lrn(x: Operand, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """x / (bias + alpha / size * sum of squares over `size` channels around) ** beta, as ONNX LRN.

    >>> lrn(np.ones((1, 2)), size=1, alpha=1.0, beta=1.0, bias=1.0)
    array([[0.5, 0.5]])
    """
    return _lrn(x, size=size, alpha=alpha, beta=beta, bias=bias)


__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "lrn", "rms_norm"]
