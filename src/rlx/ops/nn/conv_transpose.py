"""Transposed convolution over any number of axes, in NC... layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, integer, ints
from rlx.ir.dim import Dim, dim_max, known_le
from rlx.ir.dtype import dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_two
from rlx.ir.types import TensorType
from rlx.ops.array.window import (
    GEOMETRY,
    Padding,
    PaddingLike,
    check_geometry,
    extent,
    need_elements,
    per_axis,
    resolve_padding,
)
from rlx.ops.math.contract import accumulate_dtype
from rlx.ops.nn.conv import add_bias, check_channels, divided
from rlx.ops.nn.conv_adjoint import transposed
from rlx.ops.rules import is_number, need_dtype, same_dtype, shape_of


def transposed_size(d: Dim, k: Dim, stride: int, pads: tuple[Dim, Dim], dilation: int, extra: int) -> Dim:
    """Size of an axis after a transposed convolution."""
    return (d - 1) * stride + extent(k, dilation) + extra - pads[0] - pads[1]


@declare
class _conv_transpose(Op):
    """Transposed convolution: x [N, C, axes], w [C, O/groups, window]; each element of x adds a kernel."""

    name = "conv_transpose"
    level = Level.HIR
    arity = 2
    heavy = True
    attrs = {**GEOMETRY, "output_padding": Attr(ints), "groups": Attr(integer, 1)}

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        *,
        strides: Sequence[int],
        padding: Padding,
        dilations: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
    ) -> TensorType:
        need_dtype(self.name, x, is_number)
        need_dtype(self.name, w, is_number)
        d = same_dtype(self.name, (x, w))
        check_channels(self.name, x, w, groups)
        check_geometry(self.name, x.rank - 2, strides, padding, dilations)
        if len(output_padding) != x.rank - 2 or any(e < 0 for e in output_padding):
            raise ShapeError(
                f"conv_transpose: output_padding {output_padding} must be {x.rank - 2} numbers >= 0"
            )
        require_equal(
            x.shape[1],
            w.shape[0],
            lambda: f"conv_transpose: x {x} has {x.shape[1]} channels, w {w} reads {w.shape[0]}",
        )
        divided(self.name, "input channels", w.shape[0], groups)
        for k in w.shape[2:]:
            need_elements(self.name, k)
        rows = zip(x.shape[2:], w.shape[2:], strides, padding, dilations, output_padding, strict=True)
        sizes = tuple(transposed_size(*row) for row in rows)
        for s in sizes:
            if known_le(s, -1) is True:
                raise ShapeError(
                    f"conv_transpose: padding {tuple(padding)} crops more than x {x} and w {w} give"
                )
        return TensorType(d, (x.shape[0], w.shape[1] * groups, *sizes))

    def ref(
        self,
        x: np.ndarray,
        w: np.ndarray,
        *,
        strides: Sequence[int],
        padding: Padding,
        dilations: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
    ) -> np.ndarray:
        wide = accumulate_dtype(dtype(x.dtype)).np
        per_in, per_out = w.shape[0] // groups, w.shape[1]
        rows = list(zip(x.shape[2:], w.shape[2:], strides, dilations, output_padding, strict=True))
        full = [max((d - 1) * s + (k - 1) * dil + 1 + e, 0) for d, k, s, dil, e in rows]
        out = np.zeros((x.shape[0], per_out * groups, *full), wide)
        for tap in np.ndindex(*w.shape[2:]):
            box = tuple(
                slice(t * dil, t * dil + (d - 1) * s + 1, s) if d else slice(0, 0)
                for t, (d, _, s, dil, _) in zip(tap, rows, strict=True)
            )
            for g in range(groups):
                part = x[:, g * per_in : (g + 1) * per_in].astype(wide)
                kernel = w[(slice(g * per_in, (g + 1) * per_in), slice(None), *tap)].astype(wide)
                added = np.moveaxis(np.tensordot(part, kernel, ([1], [0])), -1, 1)
                out[(slice(None), slice(g * per_out, (g + 1) * per_out), *box)] += added
        # negative padding adds zeros
        pads = [(int(lo), int(hi)) for lo, hi in padding]
        grown = [(0, 0), (0, 0), *((max(-lo, 0), max(-hi, 0)) for lo, hi in pads)]
        out = np.pad(out, grown)
        keep = tuple(
            slice(max(lo, 0), d - max(hi, 0)) for d, (lo, hi) in zip(out.shape[2:], pads, strict=True)
        )
        return out[(slice(None), slice(None), *keep)].astype(x.dtype)

    def expand(
        self,
        x: Node,
        w: Node,
        *,
        strides: Sequence[int],
        padding: Padding,
        dilations: Sequence[int],
        output_padding: Sequence[int],
        groups: int,
    ) -> Node:
        size = self.infer(
            x.tensor,
            w.tensor,
            strides=strides,
            padding=padding,
            dilations=dilations,
            output_padding=output_padding,
            groups=groups,
        ).shape[2:]
        return transposed(x, w, size, strides, tuple(p[0] for p in padding), dilations, groups)

    def samples(self) -> list[Sample]:
        def one(
            x: str,
            w: str,
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            extra: Any,
            groups: int = 1,
            **more: AttrValue,
        ) -> Sample:
            attrs = {"strides": strides, "padding": padding, "dilations": dilations, "output_padding": extra}
            attrs["groups"] = groups
            return Sample((Arg(x), Arg(w)), attrs, **more)

        return [
            one("f32[2,3,5]", "f32[3,2,3]", (1,), ((0, 0),), (1,), (0,)),
            one("f32[1,4,4]", "f32[4,3,3]", (2,), ((1, 0),), (2,), (1,), 2),
            one("f32[2,2,3,4]", "f32[2,3,3,2]", (2, 3), ((1, 1), (0, 1)), (1, 1), (1, 2)),
            one("f32[1,3,4,2]", "f32[3,1,2,2]", (2, 2), ((0, 0), (0, 0)), (1, 1), (0, 0), 3),
            one(
                "f32[1,2,2,3,2]", "f32[2,1,2,1,2]", (1, 2, 1), ((0, 1), (0, 0), (0, 0)), (1, 1, 2), (0, 0, 0)
            ),
            one("f32[1,1,1]", "f32[1,1,1]", (1,), ((0, 0),), (1,), (0,)),
            one("f32[1,1,3]", "f32[1,1,2]", (1,), ((-1, -2),), (1,), (0,)),
            one("f32[1,2,3]", "f32[2,1,2]", (4,), ((1, -2),), (3,), (3,)),
            one("f32[1,2,3,4]", "f32[2,3,3,2]", (2, 3), ((1, 1), (0, 1)), (5, 2), (1, 1)),
            one("f32[1,2,3,2]", "f32[2,2,4,2]", (2, 1), ((1, 1), (-1, 1)), (1, 2), (0, 0)),
            one("f32[0,2,5]", "f32[2,3,3]", (2,), ((1, 1),), (1,), (0,), grad=False),
            one("f32[n,2,m]", "f32[2,3,3]", (2,), ((1, 1),), (1,), (1,), grad=False),
            one("bf16[1,8,5]", "bf16[8,2,3]", (1,), ((1, 1),), (1,), (0,), grad=False),
        ]


@of_two
def conv_transpose(
    x: Operand,
    w: Operand,
    bias: Operand | None = None,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    output_padding: int | Sequence[int] = 0,
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
    size: Sequence[Dim] | None = None,
) -> Tensor:
    """Transposed convolution of x [N, C, axes] with w [C, O/groups, window].

    The result has (size - 1) * stride + reach - low - high + output_padding elements along an axis; with
    padding "same" or "same_lower" it has size * stride. `size` gives the sizes of the result in place of
    padding; an odd element is cut from the low side (with padding "same": from the high side).

    >>> conv_transpose(np.ones((1, 1, 2)), np.ones((1, 1, 3)), strides=2)
    array([[[1., 1., 2., 1., 1.]]])
    """
    n = max(len(shape_of(w)) - 2, 0)
    name = "conv_transpose"
    steps, spacing = per_axis(name, "strides", strides, n), per_axis(name, "dilations", dilations, n)
    extra = per_axis(name, "output_padding", output_padding, n, 0)
    spatial = tuple(shape_of(x)[2:])
    pads: Padding
    if size is not None or padding in ("same", "same_lower"):
        wanted = [d * s for d, s in zip(spatial, steps, strict=True)] if size is None else size
        free = ((0, 0),) * n
        full = [
            transposed_size(*row)
            for row in zip(spatial, shape_of(w)[2:], steps, free, spacing, extra, strict=True)
        ]
        cut = [f - m if size is not None else dim_max(f - m, 0) for f, m in zip(full, wanted, strict=True)]
        pads = [(c // 2, c - c // 2) if padding == "same" else (c - c // 2, c // 2) for c in cut]
    else:
        pads = resolve_padding(name, padding, spatial, tuple(shape_of(w)[2:]), steps, spacing)
    y = _conv_transpose(
        x, w, strides=steps, padding=tuple(pads), dilations=spacing, output_padding=extra, groups=groups
    )
    return add_bias(y, bias)
