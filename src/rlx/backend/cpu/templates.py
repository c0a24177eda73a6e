"""Kernels of templates, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backend.cpu.frame import Slot
from rlx.backend.cpu.irtext import Module
from rlx.backend.cpu.kernels import EmittedKernel
from rlx.errors import UnsupportedError
from rlx.ir.form import Template

KINDS: dict[str, Callable[..., EmittedKernel]] = {}
REASONS = {"fft": "the length of a Fourier transform must be known when it is compiled"}


def emit_template(
    module: Module, name: str, form: Template, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a template; UnsupportedError where this backend has none of its kind."""
    if form.kind not in KINDS:
        raise UnsupportedError(REASONS.get(form.kind, f"template {form.kind!r} has no native kernel"))
    return KINDS[form.kind](module, name, form, inputs, outputs)
