"""Ops that rename, move, cut or join elements, and casts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError, ShapeError, current_where
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.load import onnx_package
from rlx.frontend.onnx.proto import element_dtype
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.broadcast import stretches
from rlx.frontend.onnx.value import Labels, Outputs, Strings, Value
from rlx.ir.dim import Constraint, Dim, ceildiv, known_eq, known_le
from rlx.ir.dtype import F8E8M0, DType
from rlx.ir.graph import Node
from rlx.ir.operand import DTypeLike
from rlx.ops.rules import normal_axes, normal_axis


def size_tensor(n: Call, shape: Sequence[Dim], dtype: DTypeLike = "i64") -> Node:
    """Sizes as a 1-D tensor: a constant where they are numbers."""
    if all(isinstance(d, int) for d in shape):
        return n.constant(np.array(shape, np.int64), dtype)
    return ops.concat([ops.reshape(ops.dim_value(d, dtype), (1,)) for d in shape])


@onnx_op("Identity")
def identity(n: Call) -> Outputs:
    return n.value(0)


@onnx_op("Shape")
def shape(n: Call) -> Outputs:
    value = n.value(0)
    whole = value.shape if isinstance(value, Strings) else n[0].shape
    start, end = n.attr("start", 0), n.attr("end", None)
    return size_tensor(n, whole[start:end])


@onnx_op("Size")
def size(n: Call) -> Outputs:
    value = n.value(0)
    if isinstance(value, Strings):
        return n.constant(np.array(value.array.size, np.int64))
    count = n[0].tensor.numel
    return n.constant(np.array(count, np.int64)) if isinstance(count, int) else ops.dim_value(count)


# -- other shapes for the same elements


def reshaped(x: Node, target: Sequence[Dim], allow_zero: bool) -> Node:
    """ONNX's rules: 0 keeps the size of an axis, -1 is what is left."""
    out: list[Dim] = []
    for i, d in enumerate(target):
        if isinstance(d, int) and d == 0 and not allow_zero:
            if i >= x.rank:
                raise ShapeError(
                    f"a 0 at place {i} of the shape copies an axis that {x.tensor} does not have"
                )
            out.append(x.shape[i])
        elif isinstance(d, int) and d < -1:
            raise ShapeError(f"its shape holds {d}; sizes are -1, 0 or more")
        else:
            out.append(d)
    if sum(1 for d in out if isinstance(d, int) and d == -1) > 1:
        raise ShapeError(f"its shape {tuple(out)} holds more than one -1")
    return ops.reshape(x, out)


@onnx_op("Reshape", ignored=("consumed_inputs",))
def reshape_by_attribute(n: Call) -> Outputs:
    return reshaped(n[0], n.attr("shape"), False)


@onnx_op("Reshape", since=5)
def reshape(n: Call) -> Outputs:
    allow_zero = n.flag("allowzero")
    if isinstance(n.value(0), Strings):
        n.on_host("text exists on the host only")
        return Strings(n.strings(0).reshape(n.ints(1)))
    value = n.value(0)
    if isinstance(value, Labels):
        return Labels(reshaped(value.numbers, n.dims(1), allow_zero), value.words)
    return reshaped(n[0], n.dims(1), allow_zero)


@onnx_op("Flatten")
def flatten(n: Call) -> Outputs:
    x = n[0]
    axis = int(n.attr("axis", 1))
    return ops.flatten(x, axis + x.rank if axis < 0 else axis)


def axes_of(n: Call, input_since: int) -> tuple[int, ...] | None:
    """Axes as an attribute or, in later versions, an input; None if not given."""
    if n.version < input_since:
        axes = n.attr("axes", None)
        return None if axes is None else tuple(axes)
    return None if n.value(1) is None else n.ints(1)


@onnx_op("Squeeze")
def squeeze(n: Call) -> Outputs:
    axes = axes_of(n, 13)
    return ops.squeeze(n[0], unit_axes(n, n[0]) if axes is None else axes)


