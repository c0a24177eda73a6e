"""Calls drawn from op declarations: every op that has samples is in the grammar, new ones at once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rlx.fuzz.programs.draw import FLOATS, SIZES, Draw, NotHere
from rlx.fuzz.programs.inputs import Values
from rlx.ir.dtype import dtype
from rlx.ir.op import Arg, Op, Role, Sample, all_ops
from rlx.ir.types import TensorType, parse_type

BINDING = {"n": 3, "m": 5, "k": 2}
"""Sizes of the symbols that samples use."""
PLAIN = (bool, int, float, str, type(None))


@functools.cache
def eligible() -> tuple[tuple[Op, tuple[Sample, ...]], ...]:
    """Ops that a user may call, with those samples that can be written as Python text."""
    out = []
    for op in all_ops():
        storage = op.storage or op.reader_side or op.writer_side  # files of users have none
        if op.role is not Role.COMPUTE or op.effects != "none" or op.finds_size or op.bodies or storage:
            continue
        samples = tuple(s for s in op.samples() if all(_is_plain(v) for v in s.attrs.values()))
        if samples:
            out.append((op, samples))
    return tuple(out)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, PLAIN)


def declared(d: Draw) -> object:
    """One sample of one op, in other sizes and dtypes, on values that are there where they fit."""
    op, samples = d.choose(eligible())
    if "causal" in op.attrs and d.has_special_values:  # what they do where keys are hidden is not specified
        raise NotHere
    sample = d.choose(samples)
    resized = _resizing(d, sample)
    retyped = _retyping(d)
    operands = [operand(d, arg, resized, retyped) for arg in sample.args]
    attrs = "".join(f", {k}={_bound(v)!r}" for k, v in sample.attrs.items())
    return d.emit(f"op({op.name!r})({', '.join(operands)}{attrs})".replace("(, ", "("), 3)


def _bound(value: object) -> object:
    """An attribute of a sample with its symbols bound; other texts stay."""
    if isinstance(value, (tuple, list)):
        return tuple(_bound(v) for v in value)
    return BINDING.get(value, value) if isinstance(value, str) else value


def _type(arg: Any) -> TensorType:
    if isinstance(arg, np.ndarray):
        return TensorType(dtype(arg.dtype), arg.shape)
    t = parse_type(arg if isinstance(arg, str) else arg.type)
    return t.with_shape(t.bind(BINDING))


def _resizing(d: Draw, sample: Sample) -> dict[int, int]:
    """Now and then one size of the sample is another one, wherever it stands."""
    dims = sorted({int(n) for a in sample.args if not isinstance(a, np.ndarray) for n in _type(a).shape})
    if not dims or d.chance(0.5):
        return {}
    return {d.choose(dims): d.choose((0, 1, *SIZES[:12], *d.sizes.values()))}


def _retyping(d: Draw) -> dict[str, str]:
    out = {}
    if d.chance(0.4):
        out["f32"] = d.main if d.main in FLOATS and d.chance(0.5) else d.choose(FLOATS)
    if d.chance(0.4):
        out["i32"] = d.choose(("i8", "u8", "i16", "i64", "u16", "u32", "u64"))
    return out


def operand(d: Draw, arg: Any, resized: dict[int, int], retyped: dict[str, str]) -> str:
    """A value that is there, cut or repeated to the shape that is needed, or a new input."""
    t = _type(arg)
    if isinstance(arg, np.ndarray):
        numbers = arg.astype(np.float64) if arg.dtype.kind not in "iubfc" else arg
        given = tuple(numbers.reshape(-1).tolist())
        return d.input(str(t.dtype), arg.shape, Values(given=given))
    arg = Arg(arg) if isinstance(arg, str) else arg
    kind = retyped.get(str(t.dtype), str(t.dtype))
    shape = tuple(resized.get(int(n), int(n)) for n in t.shape)
    if dtype(kind).is_float and d.chance(0.75):
        fitted = _fitted(d, kind, shape, arg)
        if fitted is not None:
            return fitted
    special = arg.special and d.chance(0.3)
    return d.input(kind, d.named(shape), Values(arg.low, arg.high, arg.distinct, special))


def _fitted(d: Draw, kind: str, shape: tuple[int, ...], arg: Arg) -> str | None:
    """Text that makes an operand out of a value, within the range that the op is defined on."""
    known = d.known([kind])
    same = [v for v in known if d.shape(v) == shape]
    wide = [v for v in known if int(np.prod(d.shape(v))) >= int(np.prod(shape)) > 0]
    if same:
        text = d.choose(same)
    elif wide:
        count = int(np.prod(shape))
        text = f"ops.reshape(ops.reshape({d.choose(wide[-4:])}, (-1,))[:{count}], {shape})"
    else:
        return None
    if (arg.low, arg.high) == (-2.0, 2.0):
        return text
    if arg.low >= arg.high:
        raise NotHere
    middle, reach = (arg.low + arg.high) / 2, (arg.high - arg.low) / 2
    return f"ops.tanh({text}) * {reach!r} + {middle!r}"
