"""Kernels as OpenCL C: a work item per point of a map or tile of a matmul, a group per row of a reduction.

Sums have a fixed order: each of the LANES items of a row's group takes every LANES-th element, then
the first combines what they have. The number of lanes is the same on every device, and so is the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.rows.collapse import collapse
from rlx.codegen.opencl.ctext import literal, variable_type
from rlx.codegen.opencl.kernel_text import KernelText, Slot, product
from rlx.codegen.opencl.product import print_product
from rlx.errors import UnsupportedError
from rlx.ir.dtype import DType
from rlx.ir.types import Shape
from rlx.kernel.nests import ContractNest, Nest, Stat
from rlx.records import dataclass

LANES = 32  # work items that share a row
GROUP = 64  # work items of a group where each has its own point

COMBINE = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
}
ARGUMENTS = ("argmax", "argmin")


@dataclass(frozen=True)
class PrintedKernel(EmittedKernel):
    """A kernel in OpenCL C. `dims[0]` is the number of points, or of rows that a group each works on."""

    text: str = ""
    helpers: tuple[tuple[str, str], ...] = ()
    by_rows: bool = False
    checks: bool = False  # takes the memory of error codes and the number of its own
    argument_bytes: int = 0

    def work(self, total: int) -> tuple[int, int]:
        """Work items in all and in a group, for `total` points or rows."""
        return (total * LANES, LANES) if self.by_rows else (-(-total // GROUP) * GROUP, GROUP)


def print_kernel(
    kernel: Nest | ContractNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> PrintedKernel:
    """The text of a kernel. Equal texts have equal names, whatever program they come from."""
    if isinstance(kernel, ContractNest):
        return finish(*print_product(kernel, inputs, outputs))
    flat = collapse(kernel, [shape for _, shape, _ in inputs], [strides for _, _, strides in inputs])
    return _print_rows(flat, inputs, outputs) if flat.stats else _print_map(flat, inputs, outputs)


def finish(text: KernelText, kind: str, by_rows: bool = False) -> PrintedKernel:
    helpers = tuple(sorted(text.helpers.items()))
    plain = text.finish("kernel")
    digest = hashlib.sha256("\n".join([plain, *(body for _, body in helpers)]).encode()).hexdigest()
    name = f"{kind}_{digest[:16]}"
    return PrintedKernel(
        name,
        (text.total_dim, *text.dims),
        text=text.finish(name),
        helpers=helpers,
        by_rows=by_rows,
        checks=text.checks,
        argument_bytes=8 * (plain.partition("{")[0].count(",") + 1),
    )


def _print_map(nest: Nest, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> PrintedKernel:
    text = KernelText(inputs, outputs, product(nest.space))
    text.point_of_item(nest.space)
    text.stores(list(enumerate(nest.stores)))
    return finish(text, "map")


def _print_rows(nest: Nest, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> PrintedKernel:
    outer, inner = nest.space[: nest.outer], nest.space[nest.outer :]
    text = KernelText(inputs, outputs, product(outer))
    text.line("const long row = get_group_id(0), lane = get_local_id(0);")
    text.unflatten("row", outer, 0)
    loop = f"for (long element = lane; element < {text.dim(product(inner))}; element += {LANES})"
    for number, stat in enumerate(nest.stats):
        text.accs.append(_print_stat(text, number, stat, loop, inner, nest.outer))
    full = [(i, s) for i, s in enumerate(nest.stores) if s.full]
    if full:
        with text.block(loop):
            text.unflatten("element", inner, nest.outer)
            text.stores(full)
    single = [(i, s) for i, s in enumerate(nest.stores) if not s.full]
    if single:
        with text.block("if (lane == 0)"):
            text.axes = text.axes[: nest.outer]
            text.stores(single)
    return finish(text, "reduce", by_rows=True)


def _print_stat(text: KernelText, number: int, stat: Stat, loop: str, inner: Shape, first: int) -> str:
    """One reduction over a row; returns the variable that holds it in every lane."""
    dtype, found = stat.body.dtype, f"a{number}"
    type_ = variable_type(dtype)
    places = stat.combine in ARGUMENTS
    text.line(f"__local {type_} {found}_lanes[{LANES}];")
    text.line(f"{type_} {found} = {_identity(stat, dtype)};")
    if places:
        text.line(f"__local long {found}_places[{LANES}];")
        text.line(f"long {found}_place = -1;")
    with text.block(loop):
        text.unflatten("element", inner, first)
        value = text.value(stat.body)
        _combine(text, stat, found, value, "element")
    text.line(f"{found}_lanes[lane] = {found};")
    if places:
        text.line(f"{found}_places[lane] = {found}_place;")
    text.line("barrier(CLK_LOCAL_MEM_FENCE);")
    with text.block("if (lane == 0)"):
        with text.block(f"for (long other = 1; other < {LANES}; ++other)"):
            _combine(text, stat, found, f"{found}_lanes[other]", f"{found}_places[other]")
        text.line(f"{found}_places[0] = {found}_place;" if places else f"{found}_lanes[0] = {found};")
    text.line("barrier(CLK_LOCAL_MEM_FENCE);")
    if places:
        return text.variable("long", f"{found}_places[0]")
    return text.variable(variable_type(stat.dtype), text.as_variable(f"{found}_lanes[0]", dtype, stat.dtype))


def _identity(stat: Stat, dtype: DType) -> str:
    combine = stat.combine
    if combine in COMBINE and combine not in ("max", "min"):
        return literal(combine in ("prod", "all"), dtype)
    if combine not in (*COMBINE, *ARGUMENTS):
        raise UnsupportedError(f"reduction {combine!r} has no OpenCL kernel")
    lowest = combine in ("max", "argmax")
    if dtype.is_bool:
        return literal(not lowest, dtype)
    if dtype.is_float:
        return literal(float("-inf") if lowest else float("inf"), dtype)
    return literal(int(dtype.min_value if lowest else dtype.max_value), dtype)


def _combine(text: KernelText, stat: Stat, found: str, value: str, place: str) -> None:
    """Take one more value into account."""
    dtype = stat.body.dtype
    if stat.combine not in ARGUMENTS:
        text.line(f"{found} = {text.primitive(COMBINE[stat.combine], dtype, [found, value])};")
        return
    # NaN beats everything; of equals the first or the last place counts; place -1 means none.
    better = f"{value} {'>' if stat.combine == 'argmax' else '<'} {found}"
    same = f"{value} == {found}"
    if dtype.is_float:
        better = f"{better} || ({value} != {value} && {found} == {found})"
        same = f"({same} || ({value} != {value} && {found} != {found}))"
    earlier = f"{place} {'>' if stat.last else '<'} {found}_place"
    wins = f"{found}_place < 0 || {better} || ({same} && {earlier})"
    text.line(f"if ({place} >= 0 && ({wins})) {{ {found} = {value}; {found}_place = {place}; }}")