def unit_axes(n: Call, x: Node) -> tuple[int, ...]:
    """Axes that a Squeeze without axes drops: those of size 1. An open size decides the rank of what follows,
    so it is assumed, and a guard checks it: 1 for a batch, with which exporters trace; else 2 or more."""
    batches = {i.shape[0] for i in n.importer.graph.inputs if i.rank > 1}
    batches -= {d for i in n.importer.graph.inputs for d in i.shape[i.rank > 1 :]}
    gone = []
    for axis, d in enumerate(x.shape):
        known = known_eq(d, 1)
        if known or (known is None and d in batches):
            gone.append(axis)
        elif known is None and known_le(2, d) is not True:
            n.graph.assume(Constraint("min", d, 2, current_where()))
    return tuple(gone)


@onnx_op("Unsqueeze")
def unsqueeze(n: Call) -> Outputs:
    axes = axes_of(n, 13)
    if axes is None:
        raise ModelImportError("its axes are missing")
    return ops.expand_dims(n[0], axes)


@onnx_op("Transpose")
def transpose(n: Call) -> Outputs:
    return ops.transpose(n[0], n.attr("perm", None))


@onnx_op("Expand")
def expand(n: Call) -> Outputs:
    """Both ways, as other ops broadcast."""
    x, target = n[0], list(n.dims(1, fed=True))
    rank = max(x.rank, len(target))
    have: list[Dim] = [*(1,) * (rank - x.rank), *x.shape]
    want: list[Dim] = [*(1,) * (rank - len(target)), *target]
    for axis, (h, w) in enumerate(zip(have, want, strict=True)):
        if stretches(n, w, h):
            want[axis] = h
        elif h != 1 and known_eq(h, w) is None and n.importer.data_sizes.holds(w):
            # the data say 1 or, again, what is there
            n.graph.assume(Constraint("eq", (w - 1) * (h - w), 0, current_where()))
            want[axis] = h
        elif h != 1 and stretches(n, h, w):
            x = ops.slice_axis(x, axis - rank, 0, 1)
    return ops.broadcast_to(x, want)


@onnx_op("Tile")
def tile_axis(n: Call) -> Outputs:
    reps = [1] * n[0].rank
    reps[n.integer(2)] = n.integer(1)
    return ops.tile(n[0], reps)


@onnx_op("Tile", since=6)
def tile(n: Call) -> Outputs:
    return ops.tile(n[0], n.dims(1, fed=True))


# -- joining and cutting


@onnx_op("Concat")
def concat(n: Call) -> Outputs:
    axis = int(n.attr("axis", 1 if n.version < 4 else 0))
    if isinstance(n.value(0), Strings):
        n.on_host("text exists on the host only")
        return Strings(np.concatenate([n.strings(i) for i in range(len(n))], axis))
    return ops.concat(n.nodes(), axis)


@onnx_op("Split")
def split(n: Call) -> Outputs:
    x = n[0]
    axis = normal_axis("Split", int(n.attr("axis", 0)), x.rank)
    count = int(n.attr("num_outputs", len(n.outputs)))
    if count != len(n.outputs):
        raise ModelImportError(f"num_outputs is {count}, but it has {len(n.outputs)} outputs")
    sizes: Sequence[Dim] | None = n.attr("split", None)
    if n.value(1) is not None:
        sizes = n.dims(1)
    if sizes is None:
        each = ceildiv(x.shape[axis], count)
        sizes = [each] * (count - 1)
        sizes.append(x.shape[axis] - each * (count - 1))
    return ops.split(x, axis=axis, sizes=tuple(sizes))


@onnx_op("Pad")
def pad_by_attributes(n: Call) -> Outputs:
    amounts = n.attr("pads", None) or n.attr("paddings")
    return padded(n, n[0], amounts, tuple(range(n[0].rank)), float(n.attr("value", 0.0)))


@onnx_op("Pad", since=11)
def pad(n: Call) -> Outputs:
    x = n[0]
    axes = normal_ordered(n.ints(3), x.rank) if n.value(3) is not None else tuple(range(x.rank))
    fill: Node | float = 0
    if n.value(2) is not None:
        known = n.known(2)
        fill = n[2] if known is None else _number(known.reshape(-1)[0].item(), n[2]) if known.size else 0
    return padded(n, x, n.dims(1), axes, fill)


