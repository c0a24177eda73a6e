"""From a plan to native code: one kernel per distinct region, one object per program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backend.cpu.contraction import GEMM_DTYPES, emit_contraction
from rlx.backend.cpu.conv import emit_conv
from rlx.backend.cpu.frame import EmittedKernel, Slot
from rlx.backend.cpu.irtext import Module
from rlx.backend.cpu.nest import emit_nest
from rlx.backend.cpu.packing import PanelLayout
from rlx.backend.cpu.primitives import supported
from rlx.backend.cpu.special import EMITTERS as SPECIAL
from rlx.backend.cpu.target import Target
from rlx.errors import UnsupportedError
from rlx.ir.compose import ComposeError, ContractNest, ConvNest, Kernel, Nest, Opaque, body_of, compose
from rlx.ir.dim import parse_dim
from rlx.ir.form import Call
from rlx.ir.graph import Graph, Node
from rlx.ir.lir import LirModule
from rlx.ir.types import tensor_types
from rlx.passes.layout import PanelTile
from rlx.plan.build import View


@dataclass(frozen=True)
class HostThunk:
    """A node that no native kernel exists for: it runs by its reference, between native segments."""

    node: int
    why: str


@dataclass
class KernelSet:
    """Native kernels of a program: which one each node runs, and the IR text that defines them."""

    kernels: dict[int, EmittedKernel]
    thunks: dict[int, HostThunk]
    text: str
    distinct: int

    def describe(self) -> str:
        """Everything but the code, as JSON text; `recall` is its inverse."""
        kernels = {
            str(id): [k.name, [str(d) for d in k.dims], str(k.scratch_per_thread), k.serial]
            for id, k in self.kernels.items()
        }
        thunks = {str(id): t.why for id, t in self.thunks.items()}
        return json.dumps({"kernels": kernels, "thunks": thunks, "distinct": self.distinct})

    @staticmethod
    def recall(text: str) -> KernelSet:
        data = json.loads(text)
        kernels = {
            int(id): EmittedKernel(name, tuple(parse_dim(d) for d in dims), parse_dim(scratch), serial)
            for id, (name, dims, scratch, serial) in data["kernels"].items()
        }
        thunks = {int(id): HostThunk(int(id), why) for id, why in data["thunks"].items()}
        return KernelSet(kernels, thunks, "", data["distinct"])


def panel_tiles(target: Target) -> tuple[PanelTile, ...]:
    """Panels that this target's contraction kernels read, per dtype."""
    layouts = {d: PanelLayout.of(1, 1, target, d) for d in GEMM_DTYPES}
    return tuple(PanelTile(d, p.columns, p.lanes, p.group) for d, p in layouts.items())


def slot_of(node: Node, views: dict[int, View]) -> Slot:
    """How a kernel sees an operand."""
    view = views.get(node.id)
    return Slot(node.dtype, node.shape, None if view is None else view.layout.strides)


def emit_kernel(
    module: Module, name: str, kernel: Kernel, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write one kernel; UnsupportedError where this backend has no code for it."""
    for slot in (*inputs, *outputs):
        if not supported(slot.dtype):
            raise UnsupportedError(f"dtype {slot.dtype} has no native kernels")
    if isinstance(kernel, Nest):
        return emit_nest(module, name, kernel, inputs, outputs)
    if isinstance(kernel, ContractNest):
        return emit_contraction(module, name, kernel, inputs, outputs)
    if isinstance(kernel, ConvNest):
        return emit_conv(module, name, kernel, inputs, outputs)
    if isinstance(kernel, Opaque) and isinstance(kernel.form, Call):
        raise UnsupportedError(kernel.form.why)
    if isinstance(kernel, Opaque) and type(kernel.form) in SPECIAL:
        return SPECIAL[type(kernel.form)](module, name, kernel.form, inputs, outputs)
    raise UnsupportedError(f"form {type(kernel.form).__name__} has no native kernel")


def build_kernels(module: LirModule, target: Target, views: dict[int, View]) -> KernelSet:
    """Emit every kernel of a program; equal kernels are written once."""
    out = Module(target)
    known: dict[str, EmittedKernel | str] = {}
    kernels: dict[int, EmittedKernel] = {}
    thunks: dict[int, HostThunk] = {}
    for id in module.plan.schedule:
        node = module.mir.nodes[id]
        inputs = [slot_of(o, views) for o in node.operands]
        outputs = [Slot(t.dtype, t.shape) for t in tensor_types(node.type)]
        body = body_of(node)
        key = _key(body, inputs)
        if key not in known:
            known[key] = _emit(out, len(known), node, body, inputs, outputs)
        made = known[key]
        if isinstance(made, str):
            thunks[id] = HostThunk(id, made)
        else:
            kernels[id] = made
    distinct = sum(isinstance(k, EmittedKernel) for k in known.values())
    return KernelSet(kernels, thunks, out.text() if distinct else "", distinct)


def _emit(
    module: Module, number: int, node: Node, body: Graph, inputs: list[Slot], outputs: list[Slot]
) -> EmittedKernel | str:
    """The kernel, or the reason why there is none."""
    if node.op.host_only is not None:
        return node.op.host_only
    try:
        kernel = compose(body)
        with module.all_or_nothing():
            return emit_kernel(module, f"k{number}", kernel, inputs, outputs)
    except (UnsupportedError, ComposeError) as e:
        return e.message


def _key(body: Graph, inputs: list[Slot]) -> str:
    from rlx.ir.text import graph_text

    return graph_text(body, locations=False) + "".join(f"|{s.strides}" for s in inputs)
