"""Contractions as native code: a GEMM where the indices allow it, else a reduction nest of products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import FIRST_OPERAND, ArgumentTable, EmittedKernel, Slot, unflatten
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.gemm import GemmSpec, emit_gemm, shared_facts
from rlx.codegen.cpu.product.gemm_dot import suits_dot
from rlx.codegen.cpu.product.gemm_rows import Prologue, row_stride
from rlx.codegen.cpu.product.packing import own_panels
from rlx.codegen.cpu.product.quant_gemm import GROUPED, emit_quant_gemm, grouped_precision, own_groups
from rlx.codegen.cpu.product.sparse import emit_sparse
from rlx.codegen.cpu.prologue import Line, flat_source, runs_along
from rlx.codegen.cpu.rows.collapse import accesses, flatten_loads
from rlx.codegen.cpu.rows.nest import emit_nest, order_of_sums
from rlx.codegen.cpu.rows.nest_base import expression_lanes
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value
from rlx.ir.dim import Dim, known_eq
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.nests import ContractNest, Nest, as_sum
from rlx.kernel.quads import QuadPanels
from rlx.kernel.scalar import LOADS, Scalar, body_cost
from rlx.plan.lir import WeightCut
from rlx.records import dataclass
from rlx.target.cpu import Target

HEAVY_EPILOGUE = (
    8  # scalar operations per element from which an epilogue is written once, not into every tile
)
# dtypes of the operands -> dtype of the sums
GEMM_DTYPES = {
    ("f32", "f32"): "f32",
    ("f64", "f64"): "f64",
    ("bf16", "bf16"): "f32",
    ("f16", "f16"): "f32",
    ("i8", "i8"): "i32",
    ("u8", "i8"): "i32",
}


# dtypes of packed weights that are widened as they are read, by the dtype of what they multiply
HALF_WEIGHTS = {"f32": ("f16", "bf16")}


@dataclass(frozen=True)
class Steps:
    """Element step of an operand along every iteration axis, and its constant offset."""

    axes: Shape
    start: Dim


def linear_steps(read: Scalar, strides: Shape, rank: int) -> Steps | None:
    """A load as one affine offset; None where its index is not affine."""
    total: list[Dim] = [0] * rank
    start: Dim = 0
    for index, stride in zip(read.args, strides, strict=True):
        parts = affine(index, rank)
        if parts is None:
            return None
        steps, rest = [to_dim(c) for c in parts[0]], to_dim(parts[1])
        if rest is None or any(s is None for s in steps):
            return None
        total = [t + s * stride for t, s in zip(total, steps, strict=True) if s is not None]
        start = start + rest * stride
    return Steps(tuple(total), start)


@dataclass(frozen=True)
class Sharing:
    """What kernels have in common that differ in widths only, and the widths of one of them."""

    key: tuple[object, ...]
    widths: tuple[int, ...]
    cut: WeightCut | None

    def fitted(self, kernel: EmittedKernel) -> EmittedKernel:
        """The kernel of another one with the same key, for these widths."""
        return replace(kernel, dims=(*self.widths, *kernel.dims[len(self.widths) :]), cut=self.cut)


def sharing(
    nest: ContractNest, inputs: Sequence[Slot], outputs: Sequence[Slot], target: Target
) -> Sharing | None:
    """How a contraction can share its code with others, if so. The key is all that the code depends on
    besides the widths."""
    plan = None if nest.has_prologue else plan_gemm(nest, inputs)
    if plan is None or nest.rhs_layout is None or nest.rhs_layout[0] != "read_as":
        return None
    spec = gemm_spec(nest, plan, outputs[0].dtype.name)
    facts = shared_facts(spec, target)
    wide = tuple(i for i in plan.n if nest.space[i] != 1)
    if facts is None or len(wide) > 1:
        return None
    body, ends = nest.stores[0].body, _epilogue(nest, inputs).stores[0].body
    indexed = {e.data for e in ends.walk() if e.prim in LOADS}  # others are read where their offset says
    key = (
        facts,
        (spec.m, spec.dtype, spec.c_dtype, plan.a.start, body_cost(body) >= HEAVY_EPILOGUE),
        (plan.m, tuple(nest.space[i] for i in plan.m), wide, nest.kept, nest.lhs.data, nest.rhs.data),
        (ends, tuple((i, inputs[i].shape, inputs[i].steps) for i in sorted(indexed))),
        tuple(slot.dtype.name for slot in (*inputs, *outputs)),
    )
    return Sharing(key, tuple(map(int, spec.widths.values())), cut_of(nest, inputs, target))


def emit_contraction(
    module: Module,
    name: str,
    nest: ContractNest,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    shared: bool = False,
) -> EmittedKernel:
    """Write the kernel of a contraction into the module; with `shared`, for all kernels of its `sharing`."""
    if nest.rhs_layout is not None and nest.rhs_layout[0] == "unpack_sparse":
        return emit_sparse(module, name, nest, inputs, outputs)
    plan = plan_gemm(nest, inputs)
    if nest.rhs_layout is not None and nest.rhs_layout[0] in GROUPED:
        return _Gemm(module, name, nest, plan, inputs, outputs).emit_quantised()  # type: ignore[arg-type]
    if plan is None:
        return emit_nest(module, name, as_sum(nest), inputs, outputs)
    return _Gemm(module, name, nest, plan, inputs, outputs).emit(shared)


def order_of_product(nest: ContractNest, inputs: Sequence[Slot], target: Target) -> Shape:
    """What decides in which order a contraction adds: a plain sum as such; a matmul along k or by tiles."""
    if nest.rhs_layout is not None:
        return ()
    plan = plan_gemm(nest, inputs)
    if plan is None:
        return order_of_sums(as_sum(nest), inputs)
    return (int(suits_dot(gemm_spec(nest, plan, nest.form.dtype.name), target)),)


def no_quantised(nest: ContractNest, inputs: Sequence[Slot]) -> str | None:
    """Why a matmul with quantised weights has no kernel, if so."""
    plan = plan_gemm(nest, inputs)
    if plan is None or plan.batch:
        return "a product with quantised weights reads whole rows from memory"
    if any(plan.a.axes[i] != 1 for i in plan.k):
        return "a product with quantised weights reads rows whose elements lie side by side"
    return None


def no_prologue(nest: ContractNest, inputs: Sequence[Slot]) -> str | None:
    """Why this backend does not compute the left operand of a matmul as it reads it, if so."""
    if nest.rhs_layout is not None and nest.rhs_layout[0] not in ("read_as", "unpack_quads"):
        return "a product with quantised or sparse weights reads its rows from memory"
    plan = plan_gemm(nest, inputs)
    if plan is None:
        return "only a product of matrices computes an operand once for many columns"
    if not runs_along(flat_source(nest.lhs, nest.space, inputs), plan.k[-1], inputs):
        return "a prologue reads elements that lie side by side along the summed axis"
    return None


def cut_of(nest: ContractNest, inputs: Sequence[Slot], target: Target) -> WeightCut | None:
    """How the kernel of a contraction can run part by part: by columns whose weights are stored together."""
    quads = quads_of(nest)
    if nest.rhs_layout is None or (nest.rhs_layout[0] != "read_as" and quads is None):
        return None
    plan = plan_gemm(nest, inputs)
    if plan is None or plan.batch:
        return None
    if quads is not None:
        return WeightCut(nest.rhs.data, quads.panel_bytes(quads.columns))
    stored = inputs[nest.rhs.data].dtype
    panels = own_panels(dict(nest.rhs_layout[1])["layout"], target, nest.lhs.dtype.name)
    if panels is None:
        return None
    return WeightCut(nest.rhs.data, panels.depth * panels.columns * stored.np.itemsize)


def quads_of(nest: ContractNest) -> QuadPanels | None:
    """The panels of quads that the right operand lies in, if so."""
    if nest.rhs_layout is None or nest.rhs_layout[0] != "unpack_quads":
        return None
    return QuadPanels(**dict(nest.rhs_layout[1]))


@dataclass(frozen=True)
class GemmPlan:
    """How iteration axes map to a GEMM: groups of merged axes (outermost first) for m, n, k; else batch."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    swapped: bool  # A of the GEMM is the contraction's rhs
    a: Steps
    b: Steps
    packed: bool = False