def _number(value: complex, node: Node) -> Node | float:
    """A known value as a real number, or as its node where it is none."""
    if isinstance(value, complex):
        return value.real if value.imag == 0 else node
    return value


def normal_ordered(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Non-negative axes in the order given."""
    normal_axes("axes", axes, rank)
    return tuple(a % rank for a in axes)


def padded(n: Call, x: Node, amounts: Sequence[Dim], axes: Sequence[int], fill: Node | float) -> Node:
    """ONNX Pad; `amounts` are the low sides of all axes, then the high ones."""
    mode = n.choice("mode", "constant", ("constant", "reflect", "edge", "wrap"))
    if len(amounts) != 2 * len(axes):
        raise ShapeError(f"{len(amounts)} pads for {len(axes)} axes; there must be two for each")
    pairs: list[tuple[Dim, Dim]] = [(0, 0)] * x.rank
    for i, axis in enumerate(axes):
        pairs[axis] = (amounts[i], amounts[len(axes) + i])
    if mode != "constant":
        return ops.pad(x, pairs, mode)
    if isinstance(fill, Node):  # a fill that only the run knows: blend it in
        inside = ops.pad(ops.full(x.shape, True, "bool"), pairs, value=False)
        return ops.where(inside, ops.pad(x, pairs), ops.reshape(fill, ()))
    return ops.pad(x, pairs, value=bool(fill) if x.dtype.is_bool else int(fill) if x.dtype.is_int else fill)


@onnx_op("CenterCropPad", since=18)
def center_crop_pad(n: Call) -> Outputs:
    x = n[0]
    axes = normal_ordered(n.attr("axes", range(x.rank)), x.rank)
    for axis, want in zip(axes, n.dims(1), strict=True):
        have = x.shape[axis]
        if known_le(want, have) is True:
            x = ops.slice_axis(x, axis, (have - want) // 2, want)
        elif known_le(have, want) is True:
            low = (want - have) // 2
            pairs: list[tuple[Dim, Dim]] = [(0, 0)] * x.rank
            pairs[axis] = (low, want - have - low)
            x = ops.pad(x, pairs)
        else:
            raise ShapeError(f"whether {have} is cropped or padded to {want} depends on sizes that are open")
    return x


# -- casts


def cast_to(n: Call, value: object, to: DType) -> Node:
    """Convert a tensor, or text to numbers."""
    saturate = None if not to.name.startswith("f8") else n.flag("saturate", 1)
    if isinstance(value, Strings):
        n.on_host("text exists on the host only")
        numbers = np.array([float(s) for s in value.array.flat], np.float64).reshape(value.shape)
        return n.constant(numbers, to)
    x = n[0]
    if to is F8E8M0:
        rounding = n.choice("round_mode", "up", ("up", "down", "nearest"))
        return power_of_two(ops.cast(x, "f32"), rounding, n.flag("saturate", 1))
    if to.is_int and to.bits < 8 and x.dtype.is_float:
        x = ops.cast(x, "i32")  # few bits keep the low ones of the whole part, as wider integers do
    return ops.cast(x, to, saturate=saturate)


def power_of_two(x: Node, rounding: str, saturate: bool) -> Node:
    """f32 to f8e8m0, which is an exponent and nothing else: that of x, one more where x is rounded up."""
    bits = ops.bitcast(x, "u32")
    exponent, mantissa = ops.bitwise_and(ops.shift_right(bits, 23), 255), ops.bitwise_and(bits, 0x7FFFFF)
    # below the smallest normal number the mantissa has no hidden bit: half of its range is one step
    small = ops.equal(exponent, 0)
    least = {"up": (1, 0x400001), "nearest": (0x400000, 0x600000), "down": (1 << 23, 1 << 23)}[rounding]
    limit = ops.where(small, np.uint32(least[1]), np.uint32(least[0]))
    code = exponent + ops.cast(ops.greater_equal(mantissa, limit), "u32")
    top = 254 if saturate else 255
    code = ops.where(ops.greater_equal(code, 255), np.uint32(top), code)
    wrong = ops.logical_or(ops.is_nan(x), ops.less(x, 0.0))
    return ops.bitcast(ops.cast(ops.where(wrong, np.uint32(255), code), "u8"), F8E8M0)


@onnx_op("Cast")
def cast_by_name(n: Call) -> Outputs:
    """Before opset 6 the dtype was a word."""
    return ops.cast(
        n[0], element_dtype(onnx_package().TensorProto.DataType.Value(str(n.attr("to"))), "its attribute to")
    )


@onnx_op("Cast", since=6, ignored=("saturate", "round_mode"))
def cast(n: Call) -> Outputs:
    if n.attr("to") == 8:
        return as_text(n)
    return cast_to(n, n.value(0), n.dtype("to"))


@onnx_op("CastLike", since=15, ignored=("saturate", "round_mode"))
def cast_like(n: Call) -> Outputs:
    if isinstance(n.value(1), Strings):
        return as_text(n)
    return cast_to(n, n.value(0), n[1].dtype)


def as_text(n: Call) -> Value:
    """Numbers as text."""
    if isinstance(n.value(0), (Strings, Labels)):
        return n.value(0)
    n.on_host("text exists on the host only")
    array = n.array(0)
    texts = [
        str(x) if array.dtype.kind != "f" else np.format_float_positional(x, trim="-") for x in array.flat
    ]
    return Strings(np.array(texts, dtype=object).reshape(array.shape))


# -- blocks


@onnx_op("DepthToSpace")
def depth_to_space(n: Call) -> Outputs:
    return ops.depth_to_space(n[0], int(n.attr("blocksize")), n.choice("mode", "DCR", ("DCR", "CRD")))


@onnx_op("SpaceToDepth")
def space_to_depth(n: Call) -> Outputs:
    x, block = n[0], int(n.attr("blocksize"))
    if n.choice("mode", "DCR", ("DCR", "CRD")) == "DCR":
        return ops.space_to_depth(x, block)
    batch, channels, height, width = x.shape
    cells = ops.reshape(x, (batch, channels, height // block, block, width // block, block))
    moved = ops.transpose(cells, (0, 1, 3, 5, 2, 4))
    return ops.reshape(moved, (batch, channels * block * block, height // block, width // block))


@onnx_op("Trilu")
def trilu(n: Call) -> Outputs:
    x, upper = n[0], n.flag("upper", 1)
    k = n.known(1) if n.value(1) is not None else np.zeros(1, np.int64)
    if k is not None:
        return (ops.triu if upper else ops.tril)(x, int(k.reshape(-1)[0]))
    rows = ops.iota((x.shape[-2], 1), 0) + ops.reshape(n[1], ())  # a diagonal that sizes or data choose
    columns = ops.iota((1, x.shape[-1]), 1)
    kept = ops.less_equal(rows, columns) if upper else ops.less_equal(columns, rows)
    return ops.where(kept, x, ops.zeros_like(x))


@onnx_op("ReverseSequence")
def reverse_sequence(n: Call) -> Outputs:
    """Along the time axis, the first `length` elements of each batch in reverse."""
    x, lengths = n[0], n[1]
    time, batch = int(n.attr("time_axis", 0)), int(n.attr("batch_axis", 1))
    if {time, batch} != {0, 1}:
        raise ModelImportError(f"time_axis {time} and batch_axis {batch} are not 0 and 1")
    steps = ops.reshape(ops.iota((x.shape[time],)), (-1, 1) if time == 0 else (1, -1))
    many = ops.reshape(lengths, (1, -1) if time == 0 else (-1, 1))
    at = ops.where(ops.less(steps, many), many - 1 - steps, steps)
    at = ops.reshape(at, (*at.shape, *(1,) * (x.rank - 2)))
    return ops.gather_elements(x, ops.broadcast_to(at, x.shape), axis=time)


@onnx_op("BitCast", since=26)
def bit_cast(n: Call) -> Outputs:
    return ops.bitcast(n[0], n.dtype("to"))
