"""From a plan to native code: one kernel per distinct region, in modules that are compiled side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx import progress
from rlx.codegen.cpu.attention.nest import attention_spec, emit_attention_nest
from rlx.codegen.cpu.conv.conv import emit_conv
from rlx.codegen.cpu.conv.source import no_image_prologue
from rlx.codegen.cpu.fft.kernel import emit_fft
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.kernels import BodyKernels, HostThunk, KernelSet
from rlx.codegen.cpu.layout_check import foreign_layout
from rlx.codegen.cpu.primitives import supported
from rlx.codegen.cpu.product.contraction import (
    Sharing,
    cut_of,
    emit_contraction,
    no_prologue,
    no_quantised,
    order_of_product,
    sharing,
)
from rlx.codegen.cpu.product.packing import panels_of
from rlx.codegen.cpu.product.quant_gemm import GROUPED
from rlx.codegen.cpu.rows.nest import emit_nest, order_of_sums
from rlx.codegen.cpu.special import EMITTERS
from rlx.codegen.cpu.templates import emit_template
from rlx.codegen.cpu.units import Units
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import with_room
from rlx.cost.operations import kernel_work
from rlx.errors import UnsupportedError
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.text.write import graph_text
from rlx.ir.types import Shape, TensorType, tensor_types
from rlx.kernel.compose import body_of, compose
from rlx.kernel.control import loop_form, refusal
from rlx.kernel.form import HostCall, Loop, Template, dense_strides
from rlx.kernel.nests import (
    AttentionNest,
    ComposeError,
    ContractNest,
    ConvNest,
    Kernel,
    Nest,
    Opaque,
    TransformNest,
)
from rlx.kernel.views import View, view_layouts
from rlx.plan.lir import LirBufferPlan, LirModule, WeightCut
from rlx.target.cpu import Target, resolve
from rlx.target.tiles import PanelTile

SPECIAL: dict[type, Callable[..., EmittedKernel]] = {**EMITTERS, Template: emit_template}

FAMILY = 8
"""Contractions that differ in widths only, from which on they share one kernel. Known widths make a kernel
faster by about 1 % where rows are few, and a start slower by 40 ms for each kernel."""


def panel_tiles(target: Target) -> tuple[PanelTile, ...]:
    """Panels that this target's contraction kernels read, per dtype."""
    layouts = {d: panels_of(1, 1, target, d) for d in ("f32", "f64", "bf16", "f16", "i8")}
    quads = {"i8": target.small_bytes}
    return tuple(PanelTile(d, p.columns, p.lanes, p.group, quads.get(d)) for d, p in layouts.items())


def slot_of(node: Node, views: dict[int, View]) -> Slot:
    """How a kernel sees an operand."""
    view = views.get(node.id)
    return Slot(node.dtype, node.shape, None if view is None else view.layout.strides)


def slots_of(node: Node, views: dict[int, View]) -> tuple[list[Slot], list[Slot]]:
    """How a kernel sees the operands of its node, and the results."""
    outputs = [Slot(t.dtype, t.shape) for t in tensor_types(node.type)]
    return [slot_of(o, views) for o in node.operands], outputs


def supports(kernel: Kernel, types: Sequence[TensorType]) -> str | None:
    """Why this backend has no native code for a kernel over operands and results of these types, if so."""
    for t in types:
        if not supported(t.dtype):
            return f"dtype {t.dtype} has no native kernels"
    if isinstance(kernel, ConvNest) and any(
        s.strides != dense_strides(kernel.form.out) for s in kernel.stores
    ):
        return "a convolution stores its result in its own order"
    if isinstance(kernel, (ContractNest, ConvNest)) and kernel.has_prologue:
        refused = no_prologue if isinstance(kernel, ContractNest) else no_image_prologue
        return refused(kernel, [Slot(t.dtype, t.shape) for t in types])  # type: ignore[arg-type]
    if isinstance(kernel, ContractNest) and kernel.rhs_layout and kernel.rhs_layout[0] in GROUPED:
        return no_quantised(kernel, [Slot(t.dtype, t.shape) for t in types])
    if isinstance(kernel, AttentionNest):
        spec = attention_spec(kernel, [Slot(t.dtype, t.shape) for t in types])
        return spec if isinstance(spec, str) else None
    if not isinstance(kernel, Opaque):
        return None
    if isinstance(kernel.form, HostCall):
        return kernel.form.why
    return None if type(kernel.form) in SPECIAL else f"form {type(kernel.form).__name__} has no native kernel"