def plan_gemm(nest: ContractNest, inputs: Sequence[Slot]) -> GemmPlan | None:
    """A GEMM mapping, or None where a reduction nest must do."""
    form = nest.form
    left_dtype, right_dtype = nest.lhs.dtype, inputs[nest.rhs.data].dtype
    if form.accumulate is not form.dtype or len(nest.stores) != 1:
        return None
    if nest.rhs_layout is not None and nest.rhs_layout[0] in GROUPED:
        right_dtype = form.dtype  # the codes stand for f32
    if half_weights(nest) is not None:
        right_dtype = left_dtype
    if GEMM_DTYPES.get((left_dtype.name, right_dtype.name)) != form.dtype.name:
        return None
    rank, kept = len(nest.space), nest.kept
    nowhere = Steps((0,) * rank, 0)
    a = nowhere if nest.has_prologue else linear_steps(nest.lhs, inputs[nest.lhs.data].steps, rank)
    if a is None:
        return None
    batch = len(form.batch)
    left = len(form.lhs) - batch - len(form.contract)
    m_axes, n_axes = list(range(batch, batch + left)), list(range(batch + left, kept))
    k_axes = list(range(kept, rank))
    packed = nest.rhs_layout is not None
    b = nowhere if packed else linear_steps(nest.rhs, inputs[nest.rhs.data].steps, rank)
    if b is None or not k_axes:
        return None
    swapped = False
    if not n_axes or (not packed and m_axes and _size(nest, n_axes) == 1 and _size(nest, m_axes) != 1):
        if not m_axes or packed or left_dtype is not right_dtype or nest.has_prologue:
            return None
        a, b, m_axes, n_axes, swapped = b, a, n_axes, m_axes, True
    out = nest.stores[0].strides
    at_a = [] if nest.has_prologue else [a.axes]  # computed rows are stored as the kernel reads them
    m = _merge(nest.space, m_axes, [*at_a, out])
    # Vectors run along n, so what the epilogue reads must be contiguous along the merged axes.
    ends = accesses(_epilogue(nest, inputs))
    n = n_axes[-1:]
    if not packed or len(n_axes) != 1:
        n = _merge(nest.space, n_axes, [b.axes, out, *ends.steps], ends.other)
    k = k_axes if packed and len(k_axes) == 1 else _merge(nest.space, k_axes, [*at_a, b.axes])
    if nest.has_prologue and sum(nest.space[i] != 1 for i in k) > 1:
        return None  # lanes run along one axis
    if len(k) != len(k_axes) or (packed and len(n) != len(n_axes)) or _step(nest, out, n) != 1:
        return None
    rest = [i for i in range(kept) if i not in m and i not in n]
    return GemmPlan(tuple(rest), tuple(m), tuple(n), tuple(k), swapped, a, b, packed)


