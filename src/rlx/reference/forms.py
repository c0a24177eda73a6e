"""Evaluates forms with NumPy: checks lowering rules without native code, and defines what a form means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.errors import KernelError, UnsupportedError
from rlx.ir.dim import Dim, evaluate
from rlx.ir.dtype import F64, convert
from rlx.kernel.form import CodedContract, Contract, Conv, Cumulate, Form, Map, Pieces, Reduce, Scatter, Sort
from rlx.kernel.rounded import round_groups
from rlx.kernel.scalar import PRIMITIVES, Scalar

Arrays = Sequence[np.ndarray]


def run_form(form: Form, operands: Arrays, binding: Mapping[str, int], shape: Sequence[int]) -> object:
    """The value of a form; `shape` is the shape of its (first) result."""
    for kind, run in _RUNNERS.items():
        if isinstance(form, kind):
            with np.errstate(all="ignore"):
                out = run(form, operands, binding)
            return out if isinstance(out, tuple) else np.asarray(out).reshape(tuple(shape))
    raise UnsupportedError(f"form {type(form).__name__} has no NumPy evaluation")


def sizes(space: Sequence[Dim], binding: Mapping[str, int]) -> tuple[int, ...]:
    """A space with its symbols bound."""
    return tuple(d if isinstance(d, int) else evaluate(d, binding) for d in space)


def evaluate_scalar(
    s: Scalar,
    space: Sequence[int],
    operands: Arrays,
    binding: Mapping[str, int],
    acc: np.ndarray | None = None,
) -> np.ndarray:
    """An expression at every point of a space."""
    grid = np.ogrid[tuple(slice(0, n) for n in space)] if space else ()
    memo: dict[Scalar, np.ndarray] = {}
    for e in s.walk():
        memo[e] = _value(e, [memo[a] for a in e.args], grid, operands, binding, acc)
    return np.broadcast_to(memo[s], tuple(space))


def _value(
    e: Scalar,
    args: list[np.ndarray],
    grid: Sequence[np.ndarray],
    operands: Arrays,
    binding: Mapping[str, int],
    acc: np.ndarray | None,
) -> np.ndarray:
    if e.prim == "const":
        return np.asarray(e.data).astype(e.dtype.np)
    if e.prim == "axis":
        return np.asarray(grid[e.data], np.int64)
    if e.prim == "size":
        return np.asarray(evaluate(e.data, binding), np.int64)
    if e.prim == "acc":
        return np.asarray(acc)
    if e.prim == "cast":
        return convert(args[0], e.dtype, saturate=e.data)
    if e.prim in ("load", "load_checked"):
        return _load(operands[e.data], args, checked=e.prim == "load_checked")
    if e.prim == "load_or":
        guard, fill = args[0], args[1]
        index = [np.where(guard, i, 0) for i in args[2:]]
        source = operands[e.data]
        if source.size == 0:
            return np.broadcast_to(fill, np.broadcast_shapes(guard.shape, *(i.shape for i in index)))
        return np.where(guard, _load(source, index, False), fill)
    return np.asarray(PRIMITIVES[e.prim].ref(*args))


def _load(source: np.ndarray, index: list[np.ndarray], checked: bool) -> np.ndarray:
    if not index:
        return source
    for i, n in zip(index, source.shape, strict=True):
        if i.size and (i.min() < 0 or i.max() >= n):
            found = int(i.min() if i.min() < 0 else i.max())
            raise KernelError(f"index {found} is out of range for an axis of size {n}")
    spread = np.broadcast_arrays(*index)
    if spread[0].size == 0:
        return np.empty(spread[0].shape, source.dtype)
    return source[tuple(spread)]


def _map(form: Map, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    return evaluate_scalar(form.body, sizes(form.space, binding), operands, binding)


def _pieces(form: Pieces, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    out = np.empty(sizes(form.space, binding), form.pieces[0].body.dtype.np)
    for piece in form.pieces:
        extent = sizes(piece.extent, binding)
        box = tuple(slice(o, o + n) for o, n in zip(sizes(piece.offset, binding), extent, strict=True))
        out[box] = evaluate_scalar(piece.body, extent, operands, binding)
    return out


_COMBINE: dict[str, Callable[..., object]] = {
    "sum": lambda x, axes: np.sum(x, axis=axes, dtype=x.dtype),
    "prod": lambda x, axes: np.prod(x, axis=axes, dtype=x.dtype),
    "max": lambda x, axes: np.max(x, axis=axes, initial=_end(x.dtype, low=True)),
    "min": lambda x, axes: np.min(x, axis=axes, initial=_end(x.dtype, low=False)),
    "any": lambda x, axes: np.any(x, axis=axes),
    "all": lambda x, axes: np.all(x, axis=axes),
}


def _end(d: np.dtype, low: bool) -> Any:
    if d.kind in "iu":
        return np.iinfo(d).min if low else np.iinfo(d).max
    return np.asarray(-np.inf if low else np.inf).astype(d)


def _reduce(form: Reduce, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    space = sizes(form.space, binding)
    values = evaluate_scalar(form.body, space, operands, binding)
    narrow = values.dtype.itemsize == 2 and values.dtype.kind not in "iu"
    if narrow:
        values = values.astype(np.float32)
    if form.combine in ("argmax", "argmin"):
        find = np.argmax if form.combine == "argmax" else np.argmin
        (axis,) = form.axes
        found = (
            values.shape[axis] - 1 - find(np.flip(values, axis), axis) if form.last else find(values, axis)
        )
        return np.asarray(found)
    out = np.asarray(_COMBINE[form.combine](values, form.axes))
    if form.finish is not None:
        out = evaluate_scalar(form.finish, out.shape, operands, binding, acc=out)
    return convert(out, form.dtype)


def _contract(form: Contract, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    a, b = operands[0], operands[1]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [""] * a.ndim
    right = [""] * b.ndim
    for i, j in (*form.batch, *form.contract):
        left[i] = right[j] = next(letters)
    left = [c or next(letters) for c in left]
    right = [c or next(letters) for c in right]
    summed = {left[i] for i, _ in form.contract}
    batch = [left[i] for i, _ in form.batch]
    out = batch + [c for c in left if c not in summed and c not in batch]
    out += [c for c in right if c not in summed and c not in batch]
    wide = form.accumulate.np
    made = np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", a.astype(wide), b.astype(wide))
    return convert(np.asarray(made), form.dtype)


def _coded(form: CodedContract, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    """Rounded rows times decoded weights, in f64."""
    x, codes, *factors = operands
    k = codes.shape[-2]
    rows, scales = round_groups(x, form.group)
    rounded = (rows.astype(np.float64) * scales[..., None]).reshape(
        *x.shape[:-1], rows.shape[-2] * form.group
    )
    scale, *second = (np.repeat(f.astype(np.float64), form.group, axis=-2)[..., :k, :] for f in factors)
    if form.minimums:
        weights = codes * scale - second[0]
    else:
        weights = (codes - second[0] if second else codes) * scale
    inner = replace(form.contract, accumulate=F64)
    return _contract(inner, (rounded[..., :k], weights), binding)


def _conv(form: Conv, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    x, w = operands[0].astype(form.accumulate.np), operands[1].astype(form.accumulate.np)
    pads = [sizes(p, binding) for p in form.padding]
    crop = [slice(max(-lo, 0), n - max(-hi, 0)) for n, (lo, hi) in zip(x.shape[2:], pads, strict=True)]
    grown = [(0, 0), (0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in pads)]
    x = np.pad(x[(slice(None), slice(None), *crop)], grown, constant_values=form.fill)
    out = np.zeros(sizes(form.out, binding), x.dtype)
    per_in, per_out = w.shape[1], w.shape[0] // form.groups
    for tap in np.ndindex(*w.shape[2:]):
        box = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, form.dilations, out.shape[2:], form.strides, strict=True)
        )
        for g in range(form.groups):
            part = x[(slice(None), slice(g * per_in, (g + 1) * per_in), *box)]
            kernel = w[(slice(g * per_out, (g + 1) * per_out), slice(None), *tap)]
            out[:, g * per_out : (g + 1) * per_out] += np.einsum("ni...,oi->no...", part, kernel)
    return convert(out, form.dtype)


def _cumulate(form: Cumulate, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    x = evaluate_scalar(form.body, sizes(form.space, binding), operands, binding)
    x = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x
    x = np.flip(x, form.axis) if form.reverse else x
    run: dict[str, Callable[..., np.ndarray]] = {
        "sum": np.cumsum,
        "prod": np.cumprod,
        "max": np.maximum.accumulate,
        "min": np.minimum.accumulate,
    }
    out = run[form.combine](x, axis=form.axis)
    if form.exclusive and x.shape[form.axis]:
        start = {"sum": 0, "prod": 1}[form.combine]
        first = np.full_like(np.take(x, [0], form.axis), start)
        kept = np.take(out, range(x.shape[form.axis] - 1), form.axis)
        out = np.concatenate([first, kept], form.axis)
    return convert(np.flip(out, form.axis) if form.reverse else out, form.dtype)


def _scatter(form: Scatter, operands: Arrays, binding: Mapping[str, int]) -> np.ndarray:
    out = np.array(operands[form.base])
    space = sizes(form.space, binding)
    index = [evaluate_scalar(i, space, operands, binding).ravel() for i in form.index]
    values = evaluate_scalar(form.value, space, operands, binding).ravel()
    for i, n in zip(index, out.shape, strict=True):
        if i.size and (i.min() < 0 or i.max() >= n):
            raise KernelError(
                f"scatter index {int(i.min() if i.min() < 0 else i.max())} is out of range for size {n}"
            )
    apply = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}.get(form.combine)
    if apply is None:
        for point in zip(*index, values, strict=True):  # ascending order: the last write of an element stays
            out[point[:-1]] = point[-1]
    else:
        apply.at(out, tuple(index), values)
    return out


def _sort(form: Sort, operands: Arrays, binding: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    x = operands[0]
    key = np.flip(x, -1) if form.descending else x
    order = np.argsort(key, axis=-1, kind="stable")
    if form.descending:
        order = np.flip(x.shape[-1] - 1 - order, -1)
    order = order[..., : sizes((form.keep,), binding)[0]]
    return np.take_along_axis(x, order, -1), order.astype(np.int64)


_RUNNERS: dict[type, Callable[..., object]] = {
    Map: _map,
    Pieces: _pieces,
    Reduce: _reduce,
    Contract: _contract,
    CodedContract: _coded,
    Conv: _conv,
    Cumulate: _cumulate,
    Scatter: _scatter,
    Sort: _sort,
}