def order_of(kernel: Kernel, types: Sequence[TensorType], target: Target) -> Shape | None:
    """What decides in which order a kernel adds, where sizes of its operands may change that."""
    slots = [Slot(t.dtype, t.shape) for t in types]
    if isinstance(kernel, ContractNest):
        return order_of_product(kernel, slots, target) if kernel.form.dtype.is_float else None
    if isinstance(kernel, Nest) and any(s.rounds for s in kernel.stats):
        return order_of_sums(kernel, slots)
    return None


def _refused(kernel: Kernel, inputs: Sequence[Slot], outputs: Sequence[Slot], target: Target) -> str | None:
    """Why there is no native code for a kernel over these operands, if so."""
    why = supports(kernel, [TensorType(slot.dtype, slot.shape) for slot in (*inputs, *outputs)])
    if why is None and isinstance(kernel, (ContractNest, ConvNest)):
        why = foreign_layout(kernel, inputs, outputs, target)
    return why


def emit_kernel(
    module: Module,
    name: str,
    kernel: Kernel,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    shared: bool = False,
) -> EmittedKernel:
    """Write one kernel; UnsupportedError where this backend has no code for it. With `shared`, contractions
    that differ in widths only can use it, too."""
    why = _refused(kernel, inputs, outputs, module.target)
    if why is not None:
        raise UnsupportedError(why)
    if not isinstance(kernel, Opaque) and all(0 in slot.shape for slot in outputs):
        return KernelFrame(module, name, inputs, outputs).finish()  # nothing to compute
    if isinstance(kernel, Nest):
        return emit_nest(module, name, kernel, inputs, outputs)
    if isinstance(kernel, ContractNest):
        return emit_contraction(module, name, kernel, inputs, outputs, shared)
    if isinstance(kernel, TransformNest):
        return emit_fft(module, name, kernel, inputs, outputs)
    if isinstance(kernel, ConvNest):
        return emit_conv(module, name, kernel, inputs, outputs)
    if isinstance(kernel, AttentionNest):
        return emit_attention_nest(module, name, kernel, inputs, outputs)
    return SPECIAL[type(kernel.form)](module, name, kernel.form, inputs, outputs)


def build_kernels(
    module: LirModule,
    target: Target,
    each: Callable[[str], None] = lambda text: None,
    source_lines: bool = False,
) -> KernelSet:
    """Emit every kernel of a program; equal kernels are written once. `each` gets the text of every module
    as soon as it is complete. With `source_lines`, comments say which lines of the notation wrote what."""
    return with_room(_build_kernels, module, target, each, source_lines)


def _build_kernels(
    module: LirModule, target: Target, each: Callable[[str], None], source_lines: bool
) -> KernelSet:
    flush_bf16 = module.options.get("precision") == "bf16"
    weights = (n for n in module.mir.nodes if n.op.role in (Role.PARAM, Role.CONSTANT))
    stay = sum(int(n.tensor.nbytes) for n in weights) <= target.l3_bytes
    writer = _Writer(Module(target, flush_bf16, source_lines, stay), each)
    kernels: dict[int, EmittedKernel] = {}
    thunks: dict[int, HostThunk] = {}
    inner: dict[int, tuple[BodyKernels, ...]] = {}
    views = view_layouts(module.mir)
    writer.find_families([module.mir.nodes[id] for id in module.plan.schedule], views)
    for id in module.plan.schedule:
        made = writer.node(module.mir.nodes[id], views, module.plan)
        if isinstance(made, str):
            thunks[id] = HostThunk(id, made)
        elif isinstance(made, tuple):
            inner[id] = made
        else:
            kernels[id] = made
    writer.units.finish()
    return KernelSet(kernels, thunks, tuple(writer.units.texts), writer.distinct, inner)


def cuts(module: LirModule) -> dict[int, WeightCut]:
    """How kernels of a program can be run part by part, by node; `KernelSet.cuts` of what is built."""
    found: dict[int, WeightCut] = {}
    views, target = view_layouts(module.mir), resolve(module.target)
    for id in module.plan.schedule:
        node = module.mir.nodes[id]
        weights = any(o.op.role in (Role.PARAM, Role.CONSTANT) for o in node.operands)
        if loop_form(node) is not None or node.op.host_only is not None or not weights:
            continue
        try:
            kernel = compose(body_of(node))
        except ComposeError:
            continue
        cut = None
        if isinstance(kernel, ContractNest):
            cut = cut_of(kernel, [slot_of(o, views) for o in node.operands], target)
        if cut is not None:
            found[id] = cut
    return found


def predicted_work(module: LirModule, target: Target) -> int:
    """Picoseconds of one core that a run takes at the sizes that are assumed, roughly."""
    nodes = [module.mir.nodes[id] for id in module.plan.schedule]
    return sum(evaluate(kernel_work(node, target.prices), module.plan.binding) for node in nodes)