def half_weights(nest: ContractNest) -> str | None:
    """The dtype of packed weights of 16 bits that are widened as they are read."""
    if nest.rhs_layout is None or nest.rhs_layout[0] != "read_as":
        return None
    stored = nest.rhs.dtype.name
    return stored if stored in HALF_WEIGHTS.get(nest.lhs.dtype.name, ()) else None


def _size(nest: ContractNest, axes: Sequence[int]) -> Dim:
    total: Dim = 1
    for i in axes:
        total = total * nest.space[i]
    return total


def _step(nest: ContractNest, steps: Shape, group: Sequence[int]) -> Dim:
    """Step of a merged group: that of its innermost axis larger than 1."""
    for i in reversed(group):
        if nest.space[i] != 1:
            return steps[i]
    return steps[group[-1]] if group else 0


def _epilogue(nest: ContractNest, inputs: Sequence[Slot]) -> Nest:
    """What becomes of the sums, as a nest over the axes of the result."""
    made = Nest(nest.space[: nest.kept], nest.kept, (), (nest.stores[0],))
    return flatten_loads(made, [slot.steps for slot in inputs])


def _merge(
    space: Shape, group: Sequence[int], steps: Sequence[Shape], alone: Collection[int] = ()
) -> list[int]:
    """The innermost run of axes that act as one for all operands; those that stand `alone` do not."""
    out: list[int] = []
    for i in reversed(group):
        if not out or space[i] == 1:
            out.insert(0, i)
            continue
        inner = next((j for j in out if space[j] != 1), None)
        if inner is None:
            out.insert(0, i)
            continue
        if i in alone or inner in alone:
            break
        if not all(known_eq(s[i], s[inner] * space[inner]) is True for s in steps if i < len(s)):
            break
        out.insert(0, i)
    return out


