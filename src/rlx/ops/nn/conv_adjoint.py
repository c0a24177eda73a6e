"""The adjoint of a convolution, as one convolution with a smaller kernel whose channels are interleaved."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dim import Dim, ceildiv
from rlx.ir.graph import Node
from rlx.ir.types import Shape
from rlx.ops.array.shape import flip, reshape, slice_axis, transpose
from rlx.ops.array.window import extent
from rlx.ops.rules import op_call, with_gaps


def transposed(
    x: Node, w: Node, size: Shape, strides: Sequence[int], low: Shape, dilations: Sequence[int], groups: int
) -> Node:
    """The adjoint of a convolution: x [N, C, axes], w [C, O/groups, window] -> [N, O, size].

    Element i of x adds the kernel to the output at i * stride - low. Along an axis with stride s, output
    j * s + r reads only the kernel elements m * s + r: so every r is a set of output channels of one
    convolution whose kernel is s times smaller, and the channels are then interleaved. That kernel is dense:
    where kernel elements are further apart than the stride, x is spread instead of the kernel.
    """
    n = x.rank - 2
    spread = [d > s for s, d in zip(strides, dilations, strict=True)]
    gaps = [s - 1 if apart else 0 for s, apart in zip(strides, spread, strict=True)]
    if any(gaps):
        x = op_call("pad", x, padding=((0, 0),) * x.rank, interior=(0, 0, *gaps))
        strides = [1 if apart else s for s, apart in zip(strides, spread, strict=True)]
    padding: list[tuple[Dim, Dim]] = []
    spacing = []
    for d, k, wanted, s, start, dilation in zip(
        x.shape[2:], w.shape[2:], size, strides, low, dilations, strict=True
    ):
        reach = extent(k, dilation)
        last = ceildiv(reach, s) - 1  # how far back in x the kernel of one r reads
        before = last - start // s
        padding.append((before, ceildiv(start % s + wanted, s) + last - d - before))
        spacing.append(dilation if s == 1 else 1)
    kernel = _interleaved_kernel(w, strides, dilations, groups)
    ones = (1,) * n
    out: Node = op_call(
        "conv", x, kernel, strides=ones, padding=tuple(padding), dilations=tuple(spacing), groups=groups
    )
    if all(s == 1 for s in strides):
        return out
    counts = out.shape[2:]
    channels = w.shape[1] * groups
    out = reshape(out, (x.shape[0], channels, *strides, *counts))
    out = transpose(out, (0, 1, *(a for i in range(n) for a in (2 + n + i, 2 + i))))
    out = reshape(out, (x.shape[0], channels, *(c * s for c, s in zip(counts, strides, strict=True))))
    for i, (start, s, wanted) in enumerate(zip(low, strides, size, strict=True)):
        if s > 1:
            out = slice_axis(out, 2 + i, start % s, wanted)
    return out


def _interleaved_kernel(w: Node, strides: Sequence[int], dilations: Sequence[int], groups: int) -> Node:
    """w [C, O/groups, window] -> [O * strides, C/groups, taps]: the flipped kernel of every r."""
    n = w.rank - 2
    strided = [s > 1 for s in strides]
    gaps = [d - 1 if b else 0 for d, b in zip(dilations, strided, strict=True)]
    sizes = [with_gaps(k, g) for k, g in zip(w.shape[2:], gaps, strict=True)]
    taps = [ceildiv(k, s) for k, s in zip(sizes, strides, strict=True)]
    fill = [(0, t * s - k) for t, s, k in zip(taps, strides, sizes, strict=True)]
    if any(gaps) or any(f != (0, 0) for f in fill):
        w = op_call("pad", w, padding=((0, 0), (0, 0), *fill), interior=(0, 0, *gaps))
    per_in, per_out = w.shape[0] // groups, w.shape[1]
    split = [v for pair in zip(taps, strides, strict=True) for v in pair]
    w = reshape(w, (groups, per_in, per_out, *split))
    w = transpose(w, (0, 2, *(4 + 2 * i for i in range(n)), 1, *(3 + 2 * i for i in range(n))))
    each = per_out
    for s in strides:
        each = each * s
    w = reshape(w, (groups * each, per_in, *taps))
    made: Node = flip(w, tuple(range(2, 2 + n)))
    return made
