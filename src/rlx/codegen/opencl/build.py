"""From a plan to OpenCL C: which kernels this backend has, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.codegen.cpu.kernels import HostThunk, KernelSet
from rlx.codegen.opencl import ctext, primitives
from rlx.codegen.opencl.printer import PrintedKernel, print_kernel
from rlx.errors import CompileError, UnsupportedError
from rlx.ir.graph import Node
from rlx.ir.types import TensorType, tensor_types
from rlx.kernel.compose import body_of, compose
from rlx.kernel.form import HostCall, dense_strides
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
from rlx.kernel.scalar import LOADS, Scalar
from rlx.kernel.views import View, view_layouts
from rlx.plan.lir import LirModule
from rlx.records import dataclass
from rlx.target.prices import DEVICES, Again, Prices

_NOT_HERE = {
    AttentionNest: "attention as one kernel",
    ConvNest: "convolution",
    TransformNest: "Fourier transform",
}
ARGUMENT_BYTES = 1024  # what every device takes
MOST_MEMORIES = 40  # operands and results, with an offset each; the rest of the arguments is for sizes
PRELUDE = "#pragma OPENCL FP_CONTRACT OFF\n"


@dataclass(frozen=True)
class OpenCLTarget:
    """What kernels may use. Programs for one target run on every device that has it."""

    float64: bool = True
    prices: Prices = DEVICES["opencl"]

    @property
    def again(self) -> Again:
        """What the gate charges for values that are computed again."""
        return Again.of(self.prices)

    @property
    def name(self) -> str:
        return "opencl" if self.float64 else "opencl-no-f64"

    def supports(self, kernel: Kernel, types: Sequence[TensorType]) -> str | None:
        """Why there is no OpenCL kernel over operands and results of these types; None if there is.

        >>> from rlx.kernel.compose import body_of, compose
        >>> from rlx import Graph, ops
        >>> g = Graph()
        >>> pair = ops.sort(g.input("x", (8,), "f32")).operands[0]
        >>> OpenCLTarget().supports(compose(body_of(pair)), [])
        'form Sort has no OpenCL kernel'
        """
        if isinstance(kernel, Opaque):
            form = kernel.form
            if isinstance(form, HostCall):
                return form.why
            return f"form {type(form).__name__} has no OpenCL kernel"
        if type(kernel) in _NOT_HERE:
            return f"{_NOT_HERE[type(kernel)]} has no OpenCL kernel"
        assert isinstance(kernel, Nest | ContractNest)
        if isinstance(kernel, ContractNest) and kernel.has_prologue:
            return "an OpenCL product would compute its left operand again for every 8 columns"
        if len(types) > MOST_MEMORIES:
            return f"{len(types)} operands and results are more than the {MOST_MEMORIES} of an OpenCL kernel"
        for t in types:
            refused = ctext.why_not(t.dtype, self.float64)
            if refused is not None:
                return refused
        return next((why for e in _bodies(kernel) for why in [self._refuses(e)] if why is not None), None)

    def _refuses(self, body: Scalar) -> str | None:
        for e in body.walk():
            refused = ctext.why_not(e.dtype, self.float64)
            if refused is None and e.prim not in _PLAIN:
                refused = primitives.why_not(e.prim, e.args[-1].dtype)
            if refused is not None:
                return refused
        return None


_PLAIN = frozenset({*LOADS, "const", "axis", "size", "acc", "cast"})


def _bodies(kernel: Nest | ContractNest) -> Iterable[Scalar]:
    """All expressions of a kernel."""
    if isinstance(kernel, ContractNest):
        yield from (kernel.lhs, kernel.rhs)
    else:
        yield from (s.body for s in kernel.stats)
    yield from (s.body for s in kernel.stores)


def resolve(name: str) -> OpenCLTarget:
    """The target called `name`; "host" is what an OpenCL device usually has.

    >>> resolve("opencl-no-f64").float64
    False
    """
    known = {target.name: target for target in (OpenCLTarget(True), OpenCLTarget(False))}
    if name != "host" and name not in known:
        raise CompileError(f"unknown OpenCL target {name!r}: choose host, {', '.join(known)}")
    return known.get(name, OpenCLTarget())


def build_kernels(module: LirModule, target: OpenCLTarget) -> KernelSet:
    """The kernels of a program, and host thunks for what has none."""
    views = view_layouts(module.mir)
    kernels: dict[int, PrintedKernel] = {}
    thunks: dict[int, HostThunk] = {}
    for id in module.plan.schedule:
        made = _kernel(module.mir.nodes[id], target, views)
        if isinstance(made, str):
            thunks[id] = HostThunk(id, made)
        else:
            kernels[id] = made
    text, distinct = program_text(kernels.values()), len({k.name for k in kernels.values()})
    return KernelSet(dict(kernels), thunks, (text,), distinct)


def program_text(kernels: Iterable[PrintedKernel]) -> str:
    """One OpenCL C program with these kernels; equal ones, and the helpers they share, are written once."""
    helpers: dict[str, str] = {}
    texts: dict[str, str] = {}
    for kernel in kernels:
        helpers |= dict(kernel.helpers)
        texts[kernel.name] = kernel.text
    if not texts:
        return ""
    return (
        "\n".join([PRELUDE, *(helpers[name].strip() + "\n" for name in sorted(helpers)), *texts.values()])
        + "\n"
    )


def _kernel(node: Node, target: OpenCLTarget, views: dict[int, View]) -> PrintedKernel | str:
    """The kernel of a node, or the reason why there is none."""
    if node.op.host_only is not None:
        return node.op.host_only
    inputs = []
    for o in node.operands:
        view = views.get(o.id)
        inputs.append((o.dtype, o.shape, dense_strides(o.shape) if view is None else view.layout.strides))
    results = tensor_types(node.type)
    try:
        kernel = compose(body_of(node))
        why = target.supports(kernel, [*(o.tensor for o in node.operands), *results])
        if why is not None:
            return why
        assert isinstance(kernel, Nest | ContractNest)
        made = print_kernel(kernel, inputs, [(t.dtype, t.shape, dense_strides(t.shape)) for t in results])
        if made.argument_bytes > ARGUMENT_BYTES:
            return f"{made.argument_bytes} bytes of arguments are more than the {ARGUMENT_BYTES} of OpenCL"
        return made
    except (UnsupportedError, ComposeError) as e:
        return e.message