def gemm_spec(nest: ContractNest, plan: GemmPlan, c_dtype: str) -> GemmSpec:
    """The matmul of a plan."""

    def over(steps: Shape, *groups: Sequence[int]) -> tuple[Dim, ...]:
        return (*(steps[i] for i in plan.batch), *(_step(nest, steps, g) for g in groups))

    a_strides = over(plan.a.axes, plan.m, plan.k)
    if nest.has_prologue:
        a_strides = (*a_strides[:-2], row_stride(_size(nest, plan.k)), 1)
    return GemmSpec(
        _size(nest, plan.m),
        _size(nest, plan.n),
        _size(nest, plan.k),
        a_strides=a_strides,
        b_strides=tuple(0 for _ in plan.batch) if plan.packed else over(plan.b.axes, plan.k, plan.n),
        c_strides=(*over(nest.stores[0].strides, plan.m), 1),
        batch=tuple(nest.space[i] for i in plan.batch),
        dtype=nest.lhs.dtype.name,
        c_dtype=c_dtype,
        b_packed=plan.packed,
        quads=quads_of(nest),
        b_dtype=half_weights(nest),
    )


class _Gemm:
    def __init__(
        self,
        module: Module,
        name: str,
        nest: ContractNest,
        plan: GemmPlan,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
    ) -> None:
        self.module, self.name, self.nest, self.plan = module, name, nest, plan
        self.table = ArgumentTable(inputs, outputs)
        self.store = nest.stores[0]
        self.epilogue_nest = _epilogue(nest, inputs)
        self.trivial = self.store.body.prim == "acc"
        self.prologue_nest = flat_source(nest.lhs, nest.space, inputs) if nest.has_prologue else None

    def step(self, steps: Shape, group: Sequence[int]) -> Dim:
        return _step(self.nest, steps, group)

    def size(self, group: Sequence[int]) -> Dim:
        return _size(self.nest, group)

    def emit(self, shared: bool) -> EmittedKernel:
        plan = self.plan
        rhs = self.nest.rhs.data
        lhs = rhs if self.nest.has_prologue else self.nest.lhs.data
        a, b = (rhs, lhs) if plan.swapped else (lhs, rhs)
        spec = gemm_spec(self.nest, plan, self.table.outputs[0].dtype.name)
        if shared:
            for name, width in spec.widths.items():
                self.table.give(name, int(width))
        info = emit_gemm(
            self.module,
            self.name,
            spec,
            operands=(FIRST_OPERAND + a, FIRST_OPERAND + b, FIRST_OPERAND + len(self.table.inputs)),
            starts=(plan.a.start, plan.b.start),
            dim_value=self.table.dim,
            epilogue=None if self.trivial else self.epilogue,
            heavy=body_cost(self.store.body) >= HEAVY_EPILOGUE,
            prologue=None if self.prologue_nest is None else self.prologue(self.prologue_nest),
            beside=self.beside(),
            given=self.table.given if shared else None,
        )
        cut = cut_of(self.nest, self.table.inputs, self.module.target) if spec.can_be_cut else None
        return EmittedKernel(self.name, self.table.dims, info.scratch_bytes_per_thread, cut=cut)

    def beside(self) -> tuple[tuple[int, str], ...]:
        """Operands that the epilogue reads where the result is written, by field and type: residuals."""
        found: dict[int, str] = {}
        for e in self.store.body.walk():
            if e.prim == "load":
                slot = self.table.inputs[e.data]
                steps = linear_steps(e, slot.steps, self.nest.kept)
                if steps is not None and steps.start == 0 and steps.axes == self.store.strides:
                    found[FIRST_OPERAND + e.data] = memory_type(slot.dtype)
        return tuple(found.items())

    def emit_quantised(self) -> EmittedKernel:
        """With weights of 4 to 8 bits."""
        plan, layout = self.plan, own_groups(self.nest, self.module.target)
        assert layout is not None, "foreign layouts are refused before"
        info = emit_quant_gemm(
            self.module,
            self.name,
            self.size(plan.m),
            layout,
            a_start=plan.a.start,
            a_row=self.step(plan.a.axes, plan.m),
            c_row=self.step(self.store.strides, plan.m),
            c_dtype=self.table.outputs[0].dtype.name,
            precision=grouped_precision(self.nest),
            operands=(
                FIRST_OPERAND + self.nest.lhs.data,
                FIRST_OPERAND + self.nest.rhs.data,
                FIRST_OPERAND + len(self.table.inputs),
            ),
            dim_value=self.table.dim,
            epilogue=None if self.trivial else self.epilogue,
        )
        return EmittedKernel(self.name, self.table.dims, info.scratch_bytes_per_thread)

    def epilogue(
        self, fn: Function, sums: Value, row: Int, column: Int, mask: Value | None, batch: tuple[Int, ...]
    ) -> Value:
        axes: list[Int] = [0] * self.nest.kept
        for i, value in zip(self.plan.batch, batch, strict=True):
            axes[i] = value
        self.spread_index(fn, axes, self.plan.m, row)
        lane_axis = self.spread_index(fn, axes, self.plan.n, column)
        lane = Lane(lane_axis, column, sums.width, mask)
        at = Expression(fn, self.table.dim, self.table.operands(fn), axes, lane, accs=[sums])
        return to_memory(fn, at.vector(self.epilogue_nest.stores[0].body), self.table.outputs[0].dtype)

    def prologue(self, nest: Nest) -> Prologue:
        """How rows of the left operand are computed, with lanes along k."""
        real = [i for i in self.plan.k if self.nest.space[i] != 1] or list(self.plan.k[-1:])
        along = real[-1]
        line, dtype = Line.of(nest, [along]), self.nest.lhs.dtype
        lanes = expression_lanes(self.module.target, [line.body])

        def row(fn: Function, number: Int, batch: tuple[Int, ...]) -> Callable[[Int, Value | None], Value]:
            axes: list[Int] = [0] * len(self.nest.space)
            for i, value in zip(self.plan.batch, batch, strict=True):
                axes[i] = value
            self.spread_index(fn, axes, self.plan.m, number, nest)
            first = line.begin(fn, self.table, axes)

            def at(k: Int, mask: Value | None) -> Value:
                point = [*first.axes[:along], k, *first.axes[along + 1 :]]
                lane = Lane(along, k, lanes, mask)
                here = replace(first, axes=point, lane=lane, memo=dict(first.memo))
                return to_memory(fn, here.vector(line.body), dtype)

            return at

        return Prologue(lanes, row)

    def spread_index(
        self, fn: Function, axes: list[Int], group: Sequence[int], flat: Int, nest: Nest | None = None
    ) -> int:
        """Indices of a merged group at a flat position for the epilogue, or for another nest; returns the
        axis that carries it.
        """
        real = [i for i in group if self.nest.space[i] != 1] or list(group[-1:])
        if not real:
            return self.nest.kept
        if len(real) > 1 and not self.group_is_flat(real, nest or self.epilogue_nest):
            for i, value in zip(
                real, unflatten(fn, flat, [self.table.dim(fn, self.nest.space[i]) for i in real]), strict=True
            ):
                axes[i] = value
        else:
            axes[real[-1]] = flat
        return real[-1]

    def group_is_flat(self, group: Sequence[int], nest: Nest) -> bool:
        """Whether a nest's loads see the merged axes as one (then the outer ones may stay 0)."""
        found = accesses(nest)
        if any(i in found.other for i in group):
            return False
        inner = group[-1]
        product: Dim = self.nest.space[inner]
        for i in reversed(group[:-1]):
            if not all(known_eq(s[i], s[inner] * product) is True for s in found.steps):
                return False
            product = product * self.nest.space[i]
        return True