class _Writer:
    """Writes kernels into modules and remembers them by what they compute."""

    def __init__(self, module: Module, each: Callable[[str], None]) -> None:
        self.units = Units(module, each)
        self.known: dict[str, EmittedKernel | str] = {}
        self.families: dict[tuple[object, ...], EmittedKernel | None] = {}  # None: to be written

    @property
    def distinct(self) -> int:
        return len({k.name for k in self.known.values() if isinstance(k, EmittedKernel)})

    def find_families(self, nodes: Sequence[Node], views: dict[int, View]) -> None:
        """Find the contractions that differ in widths only. Where they are many, one kernel is written for
        all of them: it reads their widths from its arguments."""
        found: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
        for node in nodes:
            if loop_form(node) is None and (own := self.sharing(node, views)) is not None:
                found.setdefault(own.key, set()).add(own.widths)
        self.families = {key: None for key, widths in found.items() if len(widths) >= FAMILY}

    def sharing(self, node: Node, views: dict[int, View]) -> Sharing | None:
        """How the kernel of a node could share its code, if so."""
        if node.op.host_only is not None:
            return None
        try:
            kernel = compose(body_of(node))
        except ComposeError:
            return None
        if not isinstance(kernel, ContractNest):
            return None
        inputs, outputs = slots_of(node, views)
        target = self.units.module.target
        refused = _refused(kernel, inputs, outputs, target)
        return None if refused is not None else sharing(kernel, inputs, outputs, target)

    def kernel(self, node: Node, views: dict[int, View]) -> EmittedKernel | str:
        """The kernel of a node, or the reason why there is none."""
        inputs, outputs = slots_of(node, views)
        body = body_of(node)
        key = _key(body, inputs)
        if key not in self.known:
            own = self.sharing(node, views) if self.families else None
            family = None if own is None or own.key not in self.families else own.key
            if own is not None and family is not None and (first := self.families[family]) is not None:
                work = kernel_work(node, self.units.module.target.prices)
                self.known[key] = replace(own.fitted(first), picoseconds=work)
                return self.known[key]
            shared = family is not None
            made = _emit(self.units.module, len(self.known), node, body, inputs, outputs, shared)
            names = " + ".join(n.op.name for n in body.nodes if n.op.role is Role.COMPUTE)
            progress.debug("kernel %%%d (%s)%s", node.id, names, f": {made}" if isinstance(made, str) else "")
            self.units.collect()
            if isinstance(made, EmittedKernel):
                made = replace(made, name=self.units.name(made.name))
                if family is not None:
                    self.families[family] = made
            self.known[key] = made
        return self.known[key]

    def node(
        self, node: Node, views: dict[int, View], plan: LirBufferPlan
    ) -> EmittedKernel | tuple[BodyKernels, ...] | str:
        """The kernel of a node or the kernels of its bodies, or the reason why it runs on the host."""
        form = loop_form(node)
        return self.kernel(node, views) if form is None else self.bodies(node, form, plan)

    def bodies(self, node: Node, form: Loop, plan: LirBufferPlan) -> tuple[BodyKernels, ...] | str:
        why = refusal(node, form)
        if why is not None:
            return why
        out = []
        for body, inside in zip(node.bodies, plan.work[node.id].bodies, strict=True):
            made = self.body(body, inside)
            if isinstance(made, str):
                return made
            out.append(made)
        return tuple(out)

    def body(self, body: Graph, plan: LirBufferPlan) -> BodyKernels | str:
        """Kernels of a body by node id, or the reason why it runs on the host."""
        views, out = view_layouts(body), BodyKernels({}, {})
        for id in plan.schedule:
            inner = body.nodes[id]
            made = self.node(inner, views, plan)
            if isinstance(made, str):
                return f"{inner.op.name} in its body: {made}"
            if isinstance(made, tuple):
                out.inner[id] = made
            elif made.reveals:
                return f"{inner.op.name} in its body has a size that depends on data"
            else:
                out.kernels[id] = made
        return out


def _emit(
    module: Module,
    number: int,
    node: Node,
    body: Graph,
    inputs: list[Slot],
    outputs: list[Slot],
    shared: bool,
) -> EmittedKernel | str:
    """The kernel, or the reason why there is none."""
    if node.op.host_only is not None:
        return node.op.host_only
    try:
        kernel = compose(body)
        with module.all_or_nothing():
            made = emit_kernel(module, f"k{number}", kernel, inputs, outputs, shared)
        return replace(made, picoseconds=kernel_work(node, module.target.prices))
    except (UnsupportedError, ComposeError) as e:
        return e.message


def _key(body: Graph, inputs: list[Slot]) -> str:
    return graph_text(body, locations=False) + "".join(f"|{s.strides}" for s in inputs)
