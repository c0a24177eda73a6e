"""Kernels of templates, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.attention.paged import emit_paged_attention
from rlx.codegen.cpu.frame import Slot
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.nonzero import emit_nonzero
from rlx.codegen.cpu.product.columns import emit_gather_stored
from rlx.codegen.cpu.product.experts import emit_expert_matmul
from rlx.codegen.native.irtext import Module
from rlx.errors import UnsupportedError
from rlx.kernel.form import Template

KINDS: dict[str, Callable[..., EmittedKernel]] = {
    "expert_matmul": emit_expert_matmul,
    "gather_stored": emit_gather_stored,
    "nonzero": emit_nonzero,
    "paged_attention": emit_paged_attention,
}


def emit_template(
    module: Module, name: str, form: Template, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a template; UnsupportedError where this backend has none of its kind."""
    if form.kind == "fft":  # of a known length it is a kernel of its own kind
        n = dict(form.config)["shape"][-1]
        raise UnsupportedError(
            f"a Fourier transform of {n} elements: its length must be known when it is compiled"
        )
    if form.kind not in KINDS:
        raise UnsupportedError(f"template {form.kind!r} has no native kernel")
    return KINDS[form.kind](module, name, form, inputs, outputs)
